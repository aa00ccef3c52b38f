//! Faults at random, from a seed: pauses, moves, policies, kills, partitions, a registry that is away.

use std::thread;
use std::time::Duration;

use fastrand::Rng;
use weir_block::Nanos;
use weir_lab::{LabConfig, REGISTRY};

use crate::common::rounds::some_time;
use crate::common::{Bench, DISK};

/// The registry forgets a silent node after this time.
const TTL: Duration = Duration::from_secs(1);

/// Longer than any pause of a process here: a process that stands still for longer than the grace, between the check of its right
/// and its system call, is what only a fence in the storage can keep from doing harm.
const GRACE: Duration = Duration::from_secs(4);

/// Policies for the disk. Without `write-back+0`: a killed owner would take acknowledged writes with it, as documented.
const POLICIES: [&str; 3] = ["write-through", "write-back+1", "write-back+2"];

/// Sets the times that the faults are made for.
pub fn tune(config: &mut LabConfig) {
    (config.network, config.lease_ttl, config.fence_grace) = (true, TTL, GRACE);
}

/// Injects faults into a lab, and reports them.
pub struct Weather {
    random: Rng,
    began: Nanos,
    pub told: Vec<String>,
}

impl Weather {
    pub fn new(seed: u64) -> Weather {
        Weather { random: Rng::with_seed(seed), began: Nanos::now(), told: Vec::new() }
    }

    fn tell(&mut self, what: String) {
        let (now, since) = (Nanos::now(), Nanos::now() - self.began);
        let (seconds, millis) = (now.0 / 1_000_000_000, now.0 / 1_000_000 % 1000);
        let told = format!("{seconds}.{millis:03} s (+{since:.1?}): {what}");
        eprintln!("{told}");
        self.told.push(told);
    }

    /// One fault, and its end.
    pub fn strike(&mut self, bench: &mut Bench) {
        match self.random.u8(0..14) {
            0 => self.pause(bench, (50, 900)),
            1 | 2 => self.pause(bench, (1500, 3500)),
            3 | 4 => self.move_somewhere(bench),
            5 => self.change_policy(bench),
            6 | 7 => self.kill(bench),
            8 | 9 => self.cut_off(bench, (300, 4000)),
            10 => self.cut_off(bench, (6500, 8000)),
            11 => self.pause_while_it_moves(bench),
            12 => self.pause_registry(bench),
            _ => self.restart_registry(bench),
        }
        thread::sleep(some_time(&mut self.random, 50, 1500));
    }

    /// The owner most of the time, else any node.
    fn victim(&mut self, bench: &Bench) -> String {
        if self.random.u8(0..3) > 0 { bench.owner() } else { self.anybody(bench) }
    }

    fn anybody(&mut self, bench: &Bench) -> String {
        let nodes = bench.lab.nodes();
        nodes[self.random.usize(..nodes.len())].name.clone()
    }

    fn pause(&mut self, bench: &Bench, (from, to): (u64, u64)) {
        let (victim, time) = (self.victim(bench), some_time(&mut self.random, from, to));
        self.tell(format!("{victim} stands still for {time:?}"));
        bench.lab.pause(&victim).unwrap();
        thread::sleep(time);
        bench.lab.resume(&victim).unwrap();
    }

    /// Whether it comes to pass depends on what else is the matter.
    fn move_somewhere(&mut self, bench: &Bench) {
        let to = self.anybody(bench);
        let outcome = bench.lab.client(&bench.owner()).unwrap().move_disk(DISK, &to);
        self.tell(format!(
            "move to {to}: {:?}",
            outcome.map(|moved| moved.disk.epoch).map_err(|error| error.message)
        ));
    }

    fn change_policy(&mut self, bench: &Bench) {
        let policy = POLICIES[self.random.usize(..POLICIES.len())];
        let outcome = bench.lab.client(&bench.owner()).unwrap().set_policy(DISK, policy);
        self.tell(format!(
            "policy {policy}: {:?}",
            outcome.map(|view| view.epoch).map_err(|error| error.message)
        ));
    }

    /// Only one at a time, and with all copies there before: more than one host may then be lost by no policy.
    fn kill(&mut self, bench: &mut Bench) {
        bench.wait_effective();
        let (victim, time) = (self.victim(bench), some_time(&mut self.random, 0, 2500));
        self.tell(format!("{victim} is killed, and started after {time:?}"));
        bench.lab.kill(&victim).unwrap();
        thread::sleep(time);
        bench.lab.start(&victim).unwrap();
        bench.wait_effective();
    }

    /// From everything, from the registry, or from the other nodes; both directions or one.
    fn cut_off(&mut self, bench: &Bench, (from, to): (u64, u64)) {
        let network = bench.lab.network().unwrap();
        let (victim, time) = (self.victim(bench), some_time(&mut self.random, from, to));
        let ways = match self.random.u8(0..6) {
            0..=2 => network.everything(&victim),
            3 => network.between(&victim, REGISTRY),
            4 => network.from_node(&victim),
            _ => network.to_node(&victim),
        };
        self.tell(format!("cut for {time:?}: {ways:?}"));
        network.cut(ways).unwrap();
        thread::sleep(time);
        network.restore().unwrap();
    }

    /// The owner stands still in the middle of a move, which is pending for long in half of the cases, because the owner cannot reach
    /// the node that the disk is to go to.
    fn pause_while_it_moves(&mut self, bench: &Bench) {
        let (owner, to) = (bench.owner(), self.anybody(bench));
        let (before, time) = (some_time(&mut self.random, 0, 40), some_time(&mut self.random, 1500, 3500));
        let (client, network) = (bench.lab.client(&owner).unwrap(), bench.lab.network().unwrap());
        let (cut, after) = (self.random.bool(), some_time(&mut self.random, 0, 2000));
        let unreached = if cut { ", which it cannot reach" } else { "" };
        self.tell(format!(
            "{owner} stands still for {time:?}, {before:?} after a move to {to}{unreached} began"
        ));
        thread::scope(|scope| {
            if cut {
                network.cut(network.between(&owner, &to)).unwrap();
            }
            scope.spawn(|| drop(client.move_disk(DISK, &to)));
            thread::sleep(before);
            bench.lab.pause(&owner).unwrap();
            thread::sleep(time);
            bench.lab.resume(&owner).unwrap();
            thread::sleep(after);
            network.restore().unwrap();
        });
        self.tell("the move has ended".into());
    }

    fn pause_registry(&mut self, bench: &Bench) {
        let time = some_time(&mut self.random, 200, 4000);
        self.tell(format!("the registry stands still for {time:?}"));
        bench.lab.pause(REGISTRY).unwrap();
        thread::sleep(time);
        bench.lab.resume(REGISTRY).unwrap();
    }

    fn restart_registry(&mut self, bench: &mut Bench) {
        let time = some_time(&mut self.random, 0, 2500);
        self.tell(format!("the registry is killed, and started after {time:?}"));
        bench.lab.kill(REGISTRY).unwrap();
        thread::sleep(time);
        bench.lab.start(REGISTRY).unwrap();
    }
}
