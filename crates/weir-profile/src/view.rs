//! Figures derived from a profile: rates, shares, hit ratios, cache sizes, coalescing.

use serde::{Deserialize, Serialize};

use super::buckets::Spread;
use super::record::{BLOCK, Class, Direction, KindProfile, Part, Profile};
use super::reuse::DISTANCES;

/// Hit ratios, in percent, for which a cache size is reported.
pub const HIT_TARGETS: [u32; 3] = [80, 90, 95];

/// Sizes of a write log, in bytes, for which coalescing is reported.
pub const COALESCING_BYTES: [u64; 6] = [1 << 20, 8 << 20, 64 << 20, 256 << 20, 1 << 30, 8 << 30];

/// Ages of a write log's oldest record, in seconds, for which coalescing is reported.
pub const COALESCING_SECONDS: [u64; 6] = [1, 5, 15, 60, 300, 1800];

/// The main figures, for JSON beside the profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfileSummary {
    /// Reads and writes per second; absent when the times are not known.
    pub iops: Option<f64>,
    /// MiB per second; absent when the times are not known.
    pub mib_per_second: Option<f64>,
    /// Reads, in percent of the requests.
    pub read_percent: f64,
    /// Sequential requests, in percent.
    pub sequential_percent: f64,
    /// Mean bytes of a read and of a write.
    pub mean_bytes: [f64; 2],
    /// Seconds with a request, in percent; absent when the times are not known.
    pub duty_percent: Option<f64>,
    /// Index of dispersion of the number of requests in 100 ms: variance divided by mean; 1 for independent requests.
    pub dispersion: Option<f64>,
    /// Bytes of distinct blocks used.
    pub working_set_bytes: f64,
    /// (percent, bytes): the smallest LRU cache of so many hits among all references; absent where only more reuse helps.
    pub cache_for_hits: Vec<(u32, Option<u64>)>,
    /// Percent of hits in an unlimited cache.
    pub most_hits_percent: f64,
    /// (bytes, percent): written bytes that a log with the last so many written bytes would absorb.
    pub absorbed_by_bytes: Vec<(u64, f64)>,
    /// (seconds, percent): written bytes that a log of the last so many seconds would absorb.
    pub absorbed_by_seconds: Vec<(u64, f64)>,
}

impl Profile {
    /// Reads and writes.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.read.requests() + self.write.requests()
    }

    /// Bytes read and written.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.read.bytes() + self.write.bytes()
    }

    /// Requests of all kinds, as counted by arrival.
    fn arrivals(&self) -> u64 {
        self.requests() + self.write_zeroes + self.discards + self.flushes
    }

    /// Reads and writes per second; `None` when the times are not known.
    #[must_use]
    pub fn iops(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.requests() as f64 / self.seconds)
    }

    /// The share of reads, 0 to 1; 0 without requests.
    #[must_use]
    pub fn read_share(&self) -> f64 {
        share(self.read.requests() as f64, self.requests() as f64)
    }

    /// The share of requests of a class, 0 to 1.
    #[must_use]
    pub fn class_share(&self, class: Class) -> f64 {
        let of = Direction::ALL.map(|direction| self.kind(direction).part(class).requests);
        share((of[0] + of[1]) as f64, self.requests() as f64)
    }

    /// Requests of both directions by length in bytes.
    #[must_use]
    pub fn sizes(&self) -> Spread {
        let mut all = self.read.sizes();
        all.add(&self.write.sizes());
        all
    }

    /// Variance divided by mean of the number of requests in 100 ms: 1 for independent requests (Poisson), 0 for regular ones,
    /// more for bursts. `None` when the observation was too short.
    #[must_use]
    pub fn dispersion(&self) -> Option<f64> {
        let ticks = self.arrival.ticks as f64;
        let mean = self.arrivals() as f64 / (self.seconds * 10.0);
        if ticks < 10.0 || mean <= 0.0 || !mean.is_finite() {
            return None;
        }
        // The mean of the completed slots, without the current one.
        let mean = mean.min((self.arrival.tick_squares / ticks).sqrt());
        Some(((self.arrival.tick_squares / ticks - mean * mean) / mean).max(0.0))
    }

    /// The share of references, 0 to 1, that an LRU cache of `bytes` that takes reads and writes would have answered;
    /// of both directions or of one.
    #[must_use]
    pub fn hit_ratio(&self, bytes: u64, of: Option<Direction>) -> f64 {
        hit_ratio(self.parts(of), bytes as f64 / BLOCK as f64)
    }

    /// The smallest LRU cache, in bytes, with at least this share of hits; `None` when no cache reaches it.
    #[must_use]
    pub fn cache_for(&self, share: f64, of: Option<Direction>) -> Option<u64> {
        let mut all = Spread::default();
        self.parts(of).for_each(|part| all.add(&part.curve.distances));
        let ends = all.0.iter().map(|&(floor, _)| DISTANCES.floor(DISTANCES.bucket(floor) + 1));
        let sizes: Vec<u64> = ends.collect();
        let enough = sizes.partition_point(|&blocks| hit_ratio(self.parts(of), blocks as f64) < share);
        sizes.get(enough).map(|blocks| blocks * BLOCK)
    }

    /// The share of hits in an unlimited cache, 0 to 1.
    #[must_use]
    pub fn most_hits(&self, of: Option<Direction>) -> f64 {
        hit_ratio(self.parts(of), f64::INFINITY)
    }

    fn parts(&self, of: Option<Direction>) -> impl Iterator<Item = &Part> {
        let wanted = move |direction: &Direction| of.is_none_or(|of| of == *direction);
        let kinds = Direction::ALL.into_iter().filter(wanted).map(|direction| self.kind(direction));
        kinds.flat_map(|kind| Class::ALL.into_iter().map(move |class| kind.part(class)))
    }

    /// The share of written blocks, 0 to 1, that a log of the last `bytes` written bytes would have absorbed: they are
    /// written again before they leave it.
    #[must_use]
    pub fn absorbed_by_bytes(&self, bytes: u64) -> f64 {
        self.absorbed(&self.write_back.after_blocks, bytes / BLOCK + 1)
    }

    /// The share of written blocks, 0 to 1, that a log of the writes of the last `seconds` would have absorbed.
    #[must_use]
    pub fn absorbed_by_seconds(&self, seconds: u64) -> f64 {
        self.absorbed(&self.write_back.after_ms, seconds.saturating_mul(1000))
    }

    fn absorbed(&self, overwrites: &Spread, below: u64) -> f64 {
        let all = overwrites.total();
        if all == 0.0 {
            return 0.0;
        }
        // Overwrites that the sample lacks, or has too many of, are those of frequently written blocks, with the shortest
        // distances.
        let missing = self.reuse.overwrites - all;
        share((overwrites.below(below) + missing).max(0.0), self.write.blocks() as f64)
    }

    /// The main figures.
    #[must_use]
    pub fn summary(&self) -> ProfileSummary {
        let timed = |value: f64| (self.seconds > 0.0).then_some(value);
        let percent = |share: f64| share * 100.0;
        let mean = |kind: &KindProfile| share(kind.bytes() as f64, kind.requests() as f64);
        ProfileSummary {
            iops: self.iops(),
            mib_per_second: timed(self.bytes() as f64 / 1_048_576.0 / self.seconds),
            read_percent: percent(self.read_share()),
            sequential_percent: percent(self.class_share(Class::Sequential)),
            mean_bytes: [mean(&self.read), mean(&self.write)],
            duty_percent: timed(
                percent(self.arrival.active_seconds as f64 / self.seconds.ceil().max(1.0)).min(100.0),
            ),
            dispersion: self.dispersion(),
            working_set_bytes: self.working_set.bytes,
            cache_for_hits: HIT_TARGETS
                .iter()
                .map(|&target| (target, self.cache_for(f64::from(target) / 100.0, None)))
                .collect(),
            most_hits_percent: percent(self.most_hits(None)),
            absorbed_by_bytes: COALESCING_BYTES
                .iter()
                .map(|&bytes| (bytes, percent(self.absorbed_by_bytes(bytes))))
                .collect(),
            absorbed_by_seconds: COALESCING_SECONDS
                .iter()
                .map(|&seconds| (seconds, percent(self.absorbed_by_seconds(seconds))))
                .collect(),
        }
    }
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// SHARDS with its adjustment: the difference between the sample's and the exact number of references consists of references to
/// few, frequently used blocks, which hit in every cache (FAST 2015, section 3.3).
pub(crate) fn hit_ratio<'a>(parts: impl Iterator<Item = &'a Part>, blocks: f64) -> f64 {
    let (mut exact, mut hits) = (0.0, 0.0);
    for part in parts {
        exact += part.blocks as f64;
        hits += part.blocks as f64 - part.curve.weight;
        for &(floor, amount) in &part.curve.distances.0 {
            if floor as f64 >= blocks {
                break;
            }
            let end = DISTANCES.floor(DISTANCES.bucket(floor) + 1);
            // Within a bucket, distances are assumed to be uniformly distributed. A distance below the size is a hit.
            hits += amount * ((blocks - floor as f64) / end.saturating_sub(floor).max(1) as f64).min(1.0);
        }
    }
    if blocks < 1.0 { 0.0 } else { share(hits, exact).clamp(0.0, 1.0) }
}
