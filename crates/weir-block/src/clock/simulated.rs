//! The clock of a simulated process.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Nanos, SET};
use crate::random::{Random, nanos};

/// The clock of one process: starts at any time and drifts. The process may pause at any read of it, like a thread that the
/// scheduler has preempted; its later actions then happen later in the world, too.
#[derive(Debug)]
pub struct VirtualClock {
    world: Arc<AtomicU64>,
    /// Drift in thousandths; positive is fast.
    drift: i64,
    offset: u64,
    /// World time until which the process is paused.
    stands_until: Arc<AtomicU64>,
    /// The process pauses once in so many reads, for at most this long.
    stalls: Cell<(u32, Duration)>,
    random: RefCell<Random>,
}

impl VirtualClock {
    /// A clock over a world's time; it runs `drift` thousandths too fast.
    pub(crate) fn new(
        world: Arc<AtomicU64>,
        stands_until: Arc<AtomicU64>,
        drift: i64,
        mut random: Random,
    ) -> VirtualClock {
        let offset = random.below(1 << 40);
        let stalls = Cell::new((0, Duration::ZERO));
        VirtualClock { world, drift, offset, stands_until, stalls, random: RefCell::new(random) }
    }

    /// The time by this clock, after a possible pause of the process.
    #[must_use]
    pub fn now(&self) -> Nanos {
        let (odds, longest) = self.stalls.get();
        if odds != 0 {
            let mut random = self.random.borrow_mut();
            if random.once_in(odds) {
                let until = self.world_now() + random.between(Duration::ZERO, longest);
                self.stands_until.store(until, Ordering::Relaxed);
            }
        }
        self.at(Nanos(self.world_now()))
    }

    /// This clock's time at a world time.
    #[must_use]
    pub fn at(&self, world: Nanos) -> Nanos {
        Nanos(self.offset + (u128::from(world.0) * self.rate() / 1000) as u64)
    }

    /// The world time at which this clock shows `local`; [`Nanos::NEVER`] is unchanged.
    #[must_use]
    pub fn when(&self, local: Nanos) -> Nanos {
        if local == Nanos::NEVER {
            return local;
        }
        let elapsed = u128::from(local.0.saturating_sub(self.offset));
        Nanos(u64::try_from((elapsed * 1000).div_ceil(self.rate())).unwrap_or(u64::MAX))
    }

    /// From now on the process pauses once in `odds` reads of the clock (never when 0), for at most `longest`.
    pub fn stall(&self, odds: u32, longest: Duration) {
        self.stalls.set((odds, longest));
    }

    /// World time until which the process is busy or paused: it must not get a turn before.
    #[must_use]
    pub fn busy_until(&self) -> Nanos {
        Nanos(self.stands_until.load(Ordering::Relaxed))
    }

    /// The process's position in world time.
    fn world_now(&self) -> u64 {
        self.world.load(Ordering::Relaxed).max(self.stands_until.load(Ordering::Relaxed))
    }

    fn rate(&self) -> u128 {
        u128::from((1000 + self.drift).max(1).unsigned_abs())
    }

    /// Converts a duration by this clock to world time.
    #[must_use]
    pub fn world_length(&self, local: Duration) -> Duration {
        Duration::from_nanos((u128::from(nanos(local)) * 1000 / self.rate()) as u64)
    }
}

thread_local! {
    /// The clock that [`Nanos::now`] reads on this thread, if any.
    static CLOCK: RefCell<Option<Rc<VirtualClock>>> = const { RefCell::new(None) };
}

/// Marker: read the time from `CLOCK`.
const BY_CLOCK: u64 = u64::MAX;

/// The time that [`Nanos::now`] returns on this thread in a simulation: that of `CLOCK`, or `set`.
pub(super) fn set_time(set: u64) -> Nanos {
    if set != BY_CLOCK {
        return Nanos(set);
    }
    CLOCK.with_borrow(|clock| clock.as_ref().map_or(Nanos(set), |clock| clock.now()))
}

/// While this exists, [`Nanos::now`] returns simulated time on this thread: for code without a [`Clock`](crate::Clock).
#[derive(Debug)]
pub struct SetTime {
    before: u64,
    clock: Option<Rc<VirtualClock>>,
}

impl SetTime {
    /// Sets the time; must not be 0.
    #[must_use]
    pub fn to(now: Nanos) -> SetTime {
        SetTime { before: SET.replace(now.0.max(1)), clock: CLOCK.take() }
    }

    /// Uses the time of a process, which may pause at any read.
    #[must_use]
    pub fn by(clock: &Rc<VirtualClock>) -> SetTime {
        SetTime { before: SET.replace(BY_CLOCK), clock: CLOCK.replace(Some(Rc::clone(clock))) }
    }
}

impl From<Nanos> for SetTime {
    fn from(now: Nanos) -> SetTime {
        SetTime::to(now)
    }
}

impl From<&Rc<VirtualClock>> for SetTime {
    fn from(clock: &Rc<VirtualClock>) -> SetTime {
        SetTime::by(clock)
    }
}

impl Drop for SetTime {
    fn drop(&mut self) {
        SET.set(self.before);
        CLOCK.set(self.clock.take());
    }
}
