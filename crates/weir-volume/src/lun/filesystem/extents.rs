//! The blocks of a file (`FS_IOC_FIEMAP`; Linux, `Documentation/filesystems/fiemap.rst`).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use crate::lun::leases::{Lease, Piece};

/// `_IOWR('f', 11, struct fiemap)`.
const FS_IOC_FIEMAP: libc::Ioctl = 0xC020_660B_u32 as libc::Ioctl;
/// Write the file's dirty pages first: what is delayed has no blocks yet.
const FIEMAP_FLAG_SYNC: u32 = 1;
/// Extents in one answer.
const BATCH: usize = 256;

/// The last extent of the file.
const LAST: u32 = 0x1;
/// It is allocated, and reads as zeroes whatever is there.
const UNWRITTEN: u32 = 0x800;
/// Several were merged, because the filesystem has no extents there.
const MERGED: u32 = 0x1000;
/// Another file has it, too.
const SHARED: u32 = 0x2000;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

#[repr(C)]
struct RawMap {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [RawExtent; BATCH],
}

/// Blocks of a file that follow each other in the file and on the LUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte in the file.
    pub start: u64,
    /// First byte on the filesystem's device.
    pub physical: u64,
    /// Bytes.
    pub length: u64,
    flags: u32,
}

impl Extent {
    /// The byte in the file after the last one.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start + self.length
    }

    /// The lease that a node may get on these blocks. An unknown flag forbids both reading and writing.
    #[must_use]
    pub fn lease(&self) -> Lease {
        match self.flags & !(LAST | MERGED) {
            0 => Lease::ReadWrite(self.physical),
            SHARED => Lease::ReadOnly(self.physical),
            _ => Lease::Nothing,
        }
    }

    /// Allocated for this file alone, and reads as zeroes whatever is there.
    #[must_use]
    pub fn is_unwritten(&self) -> bool {
        self.flags & !(LAST | MERGED) == UNWRITTEN
    }

    /// Another file has it, too.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.flags & SHARED != 0
    }

    /// For messages.
    #[must_use]
    pub fn state(&self) -> &'static str {
        match self.flags & !(LAST | MERGED) {
            0 => "written",
            SHARED => "shared with another file",
            flags if flags & UNWRITTEN != 0 => "allocated, not written",
            _ => "in a state without fixed blocks",
        }
    }
}

/// The extents of a file in a range, in order; those at its ends may begin before it and end after it. What no extent covers is a hole.
///
/// # Errors
/// The system's; `EOPNOTSUPP`: the filesystem cannot tell.
pub fn extents(file: &File, range: Range<u64>) -> io::Result<Vec<Extent>> {
    let mut found: Vec<Extent> = Vec::new();
    each_batch(file, range, |some| {
        found.extend(some);
        true
    })?;
    Ok(found)
}

/// As [`extents`], some at a time, until `take` returns false. Whether there are no more.
///
/// # Errors
/// As [`extents`].
pub fn each_batch(
    file: &File,
    range: Range<u64>,
    mut take: impl FnMut(Vec<Extent>) -> bool,
) -> io::Result<bool> {
    let (mut at, mut known) = (range.start, 0);
    while at < range.end {
        let mut some = batch(file, at..range.end)?;
        let Some(last) = some.last().copied() else { break };
        // Defends against an answer without progress.
        let next = last.end().max(at + 1);
        let is_over = some.len() < BATCH || last.flags & LAST != 0;
        // An extent on the border of two answers is in both.
        some.retain(|extent| extent.start >= known);
        known = known.max(last.end());
        let goes_on = take(some);
        if is_over {
            break;
        }
        if !goes_on {
            return Ok(false);
        }
        at = next;
    }
    Ok(true)
}

/// The layout of a range of a file, without a gap: what the coordinator may grant there.
///
/// # Errors
/// As [`extents`].
pub fn layout(file: &File, range: Range<u64>) -> io::Result<Vec<Piece>> {
    let mut pieces = Vec::new();
    let mut at = range.start;
    let hole = |start, end| Piece { start, end, lease: Lease::Hole };
    for extent in extents(file, range.clone())? {
        if extent.start > at {
            pieces.push(hole(at, extent.start.min(range.end)));
        }
        let whole = Piece { start: extent.start, end: extent.end(), lease: extent.lease() };
        pieces.extend(whole.within((range.start, range.end)));
        at = at.max(extent.end());
    }
    if at < range.end {
        pieces.push(hole(at, range.end));
    }
    Ok(pieces)
}

fn batch(file: &File, range: Range<u64>) -> io::Result<Vec<Extent>> {
    let mut map = Box::new(RawMap {
        start: range.start,
        length: range.end - range.start,
        flags: FIEMAP_FLAG_SYNC,
        mapped: 0,
        count: BATCH as u32,
        reserved: 0,
        extents: [RawExtent::default(); BATCH],
    });
    // SAFETY: the kernel reads the head and writes at most `count` extents behind it, for which there is space.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut *map) };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    let mapped = (map.mapped as usize).min(BATCH);
    let extent = |raw: &RawExtent| Extent {
        start: raw.logical,
        physical: raw.physical,
        length: raw.length,
        flags: raw.flags,
    };
    Ok(map.extents[..mapped].iter().map(extent).collect())
}
