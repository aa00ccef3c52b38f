//! The health of a shard: it publishes when its turn began, and counts turns that take long and turns that do nothing. Any
//! thread may read it, also while the shard hangs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use weir_block::Nanos;

use super::counters::{DiskCounters, DiskCounts};

/// A turn that takes longer is counted: every guest of the shard has waited for it.
pub const LONG_TURN: Duration = Duration::from_millis(10);

/// A turn that takes longer hangs.
pub const HANGS: Duration = Duration::from_secs(1);

/// So many turns in a row that do nothing, within [`SPIN_TIME`], are spinning.
const SPIN_TURNS: u64 = 1000;

/// See [`SPIN_TURNS`].
const SPIN_TIME: Duration = Duration::from_millis(100);

/// Not in any disk's turn.
const NO_DISK: usize = usize::MAX;

/// The counters that a shard publishes about its turns.
#[derive(Debug)]
pub struct Health {
    /// Nanoseconds since boot; 0 while the shard waits for something to do.
    began: AtomicU64,
    turns: AtomicU64,
    disk_turns: AtomicU64,
    long_turns: AtomicU64,
    longest: AtomicU64,
    spins: AtomicU64,
    /// Nanoseconds since boot.
    spun_at: AtomicU64,
    /// The slot of the disk whose turn it is.
    at: AtomicUsize,
    /// The disks by slot: their names, and what they publish.
    disks: Mutex<BTreeMap<usize, (String, Arc<DiskCounters>)>>,
}

/// A look at a shard's health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// Turns that it has begun.
    pub turns: u64,
    /// Turns of single disks.
    pub disk_turns: u64,
    /// Turns that took longer than [`LONG_TURN`]; the present one too.
    pub long_turns: u64,
    /// The longest turn; the present one too.
    pub longest: Duration,
    /// The number of times that it was found spinning.
    pub spins: u64,
    /// The duration of the present turn, if it is longer than [`HANGS`].
    pub hangs: Option<Duration>,
    /// Whether it was found spinning within the last second.
    pub spinning: bool,
    /// The disk in whose turn it is; empty when in none.
    pub disk: String,
}

impl Default for Health {
    fn default() -> Health {
        Health {
            began: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            disk_turns: AtomicU64::new(0),
            long_turns: AtomicU64::new(0),
            longest: AtomicU64::new(0),
            spins: AtomicU64::new(0),
            spun_at: AtomicU64::new(0),
            at: AtomicUsize::new(NO_DISK),
            disks: Mutex::default(),
        }
    }
}

impl Health {
    /// The shard's health at `now`.
    #[must_use]
    pub fn look(&self, now: Nanos) -> Look {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let began = self.began.load(Ordering::Acquire);
        let lasts = if began == 0 { Duration::ZERO } else { now - Nanos(began) };
        let spins = count(&self.spins);
        Look {
            turns: count(&self.turns),
            disk_turns: count(&self.disk_turns),
            long_turns: count(&self.long_turns) + u64::from(lasts > LONG_TURN),
            longest: Duration::from_nanos(count(&self.longest)).max(lasts),
            spins,
            hangs: Some(lasts).filter(|&lasts| lasts > HANGS),
            spinning: spins > 0 && now - Nanos(count(&self.spun_at)) < Duration::from_secs(1),
            disk: self
                .lock()
                .get(&self.at.load(Ordering::Relaxed))
                .map(|(name, _)| name.clone())
                .unwrap_or_default(),
        }
    }

    /// The duration of the present turn at `now`, if it is longer than [`HANGS`].
    #[must_use]
    pub fn hangs(&self, now: Nanos) -> Option<Duration> {
        let began = self.began.load(Ordering::Acquire);
        (began != 0).then(|| now - Nanos(began)).filter(|&lasts| lasts > HANGS)
    }

    /// The counters of the disks here.
    #[must_use]
    pub fn disks(&self) -> Vec<DiskCounts> {
        self.lock().values().map(|(name, counters)| counters.read(name)).collect()
    }

    /// Whether a load keeps clients from a disk here.
    #[must_use]
    pub fn takes_no_clients(&self, disk: &str) -> bool {
        self.lock().values().any(|(name, counters)| name == disk && counters.takes_no_clients())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, (String, Arc<DiskCounters>)>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The shard's side of its [`Health`].
#[derive(Debug)]
pub struct Pulse {
    health: Arc<Health>,
    began: Nanos,
    /// Turns in a row that did nothing, and when the first of them began.
    idle: u64,
    idle_since: Nanos,
}

impl Pulse {
    /// Publishes to `health`.
    pub fn new(health: Arc<Health>) -> Pulse {
        Pulse { health, began: Nanos(0), idle: 0, idle_since: Nanos(0) }
    }

    /// A turn begins.
    pub fn begin(&mut self, now: Nanos) {
        self.began = now;
        add(&self.health.turns, 1);
        self.health.began.store(now.0.max(1), Ordering::Release);
    }

    /// The turn of a disk begins.
    pub fn disk(&self, slot: usize) {
        add(&self.health.disk_turns, 1);
        self.health.at.store(slot, Ordering::Relaxed);
    }

    /// No disk's turn any more.
    pub fn no_disk(&self) {
        self.health.at.store(NO_DISK, Ordering::Relaxed);
    }

    /// The turn is over. `did` tells whether there was anything to do in it.
    pub fn end(&mut self, now: Nanos, did: bool) {
        let lasted = now - self.began;
        self.health.began.store(0, Ordering::Release);
        if lasted > LONG_TURN {
            add(&self.health.long_turns, 1);
        }
        let lasted = lasted.as_nanos() as u64;
        if lasted > self.health.longest.load(Ordering::Relaxed) {
            self.health.longest.store(lasted, Ordering::Relaxed);
        }
        if did {
            self.idle = 0;
            return;
        }
        if self.idle == 0 {
            self.idle_since = self.began;
        }
        self.idle += 1;
        if self.idle >= SPIN_TURNS {
            if now - self.idle_since <= SPIN_TIME {
                add(&self.health.spins, 1);
                self.health.spun_at.store(now.0, Ordering::Relaxed);
            }
            self.idle = 0;
        }
    }

    /// Sets the disk in a slot; `None`: it is free.
    pub fn name(&self, slot: usize, disk: Option<(&str, Arc<DiskCounters>)>) {
        match disk {
            Some((name, counters)) => drop(self.health.lock().insert(slot, (name.to_owned(), counters))),
            None => drop(self.health.lock().remove(&slot)),
        }
    }
}

/// One thread writes each counter, so that adding needs no locked instruction.
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed) + more, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use weir_export::Delays;

    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_turn_that_does_not_end_is_seen_from_outside() {
        let health = Arc::new(Health::default());
        let mut pulse = Pulse::new(Arc::clone(&health));
        let counters = Arc::new(DiskCounters::default());
        pulse.name(3, Some(("d3", Arc::clone(&counters))));
        counters.publish_delays(Delays { requests: 7, waited: Duration::from_millis(20), waiting: 1 });
        assert_eq!(health.disks(), [counters.read("d3")]);
        counters.publish_exclusion(true);
        assert!(health.takes_no_clients("d3") && !health.takes_no_clients("d4"));
        counters.publish_exclusion(false);
        assert!(!health.takes_no_clients("d3"));
        pulse.begin(Nanos(5 * MS));
        pulse.disk(3);
        assert_eq!(health.look(Nanos(10 * MS)).hangs, None);
        let look = health.look(Nanos(1505 * MS));
        assert_eq!((look.hangs, look.disk.as_str()), (Some(Duration::from_millis(1500)), "d3"));
        assert_eq!((look.long_turns, look.longest), (1, Duration::from_millis(1500)));
        pulse.no_disk();
        pulse.end(Nanos(1605 * MS), true);
        let look = health.look(Nanos(9000 * MS));
        assert_eq!((look.hangs, look.long_turns, look.longest), (None, 1, Duration::from_millis(1600)));
        assert_eq!((look.disk.as_str(), look.turns, look.disk_turns), ("", 1, 1));
    }

    #[test]
    fn turns_that_do_nothing_are_spinning_only_when_they_are_fast() {
        let health = Arc::new(Health::default());
        let mut pulse = Pulse::new(Arc::clone(&health));
        let mut now = 0;
        let mut turns = |count: u64, each: u64, did: bool| {
            for _ in 0..count {
                now += each;
                pulse.begin(Nanos(now));
                pulse.end(Nanos(now), did);
            }
            now
        };
        turns(5000, 1000, true);
        turns(5000, MS, false);
        turns(999, 1000, false);
        turns(1, 1000, true);
        let end = turns(999, 1000, false);
        assert_eq!(health.look(Nanos(end)).spins, 0);
        let end = turns(1, 1000, false);
        assert_eq!((health.look(Nanos(end)).spins, health.look(Nanos(end)).spinning), (1, true));
        assert!(!health.look(Nanos(end + 1500 * MS)).spinning, "over a second ago");
    }
}
