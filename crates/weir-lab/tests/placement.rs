//! Placement of write logs: media, room, fault domains.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use common::{Bench, DISK, alone, during, new_history, seed};
use weir_block::size::Size;
use weir_load::verifying::VerifyingLoad;
use weir_node::api::{ApiErrorKind, CreateDisk, Export, Medium, NodeView};

fn create(bench: &Bench, name: &str, medium: Medium) -> Result<(), weir_node::api::ApiError> {
    let wanted = CreateDisk {
        name: name.into(),
        volume: "pool".into(),
        size: 1 << 20,
        logical_block: 512,
        policy: "write-back+1".into(),
        medium,
        limit: None,
    };
    bench.lab.any_client().unwrap().create_disk(&wanted).map(drop)
}

/// The nodes' own reports, once they are as expected.
fn wait_nodes(bench: &Bench, wanted: impl Fn(&[NodeView]) -> bool) -> Vec<NodeView> {
    let client = bench.lab.any_client().unwrap();
    let deadline = weir_block::Nanos::now() + common::SOON;
    loop {
        let nodes = client.status().unwrap().nodes;
        if wanted(&nodes) {
            return nodes;
        }
        assert!(weir_block::Nanos::now() < deadline, "{nodes:#?}{}", bench.logs());
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_disk_on_a_medium_that_nobody_has_is_refused() {
    let _turn = alone();
    let bench = Bench::up(2, "write-back+1", |_| {});
    let error = create(&bench, "d2", Medium::Flash).unwrap_err();
    assert_eq!(error.kind, ApiErrorKind::Refused);
    assert!(error.message.contains("flash"), "{error:?}");
    assert_eq!(bench.disk().unwrap().medium, Medium::Ram);
    assert!(!bench.directory.path().join("pool/d2.raw").exists(), "nothing is left of it");
}

/// P10: a node keeps no more logs than it has room for, and is not asked to keep more.
#[test]
fn logs_beyond_a_nodes_room_go_elsewhere_and_then_nowhere() {
    let _turn = alone();
    // Two logs on each of three nodes.
    let bench = Bench::up(3, "write-back+1", |config| config.logs = Size(128 << 20));
    let client = bench.lab.any_client().unwrap();
    let nodes = wait_nodes(&bench, |nodes| nodes.iter().map(|node| node.load).sum::<u64>() == 2);
    for node in &nodes {
        let ram = node.media[0];
        assert_eq!(
            (ram.medium, ram.total_bytes, ram.log_bytes),
            (Medium::Ram, 128 << 20, 64 << 20),
            "{node:?}"
        );
        assert_eq!(ram.free_bytes, ram.total_bytes - node.load * ram.log_bytes, "{node:?}");
    }
    for (disk, node) in [("d2", "n2"), ("d3", "n3")] {
        create(&bench, disk, Medium::Ram).unwrap();
        client.export(disk, &Export { on: Some(node.into()), accept_loss: false }).unwrap();
        // The nodes' reports are seconds old. A node without room refuses, and the owner asks others.
        let deadline = weir_block::Nanos::now() + common::SOON;
        while bench.lab.client(node).unwrap().disk(disk).unwrap().effective != "write-back+1" {
            assert!(weir_block::Nanos::now() < deadline, "{:#?}{}", client.disks(), bench.logs());
            thread::sleep(Duration::from_millis(50));
        }
    }
    wait_nodes(&bench, |nodes| nodes.iter().all(|node| node.load == 2 && node.media[0].free_bytes == 0));
    create(&bench, "d4", Medium::Ram).unwrap();
    for node in bench.lab.nodes() {
        let error = node.client().export("d4", &Export::default()).unwrap_err();
        assert!(
            error.message.contains("no room") && error.message.contains("resources.logs"),
            "{}: {error:?}",
            node.name
        );
    }
    assert_eq!(client.disk("d4").unwrap().state, "closed", "nobody keeps a claim that is of no use");
    // Room comes back with the end of a disk.
    client.delete(DISK, &weir_node::api::Delete { force: true, ..Default::default() }).unwrap();
    wait_nodes(&bench, |nodes| nodes.iter().map(|node| node.load).sum::<u64>() == 4);
    let roomy = wait_nodes(&bench, |nodes| nodes.iter().any(|node| node.media[0].free_bytes > 0));
    let roomy = roomy.iter().find(|node| node.media[0].free_bytes > 0).unwrap().name.clone();
    client.export("d4", &Export { on: Some(roomy.clone()), accept_loss: false }).unwrap();
    assert_eq!(client.disk("d4").unwrap().owner, Some(roomy));
}

/// A lab whose nodes are in these fault domains, by number.
fn racks(policy: &str, domains: &[&str]) -> Bench {
    let named = domains.iter().map(|domain| (*domain).to_owned()).collect();
    Bench::up(domains.len(), policy, |config| config.fault_domains = named)
}

/// The result of a load: data loss, and errors that its guest saw (P1, P7, P9).
fn judge(bench: &Bench, load: VerifyingLoad, seed: u64) {
    let mut load = load;
    assert_eq!(load.progress().failed(), 0, "seed {seed}: a guest saw an error{}", bench.logs());
    let found = load.check_all().unwrap();
    let mismatches = found.mismatches + load.found().mismatches;
    assert_eq!(mismatches, 0, "seed {seed}: {:#?}{}", found.first, bench.logs());
    eprintln!(
        "{} writes, longest stall {:?}",
        load.progress().acknowledged(),
        load.progress().longest_stall()
    );
    bench.check_backing(&mut load.into_history());
}

/// Waits until the requested policy is in effect, and checks by ourselves where the replicas are.
fn wait_places(bench: &Bench, domains: &[&str], inside: usize, outside: usize) -> (String, Vec<String>) {
    let view = bench.wait_effective();
    let domain = |node: &str| domains[node[1..].parse::<usize>().unwrap() - 1];
    let owner = view.owner.unwrap();
    let beside = view.replicas.iter().filter(|replica| domain(replica) == domain(&owner)).count();
    assert_eq!((beside, view.replicas.len() - beside), (inside, outside), "{:?} {owner}", view.replicas);
    assert_eq!((usize::from(view.inside), usize::from(view.outside)), (inside, outside));
    (owner, view.replicas)
}

#[test]
fn a_lost_replica_is_replaced_by_one_of_its_own_kind() {
    let _turn = alone();
    let (seed, domains) = (seed(), ["a", "a", "b", "b", "a"]);
    let mut bench = racks("write-back+1in+1out", &domains);
    let (owner, replicas) = wait_places(&bench, &domains, 1, 1);
    let load = bench.load(new_history(seed), seed);
    let (load, ()) = during(load, Duration::from_secs(1), || {
        for lost in &replicas {
            bench.lab.kill(lost).unwrap();
            bench.wait(|view| !view.replicas.contains(lost));
            let (same, now) = wait_places(&bench, &domains, 1, 1);
            assert!(same == owner && !now.contains(lost), "{now:?}");
        }
    });
    judge(&bench, load, seed);
}

/// The new owner is in another fault domain, and what was outside is now beside it.
#[test]
fn after_a_takeover_the_set_is_rebuilt_around_the_new_owner() {
    let _turn = alone();
    let (seed, domains) = (seed(), ["a", "b", "b", "a", "a"]);
    let mut bench = racks("write-back+2out", &domains);
    let (owner, replicas) = wait_places(&bench, &domains, 0, 2);
    assert_eq!(
        (owner.as_str(), BTreeSet::from_iter(replicas)),
        ("n1", ["n2", "n3"].map(String::from).into())
    );
    let load = bench.load(new_history(seed), seed);
    let (load, ()) = during(load, Duration::from_secs(1), || {
        thread::sleep(Duration::from_millis(300));
        bench.lab.kill("n1").unwrap();
        bench.wait(|view| view.owner.as_deref() != Some("n1"));
        let (owner, replicas) = wait_places(&bench, &domains, 0, 2);
        assert!(owner == "n2" || owner == "n3", "{owner}");
        assert_eq!(BTreeSet::from_iter(replicas), ["n4", "n5"].map(String::from).into());
    });
    judge(&bench, load, seed);
}

/// After a move all copies are there, though some are in the wrong place: the guest goes on while they are exchanged.
#[test]
fn after_a_move_the_set_is_rebuilt_around_the_new_owner() {
    let _turn = alone();
    let (seed, domains) = (seed(), ["a", "a", "b", "b"]);
    let bench = racks("write-back+1in", &domains);
    wait_places(&bench, &domains, 1, 0);
    let load = bench.load(new_history(seed), seed);
    let (load, ()) = during(load, Duration::from_secs(1), || {
        thread::sleep(Duration::from_millis(300));
        for to in ["n3", "n2"] {
            bench.lab.any_client().unwrap().move_disk(DISK, to).unwrap();
            let (owner, _) = wait_places(&bench, &domains, 1, 0);
            assert_eq!(owner, to);
        }
    });
    judge(&bench, load, seed);
}

/// A strict policy that is not possible is write-through, and comes back by itself when it is.
#[test]
fn what_a_strict_policy_cannot_have_is_write_through_until_it_can() {
    let _turn = alone();
    let (seed, domains) = (seed(), ["a", "a", "b"]);
    let mut bench = racks("write-back+1in", &domains);
    let (_, replicas) = wait_places(&bench, &domains, 1, 0);
    assert_eq!(replicas, ["n2"]);
    let load = bench.load(new_history(seed), seed);
    let (load, ()) = during(load, Duration::from_secs(1), || {
        bench.lab.kill("n2").unwrap();
        let view = bench.wait(|view| view.effective == "write-through");
        assert_eq!((view.requested.as_str(), view.replicas.len()), ("write-back+1in", 0));
        bench.lab.start("n2").unwrap();
        wait_places(&bench, &domains, 1, 0);
        // On line, from a possible one to an impossible one, and back.
        let client = bench.lab.client("n3").unwrap();
        client.set_policy(DISK, "write-back+2out").unwrap();
        bench.wait(|view| view.effective == "write-through" && view.requested == "write-back+2out");
        client.set_policy(DISK, "write-back+1in+1out").unwrap();
        wait_places(&bench, &domains, 1, 1);
        client.set_policy(DISK, "write-back+1out").unwrap();
        wait_places(&bench, &domains, 0, 1);
    });
    judge(&bench, load, seed);
}

/// With too few nodes the log is drained and the storage answers; every node that comes back is used at once (P1, P9).
#[test]
fn replicas_lost_one_after_another_come_back_one_after_another() {
    let _turn = alone();
    let seed = seed();
    let mut bench = Bench::up(3, "write-back+2", |_| {});
    let owner = bench.owner();
    let others: Vec<String> =
        bench.lab.nodes().iter().map(|node| node.name.clone()).filter(|name| *name != owner).collect();
    let load = bench.load(new_history(seed), seed);
    let (load, ()) = during(load, Duration::from_secs(1), || {
        for lost in &others {
            bench.lab.kill(lost).unwrap();
            let view = bench.wait(|view| view.effective == "write-through" && view.replicas.is_empty());
            assert_eq!(view.requested, "write-back+2");
            assert!(view.reason.is_empty() || view.reason.contains("not enough"), "{}", view.reason);
        }
        for node in &others {
            bench.lab.start(node).unwrap();
        }
        assert_eq!(bench.wait_effective().replicas.len(), 2);
    });
    assert_eq!(bench.owner(), owner);
    judge(&bench, load, seed);
}
