//! A volume that fills: writers wait or fail, as configured, and `weir volume show` has the reason; space freed, they go on; nothing that was
//! acknowledged is lost (P1, P9). Needs root, for loop devices.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::process::Command;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use common::lun::{LunBench, take_all_space};
use common::{BLOCK, Bench, DISK, SOON, alone, program, seed};
use support::await_some;
use support::filesystem::SmallFilesystem;
use weir_block::Nanos;
use weir_lab::Lab;
use weir_load::verify::{Atomicity, History, Initial, Layout};
use weir_load::verifying::{Progress, Settings, VerifyingLoad};
use weir_load::workload::Span;
use weir_nbd::Uri;
use weir_nbd::client::{NbdClient, NbdError};
use weir_node::api::{ApiErrorKind, CreateDisk, Delete, DiskView, Export, Medium, VolumeView};

const MIB: u64 = 1 << 20;
/// The protocol's `ENOSPC`.
const ENOSPC: u32 = 28;
/// The disk under load: larger than what is allocated ahead for its first writes.
const DATA: &str = "data";
/// The disk that takes all space.
const FILLER: &str = "filler";
/// A part of a disk under load.
const PART: u64 = 16 * MIB;
/// Where the second part begins: nothing is allocated there yet.
const LATER: u64 = 160 * MIB;

fn create(lab: &Lab, name: &str, size: u64, policy: &str) -> Uri {
    let client = lab.any_client().unwrap();
    let wanted = CreateDisk {
        name: name.into(),
        volume: "pool".into(),
        size,
        logical_block: 4096,
        policy: policy.into(),
        medium: Medium::Ram,
        limit: None,
    };
    client.create_disk(&wanted).unwrap();
    client.export(name, &Export::default()).unwrap().uris[0].parse().unwrap()
}

fn delete(lab: &Lab, name: &str) {
    // A former owner that may still write keeps the disk for a while.
    let deleted =
        || lab.any_client().unwrap().delete(name, &Delete { force: true, ..Delete::default() }).ok();
    await_some(SOON, deleted, || format!("{name} is still there"));
}

/// A disk takes all space.
fn fill(bench: &Bench) -> JoinHandle<NbdError> {
    let writer = take_all_space(bench, FILLER);
    await_full(bench, FILLER);
    writer
}

fn volume(bench: &Bench) -> VolumeView {
    bench.lab.any_client().unwrap().volumes().unwrap().into_iter().find(|one| one.name == "pool").unwrap()
}

fn await_full(bench: &Bench, disk: &str) {
    let full = || volume(bench).full_for.iter().any(|name| name == disk).then_some(());
    await_some(SOON * 2, full, || format!("{disk} has space: {:?}{}", volume(bench), bench.logs()));
}

fn await_space(bench: &Bench) {
    let space = || volume(bench).full_for.is_empty().then_some(());
    await_some(SOON, space, || format!("{:?}{}", volume(bench), bench.logs()));
}

/// The output of `weir volume show`.
fn shown(bench: &Bench) -> String {
    let mut command = Command::new(program());
    let output = command.arg("--lab").arg(bench.lab.dir()).args(["volume", "show", "pool"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn told(bench: &Bench, kind: &str, disk: &str) -> bool {
    let nodes = bench.lab.nodes().iter();
    let mut events = nodes.filter_map(|node| node.client().events().ok()).flatten();
    events.any(|event| event.kind == kind && event.subject == disk)
}

fn view(bench: &Bench, disk: &str) -> DiskView {
    bench.disk_named(disk).unwrap_or_else(|| panic!("{disk} has no owner{}", bench.logs()))
}

/// A load on a part of a disk, which waits for as long as a guest would.
fn load(bench: &Bench, disk: &str, run: u64, offset: u64) -> VerifyingLoad {
    let layout = Layout::uniform(Span { offset, length: PART }, BLOCK).unwrap();
    let settings = Settings {
        read_percent: 20,
        seed: run,
        reconnect_for: SOON * 2,
        timeout: Duration::from_secs(120),
        atomicity: Atomicity::Block,
        ..Settings::default()
    };
    VerifyingLoad::new(History::new(layout, run, Initial::Zeroes), settings, bench.locate_named(disk))
}

/// Every block holds what was acknowledged last, and no guest has seen an error.
fn assert_sound(bench: &Bench, load: &mut VerifyingLoad) {
    let found = load.check_all().unwrap_or_else(|error| panic!("{error}{}", bench.logs()));
    assert_eq!(found.mismatches, 0, "{:#?}{}", found.first, bench.logs());
    assert_eq!(load.found().mismatches, 0, "{:#?}{}", load.found().first, bench.logs());
    assert_eq!(load.progress().failed(), 0, "{}", bench.logs());
}

fn start(mut load: VerifyingLoad) -> (JoinHandle<VerifyingLoad>, Arc<Progress>) {
    let progress = load.progress();
    let running = thread::spawn(move || {
        load.run(Duration::from_secs(600)).unwrap();
        load
    });
    (running, progress)
}

/// For a whole second nothing is acknowledged.
fn await_stall(bench: &Bench, progress: &Progress) {
    let mut last = (progress.acknowledged(), Nanos::now());
    let stalled = || {
        let now = progress.acknowledged();
        if now != last.0 {
            last = (now, Nanos::now());
        }
        (Nanos::now() - last.1 > Duration::from_secs(1)).then_some(())
    };
    await_some(SOON, stalled, || format!("{} writes and no end{}", progress.acknowledged(), bench.logs()));
}

fn await_progress(bench: &Bench, progress: &Progress) -> Duration {
    let (since, stuck) = (Nanos::now(), progress.acknowledged());
    let goes_on = || (progress.acknowledged() > stuck + 500).then_some(());
    await_some(SOON, goes_on, || format!("the writers still wait{}", bench.logs()));
    Nanos::now() - since
}

/// An event while the writers wait.
#[derive(PartialEq)]
enum Meanwhile {
    Nothing,
    /// The owner dies.
    Killed,
    /// The disk moves.
    Moved,
    /// An operator wants write-through, which has to wait for the log; and then the owner dies.
    Converted,
}

fn writers_wait(policy: &str, meanwhile: &Meanwhile) {
    let seed = seed();
    let mut pool = LunBench::up(3, "xfs", "write-through", |_| {});
    create(&pool.bench.lab, DATA, 256 * MIB, policy);
    let mut early = load(&pool.bench, DATA, seed, 0);
    early.run(Duration::from_secs(1)).unwrap();
    let filler = fill(&pool.bench);

    let (running, progress) = start(load(&pool.bench, DATA, seed + 1, LATER));
    await_full(&pool.bench, DATA);
    await_stall(&pool.bench, &progress);
    let acknowledged = progress.acknowledged();
    if policy == "write-through" {
        // Where the filler's larger writes had no space.
        assert!(acknowledged * u64::from(BLOCK) < 2 * MIB, "{acknowledged} have space");
    } else {
        assert!(acknowledged > 0, "the log takes some");
    }
    let shown = shown(&pool.bench);
    assert!(shown.contains("volume-full") && shown.contains(DATA) && shown.contains(FILLER), "{shown}");
    let waiting = view(&pool.bench, DATA);
    assert!(waiting.state == "degraded" && !waiting.reason.is_empty(), "{waiting:?}");
    let route = waiting.detail.as_ref().and_then(|detail| detail.route.clone()).unwrap();
    assert!(route.reasons.iter().any(|one| one.flag == "volume-full" && !one.benign), "{route:?}");
    assert!(told(&pool.bench, "volume-full", DATA));
    // Reads, and what has space, go on beside them.
    assert_sound(&pool.bench, &mut early);
    if *meanwhile == Meanwhile::Moved {
        let owner = waiting.owner.clone().unwrap();
        let to = ["n1", "n2", "n3"].into_iter().find(|node| *node != owner).unwrap();
        let since = Nanos::now();
        let moved = pool.bench.lab.any_client().unwrap().move_disk(DATA, to);
        eprintln!("{policy}: after {:?} while its writers wait: {moved:?}", Nanos::now() - since);
        match policy {
            "write-through" => assert!(moved.unwrap_err().message.contains("its volume is full")),
            _ => assert_eq!(moved.unwrap().to, to),
        }
        await_full(&pool.bench, DATA);
        await_stall(&pool.bench, &progress);
    }
    if *meanwhile == Meanwhile::Converted {
        keeps_its_copy(&pool.bench);
    }
    if matches!(meanwhile, Meanwhile::Killed | Meanwhile::Converted) {
        // The registry would not know yet who may take over.
        let owner = waiting.owner.unwrap();
        pool.crash(&owner);
        let taken = || pool.bench.disk_named(DATA).filter(|view| view.owner.as_ref() != Some(&owner));
        await_some(SOON * 2, taken, || format!("nobody takes it over{}", pool.bench.logs()));
        if pool.bench.disk_named(FILLER).is_none() {
            pool.bench.lab.any_client().unwrap().export(FILLER, &Export::default()).unwrap();
        }
        pool.coordinator();
    }
    delete(&pool.bench.lab, FILLER);
    let refused = filler.join().unwrap();
    eprintln!("{policy}: the filler's writer saw: {refused}");
    let went_on = await_progress(&pool.bench, &progress);
    eprintln!("{policy}: {acknowledged} acknowledged before; on within {went_on:?} after the deletion");
    await_space(&pool.bench);
    progress.stop();
    let mut later = running.join().unwrap();
    for load in [&mut early, &mut later] {
        assert_sound(&pool.bench, load);
    }
    let clean = || {
        let view = view(&pool.bench, DATA);
        let is_clean = view.detail.as_ref().is_some_and(|detail| detail.dirty_bytes == 0);
        (is_clean && view.reason.is_empty()).then_some(())
    };
    await_some(SOON, clean, || format!("{:?}{}", view(&pool.bench, DATA), pool.bench.logs()));
    assert_sound(&pool.bench, &mut later);
}

#[test]
fn writers_of_a_write_through_disk_wait_for_space() {
    let _turn = alone();
    writers_wait("write-through", &Meanwhile::Nothing);
}

#[test]
fn writers_of_a_write_back_disk_wait_for_space() {
    let _turn = alone();
    writers_wait("write-back+1", &Meanwhile::Nothing);
}

#[test]
fn what_a_log_has_acknowledged_on_a_full_volume_survives_its_owner() {
    let _turn = alone();
    writers_wait("write-back+1", &Meanwhile::Killed);
}

/// P1: what was acknowledged stays in as many copies, for as long as it cannot be destaged.
#[test]
fn a_disk_that_is_to_be_write_through_keeps_its_copy_until_its_log_is_drained() {
    let _turn = alone();
    writers_wait("write-back+1", &Meanwhile::Converted);
}

fn keeps_its_copy(bench: &Bench) {
    let requested = bench.lab.any_client().unwrap().set_policy(DATA, "write-through").unwrap();
    assert_eq!(requested.requested, "write-through");
    let until = Nanos::now() + Duration::from_secs(5);
    while Nanos::now() < until {
        let view = view(bench, DATA);
        let acknowledged = view.detail.as_ref().map(|detail| detail.acknowledged > detail.destaged);
        assert_eq!((view.effective.as_str(), view.replicas.len()), ("write-back+1", 1), "{view:?}");
        assert_eq!(acknowledged, Some(true), "{view:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// For the maintenance of a node. Under write-back the log moves with what it has. Under write-through the writes at the backing cannot be left:
/// the disk stays, says why, and its writers wait on.
#[test]
fn a_disk_whose_writers_wait_for_space_moves_with_its_log() {
    let _turn = alone();
    for policy in ["write-through", "write-back+1"] {
        writers_wait(policy, &Meanwhile::Moved);
    }
}

/// Writes blocks, each with its number, until one is refused. Returns those that were acknowledged.
fn write_until_refused(uri: &Uri) -> (Vec<u64>, NbdError, Duration) {
    let (mut nbd, mut acknowledged) = (NbdClient::connect(uri).unwrap(), Vec::new());
    let began = Nanos::now();
    for at in (LATER..LATER + 64 * MIB).step_by(64 << 10).cycle() {
        let asked = Nanos::now();
        match nbd.write(at, &vec![(at >> 16) as u8 | 1; 64 << 10], false) {
            Ok(()) => acknowledged.push(at),
            Err(error) => return (acknowledged, error, Nanos::now() - asked),
        }
        assert!(Nanos::now() - began < SOON, "{} and no end", acknowledged.len());
    }
    unreachable!("a cycle")
}

fn check(uri: &Uri, acknowledged: &[u64]) {
    let (mut nbd, mut back) = (NbdClient::connect(uri).unwrap(), vec![0; 64 << 10]);
    for at in acknowledged {
        nbd.read(*at, &mut back).unwrap();
        assert!(back.iter().all(|byte| *byte == (at >> 16) as u8 | 1), "at {at}");
    }
}

fn writers_fail(policy: &str) {
    let seed = seed();
    let pool = LunBench::up(2, "xfs", "write-through", |config| config.full_volume_wait = Duration::ZERO);
    let bench = &pool.bench;
    let uri = create(&bench.lab, DATA, 256 * MIB, policy);
    let mut early = load(bench, DATA, seed, 0);
    early.run(Duration::from_secs(1)).unwrap();
    let filler = fill(bench).join().unwrap();
    assert!(matches!(filler, NbdError::Request { errno: ENOSPC, .. }), "{filler}");

    let (acknowledged, refused, waited) = write_until_refused(&uri);
    assert!(matches!(refused, NbdError::Request { errno: ENOSPC, .. }), "{refused}");
    assert!(waited < Duration::from_secs(5), "{waited:?}");
    eprintln!("{policy}: {} acknowledged, then {refused}", acknowledged.len());
    assert!(policy != "write-through" || acknowledged.len() < 32, "where the filler had no space");
    await_full(bench, DATA);
    let shown = shown(bench);
    assert!(shown.contains("volume-full") && shown.contains(DATA), "{shown}");
    check(&uri, &acknowledged);
    assert_sound(bench, &mut early);
    // Refused once, refused again, until there is space. Under write-through, what has space goes on.
    let (more, refused, _) = write_until_refused(&uri);
    assert!(matches!(refused, NbdError::Request { errno: ENOSPC, .. }), "{refused}");
    assert!(more.is_empty() || policy == "write-through" && more == acknowledged, "{}", more.len());

    delete(&bench.lab, FILLER);
    let mut nbd = NbdClient::connect(&uri).unwrap();
    let takes = || nbd.write(LATER + 64 * MIB, &[7; 65536], true).ok();
    await_some(SOON, takes, || format!("writes still fail{}", bench.logs()));
    check(&uri, &acknowledged);
    let clean = || {
        let detail = view(bench, DATA).detail;
        detail.is_some_and(|detail| detail.dirty_bytes == 0).then_some(())
    };
    await_some(SOON, clean, || format!("{:?}{}", view(bench, DATA), bench.logs()));
    check(&uri, &acknowledged);
    assert_sound(bench, &mut early);
}

#[test]
fn writers_of_a_write_through_disk_fail_if_configured() {
    let _turn = alone();
    writers_fail("write-through");
}

#[test]
fn writers_of_a_write_back_disk_fail_if_configured() {
    let _turn = alone();
    writers_fail("write-back+1");
}

/// A bounded wait ends with the reason.
#[test]
fn a_write_waits_for_space_for_its_time_and_not_longer() {
    const WAIT: Duration = Duration::from_secs(4);
    let _turn = alone();
    let filesystem = SmallFilesystem::mount(64 * MIB);
    let bench = Bench::up_on(&filesystem.path(), 2, "write-through", |config| config.full_volume_wait = WAIT);
    let uri: Uri = view(&bench, DISK).uris[0].parse().unwrap();
    let mut nbd = NbdClient::connect(&uri).unwrap();
    nbd.write(0, &[1; 65536], true).unwrap();
    filesystem.fill(64 << 10);
    let since = Nanos::now();
    let refused = nbd.write(4 * MIB, &vec![2; MIB as usize], false).unwrap_err();
    let waited = Nanos::now() - since;
    assert!(matches!(refused, NbdError::Request { errno: ENOSPC, .. }), "{refused}");
    assert!(waited >= WAIT && waited < WAIT * 2, "{waited:?}");
    assert!(told(&bench, "volume-full", DISK));
    // Another one is freed in its time.
    let writer = thread::spawn(move || {
        nbd.write(4 * MIB, &vec![3; MIB as usize], true).unwrap();
        nbd
    });
    await_full(&bench, DISK);
    thread::sleep(Duration::from_secs(1));
    filesystem.empty();
    let mut nbd = writer.join().unwrap();
    let mut back = vec![0; MIB as usize];
    nbd.read(4 * MIB, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 3));
    await_space(&bench);
    assert!(told(&bench, "volume-has-space", DISK));
    nbd.disconnect();
}

/// A snapshot needs what the log has to be in the backing first. It says soon why that does not come.
#[test]
fn a_snapshot_of_a_dirty_disk_on_a_full_volume_says_why_it_is_not_made() {
    let _turn = alone();
    let pool = LunBench::up(2, "xfs", "write-through", |_| {});
    let bench = &pool.bench;
    let uri = create(&bench.lab, DATA, 256 * MIB, "write-back+1");
    let filler = fill(bench);
    let mut nbd = NbdClient::connect(&uri).unwrap();
    for at in (LATER..LATER + 16 * MIB).step_by(MIB as usize) {
        nbd.write(at, &vec![5; MIB as usize], false).unwrap();
    }
    await_full(bench, DATA);
    let client = bench.lab.any_client().unwrap();
    let since = Nanos::now();
    let refused = client.create_snapshot(DATA, "s", &[]).unwrap_err();
    let waited = Nanos::now() - since;
    eprintln!("after {waited:?}: {refused}");
    assert!(refused.message.contains("its volume is full"), "{refused}");
    assert!(refused.kind == ApiErrorKind::Unavailable && refused.hint.contains("add space"), "{refused:?}");
    assert!(waited < Duration::from_secs(10), "{waited:?}");
    delete(&bench.lab, FILLER);
    filler.join().unwrap();
    let made = || client.create_snapshot(DATA, "s", &[]).ok();
    await_some(SOON, made, || format!("no snapshot{}", bench.logs()));
}
