//! Whole nodes, from seeds.
//!
//! `WEIR_SIM_NODES_SEEDS=n` runs n of them instead of the usual number; `weir-sim nodes run --seed s --trace` replays one.
#![allow(clippy::unwrap_used)]

use weir_sim::{many_of, nodes};

const SEEDS: u64 = 300;

fn threads() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

#[test]
fn promises_hold_under_faults_and_everything_settles_afterwards() {
    let seeds = std::env::var("WEIR_SIM_NODES_SEEDS").ok().map_or(SEEDS, |text| text.parse().unwrap());
    let summary = many_of(nodes::run, 0..seeds, threads(), None, true, &|_| {});
    if let Some((seed, violation)) = summary.violations.first() {
        let trace = nodes::run(*seed, None, true).trace;
        let tail = &trace[trace.len().saturating_sub(200)..];
        panic!("{}\nweir-sim nodes run --seed {seed} --trace: {violation}", tail.join("\n"));
    }
    let counts = summary.counts;
    println!("{counts:#?}");
    let lively = counts.takeovers > seeds && counts.answers > 300 * seeds && counts.reads > 100 * seeds;
    assert!(lively, "the faults, or the guests, have become too rare: {counts:?}");
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in [7, 9, 2, 100] {
        let first = nodes::run(seed, None, true);
        assert!(first.trace.len() > 100, "too short a run");
        assert_eq!(first.trace, nodes::run(seed, None, true).trace);
        assert_eq!(first.counts.steps, nodes::run(seed, None, false).counts.steps, "tracing changes nothing");
    }
}

/// Seeds that found something when they were new.
#[test]
fn fixed_bugs_stay_fixed() {
    // A closing disk that refused clients accepted them again when its record changed (P9); closing a disk with a change in doubt
    // never completed, because nothing ended the doubt (P9); a time limit cut off the wait for destage in the middle of a change,
    // which the shard then waited for without end (P3, P9); a request of a closed disk made it count as open, and it was never
    // opened again (P9). A power cut of the backing failed a client's flush, but not the running checkpoint (P6). A record
    // received during a pause was applied, but its former owner was never removed (P9). A client's request waited for room that
    // became free before the disk's deadline: the shard's turns skipped the disk (P10).
    for seed in [14, 100, 72, 119, 20, 1296, 1789] {
        assert_eq!(nodes::run(seed, None, false).violation, None, "seed {seed}");
    }
}
