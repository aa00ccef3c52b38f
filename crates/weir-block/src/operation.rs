//! Operations of the reactor's engines: watches of descriptors, and reads, writes and syncs of files.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::region::Region;

/// The unit of direct I/O on Linux, in bytes.
const SECTOR: u64 = 512;

/// The recipient of an event on the shard: a layer, a connection, a peer. Allocated by [`Reactor::new_owner`](crate::Reactor::new_owner).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerId(pub u32);

/// Identifies an operation: its owner and the owner's number for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    /// The recipient of the event.
    pub owner: OwnerId,
    /// The owner's own number, meaningless to the reactor.
    pub slot: u32,
}

/// The readiness to wait for on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Interest {
    /// Something to read, or the end of the stream.
    Read,
    /// Room to send.
    Write,
    /// The connection may be over in both directions: [`crate::Socket::has_hung_up`] tells. Bytes that have arrived before may be
    /// unread.
    HangUp,
}

/// The result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// Number of bytes (at least one).
    Bytes(usize),
    /// Nothing now; a readable event will follow.
    Nothing,
    /// The other side closed its half.
    End,
}

/// The result of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// Number of bytes sent; may be fewer than offered.
    Bytes(usize),
    /// The kernel's buffer is full; a writable event will follow.
    Full,
}

/// A file that operations in flight keep open.
#[derive(Clone, Debug)]
pub struct SharedFile(Arc<Descriptor>);

impl SharedFile {
    /// Shares `file` on this shard.
    #[must_use]
    pub fn new(file: File) -> SharedFile {
        SharedFile::on_disk(file, false)
    }

    /// As [`SharedFile::new`]; `waits_for_rotation`: on a disk with a mechanism and no write cache. The kernel merges contiguous requests that
    /// it gets in one call. Their answers come together then, and so do the requests that follow them: such a disk has no work meanwhile, and
    /// turns once more before the next one. So it gets too few requests in a call for that.
    #[must_use]
    pub fn on_disk(file: File, waits_for_rotation: bool) -> SharedFile {
        SharedFile::of(Descriptor {
            number: file.as_raw_fd(),
            file: Some(file),
            offloaded: false,
            waits_for_rotation,
        })
    }

    /// As [`SharedFile::new`], for a filesystem where any call may block on its storage (FUSE, NFS), even a submission to the
    /// ring, or `close`. Separate threads start its operations, and close it after its last user has released it.
    #[must_use]
    pub fn offloaded(file: File) -> SharedFile {
        SharedFile::of(Descriptor {
            number: file.as_raw_fd(),
            file: Some(file),
            offloaded: true,
            waits_for_rotation: false,
        })
    }

    /// Whether its calls may block even when submitted to the ring.
    pub(crate) fn is_offloaded(&self) -> bool {
        self.0.offloaded
    }

    /// Whether it is on a disk with a mechanism and no write cache.
    pub(crate) fn waits_for_rotation(&self) -> bool {
        self.0.waits_for_rotation
    }

    pub(crate) fn simulated(number: i32) -> SharedFile {
        SharedFile::of(Descriptor { number, file: None, offloaded: false, waits_for_rotation: false })
    }

    fn of(descriptor: Descriptor) -> SharedFile {
        SharedFile(Arc::new(descriptor))
    }

    /// The descriptor, for calls that do not block; a simulated file's number.
    #[must_use]
    pub fn as_raw_fd(&self) -> RawFd {
        self.0.number
    }

    /// The descriptor, for calls on a thread that may block.
    #[must_use]
    pub fn share(&self) -> Arc<Descriptor> {
        Arc::clone(&self.0)
    }
}

/// The descriptor of a [`SharedFile`].
#[derive(Debug)]
pub struct Descriptor {
    number: RawFd,
    /// None if simulated.
    file: Option<File>,
    offloaded: bool,
    waits_for_rotation: bool,
}

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.number
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let file = self.file.take();
        if self.offloaded {
            // If the thread cannot start, the closure is dropped here and closes the descriptor.
            let _ = std::thread::Builder::new().name("weir-close".into()).spawn(move || drop(file));
        }
    }
}

/// The kind of a file operation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    Read,
    Write {
        /// With `RWF_DSYNC`: durable when it completes.
        durable: bool,
    },
    Sync,
    Allocate {
        mode: i32,
        length: u64,
    },
}

/// A file operation, with the memory that the kernel works on.
pub(crate) struct FileOperation {
    pub token: Token,
    pub file: SharedFile,
    pub kind: FileKind,
    /// Offset of the next byte to transfer.
    pub offset: u64,
    pub vectors: Vec<libc::iovec>,
    /// Vectors before this index are done.
    pub first: usize,
    pub moved: u64,
    /// The registration with the ring of memory that is transferred from its first byte, if it has one.
    pub registration: Option<u16>,
    pub buffer: Option<Buffer>,
    /// Keeps the memory that `vectors` point into.
    #[expect(dead_code, reason = "held, not read")]
    pub held: Option<Held>,
}

/// Memory that a write reads from, and that others use, too.
#[expect(dead_code, reason = "held, not read")]
pub(crate) enum Held {
    Region(Rc<Region>),
    Buffer(Rc<Buffer>),
}

impl FileOperation {
    pub fn without_data(token: Token, file: &SharedFile, kind: FileKind, offset: u64) -> FileOperation {
        FileOperation {
            token,
            file: file.clone(),
            kind,
            offset,
            vectors: Vec::new(),
            first: 0,
            moved: 0,
            registration: None,
            buffer: None,
            held: None,
        }
    }

    /// The vectors not yet transferred.
    pub fn rest(&self) -> &[libc::iovec] {
        &self.vectors[self.first..]
    }

    /// Applies the kernel's result. True when the operation was short and its rest must be started (short transfers are legal at
    /// any time; a read of 0 bytes has reached the end).
    ///
    /// A read that stops off a sector boundary has reached the end too: neither the page cache nor direct I/O stops there for
    /// another reason, and direct I/O cannot continue from there.
    pub fn continues_after(&mut self, result: i32) -> bool {
        if result == -libc::EINTR || result == -libc::EAGAIN {
            return true;
        }
        if result <= 0 || !matches!(self.kind, FileKind::Read | FileKind::Write { .. }) {
            return false;
        }
        // The rest begins within the buffer.
        self.registration = None;
        let mut moved = result as usize;
        self.moved += moved as u64;
        self.offset += moved as u64;
        while let Some(vector) = self.vectors.get_mut(self.first) {
            if moved < vector.iov_len {
                // SAFETY: stays inside the piece of memory that the vector describes.
                vector.iov_base = unsafe { vector.iov_base.cast::<u8>().add(moved) }.cast();
                vector.iov_len -= moved;
                return self.kind != FileKind::Read || self.offset.is_multiple_of(SECTOR);
            }
            moved -= vector.iov_len;
            self.first += 1;
        }
        false
    }

    /// The final result, after [`FileOperation::continues_after`] returned false.
    pub fn outcome(&self, result: i32) -> Result<u64, i32> {
        match (result, self.kind) {
            (error, _) if error < 0 => Err(-error),
            // A write of 0 bytes with bytes left would otherwise repeat without end.
            (0, FileKind::Write { .. }) if self.first < self.vectors.len() => Err(libc::EIO),
            _ => Ok(self.moved),
        }
    }
}
