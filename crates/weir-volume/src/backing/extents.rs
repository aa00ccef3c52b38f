//! The allocated parts of a file (`SEEK_DATA`, `SEEK_HOLE`; lseek(2)).

use std::io;
use std::os::fd::RawFd;

use weir_block::{Extent, ExtentState};

/// Maximum number of extents in one answer: limits the work of one lookup. The caller continues from the end of the answer.
const MOST: usize = 64;

/// Extents from `offset`; `length` is not zero. Bounds of extents are rounded to `logical_block`; a partly allocated block counts
/// as allocated.
pub(super) fn of_file(fd: RawFd, offset: u64, length: u64, logical_block: u64) -> Result<Vec<Extent>, i32> {
    let end = offset + length;
    let mut extents = Vec::new();
    let mut at = offset;
    while at < end && extents.len() < MOST {
        let data = match seek(fd, at, libc::SEEK_DATA) {
            Ok(data) => data / logical_block * logical_block,
            // Only a hole up to the end of the file, or an offset beyond it.
            Err(libc::ENXIO) => end,
            // The filesystem does not support this; report all as data.
            Err(libc::EINVAL | libc::EOPNOTSUPP) => at,
            Err(errno) => return Err(errno),
        };
        if data > at {
            let until = data.min(end);
            extents.push(Extent { offset: at, length: until - at, state: ExtentState::Hole });
            at = until;
            continue;
        }
        let hole = match seek(fd, at, libc::SEEK_HOLE) {
            Ok(hole) => hole.next_multiple_of(logical_block),
            // Truncated meanwhile, or unknown.
            Err(libc::ENXIO | libc::EINVAL | libc::EOPNOTSUPP) => end,
            Err(errno) => return Err(errno),
        };
        let until = hole.clamp(at + logical_block, end);
        extents.push(Extent { offset: at, length: until - at, state: ExtentState::Allocated });
        at = until;
    }
    Ok(extents)
}

fn seek(fd: RawFd, offset: u64, whence: i32) -> Result<u64, i32> {
    // SAFETY: no pointers. Nothing else uses the file position: all I/O has explicit offsets.
    let found = unsafe { libc::lseek(fd, offset as i64, whence) };
    u64::try_from(found).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}
