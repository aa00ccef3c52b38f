//! Figures that need the history of blocks: first uses and re-uses, the working set, the distances that determine the miss-ratio
//! curve, and the distances between writes of a block. All figures are from a spatial sample (SHARDS).

use std::time::Duration;

use weir_block::Nanos;

use super::buckets::Scale;
use super::record::{Class, Direction, POINTS};
use super::stack::Stack;

/// Stack distances, in blocks: 3 % wide.
pub(super) const DISTANCES: Scale = Scale::new(5, 40);

/// Blocks written since a block was written: 6 % wide.
pub(super) const WRITTEN: Scale = Scale::new(4, 40);

/// Milliseconds since a block was written: 6 % wide.
pub(super) const AGES: Scale = Scale::new(4, 40);

/// Limit below which processor time does not reduce the sample: fewer blocks have no statistical significance.
const FEWEST: usize = 512;

const SEEN_READ: u8 = 1;
const SEEN_WRITTEN: u8 = 2;
const LAST_WRITTEN: u8 = 4;

/// The bit of [`Memory::users`] for a direction and class.
fn user(direction: Direction, class: Class) -> u8 {
    1 << (direction as usize * Class::COUNT + class as usize)
}

/// The state kept for a sampled block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Memory {
    flags: u8,
    /// The directions and classes of the requests that have used it.
    users: u8,
    /// Number of the interval in which it was last used, from 1; 0 for none.
    interval: u32,
    /// Blocks that had been written before it was last written.
    written_at: u64,
    /// Time of its last write.
    at: Nanos,
}

/// References by class and by the earlier use of their blocks, each weighted with the number of blocks that a sampled one
/// represents.
#[derive(Clone, Debug)]
pub(super) struct Distances {
    /// Sampled references, weighted; the exact number is counted beside it.
    pub weight: f64,
    /// Those to blocks that were never used before.
    pub cold: f64,
    /// Those to blocks that their class had never used, in either direction.
    pub new_to_class: f64,
    /// Those to blocks that their class had never used in their direction.
    pub new_to_part: f64,
    pub at: Box<[f64]>,
}

impl Distances {
    fn new() -> Distances {
        let at = vec![0.0; DISTANCES.buckets()].into();
        Distances { weight: 0.0, cold: 0.0, new_to_class: 0.0, new_to_part: 0.0, at }
    }
}

/// The sampler.
#[derive(Debug)]
pub(super) struct Sampler {
    stack: Stack<Memory>,
    /// Blocks whose hash is below it are sampled.
    threshold: u64,
    /// The value to which the threshold is falling.
    target: u64,
    /// Number of blocks that a sampled one represents: 2^64 / threshold.
    weight: f64,
    /// Limit of sampled references per second.
    budget: u32,
    sampled_in_second: u32,
    second_end: Nanos,
    pub first_reads: f64,
    pub re_reads: f64,
    pub reads_after_write: f64,
    pub new_writes: f64,
    pub overwrites: f64,
    pub distances: [[Distances; Class::COUNT]; 2],
    pub rewritten_bytes: Box<[f64]>,
    pub rewritten_age: Box<[f64]>,
    interval: Duration,
    interval_end: Nanos,
    interval_number: u32,
    /// Weighted blocks that this interval used.
    in_interval: f64,
    /// A ring; `points` counts all points so far.
    ring: Box<[f64; POINTS]>,
    points: u64,
}

impl Sampler {
    pub fn new(now: Nanos, samples: usize, budget: u32, interval: Duration) -> Sampler {
        let distances = || std::array::from_fn(|_| Distances::new());
        Sampler {
            stack: Stack::new(samples),
            threshold: u64::MAX,
            target: u64::MAX,
            weight: 1.0,
            budget,
            sampled_in_second: 0,
            second_end: now + Duration::from_secs(1),
            first_reads: 0.0,
            re_reads: 0.0,
            reads_after_write: 0.0,
            new_writes: 0.0,
            overwrites: 0.0,
            distances: [distances(), distances()],
            rewritten_bytes: vec![0.0; WRITTEN.buckets()].into(),
            rewritten_age: vec![0.0; AGES.buckets()].into(),
            interval,
            interval_end: now + interval,
            interval_number: 1,
            in_interval: 0.0,
            ring: Box::new([0.0; POINTS]),
            points: 0,
        }
    }

    /// Number of blocks in the sample, and the sampled share of all blocks.
    pub fn sample(&self) -> (usize, f64) {
        (self.stack.len(), 1.0 / self.weight)
    }

    pub fn memory(&self) -> usize {
        let distances = self.distances.iter().flatten().map(|distances| distances.at.len()).sum::<usize>();
        let others = distances + self.rewritten_bytes.len() + self.rewritten_age.len() + POINTS;
        self.stack.memory() + others * size_of::<f64>()
    }

    /// A request for `blocks` blocks from `first` on. `written` blocks had been written before it.
    #[inline]
    pub fn request(
        &mut self,
        now: Nanos,
        (direction, class): (Direction, Class),
        (first, blocks): (u64, u64),
        written: u64,
    ) {
        if now >= self.second_end || now >= self.interval_end {
            self.roll(now);
        }
        for block in first..first + blocks {
            let hash = scramble(block);
            if hash < self.threshold {
                self.sampled(now, (direction, class), hash, written);
            }
        }
    }

    fn sampled(&mut self, now: Nanos, (direction, class): (Direction, Class), hash: u64, written: u64) {
        self.sampled_in_second += 1;
        let weight = self.weight;
        let (memory, distance) = self.stack.touch(hash);
        let before = memory.flags;
        let class_users = Direction::ALL.map(|direction| user(direction, class));
        let new_to_part = memory.users & user(direction, class) == 0;
        let new_to_class = memory.users & (class_users[0] | class_users[1]) == 0;
        memory.users |= user(direction, class);
        if memory.interval != self.interval_number {
            memory.interval = self.interval_number;
            self.in_interval += weight;
        }
        match direction {
            Direction::Read => {
                memory.flags = (before | SEEN_READ) & !LAST_WRITTEN;
                *match before {
                    0 => &mut self.first_reads,
                    flags if flags & LAST_WRITTEN != 0 => &mut self.reads_after_write,
                    _ => &mut self.re_reads,
                } += weight;
            }
            Direction::Write => {
                memory.flags = before | SEEN_WRITTEN | LAST_WRITTEN;
                if before & SEEN_WRITTEN == 0 {
                    self.new_writes += weight;
                } else {
                    self.overwrites += weight;
                    self.rewritten_bytes[WRITTEN.bucket(written - memory.written_at)] += weight;
                    let age = (now - memory.at).as_millis() as u64;
                    self.rewritten_age[AGES.bucket(age)] += weight;
                }
                (memory.written_at, memory.at) = (written, now);
            }
        }
        let distances = &mut self.distances[direction as usize][class as usize];
        distances.weight += weight;
        if new_to_part {
            distances.new_to_part += weight;
        }
        if new_to_class {
            distances.new_to_class += weight;
        }
        match distance {
            None => distances.cold += weight,
            Some(others) => {
                distances.at[DISTANCES.bucket((f64::from(others) * weight) as u64)] += weight;
            }
        }
        if self.stack.is_over() || (self.threshold > self.target && self.stack.len() > FEWEST) {
            self.sink();
        }
    }

    /// Removes the block with the largest hash from the sample and lowers the threshold to it. One block at a time, so that no
    /// request waits for many.
    fn sink(&mut self) {
        if let Some(hash) = self.stack.forget_largest() {
            self.threshold = hash;
            self.weight = 2f64.powi(64) / hash as f64;
        }
    }

    #[cold]
    fn roll(&mut self, now: Nanos) {
        if now >= self.second_end {
            if self.sampled_in_second > self.budget && self.target >= self.threshold {
                self.target = self.threshold / 2;
            }
            self.sampled_in_second = 0;
            self.second_end = now + Duration::from_secs(1);
        }
        if now >= self.interval_end {
            let length = self.interval.as_nanos() as u64;
            let ended = (now.0 - self.interval_end.0) / length + 1;
            self.push_point(self.in_interval);
            for _ in 1..ended.min(POINTS as u64 + 1) {
                self.push_point(0.0);
            }
            self.points += ended.saturating_sub(POINTS as u64 + 1);
            self.in_interval = 0.0;
            self.interval_number = self.interval_number.wrapping_add(1).max(1);
            self.interval_end.0 += ended * length;
        }
    }

    fn push_point(&mut self, blocks: f64) {
        self.ring[(self.points % POINTS as u64) as usize] = blocks;
        self.points += 1;
    }

    /// Blocks used in each of the last intervals that are over by `now`, and how many there were before those.
    pub fn working_set(&self, now: Nanos) -> (u64, Vec<f64>) {
        let length = self.interval.as_nanos() as u64;
        let kept = self.points.min(POINTS as u64);
        let ring = (self.points - kept..self.points).map(|point| self.ring[(point % POINTS as u64) as usize]);
        let mut points: Vec<f64> = ring.collect();
        if now >= self.interval_end {
            points.push(self.in_interval);
            let empty = (now.0 - self.interval_end.0) / length;
            points.extend(std::iter::repeat_n(0.0, empty.min(POINTS as u64) as usize));
            let total = self.points + 1 + empty;
            let surplus = points.len().saturating_sub(POINTS);
            points.drain(..surplus);
            return (total - points.len() as u64, points);
        }
        (self.points - kept, points)
    }
}

/// A hash that no two blocks share: the finalizer of SplitMix64 (Steele, Lea and Flood 2014).
#[inline]
fn scramble(block: u64) -> u64 {
    let mut hash = block.wrapping_add(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}
