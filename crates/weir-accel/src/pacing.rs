//! Admission that slows smoothly to the destage rate as the log fills: no cliff and no stall.

use std::time::Duration;

use weir_block::Nanos;

/// Up to this share of the log writes are admitted as fast as they come.
const FREE_SHARE: f64 = 0.5;

/// Admitted even when nothing is destaged, in bytes per second, so that a log whose backing is stuck fills gently
/// instead of stopping at half.
const FLOOR: f64 = 4e6;

/// Admitted as long as there is any room, in bytes per second, however long a checkpoint takes.
const LEAST: f64 = 64e3;

/// Credit is handed out in slices of this length; also the longest credit that is saved up.
const SLICE: Duration = Duration::from_millis(2);

/// A token bucket whose rate falls from "any" at half a log to the destage rate at a full one.
#[derive(Debug)]
pub struct Pacer {
    /// Destage throughput, bytes per second, averaged over checkpoints.
    destage_rate: f64,
    /// Bytes that may be admitted; negative: in debt.
    credit: f64,
    filled: Nanos,
    paced: bool,
    rate: f64,
}

impl Pacer {
    pub fn new() -> Pacer {
        Pacer { destage_rate: 0.0, credit: 0.0, filled: Nanos(0), paced: false, rate: FLOOR }
    }

    /// A checkpoint of `bytes` took `time`.
    pub fn destaged(&mut self, bytes: u64, time: Duration) {
        let rate = bytes as f64 / time.as_secs_f64().max(1e-6);
        self.destage_rate =
            if self.destage_rate == 0.0 { rate } else { 0.7 * self.destage_rate + 0.3 * rate };
    }

    /// Destage throughput lately, bytes per second.
    pub fn destage_rate(&self) -> u64 {
        self.destage_rate as u64
    }

    /// The backing does not take data at present.
    pub fn stuck(&mut self) {
        self.destage_rate = 0.0;
    }

    /// Hands out credit for the time since the last call. `fill` is the share of the log in use, 0 to 1. `room` are the bytes
    /// that it can still take until, after `remaining`, a checkpoint frees some.
    pub fn refill(&mut self, now: Nanos, fill: f64, room: u64, remaining: Option<Duration>) {
        let elapsed = (now - self.filled).min(SLICE).as_secs_f64();
        self.filled = now;
        self.paced = fill > FREE_SHARE;
        if !self.paced {
            self.credit = 0.0;
            return;
        }
        // Infinite at the free share, the destage rate itself at a full log, and falling steadily between.
        let base = self.destage_rate.max(FLOOR);
        self.rate = base * (1.0 - FREE_SHARE) / (fill - FREE_SHARE).max(1e-3);
        if let Some(remaining) = remaining {
            // No faster than a rate that lasts until then, or guests of a slow backing would stall at the end.
            let lasting = room as f64 / remaining.max(SLICE).as_secs_f64();
            self.rate = self.rate.min(lasting.max(LEAST));
        }
        self.credit = (self.credit + self.rate * elapsed).min(self.rate * SLICE.as_secs_f64());
    }

    /// Whether a write may be admitted now.
    pub fn admits(&self) -> bool {
        !self.paced || self.credit >= 0.0
    }

    /// A write of so many bytes was admitted.
    pub fn admitted(&mut self, bytes: u64) {
        if self.paced {
            self.credit -= bytes as f64;
        }
    }

    /// The time of the next call of [`Pacer::refill`].
    pub fn deadline(&self) -> Nanos {
        if self.admits() {
            return Nanos::NEVER;
        }
        let wait = Duration::from_secs_f64((-self.credit / self.rate).min(1.0));
        // Refilling gives at most one slice of credit at a time.
        self.filled + wait.clamp(Duration::from_micros(50), SLICE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Admitted bytes per second at a fill level, with a writer that always wants more.
    fn throughput(fill: f64) -> f64 {
        let mut pacer = Pacer::new();
        pacer.destaged(100_000_000, Duration::from_secs(1));
        let (mut now, mut admitted) = (Nanos(1), 0u64);
        pacer.refill(now, fill, u64::MAX, None);
        while now < Nanos(1_000_000_000) {
            now = now + Duration::from_micros(100);
            pacer.refill(now, fill, u64::MAX, None);
            while pacer.admits() && admitted < 10_000_000_000 {
                pacer.admitted(4096);
                admitted += 4096;
            }
        }
        admitted as f64
    }

    #[test]
    fn slows_steadily_down_to_the_destage_rate() {
        let rates: Vec<f64> = [0.55, 0.6, 0.7, 0.8, 0.9, 1.0].into_iter().map(throughput).collect();
        assert!(rates.windows(2).all(|pair| pair[0] > pair[1]), "falls: {rates:?}");
        let full = rates[rates.len() - 1];
        assert!((95e6..110e6).contains(&full), "at a full log the destage rate of 100 MB/s: {full}");
        assert!(rates.windows(2).all(|pair| pair[0] / pair[1] < 2.5), "no cliff: {rates:?}");
    }

    #[test]
    fn a_stuck_backing_lets_the_log_fill_gently() {
        let mut pacer = Pacer::new();
        pacer.stuck();
        pacer.refill(Nanos(1), 0.75, u64::MAX, None);
        pacer.admitted(1 << 20);
        assert!(!pacer.admits());
        assert!(pacer.deadline() < Nanos(10_000_000));
    }

    /// A log with a checkpoint that takes 4 s, on a backing that was fast before: room lasts until the checkpoint's end.
    #[test]
    fn room_lasts_until_the_checkpoint_ends() {
        let mut pacer = Pacer::new();
        pacer.destaged(1 << 30, Duration::from_secs(1));
        let (mut now, mut room) = (Nanos(1), 24u64 << 20);
        let end = now + Duration::from_secs(4);
        let mut longest = Duration::ZERO;
        let mut last = now;
        pacer.refill(now, 0.6, room, Some(end - now));
        while now < end {
            now = now + Duration::from_micros(200);
            pacer.refill(now, 1.0 - room as f64 / f64::from(60 << 20), room, Some(end - now));
            while pacer.admits() && room > 4096 {
                pacer.admitted(4096);
                room -= 4096;
                longest = longest.max(now - last);
                last = now;
            }
        }
        longest = longest.max(end - last);
        assert!(longest < Duration::from_millis(20), "nothing was admitted for {longest:?}");
        assert!(room < 1 << 20, "{room} bytes were kept back for nothing");
    }
}
