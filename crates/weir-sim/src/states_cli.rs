//! `weir-sim states`: whole nodes, with the faults and requests that concern their states.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use weir_sim::nodes::{StateBug, run_without};

/// A disabled rule, and the seeds that found it.
pub struct Found {
    /// The rule.
    pub bug: StateBug,
    /// Number of seeds that found it.
    pub count: u64,
    /// The first of them, and its violation.
    pub first: Option<(u64, String)>,
}

/// Runs seeds 0 up to `seeds` with a rule disabled.
pub fn find(bug: StateBug, seeds: u64, threads: usize) -> Found {
    let (next, found) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    if let Some(violation) = run_without(seed, bug, false).violation {
                        found
                            .lock()
                            .unwrap_or_else(std::sync::PoisonError::into_inner)
                            .push((seed, violation));
                    }
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    found.sort();
    Found { bug, count: found.len() as u64, first: found.into_iter().next() }
}

/// Disables each rule that this simulation reaches. Returns whether every one was found.
pub fn bugs(seeds: u64, threads: usize) -> bool {
    let mut all = true;
    for bug in StateBug::SIMULATED {
        let Found { bug, count, first } = find(bug, seeds, threads);
        let first = first.map_or_else(|| "not found".to_owned(), |(seed, text)| format!("{seed:>6}  {text}"));
        println!("{:<28} {count:>6}  {first}", bug.name());
        all &= count > 0;
    }
    all
}
