//! Completions over time, by latency, in slots of equal length.
//!
//! The size is bounded regardless of the load's duration: when there are more than [`SLOTS`], each two are merged into one of
//! twice the length. Slots are aligned to a grid of the monotonic clock, not to the load's own start, so that recordings of
//! several threads and rounds add up exactly.

use serde::{Deserialize, Serialize};
use weir_block::Nanos;

/// Maximum number of slots; a load that ran for a while has more than half as many.
pub const SLOTS: usize = 64;

/// Shortest slot: 2^20 ns, about a millisecond.
const SHORTEST: u32 = 20;

/// Latency buckets of a slot: four for each doubling, so that a bucket is 14 to 25 % wide.
pub const BUCKETS: usize = ((LONGEST - LEAST) << PARTS) as usize;

/// Latencies below 2^7 ns = 128 ns count as this.
const LEAST: u32 = 7;

/// Latencies from 2^37 ns = 137 s on count as the last bucket.
const LONGEST: u32 = 37;

/// log2 of the buckets of a doubling.
const PARTS: u32 = 2;

/// The bucket of a latency in nanoseconds.
#[inline]
fn bucket(nanoseconds: u64) -> usize {
    let latency = nanoseconds.clamp(1 << LEAST, (1 << LONGEST) - 1);
    let octave = latency.ilog2();
    let part = (latency >> (octave - PARTS)) & ((1 << PARTS) - 1);
    (((octave - LEAST) << PARTS) as u64 + part) as usize
}

/// The shortest latency of a bucket in nanoseconds; of [`BUCKETS`] the end of the last one.
#[must_use]
pub fn bucket_start(bucket: usize) -> u64 {
    let bucket = bucket.min(BUCKETS) as u64;
    let (octave, part) = (bucket >> PARTS, bucket & ((1 << PARTS) - 1));
    ((1 << PARTS) + part) << (u64::from(LEAST - PARTS) + octave)
}

/// Records a timeline while the load runs: an addition for each answer.
#[derive(Clone, Debug)]
pub struct Recorder {
    begun: Nanos,
    measured_from: Nanos,
    ended: Nanos,
    /// log2 of a slot's length in nanoseconds.
    shift: u32,
    /// The first slot is the one with this number on the grid.
    first: u64,
    slots: Vec<[u64; BUCKETS]>,
    /// End of the newest slot.
    open_until: Nanos,
}

impl Default for Recorder {
    /// Begins with the first answer.
    fn default() -> Recorder {
        Recorder {
            begun: Nanos::NEVER,
            measured_from: Nanos::NEVER,
            ended: Nanos(0),
            shift: SHORTEST,
            first: 0,
            slots: Vec::new(),
            open_until: Nanos(0),
        }
    }
}

impl Recorder {
    /// Of a load that begins at `begun` and counts from `measured_from` on.
    #[must_use]
    pub fn new(begun: Nanos, measured_from: Nanos) -> Recorder {
        Recorder { begun, measured_from, ..Recorder::default() }
    }

    /// Records an answer at `now` with this latency in nanoseconds. Time does not run backwards.
    #[inline]
    pub fn record(&mut self, now: Nanos, nanoseconds: u64) {
        if now >= self.open_until {
            self.open(now);
        }
        self.ended = now;
        if let Some(slot) = self.slots.last_mut() {
            slot[bucket(nanoseconds)] += 1;
        }
    }

    /// Advances the newest slot to that of `now`.
    #[cold]
    fn open(&mut self, now: Nanos) {
        if self.slots.is_empty() {
            self.begun = self.begun.min(now);
            if self.measured_from == Nanos::NEVER {
                self.measured_from = self.begun;
            }
            self.first = self.begun.0 >> self.shift;
        }
        while (now.0 >> self.shift) - self.first >= SLOTS as u64 {
            self.coarsen();
        }
        let number = now.0 >> self.shift;
        self.slots.resize((number - self.first) as usize + 1, [0; BUCKETS]);
        self.open_until = Nanos((number + 1).saturating_mul(1 << self.shift));
    }

    /// Merges each two slots into one.
    fn coarsen(&mut self) {
        let old = std::mem::take(&mut self.slots);
        let first = self.first >> 1;
        for (number, slot) in (self.first..).zip(old) {
            let index = ((number >> 1) - first) as usize;
            match self.slots.get_mut(index) {
                Some(whole) => add(whole, &slot),
                None => self.slots.push(slot),
            }
        }
        (self.first, self.shift) = (first, self.shift + 1);
    }

    /// Adds the recording of another thread or round. The measured time is that of both.
    pub fn add(&mut self, other: &Recorder) {
        self.measured_from = self.measured_from.min(other.measured_from);
        self.join(other);
    }

    /// Adds an earlier recording outside the measured time.
    pub fn add_earlier(&mut self, earlier: &Recorder) {
        self.join(earlier);
    }

    fn join(&mut self, other: &Recorder) {
        self.begun = self.begun.min(other.begun);
        self.ended = self.ended.max(other.ended);
        if other.slots.is_empty() {
            return;
        }
        let mut other = other.clone();
        if self.slots.is_empty() {
            (self.shift, self.first) = (other.shift, other.first);
        }
        let end = |recorder: &Recorder| recorder.first + recorder.slots.len() as u64;
        loop {
            let (first, last) = (self.first.min(other.first), end(self).max(end(&other)));
            match self.shift.cmp(&other.shift) {
                std::cmp::Ordering::Less => self.coarsen(),
                std::cmp::Ordering::Greater => other.coarsen(),
                std::cmp::Ordering::Equal if last - first > SLOTS as u64 => {
                    self.coarsen();
                    other.coarsen();
                }
                std::cmp::Ordering::Equal => {
                    let missing = (self.first - first) as usize;
                    self.slots.splice(0..0, std::iter::repeat_n([0; BUCKETS], missing));
                    self.first = first;
                    self.slots.resize((last - first) as usize, [0; BUCKETS]);
                    let index = (other.first - first) as usize;
                    self.slots[index..].iter_mut().zip(&other.slots).for_each(|(mine, slot)| add(mine, slot));
                    self.open_until = Nanos(last.saturating_mul(1 << self.shift));
                    return;
                }
            }
        }
    }

    /// The recording; `None` when it is empty.
    #[must_use]
    pub fn timeline(&self) -> Option<Timeline> {
        let slot = |counts: &[u64; BUCKETS]| {
            let occupied = |count: &u64| *count > 0;
            let first = counts.iter().position(occupied).unwrap_or(0);
            let end = counts.iter().rposition(occupied).map_or(first, |last| last + 1);
            Slot(first as u32, counts[first..end].to_vec())
        };
        let grid = self.first << self.shift;
        (!self.slots.is_empty()).then(|| Timeline {
            slot_ns: 1 << self.shift,
            lead_ns: self.begun.0.saturating_sub(grid),
            measured_from_ns: self.measured_from.0.saturating_sub(self.begun.0),
            end_ns: self.ended.0.saturating_sub(self.begun.0),
            slots: self.slots.iter().map(slot).collect(),
        })
    }
}

fn add(whole: &mut [u64; BUCKETS], part: &[u64; BUCKETS]) {
    whole.iter_mut().zip(part).for_each(|(mine, more)| *mine += more);
}

/// A load over time: successful reads and writes by their latency, warm-up included. Times are nanoseconds
/// from the load's start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Length of a slot.
    pub slot_ns: u64,
    /// Time from the first slot's start to the load's start.
    pub lead_ns: u64,
    /// Start of counting: the end of the warm-up, or the first round of the steady window.
    pub measured_from_ns: u64,
    /// Time of the last answer.
    pub end_ns: u64,
    /// One after the other, at most [`SLOTS`].
    pub slots: Vec<Slot>,
}

/// The answers of one slot: the number of the first bucket that is not empty ([`bucket_start`]), and the requests in
/// it and in those after it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot(pub u32, pub Vec<u64>);

impl Slot {
    /// Buckets and the requests in them. Skips indexes outside the buckets, which a foreign document may have.
    pub fn buckets(&self) -> impl Iterator<Item = (usize, u64)> {
        let counts = (self.0 as usize..BUCKETS).zip(self.1.iter().copied());
        counts.filter(|(_, count)| *count > 0)
    }

    /// Requests answered.
    #[must_use]
    pub fn ios(&self) -> u64 {
        self.buckets().fold(0, |sum, (_, count)| sum.saturating_add(count))
    }

    fn add(&mut self, other: &Slot) {
        let mut counts = [0u64; BUCKETS];
        for (bucket, count) in self.buckets().chain(other.buckets()) {
            counts[bucket] = counts[bucket].saturating_add(count);
        }
        let first = counts.iter().position(|count| *count > 0).unwrap_or(0);
        let end = counts.iter().rposition(|count| *count > 0).map_or(first, |last| last + 1);
        *self = Slot(first as u32, counts[first..end].to_vec());
    }
}

impl Timeline {
    /// The same with at most so many slots (1 or more).
    #[must_use]
    pub fn coarser(&self, most: usize) -> Timeline {
        let mut coarse = self.clone();
        while coarse.slots.len() > most.max(1) {
            coarse.slots = coarse
                .slots
                .chunks(2)
                .map(|pair| {
                    let mut whole = pair[0].clone();
                    pair[1..].iter().for_each(|other| whole.add(other));
                    whole
                })
                .collect();
            coarse.slot_ns = coarse.slot_ns.saturating_mul(2);
        }
        coarse
    }

    /// Start and end of a slot in nanoseconds, clipped to the load: the first and the last slot are usually shorter than the
    /// others.
    #[must_use]
    pub fn span(&self, slot: usize) -> (u64, u64) {
        let at = |slot: u64| slot.saturating_mul(self.slot_ns).saturating_sub(self.lead_ns).min(self.end_ns);
        (at(slot as u64), at(slot as u64 + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;

    fn total(timeline: &Timeline) -> u64 {
        timeline.slots.iter().map(Slot::ios).sum()
    }

    #[test]
    fn buckets_have_their_latencies() {
        for bucket_number in 0..BUCKETS {
            let (start, end) = (bucket_start(bucket_number), bucket_start(bucket_number + 1));
            assert_eq!((bucket(start), bucket(end - 1)), (bucket_number, bucket_number));
            let width = (end - start) as f64 / start as f64;
            assert!((0.14..=0.25).contains(&width), "{start}..{end}");
        }
        assert_eq!((bucket(0), bucket(u64::MAX)), (0, BUCKETS - 1));
        assert_eq!((bucket_start(0), bucket_start(BUCKETS)), (128, 1 << 37));
    }

    #[test]
    fn slots_grow_with_the_time_and_nothing_is_lost() {
        let start = Nanos(777 * MS);
        let mut recorder = Recorder::new(start, Nanos(start.0 + 100 * MS));
        assert_eq!(recorder.timeline(), None);
        for millisecond in 1..=1000 {
            recorder.record(Nanos(start.0 + millisecond * MS), 50_000);
        }
        let timeline = recorder.timeline().unwrap();
        assert_eq!(total(&timeline), 1000);
        assert!((SLOTS / 2..=SLOTS).contains(&timeline.slots.len()), "{timeline:?}");
        assert_eq!((timeline.measured_from_ns, timeline.end_ns), (100 * MS, 1000 * MS));
        // Each slot but the first and the last has what its length says.
        for (index, slot) in timeline.slots.iter().enumerate() {
            let (from, to) = timeline.span(index);
            assert!(slot.ios().abs_diff((to - from) / MS) <= 1, "{index}: {from}..{to} {slot:?}");
            assert!(slot.buckets().all(|(at, _)| at == bucket(50_000)));
        }
        assert_eq!((timeline.span(0).0, timeline.span(timeline.slots.len() - 1).1), (0, 1000 * MS));
        let coarse = timeline.coarser(10);
        assert!(coarse.slots.len() <= 10 && total(&coarse) == 1000);
        assert_eq!(coarse.span(coarse.slots.len() - 1).1, 1000 * MS);
    }

    #[test]
    fn a_stall_is_a_row_of_empty_slots() {
        let mut recorder = Recorder::new(Nanos(0), Nanos(0));
        for millisecond in (0..100).chain(300..400) {
            recorder.record(Nanos(millisecond * MS), 1000);
        }
        let timeline = recorder.timeline().unwrap();
        let empty = timeline.slots.iter().filter(|slot| slot.ios() == 0).count();
        let share = empty as f64 / timeline.slots.len() as f64;
        assert!((0.4..0.55).contains(&share), "{timeline:?}");
    }

    #[test]
    fn rounds_before_the_window_are_shown_and_not_measured() {
        let round = |start: u64| {
            let mut recorder = Recorder::new(Nanos(start), Nanos(start));
            (1..=10).for_each(|at| recorder.record(Nanos(start + at * MS), 1000));
            recorder
        };
        let mut window = round(100 * MS);
        window.add_earlier(&round(50 * MS));
        let timeline = window.timeline().unwrap();
        assert_eq!((timeline.measured_from_ns, timeline.end_ns, total(&timeline)), (50 * MS, 60 * MS, 20));
    }

    #[test]
    fn places_outside_are_left_out() {
        let slot = Slot(u32::MAX, vec![1, 2]);
        assert_eq!(slot.ios(), 0);
        assert_eq!(Slot(BUCKETS as u32 - 1, vec![3, u64::MAX]).ios(), 3);
        let timeline = Timeline { slot_ns: 0, slots: vec![slot; 3], ..Timeline::default() };
        assert_eq!(timeline.span(2), (0, 0));
    }

    proptest! {
        /// The sum of several threads' recordings equals a single recording of all.
        #[test]
        fn threads_add_up(
            answers in prop::collection::vec((0u64..5_000, 0u64..1 << 40, 0usize..3), 1..200),
        ) {
            let mut answers = answers;
            answers.sort_unstable();
            let mut alone = Recorder::new(Nanos(0), Nanos(0));
            let mut threads = vec![alone.clone(); 3];
            for &(at, latency, thread) in &answers {
                alone.record(Nanos(at * MS), latency);
                threads[thread].record(Nanos(at * MS), latency);
            }
            let mut whole = Recorder::default();
            threads.iter().for_each(|thread| whole.add(thread));
            let (whole, alone) = (whole.timeline().unwrap(), alone.timeline().unwrap());
            prop_assert_eq!(total(&whole), answers.len() as u64);
            prop_assert_eq!(whole.end_ns, alone.end_ns);
            prop_assert!(whole.slots.len() <= SLOTS);
            // The grid is the clock's: with equal slots, slot by slot the same.
            if whole.slot_ns == alone.slot_ns {
                prop_assert_eq!(whole, alone);
            }
        }
    }
}
