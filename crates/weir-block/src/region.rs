//! A large anonymous mapping for kernel operations.

use std::cell::UnsafeCell;
use std::io;
use std::ptr::NonNull;

/// Memory mapped once and kept while any `Rc`, including that of a kernel operation, exists.
///
/// The owner coordinates writes: a log arena never overwrites a range that an operation in flight still reads. The region
/// guarantees only that the addresses stay valid.
#[derive(Debug)]
pub struct Region {
    start: NonNull<UnsafeCell<u8>>,
    length: usize,
}

impl Region {
    /// Maps `length` bytes (rounded up to 2 MiB), zeroed, with huge pages where the kernel provides them.
    ///
    /// # Errors
    /// The kernel refuses the mapping (`ENOMEM`).
    pub fn new(length: usize) -> io::Result<Region> {
        const HUGE: usize = 2 << 20;
        let length = length.max(1).next_multiple_of(HUGE);
        // SAFETY: a fresh anonymous private mapping; no address is asked for.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range was just mapped. Advice only; refusal costs speed, not correctness.
        unsafe { libc::madvise(start, length, libc::MADV_HUGEPAGE) };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Region { start, length })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Never true: a region has at least one huge page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The address of byte `offset`, for an iovec.
    ///
    /// # Panics
    /// When `offset + length` is outside the region: the caller's arithmetic is wrong.
    #[must_use]
    pub fn address(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.length), "range outside the region");
        // SAFETY: just checked to be inside the mapping.
        unsafe { self.start.as_ptr().cast::<u8>().add(offset) }
    }

    /// The bytes at `offset`. The caller ensures that nothing writes there while the slice lives.
    #[must_use]
    pub fn bytes(&self, offset: usize, length: usize) -> &[u8] {
        // SAFETY: `address` checked the range; the mapping lives as long as `self`; a shard is one
        // thread and the arena never writes into a range that it has handed out for reading.
        unsafe { std::slice::from_raw_parts(self.address(offset, length), length) }
    }

    /// Copies `source` to `offset`.
    pub fn copy_in(&self, offset: usize, source: &[u8]) {
        // SAFETY: `address` checked the range; `source` cannot overlap, since slices of the region are
        // never passed here while a record is being appended.
        unsafe {
            std::ptr::copy_nonoverlapping(source.as_ptr(), self.address(offset, source.len()), source.len());
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, unmapped once.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}
