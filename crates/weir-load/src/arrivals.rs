//! Start times of requests in an open loop: at even intervals, or as a Poisson process.
//!
//! The clock is independent of the target. A request that is late starts as soon as the queue has room, and its latency
//! counts from its due time.

use serde::{Deserialize, Serialize};
use weir_block::Nanos;

/// Pieces of the curve of the exponential distribution.
const PIECES: usize = 256;

/// ln 2, of 2^32.
const LN_2: u64 = 2_977_044_472;

const NANOS: u64 = 1_000_000_000;

/// The distribution of starts over time, for a load with a rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrivals {
    /// At even intervals.
    #[default]
    Fixed,
    /// Independent of each other, as from many clients: exponential intervals with the same mean.
    Poisson,
}

/// The clock of one thread's open loop.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    next: Nanos,
    /// Mean interval: whole nanoseconds, and `rest` of `rate` of another one.
    interval: u64,
    rest: u64,
    rate: u64,
    /// Sum of the remainders, below `rate`.
    carried: u64,
    exponential: Option<Exponential>,
}

impl Pace {
    /// For thread number `thread` of `threads`, which together start `rate` requests a second from `now` on.
    pub fn new(
        rate: u64,
        arrivals: Arrivals,
        (thread, threads): (u32, u32),
        now: Nanos,
        random: fastrand::Rng,
    ) -> Pace {
        let mean = NANOS * u64::from(threads);
        let mut pace =
            Pace { next: now, interval: mean / rate, rest: mean % rate, rate, carried: 0, exponential: None };
        match arrivals {
            // Threads take turns: starting all at once would cause bursts.
            Arrivals::Fixed => pace.next.0 += NANOS * u64::from(thread) / rate,
            Arrivals::Poisson => {
                pace.exponential = Some(Exponential::new(random));
                pace.advance();
            }
        }
        pace
    }

    /// Due time of the next request.
    #[inline]
    pub fn next(&self) -> Nanos {
        self.next
    }

    /// Advances to the next request: the current one was issued.
    #[inline]
    pub fn advance(&mut self) {
        self.carried += self.rest;
        let mut gap = self.interval;
        if self.carried >= self.rate {
            self.carried -= self.rate;
            gap += 1;
        }
        if let Some(exponential) = &mut self.exponential {
            gap = exponential.draw(gap);
        }
        self.next = Nanos(self.next.0.saturating_add(gap));
    }

    /// Number of requests that are due before `end` and were not issued.
    pub fn due_before(mut self, end: Nanos) -> u64 {
        let mut due = 0;
        while self.next < end {
            self.advance();
            due += 1;
        }
        due
    }
}

/// Exponential intervals, without floating-point operations per interval.
///
/// An exponential variable is a number of halvings (zeros before the first one in random bits, each worth ln 2) plus
/// an independent rest below ln 2. The rest's curve, `-ln(1 - u/2)`, is kept in 256 straight pieces, which are off by
/// less than three parts in a million of the mean.
#[derive(Clone, Debug)]
struct Exponential {
    random: fastrand::Rng,
    /// Of 2^32.
    curve: Box<[u64; PIECES + 1]>,
}

impl Exponential {
    fn new(random: fastrand::Rng) -> Exponential {
        let at = |piece: usize| -(1.0 - piece as f64 / (2 * PIECES) as f64).ln() * (1u64 << 32) as f64;
        Exponential { random, curve: Box::new(std::array::from_fn(|piece| at(piece) as u64)) }
    }

    #[inline]
    fn draw(&mut self, mean: u64) -> u64 {
        let halvings = u64::from(self.random.u64(..).trailing_zeros());
        let drawn = self.random.u64(..);
        let piece = (drawn >> 56) as usize;
        let within = (drawn >> 24) & u64::from(u32::MAX);
        let (from, to) = (self.curve[piece], self.curve[piece + 1]);
        let distance = halvings * LN_2 + from + (((to - from) * within) >> 32);
        ((u128::from(mean) * u128::from(distance)) >> 32) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(rate: u64, arrivals: Arrivals, thread: (u32, u32), count: usize) -> Vec<u64> {
        let mut pace = Pace::new(rate, arrivals, thread, Nanos(0), fastrand::Rng::with_seed(5));
        let next = || {
            let next = pace.next().0;
            pace.advance();
            next
        };
        std::iter::repeat_with(next).take(count).collect()
    }

    #[test]
    fn even_distances_keep_the_rate_exactly() {
        for rate in [1, 3, 7, 300_000, 999_999_937] {
            let last = starts(rate, Arrivals::Fixed, (0, 1), rate.min(300_000) as usize + 1).pop().unwrap();
            let should = u128::from(rate.min(300_000)) * 1_000_000_000 / u128::from(rate);
            assert!(u128::from(last).abs_diff(should) <= 1, "{rate}: {last} {should}");
        }
    }

    #[test]
    fn threads_take_turns() {
        let of = |thread| starts(1_000, Arrivals::Fixed, (thread, 4), 3);
        assert_eq!(of(0), [0, 4_000_000, 8_000_000]);
        assert_eq!(of(3), [3_000_000, 7_000_000, 11_000_000]);
    }

    #[test]
    fn poisson_distances_are_exponential() {
        const COUNT: usize = 400_000;
        let starts = starts(1_000, Arrivals::Poisson, (0, 1), COUNT);
        let mut gaps: Vec<f64> = starts.windows(2).map(|pair| (pair[1] - pair[0]) as f64 / 1e6).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((mean - 1.0).abs() < 0.008, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.02, "variance {variance}");
        // Kolmogorov and Smirnov: the largest distance from 1 - e^-x; above 2/sqrt(n) has a chance of 1 in 1,500.
        gaps.sort_by(f64::total_cmp);
        let distance = |(index, gap): (usize, &f64)| {
            ((index as f64 + 0.5) / gaps.len() as f64 - (1.0 - (-gap).exp())).abs()
        };
        let largest = gaps.iter().enumerate().map(distance).fold(0.0, f64::max);
        assert!(largest < 2.0 / (gaps.len() as f64).sqrt(), "{largest}");
    }

    #[test]
    fn what_is_due_is_counted() {
        let pace = Pace::new(1_000, Arrivals::Fixed, (0, 1), Nanos(0), fastrand::Rng::with_seed(1));
        assert_eq!(pace.clone().due_before(Nanos(10_000_000)), 10);
        assert_eq!(pace.due_before(Nanos(0)), 0);
    }
}
