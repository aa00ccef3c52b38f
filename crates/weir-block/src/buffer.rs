//! Aligned buffers from a bounded pool.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::ptr::NonNull;
use std::rc::Rc;

/// Alignment of every buffer, in bytes: enough for direct I/O on any Linux block device.
pub const ALIGNMENT: usize = 4096;

/// Largest buffer, in bytes: the largest request that the NBD protocol recommends (32 MiB).
pub const LARGEST: usize = 32 << 20;

/// Sizes are powers of two from [`ALIGNMENT`] to [`LARGEST`].
const CLASSES: usize = (LARGEST / ALIGNMENT).ilog2() as usize + 1;

/// A shard's buffer pool. Bounded in bytes (P10): when it is exhausted, callers wait.
///
/// Buffers go back to a free list by size when they are dropped, so that in the steady state no I/O allocates. Idle memory stays
/// under the same bound: if free buffers of other sizes leave no room for a request, the pool releases them first.
///
/// A pool may lend memory beside that of another one ([`BufferPool::beside`]), up to its own bound, and keeps none: what it gives back is the
/// other one's, within that one's bound. So a disk's own bound costs memory only while the disk uses it.
#[derive(Clone)]
pub struct BufferPool {
    inner: Rc<Inner>,
}

struct Inner {
    limit: usize,
    /// Bytes in use, counted in whole classes.
    lent: Cell<usize>,
    /// It lends beside another pool.
    is_beside: bool,
    store: Rc<Store>,
}

/// The memory of a pool and of those beside it.
struct Store {
    /// Bytes that the pool has in use, and bytes that are idle, may be this together.
    limit: usize,
    /// Both are counted in whole classes; what pools beside have in use does not count.
    lent: Cell<usize>,
    idle: Cell<usize>,
    /// The pool uses the last ones, and pools beside the first ones. So memory that was registered for the one stays with it.
    free: RefCell<[VecDeque<Memory>; CLASSES]>,
    /// Registrations of memory that was released.
    retired: RefCell<Vec<u16>>,
}

/// Memory of one buffer, and its registration, if it has one.
#[derive(Clone, Copy)]
struct Memory {
    start: NonNull<u8>,
    registration: Option<u16>,
}

impl BufferPool {
    /// A pool of at most `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> BufferPool {
        let store = Store {
            limit,
            lent: Cell::new(0),
            idle: Cell::new(0),
            free: RefCell::new(std::array::from_fn(|_| VecDeque::new())),
            retired: RefCell::default(),
        };
        BufferPool::of(Rc::new(store), limit, false)
    }

    /// A pool of at most `limit` bytes, whatever this one lends. Its idle memory is this one's.
    #[must_use]
    pub fn beside(&self, limit: usize) -> BufferPool {
        BufferPool::of(Rc::clone(&self.inner.store), limit, true)
    }

    fn of(store: Rc<Store>, limit: usize, is_beside: bool) -> BufferPool {
        BufferPool { inner: Rc::new(Inner { limit, lent: Cell::new(0), is_beside, store }) }
    }

    /// A buffer of `length` bytes (1 to [`LARGEST`]) with unspecified content, or `None` when the pool has
    /// reached its bound.
    #[must_use]
    pub fn take(&self, length: usize) -> Option<Buffer> {
        let class = class_of(length)?;
        let size = ALIGNMENT << class;
        if !self.has_room(length) {
            return None;
        }
        let inner = &self.inner;
        let Memory { start, registration } = inner.store.lend(class, inner.is_beside);
        inner.lent.set(inner.lent.get() + size);
        Some(Buffer { start, length, class, registration: Cell::new(registration), pool: Rc::clone(inner) })
    }

    /// Whether `buffer` is of this pool, or of one beside it.
    pub(crate) fn has(&self, buffer: &Buffer) -> bool {
        Rc::ptr_eq(&self.inner.store, &buffer.pool.store)
    }

    /// Takes the registrations of memory that was released: they are in use no more.
    pub(crate) fn take_retired(&self) -> Vec<u16> {
        self.inner.store.retired.take()
    }

    /// Whether [`BufferPool::take`] would succeed now.
    #[must_use]
    pub fn has_room(&self, length: usize) -> bool {
        class_of(length).is_some_and(|class| self.inner.lent.get() + (ALIGNMENT << class) <= self.inner.limit)
    }

    /// Bytes of this pool in use.
    #[must_use]
    pub fn lent(&self) -> usize {
        self.inner.lent.get()
    }

    /// The bound, in bytes.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.inner.limit
    }
}

impl Store {
    fn lend(&self, class: usize, is_beside: bool) -> Memory {
        let size = ALIGNMENT << class;
        let recycled = {
            let free = &mut self.free.borrow_mut()[class];
            if is_beside { free.pop_front() } else { free.pop_back() }
        };
        match recycled {
            Some(_) => self.idle.set(self.idle.get() - size),
            None if is_beside => {}
            None => self.make_room_for(size),
        }
        if !is_beside {
            self.lent.set(self.lent.get() + size);
        }
        recycled.unwrap_or_else(|| Memory { start: allocate(class), registration: None })
    }

    fn take_back(&self, memory: Memory, class: usize, is_beside: bool) {
        let size = ALIGNMENT << class;
        if !is_beside {
            self.lent.set(self.lent.get() - size);
        }
        if !self.has_room(size) {
            self.retired.borrow_mut().extend(memory.registration);
            return release(memory.start, class);
        }
        self.idle.set(self.idle.get() + size);
        let free = &mut self.free.borrow_mut()[class];
        if is_beside { free.push_front(memory) } else { free.push_back(memory) }
    }

    fn has_room(&self, size: usize) -> bool {
        self.lent.get() + self.idle.get() + size <= self.limit
    }

    /// Releases idle buffers until `size` more bytes fit under the limit, or none is left.
    fn make_room_for(&self, size: usize) {
        let mut free = self.free.borrow_mut();
        for class in (0..CLASSES).rev() {
            while !self.has_room(size) {
                let Some(Memory { start, registration }) = free[class].pop_front() else { break };
                self.idle.set(self.idle.get() - (ALIGNMENT << class));
                self.retired.borrow_mut().extend(registration);
                release(start, class);
            }
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        for (class, list) in self.free.get_mut().iter_mut().enumerate() {
            for memory in list.drain(..) {
                release(memory.start, class);
            }
        }
    }
}

fn class_of(length: usize) -> Option<usize> {
    if length == 0 || length > LARGEST {
        return None;
    }
    Some(length.div_ceil(ALIGNMENT).next_power_of_two().ilog2() as usize)
}

fn layout(class: usize) -> Layout {
    Layout::from_size_align(ALIGNMENT << class, ALIGNMENT)
        .expect("a power of two below 32 MiB is a valid layout")
}

fn allocate(class: usize) -> NonNull<u8> {
    let layout = layout(class);
    // SAFETY: the layout's size is not zero.
    let start = unsafe { alloc_zeroed(layout) };
    NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout))
}

fn release(start: NonNull<u8>, class: usize) {
    // SAFETY: allocated by `allocate` with the same class; each address has exactly one holder.
    unsafe { dealloc(start.as_ptr(), layout(class)) };
}

/// Bytes aligned for direct I/O, owned by one holder at a time. Goes back to its pool when dropped.
pub struct Buffer {
    start: NonNull<u8>,
    length: usize,
    class: usize,
    /// The number under which the shard's ring knows the memory: it stays with the memory until that is released.
    registration: Cell<Option<u16>>,
    pool: Rc<Inner>,
}

impl Buffer {
    /// Length in bytes, as requested.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Never true for a buffer from a pool.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Shortens the buffer without releasing memory.
    ///
    /// # Panics
    /// When `length` exceeds the buffer's length.
    pub fn truncate(&mut self, length: usize) {
        assert!(length <= self.length, "a buffer cannot grow");
        self.length = length;
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `length` initialised bytes (zeroed at allocation) owned by this buffer.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    /// The bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes this holder the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }

    /// The number under which the shard's ring knows its memory.
    pub(crate) fn registration(&self) -> Option<u16> {
        self.registration.get()
    }

    /// The shard's ring knows its memory under this number from now on.
    pub(crate) fn set_registration(&self, number: u16) {
        self.registration.set(Some(number));
    }

    /// All of its memory, which may be more than its length.
    pub(crate) fn memory(&self) -> libc::iovec {
        libc::iovec { iov_base: self.start.as_ptr().cast(), iov_len: ALIGNMENT << self.class }
    }

    /// The address of the first byte, for the reactor.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let size = ALIGNMENT << self.class;
        self.pool.lent.set(self.pool.lent.get() - size);
        let memory = Memory { start: self.start, registration: self.registration.get() };
        self.pool.store.take_back(memory, self.class, self.pool.is_beside);
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_come_back() {
        let pool = BufferPool::new(64 << 10);
        let first = pool.take(5000).expect("fits");
        assert_eq!(first.len(), 5000);
        assert_eq!(first.as_ptr() as usize % ALIGNMENT, 0);
        assert_eq!(pool.lent(), 8192);
        let address = first.as_ptr();
        drop(first);
        assert_eq!(pool.lent(), 0);
        assert_eq!(pool.take(8192).expect("fits").as_ptr(), address, "recycled, not allocated again");
    }

    #[test]
    fn a_registration_stays_with_the_memory_until_that_is_released() {
        let pool = BufferPool::new(8 << 10);
        let first = pool.take(4096).expect("fits");
        first.set_registration(7);
        drop(first);
        let again = pool.take(100).expect("fits");
        assert_eq!((again.registration(), pool.has(&again)), (Some(7), true));
        drop(again);
        let larger = pool.take(8192).expect("fits");
        assert_eq!((larger.registration(), pool.take_retired()), (None, vec![7]));
        assert!(pool.take_retired().is_empty() && !BufferPool::new(4096).has(&larger));
    }

    #[test]
    fn a_pool_beside_another_lends_up_to_its_bound_and_keeps_nothing() {
        let shard = BufferPool::new(16 << 10);
        let disks: Vec<BufferPool> = (0..3).map(|_| shard.beside(16 << 10)).collect();
        let take_all = |pool: &BufferPool| (0..4).map(|_| pool.take(4096).expect("fits")).collect::<Vec<_>>();
        let idle = || shard.inner.store.idle.get();
        let mine = take_all(&shard);
        mine.iter().for_each(|one| one.set_registration(7));
        let lent: Vec<Vec<Buffer>> = disks.iter().map(take_all).collect();
        assert!(shard.take(1).is_none() && disks[0].take(1).is_none(), "each has its own bound");
        assert_eq!((shard.lent(), disks[0].lent()), (16 << 10, 16 << 10));
        drop(lent);
        assert_eq!(idle(), 0, "the shard has its bound in use");
        drop(mine);
        assert_eq!((idle(), shard.lent(), disks[2].lent()), (16 << 10, 0, 0), "whatever the disks lend");
        let two = [shard.take(1).expect("fits"), shard.take(1).expect("fits")];
        let first = disks[1].take(4096).expect("fits");
        drop(two);
        assert!(shard.has(&first) && idle() == 12 << 10, "one uses what another has given back");
        drop(first);
        assert_eq!(shard.take(16 << 10).map(|all| all.registration()), Some(None));
        assert_eq!((idle(), shard.take_retired()), (16 << 10, vec![7; 4]));
        let (held, other) = (disks[1].take(4096), disks[2].take(4096));
        drop((shard, disks));
        drop((held, other));
    }

    #[test]
    fn memory_of_a_pool_stays_with_it_while_one_beside_it_has_its_own() {
        let shard = BufferPool::new(16 << 10);
        let disk = shard.beside(16 << 10);
        let (mine, other) = (shard.take(1).expect("fits"), disk.take(1).expect("fits"));
        mine.set_registration(7);
        drop((mine, other));
        for _ in 0..3 {
            let (other, mine) = (disk.take(1).expect("fits"), shard.take(1).expect("fits"));
            assert_eq!((mine.registration(), other.registration()), (Some(7), None));
        }
    }

    #[test]
    fn the_bound_holds_and_idle_memory_makes_room() {
        let pool = BufferPool::new(16 << 10);
        let held: Vec<_> = (0..4).map(|_| pool.take(4096).expect("fits")).collect();
        assert!(pool.take(1).is_none());
        assert!(!pool.has_room(1));
        drop(held);
        assert!(pool.take(16 << 10).is_some(), "four idle pages are released for one larger buffer");
        assert!(pool.take(0).is_none());
        assert!(pool.take(LARGEST + 1).is_none());
    }
}
