//! A disk's limit on real nodes: guests feel it, it is changed while one uses the disk, and it goes where the disk goes.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::thread;
use std::time::Duration;

use common::{Bench, DISK, alone, seed};
use support::guest_load::{GuestLoad, REQUEST, Shape};
use weir_block::Nanos;
use weir_nbd::Uri;
use weir_node::api::{ApiErrorKind, DiskLimit, DiskView};

/// A guest that asks for all it can get.
const GREEDY: Shape = Shape { depth: 8, read_percent: 50, rate: None };

/// What may come on top of a limit: the burst, and answers that are under way.
const MORE: f64 = 1.15;

/// What a busy machine may leave of a limit.
const LESS: f64 = 0.6;

fn start(bench: &Bench) -> GuestLoad {
    let node = bench.owner();
    GuestLoad::start(&Uri::unix(&bench.lab.node(&node).unwrap().nbd_unix, DISK), GREEDY, seed())
}

/// Sleeps, and returns the times of the beginning and of the end.
fn a_while() -> (Nanos, Nanos) {
    let began = Nanos::now();
    thread::sleep(Duration::from_secs(2));
    (began, Nanos::now())
}

fn is_near(rate: f64, limit: f64) {
    assert!(rate < limit * MORE && rate > limit * LESS, "{rate:.0} requests per second instead of {limit}");
}

#[test]
fn a_limit_holds_is_changed_and_stays_with_the_disk() {
    let _turn = alone();
    let mut bench = Bench::up(2, "write-back+1", |_| {});
    let client = bench.lab.client(&bench.owner()).unwrap();
    let requests = DiskLimit { iops: Some(400), bytes_per_second: None, burst_ms: 50 };
    let bytes =
        DiskLimit { iops: Some(100_000), bytes_per_second: Some(200 * u64::from(REQUEST)), burst_ms: 50 };

    let refused = client.set_limit(DISK, Some(DiskLimit { iops: Some(0), ..requests })).unwrap_err();
    assert_eq!(refused.kind, ApiErrorKind::Invalid, "{refused:?}");
    assert!(refused.message.contains("would serve nothing"), "{refused:?}");

    // One guest all the time, who notices only its rate.
    let load = start(&bench);
    assert_eq!(client.set_limit(DISK, Some(requests)).unwrap().limit, Some(requests));
    thread::sleep(Duration::from_millis(200));
    let first = a_while();
    assert_eq!(client.set_limit(DISK, Some(bytes)).unwrap().limit, Some(bytes));
    thread::sleep(Duration::from_millis(200));
    let second = a_while();
    let delays = client.disk(DISK).unwrap().detail.unwrap().limit_delays;
    assert!(delays.requests > 500 && delays.seconds > 0.0, "{delays:?}");
    assert_eq!(client.set_limit(DISK, None).unwrap().limit, None);
    let third = a_while();
    client.set_limit(DISK, Some(bytes)).unwrap();
    let timeline = load.finish();
    is_near(timeline.rate(first.0, first.1), 400.0);
    is_near(timeline.rate(second.0, second.1), 200.0);
    let unlimited = timeline.rate(third.0, third.1);
    assert!(unlimited > 800.0, "{unlimited:.0} requests per second without a limit");

    // A move, and a takeover.
    let (from, to) = (bench.owner(), bench.wait_effective().replicas[0].clone());
    bench.lab.any_client().unwrap().move_disk(DISK, &to).unwrap();
    limited_on(&bench, &to, bytes);
    bench.wait_effective();
    bench.lab.kill(&to).unwrap();
    limited_on(&bench, &from, bytes);
}

/// The disk is on this node, with the limit.
fn limited_on(bench: &Bench, node: &str, limit: DiskLimit) {
    let is_there = |view: &DiskView| view.owner.as_deref() == Some(node) && view.detail.is_some();
    assert_eq!(bench.wait(is_there).limit, Some(limit));
    let load = start(bench);
    thread::sleep(Duration::from_millis(200));
    let (began, ended) = a_while();
    is_near(load.finish().rate(began, ended), 200.0);
}
