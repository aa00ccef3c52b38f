//! One seed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use weir_accel::planted::Bug;

use crate::counts::Counts;
use crate::world::World;

/// What came of one seed.
#[derive(Clone, Debug)]
pub struct Run {
    /// What it has seen.
    pub counts: Counts,
    /// The promise that was broken, when and how; `None` when all held.
    pub violation: Option<String>,
    /// What happened, one line each, if it was asked for.
    pub trace: Vec<String>,
}

/// Runs a seed to its end, or to the first violation; with a bug planted in the cores if one is given.
///
/// `traced` keeps a line for everything that happens: some thousands of them.
#[must_use]
pub fn run(seed: u64, bug: Option<Bug>, traced: bool) -> Run {
    let mut world = World::new(seed, bug, traced);
    let ended = catch_unwind(AssertUnwindSafe(|| world.run()));
    let violation = match ended {
        Ok(()) => world.violation.take(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Some(format!("the core panicked: {}", text.unwrap_or_default()))
        }
    };
    Run { counts: world.counts, violation, trace: world.trace.take().unwrap_or_default() }
}
