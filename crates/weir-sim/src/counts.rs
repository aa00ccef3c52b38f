//! Counts of runs, to show that they test something.

use std::time::Duration;

use weir_cluster::records::{NodeStateRecord, NodeStatesRecord};

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
    /// What concerns the states of nodes.
    pub states: StateCounts,
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
            states: StateCounts::default(),
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
        self.states.add(&other.states);
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

/// Counts that concern the states of nodes.
#[derive(Clone, Copy, Debug, Default)]
pub struct StateCounts {
    /// Isolations recorded.
    pub isolations: u64,
    /// Quarantines begun.
    pub quarantines: u64,
    /// Drains begun.
    pub drains: u64,
    /// Drains ended.
    pub resumes: u64,
    /// Nodes removed.
    pub removals: u64,
    /// Long outages of the registry.
    pub outages: u64,
    /// Those that began while a node was drained or quarantined.
    pub outages_barred: u64,
    /// Requests to drain, resume, clear or remove a node while the registry was away.
    pub requests_away: u64,
}

impl StateCounts {
    /// Each by its name.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 8] {
        [
            ("isolations", self.isolations),
            ("quarantines", self.quarantines),
            ("drains", self.drains),
            ("resumes", self.resumes),
            ("removals", self.removals),
            ("long registry outages", self.outages),
            ("  with barred nodes", self.outages_barred),
            ("requests in outages", self.requests_away),
        ]
    }

    fn add(&mut self, other: &StateCounts) {
        self.isolations += other.isolations;
        self.quarantines += other.quarantines;
        self.drains += other.drains;
        self.resumes += other.resumes;
        self.removals += other.removals;
        self.outages += other.outages;
        self.outages_barred += other.outages_barred;
        self.requests_away += other.requests_away;
    }

    /// Counts what differs between two consecutive records.
    pub fn add_changes(&mut self, before: &NodeStatesRecord, next: &NodeStatesRecord) {
        let none = NodeStateRecord::default();
        for (name, node) in &next.nodes {
            let known = before.nodes.get(name).unwrap_or(&none);
            let began = |now: bool, before: bool| u64::from(now && !before);
            self.isolations += began(node.isolation.is_some(), known.isolation.is_some());
            self.quarantines += began(node.quarantine.is_some(), known.quarantine.is_some());
            self.drains += began(node.drain.is_some(), known.drain.is_some());
            self.resumes += began(known.drain.is_some(), node.drain.is_some());
        }
        self.removals += before.nodes.keys().filter(|name| !next.nodes.contains_key(*name)).count() as u64;
    }
}
