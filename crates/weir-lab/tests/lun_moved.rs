//! The LUN of a volume is somewhere else: at another path of a host, or the storage has moved the volume to another LUN. Needs root, for
//! loop devices. They have no names of their own, so nothing tells a copy here: what is tested is the operator's word, and that nodes act on
//! it. The comparison of names is tested beside it.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::symlink;
use std::process::Command;
use std::time::Duration;

use common::lun::{LunBench, eventually, set_devices};
use common::{DISK, SOON, alone, during, new_history, program, seed};
use weir_node::api::{ApiError, ApiErrorKind, ChangedIdentity, Delete, SetIdentity};

const NODES: [&str; 2] = ["n1", "n2"];

fn set_identity(pool: &LunBench, identity: &str, dry_run: bool) -> Result<ChangedIdentity, ApiError> {
    let client = pool.bench.lab.client("n2").unwrap().patience(SOON);
    client.set_identity("pool", &SetIdentity { identity: identity.into(), dry_run })
}

#[test]
fn a_volume_whose_lun_no_node_has_any_more_is_on_the_one_that_the_operator_names() {
    let _turn = alone();
    let seed = seed();
    let mut pool = LunBench::up(2, "xfs", "write-through", |_| {});
    let coordinator = pool.coordinator();
    let refused = set_identity(&pool, "naa.2", false).unwrap_err();
    let words = format!("node {coordinator} coordinates volume pool");
    assert!(refused.kind == ApiErrorKind::Refused && refused.message.contains(&words), "{refused}");
    let before = pool.lun("n1").identity;

    // The storage is gone, and is going to be back.
    let directory = tempfile::tempdir().unwrap();
    let links = NODES.map(|node| directory.path().join(node));
    for (node, link) in NODES.into_iter().zip(&links) {
        set_devices(&pool.bench.lab, node, std::slice::from_ref(link));
        pool.bench.lab.kill(node).unwrap();
    }
    for node in NODES {
        pool.bench.lab.start(node).unwrap();
    }
    // Its owner was killed, and has a successor.
    let words = format!("disks that are open: {DISK}");
    eventually(&pool, "refused", || {
        let refused = set_identity(&pool, "naa.2", true).err()?;
        (refused.kind == ApiErrorKind::Refused && refused.message.contains(&words)).then_some(())
    });
    set_identity(&pool, "naa.2", false).unwrap_err();
    assert_eq!(pool.lun("n1").identity, before);

    // Nothing of it is open any more.
    for (number, link) in (1..).zip(&links) {
        symlink(pool.luns.path(number), link).unwrap();
    }
    pool.coordinator();
    let client = pool.bench.lab.client("n1").unwrap().patience(SOON);
    let named = Delete { name: DISK.into(), ..Delete::default() };
    eventually(&pool, "deleted", || client.delete(DISK, &named).ok());
    for (node, link) in NODES.into_iter().zip(&links) {
        std::fs::remove_file(link).unwrap();
        pool.bench.lab.kill(node).unwrap();
    }
    for node in NODES {
        pool.bench.lab.start(node).unwrap();
    }
    let would = eventually(&pool, "unused", || set_identity(&pool, "naa.2", true).ok());
    assert_eq!((would.from.as_str(), would.to.as_str(), would.done), (before.as_str(), "naa.2", false));
    assert_eq!(pool.lun("n1").identity, before);
    let mut command = Command::new(program());
    command.arg("--lab").arg(pool.bench.lab.dir()).args(["--output", "json"]);
    let output = command.args(["volume", "set-identity", "pool", "naa.2"]).output().unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let shape = "weir.changed-identity/1";
    let expected =
        serde_json::json!({ "schema": shape, "volume": "pool", "from": before, "to": "naa.2", "done": true });
    assert_eq!(answer, expected);
    // Without a restart, each looks for the other one.
    for node in NODES {
        eventually(&pool, "looked for", || {
            let lun = pool.lun(node);
            (lun.identity == "naa.2" && lun.notice.contains("has LUN naa.2")).then_some(())
        });
    }
    // Events are written behind what they tell.
    let text = format!("its LUN is naa.2 from now on; before: {before}");
    eventually(&pool, "told", || {
        let events = pool.bench.lab.client("n1").unwrap().patience(SOON).events().ok()?;
        events.iter().any(|event| event.kind == "volume-identity" && event.text == text).then_some(())
    });
    for (number, link) in (1..).zip(&links) {
        symlink(pool.luns.path(number), link).unwrap();
    }
    pool.coordinator();
    pool.bench.create(DISK, "write-through");
    let (mut load, ()) = during(pool.bench.load(new_history(seed), seed), Duration::from_secs(1), || {});
    pool.bench.judge(&mut load, seed);
}

/// As when a session with the storage ends, and the next one has another device.
#[test]
fn a_path_that_comes_back_as_another_device_is_used_without_a_restart() {
    let _turn = alone();
    let seed = seed();
    let mut pool = LunBench::up(3, "xfs", "write-through", |_| {});
    let (_, node) = pool.apart();
    let directory = tempfile::tempdir().unwrap();
    let links = ["first", "second"].map(|name| directory.path().join(name));
    let number: usize = node[1..].parse().unwrap();
    symlink(pool.luns.path(number), &links[0]).unwrap();
    set_devices(&pool.bench.lab, &node, &links);
    pool.bench.lab.kill(&node).unwrap();
    pool.bench.lab.start(&node).unwrap();
    pool.coordinator();
    let client = pool.bench.lab.client(&node).unwrap().patience(SOON);
    eventually(&pool, "moved", || client.move_disk(DISK, &node).ok());
    let second = pool.luns.another_path();
    let (mut load, ()) = during(pool.bench.load(new_history(seed), seed), Duration::from_secs(1), || {
        pool.await_all_direct(&node);
        pool.luns.break_path(number, true);
        pool.await_route(&node, |route| route.state == "block-redirected");
        symlink(second.path(), &links[1]).unwrap();
        let since = pool.await_route(&node, |route| route.state == "direct");
        eprintln!("direct again after {since:?}");
        pool.await_all_direct(&node);
    });
    pool.bench.judge(&mut load, seed);
    assert_eq!(pool.lun(&node).path.as_ref(), Some(&links[1]));
    let text = format!("this node reaches its LUN at {}", links[1].display());
    eventually(&pool, "told", || {
        let events = client.events().ok()?;
        events.iter().any(|event| event.kind == "volume-path" && event.text.starts_with(&text)).then_some(())
    });
    pool.luns.break_path(number, false);
    // Before the path that the bench does not know of.
    for node in ["n1", "n2", "n3"] {
        pool.bench.lab.kill(node).unwrap();
    }
}
