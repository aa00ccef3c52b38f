//! Disks in many extents: what snapshots and clones of them cost, and their copies in few extents.
#![allow(clippy::unwrap_used)]

mod common;

use std::hash::{DefaultHasher, Hasher};
use std::time::Duration;

use common::lun::LunBench;
use common::{SOON, alone};
use weir_block::Nanos;
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{
    ApiError, ApiErrorKind, CloneDisk, CompactionView, CreateDisk, Export, Medium, MoveVolume,
};
use weir_node::client::Client;

const DISK: &str = "big";
const SIZE: u64 = 400 << 20;
/// The disk twice, and what the filesystem needs. Not three times.
const LUN: u64 = 1216 << 20;
/// Bytes that one write after a snapshot gives an extent of their own.
const PIECE: u64 = 64 << 10;
const CHUNK: usize = 1 << 20;

fn connect(client: &Client, disk: &str) -> NbdClient {
    // Whoever had it a moment ago may still give it back.
    let deadline = Nanos::now() + SOON;
    let view = loop {
        match client.export(disk, &Export::default()) {
            Err(error) if Nanos::now() < deadline => drop(error),
            opened => break opened.unwrap(),
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let uri: Uri = view.uris[0].parse().unwrap();
    NbdClient::connect(&uri).unwrap()
}

fn hash(client: &Client, disk: &str) -> u64 {
    let (mut guest, mut hasher) = (connect(client, disk), DefaultHasher::new());
    let mut data = vec![0; CHUNK];
    for at in (0..SIZE).step_by(CHUNK) {
        guest.read(at, &mut data).unwrap();
        hasher.write(&data);
    }
    hasher.finish()
}

/// A client that has just gone counts for a moment.
fn compact(client: &Client, dry_run: bool) -> Result<CompactionView, ApiError> {
    let deadline = Nanos::now() + SOON;
    loop {
        match client.compact(DISK, dry_run) {
            Err(error) if error.message.contains("connected to it") && Nanos::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            done => return done,
        }
    }
}

fn await_compacted(pool: &LunBench, client: &Client) -> Result<CompactionView, ApiError> {
    let deadline = Nanos::now() + 4 * SOON;
    loop {
        let now = client.compaction(DISK);
        if !now.as_ref().is_ok_and(|now| now.state == "copying") {
            return now;
        }
        assert!(Nanos::now() < deadline, "{now:?}{}", pool.bench.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Every other piece is written after a snapshot, so that no two neighbours are one extent.
fn shatter(client: &Client) {
    let wanted = CreateDisk {
        name: DISK.into(),
        volume: "pool".into(),
        size: SIZE,
        logical_block: 4096,
        policy: "write-through".into(),
        medium: Medium::Ram,
        limit: None,
    };
    client.create_disk(&wanted).unwrap();
    let mut guest = connect(client, DISK);
    let mut rng = fastrand::Rng::with_seed(1);
    let mut data = vec![0; CHUNK];
    for at in (0..SIZE).step_by(CHUNK) {
        rng.fill(&mut data);
        guest.write(at, &data, false).unwrap();
    }
    client.create_snapshot(DISK, "s", &[]).unwrap();
    for at in (0..SIZE).step_by(2 * PIECE as usize) {
        rng.fill(&mut data[..4096]);
        guest.write(at, &data[..4096], false).unwrap();
    }
}

#[test]
fn a_disk_in_many_extents_says_what_it_costs_and_is_copied_to_few() {
    let _turn = alone();
    let pool = LunBench::up_of(LUN, 3, "xfs", "write-through", |_| {});
    let coordinator = pool.coordinator();
    let other = ["n1", "n2", "n3"].into_iter().find(|node| *node != coordinator).unwrap();
    let client = pool.bench.lab.client(other).unwrap().patience(Duration::from_secs(60));
    shatter(&client);
    let before = hash(&client, DISK);
    let layout = client.layout(DISK, None).unwrap();
    let (extents, takes) = (layout.extents.unwrap(), layout.share_seconds.unwrap());
    assert!(extents > 5_000 && layout.is_many, "{layout:?}");
    assert!(
        layout.advice.contains("`weir disk compact big`") && layout.advice.contains("extents"),
        "{layout:?}"
    );
    let of_snapshot = client.layout(DISK, Some("s")).unwrap();
    assert!(of_snapshot.is_many && of_snapshot.advice.contains("made after"), "{of_snapshot:?}");
    assert_eq!(client.layout(DISK, Some("none")).unwrap_err().kind, ApiErrorKind::NotFound);
    let clone = |name: &str, snapshot: Option<&str>| {
        let snapshot = snapshot.map(str::to_owned);
        let wanted = CloneDisk {
            name: name.into(),
            snapshot,
            policy: "write-through".into(),
            medium: Medium::Ram,
            limit: None,
        };
        let began = Nanos::now();
        client.clone_disk(DISK, &wanted).unwrap();
        Nanos::now() - began
    };
    let whole = clone("before", None);
    eprintln!(
        "{extents} extents: sharing is estimated to take {takes:.3} s; a clone took {whole:?} altogether"
    );

    // Under a client, it is not touched.
    let guest = connect(&client, DISK);
    let refused = client.compact(DISK, false).unwrap_err();
    assert!(
        refused.kind == ApiErrorKind::Refused && refused.message.contains("connected to it"),
        "{refused:?}"
    );
    drop(guest);
    let plan = compact(&client, true).unwrap();
    assert_eq!(
        (plan.state.as_str(), plan.extents_after, plan.bytes, plan.was_open),
        ("planned", None, SIZE, true)
    );
    assert!(plan.shared >= SIZE / 2, "{plan:?}");

    // Another coordinator: the copy ends, and the disk is what it was.
    compact(&client, false).unwrap();
    let moved = client.move_volume("pool", &MoveVolume { to: other.into(), dry_run: false });
    eprintln!("moved under a copy in {:.1?} s", moved.unwrap().seconds.unwrap());
    let stopped = await_compacted(&pool, &client).unwrap_err();
    assert!(stopped.message.contains("nothing is known here of a compaction"), "{stopped:?}");
    let told = client.events().unwrap();
    let told = told.iter().find(|event| event.kind == "compaction-failed").expect("an event");
    assert!(
        told.text.contains("was stopped: this node stops, or does not coordinate its volume any more"),
        "{told:?}"
    );
    assert_eq!(hash(&client, DISK), before);

    let began = Nanos::now();
    let begun = compact(&client, false).unwrap();
    assert!(begun.was_open && begun.state == "copying", "{begun:?}");
    if client.compaction(DISK).unwrap().state == "copying" {
        let refused = client.export(DISK, &Export::default()).unwrap_err();
        assert!(
            refused.message.contains("is being compacted") || refused.message.contains("owned"),
            "{refused:?}"
        );
    }
    let done =
        await_compacted(&pool, &client).unwrap_or_else(|error| panic!("{error:?}{}", pool.bench.logs()));
    eprintln!("{extents} extents to {:?} in {:?}", done.extents_after, Nanos::now() - began);
    assert!(done.extents_after.is_some_and(|after| after < 50) && done.copied == SIZE, "{done:?}");
    assert!(client.disk(DISK).unwrap().owner.is_none(), "it is closed");
    assert_eq!(hash(&client, DISK), before);
    let layout = client.layout(DISK, None).unwrap();
    assert!(layout.advice.is_empty() && layout.extents == done.extents_after, "{layout:?}");
    eprintln!("a clone afterwards took {:?} altogether", clone("after", None));
    let told = client.events().unwrap();
    assert!(told.iter().any(|event| event.kind == "disk-compacted" && event.subject == DISK), "{told:?}");
    // What shares blocks with it, or did, is what it was, on every node.
    assert_eq!((hash(&client, "before"), hash(&client, "after")), (before, before));
    for node in ["n1", "n2", "n3"] {
        client.move_disk(DISK, node).unwrap();
        assert_eq!(hash(&client, DISK), before, "on {node}");
    }

    // The snapshot and the former content are there, so a third copy does not fit.
    let refused = compact(&client, false).unwrap_err();
    assert!(refused.kind == ApiErrorKind::Refused && refused.message.contains("a copy needs"), "{refused:?}");
    assert!(client.disk(DISK).unwrap().owner.is_some(), "it is not closed for nothing");
    let leftover = client.volume_usage("pool").unwrap();
    assert!(leftover.items.iter().all(|item| item.kind != "unfinished"), "{leftover:?}");
}
