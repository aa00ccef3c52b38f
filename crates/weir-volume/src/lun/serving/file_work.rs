//! Work on a file of the filesystem that blocks, for a thread beside the shard.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

use rustix::fs::FallocateFlags;
use weir_block::IoError;

use crate::lun::filesystem::FilesystemError;
use crate::lun::filesystem::extents::{extents, layout};
use crate::lun::filesystem::space::{Zeroes, allocate};
use crate::lun::leases::Piece;
use crate::lun::router::Range;

/// Space that stays free of what is allocated ahead, in bytes: for writes that come, and for the filesystem's own blocks.
const KEPT_FREE: u64 = 64 << 20;

/// The layout of a range after the work, or why it has failed.
pub type Layout = Result<Vec<Piece>, IoError>;

/// A file, for threads.
#[derive(Debug)]
pub struct WorkFile {
    /// Open for direct I/O.
    pub file: File,
    /// For messages.
    pub path: PathBuf,
    /// Written where space is allocated.
    pub zeroes: Zeroes,
}

impl WorkFile {
    /// Makes what was written durable, with its blocks, and looks at each range then.
    pub fn commit(&self, ranges: &[Range]) -> Vec<Layout> {
        match self.file.sync_data() {
            Ok(()) => ranges.iter().map(|range| self.map(*range)).collect(),
            Err(error) => {
                let error = io_error(&error, "making a redirected write durable");
                ranges.iter().map(|_| Err(error)).collect()
            }
        }
    }

    /// The layout of a range, which is durable: a job that has failed may have left blocks that are not.
    pub fn look(&self, range: Range) -> Layout {
        self.file.sync_data().map_err(|error| io_error(&error, "making a disk's extents durable"))?;
        self.map(range)
    }

    fn map(&self, range: Range) -> Layout {
        layout(&self.file, range.0..range.1).map_err(|error| io_error(&error, "looking at a disk's extents"))
    }

    /// Frees a range, which reads as zeroes then.
    pub fn punch(&self, range: Range, around: Range) -> Layout {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(self.file.as_fd(), flags, range.0, range.1 - range.0)
            .map_err(|error| io_error(&error.into(), "freeing a range of a disk"))?;
        self.look(around)
    }

    /// Writes zeroes wherever a range has no written blocks. `None` in place of the layout: there is too little space.
    pub fn allocate(&self, range: Range) -> Result<Option<Vec<Piece>>, IoError> {
        let failed = |error: io::Error| io_error(&error, "allocating space ahead");
        let space = rustix::fs::fstatvfs(&self.file).map_err(|error| failed(error.into()))?;
        if space.f_bavail.saturating_mul(space.f_frsize) < range.1 - range.0 + KEPT_FREE {
            return Ok(None);
        }
        let mut at = range.0;
        let found = extents(&self.file, range.0..range.1).map_err(failed)?;
        for extent in found.iter().filter(|extent| !extent.is_unwritten()) {
            self.fill((at, extent.start.min(range.1)))?;
            at = at.max(extent.end());
        }
        self.fill((at, range.1))?;
        self.look(range).map(Some)
    }

    fn fill(&self, (start, end): Range) -> Result<(), IoError> {
        if start >= end {
            return Ok(());
        }
        match allocate(&self.file, &self.path, start..end, &self.zeroes) {
            Ok(_) => Ok(()),
            Err(FilesystemError::System { source, .. }) => Err(io_error(&source, "allocating space ahead")),
            Err(error) => {
                tracing::warn!(%error, "space was allocated, and cannot be granted");
                Err(IoError::from_errno(libc::EIO, "allocating space ahead"))
            }
        }
    }
}

fn io_error(error: &io::Error, context: &'static str) -> IoError {
    IoError::from_errno(error.raw_os_error().unwrap_or(libc::EIO), context)
}
