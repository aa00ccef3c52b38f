//! Storage that is being made a volume.

use serde::{Deserialize, Serialize};

use super::{NodeRef, Record, RecordError, check_name};

/// A process makes a volume, and nobody else begins to make one of the same storage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetupRecord {
    /// The volume's name.
    pub volume: String,
    /// The process.
    pub by: NodeRef,
}

impl Record for SetupRecord {
    const KIND: &'static str = "setup";

    fn check(&self) -> Result<(), RecordError> {
        check_name(&self.volume)?;
        check_name(&self.by.node)
    }
}
