//! The limit of a disk's rate: token buckets, as arithmetic on given times.

use std::num::NonZeroU64;
use std::time::Duration;

use weir_block::Nanos;

/// The highest rate at which the clients of a disk are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Requests per second.
    pub iops: Option<NonZeroU64>,
    /// Bytes per second.
    pub bytes_per_second: Option<NonZeroU64>,
    /// After a pause, what these rates allow in this time passes at once.
    pub burst: Duration,
}

/// Requests that a limit has delayed, since the disk was opened here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delays {
    /// The number of requests that have waited.
    pub requests: u64,
    /// The sum of their waits: of each from the time at which it was received, less what it has waited for anything else. What a
    /// client has sent and the kernel's socket still has is not received.
    pub waited: Duration,
    /// The number of connections whose next request waits.
    pub waiting: usize,
}

/// The state of a [`Rate`]: the requests and bytes that may pass now.
///
/// In any time, at most `rate × time + burst` passes, or one request that is larger than the burst. No more than that is ever kept
/// back: if requests always wait, the rate is reached.
#[derive(Clone, Copy, Debug)]
pub struct Limiter {
    requests: Option<Bucket>,
    bytes: Option<Bucket>,
}

impl Limiter {
    /// A limiter under which nothing has passed yet.
    #[must_use]
    pub fn new(rate: Rate, now: Nanos) -> Limiter {
        let bucket = |rate_of: Option<NonZeroU64>| rate_of.map(|per| Bucket::new(per, rate.burst, now));
        Limiter { requests: bucket(rate.iops), bytes: bucket(rate.bytes_per_second) }
    }

    /// The time from which one request of so many bytes may pass, if nothing else does before; not after `now`: it may pass now.
    #[must_use]
    pub fn opens_at(&self, now: Nanos, bytes: u64) -> Nanos {
        let of = |bucket: &Option<Bucket>, cost| bucket.map_or(now, |bucket| bucket.opens_at(now, cost));
        of(&self.requests, 1).max(of(&self.bytes, bytes))
    }

    /// One request of so many bytes passes. It may.
    pub fn pass(&mut self, now: Nanos, bytes: u64) {
        for (bucket, cost) in [(&mut self.requests, 1), (&mut self.bytes, bytes)] {
            if let Some(bucket) = bucket {
                bucket.take(now, cost);
            }
        }
    }
}

/// Tokens, which come in at `rate` per second. One is a billion of the bucket's units, so that a nanosecond brings in `rate` units,
/// and nothing is lost to rounding.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    rate: i128,
    capacity: i128,
    /// At `at`. Negative after a request that was larger than the bucket.
    level: i128,
    at: Nanos,
}

const UNITS: i128 = 1_000_000_000;

impl Bucket {
    fn new(rate: NonZeroU64, burst: Duration, now: Nanos) -> Bucket {
        let rate = i128::from(rate.get());
        let burst = i128::try_from(burst.as_nanos()).unwrap_or(i128::MAX);
        let capacity = rate.saturating_mul(burst);
        Bucket { rate, capacity, level: capacity, at: now }
    }

    fn level(&self, now: Nanos) -> i128 {
        let elapsed = i128::from(now.0.saturating_sub(self.at.0));
        self.level.saturating_add(elapsed.saturating_mul(self.rate)).min(self.capacity)
    }

    fn opens_at(&self, now: Nanos, cost: u64) -> Nanos {
        // A request larger than the bucket passes when it is full, and its successors wait for it.
        let wanted = (i128::from(cost) * UNITS).min(self.capacity);
        let lacks = wanted - self.level(now);
        if lacks <= 0 {
            return now;
        }
        let wait = (lacks + self.rate - 1) / self.rate;
        Nanos(now.0.saturating_add(u64::try_from(wait).unwrap_or(u64::MAX)))
    }

    fn take(&mut self, now: Nanos, cost: u64) {
        self.level = self.level(now) - i128::from(cost) * UNITS;
        self.at = self.at.max(now);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Recomputes from the whole history what a bucket would have: tokens of a duration, less what has passed in it, over all
    /// durations that end now, is never more than a full bucket and that.
    struct Oracle {
        rate: u128,
        capacity: i128,
        passed: Vec<(u64, u64)>,
    }

    impl Oracle {
        fn new(rate: u64, burst: Duration) -> Oracle {
            let rate = u128::from(rate);
            Oracle { rate, capacity: (rate * burst.as_nanos()) as i128, passed: Vec::new() }
        }

        fn admits(&self, now: u64, cost: u64) -> bool {
            let since = |start: u64| {
                let in_it =
                    self.passed.iter().filter(|(at, _)| *at >= start).map(|(_, cost)| i128::from(*cost));
                self.capacity + (self.rate * u128::from(now - start)) as i128 - in_it.sum::<i128>() * UNITS
            };
            let starts = self.passed.iter().map(|(at, _)| *at).chain([now]);
            let level = starts.map(since).min().unwrap();
            level >= (i128::from(cost) * UNITS).min(self.capacity)
        }
    }

    /// Pauses between requests, and their sizes.
    fn requests() -> impl Strategy<Value = Vec<(u64, u64)>> {
        let pause = prop_oneof![2 => Just(0), 3 => 1..2_000_000_u64, 1 => 1..5_000_000_000_u64];
        let bytes = prop_oneof![1 => Just(0), 3 => Just(4096), 2 => 1..70_000_u64, 1 => 1..40_000_000_u64];
        prop::collection::vec((pause, bytes), 1..60)
    }

    fn rate() -> impl Strategy<Value = Rate> {
        let per = |most: u64| prop::option::of((1..=most).prop_filter_map("not zero", NonZeroU64::new));
        (per(100_000), per(1 << 34), 1..3_000_u64).prop_map(|(iops, bytes_per_second, burst)| Rate {
            iops,
            bytes_per_second,
            burst: Duration::from_millis(burst),
        })
    }

    proptest! {
        /// Requests that are asked for at any time, and given up if they may not pass.
        #[test]
        fn decides_as_the_history_says(rate in rate(), requests in requests()) {
            let mut now = Nanos(7);
            let mut limiter = Limiter::new(rate, now);
            let oracle = |per: Option<NonZeroU64>| per.map(|per| Oracle::new(per.get(), rate.burst));
            let (mut count, mut bytes) = (oracle(rate.iops), oracle(rate.bytes_per_second));
            for (pause, size) in requests {
                now = now + Duration::from_nanos(pause);
                let may = |oracle: &Option<Oracle>, cost| oracle.as_ref().is_none_or(|it| it.admits(now.0, cost));
                let expected = may(&count, 1) && may(&bytes, size);
                prop_assert_eq!(limiter.opens_at(now, size) <= now, expected);
                if expected {
                    limiter.pass(now, size);
                    count.iter_mut().for_each(|it| it.passed.push((now.0, 1)));
                    bytes.iter_mut().for_each(|it| it.passed.push((now.0, size)));
                }
            }
        }

        /// Requests that wait for their time: in no duration more than the limit, and in all of it no less.
        #[test]
        fn holds_the_rate_and_reaches_it(
            per in 1..1_000_000_u64,
            burst in 1..1_000_u64,
            sizes in prop::collection::vec(1..100_000_u64, 2..80),
        ) {
            let bytes_per_second = NonZeroU64::new(per);
            let rate = Rate { iops: None, bytes_per_second, burst: Duration::from_millis(burst) };
            let mut limiter = Limiter::new(rate, Nanos(0));
            let (mut now, mut passed) = (Nanos(0), Vec::new());
            for size in sizes {
                let opens = limiter.opens_at(now, size);
                if opens > now {
                    prop_assert!(limiter.opens_at(Nanos(opens.0 - 1), size) > Nanos(opens.0 - 1), "not earlier");
                }
                now = now.max(opens);
                prop_assert!(limiter.opens_at(now, size) <= now, "then");
                limiter.pass(now, size);
                passed.push((now.0, size));
            }
            let burst = u128::from(per) * rate.burst.as_nanos();
            for (index, &(from, _)) in passed.iter().enumerate() {
                let (mut sum, mut largest) = (0, 0);
                for &(to, size) in &passed[index..] {
                    sum += u128::from(size) * UNITS as u128;
                    largest = largest.max(u128::from(size) * UNITS as u128);
                    let allowed = u128::from(per) * u128::from(to - from) + burst.max(largest);
                    prop_assert!(sum <= allowed, "{sum} of {allowed}");
                }
            }
            // Of what comes in, less than a nanosecond's is lost to each request, and the last one need not be affordable yet.
            let sum: u128 = passed.iter().map(|(_, size)| u128::from(*size) * UNITS as u128).sum();
            let lost = u128::from(per) * passed.len() as u128;
            prop_assert!(sum + lost >= u128::from(per) * u128::from(now.0));
        }
    }

    #[test]
    fn a_request_larger_than_the_bucket_passes_when_that_is_full_and_its_successors_wait() {
        let bytes_per_second = NonZeroU64::new(1_000_000);
        let rate = Rate { iops: None, bytes_per_second, burst: Duration::from_millis(100) };
        let mut limiter = Limiter::new(rate, Nanos(0));
        assert_eq!(limiter.opens_at(Nanos(0), 1_000_000), Nanos(0));
        limiter.pass(Nanos(0), 1_000_000);
        assert_eq!(limiter.opens_at(Nanos(0), 50_000), Nanos(950_000_000));
        assert_eq!(
            limiter.opens_at(Nanos(0), 0),
            Nanos(900_000_000),
            "not even what costs nothing passes by"
        );
        assert_eq!(limiter.opens_at(Nanos(0), 1_000_000), Nanos(1_000_000_000), "full again");
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let most = NonZeroU64::new(u64::MAX);
        let mut limiter =
            Limiter::new(Rate { iops: most, bytes_per_second: most, burst: Duration::MAX }, Nanos(0));
        for at in [0, 1, u64::MAX] {
            limiter.pass(Nanos(at), u64::MAX);
            assert!(limiter.opens_at(Nanos(at), u64::MAX) >= Nanos(at));
        }
        let least = NonZeroU64::new(1);
        let rate = Rate { iops: least, bytes_per_second: least, burst: Duration::from_nanos(1) };
        let mut limiter = Limiter::new(rate, Nanos(0));
        limiter.pass(Nanos(0), u64::MAX);
        assert_eq!(limiter.opens_at(Nanos(1), 1), Nanos(u64::MAX), "a time that does not come");
    }
}
