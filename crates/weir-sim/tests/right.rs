//! The right to serve: no violations, and the checks can fail.
//!
//! `WEIR_SIM_RIGHT_SEEDS=n` runs n seeds instead of the usual number; `weir-sim right run --seed s --trace` replays one.
#![allow(clippy::unwrap_used)]

use weir_sim::right::{Bug, find, many, run};

const SEEDS: u64 = 3_000;

fn threads() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

#[test]
fn no_owner_serves_without_the_right() {
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
    let mut lines = 0;
    for seed in 0..10 {
        let first = run(seed, None, true);
        assert_eq!(first.trace, run(seed, None, true).trace);
        assert_eq!(first.counts.steps, run(seed, None, false).counts.steps, "tracing changes nothing");
        lines += first.trace.len();
    }
    assert!(lines > 1_000, "{lines} lines in all");
}

/// Rarely violated rules, each with a seed that finds it; `weir-sim right bugs` finds others when the faults have changed.
const RARE: [(&str, u64); 9] = [
    ("forget-doubtful-set", 1_085),
    ("serve-while-handing-over", 3_690),
    ("no-start-wait", 75),
    ("check-before-receipt", 22),
    ("read-before-session", 2_525),
    ("confirm-by-grants", 1_051),
    ("session-not-compared", 48),
    ("silence-before-proof", 1_207),
    ("resume-on-read", 7_861),
];

#[test]
fn a_disabled_rule_is_found() {
    let mut missed = Vec::new();
    for bug in Bug::all() {
        let rare = RARE.iter().find(|(name, _)| *name == bug.name());
        let found = match rare {
            Some((_, seed)) => {
                assert_eq!(run(*seed, None, false).violation, None, "seed {seed} without {}", bug.name());
                run(*seed, Some(bug), false).violation.map(|violation| (*seed, violation))
            }
            None => find(bug, 2_000, threads(), true).first,
        };
        match found {
            Some((seed, violation)) => println!("{:<26}{seed:>6}  {violation}", bug.name()),
            None => missed.push(bug.name()),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
