//! What `weir volume du` says of disks, snapshots and clones is what the filesystem frees when they go.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::thread;
use std::time::Duration;

use common::lun::LunBench;
use common::{DISK, SOON, alone};
use support::await_some;
use support::filesystem::SmallFilesystem;
use weir_block::Nanos;
use weir_lab::{Lab, LabConfig};
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{CloneDisk, CreateDisk, CreateVolume, Delete, Export, Medium, UsageItem, VolumeUsage};

const MIB: u64 = 1 << 20;
/// More than the filesystem's own notes about a file take, and less than what is written.
const LITTLE: u64 = MIB / 2;

fn connect(lab: &Lab, disk: &str) -> NbdClient {
    let view = lab.any_client().unwrap().export(disk, &Export::default()).unwrap();
    let uri: Uri = view.uris.first().unwrap().parse().unwrap();
    NbdClient::connect(&uri).unwrap()
}

fn fill(lab: &Lab, disk: &str, mebibytes: std::ops::Range<u64>) {
    let mut guest = connect(lab, disk);
    for at in mebibytes {
        guest.write(at * MIB, &vec![at as u8 + 1; MIB as usize], false).unwrap();
    }
    guest.flush().unwrap();
}

/// Asks each node: all say the same.
fn usage(lab: &Lab) -> VolumeUsage {
    let all: Vec<VolumeUsage> =
        lab.nodes().iter().map(|node| node.client().volume_usage("pool").unwrap()).collect();
    let names = |usage: &VolumeUsage| usage.items.iter().map(|one| one.name.clone()).collect::<Vec<_>>();
    assert!(all.iter().all(|one| names(one) == names(&all[0])), "{all:#?}");
    let usage = all.into_iter().next().unwrap();
    let exclusive: u64 = usage.items.iter().map(|one| one.exclusive.unwrap()).sum();
    assert_eq!(usage.exclusive, exclusive);
    assert_eq!(usage.exclusive + usage.shared.unwrap() + usage.other.unwrap(), usage.used, "{usage:#?}");
    assert!(usage.used <= usage.size && usage.available <= usage.size - usage.used, "{usage:#?}");
    usage
}

fn item(usage: &VolumeUsage, name: &str) -> UsageItem {
    usage.items.iter().find(|one| one.name == name).unwrap_or_else(|| panic!("{name}: {usage:#?}")).clone()
}

fn is_about(bytes: Option<u64>, mebibytes: u64) -> bool {
    bytes.is_some_and(|bytes| bytes.abs_diff(mebibytes * MIB) <= LITTLE)
}

/// The usage, when `wanted` is true of it. A write log is destaged, and XFS frees what was deleted, a little later.
fn usage_when(lab: &Lab, wanted: impl Fn(&VolumeUsage) -> bool) -> VolumeUsage {
    let deadline = Nanos::now() + SOON;
    loop {
        let usage = usage(lab);
        if wanted(&usage) {
            return usage;
        }
        assert!(Nanos::now() < deadline, "{usage:#?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// `written`: mebibytes that the disk has in the end.
fn counts_what_is_shared(lab: &Lab, disk: &str, written: u64) {
    let client = lab.any_client().unwrap();
    let before = usage_when(lab, |usage| item(usage, disk).exclusive.unwrap() >= written * MIB - LITTLE);
    let alone = item(&before, disk);
    assert_eq!((alone.kind.as_str(), alone.shared), ("disk", Some(0)));
    assert!(alone.allocated.abs_diff(alone.exclusive.unwrap()) <= LITTLE, "{alone:?}");

    client.create_snapshot(disk, "s", &[]).unwrap();
    let clone = CloneDisk {
        name: "clone".into(),
        snapshot: Some("s".into()),
        policy: "write-through".into(),
        medium: Medium::Ram,
        limit: None,
    };
    client.clone_disk(disk, &clone).unwrap();
    let all = usage(lab);
    let snapshot = format!("{disk}@s");
    assert_eq!(item(&all, &snapshot).kind, "snapshot");
    for name in [disk, &snapshot, "clone"] {
        let one = item(&all, name);
        assert!(one.shared.unwrap() >= written * MIB - LITTLE, "{one:?}");
        assert!(is_about(one.exclusive, 0), "{one:?}");
    }
    // Three files have them, and they count once.
    assert!(all.shared.unwrap() <= item(&all, disk).shared.unwrap() + LITTLE, "{all:#?}");
    assert!(all.used.abs_diff(before.used) <= 2 * LITTLE, "{before:#?}{all:#?}");

    // 4 MiB of the clone are its own now, and nobody's else.
    fill(lab, "clone", 0..4);
    let all = usage_when(lab, |usage| is_about(item(usage, "clone").exclusive, 4));
    assert!(
        is_about(item(&all, disk).exclusive, 0) && is_about(item(&all, &snapshot).exclusive, 0),
        "{all:#?}"
    );

    // Its exclusive bytes are what its deletion frees.
    let owned = item(&all, "clone").exclusive.unwrap();
    client.delete("clone", &Delete { force: true, ..Delete::default() }).unwrap();
    usage_when(lab, |now| (now.available - all.available.min(now.available)).abs_diff(owned) <= LITTLE);
    client.delete_snapshot(disk, "s", false).unwrap();
    // Its keeper says so, for as long as that may make a difference.
    let said = || -> Vec<u64> {
        let usages = lab.nodes().iter().map(|node| node.client().volume_usage("pool").unwrap());
        usages.filter_map(|usage| usage.deleted_seconds_ago).collect()
    };
    let young = said();
    assert!(!young.is_empty() && young.iter().all(|seconds| *seconds < 10), "{young:?}");
    let last = usage_when(lab, |usage| usage.shared == Some(0));
    assert_eq!(item(&last, disk).shared, Some(0));
    await_some(SOON, || said().is_empty().then_some(()), || "the deletion does not get old".to_owned());
    assert!(last.used.abs_diff(before.used) <= 2 * LITTLE, "{before:#?}{last:#?}");
}

#[test]
fn on_a_lun() {
    let _turn = alone();
    let pool = LunBench::up(2, "xfs", "write-through", |_| {});
    let lab = &pool.bench.lab;
    fill(lab, DISK, 0..16);
    // Space is allocated ahead of writes: all of a small disk.
    counts_what_is_shared(lab, DISK, 32);
    let usage = usage(lab);
    assert!(usage.filesystem_is_its_own, "{usage:#?}");
    assert_eq!(usage.items.len(), 1);
}

#[test]
fn on_a_lun_without_reflinks() {
    let _turn = alone();
    let pool = LunBench::up(2, "ext4", "write-through", |_| {});
    fill(&pool.bench.lab, DISK, 0..16);
    let usage = usage_when(&pool.bench.lab, |usage| item(usage, DISK).exclusive.unwrap() >= 16 * MIB);
    assert_eq!(usage.shared, Some(0));
}

#[test]
fn in_a_directory() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount_xfs(512 << 20);
    let directory = tempfile::tempdir().unwrap();
    let mut config = LabConfig::new(directory.path().join("lab"), common::program());
    config.nodes = 2;
    let lab = Lab::up(&config).unwrap();
    let client = lab.any_client().unwrap();
    client.create_volume(&CreateVolume::dir("pool", filesystem.path())).unwrap();
    let disk = CreateDisk {
        name: "d".into(),
        volume: "pool".into(),
        size: 32 * MIB,
        logical_block: 4096,
        policy: "write-through".into(),
        medium: Medium::Ram,
        limit: None,
    };
    client.create_disk(&disk).unwrap();
    client.export("d", &Export::default()).unwrap();
    fill(&lab, "d", 0..16);
    // Files of others are none of its items, and count.
    std::fs::write(filesystem.path().join("other"), vec![1; 8 << 20]).unwrap();
    counts_what_is_shared(&lab, "d", 16);
    let usage = usage(&lab);
    assert!(!usage.filesystem_is_its_own && usage.other.unwrap() >= 8 * MIB, "{usage:#?}");
    assert_eq!(usage.items.len(), 1);
    drop(lab);
}
