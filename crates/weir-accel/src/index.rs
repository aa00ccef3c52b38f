//! The index: the location of the newest logged version of each byte (P7).

use std::collections::BTreeMap;

/// Marks an entry without data: the range reads as zeroes.
const ZEROES: u64 = u64::MAX;

/// A run of bytes of the disk whose newest version is in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// First byte of the disk.
    pub start: u64,
    /// First byte after.
    pub end: u64,
    /// Sequence number of the record.
    pub sequence: u64,
    /// Position of the first byte on the log's ring; `None`: zeroes.
    pub position: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Value {
    end: u64,
    sequence: u64,
    position: u64,
}

impl Value {
    fn position_after(&self, bytes: u64) -> u64 {
        if self.position == ZEROES { ZEROES } else { self.position + bytes }
    }
}

/// Disjoint runs by their start.
#[derive(Debug, Default)]
pub struct Index {
    runs: BTreeMap<u64, Value>,
}

impl Index {
    /// Nothing is in the log.
    #[must_use]
    pub fn new() -> Index {
        Index::default()
    }

    /// Whether nothing is in the log.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// A newer record covers `start..end`.
    pub fn insert(&mut self, start: u64, end: u64, sequence: u64, position: Option<u64>) {
        let new = Value { end, sequence, position: position.unwrap_or(ZEROES) };
        // Guests overwrite the same blocks again and again: one look-up then.
        if let Some(old) = self.runs.get_mut(&start)
            && old.end == end
        {
            *old = new;
            return;
        }
        self.clear(start, end);
        self.runs.insert(start, new);
    }

    /// Cuts `start..end` out of all runs.
    fn clear(&mut self, start: u64, end: u64) {
        if let Some((&before, value)) = self.runs.range_mut(..start).next_back()
            && value.end > start
        {
            let old = *value;
            value.end = start;
            if old.end > end {
                self.runs.insert(end, Value { position: old.position_after(end - before), ..old });
                return;
            }
        }
        while let Some((&at, &old)) = self.runs.range(start..end).next() {
            self.runs.remove(&at);
            if old.end > end {
                self.runs.insert(end, Value { position: old.position_after(end - at), ..old });
            }
        }
    }

    /// The record leaves the log: the runs that are still its own go.
    pub fn remove(&mut self, start: u64, end: u64, sequence: u64) {
        if let Some(value) = self.runs.get(&start)
            && value.end == end
        {
            if value.sequence == sequence {
                self.runs.remove(&start);
            }
            return;
        }
        let mut from = start;
        // A newer run may reach beyond the end.
        while from < end
            && let Some((&at, value)) = self.runs.range(from..end).next()
        {
            from = value.end;
            if value.sequence == sequence {
                self.runs.remove(&at);
            }
        }
    }

    /// The parts of `start..end` that are in the log, in order, clipped to the range.
    pub fn overlaps(&self, start: u64, end: u64) -> impl Iterator<Item = Entry> {
        let first =
            self.runs.range(..=start).next_back().filter(|(_, value)| value.end > start).map(|(&at, _)| at);
        self.runs.range(first.unwrap_or(start)..end).map(move |(&at, value)| {
            let from = at.max(start);
            let position = value.position_after(from - at);
            Entry {
                start: from,
                end: value.end.min(end),
                sequence: value.sequence,
                position: (position != ZEROES).then_some(position),
            }
        })
    }

    /// All runs, in order.
    pub fn iter(&self) -> impl Iterator<Item = Entry> {
        self.overlaps(0, u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against an array with one cell per byte.
        #[test]
        fn agrees_with_an_array(
            steps in prop::collection::vec((0u64..60, 1u64..30, any::<bool>(), any::<bool>()), 1..80)
        ) {
            let mut index = Index::new();
            let mut cells: Vec<Option<(u64, Option<u64>)>> = vec![None; 100];
            let mut records = Vec::new();
            for (number, (start, length, zeroes, free)) in steps.into_iter().enumerate() {
                let (number, end) = (number as u64 + 1, start + length);
                let position = (!zeroes).then_some(number * 1000);
                index.insert(start, end, number, position);
                records.push((start, end, number));
                for at in start..end {
                    cells[at as usize] = Some((number, position.map(|position| position + at - start)));
                }
                if free {
                    let (start, end, number) = records.remove(0);
                    index.remove(start, end, number);
                    for cell in &mut cells {
                        if cell.is_some_and(|(owner, _)| owner == number) {
                            *cell = None;
                        }
                    }
                }
                let mut seen = vec![None; 100];
                for entry in index.overlaps(0, 100) {
                    for at in entry.start..entry.end {
                        seen[at as usize] = Some((entry.sequence, entry.position.map(|position| position + at - entry.start)));
                    }
                }
                prop_assert_eq!(&seen, &cells);
                let clipped: Vec<_> = index.overlaps(17, 23).collect();
                prop_assert!(clipped.iter().all(|entry| entry.start >= 17 && entry.end <= 23));
                prop_assert_eq!(
                    clipped.iter().map(|entry| entry.end - entry.start).sum::<u64>(),
                    cells[17..23].iter().flatten().count() as u64
                );
            }
        }
    }
}
