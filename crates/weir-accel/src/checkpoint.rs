//! The writes of one destage checkpoint: the newest version of each byte among its records, sorted by offset.

use std::collections::VecDeque;

use crate::index::{Entry, Index};
use crate::log::{Log, RecordKind};
use crate::planted::{Bug, Planted};

/// Most bytes in one write to the backing, and most pieces.
const LARGEST_WRITE: u64 = 1 << 20;
const MOST_PIECES: usize = 256;

/// One request to the backing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Consecutive bytes of the disk from pieces (position, length) of the arena.
    Write {
        /// Bytes from the start of the disk.
        offset: u64,
        /// Positions in the arena's region.
        pieces: Vec<(usize, usize)>,
    },
    /// A range that reads as zeroes.
    Zero {
        /// Bytes from the start of the disk.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Its space may be given back.
        discard: bool,
    },
}

/// The steps that bring the backing from the state after record `from - 1` to the state after record `to` (P5),
/// and how many bytes of data the overwrites within it saved.
#[must_use]
pub fn plan(log: &Log, from: u64, to: u64, planted: Planted) -> (VecDeque<Step>, u64) {
    let mut runs: Vec<Entry> = Vec::with_capacity((to + 1 - from) as usize);
    let mut total = 0;
    for (sequence, record) in log.range(from, to) {
        let position = (record.kind == RecordKind::Write).then_some(record.position);
        runs.push(Entry { start: record.offset, end: record.end(), sequence, position });
        total += record.data_length() as u64;
    }
    runs.sort_unstable_by_key(|run| (run.start, run.sequence));
    // Overwrites are mostly of the very same range: the newest of a group is its last.
    runs.dedup_by(|later, earlier| {
        let same = later.start == earlier.start && later.end == earlier.end;
        if same && !planted.has(Bug::ReorderDestage) {
            *earlier = *later;
        }
        same
    });
    if runs.windows(2).any(|pair| pair[1].start < pair[0].end) {
        runs = without_overlaps(runs);
    }
    let kept: u64 = runs.iter().filter(|run| run.position.is_some()).map(|run| run.end - run.start).sum();
    (steps(log, &runs), total - kept)
}

/// The general case, through the same structure that serves reads.
fn without_overlaps(mut runs: Vec<Entry>) -> Vec<Entry> {
    runs.sort_unstable_by_key(|run| run.sequence);
    let mut index = Index::new();
    for run in &runs {
        index.insert(run.start, run.end, run.sequence, run.position);
    }
    index.iter().collect()
}

/// Joins neighbours into requests of a useful size.
fn steps(log: &Log, runs: &[Entry]) -> VecDeque<Step> {
    let mut steps: VecDeque<Step> = VecDeque::new();
    let (mut end, mut size) = (0, 0);
    for run in runs {
        let length = run.end - run.start;
        let Some(position) = run.position else {
            let discard = log.get(run.sequence).is_some_and(|record| record.kind == RecordKind::Discard);
            steps.push_back(Step::Zero { offset: run.start, length, discard });
            end = u64::MAX;
            continue;
        };
        let piece = (log.arena_offset(position), length as usize);
        match steps.back_mut() {
            Some(Step::Write { pieces, .. })
                if end == run.start && size + length <= LARGEST_WRITE && pieces.len() < MOST_PIECES =>
            {
                pieces.push(piece);
                size += length;
            }
            _ => {
                steps.push_back(Step::Write { offset: run.start, pieces: vec![piece] });
                size = length;
            }
        }
        end = run.end;
    }
    steps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The plan against replaying the records one by one.
        #[test]
        fn ends_in_the_same_state_as_a_replay(
            writes in prop::collection::vec((0u64..64, 1u64..20, 0u8..6), 1..60), cut in 0usize..60
        ) {
            let mut log = Log::new(2 << 20, 1).expect("memory");
            let mut expected = vec![0xEEu8; 100 * 512];
            for (number, &(start, units, kind)) in writes.iter().enumerate() {
                let (offset, length) = (start * 512, units * 512);
                let kind = match kind { 0 => RecordKind::Zero, 1 => RecordKind::Discard, _ => RecordKind::Write };
                let fill = if kind == RecordKind::Write { number as u8 + 1 } else { 0 };
                let data = vec![fill; if kind == RecordKind::Write { length as usize } else { 0 }];
                log.append(kind, offset, length as u32, &data).expect("fits");
                if number < cut {
                    expected[offset as usize..(offset + length) as usize].fill(fill);
                }
            }
            let to = cut.min(writes.len()) as u64;
            let (steps, _) = plan(&log, 1, to, Planted::default());
            let mut disk = vec![0xEEu8; 100 * 512];
            let mut last_end = 0;
            for step in steps {
                match step {
                    Step::Write { mut offset, pieces } => {
                        prop_assert!(offset >= last_end, "sorted");
                        for (position, length) in pieces {
                            let bytes = log.region().bytes(position, length);
                            disk[offset as usize..offset as usize + length].copy_from_slice(bytes);
                            offset += length as u64;
                        }
                        last_end = offset;
                    }
                    Step::Zero { offset, length, .. } => {
                        prop_assert!(offset >= last_end, "sorted");
                        disk[offset as usize..(offset + length) as usize].fill(0);
                        last_end = offset + length;
                    }
                }
            }
            prop_assert!(disk == expected);
        }
    }
}
