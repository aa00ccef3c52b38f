//! Crash rounds with real processes: SIGKILL and SIGSTOP under load, then every block is checked against the history of
//! acknowledged writes (P1, P2, P4, P7).
//!
//! `WEIR_ROUNDS` sets how many rounds there are over all tests here and those of partitions, `WEIR_SEED` replays.
#![allow(clippy::unwrap_used)]

mod common;

use std::thread;
use std::time::Duration;

use common::rounds::{Setup, refused, rounds, run_rounds, some_time};
use common::{Bench, during};
use fastrand::Rng;
use weir_load::verifying::VerifyingLoad;

/// One replica; one node is left over to take another's place.
const ONE: Setup = Setup { nodes: 3, policy: "write-back+1", network: false };

/// Two replicas; one node is left over.
const TWO: Setup = Setup { nodes: 4, policy: "write-back+2", ..ONE };

fn start(bench: &mut Bench, node: &str) {
    bench.lab.start(node).unwrap();
}

/// The owner is killed in the middle of a load, its successor goes on, and the node comes back.
fn kill_owner(bench: &mut Bench, random: &mut Rng, load: VerifyingLoad) -> (VerifyingLoad, String) {
    let before = some_time(random, 20, 1200);
    let former = bench.owner();
    let (load, ()) = during(load, Duration::from_millis(1500), || {
        thread::sleep(before);
        bench.lab.kill(&former).unwrap();
        // etcd learns of it by the end of a lease.
        bench.wait(|view| view.owner.as_ref() != Some(&former));
    });
    assert_ne!(bench.owner(), former);
    assert!(load.progress().reconnects() > 0, "the load never noticed");
    (load, former)
}

#[test]
fn owner_killed_with_one_replica() {
    run_rounds("owner killed", ONE, rounds(3, 6), kill_owner, start);
}

#[test]
fn owner_killed_with_two_replicas() {
    run_rounds("owner killed", TWO, rounds(2, 4), kill_owner, start);
}

/// A replica is killed in the middle of a load: the guest waits a moment and keeps its connection.
fn kill_replica(bench: &mut Bench, random: &mut Rng, load: VerifyingLoad) -> (VerifyingLoad, String) {
    let before = some_time(random, 20, 800);
    let replicas = bench.wait_effective().replicas;
    let replica = replicas[random.usize(..replicas.len())].clone();
    let lab = &mut bench.lab;
    let (load, ()) = during(load, Duration::from_millis(1500), || {
        thread::sleep(before);
        lab.kill(&replica).unwrap();
    });
    assert_eq!(load.progress().reconnects(), 0, "the owner was not touched (P9)");
    let view = bench.wait_effective();
    assert!(!view.replicas.contains(&replica), "another node has taken its place");
    (load, replica)
}

#[test]
fn one_replica_killed() {
    run_rounds("replica killed", ONE, rounds(2, 3), kill_replica, start);
}

#[test]
fn one_of_two_replicas_killed() {
    run_rounds("replica killed", TWO, rounds(1, 2), kill_replica, start);
}

/// The owner stands still for longer than its lease, another takes over, and then it goes on: everything that it still
/// tries must be refused.
fn pause_owner(bench: &mut Bench, random: &mut Rng, load: VerifyingLoad) -> (VerifyingLoad, String) {
    let before = some_time(random, 20, 500);
    let after = some_time(random, 10, 1500);
    let former = bench.owner();
    let (load, successor) = during(load, Duration::from_secs(2), || {
        thread::sleep(before);
        bench.lab.pause(&former).unwrap();
        let successor = bench.wait(|view| view.owner.as_ref() != Some(&former)).owner.unwrap();
        thread::sleep(after);
        bench.lab.resume(&former).unwrap();
        successor
    });
    assert_eq!(bench.owner(), successor, "the former owner has not come back");
    (load, former)
}

#[test]
fn owner_with_one_replica_paused_beyond_its_lease() {
    run_rounds("owner paused", ONE, rounds(2, 3), pause_owner, refused);
}

#[test]
fn owner_with_two_replicas_paused_beyond_its_lease() {
    run_rounds("owner paused", TWO, rounds(1, 2), pause_owner, refused);
}
