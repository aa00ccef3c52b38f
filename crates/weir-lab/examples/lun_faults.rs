//! Random faults of a cluster shared volume on a LUN, under verified load: hosts that crash, paths that break, processes that stand still,
//! disks that move. Every acknowledged write and every read is checked, and in the end the filesystem. Needs root.
#![allow(clippy::unwrap_used)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::process::Command;
use std::thread;
use std::time::Duration;

use clap::Parser;
use common::lun::{LunBench, run};
use common::{DISK, SOON, during, new_history};
use fastrand::Rng;
use weir_block::Nanos;
use weir_lab::process::ProcessState;
use weir_load::verify::History;

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
}

const FAULTS: [Fault; 6] = [
    Fault::CrashCoordinator,
    Fault::KillOwner,
    Fault::LosePath,
    Fault::PauseCoordinator,
    Fault::PauseOwner,
    Fault::Move,
];

#[derive(Debug, Default)]
struct Totals {
    acknowledged: u64,
    failed: u64,
    longest: Duration,
    fences: usize,
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
                "{format}: {} rounds, 0 lost, {} errors, {} acknowledged writes, {} fences, longest stall {:?}",
                arguments.rounds, totals.failed, totals.acknowledged, totals.fences, totals.longest
            );
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
        let (mut load, ()) = during(load, Duration::from_millis(random.u64(300..1500)), || {
            thread::sleep(Duration::from_millis(random.u64(50..800)));
            inflict(&mut pool, fault, (&coordinator, &owner), random);
        });
        mend(&mut pool);
        let found = load.found().clone();
        assert_eq!(found.mismatches, 0, "round {round}, {fault:?}: {:#?}{}", found.first, pool.bench.logs());
        let progress = load.progress();
        totals.acknowledged += progress.acknowledged();
        totals.failed += progress.failed();
        totals.longest = totals.longest.max(progress.longest_stall());
        println!(
            "{format} {policy} round {round}: {fault:?}, coordinator {coordinator}, owner {owner}: {} acknowledged, {} errors, longest stall {:?}",
            progress.acknowledged(),
            progress.failed(),
            progress.longest_stall()
        );
        if round % 10 == 9 {
            let all = load.check_all().unwrap();
            assert_eq!(all.mismatches, 0, "round {round}, {fault:?}: {:#?}{}", all.first, pool.bench.logs());
        }
        history = load.into_history();
    }
    totals.fences = pool.luns.fenced().len();
    let device = pool.luns.path(1).to_owned();
    let LunBench { bench, luns, .. } = pool;
    bench.lab.down().unwrap();
    run(Command::new("blockdev").arg("--setrw").arg(&device));
    match format {
        "ext4" => run(Command::new("e2fsck").arg("-fn").arg(&device)),
        _ => run(Command::new("xfs_repair").arg("-n").arg(&device)),
    }
    drop(luns);
    totals
}

fn inflict(pool: &mut LunBench, fault: Fault, (coordinator, owner): (&str, &str), random: &mut Rng) {
    let number = |node: &str| node[1..].parse::<usize>().unwrap();
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
            pool.bench.lab.pause(node).unwrap();
            thread::sleep(Duration::from_millis(random.u64(100..6000)));
            pool.bench.lab.resume(node).unwrap();
        }
        Fault::Move => {
            let others: Vec<String> =
                (1..=NODES).map(|node| format!("n{node}")).filter(|node| node != owner).collect();
            let to = &others[random.usize(..others.len())];
            // Its target may have gone; the disk stays then.
            let _ = pool.bench.lab.any_client().unwrap().move_disk(DISK, to);
        }
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
