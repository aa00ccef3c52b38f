//! `weir profile` on a real node: a known load appears in the disk's profile, and a replay of the profile resembles it.
#![allow(clippy::unwrap_used)]

mod common;

use std::process::Stdio;
use std::time::Duration;

use common::{Place, assert_shape};
use serde_json::Value;

/// A place with one node and a disk `d`, and the disk's export.
fn with_disk() -> (Place, String) {
    let place = Place::new();
    place.ok("lab up --nodes 1");
    place.ok(&format!("volume create pool --path {}", place.pool().display()));
    place.ok("disk create d --volume pool --size 256MiB --policy write-back+0");
    let uris = place.ok("disk export d");
    (place, uris.lines().next().unwrap().to_owned())
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

#[test]
fn a_known_load_is_found_and_comes_back() {
    let (place, uri) = with_disk();
    place.ok(&format!(
        "bench {uri} --rw randwrite --bs 64k --size 64MiB --bytes 64MiB --runtime 1s --warmup 0s --destroy"
    ));

    let load = "--rw randrw:70 --bs 4k:60,16k:40 --pattern zipf:1.1 --rate 1000 --poisson --size 64MiB --destroy --no-prefill";
    let load = format!("bench {uri} {load} --runtime 7s --warmup 0s --format json");
    let load = place.command(&load).stdout(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let recorded = place.json("profile record d --for 5s --to d.json");
    let result: Value = serde_json::from_slice(&load.wait_with_output().unwrap().stdout).unwrap();

    let (reads, writes) = (&result["kinds"][0], &result["kinds"][1]);
    let summary = &recorded["summary"];
    let near = |is: f64, should: f64, off: f64| {
        assert!((is - should).abs() <= off, "{is} instead of {should}: {summary}")
    };
    assert_eq!(number(&recorded["seconds"]), 5.0);
    near(number(&summary["iops"]), number(&reads["iops"]) + number(&writes["iops"]), 50.0);
    near(number(&summary["read_percent"]), 70.0, 2.5);
    near(number(&summary["mean_bytes"][0]), number(&reads["bytes"]) / number(&reads["ios"]), 400.0);
    assert!((0.5..2.5).contains(&number(&summary["dispersion"])), "independent requests: {summary}");
    assert!(number(&summary["sequential_percent"]) < 3.0, "{summary}");
    let working_set = number(&summary["working_set_bytes"]);
    assert!((1e6..64e6).contains(&working_set) && number(&summary["most_hits_percent"]) > 50.0, "{summary}");

    // The saved profile is the printed one, and the disk's own profile includes more requests.
    let kept = place.json("profile show --from d.json");
    assert_eq!(kept["summary"], recorded["summary"]);
    let all = place.json("profile show d");
    assert!(number(&all["write"]["random"]["requests"]) > number(&recorded["write"]["random"]["requests"]));
    let text = place.ok("profile show --from d.json");
    for part in ["disk d", "independently", "working set", "cache for hits", "absorbed"] {
        assert!(text.contains(part), "{part}: {text}");
    }

    let replay = place.json("profile replay --from d.json --target null:256M --for 300ms");
    assert_shape(&replay, "profile replay");
    let replayed = place.json(&format!("profile replay --from d.json --target {uri} --destroy"));
    for row in replayed["rows"].as_array().unwrap() {
        let difference = row["difference"].as_f64().unwrap_or(0.0);
        assert!(difference.abs() <= 10.0, "{row} in {replayed:#}");
    }
    let in_hole = "profile replay --from d.json --target hole.img --destroy --create --for 1s";
    let mistyped = place.fails("profile replay --from d.json --target mistyped.img --for 1s", 3);
    assert!(mistyped.contains("mistyped.img does not exist") && mistyped.contains("--create"), "{mistyped}");
    assert!(!place.path().join("mistyped.img").exists());
    let refused = place.fails(&format!("{in_hole} --prefill-size 4KiB"), 4);
    assert!(refused.contains("4KiB are allowed") && refused.contains("hole.img"), "{refused}");
    place.ok(&format!("{in_hole} --no-prefill"));
    let text = place.ok("profile replay --from d.json --target null:256M --for 1s");
    assert!(text.contains("DIFFERENCE, %") && text.contains("shorter than what was watched"), "{text}");
}

#[test]
fn a_profile_becomes_jobs_that_run() {
    let (place, uri) = with_disk();
    place.ok(&format!(
        "bench {uri} --rw write --bs 8k --rate 500 --runtime 1s --warmup 0s --destroy --no-prefill"
    ));
    std::fs::File::create(place.path().join("scratch.img")).unwrap().set_len(256 << 20).unwrap();
    for (format, file) in [("bench", "d.jobs"), ("fio", "d.fio")] {
        let jobs = place.ok(&format!("profile export d --format {format} --target scratch.img --for 300ms"));
        std::fs::write(place.path().join(file), jobs).unwrap();
    }
    assert!(place.read("d.fio").contains("[sequential-write]"), "{}", place.read("d.fio"));
    for file in ["d.jobs", "d.fio"] {
        let report = place.parsed(&format!("bench --jobs {file} --destroy --no-prefill --format json"));
        let jobs = report["jobs"].as_array().unwrap();
        assert_eq!((jobs.len(), &jobs[0]["kinds"][0]["kind"]), (1, &Value::from("write")), "{report}");
        assert_shape(&report, file);
        assert!(number(&jobs[0]["kinds"][0]["ios"]) > 20.0, "{report}");
    }
}

#[test]
fn traces_are_imported_and_mistakes_are_named() {
    let place = Place::new();
    let log = "fio version 3 iolog\n0 /dev/x add\n1 /dev/x open\n10000 /dev/x read 0 4096\n900000 /dev/x write 4096 8192\n";
    std::fs::write(place.path().join("x.log"), log).unwrap();
    let shown = place.json("profile import x.log");
    assert_shape(&shown, "profile import");
    assert_eq!((number(&shown["seconds"]), number(&shown["summary"]["read_percent"])), (0.89, 50.0));
    assert_eq!(place.json("profile show --from x.log.profile.json")["summary"], shown["summary"]);
    let sum = place.json("profile show --from x.log.profile.json x.log.profile.json");
    assert_eq!(number(&sum["seconds"]), 1.78);

    std::fs::write(place.path().join("bad.log"), "fio version 3 iolog\n10 /dev/x burn 0 4096\n").unwrap();
    assert!(place.fails("profile import bad.log", 2).contains("bad.log: line 2"));
    assert!(place.fails("profile show --from x.log", 2).contains("x.log: it is not a profile"));
    assert!(place.fails("profile show --from none.json", 3).contains("none.json"));
    assert!(place.fails("profile show", 2).contains("DISK"));
    assert!(place.fails("profile replay --from x.log.profile.json --target x.log", 4).contains("--destroy"));
    place.ok("lab up --nodes 1");
    assert!(place.fails("profile show nobody", 3).contains("nobody"));
    place.ok(&format!("volume create pool --path {}", place.pool().display()));
    place.ok("disk create d --volume pool --size 64MiB --policy write-back+0");
    assert!(place.fails("profile show d", 4).contains("closed"));
    place.ok("disk export d");
    assert!(place.fails("profile record d --for 10ms", 2).contains("100 ms to 7 days"));
}
