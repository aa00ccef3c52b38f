//! Aligned buffers from a bounded pool.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::{Cell, RefCell};
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
/// Pools may have their idle memory in common ([`BufferPool::beside`]): each lends up to its own bound, and what one gives back the others use.
/// So a disk's own bound costs memory only while the disk uses it.
#[derive(Clone)]
pub struct BufferPool {
    inner: Rc<Inner>,
}

struct Inner {
    limit: usize,
    /// Bytes in use, counted in whole classes.
    lent: Cell<usize>,
    store: Rc<Store>,
}

/// The memory of one or more pools.
struct Store {
    /// Idle memory is released where it would be more than this together with that in use. Memory in use may be more.
    limit: usize,
    /// Bytes in use and bytes idle, both counted in whole classes.
    lent: Cell<usize>,
    idle: Cell<usize>,
    free: RefCell<[Vec<Memory>; CLASSES]>,
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
            free: RefCell::new(std::array::from_fn(|_| Vec::new())),
            retired: RefCell::default(),
        };
        BufferPool { inner: Rc::new(Inner { limit, lent: Cell::new(0), store: Rc::new(store) }) }
    }

    /// A pool of at most `limit` bytes, whatever this one lends. Their idle memory is in common, and bounded by this one's bound.
    #[must_use]
    pub fn beside(&self, limit: usize) -> BufferPool {
        let store = Rc::clone(&self.inner.store);
        BufferPool { inner: Rc::new(Inner { limit, lent: Cell::new(0), store }) }
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
        let Memory { start, registration } = inner.store.lend(class);
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
    fn lend(&self, class: usize) -> Memory {
        let size = ALIGNMENT << class;
        let recycled = self.free.borrow_mut()[class].pop();
        if recycled.is_some() {
            self.idle.set(self.idle.get() - size);
        } else {
            self.make_room_for(size);
        }
        self.lent.set(self.lent.get() + size);
        recycled.unwrap_or_else(|| Memory { start: allocate(class), registration: None })
    }

    fn take_back(&self, memory: Memory, class: usize) {
        let size = ALIGNMENT << class;
        self.lent.set(self.lent.get() - size);
        if self.has_room(size) {
            self.idle.set(self.idle.get() + size);
            self.free.borrow_mut()[class].push(memory);
        } else {
            self.retired.borrow_mut().extend(memory.registration);
            release(memory.start, class);
        }
    }

    fn has_room(&self, size: usize) -> bool {
        self.lent.get() + self.idle.get() + size <= self.limit
    }

    /// Releases idle buffers until `size` more bytes fit under the limit, or none is left.
    fn make_room_for(&self, size: usize) {
        let mut free = self.free.borrow_mut();
        for class in (0..CLASSES).rev() {
            while !self.has_room(size) {
                let Some(Memory { start, registration }) = free[class].pop() else { break };
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
        self.pool.store.take_back(memory, self.class);
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
    fn pools_beside_each_other_lend_up_to_their_bounds_and_keep_the_bound_of_one() {
        let first = BufferPool::new(16 << 10);
        let others: Vec<BufferPool> = (0..3).map(|_| first.beside(16 << 10)).collect();
        let take_all = |pool: &BufferPool| (0..4).map(|_| pool.take(4096).expect("fits")).collect::<Vec<_>>();
        let mine = take_all(&first);
        mine[0].set_registration(7);
        let lent: Vec<Vec<Buffer>> = others.iter().map(take_all).collect();
        assert!(first.take(1).is_none() && others[0].take(1).is_none(), "each has its own bound");
        assert_eq!((first.lent(), others[0].lent()), (16 << 10, 16 << 10));
        let idle = |pool: &BufferPool| pool.inner.store.idle.get();
        drop(mine);
        assert_eq!(
            (idle(&first), first.take_retired()),
            (0, vec![7]),
            "others have more in use than is kept"
        );
        drop(lent);
        assert_eq!((idle(&first), first.lent(), others[2].lent()), (16 << 10, 0, 0));
        let held = take_all(&others[1]);
        assert!(idle(&first) == 0 && first.has(&held[0]), "one uses what another has given back");
        drop((first, others));
        drop(held);
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
