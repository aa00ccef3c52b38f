//! Clocks with drift.

use fastrand::Rng;
use weir_block::Nanos;

/// Largest drift, in parts per million.
pub const DRIFT: i64 = 30_000;

/// One host's clock, as a function of real time.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    ppm: i64,
    real: Nanos,
    local: Nanos,
}

impl Clock {
    /// The clock of a host that booted some time ago.
    pub fn new(rng: &mut Rng, real: Nanos) -> Clock {
        Clock { ppm: speed(rng), real, local: Nanos(rng.u64(10_000_000_000..1_000_000_000_000)) }
    }

    /// Its time at a real time.
    pub fn at(&self, real: Nanos) -> Nanos {
        let passed = (real.0 - self.real.0) as i128;
        Nanos(self.local.0 + (passed * i128::from(1_000_000 + self.ppm) / 1_000_000) as u64)
    }

    /// The real time at which it shows `local`, at its current speed.
    pub fn when(&self, local: Nanos) -> Nanos {
        let left = local.0.saturating_sub(self.local.0) as i128;
        Nanos(self.real.0 + (left * 1_000_000 / i128::from(1_000_000 + self.ppm)) as u64 + 1)
    }

    /// Changes its speed.
    pub fn turn(&mut self, rng: &mut Rng, real: Nanos) {
        *self = Clock { ppm: speed(rng), real, local: self.at(real) };
    }
}

/// A random speed, mostly an extreme one, where margins are tightest.
fn speed(rng: &mut Rng) -> i64 {
    match rng.u8(0..3) {
        0 => -DRIFT,
        1 => DRIFT,
        _ => rng.i64(-DRIFT..=DRIFT),
    }
}
