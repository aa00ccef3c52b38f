//! Meters: counts, bytes, requests in flight and latency, per request kind. They merge by addition.

use hdrhistogram::Histogram;

use crate::clock::Nanos;
use crate::request::RequestKind;

/// Longest recorded latency, in nanoseconds (one hour); longer ones count as this.
const LONGEST: u64 = 3_600_000_000_000;

/// Counts and latencies of one kind of request at one layer.
#[derive(Clone, Debug)]
pub struct KindMeter {
    /// Requests accepted.
    pub arrivals: u64,
    /// Requests completed successfully.
    pub completions: u64,
    /// Requests completed with an error.
    pub errors: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
    /// Extra requests from splits (two parts are one split).
    pub splits: u64,
    /// Requests saved by merging adjacent ones.
    pub merges: u64,
    /// Nanoseconds from arrival to completion of successful requests; log-linear, error at most 1 %.
    pub latency: Histogram<u64>,
}

impl Default for KindMeter {
    fn default() -> KindMeter {
        KindMeter {
            arrivals: 0,
            completions: 0,
            errors: 0,
            bytes: 0,
            splits: 0,
            merges: 0,
            latency: new_latency_histogram(),
        }
    }
}

/// An empty latency histogram: 1 ns to one hour, two significant digits (error at most 1 %), about 37 KB.
#[must_use]
pub fn new_latency_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST, 2).expect("constant bounds are valid")
}

impl KindMeter {
    fn add(&mut self, other: &KindMeter) {
        self.arrivals += other.arrivals;
        self.completions += other.completions;
        self.errors += other.errors;
        self.bytes += other.bytes;
        self.splits += other.splits;
        self.merges += other.merges;
        self.latency.add(&other.latency).expect("all latency histograms have the same bounds");
    }
}

/// The measurements of one layer. Percentiles come only from merged histograms, never from averaged percentiles.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    kinds: [KindMeter; RequestKind::ALL.len()],
    in_flight: u64,
    /// Arrivals and ends of requests.
    activity: u64,
    /// Request-nanoseconds up to `changed`: the integral of `in_flight` over time.
    occupancy: u128,
    changed: Nanos,
}

impl Meter {
    /// An empty meter.
    #[must_use]
    pub fn new() -> Meter {
        Meter::default()
    }

    /// A request arrives.
    pub fn arrive(&mut self, kind: RequestKind, now: Nanos) {
        self.account(now);
        self.in_flight += 1;
        self.activity += 1;
        self.kinds[kind.index()].arrivals += 1;
    }

    /// A request that arrived at `arrived` completes.
    pub fn complete(&mut self, kind: RequestKind, bytes: u64, arrived: Nanos, now: Nanos, success: bool) {
        self.account(now);
        self.in_flight -= 1;
        self.activity += 1;
        let kind = &mut self.kinds[kind.index()];
        if success {
            kind.completions += 1;
            kind.bytes += bytes;
            kind.latency.saturating_record((now - arrived).as_nanos() as u64);
        } else {
            kind.errors += 1;
        }
    }

    /// This layer split one request into `extra` more.
    pub fn split(&mut self, kind: RequestKind, extra: u64) {
        self.kinds[kind.index()].splits += extra;
    }

    /// This layer merged adjacent requests and saved `saved` of them.
    pub fn merge(&mut self, kind: RequestKind, saved: u64) {
        self.kinds[kind.index()].merges += saved;
    }

    fn account(&mut self, now: Nanos) {
        if self.in_flight > 0 {
            self.occupancy += u128::from(self.in_flight) * (now - self.changed).as_nanos();
        }
        self.changed = now;
    }

    /// The counts of one kind.
    #[must_use]
    pub fn kind(&self, kind: RequestKind) -> &KindMeter {
        &self.kinds[kind.index()]
    }

    /// Requests in flight now.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Grows with each request that arrives, completes or fails.
    #[must_use]
    pub fn activity(&self) -> u64 {
        self.activity
    }

    /// Integral of the number in flight over time, in request-nanoseconds. Divided by elapsed time it is
    /// the mean queue depth (Little's law: throughput × mean latency).
    #[must_use]
    pub fn occupancy(&self) -> u128 {
        self.occupancy
    }

    /// Adds another meter: of another thread, node or period.
    pub fn add(&mut self, other: &Meter) {
        for (mine, theirs) in self.kinds.iter_mut().zip(&other.kinds) {
            mine.add(theirs);
        }
        self.in_flight += other.in_flight;
        self.activity += other.activity;
        self.occupancy += other.occupancy;
        self.changed = self.changed.max(other.changed);
    }
}

/// A copy of a meter with its layer's name.
#[derive(Clone, Debug)]
pub struct LayerMeter {
    /// `export`, `accel`, `backing`, …
    pub layer: &'static str,
    /// Its meter.
    pub meter: Meter,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_latency_and_littles_law() {
        let mut meter = Meter::new();
        meter.arrive(RequestKind::Read, Nanos(1_000));
        meter.arrive(RequestKind::Read, Nanos(1_000));
        meter.complete(RequestKind::Read, 4096, Nanos(1_000), Nanos(3_000), true);
        meter.complete(RequestKind::Read, 4096, Nanos(1_000), Nanos(5_000), false);
        let read = meter.kind(RequestKind::Read);
        assert_eq!((read.arrivals, read.completions, read.errors, read.bytes), (2, 1, 1, 4096));
        assert_eq!(meter.occupancy(), 2 * 2_000 + 2_000);
        let p50 = read.latency.value_at_quantile(0.5);
        assert!((1_980..=2_020).contains(&p50), "within one per cent: {p50}");
    }

    #[test]
    fn meters_merge_by_addition() {
        let mut left = Meter::new();
        let mut right = Meter::new();
        for (meter, latency) in [(&mut left, 100), (&mut right, 10_000)] {
            meter.arrive(RequestKind::Write, Nanos(0));
            meter.complete(RequestKind::Write, 512, Nanos(0), Nanos(latency), true);
        }
        left.add(&right);
        assert_eq!(left.kind(RequestKind::Write).completions, 2);
        assert_eq!(left.kind(RequestKind::Write).latency.len(), 2);
        assert!(left.kind(RequestKind::Write).latency.max() >= 9_900);
    }
}
