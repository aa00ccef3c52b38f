//! A profile as numbers: written to files, sent over the API, merged.

use serde::{Deserialize, Serialize};

use super::buckets::{MOST, Spread, is_amount};

/// Version of the layout; a reader refuses any other version.
pub const VERSION: u32 = 1;

/// Bytes of a block: the unit of reuse, of the working set and of the curves.
pub const BLOCK: u64 = 4096;

/// Number of points of the working set over time: the last ones.
pub(crate) const POINTS: usize = 240;

/// No disk is larger, in bytes: 1 EiB.
pub(crate) const LARGEST_DISK: u64 = 1 << 60;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

impl Direction {
    /// Both.
    pub const ALL: [Direction; 2] = [Direction::Read, Direction::Write];

    /// The word that users see.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
        }
    }
}

/// The position of a request relative to earlier ones of its direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Neither of the others.
    Random,
    /// At the end of one of the last 16 streams.
    Sequential,
    /// At the same distance from the previous request as that one from its predecessor.
    Strided,
}

impl Class {
    /// Number of classes.
    pub const COUNT: usize = 3;

    /// All of them, in the order of their numbers.
    pub const ALL: [Class; Class::COUNT] = [Class::Random, Class::Sequential, Class::Strided];
}

/// Stack distances: for each reference to a block, how many other blocks were used since it was last used.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// References, estimated from the sample. Their difference from the exact number corrects the curve.
    pub weight: f64,
    /// Of these, references to blocks not used before.
    pub cold: f64,
    /// References to blocks that requests of the same class had not used before, in either direction; another class may have.
    /// 0 in profiles of former versions of Weir.
    #[serde(default)]
    pub new_to_class: f64,
    /// References to blocks that requests of the same class and direction had not used before. 0 in profiles of former versions.
    #[serde(default)]
    pub new_to_part: f64,
    /// Those to blocks used before, by stack distance in blocks, buckets 3 % wide.
    pub distances: Spread,
}

impl Curve {
    /// Blocks that requests of this class have used, without those of other parts of the class that were there before.
    #[must_use]
    pub fn used_by_class(&self) -> f64 {
        self.cold.max(self.new_to_class)
    }

    /// Blocks that requests of this class and direction have used.
    #[must_use]
    pub fn used_by_part(&self) -> f64 {
        self.used_by_class().max(self.new_to_part)
    }

    fn add(&mut self, other: &Curve) {
        self.weight += other.weight;
        self.cold += other.cold;
        self.new_to_class += other.new_to_class;
        self.new_to_part += other.new_to_part;
        self.distances.add(&other.distances);
    }
}

/// The requests of one direction and class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Requests.
    pub requests: u64,
    /// Bytes.
    pub bytes: u64,
    /// References to blocks of 4 KiB: each request counts once for every block that it touches.
    pub blocks: u64,
    /// Requests by length in bytes: exact up to 128 KiB, then 6 % wide.
    pub sizes: Spread,
    /// Stack distances of its references (from the sample), in the stream of all requests.
    pub curve: Curve,
}

impl Part {
    fn add(&mut self, other: &Part) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.blocks += other.blocks;
        self.sizes.add(&other.sizes);
        self.curve.add(&other.curve);
    }
}

/// The requests of one direction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KindProfile {
    /// Those at random offsets.
    pub random: Part,
    /// Those at the end of a stream.
    pub sequential: Part,
    /// Those in equal steps.
    pub strided: Part,
    /// Sequential runs by their number of requests: powers of two.
    pub runs: Spread,
    /// The most frequent steps in bytes, each with a lower bound of its frequency. At most 4.
    pub strides: Vec<(i64, u64)>,
    /// Random requests by the largest power of two, up to 1 MiB, that divides their offset in bytes.
    pub alignments: Spread,
}

impl KindProfile {
    /// The part of a class.
    #[must_use]
    pub fn part(&self, class: Class) -> &Part {
        match class {
            Class::Random => &self.random,
            Class::Sequential => &self.sequential,
            Class::Strided => &self.strided,
        }
    }

    pub(super) fn part_mut(&mut self, class: Class) -> &mut Part {
        match class {
            Class::Random => &mut self.random,
            Class::Sequential => &mut self.sequential,
            Class::Strided => &mut self.strided,
        }
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        Class::ALL.into_iter().map(|class| self.part(class))
    }

    /// Requests of all classes.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.parts().map(|part| part.requests).sum()
    }

    /// Bytes of all classes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts().map(|part| part.bytes).sum()
    }

    /// References to blocks of all classes.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.parts().map(|part| part.blocks).sum()
    }

    /// Requests of all classes by length in bytes.
    #[must_use]
    pub fn sizes(&self) -> Spread {
        let mut all = Spread::default();
        self.parts().for_each(|part| all.add(&part.sizes));
        all
    }

    fn add(&mut self, other: &KindProfile) {
        for class in Class::ALL {
            self.part_mut(class).add(other.part(class));
        }
        self.runs.add(&other.runs);
        for &(distance, count) in &other.strides {
            match self.strides.iter_mut().find(|known| known.0 == distance) {
                Some(known) => known.1 += count,
                None => self.strides.push((distance, count)),
            }
        }
        self.strides.sort_by_key(|&(distance, count)| (std::cmp::Reverse(count), distance));
        self.strides.truncate(4);
        self.alignments.add(&other.alignments);
    }
}

/// Arrivals of requests of all kinds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Arrival {
    /// Intervals between requests in nanoseconds, buckets 25 % wide.
    pub gaps_ns: Spread,
    /// Bursts (ended by a pause of 10 ms) by their number of requests: powers of two.
    pub bursts: Spread,
    /// Total duration of the bursts, in seconds.
    pub burst_seconds: f64,
    /// Number of 100 ms slots.
    pub ticks: u64,
    /// Sum of the squares of their request counts.
    pub tick_squares: f64,
    /// Largest request count of a slot.
    pub tick_peak: u64,
    /// Seconds with a request.
    pub active_seconds: u64,
}

/// The requests of one hour of the day (UTC), over all days.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Hour {
    /// Seconds of it under observation.
    pub watched_seconds: f64,
    /// Seconds of it with a request.
    pub active_seconds: u64,
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes of both.
    pub bytes: u64,
}

/// References by the earlier use of their blocks, in blocks (from the sample).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reuse {
    /// Reads of blocks that had neither been read nor written.
    pub first_reads: f64,
    /// Reads of blocks whose last use was a read.
    pub re_reads: f64,
    /// Reads of blocks whose last use was a write.
    pub reads_after_write: f64,
    /// Writes of blocks that had not been written.
    pub new_writes: f64,
    /// Writes of blocks that had been written.
    pub overwrites: f64,
}

/// Distinct blocks used, in bytes (from the sample).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkingSet {
    /// Over the whole time.
    pub bytes: f64,
    /// Length of an interval in seconds.
    pub interval_seconds: f64,
    /// Number of intervals before the first one kept.
    pub skipped: u64,
    /// In each whole interval: the last 240.
    pub over_time: Vec<f64>,
}

/// Distances between writes of a block (from the sample), which determine the writes that a log would absorb.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WriteBack {
    /// Overwritten blocks by the number of blocks written since their last write, buckets 6 % wide.
    pub after_blocks: Spread,
    /// Overwritten blocks by the milliseconds since their last write, buckets 6 % wide.
    pub after_ms: Spread,
}

/// The state of the sample at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// The sampled share of all blocks, 0 to 1.
    pub rate: f64,
    /// Blocks in it.
    pub blocks: u64,
}

/// The requests to a disk in a period of time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// Version of this layout.
    pub version: u32,
    /// The source: `disk db`, or the name of a trace.
    pub source: String,
    /// Size of the disk, in bytes; absent when unknown.
    pub disk_bytes: Option<u64>,
    /// End of the last block that was read or written, in bytes, at most 1 EiB; 0 in profiles of former versions of Weir.
    #[serde(default)]
    pub end_bytes: u64,
    /// Length of the observation, in seconds; 0 when the times of the requests are not known.
    pub seconds: f64,
    /// Reads.
    pub read: KindProfile,
    /// Writes.
    pub write: KindProfile,
    /// Requests to make a range read as zeroes.
    pub write_zeroes: u64,
    /// Requests that give space back.
    pub discards: u64,
    /// Flushes.
    pub flushes: u64,
    /// Arrivals of requests.
    pub arrival: Arrival,
    /// By hour of the day (UTC), 24 of them; empty when the time of day is not known.
    pub hours: Vec<Hour>,
    /// References by the earlier use of their blocks.
    pub reuse: Reuse,
    /// Distinct blocks used.
    pub working_set: WorkingSet,
    /// Distances between writes of a block.
    pub write_back: WriteBack,
    /// The state of the sample.
    pub sampling: Sampling,
}

/// The reason why a text is not a usable profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// Not JSON, or something is missing.
    #[error("it is not a profile: {0}; `weir profile record` and `weir profile import` write profiles")]
    Json(#[from] serde_json::Error),
    /// Another layout.
    #[error("it is a profile of version {0}, and this program reads version {VERSION}")]
    Version(u64),
    /// Invalid numbers.
    #[error("the profile's {0} cannot be: the file is damaged")]
    Unsound(&'static str),
}

impl Profile {
    /// Reads a profile. Ignores unknown fields; a missing field is an error.
    ///
    /// # Errors
    /// It is none, or of another version, or damaged.
    pub fn from_json(text: &str) -> Result<Profile, ProfileError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u64,
        }
        let found: Versioned = serde_json::from_str(text)?;
        if found.version != u64::from(VERSION) {
            return Err(ProfileError::Version(found.version));
        }
        let profile: Profile = serde_json::from_str(text)?;
        profile.check()?;
        Ok(profile)
    }

    /// The part of a direction.
    #[must_use]
    pub fn kind(&self, direction: Direction) -> &KindProfile {
        match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.write,
        }
    }

    pub(super) fn kind_mut(&mut self, direction: Direction) -> &mut KindProfile {
        match direction {
            Direction::Read => &mut self.read,
            Direction::Write => &mut self.write,
        }
    }

    fn check(&self) -> Result<(), ProfileError> {
        let mut spreads = vec![
            ("arrivals", &self.arrival.gaps_ns),
            ("bursts", &self.arrival.bursts),
            ("overwrites", &self.write_back.after_blocks),
            ("ages of overwrites", &self.write_back.after_ms),
        ];
        for kind in [&self.read, &self.write] {
            spreads.extend([("runs", &kind.runs), ("alignments", &kind.alignments)]);
            if kind.strides.iter().any(|&(_, count)| count > MOST as u64) {
                return Err(ProfileError::Unsound("strides"));
            }
            for part in kind.parts() {
                spreads.extend([("sizes", &part.sizes), ("stack distances", &part.curve.distances)]);
                let counts = [part.requests, part.blocks, part.bytes / super::BLOCK];
                if counts.iter().any(|&count| count > MOST as u64) {
                    return Err(ProfileError::Unsound("requests"));
                }
                let Curve { weight, cold, new_to_class, new_to_part, .. } = part.curve;
                if ![weight, cold, new_to_class, new_to_part].into_iter().all(is_amount) {
                    return Err(ProfileError::Unsound("references"));
                }
                if part.sizes.0.iter().any(|&(size, _)| size == 0 || size % 512 != 0) {
                    return Err(ProfileError::Unsound("sizes"));
                }
            }
        }
        if let Some((name, _)) = spreads.iter().find(|(_, spread)| !spread.is_sound()) {
            return Err(ProfileError::Unsound(name));
        }
        let Reuse { first_reads, re_reads, reads_after_write, new_writes, overwrites } = self.reuse;
        let amounts = [first_reads, re_reads, reads_after_write, new_writes, overwrites];
        let others =
            [self.seconds, self.working_set.interval_seconds, self.working_set.bytes / super::BLOCK as f64];
        let set = self.working_set.over_time.iter().map(|bytes| bytes / super::BLOCK as f64);
        if !amounts.into_iter().chain(others).chain(set).all(is_amount)
            || !self.arrival.tick_squares.is_finite()
            || [self.write_zeroes, self.discards, self.flushes].iter().any(|&count| count > MOST as u64)
        {
            return Err(ProfileError::Unsound("counts"));
        }
        let Arrival { ticks, tick_peak, active_seconds, burst_seconds, .. } = self.arrival;
        let counts = [ticks, tick_peak, active_seconds, self.working_set.skipped, self.sampling.blocks];
        if counts.iter().any(|&count| count > MOST as u64) || !is_amount(burst_seconds) {
            return Err(ProfileError::Unsound("times"));
        }
        let is_sound = |hour: &Hour| {
            let counts = [hour.active_seconds, hour.reads, hour.writes, hour.bytes / super::BLOCK];
            is_amount(hour.watched_seconds) && counts.iter().all(|&count| count <= MOST as u64)
        };
        if !self.hours.iter().all(is_sound) {
            return Err(ProfileError::Unsound("hours"));
        }
        if self.disk_bytes.is_some_and(|bytes| bytes > LARGEST_DISK) || self.end_bytes > LARGEST_DISK {
            return Err(ProfileError::Unsound("size of the disk"));
        }
        match self.hours.len() {
            0 | super::HOURS => Ok(()),
            _ => Err(ProfileError::Unsound("hours")),
        }
    }

    /// Adds a later period. Blocks are not tracked across periods: first uses of each period are first uses of the sum, and the
    /// curves are those of a cache that is empty at the start of each period.
    pub fn add(&mut self, later: &Profile) {
        self.seconds += later.seconds;
        self.disk_bytes = self.disk_bytes.max(later.disk_bytes);
        self.end_bytes = self.end_bytes.max(later.end_bytes);
        if self.source != later.source {
            self.source = format!("{}, {}", self.source, later.source);
        }
        self.read.add(&later.read);
        self.write.add(&later.write);
        self.write_zeroes += later.write_zeroes;
        self.discards += later.discards;
        self.flushes += later.flushes;
        self.add_arrival(&later.arrival);
        self.hours.resize(self.hours.len().max(later.hours.len()), Hour::default());
        for (mine, theirs) in self.hours.iter_mut().zip(&later.hours) {
            mine.watched_seconds += theirs.watched_seconds;
            mine.active_seconds += theirs.active_seconds;
            mine.reads += theirs.reads;
            mine.writes += theirs.writes;
            mine.bytes += theirs.bytes;
        }
        self.add_reuse(later);
    }

    fn add_arrival(&mut self, later: &Arrival) {
        let arrival = &mut self.arrival;
        arrival.gaps_ns.add(&later.gaps_ns);
        arrival.bursts.add(&later.bursts);
        arrival.burst_seconds += later.burst_seconds;
        arrival.ticks += later.ticks;
        arrival.tick_squares += later.tick_squares;
        arrival.tick_peak = arrival.tick_peak.max(later.tick_peak);
        arrival.active_seconds += later.active_seconds;
    }

    fn add_reuse(&mut self, later: &Profile) {
        let (reuse, theirs) = (&mut self.reuse, &later.reuse);
        reuse.first_reads += theirs.first_reads;
        reuse.re_reads += theirs.re_reads;
        reuse.reads_after_write += theirs.reads_after_write;
        reuse.new_writes += theirs.new_writes;
        reuse.overwrites += theirs.overwrites;
        self.write_back.after_blocks.add(&later.write_back.after_blocks);
        self.write_back.after_ms.add(&later.write_back.after_ms);
        let (set, theirs) = (&mut self.working_set, &later.working_set);
        // The largest period's is a lower bound of the sum's.
        set.bytes = set.bytes.max(theirs.bytes);
        if set.interval_seconds == theirs.interval_seconds {
            set.over_time.extend(&theirs.over_time);
        } else {
            set.skipped += set.over_time.len() as u64;
            set.over_time.clone_from(&theirs.over_time);
            set.interval_seconds = theirs.interval_seconds;
        }
        let surplus = set.over_time.len().saturating_sub(POINTS);
        set.over_time.drain(..surplus);
        set.skipped += surplus as u64;
        self.sampling.rate = self.sampling.rate.min(later.sampling.rate);
        self.sampling.blocks = self.sampling.blocks.max(later.sampling.blocks);
    }
}
