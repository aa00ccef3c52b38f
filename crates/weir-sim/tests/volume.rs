//! The protocol of a shared volume: no seed breaks an invariant, and each planted bug is found.

use weir_sim::volume::{Counts, Run, claims, many, run, shells};
use weir_volume::planted::Bug;

/// Threads for the seeds.
const THREADS: usize = 2;

#[test]
fn invariants_hold() {
    let violations = many(0..10_000, THREADS, None);
    assert!(violations.is_empty(), "{:?}", violations.first());
}

#[test]
fn every_planted_bug_is_found() {
    // Most are found by the first seeds.
    let is_found =
        |bug| (0..3_000).step_by(200).any(|from| !many(from..from + 200, THREADS, Some(bug)).is_empty());
    let missed: Vec<&str> = Bug::FILES.into_iter().filter(|bug| !is_found(*bug)).map(Bug::name).collect();
    assert!(missed.is_empty(), "{missed:?}");
}

/// A router that redirects everything would hold all invariants.
#[test]
fn everything_is_done_that_the_invariants_are_about() {
    let mut all = Counts::default();
    for counts in (0..200).map(|seed| run(seed, None, false).counts) {
        all.answered += counts.answered;
        all.direct += counts.direct;
        all.shared += counts.shared;
        all.block += counts.block;
        all.zeroes += counts.zeroes;
        all.file += counts.file;
        all.recalls += counts.recalls;
        all.changes += counts.changes;
        all.prepared += counts.prepared;
        all.failed += counts.failed;
    }
    let least = [
        all.answered / 50,
        all.direct,
        all.shared,
        all.block,
        all.zeroes,
        all.file,
        all.recalls,
        all.changes,
        all.prepared,
        all.failed,
    ];
    assert!(least.iter().all(|count| *count > 20), "{all:?}");
}

#[test]
fn one_node_coordinates_and_no_former_one_writes() {
    let violations = claims::many(0..20_000, THREADS, None);
    assert!(violations.is_empty(), "{:?}", violations.first());
}

#[test]
fn every_planted_bug_of_the_coordinators_claim_is_found() {
    for bug in Bug::CLAIMS {
        // By the invariant that it breaks.
        let expected = match bug {
            Bug::EnterForEver | Bug::DoubtForEver | Bug::ServeUnadmitted => ": I8: ",
            Bug::AdmitBesideFormer | Bug::AdmitBeforeDrop => ": I4: ",
            _ => ": I5: ",
        };
        let breaks =
            |seed| claims::run(seed, Some(bug), false).violation.is_some_and(|text| text.contains(expected));
        assert!((0..100_000).any(breaks), "{}", bug.name());
    }
}

/// A node that never mounts would hold I5.
#[test]
fn coordinators_are_fenced_and_mount() {
    let all: Vec<claims::Counts> = (0..400).map(|seed| claims::run(seed, None, false).counts).collect();
    let sum = |count: fn(&claims::Counts) -> u64| all.iter().map(count).sum::<u64>();
    let least = [
        sum(|one| one.mounts),
        sum(|one| one.fenced),
        sum(|one| one.readmitted),
        sum(|one| one.writes),
        sum(|one| one.refused),
    ];
    assert!(least.iter().all(|count| *count > 200), "{least:?}");
}

#[test]
fn the_shells_of_a_disk_keep_its_promises() {
    let violations = shells::many(0..300, THREADS, None);
    assert!(violations.is_empty(), "{:?}", violations.first());
}

/// Nothing fails where nothing is broken, and most I/O is direct.
#[test]
fn without_faults_the_shells_fail_nothing() {
    for seed in 0..30 {
        let Run { violation, counts, .. } = shells::run_calmly(seed);
        assert_eq!((violation, counts.failed), (None, 0), "seed {seed}");
        assert!(counts.answered > 50, "seed {seed}: {counts:?}");
    }
}

#[test]
fn every_planted_bug_is_found_through_the_shells() {
    let is_found =
        |bug| (0..400).step_by(20).any(|from| !shells::many(from..from + 20, THREADS, Some(bug)).is_empty());
    let missed: Vec<&str> = shells::bugs().into_iter().filter(|bug| !is_found(*bug)).map(Bug::name).collect();
    assert!(missed.is_empty(), "{missed:?}");
}

/// Shells that never did a thing would keep all promises about it.
#[test]
fn the_shells_do_everything_that_is_promised() {
    let all: Vec<shells::Counts> = (0..100).map(|seed| shells::run(seed, None, false).counts).collect();
    let sum = |count: fn(&shells::Counts) -> u64| all.iter().map(count).sum::<u64>();
    let least = [
        sum(|one| one.answered) / 100,
        sum(|one| one.failed),
        sum(|one| one.routes.direct),
        sum(|one| one.routes.block),
        sum(|one| one.routes.file),
        sum(|one| one.routes.zeroes),
        sum(|one| one.changes),
        sum(|one| one.killed),
        sum(|one| one.coordinators),
        sum(|one| one.owners),
        sum(|one| one.connections),
        sum(|one| one.fences),
        sum(|one| one.paths),
        sum(|one| one.full),
        sum(|one| one.durable),
    ];
    assert!(least.iter().all(|count| *count > 20), "{least:?}");
}
