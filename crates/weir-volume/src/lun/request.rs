//! A request to a disk of a shared volume, its range and its route.

/// First byte of a range, and the byte behind the last one.
pub type Range = (u64, u64);

/// The action of a request on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes data.
    Write,
    /// Writes zeroes or discards: the filesystem may free the blocks.
    Punch,
    /// Makes durable whatever was done before. Its range is empty.
    Flush,
}

impl Kind {
    /// Whether it may change the file.
    #[must_use]
    pub fn changes(self) -> bool {
        matches!(self, Kind::Write | Kind::Punch)
    }
}

/// A request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Unique among those in flight.
    pub id: u64,
    /// Its action.
    pub kind: Kind,
    /// Its bytes; not empty, but for a flush.
    pub range: Range,
}

/// The way of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// This node's I/O on the LUN.
    Direct,
    /// The coordinator's I/O on the LUN.
    Block,
    /// Through the coordinator's filesystem.
    File,
}

/// Why changes go through the coordinator's filesystem: what the disk lacks there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lacks {
    /// Blocks, as far as the owner knows; or it gives blocks back.
    pub blocks: bool,
    /// Blocks that no other file shares.
    pub own_blocks: bool,
}

/// Whether two ranges have a byte in common.
#[must_use]
pub fn overlap(one: Range, other: Range) -> bool {
    one.0 < other.1 && other.0 < one.1
}

/// The whole pieces that a range touches.
#[must_use]
pub fn neighbourhood((start, end): Range, piece: u64) -> Range {
    (start / piece * piece, end.div_ceil(piece) * piece)
}
