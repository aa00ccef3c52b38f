//! An owner is cut off for longer than lease and grace together, another one goes on, and then the way is free again.

use std::thread;
use std::time::Duration;

use fastrand::Rng;
use rustix::process::Signal;
use weir_block::Nanos;
use weir_lab::LabConfig;
use weir_lab::history::History;
use weir_load::verify::{Atomicity, History as VerifyHistory, Initial, Layout};
use weir_load::verifying::{Progress, Settings, VerifyingLoad};
use weir_load::workload::Span;

use super::{TTL, restart, soak};
use crate::common::etcd::Members;
use crate::common::rounds::{CUT_OFF_GRACE, some_time};
use crate::common::{BLOCK, Bench, DISK, SIZE, SOON, alone, during, new_history, seed};
use crate::support::await_some;
use crate::support::clients::{Clients, Habit, Recorded, Recorder};
use crate::support::filesystem::SmallFilesystem;
use crate::support::run;

/// The shortest lease of an etcd with its default times.
const ETCD_TTL: Duration = Duration::from_secs(2);

/// Rounds of each test with one kind of registry.
fn rounds() -> u64 {
    soak().map_or(1, |rounds| rounds.div_ceil(20))
}

/// The time to live of the nodes' leases.
fn ttl(etcd: Option<&Members>) -> Duration {
    if etcd.is_some() { ETCD_TTL } else { TTL }
}

fn tune(config: &mut LabConfig, etcd: Option<&Members>) {
    (config.network, config.lease_ttl, config.fence_grace) = (true, ttl(etcd), CUT_OFF_GRACE);
    config.etcd = etcd.map(Members::lab);
}

fn name(etcd: Option<&Members>) -> &'static str {
    if etcd.is_some() { "etcd" } else { "embedded registry" }
}

/// Cuts a node off, and waits until lease and grace are over and another node has the disk.
fn cut_off(bench: &Bench, former: &str) -> Nanos {
    let network = bench.lab.network().unwrap();
    network.cut(network.everything(former)).unwrap();
    Nanos::now() + ttl(bench.etcd.as_ref()) + CUT_OFF_GRACE + Duration::from_secs(2)
}

fn sleep_until(time: Nanos) {
    thread::sleep(time - Nanos::now());
}

/// The log is full as far as whole writes fit, and the load waits.
fn await_full_log(bench: &Bench, progress: &Progress) {
    bench.wait(|view| {
        let detail = view.detail.as_ref().unwrap();
        detail.log_used_bytes > detail.log_bytes - detail.log_bytes / 20
    });
    assert!(progress.acknowledged() > 1000);
}

/// Everything that was acknowledged is in the backing.
fn await_drained(bench: &Bench, former: &str) {
    bench.wait(|view| {
        view.owner.as_deref() != Some(former)
            && view.detail.as_ref().is_some_and(|detail| detail.dirty_bytes == 0)
    });
}

/// One round under `write-back+1`: the log is full because the backing takes no writes, and the owner has been ordered to
/// stop. So it waits for its log to drain when it is cut off. Then the backing takes writes again, and the successor drains
/// the log.
fn round_with_a_full_log(
    bench: &mut Bench,
    random: &mut Rng,
    load: VerifyingLoad,
    file: &str,
) -> VerifyingLoad {
    let former = bench.owner();
    let progress = load.progress();
    // With the load over, what the backing holds is all that there is; with the load going on, new writes lie in the log above.
    let quiet = random.bool();
    run("chattr", ["+i", file]);
    let (mut load, ()) = during(load, Duration::ZERO, || {
        await_full_log(bench, &progress);
        let process = bench.lab.node(&former).unwrap().process.unwrap();
        process.signal(Signal::TERM).unwrap();
        thread::sleep(some_time(random, 50, 300));
        let over = cut_off(bench, &former);
        // Not before the former owner has lost its right; the successor cannot open what takes no writes.
        thread::sleep(ttl(bench.etcd.as_ref()) + Duration::from_millis(500));
        run("chattr", ["-i", file]);
        bench.wait(|view| view.owner.as_ref() != Some(&former));
        let before = progress.acknowledged();
        let goes_on = || (progress.acknowledged() > before + 5000).then_some(());
        await_some(SOON, goes_on, || format!("the load does not go on{}", bench.logs()));
        sleep_until(over);
        if quiet {
            progress.stop();
            await_drained(bench, &former);
        }
        bench.lab.network().unwrap().restore().unwrap();
        thread::sleep(Duration::from_secs(3));
    });
    assert_ne!(bench.owner(), former);
    judge(bench, &mut load, quiet);
    restart(bench, &former);
    bench.wait_effective();
    // The next round fills the log anew.
    bench.wait(|view| view.detail.as_ref().is_some_and(|detail| detail.dirty_bytes == 0));
    load
}

fn judge(bench: &Bench, load: &mut VerifyingLoad, quiet: bool) {
    let mixed = load.found().clone();
    let all = load.check_all().unwrap();
    let (wrong, found) = (mixed.mismatches + all.mismatches, [mixed.first, all.first]);
    assert_eq!(wrong, 0, "wrong blocks, load over at the healing: {quiet}: {found:#?}{}", bench.logs());
    assert_eq!(load.progress().failed(), 0, "a guest saw an error (P9){}", bench.logs());
}

#[test]
fn an_owner_with_a_full_log_and_a_pending_close_is_cut_off_and_comes_back() {
    let _turn = alone();
    with_a_full_log(None);
    with_a_full_log(Some(Members::up()));
}

fn with_a_full_log(etcd: Option<Members>) {
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let filesystem = SmallFilesystem::mount(64 << 20);
    let mut bench = Bench::up_on(&filesystem.path(), 3, "write-back+1", |config| tune(config, etcd.as_ref()));
    bench.etcd = etcd;
    let file = filesystem.path().join(format!("{DISK}.raw"));
    let mut history = new_history(seed);
    let (mut acknowledged, began) = (0, Nanos::now());
    for _ in 0..rounds() {
        let settings = Settings {
            seed: random.u64(..),
            read_percent: 20,
            reconnect_for: SOON,
            timeout: Duration::from_secs(3),
            atomicity: Atomicity::Block,
            ..Settings::default()
        };
        let load = VerifyingLoad::new(history, settings, bench.locate());
        let load = round_with_a_full_log(&mut bench, &mut random, load, file.to_str().unwrap());
        acknowledged += load.progress().acknowledged();
        history = load.into_history();
    }
    bench.check_backing(&mut history);
    eprintln!(
        "full log, pending close, {}: {} rounds, {acknowledged} writes, 0 wrong blocks, {:.0?}",
        name(bench.etcd.as_ref()),
        rounds(),
        Nanos::now() - began
    );
}

/// The clients of the write-through rounds whose operations are recorded.
const HABITS: [Habit; 4] = [Habit::Stays, Habit::Stays, Habit::Follows, Habit::Roams];

/// One round under `write-through`: there is no log. The former owner must not pass on requests that its clients have given
/// up since, and must not answer reads of clients that stay with it. In half of the rounds the owner has been ordered to give
/// the disk to another node, and closes it when it is cut off.
///
/// Two owners without a log hardly show, because the backing orders the requests of both. So in rounds `with_a_log` the
/// successor gets one: the newest data is then in no place that the former owner could read, and covers its writes.
fn round_without_a_log(
    bench: &Bench,
    random: &mut Rng,
    load: VerifyingLoad,
    clients: Clients,
    with_a_log: bool,
) -> (VerifyingLoad, Recorded) {
    let former = bench.owner();
    let progress = load.progress();
    let (load, recorded) = during(load, Duration::ZERO, || {
        thread::sleep(some_time(random, 100, 1000));
        let over = cut_off(bench, &former);
        thread::sleep(some_time(random, 0, 1500));
        let (to, client) = (super::others(bench, &former).swap_remove(0), bench.lab.client(&former).unwrap());
        let moving = random.bool().then(|| thread::spawn(move || client.move_disk(DISK, &to)));
        bench.wait(|view| view.owner.as_ref() != Some(&former));
        let before = progress.acknowledged();
        let goes_on = || (progress.acknowledged() > before + 5000).then_some(());
        await_some(SOON, goes_on, || format!("the load does not go on{}", bench.logs()));
        if with_a_log {
            set_policy(bench, "write-back+1");
        }
        sleep_until(over);
        progress.stop();
        thread::sleep(some_time(random, 100, 1000));
        bench.lab.network().unwrap().restore().unwrap();
        thread::sleep(some_time(random, 2000, 3000));
        if let Some(moving) = moving {
            let _ = moving.join().unwrap();
        }
        clients.stop()
    });
    assert_ne!(bench.owner(), former);
    assert_eq!(recorded.failed, 0, "a guest saw an error (P9){}", bench.logs());
    (load, recorded)
}

/// Changes the policy, and waits until it is in effect.
fn set_policy(bench: &Bench, policy: &str) {
    bench.lab.client(&bench.owner()).unwrap().set_policy(DISK, policy).unwrap();
    bench.wait(|view| view.effective == policy && view.state == "serving");
}

#[test]
fn an_owner_without_a_log_is_cut_off_and_comes_back() {
    let _turn = alone();
    without_a_log(None);
    without_a_log(Some(Members::up()));
}

fn without_a_log(etcd: Option<Members>) {
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let mut bench = Bench::up(3, "write-through", |config| tune(config, etcd.as_ref()));
    bench.etcd = etcd;
    // The recorded clients have the first half of the disk.
    let layout = Layout::uniform(Span { offset: SIZE / 2, length: SIZE / 2 }, BLOCK).unwrap();
    let (mut blocks, mut sectors) = (VerifyHistory::new(layout, seed, Initial::Zeroes), History::default());
    let (mut acknowledged, began) = (0, Nanos::now());
    for round in 0..rounds() {
        let first = (round * (HABITS.len() as u64 + 1)) as u16;
        let clients = Clients::start_from(&bench, first, &HABITS, Duration::from_millis(2), random.u64(..));
        let load = bench.load(blocks, random.u64(..));
        // The first round on etcd without one: outside the soak there is no other.
        let with_a_log = round.is_multiple_of(2) != bench.etcd.is_some();
        let (mut load, recorded) = round_without_a_log(&bench, &mut random, load, clients, with_a_log);
        judge(&bench, &mut load, true);
        acknowledged += load.progress().acknowledged();
        blocks = load.into_history();
        sectors.extend(recorded.history);
        let mut reader = super::connect(&bench, &bench.owner(), SOON).unwrap();
        let last = Recorder::last(&bench, first + HABITS.len() as u16 + 1);
        sectors.append(&mut last.read_all(|offset, data| reader.read(offset, data).unwrap()));
        let judgement = sectors.judge();
        assert!(judgement.is_linearizable(), "round {round}, seed {seed}: {judgement}{}", bench.logs());
        set_policy(&bench, "write-through");
    }
    eprintln!(
        "write-through, {}: {} rounds, {acknowledged} writes, 0 wrong blocks, {}, {:.0?}",
        name(bench.etcd.as_ref()),
        rounds(),
        sectors.judge(),
        Nanos::now() - began
    );
}
