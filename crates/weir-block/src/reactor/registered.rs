//! Memory of buffers that the ring keeps mapped, so that the kernel does not look up its pages for each request: about a tenth of the cost of a
//! small read or write of a fast device.
//!
//! The memory counts as locked. Where the limit for that is too low, or the kernel too old, requests go without.

use io_uring::IoUring;

use crate::buffer::Buffer;

/// Most registrations of a ring.
const MOST: u16 = 2048;

/// Largest memory that is registered, in bytes: a large request takes far longer than the look-up of its pages.
const LARGEST: usize = 128 << 10;

/// Limit of the registered memory, in bytes (P10). The kernel copies all of it for each program that the node starts (`fork`).
const LIMIT: usize = 16 << 20;

/// User data of the completion that says that the kernel has released the memory of number 0; the other numbers follow.
const RELEASED: u64 = 1 << 62;

/// The ring's table.
pub(super) struct RegisteredBuffers {
    /// Numbers without memory.
    vacant: Vec<u16>,
    /// Bytes under each number.
    sizes: Vec<usize>,
    /// Bytes under all numbers, until the kernel has released them: before Linux 6.13 it keeps them as long as any request that was begun before.
    bytes: usize,
    /// Most bytes that the kernel takes.
    limit: usize,
}

impl RegisteredBuffers {
    /// An empty table, if the kernel has one (Linux 5.19).
    pub fn new(ring: &IoUring) -> RegisteredBuffers {
        let has_table = ring.submitter().register_buffers_sparse(MOST.into()).is_ok();
        let vacant = if has_table { (0..MOST).rev().collect() } else { Vec::new() };
        RegisteredBuffers { vacant, sizes: vec![0; MOST.into()], bytes: 0, limit: LIMIT }
    }

    /// Registers the memory of a buffer that has no number, unless it is too much.
    pub fn add(&mut self, ring: &IoUring, buffer: &Buffer) {
        let memory = buffer.memory();
        let size = memory.iov_len;
        if size > LARGEST || self.bytes + size > self.limit {
            return;
        }
        let Some(number) = self.vacant.pop() else { return };
        if set(ring, number, memory, RELEASED + u64::from(number)) {
            buffer.set_registration(number);
            self.sizes[usize::from(number)] = size;
            self.bytes += size;
        } else {
            self.vacant.push(number);
            // Not tried again for each request.
            self.limit = self.bytes;
        }
    }

    /// The pool has released the memory under these numbers. Each is vacant when the kernel has released it, too.
    pub fn remove(&mut self, ring: &IoUring, numbers: Vec<u16>) {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        for number in numbers {
            // Where the kernel refuses, the number is used no more.
            set(ring, number, nothing, 0);
        }
    }

    /// Whether a completion's user data says that the kernel has released memory.
    pub fn take(&mut self, user_data: u64) -> bool {
        let Some(number) = user_data.checked_sub(RELEASED).filter(|number| *number < u64::from(MOST)) else {
            return false;
        };
        self.bytes -= std::mem::take(&mut self.sizes[number as usize]);
        self.vacant.push(number as u16);
        true
    }
}

/// `tag`: user data of a completion when the kernel releases this memory; 0: none.
fn set(ring: &IoUring, number: u16, memory: libc::iovec, tag: u64) -> bool {
    // SAFETY: the kernel keeps the pages of the memory until the number is set anew or the ring ends. Requests name the number only together with
    // a buffer that has it, and it goes with the memory.
    unsafe { ring.submitter().register_buffers_update(number.into(), &[memory], Some(&[tag])) }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::BufferPool;

    #[test]
    fn numbers_and_memory_come_back_when_the_kernel_has_released_them() {
        let mut ring = IoUring::new(8).expect("a ring");
        let mut table = RegisteredBuffers::new(&ring);
        assert_eq!(table.vacant.len(), usize::from(MOST), "this kernel has a table");
        let pool = BufferPool::new(64 << 10);
        for round in 0..2 * usize::from(MOST) {
            // The limit has no room for the idle memory of both sizes.
            let buffer = pool.take(if round % 2 == 0 { 4096 } else { 64 << 10 }).expect("fits");
            table.remove(&ring, pool.take_retired());
            assert_eq!(buffer.registration(), None, "round {round}: new memory");
            table.add(&ring, &buffer);
            assert!(buffer.registration().is_some(), "round {round}");
            drop(buffer);
            ring.submit().expect("nothing to refuse");
            for completion in ring.completion() {
                assert!(table.take(completion.user_data()));
            }
        }
        assert_eq!(table.vacant.len(), usize::from(MOST) - 1);
        assert_eq!(table.bytes, 64 << 10);
        assert!(!table.take(u64::MAX) && !table.take(7));
    }

    #[test]
    fn no_more_than_the_limit_is_registered_and_nothing_large() {
        let ring = IoUring::new(8).expect("a ring");
        let mut table = RegisteredBuffers::new(&ring);
        let pool = BufferPool::new(64 << 20);
        let large = pool.take(LARGEST + 1).expect("fits");
        table.add(&ring, &large);
        assert_eq!(large.registration(), None);
        let all: Vec<Buffer> = (0..200).map(|_| pool.take(LARGEST).expect("fits")).collect();
        all.iter().for_each(|buffer| table.add(&ring, buffer));
        let registered = all.iter().filter(|buffer| buffer.registration().is_some()).count();
        assert_eq!((registered * LARGEST, table.bytes), (LIMIT, LIMIT));
    }
}
