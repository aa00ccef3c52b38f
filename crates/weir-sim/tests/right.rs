//! The right to serve: nothing is broken, and its checks can fail.
//!
//! `WEIR_SIM_RIGHT_SEEDS=n` runs n seeds instead of the usual number; `weir-sim right run --seed s --trace` replays one.
#![allow(clippy::unwrap_used)]

use weir_sim::right::{find, many, planted, run};

const SEEDS: u64 = 3_000;

fn threads() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

#[test]
fn nobody_serves_without_the_right() {
    let seeds = std::env::var("WEIR_SIM_RIGHT_SEEDS").ok().map_or(SEEDS, |text| text.parse().unwrap());
    let summary = many(0..seeds, threads(), None, true);
    if let Some((seed, violation)) = summary.violations.first() {
        let trace = run(*seed, None, true).trace;
        let tail = &trace[trace.len().saturating_sub(100)..];
        panic!("{}\nweir-sim right run --seed {seed} --trace: {violation}", tail.join("\n"));
    }
    println!("{:?}", summary.counts);
    let counts = summary.counts;
    let least =
        [counts.takeovers, counts.waits, counts.doubts, counts.reads, counts.writes].into_iter().min();
    assert!(least > Some(seeds), "too little happens");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let first = run(5, None, true);
    assert!(first.trace.len() > 100);
    assert_eq!(first.trace, run(5, None, true).trace);
    assert_eq!(first.counts.steps, run(5, None, false).counts.steps, "tracing changes nothing");
}

#[test]
fn a_rule_that_is_switched_off_is_found() {
    for bug in planted::COMMON {
        let found = find(bug, 4_000, threads(), true).first;
        let (seed, violation) = found.unwrap_or_else(|| panic!("{} was not found", bug.name()));
        println!("{:<26}{seed:>6}  {violation}", bug.name());
    }
}
