//! Random numbers for simulations: SplitMix64 (Steele, Lea, Flood 2014): small, and the same on every machine.

use std::time::Duration;

/// A generator of random numbers.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to `bound - 1`; 0 when the bound is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next() % bound }
    }

    /// True once in `odds` calls on average; never when `odds` is 0.
    pub fn once_in(&mut self, odds: u32) -> bool {
        odds != 0 && self.below(u64::from(odds)) == 0
    }

    /// Between two times, in nanoseconds.
    pub fn between(&mut self, least: Duration, most: Duration) -> u64 {
        let (least, most) = (nanos(least), nanos(most));
        least + self.below(most.saturating_sub(least) + 1)
    }
}

/// A duration in nanoseconds, saturating.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
