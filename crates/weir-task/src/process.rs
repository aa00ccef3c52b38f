//! The tasks of one simulated process.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use weir_block::Nanos;
use weir_block::sim::SetTime;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Polls of a process's tasks at one point in time before they count as spinning.
const MOST_POLLS: usize = 20_000;

thread_local! {
    /// The process whose tasks this thread polls.
    static CURRENT: RefCell<Option<Arc<Shared>>> = const { RefCell::new(None) };
}

/// The process whose tasks this thread polls; none outside a simulation.
pub(crate) fn current() -> Option<Arc<Shared>> {
    CURRENT.with_borrow(Clone::clone)
}

/// The tasks of one simulated process. Dropping it cancels them at their current await, like a kill.
pub struct Process {
    shared: Arc<Shared>,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process").field("tasks", &self.shared.lock().tasks.len()).finish_non_exhaustive()
    }
}

pub(crate) struct Shared {
    state: Mutex<State>,
    /// Tasks to poll. Separate from `State`, because any thread may call a waker.
    ready: Arc<Ready>,
}

#[derive(Default)]
struct Ready(Mutex<BTreeSet<u64>>);

struct State {
    /// By number; `None` while it is being polled.
    tasks: BTreeMap<u64, Option<Task>>,
    last: u64,
    /// Timers by the process's clock.
    timers: BTreeMap<(Nanos, u64), Waker>,
    last_timer: u64,
    aborted: BTreeSet<u64>,
    random: u64,
}

impl Process {
    /// A process without tasks; `seed` decides the order in which tasks run.
    #[must_use]
    pub fn new(seed: u64) -> Process {
        let state = State {
            tasks: BTreeMap::new(),
            last: 0,
            timers: BTreeMap::new(),
            last_timer: 0,
            aborted: BTreeSet::new(),
            random: seed | 1,
        };
        Process { shared: Arc::new(Shared { state: Mutex::new(state), ready: Arc::default() }) }
    }

    /// Runs `work` in this process at `time`; tasks that it spawns belong to the process.
    pub fn enter<T>(&self, time: impl Into<SetTime>, work: impl FnOnce() -> T) -> T {
        let before = CURRENT.replace(Some(Arc::clone(&self.shared)));
        let _back = Back(before);
        let _time = time.into();
        work()
    }

    /// Runs the tasks at `time` until all of them wait. False: they spin.
    pub fn run(&self, time: impl Into<SetTime>) -> bool {
        self.enter(time, || {
            self.shared.fire(Nanos::now());
            for _ in 0..MOST_POLLS {
                let Some(number) = self.shared.next_ready() else { return true };
                self.shared.poll(number);
            }
            false
        })
    }

    /// When the next task is due, by the process's clock: 0 for now.
    #[must_use]
    pub fn due(&self) -> Nanos {
        if !self.shared.ready.lock().is_empty() {
            return Nanos(0);
        }
        let state = self.shared.lock();
        state.timers.keys().next().map_or(Nanos::NEVER, |(at, _)| *at)
    }
}

/// Restores the previous process, even after a panic in a task.
struct Back(Option<Arc<Shared>>);

impl Drop for Back {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A dropped task may release what another one waits for, and wake it.
        loop {
            let task = self.shared.lock().tasks.pop_first();
            match task {
                Some((_, task)) => drop(task),
                None => break,
            }
        }
        let timers = std::mem::take(&mut self.shared.lock().timers);
        drop(timers);
    }
}

impl Ready {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct TaskWaker {
    number: u64,
    ready: Arc<Ready>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.lock().insert(self.number);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn spawn<T: Send + 'static>(
        self: &Arc<Self>,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Joining<T> {
        let end = Arc::new(Mutex::new(End::Running(None)));
        let ended = EndOnDrop(Arc::clone(&end));
        let work = async move {
            let result = task.await;
            ended.tell(End::Done(Some(result)));
        };
        let mut state = self.lock();
        state.last += 1;
        let number = state.last;
        state.tasks.insert(number, Some(Box::pin(work)));
        drop(state);
        self.ready.lock().insert(number);
        Joining { number, process: Arc::downgrade(self), end }
    }

    /// Wakes the timers that are due.
    fn fire(&self, now: Nanos) {
        let mut state = self.lock();
        let later = state.timers.split_off(&(Nanos(now.0.saturating_add(1)), 0));
        let due = std::mem::replace(&mut state.timers, later);
        drop(state);
        due.into_values().for_each(Waker::wake);
    }

    /// A random ready task: real threads take them in any order. Wake order cannot be used: tokio's channels draw it from a
    /// generator that cannot be seeded.
    fn next_ready(&self) -> Option<u64> {
        let mut ready = self.ready.lock();
        let count = ready.len() as u64;
        let index = if count < 2 { 0 } else { self.lock().random() % count };
        let number = *ready.iter().nth(index as usize)?;
        ready.remove(&number);
        Some(number)
    }

    fn poll(&self, number: u64) {
        let Some(mut task) = self.lock().tasks.get_mut(&number).and_then(Option::take) else { return };
        let waker = Waker::from(Arc::new(TaskWaker { number, ready: Arc::clone(&self.ready) }));
        let ended = task.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        let mut state = self.lock();
        if state.aborted.remove(&number) || ended {
            state.tasks.remove(&number);
            drop(state);
            drop(task);
        } else if let Some(slot) = state.tasks.get_mut(&number) {
            *slot = Some(task);
        }
    }

    fn abort(&self, number: u64) {
        let mut state = self.lock();
        match state.tasks.get_mut(&number).map(Option::take) {
            Some(Some(task)) => {
                state.tasks.remove(&number);
                drop(state);
                drop(task);
            }
            // The task aborts itself.
            Some(None) => drop(state.aborted.insert(number)),
            None => {}
        }
    }
}

impl State {
    /// An xorshift generator: it only has to differ by seed.
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

/// The result of a task.
enum End<T> {
    Running(Option<Waker>),
    /// Taken once.
    Done(Option<T>),
    Aborted,
}

/// Reports the end of a task, even when it is dropped at an await.
struct EndOnDrop<T>(Arc<Mutex<End<T>>>);

impl<T> EndOnDrop<T> {
    fn tell(&self, how: End<T>) {
        let mut end = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let End::Running(waiting) = &mut *end {
            let waiting = waiting.take();
            *end = how;
            drop(end);
            waiting.into_iter().for_each(Waker::wake);
        }
    }
}

impl<T> Drop for EndOnDrop<T> {
    fn drop(&mut self) {
        self.tell(End::Aborted);
    }
}

/// Waits for the end of a simulated task.
pub(crate) struct Joining<T> {
    number: u64,
    process: std::sync::Weak<Shared>,
    end: Arc<Mutex<End<T>>>,
}

impl<T> fmt::Debug for Joining<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Joining").field("number", &self.number).finish_non_exhaustive()
    }
}

impl<T> Joining<T> {
    pub fn abort(&self) {
        if let Some(process) = self.process.upgrade() {
            process.abort(self.number);
        }
    }

    pub fn is_finished(&self) -> bool {
        !matches!(*self.end.lock().unwrap_or_else(PoisonError::into_inner), End::Running(_))
    }

    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<T, crate::Aborted>> {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *end {
            End::Running(waiting) => {
                *waiting = Some(context.waker().clone());
                Poll::Pending
            }
            End::Done(result) => Poll::Ready(result.take().ok_or(crate::Aborted)),
            End::Aborted => Poll::Ready(Err(crate::Aborted)),
        }
    }
}

/// A timer by the process's clock.
pub(crate) struct Timer {
    process: Arc<Shared>,
    at: Nanos,
    /// Its number among the timers, once it waits.
    number: Option<u64>,
}

impl Timer {
    pub fn new(process: Arc<Shared>, at: Nanos) -> Timer {
        Timer { process, at, number: None }
    }
}

impl Future for Timer {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if Nanos::now() >= self.at {
            return Poll::Ready(());
        }
        let process = Arc::clone(&self.process);
        let mut state = process.lock();
        let number = *self.number.get_or_insert_with(|| {
            state.last_timer += 1;
            state.last_timer
        });
        state.timers.insert((self.at, number), context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let waker = self.process.lock().timers.remove(&(self.at, number));
            drop(waker);
        }
    }
}
