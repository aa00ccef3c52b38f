//! The seeds that every change must pass.
//!
//! `WEIR_SIM_SEEDS=n` runs n of them instead of the usual number; `weir-sim run --seed s --trace` replays one.
#![allow(clippy::unwrap_used)]

use weir_sim::{Bug, many, run};

/// Seeds of a usual run: five minutes at most on two busy cores, unoptimised.
const SEEDS: u64 = 10_000;

fn seeds() -> u64 {
    std::env::var("WEIR_SIM_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SEEDS)
}

#[test]
fn promises_hold_under_faults_and_everything_settles_afterwards() {
    let summary = many(0..seeds(), 2, None, true, &|_| {});
    if let Some((seed, violation)) = summary.violations.first() {
        let trace = run(*seed, None, true).trace;
        let tail = &trace[trace.len().saturating_sub(200)..];
        panic!("{}\nseed {seed} (weir-sim run --seed {seed} --trace): {violation}", tail.join("\n"));
    }
    println!("{:?}", summary.counts);
    assert!(summary.seeds < 100 || summary.counts.is_lively(), "the faults have become too rare");
}

#[test]
fn planted_bugs_are_found() {
    for bug in Bug::ALL {
        let found = (0..1_000).find_map(|seed| Some((seed, run(seed, Some(bug), false).violation?)));
        let (seed, violation) = found.unwrap_or_else(|| panic!("{bug:?} was not found"));
        println!("{bug:?}: seed {seed}, {violation}");
    }
}

#[test]
fn a_seed_is_a_run() {
    let trace = |seed| run(seed, None, true).trace;
    assert_eq!(trace(7), trace(7));
    assert_ne!(trace(7), trace(8));
}
