//! Rounds of faults of etcd, and of nodes at once with etcd, under loads that remember every write: `make etcd-faults`.

pub mod compare;
pub mod faults;
pub mod figures;
mod watcher;

use std::thread;
use std::time::Duration;

use fastrand::Rng;
use weir_block::Nanos;
use weir_lab::LabConfig;
use weir_lab::process::ProcessState;
use weir_load::LoadError;
use weir_load::verify::{Atomicity, History};
use weir_load::verifying::{Settings as LoadSettings, VerifyingLoad};
use weir_node::api::{CreateDisk, DiskView, Export};

use self::faults::Fault;
use self::figures::Round;
use self::watcher::{Watched, Watcher};
use crate::common::etcd::Members;
use crate::common::rounds::{CUT_OFF_GRACE, some_time};
use crate::common::{Bench, DISK, SIZE, SOON, new_history};

/// Nodes. With one of them gone, two replicas still have places: a disk that falls to write-through instead has to wait for the fence
/// grace after a takeover, which is a matter of `lease.fence_grace` alone.
const NODES: usize = 4;

/// The disks, on three of them at first. Later they are where their last takeover put them.
const DISKS: [(&str, &str, &str); 3] =
    [(DISK, "write-back+1", "n1"), ("d2", "write-back+2", "n2"), ("d3", "write-back+1", "n3")];

/// A load gives up on a disk after this, and a round on an owner.
const GIVES_UP: Duration = Duration::from_secs(45);

/// A disk under load.
struct Disk {
    name: &'static str,
    /// Absent while a load has it.
    history: Option<History>,
}

/// Nodes on an etcd of three members, with three disks.
pub struct Rig {
    bench: Bench,
    random: Rng,
    disks: Vec<Disk>,
    /// Number of the last small disk that was made to have the registry changed.
    changes: u64,
}

/// What is in memory is not delayed by the machine's disk, which others use, too.
fn in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// Leases of `lease`, in a network whose links to the registry can be cut.
fn tune(config: &mut LabConfig, lease: Duration) {
    (config.network, config.lease_ttl, config.fence_grace) = (true, lease, CUT_OFF_GRACE);
}

/// Waits until `wanted`; `false` after `patience`.
fn becomes(patience: Duration, mut wanted: impl FnMut() -> bool) -> bool {
    let deadline = Nanos::now() + patience;
    while !wanted() {
        if Nanos::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(20));
    }
    true
}

/// The requested policy is in effect, on complete copies.
fn is_whole(view: &DiskView) -> bool {
    view.requested == view.effective && view.state == "serving" && view.lost_replicas.is_empty()
}

impl Rig {
    /// A fresh cluster; nodes count as gone `lease` after their last sign of life.
    pub fn up(seed: u64, lease: Duration) -> Rig {
        let bench = Bench::up_on_etcd_in(in_memory(), NODES, DISKS[0].1, |config| tune(config, lease));
        for (name, policy, node) in &DISKS[1..] {
            let client = bench.lab.client(node).unwrap();
            client.create_disk(&disk(&bench, name, policy, SIZE)).unwrap();
            client.export(name, &Export::default()).unwrap();
        }
        let histories = (seed..).map(new_history);
        let disks = DISKS.iter().zip(histories);
        let disks = disks.map(|((name, ..), history)| Disk { name, history: Some(history) }).collect();
        let mut rig = Rig { bench, random: Rng::with_seed(seed), disks, changes: 0 };
        assert!(rig.mend(), "the disks are not redundant at first{}", rig.bench.logs());
        rig
    }

    fn etcd(&mut self) -> &mut Members {
        // `up` has made them.
        self.bench.etcd.as_mut().unwrap()
    }

    /// The faults of `rounds` rounds, each kind as often as the others.
    pub fn plan(&mut self, rounds: usize) -> Vec<Fault> {
        let mut plan = Vec::new();
        while plan.len() < rounds {
            let mut faults = Fault::ALL;
            self.random.shuffle(&mut faults);
            plan.extend(faults);
        }
        plan.truncate(rounds);
        plan
    }

    /// One fault under load and its end. Every block is judged afterwards, and everything is whole again.
    pub fn round(&mut self, fault: Fault) -> Round {
        let began = Nanos::now();
        let loads: Vec<_> = (0..self.disks.len()).map(|disk| self.load(disk)).collect();
        let progress: Vec<_> = loads.iter().map(VerifyingLoad::progress).collect();
        let threads: Vec<_> = loads.into_iter().map(run).collect();
        let names: Vec<_> = self.disks.iter().map(|disk| disk.name).collect();
        let watcher = Watcher::start(self.bench.lab.nodes(), &names, &progress);
        let started = becomes(SOON, || progress.iter().all(|progress| progress.acknowledged() > 0));
        assert!(started, "a load does not start{}", self.bench.logs());
        thread::sleep(some_time(&mut self.random, 200, 800));
        let struck = Nanos::now();
        let strike = fault.strike(self);
        let healed = becomes(GIVES_UP, || watcher.is_served_after(strike.back));
        thread::sleep(some_time(&mut self.random, 300, 700));
        progress.iter().for_each(|progress| progress.stop());
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let watched = watcher.finish(struck, strike.back);
        let mut round = Round::new(fault, strike.told, strike.back - struck, &watched);
        if !healed {
            round.violations.push(format!("a disk is not served {GIVES_UP:?} after the quorum is back"));
        }
        if !strike.seen {
            round.violations.push("a node has missed changes that were compacted".into());
        }
        // Reading everything needs every disk to be served.
        let mended = self.mend();
        if !mended {
            round.violations.push(format!("redundancy is not back within {SOON:?}"));
        }
        for ((load, result), number) in ended.into_iter().zip(0..) {
            self.judge(&mut round, number, load, result);
        }
        round.seconds = (Nanos::now() - began).as_secs_f64();
        round
    }

    /// A load that leaves the machine time for the others.
    fn load(&mut self, number: usize) -> VerifyingLoad {
        let disk = &mut self.disks[number];
        let settings = LoadSettings {
            depth: 8,
            rate: Some(400),
            seed: self.random.u64(..),
            reconnect_for: GIVES_UP,
            timeout: GIVES_UP,
            atomicity: Atomicity::Block,
            ..LoadSettings::default()
        };
        let history = disk.history.take().expect("the last round has given it back");
        VerifyingLoad::new(history, settings, self.bench.locate_named(disk.name))
    }

    /// Counts what was answered wrongly under load, and what is wrong afterwards.
    fn judge(
        &mut self,
        round: &mut Round,
        number: usize,
        mut load: VerifyingLoad,
        result: Result<(), LoadError>,
    ) {
        let name = self.disks[number].name;
        let progress = load.progress();
        round.count(&progress);
        if let Err(error) = result {
            round.errors += 1;
            round.violations.push(format!("{name}: {error}"));
        }
        let mixed = load.found().clone();
        match load.check_all() {
            Ok(all) => {
                round.lost += mixed.mismatches + all.mismatches;
                let found = mixed.first.into_iter().chain(all.first);
                round.violations.extend(found.map(|found| format!("{name}: {found}")));
            }
            Err(error) => {
                round.lost += mixed.mismatches;
                round.errors += 1;
                round.violations.push(format!("{name} cannot be read: {error}"));
            }
        }
        self.disks[number].history = Some(load.into_history());
    }

    /// Starts every member and node that was killed, and waits until all disks have all copies. Whether they have in time.
    fn mend(&mut self) -> bool {
        self.etcd().start_all();
        for node in self.names() {
            if self.bench.lab.state_of(&node).unwrap() == ProcessState::Gone {
                self.bench.lab.start(&node).unwrap();
            }
        }
        let whole = |disk: &Disk| self.bench.disk_named(disk.name).as_ref().is_some_and(is_whole);
        becomes(SOON, || self.disks.iter().all(whole))
    }

    fn names(&self) -> Vec<String> {
        self.bench.lab.nodes().iter().map(|node| node.name.clone()).collect()
    }

    /// The owner of a disk at random.
    fn some_owner(&mut self) -> String {
        let disk = self.random.choice(&self.disks).expect("there are three").name;
        let owner = self.bench.disk_named(disk).and_then(|view| view.owner);
        owner.unwrap_or_else(|| panic!("{disk} has no owner before the fault{}", self.bench.logs()))
    }

    /// How often nodes have listed the registry again because a compaction was faster than their watch. Their logs tell when
    /// `WEIR_LOG` has `weir_cluster::view=debug`.
    pub fn listed_again(&self) -> usize {
        let logs = self.bench.lab.nodes().iter().map(|node| std::fs::read_to_string(&node.log));
        let met = |line: &&str| line.contains("listing again") && line.contains("no longer known");
        logs.map(|log| log.unwrap_or_default().lines().filter(met).count()).sum()
    }

    /// The ends of all logs, for a failure's message.
    pub fn logs(&self) -> String {
        self.bench.logs()
    }

    /// Copies all logs to a directory that outlives this value.
    pub fn keep_logs(&self, directory: &std::path::Path) {
        std::fs::create_dir_all(directory).unwrap();
        for node in self.bench.lab.nodes() {
            std::fs::copy(&node.log, directory.join(format!("{}.log", node.name))).unwrap();
        }
    }
}

/// What a thread with a load leaves.
type Ended = (VerifyingLoad, Result<(), LoadError>);

fn run(mut load: VerifyingLoad) -> thread::JoinHandle<Ended> {
    thread::spawn(move || {
        let result = load.run(Duration::from_secs(600));
        (load, result)
    })
}

fn disk(bench: &Bench, name: &str, policy: &str, size: u64) -> CreateDisk {
    CreateDisk {
        name: name.into(),
        volume: "pool".into(),
        size,
        logical_block: 512,
        policy: policy.into(),
        medium: bench.medium,
        limit: None,
    }
}
