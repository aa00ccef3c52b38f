//! Arrivals of requests: intervals, bursts, and the hours of the day.

use std::time::Duration;

use weir_block::Nanos;

use super::buckets::Scale;

/// Length of the slots in which requests are counted: the variance of the counts measures burstiness.
pub const TICK: Duration = Duration::from_millis(100);

/// A pause of this length ends a burst.
pub const PAUSE: Duration = Duration::from_millis(10);

/// Hours of a day.
pub const HOURS: usize = 24;

/// Intervals between requests, in nanoseconds.
pub(super) const GAPS: Scale = Scale::new(2, 50);

/// Requests of a burst.
pub(super) const BURSTS: Scale = Scale::new(0, 40);

const SECOND: u64 = 1_000_000_000;
const HOUR: u64 = 3600 * SECOND;
const TICK_NANOS: u64 = TICK.as_nanos() as u64;
const TICKS_OF_SECOND: u64 = SECOND / TICK_NANOS;

/// The requests of one hour of the day, over all days.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HourCount {
    /// Nanoseconds of it under observation.
    pub watched: u64,
    /// Seconds of it with a request.
    pub active_seconds: u64,
    pub reads: u64,
    pub writes: u64,
    pub bytes: u64,
}

/// Tracks the times of requests.
#[derive(Clone, Debug)]
pub(super) struct Times {
    pub started: Nanos,
    pub last: Nanos,
    /// The end of the current slot, and its count.
    tick_end: Nanos,
    in_tick: u64,
    ticks_of_second: u64,
    active: bool,
    hour: usize,
    hour_until: Nanos,
    hour_since: Nanos,
    pub requests: u64,
    pub gaps: [u64; GAPS.buckets()],
    pub bursts: [u64; BURSTS.buckets()],
    burst_start: Nanos,
    in_burst: u64,
    pub burst_nanos: u64,
    pub ticks: u64,
    pub tick_squares: f64,
    pub tick_peak: u64,
    pub active_seconds: u64,
    pub hours: [HourCount; HOURS],
}

impl Times {
    /// From `now` on, which is `unix` after 1970.
    pub fn new(now: Nanos, unix: Duration) -> Times {
        let midnight = (unix.as_nanos() % (24 * u128::from(HOUR))) as u64;
        let hour = (midnight / HOUR) as usize;
        Times {
            started: now,
            last: now,
            tick_end: now + TICK,
            in_tick: 0,
            ticks_of_second: 0,
            active: false,
            hour,
            hour_until: now + Duration::from_nanos(HOUR - midnight % HOUR),
            hour_since: now,
            requests: 0,
            gaps: [0; GAPS.buckets()],
            bursts: [0; BURSTS.buckets()],
            burst_start: now,
            in_burst: 0,
            burst_nanos: 0,
            ticks: 0,
            tick_squares: 0.0,
            tick_peak: 0,
            active_seconds: 0,
            hours: [HourCount::default(); HOURS],
        }
    }

    /// A request arrives. A time before the last one counts as the last one.
    #[inline]
    pub fn arrive(&mut self, now: Nanos) {
        if now >= self.tick_end {
            self.roll(now);
        }
        let now = now.max(self.last);
        let gap = now.0 - self.last.0;
        if self.requests > 0 {
            self.gaps[GAPS.bucket(gap)] += 1;
        }
        if gap >= PAUSE.as_nanos() as u64 || self.requests == 0 {
            self.end_burst();
            self.burst_start = now;
        }
        self.last = now;
        self.requests += 1;
        self.in_tick += 1;
        self.in_burst += 1;
    }

    #[inline]
    pub fn data(&mut self, is_read: bool, bytes: u64) {
        let hour = &mut self.hours[self.hour];
        *(if is_read { &mut hour.reads } else { &mut hour.writes }) += 1;
        hour.bytes += bytes;
    }

    fn end_burst(&mut self) {
        if self.in_burst > 0 {
            self.bursts[BURSTS.bucket(self.in_burst)] += 1;
            self.burst_nanos += self.last.0 - self.burst_start.0;
        }
        self.in_burst = 0;
    }

    /// Closes the slots that have ended by `now`. The cost does not depend on their number.
    #[cold]
    pub fn roll(&mut self, now: Nanos) {
        if now < self.tick_end {
            return;
        }
        // One slot may have requests; the rest of its second, and all later slots, are empty.
        let ended = (now.0 - self.tick_end.0) / TICK_NANOS + 1;
        let closed = ended.min(TICKS_OF_SECOND - self.ticks_of_second);
        for _ in 0..closed {
            self.close_tick();
        }
        let empty = ended - closed;
        self.ticks += empty;
        self.ticks_of_second = (self.ticks_of_second + empty) % TICKS_OF_SECOND;
        self.tick_end.0 += empty * TICK_NANOS;
        if now >= self.hour_until {
            self.roll_hour(now);
        }
    }

    fn close_tick(&mut self) {
        self.tick_end.0 += TICK_NANOS;
        self.ticks += 1;
        self.ticks_of_second += 1;
        self.tick_squares += self.in_tick as f64 * self.in_tick as f64;
        self.tick_peak = self.tick_peak.max(self.in_tick);
        self.active |= self.in_tick > 0;
        self.in_tick = 0;
        if self.ticks_of_second == TICKS_OF_SECOND {
            self.ticks_of_second = 0;
            self.active_seconds += u64::from(self.active);
            self.hours[self.hour].active_seconds += u64::from(self.active);
            self.active = false;
        }
    }

    fn roll_hour(&mut self, now: Nanos) {
        // Whole days count evenly for all hours; the rest hour by hour.
        let days = (now.0 - self.hour_since.0) / (24 * HOUR);
        self.hours.iter_mut().for_each(|hour| hour.watched += days * HOUR);
        self.hour_since.0 += days * 24 * HOUR;
        self.hour_until.0 += days * 24 * HOUR;
        while now >= self.hour_until {
            self.watch_until(self.hour_until);
            self.hour = (self.hour + 1) % HOURS;
            self.hour_until.0 += HOUR;
        }
    }

    fn watch_until(&mut self, until: Nanos) {
        self.hours[self.hour].watched += until.0 - self.hour_since.0;
        self.hour_since = until;
    }

    /// Counts everything up to `now`, for a copy to show.
    pub fn settle(&mut self, now: Nanos) {
        let now = now.max(self.last);
        self.roll(now);
        self.watch_until(now.max(self.hour_since));
        self.end_burst();
        if self.in_tick > 0 || self.active {
            self.active_seconds += 1;
            self.hours[self.hour].active_seconds += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(seconds: f64) -> Nanos {
        Nanos(1_000 + (seconds * 1e9) as u64)
    }

    proptest! {
        /// Compared with counting every slot, second and burst from a list.
        #[test]
        fn counts_are_those_of_a_list(gaps in proptest::collection::vec(0u64..200, 1..200), rest in 0u64..5_000) {
            let mut times = Times::new(Nanos(7), Duration::from_secs(0));
            let mut all = Vec::new();
            let mut now = Nanos(7);
            for gap in gaps {
                now.0 += gap * gap * 100_000;
                times.arrive(now);
                all.push(now.0 - 7);
            }
            let end = now.0 + rest * 1_000_000 - 7;
            times.settle(Nanos(end + 7));
            let in_stretch = |length: u64, number: u64| all.iter().filter(|&&at| at / length == number).count() as u64;
            let ticks = end / TICK_NANOS;
            prop_assert_eq!(times.ticks, ticks);
            let squares: f64 = (0..ticks).map(|tick| (in_stretch(TICK_NANOS, tick) as f64).powi(2)).sum();
            prop_assert_eq!(times.tick_squares, squares);
            let active = (0..=end / SECOND).filter(|&second| in_stretch(SECOND, second) > 0).count() as u64;
            prop_assert_eq!(times.active_seconds, active);
            let bursts = 1 + all.windows(2).filter(|pair| pair[1] - pair[0] >= 10_000_000).count() as u64;
            prop_assert_eq!(times.bursts.iter().sum::<u64>(), bursts);
            prop_assert_eq!(times.hours.iter().map(|hour| hour.watched).sum::<u64>(), end);
            prop_assert_eq!(times.hours.iter().map(|hour| hour.active_seconds).sum::<u64>(), active);
        }
    }

    #[test]
    fn hours_of_the_day_are_told_apart_over_days() {
        // From 23:30 on: a request each minute of the first hour of each of three days, then silence.
        let mut times = Times::new(at(0.0), Duration::from_secs(86_400 * 5 + 84_600));
        for day in 0..3 {
            for minute in 0..60 {
                let now = at(f64::from(1_800 + day * 86_400 + minute * 60));
                times.arrive(now);
                times.data(true, 4096);
            }
        }
        times.settle(at(3.0 * 86_400.0));
        assert_eq!(times.hours[0].reads, 180);
        assert_eq!(times.hours[0].active_seconds, 180);
        assert_eq!(times.hours[1].reads, 0);
        for (hour, count) in times.hours.iter().enumerate() {
            assert_eq!(count.watched, 3 * HOUR, "{hour}");
        }
    }

    #[test]
    fn a_pause_of_years_costs_nothing() {
        let mut times = Times::new(at(0.0), Duration::ZERO);
        times.arrive(at(0.05));
        times.arrive(at(1e9));
        assert_eq!(times.ticks, 10_000_000_000);
        assert_eq!(times.bursts[BURSTS.bucket(1)], 1);
    }
}
