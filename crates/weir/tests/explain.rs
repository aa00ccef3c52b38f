//! `weir explain` on a real disk: its findings must agree with the load.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use common::Place;

#[test]
fn the_time_of_live_requests_is_divided_among_layers() {
    let place = Place::new();
    place.ok("lab up --nodes 2");
    place.ok(&format!("volume create pool --path {}", place.pool().display()));
    place.ok("disk create db --volume pool --size 16MiB --policy write-back+1");
    place.ok("disk export db --on n1");
    while place.json("disk show db")["effective"] != "write-back+1" {
        thread::sleep(Duration::from_millis(50));
    }
    let quiet = place.json("explain db --over 100ms");
    assert_eq!(quiet["findings"], serde_json::json!(["reads: there were none", "writes: there were none"]));

    let socket = place.path().join("weir-lab/n1/nbd.sock");
    let uri = format!("nbd+unix:///db?socket={}", socket.display());
    let load = format!("bench {uri} --rw randrw:50 --qd 4 --rate 2000 --runtime 6s --destroy");
    let (explained, text, top) = thread::scope(|scope| {
        scope.spawn(|| place.ok(&load));
        thread::sleep(Duration::from_secs(2));
        let top = || place.ok("top --every 1s --count 1");
        (place.json("explain db --over 2s"), place.ok("explain db --over 500ms"), top())
    });
    a_limit_is_named(&place, &uri);
    let windows = explained["windows"].as_array().unwrap();
    let of = |kind: &str, layer: &str| {
        windows.iter().find(|window| window["kind"] == kind && window["layer"] == layer).unwrap()
    };
    for kind in ["read", "write"] {
        let top = of(kind, "export");
        let rate = top["requests_per_second"].as_f64().unwrap();
        assert!((700.0..1300.0).contains(&rate), "about half of 2000: {rate}");
        let shares: f64 = windows
            .iter()
            .filter(|window| window["kind"] == kind)
            .filter_map(|window| window["share"].as_f64())
            .sum();
        assert!((shares - 1.0).abs() < 1e-6, "{explained:#}");
    }
    assert!(of("write", "replicas")["own_us"].as_f64().unwrap() > 0.0, "writes wait for the replica");
    assert!(of("write", "backing")["own_us"].is_null(), "and not for destage");
    assert!(text.contains("KIND") && text.contains("writes"), "{text}");
    let line = top.lines().find(|line| line.starts_with("db ")).unwrap();
    assert!(line.contains("n1") && line.contains("write-back+1") && line.matches("/s").count() == 2, "{top}");
}

/// Whose requests wait for the disk's limit learns it from the meters, too.
fn a_limit_is_named(place: &Place, uri: &str) {
    place.ok("disk limit db --iops 200");
    let (explained, top) = thread::scope(|scope| {
        scope.spawn(|| place.ok(&format!("bench {uri} --qd 4 --runtime 5s --warmup 0s --no-prefill")));
        thread::sleep(Duration::from_secs(1));
        let explained = place.json("explain db --over 2s");
        (explained, place.ok("top --every 1s --count 1"))
    });
    let findings = explained["findings"].as_array().unwrap();
    let limit = findings.last().unwrap().as_str().unwrap();
    assert!(
        limit.contains("were held back by the disk's limit (200 requests/s, burst of 100 ms)"),
        "{limit}"
    );
    let delays = &explained["disk"]["detail"]["limit_delays"];
    assert!(
        delays["requests"].as_u64().unwrap() > 100 && delays["seconds"].as_f64().unwrap() > 0.5,
        "{delays}"
    );
    let line = top.lines().find(|line| line.starts_with("db ")).unwrap();
    assert!(line.contains("limit ("), "{top}");
    let shown = place.ok("disk show db");
    assert!(shown.contains("limit delays"), "{shown}");
    let metrics = metrics(place);
    let line =
        metrics.lines().find(|line| line.starts_with("weir_disk_limit_delayed_requests_total{")).unwrap();
    assert!(line.contains("disk=\"db\"") && !line.ends_with(" 0"), "{line}");
    place.ok("disk limit db --none");
}

/// What Prometheus reads from the disk's owner.
fn metrics(place: &Place) -> String {
    let mut stream = UnixStream::connect(place.path().join("weir-lab/n1/api.sock")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: w\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}
