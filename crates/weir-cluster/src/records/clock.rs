//! The record of a node's wall clock.

use serde::{Deserialize, Serialize};

use super::Record;

/// `clocks/<name>`: a node's wall clock when it wrote this, under its lease. The others compare it with their own when it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockRecord {
    /// Milliseconds since 1970.
    pub unix_ms: u64,
}

impl Record for ClockRecord {
    const KIND: &'static str = "clock";
}
