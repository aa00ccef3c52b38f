//! A disk's file in fewer pieces: its content is copied to space that the filesystem allocates in large steps.
//!
//! A snapshot or a clone shares one extent after the other, so it takes as long as a file has extents, and requests that need the file wait
//! meanwhile. Copy-on-write after snapshots, and writes to new space at random, break a file into many.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};
use weir_block::BufferPool;

use crate::lun::filesystem::extents::{Extent, each_batch};

/// With more extents than this, whoever shares a file's blocks is told how long that takes.
pub const MANY_EXTENTS: u64 = 5_000;

/// Time in which XFS shares an extent, at most: 1,024 take 7 to 22 ms, by the processor.
const SHARE_EACH: Duration = Duration::from_micros(22);

/// Shorter holes between written blocks are filled with zeroes: each would end an extent.
const FILLED: u64 = 64 << 10;

/// Bytes that are allocated at once, and bytes that are copied at once.
const STEP: u64 = 256 << 20;
const PIECE: usize = 4 << 20;

/// About how long it takes to share the blocks of a file with so many extents.
#[must_use]
pub fn share_time(extents: u64) -> Duration {
    SHARE_EACH.saturating_mul(u32::try_from(extents).unwrap_or(u32::MAX))
}

/// What a file is in, and what a copy of it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pieces {
    /// Its extents.
    pub extents: u64,
    /// Bytes of those that it shares with other files.
    pub shared: u64,
    /// Stretches that are copied, each to as few extents as there is contiguous space for.
    pub stretches: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Looks at all extents of a file of `size` bytes; `None` if `goes_on` says no before the end. Blocks.
///
/// # Errors
/// The system's; `EOPNOTSUPP`: the filesystem cannot tell.
pub fn pieces(file: &File, size: u64, goes_on: impl Fn() -> bool) -> io::Result<Option<Pieces>> {
    let (mut found, mut last) = (Pieces::default(), None::<Range<u64>>);
    let is_whole = each_batch(file, 0..size, |some| {
        for extent in &some {
            found.extents += 1;
            found.shared += if extent.is_shared() { extent.length } else { 0 };
            let Some(data) = data(extent, size) else { continue };
            match &mut last {
                Some(stretch) if joins(stretch, &data) => {
                    found.bytes += data.end - stretch.end;
                    stretch.end = data.end;
                }
                _ => {
                    found.stretches += 1;
                    found.bytes += data.end - data.start;
                    last = Some(data);
                }
            }
        }
        goes_on()
    })?;
    Ok(is_whole.then_some(found))
}

/// The part of an extent that is not zeroes anyway.
fn data(extent: &Extent, size: u64) -> Option<Range<u64>> {
    let range = extent.start..extent.end().min(size);
    (!extent.is_unwritten() && range.start < range.end).then_some(range)
}

fn joins(stretch: &Range<u64>, next: &Range<u64>) -> bool {
    next.start.saturating_sub(stretch.end) <= FILLED
}

/// The first stretch from `from` on.
fn next_stretch(file: &File, from: u64, size: u64) -> io::Result<Option<Range<u64>>> {
    let mut found = None::<Range<u64>>;
    each_batch(file, from..size, |some| {
        for data in some.iter().filter_map(|extent| data(extent, size)) {
            match &mut found {
                Some(stretch) if joins(stretch, &data) => stretch.end = data.end,
                Some(_) => return false,
                // The first one may begin before.
                None => found = Some(data.start.max(from)..data.end),
            }
        }
        true
    })?;
    Ok(found)
}

/// Copies the content of `source`, of `size` bytes, to `target`, which is empty; durably. Both are open for direct I/O. `goes_on` hears of the bytes of
/// each step; if it says no, the copy ends, and the answer is false. Blocks.
///
/// # Errors
/// The system's.
pub fn copy(
    source: &File,
    target: &File,
    size: u64,
    mut goes_on: impl FnMut(u64) -> bool,
) -> io::Result<bool> {
    let mut buffer = BufferPool::new(PIECE).take(PIECE).ok_or(io::ErrorKind::OutOfMemory)?;
    target.set_len(size)?;
    let mut at = 0;
    while let Some(stretch) = next_stretch(source, at, size)? {
        for start in stretch.clone().step_by(STEP as usize) {
            let end = stretch.end.min(start + STEP);
            allocate(target, start..end)?;
            for from in (start..end).step_by(PIECE) {
                let length = (end - from).min(PIECE as u64);
                let data = &mut buffer.bytes_mut()[..length as usize];
                source.read_exact_at(data, from)?;
                target.write_all_at(data, from)?;
                if !goes_on(length) {
                    return Ok(false);
                }
            }
        }
        at = stretch.end;
    }
    target.sync_all()?;
    Ok(true)
}

/// In one piece, as far as there is one.
fn allocate(file: &File, range: Range<u64>) -> io::Result<()> {
    Ok(fallocate(file, FallocateFlags::KEEP_SIZE, range.start, range.end - range.start)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;

    use super::*;

    const BLOCK: u64 = 4096;

    fn open(path: &Path) -> File {
        let mut options = File::options();
        options.read(true).write(true).create(true).custom_flags(libc::O_DIRECT);
        options.open(path).unwrap()
    }

    /// A block of one number.
    fn write(file: &File, block: u64, number: u8) {
        let mut buffer = BufferPool::new(PIECE).take(BLOCK as usize).unwrap();
        buffer.bytes_mut().fill(number);
        file.write_all_at(buffer.bytes(), block * BLOCK).unwrap();
    }

    /// On the filesystem of the build, whatever it is.
    #[test]
    fn a_copy_has_the_content_in_fewer_pieces_and_keeps_large_holes() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let [from, to] = ["from", "to"].map(|name| directory.path().join(name));
        let (source, target) = (open(&from), open(&to));
        let blocks: u64 = 4096;
        source.set_len(blocks * BLOCK).unwrap();
        // Every other block, so that no two are one extent; then a large hole, and one block more.
        for block in (0..512).step_by(2) {
            write(&source, block, block as u8 | 1);
        }
        write(&source, 3000, 7);
        let before = pieces(&source, blocks * BLOCK, || true).unwrap().unwrap();
        assert_eq!((before.stretches, before.bytes), (2, (511 + 1) * BLOCK), "{before:?}");
        assert!(before.extents > 200, "{before:?}");
        let mut heard = 0;
        let done = copy(&source, &target, blocks * BLOCK, |bytes| {
            heard += bytes;
            true
        });
        assert!(done.unwrap());
        assert_eq!(heard, before.bytes);
        assert_eq!(std::fs::read(&from).unwrap(), std::fs::read(&to).unwrap());
        let after = pieces(&target, blocks * BLOCK, || true).unwrap().unwrap();
        assert!(after.extents < before.extents / 10 && after.bytes == before.bytes, "{after:?}");
        // Nothing is looked at any more, or copied.
        assert_eq!(pieces(&source, blocks * BLOCK, || false).unwrap(), None);
        let stopped = copy(&source, &open(&directory.path().join("stopped")), blocks * BLOCK, |_| false);
        assert!(!stopped.unwrap());
    }

    #[test]
    fn an_empty_file_has_nothing_to_copy() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let (source, target) = (open(&directory.path().join("a")), open(&directory.path().join("b")));
        source.set_len(1 << 20).unwrap();
        assert_eq!(pieces(&source, 1 << 20, || true).unwrap(), Some(Pieces::default()));
        assert!(copy(&source, &target, 1 << 20, |_| true).unwrap());
        assert_eq!(target.metadata().unwrap().len(), 1 << 20);
    }

    #[test]
    fn the_time_grows_with_the_extents() {
        assert!(share_time(1_024) < Duration::from_millis(30));
        let many = share_time(16_384);
        assert!((Duration::from_millis(190)..Duration::from_millis(400)).contains(&many), "{many:?}");
        assert!(share_time(u64::MAX) > Duration::from_secs(10_000));
    }
}
