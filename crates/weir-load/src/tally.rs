//! Counts and latencies of a load. Tallies merge by addition: over threads, nodes and time.

use hdrhistogram::Histogram;
use weir_block::meter::new_latency_histogram;
use weir_block::{Nanos, RequestKind};

use crate::timeline::Recorder;

/// The kinds of request that a load makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoKind {
    /// Reads from the target.
    Read,
    /// Writes to the target.
    Write,
    /// Makes answered writes durable; no bytes.
    Flush,
}

impl IoKind {
    /// All kinds, in the order of their tables.
    pub const ALL: [IoKind; 3] = [IoKind::Read, IoKind::Write, IoKind::Flush];

    /// The corresponding kind of request to a layer.
    #[must_use]
    pub fn request(self) -> RequestKind {
        match self {
            IoKind::Read => RequestKind::Read,
            IoKind::Write => RequestKind::Write,
            IoKind::Flush => RequestKind::Flush,
        }
    }

    /// The word that users see.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            IoKind::Read => "read",
            IoKind::Write => "write",
            IoKind::Flush => "flush",
        }
    }
}

/// Counts and latencies of one kind.
#[derive(Clone, Debug)]
pub struct KindTally {
    /// Requests answered with success.
    pub ios: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Nanoseconds from issue (with a rate: from the intended start) to the answer of successful requests;
    /// error at most 1 %.
    pub latency: Histogram<u64>,
    /// Nanoseconds from issue to the answer of successful requests; empty without a rate, where `latency` is the same. It
    /// excludes the wait for room in the queue (coordinated omission, Tene 2013).
    pub service: Histogram<u64>,
}

impl Default for KindTally {
    fn default() -> KindTally {
        KindTally {
            ios: 0,
            bytes: 0,
            errors: 0,
            latency: new_latency_histogram(),
            service: new_latency_histogram(),
        }
    }
}

/// Counts and latencies of all kinds.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    kinds: [KindTally; 3],
    /// Successful reads and writes over time, the warm-up's included.
    pub timeline: Recorder,
}

impl Tally {
    /// Of a load that begins at `begun` and counts from `measured_from` on.
    #[must_use]
    pub fn of_load(begun: Nanos, measured_from: Nanos) -> Tally {
        Tally { timeline: Recorder::new(begun, measured_from), ..Tally::default() }
    }

    /// The counts of one kind.
    #[must_use]
    pub fn kind(&self, kind: IoKind) -> &KindTally {
        &self.kinds[kind as usize]
    }

    /// Successful reads and writes.
    #[must_use]
    pub fn ios(&self) -> u64 {
        self.kind(IoKind::Read).ios + self.kind(IoKind::Write).ios
    }

    /// Failed requests of all kinds.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.errors).sum()
    }

    /// Counts one answer.
    #[inline]
    pub fn count(&mut self, kind: IoKind, bytes: u64, nanoseconds: u64, ok: bool) {
        let kind = &mut self.kinds[kind as usize];
        if ok {
            kind.ios += 1;
            kind.bytes += bytes;
            kind.latency.saturating_record(nanoseconds);
        } else {
            kind.errors += 1;
        }
    }

    /// Adds requests counted elsewhere: successful ones in a histogram of nanoseconds, as pairs of a latency and
    /// the number of requests that took as long, their bytes, and the failed ones.
    pub fn count_all(&mut self, kind: IoKind, histogram: &[(u64, u64)], bytes: u64, errors: u64) {
        let kind = &mut self.kinds[kind as usize];
        for &(nanoseconds, requests) in histogram {
            kind.ios += requests;
            kind.latency.saturating_record_n(nanoseconds, requests);
        }
        kind.bytes += bytes;
        kind.errors += errors;
    }

    /// Records the time from issue to answer of a successful request that [`Tally::count`] has counted from its
    /// intended start.
    #[inline]
    pub fn count_service(&mut self, kind: IoKind, nanoseconds: u64) {
        self.kinds[kind as usize].service.saturating_record(nanoseconds);
    }

    /// Adds another tally.
    pub fn add(&mut self, other: &Tally) {
        for (mine, theirs) in self.kinds.iter_mut().zip(&other.kinds) {
            mine.ios += theirs.ios;
            mine.bytes += theirs.bytes;
            mine.errors += theirs.errors;
            for (mine, theirs) in [(&mut mine.latency, &theirs.latency), (&mut mine.service, &theirs.service)]
            {
                mine.add(theirs).expect("all latency histograms have the same bounds");
            }
        }
        self.timeline.add(&other.timeline);
    }

    /// The counts since `earlier`, an earlier copy of this tally. The timeline stays complete.
    #[must_use]
    pub fn since(&self, earlier: &Tally) -> Tally {
        let mut rest = self.clone();
        for (mine, theirs) in rest.kinds.iter_mut().zip(&earlier.kinds) {
            mine.ios = mine.ios.saturating_sub(theirs.ios);
            mine.bytes = mine.bytes.saturating_sub(theirs.bytes);
            mine.errors = mine.errors.saturating_sub(theirs.errors);
            for (mine, theirs) in [(&mut mine.latency, &theirs.latency), (&mut mine.service, &theirs.service)]
            {
                // Fails when this tally was cleared in between: then all of it is later.
                let _ = mine.subtract(theirs);
            }
        }
        rest
    }

    /// Clears everything but the timeline: the end of a warm-up.
    pub fn clear(&mut self) {
        for kind in &mut self.kinds {
            (kind.ios, kind.bytes, kind.errors) = (0, 0, 0);
            kind.latency.reset();
            kind.service.reset();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_counted_is_as_if_counted_here() {
        let (mut one_by_one, mut at_once) = (Tally::default(), Tally::default());
        for (latency, requests) in [(1_000, 3), (50_000, 2)] {
            (0..requests).for_each(|_| one_by_one.count(IoKind::Read, 4096, latency, true));
        }
        one_by_one.count(IoKind::Read, 4096, 7, false);
        at_once.count_all(IoKind::Read, &[(1_000, 3), (50_000, 2)], 5 * 4096, 1);
        let [a, b] = [&one_by_one, &at_once].map(|tally| tally.kind(IoKind::Read));
        assert_eq!((a.ios, a.bytes, a.errors, &a.latency), (b.ios, b.bytes, b.errors, &b.latency));
        let later = at_once.since(&one_by_one);
        assert_eq!((later.ios(), later.errors(), later.kind(IoKind::Read).latency.len()), (0, 0, 0));
    }
}
