//! Counts of runs, to show that they test something.

use std::time::Duration;

use crate::atlas::{FaultCounts, KINDS};

/// The counts of one or many runs.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    /// Virtual time.
    pub virtual_time: Duration,
    /// Events.
    pub steps: u64,
    /// Checks of the promises on all copies.
    pub checks: u64,
    /// Completed requests.
    pub answers: u64,
    /// Reads checked in their block's history.
    pub reads: u64,
    /// Takeovers.
    pub takeovers: u64,
    /// Flushed checkpoints.
    pub checkpoints: u64,
    /// Owners that a replica refused: by their epoch, or because the record names another node.
    pub refusals: u64,
    /// Logs recovered from flash.
    pub recoveries: u64,
    /// Recovered logs that were damaged.
    pub damaged: u64,
    /// Longest time from the end of the faults until the cluster had settled.
    pub longest_convergence: Duration,
    /// Faults by kind, in the order of the atlas.
    pub faults: FaultCounts,
}

impl Default for Counts {
    fn default() -> Counts {
        Counts {
            virtual_time: Duration::ZERO,
            steps: 0,
            checks: 0,
            answers: 0,
            reads: 0,
            takeovers: 0,
            checkpoints: 0,
            refusals: 0,
            recoveries: 0,
            damaged: 0,
            longest_convergence: Duration::ZERO,
            faults: [0; KINDS],
        }
    }
}

impl Counts {
    /// Adds another run.
    pub fn add(&mut self, other: &Counts) {
        self.virtual_time += other.virtual_time;
        self.steps += other.steps;
        self.checks += other.checks;
        self.answers += other.answers;
        self.reads += other.reads;
        self.takeovers += other.takeovers;
        self.checkpoints += other.checkpoints;
        self.refusals += other.refusals;
        self.recoveries += other.recoveries;
        self.damaged += other.damaged;
        self.longest_convergence = self.longest_convergence.max(other.longest_convergence);
        for (mine, others) in self.faults.iter_mut().zip(other.faults) {
            *mine += others;
        }
    }

    /// Whether every kind of event happened.
    #[must_use]
    pub fn is_lively(&self) -> bool {
        let Counts { takeovers, answers, reads, checkpoints, refusals, recoveries, damaged, .. } = *self;
        let seen = [takeovers, answers, reads, checkpoints, refusals, recoveries, damaged];
        seen.iter().chain(&self.faults).all(|count| *count > 20)
    }
}
