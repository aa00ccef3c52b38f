//! The engine without io_uring: epoll for sockets, a few threads for files.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::clock::Nanos;
use crate::operation::{FileKind, FileOperation, Interest};

/// Initial number of threads for file I/O. Four keep a disk busy enough for a fallback.
const WORKERS: usize = 4;

/// Maximum number of threads for file I/O (P10): enough for calls that hang in storage and for the shard's other disks.
const MOST_WORKERS: usize = 512;

/// When calls wait and none has returned for this long, the running ones may hang: the engine then adds threads for the others.
const STUCK: Duration = Duration::from_millis(10);

/// Marks the descriptor that signals results of the workers.
const WORKERS_DONE: u64 = u64::MAX;

pub(super) struct Epoll {
    epoll: OwnedFd,
    /// Watches by descriptor: the slots that wait for read, for write and for the end.
    watches: HashMap<i32, [Option<usize>; 3]>,
    /// Registrations that `epoll_ctl` refused. Reported as ready, so that the next call returns the error.
    refused: Vec<usize>,
    jobs: Option<Sender<Job>>,
    queue: Arc<Mutex<Receiver<Job>>>,
    workers: Vec<JoinHandle<()>>,
    results: Arc<Results>,
    /// Calls whose results were not collected yet.
    in_flight: usize,
    /// Time at which a result was last collected, or a call started while none ran.
    moved: Nanos,
}

struct Results {
    event: OwnedFd,
    list: Mutex<Vec<(usize, i32)>>,
}

/// A file operation as a worker sees it. The reactor's slot keeps file and memory until the result is collected.
struct Job {
    key: usize,
    fd: i32,
    kind: FileKind,
    offset: u64,
    vectors: *const libc::iovec,
    count: i32,
}

// SAFETY: the pointers lead to memory owned by a slot that is not touched or freed until the worker has
// reported the result, and `Epoll::drop` joins the workers.
unsafe impl Send for Job {}

impl Epoll {
    pub fn new() -> io::Result<Epoll> {
        // SAFETY: no pointers.
        let epoll = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: no pointers.
        let event = owned(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })?;
        let mut registration = libc::epoll_event { events: libc::EPOLLIN as u32, u64: WORKERS_DONE };
        // SAFETY: both descriptors are open, `registration` is valid.
        let added = unsafe {
            libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, event.as_raw_fd(), &raw mut registration)
        };
        if added < 0 {
            return Err(io::Error::last_os_error());
        }
        let results = Arc::new(Results { event, list: Mutex::new(Vec::new()) });
        let (jobs, queue) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let mut epoll = Epoll {
            epoll,
            watches: HashMap::new(),
            refused: Vec::new(),
            jobs: Some(jobs),
            queue,
            workers: Vec::new(),
            results,
            in_flight: 0,
            moved: Nanos(0),
        };
        for _ in 0..WORKERS {
            epoll.add_worker()?;
        }
        Ok(epoll)
    }

    /// Starts one more worker.
    fn add_worker(&mut self) -> io::Result<()> {
        let (queue, results) = (Arc::clone(&self.queue), Arc::clone(&self.results));
        let work = move || work(&queue, &results);
        self.workers.push(std::thread::Builder::new().name("weir-file".into()).spawn(work)?);
        Ok(())
    }

    /// Whether calls wait for a worker and the limit allows one more.
    fn is_short(&self) -> bool {
        self.in_flight > self.workers.len() && self.workers.len() < MOST_WORKERS
    }

    /// Adds workers when running calls hang: calls of other disks must not wait for a hung storage.
    fn relieve(&mut self) {
        if !self.is_short() || Nanos::now() < self.moved + STUCK {
            return;
        }
        while self.is_short() && self.add_worker().is_ok() {}
    }

    pub fn watch(&mut self, key: usize, fd: i32, interest: Interest) {
        self.watches.entry(fd).or_default()[side(interest)] = Some(key);
        if self.register(fd).is_err() {
            self.watches.remove(&fd);
            self.refused.push(key);
        }
    }

    pub fn unwatch(&mut self, fd: i32, interest: Interest) {
        if let Some(waiting) = self.watches.get_mut(&fd) {
            waiting[side(interest)] = None;
            // Fails only when the descriptor is closed already, and then epoll has removed it already.
            let _ = self.register(fd);
        }
    }

    /// Registers the watches of `fd` with the kernel, one-shot.
    fn register(&mut self, fd: i32) -> io::Result<()> {
        let waiting = self.watches.get(&fd).copied().unwrap_or_default();
        let mut events = libc::EPOLLONESHOT as u32;
        if waiting[0].is_some() {
            events |= (libc::EPOLLIN | libc::EPOLLRDHUP) as u32;
        }
        if waiting[1].is_some() {
            events |= libc::EPOLLOUT as u32;
        }
        // The kernel always reports the end of both directions.
        let operation = if waiting == [None; 3] {
            self.watches.remove(&fd);
            libc::EPOLL_CTL_DEL
        } else {
            libc::EPOLL_CTL_MOD
        };
        let mut registration = libc::epoll_event { events, u64: fd as u64 };
        let epoll = self.epoll.as_raw_fd();
        // SAFETY: `registration` is valid; the kernel checks the descriptor.
        let mut result = unsafe { libc::epoll_ctl(epoll, operation, fd, &raw mut registration) };
        if result < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOENT) {
            if operation == libc::EPOLL_CTL_DEL {
                return Ok(());
            }
            // SAFETY: as above.
            result = unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut registration) };
        }
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    pub fn start(&mut self, key: usize, operation: &FileOperation) {
        let rest = operation.rest();
        let job = Job {
            key,
            fd: operation.file.as_raw_fd(),
            kind: operation.kind,
            offset: operation.offset,
            vectors: rest.as_ptr(),
            count: rest.len().min(libc::UIO_MAXIOV as usize) as i32,
        };
        if self.in_flight == 0 {
            self.moved = Nanos::now();
        }
        self.in_flight += 1;
        let jobs = self.jobs.as_ref().expect("present until drop");
        assert!(jobs.send(job).is_ok(), "the workers live as long as the engine");
    }

    pub fn wait(&mut self, timeout: Option<Duration>, finished: &mut Vec<(usize, i32)>) -> io::Result<()> {
        self.relieve();
        let timeout = if self.is_short() { Some(timeout.unwrap_or(STUCK).min(STUCK)) } else { timeout };
        let mut ready = [libc::epoll_event { events: 0, u64: 0 }; 128];
        let milliseconds = match timeout {
            _ if !self.refused.is_empty() => 0,
            None => -1,
            Some(timeout) => i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX),
        };
        // SAFETY: `ready` has room for the count given.
        let count = unsafe {
            libc::epoll_wait(self.epoll.as_raw_fd(), ready.as_mut_ptr(), ready.len() as i32, milliseconds)
        };
        if count < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
        }
        finished.extend(self.refused.drain(..).map(|key| (key, 0)));
        for event in &ready[..count as usize] {
            let (events, data) = (event.events, event.u64);
            if data == WORKERS_DONE {
                self.take_results(finished);
            } else {
                self.take_ready(data as i32, events, finished);
            }
        }
        Ok(())
    }

    fn take_results(&mut self, finished: &mut Vec<(usize, i32)>) {
        let mut count = [0u8; 8];
        // SAFETY: eight writable bytes, non-blocking descriptor.
        unsafe { libc::read(self.results.event.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        let mut list = self.results.list.lock().expect("workers do not panic while they hold the list");
        self.in_flight -= list.len();
        self.moved = Nanos::now();
        finished.append(&mut list);
    }

    fn take_ready(&mut self, fd: i32, events: u32, finished: &mut Vec<(usize, i32)>) {
        let Some(waiting) = self.watches.get_mut(&fd) else { return };
        let broken = events & (libc::EPOLLERR | libc::EPOLLHUP) as u32 != 0;
        let readable = events & (libc::EPOLLIN | libc::EPOLLRDHUP) as u32 != 0;
        let writable = events & libc::EPOLLOUT as u32 != 0;
        for (side, ready) in [(0, readable || broken), (1, writable || broken), (2, broken)] {
            if ready && let Some(key) = waiting[side].take() {
                finished.push((key, 0));
            }
        }
        // One-shot switched the descriptor off for all of them.
        let _ = self.register(fd);
    }
}

impl Drop for Epoll {
    fn drop(&mut self) {
        drop(self.jobs.take());
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn side(interest: Interest) -> usize {
    match interest {
        Interest::Read => 0,
        Interest::Write => 1,
        Interest::HangUp => 2,
    }
}

fn owned(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that the kernel has just made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn work(queue: &Mutex<Receiver<Job>>, results: &Results) {
    loop {
        let job = queue.lock().expect("workers do not panic while they hold the queue").recv();
        let Ok(job) = job else { return };
        let result = run(&job);
        results.list.lock().expect("workers do not panic while they hold the list").push((job.key, result));
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes.
        unsafe { libc::write(results.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

fn run(job: &Job) -> i32 {
    let offset = job.offset as i64;
    // SAFETY: see `Job`: descriptor and vectors are kept by the slot until the result is taken.
    let result = unsafe {
        match job.kind {
            FileKind::Read => libc::preadv(job.fd, job.vectors, job.count, offset),
            FileKind::Write { durable: false } => libc::pwritev(job.fd, job.vectors, job.count, offset),
            FileKind::Write { durable: true } => {
                libc::pwritev2(job.fd, job.vectors, job.count, offset, libc::RWF_DSYNC)
            }
            FileKind::Sync => libc::fdatasync(job.fd) as isize,
            FileKind::Allocate { mode, length } => {
                libc::fallocate(job.fd, mode, offset, length as i64) as isize
            }
        }
    };
    if result < 0 { -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) } else { result as i32 }
}
