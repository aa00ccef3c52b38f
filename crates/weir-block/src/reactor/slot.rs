//! The reactor's record of an operation until the kernel has completed it.

use std::rc::Rc;

use super::{Interest, SharedFile, Token};
use crate::buffer::Buffer;
use crate::region::Region;

/// The unit of direct I/O on Linux, in bytes.
const SECTOR: u64 = 512;

/// One entry of the reactor's table; its index is the kernel's user data.
pub(super) enum Slot {
    Watch {
        serial: u64,
        fd: i32,
        interest: Interest,
        token: Token,
    },
    /// A cancelled watch that waits for its last completion.
    Abandoned,
    Waker,
    File(FileOperation),
}

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
    pub buffer: Option<Buffer>,
    /// Keeps mapped the memory that `vectors` point into.
    #[expect(dead_code, reason = "held, not read")]
    pub region: Option<Rc<Region>>,
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
            buffer: None,
            region: None,
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
            // A write of 0 bytes with bytes left would otherwise repeat for ever.
            (0, FileKind::Write { .. }) if self.first < self.vectors.len() => Err(libc::EIO),
            _ => Ok(self.moved),
        }
    }
}
