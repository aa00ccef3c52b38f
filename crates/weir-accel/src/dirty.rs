//! The acknowledged data that is not in the backing yet: its size and age.

use std::collections::VecDeque;
use std::time::Duration;

use weir_block::Nanos;

/// Ages are known to within this time.
const STEP: Duration = Duration::from_millis(50);

/// The records that the backing does not hold.
#[derive(Debug, Default)]
pub struct Dirty {
    bytes: u64,
    /// From this record on, records are no older than that. Never more than there are records (P10).
    marks: VecDeque<(u64, Nanos)>,
}

impl Dirty {
    /// A record was appended. The age of an inherited one is unknown: it counts from the takeover.
    pub fn add(&mut self, sequence: u64, bytes: u64, now: Nanos) {
        self.bytes += bytes;
        if self.marks.back().is_none_or(|&(_, last)| now - last >= STEP) {
            self.marks.push_back((sequence, now));
        }
    }

    /// A record is in the backing.
    pub fn remove(&mut self, bytes: u64) {
        self.bytes -= bytes;
    }

    /// All records up to `sequence` have been removed.
    pub fn clean_to(&mut self, sequence: u64, last: u64) {
        while self.marks.get(1).is_some_and(|&(first, _)| first <= sequence + 1) {
            self.marks.pop_front();
        }
        if sequence >= last {
            self.marks.clear();
        }
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Age of the oldest record; `None` when all is clean.
    #[must_use]
    pub fn oldest(&self, now: Nanos) -> Option<Duration> {
        self.marks.front().map(|&(_, since)| now - since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_age_follows_the_oldest_record() {
        let at = |ms: u64| Nanos(1_000_000_000 + ms * 1_000_000);
        let mut dirty = Dirty::default();
        assert_eq!(dirty.oldest(at(0)), None);
        for sequence in 1..=100 {
            dirty.add(sequence, 512, at(sequence * 10));
        }
        assert_eq!(dirty.bytes(), 51_200);
        for clean in [0, 1, 37, 98] {
            let mut dirty = Dirty { bytes: dirty.bytes, marks: dirty.marks.clone() };
            dirty.clean_to(clean, 100);
            let exact = at(1000) - at((clean + 1) * 10);
            let age = dirty.oldest(at(1000)).expect("dirty");
            assert!(age >= exact && age - exact <= STEP, "{clean}: {age:?} for {exact:?}");
        }
        (1..=100).for_each(|_| dirty.remove(512));
        dirty.clean_to(100, 100);
        assert_eq!((dirty.bytes(), dirty.oldest(at(2000))), (0, None));
    }
}
