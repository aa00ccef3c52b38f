//! Monotonic time, read in one place.
//!
//! Protocol cores never read a clock: they are given a [`Nanos`]. The shard's loop reads it here.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A point on the monotonic clock, in nanoseconds since an arbitrary start (boot).
///
/// `CLOCK_MONOTONIC` and not `CLOCK_BOOTTIME`: a host that was suspended also had its I/O suspended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Later than every real time: the deadline of something that has none.
    pub const NEVER: Nanos = Nanos(u64::MAX);

    /// Reads the clock (a vDSO call, about 25 ns).
    #[must_use]
    pub fn now() -> Nanos {
        let mut spec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `spec` is a valid timespec that outlives the call; CLOCK_MONOTONIC always exists.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut spec) };
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
