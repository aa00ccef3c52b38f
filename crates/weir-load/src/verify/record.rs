//! A history on disk from the first write on, so that it outlives the process.
//!
//! A header of one page, then for each block two numbers of 32 bits, the newest version that was acknowledged (or seen)
//! and the newest that was issued. The table is mapped into memory: the load stores a version there before it sends the write,
//! and its acknowledgement after the answer, each with one store. The kernel writes the pages to the file, even if the process is
//! killed. After a power cut of its own host a record is not reliable.
//!
//! | bytes | content (little endian) |
//! |---|---|
//! | 0..8 | magic `WEIRLIVE` |
//! | 8..12 | format version |
//! | 12..16 | block size in bytes |
//! | 16..24 | run: whose data it is |
//! | 24..32 | first byte of the range |
//! | 32..40 | bytes of the range |
//! | 40..44 | CRC-32C of bytes 0..40 |

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::FlockOperation;
use rustix::mm::{MapFlags, ProtFlags};

use super::file::HistoryError;
use super::history::{History, Initial, Versions};
use super::layout::Layout;
use super::trail::Trail;
use crate::workload::Span;

const MAGIC: [u8; 8] = *b"WEIRLIVE";
const FORMAT: u32 = 1;
const HEADER: usize = 4096;
/// Used bytes of the header, its checksum included.
const USED: usize = 44;
const ENTRY: usize = 8;

/// The record of a running load. It is locked: one load writes it, and no other process reads it meanwhile.
#[derive(Debug)]
pub struct Record {
    _file: File,
    map: NonNull<u8>,
    length: usize,
    first: u64,
    block_size: u64,
}

// SAFETY: the mapping is used through atomics only, and is unmapped when the last owner is gone.
unsafe impl Send for Record {}
// SAFETY: as above.
unsafe impl Sync for Record {}

impl Record {
    /// Creates the file, which must not exist, for a run on the blocks of `block_size` bytes of `span`. Its size is 4 KiB and
    /// eight bytes for each block.
    ///
    /// # Errors
    /// It exists, cannot be written, or there is no room for it.
    pub fn create(path: &Path, run: u64, span: Span, block_size: u32) -> Result<Record, HistoryError> {
        let failed = |source| HistoryError::Io { path: path.into(), source };
        let blocks = span.length / u64::from(block_size);
        let length = HEADER + blocks as usize * ENTRY;
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).map_err(|error| {
            match error.kind() {
                io::ErrorKind::AlreadyExists => HistoryError::Taken {
                    path: path.into(),
                    what: "is there already: judge by it with `weir bench verify` and remove it, or name another",
                },
                _ => failed(error),
            }
        })?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(|error| failed(error.into()))?;
        fill(&file, &header(run, span, block_size), length).map_err(failed)?;
        // SAFETY: a new mapping at an address that the kernel chooses; the file has these bytes, all of them written.
        let map = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, &file, 0)
        };
        let map = NonNull::new(map.map_err(|error| failed(error.into()))?.cast());
        let map = map.ok_or_else(|| failed(io::ErrorKind::OutOfMemory.into()))?;
        Ok(Record { _file: file, map, length, first: span.offset, block_size: u64::from(block_size) })
    }

    /// Records the versions of the block at byte `offset` of the target: the newest that was acknowledged or seen, and the newest
    /// that was issued. Call it before sending a write, and after its answer.
    ///
    /// # Panics
    /// When the run has no such block.
    #[inline]
    pub fn note(&self, offset: u64, acknowledged: u32, issued: u32) {
        let at = HEADER + ((offset - self.first) / self.block_size) as usize * ENTRY;
        assert!(offset >= self.first && at + ENTRY <= self.length, "byte {offset} is outside the record");
        // SAFETY: the entry lies inside the mapping and is aligned to its size; all access is atomic.
        let entry = unsafe { AtomicU64::from_ptr(self.map.as_ptr().add(at).cast()) };
        entry.store((u64::from(issued) << 32 | u64::from(acknowledged)).to_le(), Ordering::Release);
    }

    /// The history that a load has left at `path`, whether it completed or was killed.
    ///
    /// # Errors
    /// It cannot be read, a load is still writing it, it is damaged, or something else.
    pub fn load(path: &Path) -> Result<History, HistoryError> {
        let failed = |source| HistoryError::Io { path: path.into(), source };
        let wrong = |what| HistoryError::Content { path: path.into(), what };
        let mut file = File::open(path).map_err(failed)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).map_err(|_| HistoryError::Taken {
            path: path.into(),
            what: "a load is still writing it: end that first",
        })?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed)?;
        decode(&bytes).map_err(wrong)
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.map.as_ptr().cast(), self.length) };
    }
}

fn header(run: u64, span: Span, block_size: u32) -> [u8; USED] {
    let mut header = [0; USED];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    header[12..16].copy_from_slice(&block_size.to_le_bytes());
    for (at, number) in [(16, run), (24, span.offset), (32, span.length)] {
        header[at..at + 8].copy_from_slice(&number.to_le_bytes());
    }
    let sum = crc32c::crc32c(&header[..40]);
    header[40..].copy_from_slice(&sum.to_le_bytes());
    header
}

/// Every byte is written: a mapped hole for which there is no room would end the process.
fn fill(mut file: &File, header: &[u8], length: usize) -> io::Result<()> {
    file.write_all(header)?;
    let zeroes = vec![0; 1 << 20];
    let mut left = length - header.len();
    while left > 0 {
        let piece = left.min(zeroes.len());
        file.write_all(&zeroes[..piece])?;
        left -= piece;
    }
    file.sync_all()
}

fn decode(bytes: &[u8]) -> Result<History, &'static str> {
    let header: &[u8; USED] = bytes.first_chunk().ok_or("is too short for a record of a load")?;
    if header[..8] != MAGIC {
        return Err("is not the record of a load (it does not start with WEIRLIVE)");
    }
    let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| header[at + i]));
    let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
    if crc32c::crc32c(&header[..40]) != word(40) {
        return Err("is damaged (the checksum of its header does not match)");
    }
    if word(8) != FORMAT {
        return Err("was written by a newer version of weir");
    }
    let span = Span { offset: long(24), length: long(32) };
    let layout = Layout::uniform(span, word(12)).map_err(|_| "describes blocks that cannot be")?;
    let table = bytes.get(HEADER..).unwrap_or_default().as_chunks::<ENTRY>().0;
    if table.len() as u64 != layout.blocks() {
        return Err("is cut short, or has bytes left over");
    }
    let entry = |entry: &[u8; ENTRY]| {
        let both = u64::from_le_bytes(*entry);
        let versions = Versions { floor: both as u32, issued: (both >> 32) as u32 };
        (versions.floor <= versions.issued).then_some(versions)
    };
    let versions = table.iter().map(entry).collect::<Option<Vec<Versions>>>();
    let versions = versions.ok_or("is damaged (a version was acknowledged and never issued)")?;
    Ok(History { layout, run: long(16), initial: Initial::Unknown, versions, trail: Trail::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SPAN: Span = Span { offset: 8192, length: 16 * 4096 };

    #[test]
    fn what_is_noted_is_found_again_and_nobody_else_writes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record");
        let record = Record::create(&path, 7, SPAN, 4096).unwrap();
        record.note(8192, 1, 2);
        record.note(8192 + 15 * 4096, 5, 5);
        let busy = Record::load(&path).unwrap_err().to_string();
        assert!(busy.contains("still writing"), "{busy}");
        drop(record);
        let history = Record::load(&path).unwrap();
        assert_eq!((history.run(), history.written()), (7, (2, 7)));
        assert_eq!(history.versions[15], Versions { floor: 5, issued: 5 });
        let again = Record::create(&path, 8, SPAN, 4096).unwrap_err().to_string();
        assert!(again.contains("is there already") && again.contains("weir bench verify"), "{again}");
        let nowhere = Record::create(&directory.path().join("none/record"), 8, SPAN, 4096).unwrap_err();
        assert!(nowhere.to_string().contains("none/record"), "{nowhere}");
    }

    #[test]
    fn what_is_no_record_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record");
        drop(Record::create(&path, 7, SPAN, 4096).unwrap());
        let good = std::fs::read(&path).unwrap();
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        for (bytes, hint) in [
            (b"text".to_vec(), "too short"),
            (with(0, b'X'), "WEIRLIVE"),
            (with(20, 1), "checksum"),
            (good[..4200].to_vec(), "cut short"),
            (with(HEADER, 1), "never issued"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let said = Record::load(&path).unwrap_err().to_string();
            assert!(said.contains(hint) && said.contains("record"), "{hint}: {said}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_are_a_panic(at in 0usize..HEADER + 128, byte: u8, cut in 0usize..HEADER + 129) {
            let mut bytes = header(7, SPAN, 4096).to_vec();
            bytes.resize(HEADER + 16 * ENTRY, 0);
            bytes[at] = byte;
            bytes.truncate(cut);
            let _ = decode(&bytes);
        }
    }
}
