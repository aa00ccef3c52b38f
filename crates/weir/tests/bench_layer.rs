//! `weir bench --disk`: a load on a layer inside a node is prefilled, observed, and ends when it is interrupted.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::Place;
use serde_json::Value;

/// A lab of one node with a disk of 64 MiB that was never written.
fn place() -> Place {
    let place = Place::new();
    place.pool();
    place.ok("lab up --nodes 1");
    place.ok("volume create pool --path pool");
    place.ok("disk create db --volume pool --size 64MiB --policy write-back+0");
    place.ok("disk export db");
    while place.json("disk show db")["effective"] != "write-back+0" {
        std::thread::sleep(Duration::from_millis(50));
    }
    place
}

#[test]
fn a_layer_is_filled_watched_and_left_alone_when_interrupted() {
    let place = place();
    let short = "--runtime 200ms --warmup 0s";
    let notes = |line: &str| {
        // The backing alone is measured only when the write log is empty.
        while place.json("disk show db")["detail"]["dirty_bytes"] != 0 {
            std::thread::sleep(Duration::from_millis(50));
        }
        place.json(line)["notes"].as_array().unwrap().clone()
    };
    let said = notes(&format!("bench --disk db --layer backing {short}"));
    let hollow =
        said.iter().any(|note| note.as_str().unwrap().contains("not all of the disk has ever been written"));
    assert!(hollow, "{said:?}");
    let few = format!("bench --disk db --layer accel --rw randwrite --destroy --bytes 64k {short}");
    let untouched = notes(&format!("{few} --no-prefill"));
    assert!(untouched.is_empty(), "who wants no filling is not told of holes: {untouched:?}");
    assert!(!notes(&format!("bench --disk db --layer backing {short}")).is_empty(), "64 KiB do not fill it");
    assert!(place.fails(&format!("{few} --prefill-size 64k"), 4).contains("would be filled"));
    let written = place.json(&few);
    assert_eq!(written["kinds"][0]["bytes"], 64 << 10, "what was filled is not counted: {written}");
    assert_eq!(written["prefill"]["bytes"], place.json("disk show db")["size_bytes"], "but apart: {written}");
    let said = notes(&format!("bench --disk db --layer backing {short}"));
    assert!(said.is_empty(), "all of it is written now: {said:?}");

    let line = "bench --disk db --layer accel --rw randrw --destroy --runtime 1h --warmup 0s --format jsonl";
    let mut child = place.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let interval: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!((&interval["type"], &interval["kinds"][0]["kind"]), (&"interval".into(), &"read".into()));
    assert!(interval["kinds"][0]["iops"].as_f64().unwrap() > 100.0, "{interval}");
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let last: Value = serde_json::from_str(&lines.map(Result::unwrap).last().unwrap()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("interrupted"), "{said}");
    assert!(last["incomplete"].as_str().unwrap().contains("meter"), "{last}");
    assert!(last["kinds"][0]["ios"].as_u64().unwrap() > 100, "{last}");
    // The node has ended the load, too; otherwise it would refuse the next one.
    let mut tries = 0;
    while !place.weir(&format!("bench --disk db --layer accel {short}")).status.success() {
        tries += 1;
        assert!(tries < 50, "the interrupted load goes on in the node");
        std::thread::sleep(Duration::from_millis(100));
    }
}
