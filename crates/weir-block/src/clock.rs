//! Time, read in one place.
//!
//! Protocol cores never read a clock: they are given a [`Nanos`]. The shard's loop reads it here, through the [`Clock`] of
//! its reactor, which in a simulation is a virtual one.

use std::cell::Cell;
use std::ops::{Add, Sub};
use std::rc::Rc;
use std::time::Duration;

use crate::sim::VirtualClock;

thread_local! {
    /// The time that a simulation says it is on this thread; 0: that of the machine's clock.
    pub(crate) static SET: Cell<u64> = const { Cell::new(0) };
}

/// A point on the clock that runs since boot, in nanoseconds.
///
/// `CLOCK_BOOTTIME` and not `CLOCK_MONOTONIC`: while a host is suspended its leases run out and its disks are taken over. A
/// clock that stands still meanwhile would let it go on as the owner when it wakes (P2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Later than every real time: the deadline of something that has none.
    pub const NEVER: Nanos = Nanos(u64::MAX);

    /// Reads the machine's clock (a vDSO call, about 25 ns), or is told the time by a simulation
    /// ([`SetTime`](crate::sim::SetTime)). On a shard, ask [`Reactor::now`](crate::Reactor::now) or a [`Clock`]: there a simulated
    /// process may stand still at any look.
    #[must_use]
    pub fn now() -> Nanos {
        let set = SET.get();
        if set != 0 {
            return crate::sim::set_time(set);
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

/// What a shard reads the time from: the machine's clock, or that of a simulation.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// [`Nanos::now`].
    #[default]
    Boot,
    /// Of a simulated process.
    Virtual(Rc<VirtualClock>),
}

impl Clock {
    /// The time now: every call reads the clock, so that a process that stood still meanwhile notices it.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Nanos {
        match self {
            Clock::Boot => Nanos::now(),
            Clock::Virtual(clock) => clock.now(),
        }
    }
}
