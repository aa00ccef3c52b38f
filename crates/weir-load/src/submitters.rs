//! Several threads that issue one sequence, simulated in one thread: the order in which their requests arrive.
//!
//! Each takes the next request of the sequence and submits it when it runs. The scheduler determines the delay in between; here
//! it is drawn from an exponential distribution. So requests overtake each other as they do behind a server with several worker
//! threads, and are otherwise unchanged.

use std::time::Duration;

use fastrand::Rng;
use weir_block::Nanos;

/// Default mean time for which a submitter holds a request: waking a thread and its system call.
pub const HOLD: Duration = Duration::from_micros(100);

/// Limit of a hold, in multiples of its mean.
const LONGEST_HOLD: f64 = 8.0;

/// The submitters, and the time at which each is free again.
#[derive(Debug)]
pub struct Submitters {
    free: Vec<Nanos>,
    mean: Duration,
    rng: Rng,
}

impl Submitters {
    /// `count` submitters (1 or more); the same `seed` draws the same times.
    #[must_use]
    pub fn new(count: usize, mean: Duration, seed: u64) -> Submitters {
        Submitters { free: vec![Nanos(0); count.max(1)], mean, rng: Rng::with_seed(seed) }
    }

    /// Submission time of a request that arrives at `now`: the submitter that is free first takes it.
    pub fn passes_at(&mut self, now: Nanos) -> Nanos {
        // The inverse of the exponential distribution; 1 − f64() is in (0, 1].
        let hold = self.mean.mul_f64((-(1.0 - self.rng.f64()).ln()).min(LONGEST_HOLD));
        let free = self.free.iter_mut().min().expect("there is at least one");
        *free = now.max(*free) + hold;
        *free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Submission times of 10 000 requests, one arriving every 60 µs.
    fn times(count: usize) -> Vec<Nanos> {
        let mut submitters = Submitters::new(count, HOLD, 5);
        (0..10_000).map(|n| submitters.passes_at(Nanos(n * 60_000))).collect()
    }

    #[test]
    fn one_submitter_keeps_the_order_and_two_lose_it() {
        let overtaken = |times: &[Nanos]| times.windows(2).filter(|pair| pair[0] > pair[1]).count();
        assert_eq!(overtaken(&times(1)), 0);
        let two = overtaken(&times(2));
        assert!((1500..4500).contains(&two), "{two} of 10 000");
    }

    #[test]
    fn holds_have_their_mean() {
        let mut alone = Submitters::new(1, HOLD, 5);
        let total: Duration =
            (0..10_000).map(|n| alone.passes_at(Nanos(n * 1_000_000_000)) - Nanos(n * 1_000_000_000)).sum();
        assert!((0.95..1.05).contains(&(total.div_f64(10_000.0).as_secs_f64() / HOLD.as_secs_f64())));
    }
}
