//! One shard, one thread, one ring.
//!
//! The reactor owns every buffer that the kernel works on until the kernel has given it back; callers get
//! it with the [`Event`]. Nothing here is a future, so nothing can be dropped while an operation runs.
//! Everything started since the last [`Reactor::wait`] goes to the kernel in one call, together with the
//! wait itself.
//!
//! Three engines stand behind it: io_uring; epoll with a few threads for file I/O where io_uring is
//! switched off (`kernel.io_uring_disabled`, seccomp in containers); and virtual time with simulated sockets and files
//! ([`crate::sim`]).

mod epoll;
mod slot;
mod uring;
mod waker;

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use slab::Slab;

use crate::buffer::{Buffer, BufferPool};
use crate::clock::{Clock, Nanos};
use crate::region::Region;
use crate::sim;
use slot::Slot;
pub(crate) use slot::{FileKind, FileOperation};
pub use waker::Waker;

/// Who on the shard an event is for: a layer, a connection, a peer. Given out by [`Reactor::new_owner`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerId(pub u32);

/// Names an operation: its owner and the owner's own number for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    /// Who gets the event.
    pub owner: OwnerId,
    /// The owner's own number, meaningless to the reactor.
    pub slot: u32,
}

/// What to wait for on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Interest {
    /// Something to read, or the end of the stream.
    Read,
    /// Room to send.
    Write,
}

/// A watch that has not fired yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchId {
    key: usize,
    /// Told apart from later users of the same slot.
    serial: u64,
}

/// A file that operations in flight keep open.
#[derive(Clone, Debug)]
pub struct SharedFile(Arc<Descriptor>);

impl SharedFile {
    /// Shares `file` on this shard.
    #[must_use]
    pub fn new(file: File) -> SharedFile {
        SharedFile::of(Descriptor { number: file.as_raw_fd(), file: Some(file), aside: false })
    }

    /// As [`SharedFile::new`], for a file on a filesystem that may have any call wait for its storage, also those that are
    /// begun in the ring, or closing it (FUSE, NFS). Threads of their own begin its operations, and close it once everybody
    /// has let go of it.
    #[must_use]
    pub fn aside(file: File) -> SharedFile {
        SharedFile::of(Descriptor { number: file.as_raw_fd(), file: Some(file), aside: true })
    }

    /// Whether calls on it may wait, even to be begun.
    pub(crate) fn is_aside(&self) -> bool {
        self.0.aside
    }

    pub(crate) fn simulated(number: i32) -> SharedFile {
        SharedFile::of(Descriptor { number, file: None, aside: false })
    }

    fn of(descriptor: Descriptor) -> SharedFile {
        SharedFile(Arc::new(descriptor))
    }

    /// The descriptor, for calls that do not block; of a simulated file its number.
    #[must_use]
    pub fn as_raw_fd(&self) -> RawFd {
        self.0.number
    }

    /// The descriptor, for calls on a thread that may wait.
    #[must_use]
    pub fn share(&self) -> Arc<Descriptor> {
        Arc::clone(&self.0)
    }
}

/// The descriptor of a [`SharedFile`].
#[derive(Debug)]
pub struct Descriptor {
    number: RawFd,
    /// None if simulated.
    file: Option<File>,
    aside: bool,
}

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.number
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let file = self.file.take();
        if self.aside {
            // Without a thread it is closed here: what was moved into the closure is dropped with it.
            let _ = std::thread::Builder::new().name("weir-close".into()).spawn(move || drop(file));
        }
    }
}

/// Where the bytes of a file write come from.
#[derive(Debug)]
pub enum WriteSource {
    /// One buffer, written whole; comes back with the event.
    Buffer(Buffer),
    /// Pieces of a region (offset, length), written one after the other as one extent of the file.
    /// The owner must not change them before the event.
    Gather(Rc<Region>, Vec<(usize, usize)>),
    /// A buffer, which comes back with the event, and behind it pieces of a region as in [`WriteSource::Gather`].
    Framed(Buffer, Rc<Region>, Vec<(usize, usize)>),
}

impl WriteSource {
    /// Where the bytes are, one piece after the other.
    pub fn vectors(&self) -> impl Iterator<Item = libc::iovec> {
        let (buffer, gathered) = match self {
            WriteSource::Buffer(buffer) => (Some(buffer), None),
            WriteSource::Gather(region, pieces) => (None, Some((region, pieces))),
            WriteSource::Framed(buffer, region, pieces) => (Some(buffer), Some((region, pieces))),
        };
        let whole = |buffer: &Buffer| libc::iovec { iov_base: buffer.as_ptr().cast(), iov_len: buffer.len() };
        let pieces = gathered.into_iter().flat_map(|(region, pieces)| {
            pieces.iter().map(|&(start, length)| libc::iovec {
                iov_base: region.address(start, length).cast(),
                iov_len: length,
            })
        });
        buffer.map(whole).into_iter().chain(pieces)
    }
}

/// Something happened that an owner asked for.
#[derive(Debug)]
pub struct Event {
    /// Whom and what it is for.
    pub token: Token,
    /// What happened.
    pub action: Action,
}

/// What happened.
#[derive(Debug)]
pub enum Action {
    /// A watched descriptor is ready. The watch is used up.
    Ready(Interest),
    /// A file operation ended.
    File {
        /// Bytes moved (0 for sync and allocate), or the kernel's error number. A write is never short; a read is
        /// short only at the end of the file.
        result: Result<u64, i32>,
        /// The buffer that was read into or written from.
        buffer: Option<Buffer>,
    },
}

/// Which engine to use.
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
    /// Most bytes of buffers that the shard may hold.
    pub buffer_limit: usize,
    /// Which engine.
    pub engine: Engine,
    /// Longest time that the reactor looks for the next event before it sleeps, after one that came within this
    /// time; zero: never. Waking a processor that sleeps takes about as long.
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

enum Driver {
    Uring(uring::Uring),
    Epoll(epoll::Epoll),
    Sim(sim::Engine),
}

/// The shard's loop to the kernel.
pub struct Reactor {
    /// Before `slots`: dropping it ends all operations, after which their buffers may go.
    driver: Driver,
    clock: Clock,
    slots: Slab<Slot>,
    buffers: BufferPool,
    waker: Arc<Waker>,
    next_owner: u32,
    next_serial: u64,
    files_in_flight: usize,
    /// Finished (slot, result) pairs of the last wait.
    finished: Vec<(usize, i32)>,
    spare_vectors: Vec<Vec<libc::iovec>>,
    /// Until when writes of some owners may be begun; see [`Reactor::guard`].
    guards: Vec<(OwnerId, Weak<AtomicU64>)>,
    poll: Duration,
    /// The last wait was a short one.
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

    /// Reads the shard's clock. Nothing is kept from one call to the next: who asks late gets a late answer.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// The shard's clock, for those who are asked without the reactor at hand.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.clock.clone()
    }

    /// The shard's buffers.
    #[must_use]
    pub fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    /// A handle with which other threads end this reactor's wait.
    #[must_use]
    pub fn waker(&self) -> Arc<Waker> {
        Arc::clone(&self.waker)
    }

    /// A fresh owner number; never given out twice.
    pub fn new_owner(&mut self) -> OwnerId {
        self.next_owner += 1;
        OwnerId(self.next_owner)
    }

    /// Of a write of this owner's that was short, the rest is begun before `until` only, in nanoseconds of the shard's clock, and
    /// while somebody keeps that; after it the write fails. Who looked at its right before it wrote does not do so again for the rest,
    /// and the process may have stood still meanwhile (P4).
    pub fn guard(&mut self, owner: OwnerId, until: &Arc<AtomicU64>) {
        self.guards.retain(|(_, until)| until.strong_count() > 0);
        self.guards.push((owner, Arc::downgrade(until)));
    }

    /// File operations that the kernel has not finished.
    #[must_use]
    pub fn files_in_flight(&self) -> usize {
        self.files_in_flight
    }

    /// Asks for one [`Action::Ready`] when `fd` is ready. The descriptor must stay open until the event or
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

    /// Takes a watch back. Its event will not arrive, unless [`Reactor::wait`] has returned it already.
    pub fn unwatch(&mut self, watch: WatchId) {
        let Some(slot) = self.slots.get_mut(watch.key) else { return };
        let Slot::Watch { serial, fd, interest, .. } = *slot else { return };
        if serial != watch.serial {
            return;
        }
        match &mut self.driver {
            Driver::Uring(uring) => {
                // The kernel still answers for the watch; until then the slot must not be used again.
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
        self.start(FileOperation {
            token,
            file: file.clone(),
            kind: FileKind::Read,
            offset,
            vectors,
            first: 0,
            moved: 0,
            buffer: Some(buffer),
            region: None,
        });
    }

    /// Writes all of `source` at `offset`.
    pub fn write(&mut self, file: &SharedFile, offset: u64, source: WriteSource, token: Token) {
        self.start_write(file, offset, source, false, token);
    }

    /// Writes all of `source` at `offset`; at the event it is on stable storage (`RWF_DSYNC`, which a device with
    /// forced unit access does without emptying its whole cache).
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
        let (buffer, region) = match source {
            WriteSource::Buffer(buffer) => (Some(buffer), None),
            WriteSource::Gather(region, _) => (None, Some(region)),
            WriteSource::Framed(buffer, region, _) => (Some(buffer), Some(region)),
        };
        self.start(FileOperation {
            token,
            file: file.clone(),
            kind: FileKind::Write { durable },
            offset,
            vectors,
            first: 0,
            moved: 0,
            buffer,
            region,
        });
    }

    /// `fdatasync`: everything written and finished before is on stable storage at the event.
    pub fn sync(&mut self, file: &SharedFile, token: Token) {
        self.start(FileOperation::without_data(token, file, FileKind::Sync, 0));
    }

    /// `fallocate` with the given mode bits.
    pub fn allocate(&mut self, file: &SharedFile, mode: i32, offset: u64, length: u64, token: Token) {
        self.start(FileOperation::without_data(token, file, FileKind::Allocate { mode, length }, offset));
    }

    /// Hands everything started to the kernel and waits until something happened, another thread woke this one,
    /// or `deadline` has passed (a deadline in the past polls). Appends what happened to `events`.
    ///
    /// # Errors
    /// The ring or the epoll instance is broken; the shard cannot go on.
    pub fn wait(&mut self, deadline: Nanos, events: &mut Vec<Event>) -> io::Result<()> {
        if let Driver::Sim(_) = self.driver {
            return self.sleep(deadline, events);
        }
        let began = self.now();
        if self.busy
            && deadline > began
            && let Driver::Uring(uring) = &mut self.driver
        {
            let waker = &self.waker;
            uring.poll(deadline.min(began + self.poll), || waker.is_notified())?;
        }
        let before = events.len();
        let waited = self.sleep(deadline, events);
        // Sleeping and being woken costs more than so short a wait; after a longer one, sleeping is right.
        self.busy = events.len() > before && self.now() - began <= self.poll;
        waited
    }

    fn sleep(&mut self, deadline: Nanos, events: &mut Vec<Event>) -> io::Result<()> {
        // The engines wait for a length of time, which does not count a suspend: whoever wakes from one looks at its clock late.
        let timeout = match deadline {
            Nanos::NEVER => None,
            // Here nothing waits for a length of time, and a look at the clock may take long.
            _ if matches!(self.driver, Driver::Sim(_)) => None,
            deadline => Some(deadline - self.now()),
        };
        let sleeps = self.waker.prepare_to_sleep();
        let timeout = if sleeps { timeout } else { Some(Duration::ZERO) };
        let mut finished = std::mem::take(&mut self.finished);
        let waited = match &mut self.driver {
            Driver::Uring(uring) => uring.wait(timeout, &mut finished),
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
                if more && may_go_on(&self.guards, &self.clock, operation) {
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

    fn take_vector(&mut self) -> Vec<libc::iovec> {
        self.spare_vectors.pop().unwrap_or_default()
    }

    fn watch_waker(&mut self) {
        let key = self.slots.insert(Slot::Waker);
        let fd = self.waker.as_raw_fd();
        match &mut self.driver {
            Driver::Uring(uring) => uring.watch(key, fd, Interest::Read),
            Driver::Epoll(epoll) => epoll.watch(key, fd, Interest::Read),
            // Nobody but the thread itself wakes it.
            Driver::Sim(_) => drop(self.slots.remove(key)),
        }
    }
}

/// Whether the rest of an operation may be begun.
fn may_go_on(guards: &[(OwnerId, Weak<AtomicU64>)], clock: &Clock, operation: &FileOperation) -> bool {
    let guard = guards.iter().find(|(owner, _)| *owner == operation.token.owner);
    let Some((_, until)) = guard.filter(|_| operation.kind != FileKind::Read) else { return true };
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
    /// Waits for the file operations in flight: their buffers must not go before the kernel is done with them.
    fn drop(&mut self) {
        if let Driver::Sim(sim) = &self.driver {
            return sim.leave();
        }
        let mut events = Vec::new();
        while self.files_in_flight > 0 {
            if self.wait(Nanos::NEVER, &mut events).is_err() {
                // The ring is broken and the kernel may still write: leak rather than free under it.
                std::mem::forget(std::mem::take(&mut self.slots));
                return;
            }
            events.clear();
        }
    }
}
