//! Positions of requests relative to earlier ones: sequential, strided or random.

use super::buckets::Scale;
use super::record::Class;

/// Number of streams tracked at once, for reads and for writes each.
const STREAMS: usize = 16;

/// Number of distances counted at once.
const STRIDES: usize = 4;

/// Number of distinguished alignments: 512 bytes times a power of two, up to 1 MiB.
pub(super) const ALIGNMENTS: usize = 12;

/// Lengths of sequential runs in requests: powers of two.
pub(super) const RUNS: Scale = Scale::new(0, 20);

/// Classifies the requests of one direction.
///
/// A request is *sequential* when it begins where one of the last streams ended, and *strided* when its distance from the
/// request before it is that request's distance from the one before that. Everything else is *random*.
#[derive(Clone, Debug)]
pub(super) struct Classifier {
    /// The end of each stream; `u64::MAX` for none.
    ends: [u64; STREAMS],
    /// Requests of each stream.
    lengths: [u32; STREAMS],
    /// Streams that continued since the cursor passed them: they are not evicted (as in the CLOCK algorithm).
    active: u16,
    cursor: usize,
    start: u64,
    distance: i64,
    /// Candidates for the most frequent strides, by Misra and Gries ("Finding repeated elements", 1982).
    strides: [(i64, u64); STRIDES],
    runs: [u64; RUNS.buckets()],
    /// Random requests by the largest power of two, in sectors, that divides their offset.
    alignments: [u64; ALIGNMENTS],
}

impl Classifier {
    pub fn new() -> Classifier {
        Classifier {
            ends: [u64::MAX; STREAMS],
            lengths: [0; STREAMS],
            active: 0,
            cursor: 0,
            start: 0,
            distance: 0,
            strides: [(0, 0); STRIDES],
            runs: [0; RUNS.buckets()],
            alignments: [0; ALIGNMENTS],
        }
    }

    #[inline]
    pub fn classify(&mut self, offset: u64, length: u64) -> Class {
        let distance = offset.wrapping_sub(self.start) as i64;
        let same = distance == self.distance;
        (self.start, self.distance) = (offset, distance);
        let end = offset.saturating_add(length);
        if let Some(stream) = self.ends.iter().position(|&other| other == offset) {
            self.ends[stream] = end;
            self.lengths[stream] = self.lengths[stream].saturating_add(1);
            self.active |= 1 << stream;
            return Class::Sequential;
        }
        self.begin(end);
        if same && distance != 0 {
            self.count_stride(distance);
            return Class::Strided;
        }
        let sectors = offset >> 9;
        self.alignments[(sectors.trailing_zeros() as usize).min(ALIGNMENTS - 1)] += 1;
        Class::Random
    }

    /// A new stream, in the slot of one that has not continued recently.
    fn begin(&mut self, end: u64) {
        while (self.active >> self.cursor) & 1 == 1 {
            self.active &= !(1 << self.cursor);
            self.cursor = (self.cursor + 1) % STREAMS;
        }
        self.end_run(self.cursor);
        (self.ends[self.cursor], self.lengths[self.cursor]) = (end, 1);
        self.cursor = (self.cursor + 1) % STREAMS;
    }

    fn end_run(&mut self, stream: usize) {
        if self.lengths[stream] > 1 {
            self.runs[RUNS.bucket(self.lengths[stream].into())] += 1;
        }
    }

    fn count_stride(&mut self, distance: i64) {
        if let Some(known) = self.strides.iter_mut().find(|known| known.0 == distance && known.1 > 0) {
            known.1 += 1;
        } else if let Some(free) = self.strides.iter_mut().find(|known| known.1 == 0) {
            *free = (distance, 1);
        } else {
            self.strides.iter_mut().for_each(|known| known.1 -= 1);
        }
    }

    /// Distances in bytes, each with a lower bound of its frequency, the most frequent first.
    pub fn strides(&self) -> Vec<(i64, u64)> {
        let mut seen: Vec<(i64, u64)> = self.strides.iter().copied().filter(|known| known.1 > 0).collect();
        seen.sort_by_key(|&(distance, count)| (std::cmp::Reverse(count), distance));
        seen
    }

    /// Sequential runs by their length in requests, including those in progress.
    pub fn runs(&self) -> [u64; RUNS.buckets()] {
        let mut all = self.clone();
        (0..STREAMS).for_each(|stream| all.end_run(stream));
        all.runs
    }

    pub fn alignments(&self) -> [u64; ALIGNMENTS] {
        self.alignments
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn classes(classifier: &mut Classifier, requests: impl IntoIterator<Item = (u64, u64)>) -> [usize; 3] {
        let mut of = [0; 3];
        for (offset, length) in requests {
            of[classifier.classify(offset, length) as usize] += 1;
        }
        of
    }

    #[test]
    fn streams_side_by_side_are_sequential() {
        let mut classifier = Classifier::new();
        let requests =
            (0..100).flat_map(|step| (0..8).map(move |stream| (stream * (1 << 30) + step * 4096, 4096)));
        let [random, sequential, _] = classes(&mut classifier, requests);
        assert!(random <= 8 && sequential == 99 * 8, "{random} {sequential}");
        let runs = classifier.runs();
        assert_eq!(runs[RUNS.bucket(100)], 8, "{runs:?}");
    }

    #[test]
    fn a_stream_among_random_requests_is_kept() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut classifier = Classifier::new();
        let requests = (0..1_000u64).flat_map(|step| {
            let mut four = vec![(step * 65_536, 65_536)];
            four.extend((0..3).map(|_| (random.u64(1 << 20..1 << 28) * 4096, 4096)));
            four
        });
        let [random, sequential, strided] = classes(&mut classifier, requests.collect::<Vec<_>>());
        assert_eq!((random, sequential, strided), (3_001, 999, 0));
    }

    #[test]
    fn strides_are_found_and_named() {
        let mut classifier = Classifier::new();
        let forward = (0..500u64).map(|step| (step * 65_536, 4096));
        let backward = (0..300u64).map(|step| ((1 << 40) - step * 8192, 4096));
        let [random, _, strided] = classes(&mut classifier, forward.chain(backward));
        assert_eq!((random, strided), (4, 796));
        assert_eq!(classifier.strides()[..2], [(65_536, 498), (-8_192, 298)]);
        assert_eq!(classifier.alignments().iter().sum::<u64>(), 4);
    }

    proptest! {
        /// Reference implementation: the ends of all streams.
        #[test]
        fn nothing_sequential_is_missed_with_few_streams(picks in proptest::collection::vec(0usize..6, 1..400)) {
            let mut classifier = Classifier::new();
            let mut ends: Vec<u64> = (0..6).map(|stream| stream << 32).collect();
            let mut begun = [false; 6];
            for pick in picks {
                let class = classifier.classify(ends[pick], 4096);
                ends[pick] += 4096;
                prop_assert_eq!(class == Class::Sequential, begun[pick]);
                begun[pick] = true;
            }
        }
    }
}
