//! What runs have seen, so that it can be told whether they test anything.

use std::time::Duration;

use crate::atlas::{FaultCounts, KINDS};

/// What one run, or many of them, have seen.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    /// Virtual time.
    pub virtual_time: Duration,
    /// Things that happened.
    pub steps: u64,
    /// How often the promises were checked on all copies.
    pub checks: u64,
    /// Requests that were answered.
    pub answers: u64,
    /// Reads whose place in their block's history was checked.
    pub reads: u64,
    /// Disks that another node took over.
    pub takeovers: u64,
    /// Checkpoints that were flushed.
    pub checkpoints: u64,
    /// Owners that a replica has refused because of their epoch.
    pub refusals: u64,
    /// Logs that were read from flash when a node started.
    pub recoveries: u64,
    /// Those that were found damaged.
    pub damaged: u64,
    /// Longest time from the end of the faults until everything was as requested, drained and quiet.
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
    /// Adds what another run has seen.
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

    /// Whether everything happened that can.
    #[must_use]
    pub fn is_lively(&self) -> bool {
        let Counts { takeovers, answers, reads, checkpoints, refusals, recoveries, damaged, .. } = *self;
        let seen = [takeovers, answers, reads, checkpoints, refusals, recoveries, damaged];
        seen.iter().chain(&self.faults).all(|count| *count > 20)
    }
}
