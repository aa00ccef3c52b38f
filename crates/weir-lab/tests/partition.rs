//! Partitions with real processes, each in a network of its own: ways are cut under load, one direction or both, between two
//! nodes or around one, and every block is checked against the history of acknowledged writes (P1, P2, P4, P7, P9). Needs
//! root, for network namespaces. Half of the partitions last for longer than lease and grace together.
//!
//! `WEIR_ROUNDS` sets how many rounds there are over all tests here and in `crash`, `WEIR_SEED` replays.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::rounds::{CUT_OFF_GRACE, Setup, refused, rounds, run_rounds, some_time};
use common::{Bench, during};
use fastrand::Rng;
use weir_block::Nanos;
use weir_lab::REGISTRY;
use weir_load::verifying::VerifyingLoad;

/// One replica; one node is left over to take another's place.
const ONE: Setup = Setup { nodes: 3, policy: "write-back+1", network: true };

/// Two replicas; one node is left over.
const TWO: Setup = Setup { nodes: 4, policy: "write-back+2", ..ONE };

/// The shortest duration of a partition: every second one is longer than lease and grace together, so that no node waits any
/// more for I/O of the isolated node.
fn lasts() -> Duration {
    static LONG: AtomicBool = AtomicBool::new(false);
    let beyond = CUT_OFF_GRACE + Duration::from_secs(3);
    if LONG.fetch_xor(true, Ordering::Relaxed) { Duration::ZERO } else { beyond }
}

fn some_replica(bench: &Bench, random: &mut Rng) -> String {
    let replicas = bench.wait_effective().replicas;
    replicas[random.usize(..replicas.len())].clone()
}

/// Everything is whole again already, and so is the node.
fn whole(bench: &mut Bench, _: &str) {
    bench.lab.network().unwrap().restore().unwrap();
}

/// A replica that does not hear of its owner, or is not heard, is replaced. The guest keeps its connection and waits.
fn cut_replica(
    bench: &mut Bench,
    random: &mut Rng,
    load: VerifyingLoad,
    ways: impl Fn(&Bench, &str, &str) -> Vec<(String, String)>,
) -> (VerifyingLoad, String) {
    let before = some_time(random, 20, 500);
    let lasts = lasts();
    let (owner, replica) = (bench.owner(), some_replica(bench, random));
    let (load, ()) = during(load, Duration::from_secs(1), || {
        thread::sleep(before);
        bench.lab.network().unwrap().cut(ways(bench, &owner, &replica)).unwrap();
        bench.wait(|view| !view.replicas.contains(&replica) && view.requested == view.effective);
        thread::sleep(lasts);
    });
    assert_eq!(bench.owner(), owner);
    assert_eq!(load.progress().reconnects(), 0, "the owner was not touched (P9)");
    (load, replica)
}

fn owner_from_replica(bench: &mut Bench, random: &mut Rng, load: VerifyingLoad) -> (VerifyingLoad, String) {
    cut_replica(bench, random, load, |bench, owner, replica| {
        bench.lab.network().unwrap().between(owner, replica)
    })
}

#[test]
fn owner_and_its_replica_are_cut_from_each_other() {
    run_rounds("owner | replica", ONE, rounds(1, 2), owner_from_replica, whole);
}

#[test]
fn owner_and_one_of_two_replicas_are_cut_from_each_other() {
    run_rounds("owner | replica", TWO, rounds(1, 2), owner_from_replica, whole);
}

fn replica_from_all(bench: &mut Bench, random: &mut Rng, load: VerifyingLoad) -> (VerifyingLoad, String) {
    cut_replica(bench, random, load, |bench, _, replica| bench.lab.network().unwrap().everything(replica))
}

#[test]
fn the_replica_is_cut_from_everything() {
    run_rounds("replica | all", ONE, rounds(1, 1), replica_from_all, whole);
}

#[test]
fn one_of_two_replicas_is_cut_from_everything() {
    run_rounds("replica | all", TWO, rounds(1, 1), replica_from_all, whole);
}

/// One direction between owner and replica. TCP needs both, so the replica is lost as if both were cut; which side
/// notices, and what was delivered by then, differs.
fn one_way(bench: &mut Bench, random: &mut Rng, load: VerifyingLoad) -> (VerifyingLoad, String) {
    let towards_replica = random.bool();
    cut_replica(bench, random, load, |_, owner, replica| {
        let (owner, replica) = (owner.to_owned(), replica.to_owned());
        vec![if towards_replica { (owner, replica) } else { (replica, owner) }]
    })
}

#[test]
fn one_way_between_owner_and_replica_is_cut() {
    run_rounds("owner / replica, one way", ONE, rounds(1, 2), one_way, whole);
}

#[test]
fn one_way_between_owner_and_one_of_two_replicas_is_cut() {
    run_rounds("owner / replica, one way", TWO, rounds(1, 2), one_way, whole);
}

/// The owner's lease ends, another takes over, and then the way is free again: everything that the former owner still tries,
/// or has sent before, must be refused. It runs all the time, and clients reach it all the time.
fn owner_from_all(bench: &mut Bench, random: &mut Rng, load: VerifyingLoad) -> (VerifyingLoad, String) {
    let former = bench.owner();
    let ways = bench.lab.network().unwrap().everything(&former);
    succeeded(bench, random, load, former, ways)
}

/// The same, while the former owner still reaches its replicas, or still hears of them or of the registry.
fn owner_from_registry(bench: &mut Bench, random: &mut Rng, load: VerifyingLoad) -> (VerifyingLoad, String) {
    let former = bench.owner();
    let network = bench.lab.network().unwrap();
    let mut ways = network.between(&former, REGISTRY);
    match random.u8(0..5) {
        0 => {}
        // The registry does not hear it, or hears it and is not heard.
        1 => drop(ways.pop()),
        2 => drop(ways.remove(0)),
        3 => ways.extend(network.from_node(&former)),
        _ => ways.extend(network.to_node(&former)),
    }
    succeeded(bench, random, load, former, ways)
}

fn succeeded(
    bench: &mut Bench,
    random: &mut Rng,
    load: VerifyingLoad,
    former: String,
    ways: Vec<(String, String)>,
) -> (VerifyingLoad, String) {
    let (before, after) = (some_time(random, 20, 500), some_time(random, 10, 1500));
    let (load, successor) = during(load, Duration::from_secs(1), || {
        thread::sleep(before);
        bench.lab.network().unwrap().cut(ways).unwrap();
        let until = Nanos::now() + lasts();
        let successor = bench.wait(|view| view.owner.as_ref() != Some(&former)).owner.unwrap();
        thread::sleep(after);
        thread::sleep(until - Nanos::now());
        bench.lab.network().unwrap().restore().unwrap();
        successor
    });
    assert_eq!(bench.owner(), successor, "the former owner has not come back");
    assert!(load.progress().reconnects() > 0, "the load never noticed");
    (load, former)
}

#[test]
fn the_owner_with_one_replica_is_cut_from_everything() {
    run_rounds("owner | all", ONE, rounds(1, 3), owner_from_all, refused);
}

#[test]
fn the_owner_with_two_replicas_is_cut_from_everything() {
    run_rounds("owner | all", TWO, rounds(1, 3), owner_from_all, refused);
}

#[test]
fn the_owner_is_cut_from_the_registry() {
    run_rounds("owner | registry", ONE, rounds(1, 2), owner_from_registry, refused);
}

#[test]
fn the_owner_with_two_replicas_is_cut_from_the_registry() {
    run_rounds("owner | registry", TWO, rounds(1, 2), owner_from_registry, refused);
}
