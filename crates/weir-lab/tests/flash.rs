//! Logs on flash: they survive the end of every process, they do not survive the flash, and a node whose flash fails says so.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;

use common::{Bench, DISK, alone, during, new_history, seed};
use weir_block::size::Size;
use weir_lab::{LabConfig, LabFlash};
use weir_node::api::Export;

/// Long enough that the tests' load is dirty for the most part.
const LOAD: Duration = Duration::from_millis(1500);

fn on_flash(config: &mut LabConfig) {
    config.flash = LabFlash::Files(Size(96 << 20));
}

/// All nodes are killed at once under load and started again, in this order.
fn all_killed(nodes: usize, policy: &str, order: &[&str]) {
    let _turn = alone();
    let seed = seed();
    let mut bench = Bench::up(nodes, policy, on_flash);
    let mut history = new_history(seed);
    for round in 0..3 {
        let load = bench.load(history, seed + round);
        let names: Vec<String> = bench.lab.nodes().iter().map(|node| node.name.clone()).collect();
        let lab = &mut bench.lab;
        let (mut load, ()) = during(load, LOAD / 2, || {
            thread::sleep(LOAD / 2);
            names.iter().for_each(|name| lab.kill(name).unwrap());
            order.iter().for_each(|name| lab.start(name).unwrap());
        });
        bench.wait(|view| view.owner.is_some());
        let found = load.check_all().unwrap();
        assert_eq!(found.mismatches, 0, "seed {seed}: {:#?}{}", found.first, bench.logs());
        assert!(load.progress().acknowledged() > 100, "the load did nothing to speak of");
        eprintln!("{policy}, round {round}: {} acknowledged, lost 0", load.progress().acknowledged());
        history = load.into_history();
        bench.wait_effective();
    }
    let detail = bench.wait(|view| view.owner.is_some()).detail.unwrap();
    assert!(detail.destage.flash_bytes > 0, "the flash was written to: {detail:?}");
    bench.check_backing(&mut history);
}

#[test]
fn one_copy_on_flash_survives_its_process() {
    all_killed(1, "write-back+0", &["n1"]);
}

#[test]
fn all_copies_on_flash_survive_all_processes() {
    all_killed(3, "write-back+1", &["n3", "n2", "n1"]);
}

/// A replica that starts again still has its copy: the set does not change, and no copy is filled anew.
#[test]
fn a_replica_that_starts_again_keeps_its_place() {
    let _turn = alone();
    let mut bench = Bench::up(2, "write-back+1", on_flash);
    let before = bench.wait_effective();
    let replica = before.replicas[0].clone();
    let load = bench.load(new_history(seed()), 1);
    let lab = &mut bench.lab;
    let (mut load, ()) = during(load, LOAD, || {
        lab.kill(&replica).unwrap();
        lab.start(&replica).unwrap();
    });
    let found = load.check_all().unwrap();
    assert_eq!(found.mismatches, 0, "{:#?}{}", found.first, bench.logs());
    assert_eq!(load.progress().failed(), 0);
    let after = bench.wait_effective();
    assert_eq!(after.replicas, before.replicas);
}

/// The only copy is on a flash that is lost: the disk waits for an operator, who accepts the loss.
#[test]
fn a_lost_flash_is_told_and_its_loss_must_be_accepted() {
    let _turn = alone();
    let mut bench = Bench::up(1, "write-back+0", on_flash);
    let mut load = bench.load(new_history(seed()), 1);
    let flash = bench.lab.nodes()[0].config.with_file_name("flash");
    load.run(LOAD / 2).unwrap();
    bench.lab.kill("n1").unwrap();
    std::fs::remove_file(&flash).unwrap();
    bench.lab.start("n1").unwrap();
    let client = bench.lab.client("n1").unwrap();
    let view = client.disk(DISK).unwrap();
    assert_eq!(view.state, "unavailable", "{view:#?}");
    let refused = client.export(DISK, &Export::default()).unwrap_err();
    assert!(refused.message.contains("on the flash of n1"), "{refused:?}");
    client.export(DISK, &Export { accept_loss: true, ..Export::default() }).unwrap();
    bench.wait_effective();
}

/// Makes a node's flash refuse writes, also those of descriptors that are open, until it is dropped.
struct Broken(PathBuf);

impl Broken {
    fn new(bench: &Bench, node: &str) -> Broken {
        let node = bench.lab.nodes().iter().find(|one| one.name == node).unwrap();
        let broken = Broken(node.config.with_file_name("flash"));
        broken.chattr("+i");
        broken
    }

    fn chattr(&self, flag: &str) {
        assert!(Command::new("chattr").arg(flag).arg(&self.0).status().unwrap().success());
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        self.chattr("-i");
    }
}

fn tells(bench: &Bench, kind: &str) -> bool {
    bench.lab.any_client().unwrap().events().unwrap().iter().any(|event| event.kind == kind)
}

/// The owner's flash fails under load: the replica's copy serves, the data drains, the effective policy falls, an event tells;
/// the disk is whole again once it has moved.
#[test]
fn an_owner_whose_flash_fails_falls_to_write_through() {
    let _turn = alone();
    let mut bench = Bench::up(3, "write-back+1", on_flash);
    let owner = bench.owner();
    let load = bench.load(new_history(seed()), 1);
    let (mut load, broken) = during(load, LOAD, || {
        thread::sleep(LOAD / 3);
        Broken::new(&bench, &owner)
    });
    let view = bench.wait(|view| view.effective == "write-through");
    assert!(view.detail.unwrap().reason.contains("flash has failed"));
    assert!(tells(&bench, "flash-failed"));
    let found = load.check_all().unwrap();
    assert_eq!(found.mismatches, 0, "{:#?}{}", found.first, bench.logs());
    assert_eq!(load.progress().failed(), 0, "no guest saw an error (P9)");
    // Also when it dies now: everything acknowledged is in the backing or with the replica.
    bench.lab.kill(&owner).unwrap();
    bench.wait(|view| view.owner.as_deref().is_some_and(|now| now != owner));
    let found = load.check_all().unwrap();
    assert_eq!(found.mismatches, 0, "{:#?}{}", found.first, bench.logs());
    bench.wait_effective();
    drop(broken);
}

/// A replica's flash fails under load: another node takes its place.
#[test]
fn a_replica_whose_flash_fails_is_replaced() {
    let _turn = alone();
    let bench = Bench::up(3, "write-back+1", on_flash);
    let replica = bench.wait_effective().replicas[0].clone();
    let load = bench.load(new_history(seed()), 1);
    let (mut load, broken) = during(load, LOAD, || {
        thread::sleep(LOAD / 3);
        Broken::new(&bench, &replica)
    });
    let view = bench.wait(|view| view.effective == "write-back+1" && !view.replicas.contains(&replica));
    assert_eq!(view.replicas.len(), 1);
    assert!(tells(&bench, "flash-failed"));
    let found = load.check_all().unwrap();
    assert_eq!(found.mismatches, 0, "{:#?}{}", found.first, bench.logs());
    assert_eq!(load.progress().failed(), 0, "no guest saw an error (P9)");
    eprintln!("longest stall {:?}", load.progress().longest_stall());
    drop(broken);
}
