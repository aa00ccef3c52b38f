//! Work on a file of the filesystem that blocks, for a thread beside the shard.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FallocateFlags;
use weir_block::IoError;

use crate::lun::filesystem::extents::{extents, layout};
use crate::lun::filesystem::pages::Pages;
use crate::lun::filesystem::space::{Zeroes, allocate};
use crate::lun::filesystem::{FilesystemError, Kind, Mounted};
use crate::lun::leases::Piece;
use crate::lun::router::Range;

/// Space that stays free of what is allocated ahead, in bytes: for writes that come, and for the filesystem's own blocks.
const KEPT_FREE: u64 = 64 << 20;

/// Bytes that are written once more at a time.
const AGAIN: u64 = 64 << 10;

/// The layout of a range after the work, or why it has failed.
pub type Layout = Result<Vec<Piece>, IoError>;

/// A change of a disk's layout that somebody else wants.
pub type Change = Box<dyn FnOnce(&File) -> io::Result<()> + Send>;

/// The work on a disk's file that blocks. A thread beside the shard calls it; what it answers is durable. A simulation has a file of its own.
pub trait FileWork: Send + Sync {
    /// For messages.
    fn path(&self) -> &Path;

    /// Makes what was written durable, with its blocks, and looks at each range then.
    fn commit(&self, ranges: &[Range]) -> Vec<Layout>;

    /// The layout of a range, which is durable: a job that has failed may have left blocks that are not.
    ///
    /// # Errors
    /// The filesystem's.
    fn look(&self, range: Range) -> Layout;

    /// Frees a range, which reads as zeroes then. The layout is that of `around`.
    ///
    /// # Errors
    /// The filesystem's.
    fn punch(&self, range: Range, around: Range) -> Layout;

    /// Writes zeroes wherever a range has no written blocks. `None` in place of the layout: there is too little space.
    ///
    /// # Errors
    /// The filesystem's.
    fn allocate(&self, range: Range) -> Result<Option<Vec<Piece>>, IoError>;

    /// Ends what a write to a range that has failed may have begun: XFS keeps blocks that it has allocated for a copy, does not show them,
    /// and the next write there moves the file to them, also if nothing is shared any more (`VOLUME.md` §1). The layout is that of `around`.
    ///
    /// # Errors
    /// The filesystem's. What it has of the file is not known then ([`FileWork::distrust`]).
    fn settle(&self, range: Range, around: Range) -> Layout;

    /// What the filesystem has of the file is not known: nothing is granted any more.
    fn distrust(&self);

    /// Makes a change of the layout.
    ///
    /// # Errors
    /// The change's, or the filesystem's.
    fn change(&self, change: Change) -> Result<(), IoError>;

    /// Whether the filesystem works, and this node reaches the LUN ([`Mounted::check`]).
    fn is_usable(&self) -> bool;
}

/// A file, for threads.
#[derive(Debug)]
pub struct WorkFile {
    /// Open for direct I/O.
    pub file: File,
    /// For messages.
    pub path: PathBuf,
    /// Written where space is allocated.
    pub zeroes: Zeroes,
    /// Kept while anything may be under way: the unmount waits for it.
    pub mounted: Arc<Mounted>,
    /// Its blocks stay where they are, so that its owner may write to them. Otherwise all I/O goes through the filesystem.
    pub grants: AtomicBool,
}

impl FileWork for WorkFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn commit(&self, ranges: &[Range]) -> Vec<Layout> {
        match self.file.sync_data() {
            Ok(()) => ranges.iter().map(|range| self.map(*range)).collect(),
            Err(error) => {
                let error = io_error(&error, "making a redirected write durable");
                ranges.iter().map(|_| Err(error)).collect()
            }
        }
    }

    fn look(&self, range: Range) -> Layout {
        self.file.sync_data().map_err(|error| io_error(&error, "making a disk's extents durable"))?;
        self.map(range)
    }

    fn punch(&self, range: Range, around: Range) -> Layout {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(self.file.as_fd(), flags, range.0, range.1 - range.0)
            .map_err(|error| io_error(&error.into(), "freeing a range of a disk"))?;
        self.look(around)
    }

    fn allocate(&self, range: Range) -> Result<Option<Vec<Piece>>, IoError> {
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

    fn settle(&self, range: Range, around: Range) -> Layout {
        let superblock = self.mounted.superblock();
        let keeps_copies = superblock.kind == Kind::Xfs && superblock.reflink;
        if keeps_copies && self.grants.load(Ordering::Relaxed) {
            self.write_again(range)?;
        }
        self.look(around)
    }

    fn distrust(&self) {
        self.grants.store(false, Ordering::Relaxed);
        // If it cannot be examined, nothing else can be done with it either.
        let is_news = self.file.metadata().is_ok_and(|found| self.mounted.distrust(found.ino()));
        if is_news {
            let file = self.path.display();
            tracing::warn!(%file, "the blocks of a disk's file are not known: all I/O goes through the filesystem");
        }
    }

    fn change(&self, change: Change) -> Result<(), IoError> {
        let changed = change(&self.file).and_then(|()| self.file.sync_data());
        changed.map_err(|error| io_error(&error, "changing a disk's file"))
    }

    fn is_usable(&self) -> bool {
        self.mounted.check().is_ok()
    }
}

impl WorkFile {
    fn map(&self, range: Range) -> Layout {
        if !self.grants.load(Ordering::Relaxed) {
            return Ok(Vec::new());
        }
        layout(&self.file, range.0..range.1).map_err(|error| io_error(&error, "looking at a disk's extents"))
    }

    /// Writes once more what a range holds. A block that has one for a copy takes it, and one that has none and gets none is as before. A
    /// piece may fail half-way again, and is written block by block then.
    fn write_again(&self, range: Range) -> Result<(), IoError> {
        let failed = |error: io::Error| io_error(&error, "ending a write that has failed");
        let block = u64::from(self.mounted.superblock().block);
        let mut pages = Pages::new(AGAIN as usize);
        let written = extents(&self.file, range.0..range.1).map_err(failed)?;
        for extent in written.iter().filter(|extent| !extent.is_unwritten()) {
            let (start, end) = (extent.start.max(range.0) / block * block, extent.end().min(range.1));
            for piece in (start..end.next_multiple_of(block)).step_by(AGAIN as usize) {
                let length = AGAIN.min(end.next_multiple_of(block) - piece);
                let bytes = &mut pages.bytes_mut()[..length as usize];
                self.file.read_exact_at(bytes, piece).map_err(failed)?;
                if has_space(self.file.write_all_at(bytes, piece)).map_err(failed)? {
                    continue;
                }
                for (number, bytes) in bytes.chunks(block as usize).enumerate() {
                    has_space(self.file.write_all_at(bytes, piece + number as u64 * block))
                        .map_err(failed)?;
                }
            }
        }
        Ok(())
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

/// False: the filesystem is full.
fn has_space(written: io::Result<()>) -> io::Result<bool> {
    match written {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) => Ok(false),
        written => written.map(|()| true),
    }
}

fn io_error(error: &io::Error, context: &'static str) -> IoError {
    IoError::from_errno(error.raw_os_error().unwrap_or(libc::EIO), context)
}
