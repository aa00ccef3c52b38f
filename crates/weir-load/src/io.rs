//! A request on its way from the generator to an engine.

use crate::tally::IoKind;

/// One request that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Io {
    /// Names the request until it is answered: below the queue depth, and free for engines to index by.
    pub slot: u32,
    /// Read, write or flush.
    pub kind: IoKind,
    /// Bytes from the start of the target; 0 for a flush.
    pub offset: u64,
    /// Bytes; 0 for a flush.
    pub length: u32,
}
