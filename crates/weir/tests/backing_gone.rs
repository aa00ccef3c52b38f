//! A disk whose backing file is gone when another node takes it over: nothing can open it, and only a forced deletion ends it.
#![allow(clippy::unwrap_used)]

mod common;

use std::process::{Child, Stdio};

use common::{Place, assert_shape, await_some};
use serde_json::Value;

/// Writes to disk `db` through the export at `uri`, until it is dropped.
struct Writer(Child);

impl Writer {
    fn start(place: &Place, uri: &str) -> Writer {
        let mut load =
            place.command(&format!("bench {uri} --rw randwrite --destroy --no-prefill --runtime 60s"));
        let writer = Writer(load.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        await_some("acknowledged writes", || {
            let shown = place.json("disk show db");
            shown["detail"]["acknowledged"].as_u64().filter(|last| *last > 1000)
        });
        writer
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The logs of `db` on a node, its own and those of other owners.
fn logs_on(place: &Place, node: &str) -> Value {
    let status = place.json(&format!("status --node {node}"));
    status["replicas"].clone()
}

#[test]
fn a_disk_whose_backing_is_gone_is_deleted_by_force_only() {
    let place = Place::new();
    place.ok("lab up --nodes 3 --lease 1s");
    place.ok(&format!("volume create pool --path {}", place.pool().display()));
    place.ok("disk create db --volume pool --size 16MiB --policy write-back+2");
    let uris = place.ok("disk export db --node n1");
    await_some("two replicas", || (place.json("disk show db")["effective"] == "write-back+2").then_some(()));
    let writer = Writer::start(&place, uris.lines().find(|uri| uri.starts_with("nbd+unix:")).unwrap());
    std::fs::remove_file(place.pool().join("db.raw")).unwrap();
    place.ok("lab kill n1");
    drop(writer);
    // Each leaves it to the other first, which may be able to open it.
    await_some("an owner that cannot open it", || {
        let events = place.ok("events --node n2");
        ["open-failed", "takeover"].iter().all(|kind| events.contains(kind)).then_some(())
    });

    let said = place.fails("disk delete db --yes --node n2", 4);
    assert!(said.contains("db.raw") && said.contains("a deletion loses"), "{said}");
    assert!(said.contains("--force"), "{said}");
    let would = place.ok("disk delete db --force --dry-run --node n3");
    assert!(would.contains("this would lose") && would.contains("of acknowledged writes"), "{would}");
    assert!(!would.contains("lose 0 B"), "it was written until its owner was killed: {would}");
    let said = place.fails("disk delete db --force --node n2", 4);
    assert!(said.contains("this would lose") && said.contains("--yes"), "{said}");
    place.json("disk show db --node n2");

    // By whichever of the two does not own it.
    let deleted = place.json("disk delete db --force --yes --node n3");
    assert_shape(&deleted, "weir.deleted-disk/2");
    assert!(deleted["done"] == true && deleted["lost"].as_str().unwrap().contains("acknowledged writes"));
    place.fails("disk show db --node n2", 3);
    for node in ["n2", "n3"] {
        await_some("the logs are given up", || {
            logs_on(&place, node).as_array().unwrap().is_empty().then_some(())
        });
    }
    assert!(place.ok("events --node n2").contains("lost: "));

    // Its name is free, and nothing of it comes back.
    place.ok("disk create db --volume pool --size 1MiB --policy write-back+1 --node n2");
    place.ok("disk export db --node n2");
    assert_eq!(place.json("disk show db --node n2")["detail"]["appended"], 0);
    place.ok("disk delete db --yes --node n3");
}
