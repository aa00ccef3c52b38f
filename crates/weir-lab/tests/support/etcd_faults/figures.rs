//! Figures of rounds, and their bounds.

use std::time::Duration;

use serde::Serialize;
use weir_block::Nanos;
use weir_load::verifying::Progress;

use super::{Fault, Watched};

/// The figures of one round.
#[derive(Clone, Debug, Serialize)]
pub struct Round {
    pub fault: Fault,
    /// What exactly was done.
    pub told: String,
    pub seconds: f64,
    /// From the fault until the quorum was back.
    pub quorum_after_ms: f64,
    /// The longest time of any disk without an owner after the quorum was back.
    pub unowned_ms: f64,
    /// The longest time of any guest without an answered write after that.
    pub unanswered_ms: f64,
    /// That guest's disk.
    pub unanswered_disk: &'static str,
    /// The longest time of any guest without an answered write since the fault.
    pub stall_ms: f64,
    pub acknowledged: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Blocks that are not what was acknowledged.
    pub lost: u64,
    /// What else must not be.
    pub violations: Vec<String>,
}

/// Upper bounds.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Of the time without an owner, and of the time without an answered write, each after the quorum is back.
    pub unowned: Duration,
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

impl Round {
    pub(super) fn new(fault: Fault, told: String, quorum_after: Duration, watched: &Watched) -> Round {
        Round {
            fault,
            told,
            seconds: 0.0,
            quorum_after_ms: ms(quorum_after),
            unowned_ms: ms(watched.unowned),
            unanswered_ms: ms(watched.unanswered),
            unanswered_disk: watched.unanswered_disk,
            stall_ms: ms(watched.stall),
            acknowledged: 0,
            errors: 0,
            lost: 0,
            violations: Vec::new(),
        }
    }

    pub(super) fn count(&mut self, progress: &Progress) {
        self.acknowledged += progress.acknowledged();
        self.errors += progress.failed();
    }

    /// What breaks a promise or a bound, in words.
    pub fn broken(&self, bounds: Bounds) -> Vec<String> {
        let mut broken = self.violations.clone();
        if self.lost > 0 {
            broken.push(format!("{} blocks are not what was acknowledged", self.lost));
        }
        if self.errors > 0 {
            broken.push(format!("guests saw {} errors (P9)", self.errors));
        }
        for (what, time) in [("an owner", self.unowned_ms), ("an answered write", self.unanswered_ms)] {
            if time > ms(bounds.unowned) {
                broken.push(format!("{time:.0} ms without {what} after the quorum was back"));
            }
        }
        broken
    }
}

impl std::fmt::Display for Round {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = |ms: f64| ms / 1000.0;
        write!(
            to,
            "{}: {}; quorum after {:.1} s, no owner for {:.1} s, no answer for {:.1} s ({}), longest stall {:.1} s, {} writes, {} errors, {} \
             lost ({:.1} s)",
            self.fault.name(),
            self.told,
            seconds(self.quorum_after_ms),
            seconds(self.unowned_ms),
            seconds(self.unanswered_ms),
            self.unanswered_disk,
            seconds(self.stall_ms),
            self.acknowledged,
            self.errors,
            self.lost,
            self.seconds,
        )
    }
}

/// The figures of all rounds with one kind of fault.
#[derive(Debug, Serialize)]
pub struct Summary {
    pub fault: Fault,
    pub rounds: usize,
    pub unowned_median_ms: f64,
    pub unowned_longest_ms: f64,
    pub unanswered_median_ms: f64,
    pub unanswered_longest_ms: f64,
    pub stall_longest_ms: f64,
    pub acknowledged: u64,
    pub errors: u64,
    pub lost: u64,
}

/// The longest time between `from` and `to` in which nothing happened.
pub fn longest_gap(times: &[Nanos], from: Nanos, to: Nanos) -> Duration {
    let within = times.iter().copied().filter(|time| *time > from && *time < to);
    let ends = within.clone().chain([to]);
    [from].into_iter().chain(within).zip(ends).map(|(one, other)| other - one).max().unwrap_or_default()
}

/// The value of which a part `share` of all is at most as large.
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let rank = (values.len() as f64 * share).ceil() as usize;
    values.get(rank.clamp(1, values.len().max(1)) - 1).copied().unwrap_or(f64::NAN)
}

/// One for each kind of fault that was there.
pub fn summaries(rounds: &[Round]) -> Vec<Summary> {
    let of = |fault: Fault| rounds.iter().filter(move |round| round.fault == fault);
    let summary = |fault: Fault| {
        let all = |figure: fn(&Round) -> f64| of(fault).map(figure).collect::<Vec<_>>();
        let (unowned, unanswered) = (all(|round| round.unowned_ms), all(|round| round.unanswered_ms));
        Summary {
            fault,
            rounds: unowned.len(),
            unowned_median_ms: quantile(&unowned, 0.5),
            unowned_longest_ms: quantile(&unowned, 1.0),
            unanswered_median_ms: quantile(&unanswered, 0.5),
            unanswered_longest_ms: quantile(&unanswered, 1.0),
            stall_longest_ms: quantile(&all(|round| round.stall_ms), 1.0),
            acknowledged: of(fault).map(|round| round.acknowledged).sum(),
            errors: of(fault).map(|round| round.errors).sum(),
            lost: of(fault).map(|round| round.lost).sum(),
        }
    };
    Fault::ALL.into_iter().filter(|fault| of(*fault).next().is_some()).map(summary).collect()
}
