//! Tasks and timers of the control plane.
//!
//! A node uses tokio's. Inside [`Process::run`] they belong to a simulated process: one thread polls the same futures under
//! simulated time, in an order that a seed decides. Code for both uses [`spawn`], [`sleep`], [`timeout`] and [`interval`] of this
//! crate, and `tokio::select!` with `biased`, because its random order cannot be seeded. The channels of `tokio::sync` need no
//! runtime and are the same under both.

mod process;

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use weir_block::Nanos;

pub use process::Process;
use process::{Joining, Timer, current};

/// Starts a task. It continues when the handle is dropped.
pub fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    match current() {
        Some(process) => JoinHandle(Handle::Simulated(process.spawn(task))),
        None => JoinHandle(Handle::Tokio(tokio::spawn(task))),
    }
}

/// Waits for a task's end.
#[derive(Debug)]
pub struct JoinHandle<T>(Handle<T>);

#[derive(Debug)]
enum Handle<T> {
    Tokio(tokio::task::JoinHandle<T>),
    Simulated(Joining<T>),
}

/// A task was aborted, or has panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aborted;

impl<T> JoinHandle<T> {
    /// Cancels the task at its current await. Await the handle to know that it has ended.
    pub fn abort(&self) {
        match &self.0 {
            Handle::Tokio(handle) => handle.abort(),
            Handle::Simulated(joining) => joining.abort(),
        }
    }

    /// Whether the task has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        match &self.0 {
            Handle::Tokio(handle) => handle.is_finished(),
            Handle::Simulated(joining) => joining.is_finished(),
        }
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, Aborted>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.get_mut().0 {
            Handle::Tokio(handle) => Pin::new(handle).poll(context).map(|ended| ended.map_err(|_| Aborted)),
            Handle::Simulated(joining) => joining.poll(context),
        }
    }
}

/// Waits for `length`.
pub async fn sleep(length: Duration) {
    match current() {
        Some(process) => Timer::new(process, Nanos::now() + length).await,
        None => tokio::time::sleep(length).await,
    }
}

/// A time limit has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no answer in time")
    }
}

impl std::error::Error for Elapsed {}

impl From<Elapsed> for io::Error {
    fn from(elapsed: Elapsed) -> io::Error {
        io::Error::new(io::ErrorKind::TimedOut, elapsed)
    }
}

/// Waits for `work` for at most `length`, then drops it.
///
/// # Errors
/// The time limit has passed.
pub async fn timeout<T>(length: Duration, work: impl Future<Output = T>) -> Result<T, Elapsed> {
    tokio::select! {
        biased;
        done = work => Ok(done),
        () = sleep(length) => Err(Elapsed),
    }
}

/// Ticks at once, and then at least `period` apart: missed ticks are skipped.
#[must_use]
pub fn interval(period: Duration) -> Interval {
    Interval { period, next: Nanos(0) }
}

/// See [`interval`].
#[derive(Debug)]
pub struct Interval {
    period: Duration,
    next: Nanos,
}

impl Interval {
    /// Waits for the next tick. Cancel safe.
    pub async fn tick(&mut self) {
        let now = Nanos::now();
        if self.next > now {
            sleep(self.next - now).await;
        }
        self.next = Nanos::now() + self.period;
    }
}

/// Wall-clock time in milliseconds since 1970, for display and for the states of nodes, which are policy: the safety of data never
/// depends on it. In a simulation it follows the simulated clock.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "for display and policy; no safety depends on it")]
pub fn unix_millis() -> u64 {
    if current().is_some() {
        return Nanos::now().0 / 1_000_000;
    }
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
