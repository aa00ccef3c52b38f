//! The coordination of a volume on a LUN moves: by an operator's command, and off a node that is drained.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::lun::LunBench;
use common::{DISK, SOON, alone, during, new_history, seed};
use weir_block::Nanos;
use weir_node::api::{ApiError, ApiErrorKind, CreateVolume, DrainNode, MoveVolume, MovedVolume};

const NODES: [&str; 3] = ["n1", "n2", "n3"];

fn move_volume(pool: &LunBench, to: &str, dry_run: bool) -> Result<MovedVolume, ApiError> {
    let client = pool.bench.lab.client("n1").unwrap().patience(Duration::from_secs(60));
    client.move_volume("pool", &MoveVolume { to: to.into(), dry_run })
}

fn put_disk(pool: &LunBench, node: &str) {
    if pool.bench.owner() != node {
        pool.bench.lab.any_client().unwrap().move_disk(DISK, node).unwrap();
    }
    pool.bench.wait_effective();
}

fn another(than: &[&str]) -> &'static str {
    NODES.into_iter().find(|node| !than.contains(node)).unwrap()
}

/// Waits until the load needs no new blocks any more: nothing of its I/O goes through the coordinator's filesystem.
fn await_all_blocks(pool: &LunBench, owner: &str) {
    let client = pool.bench.lab.client(owner).unwrap();
    let redirected = || client.disk(DISK).ok()?.detail?.route.map(|route| route.file);
    let deadline = Nanos::now() + SOON;
    let mut last = None;
    loop {
        let now = redirected();
        if now.is_some() && now == last {
            return;
        }
        assert!(Nanos::now() < deadline, "{last:?} {now:?}{}", pool.bench.logs());
        last = now;
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Moves the coordination. Nobody is fenced in a planned move, and nobody says so meanwhile.
fn move_without_a_word_of_fencing(pool: &LunBench, to: &str) -> MovedVolume {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !is_over.load(Ordering::Relaxed) {
                for node in NODES {
                    let lun = pool.lun(node);
                    seen.insert(lun.phase);
                    seen.insert(lun.trouble);
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            seen
        });
        let moved = move_volume(pool, to, false);
        is_over.store(true, Ordering::Relaxed);
        let seen = watch.join().unwrap();
        assert!(seen.iter().all(|text| !text.contains("fencing")), "{seen:?}");
        moved.unwrap()
    })
}

/// Direct I/O goes on; redirected requests wait for the new coordinator. Nobody is fenced.
#[test]
fn the_coordination_moves_by_command_under_load() {
    for (format, redirected) in [("xfs", false), ("ext4", true)] {
        let _turn = alone();
        let seed = seed();
        let pool = LunBench::up(3, format, "write-through", |_| {});
        let first = pool.coordinator();
        let owner = another(&[&first]);
        put_disk(&pool, owner);
        let client = pool.bench.lab.client(owner).unwrap();
        // Nobody has to do anything about such a move, and the events of its disks say so.
        let routes_with = |reason: &str| {
            let events = client.events().unwrap().into_iter();
            events.filter(|event| event.kind == "route" && event.text.contains(reason)).count()
        };
        let load = pool.bench.load(new_history(seed), seed);
        let progress = load.progress();
        let (mut load, ()) = during(load, Duration::from_secs(1), || {
            await_all_blocks(&pool, owner);
            client.set_redirected("pool", redirected).unwrap();
            std::thread::sleep(Duration::from_millis(500));
            progress.take_longest_stall();
            let moving = routes_with("coordinator-moving");
            // To a node without the disk, to its owner, and back.
            for to in [another(&[&first, owner]), owner, &first] {
                let epoch = pool.lun(owner).epoch;
                let moved = move_without_a_word_of_fencing(&pool, to);
                std::thread::sleep(Duration::from_millis(500));
                let stall = progress.take_longest_stall();
                eprintln!(
                    "{format}, redirected {redirected}: to {to} in {:.1?} s, longest stall {stall:?}",
                    moved.seconds.unwrap()
                );
                assert_eq!((moved.to.as_str(), moved.done, moved.epoch), (to, true, epoch + 1));
                assert_eq!(pool.coordinator(), to);
                let most = if redirected { Duration::from_secs(15) } else { Duration::from_secs(2) };
                assert!(stall < most, "{stall:?}{}", pool.bench.logs());
            }
            assert!(routes_with("coordinator-handover (benign)") > 0, "{:#?}", client.events());
            assert_eq!(routes_with("coordinator-moving"), moving, "{:#?}", client.events());
        });
        pool.bench.judge(&mut load, seed);
        assert_eq!(pool.luns.fenced(), [""; 0]);
        let events = client.events().unwrap();
        let told =
            events.iter().filter(|event| event.kind == "coordination-moves" && event.subject == "pool");
        assert_eq!(told.count(), 3);
    }
}

#[test]
fn a_move_that_cannot_succeed_is_refused_with_the_reason() {
    let _turn = alone();
    // The third node has no path to the LUN.
    let pool = LunBench::up(3, "xfs", "write-through", |config| config.luns[2] = "/dev/null".into());
    let first = pool.coordinator();
    let second = another(&[&first, "n3"]);
    let client = pool.bench.lab.client(&first).unwrap();
    let refused = |to: &str, kind: ApiErrorKind, words: &str| {
        for dry_run in [true, false] {
            let error = move_volume(&pool, to, dry_run).unwrap_err();
            assert!(error.kind == kind && error.message.contains(words), "{error:?}");
        }
    };
    refused("n9", ApiErrorKind::NotFound, "n9");
    refused(&first, ApiErrorKind::Refused, "coordinates volume pool already");
    refused(
        "n3",
        ApiErrorKind::Refused,
        "node n3 has no path to the LUN of volume pool: none of lun.devices has LUN",
    );
    let would = move_volume(&pool, second, true).unwrap();
    assert_eq!((would.from.as_str(), would.to.as_str(), would.done), (&*first, second, false));
    let directory = pool.bench.directory.path().join("directory");
    std::fs::create_dir(&directory).unwrap();
    client.create_volume(&CreateVolume::dir("plain", directory)).unwrap();
    let error = client.move_volume("plain", &MoveVolume { to: second.into(), dry_run: false }).unwrap_err();
    assert!(error.message.contains("volume plain is a directory"), "{error:?}");
    // A drain of the coordinator, with nobody else to take the volume, would leave it without one.
    put_disk(&pool, second);
    client.drain_node(second, &DrainNode { fewer_copies: true, dry_run: false }).unwrap();
    refused(second, ApiErrorKind::Refused, &format!("node {second} is drained"));
    let drain = |dry_run| client.drain_node(&first, &DrainNode { fewer_copies: true, dry_run });
    assert!(drain(true).unwrap().volumes[0].stays.contains("no other node"));
    let error = drain(false).unwrap_err();
    assert!(error.message.contains("it coordinates volume pool, and no other node"), "{error:?}");
    assert_eq!(pool.lun(&first).epoch, 1, "nothing has moved");
}

/// The LUN does not take its heartbeat, and does not let it back.
#[test]
fn another_node_takes_over_when_the_named_one_does_not_manage() {
    let _turn = alone();
    let seed = seed();
    let pool = LunBench::up(3, "xfs", "write-through", |_| {});
    let first = pool.coordinator();
    let (owner, target) = (first.as_str(), another(&[&first]));
    put_disk(&pool, owner);
    let number: usize = target[1..].parse().unwrap();
    let (mut load, error) = during(pool.bench.load(new_history(seed), seed), Duration::from_secs(1), || {
        std::thread::sleep(Duration::from_secs(1));
        pool.luns.break_admissions(true);
        pool.luns.set_path(number, false);
        let since = Nanos::now();
        let error = move_volume(&pool, target, false).unwrap_err();
        eprintln!("after {:?}: {error}", Nanos::now() - since);
        error
    });
    eprintln!("longest stall {:?}", load.progress().longest_stall());
    let next = pool.coordinator();
    assert_ne!(next, target);
    let words = format!("node {target} has not taken the coordination of volume pool");
    assert!(error.kind == ApiErrorKind::Failed && error.message.starts_with(&words), "{error:?}");
    assert!(error.message.ends_with(&format!("{next} coordinates it now")), "{error:?}");
    pool.luns.break_admissions(false);
    pool.bench.judge(&mut load, seed);
}

/// It unmounts, and whoever is next does not fence it.
#[test]
fn a_drained_coordinator_gives_its_volume_away_without_a_fence() {
    let _turn = alone();
    let seed = seed();
    let pool = LunBench::up(3, "xfs", "write-through", |_| {});
    let first = pool.coordinator();
    put_disk(&pool, another(&[&first]));
    let client = pool.bench.lab.client(&first).unwrap();
    let (mut load, next) = during(pool.bench.load(new_history(seed), seed), Duration::from_secs(1), || {
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(client.node(&first).unwrap().volumes[0].volume, "pool");
        let since = Nanos::now();
        let mut drain = Command::new(common::program());
        drain.arg("--lab").arg(pool.bench.lab.dir()).args(["node", "drain", &first, "--fewer-copies"]);
        let output = drain.output().unwrap();
        eprintln!("given away within {:?}", Nanos::now() - since);
        assert!(output.status.success(), "{output:?}{}", pool.bench.logs());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("volume pool waits for its new coordinator"), "{said}");
        // The command has waited for that.
        let lun = pool.lun(&first);
        let next = lun.coordinator.clone().filter(|_| lun.trouble.is_empty());
        next.unwrap_or_else(|| panic!("{lun:?}{}", pool.bench.logs()))
    });
    assert_ne!(next, first);
    assert_eq!(pool.luns.fenced(), [""; 0]);
    assert!(client.node(&first).unwrap().volumes.is_empty());
    // One that takes disks again does not take its volume back by itself: that would stop guests for nothing.
    client.resume_node(&first).unwrap();
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(pool.coordinator(), next);
    pool.bench.judge(&mut load, seed);
}
