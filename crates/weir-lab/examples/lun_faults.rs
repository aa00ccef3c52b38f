//! Random faults of a cluster shared volume on a LUN, under verified load: hosts that crash, paths that break, processes that stand still,
//! disks that move, writes that land after their node has been fenced or replaced, space that runs out. Every acknowledged write and every read
//! is checked, and in the end the filesystem. Needs root, and cgroup v1's `blkio.throttle`.
#![allow(clippy::unwrap_used)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use clap::Parser;
use common::lun::{HeldUp, LunBench, take_all_space};
use common::{DISK, SOON, during, new_history};
use fastrand::Rng;
use weir_block::Nanos;
use weir_lab::process::ProcessState;
use weir_load::verify::{Atomicity, History};
use weir_load::verifying::{Settings, VerifyingLoad};
use weir_node::api::{ApiErrorKind, Delete};

const NODES: usize = 3;

/// Random faults of a volume on a LUN.
#[derive(Debug, Parser)]
struct Arguments {
    /// Rounds on each filesystem; each has one fault.
    #[arg(long, default_value_t = 100)]
    rounds: u32,
    /// Replays a run.
    #[arg(long)]
    seed: Option<u64>,
    /// One of xfs and ext4; otherwise both.
    #[arg(long)]
    only: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The coordinator's host crashes.
    CrashCoordinator,
    /// The owner's process is killed.
    KillOwner,
    /// The owner's path to the LUN breaks, and is there again.
    LosePath,
    /// The coordinator's process stands still: it is fenced if that lasts.
    PauseCoordinator,
    /// The owner's process stands still.
    PauseOwner,
    /// The disk moves.
    Move,
    /// Writes of the coordinator, or of the owner, are held up on their way to the LUN; its host crashes, or its process stands still, and
    /// they land later.
    LateWrites,
    /// Another disk takes all space, and gives it back, while a new disk is written to.
    NoSpace,
}

const FAULTS: [Fault; 8] = [
    Fault::CrashCoordinator,
    Fault::KillOwner,
    Fault::LosePath,
    Fault::PauseCoordinator,
    Fault::PauseOwner,
    Fault::Move,
    Fault::LateWrites,
    Fault::NoSpace,
];

#[derive(Debug, Default)]
struct Totals {
    acknowledged: u64,
    longest: Duration,
    fences: usize,
    /// Of each kind of fault.
    faults: BTreeMap<String, u32>,
    /// Writes that reached the LUN after their process had ended, or stood still.
    late: u64,
}

fn main() {
    let arguments = Arguments::parse();
    let seed = arguments.seed.unwrap_or_else(|| Nanos::now().0);
    println!("seed {seed}");
    let mut random = Rng::with_seed(seed);
    for format in ["xfs", "ext4"] {
        if arguments.only.as_ref().is_none_or(|only| only == format) {
            let totals = rounds(format, arguments.rounds, &mut random);
            println!(
                "{format}: {} rounds, 0 lost, 0 errors, {} acknowledged writes, {} fences, longest stall {:?}, clean",
                arguments.rounds, totals.acknowledged, totals.fences, totals.longest
            );
            let faults: Vec<String> =
                totals.faults.iter().map(|(fault, count)| format!("{count} {fault}")).collect();
            println!("{format}: {}; {} late writes", faults.join(", "), totals.late);
        }
    }
}

fn rounds(format: &str, rounds: u32, random: &mut Rng) -> Totals {
    let policy = if random.bool() { "write-back+1" } else { "write-through" };
    let mut pool = LunBench::up(NODES, format, policy, |_| {});
    let mut history: History = new_history(random.u64(..));
    let mut totals = Totals::default();
    for round in 0..rounds {
        let fault = FAULTS[random.usize(..FAULTS.len())];
        let (coordinator, owner) = (pool.coordinator(), pool.bench.owner());
        let load = pool.bench.load(history, random.u64(..));
        let (mut load, late) = during(load, Duration::from_millis(random.u64(300..1500)), || {
            thread::sleep(Duration::from_millis(random.u64(50..800)));
            inflict(&mut pool, fault, (&coordinator, &owner), random)
        });
        mend(&mut pool);
        let found = load.found().clone();
        assert_eq!(found.mismatches, 0, "round {round}, {fault:?}: {:#?}{}", found.first, pool.bench.logs());
        let progress = load.progress();
        *totals.faults.entry(format!("{fault:?}")).or_default() += 1;
        totals.late += late;
        totals.acknowledged += progress.acknowledged();
        totals.longest = totals.longest.max(progress.longest_stall());
        println!(
            "{format} {policy} round {round}: {fault:?}, coordinator {coordinator}, owner {owner}: {} acknowledged, {} errors, {late} late writes, longest stall {:?}",
            progress.acknowledged(),
            progress.failed(),
            progress.longest_stall()
        );
        // Guests wait through each of these faults: all are over long before `lun.coordinator_wait` and `limits.full_volume_wait` are (P9).
        assert_eq!(
            progress.failed(),
            0,
            "round {round}, {fault:?}: a guest saw an error{}",
            pool.bench.logs()
        );
        if round % 10 == 9 || round + 1 == rounds {
            let all = load.check_all().unwrap();
            assert_eq!(all.mismatches, 0, "round {round}, {fault:?}: {:#?}{}", all.first, pool.bench.logs());
        }
        history = load.into_history();
    }
    totals.fences = pool.luns.fenced().len();
    pool.ends_clean();
    totals
}

fn number(node: &str) -> usize {
    node[1..].parse().unwrap()
}

/// Returns the number of late writes.
fn inflict(pool: &mut LunBench, fault: Fault, (coordinator, owner): (&str, &str), random: &mut Rng) -> u64 {
    match fault {
        Fault::CrashCoordinator => {
            pool.crash(coordinator);
        }
        Fault::KillOwner => pool.bench.lab.kill(owner).unwrap(),
        Fault::LosePath => {
            pool.luns.set_path(number(owner), false);
            thread::sleep(Duration::from_millis(random.u64(100..2500)));
            pool.luns.set_path(number(owner), true);
        }
        Fault::PauseCoordinator | Fault::PauseOwner => {
            let node = if fault == Fault::PauseOwner { owner } else { coordinator };
            let lasts = Duration::from_millis(random.u64(100..6000));
            pool.stand_still(node, lasts);
            thread::sleep(lasts);
            pool.bench.lab.resume(node).unwrap();
        }
        Fault::Move => {
            let others: Vec<String> =
                (1..=NODES).map(|node| format!("n{node}")).filter(|node| node != owner).collect();
            let to = &others[random.usize(..others.len())];
            // Its target may have gone; the disk stays then.
            let _ = pool.bench.lab.any_client().unwrap().move_disk(DISK, to);
        }
        Fault::LateWrites => {
            let node = if random.bool() { owner } else { coordinator };
            return late_writes(pool, node, random);
        }
        Fault::NoSpace => run_out_of_space(pool, random),
    }
    0
}

/// Longest time that writes are held up: less than `lease.fence_grace` of the lab, for which a former owner's writes are awaited.
const HELD_UP_MS: u64 = 5000;

fn late_writes(pool: &mut LunBench, node: &str, random: &mut Rng) -> u64 {
    let process = pool.bench.lab.process(node).unwrap().unwrap();
    let held = pool.luns.hold_up(number(node), process.pid);
    let held = held.expect("the kernel has cgroup v1's blkio.throttle");
    let device = pool.luns.path(number(node)).to_owned();
    thread::sleep(Duration::from_millis(random.u64(100..500)));
    let stands = random.bool();
    let lasts = Duration::from_millis(random.u64(500..HELD_UP_MS));
    if stands {
        pool.stand_still(node, lasts);
    } else {
        pool.shut_down(node);
        process.signal(rustix::process::Signal::KILL).unwrap();
    }
    let before = HeldUp::landed(&device);
    thread::sleep(lasts);
    let late = held.let_go(before);
    if stands {
        thread::sleep(Duration::from_millis(random.u64(0..2000)));
        pool.bench.lab.resume(node).unwrap();
    } else {
        // It can end only now, if it has not already.
        let _ = pool.bench.lab.kill(node);
    }
    late
}

/// A new disk needs space for each write: what it has acknowledged, and what waits, is there when there is space again.
fn run_out_of_space(pool: &mut LunBench, random: &mut Rng) {
    const FILLER: &str = "filler";
    const NEW: &str = "new";
    let bench = &pool.bench;
    let seed = random.u64(..);
    bench.create_sized(NEW, "write-through", common::SIZE);
    let filler = take_all_space(bench, FILLER);
    let full = || {
        let volumes = bench.lab.any_client().unwrap().volumes().unwrap_or_default();
        volumes.iter().any(|volume| volume.full_for.iter().any(|disk| disk == FILLER))
    };
    await_some("a full volume", pool, full);
    let settings = Settings {
        seed,
        reconnect_for: SOON * 2,
        timeout: Duration::from_secs(60),
        atomicity: Atomicity::Block,
        ..Settings::default()
    };
    let mut load = VerifyingLoad::new(new_history(seed), settings, bench.locate_named(NEW));
    let waits = Duration::from_millis(random.u64(500..3000));
    let progress = load.progress();
    let running = thread::spawn(move || load.run(SOON * 4).map(|()| load));
    thread::sleep(waits);
    delete(pool, FILLER);
    let before = progress.acknowledged();
    await_some("write on the volume that has space again", pool, || progress.acknowledged() > before + 100);
    progress.stop();
    let mut load = running.join().unwrap().unwrap();
    filler.join().unwrap();
    let found = load.check_all().unwrap();
    assert_eq!((found.mismatches, load.progress().failed()), (0, 0), "{:#?}{}", found.first, bench.logs());
    drop(load);
    delete(pool, NEW);
}

fn delete(pool: &LunBench, disk: &str) {
    let force = Delete { force: true, ..Delete::default() };
    await_some("its deletion", pool, || match pool.bench.lab.any_client().unwrap().delete(disk, &force) {
        // An earlier attempt has deleted it, and could not remove its file.
        Err(error) => error.kind == ApiErrorKind::NotFound,
        Ok(_) => true,
    });
}

fn await_some(what: &str, pool: &LunBench, is_so: impl Fn() -> bool) {
    let deadline = Nanos::now() + SOON * 2;
    while !is_so() {
        assert!(Nanos::now() < deadline, "no {what}{}", pool.bench.logs());
        thread::sleep(Duration::from_millis(50));
    }
}

/// Every node runs again, somebody coordinates, and the disk has its policy.
fn mend(pool: &mut LunBench) {
    for node in 1..=NODES {
        let name = format!("n{node}");
        if pool.bench.lab.node(&name).unwrap().process_state() != ProcessState::Running {
            pool.bench.lab.start(&name).unwrap();
        }
    }
    pool.coordinator();
    let deadline = Nanos::now() + SOON;
    while pool.bench.disk().is_none() {
        assert!(Nanos::now() < deadline, "nobody serves the disk{}", pool.bench.logs());
        let _ = pool.bench.lab.any_client().unwrap().export(DISK, &Default::default());
        thread::sleep(Duration::from_millis(100));
    }
    pool.bench.wait_effective();
}
