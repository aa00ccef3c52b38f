//! The protocol of a shared volume: no seed breaks an invariant, and each planted bug is found.

use weir_sim::volume::{many, run};
use weir_volume::planted::Bug;

/// Threads for the seeds.
const THREADS: usize = 2;

#[test]
fn invariants_hold() {
    let violations = many(0..20_000, THREADS, None);
    assert!(violations.is_empty(), "{:?}", violations.first());
}

#[test]
fn every_planted_bug_is_found() {
    let missed: Vec<&str> = Bug::ALL
        .into_iter()
        .filter(|bug| many(0..3_000, THREADS, Some(*bug)).is_empty())
        .map(Bug::name)
        .collect();
    assert!(missed.is_empty(), "{missed:?}");
}

/// A run that does nothing would hold all invariants.
#[test]
fn runs_answer_requests() {
    let answered: u64 = (0..100).map(|seed| run(seed, None, false).answered).sum();
    assert!(answered > 2_000, "{answered} requests in 100 runs");
}
