//! Runs many seeds on several threads.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use weir_accel::planted::Bug;

use crate::cluster::{Run, run};
use crate::counts::Counts;

/// Seeds per batch of a thread.
const PORTION: u64 = 16;

/// The function that runs a seed: [`run`] or [`crate::nodes::run`].
pub type Simulation = fn(u64, Option<Bug>, bool) -> Run;

/// The result of many seeds.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Seeds run, including those with violations.
    pub seeds: u64,
    /// Their total counts.
    pub counts: Counts,
    /// The seeds that broke a promise, and how; in order of seeds.
    pub violations: Vec<(u64, String)>,
}

/// The progress of many seeds.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Seeds done.
    pub seeds: u64,
    /// Their virtual time.
    pub virtual_time: Duration,
    /// Broken promises.
    pub violations: u64,
    /// The first seed found to break one.
    pub first: Option<u64>,
}

/// Runs `seeds` on `threads` threads. Ends early after the first violation if `stop` says so. One thread at a time calls
/// `progress` occasionally.
pub fn many(
    seeds: Range<u64>,
    threads: usize,
    bug: Option<Bug>,
    stop: bool,
    progress: &(dyn Fn(&Progress) + Sync),
) -> Summary {
    many_of(run, seeds, threads, bug, stop, progress)
}

/// As [`many`], of another simulation.
pub fn many_of(
    simulation: impl Fn(u64, Option<Bug>, bool) -> Run + Sync,
    seeds: Range<u64>,
    threads: usize,
    bug: Option<Bug>,
    stop: bool,
    progress: &(dyn Fn(&Progress) + Sync),
) -> Summary {
    // Thousands of logs use a few KiB each: zeroing huge pages for them is a fifth of the time. A refusal only costs that time.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    let (next, done, stopped) =
        (AtomicU64::new(seeds.start), Mutex::new(Progress::default()), AtomicBool::new(false));
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
                    let (time, found) = (own.counts.virtual_time, own.violations.len());
                    for seed in first..seeds.end.min(first + PORTION) {
                        own.take(simulation(seed, bug, false), seed);
                        if stop && !own.violations.is_empty() {
                            stopped.store(true, Ordering::Relaxed);
                            break;
                        }
                    }
                    let portion = seeds.end.min(first + PORTION) - first;
                    let mut done = done.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    done.seeds += portion;
                    done.virtual_time += own.counts.virtual_time - time;
                    done.violations += (own.violations.len() - found) as u64;
                    done.first = done.first.or(own.violations.get(found).map(|violation| violation.0));
                    progress(&done);
                }
                total.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).add(own);
            });
        }
    });
    let mut total = total.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    total.violations.sort();
    total
}

impl Summary {
    fn take(&mut self, run: Run, seed: u64) {
        self.seeds += 1;
        self.counts.add(&run.counts);
        self.violations.extend(run.violation.map(|violation| (seed, violation)));
    }

    fn add(&mut self, other: Summary) {
        self.seeds += other.seeds;
        self.counts.add(&other.counts);
        self.violations.extend(other.violations);
    }
}

/// A planted bug and the seeds that found it.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The bug.
    pub bug: Bug,
    /// Number of seeds that found it.
    pub found: u64,
    /// The first of them, and its violation.
    pub first: Option<(u64, String)>,
}

/// Plants a bug and runs seeds from 0 up to `seeds` with it; all of them, or until it is found if `stop` says so.
#[must_use]
pub fn find(bug: Bug, seeds: u64, threads: usize, stop: bool) -> Finding {
    find_in(run, bug, seeds, threads, stop)
}

/// As [`find`], in another simulation.
#[must_use]
pub fn find_in(simulation: Simulation, bug: Bug, seeds: u64, threads: usize, stop: bool) -> Finding {
    let summary = many_of(simulation, 0..seeds, threads, Some(bug), stop, &|_| {});
    let found = summary.violations.len() as u64;
    Finding { bug, found, first: summary.violations.into_iter().next() }
}
