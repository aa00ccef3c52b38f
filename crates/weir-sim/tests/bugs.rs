//! The checker can fail: bugs that people make, planted in the cores, are found.
#![allow(clippy::unwrap_used)]

use weir_sim::{Bug, find};

/// Every bug is found within so many seeds; most within a hundred.
const SEEDS: u64 = 10_000;

#[test]
fn every_planted_bug_is_found() {
    let threads = std::thread::available_parallelism().unwrap().get();
    let mut missed = Vec::new();
    for bug in Bug::ALL {
        match find(bug, SEEDS, threads, true).first {
            Some((seed, violation)) => println!("{:<28} {seed:>6}  {violation}", bug.name()),
            None => missed.push(bug.name()),
        }
    }
    assert!(missed.is_empty(), "not found within {SEEDS} seeds: {missed:?}");
}
