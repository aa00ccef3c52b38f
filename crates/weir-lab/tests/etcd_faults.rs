//! The registry on a real etcd of three members, under load: each kind of fault once. `make etcd-faults` makes 200 rounds and prints
//! their figures. Needs root, for network namespaces.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::time::Duration;

use common::{alone, seed};
use support::etcd_faults::Rig;
use support::etcd_faults::faults::Fault;
use support::etcd_faults::figures::{Bounds, Round, longest_gap, quantile};
use weir_block::Nanos;

/// Shorter than the default, for a shorter test.
const LEASE: Duration = Duration::from_secs(2);

/// On a machine that does much else.
const BOUNDS: Bounds = Bounds { unowned: Duration::from_secs(10) };

#[test]
fn nothing_is_lost_and_every_disk_has_an_owner_soon() {
    let _turn = alone();
    let mut rig = Rig::up(seed(), LEASE);
    for fault in rig.plan(Fault::ALL.len()) {
        let round = rig.round(fault);
        eprintln!("{round}");
        assert!(round.acknowledged > 100, "the loads did nothing to speak of: {round:?}");
        let broken = round.broken(BOUNDS);
        assert!(broken.is_empty(), "{broken:#?}{}", rig.logs());
    }
}

#[test]
fn gaps_begin_and_end_with_the_time_that_is_watched() {
    let at = |ms: u64| Nanos(ms * 1_000_000);
    let gap = |times: &[u64], from, to| {
        let times: Vec<_> = times.iter().copied().map(at).collect();
        longest_gap(&times, at(from), at(to)).as_millis()
    };
    assert_eq!(gap(&[], 10, 50), 40, "nothing happened at all");
    assert_eq!(gap(&[5, 20, 30, 60], 10, 50), 20, "the last answer was long before the end");
    assert_eq!(gap(&[5, 40, 45], 10, 50), 30, "what was before does not count");
    assert_eq!(gap(&[11, 12, 35, 49], 10, 50), 23);
    assert_eq!(quantile(&[3.0, 1.0, 2.0, 9.0], 0.5), 2.0);
    assert_eq!(quantile(&[3.0, 1.0, 2.0, 9.0], 0.99), 9.0);
}

#[test]
fn each_broken_bound_is_told() {
    let good = Round {
        fault: Fault::LeaderKilled,
        told: String::new(),
        seconds: 5.0,
        quorum_after_ms: 1000.0,
        unowned_ms: 9999.0,
        unanswered_ms: 9999.0,
        unanswered_disk: "d1",
        stall_ms: 60_000.0,
        acknowledged: 1,
        errors: 0,
        lost: 0,
        violations: Vec::new(),
    };
    assert!(good.broken(BOUNDS).is_empty());
    for (bad, words) in [
        (Round { lost: 1, ..good.clone() }, "not what was acknowledged"),
        (Round { errors: 1, ..good.clone() }, "1 errors"),
        (Round { unowned_ms: 10_001.0, ..good.clone() }, "without an owner"),
        (Round { unanswered_ms: 10_001.0, ..good.clone() }, "without an answered write"),
        (Round { violations: vec!["redundancy".into()], ..good.clone() }, "redundancy"),
    ] {
        let broken = bad.broken(BOUNDS);
        assert!(broken.len() == 1 && broken[0].contains(words), "{broken:?} says nothing of {words:?}");
    }
}
