//! Rounds of faults under a load that remembers every write, and the judgement after each (P1, P2, P4, P7, P9).

use std::time::Duration;

use fastrand::Rng;
use weir_block::size::Size;
use weir_lab::{LabConfig, LabFlash};
use weir_load::verify::History;
use weir_load::verifying::VerifyingLoad;
use weir_node::api::{Export, Medium};

use super::{Bench, DISK, alone, new_history, seed};

/// Longest stall that a load may see, on a machine that does much else (the target on a quiet one is 2 s).
pub const LONGEST_STALL: Duration = Duration::from_secs(10);

/// `fence_grace` where nodes are cut off: short, so that a partition can outlast it.
pub const CUT_OFF_GRACE: Duration = Duration::from_secs(3);

/// Room for the log of one disk.
const FLASH: Size = Size(96 << 20);

/// The setup of a test of rounds.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub nodes: usize,
    pub policy: &'static str,
    /// A network of the lab's own, to be cut.
    pub network: bool,
}

impl Setup {
    fn tune(self, medium: Medium, config: &mut LabConfig) {
        config.network = self.network;
        if self.network {
            config.fence_grace = CUT_OFF_GRACE;
        }
        if medium == Medium::Flash {
            config.flash = LabFlash::Files(FLASH);
        }
    }
}

/// `WEIR_ROUNDS`, of a long run.
pub fn soak() -> Option<u64> {
    std::env::var("WEIR_ROUNDS").ok().and_then(|rounds| rounds.parse().ok())
}

/// The number of rounds of a test: `otherwise`, or this test's part of `WEIR_ROUNDS`, the number for all tests of rounds
/// together: `of_forty` out of forty.
pub fn rounds(otherwise: u64, of_forty: u64) -> u64 {
    soak().map_or(otherwise, |all| (all * of_forty).div_ceil(40))
}

/// The events in the rounds of one test.
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
        let all = bench.judge(&mut load, seed);
        let progress = load.progress();
        assert!(progress.acknowledged() > 100, "the load did nothing to speak of");
        assert!(
            progress.longest_stall() < LONGEST_STALL,
            "stalled for {:?}{}",
            progress.longest_stall(),
            bench.logs()
        );
        self.rounds += 1;
        self.acknowledged += progress.acknowledged();
        self.unknown += progress.unknown();
        self.checked += all.checked;
        self.longest_stall = self.longest_stall.max(progress.longest_stall());
        load.into_history()
    }
}

/// Some time from `from_ms` to `to_ms` milliseconds.
pub fn some_time(random: &mut Rng, from_ms: u64, to_ms: u64) -> Duration {
    Duration::from_millis(random.u64(from_ms..to_ms))
}

/// Where the registry of a lab is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The lab's own, on this machine.
    Embedded,
    /// An etcd of three members with TLS.
    Etcd,
}

/// The blocks of a test's rounds, so that half of them are on etcd and half of them have the log on flash, also of two.
const BLOCKS: [(Medium, Place); 4] = [
    (Medium::Ram, Place::Embedded),
    (Medium::Flash, Place::Etcd),
    (Medium::Ram, Place::Etcd),
    (Medium::Flash, Place::Embedded),
];

/// Rounds, half of them with the log in memory and half with the log on flash, half of them with the embedded registry and half on
/// etcd: `disturb` does harm to a node under load, every block is judged, `restore` brings the node back.
pub fn run_rounds(
    what: &str,
    setup: Setup,
    rounds: u64,
    disturb: impl Fn(&mut Bench, &mut Rng, VerifyingLoad) -> (VerifyingLoad, String),
    restore: impl Fn(&mut Bench, &str),
) {
    for (number, (medium, place)) in (0..).zip(BLOCKS) {
        let rounds = (rounds + BLOCKS.len() as u64 - 1 - number) / BLOCKS.len() as u64;
        if rounds > 0 {
            run_rounds_on((medium, place), what, setup, rounds, &disturb, &restore);
        }
    }
}

/// Rounds on one lab and one history.
fn run_rounds_on(
    (medium, place): (Medium, Place),
    what: &str,
    setup: Setup,
    rounds: u64,
    disturb: &impl Fn(&mut Bench, &mut Rng, VerifyingLoad) -> (VerifyingLoad, String),
    restore: &impl Fn(&mut Bench, &str),
) {
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let tune = |config: &mut LabConfig| setup.tune(medium, config);
    let mut bench = match place {
        Place::Embedded => Bench::up(setup.nodes, setup.policy, tune),
        Place::Etcd => Bench::up_on_etcd(setup.nodes, setup.policy, tune),
    };
    let (mut score, mut history) = (Score::default(), new_history(seed));
    for _ in 0..rounds {
        let load = bench.load(history, random.u64(..));
        let (load, node) = disturb(&mut bench, &mut random, load);
        history = score.judge(&bench, load, seed);
        restore(&mut bench, &node);
        bench.wait_effective();
    }
    bench.check_backing(&mut history);
    let place = match place {
        Place::Embedded => "embedded registry",
        Place::Etcd => "etcd",
    };
    eprintln!("{what}, {}, {medium}, {place}: {score:?}", setup.policy);
}

/// The former owner has let the disk go, says where it is now, and is a node like others again.
pub fn refused(bench: &mut Bench, former: &str) {
    let client = bench.lab.client(former).unwrap();
    let view = client.export(DISK, &Export::default()).unwrap();
    assert!(view.owner.as_deref().is_some_and(|owner| owner != former), "{view:?}");
    let here = Export { on: Some(former.into()), ..Export::default() };
    let error = client.export(DISK, &here).unwrap_err();
    assert!(error.message.contains("is owned by"), "{error:?}");
    let let_go =
        client.events().unwrap().into_iter().any(|event| event.node == former && event.kind == "released");
    assert!(let_go, "no event tells of it{}", bench.logs());
    bench.wait(|view| view.detail.as_ref().is_some_and(|detail| detail.reason.is_empty()));
}
