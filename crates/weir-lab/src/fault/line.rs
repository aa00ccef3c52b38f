//! A line in which requests wait as the faults say.
//!
//! They pass, from the top: the limit of requests in flight, the delay, the tier, the bandwidth, the dispatching
//! threads. Everything before the threads keeps the order, also across a change of the faults.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet, VecDeque};
use std::time::Duration;

use fastrand::Rng;
use weir_block::Nanos;
use weir_load::submitters::Submitters;

use super::settings::{Faults, Switch, Tier};
use super::timing::{Fate, Request, Timing};

/// The unit in which a tier keeps data, in bytes.
const TIER_BLOCK: u64 = 4096;

/// The faults of one place, at work. See the module.
#[derive(Debug)]
pub struct Line {
    switch: Switch,
    seen: u64,
    faults: Faults,
    rng: Rng,
    /// Not let in yet: as many as allowed are in flight.
    waiting: VecDeque<Request>,
    /// The departure time of each; equal times in the order of arrival.
    leaving: BinaryHeap<Reverse<(Nanos, u64, usize)>>,
    arrivals: u64,
    /// Let in and not returned.
    in_flight: usize,
    /// No request overtakes here: the departure time of the last one that keeps the order.
    last: Nanos,
    /// The time at which the link is free again.
    link_free: Nanos,
    /// Absent if the order is kept.
    dispatchers: Option<Submitters>,
    tier: Contents,
    phase: Phase,
}

/// The phase of a moody device.
#[derive(Debug, Default)]
struct Phase {
    slow: bool,
    until: Nanos,
}

impl Line {
    /// A line that does what `switch` says. The same `seed` draws the same times.
    #[must_use]
    pub fn new(switch: Switch, seed: u64) -> Line {
        Line {
            switch,
            seen: 0,
            faults: Faults::default(),
            rng: Rng::with_seed(seed),
            waiting: VecDeque::new(),
            leaving: BinaryHeap::new(),
            arrivals: 0,
            in_flight: 0,
            last: Nanos(0),
            link_free: Nanos(0),
            dispatchers: None,
            tier: Contents::default(),
            phase: Phase::default(),
        }
    }

    fn heed_switch(&mut self) {
        if let Some(faults) = self.switch.changed(&mut self.seen) {
            self.faults = faults;
            self.phase = Phase::default();
            let mean = Duration::from_micros(faults.hold_us);
            self.dispatchers =
                (faults.dispatchers > 1).then(|| Submitters::new(faults.dispatchers, mean, self.rng.u64(..)));
        }
    }

    fn let_in(&mut self, now: Nanos) {
        let limit = if self.faults.in_flight == 0 { usize::MAX } else { self.faults.in_flight };
        while self.in_flight < limit {
            let Some(request) = self.waiting.pop_front() else { return };
            self.in_flight += 1;
            let at = self.leaves_at(&request, now);
            self.arrivals += 1;
            self.leaving.push(Reverse((at, self.arrivals, request.key)));
        }
    }

    fn leaves_at(&mut self, request: &Request, now: Nanos) -> Nanos {
        let Faults { delay_us, jitter_us, bandwidth, tier, .. } = self.faults;
        let jitter = if jitter_us == 0 { 0 } else { self.rng.u64(0..=jitter_us) };
        let miss = tier.filter(|tier| !self.tier.has(request, *tier)).map_or(0, |tier| tier.miss_us);
        let mood = self.mood(now);
        let mut at = (now + Duration::from_micros(delay_us + jitter + miss) + mood).max(self.last);
        if bandwidth > 0 {
            self.link_free = at.max(self.link_free) + time_of(request.bytes, bandwidth);
            at = self.link_free;
        }
        self.last = at;
        self.dispatched(at)
    }

    /// The delay that the present phase of a moody device adds.
    fn mood(&mut self, now: Nanos) -> Duration {
        let Some(moods) = self.faults.moods else { return Duration::ZERO };
        while self.phase.until <= now {
            let mean = Duration::from_millis(moods.mean_ms.max(1));
            // The inverse of the exponential distribution; 1 - f64 is never 0.
            let length = mean.mul_f64(-(1.0 - self.rng.f64()).ln()) + Duration::from_micros(1);
            let from = if self.phase.until == Nanos(0) { now } else { self.phase.until };
            self.phase = Phase { slow: !self.phase.slow, until: from + length };
        }
        Duration::from_micros(if self.phase.slow { moods.slow_us } else { 0 })
    }

    fn dispatched(&mut self, at: Nanos) -> Nanos {
        self.dispatchers.as_mut().map_or(at, |dispatchers| dispatchers.passes_at(at))
    }
}

impl Timing for Line {
    fn arrive(&mut self, request: Request, now: Nanos) {
        self.heed_switch();
        self.waiting.push_back(request);
        self.let_in(now);
    }

    fn next(&mut self, now: Nanos) -> Option<(usize, Fate)> {
        let &Reverse((at, _, key)) = self.leaving.peek()?;
        if at > now {
            return None;
        }
        self.leaving.pop();
        let fails =
            self.faults.errors_per_million > 0 && self.rng.u32(0..1_000_000) < self.faults.errors_per_million;
        if !fails {
            return Some((key, Fate::PassOn));
        }
        self.in_flight -= 1;
        self.let_in(now);
        Some((key, Fate::Fail))
    }

    fn returned(&mut self, _key: usize, now: Nanos) {
        self.heed_switch();
        self.in_flight -= 1;
        self.let_in(now);
    }

    fn deadline(&self) -> Nanos {
        self.leaving.peek().map_or(Nanos::NEVER, |Reverse((at, ..))| *at)
    }
}

/// The transfer time of so many bytes.
fn time_of(bytes: u64, per_second: u64) -> Duration {
    Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(per_second)) as u64)
}

/// The content of a tier: first in, first out.
#[derive(Debug, Default)]
struct Contents {
    blocks: HashSet<u64>,
    order: VecDeque<u64>,
}

impl Contents {
    /// Whether all of the request was there; afterwards it is.
    fn has(&mut self, request: &Request, tier: Tier) -> bool {
        let most = (tier.bytes / TIER_BLOCK) as usize;
        let mut all = true;
        for block in request.offset / TIER_BLOCK..(request.offset + request.bytes).div_ceil(TIER_BLOCK) {
            if self.blocks.insert(block) {
                all = false;
                self.order.push_back(block);
            }
        }
        while self.order.len() > most {
            let Some(first) = self.order.pop_front() else { break };
            self.blocks.remove(&first);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::settings::Moods;
    use weir_block::RequestKind;

    const US: u64 = 1000;

    fn request(key: usize, block: u64, bytes: u64) -> Request {
        Request { key, kind: RequestKind::Write, offset: block * 4096, bytes }
    }

    fn line(faults: Faults) -> Line {
        let switch = Switch::default();
        switch.set(faults);
        Line::new(switch, 7)
    }

    /// Lets requests in at the given times, returns each 1 µs after it went on; when each went on, in that order.
    fn play(line: &mut Line, arrivals: &[(u64, Request)]) -> Vec<(usize, u64, Fate)> {
        let mut arrivals = arrivals.iter().copied().collect::<VecDeque<_>>();
        let mut below: VecDeque<(u64, usize)> = VecDeque::new();
        let mut out = Vec::new();
        loop {
            let times = [arrivals.front().map(|a| a.0), below.front().map(|b| b.0)];
            let next = times.into_iter().flatten().min().unwrap_or(u64::MAX).min(line.deadline().0);
            if next == u64::MAX {
                return out;
            }
            let now = Nanos(next);
            while below.front().is_some_and(|(at, _)| *at <= next) {
                line.returned(below.pop_front().unwrap().1, now);
            }
            while arrivals.front().is_some_and(|(at, _)| *at <= next) {
                line.arrive(arrivals.pop_front().unwrap().1, now);
            }
            while let Some((key, fate)) = line.next(now) {
                out.push((key, next, fate));
                if fate == Fate::PassOn {
                    below.push_back((next + US, key));
                }
            }
        }
    }

    /// `count` requests of 4 KiB, one every `gap` microseconds.
    fn stream(count: usize, gap: u64) -> Vec<(u64, Request)> {
        (0..count).map(|key| (key as u64 * gap * US, request(key, key as u64, 4096))).collect()
    }

    fn keys(out: &[(usize, u64, Fate)]) -> Vec<usize> {
        out.iter().map(|(key, ..)| *key).collect()
    }

    #[test]
    fn without_faults_everything_passes_at_once() {
        let out = play(&mut line(Faults::default()), &stream(10, 5));
        assert!(out.iter().all(|(key, at, fate)| *at == *key as u64 * 5 * US && *fate == Fate::PassOn));
    }

    #[test]
    fn a_delay_adds_what_it_says() {
        let out = play(&mut line(Faults::delayed(Duration::from_micros(700))), &stream(50, 3));
        assert!(out.iter().all(|(key, at, _)| *at == (*key as u64 * 3 + 700) * US), "{out:?}");
    }

    #[test]
    fn jitter_stays_within_its_bound_and_keeps_the_order() {
        let faults = Faults { delay_us: 100, jitter_us: 400, ..Faults::default() };
        let out = play(&mut line(faults), &stream(500, 50));
        assert!(keys(&out).is_sorted());
        let added = |(key, at, _): &(usize, u64, Fate)| at / US - *key as u64 * 50;
        assert!(out.iter().all(|one| (100..=500).contains(&added(one))));
        assert!(out.iter().any(|one| added(one) < 200) && out.iter().any(|one| added(one) > 400));
    }

    #[test]
    fn moods_last_for_phases_and_not_for_requests() {
        let faults = Faults { moods: Some(Moods { mean_ms: 100, slow_us: 700 }), ..Faults::default() };
        // Ten seconds, a request each millisecond.
        let out = play(&mut line(faults), &stream(10_000, 1000));
        let slow: Vec<bool> = out.iter().map(|(key, at, _)| at / US - *key as u64 * 1000 >= 700).collect();
        let share = slow.iter().filter(|slow| **slow).count();
        assert!((3000..7000).contains(&share), "{share}");
        let changes = slow.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert!((60..160).contains(&changes), "{changes} phases of 100 ms in ten seconds");
    }

    #[test]
    fn the_bandwidth_is_kept_whatever_the_sizes() {
        let faults = Faults { bandwidth: 100 << 20, ..Faults::default() };
        let sizes = [4096, 65536, 1 << 20, 512];
        let arrivals: Vec<_> = (0..400).map(|key| (0, request(key, 0, sizes[key % 4]))).collect();
        let out = play(&mut line(faults), &arrivals);
        let bytes: u64 = arrivals.iter().map(|(_, request)| request.bytes).sum();
        let rate = bytes as f64 / (out.last().unwrap().1 as f64 / 1e9);
        assert!((rate / f64::from(100 << 20) - 1.0).abs() < 0.001, "{rate}");
        assert!(keys(&out).is_sorted());
    }

    #[test]
    fn one_in_flight_means_one_in_flight() {
        let out = play(&mut line(Faults { in_flight: 1, ..Faults::default() }), &stream(20, 0));
        // Each returns 1 µs after it went on; then the next one goes.
        assert!(out.iter().all(|(key, at, _)| *at == *key as u64 * US), "{out:?}");
    }

    #[test]
    fn only_dispatchers_lose_the_order() {
        let everything_else = Faults {
            delay_us: 50,
            jitter_us: 300,
            bandwidth: 200 << 20,
            in_flight: 6,
            tier: Some(Tier { bytes: 64 << 10, miss_us: 120 }),
            ..Faults::default()
        };
        assert!(keys(&play(&mut line(everything_else), &stream(2000, 10))).is_sorted());
        let inversions = |dispatchers| {
            let out = keys(&play(&mut line(Faults::order_lost(dispatchers)), &stream(2000, 60)));
            let mut all = out.clone();
            all.sort_unstable();
            assert_eq!(all, (0..2000).collect::<Vec<_>>(), "each goes on exactly once");
            out.windows(2).filter(|pair| pair[0] > pair[1]).count()
        };
        assert_eq!(inversions(1), 0);
        assert!((200..800).contains(&inversions(2)), "{}", inversions(2));
    }

    #[test]
    fn a_tier_is_fast_until_it_is_full() {
        let faults = Faults { tier: Some(Tier { bytes: 10 * 4096, miss_us: 500 }), ..Faults::default() };
        let slow = |footprint: u64| {
            let mut line = line(faults);
            let blocks = (0..10 * footprint).map(|n| n % footprint);
            let arrivals: Vec<_> = blocks
                .enumerate()
                .map(|(key, block)| (key as u64 * 1000 * US, request(key, block, 4096)))
                .collect();
            let out = play(&mut line, &arrivals);
            out.iter().filter(|(key, at, _)| at - *key as u64 * 1000 * US == 500 * US).count()
        };
        assert_eq!(slow(10), 10, "only the first time");
        assert_eq!(slow(11), 110, "always pushed out before it comes again");
    }

    #[test]
    fn errors_come_as_often_as_they_should() {
        let faults = Faults { errors_per_million: 100_000, in_flight: 1, ..Faults::default() };
        let out = play(&mut line(faults), &stream(10_000, 5));
        let failed = out.iter().filter(|(.., fate)| *fate == Fate::Fail).count();
        assert!(out.len() == 10_000 && (850..1150).contains(&failed), "{failed}");
    }

    #[test]
    fn faults_change_under_way_without_losing_the_order() {
        let mut line = line(Faults::delayed(Duration::from_millis(5)));
        line.arrive(request(0, 0, 4096), Nanos(0));
        line.switch.set(Faults::default());
        line.arrive(request(1, 1, 4096), Nanos(US));
        assert_eq!(line.next(Nanos(US)), None, "the second waits behind the first");
        assert_eq!(line.deadline(), Nanos(5000 * US));
        assert_eq!(line.next(Nanos(5000 * US)), Some((0, Fate::PassOn)));
        assert_eq!(line.next(Nanos(5000 * US)), Some((1, Fate::PassOn)));
        line.arrive(request(2, 2, 4096), Nanos(6000 * US));
        assert_eq!(line.next(Nanos(6000 * US)), Some((2, Fate::PassOn)));
        // Lifting a limit admits all waiting requests.
        line.switch.set(Faults { in_flight: 1, ..Faults::default() });
        (3..6).for_each(|key| line.arrive(request(key, 3, 4096), Nanos(7000 * US)));
        line.switch.set(Faults::default());
        line.returned(0, Nanos(7000 * US));
        assert_eq!((3..6).filter_map(|_| line.next(Nanos(7000 * US))).count(), 3);
    }
}
