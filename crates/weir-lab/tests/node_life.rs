//! Nodes that are drained, resumed and removed, with disks under load on them.
#![allow(clippy::unwrap_used)]

mod common;

use std::thread;
use std::time::Duration;

use common::{Bench, DISK, SOON, alone, during, new_history, seed};
use weir_block::Nanos;
use weir_load::verifying::VerifyingLoad;
use weir_node::api::{ApiErrorKind, DrainNode, NodeView, NodeWork};
use weir_node::client::Client;

/// Longest stall that a load may see, on a machine that does much else.
const LONGEST_STALL: Duration = Duration::from_secs(2);

const PLAIN: DrainNode = DrainNode { fewer_copies: false, dry_run: false };

fn client(bench: &Bench) -> Client {
    bench.lab.any_client().unwrap()
}

fn wait_node(bench: &Bench, name: &str, wanted: impl Fn(&NodeWork) -> bool) -> NodeWork {
    let deadline = Nanos::now() + SOON;
    loop {
        let work = client(bench).node(name).unwrap();
        if wanted(&work) {
            return work;
        }
        assert!(Nanos::now() < deadline, "{work:#?}{}", bench.logs());
        thread::sleep(Duration::from_millis(50));
    }
}

fn open_on(bench: &Bench, disk: &str, policy: &str, node: &str) {
    bench.create(disk, policy);
    client(bench).move_disk(disk, node).unwrap();
}

fn owner(bench: &Bench, disk: &str) -> Option<String> {
    bench.disk_named(disk).unwrap().owner
}

fn judge(bench: &Bench, load: &mut VerifyingLoad, seed: u64) {
    let all = load.check_all().unwrap();
    assert_eq!(all.mismatches, 0, "seed {seed}: {:#?}{}", all.first, bench.logs());
    assert_eq!(load.progress().failed(), 0, "a guest saw an error (P9){}", bench.logs());
    let stall = load.progress().longest_stall();
    assert!(stall < LONGEST_STALL, "stalled for {stall:?}{}", bench.logs());
    eprintln!("longest stall {stall:?}");
}

/// With disks of every kind: with copies, with the only log there, without a log; and with copies of others' disks.
#[test]
fn a_drained_node_gives_everything_away_and_gets_its_disks_back() {
    let _turn = alone();
    let seed = seed();
    let mut bench = Bench::up(4, "write-back+1", |_| {});
    let drained = bench.owner();
    let other = if drained == "n1" { "n2" } else { "n1" };
    let own = [("two", "write-back+2"), ("one", "write-back+0"), ("none", "write-through")];
    own.iter().for_each(|(disk, policy)| open_on(&bench, disk, policy, &drained));
    ["x", "y", "z"].iter().for_each(|disk| open_on(&bench, disk, "write-back+2", other));
    bench.wait_effective();
    wait_node(&bench, &drained, |work| work.disks.len() == 4 && !work.copies.is_empty());
    let mut history = new_history(seed);

    let planned = client(&bench).drain_node(&drained, &DrainNode { dry_run: true, ..PLAIN }).unwrap();
    assert!(planned.node.state == NodeView::UP && planned.stays.is_empty(), "{planned:#?}");
    let (mut load, ()) = during(bench.load(history, seed), Duration::from_secs(1), || {
        client(&bench).drain_node(&drained, &PLAIN).unwrap();
        let work = wait_node(&bench, &drained, |work| work.node.state == NodeView::MAINTENANCE);
        assert!(work.disks.is_empty() && work.copies.is_empty(), "{work:#?}");
        assert_eq!(work.away.len(), 4, "{work:#?}");
    });
    judge(&bench, &mut load, seed);
    history = load.into_history();
    bench.wait_effective();

    // Nothing is placed there: not by command, not by the cluster, and not after a restart.
    assert_eq!(client(&bench).move_disk("one", &drained).unwrap_err().kind, ApiErrorKind::Refused);
    bench.lab.kill(&drained).unwrap();
    wait_node(&bench, &drained, |work| work.node.state == NodeView::DOWN);
    bench.lab.start(&drained).unwrap();
    wait_node(&bench, &drained, |work| work.node.state == NodeView::MAINTENANCE);
    thread::sleep(Duration::from_secs(2));
    let work = wait_node(&bench, &drained, |_| true);
    assert!(work.disks.is_empty() && work.copies.is_empty(), "{work:#?}");

    let (mut load, ()) = during(bench.load(history, seed ^ 1), Duration::from_secs(1), || {
        client(&bench).resume_node(&drained).unwrap();
        let work = wait_node(&bench, &drained, |work| work.away.is_empty());
        assert_eq!((work.node.state.as_str(), work.disks.len()), (NodeView::UP, 4), "{work:#?}");
    });
    judge(&bench, &mut load, seed);
    for disk in [DISK, "two", "one", "none"] {
        assert_eq!(owner(&bench, disk).as_ref(), Some(&drained), "{disk}");
    }
    // A disk that an operator has moved elsewhere stays there.
    client(&bench).move_disk("none", other).unwrap();
    thread::sleep(Duration::from_secs(2));
    assert_eq!(owner(&bench, "none").as_deref(), Some(other));
    bench.wait_effective();
    bench.check_backing(&mut load.into_history());
}

#[test]
fn a_drain_that_costs_a_copy_is_refused_unless_permitted() {
    let _turn = alone();
    let mut bench = Bench::up(2, "write-back+1", |_| {});
    bench.wait_effective();
    for node in ["n1", "n2"] {
        let error = client(&bench).drain_node(node, &PLAIN).unwrap_err();
        assert_eq!(error.kind, ApiErrorKind::Refused, "{error:?}");
        assert!(error.message.contains("1 replica,") && error.hint.contains("--fewer-copies"), "{error:?}");
    }
    let drained = bench.owner();
    client(&bench).drain_node(&drained, &DrainNode { fewer_copies: true, ..PLAIN }).unwrap();
    wait_node(&bench, &drained, |work| work.node.state == NodeView::MAINTENANCE);
    let disk = bench.wait(|view| view.effective == "write-through");
    assert_eq!(disk.requested, "write-back+1");
    client(&bench).resume_node(&drained).unwrap();
    wait_node(&bench, &drained, |work| work.away.is_empty());
    bench.wait_effective();

    // The other one has the copy that counts, until it is replaced; and a node that is up is not removed.
    let other = if drained == "n1" { "n2" } else { "n1" };
    assert_eq!(client(&bench).remove_node(other).unwrap_err().kind, ApiErrorKind::Refused);
    bench.lab.kill(other).unwrap();
    wait_node(&bench, other, |work| work.node.state == NodeView::DOWN && work.copies.is_empty());
    client(&bench).remove_node(other).unwrap();
    let deadline = Nanos::now() + SOON;
    while client(&bench).node(other).is_ok() {
        assert!(Nanos::now() < deadline, "it is still in the list{}", bench.logs());
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(client(&bench).drain_node(other, &PLAIN).unwrap_err().kind, ApiErrorKind::NotFound);
}
