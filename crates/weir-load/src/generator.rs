//! Chooses requests and records their latencies. Does no I/O and reads no clock.
//!
//! The caller passes the time: an engine's loop reads the clock once before it submits a batch and once after it has
//! reaped one. Every request of a submitted batch has the same time of issue, and every answer of a reaped
//! batch the same time of completion. That is exact, not an approximation: one system call submits all requests of a batch and
//! one returns all answers, so no more precise time is known for any of them.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use weir_block::Nanos;

use crate::arrivals::Pace;
use crate::bits::BitSet;
use crate::io::Io;
use crate::plan::Plan;
use crate::tally::{IoKind, Tally};
use crate::workload::{Span, Workload, WorkloadError};

#[derive(Clone, Copy, Debug)]
struct Pending {
    /// With a rate its due time, else its time of issue.
    started: Nanos,
    length: u32,
    kind: IoKind,
}

/// The core of one thread's load.
#[derive(Debug)]
pub struct Generator {
    plan: Plan,
    first: u64,
    /// Bytes that may still be requested; `u64::MAX` when only time ends the load.
    left: u64,
    deadline: Nanos,
    flushes: Option<Flushes>,
    /// No rate, no flushes, no verification: no check per request is needed.
    is_plain: bool,
    largest: u64,
    pace: Option<Pace>,
    /// With a rate: time of issue of the request in each slot.
    issued: Vec<Nanos>,
    slots: Vec<Pending>,
    /// Last in, first out: the buffers used last are still in the CPU's cache.
    free: Vec<u32>,
    /// The blocks in flight; kept only while verifying.
    busy: Option<Busy>,
    tally: Tally,
}

/// The schedule of flushes.
#[derive(Clone, Copy, Debug)]
struct Flushes {
    /// Writes between two flushes.
    every: u64,
    /// Writes left before the next flush.
    due_in: u64,
}

/// Blocks with a request in flight.
#[derive(Debug)]
struct Busy {
    blocks: BitSet,
    /// By slot, as bytes from the start of the span; `None` for a flush.
    offsets: Vec<Option<u64>>,
    block_size: u64,
    /// Whether another block may take its place.
    is_random: bool,
}

impl Busy {
    /// Claims a free block: the one at `offset`, or for a random load the next free one.
    fn claim(&mut self, offset: u64) -> Option<u64> {
        let block = offset / self.block_size;
        if self.is_random {
            self.blocks.set_from(block).map(|block| block * self.block_size)
        } else {
            self.blocks.set(block).then_some(offset)
        }
    }

    /// The request in a slot was answered.
    fn release(&mut self, slot: u32) {
        if let Some(offset) = self.offsets[slot as usize].take() {
            self.blocks.clear(offset / self.block_size);
        }
    }
}

impl Generator {
    /// The load of thread number `thread` on its `span` (from [`Workload::spans`]), from `now` on.
    ///
    /// # Errors
    /// The workload does not validate, or the span holds no block.
    pub fn new(workload: &Workload, span: Span, thread: u32, now: Nanos) -> Result<Generator, WorkloadError> {
        workload.validate()?;
        let block_size = workload.block_size.0;
        let blocks = span.length / block_size;
        if blocks == 0 {
            let range = weir_block::size::Size(span.length);
            return Err(WorkloadError::TooSmall {
                range,
                threads: workload.threads,
                block_size: workload.block_size,
            });
        }
        let depth = workload.queue_depth;
        // Adjacent seeds must not give correlated sequences: spread them over 64 bits.
        let mut random = fastrand::Rng::with_seed(spread(workload.seed ^ spread(u64::from(thread))));
        let pace = workload
            .rate
            .map(|rate| Pace::new(rate, workload.arrivals, (thread, workload.threads), now, random.fork()));
        let idle = Pending { started: now, length: 0, kind: IoKind::Read };
        Ok(Generator {
            plan: Plan::new(workload, span, random),
            first: span.offset,
            left: match (workload.bytes, workload.runtime) {
                (Some(bytes), _) => bytes.0.div_ceil(u64::from(workload.threads)),
                (None, Some(_)) => u64::MAX,
                (None, None) => blocks * block_size,
            },
            deadline: workload.runtime.map_or(Nanos::NEVER, |runtime| now + workload.warmup + runtime),
            flushes: workload.flush_every.map(|every| Flushes { every, due_in: every }),
            is_plain: workload.rate.is_none() && workload.flush_every.is_none() && !workload.verify,
            largest: block_size,
            issued: vec![now; if pace.is_some() { depth as usize } else { 0 }],
            pace,
            slots: vec![idle; depth as usize],
            free: (0..depth).rev().collect(),
            busy: workload.verify.then(|| Busy {
                blocks: BitSet::new(blocks),
                offsets: vec![None; depth as usize],
                block_size,
                is_random: workload.access.is_random(),
            }),
            tally: Tally::of_load(now, now + workload.warmup),
        })
    }

    /// Joins the common sequence of the threads of a [`crate::Pattern::Shared`] load: bytes taken so far, 0 at the beginning.
    /// Other patterns do not need it.
    pub fn share(&mut self, common: &Arc<AtomicU64>) {
        self.plan.share(common);
    }

    /// Passes all requests that can be issued at `now` to `make`: calls [`Generator::next`] until there is none; for a load
    /// without rate, flushes and verification, issues all at once.
    #[inline]
    pub fn issue(&mut self, now: Nanos, mut make: impl FnMut(Io)) {
        if self.is_plain {
            self.issue_plain(now, &mut make);
        }
        while let Some(io) = self.next(now) {
            make(io);
        }
    }

    /// Leaves the load's last requests to [`Generator::next`], which counts them one by one.
    #[inline]
    fn issue_plain(&mut self, now: Nanos, make: &mut impl FnMut(Io)) {
        if now >= self.deadline {
            return;
        }
        while !self.free.is_empty() {
            let (offsets, lengths, kinds) = self.plan.rest();
            let count = offsets.len().min(self.free.len());
            if count == 0 || self.left < count as u64 * self.largest {
                return;
            }
            let planned = offsets.iter().zip(lengths).zip(kinds);
            let from = self.free.len() - count;
            let mut bytes = 0;
            for (slot, ((&offset, &length), &kind)) in self.free.drain(from..).rev().zip(planned) {
                self.slots[slot as usize] = Pending { started: now, length, kind };
                bytes += u64::from(length);
                make(Io { slot, kind, offset: self.first + offset, length });
            }
            self.left -= bytes;
            self.plan.skip(count);
        }
    }

    /// The next request, issued at `now`; `None` when the queue is full, the load is over, its next start is not due, or (while
    /// verifying) every candidate block is in flight.
    #[inline]
    pub fn next(&mut self, now: Nanos) -> Option<Io> {
        if self.left == 0 || now >= self.deadline || self.free.is_empty() {
            return None;
        }
        if let Some(Flushes { due_in: 0, .. }) = self.flushes {
            return self.flush(now);
        }
        let started = match &self.pace {
            Some(pace) if now < pace.next() => return None,
            Some(pace) => pace.next(),
            None => now,
        };
        let Some((mut offset, length, kind)) = self.plan.peek() else {
            self.left = 0;
            return None;
        };
        if let Some(busy) = &mut self.busy {
            offset = busy.claim(offset)?;
        }
        self.plan.advance();
        let slot = self.free.pop()?;
        self.left = self.left.saturating_sub(u64::from(length));
        if let Some(pace) = &mut self.pace {
            pace.advance();
            self.issued[slot as usize] = now;
        }
        if let Some(busy) = &mut self.busy {
            busy.offsets[slot as usize] = Some(offset);
        }
        if let Some(flushes) = &mut self.flushes {
            flushes.due_in -= u64::from(kind == IoKind::Write);
        }
        self.slots[slot as usize] = Pending { started, length, kind };
        Some(Io { slot, kind, offset: self.first + offset, length })
    }

    /// A flush, which has no start time of its own in a rate.
    #[cold]
    fn flush(&mut self, now: Nanos) -> Option<Io> {
        let slot = self.free.pop()?;
        if let Some(flushes) = &mut self.flushes {
            flushes.due_in = flushes.every;
        }
        if let Some(issued) = self.issued.get_mut(slot as usize) {
            *issued = now;
        }
        let kind = IoKind::Flush;
        self.slots[slot as usize] = Pending { started: now, length: 0, kind };
        Some(Io { slot, kind, offset: 0, length: 0 })
    }

    /// Completes an I/O that its engine has answered by `now`, `ok` or with an error.
    #[inline]
    pub fn complete(&mut self, slot: u32, now: Nanos, ok: bool) {
        let Pending { started, length, kind } = self.slots[slot as usize];
        self.free.push(slot);
        let length = u64::from(length);
        let latency = now.0.saturating_sub(started.0);
        self.tally.count(kind, length, latency, ok);
        if ok && kind != IoKind::Flush {
            self.tally.timeline.record(now, latency);
        }
        if self.is_plain {
            return;
        }
        if let Some(busy) = &mut self.busy {
            busy.release(slot);
        }
        if ok && let Some(issued) = self.issued.get(slot as usize) {
            self.tally.count_service(kind, now.0.saturating_sub(issued.0));
        }
    }

    /// With a rate: requests that were due before the load's end and never issued, because the queue was full. `now` is the end of a
    /// load that ended early: later ones were never due.
    #[must_use]
    pub fn never_made(&self, now: Nanos) -> u64 {
        match &self.pace {
            Some(pace) if self.left > 0 && self.deadline != Nanos::NEVER => {
                pace.clone().due_before(self.deadline.min(now))
            }
            _ => 0,
        }
    }

    /// Requests issued and not completed.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        (self.slots.len() - self.free.len()) as u32
    }

    /// Whether no further request will be issued.
    #[must_use]
    pub fn exhausted(&self, now: Nanos) -> bool {
        self.left == 0 || now >= self.deadline
    }

    /// Time at which to call [`Generator::next`] again even without a completion. [`Nanos::NEVER`] once the load is over: only
    /// answers are outstanding.
    #[must_use]
    pub fn wake(&self, now: Nanos) -> Nanos {
        match &self.pace {
            Some(pace) if !self.free.is_empty() && !self.exhausted(now) => pace.next().min(self.deadline),
            _ => Nanos::NEVER,
        }
    }

    /// Stops issuing requests.
    pub fn stop(&mut self) {
        self.left = 0;
    }

    /// The counts so far.
    #[must_use]
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Clears the counts: the end of the warm-up.
    pub fn clear_tally(&mut self) {
        self.tally.clear();
    }

    /// The counts, when the load is over.
    #[must_use]
    pub fn into_tally(self) -> Tally {
        self.tally
    }
}

/// Spreads a seed over 64 bits (the finaliser of SplitMix64, Steele et al. 2014).
#[must_use]
pub(crate) fn spread(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use super::*;
    use crate::workload::Access;
    use proptest::prelude::*;
    use weir_block::size::Size;

    const BLOCK: u64 = 4096;

    fn workload(access: Access) -> Workload {
        Workload { access, runtime: None, ..Workload::default() }
    }

    fn generator(workload: &Workload, blocks: u64) -> Generator {
        let span = Span { offset: 8 * BLOCK, length: blocks * workload.block_size.0 };
        Generator::new(workload, span, 0, Nanos(0)).unwrap()
    }

    #[test]
    fn sequential_goes_once_over_the_range() {
        let mut generator = generator(&workload(Access::Read), 100);
        let mut offsets = Vec::new();
        while let Some(io) = generator.next(Nanos(0)) {
            offsets.push(io.offset);
            generator.complete(io.slot, Nanos(10), true);
        }
        assert_eq!(offsets, (8..108).map(|block| block * BLOCK).collect::<Vec<_>>());
        assert_eq!((generator.tally().ios(), generator.in_flight()), (100, 0));
        assert!(generator.exhausted(Nanos(0)));
    }

    #[test]
    fn the_queue_depth_and_the_deadline_hold() {
        let workload = Workload {
            runtime: Some(Duration::from_nanos(100)),
            queue_depth: 3,
            ..workload(Access::RandRead)
        };
        let mut generator = generator(&workload, 10);
        let slots: Vec<u32> = std::iter::from_fn(|| generator.next(Nanos(99))).map(|io| io.slot).collect();
        assert_eq!(
            slots.iter().collect::<HashSet<_>>().len(),
            3,
            "three different slots, then the queue is full"
        );
        generator.complete(slots[1], Nanos(99), true);
        assert!(generator.next(Nanos(100)).is_none(), "the time is up");
        assert_eq!(generator.in_flight(), 2);
    }

    #[test]
    fn a_load_that_ends_early_owes_only_what_was_due_until_then() {
        let workload = Workload {
            runtime: Some(Duration::from_secs(1)),
            rate: Some(1000),
            queue_depth: 1,
            ..workload(Access::RandRead)
        };
        let mut generator = generator(&workload, 10);
        assert!(generator.next(Nanos(1_000_000)).is_some() && generator.next(Nanos(5_000_000)).is_none());
        assert!((98..=100).contains(&generator.never_made(Nanos(100_000_000))), "of a tenth of the time");
        assert!((998..=1000).contains(&generator.never_made(Nanos(3_000_000_000))), "of all of it");
    }

    #[test]
    fn random_offsets_are_uniform() {
        let workload = Workload { runtime: Some(Duration::from_secs(1)), ..workload(Access::RandRead) };
        let mut generator = generator(&workload, 64);
        let mut hits = [0u32; 64];
        for _ in 0..64_000 {
            let io = generator.next(Nanos(0)).unwrap();
            hits[(io.offset / BLOCK - 8) as usize] += 1;
            generator.complete(io.slot, Nanos(1), true);
        }
        // Chi-square with 63 degrees of freedom: above 120 has a chance of less than 1 in 50,000.
        let chi: f64 = hits.iter().map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0).sum();
        assert!(chi < 120.0, "chi-square {chi}");
    }

    #[test]
    fn the_mix_is_as_asked() {
        let workload = Workload {
            runtime: Some(Duration::from_secs(1)),
            ..workload(Access::RandRw { read_percent: 70 })
        };
        let mut generator = generator(&workload, 64);
        for _ in 0..20_000 {
            let io = generator.next(Nanos(0)).unwrap();
            generator.complete(io.slot, Nanos(1), true);
        }
        let reads = generator.tally().kind(IoKind::Read).ios;
        assert!((13_700..14_300).contains(&reads), "{reads} of 20000");
    }

    #[test]
    fn all_at_once_is_one_by_one() {
        for access in [Access::Read, Access::RandRead, Access::RandRw { read_percent: 30 }] {
            for bytes in [None, Some(Size(77 * 4096))] {
                let workload = Workload {
                    mix: "4k:60,64k:40".parse().ok(),
                    block_size: Size(64 << 10),
                    queue_depth: 50,
                    bytes,
                    ..workload(access)
                };
                let (mut one, mut all) = (generator(&workload, 100), generator(&workload, 100));
                let (mut issued, mut flying) = (0, Vec::new());
                loop {
                    let expected: Vec<Io> = std::iter::from_fn(|| one.next(Nanos(0))).collect();
                    let mut found = Vec::new();
                    all.issue(Nanos(0), |io| found.push(io));
                    assert_eq!(found, expected);
                    issued += found.len();
                    flying.append(&mut found);
                    if flying.is_empty() {
                        break;
                    }
                    // Another number is answered each time, so that plan and queue end at different requests.
                    for io in flying.drain(..flying.len().min(1 + issued % 37)) {
                        one.complete(io.slot, Nanos(1), true);
                        all.complete(io.slot, Nanos(1), true);
                    }
                }
                assert_eq!((one.left, one.tally().ios()), (all.left, all.tally().ios()));
                assert_eq!(all.tally().ios(), issued as u64);
                assert!(all.left == 0 && issued > 10, "{issued}");
            }
        }
    }

    #[test]
    fn flushes_come_after_so_many_writes() {
        let workload = Workload {
            flush_every: Some(3),
            runtime: Some(Duration::from_secs(1)),
            ..workload(Access::RandRw { read_percent: 50 })
        };
        let mut generator = generator(&workload, 64);
        let (mut writes, mut flushes) = (0, 0);
        for _ in 0..1000 {
            let io = generator.next(Nanos(0)).unwrap();
            match io.kind {
                IoKind::Flush => {
                    assert_eq!((writes, io.length), (3, 0));
                    (writes, flushes) = (0, flushes + 1);
                }
                kind => writes += u32::from(kind == IoKind::Write),
            }
            generator.complete(io.slot, Nanos(1), true);
        }
        assert!(flushes > 100, "{flushes}");
        assert_eq!(generator.tally().kind(IoKind::Flush).ios, flushes);
        assert_eq!(generator.tally().ios(), 1000 - flushes);
    }

    #[test]
    fn errors_are_counted_apart_and_latency_is_kept() {
        let mut generator = generator(&workload(Access::Write), 4);
        for (latency, ok) in [(1_000, true), (2_000, false), (3_000, true)] {
            let io = generator.next(Nanos(500)).unwrap();
            generator.complete(io.slot, Nanos(500 + latency), ok);
        }
        let writes = generator.tally().kind(IoKind::Write);
        assert_eq!((writes.ios, writes.errors, writes.bytes), (2, 1, 2 * BLOCK));
        assert!((2_970..=3_030).contains(&writes.latency.max()));
    }

    #[test]
    fn an_open_loop_counts_from_the_intended_start() {
        let workload = Workload {
            rate: Some(1_000_000),
            runtime: Some(Duration::from_secs(1)),
            ..workload(Access::RandRead)
        };
        let mut generator = generator(&workload, 64);
        let first = generator.next(Nanos(0)).unwrap();
        assert!(generator.next(Nanos(999)).is_none());
        assert_eq!(generator.wake(Nanos(999)), Nanos(1000));
        assert_eq!(
            generator.wake(Nanos(1_000_000_000)),
            Nanos::NEVER,
            "at the end nothing is left to wake up for"
        );
        // The target stalls until 10 µs: the latency of a request due at 1 µs counts from there.
        generator.complete(first.slot, Nanos(10_000), true);
        let late = generator.next(Nanos(10_000)).unwrap();
        generator.complete(late.slot, Nanos(10_500), true);
        assert!((9_400..=9_600).contains(&generator.tally().kind(IoKind::Read).latency.min()));
    }

    #[test]
    fn threads_and_seeds_differ_but_repeat() {
        let offsets = |seed, thread| {
            let workload = Workload { seed, ..workload(Access::RandRead) };
            let span = Span { offset: 0, length: 1000 * BLOCK };
            let mut generator = Generator::new(&workload, span, thread, Nanos(0)).unwrap();
            std::iter::from_fn(move || generator.next(Nanos(0))).map(|io| io.offset).collect::<Vec<_>>()
        };
        assert_eq!(offsets(1, 0), offsets(1, 0));
        assert_ne!(offsets(1, 0), offsets(2, 0));
        assert_ne!(offsets(1, 0), offsets(1, 1));
    }

    proptest! {
        #[test]
        fn offsets_are_aligned_and_inside(
            shift in 0u32..8, blocks in 1u64..500, depth in 1u32..64, seed: u64, percent in 0u8..=100,
        ) {
            let workload = Workload {
                block_size: Size(512 << shift),
                queue_depth: depth,
                seed,
                ..workload(Access::RandRw { read_percent: percent })
            };
            let size = workload.block_size.0;
            let mut generator = generator(&workload, blocks);
            let mut issued = 0;
            while let Some(io) = generator.next(Nanos(0)) {
                prop_assert_eq!((io.offset - 8 * BLOCK) % size, 0);
                prop_assert!(io.offset >= 8 * BLOCK);
                prop_assert!(io.offset + u64::from(io.length) <= 8 * BLOCK + blocks * size);
                prop_assert!(io.slot < depth);
                generator.complete(io.slot, Nanos(1), true);
                issued += 1;
            }
            prop_assert_eq!(issued, blocks);
        }

        #[test]
        fn verifying_never_has_a_block_in_flight_twice(
            blocks in 1u64..80, depth in 1u32..64, seed: u64, random: bool,
        ) {
            let access = if random { Access::RandWrite } else { Access::Write };
            let workload = Workload {
                runtime: Some(Duration::from_secs(1)), verify: true, queue_depth: depth, seed, ..workload(access)
            };
            let mut generator = generator(&workload, blocks);
            let mut order = fastrand::Rng::with_seed(seed);
            let mut flying: Vec<Io> = Vec::new();
            for _ in 0..300 {
                while let Some(io) = generator.next(Nanos(0)) {
                    prop_assert!(flying.iter().all(|other| other.offset != io.offset));
                    flying.push(io);
                }
                prop_assert!(!flying.is_empty());
                if random {
                    prop_assert_eq!(flying.len() as u64, u64::from(depth).min(blocks));
                }
                let done = flying.swap_remove(order.usize(..flying.len()));
                generator.complete(done.slot, Nanos(1), true);
            }
        }
    }
}
