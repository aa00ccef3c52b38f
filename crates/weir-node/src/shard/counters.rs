//! Figures of a disk for other threads: delays by its limit, requests by route, and whether it takes clients. The shard stores them once in each
//! turn of the disk, so that no reader makes it wait.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use weir_export::Delays;
use weir_volume::lun::route_status::{Reasons, RouteCounts, RouteState, RouteStatus};

/// The counters of an open disk. One thread writes them.
#[derive(Debug, Default)]
pub struct DiskCounters {
    delayed: AtomicU64,
    waited: AtomicU64,
    /// A load overwrites the disk.
    takes_no_clients: AtomicBool,
    /// The state's place in [`RouteState::ALL`], from 1, and above [`STATE_BITS`] the reasons; 0: there are no routes. One word, so that a
    /// reader never takes the reasons of one state for those of another.
    route: AtomicU32,
    direct: AtomicU64,
    block: AtomicU64,
    file: AtomicU64,
    zeroes: AtomicU64,
    splits: AtomicU64,
}

const STATE_BITS: u32 = 8;

/// The counters of one disk, since it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskCounts {
    /// The disk.
    pub disk: String,
    /// Requests that have waited for its limit.
    pub delayed: u64,
    /// The sum of their waits.
    pub waited: Duration,
    /// By which way its I/O goes, of a disk of a volume on a LUN.
    pub route: Option<RouteStatus>,
}

impl DiskCounters {
    /// Publishes what the disk's limit has delayed so far.
    pub fn publish_delays(&self, delays: Delays) {
        self.delayed.store(delays.requests, Ordering::Relaxed);
        let waited = u64::try_from(delays.waited.as_nanos()).unwrap_or(u64::MAX);
        self.waited.store(waited, Ordering::Relaxed);
    }

    /// Publishes whether a load keeps clients out.
    pub fn publish_exclusion(&self, takes_no_clients: bool) {
        self.takes_no_clients.store(takes_no_clients, Ordering::Relaxed);
    }

    /// Whether a load keeps clients out.
    #[must_use]
    pub fn takes_no_clients(&self) -> bool {
        self.takes_no_clients.load(Ordering::Relaxed)
    }

    /// Publishes the way of the disk's I/O.
    pub fn publish_route(&self, status: &RouteStatus) {
        let RouteStatus { state, reasons, counts } = status;
        let word = (1 + *state as u32) | (u32::from(reasons.bits()) << STATE_BITS);
        self.route.store(word, Ordering::Relaxed);
        let RouteCounts { direct, block, file, zeroes, splits } = *counts;
        for (counter, count) in [
            (&self.direct, direct),
            (&self.block, block),
            (&self.file, file),
            (&self.zeroes, zeroes),
            (&self.splits, splits),
        ] {
            counter.store(count, Ordering::Relaxed);
        }
    }

    /// The counters of the disk of this name.
    #[must_use]
    pub fn read(&self, disk: &str) -> DiskCounts {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let word = self.route.load(Ordering::Relaxed);
        let place = (word & ((1 << STATE_BITS) - 1)).checked_sub(1);
        let state = place.and_then(|place| RouteState::ALL.get(place as usize).copied());
        let route = state.map(|state| RouteStatus {
            state,
            reasons: Reasons::of_bits((word >> STATE_BITS) as u16),
            counts: RouteCounts {
                direct: count(&self.direct),
                block: count(&self.block),
                file: count(&self.file),
                zeroes: count(&self.zeroes),
                splits: count(&self.splits),
            },
        });
        DiskCounts {
            disk: disk.to_owned(),
            delayed: count(&self.delayed),
            waited: Duration::from_nanos(count(&self.waited)),
            route,
        }
    }
}

#[cfg(test)]
mod tests {
    use weir_volume::lun::route_status::Reason;

    use super::*;

    #[test]
    fn what_is_published_is_read() {
        let counters = DiskCounters::default();
        counters.publish_delays(Delays { requests: 7, waited: Duration::from_millis(20), waiting: 1 });
        let mut expected =
            DiskCounts { disk: "d".into(), delayed: 7, waited: Duration::from_millis(20), route: None };
        assert_eq!(counters.read("d"), expected, "a disk in a directory has no routes");
        let counts = RouteCounts { direct: 1, block: 2, file: 3, zeroes: 4, splits: 5 };
        for state in RouteState::ALL {
            for reason in Reason::ALL {
                let reasons = Reasons::default().with(reason, true).with(Reason::UserRequest, true);
                expected.route = Some(RouteStatus { state, reasons, counts });
                counters.publish_route(&expected.route.unwrap());
                assert_eq!(counters.read("d"), expected);
            }
        }
    }
}
