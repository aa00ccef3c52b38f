//! The shell that runs in production, from seeds.
//!
//! `WEIR_SIM_SHELL_SEEDS=n` runs n of them instead of the usual number; `weir-sim shell run --seed s --trace` replays one.
#![allow(clippy::unwrap_used)]

use weir_sim::{Bug, find_in, many_of, production};

const SEEDS: u64 = 1_500;

/// Every bug is found within so many seeds.
const BUG_SEEDS: u64 = 5_000;

fn threads() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

#[test]
fn promises_hold_under_faults_and_everything_settles_afterwards() {
    let seeds = std::env::var("WEIR_SIM_SHELL_SEEDS").ok().map_or(SEEDS, |text| text.parse().unwrap());
    let summary = many_of(production::run, 0..seeds, threads(), None, true, &|_| {});
    if let Some((seed, violation)) = summary.violations.first() {
        let trace = production::run(*seed, None, true).trace;
        let tail = &trace[trace.len().saturating_sub(200)..];
        panic!("{}\nweir-sim shell run --seed {seed} --trace: {violation}", tail.join("\n"));
    }
    let counts = summary.counts;
    println!("{counts:#?}");
    let lively = counts.takeovers > seeds && counts.answers > 500 * seeds && counts.reads > 100 * seeds;
    assert!(lively, "the faults, or the guests, have become too rare: {counts:?}");
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in [7, 9, 2] {
        let first = production::run(seed, None, true);
        assert!(first.trace.len() > 500, "a run of some length");
        assert_eq!(first.trace, production::run(seed, None, true).trace);
        assert_eq!(
            first.counts.steps,
            production::run(seed, None, false).counts.steps,
            "tracing changes nothing"
        );
    }
}

#[test]
fn every_bug_planted_in_the_shell_is_found() {
    let mut missed = Vec::new();
    for bug in Bug::SHELL {
        match find_in(production::run, bug, BUG_SEEDS, threads(), true).first {
            Some((seed, violation)) => println!("{:<28} {seed:>6}  {violation}", bug.name()),
            None => missed.push(bug.name()),
        }
    }
    assert!(missed.is_empty(), "not found within {BUG_SEEDS} seeds: {missed:?}");
}
