//! Operators' commands on a lab of real processes: export, policies on line, growth, deletion, loss, restarts.
#![allow(clippy::unwrap_used)]

mod common;

use std::thread;
use std::time::Duration;

use common::{BLOCK, Bench, DISK, SIZE, alone, during, new_history, seed};
use weir_block::size::Size;
use weir_block::{Nanos, RequestKind};
use weir_lab::process::ProcessState;
use weir_lab::{Lab, LabConfig, REGISTRY};
use weir_load::Workload;
use weir_load::workload::Access;
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{ApiErrorKind, CreateDisk, Delete, Export, Medium, RunLoad};
use weir_node::client::Client;
use weir_node::shard::messages::LoadLayer;

fn uri(bench: &Bench) -> Uri {
    bench.wait(|view| !view.uris.is_empty()).uris[0].parse().unwrap()
}

#[test]
fn other_nodes_say_where_the_disk_is() {
    let _turn = alone();
    let bench = Bench::up(2, "write-back+1", |_| {});
    let there = uri(&bench).to_string();
    // Any node answers with the address of the export.
    let other = bench.lab.client("n2").unwrap();
    assert_eq!(other.export(DISK, &Export::default()).unwrap().uris[0], there);
    let here = Export { on: Some("n2".into()), ..Export::default() };
    let error = other.export(DISK, &here).unwrap_err();
    assert_eq!(error.kind, ApiErrorKind::Refused);
    assert!(error.message.contains(&there), "{} does not name {there}", error.message);
    let elsewhere = format!("nbd+unix:///{DISK}?socket={}", bench.lab.node("n2").unwrap().nbd_unix.display());
    NbdClient::connect(&elsewhere.parse().unwrap()).expect("n2 forwards its clients");
    // A request to one node makes another, named one the owner.
    let wanted = CreateDisk {
        name: "d2".into(),
        volume: "pool".into(),
        size: 1 << 20,
        logical_block: 4096,
        policy: "write-through".into(),
        medium: Medium::Ram,
        limit: None,
    };
    let client = bench.lab.client("n1").unwrap();
    client.create_disk(&wanted).unwrap();
    let view = client.export("d2", &Export { on: Some("n2".into()), accept_loss: false }).unwrap();
    assert_eq!(view.owner.as_deref(), Some("n2"));
    let error = client.create_disk(&wanted).unwrap_err();
    assert_eq!(error.kind, ApiErrorKind::Exists);
}

/// An owner that cannot open the disk: every node reports that, and not an export without an address.
#[test]
fn an_export_that_the_owner_cannot_make_is_an_error_on_every_node() {
    let _turn = alone();
    let mut bench = Bench::up(2, "write-through", |_| {});
    let (owner, file) = (bench.owner(), bench.directory.path().join("pool").join(format!("{DISK}.raw")));
    let other = if owner == "n1" { "n2" } else { "n1" };
    let away = file.with_extension("away");
    std::fs::rename(&file, &away).unwrap();
    bench.lab.kill(&owner).unwrap();
    let client = bench.lab.client(other).unwrap();
    let deadline = Nanos::now() + Duration::from_secs(30);
    while client.disk(DISK).unwrap().owner.as_deref() != Some(other) {
        assert!(Nanos::now() < deadline, "nobody takes it over{}", bench.logs());
        thread::sleep(Duration::from_millis(20));
    }
    bench.lab.start(&owner).unwrap();
    let error = bench.lab.client(&owner).unwrap().export(DISK, &Export::default()).unwrap_err();
    assert!(error.message.contains("does not exist"), "{error:?}{}", bench.logs());
    std::fs::rename(&away, &file).unwrap();
    let view = bench.lab.client(&owner).unwrap().export(DISK, &Export::default()).unwrap();
    assert!(!view.uris.is_empty(), "{view:?}");
}

/// Meters, profiles and loads of a disk, from a node that does not have it.
#[test]
fn any_node_measures_a_disk() {
    let _turn = alone();
    let bench = Bench::up(2, "write-back+1", |_| {});
    let mut nbd = NbdClient::connect(&uri(&bench)).unwrap();
    nbd.write(0, &[7; BLOCK as usize], true).unwrap();
    let written = |client: &Client| {
        let meters = client.meters(DISK).unwrap();
        let writes = meters[0].kinds.iter().filter(|kind| kind.kind == RequestKind::Write);
        writes.map(|kind| kind.bytes).sum::<u64>()
    };
    let [owner, other] = ["n1", "n2"].map(|node| bench.lab.client(node).unwrap());
    assert_eq!(bench.owner(), "n1");
    assert_eq!((written(&owner), written(&other)), (BLOCK.into(), BLOCK.into()));
    assert_eq!(other.profile(DISK).unwrap().disk_bytes, owner.profile(DISK).unwrap().disk_bytes);
    other.record_profile(DISK, Duration::from_millis(100)).unwrap();
    drop(nbd);
    bench.wait(|view| view.detail.as_ref().is_some_and(|detail| detail.clients == 0));
    let workload = Workload {
        access: Access::RandWrite,
        runtime: Some(Duration::from_millis(200)),
        ..Workload::default()
    };
    let load = RunLoad { layer: LoadLayer::Accel, workload, force: false };
    assert!(other.load(DISK, &load).unwrap().kinds[0].ios > 0);
    assert_eq!(other.meters("none").unwrap_err().kind, ApiErrorKind::NotFound);
}

/// A node that has not yet heard of a disk which is in the registry waits for it instead of denying it.
#[test]
fn a_new_disk_can_be_used_at_once_on_every_node() {
    let _turn = alone();
    let bench = Bench::up(2, "write-through", |_| {});
    let (maker, user) = (bench.lab.client("n1").unwrap(), bench.lab.client("n2").unwrap());
    for number in 0..20 {
        let name = format!("new{number}");
        let wanted = CreateDisk {
            name: name.clone(),
            volume: "pool".into(),
            size: 1 << 20,
            logical_block: 512,
            policy: "write-through".into(),
            medium: Medium::Ram,
            limit: None,
        };
        maker.create_disk(&wanted).unwrap();
        assert_eq!(user.export(&name, &Export::default()).unwrap().owner.as_deref(), Some("n2"));
    }
}

#[test]
fn policies_change_on_line() {
    let _turn = alone();
    let seed = seed();
    let bench = Bench::up(3, "write-back+1", |_| {});
    let load = bench.load(new_history(seed), seed);
    let (mut load, ()) = during(load, Duration::from_secs(1), || {
        for (number, policy) in
            ["write-through", "write-back+2", "write-back+0", "write-back+1"].iter().enumerate()
        {
            // Any node takes the request, whichever is the owner.
            let client = bench.lab.client(&format!("n{}", number % 3 + 1)).unwrap();
            assert_eq!(client.set_policy(DISK, policy).unwrap().requested, *policy);
            let view = bench.wait_effective();
            assert_eq!(view.effective, *policy);
        }
    });
    assert_eq!((load.progress().failed(), load.progress().reconnects()), (0, 0), "{}", bench.logs());
    let found = load.check_all().unwrap();
    assert_eq!(found.mismatches + load.found().mismatches, 0, "{:#?}", found.first);
    bench.check_backing(&mut load.into_history());
}

/// Each change is an epoch, and the replica hears of them from its owner before it sees them in the record. One rack has all nodes, so
/// that the set is right for both policies.
#[test]
fn a_replica_follows_its_owner_through_many_changes_on_one_connection() {
    let _turn = alone();
    let seed = seed();
    let rack = ["a", "a", "a"].map(str::to_owned);
    let bench = Bench::up(3, "write-back+1", |config| config.fault_domains = rack.into());
    let before = bench.wait_effective();
    let replica = bench.lab.client(&before.replicas[0]).unwrap();
    let load = bench.load(new_history(seed), seed);
    let (mut load, ()) = during(load, Duration::from_secs(1), || {
        let client = bench.lab.client("n1").unwrap();
        for (change, policy) in (1..).zip(["write-back+1in", "write-back+1"].iter().cycle().take(40)) {
            client.set_policy(DISK, policy).unwrap();
            // A record further ahead than a replica's node has seen is not believed, and rightly so.
            while replica.disk(DISK).unwrap().epoch < before.epoch + change {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    });
    let after = bench.wait_effective();
    assert!(after.epoch >= before.epoch + 40, "{} {}", before.epoch, after.epoch);
    assert_eq!((&after.owner, &after.replicas), (&before.owner, &before.replicas), "{}", bench.logs());
    let events = bench.lab.client("n1").unwrap().events().unwrap();
    let lost: Vec<_> = events.iter().filter(|event| event.kind == "replica-lost").collect();
    assert!(lost.is_empty(), "{lost:#?}{}", bench.logs());
    assert_eq!(load.check_all().unwrap().mismatches, 0);
}

#[test]
fn a_disk_grows_under_its_clients() {
    let _turn = alone();
    let bench = Bench::up(2, "write-back+1", |_| {});
    let client = bench.lab.client("n2").unwrap();
    assert_eq!(client.resize(DISK, SIZE / 2).unwrap_err().kind, ApiErrorKind::Refused);
    assert_eq!(client.resize(DISK, 2 * SIZE).unwrap().size, 2 * SIZE);
    let mut nbd = NbdClient::connect(&uri(&bench)).unwrap();
    assert_eq!(nbd.export().size, 2 * SIZE);
    nbd.write(2 * SIZE - u64::from(BLOCK), &[7; BLOCK as usize], true).unwrap();
    let mut back = vec![0; BLOCK as usize];
    nbd.read(2 * SIZE - u64::from(BLOCK), &mut back).unwrap();
    assert_eq!(back, [7; BLOCK as usize]);
}

/// The limits of the handshake hold, also with the least memory and the smallest log.
#[test]
fn the_largest_requests_are_taken() {
    let _turn = alone();
    let bench =
        Bench::up(2, "write-back+1", |config| (config.buffers, config.log) = (Size(8 << 20), Size(64 << 20)));
    let mut nbd = NbdClient::connect(&uri(&bench)).unwrap();
    let largest = nbd.export().maximum_block as usize;
    assert_eq!(largest, 32 << 20, "whatever the node's buffers hold");
    for length in [1 << 20, largest] {
        let data: Vec<u8> = (0..length).map(|at| (at / 512 + (length >> 20)) as u8).collect();
        let mut back = vec![0; length];
        for offset in (0..SIZE).step_by(length) {
            nbd.write(offset, &data, false).unwrap();
        }
        for offset in (0..SIZE).step_by(length) {
            nbd.read(offset, &mut back).unwrap();
            assert!(back == data, "{length} bytes at {offset}");
        }
    }
}

#[test]
fn deletion_is_asked_for_twice_and_leaves_nothing() {
    let _turn = alone();
    let bench = Bench::up(2, "write-back+1", |_| {});
    let client = bench.lab.client("n2").unwrap();
    let mut nbd = NbdClient::connect(&uri(&bench)).unwrap();
    nbd.write(0, &[1; BLOCK as usize], true).unwrap();
    let file = bench.directory.path().join("pool").join(format!("{DISK}.raw"));
    let error = client.delete(DISK, &Delete::default()).unwrap_err();
    assert!(error.kind == ApiErrorKind::Refused && error.message.contains("1 client is"), "{error:?}");
    drop(nbd);
    bench.wait(|view| view.detail.as_ref().is_some_and(|detail| detail.clients == 0));
    let would = client.delete(DISK, &Delete { dry_run: true, ..Delete::default() }).unwrap();
    assert!(!would.done && would.path == file && file.exists());
    assert!(client.delete(DISK, &Delete::default()).unwrap().done);
    assert!(!file.exists());
    assert_eq!(client.disk(DISK).unwrap_err().kind, ApiErrorKind::NotFound);
    // A new disk of the same name has nothing of the old one, neither data nor replicas.
    bench.create_with_blocks(DISK, "write-back+1", 512);
    bench.wait_effective();
    let mut back = vec![1; BLOCK as usize];
    NbdClient::connect(&uri(&bench)).unwrap().read(0, &mut back).unwrap();
    assert_eq!(back, [0; BLOCK as usize]);
}

/// P5: when every copy of the log is lost, the disk is not served until an operator accepts that; then it is as it was at
/// some moment, with everything before and nothing after.
#[test]
fn a_lost_log_is_accepted_by_people_only() {
    const BLOCKS: u64 = 64;
    let _turn = alone();
    let mut bench = Bench::up(3, "write-back+1", |_| {});
    let view = bench.wait_effective();
    let (owner, replica) = (view.owner.unwrap(), view.replicas[0].clone());
    let mut nbd = NbdClient::connect(&uri(&bench)).unwrap();
    for number in 1..=6000u64 {
        let block: Vec<u8> = number.to_le_bytes().repeat(BLOCK as usize / 8);
        nbd.write(number % BLOCKS * u64::from(BLOCK), &block, false).unwrap();
    }
    // Both stand still before either ends, so that neither can replace the other.
    bench.lab.pause(&replica).unwrap();
    bench.lab.pause(&owner).unwrap();
    bench.lab.kill(&replica).unwrap();
    bench.lab.kill(&owner).unwrap();
    bench.lab.start(&owner).unwrap();
    let client = bench.lab.client(&owner).unwrap();
    let error = client.export(DISK, &Export::default()).unwrap_err();
    assert!(error.kind == ApiErrorKind::Refused && error.message.contains("--accept-loss"), "{error:?}");
    assert_eq!(client.disk(DISK).unwrap().state, "unavailable");
    client.export(DISK, &Export { on: None, accept_loss: true }).unwrap();
    let mut nbd = NbdClient::connect(&uri(&bench)).unwrap();
    let mut block = vec![0; BLOCK as usize];
    let mut found: Vec<u64> = Vec::new();
    for number in 0..BLOCKS {
        nbd.read(number * u64::from(BLOCK), &mut block).unwrap();
        let (words, []) = block.as_chunks::<8>() else {
            unreachable!("a block is a multiple of eight bytes")
        };
        assert!(words.iter().all(|word| word == &words[0]), "a torn block");
        found.push(u64::from_le_bytes(words[0]));
    }
    let last = *found.iter().max().unwrap();
    let newest =
        |block: u64| (0..=last).rev().find(|number| number % BLOCKS == block && *number > 0).unwrap_or(0);
    let expected: Vec<u64> = (0..BLOCKS).map(newest).collect();
    assert_eq!(found, expected, "not a state that the disk went through (P5)");
}

#[test]
fn write_through_is_taken_over_too() {
    let _turn = alone();
    let seed = seed();
    let mut bench = Bench::up(2, "write-through", |_| {});
    let owner = bench.owner();
    let load = bench.load(new_history(seed), seed);
    let lab = &mut bench.lab;
    let (mut load, ()) = during(load, Duration::from_secs(3), || {
        thread::sleep(Duration::from_millis(300));
        lab.kill(&owner).unwrap();
    });
    assert_ne!(bench.owner(), owner);
    let found = load.check_all().unwrap();
    assert_eq!(found.mismatches + load.found().mismatches, 0, "{:#?}{}", found.first, bench.logs());
}

/// P9: while the registry is away the guest notices nothing as long as leases stand, waits when they do not, and never gets
/// an error.
#[test]
fn the_registry_goes_and_comes() {
    let _turn = alone();
    let seed = seed();
    let mut bench = Bench::up(3, "write-back+1", |config| config.lease_ttl = Duration::from_secs(2));
    let load = bench.load(new_history(seed), seed);
    let lab = &mut bench.lab;
    let (mut load, ()) = during(load, Duration::from_secs(3), || {
        lab.kill(REGISTRY).unwrap();
        thread::sleep(Duration::from_millis(500));
        lab.start(REGISTRY).unwrap();
        thread::sleep(Duration::from_secs(1));
        lab.pause(REGISTRY).unwrap();
        thread::sleep(Duration::from_secs(3));
        lab.resume(REGISTRY).unwrap();
    });
    assert_eq!(load.progress().failed(), 0, "{}", bench.logs());
    bench.wait_effective();
    let found = load.check_all().unwrap();
    assert_eq!(found.mismatches + load.found().mismatches, 0, "{:#?}{}", found.first, bench.logs());
    bench.check_backing(&mut load.into_history());
}

/// Everything ends cleanly and comes again: nothing is dirty any more, and nothing is lost.
#[test]
fn a_lab_ends_and_comes_again() {
    let _turn = alone();
    let seed = seed();
    let bench = Bench::up(2, "write-back+1", |_| {});
    let load = bench.load(new_history(seed), seed);
    let (load, ()) = during(load, Duration::from_secs(1), || {});
    let mut history = load.into_history();
    let Bench { lab, directory, medium, etcd } = bench;
    let dir = lab.dir().to_owned();
    let pids: Vec<_> = lab.nodes().iter().filter_map(|node| node.process).collect();
    lab.down().unwrap();
    assert!(pids.iter().all(|process| process.state() == ProcessState::Gone));
    let mut config = LabConfig::new(&dir, common::program());
    config.nodes = 2;
    let lab = Lab::up(&config).unwrap();
    let client = lab.any_client().unwrap();
    let view = client.disk(DISK).unwrap();
    assert_eq!((view.state.as_str(), view.owner), ("closed", None), "the nodes had closed it");
    client.export(DISK, &Export { on: Some("n2".into()), accept_loss: false }).unwrap();
    let bench = Bench { lab, directory, medium, etcd };
    let mut load = bench.load(history, seed);
    assert_eq!(load.check_all().unwrap().mismatches, 0);
    history = load.into_history();
    bench.check_backing(&mut history);
    assert!(matches!(Lab::up(&config), Err(weir_lab::LabError::Running(_))));
}
