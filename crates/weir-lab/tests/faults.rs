//! A published measurement, repeated in the lab: a file server that dispatches one writer's sequence from two threads
//! costs it more than nine tenths of its speed, and nothing else; and the finder says so.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::{alone, program};
use weir_lab::fault::orders::{self, Order};
use weir_lab::fault::{At, Faults, LinkFaults};
use weir_lab::{Lab, LabConfig};
use weir_load::{Access, Size, Workload};
use weir_node::api::{CreateDisk, CreateVolume, Export, RunLoad};
use weir_node::client::Client;
use weir_node::shard::messages::LoadLayer;

const DISK: &str = "d1";
const SIZE: u64 = 64 << 20;

/// Nodes that take orders, and one disk in memory.
struct Stack {
    lab: Lab,
    _directory: tempfile::TempDir,
}

impl Stack {
    fn up(nodes: usize, policy: &str) -> Stack {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut config = LabConfig::new(directory.path().join("lab"), env!("CARGO_BIN_EXE_weir-lab-node"));
        (config.nodes, config.log) = (nodes, weir_node::units::Size(4 << 20));
        let lab = Lab::up(&config).unwrap();
        let pool = directory.path().join("pool");
        std::fs::create_dir(&pool).unwrap();
        let stack = Stack { lab, _directory: directory };
        let client = stack.client();
        client.create_volume(&CreateVolume { name: "pool".into(), kind: "dir".into(), path: pool }).unwrap();
        let (name, volume, policy) = (DISK.to_owned(), "pool".to_owned(), policy.to_owned());
        client.create_disk(&CreateDisk { name, volume, size: SIZE, logical_block: 512, policy }).unwrap();
        client.export(DISK, &Export::default()).unwrap();
        stack
    }

    fn client(&self) -> Client {
        self.lab.client("n1").unwrap()
    }

    fn order(&self, node: &str, order: &Order) {
        let state = self.lab.node(node).unwrap().config.parent().unwrap().to_owned();
        orders::send(&orders::socket(&state), order).unwrap();
    }

    fn set(&self, at: At, faults: Faults) {
        self.order("n1", &Order::Disk { disk: DISK.into(), at, faults });
    }

    /// IOPS of 8 KiB at depth 8.
    fn iops(&self, layer: LoadLayer, access: Access) -> f64 {
        let workload = Workload {
            access,
            block_size: Size(8192),
            queue_depth: 8,
            runtime: Some(Duration::from_secs(1)),
            warmup: Duration::from_millis(200),
            ..Workload::default()
        };
        let summary = self.client().load(DISK, &RunLoad { layer, workload }).unwrap();
        assert_eq!(summary.first_error, None);
        summary.kinds.iter().map(|kind| kind.iops).sum()
    }
}

const DISORDER: Faults = Faults {
    dispatchers: 2,
    hold_us: 100,
    delay_us: 0,
    jitter_us: 0,
    bandwidth: 0,
    in_flight: 0,
    tier: None,
    errors_per_million: 0,
    simulated_disk: false,
};

fn disk() -> Faults {
    Faults { simulated_disk: true, ..Faults::default() }
}

#[test]
fn two_dispatching_threads_cost_a_sequential_writer_more_than_nine_tenths() {
    let _turn = alone();
    let stack = Stack::up(1, "write-through");
    stack.set(At::Backing, disk());
    let kinds = [Access::Write, Access::Read, Access::RandWrite, Access::RandRead];
    let all = || kinds.map(|kind| stack.iops(LoadLayer::Accel, kind));
    let before = all();
    stack.set(At::Accel, DISORDER);
    let after = all();
    stack.set(At::Accel, Faults::default());
    let cleared = stack.iops(LoadLayer::Accel, Access::Write);
    eprintln!(
        "IOPS of sequential write, sequential read, random write, random read: {before:.0?} → {after:.0?}"
    );
    assert!(after[0] < 0.1 * before[0], "{before:?} → {after:?}");
    for kind in 1..4 {
        assert!(after[kind] > 0.8 * before[kind], "{:?}: {before:?} → {after:?}", kinds[kind]);
    }
    assert!((250.0..400.0).contains(&before[3]), "a disk of 15 000 revolutions: {before:?}");
    assert!(cleared > 0.7 * before[0], "the order is kept again: {cleared}");
}

#[test]
fn the_finder_says_that_the_order_is_lost() {
    let _turn = alone();
    let stack = Stack::up(1, "write-through");
    stack.set(At::Backing, disk());
    stack.set(At::Accel, DISORDER);
    let arguments = ["--tier", "probe", "--repeats", "2", "--runtime", "600 ms", "--policies", "none"];
    let said = diagnose(&stack, &arguments);
    assert_eq!(said["cause"], "arrival_order", "{said:#}");
    assert!(said["headline"].as_str().unwrap().contains("from backing to accel"), "{said:#}");
}

/// What `weir diagnose` says of the disk, for programs.
fn diagnose(stack: &Stack, arguments: &[&str]) -> serde_json::Value {
    let report = stack.lab.dir().join("report.html");
    let output = Command::new(program())
        .args(["--output", "json", "--lab"])
        .arg(stack.lab.dir())
        .args(["diagnose", "--disk", DISK, "--destroy", "--seed", "1", "--report"])
        .arg(&report)
        .args(arguments)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let said = serde_json::from_slice(&output.stdout);
    let said: serde_json::Value = said.unwrap_or_else(|error| panic!("{error}: {errors}"));
    assert!(Path::new(&report).exists());
    if std::env::var_os("WEIR_SHOW").is_some() {
        let json = std::fs::read_to_string(report.with_extension("json")).unwrap();
        std::fs::write("/tmp/weir-faults-report.json", json).unwrap();
    }
    said
}

#[test]
fn a_way_to_a_replica_is_as_long_as_it_is_told_to_be() {
    let _turn = alone();
    let stack = Stack::up(2, "write-back+1");
    let median = || {
        let workload = Workload {
            access: Access::RandWrite,
            queue_depth: 1,
            runtime: Some(Duration::from_millis(500)),
            ..Workload::default()
        };
        let summary = stack.client().load(DISK, &RunLoad { layer: LoadLayer::Accel, workload }).unwrap();
        Duration::from_nanos(summary.kinds[0].latency_ns.p50)
    };
    let before = median();
    stack.order("n2", &Order::Link(LinkFaults { delay_us: 5000, bandwidth: 0 }));
    let after = median();
    eprintln!("median of a replicated write: {before:?} → {after:?}");
    assert!(after >= before.max(Duration::from_millis(5)) && before < Duration::from_millis(5));
}
