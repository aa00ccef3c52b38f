//! Disks move between nodes under load: nothing is drained, nothing is lost, and guests wait a moment (P1, P4, P9).
#![allow(clippy::unwrap_used)]

mod common;

use std::thread;
use std::time::Duration;

use common::{Bench, DISK, alone, during, new_history, seed};
use fastrand::Rng;
use weir_load::verifying::VerifyingLoad;
use weir_node::api::Moved;

/// Longest stall that a load may see, on a machine that does much else (the target on a quiet one is 200 ms).
const LONGEST_STALL: Duration = Duration::from_secs(2);

fn move_to(bench: &Bench, to: &str) -> Moved {
    let client = bench.lab.any_client().unwrap();
    client.move_disk(DISK, to).unwrap_or_else(|error| panic!("{error:?}{}", bench.logs()))
}

/// Any node but the owner.
fn elsewhere(bench: &Bench, random: &mut Rng) -> String {
    let owner = bench.owner();
    let others: Vec<String> =
        bench.lab.nodes().iter().map(|node| node.name.clone()).filter(|name| *name != owner).collect();
    others[random.usize(..others.len())].clone()
}

fn judge(bench: &Bench, load: &mut VerifyingLoad, seed: u64) {
    let mixed = load.found().clone();
    assert_eq!(mixed.mismatches, 0, "seed {seed}, read under load: {:#?}{}", mixed.first, bench.logs());
    let all = load.check_all().unwrap();
    assert_eq!(all.mismatches, 0, "seed {seed}: {:#?}{}", all.first, bench.logs());
    assert_eq!(load.progress().failed(), 0, "a guest saw an error (P9){}", bench.logs());
}

fn moves_under_load(nodes: usize, policy: &str, moves: u32) {
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let bench = Bench::up(nodes, policy, |_| {});
    let mut history = new_history(seed);
    let (mut dirty, mut stalls) = (Vec::new(), Vec::new());
    for _ in 0..moves {
        bench.wait_effective();
        let to = elsewhere(&bench, &mut random);
        let load = bench.load(history, random.u64(..));
        let (mut load, moved) = during(load, Duration::from_secs(1), || {
            thread::sleep(Duration::from_millis(random.u64(50..600)));
            move_to(&bench, &to)
        });
        assert_eq!((&moved.to, bench.owner()), (&to, to.clone()));
        assert!(load.progress().reconnects() > 0, "the load never noticed");
        let stall = load.progress().longest_stall();
        assert!(stall < LONGEST_STALL, "stalled for {stall:?}{}", bench.logs());
        judge(&bench, &mut load, seed);
        dirty.push(moved.dirty_bytes);
        stalls.push(stall);
        history = load.into_history();
    }
    bench.check_backing(&mut history);
    eprintln!("{policy}: stalls {stalls:?}, dirty at the switch {dirty:?}");
    if policy != "write-through" {
        assert!(dirty.iter().any(|&bytes| bytes > 0), "something was dirty at the switch");
    }
}

#[test]
fn a_disk_moves_with_its_dirty_data() {
    moves_under_load(3, "write-back+1", 4);
}

#[test]
fn a_disk_with_two_replicas_moves() {
    moves_under_load(4, "write-back+2", 3);
}

#[test]
fn a_disk_without_a_log_moves() {
    moves_under_load(2, "write-through", 2);
}

/// Right after a move there are as many copies as before: either of the two nodes may die.
fn dies_after_a_move(victim_is_new_owner: bool) {
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let mut bench = Bench::up(3, "write-back+1", |_| {});
    let former = bench.owner();
    let to = elsewhere(&bench, &mut random);
    let load = bench.load(new_history(seed), seed);
    let lab = &mut bench.lab;
    let (mut load, ()) = during(load, Duration::from_secs(2), || {
        thread::sleep(Duration::from_millis(200));
        lab.any_client().unwrap().move_disk(DISK, &to).unwrap();
        lab.kill(if victim_is_new_owner { &to } else { &former }).unwrap();
    });
    assert_eq!(bench.owner() == to, !victim_is_new_owner);
    judge(&bench, &mut load, seed);
    bench.wait_effective();
    bench.check_backing(&mut load.into_history());
}

#[test]
fn the_new_owner_dies_after_a_move() {
    dies_after_a_move(true);
}

#[test]
fn the_former_owner_dies_after_a_move() {
    dies_after_a_move(false);
}

#[test]
fn a_move_that_cannot_be_had_is_refused_and_changes_nothing() {
    let _turn = alone();
    let bench = Bench::up(3, "write-back+1", |_| {});
    let owner = bench.owner();
    let client = bench.lab.any_client().unwrap();
    let unknown = client.move_disk(DISK, "nowhere").unwrap_err();
    assert!(unknown.message.contains("there is no node nowhere"), "{unknown:?}");
    let epoch = bench.disk().unwrap().epoch;
    assert_eq!(move_to(&bench, &owner).disk.epoch, epoch, "it is there already");
    // A node that stands still has a lease for a moment, and no copy ever.
    let replicas = bench.wait_effective().replicas;
    let stranger = bench.lab.nodes().iter().map(|node| node.name.clone());
    let stranger = stranger.into_iter().find(|name| *name != owner && !replicas.contains(name)).unwrap();
    bench.lab.pause(&stranger).unwrap();
    let error = bench.lab.client(&owner).unwrap().move_disk(DISK, &stranger).unwrap_err();
    assert!(error.message.contains("stays where it is") || error.message.contains("no node"), "{error:?}");
    bench.lab.resume(&stranger).unwrap();
    assert_eq!(bench.owner(), owner);
    bench.wait_effective();
}
