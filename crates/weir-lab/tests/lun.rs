//! A cluster shared volume on a LUN: several nodes, each with a device of its own for one image, and verified load.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use common::etcd::Members;
use common::lun::{LunBench, RedirectedLoad};
use common::{DISK, alone, during, new_history, seed};
use weir_block::Nanos;
use weir_node::api::{ApiErrorKind, CreateDisk, CreateVolume, Delete, DiskView, Export};
use weir_node::shard::messages::RouteView;

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

/// Longest stall of I/O that the coordinator does, while another node takes over.
const REDIRECTED_STALL: Duration = Duration::from_secs(10);
/// Longest stall of direct I/O meanwhile. It needs no coordinator: the target on a quiet machine is 100 ms. On a busy one it waits for a
/// processor, but not for the next coordinator, which takes seconds.
const DIRECT_STALL: Duration = Duration::from_millis(1000);

/// Requests a second that go directly. The devices of all nodes are one file: as many as it takes would keep the mount from its replay, which
/// on a busy machine takes ten seconds then instead of two.
const DIRECT_RATE: u64 = 500;

/// Write-through, so that each request of the guest is on the LUN before its answer.
#[test]
fn the_coordinators_host_crashes_under_load() {
    for format in ["xfs", "ext4"] {
        let _turn = alone();
        let seed = seed();
        let mut pool = LunBench::up(3, format, "write-through", |_| {});
        let (coordinator, owner) = pool.apart();
        let redirected = RedirectedLoad::begin(&pool.bench, &owner);
        let load = pool.bench.load_at(Some(DIRECT_RATE), new_history(seed), seed);
        let progress = load.progress();
        let (mut load, (next, served)) = during(load, Duration::from_secs(1), || {
            pool.await_all_direct(&owner);
            progress.take_longest_stall();
            let since = Nanos::now();
            assert!(pool.crash(&coordinator), "it has the filesystem mounted");
            (pool.coordinator(), Nanos::now() - since)
        });
        let stalled = progress.longest_stall();
        let (changes, longest) = redirected.end();
        eprintln!(
            "{format}: from {coordinator} to {next} within {served:?}; direct I/O stalled for {stalled:?}, redirected I/O for {longest:?}, {changes} redirected changes"
        );
        assert_eq!(pool.luns.fenced(), std::slice::from_ref(&coordinator));
        assert_ne!(next, coordinator);
        pool.bench.judge(&mut load, seed);
        let route = pool.bench.disk_named(RedirectedLoad::DISK).unwrap().detail.unwrap().route.unwrap();
        assert!(changes > 0 && route.file >= 2 * changes, "{changes} changes, {route:?}");
        assert!(longest < REDIRECTED_STALL, "redirected I/O stalled for {longest:?}{}", pool.bench.logs());
        assert!(stalled < DIRECT_STALL && 2 * stalled < longest, "direct I/O stalled for {stalled:?}");
        pool.ends_clean();
    }
}

/// Fences, claims and moves are changes of a registry that is not the lab's own.
#[test]
fn on_etcd_a_coordinators_host_crashes_and_a_disk_moves() {
    let _turn = alone();
    let seed = seed();
    let etcd = Members::up();
    let mut pool = LunBench::up(3, "xfs", "write-back+1", |config| config.etcd = Some(etcd.lab()));
    pool.bench.etcd = Some(etcd);
    let (coordinator, owner) = pool.apart();
    let load = pool.bench.load(new_history(seed), seed);
    let (mut load, next) = during(load, Duration::from_secs(1), || {
        std::thread::sleep(Duration::from_millis(500));
        let since = Nanos::now();
        assert!(pool.crash(&coordinator), "it has the filesystem mounted");
        let next = pool.coordinator();
        eprintln!("from {coordinator} to {next} within {:?}", Nanos::now() - since);
        pool.bench.lab.start(&coordinator).unwrap();
        let client = pool.bench.lab.client(&next).unwrap().patience(common::SOON);
        let others = ["n1", "n2", "n3"].into_iter().filter(|node| *node != owner);
        for to in others.chain([owner.as_str()]) {
            eventually(&pool, "moved", || client.move_disk(DISK, to).is_ok());
            pool.bench.wait_effective();
            assert_eq!(pool.bench.owner(), to);
        }
        next
    });
    eprintln!("longest stall {:?}", load.progress().longest_stall());
    assert_ne!(next, coordinator);
    assert_eq!(pool.luns.fenced(), [coordinator]);
    pool.bench.judge(&mut load, seed);
    pool.ends_clean();
}

/// The state by which a node does direct I/O, or does not, is to be known within a second.
const PATH_LOST: Duration = Duration::from_secs(1);

#[test]
fn an_owner_that_loses_its_path_goes_on_through_the_coordinator() {
    for (format, policy) in [("xfs", "write-through"), ("ext4", "write-back+1")] {
        let _turn = alone();
        let seed = seed();
        let pool = LunBench::up(3, format, policy, |_| {});
        let (_, owner) = pool.apart();
        let path = owner[1..].parse().unwrap();
        let load = pool.bench.load(new_history(seed), seed);
        let progress = load.progress();
        let (mut load, ()) = during(load, Duration::from_secs(1), || {
            pool.await_all_direct(&owner);
            let before = pool.route(&owner).unwrap();
            progress.take_longest_stall();
            let began = Nanos::now();
            pool.luns.break_path(path, true);
            let is_redirected = |route: &RouteView| {
                let mut reasons = route.reasons.iter();
                route.state == "block-redirected" && reasons.any(|one| one.flag == "no-disk-connectivity")
            };
            pool.await_route(&owner, is_redirected);
            let lost = Nanos::now() - began;
            let acknowledged = progress.acknowledged();
            std::thread::sleep(Duration::from_secs(1));
            let after = pool.route(&owner).unwrap();
            assert!(is_redirected(&after) && after.block > before.block + 100, "{before:?} {after:?}");
            assert!(progress.acknowledged() > acknowledged + 100, "the load goes on");
            pool.luns.break_path(path, false);
            let repaired = pool.await_route(&owner, |route| route.state == "direct");
            eprintln!(
                "{format} {policy}: redirected after {lost:?}, direct {repaired:?} after the repair, longest stall {:?}",
                progress.longest_stall()
            );
            assert!(lost < PATH_LOST, "{lost:?}{}", pool.bench.logs());
            assert!(progress.longest_stall() < PATH_LOST, "{:?}", progress.longest_stall());
            pool.await_all_direct(&owner);
        });
        assert!(pool.luns.fenced().is_empty(), "a path that fails is no reason for a fence");
        pool.bench.judge(&mut load, seed);
    }
}

/// It is let back by the fence command without a change of the owner.
#[test]
fn an_owner_whose_writes_the_lun_refuses_is_admitted_again() {
    let _turn = alone();
    let seed = seed();
    let pool = LunBench::up(3, "xfs", "write-through", |_| {});
    let (_, owner) = pool.apart();
    let path = owner[1..].parse().unwrap();
    let load = pool.bench.load(new_history(seed), seed);
    let (mut load, ()) = during(load, Duration::from_secs(1), || {
        pool.await_all_direct(&owner);
        let before = pool.route(&owner).unwrap();
        pool.luns.set_path(path, false);
        pool.await_route(&owner, |route| route.file + route.block > before.file + before.block);
        let admitted = pool.await_route(&owner, |route| route.state == "direct");
        eprintln!("direct again after {admitted:?}");
    });
    assert_eq!(pool.bench.owner(), owner);
    pool.bench.judge(&mut load, seed);
}

/// Waits until `weir volume show` and the metrics of its owner show the disk in this state, with this reason, or without any that lasts.
fn await_shown(pool: &LunBench, owner: &str, state: &str, reason: Option<&str>) {
    eventually(pool, "shown by `weir volume show`", || {
        let mut command = Command::new(common::program());
        command.arg("--lab").arg(pool.bench.lab.dir());
        let output = command.args(["volume", "show", "pool", "--output", "json"]).output().unwrap();
        let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let disks = shown["disks"].as_array().unwrap();
        let route = &disks.iter().find(|disk| disk["name"] == DISK).unwrap()["detail"]["route"];
        let flags = route["reasons"].as_array().into_iter().flatten();
        // That one comes and goes with a write.
        let mut flags = flags.filter(|one| one["flag"] != "unallocated-extent");
        let is_right = match reason {
            Some(reason) => flags.any(|one| one["flag"] == reason && one["benign"] == true),
            None => flags.next().is_none(),
        };
        route["state"] == state && is_right
    });
    eventually(pool, "shown by the metrics", || {
        let mut stream = UnixStream::connect(&pool.bench.lab.node(owner).unwrap().api).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: w\r\nConnection: close\r\n\r\n").unwrap();
        let mut metrics = String::new();
        stream.read_to_string(&mut metrics).unwrap();
        let of_disk = format!("{{node=\"{owner}\",disk=\"{DISK}\",");
        let value = |metric: &str, labels: &str| {
            let line = format!("{metric}{of_disk}{labels}}} ");
            metrics.lines().find_map(|one| one.strip_prefix(&line)?.parse::<u64>().ok())
        };
        let states = ["direct", "block-redirected", "file-redirected", "paused"];
        let is_in = states.iter().all(|one| {
            value("weir_disk_route", &format!("state=\"{one}\"")) == Some(u64::from(*one == state))
        });
        let wish = value("weir_disk_route_reason", "reason=\"user-request\",benign=\"true\"");
        let parts = value("weir_disk_route_parts_total", &format!("route=\"{state}\""));
        let is_wish = u64::from(reason == Some("user-request"));
        is_in && wish == Some(is_wish) && parts.is_some_and(|parts| parts > 0)
    });
}

/// What an operator does before work on a path, or to find out whether a path is at fault.
#[test]
fn all_io_goes_through_the_coordinator_when_the_operator_wants_that() {
    let _turn = alone();
    let seed = seed();
    let pool = LunBench::up(3, "xfs", "write-through", |_| {});
    let bench = &pool.bench;
    let route = || {
        let detail = bench.disk().unwrap().detail.unwrap();
        let route = detail.route.unwrap();
        (route.state, route.reasons.into_iter().map(|reason| reason.flag).collect::<Vec<_>>())
    };
    let await_route = |state: &str| {
        let deadline = Nanos::now() + common::SOON;
        while route().0 != state {
            assert!(Nanos::now() < deadline, "{:?}{}", route(), bench.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let mut history = new_history(seed);
    let coordinator = pool.coordinator();
    let other = (1..=3).map(|node| format!("n{node}")).find(|name| *name != coordinator).unwrap();
    for node in [coordinator.as_str(), &other] {
        if bench.owner() != node {
            bench.lab.any_client().unwrap().move_disk(DISK, node).unwrap();
        }
        bench.wait_effective();
        let (mut load, ()) = during(bench.load(history, seed), Duration::from_secs(1), || {
            let client = bench.lab.any_client().unwrap();
            std::thread::sleep(Duration::from_millis(500));
            await_route("direct");
            assert!(client.set_redirected("pool", true).unwrap().lun.unwrap().redirected);
            await_route("file-redirected");
            assert!(route().1.contains(&"user-request".to_owned()), "{:?}", route());
            await_shown(&pool, node, "file-redirected", Some("user-request"));
            let text = "file-redirected: user-request (benign)";
            eventually(&pool, "told", || {
                let told = bench.lab.client(node).unwrap().events().unwrap();
                told.iter().any(|event| event.kind == "route" && event.node == node && event.text == text)
            });
            std::thread::sleep(Duration::from_secs(1));
            // The way there, and the work there.
            let meters = client.meters(DISK).unwrap();
            let layers =
                if *node == coordinator { &["coordinator"][..] } else { &["redirected", "coordinator"] };
            for layer in layers {
                let meter = meters.iter().find(|meter| meter.layer == *layer);
                let meter = meter.unwrap_or_else(|| panic!("{node}: no {layer} among {meters:#?}"));
                assert!(meter.kinds.iter().any(|kind| kind.completions > 0), "{node}: {meter:#?}");
            }
            assert!(!client.set_redirected("pool", false).unwrap().lun.unwrap().redirected);
            await_route("direct");
            await_shown(&pool, node, "direct", None);
        });
        eprintln!("{node}: longest stall {:?}", load.progress().longest_stall());
        bench.judge(&mut load, seed);
        history = load.into_history();
    }
    // A disk that is opened meanwhile follows, too.
    let client = bench.lab.any_client().unwrap();
    client.set_redirected("pool", true).unwrap();
    client.move_disk(DISK, &coordinator).unwrap();
    await_route("file-redirected");
    client.set_redirected("pool", false).unwrap();
    await_route("direct");
}

/// As when a coordinator cannot write to its LUN for a moment: its filesystem is of no use any more, but its process goes on.
#[test]
fn a_coordinator_whose_filesystem_shuts_down_gives_the_volume_back() {
    for format in ["xfs", "ext4"] {
        let _turn = alone();
        let seed = seed();
        let pool = LunBench::up(3, format, "write-through", |_| {});
        let coordinator = pool.coordinator();
        let owner = ["n1", "n2", "n3"].into_iter().find(|node| *node != coordinator).unwrap();
        if pool.bench.owner() != owner {
            pool.bench.lab.any_client().unwrap().move_disk(DISK, owner).unwrap();
        }
        pool.bench.wait_effective();
        let epoch = pool.lun(owner).epoch;
        let load = pool.bench.load(new_history(seed), seed);
        let (mut load, ()) = during(load, Duration::from_secs(2), || {
            std::thread::sleep(Duration::from_millis(300));
            assert!(pool.shut_down(&coordinator));
            // An owner that has all blocks of its disk by now asks a coordinator for nothing, and so finds out nothing.
            pool.bench.lab.client(owner).unwrap().set_redirected("pool", true).unwrap();
            let deadline = Nanos::now() + common::SOON;
            // By the same node or another one, with the log replayed.
            while pool.lun(owner).epoch == epoch {
                assert!(Nanos::now() < deadline, "{}", pool.bench.logs());
                std::thread::sleep(Duration::from_millis(20));
            }
            pool.coordinator();
            pool.bench.lab.client(owner).unwrap().set_redirected("pool", false).unwrap();
        });
        eprintln!("{format}: stalled for {:?}", load.progress().longest_stall());
        pool.bench.judge(&mut load, seed);
    }
}

/// Guests wait, but not for ever, and hear of it; nothing that was acknowledged is lost (P9).
#[test]
fn a_volume_that_nobody_can_take_over_fails_its_requests_after_a_while() {
    const WAIT: Duration = Duration::from_secs(4);
    let _turn = alone();
    let seed = seed();
    let mut pool = LunBench::up(3, "xfs", "write-through", |config| config.coordinator_wait = WAIT);
    let coordinator = pool.coordinator();
    let owner = ["n1", "n2", "n3"].into_iter().find(|node| *node != coordinator).unwrap();
    if pool.bench.owner() != owner {
        pool.bench.lab.any_client().unwrap().move_disk(DISK, owner).unwrap();
    }
    pool.bench.wait_effective();
    let (mut load, ()) = during(pool.bench.load(new_history(seed), seed), Duration::ZERO, || {
        std::thread::sleep(Duration::from_secs(1));
    });
    pool.bench.judge(&mut load, seed);
    pool.luns.break_fences(true);
    assert!(pool.crash(&coordinator));
    // Without its path, the owner needs the coordinator for everything.
    pool.luns.set_path(owner[1..].parse().unwrap(), false);
    let uri = pool.bench.disk().unwrap().uris[0].clone();
    let write = |uri: &str| {
        let since = Nanos::now();
        let args = ["60", "qemu-io", "-f", "raw", "-c", "write -P 7 0 4k", uri];
        let output = Command::new("timeout").args(args).output().unwrap();
        (output, Nanos::now() - since)
    };
    let (output, waited) = write(&uri);
    assert!(!output.status.success() && waited < 2 * WAIT + Duration::from_secs(5), "{output:?} {waited:?}");
    assert!(waited > WAIT / 2, "it has waited: {output:?} {waited:?}");
    eventually(&pool, "told with the remedy", || {
        let client = pool.bench.lab.client(owner).unwrap();
        let told = client.events().unwrap().into_iter().find(|event| event.kind == "volume-recovery-failed");
        told.is_some_and(|event| event.text.contains("`weir volume confirm-fenced pool NODE`"))
    });
    pool.luns.break_fences(false);
    pool.luns.set_path(owner[1..].parse().unwrap(), true);
    pool.coordinator();
    let deadline = Nanos::now() + common::SOON;
    while !write(&uri).0.status.success() {
        assert!(Nanos::now() < deadline, "{}", pool.bench.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// More than the LUN takes.
const TOO_MUCH: u64 = 600 << 20;

/// A client that writes more to a disk than its LUN takes. Returns it, and the disk as its owner shows it once nothing more is destaged.
fn fill(pool: &LunBench, disk: &str, owner: &str) -> (std::process::Child, DiskView) {
    let client = pool.bench.lab.any_client().unwrap();
    let wanted = CreateDisk {
        name: disk.into(),
        volume: "pool".into(),
        size: TOO_MUCH,
        logical_block: 4096,
        policy: "write-back+1".into(),
        medium: weir_node::api::Medium::Ram,
        limit: None,
    };
    client.create_disk(&wanted).unwrap();
    let export = Export { on: Some(owner.into()), ..Export::default() };
    let uri = client.export(disk, &export).unwrap().uris[0].clone();
    let data = pool.bench.directory.path().join("data");
    if !data.exists() {
        let (mut random, mut file) = (File::open("/dev/urandom").unwrap(), File::create(&data).unwrap());
        let mut piece = vec![0; 8 << 20];
        random.read_exact(&mut piece).unwrap();
        (0..TOO_MUCH / piece.len() as u64).for_each(|_| file.write_all(&piece).unwrap());
    }
    let writer = Command::new("nbdcopy").arg(&data).arg(uri).spawn().unwrap();
    let deadline = Nanos::now() + common::SOON;
    loop {
        match pool.bench.disk_named(disk) {
            Some(view) if view.state == "degraded" => return (writer, view),
            last => assert!(Nanos::now() < deadline, "{last:?}{}", pool.bench.logs()),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Nothing of it can be destaged, and whoever deletes it by force wants to have the space.
#[test]
fn a_disk_on_a_full_lun_is_deleted_by_force_with_what_only_its_log_has() {
    let _turn = alone();
    let pool = LunBench::up(3, "xfs", "write-through", |_| {});
    let coordinator = pool.coordinator();
    let other = ["n1", "n2", "n3"].into_iter().find(|node| *node != coordinator).unwrap();
    // Its file is the coordinator's to remove, and its log its owner's: on one node, and on two.
    for (disk, owner) in [("a", other), ("b", &coordinator), ("c", other)] {
        let (mut writer, view) = fill(&pool, disk, owner);
        assert!(view.reason.contains("no space left"), "{}", view.reason);
        let client = pool.bench.lab.client(owner).unwrap().patience(Duration::from_secs(20));
        let delete = |force, dry_run| {
            client.delete(disk, &Delete { name: disk.into(), force, dry_run, ..Delete::default() })
        };
        assert_eq!(delete(false, false).unwrap_err().kind, ApiErrorKind::Refused);
        let preview = delete(true, true).unwrap();
        assert!(preview.allocated.is_some_and(|bytes| bytes > TOO_MUCH / 2), "{preview:?}");
        assert!(preview.lost.contains("not destaged") && preview.lost.contains("no space"), "{preview:?}");
        if disk == "c" {
            // Without clients, the storage is what keeps it.
            writer.kill().unwrap();
            let deadline = Nanos::now() + common::SOON;
            while pool.bench.disk_named(disk).unwrap().detail.unwrap().clients > 0 {
                assert!(Nanos::now() < deadline, "its clients are gone");
                std::thread::sleep(Duration::from_millis(20));
            }
            let refused = delete(false, false).unwrap_err();
            assert!(refused.message.contains("its storage takes nothing"), "{refused}");
        }
        let began = Nanos::now();
        let deleted = delete(true, false).unwrap();
        assert!(deleted.lost.contains("not destaged"), "{deleted:?}");
        eprintln!("{disk} on {owner}, coordinator {coordinator}: deleted within {:?}", Nanos::now() - began);
        assert!(!writer.wait().unwrap().success(), "its client has an error, and does not hang");
        assert!(client.disks().unwrap().iter().all(|view| view.name != disk));
        let told = client.events().unwrap();
        let told = told.iter().find(|event| event.kind == "disk-deleted" && event.subject == disk);
        assert!(told.is_some_and(|event| event.text.contains("lost: ")), "{told:?}");
    }
}

/// The health line of a node.
fn health(pool: &LunBench, node: &str) -> String {
    pool.bench.lab.client(node).unwrap().status().unwrap().health.to_string()
}

fn eventually(pool: &LunBench, what: &str, is_so: impl Fn() -> bool) {
    let deadline = Nanos::now() + common::SOON;
    while !is_so() {
        assert!(Nanos::now() < deadline, "not {what}: {:?}{}", health(pool, "n3"), pool.bench.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Its disks look well for as long as they do direct I/O, and destage nothing.
#[test]
fn a_volume_that_nobody_serves_is_named_with_the_reason() {
    let _turn = alone();
    let mut pool = LunBench::up(3, "xfs", "write-through", |_| {});
    let coordinator = pool.coordinator();
    let other = ["n1", "n2", "n3"].into_iter().find(|node| *node != coordinator).unwrap();
    let client = pool.bench.lab.client(other).unwrap();
    if pool.bench.owner() != other {
        client.move_disk(DISK, other).unwrap();
    }
    pool.bench.wait_effective();
    let well = pool.lun(other);
    assert_eq!((well.coordinator.as_deref(), well.trouble.as_str()), (Some(&*coordinator), ""));
    assert!(well.free_bytes > Some(0) && well.free_bytes < well.size_bytes, "{well:?}");
    pool.luns.break_fences(true);
    assert!(pool.crash(&coordinator));
    let names_it = |text: &str| {
        let waits = "volume pool is not served (1 disk waits for it): nobody coordinates it";
        text.contains(waits) && text.contains("no answer")
    };
    eventually(&pool, "named", || names_it(&health(&pool, other)));
    pool.bench.wait(|view| view.state == "degraded" && view.reason.contains("volume pool is not served"));
    // Whoever only tries is no coordinator, and most of its attempts are in one epoch.
    eventually(&pool, "trying", || pool.lun(other).trouble.contains("is trying (fencing)"));
    assert_eq!(pool.lun(other).coordinator, None);
    let refused =
        client.delete("nothing", &Delete { name: "nothing".into(), dry_run: true, ..Delete::default() });
    assert_eq!(refused.unwrap_err().kind, ApiErrorKind::NotFound);
    let wanted = CreateDisk {
        name: "new".into(),
        volume: "pool".into(),
        size: 1 << 20,
        logical_block: 4096,
        policy: "write-through".into(),
        medium: weir_node::api::Medium::Ram,
        limit: None,
    };
    let refused = client.create_disk(&wanted).unwrap_err();
    assert!(refused.message.contains("volume pool is not served: nobody coordinates it"), "{refused}");
    std::thread::sleep(Duration::from_secs(15));
    let epoch = pool.lun(other).epoch;
    assert!(epoch <= 7, "{epoch} epochs");
    pool.luns.break_fences(false);
    pool.coordinator();
    let well = || {
        let lun = pool.lun(other);
        lun.trouble.is_empty() && lun.notice.is_empty() && !health(&pool, other).contains("volume")
    };
    eventually(&pool, "well again", well);
    pool.bench.wait_effective();
    let events = client.events().unwrap();
    let fenced = events.iter().find(|event| event.kind == "node-fenced").expect("an event");
    assert!(fenced.text.contains(&format!("has fenced {coordinator}")), "{fenced:?}");
}

/// It knows an old record for a moment when it goes on, beside a LUN on which another one has coordinated since.
#[test]
fn a_coordinator_that_stood_still_does_not_take_the_registry_for_a_backup() {
    let _turn = alone();
    let pool = LunBench::up(3, "ext4", "write-through", |_| {});
    let former = pool.coordinator();
    pool.bench.lab.pause(&former).unwrap();
    let next = pool.coordinator();
    assert_ne!(next, former);
    pool.bench.lab.resume(&former).unwrap();
    std::thread::sleep(Duration::from_secs(8));
    for node in ["n1", "n2", "n3"] {
        let lun = pool.lun(node);
        assert_eq!((lun.notice.as_str(), lun.trouble.as_str()), ("", ""), "{node}{}", pool.bench.logs());
    }
    let events = pool.bench.lab.client(&next).unwrap().events().unwrap();
    assert!(events.iter().all(|event| !event.text.contains("backup")), "{events:?}");
}

#[test]
fn a_lun_has_one_volume_whatever_its_path_is_called() {
    let _turn = alone();
    let pool = LunBench::up(3, "xfs", "write-through", |_| {});
    let client = pool.bench.lab.client("n1").unwrap();
    let identity = pool.lun("n1").identity;
    for path in [1, 2, 3] {
        let wanted = CreateVolume {
            name: "other".into(),
            kind: "lun".into(),
            path: pool.luns.path(path).to_owned(),
            server: None,
            format: Some("xfs".into()),
            identity: Some(identity.clone()),
            destroy: true,
        };
        let (named, used) = (pool.luns.path(path).display(), pool.luns.path(1).display());
        let words = format!("{named} is the LUN of volume pool, which this node uses at {used}: ");
        for refused in [client.plan_volume(&wanted).unwrap_err(), client.create_volume(&wanted).unwrap_err()]
        {
            assert!(refused.message.starts_with(&words), "{refused}");
        }
    }
}
