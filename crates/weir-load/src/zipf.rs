//! Zipf-distributed ranks at a constant cost for each, with integers only.
//!
//! The first ranks each have an entry of their own; above them, an entry stands for a run of ranks that grows by
//! 1/64 at each step, with the run's exact weight, and within a run ranks are equally likely (at most `theta`
//! hundredths off the formula, where neighbouring ranks differ by less than that anyway). Entries are drawn with
//! Walker's alias method in Vose's form (Vose 1991, "A linear algorithm for generating random numbers with a given
//! distribution"). So the table is small (some 2,000 entries) however large the range is.

/// Ranks with an entry of their own.
const EXACT: u64 = 1024;

/// Runs of ranks grow by one in so many.
const GROWTH: u64 = 64;

/// Draws ranks 0, 1, … in proportion to `1 / (rank + 1)^theta`.
#[derive(Debug)]
pub struct Zipf {
    entries: Vec<Entry>,
    scatter: Scatter,
}

/// One column of the alias table.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// Of 2^32: below it the column's own run is drawn, else the alias's.
    threshold: u64,
    alias: u32,
    first: u64,
    width: u64,
}

impl Zipf {
    /// For ranks below `count` (at least 1), with the exponent in thousandths.
    #[must_use]
    pub fn new(count: u64, theta_milli: u32) -> Zipf {
        let theta = f64::from(theta_milli) / 1000.0;
        let mut entries = Vec::new();
        let mut weights = Vec::new();
        let mut first = 0;
        while first < count {
            let width = if first < EXACT { 1 } else { (first / GROWTH).min(count - first) };
            weights.push(weight(first, width, theta));
            entries.push(Entry { first, width, ..Entry::default() });
            first += width;
        }
        alias(&mut entries, &weights);
        Zipf { entries, scatter: Scatter::new(count) }
    }

    /// The block of a rank that is drawn.
    #[inline]
    pub fn draw(&self, random: &mut fastrand::Rng) -> u64 {
        self.scatter.position(self.rank(random))
    }

    #[inline]
    fn rank(&self, random: &mut fastrand::Rng) -> u64 {
        let drawn = random.u64(..);
        let column = ((drawn >> 32) * self.entries.len() as u64) >> 32;
        let mut entry = &self.entries[column as usize];
        if drawn & u64::from(u32::MAX) >= entry.threshold {
            entry = &self.entries[entry.alias as usize];
        }
        if entry.width == 1 { entry.first } else { entry.first + random.u64(0..entry.width) }
    }
}

/// Sum of `1 / (rank + 1)^theta` over `width` ranks from `first` on. Runs lie so far out that the integral from
/// half before to half behind is the sum to one part in a million.
#[must_use]
pub fn weight(first: u64, width: u64, theta: f64) -> f64 {
    let rank = (first + 1) as f64;
    if width == 1 {
        return rank.powf(-theta);
    }
    let (from, to) = (rank - 0.5, rank + width as f64 - 0.5);
    let exponent = 1.0 - theta;
    if exponent.abs() < 1e-9 {
        (to / from).ln()
    } else {
        (to.powf(exponent) - from.powf(exponent)) / exponent
    }
}

/// Fills in thresholds and aliases (Vose's algorithm): columns that are too light borrow from one that is too heavy.
fn alias(entries: &mut [Entry], weights: &[f64]) {
    let total: f64 = weights.iter().sum();
    let mut share: Vec<f64> = weights.iter().map(|weight| weight / total * entries.len() as f64).collect();
    let (mut light, mut heavy): (Vec<usize>, Vec<usize>) =
        (0..entries.len()).partition(|&column| share[column] < 1.0);
    // The columns that rounding leaves over are full.
    for entry in entries.iter_mut() {
        entry.threshold = 1 << 32;
    }
    while let (Some(small), Some(&large)) = (light.pop(), heavy.last()) {
        entries[small].threshold = (share[small] * (1u64 << 32) as f64) as u64;
        entries[small].alias = large as u32;
        share[large] -= 1.0 - share[small];
        if share[large] < 1.0 {
            heavy.pop();
            light.push(large);
        }
    }
}

/// Maps every rank to a block of its own, so that adjacent ranks are not adjacent blocks: invertible multiplications and shifts
/// on the next power of two, repeated until the result is in the range.
#[derive(Clone, Copy, Debug)]
struct Scatter {
    count: u64,
    mask: u64,
    shift: u32,
}

impl Scatter {
    fn new(count: u64) -> Scatter {
        let bits = u64::BITS - (count - 1).leading_zeros();
        let mask = if bits == 0 { 0 } else { u64::MAX >> (u64::BITS - bits) };
        Scatter { count, mask, shift: bits / 2 + 1 }
    }

    #[inline]
    fn position(self, rank: u64) -> u64 {
        // The odd constants are those of SplitMix64 (Steele et al. 2014).
        let mut at = rank;
        loop {
            at = at.wrapping_mul(0xbf58_476d_1ce4_e5b9).wrapping_add(0x9e37_79b9) & self.mask;
            at ^= at >> self.shift;
            at = at.wrapping_mul(0x94d0_49bb_1331_11eb) & self.mask;
            at ^= at >> self.shift;
            if at < self.count {
                return at;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Probability of each rank, from the table.
    fn probabilities(zipf: &Zipf, count: u64) -> Vec<f64> {
        let mut of = vec![0.0; count as usize];
        let column = 1.0 / zipf.entries.len() as f64;
        for entry in &zipf.entries {
            let own = entry.threshold as f64 / (1u64 << 32) as f64;
            for (run, share) in [(entry, own), (&zipf.entries[entry.alias as usize], 1.0 - own)] {
                for rank in run.first..run.first + run.width {
                    of[rank as usize] += column * share / run.width as f64;
                }
            }
        }
        of
    }

    /// The formula, by direct summation.
    fn formula(count: u64, theta: f64) -> Vec<f64> {
        let total: f64 = (1..=count).map(|rank| (rank as f64).powf(-theta)).sum();
        (1..=count).map(|rank| (rank as f64).powf(-theta) / total).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn the_table_is_the_formula(count in 1u64..60_000, theta_milli in 1u32..=2_500) {
            let zipf = Zipf::new(count, theta_milli);
            let theta = f64::from(theta_milli) / 1000.0;
            let (is, should) = (probabilities(&zipf, count), formula(count, theta));
            for (rank, (is, should)) in is.iter().zip(&should).enumerate() {
                // Within a run, plus what 2^-32 of a column can round away.
                let off = (is - should).abs();
                prop_assert!(off <= should * (theta / 100.0 + 1e-6) + 1e-9, "rank {rank}: {is} {should}");
            }
        }

        #[test]
        fn every_rank_has_a_block_of_its_own(count in 1u64..5_000) {
            let scatter = Scatter::new(count);
            let mut positions: Vec<u64> = (0..count).map(|rank| scatter.position(rank)).collect();
            positions.sort_unstable();
            prop_assert_eq!(positions, (0..count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn draws_follow_the_formula() {
        let (count, draws) = (5_000, 400_000);
        for theta_milli in [500, 1_000, 1_200] {
            let zipf = Zipf::new(count, theta_milli);
            let mut random = fastrand::Rng::with_seed(7);
            let mut hits = vec![0u32; count as usize];
            for _ in 0..draws {
                hits[zipf.rank(&mut random) as usize] += 1;
            }
            // Chi-square over groups of ranks that are expected some 2,000 times each.
            let should = formula(count, f64::from(theta_milli) / 1000.0);
            let (mut chi, mut groups, mut expected, mut seen) = (0.0, 0, 0.0, 0.0);
            for (hits, should) in hits.iter().zip(&should) {
                expected += should * f64::from(draws);
                seen += f64::from(*hits);
                if expected >= 2_000.0 {
                    chi += (seen - expected) * (seen - expected) / expected;
                    (groups, expected, seen) = (groups + 1, 0.0, 0.0);
                }
            }
            // Mean and deviation of chi-square; five deviations do not happen by chance.
            let degrees = f64::from(groups - 1);
            assert!(chi < degrees + 5.0 * (2.0 * degrees).sqrt(), "{theta_milli}: {chi} for {groups} groups");
        }
    }

    #[test]
    fn huge_ranges_have_small_tables() {
        let zipf = Zipf::new(1 << 40, 990);
        assert!(zipf.entries.len() < 3_000, "{}", zipf.entries.len());
        let mut random = fastrand::Rng::with_seed(1);
        assert!((0..10_000).all(|_| zipf.draw(&mut random) < 1 << 40));
    }
}
