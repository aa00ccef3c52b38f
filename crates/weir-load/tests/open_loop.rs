//! A load with a rate against a server that really stops: the latency from the intended start shows it, the one from the issue
//! does not, and the labels distinguish them.

#![allow(clippy::unwrap_used)]

#[path = "../../weir-nbd/tests/common/mod.rs"]
mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Server, TestDir};
use weir_load::arrivals::Arrivals;
use weir_load::run::{Monitor, run};
use weir_load::summary::{LatencyFrom, Summary};
use weir_load::tally::IoKind;
use weir_load::target::Target;
use weir_load::workload::Workload;

/// Runs `workload` while the server stops for 100 ms in each second.
fn with_stalls(server: &Server, workload: &Workload) -> Summary {
    let target = Target::Nbd(server.uri.clone());
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(450));
                server.stall(Duration::from_millis(100));
                std::thread::sleep(Duration::from_millis(450));
            }
        });
        let summary = run(&target, workload, false, &Monitor::new());
        ended.store(true, Ordering::Relaxed);
        summary.unwrap()
    })
}

#[test]
fn a_stall_is_seen_from_the_intended_start() {
    let dir = TestDir::new();
    let server = dir.nbdkit("memory", &["memory", "64M"]);
    let closed = Workload { runtime: Some(Duration::from_millis(500)), ..Workload::default() };
    let target = Target::Nbd(server.uri.clone());
    let capacity = run(&target, &closed, false, &Monitor::new()).unwrap().iops();
    for arrivals in [Arrivals::Fixed, Arrivals::Poisson] {
        let workload = Workload {
            rate: Some((capacity * 0.8) as u64),
            arrivals,
            runtime: Some(Duration::from_secs(3)),
            ..Workload::default()
        };
        let summary = with_stalls(&server, &workload);
        println!("capacity {capacity:.0}/s, {arrivals:?}\n{:?}", summary.kinds);
        let read = summary.kind(IoKind::Read).unwrap();
        let issue = read.issue_latency_ns.expect("a load with a rate has both");
        assert_eq!(summary.latency_from, LatencyFrom::IntendedStart);
        assert!(read.latency_ns.p99 >= 50_000_000, "{summary:?}");
        assert!(issue.p99 < 50_000_000, "only a full queue was in flight during a stall: {summary:?}");
        assert!(issue.max >= 80_000_000, "and that saw it: {summary:?}");
    }
}

#[test]
fn a_rate_beyond_the_target_is_said() {
    let dir = TestDir::new();
    let server = dir.nbdkit("slow", &["--filter=delay", "memory", "1M", "rdelay=10ms"]);
    let workload = Workload {
        rate: Some(5_000),
        queue_depth: 4,
        runtime: Some(Duration::from_millis(500)),
        ..Workload::default()
    };
    let summary = run(&Target::Nbd(server.uri.clone()), &workload, false, &Monitor::new()).unwrap();
    let read = summary.kind(IoKind::Read).unwrap();
    assert_eq!(read.ios + summary.never_made, 2_500, "every intended start is accounted for: {summary:?}");
    assert!(summary.never_made > 1_000, "{summary:?}");
    let said: Vec<String> = summary.remarks().collect();
    assert!(said[0].contains("never made") && said[0].ends_with("does not sustain the rate"), "{said:?}");
}
