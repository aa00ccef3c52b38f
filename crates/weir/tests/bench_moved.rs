//! A load on a disk that moves to another node: its connection ends, and the load says why.
#![allow(clippy::unwrap_used)]

mod common;

use std::process::Stdio;

use common::{Place, await_some};

#[test]
fn a_load_says_that_its_disk_has_moved() {
    let place = Place::new();
    place.ok("lab up --nodes 2");
    place.ok(&format!("volume create pool --path {}", place.pool().display()));
    place.ok("disk create db --volume pool --size 16MiB --policy write-back+1");
    let uris = place.ok("disk export db --node n1");
    let uri = uris.lines().find(|uri| uri.starts_with("nbd+unix:")).unwrap();
    let mut load = place.command(&format!("bench {uri} --rw randwrite --destroy --no-prefill --runtime 60s"));
    let load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    await_some("requests of the load", || {
        place.json("disk show db")["detail"]["acknowledged"].as_u64().filter(|last| *last > 1000)
    });
    place.ok("disk move db --to n2");
    let ended = load.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("disk db has moved from n1 to n2"), "{said}");
    assert!(said.contains("exported there at nbd") && said.contains("/n2/"), "{said}");
    let printed = String::from_utf8(ended.stdout).unwrap();
    assert!(printed.contains("IOPS"), "what was measured until then: {printed}");
}
