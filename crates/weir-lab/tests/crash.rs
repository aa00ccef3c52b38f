//! Crash rounds with real processes: SIGKILL and SIGSTOP under load, then every block is checked against the history of
//! acknowledged writes (P1, P2, P4, P7).
//!
//! `WEIR_CRASH_ROUNDS` sets how many rounds there are over all tests here, `WEIR_SEED` replays.
#![allow(clippy::unwrap_used)]

mod common;

use std::thread;
use std::time::Duration;

use common::{Bench, DISK, alone, during, new_history, seed};
use fastrand::Rng;
use weir_load::verify::History;
use weir_load::verifying::VerifyingLoad;

/// Longest stall that a load may see, on a machine that does much else (the target on a quiet one is 2 s).
const LONGEST_STALL: Duration = Duration::from_secs(10);

/// The share of a test in all rounds.
fn rounds(of_twenty: u64) -> u64 {
    let all = std::env::var("WEIR_CRASH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(20);
    (all * of_twenty).div_ceil(20)
}

/// What happened in the rounds of one test.
#[derive(Debug, Default)]
struct Score {
    rounds: u64,
    acknowledged: u64,
    unknown: u64,
    checked: u64,
    longest_stall: Duration,
}

impl Score {
    /// Judges every block of the disk.
    fn judge(&mut self, bench: &Bench, mut load: VerifyingLoad, seed: u64) -> History {
        let mixed = load.found().clone();
        assert_eq!(mixed.mismatches, 0, "seed {seed}, read under load: {:#?}{}", mixed.first, bench.logs());
        let all = load.check_all().unwrap();
        assert_eq!(all.mismatches, 0, "seed {seed}: {:#?}{}", all.first, bench.logs());
        let progress = load.progress();
        assert!(progress.acknowledged() > 100, "the load did nothing to speak of");
        assert!(
            progress.longest_stall() < LONGEST_STALL,
            "stalled for {:?}{}",
            progress.longest_stall(),
            bench.logs()
        );
        assert_eq!(progress.failed(), 0, "a guest saw an error (P9){}", bench.logs());
        self.rounds += 1;
        self.acknowledged += progress.acknowledged();
        self.unknown += progress.unknown();
        self.checked += all.checked;
        self.longest_stall = self.longest_stall.max(progress.longest_stall());
        load.into_history()
    }
}

fn some_time(random: &mut Rng, from_ms: u64, to_ms: u64) -> Duration {
    Duration::from_millis(random.u64(from_ms..to_ms))
}

/// Rounds on one lab and one history: `disturb` does harm to a node under load, every block is judged, `restore` brings
/// the node back.
fn run_rounds(
    what: &str,
    (nodes, policy): (usize, &str),
    rounds: u64,
    disturb: impl Fn(&mut Bench, &mut Rng, VerifyingLoad) -> (VerifyingLoad, String),
    restore: impl Fn(&mut Bench, &str),
) {
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let mut bench = Bench::up(nodes, policy, |_| {});
    let (mut score, mut history) = (Score::default(), new_history(seed));
    for _ in 0..rounds {
        let load = bench.load(history, random.u64(..));
        let (load, node) = disturb(&mut bench, &mut random, load);
        history = score.judge(&bench, load, seed);
        restore(&mut bench, &node);
        bench.wait_effective();
    }
    bench.check_backing(&mut history);
    eprintln!("{what}, {policy}: {score:?}");
}

fn start(bench: &mut Bench, node: &str) {
    bench.lab.start(node).unwrap();
}

/// The owner is killed in the middle of a load, its successor goes on, and the node comes back.
fn kill_owner(bench: &mut Bench, random: &mut Rng, load: VerifyingLoad) -> (VerifyingLoad, String) {
    let before = some_time(random, 20, 1200);
    let former = bench.owner();
    let lab = &mut bench.lab;
    let (load, ()) = during(load, before + Duration::from_millis(1500), || {
        thread::sleep(before);
        lab.kill(&former).unwrap();
    });
    assert_ne!(bench.owner(), former);
    assert!(load.progress().reconnects() > 0, "the load never noticed");
    (load, former)
}

#[test]
fn owner_killed_with_one_replica() {
    run_rounds("owner killed", (3, "write-back+1"), rounds(6), kill_owner, start);
}

#[test]
fn owner_killed_with_two_replicas() {
    run_rounds("owner killed", (4, "write-back+2"), rounds(4), kill_owner, start);
}

/// A replica is killed in the middle of a load: the guest waits a moment and keeps its connection.
fn kill_replica(bench: &mut Bench, random: &mut Rng, load: VerifyingLoad) -> (VerifyingLoad, String) {
    let before = some_time(random, 20, 800);
    let replicas = bench.wait_effective().replicas;
    let replica = replicas[random.usize(..replicas.len())].clone();
    let lab = &mut bench.lab;
    let (load, ()) = during(load, before + Duration::from_millis(1500), || {
        thread::sleep(before);
        lab.kill(&replica).unwrap();
    });
    assert_eq!(load.progress().reconnects(), 0, "the owner was not touched (P9)");
    let view = bench.wait_effective();
    assert!(!view.replicas.contains(&replica), "another node has taken its place");
    (load, replica)
}

#[test]
fn one_replica_killed() {
    run_rounds("replica killed", (3, "write-back+1"), rounds(3), kill_replica, start);
}

#[test]
fn one_of_two_replicas_killed() {
    run_rounds("replica killed", (4, "write-back+2"), rounds(2), kill_replica, start);
}

/// The owner stands still for longer than its lease, another takes over, and then it goes on: everything that it still
/// tries must be refused.
fn pause_owner(bench: &mut Bench, random: &mut Rng, load: VerifyingLoad) -> (VerifyingLoad, String) {
    let before = some_time(random, 20, 500);
    let after = some_time(random, 10, 1500);
    let former = bench.owner();
    let (load, successor) = during(load, before + after + Duration::from_secs(5), || {
        thread::sleep(before);
        bench.lab.pause(&former).unwrap();
        let successor = bench.wait(|view| view.owner.as_ref() != Some(&former)).owner.unwrap();
        thread::sleep(after);
        bench.lab.resume(&former).unwrap();
        successor
    });
    assert_eq!(bench.owner(), successor, "the former owner has not come back");
    (load, former)
}

#[test]
fn owner_with_one_replica_paused_beyond_its_lease() {
    run_rounds("owner paused", (3, "write-back+1"), rounds(3), pause_owner, refused);
}

#[test]
fn owner_with_two_replicas_paused_beyond_its_lease() {
    run_rounds("owner paused", (4, "write-back+2"), rounds(2), pause_owner, refused);
}

/// The former owner has let the disk go, says where it is now, and is a node like others again.
fn refused(bench: &mut Bench, former: &str) {
    let client = bench.lab.client(former).unwrap();
    let error = client.export(DISK, &weir_node::api::Export::default()).unwrap_err();
    assert!(error.message.contains("is owned by"), "{error:?}");
    let let_go =
        client.events().unwrap().into_iter().any(|event| event.node == former && event.kind == "let-go");
    assert!(let_go, "no event tells of it{}", bench.logs());
    bench.wait(|view| view.detail.as_ref().is_some_and(|detail| detail.reason.is_empty()));
}
