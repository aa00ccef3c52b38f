//! The checks can fail: they find plausible bugs, planted in production code.
#![allow(clippy::unwrap_used)]

use weir_sim::{Bug, find, run};

/// Seeds that find every bug except the rare ones.
const SEEDS: u64 = 300;

/// Rare bugs, each with a seed that finds it; `weir-sim bugs` finds others when the faults have changed.
const RARE: [(Bug, u64); 10] = [
    (Bug::ForgetBypassed, 8489),
    (Bug::ForgetFormer, 1343),
    (Bug::DestageInheritedInParts, 3789),
    (Bug::DestageBesideBypass, 2547),
    (Bug::KeepUninherited, 931),
    (Bug::KeepForeignLog, 8475),
    (Bug::ForgetRewind, 898),
    (Bug::KeepPinned, 5256),
    (Bug::OpenWhileFenced, 1750),
    (Bug::SkipFreedPart, 1065),
];

#[test]
fn every_planted_bug_is_found() {
    let threads = std::thread::available_parallelism().unwrap().get();
    let mut missed = Vec::new();
    for bug in Bug::ALL {
        let found = match RARE.iter().find(|(rare, _)| *rare == bug) {
            Some((_, seed)) => {
                assert_eq!(run(*seed, None, false).violation, None, "seed {seed} without {}", bug.name());
                run(*seed, Some(bug), false).violation.map(|violation| (*seed, violation))
            }
            None => find(bug, SEEDS, threads, true).first,
        };
        match found {
            Some((seed, violation)) => println!("{:<28} {seed:>6}  {violation}", bug.name()),
            None => missed.push(bug.name()),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
