//! The right to serve, in virtual time: the production cores ([`weir_cluster::right`]) and the production rules by which the record
//! changes ([`weir_cluster::ownership`]), between hosts whose clocks drift, over a network that loses and delays.
//!
//! One disk with one register. Played here are the registry and what a node does around the cores; each part of that is written
//! as its rule says, so that it can serve as the reference for the node's own. A seed decides everything.

mod change;
mod checks;
mod clock;
mod faults;
mod many;
mod node;
mod owner;
pub mod planted;
mod registry;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

pub use many::{Finding, Summary, find, many};
pub use planted::Bug;
use world::World;

/// A session lasts so long, at least.
const TTL: Duration = Duration::from_secs(1);
/// So does a grant.
const GRANT: Duration = Duration::from_secs(1);
/// For clocks that differ by twice [`clock::DRIFT`], and not much more.
const MARGIN: Duration = Duration::from_millis(65);
/// A write to the storage lands within this, or never.
const LONGEST_IO: Duration = Duration::from_millis(800);
/// That, by a clock that is fast.
const FENCE_GRACE: Duration = Duration::from_millis(825);
const DISK: &str = "d";
/// How long a run lasts.
const LENGTH: Duration = Duration::from_secs(12);

/// What runs have seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Events.
    pub steps: u64,
    /// Takeovers that were asked for.
    pub takeovers: u64,
    /// Moves that were asked for.
    pub moves: u64,
    /// Changes of the record.
    pub changes: u64,
    /// Changes of which the owner heard nothing in time.
    pub doubts: u64,
    /// Tenures that began.
    pub tenures: u64,
    /// Tenures that have waited for former owners.
    pub waits: u64,
    /// Grants.
    pub grants: u64,
    /// Seals.
    pub seals: u64,
    /// Reads that were let in.
    pub reads: u64,
    /// Writes that were done.
    pub writes: u64,
    /// Answers that clients heard.
    pub answers: u64,
}

impl Counts {
    /// Names and numbers, for people and programs.
    #[must_use]
    pub fn list(&self) -> [(&'static str, u64); 12] {
        [
            ("steps", self.steps),
            ("takeovers asked for", self.takeovers),
            ("moves asked for", self.moves),
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

/// What came of one seed.
#[derive(Clone, Debug)]
pub struct Run {
    /// What it has seen.
    pub counts: Counts,
    /// The promise that was broken, when and how.
    pub violation: Option<String>,
    /// What happened, if it was asked for.
    pub trace: Vec<String>,
}

/// Runs a seed to its end, or to the first violation; without a rule if a bug is given.
#[must_use]
pub fn run(seed: u64, bug: Option<Bug>, traced: bool) -> Run {
    let mut world = World::new(seed, bug, traced);
    let end = world.now + LENGTH;
    let ran = catch_unwind(AssertUnwindSafe(|| world.run(end)));
    if ran.is_err() {
        world.checks.broken(|| "a panic".into());
    }
    let at = world.now.0 as f64 / 1e9 - 1.0;
    let violation = world.checks.violation.take().map(|violation| format!("{at:.6} {violation}"));
    Run { counts: world.counts, violation, trace: world.trace.unwrap_or_default() }
}
