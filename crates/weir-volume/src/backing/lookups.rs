//! Extents of a file are looked up on a thread of the backing's own: `lseek` waits for the filesystem, and a shard must not.
//!
//! The thread exists only while somebody asks, so that a disk whose filesystem hangs costs one thread and no more. A write that
//! was answered before the question was asked is in the file by then, and is never reported as a hole (P7).

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

/// The thread ends when nobody has asked for this long.
const LINGER: Duration = Duration::from_secs(5);

/// What is to be looked up.
pub(super) struct Question {
    /// The request's slot.
    pub slot: u32,
    pub offset: u64,
    pub length: u64,
    pub logical_block: u64,
}

/// The request's slot and what was found, or the kernel's error number.
pub(super) type Answer = (u32, Result<Vec<Extent>, i32>);

/// The questions of one backing; no more of them than it takes requests.
pub(super) struct Lookups {
    file: SharedFile,
    owner: OwnerId,
    shared: Option<Arc<Shared>>,
    /// Questions whose answers were not taken yet.
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
    questions: VecDeque<Question>,
    answers: Vec<Answer>,
    /// There is a thread.
    running: bool,
    /// The backing is gone, and the thread is to go.
    over: bool,
}

impl Lookups {
    pub fn new(file: SharedFile, owner: OwnerId) -> Lookups {
        Lookups { file, owner, shared: None, open: 0, watch: None }
    }

    /// Has a question looked up. The answer is there after an event of the backing's owner ([`Lookups::take`]).
    ///
    /// # Errors
    /// No thread can be had: the error number.
    pub fn ask(&mut self, reactor: &mut Reactor, question: Question) -> Result<(), i32> {
        self.begin(question).map_err(|error| error.raw_os_error().unwrap_or(libc::EAGAIN))?;
        self.open += 1;
        self.watch(reactor);
        Ok(())
    }

    fn begin(&mut self, question: Question) -> io::Result<()> {
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
        state.questions.push_back(question);
        shared.asked.notify_one();
        Ok(())
    }

    /// After an event: the answers that have arrived.
    pub fn take(&mut self, reactor: &mut Reactor) -> Vec<Answer> {
        let Some(shared) = &self.shared else { return Vec::new() };
        // The watch is used up. The count first: what arrives after this wakes us again.
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
        // SAFETY: a fresh descriptor that nobody else owns.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Shared { state: Mutex::default(), asked: Condvar::new(), event })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread.
    fn work(&self, file: &Descriptor) {
        while let Some(Question { slot, offset, length, logical_block }) = self.next() {
            let found = extents::of_file(file.as_raw_fd(), offset, length, logical_block);
            self.lock().answers.push((slot, found));
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight readable bytes. It cannot fail: the count is reset with every event.
            unsafe { libc::write(self.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// Waits for a question; `None` when the thread is to end.
    fn next(&self) -> Option<Question> {
        let idle = |state: &mut State| state.questions.is_empty() && !state.over;
        let waited = self.asked.wait_timeout_while(self.lock(), LINGER, idle);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let question = if state.over { None } else { state.questions.pop_front() };
        // Whoever asks from here on starts another thread.
        state.running = question.is_some();
        question
    }

    fn reset(&self) {
        let mut count = [0u8; 8];
        // SAFETY: eight writable bytes; the descriptor does not block.
        unsafe { libc::read(self.event.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}
