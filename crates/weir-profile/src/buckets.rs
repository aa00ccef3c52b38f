//! Log-linear buckets: exact for small numbers, then a fixed number of equal steps for each doubling.

use serde::{Deserialize, Serialize};

/// The mapping of numbers to buckets: `2^BITS` steps for each doubling, exact below `2^(BITS + 1)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    bits: u32,
    /// Numbers of `2^top` and more share the last bucket.
    top: u32,
}

impl Scale {
    /// `2^bits` steps per doubling, up to `2^top`. Needs `bits < top <= 63`.
    #[must_use]
    pub const fn new(bits: u32, top: u32) -> Scale {
        assert!(bits < top && top <= 63, "a scale has steps below its top");
        Scale { bits, top }
    }

    /// The number of buckets.
    #[must_use]
    pub const fn buckets(self) -> usize {
        (((self.top - self.bits + 1) << self.bits) + 1) as usize
    }

    /// The bucket of a number.
    #[inline]
    #[must_use]
    pub const fn bucket(self, value: u64) -> usize {
        if value >> self.top != 0 {
            return self.buckets() - 1;
        }
        let magnitude = (u64::BITS - 1) - (value | (1 << self.bits)).leading_zeros();
        let shift = magnitude - self.bits;
        ((shift as u64) << self.bits) as usize + (value >> shift) as usize
    }

    /// The smallest number of a bucket; of the last one, `2^top`. The bucket ends where the next one begins.
    #[must_use]
    pub const fn floor(self, bucket: usize) -> u64 {
        let steps = 1u64 << self.bits;
        let bucket = bucket as u64;
        if bucket < 2 * steps {
            return bucket;
        }
        let shift = bucket / steps - 1;
        (steps + bucket % steps) << shift
    }

    /// The non-empty buckets, as (smallest number, amount), in order.
    pub(crate) fn list<T: Copy + Into<f64>>(self, amounts: &[T]) -> Spread {
        let held = amounts
            .iter()
            .enumerate()
            .map(|(bucket, &amount)| (self.floor(bucket), hundredths(amount.into())));
        Spread(held.filter(|&(_, amount)| amount != 0.0).collect())
    }
}

/// An upper bound for any disk: a million requests a second for three years.
pub(crate) const MOST: f64 = 1e14;

/// Whether a number from a file is a valid amount.
pub(crate) fn is_amount(amount: f64) -> bool {
    (0.0..=MOST).contains(&amount)
}

/// Rounded to hundredths: estimates are not more exact, and short numbers survive writing and reading.
pub(crate) fn hundredths(amount: f64) -> f64 {
    (amount * 100.0).round() / 100.0
}

/// Amounts by the smallest number of their bucket, in ascending order. Merges by addition, as long as both sides
/// have the same scale; each field says its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Spread(pub Vec<(u64, f64)>);

impl Spread {
    /// The sum of all amounts.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.0.iter().map(|&(_, amount)| amount).sum()
    }

    /// The amount in buckets that begin below `limit`.
    #[must_use]
    pub fn below(&self, limit: u64) -> f64 {
        self.0.iter().take_while(|&&(floor, _)| floor < limit).map(|&(_, amount)| amount).sum()
    }

    /// The number that a share `quantile` (0 to 1) of the amounts does not exceed, by the floors of the buckets; `None`
    /// when there is nothing.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Option<u64> {
        let wanted = self.total() * quantile.clamp(0.0, 1.0);
        let mut sum = 0.0;
        for &(floor, amount) in &self.0 {
            sum += amount;
            if sum >= wanted {
                return Some(floor);
            }
        }
        self.0.last().map(|&(floor, _)| floor)
    }

    /// Adds another one.
    pub fn add(&mut self, other: &Spread) {
        let mut sum = std::collections::BTreeMap::new();
        for &(floor, amount) in self.0.iter().chain(&other.0) {
            *sum.entry(floor).or_insert(0.0) += amount;
        }
        self.0 = sum.into_iter().collect();
    }

    /// Whether it is sorted and has valid amounts.
    pub(crate) fn is_sound(&self) -> bool {
        self.0.windows(2).all(|pair| pair[0].0 < pair[1].0)
            && self.0.iter().all(|&(_, amount)| is_amount(amount))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_follow_each_other_without_gaps() {
        for scale in [Scale::new(0, 20), Scale::new(3, 30), Scale::new(5, 40)] {
            for bucket in 0..scale.buckets() {
                let floor = scale.floor(bucket);
                assert_eq!(scale.bucket(floor), bucket, "{scale:?} {floor}");
                if bucket > 0 {
                    assert_eq!(scale.bucket(floor - 1), bucket - 1, "{scale:?} {floor}");
                }
            }
            assert_eq!(scale.bucket(u64::MAX), scale.buckets() - 1);
        }
    }

    proptest! {
        #[test]
        fn a_bucket_is_narrow(value in 0u64..1 << 40) {
            let scale = Scale::new(5, 40);
            let bucket = scale.bucket(value);
            prop_assert!(scale.floor(bucket) <= value && value < scale.floor(bucket + 1));
            prop_assert!(value - scale.floor(bucket) <= value / 32);
        }

        #[test]
        fn spreads_add_and_count(values in proptest::collection::vec(0u64..5_000, 1..200), cut in 0usize..200) {
            let scale = Scale::new(4, 20);
            let of = |values: &[u64]| {
                let mut amounts = vec![0u32; scale.buckets()];
                values.iter().for_each(|&value| amounts[scale.bucket(value)] += 1);
                scale.list(&amounts)
            };
            let cut = cut.min(values.len());
            let mut sum = of(&values[..cut]);
            sum.add(&of(&values[cut..]));
            prop_assert_eq!(&sum, &of(&values));
            let mut sorted = values.clone();
            sorted.sort_unstable();
            let median = sorted[(sorted.len() - 1) / 2];
            prop_assert_eq!(sum.quantile(0.5), Some(scale.floor(scale.bucket(median))));
            prop_assert_eq!(sum.below(16) as usize, values.iter().filter(|&&value| value < 16).count());
        }
    }
}
