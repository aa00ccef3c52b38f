//! A distribution of latencies in its serialized form.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// A distribution: the buckets that are not empty in rising order, each as its largest latency in nanoseconds
/// (at most 1 % above its smallest) and the number of requests in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Buckets(pub Vec<(u64, u64)>);

/// Shares of the requests at which [`Buckets::thinned`] keeps an edge.
const THIN_LEVELS: [f64; 46] = [
    0.001,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.35,
    0.4,
    0.45,
    0.5,
    0.55,
    0.6,
    0.65,
    0.7,
    0.75,
    0.8,
    0.825,
    0.85,
    0.875,
    0.9,
    0.92,
    0.94,
    0.95,
    0.96,
    0.97,
    0.98,
    0.985,
    0.99,
    0.9925,
    0.995,
    0.9975,
    0.999,
    0.9995,
    0.9998,
    0.9999,
    0.99995,
    0.99998,
    0.99999,
    0.999_995,
    0.999_999,
    0.999_999_5,
    0.999_999_9,
];

impl Buckets {
    /// Most buckets of a thinned distribution.
    pub const THIN: usize = THIN_LEVELS.len() + 3;

    /// The buckets of a histogram of nanoseconds.
    #[must_use]
    pub fn of(histogram: &Histogram<u64>) -> Buckets {
        let top = histogram.max();
        let bucket = |bucket: hdrhistogram::iterators::IterationValue<u64>| {
            (bucket.value_iterated_to().min(top), bucket.count_since_last_iteration())
        };
        Buckets(histogram.iter_recorded().map(bucket).collect())
    }

    /// Whether nothing was counted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Requests counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.iter().map(|bucket| bucket.1).sum()
    }

    /// The latency in nanoseconds that this percentage of the requests does not exceed; 0 when nothing was counted.
    #[must_use]
    pub fn percentile(&self, percent: f64) -> u64 {
        let wanted = ((self.count() as f64 * percent / 100.0).ceil() as u64).max(1);
        let mut seen = 0;
        let found = self.0.iter().find(|bucket| {
            seen += bucket.1;
            seen >= wanted
        });
        found.or(self.0.last()).map_or(0, |bucket| bucket.0)
    }

    /// The same distribution in at most [`Buckets::THIN`] buckets, finer towards the slow end: adjacent buckets are merged, so
    /// that the cumulative count at every remaining latency is unchanged.
    #[must_use]
    pub fn thinned(&self) -> Buckets {
        let (all, last) = (self.count() as f64, self.0.len().saturating_sub(1));
        let mut levels = THIN_LEVELS.into_iter().peekable();
        let mut thin = Buckets::default();
        let (mut seen, mut joined) = (0u64, 0u64);
        for (index, &(latency, count)) in self.0.iter().enumerate() {
            seen += count;
            joined += count;
            let mut reached = false;
            while levels.next_if(|level| seen as f64 >= level * all).is_some() {
                reached = true;
            }
            // The ends are kept: the shortest, the longest, and where the longest begins.
            if reached || index == 0 || index + 1 >= last {
                thin.0.push((latency, joined));
                joined = 0;
            }
        }
        thin
    }

    /// The sum of both distributions.
    #[must_use]
    pub fn joined(&self, other: &Buckets) -> Buckets {
        let mut all = BTreeMap::new();
        for &(latency, count) in self.0.iter().chain(&other.0) {
            let sum: &mut u64 = all.entry(latency).or_default();
            *sum = sum.saturating_add(count);
        }
        Buckets(all.into_iter().collect())
    }

    /// The standard deviation in nanoseconds, around a mean that is more exact than the buckets'.
    #[must_use]
    pub fn deviation(&self, mean: f64) -> f64 {
        let square = |&(latency, count): &(u64, u64)| (latency as f64 - mean).powi(2) * count as f64;
        match self.count() {
            0 => 0.0,
            count => (self.0.iter().map(square).sum::<f64>() / count as f64).sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thin_distribution_has_few_buckets_and_the_same_percentiles() {
        // A hundred thousand latencies over three decades, and one far out.
        let mut histogram = weir_block::meter::new_latency_histogram();
        (0..100_000)
            .for_each(|at| histogram.saturating_record((10_000.0 * 1.0001f64.powi(at % 69_000)) as u64));
        histogram.saturating_record(3_000_000_000);
        let all = Buckets::of(&histogram);
        let thin = all.thinned();
        assert!(all.0.len() > 400 && thin.0.len() <= Buckets::THIN, "{} {}", all.0.len(), thin.0.len());
        assert_eq!(thin.count(), all.count());
        for percent in [1.0, 10.0, 50.0, 90.0, 99.0, 99.9, 99.99, 100.0] {
            assert_eq!(thin.percentile(percent), all.percentile(percent), "{percent}");
        }
        assert_eq!((thin.0[0].0, thin.thinned()), (all.0[0].0, thin.clone()));
        assert_eq!(Buckets::default().thinned(), Buckets::default());
        assert_eq!(Buckets(vec![(7, 3)]).thinned(), Buckets(vec![(7, 3)]));
    }
}
