//! Space of a file that other nodes may use directly: written, with blocks of its own.
//!
//! What `fallocate` gives reads as zeroes whatever a node writes there directly, until the *filesystem* has written it; user space cannot
//! tell it that (`VOLUME.md` §1). So the space is written with zeroes through the filesystem first.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::error::FilesystemError;
use super::extents::{Extent, extents};
use super::pages::{PAGE, Pages};
use crate::lun::leases::Lease;

/// Bytes of one write of zeroes.
const STEP: u64 = 4 << 20;
/// Zeroes for direct I/O.
#[derive(Debug)]
pub struct Zeroes(Pages);

impl Default for Zeroes {
    fn default() -> Zeroes {
        Zeroes(Pages::new(STEP as usize))
    }
}

/// Writes zeroes over a range of a file that is open for direct I/O, makes them durable, and returns the extents that the range has then:
/// a node may write to all of them. The range is in whole blocks of 4096 bytes. Whatever was there is lost.
///
/// # Errors
/// [`FilesystemError`]; [`FilesystemError::is_full`]. A part of the range may have been written.
pub fn allocate(
    file: &File,
    path: &Path,
    range: Range<u64>,
    zeroes: &Zeroes,
) -> Result<Vec<Extent>, FilesystemError> {
    if !range.start.is_multiple_of(PAGE as u64) || !range.end.is_multiple_of(PAGE as u64) {
        let source = io::Error::from_raw_os_error(libc::EINVAL);
        return Err(FilesystemError::system("allocate a part of a block of", path)(source));
    }
    let mut at = range.start;
    while at < range.end {
        let length = STEP.min(range.end - at);
        file.write_all_at(&zeroes.0.bytes()[..length as usize], at)
            .map_err(FilesystemError::system("write", path))?;
        at += length;
    }
    file.sync_data().map_err(FilesystemError::system("sync", path))?;
    let found =
        extents(file, range.clone()).map_err(FilesystemError::system("look at the extents of", path))?;
    check(&found, path, range)?;
    Ok(found)
}

/// Every byte of the range is in a block that a node may write to.
fn check(found: &[Extent], path: &Path, range: Range<u64>) -> Result<(), FilesystemError> {
    let mut at = range.start;
    for extent in found {
        if extent.start > at || !matches!(extent.lease(), Lease::ReadWrite(_)) {
            break;
        }
        at = extent.end();
    }
    if at >= range.end {
        return Ok(());
    }
    let next = found.iter().find(|extent| extent.end() > at && extent.start <= at);
    let found = next.map_or("a hole", Extent::state).to_owned();
    Err(FilesystemError::NotWritten { path: path.to_path_buf(), start: at, end: range.end, found })
}
