//! Clocks that run at different speeds.

use fastrand::Rng;
use weir_block::Nanos;

/// How many parts in a million a clock is fast or slow at most.
pub const DRIFT: i64 = 30_000;

/// One host's clock, read at real times.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    ppm: i64,
    real: Nanos,
    local: Nanos,
}

impl Clock {
    /// A host that has booted some time ago.
    pub fn new(rng: &mut Rng, real: Nanos) -> Clock {
        Clock { ppm: speed(rng), real, local: Nanos(rng.u64(10_000_000_000..1_000_000_000_000)) }
    }

    /// What it shows.
    pub fn at(&self, real: Nanos) -> Nanos {
        let passed = (real.0 - self.real.0) as i128;
        Nanos(self.local.0 + (passed * i128::from(1_000_000 + self.ppm) / 1_000_000) as u64)
    }

    /// When it shows that much, if its speed stays.
    pub fn when(&self, local: Nanos) -> Nanos {
        let left = local.0.saturating_sub(self.local.0) as i128;
        Nanos(self.real.0 + (left * 1_000_000 / i128::from(1_000_000 + self.ppm)) as u64 + 1)
    }

    /// Runs at another speed from now on.
    pub fn turn(&mut self, rng: &mut Rng, real: Nanos) {
        *self = Clock { ppm: speed(rng), real, local: self.at(real) };
    }
}

/// Mostly as fast or as slow as can be: that is where margins are too small.
fn speed(rng: &mut Rng) -> i64 {
    match rng.u8(0..3) {
        0 => -DRIFT,
        1 => DRIFT,
        _ => rng.i64(-DRIFT..=DRIFT),
    }
}
