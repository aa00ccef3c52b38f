//! The right to serve, in virtual time: the production cores ([`weir_cluster::right`]) and the production rules by which the
//! record changes ([`weir_cluster::ownership`]), between hosts with clock drift, over a network that loses and delays messages.
//!
//! One disk with one register. The registry and a node's actions around the cores are simulated; each follows its rule literally
//! and so is a reference for the node's code. A seed decides everything.

mod clock;
mod many;
pub mod planted;
mod registry;
mod simulation;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

pub use many::{Finding, Summary, find, many};
pub use planted::Bug;
use simulation::Simulation;

/// Least time to live of a session.
const TTL: Duration = Duration::from_secs(1);
/// Length of a grant.
const GRANT: Duration = Duration::from_secs(1);
/// Margin for clocks that differ by twice [`clock::DRIFT`], and little more.
const MARGIN: Duration = Duration::from_millis(65);
/// A write to the storage lands within this time, or never.
const LONGEST_IO: Duration = Duration::from_millis(800);
/// [`LONGEST_IO`] by a fast clock.
const FENCE_GRACE: Duration = Duration::from_millis(825);
const DISK: &str = "d";
/// Length of a run.
const LENGTH: Duration = Duration::from_secs(12);

/// Counts of runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Events.
    pub steps: u64,
    /// Requested takeovers.
    pub takeovers: u64,
    /// Requested moves.
    pub moves: u64,
    /// Changes of the record.
    pub changes: u64,
    /// Changes without an answer in time.
    pub doubts: u64,
    /// Tenures started.
    pub tenures: u64,
    /// Tenures that waited for former owners.
    pub waits: u64,
    /// Grants.
    pub grants: u64,
    /// Seals.
    pub seals: u64,
    /// Accepted reads.
    pub reads: u64,
    /// Completed writes.
    pub writes: u64,
    /// Answers received by clients.
    pub answers: u64,
}

impl Counts {
    /// Names and counts, for output.
    #[must_use]
    pub fn list(&self) -> [(&'static str, u64); 12] {
        [
            ("steps", self.steps),
            ("takeovers requested", self.takeovers),
            ("moves requested", self.moves),
            ("changes of the record", self.changes),
            ("changes in doubt", self.doubts),
            ("tenures", self.tenures),
            ("waits for former owners", self.waits),
            ("grants", self.grants),
            ("seals", self.seals),
            ("reads", self.reads),
            ("writes", self.writes),
            ("answers", self.answers),
        ]
    }

    fn add(&mut self, other: &Counts) {
        let Counts {
            steps,
            takeovers,
            moves,
            changes,
            doubts,
            tenures,
            waits,
            grants,
            seals,
            reads,
            writes,
            answers,
        } = other;
        self.steps += steps;
        self.takeovers += takeovers;
        self.moves += moves;
        self.changes += changes;
        self.doubts += doubts;
        self.tenures += tenures;
        self.waits += waits;
        self.grants += grants;
        self.seals += seals;
        self.reads += reads;
        self.writes += writes;
        self.answers += answers;
    }
}

/// The result of one seed.
#[derive(Clone, Debug)]
pub struct Run {
    /// Its counts.
    pub counts: Counts,
    /// The broken promise, with time and cause.
    pub violation: Option<String>,
    /// The trace, if requested.
    pub trace: Vec<String>,
}

/// Runs a seed to its end, or to the first violation; with a rule disabled if a bug is given.
#[must_use]
pub fn run(seed: u64, bug: Option<Bug>, traced: bool) -> Run {
    let mut simulation = Simulation::new(seed, bug, traced);
    let end = simulation.now + LENGTH;
    let ran = catch_unwind(AssertUnwindSafe(|| simulation.run(end)));
    if ran.is_err() {
        simulation.checks.broken(|| "a panic".into());
    }
    let at = simulation.now.0 as f64 / 1e9 - 1.0;
    let violation = simulation.checks.violation.take().map(|violation| format!("{at:.6} {violation}"));
    Run { counts: simulation.counts, violation, trace: simulation.trace.unwrap_or_default() }
}
