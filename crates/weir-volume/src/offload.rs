//! Work that may block, on a thread beside a shard: the shard asks, and collects the answers after an event.
//!
//! The thread exists only while there is work, so that hung storage costs one thread for each user.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use weir_block::{Interest, Reactor, Token, WatchId};

/// The thread ends after this long without work.
const LINGER: Duration = Duration::from_secs(5);

/// The work, and the answer if it panics.
type Work<A> = (Box<dyn FnOnce() -> A + Send>, A);

/// The work of one user, done one piece after the other, in order.
pub(crate) struct Offload<A> {
    /// The thread's name.
    name: &'static str,
    /// Of the events after which answers are there.
    token: Token,
    shared: Option<Arc<Shared<A>>>,
    /// Work whose answers were not collected yet.
    open: usize,
    watch: Option<WatchId>,
}

struct Shared<A> {
    state: Mutex<State<A>>,
    asked: Condvar,
    /// Wakes the shard.
    event: OwnedFd,
}

struct State<A> {
    work: VecDeque<Work<A>>,
    answers: Vec<A>,
    /// The thread is running.
    running: bool,
    /// The user is gone; the thread must end.
    over: bool,
}

impl<A: Send + 'static> Offload<A> {
    /// No thread yet. Events will carry `token`.
    pub fn new(name: &'static str, token: Token) -> Offload<A> {
        Offload { name, token, shared: None, open: 0, watch: None }
    }

    /// Begins a piece of work. Its answer is available after an event ([`Offload::take`]); `otherwise`, if it panics.
    ///
    /// # Errors
    /// The thread cannot start: the error number.
    pub fn ask(
        &mut self,
        reactor: &mut Reactor,
        work: impl FnOnce() -> A + Send + 'static,
        otherwise: A,
    ) -> Result<(), i32> {
        self.begin(reactor, (Box::new(work), otherwise))
            .map_err(|error| error.raw_os_error().unwrap_or(libc::EAGAIN))?;
        self.open += 1;
        self.watch(reactor);
        Ok(())
    }

    fn begin(&mut self, reactor: &mut Reactor, work: Work<A>) -> io::Result<()> {
        let shared = match &self.shared {
            Some(shared) => shared,
            None => self.shared.insert(Arc::new(Shared::new()?)),
        };
        let mut state = shared.lock();
        if reactor.is_simulated() {
            state.work.push_back(work);
            let shared = Arc::clone(shared);
            reactor.simulate(self.token, move || shared.run_next());
            return Ok(());
        }
        if !state.running {
            let shared = Arc::clone(shared);
            thread::Builder::new().name(self.name.into()).spawn(move || shared.run())?;
            state.running = true;
        }
        state.work.push_back(work);
        shared.asked.notify_one();
        Ok(())
    }

    /// Pieces of work whose answers were not collected yet.
    pub fn open(&self) -> usize {
        self.open
    }

    /// After an event: the answers that have arrived.
    pub fn take(&mut self, reactor: &mut Reactor) -> Vec<A> {
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
            && !reactor.is_simulated()
        {
            self.watch = Some(reactor.watch(shared.event.as_raw_fd(), Interest::Read, self.token));
        }
    }
}

impl<A> Drop for Offload<A> {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.lock().over = true;
            shared.asked.notify_one();
        }
    }
}

impl<A> Shared<A> {
    fn new() -> io::Result<Shared<A>> {
        // SAFETY: eventfd takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor without another owner.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        let state = State { work: VecDeque::new(), answers: Vec::new(), running: false, over: false };
        Ok(Shared { state: Mutex::new(state), asked: Condvar::new(), event })
    }

    fn lock(&self) -> MutexGuard<'_, State<A>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread's main loop.
    fn run(&self) {
        while let Some((work, otherwise)) = self.next() {
            // Whoever waits for it would wait for ever. The panic itself is in the log.
            let answer = catch_unwind(AssertUnwindSafe(work)).unwrap_or(otherwise);
            self.lock().answers.push(answer);
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight readable bytes. It cannot fail: every event resets the count.
            unsafe { libc::write(self.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// One piece of work, in a simulation: the world tells the shard.
    fn run_next(&self) {
        let next = self.lock().work.pop_front();
        let answer = next.map(|(work, _)| work());
        self.lock().answers.extend(answer);
    }

    /// Waits for work; `None` when the thread must end.
    fn next(&self) -> Option<Work<A>> {
        let idle = |state: &mut State<A>| state.work.is_empty() && !state.over;
        let waited = self.asked.wait_timeout_while(self.lock(), LINGER, idle);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let work = if state.over { None } else { state.work.pop_front() };
        // Later work starts another thread.
        state.running = work.is_some();
        work
    }

    fn reset(&self) {
        let mut count = [0u8; 8];
        // SAFETY: eight writable bytes; the descriptor does not block.
        unsafe { libc::read(self.event.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}
