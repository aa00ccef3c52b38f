//! The range and distribution of a load's random requests.

use weir_block::size::Size;
use weir_load::workload::{Access, LARGEST_BLOCK, SECTOR, Workload};

use super::fit::{Demand, Fit, fit};
use super::share::Share;
use crate::record::{BLOCK, Class, Direction, Part, Profile};
use crate::view::hit_ratio;

/// The alignment of random offsets is the largest power of two that divides at least this share of them.
const ALIGNED: f64 = 0.95;

/// Number of cache sizes at which the curve is evaluated, and the smallest of them in blocks.
const SIZES: u32 = 32;
const SMALLEST: f64 = 8.0;

/// So many positions for each used one make reuse by chance rare: half a percent of evenly distributed requests.
const SPARSE: f64 = 100.0;

/// The end of the largest range, in bytes: the sum with a range's start still fits 64 bits.
const FARTHEST: u64 = 1 << 60;

/// A range, and the distribution of requests over its positions.
pub(super) struct Area {
    fit: Fit,
    unit: u64,
    start: u64,
}

impl Area {
    /// For some of the random requests, after the first `start` bytes.
    pub fn of(profile: &Profile, random: &[&Share], start: u64) -> Area {
        let unit = random.iter().map(|share| alignment(profile, share.direction)).min().unwrap_or(BLOCK);
        Area { fit: fit(&demand(profile, random, unit)), unit, start: start.next_multiple_of(unit) }
    }

    /// Every job gets the same positions, regardless of its largest size: the distribution then refers to the same blocks.
    pub fn workload(&self, share: &Share, base: Workload) -> Workload {
        Workload {
            access: match share.direction {
                Direction::Read => Access::RandRead,
                Direction::Write => Access::RandWrite,
            },
            pattern: self.fit.pattern,
            alignment: Some(Size(self.unit)),
            offset: Size(self.start),
            size: Some(Size((self.fit.positions - 1) * self.unit + base.block_size.0)),
            ..base
        }
    }
}

/// The largest power of two that divides nearly all random offsets.
fn alignment(profile: &Profile, direction: Direction) -> u64 {
    let counts = &profile.kind(direction).alignments;
    let total = counts.total();
    let mut unit = u64::from(SECTOR);
    for &(power, _) in &counts.0 {
        if total - counts.below(power) >= total * ALIGNED {
            unit = power;
        }
    }
    // A few positions may all be multiples of a larger power of two by chance, so the most frequent size limits it. Reuse is
    // counted in blocks, so no position is smaller than a block.
    let sizes = &profile.kind(direction).random.sizes.0;
    let frequent = sizes.iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(BLOCK, |&(size, _)| size);
    unit.min(1 << frequent.trailing_zeros()).max(BLOCK)
}

fn demand(profile: &Profile, random: &[&Share], unit: u64) -> Demand {
    let sum = |of: fn(&Part) -> f64| random.iter().map(|share| of(&share.part)).sum::<f64>();
    let requests = sum(|part| part.requests as f64).max(1.0);
    let references = sum(|part| part.blocks as f64).max(1.0);
    let blocks = references / requests;
    let reach = (blocks * BLOCK as f64 / unit as f64).max(1.0);
    let blocks = blocks / reach;
    let parts = || random.iter().map(|share| &share.part);
    let all: f64 = Class::ALL
        .iter()
        .flat_map(|&class| Direction::ALL.map(|direction| profile.kind(direction).part(class).curve.cold))
        .sum();
    let cold = sum(|part| part.curve.cold);
    // Reads and writes in one range use the blocks of both.
    let reused = match random {
        [alone] => alone.part.curve.used_by_part(),
        _ => sum(|part| part.curve.used_by_class()),
    };
    // First uses tell the range best. Where others had used most of it before (a prefill), few are left.
    let used = if 2.0 * cold < reused { reused } else { cold };
    let warm = if used > 0.0 { 1.0 - cold / used } else { 0.0 };
    let positions = (used / blocks).clamp(1.0, requests * reach);
    let cache =
        |step: u32| SMALLEST * (all.max(SMALLEST * 2.0) / SMALLEST).powf(f64::from(step) / f64::from(SIZES));
    Demand {
        requests,
        used: positions,
        most: most(profile, unit, positions),
        blocks,
        reach,
        warm,
        // As far as others had used the range before, they used their other blocks before, too.
        others: (all - cold).max(0.0) * (1.0 - warm) / requests,
        curve: (0..=SIZES).map(cache).map(|blocks| (blocks, hit_ratio(parts(), blocks))).collect(),
    }
}

/// The number of positions for which there is room on the disk. If its size is not known, the requests' own range counts; if
/// that is not known either (a profile of a former version), so many that hardly one is used twice by chance.
fn most(profile: &Profile, unit: u64, used: f64) -> u64 {
    let known = match (profile.disk_bytes, profile.end_bytes) {
        (Some(disk), _) => (disk / unit).saturating_sub(u64::from(LARGEST_BLOCK) / unit),
        (None, 0) => (used * SPARSE).ceil() as u64,
        (None, end) => (end / unit).max(used.ceil() as u64),
    };
    known.clamp(1, FARTHEST / unit)
}
