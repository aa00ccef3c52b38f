//! One shard, one thread, one ring.
//!
//! The reactor owns every buffer of a kernel operation until the operation ends, and returns it with the [`Event`]. Nothing here
//! is a future, so nothing can be dropped while an operation runs. Everything started since the last [`Reactor::wait`] goes to
//! the kernel in one call, together with the wait itself (to a disk that waits for rotation: in several).
//!
//! It has three engines: io_uring; epoll with a few threads for file I/O where io_uring is disabled (`kernel.io_uring_disabled`,
//! seccomp in containers); and virtual time with simulated sockets and files ([`crate::sim`]).

mod epoll;
mod registered;
mod slot;
mod uring;
mod waker;

use std::cell::Cell;
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use slab::Slab;

use crate::buffer::{Buffer, BufferPool};
use crate::clock::{Clock, Nanos};
pub use crate::operation::{Descriptor, Interest, OwnerId, SharedFile, Token};
use crate::operation::{FileKind, FileOperation, Held};
use crate::region::Region;
use crate::sim;
use slot::Slot;
pub use waker::Waker;

/// A watch that has not fired yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchId {
    key: usize,
    /// Distinguishes this watch from later users of the same slot.
    serial: u64,
}

/// The source of a file write's bytes.
#[derive(Debug)]
pub enum WriteSource {
    /// One buffer, written whole; returned with the event.
    Buffer(Buffer),
    /// Pieces of a region (offset, length), written one after the other as one extent of the file.
    /// The owner must not change them before the event.
    Gather(Rc<Region>, Vec<(usize, usize)>),
    /// A part of a buffer that others use, too: its first byte, and its length. Nobody changes it before the event.
    Shared(Rc<Buffer>, usize, usize),
    /// A buffer, returned with the event, followed by pieces of a region as in [`WriteSource::Gather`].
    Framed(Buffer, Rc<Region>, Vec<(usize, usize)>),
}

impl WriteSource {
    /// `length` zeroes: as many times the region `zeroes`, which holds nothing else. A write takes at most 1,024 pieces (`IOV_MAX`).
    #[must_use]
    pub fn zeroes(zeroes: &Rc<Region>, length: u64) -> WriteSource {
        let piece = zeroes.len();
        let pieces = (0..length).step_by(piece).map(|at| (0, piece.min((length - at) as usize)));
        WriteSource::Gather(Rc::clone(zeroes), pieces.collect())
    }

    /// The pieces of memory, in order.
    pub fn vectors(&self) -> impl Iterator<Item = libc::iovec> {
        let whole = |buffer: &Buffer| vector(buffer.bytes());
        let (buffer, gathered) = match self {
            WriteSource::Buffer(buffer) => (Some(whole(buffer)), None),
            WriteSource::Shared(buffer, start, length) => {
                (Some(vector(&buffer.bytes()[*start..start + length])), None)
            }
            WriteSource::Gather(region, pieces) => (None, Some((region, pieces))),
            WriteSource::Framed(buffer, region, pieces) => (Some(whole(buffer)), Some((region, pieces))),
        };
        let pieces = gathered.into_iter().flat_map(|(region, pieces)| {
            pieces.iter().map(|&(start, length)| libc::iovec {
                iov_base: region.address(start, length).cast(),
                iov_len: length,
            })
        });
        buffer.into_iter().chain(pieces)
    }
}

/// Bytes that the kernel reads.
fn vector(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

/// The result of an owner's watch or operation.
#[derive(Debug)]
pub struct Event {
    /// Recipient and operation.
    pub token: Token,
    /// The event's kind and result.
    pub action: Action,
}

/// The event's kind and result.
#[derive(Debug)]
pub enum Action {
    /// A watched descriptor is ready. The watch has ended.
    Ready(Interest),
    /// A file operation ended.
    File {
        /// Bytes moved (0 for sync and allocate), or the kernel's error number. A write is never short; a read is
        /// short only at the end of the file.
        result: Result<u64, i32>,
        /// The buffer of the read or write.
        buffer: Option<Buffer>,
    },
}

/// The engine to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// io_uring where the kernel allows it, otherwise epoll.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// epoll and threads, always.
    Epoll,
}

/// Limits of a reactor (P10).
#[derive(Clone, Copy, Debug)]
pub struct ReactorConfig {
    /// Submission queue entries; a power of two.
    pub entries: u32,
    /// Limit of the shard's buffers, in bytes.
    pub buffer_limit: usize,
    /// The engine.
    pub engine: Engine,
    /// Longest time that the reactor busy-polls before it blocks, after an event that came within this time; zero: never. Waking
    /// an idle processor takes about as long.
    pub poll: Duration,
}

impl Default for ReactorConfig {
    fn default() -> ReactorConfig {
        ReactorConfig {
            entries: 512,
            buffer_limit: 256 << 20,
            engine: Engine::Auto,
            poll: Duration::from_micros(50),
        }
    }
}

/// A thread that computes keeps a yielded processor for its time slice of milliseconds; a peer that handles a request is
/// done far sooner.
const LONG_YIELD: Duration = Duration::from_micros(500);

/// After a long yield the reactor blocks for this long instead of polling. The scheduler prefers a thread that wakes to one
/// that computes; a thread that yields waits for the whole slice, at every request.
const POLL_BACK_OFF: Duration = Duration::from_millis(200);

#[expect(clippy::large_enum_variant, reason = "a reactor has one, and each request goes through it")]
enum Driver {
    Uring(uring::Uring),
    Epoll(epoll::Epoll),
    Sim(sim::Engine),
}

/// The shard's interface to the kernel.
pub struct Reactor {
    /// Declared before `slots`: dropping it ends all operations, and only then may their buffers be freed.
    driver: Driver,
    clock: Clock,
    /// See [`Reactor::recent`].
    recent: Cell<Nanos>,
    slots: Slab<Slot>,
    buffers: BufferPool,
    waker: Arc<Waker>,
    next_owner: u32,
    next_serial: u64,
    files_in_flight: usize,
    /// Finished (slot, result) pairs of the last wait.
    finished: Vec<(usize, i32)>,
    spare_vectors: Vec<Vec<libc::iovec>>,
    /// Deadlines for starting writes of some owners; see [`Reactor::guard`].
    guards: Vec<(OwnerId, Weak<AtomicU64>)>,
    poll: Duration,
    /// Time until which the reactor blocks without polling.
    polls_from: Nanos,
    /// The last wait was short.
    busy: bool,
}

impl Reactor {
    /// Makes a reactor for the calling thread. It must stay on that thread.
    ///
    /// # Errors
    /// The kernel refuses a ring (with [`Engine::Uring`]) or an epoll instance.
    pub fn new(config: ReactorConfig) -> io::Result<Reactor> {
        let driver = match config.engine {
            Engine::Uring => Driver::Uring(uring::Uring::new(config.entries)?),
            Engine::Epoll => Driver::Epoll(epoll::Epoll::new()?),
            Engine::Auto => match uring::Uring::new(config.entries) {
                Ok(uring) => Driver::Uring(uring),
                Err(_) => Driver::Epoll(epoll::Epoll::new()?),
            },
        };
        let mut reactor = Reactor::over(driver, Clock::Boot, config)?;
        reactor.watch_waker();
        Ok(reactor)
    }

    /// The reactor of a process in a simulated world.
    ///
    /// # Errors
    /// The system refuses the waker's descriptor.
    pub fn simulated(
        world: &sim::World,
        process: sim::ProcessId,
        clock: Rc<sim::VirtualClock>,
        config: ReactorConfig,
    ) -> io::Result<Reactor> {
        let engine = sim::Engine::new(world, process, Rc::clone(&clock));
        Reactor::over(Driver::Sim(engine), Clock::Virtual(clock), config)
    }

    fn over(driver: Driver, clock: Clock, config: ReactorConfig) -> io::Result<Reactor> {
        let waker = Arc::new(Waker::new()?);
        Ok(Reactor {
            driver,
            recent: Cell::new(clock.now()),
            clock,
            slots: Slab::new(),
            buffers: BufferPool::new(config.buffer_limit),
            waker,
            next_owner: 0,
            next_serial: 0,
            files_in_flight: 0,
            finished: Vec::new(),
            spare_vectors: Vec::new(),
            guards: Vec::new(),
            poll: config.poll,
            polls_from: Nanos(0),
            busy: false,
        })
    }

    /// `io_uring`, `epoll` or `sim`.
    #[must_use]
    pub fn engine_name(&self) -> &'static str {
        match self.driver {
            Driver::Uring(_) => "io_uring",
            Driver::Epoll(_) => "epoll",
            Driver::Sim(_) => "sim",
        }
    }

    /// Whether its time, connections and files are simulated.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        matches!(self.driver, Driver::Sim(_))
    }

    /// Simulates a thread beside the shard: runs `work` later, and sends an [`Action::Ready`] then. Only in a simulation: elsewhere it does
    /// nothing.
    pub fn simulate(&mut self, token: Token, work: impl FnOnce() + Send + 'static) {
        let Driver::Sim(sim) = &mut self.driver else { return };
        self.next_serial += 1;
        let watch = Slot::Watch { serial: self.next_serial, fd: -1, interest: Interest::Read, token };
        sim.work(self.slots.insert(watch), Box::new(work));
    }

    /// Reads the shard's clock. The result is not cached between calls, so a late call returns a late time.
    #[inline]
    pub fn now(&self) -> Nanos {
        let now = self.clock.now();
        self.recent.set(now);
        now
    }

    /// The last time that [`Reactor::now`] has read, at the latest when [`Reactor::wait`] returned. A read of the clock takes 25 to 40 ns: many for
    /// each request are a noticeable part of its cost. For meters, and for deadlines that may be noticed a little later; not for the right to
    /// serve, because the process may have stood still since (P2, P4).
    #[inline]
    #[must_use]
    pub fn recent(&self) -> Nanos {
        if let Clock::Virtual(clock) = &self.clock {
            // A simulated process may pause here as at a read, and does not notice it.
            let _ = clock.now();
        }
        self.recent.get()
    }

    /// The shard's clock, for code without access to the reactor.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.clock.clone()
    }

    /// The shard's buffers.
    #[must_use]
    pub fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    /// A handle that lets other threads end this reactor's wait.
    #[must_use]
    pub fn waker(&self) -> Arc<Waker> {
        Arc::clone(&self.waker)
    }

    /// A new owner number; never reused.
    pub fn new_owner(&mut self) -> OwnerId {
        self.next_owner += 1;
        OwnerId(self.next_owner)
    }

    /// Sets a deadline for the rest of this owner's short writes: after `until` (nanoseconds of the shard's clock), or once
    /// `until` is dropped, the rest is not started and the write fails. The owner checks its right only before it starts a write,
    /// and the process may have paused since (P4).
    pub fn guard(&mut self, owner: OwnerId, until: &Arc<AtomicU64>) {
        self.guards.retain(|(_, until)| until.strong_count() > 0);
        self.guards.push((owner, Arc::downgrade(until)));
    }

    /// Whether writes of this owner may begin; see [`Reactor::guard`].
    #[must_use]
    pub fn may_write(&self, owner: OwnerId) -> bool {
        has_right(&self.guards, &self.clock, owner)
    }

    /// File operations that the kernel has not finished.
    #[must_use]
    pub fn files_in_flight(&self) -> usize {
        self.files_in_flight
    }

    /// Requests one [`Action::Ready`] when `fd` is ready. The descriptor must stay open until the event or
    /// [`Reactor::unwatch`].
    pub fn watch(&mut self, fd: RawFd, interest: Interest, token: Token) -> WatchId {
        self.next_serial += 1;
        let serial = self.next_serial;
        let key = self.slots.insert(Slot::Watch { serial, fd, interest, token });
        match &mut self.driver {
            Driver::Uring(uring) => uring.watch(key, fd, interest),
            Driver::Epoll(epoll) => epoll.watch(key, fd, interest),
            Driver::Sim(sim) => sim.watch(key, fd, interest),
        }
        WatchId { key, serial }
    }

    /// Cancels a watch. Its event will not arrive, unless [`Reactor::wait`] has already returned it.
    pub fn unwatch(&mut self, watch: WatchId) {
        let Some(slot) = self.slots.get_mut(watch.key) else { return };
        let Slot::Watch { serial, fd, interest, .. } = *slot else { return };
        if serial != watch.serial {
            return;
        }
        match &mut self.driver {
            Driver::Uring(uring) => {
                // The kernel still completes the watch; until then the slot must not be reused.
                *slot = Slot::Abandoned;
                uring.unwatch(watch.key);
            }
            Driver::Epoll(epoll) => {
                epoll.unwatch(fd, interest);
                self.slots.remove(watch.key);
            }
            Driver::Sim(sim) => {
                sim.unwatch(watch.key, fd, interest);
                self.slots.remove(watch.key);
            }
        }
    }

    /// Reads into the whole of `buffer` from `offset`.
    pub fn read(&mut self, file: &SharedFile, offset: u64, buffer: Buffer, token: Token) {
        let mut vectors = self.take_vector();
        vectors.push(libc::iovec { iov_base: buffer.as_ptr().cast(), iov_len: buffer.len() });
        let registration = self.register(file, &buffer);
        self.start(FileOperation {
            token,
            file: file.clone(),
            kind: FileKind::Read,
            offset,
            vectors,
            first: 0,
            moved: 0,
            registration,
            buffer: Some(buffer),
            held: None,
        });
    }

    /// Writes all of `source` at `offset`.
    pub fn write(&mut self, file: &SharedFile, offset: u64, source: WriteSource, token: Token) {
        self.start_write(file, offset, source, false, token);
    }

    /// Writes all of `source` at `offset`; at the event it is durable (`RWF_DSYNC`; a device with forced unit access does not
    /// flush its whole cache for it).
    pub fn write_durable(&mut self, file: &SharedFile, offset: u64, source: WriteSource, token: Token) {
        self.start_write(file, offset, source, true, token);
    }

    fn start_write(
        &mut self,
        file: &SharedFile,
        offset: u64,
        source: WriteSource,
        durable: bool,
        token: Token,
    ) {
        let mut vectors = self.take_vector();
        vectors.extend(source.vectors());
        let registration = match &source {
            WriteSource::Buffer(buffer) => self.register(file, buffer),
            // From its first byte only: Linux 6.5 confuses some devices with the rest.
            WriteSource::Shared(buffer, 0, _) => self.register(file, buffer),
            WriteSource::Shared(..) | WriteSource::Gather(..) | WriteSource::Framed(..) => None,
        };
        let (buffer, held) = match source {
            WriteSource::Buffer(buffer) => (Some(buffer), None),
            WriteSource::Shared(buffer, ..) => (None, Some(Held::Buffer(buffer))),
            WriteSource::Gather(region, _) => (None, Some(Held::Region(region))),
            WriteSource::Framed(buffer, region, _) => (Some(buffer), Some(Held::Region(region))),
        };
        self.start(FileOperation {
            token,
            file: file.clone(),
            kind: FileKind::Write { durable },
            offset,
            vectors,
            first: 0,
            moved: 0,
            registration,
            buffer,
            held,
        });
    }

    /// `fdatasync`: at the event, all writes that completed before are durable.
    pub fn sync(&mut self, file: &SharedFile, token: Token) {
        self.start(FileOperation::without_data(token, file, FileKind::Sync, 0));
    }

    /// `fallocate` with the given mode bits.
    pub fn allocate(&mut self, file: &SharedFile, mode: i32, offset: u64, length: u64, token: Token) {
        self.start(FileOperation::without_data(token, file, FileKind::Allocate { mode, length }, offset));
    }

    /// Submits everything started to the kernel and waits for an event, a wake-up by another thread, or `deadline` (a deadline in
    /// the past polls). Appends the events to `events`.
    ///
    /// # Errors
    /// The ring or the epoll instance failed; the shard cannot continue.
    pub fn wait(&mut self, deadline: Nanos, events: &mut Vec<Event>) -> io::Result<()> {
        if let Driver::Sim(_) = self.driver {
            // Reading the simulated clock may take long.
            let waited = self.sleep(Nanos(0), deadline, events);
            self.now();
            return waited;
        }
        let began = self.now();
        let mut now = began;
        if self.busy
            && deadline > began
            && began >= self.polls_from
            && let Driver::Uring(uring) = &mut self.driver
        {
            let waker = &self.waker;
            let yielded = uring.poll(deadline.min(began + self.poll), || waker.is_notified())?;
            now = self.now();
            if yielded > LONG_YIELD {
                self.polls_from = now + POLL_BACK_OFF;
            }
        }
        let before = events.len();
        let waited = self.sleep(now, deadline, events);
        // Blocking and waking cost more than so short a wait; after a longer one, blocking is cheaper.
        self.busy = self.now() - began <= self.poll && events.len() > before;
        waited
    }

    fn sleep(&mut self, now: Nanos, deadline: Nanos, events: &mut Vec<Event>) -> io::Result<()> {
        // The engines wait for a duration, which excludes suspend: after a resume the shard reads its clock late.
        let timeout = match deadline {
            Nanos::NEVER => None,
            // The simulated engine waits for a point in time, and reading its clock may take long.
            _ if matches!(self.driver, Driver::Sim(_)) => None,
            deadline => Some(deadline - now),
        };
        let sleeps = self.waker.prepare_to_sleep();
        let timeout = if sleeps { timeout } else { Some(Duration::ZERO) };
        let mut finished = std::mem::take(&mut self.finished);
        if let Driver::Uring(uring) = &mut self.driver {
            uring.unregister(self.buffers.take_retired());
        }
        let waited = match &mut self.driver {
            Driver::Uring(uring) => uring.wait(now, timeout, &mut finished),
            Driver::Epoll(epoll) => epoll.wait(timeout, &mut finished),
            Driver::Sim(sim) => sim.wait(deadline, !sleeps, &mut finished),
        };
        self.waker.awake();
        for (key, result) in finished.drain(..) {
            self.finish(key, result, events);
        }
        self.finished = finished;
        waited
    }

    fn finish(&mut self, key: usize, result: i32, events: &mut Vec<Event>) {
        match &mut self.slots[key] {
            Slot::Abandoned => drop(self.slots.remove(key)),
            Slot::Waker => {
                self.slots.remove(key);
                self.waker.drain();
                self.watch_waker();
            }
            Slot::Watch { interest, token, .. } => {
                events.push(Event { token: *token, action: Action::Ready(*interest) });
                self.slots.remove(key);
            }
            Slot::File(operation) => {
                let more = operation.continues_after(result);
                if more && may_continue(&self.guards, &self.clock, operation) {
                    return self.driver.start(key, operation);
                }
                let Slot::File(mut operation) = self.slots.remove(key) else { unreachable!("matched above") };
                self.files_in_flight -= 1;
                let result = if more { Err(libc::ESTALE) } else { operation.outcome(result) };
                operation.vectors.clear();
                self.spare_vectors.push(operation.vectors);
                let action = Action::File { result, buffer: operation.buffer };
                events.push(Event { token: operation.token, action });
            }
        }
    }

    fn start(&mut self, operation: FileOperation) {
        self.files_in_flight += 1;
        let entry = self.slots.vacant_entry();
        let key = entry.key();
        if let Slot::File(operation) = entry.insert(Slot::File(operation)) {
            self.driver.start(key, operation);
        }
    }

    /// The registration of a buffer's memory with the ring; it gets one at its first use. Buffers of other pools have none.
    fn register(&mut self, file: &SharedFile, buffer: &Buffer) -> Option<u16> {
        let Driver::Uring(uring) = &mut self.driver else { return None };
        // A call that may block takes far longer than the lookup of its pages.
        if file.is_offloaded() || !self.buffers.has(buffer) {
            return None;
        }
        if buffer.registration().is_none() {
            uring.unregister(self.buffers.take_retired());
            uring.register(buffer);
        }
        buffer.registration()
    }

    fn take_vector(&mut self) -> Vec<libc::iovec> {
        self.spare_vectors.pop().unwrap_or_default()
    }

    fn watch_waker(&mut self) {
        let key = self.slots.insert(Slot::Waker);
        let fd = self.waker.as_raw_fd();
        match &mut self.driver {
            Driver::Uring(uring) => uring.watch(key, fd, Interest::Read),
            Driver::Epoll(epoll) => epoll.watch(key, fd, Interest::Read),
            // Only the thread itself wakes it.
            Driver::Sim(_) => drop(self.slots.remove(key)),
        }
    }
}

/// Whether the rest of an operation may start.
fn may_continue(guards: &[(OwnerId, Weak<AtomicU64>)], clock: &Clock, operation: &FileOperation) -> bool {
    operation.kind == FileKind::Read || has_right(guards, clock, operation.token.owner)
}

fn has_right(guards: &[(OwnerId, Weak<AtomicU64>)], clock: &Clock, owner: OwnerId) -> bool {
    let Some((_, until)) = guards.iter().find(|(other, _)| *other == owner) else { return true };
    until.upgrade().is_some_and(|until| clock.now().0 < until.load(Ordering::Acquire))
}

impl Driver {
    fn start(&mut self, key: usize, operation: &FileOperation) {
        match self {
            Driver::Uring(uring) => uring.start(key, operation),
            Driver::Epoll(epoll) => epoll.start(key, operation),
            Driver::Sim(sim) => sim.start(key, operation),
        }
    }
}

impl Drop for Reactor {
    /// Waits for the file operations in flight: their buffers must outlive the kernel's use of them.
    fn drop(&mut self) {
        if let Driver::Sim(sim) = &self.driver {
            return sim.leave();
        }
        let mut events = Vec::new();
        while self.files_in_flight > 0 {
            if self.wait(Nanos::NEVER, &mut events).is_err() {
                // The ring failed and the kernel may still write: leak the buffers rather than free them.
                std::mem::forget(std::mem::take(&mut self.slots));
                return;
            }
            events.clear();
        }
    }
}
