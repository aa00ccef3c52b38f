//! Disks in many extents: what snapshots and clones of them cost, and their copies in few extents.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::hash::{DefaultHasher, Hasher};
use std::time::Duration;

use common::lun::LunBench;
use common::throttle::Throttle;
use common::{SOON, alone};
use support::await_some;
use weir_block::Nanos;
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{
    ApiError, ApiErrorKind, CloneDisk, CompactionView, CreateDisk, Export, LookAtLayout, Medium, MoveVolume,
};
use weir_node::client::Client;

const DISK: &str = "big";
const SIZE: u64 = 400 << 20;
/// The disk twice, and what the filesystem needs. Not three times.
const LUN: u64 = 1216 << 20;
/// Bytes that one write after a snapshot gives an extent of their own.
const PIECE: u64 = 64 << 10;
const CHUNK: usize = 1 << 20;
/// Bytes in a second that a copy takes that is to be interrupted.
const SLOW: u64 = 32 << 20;

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

/// Writes of the coordinator's process are slow from here on, so that a copy is under way when something happens to it. `None` where the
/// kernel has no way for that, and a copy may be done before.
fn slow_down(pool: &LunBench, node: &str) -> Option<Throttle> {
    let process = pool.bench.lab.process(node).unwrap().unwrap();
    Throttle::new(pool.luns.path(node[1..].parse().unwrap()), SLOW, [process.pid])
}

fn interruptions(client: &Client) -> Vec<String> {
    let events = client.events().unwrap().into_iter();
    events.filter(|event| event.kind == "compaction-interrupted").map(|event| event.text).collect()
}

/// The coordination moves, or its node is killed: the disk is what it was, one event says so, and nothing is left of the copy.
fn interrupted_copies_are_dropped(pool: &mut LunBench, before: u64) {
    for (number, killed) in [(1, false), (2, true)] {
        let coordinator = pool.coordinator();
        let nodes = ["n1", "n2", "n3"];
        let next = nodes.into_iter().find(|node| *node != coordinator).unwrap();
        let client = pool.bench.lab.client(next).unwrap().patience(Duration::from_secs(60));
        let slow = slow_down(pool, &coordinator);
        compact(&client, false).unwrap();
        if slow.is_some() {
            // This node hears of the disk's new owner a moment after the copy has begun.
            let compacting = || client.disk(DISK).ok().filter(|view| view.state == "compacting");
            let view =
                await_some(SOON, compacting, || format!("{:?}{}", client.disk(DISK), pool.bench.logs()));
            assert!(view.reason.ends_with("% copied"), "{view:?}");
            let health = client.status().unwrap().health;
            assert!(health.reasons.iter().all(|reason| !reason.contains(DISK)), "{health:?}");
            let refused = client.export(DISK, &Export::default()).unwrap_err();
            let says = ["is being compacted", "owned"].iter().any(|words| refused.message.contains(words));
            assert!(says, "{refused:?}");
        }
        let is_under_way = client.compaction(DISK).is_ok_and(|view| view.state == "copying");
        if killed {
            pool.bench.lab.kill(&coordinator).unwrap();
            drop(slow);
        } else {
            drop(slow);
            client.move_volume("pool", &MoveVolume { to: next.into(), dry_run: false }).unwrap();
        }
        assert_ne!(pool.coordinator(), coordinator);
        if is_under_way {
            let stopped = await_compacted(pool, &client).unwrap_err();
            assert!(
                matches!(stopped.kind, ApiErrorKind::NotFound | ApiErrorKind::Unavailable),
                "{stopped:?}"
            );
            let told = || (interruptions(&client).len() >= number).then_some(());
            await_some(SOON, told, || format!("{:?}{}", interruptions(&client), pool.bench.logs()));
        } else {
            eprintln!("the copy was done before it could be interrupted: this kernel does not slow it down");
        }
        if killed {
            pool.bench.lab.start(&coordinator).unwrap();
        }
        assert_eq!(hash(&client, DISK), before, "{}", pool.bench.logs());
        let texts = interruptions(&client);
        assert!(texts.len() <= number && texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        let usage = client.volume_usage("pool").unwrap();
        assert!(usage.items.iter().all(|item| item.kind != "unfinished"), "{usage:?}");
    }
}

#[test]
fn a_disk_in_many_extents_says_what_it_costs_and_is_copied_to_few() {
    let _turn = alone();
    let mut pool = LunBench::up_of(LUN, 3, "xfs", "write-through", |_| {});
    let coordinator = pool.coordinator();
    let other = ["n1", "n2", "n3"].into_iter().find(|node| *node != coordinator).unwrap();
    let client = pool.bench.lab.client(other).unwrap().patience(Duration::from_secs(60));
    shatter(&client);
    let before = hash(&client, DISK);
    let layout = client.layout(DISK, &LookAtLayout::default()).unwrap();
    let (extents, takes) = (layout.extents.unwrap(), layout.share_seconds.unwrap());
    assert!(extents > 5_000 && layout.is_many, "{layout:?}");
    assert!(
        layout.advice.contains("`weir disk compact big`") && layout.advice.contains("extents"),
        "{layout:?}"
    );
    let of_snapshot = |name: &str| LookAtLayout { snapshot: Some(name.to_owned()), before: None };
    let snapshot = client.layout(DISK, &of_snapshot("s")).unwrap();
    assert!(snapshot.is_many && snapshot.advice.contains("made after"), "{snapshot:?}");
    assert_eq!(client.layout(DISK, &of_snapshot("none")).unwrap_err().kind, ApiErrorKind::NotFound);
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

    interrupted_copies_are_dropped(&mut pool, before);

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
    let layout = client.layout(DISK, &LookAtLayout::default()).unwrap();
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
