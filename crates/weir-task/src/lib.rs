//! Tasks and timers of the control plane.
//!
//! In a node they are tokio's. Inside [`Process::run`] they are those of a simulated process: the same futures, polled by one
//! thread under the time that the simulation says it is, in an order that a seed decides. Code that is to run under both takes
//! [`spawn`], [`sleep`], [`timeout`] and [`interval`] from here, and `tokio::select!` with `biased`, whose order is not drawn from
//! a generator that nobody can seed. The channels of `tokio::sync` need no runtime and are the same under both.

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

/// Starts a task. It runs on when the handle is dropped.
pub fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    match current() {
        Some(process) => JoinHandle(Handle::Simulated(process.spawn(task))),
        None => JoinHandle(Handle::Tokio(tokio::spawn(task))),
    }
}

/// The way to a task's end.
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
    /// Ends the task where it waits. Await the handle to know that it has ended.
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

/// Waits for so long.
pub async fn sleep(length: Duration) {
    match current() {
        Some(process) => Timer::new(process, Nanos::now() + length).await,
        None => tokio::time::sleep(length).await,
    }
}

/// Something has taken too long.
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

/// Waits for `work`, but no longer than `length`; then it is dropped where it waits.
///
/// # Errors
/// The time is over.
pub async fn timeout<T>(length: Duration, work: impl Future<Output = T>) -> Result<T, Elapsed> {
    tokio::select! {
        biased;
        done = work => Ok(done),
        () = sleep(length) => Err(Elapsed),
    }
}

/// Ticks at once, and then at least `period` apart: a tick that nobody has taken in time is not made up for.
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

/// Wall-clock time in milliseconds since 1970, for people to read: nothing is ever decided by it. In a simulation it follows the
/// simulated clock.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "for people; nothing is decided by it")]
pub fn unix_millis() -> u64 {
    if current().is_some() {
        return Nanos::now().0 / 1_000_000;
    }
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
