//! The number of writes that a checkpoint keeps in flight: the smallest with which the backing reaches its best throughput.
//! More would only delay guests' reads.
//!
//! The controller remembers the throughput of each depth that it has tried, runs at the smallest depth that is nearly as fast
//! as the best, and tries a neighbour now and then. It measures the depth in use again each time, so its memory follows a
//! backing that changes.

use std::time::Duration;

/// The depths that are tried.
const DEPTHS: [usize; 12] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];

/// Index of the first depth (32): enough for most storage, so that the first checkpoints are not slow.
const FIRST: usize = 9;

/// The share of the best throughput from which on a depth counts as equally fast.
const NEARLY: f64 = 0.9;

/// Checkpoints at the chosen depth between two tries of a neighbour.
const TRY_AFTER: u32 = 8;

/// Weight of a new measurement.
const WEIGHT: f64 = 0.3;

/// A measurement needs this many writes per request in flight; otherwise it would measure how the queue fills and empties.
const ENOUGH: usize = 4;

/// The fixed cost of a write, in bytes: a small write takes about as long as one of this size on disks and networks.
const PER_WRITE: u64 = 64 << 10;

/// Finds the depth for one disk's backing.
#[derive(Debug)]
pub struct DepthControl {
    /// Work per second, by depth; zero: never tried.
    throughput: [f64; DEPTHS.len()],
    /// The depth's index for the next checkpoint.
    at: usize,
    chosen: usize,
    since_try: u32,
    /// The next try is of the next larger depth.
    upwards: bool,
}

impl DepthControl {
    pub fn new() -> DepthControl {
        DepthControl {
            throughput: [0.0; DEPTHS.len()],
            at: FIRST,
            chosen: FIRST,
            since_try: 0,
            upwards: false,
        }
    }

    /// Writes that the next checkpoint keeps in flight.
    pub fn depth(&self) -> usize {
        DEPTHS[self.at]
    }

    /// A checkpoint of so many `writes` and `bytes` took `time`, at [`DepthControl::depth`].
    pub fn observe(&mut self, writes: usize, bytes: u64, time: Duration) {
        if writes < ENOUGH * self.depth() || time.is_zero() {
            return;
        }
        let work = (bytes + writes as u64 * PER_WRITE) as f64 / time.as_secs_f64();
        let known = &mut self.throughput[self.at];
        *known = if *known == 0.0 { work } else { (1.0 - WEIGHT) * *known + WEIGHT * work };
        let best = self.throughput.iter().copied().fold(0.0, f64::max);
        let good = |throughput: &f64| *throughput >= NEARLY * best;
        self.chosen = self.throughput.iter().position(good).unwrap_or(FIRST);
        self.since_try += 1;
        self.at = if self.since_try > TRY_AFTER { self.try_neighbour() } else { self.chosen };
    }

    fn try_neighbour(&mut self) -> usize {
        self.since_try = 0;
        self.upwards = !self.upwards;
        let larger = (self.chosen + 1).min(DEPTHS.len() - 1);
        let smaller = self.chosen.saturating_sub(1);
        if self.upwards { larger } else { smaller }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A backing that does `parallel` writes of 4 KiB at once, each in `service`, with noise of a tenth.
    struct Backing {
        parallel: usize,
        service: Duration,
        random: fastrand::Rng,
    }

    impl Backing {
        fn checkpoint(&mut self, control: &mut DepthControl) {
            let writes = 1024;
            let rate = control.depth().min(self.parallel) as f64 / self.service.as_secs_f64();
            let noise = 0.95 + 0.1 * self.random.f64();
            control.observe(
                writes,
                4096 * writes as u64,
                Duration::from_secs_f64(writes as f64 / rate * noise),
            );
        }
    }

    /// The smallest depth that is known to the controller and keeps the backing busy.
    fn enough(parallel: usize) -> usize {
        DEPTHS.into_iter().find(|depth| *depth >= parallel).unwrap_or(64)
    }

    /// The depth of the controller in most of `rounds` checkpoints.
    fn settled(backing: &mut Backing, control: &mut DepthControl, rounds: usize) -> usize {
        let mut counts = [0; DEPTHS.len()];
        for _ in 0..rounds {
            backing.checkpoint(control);
            counts[control.chosen] += 1;
        }
        DEPTHS[(0..counts.len()).max_by_key(|index| counts[*index]).unwrap_or(0)]
    }

    #[test]
    fn finds_where_throughput_stops_growing() {
        for seed in 0..20 {
            for parallel in [1, 2, 4, 8, 16, 32, 64] {
                let service = Duration::from_micros(100);
                let mut backing = Backing { parallel, service, random: fastrand::Rng::with_seed(seed) };
                let mut control = DepthControl::new();
                settled(&mut backing, &mut control, 300);
                assert_eq!(settled(&mut backing, &mut control, 100), enough(parallel), "seed {seed}");
            }
        }
    }

    #[test]
    fn follows_a_backing_that_changes() {
        let mut backing =
            Backing { parallel: 4, service: Duration::from_micros(100), random: fastrand::Rng::with_seed(7) };
        let mut control = DepthControl::new();
        settled(&mut backing, &mut control, 300);
        for (parallel, micros) in [(32, 1000), (2, 50), (16, 5000)] {
            (backing.parallel, backing.service) = (parallel, Duration::from_micros(micros));
            settled(&mut backing, &mut control, 1000);
            assert_eq!(settled(&mut backing, &mut control, 100), enough(parallel));
        }
    }

    #[test]
    fn small_checkpoints_say_nothing() {
        let mut control = DepthControl::new();
        for _ in 0..100 {
            control.observe(10, 1 << 20, Duration::from_secs(1));
            assert_eq!(control.depth(), DEPTHS[FIRST]);
        }
    }
}
