//! The settings of all faults, and the switch that changes them at run time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Longest delay, jitter or hold, in microseconds: a minute. A longer one is a mistake in an order.
const LONGEST_US: u64 = 60_000_000;

/// Largest sector, in bytes.
const LARGEST_SECTOR: u64 = 1 << 20;

/// Most dispatching threads.
const MOST_DISPATCHERS: usize = 64;

/// The faults at one place of a disk. The default is none. Times are microseconds, rates bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Faults {
    /// Each request goes on this much later.
    pub delay_us: u64,
    /// Up to this much more, drawn for each request; the order stays.
    pub jitter_us: u64,
    /// Bytes that pass in a second, one request after the other. 0: no limit.
    pub bandwidth: u64,
    /// Requests below this place at a time. 0: no limit.
    pub in_flight: usize,
    /// Threads that take requests in turn and pass each on when they get to it, which loses the order. 0 or 1: no such
    /// threads.
    pub dispatchers: usize,
    /// Mean time for which such a thread holds a request, drawn for each from an exponential distribution.
    pub hold_us: u64,
    /// A small fast tier in front of something slower.
    pub tier: Option<Tier>,
    /// Phases in which everything takes longer, and phases in which it does not.
    pub moods: Option<Moods>,
    /// Reads and writes of more bytes go on in pieces of so many; at the export alone. 0: they stay whole.
    pub split: u32,
    /// Writes go on in whole sectors of so many bytes, the rest of which is read first; at the export alone. A multiple of 512. 0:
    /// as they come.
    pub sectors: u32,
    /// Of a million requests, so many fail without reaching the layer below.
    pub errors_per_million: u32,
    /// The simulated disk: only where there is one (at the backing).
    pub simulated_disk: bool,
}

/// A fast tier of limited size: blocks that are in it pass at once; others come from below, take longer, and push out
/// those that came in first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tier {
    /// Its size, in bytes.
    pub bytes: u64,
    /// The added latency of a request that is not in it.
    pub miss_us: u64,
}

/// A device that is now fast, now slow, as one is that collects its garbage: the length of each phase is drawn from an
/// exponential distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moods {
    /// Mean length of a phase, in milliseconds.
    pub mean_ms: u64,
    /// The added latency of a request in every other phase, in microseconds.
    pub slow_us: u64,
}

/// An order that cannot be carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}: it may be at most {most}")]
pub struct FaultsError {
    /// The setting.
    field: &'static str,
    /// The requested value.
    value: u64,
    /// The largest permitted value.
    most: u64,
}

impl Faults {
    /// Whether every number is one that the layers can work with.
    ///
    /// # Errors
    /// One is out of range.
    pub fn check(&self) -> Result<(), FaultsError> {
        let miss = self.tier.map_or(0, |tier| tier.miss_us);
        for (field, value, most) in [
            ("delay_us", self.delay_us, LONGEST_US),
            ("jitter_us", self.jitter_us, LONGEST_US),
            ("hold_us", self.hold_us, LONGEST_US),
            ("tier.miss_us", miss, LONGEST_US),
            ("moods.slow_us", self.moods.map_or(0, |moods| moods.slow_us), LONGEST_US),
            ("moods.mean_ms", self.moods.map_or(0, |moods| moods.mean_ms), LONGEST_US / 1000),
            ("dispatchers", self.dispatchers as u64, MOST_DISPATCHERS as u64),
            ("sectors", u64::from(self.sectors), LARGEST_SECTOR),
            ("errors_per_million", u64::from(self.errors_per_million), 1_000_000),
        ] {
            if value > most {
                return Err(FaultsError { field, value, most });
            }
        }
        Ok(())
    }

    /// Threads that lose the order, as two file-server threads do that take turns.
    #[must_use]
    pub fn order_lost(dispatchers: usize) -> Faults {
        Faults { dispatchers, hold_us: 100, ..Faults::default() }
    }

    /// Only a delay.
    #[must_use]
    pub fn delayed(delay: Duration) -> Faults {
        Faults { delay_us: delay.as_micros() as u64, ..Faults::default() }
    }
}

/// Sets the faults of one place from any thread; the layer there sees the change with the next request.
#[derive(Clone, Debug, Default)]
pub struct Switch(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Grows with each change, so that the layer reads one number per request and locks only after a change.
    version: AtomicU64,
    faults: Mutex<Faults>,
}

impl Switch {
    /// These faults from now on, and no others. Requests that are held already keep their time.
    pub fn set(&self, faults: Faults) {
        *self.0.faults.lock().unwrap_or_else(PoisonError::into_inner) = faults;
        self.0.version.fetch_add(1, Ordering::Release);
    }

    /// The present settings.
    #[must_use]
    pub fn get(&self) -> Faults {
        *self.0.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The present settings, if they have changed since version `seen`, which becomes the present one.
    pub fn changed(&self, seen: &mut u64) -> Option<Faults> {
        let version = self.0.version.load(Ordering::Acquire);
        if version == *seen {
            return None;
        }
        *seen = version;
        Some(self.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_seen_once() {
        let switch = Switch::default();
        let mut seen = 0;
        assert_eq!(switch.changed(&mut seen), None);
        switch.clone().set(Faults::delayed(Duration::from_millis(1)));
        assert_eq!(switch.changed(&mut seen).unwrap().delay_us, 1000);
        assert_eq!(switch.changed(&mut seen), None);
    }

    #[test]
    fn orders_out_of_range_are_refused_by_name() {
        let refused = Faults { delay_us: LONGEST_US + 1, ..Faults::default() }.check().unwrap_err();
        assert!(refused.to_string().contains("delay_us"), "{refused}");
        let refused = Faults { dispatchers: 65, ..Faults::default() }.check().unwrap_err();
        assert!(refused.to_string().contains("at most 64"), "{refused}");
        assert!(Faults::order_lost(2).check().is_ok());
        assert!(serde_json::from_str::<Faults>(r#"{"dealy_us":1}"#).is_err(), "a misspelt fault is none");
    }
}
