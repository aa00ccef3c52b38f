//! The requests that every layer accepts.

use crate::buffer::{Buffer, BufferPool};
use crate::error::IoError;

/// Chosen by the submitter of a request, returned with its completion. Opaque to the layer below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u64);

/// The kinds of request, as meters count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestKind {
    /// Read from the disk.
    Read,
    /// Write to the disk.
    Write,
    /// Make a range read as zeroes.
    WriteZeroes,
    /// The guest no longer needs a range. Weir makes it read as zeroes.
    Discard,
    /// Earlier acknowledged writes get the durability that the policy names (P8).
    Flush,
    /// Report the parts of a range that are allocated, holes, or zeroes.
    Extents,
}

impl RequestKind {
    /// Every kind, in the order of [`RequestKind::index`].
    pub const ALL: [RequestKind; 6] = [
        RequestKind::Read,
        RequestKind::Write,
        RequestKind::WriteZeroes,
        RequestKind::Discard,
        RequestKind::Flush,
        RequestKind::Extents,
    ];

    /// A dense index, for tables by kind.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The name that users see.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            RequestKind::Read => "read",
            RequestKind::Write => "write",
            RequestKind::WriteZeroes => "write_zeroes",
            RequestKind::Discard => "discard",
            RequestKind::Flush => "flush",
            RequestKind::Extents => "extents",
        }
    }

    /// Whether the request changes the disk's content.
    #[must_use]
    pub const fn changes_data(self) -> bool {
        matches!(self, RequestKind::Write | RequestKind::WriteZeroes | RequestKind::Discard)
    }
}

/// The bytes of a write.
///
/// Small writes are borrowed from the socket's receive buffer, so that the log copies them only once; large ones were received
/// into an aligned separate buffer, which is passed on.
#[derive(Debug)]
pub enum Payload<'a> {
    /// Valid only during `submit`: the layer copies what it keeps. Any alignment.
    Lent(&'a [u8]),
    /// Aligned for direct I/O; the layer keeps it as long as necessary.
    Given(Buffer),
}

impl Payload<'_> {
    /// The bytes, borrowed or owned.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Payload::Lent(bytes) => bytes,
            Payload::Given(buffer) => buffer.bytes(),
        }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    /// Whether there is nothing to write. Layers never see such a request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One request to a layer. Offsets and lengths are bytes, multiples of the disk's logical block, inside
/// the disk, and not zero: the export checks before it submits.
#[derive(Debug)]
pub enum Request<'a> {
    /// Fill `buffer` (its whole length) from `offset`.
    Read {
        /// Returned with the completion.
        tag: Tag,
        /// Bytes from the start of the disk.
        offset: u64,
        /// The target of the bytes; returned in [`Outcome::Read`].
        buffer: Buffer,
    },
    /// Put `payload` at `offset`.
    Write {
        /// Returned with the completion.
        tag: Tag,
        /// Bytes from the start of the disk.
        offset: u64,
        /// The data.
        payload: Payload<'a>,
        /// Complete only with the policy's durability (P8).
        fua: bool,
    },
    /// Make a range read as zeroes.
    WriteZeroes {
        /// Returned with the completion.
        tag: Tag,
        /// Bytes from the start of the disk.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Complete only with the policy's durability (P8).
        fua: bool,
        /// The backing may free the space; without it the range stays allocated where the backing can do so.
        may_unmap: bool,
        /// Fail with [`crate::Code::NotSupported`] rather than write zeroes block by block.
        fast_only: bool,
    },
    /// Free space. The range reads as zeroes afterwards.
    Discard {
        /// Returned with the completion.
        tag: Tag,
        /// Bytes from the start of the disk.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Complete only with the policy's durability (P8).
        fua: bool,
    },
    /// Durability for all writes acknowledged before (P8).
    Flush {
        /// Returned with the completion.
        tag: Tag,
    },
    /// Report the allocation of a range.
    Extents {
        /// Returned with the completion.
        tag: Tag,
        /// Bytes from the start of the disk.
        offset: u64,
        /// Bytes.
        length: u64,
    },
}

impl<'a> Request<'a> {
    /// The same request with owned bytes, to keep beyond `submit`.
    ///
    /// # Errors
    /// The pool has no memory for them; returns the request.
    pub fn into_owned(self, pool: &BufferPool) -> Result<Request<'static>, Request<'a>> {
        Ok(match self {
            Request::Write { tag, offset, payload: Payload::Lent(bytes), fua } => {
                let Some(mut buffer) = pool.take(bytes.len()) else { return Err(self) };
                buffer.bytes_mut().copy_from_slice(bytes);
                Request::Write { tag, offset, payload: Payload::Given(buffer), fua }
            }
            Request::Write { tag, offset, payload: Payload::Given(buffer), fua } => {
                Request::Write { tag, offset, payload: Payload::Given(buffer), fua }
            }
            Request::Read { tag, offset, buffer } => Request::Read { tag, offset, buffer },
            Request::WriteZeroes { tag, offset, length, fua, may_unmap, fast_only } => {
                Request::WriteZeroes { tag, offset, length, fua, may_unmap, fast_only }
            }
            Request::Discard { tag, offset, length, fua } => Request::Discard { tag, offset, length, fua },
            Request::Flush { tag } => Request::Flush { tag },
            Request::Extents { tag, offset, length } => Request::Extents { tag, offset, length },
        })
    }
}

impl Request<'_> {
    /// The tag that the completion will carry.
    #[must_use]
    pub fn tag(&self) -> Tag {
        match self {
            Request::Read { tag, .. }
            | Request::Write { tag, .. }
            | Request::WriteZeroes { tag, .. }
            | Request::Discard { tag, .. }
            | Request::Flush { tag }
            | Request::Extents { tag, .. } => *tag,
        }
    }

    /// Replaces the tag; a layer in between uses its own for the layer below.
    pub fn set_tag(&mut self, new: Tag) {
        match self {
            Request::Read { tag, .. }
            | Request::Write { tag, .. }
            | Request::WriteZeroes { tag, .. }
            | Request::Discard { tag, .. }
            | Request::Flush { tag }
            | Request::Extents { tag, .. } => *tag = new,
        }
    }

    /// The kind, for meters and tables.
    #[must_use]
    pub fn kind(&self) -> RequestKind {
        match self {
            Request::Read { .. } => RequestKind::Read,
            Request::Write { .. } => RequestKind::Write,
            Request::WriteZeroes { .. } => RequestKind::WriteZeroes,
            Request::Discard { .. } => RequestKind::Discard,
            Request::Flush { .. } => RequestKind::Flush,
            Request::Extents { .. } => RequestKind::Extents,
        }
    }

    /// First byte and length; `(0, 0)` for a flush.
    #[must_use]
    pub fn range(&self) -> (u64, u64) {
        match self {
            Request::Read { offset, buffer, .. } => (*offset, buffer.len() as u64),
            Request::Write { offset, payload, .. } => (*offset, payload.len() as u64),
            Request::WriteZeroes { offset, length, .. }
            | Request::Discard { offset, length, .. }
            | Request::Extents { offset, length, .. } => (*offset, *length),
            Request::Flush { .. } => (0, 0),
        }
    }
}

/// The allocation state of a range of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExtentState {
    /// Backed by data.
    Allocated,
    /// Not backed; reads as zeroes.
    Hole,
    /// Backed, and known to read as zeroes.
    Zero,
}

/// A run of bytes in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Extent {
    /// Bytes from the start of the disk.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Its state.
    pub state: ExtentState,
}

/// The result of a successful request.
#[derive(Debug)]
pub enum Outcome {
    /// Done, without data.
    Done,
    /// The buffer of a read, filled.
    Read(Buffer),
    /// Consecutive extents from the requested offset. At least one; may end before the requested range.
    Extents(Vec<Extent>),
}

/// The completion of one request.
#[derive(Debug)]
pub struct Completion {
    /// The request's tag.
    pub tag: Tag,
    /// The result.
    pub result: Result<Outcome, IoError>,
}
