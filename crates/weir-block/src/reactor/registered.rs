//! Memory of buffers that the ring keeps mapped, so that the kernel does not look up its pages for each request: about a tenth of the cost of a
//! small read or write of a fast device.
//!
//! The memory counts as locked. Where the limit for that is too low, or the kernel too old, requests go without.

use io_uring::IoUring;

use crate::buffer::Buffer;

/// Most registrations of a ring (Linux, `io_uring/rsrc.c`: `IORING_MAX_REG_BUFFERS`).
const MOST: u16 = 1 << 14;

/// The ring's table.
pub(super) struct RegisteredBuffers {
    /// Numbers without memory; empty when the kernel takes no more.
    vacant: Vec<u16>,
}

impl RegisteredBuffers {
    /// An empty table, if the kernel has one (Linux 5.19).
    pub fn new(ring: &IoUring) -> RegisteredBuffers {
        let has_table = ring.submitter().register_buffers_sparse(MOST.into()).is_ok();
        RegisteredBuffers { vacant: if has_table { (0..MOST).rev().collect() } else { Vec::new() } }
    }

    /// Registers the memory of a buffer that has no number.
    pub fn add(&mut self, ring: &IoUring, buffer: &Buffer) {
        let Some(number) = self.vacant.pop() else { return };
        match set(ring, number, buffer.memory()) {
            true => buffer.set_registration(number),
            // Not tried again for each request.
            false => self.vacant.clear(),
        }
    }

    /// The memory under these numbers has been released.
    pub fn remove(&mut self, ring: &IoUring, numbers: Vec<u16>) {
        for number in numbers {
            let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            if set(ring, number, nothing) {
                self.vacant.push(number);
            }
        }
    }
}

fn set(ring: &IoUring, number: u16, memory: libc::iovec) -> bool {
    // SAFETY: the kernel keeps the pages of the memory until the number is set anew or the ring ends. Requests name the number only together with
    // a buffer that has it, and it goes with the memory.
    unsafe { ring.submitter().register_buffers_update(number.into(), &[memory], None) }.is_ok()
}
