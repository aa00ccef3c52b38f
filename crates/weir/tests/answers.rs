//! Answers of every node, also while others are down; all tests share one lab.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use weir_block::Nanos;

mod common;

use common::{Guest, Place, assert_shape, await_some};

/// The duration of a command, and its output.
fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let start = Nanos::now();
    let done = work();
    (Nanos::now() - start, done)
}

fn status(place: &Place, node: &str) -> Value {
    place.json(&format!("status --node {node}"))
}

fn shown(place: &Place, disk: &str, node: &str) -> Value {
    place.json(&format!("disk show {disk} --node {node}"))
}

/// Sends a raw request, which our clients would not make; returns status line and body.
fn raw(place: &Place, request: &str) -> String {
    let mut stream = UnixStream::connect(place.path().join("weir-lab/n2/api.sock")).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn post(place: &Place, path: &str, body: &str) -> String {
    let length = body.len();
    raw(
        place,
        &format!(
            "POST {path} HTTP/1.1\r\nHost: w\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        ),
    )
}

#[test]
fn any_node_answers_for_any_disk() {
    let place = Place::new();
    place.ok("lab up --nodes 3 --lease 1s");
    volumes_are_told_apart(&place);
    place.ok("disk create db --volume pool --size 16MiB --policy write-back+1");
    place.ok("disk create closed --volume pool --size 1MiB");
    let uris = place.ok("disk export db --node n1");
    await_some("health ok", || (status(&place, "n1")["health"]["level"] == "ok").then_some(()));
    assert!(place.ok("status --node n2").starts_with("health: ok\n"));

    for node in ["n1", "n2", "n3"] {
        assert_eq!(place.ok(&format!("disk export db --node {node}")), uris, "{node}");
        let disk = shown(&place, "db", node);
        assert_eq!((&disk["owner"], &disk["state"]), (&"n1".into(), &"serving".into()), "{disk:#}");
        assert!(disk["detail"]["dirty_bytes"].is_u64() && disk["detail"]["appended"].is_u64(), "{disk:#}");
        assert_eq!(status(&place, node)["nodes"].as_array().unwrap().len(), 3);
        let listed = place.json(&format!("disk list --node {node}"));
        let states: Vec<_> =
            listed["disks"].as_array().unwrap().iter().map(|disk| disk["state"].clone()).collect();
        assert_eq!(states, ["closed", "serving"], "{node}: {listed:#}");
    }
    let epoch = shown(&place, "db", "n2")["epoch"].clone();
    let there = place.ok("disk move db --to n1 --node n3");
    assert!(there.contains("on n1 already"), "{there}");
    assert_eq!(shown(&place, "db", "n2")["epoch"], epoch);

    answers_have_the_shapes_that_are_written_down(&place);
    requests_are_limited(&place);
    loads_need_a_disk_of_their_own(&place, &uris);
    a_backing_file_is_deleted(&place);
    a_node_is_killed(&place);
    an_owner_stands_still(&place);
    the_registry_is_away(&place);
    place.ok("lab down --force");
}

fn volumes_are_told_apart(place: &Place) {
    place.ok(&format!("volume create pool --path {}", place.pool().display()));
    let link = place.path().join("link");
    std::os::unix::fs::symlink(place.pool(), &link).unwrap();
    let said = place.fails(&format!("volume create twice --path {}", link.display()), 4);
    assert!(said.contains("volume pool"), "{said}");
    for system in ["/etc", "/usr/lib", "/proc", "/run/weir-x", "/", "/tmp"] {
        let said = place.weir(&format!("volume create bad --path {system}"));
        assert!(!said.status.success(), "{system}");
    }
    assert!(place.fails("volume create bad --path /etc", 2).contains("belongs to the system"));
    let dots = format!("{}/../pool", place.pool().display());
    let said = post(place, "/v1/volumes", &format!(r#"{{"name":"b","kind":"dir","path":"{dots}"}}"#));
    assert!(said.starts_with("HTTP/1.1 400") && said.contains("`..`"), "{said}");

    let other = place.path().join("other");
    std::fs::create_dir(&other).unwrap();
    place.ok(&format!("volume create other --path {}", other.display()));
    place.ok("disk create inside --volume other --size 1MiB");
    assert!(place.fails("volume delete other --yes", 4).contains("disks in it: inside"));
    place.ok("disk delete inside --yes");
    assert!(place.fails("volume delete other", 4).contains("--yes"));
    assert!(place.ok("volume delete other --dry-run").contains("would delete"));
    assert!(other.join(".weir-volume").exists());
    place.ok("volume delete other --yes");
    // With its mark: removing it could affect a volume created in the directory meanwhile.
    assert!(other.exists() && other.join(".weir-volume").exists());
    assert!(place.fails("volume delete other --yes", 3).contains("weir volume list"));
}

/// Keys and types of real answers, compared with `shapes.json`: fields that programs read are stable until the schema's number
/// changes.
fn answers_have_the_shapes_that_are_written_down(place: &Place) {
    let commands = [
        "status",
        "disk show db",
        "disk show closed",
        "disk limit closed --iops 500",
        "disk list",
        "volume list",
        "volume show pool",
        "volume du pool",
        "events",
        "disk move db --to n1",
        "disk delete closed --dry-run",
        "volume delete other --dry-run",
        "lab status",
        "top --every 200ms --count 1",
        "explain db --over 100ms",
        "diagnose --disk db --dry-run",
    ];
    place.ok(&format!("volume create other --path {}", place.path().join("other").display()));
    for command in commands {
        assert_shape(&place.json(command), command);
    }
    place.ok("volume delete other --yes");
    for request in ["GET /v1/disks/none", "GET /v1/disks/db/meters", "GET /v1/owned"] {
        let answer = raw(place, &format!("{request} HTTP/1.1\r\nHost: w\r\nConnection: close\r\n\r\n"));
        let body: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
        assert_shape(&body, request);
    }
}

fn requests_are_limited(place: &Place) {
    let said = post(place, "/v1/disks/closed/delete", "{}");
    assert!(said.starts_with("HTTP/1.1 400") && said.contains("does not repeat its name"), "{said}");
    let said = post(place, "/v1/disks/closed/delete", r#"{"name":"db"}"#);
    assert!(said.starts_with("HTTP/1.1 400") && said.contains("names disk"), "{said}");
    let long = "x".repeat(2000);
    for (path, body) in [
        (format!("/v1/disks/{long}/export"), "{}".to_owned()),
        ("/v1/volumes".to_owned(), format!(r#"{{"name":"{long}","kind":"dir","path":"/srv/v"}}"#)),
    ] {
        let said = post(place, &path, &body);
        assert!(said.starts_with("HTTP/1.1 400") && said.contains("is not a name"), "{said}");
        assert!(said.len() < 1000, "it does not repeat all of it");
    }
    assert!(place.fails(&format!("disk show {long}"), 2).contains("is not a name"));
}

/// A load on a disk with a guest needs force.
fn loads_need_a_disk_of_their_own(place: &Place, uris: &str) {
    let uri = uris.lines().find(|line| line.starts_with("nbd+unix:")).unwrap();
    let _guest = Guest::of(place, "db", uri);
    let load = "bench --disk db --layer accel --rw randwrite --destroy --no-prefill --runtime 100ms";
    let said = place.fails(load, 4);
    assert!(said.contains("1 client is connected"), "{said}");
}

fn a_backing_file_is_deleted(place: &Place) {
    let (file, kept) = (place.pool().join("db.raw"), place.path().join("kept.raw"));
    std::fs::rename(&file, &kept).unwrap();
    let seen = await_some("it is noticed", || {
        let seen = status(place, "n3");
        (seen["health"]["level"] == "at-risk").then_some(seen)
    });
    let said = seen["health"]["reasons"][0].as_str().unwrap();
    assert!(said.contains("disk db") && said.contains("db.raw was deleted or moved"), "{said}");
    assert!(place.ok("events").contains("backing-gone"));
    // Only this process has the file: neither a move nor the end of the lab may close it.
    let owner = shown(place, "db", "n3")["owner"].as_str().unwrap().to_owned();
    let other = ["n1", "n2", "n3"].into_iter().find(|node| *node != owner).unwrap();
    let said = place.fails(&format!("disk move db --to {other}"), 4);
    assert!(said.contains("db.raw was deleted or moved") && said.contains("export"), "{said}");
    let said = place.fails("lab down", 4);
    assert!(said.contains("the lab goes on") && said.contains("db.raw was deleted or moved"), "{said}");
    std::fs::rename(&kept, &file).unwrap();
    await_some("it is back", || (status(place, "n3")["health"]["level"] == "ok").then_some(()));
}

fn a_node_is_killed(place: &Place) {
    place.ok("lab kill n1");
    // Any node waits until the disk is exported again, and answers with the address.
    let uris = place.ok("disk export db --node n3");
    assert!(uris.starts_with("nbd+unix:///db?socket=") && !uris.contains("/n1/"), "{uris}");
    assert_eq!(place.ok("disk export db --node n2"), uris);
    for node in ["n2", "n3"] {
        let seen = await_some("n1 is down", || {
            let seen = status(place, node);
            (seen["nodes"][0]["state"] == "down").then_some(seen)
        });
        assert_eq!(seen["nodes"][0]["name"], "n1");
        assert!(seen["nodes"][0]["down_since"].as_str().unwrap().ends_with('Z'), "{seen:#}");
        let reasons = seen["health"]["reasons"].to_string();
        assert!(seen["health"]["level"] != "ok" && reasons.contains("node n1 is down since"), "{reasons}");
    }
    let asked = place.json("disk policy db write-back+2");
    assert!(asked["warnings"][0].as_str().unwrap().contains("needs 2 other nodes"), "{asked:#}");
    let seen = await_some("the policy is in effect as far as it can be", || {
        let seen = status(place, "n2");
        seen["health"]["reasons"].to_string().contains("write-back+2 needs").then_some(seen)
    });
    assert!(place.fails("node remove n2", 4).contains("is up"), "{seen:#}");
    place.ok("disk policy db write-back+1");
    await_some("n1 can be removed", || place.weir("node remove n1").status.success().then_some(()));
    assert_eq!(status(place, "n3")["nodes"].as_array().unwrap().len(), 2);
    place.ok("lab start n1");
    await_some("n1 is back", || (status(place, "n2")["nodes"].as_array()?.len() == 3).then_some(()));
    await_some("all is well", || (status(place, "n3")["health"]["level"] == "ok").then_some(()));
}

fn an_owner_stands_still(place: &Place) {
    let owner = shown(place, "db", "n1")["owner"].as_str().unwrap().to_owned();
    let other = ["n1", "n2", "n3"].into_iter().find(|node| *node != owner).unwrap();
    place.ok(&format!("lab pause {owner}"));
    let (took, disk) = timed(|| shown(place, "db", other));
    assert!(took < Duration::from_secs(5), "{took:?}");
    // Another node may own it by now.
    let silent = disk["state"] == "silent" && disk["reason"] == format!("owner {owner} does not answer");
    assert!(silent || disk["owner"] != owner || disk["state"] == "takeover", "{disk:#}");
    let (took, said) = timed(|| place.fails(&format!("disk show db --node {owner}"), 5));
    assert!(took < Duration::from_secs(15) && said.contains("paused"), "{took:?}: {said}");
    place.ok(&format!("lab resume {owner}"));
    await_some("all is well", || (status(place, other)["health"]["level"] == "ok").then_some(()));
}

fn the_registry_is_away(place: &Place) {
    place.ok("lab pause registry");
    let seen = await_some("the registry is away", || {
        let (took, seen) = timed(|| status(place, "n2"));
        assert!(took < Duration::from_secs(5), "{took:?}");
        (seen["registry"]["state"] == "away").then_some(seen)
    });
    assert!(seen["health"]["reasons"].to_string().contains("registry has been away for"), "{seen:#}");
    assert_eq!(seen["disks"].as_array().unwrap().len(), 2);
    let disk = shown(place, "db", "n3");
    assert!(disk["registry_age_seconds"].as_f64().unwrap() > 0.0 && disk["detail"].is_object(), "{disk:#}");
    place.json("disk list --node n1");
    place.ok("lab resume registry");
    await_some("it is back", || (status(place, "n2")["registry"]["state"] == "connected").then_some(()));
}

#[test]
fn a_node_outside_the_cluster_says_so_at_once() {
    let place = Place::new();
    let config = "name = \"n1\"\nstate_dir = \"STATE\"\n[registry]\nsocket = \"STATE/none.sock\"\n\
                  [peers]\nlisten = \"127.0.0.1:0\"\n[api]\nsocket = \"STATE/api.sock\"\n";
    let state = place.path().join("state");
    let config = config.replace("STATE", state.to_str().unwrap());
    std::fs::write(place.path().join("weir.toml"), config).unwrap();
    let mut node = place.command("node --config weir.toml").stderr(Stdio::null()).spawn().unwrap();
    let socket = state.join("api.sock");
    await_some("its API", || socket.exists().then_some(()));
    for line in ["status", "disk create d --volume v --size 1MiB", "disk show d"] {
        let (took, said) = timed(|| place.fails(&format!("{line} --api {}", socket.display()), 5));
        assert!(took < Duration::from_secs(3), "{line}: {took:?}");
        assert!(said.contains("has not joined the cluster") && said.contains("none.sock"), "{said}");
    }
    node.kill().unwrap();
    node.wait().unwrap();
}
