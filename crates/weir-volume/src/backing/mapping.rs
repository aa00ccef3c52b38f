//! Reads of files in memory without a system call.
//!
//! `pread` of 4 KiB from tmpfs takes twice the time of the copy. A mapping saves the difference, with two dangers. A read of a
//! hole through a mapping allocates the page: so only pages that are known to be allocated are read through it. A page that the
//! kernel cannot provide raises `SIGBUS`: [`bus_error`](super::bus_error) turns that into a failed copy.
//!
//! Writes stay system calls. The kernel completes a page's copy even if the process is killed meanwhile; a copy by the process
//! itself could leave a torn block.

use std::io;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};

use weir_block::ExtentState;

use super::{bus_error, extents};

/// The unit of allocation that is tracked, in bytes: the smallest page of tmpfs.
const PAGE: u64 = 4096;
/// The unit in which existing data is looked up, in bytes.
const CHUNK: u64 = 2 << 20;
/// The largest file that is mapped, in bytes: bounds the bits for its pages to 32 MiB (P10).
pub(super) const LARGEST: u64 = 1 << 40;

/// One bit for each unit of a file.
struct Bits(Vec<u64>);

impl Bits {
    /// All unset. The memory is touched only where bits are set.
    fn new(count: u64) -> Bits {
        Bits(vec![0; count.div_ceil(64) as usize])
    }

    fn get(&self, at: u64) -> bool {
        self.0[(at / 64) as usize] >> (at % 64) & 1 == 1
    }

    fn set(&mut self, at: u64) {
        self.0[(at / 64) as usize] |= 1 << (at % 64);
    }

    fn clear(&mut self, at: u64) {
        self.0[(at / 64) as usize] &= !(1 << (at % 64));
    }
}

/// A file in memory, mapped for reading.
pub(super) struct Mapping {
    start: NonNull<u8>,
    /// Bytes that are mapped. The file may be shorter: pages after its end are not allocated.
    length: u64,
    /// Pages that are known to be allocated.
    allocated: Bits,
    /// Chunks whose existing pages have been looked up.
    examined: Bits,
}

impl Mapping {
    /// Maps `length` bytes, at most [`LARGEST`], of the file.
    pub fn new(fd: RawFd, length: u64) -> io::Result<Mapping> {
        assert!(length <= LARGEST, "bounded by the caller");
        bus_error::install()?;
        let protection = libc::PROT_READ;
        // SAFETY: a new mapping at an address of the kernel's choice; nothing refers to it yet.
        let start =
            unsafe { libc::mmap(ptr::null_mut(), length as usize, protection, libc::MAP_SHARED, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let allocated = Bits::new(length.div_ceil(PAGE));
        let examined = Bits::new(length.div_ceil(CHUNK));
        Ok(Mapping { start, length, allocated, examined })
    }

    /// Whether all pages of the range are known to be allocated, so that [`Mapping::copy`] may read them.
    pub fn holds(&mut self, fd: RawFd, offset: u64, length: u64) -> bool {
        if length == 0 || offset.checked_add(length).is_none_or(|end| end > self.length) {
            return false;
        }
        self.all_allocated(offset, length)
            || (self.examine(fd, offset, length) && self.all_allocated(offset, length))
    }

    /// Copies a range that [`Mapping::holds`]. False: the kernel could not provide it, and the mapping is to be dropped.
    #[must_use]
    pub fn copy(&self, offset: u64, target: &mut [u8]) -> bool {
        assert!(offset + target.len() as u64 <= self.length, "checked by `holds`");
        // SAFETY: the source is inside the mapping, which this value alone unmaps; `target` is a unique borrow, so it does not
        // overlap. `new` has installed the handler.
        unsafe {
            bus_error::copy(self.start.as_ptr().add(offset as usize), target.as_mut_ptr(), target.len())
        }
    }

    /// Notes a completed write: its pages are allocated.
    pub fn written(&mut self, offset: u64, length: u64) {
        let end = offset.saturating_add(length).min(self.length);
        (offset / PAGE..end.div_ceil(PAGE)).for_each(|page| self.allocated.set(page));
    }

    /// Notes that the range is about to be deallocated.
    pub fn forget(&mut self, offset: u64, length: u64) {
        let end = offset.saturating_add(length).min(self.length);
        (offset / PAGE..end.div_ceil(PAGE)).for_each(|page| self.allocated.clear(page));
    }

    fn all_allocated(&self, offset: u64, length: u64) -> bool {
        (offset / PAGE..(offset + length).div_ceil(PAGE)).all(|page| self.allocated.get(page))
    }

    /// Looks up the existing data of the range's chunks, once for each. Returns whether a chunk was looked up.
    fn examine(&mut self, fd: RawFd, offset: u64, length: u64) -> bool {
        let mut looked_up = false;
        for chunk in offset / CHUNK..(offset + length).div_ceil(CHUNK) {
            if self.examined.get(chunk) {
                continue;
            }
            looked_up = true;
            self.examined.set(chunk);
            let start = chunk * CHUNK;
            let found = extents::of_file(fd, start, CHUNK.min(self.length - start), PAGE);
            // Without an answer, and behind the extents of a very fragmented chunk, reads stay system calls.
            for extent in found.unwrap_or_default() {
                if extent.state == ExtentState::Allocated {
                    self.written(extent.offset, extent.length);
                }
            }
        }
        looked_up
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` mapped; no reference into it exists outside of `copy`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length as usize) };
    }
}
