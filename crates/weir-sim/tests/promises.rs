//! Seeds that every change must pass.
//!
//! `WEIR_SIM_SEEDS=n` runs n of them instead of the usual number; `weir-sim run --seed s --trace` replays one.
#![allow(clippy::unwrap_used)]

use weir_sim::{FAULTS, many, run};

const SEEDS: u64 = 600;

fn seeds() -> u64 {
    std::env::var("WEIR_SIM_SEEDS").ok().map_or(SEEDS, |text| text.parse().unwrap())
}

#[test]
fn promises_hold_under_faults_and_everything_settles_afterwards() {
    let threads = std::thread::available_parallelism().unwrap().get();
    let summary = many(0..seeds(), threads, None, true, &|_| {});
    if let Some((seed, violation)) = summary.violations.first() {
        let trace = run(*seed, None, true).trace;
        let tail = &trace[trace.len().saturating_sub(200)..];
        panic!("{}\nweir-sim run --seed {seed} --trace: {violation}", tail.join("\n"));
    }
    println!("{:#?}", summary.counts);
    assert!(summary.seeds < SEEDS || summary.counts.is_lively(), "the faults have become too rare");
}

/// The atlas has an entry for each kind, in order.
#[test]
fn the_atlas_is_complete() {
    for (index, entry) in FAULTS.iter().enumerate() {
        assert_eq!(entry.fault as usize, index, "{}", entry.name);
        assert!(entry.covered_by.contains('P') && !entry.what.is_empty() && !entry.limits.is_empty());
    }
}
