//! Processes that are really killed or stopped under load: every acknowledged write is looked for afterwards.
//!
//! `WEIR_CRASH_ROUNDS` says how many rounds there are in all (20 by default, 500 in `make soak`); `WEIR_CRASH_SEED` repeats
//! a run.

mod support;

use std::time::Duration;

use fastrand::Rng;
use support::{Cluster, DISK, Load, new_history};
use weir_load::verify::History;
use weir_load::verifying::Settings;

const SIZE: u64 = 64 << 20;

/// What happens to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    KillOwner,
    KillReplica,
    PauseOwner,
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// Every variant's share of the rounds.
fn rounds(share: u64) -> u64 {
    (number("WEIR_CRASH_ROUNDS", 20) * share).div_ceil(20)
}

fn run(fault: Fault, policy: &str, rounds: u64) {
    let seed = number("WEIR_CRASH_SEED", 1) ^ u64::from(policy.as_bytes()[11]) << 8 ^ (fault as u64) << 16;
    let mut random = Rng::with_seed(seed);
    let cluster = &mut Cluster::start();
    cluster.create_disk(DISK, SIZE, policy);
    let mut history = new_history(SIZE, seed);
    let (mut acknowledged, mut unknown, mut stall) = (0, 0, Duration::ZERO);
    for round in 0..rounds {
        cluster.wait_policy(DISK, policy);
        // A connection to a paused node breaks only by silence.
        let settings =
            Settings { seed: random.u64(..), timeout: Duration::from_secs(3), ..Settings::default() };
        let load = Load::start(cluster, DISK, history, settings);
        load.wait_acknowledged(1, cluster);
        std::thread::sleep(Duration::from_millis(random.u64(20..900)));
        let victim = strike(cluster, fault, &mut random);
        load.wait_acknowledged(200, cluster);
        if fault == Fault::PauseOwner {
            wake_and_expect_refusal(cluster, &victim);
            load.wait_acknowledged(200, cluster);
        }
        acknowledged += load.progress.acknowledged();
        unknown += load.progress.unknown();
        stall = stall.max(load.progress.longest_stall());
        history = check(load, fault, policy, round, seed, cluster);
        if fault != Fault::PauseOwner {
            cluster.lab.start(&victim).expect("the node starts again");
        }
    }
    println!(
        "{fault:?} under {policy}: {rounds} rounds, acknowledged {acknowledged}, in flight at a fault {unknown}, \
         longest stall {stall:?}, lost 0"
    );
}

fn check(load: Load, fault: Fault, policy: &str, round: u64, seed: u64, cluster: &Cluster) -> History {
    let mut load = load.stop();
    let pass = load.check_all().expect("the disk can be read");
    let during = load.found();
    assert!(
        pass.mismatches == 0 && during.mismatches == 0,
        "{fault:?} under {policy}, round {round}, seed {seed}: {pass:#?} {during:#?}\n{}",
        cluster.events()
    );
    assert!(pass.checked > 0);
    load.into_history()
}

/// Does it; says whom it hit.
fn strike(cluster: &mut Cluster, fault: Fault, random: &mut Rng) -> String {
    let view = cluster.client().disk(DISK).expect("the disk");
    let owner = view.owner.expect("an owner");
    match fault {
        Fault::KillOwner => {
            cluster.lab.kill(&owner).expect("killed");
            owner
        }
        Fault::KillReplica => {
            let victim = view.replicas[random.usize(..view.replicas.len())].clone();
            cluster.lab.kill(&victim).expect("killed");
            victim
        }
        Fault::PauseOwner => {
            cluster.lab.pause(&owner).expect("paused");
            // Longer than its lease: somebody else has it by then.
            cluster.wait(DISK, "a new owner", |view| view.owner.as_ref().is_some_and(|now| *now != owner));
            owner
        }
    }
}

/// The old owner goes on where it stood, requests of its old clients in its sockets. It must not own anything (P2).
fn wake_and_expect_refusal(cluster: &Cluster, former: &str) {
    let epoch = cluster.client().disk(DISK).expect("the disk").epoch;
    cluster.lab.resume(former).expect("resumed");
    let client = cluster.lab.client(former).expect("the node");
    let deadline = weir_block::Nanos::now() + Duration::from_secs(30);
    loop {
        assert!(weir_block::Nanos::now() < deadline, "{former} keeps the disk\n{}", cluster.events());
        if let Ok(status) = client.status() {
            let open = status.disks.iter().any(|disk| {
                disk.name == DISK && disk.detail.as_ref().is_some_and(|detail| detail.role == "owner")
            });
            let knows = status.disks.iter().any(|disk| disk.name == DISK && disk.epoch >= epoch);
            if knows && !open {
                break;
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let uri = client.status().expect("it answers").exports.iter().find_map(|uri| uri.parse().ok());
    let mut uri: weir_load::nbd::Uri = uri.expect("it exports");
    uri.export = DISK.into();
    assert!(weir_load::nbd::Client::connect(&uri).is_err(), "{former} still exports the disk");
}

#[test]
fn owner_killed_under_write_back_1() {
    run(Fault::KillOwner, "write-back+1", rounds(5));
}

#[test]
fn owner_killed_under_write_back_2() {
    run(Fault::KillOwner, "write-back+2", rounds(5));
}

#[test]
fn replica_killed_under_write_back_1() {
    run(Fault::KillReplica, "write-back+1", rounds(3));
}

#[test]
fn replica_killed_under_write_back_2() {
    run(Fault::KillReplica, "write-back+2", rounds(3));
}

#[test]
fn owner_stopped_beyond_its_lease_under_write_back_1() {
    run(Fault::PauseOwner, "write-back+1", rounds(2));
}

#[test]
fn owner_stopped_beyond_its_lease_under_write_back_2() {
    run(Fault::PauseOwner, "write-back+2", rounds(2));
}
