//! fio's results and ours from the same latencies: percentiles, and the layout of the JSON.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use weir_formats::fio::to_json;
use weir_load::summary::Summary;
use weir_load::tally::{IoKind, Tally};
use weir_load::workload::{Access, Workload};

/// A mixed load by fio on a file, with the log of every latency: its JSON, and (nanoseconds, is a write).
fn fio() -> (Value, Vec<(u64, bool)>) {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new("fio")
        .current_dir(dir.path())
        .args(["--name=job", "--filename=disk", "--size=16m", "--rw=randrw", "--bs=4k", "--ioengine=psync"])
        .args(["--number_ios=4000", "--write_lat_log=log", "--log_avg_msec=0", "--output-format=json"])
        .output()
        .expect("the tests need fio");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let log = std::fs::read_to_string(dir.path().join("log_clat.1.log")).unwrap();
    let entry = |line: &str| {
        let mut cells = line.split(',').map(str::trim);
        let latency = cells.nth(1).unwrap().parse().unwrap();
        (latency, cells.next().unwrap() == "1")
    };
    (serde_json::from_slice(&output.stdout).unwrap(), log.lines().map(entry).collect())
}

/// Every key of a document, with its path; the numbers of percentiles and bins included.
fn paths(value: &Value, path: &str, into: &mut BTreeSet<String>) {
    if let Value::Object(fields) = value {
        for (name, value) in fields {
            let path = format!("{path}/{name}");
            paths(value, &path, into);
            into.insert(path);
        }
    }
}

#[test]
fn percentiles_and_layout_are_those_of_fio() {
    let (theirs, log) = fio();
    assert!(log.len() >= 4_000, "{} latencies", log.len());
    let mut tally = Tally::default();
    for &(latency, is_write) in &log {
        let kind = if is_write { IoKind::Write } else { IoKind::Read };
        tally.count(kind, 4096, latency, true);
    }
    let workload = Workload { access: Access::RandRw { read_percent: 50 }, ..Workload::default() };
    let summary = Summary::new("disk", "psync", &workload, &tally, Duration::from_secs(1));
    let ours = to_json(&[summary], 0.0);
    let mut worst = 0.0_f64;
    for kind in ["read", "write"] {
        let [theirs, ours] = [&theirs, &ours].map(|result| &result["jobs"][0][kind]["clat_ns"]);
        assert_eq!(theirs["N"], ours["N"]);
        for (percent, value) in theirs["percentile"].as_object().unwrap() {
            let (theirs, ours) = (value.as_f64().unwrap(), ours["percentile"][percent].as_f64().unwrap());
            let off = (ours - theirs).abs() / theirs;
            worst = worst.max(off);
            assert!(off < 0.02, "{kind} p{percent}: fio {theirs}, weir {ours}");
        }
        for figure in ["mean", "stddev", "min", "max"] {
            let (theirs, ours) = (theirs[figure].as_f64().unwrap(), ours[figure].as_f64().unwrap());
            assert!((ours - theirs).abs() < theirs * 0.02, "{kind} {figure}: fio {theirs}, weir {ours}");
        }
    }
    println!("{} latencies; percentiles at most {:.2} % from fio's", log.len(), worst * 100.0);

    let (mut has, mut should) = (BTreeSet::new(), BTreeSet::new());
    paths(&ours["jobs"][0], "", &mut has);
    paths(&theirs["jobs"][0], "", &mut should);
    let missing: Vec<&String> = should.difference(&has).filter(|path| !not_measured(path)).collect();
    assert!(missing.is_empty(), "fio has and we have not: {missing:?}");
    let foreign: Vec<&String> =
        has.difference(&should).filter(|path| !path.starts_with("/job options")).collect();
    assert!(foreign == ["/total_err"], "we have and fio has not: {foreign:?}");
}

/// Figures that only fio measures; the head of `fio::json` lists them.
fn not_measured(path: &str) -> bool {
    const OTHERS: [&str; 11] = [
        "/job options",
        "/eta",
        "/usr_cpu",
        "/sys_cpu",
        "/ctx",
        "/majf",
        "/minf",
        "/iodepth",
        "/latency_depth",
        "/latency_target",
        "/latency_percentile",
    ];
    OTHERS.iter().any(|other| path.starts_with(other)) || path.starts_with("/latency_window")
}
