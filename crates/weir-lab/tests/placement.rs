//! Where write logs go: media, room, fault domains.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Bench, DISK, alone};
use weir_node::api::{ApiErrorKind, CreateDisk, Export, Medium, NodeView};
use weir_node::units::Size;

fn create(bench: &Bench, name: &str, medium: Medium) -> Result<(), weir_node::api::ApiError> {
    let wanted = CreateDisk {
        name: name.into(),
        volume: "pool".into(),
        size: 1 << 20,
        logical_block: 512,
        policy: "write-back+1".into(),
        medium,
    };
    bench.lab.any_client().unwrap().create_disk(&wanted).map(drop)
}

/// What the nodes tell of themselves, once they tell what is expected of them.
fn wait_nodes(bench: &Bench, wanted: impl Fn(&[NodeView]) -> bool) -> Vec<NodeView> {
    let client = bench.lab.any_client().unwrap();
    let deadline = weir_block::Nanos::now() + common::SOON;
    loop {
        let nodes = client.status().unwrap().nodes;
        if wanted(&nodes) {
            return nodes;
        }
        assert!(weir_block::Nanos::now() < deadline, "{nodes:#?}{}", bench.logs());
        std::thread::sleep(std::time::Duration::from_millis(50));
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

/// P10: a node keeps no more logs than it has room for, and nobody asks it to keep more.
#[test]
fn logs_beyond_a_nodes_room_go_elsewhere_and_then_nowhere() {
    let _turn = alone();
    // Two logs on each of three nodes.
    let bench = Bench::up(3, "write-back+1", |config| config.logs = Size(128 << 20));
    let client = bench.lab.any_client().unwrap();
    let nodes = wait_nodes(&bench, |nodes| nodes.iter().map(|node| node.load).sum::<u64>() == 2);
    for node in &nodes {
        let ram = node.media[0];
        assert_eq!((ram.medium, ram.bytes, ram.log), (Medium::Ram, 128 << 20, 64 << 20), "{node:?}");
        assert_eq!(ram.free, ram.bytes - node.load * ram.log, "{node:?}");
    }
    for (disk, node) in [("d2", "n2"), ("d3", "n3")] {
        create(&bench, disk, Medium::Ram).unwrap();
        client.export(disk, &Export { on: Some(node.into()), accept_loss: false }).unwrap();
        // What nodes tell is seconds old. Who is asked and has no room says so, and others are asked.
        let deadline = weir_block::Nanos::now() + common::SOON;
        while bench.lab.client(node).unwrap().disk(disk).unwrap().effective != "write-back+1" {
            assert!(weir_block::Nanos::now() < deadline, "{:#?}{}", client.disks(), bench.logs());
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
    wait_nodes(&bench, |nodes| nodes.iter().all(|node| node.load == 2 && node.media[0].free == 0));
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
    client.delete(DISK, &weir_node::api::Delete { force: true, dry_run: false }).unwrap();
    wait_nodes(&bench, |nodes| nodes.iter().map(|node| node.load).sum::<u64>() == 4);
    let roomy = wait_nodes(&bench, |nodes| nodes.iter().any(|node| node.media[0].free > 0));
    let roomy = roomy.iter().find(|node| node.media[0].free > 0).unwrap().name.clone();
    client.export("d4", &Export { on: Some(roomy.clone()), accept_loss: false }).unwrap();
    assert_eq!(client.disk("d4").unwrap().owner, Some(roomy));
}
