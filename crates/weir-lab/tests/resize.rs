//! Disks of a volume on a LUN grow while they are used: their owners and the coordinator of the volume agree on it, and snapshots keep the
//! size that they have.
#![allow(clippy::unwrap_used)]

mod common;

use std::thread;
use std::time::Duration;

use common::lun::LunBench;
use common::{DISK, SIZE, alone, during, new_history, seed};
use weir_lab::Lab;
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{ApiErrorKind, CloneDisk, CreateDisk, Export, Medium, RollBack};

const MIB: u64 = 1 << 20;

fn connect(lab: &Lab, disk: &str) -> NbdClient {
    let view = lab.any_client().unwrap().export(disk, &Export::default()).unwrap();
    let uri: Uri = view.uris.first().unwrap_or_else(|| panic!("{view:#?}")).parse().unwrap();
    NbdClient::connect(&uri).unwrap()
}

/// A new client sees `size` bytes, of which those from `zeroes` on read as zeroes, and uses them to the last.
fn is_used_to_its_end(lab: &Lab, disk: &str, zeroes: u64, size: u64) {
    let mut guest = connect(lab, disk);
    assert_eq!(guest.export().size, size, "{disk}");
    let mut data = vec![1; MIB as usize];
    for at in (zeroes..size).step_by(MIB as usize) {
        guest.read(at, &mut data).unwrap();
        assert!(data.iter().all(|byte| *byte == 0), "{disk} at {at}");
    }
    let new = vec![0xa5; MIB as usize];
    for at in [zeroes, size - MIB] {
        guest.write(at, &new, true).unwrap();
        guest.read(at, &mut data).unwrap();
        assert_eq!(data, new, "{disk} at {at}");
    }
}

fn grows_under_load(format: &str, policy: &str) {
    let _turn = alone();
    let seed = seed();
    let mut pool = LunBench::up(3, format, policy, |_| {});
    let coordinator = pool.coordinator();
    let other = pool.bench.lab.nodes().iter().map(|node| node.name.clone()).find(|name| *name != coordinator);
    let client = pool.bench.lab.any_client().unwrap();
    client.move_disk(DISK, &other.unwrap()).unwrap();
    pool.bench.wait_effective();
    let (mut load, ()) = during(pool.bench.load(new_history(seed), seed), Duration::from_secs(1), || {
        for mebibytes in [33, 48, 64] {
            thread::sleep(Duration::from_millis(200));
            let view = client.resize(DISK, mebibytes * MIB).unwrap_or_else(|error| {
                panic!("{error:?}{}", pool.bench.logs());
            });
            assert_eq!(view.size, mebibytes * MIB);
        }
    });
    pool.bench.judge(&mut load, seed);
    is_used_to_its_end(&pool.bench.lab, DISK, SIZE, 2 * SIZE);
    let smaller = client.resize(DISK, SIZE).unwrap_err();
    assert_eq!(smaller.kind, ApiErrorKind::Refused, "{smaller:?}");
    // What the LUN has is the truth: another node serves it, and another one coordinates it.
    client.move_disk(DISK, &coordinator).unwrap();
    pool.crash(&coordinator);
    let next = pool.coordinator();
    pool.bench.lab.client(&next).unwrap().export(DISK, &Export::default()).unwrap();
    pool.bench.wait(|view| view.state == "serving" && view.owner.as_ref() != Some(&coordinator));
    let mut guest = connect(&pool.bench.lab, DISK);
    assert_eq!(guest.export().size, 2 * SIZE);
    let mut data = vec![0; MIB as usize];
    for at in [SIZE, 2 * SIZE - MIB] {
        guest.read(at, &mut data).unwrap();
        assert!(data.iter().all(|byte| *byte == 0xa5), "at {at}");
    }
    drop(guest);
    pool.bench.judge(&mut load, seed);
}

#[test]
fn a_disk_grows_under_load_on_xfs() {
    grows_under_load("xfs", "write-back+1");
}

#[test]
fn a_disk_grows_under_load_on_ext4() {
    grows_under_load("ext4", "write-through");
}

/// A disk that shares blocks with its snapshot and its clone grows alone. A closed one grows, too.
#[test]
fn snapshots_and_clones_keep_their_size() {
    let _turn = alone();
    let pool = LunBench::up(2, "xfs", "write-back+0", |_| {});
    let (lab, client) = (&pool.bench.lab, pool.bench.lab.any_client().unwrap());
    connect(lab, DISK).write(0, &vec![7; MIB as usize], true).unwrap();
    client.create_snapshot(DISK, "small", &[]).unwrap();
    client.resize(DISK, 2 * SIZE).unwrap();
    is_used_to_its_end(lab, DISK, SIZE, 2 * SIZE);
    client.create_snapshot(DISK, "large", &[]).unwrap();
    let sizes: Vec<u64> = client.snapshots(DISK).unwrap().iter().map(|one| one.size).collect();
    assert_eq!(sizes, [SIZE, 2 * SIZE]);
    let clone = CloneDisk {
        name: "c".into(),
        snapshot: Some("small".into()),
        policy: "write-through".into(),
        medium: Medium::Ram,
        limit: None,
    };
    assert_eq!(client.clone_disk(DISK, &clone).unwrap().size, SIZE);
    client.resize("c", SIZE + MIB).unwrap();
    is_used_to_its_end(lab, "c", SIZE, SIZE + MIB);
    let mut data = vec![0; MIB as usize];
    connect(lab, "c").read(0, &mut data).unwrap();
    assert!(data.iter().all(|byte| *byte == 7));
    // What the disk has grown by since the snapshot is gone with the rollback, and its size is not.
    let back = RollBack { snapshot: "small".into(), discard_current: true, ..RollBack::default() };
    let rolled_back = std::iter::repeat_with(|| client.roll_back(DISK, &back)).take(200).find_map(|done| {
        thread::sleep(Duration::from_millis(20));
        done.ok()
    });
    assert!(rolled_back.unwrap().was_open);
    client.resize(DISK, 2 * SIZE + MIB).unwrap();
    is_used_to_its_end(lab, DISK, SIZE, 2 * SIZE + MIB);
    connect(lab, DISK).read(0, &mut data).unwrap();
    assert!(data.iter().all(|byte| *byte == 7));

    let closed = CreateDisk {
        name: "closed".into(),
        volume: "pool".into(),
        size: MIB,
        logical_block: 4096,
        policy: "write-back+0".into(),
        medium: Medium::Ram,
        limit: None,
    };
    client.create_disk(&closed).unwrap();
    for node in lab.nodes() {
        let view = node.client().resize("closed", client.disk("closed").unwrap().size + MIB).unwrap();
        assert!(view.owner.is_none());
    }
    is_used_to_its_end(lab, "closed", MIB, 3 * MIB);
}
