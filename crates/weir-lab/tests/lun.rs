//! A cluster shared volume on a LUN: several nodes, each with a device of its own for one image, and verified load.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::lun::LunBench;
use common::{DISK, alone, during, new_history, seed};
use weir_block::Nanos;

/// The disk is on each node in turn, the coordinator among them.
fn every_node_serves(format: &str, policy: &str) {
    let _turn = alone();
    let seed = seed();
    let pool = LunBench::up(3, format, policy, |_| {});
    let bench = &pool.bench;
    let mut history = new_history(seed);
    for node in ["n1", "n2", "n3"] {
        if bench.owner() != node {
            bench.lab.any_client().unwrap().move_disk(DISK, node).unwrap();
        }
        bench.wait_effective();
        let (mut load, ()) = during(bench.load(history, seed), Duration::from_secs(2), || {});
        bench.judge(&mut load, seed);
        eprintln!(
            "{node}: {} acknowledged, coordinator {}",
            load.progress().acknowledged(),
            pool.coordinator()
        );
        history = load.into_history();
    }
}

#[test]
fn every_node_serves_a_disk_on_xfs() {
    every_node_serves("xfs", "write-through");
}

#[test]
fn every_node_serves_a_disk_on_ext4() {
    every_node_serves("ext4", "write-back+1");
}

#[test]
fn the_coordinators_host_crashes_under_load() {
    for (format, policy) in [("xfs", "write-through"), ("ext4", "write-back+1")] {
        let _turn = alone();
        let seed = seed();
        let mut pool = LunBench::up(3, format, policy, |_| {});
        let coordinator = pool.coordinator();
        let owner = ["n1", "n2", "n3"].into_iter().find(|node| *node != coordinator).unwrap();
        if pool.bench.owner() != owner {
            pool.bench.lab.any_client().unwrap().move_disk(DISK, owner).unwrap();
        }
        pool.bench.wait_effective();
        let load = pool.bench.load(new_history(seed), seed);
        let (mut load, next) = during(load, Duration::from_secs(2), || {
            std::thread::sleep(Duration::from_secs(1));
            assert!(pool.crash(&coordinator), "it has the filesystem mounted");
            let since = Nanos::now();
            let next = pool.coordinator();
            eprintln!("{format}: another one serves after {:?}", Nanos::now() - since);
            next
        });
        eprintln!(
            "{format} {policy}: from {coordinator} to {next}, stalled for {:?}",
            load.progress().longest_stall()
        );
        assert_eq!(pool.luns.fenced(), std::slice::from_ref(&coordinator));
        assert_ne!(next, coordinator);
        pool.bench.judge(&mut load, seed);
    }
}

#[test]
fn an_owner_that_loses_its_path_goes_on_through_the_coordinator() {
    let _turn = alone();
    let seed = seed();
    let pool = LunBench::up(3, "xfs", "write-through", |_| {});
    let bench = &pool.bench;
    let coordinator = pool.coordinator();
    let owner = (1..=3).find(|node| format!("n{node}") != coordinator).unwrap();
    let name = format!("n{owner}");
    if bench.owner() != name {
        bench.lab.any_client().unwrap().move_disk(DISK, &name).unwrap();
    }
    bench.wait_effective();
    let (mut load, ()) = during(bench.load(new_history(seed), seed), Duration::from_secs(2), || {
        std::thread::sleep(Duration::from_secs(1));
        pool.luns.set_path(owner, false);
        std::thread::sleep(Duration::from_secs(2));
        pool.luns.set_path(owner, true);
    });
    eprintln!("longest stall {:?}", load.progress().longest_stall());
    bench.judge(&mut load, seed);
}
