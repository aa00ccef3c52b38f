//! The outcome of a run of the volume's simulations, and what they write to it.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use weir_volume::planted::Bug;

use crate::panic_text;

/// The result of a run.
#[derive(Debug)]
pub struct Run<C> {
    /// The broken invariant, with its step; `None` when all held.
    pub violation: Option<String>,
    /// The trace, one line for each event, if requested.
    pub trace: Vec<String>,
    /// The number of each thing that was done.
    pub counts: C,
}

/// A run's present step, its trace if requested, and its first violation.
#[derive(Debug)]
pub struct Log {
    pub step: usize,
    pub violation: Option<String>,
    trace: Option<Vec<String>>,
}

impl Log {
    pub fn new(traced: bool) -> Log {
        Log { step: 0, violation: None, trace: traced.then(Vec::new) }
    }

    pub fn fail(&mut self, text: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(format!("step {}: {}", self.step, text()));
        }
    }

    pub fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>5} {}", self.step, text()));
        }
    }

    pub fn end<C>(self, counts: C) -> Run<C> {
        Run { violation: self.violation, trace: self.trace.unwrap_or_default(), counts }
    }
}

/// Runs a world; a panic is a violation.
pub fn run_world<W>(world: &mut W, run: impl FnOnce(&mut W), log: impl FnOnce(&mut W) -> &mut Log) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(world))) {
        log(world).fail(|| format!("a panic: {}", panic_text(&*panic)));
    }
}

/// Runs many seeds; the violations, in order of seeds.
pub fn violations<C>(
    run: impl Fn(u64, Option<Bug>, bool) -> Run<C> + Sync,
    seeds: Range<u64>,
    threads: usize,
    bug: Option<Bug>,
) -> Vec<(u64, String)> {
    let simulation = |seed, _, _| {
        let Run { violation, trace, .. } = run(seed, bug, false);
        crate::Run { counts: crate::Counts::default(), violation, trace }
    };
    crate::many_of(simulation, seeds, threads, None, false, &|_| {}).violations
}
