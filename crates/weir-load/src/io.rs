//! A request on its way from the generator to an engine.

use crate::tally::IoKind;

/// One request to issue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Io {
    /// Identifies the request until it is answered: below the queue depth, so that engines can use it as an index.
    pub slot: u32,
    /// Read, write or flush.
    pub kind: IoKind,
    /// Bytes from the start of the target; 0 for a flush.
    pub offset: u64,
    /// Bytes; 0 for a flush.
    pub length: u32,
}
