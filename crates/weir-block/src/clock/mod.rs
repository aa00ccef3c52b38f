//! Time: the only code that reads the clock.
//!
//! Protocol cores never read a clock: callers pass a [`Nanos`]. The shard's loop reads it through its reactor's [`Clock`], which
//! is virtual in a simulation.

mod simulated;

use std::cell::Cell;
use std::ops::{Add, Sub};
use std::rc::Rc;
use std::time::Duration;

pub use simulated::{SetTime, VirtualClock};

thread_local! {
    /// This thread's simulated time; 0: read the machine's clock.
    static SET: Cell<u64> = const { Cell::new(0) };
}

/// A point in time, in nanoseconds since boot.
///
/// `CLOCK_BOOTTIME` and not `CLOCK_MONOTONIC`: while a host is suspended its leases run out and its disks are taken over. With a
/// clock that stops meanwhile, the host would resume as the owner (P2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Later than every real time: means "no deadline".
    pub const NEVER: Nanos = Nanos(u64::MAX);

    /// Reads the machine's clock (a vDSO call, about 25 ns), or the time that a simulation has set
    /// ([`SetTime`]). On a shard, use [`Reactor::now`](crate::Reactor::now) or a [`Clock`]: there a
    /// simulated process may pause at any read of the clock.
    #[must_use]
    pub fn now() -> Nanos {
        let set = SET.get();
        if set != 0 {
            return simulated::set_time(set);
        }
        let mut spec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `spec` is a valid timespec that outlives the call; CLOCK_BOOTTIME exists since Linux 2.6.39.
        unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut spec) };
        Nanos(spec.tv_sec as u64 * 1_000_000_000 + spec.tv_nsec as u64)
    }

    /// Time from `earlier` to `self`; zero when `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Nanos) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Nanos {
    type Output = Nanos;
    fn add(self, duration: Duration) -> Nanos {
        Nanos(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub for Nanos {
    type Output = Duration;
    fn sub(self, earlier: Nanos) -> Duration {
        self.since(earlier)
    }
}

/// A shard's source of time: the machine's clock, or a simulation's.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// [`Nanos::now`].
    #[default]
    Boot,
    /// A simulated process's clock.
    Virtual(Rc<VirtualClock>),
}

impl Clock {
    /// The current time. Every call reads the clock, so that a process notices a pause.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Nanos {
        match self {
            Clock::Boot => Nanos::now(),
            Clock::Virtual(clock) => clock.now(),
        }
    }
}
