//! Extent lookups on a thread per backing: `lseek` may block on the filesystem, and a shard must not block.
//!
//! The thread exists only while lookups arrive, so that a hung filesystem costs one thread per disk. A write that completed
//! before the lookup is in the file, so it is never reported as a hole (P7).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use weir_block::{Descriptor, Extent, Interest, OwnerId, Reactor, SharedFile, Token, WatchId};

use super::extents;

/// The slot of the watch for answers; requests never reach it.
const ANSWERS: u32 = u32::MAX - 1;

/// The thread ends after this long without a lookup.
const LINGER: Duration = Duration::from_secs(5);

/// A range to look up.
pub(super) struct Lookup {
    /// The request's slot.
    pub slot: u32,
    pub offset: u64,
    pub length: u64,
    pub logical_block: u64,
}

/// The request's slot and its extents, or the kernel's error number.
pub(super) type Answer = (u32, Result<Vec<Extent>, i32>);

/// The lookups of one backing; at most as many as its queue depth.
pub(super) struct Lookups {
    file: SharedFile,
    owner: OwnerId,
    shared: Option<Arc<Shared>>,
    /// Lookups whose answers were not collected yet.
    open: usize,
    watch: Option<WatchId>,
}

struct Shared {
    state: Mutex<State>,
    asked: Condvar,
    /// Wakes the shard.
    event: OwnedFd,
}

#[derive(Default)]
struct State {
    lookups: VecDeque<Lookup>,
    answers: Vec<Answer>,
    /// The thread is running.
    running: bool,
    /// The backing was dropped; the thread must end.
    over: bool,
}

impl Lookups {
    pub fn new(file: SharedFile, owner: OwnerId) -> Lookups {
        Lookups { file, owner, shared: None, open: 0, watch: None }
    }

    /// Starts a lookup. The answer is available after an event of the backing's owner ([`Lookups::take`]).
    ///
    /// # Errors
    /// The thread cannot start: the error number.
    pub fn ask(&mut self, reactor: &mut Reactor, lookup: Lookup) -> Result<(), i32> {
        self.begin(lookup).map_err(|error| error.raw_os_error().unwrap_or(libc::EAGAIN))?;
        self.open += 1;
        self.watch(reactor);
        Ok(())
    }

    fn begin(&mut self, lookup: Lookup) -> io::Result<()> {
        let shared = match &self.shared {
            Some(shared) => shared,
            None => self.shared.insert(Arc::new(Shared::new()?)),
        };
        let mut state = shared.lock();
        if !state.running {
            let (shared, file) = (Arc::clone(shared), self.file.share());
            let work = move || shared.work(&file);
            thread::Builder::new().name("weir-extents".into()).spawn(work)?;
            state.running = true;
        }
        state.lookups.push_back(lookup);
        shared.asked.notify_one();
        Ok(())
    }

    /// After an event: the answers that have arrived.
    pub fn take(&mut self, reactor: &mut Reactor) -> Vec<Answer> {
        let Some(shared) = &self.shared else { return Vec::new() };
        // The watch has fired. Reset the count first: a later answer wakes us again.
        self.watch = None;
        shared.reset();
        let answers = std::mem::take(&mut shared.lock().answers);
        self.open -= answers.len();
        self.watch(reactor);
        answers
    }

    fn watch(&mut self, reactor: &mut Reactor) {
        if let Some(shared) = &self.shared
            && self.open > 0
            && self.watch.is_none()
        {
            let token = Token { owner: self.owner, slot: ANSWERS };
            self.watch = Some(reactor.watch(shared.event.as_raw_fd(), Interest::Read, token));
        }
    }
}

impl Drop for Lookups {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.lock().over = true;
            shared.asked.notify_one();
        }
    }
}

impl Shared {
    fn new() -> io::Result<Shared> {
        // SAFETY: eventfd takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor without another owner.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Shared { state: Mutex::default(), asked: Condvar::new(), event })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread's main loop.
    fn work(&self, file: &Descriptor) {
        while let Some(Lookup { slot, offset, length, logical_block }) = self.next() {
            let found = extents::of_file(file.as_raw_fd(), offset, length, logical_block);
            self.lock().answers.push((slot, found));
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight readable bytes. It cannot fail: every event resets the count.
            unsafe { libc::write(self.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// Waits for a lookup; `None` when the thread must end.
    fn next(&self) -> Option<Lookup> {
        let idle = |state: &mut State| state.lookups.is_empty() && !state.over;
        let waited = self.asked.wait_timeout_while(self.lock(), LINGER, idle);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let lookup = if state.over { None } else { state.lookups.pop_front() };
        // A later lookup starts another thread.
        state.running = lookup.is_some();
        lookup
    }

    fn reset(&self) {
        let mut count = [0u8; 8];
        // SAFETY: eight writable bytes; the descriptor does not block.
        unsafe { libc::read(self.event.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}
