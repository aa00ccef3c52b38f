//! The profiler: counts of each request.

use std::time::Duration;

use weir_block::{Nanos, Observe, RequestKind};

use super::arrivals::{BURSTS, GAPS, Times};
use super::buckets::{Scale, Spread, hundredths};
use super::classifier::{ALIGNMENTS, Classifier, RUNS};
use super::record::{
    Arrival, BLOCK, Class, Curve, Direction, Hour, KindProfile, LARGEST_DISK, Part, Profile, Reuse, Sampling,
    VERSION, WorkingSet, WriteBack,
};
use super::reuse::{AGES, DISTANCES, Distances, Sampler, WRITTEN};

/// Lengths of requests in sectors: exact below 128 KiB, then 16 steps for each doubling.
const SECTORS: Scale = Scale::new(4, 16);

/// Sectors below which each length has a bucket of its own.
const EXACT: usize = 256;

const SECTOR: u64 = 512;

/// Sampling settings of a profiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Maximum number of 4 KiB blocks in the sample, 64 to 2^24. 8192 are enough for an error of about one point (FAST 2015,
    /// section 4).
    pub samples: usize,
    /// Limit of sampled references per second; above it the sample shrinks, but not below 512 blocks. Bounds the processor time.
    pub sampled_per_second: u32,
    /// Length of an interval of the working set over time, at least 1 ms.
    pub interval: Duration,
}

impl Default for Settings {
    /// About 1.2 MiB of memory; about 0.1 % of a processor for sampled references.
    fn default() -> Settings {
        Settings { samples: 8192, sampled_per_second: 8_000, interval: Duration::from_secs(60) }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    requests: u64,
    bytes: u64,
    blocks: u64,
}

/// The requests of one direction.
#[derive(Debug)]
struct Kind {
    classifier: Classifier,
    counts: [Counts; Class::COUNT],
    exact: [Box<[u64; EXACT]>; Class::COUNT],
    large: [Box<[u64; SECTORS.buckets()]>; Class::COUNT],
}

impl Kind {
    fn new() -> Kind {
        Kind {
            classifier: Classifier::new(),
            counts: [Counts::default(); Class::COUNT],
            exact: std::array::from_fn(|_| Box::new([0; EXACT])),
            large: std::array::from_fn(|_| Box::new([0; SECTORS.buckets()])),
        }
    }
}

/// Watches the requests of one disk, in memory of a fixed size (about 1.2 MiB with the usual settings) and without
/// allocation, lock or clock of its own.
#[derive(Debug)]
pub struct Profiler {
    times: Times,
    kinds: [Kind; 2],
    sampler: Sampler,
    blocks_written: u64,
    /// The end of the last block that was used.
    end: u64,
    write_zeroes: u64,
    discards: u64,
    flushes: u64,
    interval: Duration,
}

impl Profiler {
    /// Profiles from `now` on, which is `unix` after 1970 (for the hours of the day).
    ///
    /// # Panics
    /// A setting is outside its range.
    #[must_use]
    pub fn new(settings: Settings, now: Nanos, unix: Duration) -> Profiler {
        let Settings { samples, sampled_per_second, interval } = settings;
        assert!(samples >= 64, "a sample of fewer than 64 blocks says nothing");
        assert!(interval >= Duration::from_millis(1), "an interval is at least a millisecond");
        Profiler {
            times: Times::new(now, unix),
            kinds: [Kind::new(), Kind::new()],
            sampler: Sampler::new(now, samples, sampled_per_second, interval),
            blocks_written: 0,
            end: 0,
            write_zeroes: 0,
            discards: 0,
            flushes: 0,
            interval,
        }
    }

    fn data(&mut self, now: Nanos, direction: Direction, offset: u64, length: u64) {
        if length == 0 {
            return;
        }
        self.times.arrive(now);
        self.times.data(direction == Direction::Read, length);
        let now = self.times.last;
        let kind = &mut self.kinds[direction as usize];
        let class = kind.classifier.classify(offset, length);
        let first = offset / BLOCK;
        let blocks = (offset.saturating_add(length - 1)) / BLOCK - first + 1;
        self.end = self.end.max((first + blocks).saturating_mul(BLOCK));
        let counts = &mut kind.counts[class as usize];
        counts.requests += 1;
        counts.bytes += length;
        counts.blocks += blocks;
        let sectors = length.div_ceil(SECTOR);
        match kind.exact[class as usize].get_mut(sectors as usize) {
            Some(count) => *count += 1,
            None => kind.large[class as usize][SECTORS.bucket(sectors)] += 1,
        }
        self.sampler.request(now, (direction, class), (first, blocks), self.blocks_written);
        if direction == Direction::Write {
            self.blocks_written += blocks;
        }
    }

    /// Bytes of memory in use, independent of the workload.
    #[must_use]
    pub fn memory(&self) -> usize {
        let sizes = 2 * Class::COUNT * (EXACT + SECTORS.buckets()) * size_of::<u64>();
        size_of::<Profiler>() + sizes + self.sampler.memory()
    }

    /// The profile at `now`, under the name of its source.
    #[must_use]
    pub fn profile(&self, now: Nanos, source: &str) -> Profile {
        let mut times = self.times.clone();
        times.settle(now);
        let mut profile = Profile {
            version: VERSION,
            source: source.to_owned(),
            disk_bytes: None,
            end_bytes: self.end.min(LARGEST_DISK),
            seconds: (now.max(times.last) - times.started).as_micros() as f64 / 1e6,
            write_zeroes: self.write_zeroes,
            discards: self.discards,
            flushes: self.flushes,
            arrival: arrival(&times),
            hours: hours(&times),
            reuse: self.reuse(),
            write_back: WriteBack {
                after_blocks: WRITTEN.list(&self.sampler.rewritten_bytes),
                after_ms: AGES.list(&self.sampler.rewritten_age),
            },
            ..Profile::default()
        };
        for direction in Direction::ALL {
            *profile.kind_mut(direction) = self.kind(direction);
        }
        let cold = self.sampler.distances.iter().flatten().map(|distances| distances.cold).sum::<f64>();
        let (skipped, over_time) = self.sampler.working_set(now);
        profile.working_set = WorkingSet {
            bytes: (cold * BLOCK as f64).round(),
            interval_seconds: self.interval.as_secs_f64(),
            skipped,
            over_time: over_time.into_iter().map(|blocks| (blocks * BLOCK as f64).round()).collect(),
        };
        let (blocks, rate) = self.sampler.sample();
        profile.sampling = Sampling { rate: (rate * 1e9).round() / 1e9, blocks: blocks as u64 };
        profile
    }

    fn kind(&self, direction: Direction) -> KindProfile {
        let kind = &self.kinds[direction as usize];
        let part = |class: Class| {
            let Counts { requests, bytes, blocks } = kind.counts[class as usize];
            let distances = &self.sampler.distances[direction as usize][class as usize];
            let (exact, large) = (&*kind.exact[class as usize], &*kind.large[class as usize]);
            Part { requests, bytes, blocks, sizes: sizes(exact, large), curve: curve(distances) }
        };
        KindProfile {
            random: part(Class::Random),
            sequential: part(Class::Sequential),
            strided: part(Class::Strided),
            runs: RUNS.list(&kind.classifier.runs().map(|count| count as f64)),
            strides: kind.classifier.strides(),
            alignments: alignments(&kind.classifier.alignments()),
        }
    }

    /// First uses need no correction: there is one for each block of the sample. The difference to the exact number of references
    /// consists of uses of few, frequently used blocks, which the sample may include or not, and those are re-uses.
    fn reuse(&self) -> Reuse {
        let sampler = &self.sampler;
        let missing = |direction: Direction| {
            let exact: u64 = self.kinds[direction as usize].counts.iter().map(|counts| counts.blocks).sum();
            let weight: f64 = sampler.distances[direction as usize].iter().map(|part| part.weight).sum();
            exact as f64 - weight
        };
        let (reads, writes) = (missing(Direction::Read), missing(Direction::Write));
        let known = sampler.re_reads + sampler.reads_after_write;
        let again = if known > 0.0 { sampler.re_reads / known } else { 1.0 };
        Reuse {
            first_reads: hundredths(sampler.first_reads),
            re_reads: hundredths((sampler.re_reads + reads * again).max(0.0)),
            reads_after_write: hundredths((sampler.reads_after_write + reads * (1.0 - again)).max(0.0)),
            new_writes: hundredths(sampler.new_writes),
            overwrites: hundredths((sampler.overwrites + writes).max(0.0)),
        }
    }
}

impl Observe for Profiler {
    #[inline]
    fn observe(&mut self, now: Nanos, kind: RequestKind, offset: u64, length: u64) {
        let count = match kind {
            RequestKind::Read => return self.data(now, Direction::Read, offset, length),
            RequestKind::Write => return self.data(now, Direction::Write, offset, length),
            RequestKind::WriteZeroes => &mut self.write_zeroes,
            RequestKind::Discard => &mut self.discards,
            RequestKind::Flush => &mut self.flushes,
            // Nothing is read or written.
            RequestKind::Extents => return,
        };
        *count += 1;
        self.times.arrive(now);
    }
}

fn sizes(exact: &[u64], large: &[u64]) -> Spread {
    let bytes = |sectors: u64| sectors * SECTOR;
    let exact = exact.iter().enumerate().map(|(sectors, &count)| (bytes(sectors as u64), count));
    let large = large.iter().enumerate().map(|(bucket, &count)| (bytes(SECTORS.floor(bucket)), count));
    Spread(
        exact
            .chain(large)
            .filter(|&(_, count)| count > 0)
            .map(|(size, count)| (size, count as f64))
            .collect(),
    )
}

fn curve(distances: &Distances) -> Curve {
    Curve {
        weight: hundredths(distances.weight),
        cold: hundredths(distances.cold),
        new_to_class: hundredths(distances.new_to_class),
        new_to_part: hundredths(distances.new_to_part),
        distances: DISTANCES.list(&distances.at),
    }
}

fn alignments(counts: &[u64; ALIGNMENTS]) -> Spread {
    let held = counts.iter().enumerate().filter(|&(_, &count)| count > 0);
    Spread(held.map(|(power, &count)| (SECTOR << power, count as f64)).collect())
}

fn arrival(times: &Times) -> Arrival {
    Arrival {
        gaps_ns: GAPS.list(&times.gaps.map(|count| count as f64)),
        bursts: BURSTS.list(&times.bursts.map(|count| count as f64)),
        burst_seconds: (times.burst_nanos / 1000) as f64 / 1e6,
        ticks: times.ticks,
        tick_squares: times.tick_squares,
        tick_peak: times.tick_peak,
        active_seconds: times.active_seconds,
    }
}

fn hours(times: &Times) -> Vec<Hour> {
    let hour = |count: &super::arrivals::HourCount| Hour {
        watched_seconds: (count.watched / 1_000_000) as f64 / 1e3,
        active_seconds: count.active_seconds,
        reads: count.reads,
        writes: count.writes,
        bytes: count.bytes,
    };
    times.hours.iter().map(hour).collect()
}
