//! `weir explain` on a real disk: what it says must agree with what was done to it.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::Value;

const WEIR: &str = env!("CARGO_BIN_EXE_weir");

fn weir(place: &Path, line: &str) -> String {
    let output = Command::new(WEIR)
        .args(line.split_whitespace())
        .current_dir(place)
        .env("WEIR_LAB", place.join("lab"))
        .env_remove("WEIR_API")
        .output()
        .unwrap();
    assert!(output.status.success(), "weir {line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json(place: &Path, line: &str) -> Value {
    serde_json::from_str(&weir(place, &format!("{line} --output json"))).unwrap()
}

#[test]
fn the_time_of_live_requests_is_divided_among_layers() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    std::fs::create_dir(place.join("pool")).unwrap();
    weir(place, "lab up --nodes 2");
    weir(place, &format!("volume create pool --path {}", place.join("pool").display()));
    weir(place, "disk create db --volume pool --size 16MiB --policy write-back+1");
    weir(place, "disk export db --on n1");
    while json(place, "disk show db")["effective"] != "write-back+1" {
        thread::sleep(Duration::from_millis(50));
    }
    let quiet = json(place, "explain db --over 100ms");
    assert_eq!(quiet["findings"], serde_json::json!(["reads: there were none", "writes: there were none"]));

    let socket = place.join("lab/n1/nbd.sock");
    let uri = format!("nbd+unix:///db?socket={}", socket.display());
    let load = format!("bench {uri} --rw randrw:50 --qd 4 --rate 2000 --runtime 6s --destroy");
    let (explained, text, top) = thread::scope(|scope| {
        scope.spawn(|| weir(place, &load));
        thread::sleep(Duration::from_secs(2));
        let top = || weir(place, "top --every 1s --count 1");
        (json(place, "explain db --over 2s"), weir(place, "explain db --over 500ms"), top())
    });
    let windows = explained["windows"].as_array().unwrap();
    let of = |kind: &str, layer: &str| {
        windows.iter().find(|window| window["kind"] == kind && window["layer"] == layer).unwrap()
    };
    for kind in ["read", "write"] {
        let top = of(kind, "export");
        let rate = top["rate"].as_f64().unwrap();
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
    weir(place, "lab down");
}
