//! Runs many seeds on several threads.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Bug, Counts, run};

const PORTION: u64 = 32;

/// The result of many seeds.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Number of seeds run.
    pub seeds: u64,
    /// Their total counts.
    pub counts: Counts,
    /// The seeds that broke a promise, and how; in order of seeds.
    pub violations: Vec<(u64, String)>,
}

/// Runs `seeds` on `threads` threads. Ends early after the first violation if `stop` says so.
#[must_use]
pub fn many(seeds: Range<u64>, threads: usize, bug: Option<Bug>, stop: bool) -> Summary {
    let (next, stopped) = (AtomicU64::new(seeds.start), AtomicBool::new(false));
    let total = Mutex::new(Summary::default());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                let mut own = Summary::default();
                while !stopped.load(Ordering::Relaxed) {
                    let first = next.fetch_add(PORTION, Ordering::Relaxed);
                    if first >= seeds.end {
                        break;
                    }
                    for seed in first..seeds.end.min(first + PORTION) {
                        own.take(seed, bug);
                        if stop && !own.violations.is_empty() {
                            stopped.store(true, Ordering::Relaxed);
                            break;
                        }
                    }
                }
                let mut total = total.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                total.seeds += own.seeds;
                total.counts.add(&own.counts);
                total.violations.extend(own.violations);
            });
        }
    });
    let mut total = total.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    total.violations.sort();
    total
}

impl Summary {
    fn take(&mut self, seed: u64, bug: Option<Bug>) {
        let run = run(seed, bug, false);
        self.seeds += 1;
        self.counts.add(&run.counts);
        self.violations.extend(run.violation.map(|violation| (seed, violation)));
    }
}

/// A bug and the seeds that found it.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The bug.
    pub bug: Bug,
    /// Number of seeds that found it.
    pub found: u64,
    /// The first of them, and its violation.
    pub first: Option<(u64, String)>,
}

/// Runs seeds from 0 up to `seeds` with a bug; all of them, or until it is found if `stop` says so.
#[must_use]
pub fn find(bug: Bug, seeds: u64, threads: usize, stop: bool) -> Finding {
    let summary = many(0..seeds, threads, Some(bug), stop);
    let found = summary.violations.len() as u64;
    Finding { bug, found, first: summary.violations.into_iter().next() }
}
