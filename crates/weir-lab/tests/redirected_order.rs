//! A published measurement of a shared volume, on one of Weir's: a coordinator that begins the writes that are redirected to it from two
//! threads costs a sequential writer nearly all of its speed on a disk with a mechanism, and nothing else; and the finder names cause and
//! layer.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::lun::LunBench;
use common::{DISK, SOON, alone, program};
use weir_block::Nanos;
use weir_lab::fault::orders::{self, Order};
use weir_lab::fault::{At, Faults};
use weir_lab::mechanical_disk::MechanicalDisk;
use weir_load::Access;
use weir_node::shard::messages::LoadLayer;

/// Bytes of the LUN: XFS wants 300 MiB.
const LUN: usize = 512 << 20;

/// Rounds of the measurement: other work of this machine costs time, and never makes a disk faster, so the best of each counts.
const ATTEMPTS: usize = 5;

/// What the writer keeps of its speed, at most, as a share. The published measurement: 810 of 17,311.
const KEPT: f64 = 0.1;

/// 8 KiB requests a second at the simulated disk's 128 MiB/s.
const RATED: f64 = 16_384.0;

/// A volume on a simulated disk, redirected; its disk is on a node that does not coordinate it.
struct Redirected {
    // The nodes end before their disk.
    pool: LunBench,
    disk: MechanicalDisk,
    coordinator: String,
    owner: String,
}

impl Redirected {
    fn up(directory: &Path) -> Redirected {
        let disk = MechanicalDisk::create(directory, LUN, 2).unwrap();
        let paths = disk.paths();
        let paths: Vec<&Path> = paths.iter().map(AsRef::as_ref).collect();
        let node =
            |config: &mut weir_lab::LabConfig| config.program = env!("CARGO_BIN_EXE_weir-lab-node").into();
        let pool = LunBench::up_on(&paths, "xfs", "write-through", node);
        let coordinator = pool.coordinator();
        let owner = if coordinator == "n1" { "n2" } else { "n1" }.to_owned();
        let client = pool.bench.lab.any_client().unwrap();
        if pool.bench.owner() != owner {
            client.move_disk(DISK, &owner).unwrap();
        }
        pool.bench.wait_effective();
        client.set_redirected("pool", true).unwrap();
        let redirected = Redirected { pool, disk, coordinator, owner };
        redirected.await_route();
        redirected
    }

    fn await_route(&self) {
        let deadline = Nanos::now() + SOON;
        loop {
            let route = self.pool.bench.disk().and_then(|view| view.detail?.route);
            match route {
                Some(route) if route.state == "file-redirected" => return,
                last => assert!(Nanos::now() < deadline, "{last:?}{}", self.pool.bench.logs()),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sets the faults at the place where the coordinator begins what is redirected to it.
    fn set(&self, faults: Faults) {
        let node = self.pool.bench.lab.node(&self.coordinator).unwrap();
        let order = Order::Disk { disk: DISK.to_owned(), at: At::Redirected, faults };
        orders::send(&orders::socket(node.config.parent().unwrap()), &order).unwrap();
    }

    fn iops(&self, layer: LoadLayer, access: Access) -> f64 {
        common::iops(&self.pool.bench.lab.client(&self.owner).unwrap(), DISK, layer, access)
    }

    /// What the finder says of the two routes.
    fn diagnose(&self, repeats: u32) -> serde_json::Value {
        let report = self.pool.bench.directory.path().join("report.html");
        let mut command = Command::new(program());
        command.args(["--output", "json", "--lab"]).arg(self.pool.bench.lab.dir());
        command.args(["diagnose", "--disk", DISK, "--destroy", "--tier", "probe", "--policies", "none"]);
        // The routes are the lowest layers. Naming a cause needs the runs that decide, not more repeats of the steps.
        command.args(["--without", "accel,nbd", "--more", "0", "--runtime", "650 ms", "--seed", "1"]);
        command.args(["--repeats", &repeats.to_string(), "--report"]).arg(report);
        let output = command.stdin(Stdio::null()).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| {
            panic!("{}{}", String::from_utf8_lossy(&output.stderr), self.pool.bench.logs())
        })
    }
}

/// Rates of sequential writes, sequential reads and random writes.
type Rates = [f64; 3];

/// The best of several rounds: directly, redirected, and redirected without the order. Until they show what there is to show.
fn rates(volume: &Redirected) -> [Rates; 3] {
    let kinds = [Access::Write, Access::Read, Access::RandWrite];
    let mut rates = [[0.0; 3]; 3];
    for attempt in 1.. {
        let measure = |layer, best: &mut Rates| {
            for (best, kind) in best.iter_mut().zip(kinds) {
                *best = f64::max(*best, volume.iops(layer, kind));
            }
        };
        let [direct, kept, lost] = &mut rates;
        measure(LoadLayer::Direct, direct);
        measure(LoadLayer::Backing, kept);
        volume.set(Faults::order_lost(2));
        measure(LoadLayer::Backing, lost);
        volume.set(Faults::default());
        let enough = if is_quiet(kept) {
            lost[0] < KEPT * kept[0]
        } else {
            lost[0] < KEPT * RATED && lost[0] < 0.4 * direct[0]
        };
        if enough && (1..3).all(|kind| lost[kind] > 0.6 * kept[kind]) {
            break;
        }
        assert!(attempt < ATTEMPTS, "{rates:.0?}{}", volume.pool.bench.logs());
    }
    rates
}

/// The redirected writer is near the disk's speed. Where others want the processors too, it is not: a write that comes late costs a revolution,
/// and the more processes it passes the more often it does.
fn is_quiet(kept: &Rates) -> bool {
    kept[0] > 0.5 * RATED
}

#[test]
fn a_coordinator_that_loses_the_order_is_named() {
    let _turn = alone();
    let directory = tempfile::tempdir().unwrap();
    let volume = Redirected::up(directory.path());
    // Written once, so that nothing is allocated while the disk turns.
    volume.iops(LoadLayer::Direct, Access::Write);
    volume.disk.turn(true);
    let rates = rates(&volume);
    eprintln!(
        "IOPS of sequential write, sequential read, random write; direct, redirected, without its order: {rates:.0?}"
    );
    let quiet = is_quiet(&rates[1]);
    if quiet {
        let healthy = volume.diagnose(2);
        assert_ne!(healthy["cause"], "arrival_order", "{healthy:#}");
        eprintln!("with its order: {}", healthy["headline"]);
    }
    volume.set(Faults::order_lost(2));
    // On a busy machine, which has taken most of the writer's speed already, the runs may decide nothing; another cause is never right.
    let attempts = if quiet { ATTEMPTS } else { 1 };
    let mut verdicts = (0..attempts).map(|_| volume.diagnose(3));
    match verdicts.find(|named| !named["cause"].is_null()) {
        Some(named) => {
            eprintln!("without: {}", named["headline"]);
            assert_eq!(
                (&named["cause"], &named["layer"]),
                (&"arrival_order".into(), &"file-redirected".into()),
                "{named:#}"
            );
        }
        None => assert!(!quiet, "no cause is named: {rates:.0?}"),
    }
    volume.disk.turn(false);
}
