//! Plans the next requests in batches: offsets, lengths and kinds.
//!
//! The workload is examined once per batch, not once per request: every pattern has a loop of its own, and constant
//! fields (one block size, only reads) are filled in once, when the load begins. No
//! floats, locks or allocations; only a sequence that threads share is an atomic counter, taken one at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::pattern::Pattern;
use crate::tally::IoKind;
use crate::workload::{Span, Workload};
use crate::zipf::Zipf;

/// Number of requests planned together.
const BATCH: usize = 64;

/// The next requests of one thread.
#[derive(Debug)]
pub(crate) struct Plan {
    random: fastrand::Rng,
    positions: Positions,
    /// By hundredths of the requests; `None` when all have the same length.
    mix: Option<Box<[u32; 100]>>,
    read_percent: u8,
    offsets: [u64; BATCH],
    lengths: [u32; BATCH],
    kinds: [IoKind; BATCH],
    at: usize,
    end: usize,
}

/// Positions of requests: bytes from the start of the span.
#[derive(Debug)]
enum Positions {
    Uniform {
        count: u64,
        unit: u64,
    },
    Zipf {
        table: Zipf,
        unit: u64,
    },
    /// The first `hot` of `count` positions get `percent` % of the requests.
    Hot {
        percent: u8,
        hot: u64,
        count: u64,
        unit: u64,
    },
    /// The next request's offset, and the span's end.
    Sequential {
        next: u64,
        end: u64,
    },
    /// In blocks: see [`Pattern::Stride`].
    Stride {
        next: u64,
        sweep: u64,
        step: u64,
        count: u64,
        unit: u64,
    },
    /// Bytes that all threads have taken so far; `passes` is false for a single pass.
    Shared {
        taken: Arc<AtomicU64>,
        end: u64,
        passes: bool,
    },
}

impl Plan {
    /// For a valid workload, on a span that holds at least one of its largest blocks.
    pub fn new(workload: &Workload, span: Span, random: fastrand::Rng) -> Plan {
        let read_percent = workload.access.read_percent();
        Plan {
            random,
            positions: Positions::new(workload, span),
            mix: workload.mix.as_ref().map(|mix| {
                let each = mix.shares().iter();
                let lengths: Vec<u32> = each
                    .flat_map(|&(size, percent)| std::iter::repeat_n(size.0 as u32, percent.into()))
                    .collect();
                Box::new(std::array::from_fn(|hundredth| lengths[hundredth % lengths.len()]))
            }),
            read_percent,
            offsets: [0; BATCH],
            lengths: [workload.block_size.0 as u32; BATCH],
            kinds: [if read_percent == 100 { IoKind::Read } else { IoKind::Write }; BATCH],
            at: 0,
            end: 0,
        }
    }

    /// Joins the threads' common sequence; no effect for other patterns.
    pub fn share(&mut self, common: &Arc<AtomicU64>) {
        if let Positions::Shared { taken, .. } = &mut self.positions {
            *taken = Arc::clone(common);
        }
    }

    /// Offset in the span, length and kind of the next request; `None` at the end of a common sequence.
    #[inline]
    pub fn peek(&mut self) -> Option<(u64, u32, IoKind)> {
        if self.at == self.end {
            self.fill();
            if self.end == 0 {
                return None;
            }
        }
        // Always below `BATCH`; the modulo lets the compiler omit three bounds checks per request.
        let at = self.at % BATCH;
        Some((self.offsets[at], self.lengths[at], self.kinds[at]))
    }

    /// Offsets in the span, lengths and kinds of the planned requests; none at the end of a common sequence.
    #[inline]
    pub fn rest(&mut self) -> (&[u64], &[u32], &[IoKind]) {
        if self.at == self.end {
            self.fill();
        }
        let next = self.at..self.end;
        (&self.offsets[next.clone()], &self.lengths[next.clone()], &self.kinds[next])
    }

    /// Consumes one planned request.
    #[inline]
    pub fn advance(&mut self) {
        self.skip(1);
    }

    /// Consumes so many planned requests.
    #[inline]
    pub fn skip(&mut self, count: usize) {
        self.at += count;
    }

    #[inline(never)]
    fn fill(&mut self) {
        (self.at, self.end) = (0, BATCH);
        if let Some(mix) = &self.mix {
            self.lengths.fill_with(|| mix[self.random.usize(0..100)]);
        }
        if !matches!(self.read_percent, 0 | 100) {
            let percent = self.read_percent;
            self.kinds.fill_with(|| match self.random.u8(0..100) < percent {
                true => IoKind::Read,
                false => IoKind::Write,
            });
        }
        self.end = self.positions.fill(&mut self.random, &self.lengths, &mut self.offsets);
    }
}

impl Positions {
    fn new(workload: &Workload, span: Span) -> Positions {
        let unit = workload.unit().0;
        // A request of any length fits at every position.
        let count = (span.length - workload.block_size.0) / unit + 1;
        if !workload.access.is_random() {
            return match workload.pattern {
                Pattern::Shared => Positions::Shared {
                    taken: Arc::default(),
                    end: span.length,
                    passes: workload.runtime.is_some() || workload.bytes.is_some(),
                },
                Pattern::Stride { bytes } => {
                    Positions::Stride { next: 0, sweep: 0, step: (bytes.0 / unit).min(count), count, unit }
                }
                _ => Positions::Sequential { next: 0, end: span.length },
            };
        }
        match workload.pattern {
            Pattern::Zipf { theta_milli } => Positions::Zipf { table: Zipf::new(count, theta_milli), unit },
            // A single position leaves no cold part.
            Pattern::Hot { requests, range } if count > 1 => {
                let hot = (u128::from(count) * u128::from(range) / 100) as u64;
                Positions::Hot { percent: requests, hot: hot.max(1), count, unit }
            }
            _ => Positions::Uniform { count, unit },
        }
    }

    /// Fills in the next positions and returns their number.
    fn fill(&mut self, random: &mut fastrand::Rng, lengths: &[u32], offsets: &mut [u64; BATCH]) -> usize {
        match self {
            Positions::Uniform { count, unit } => offsets.fill_with(|| random.u64(0..*count) * *unit),
            Positions::Zipf { table, unit } => offsets.fill_with(|| table.draw(random) * *unit),
            Positions::Hot { percent, hot, count, unit } => offsets.fill_with(|| {
                let among = if random.u8(0..100) < *percent { 0..*hot } else { *hot..*count };
                random.u64(among) * *unit
            }),
            Positions::Sequential { next, end } => {
                for (offset, &length) in offsets.iter_mut().zip(lengths) {
                    let length = u64::from(length);
                    *offset = if *next + length > *end { 0 } else { *next };
                    *next = *offset + length;
                }
            }
            Positions::Stride { next, sweep, step, count, unit } => offsets.fill_with(|| {
                let position = *next;
                *next += *step;
                if *next >= *count {
                    *sweep = if *sweep + 1 == *step { 0 } else { *sweep + 1 };
                    *next = *sweep;
                }
                position * *unit
            }),
            Positions::Shared { taken, end, passes } => {
                let length = u64::from(lengths[0]);
                let position = taken.fetch_add(length, Ordering::Relaxed);
                if !*passes && position + length > *end {
                    return 0;
                }
                // A request that would cross the end is aligned with it instead.
                offsets[0] = (position % *end).min(*end - length);
                return 1;
            }
        }
        BATCH
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use super::*;
    use crate::workload::Access;
    use proptest::prelude::*;
    use weir_block::size::Size;

    const BLOCK: u64 = 4096;

    fn plan(workload: &Workload, blocks: u64) -> Plan {
        workload.validate().unwrap();
        Plan::new(workload, Span { offset: 0, length: blocks * BLOCK }, fastrand::Rng::with_seed(3))
    }

    fn offsets(plan: &mut Plan, count: usize) -> Vec<u64> {
        let next = || {
            let planned = plan.peek().map(|planned| planned.0);
            plan.advance();
            planned
        };
        std::iter::from_fn(next).take(count).collect()
    }

    #[test]
    fn a_zipf_load_asks_for_blocks_as_the_formula_says() {
        let pattern = Pattern::Zipf { theta_milli: 1_000 };
        let mut plan = plan(&Workload { pattern, ..Workload::default() }, 500);
        let mut hits: HashMap<u64, f64> = HashMap::new();
        for offset in offsets(&mut plan, 200_000) {
            *hits.entry(offset / BLOCK).or_default() += 1.0;
        }
        let mut counts: Vec<f64> = hits.into_values().collect();
        counts.sort_by(|a, b| b.total_cmp(a));
        let harmonic: f64 = (1..=500).map(|rank| 1.0 / f64::from(rank)).sum();
        for rank in [1usize, 2, 3, 5, 10] {
            let should = 200_000.0 / harmonic / rank as f64;
            assert!(
                (counts[rank - 1] - should).abs() < should * 0.06,
                "{rank}: {} {should}",
                counts[rank - 1]
            );
        }
    }

    #[test]
    fn the_hot_part_gets_its_share_and_the_cold_one_the_rest() {
        let pattern = Pattern::Hot { requests: 90, range: 10 };
        let mut plan = plan(&Workload { pattern, ..Workload::default() }, 1_000);
        let asked = offsets(&mut plan, 100_000);
        let hot = asked.iter().filter(|&&offset| offset < 100 * BLOCK).count();
        assert!((89_500..90_500).contains(&hot), "{hot} of 100000");
        assert_eq!(asked.iter().map(|offset| offset / BLOCK).max(), Some(999));
    }

    #[test]
    fn mixes_are_mixed_as_asked() {
        let workload = Workload {
            mix: Some("4k:60,64k:40".parse().unwrap()),
            block_size: Size(64 << 10),
            access: Access::Rw { read_percent: 25 },
            ..Workload::default()
        };
        let mut plan = plan(&workload, 1_000);
        let (mut small, mut reads, mut expected) = (0, 0, 0);
        for _ in 0..50_000 {
            let (offset, length, kind) = plan.peek().unwrap();
            plan.advance();
            small += u32::from(length == 4096);
            reads += u32::from(kind == IoKind::Read);
            assert!(offset == expected || offset == 0, "one after the other: {offset} {expected}");
            expected = offset + u64::from(length);
            assert!(expected <= 1_000 * BLOCK);
        }
        assert!((29_500..30_500).contains(&small), "{small} small ones");
        assert!((12_100..12_900).contains(&reads), "{reads} reads");
    }

    #[test]
    fn a_shared_sequence_is_taken_once_by_all() {
        let workload = Workload {
            access: Access::Read,
            pattern: Pattern::Shared,
            threads: 4,
            runtime: None,
            ..Workload::default()
        };
        let common = Arc::default();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let mut plan = plan(&workload, 10_000);
                plan.share(&common);
                std::thread::spawn(move || offsets(&mut plan, usize::MAX))
            })
            .collect();
        let mut all: Vec<u64> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        all.sort_unstable();
        assert_eq!(all, (0..10_000).map(|block| block * BLOCK).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn a_stride_asks_for_every_block_once(blocks in 1u64..400, step in 1u64..500) {
            let pattern = Pattern::Stride { bytes: Size(step * BLOCK) };
            let mut plan = plan(&Workload { access: Access::Read, pattern, ..Workload::default() }, blocks);
            let asked = offsets(&mut plan, blocks as usize * 2);
            // Reference implementation: sweep after sweep, each one block further.
            let sweep = |first: u64| (first..blocks).step_by(step as usize);
            let slow: Vec<u64> = (0..step.min(blocks)).flat_map(sweep).map(|block| block * BLOCK).collect();
            prop_assert_eq!(&asked[..blocks as usize], &slow[..]);
            prop_assert_eq!(&asked[blocks as usize..], &slow[..], "and again");
        }

        #[test]
        fn every_request_is_aligned_and_inside(
            blocks in 16u64..300, which in 0usize..6, sectors in 1u64..9, percent in 0u8..=100,
        ) {
            let pattern = ["plain", "zipf:0.8", "hot:70/30", "plain", "shared", "stride:64k"][which];
            let random = which < 3;
            let access = match random {
                true => Access::RandRw { read_percent: percent },
                false => Access::Rw { read_percent: percent },
            };
            let workload = Workload {
                access,
                pattern: pattern.parse().unwrap(),
                mix: (which != 5).then(|| "4k:60,64k:40".parse().unwrap()),
                block_size: if which == 5 { Size(BLOCK) } else { Size(64 << 10) },
                alignment: random.then_some(Size(sectors * 512)),
                runtime: Some(Duration::from_secs(1)),
                ..Workload::default()
            };
            let mut plan = plan(&workload, blocks);
            let unit = if random { sectors * 512 } else { 512 };
            for _ in 0..500 {
                let (offset, length, _) = plan.peek().unwrap();
                plan.advance();
                prop_assert!(offset % unit == 0 && [4096, 65536].contains(&length));
                prop_assert!(offset + u64::from(length) <= blocks * BLOCK, "{} {}", offset, length);
            }
        }
    }
}
