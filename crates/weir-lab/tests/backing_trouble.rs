//! A backing that is full, takes no writes, or is slow: acknowledged writes stay, guests wait, and everything goes on when the
//! trouble is over (P1, P7, P9, P10). Needs root, for loop mounts.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use common::{BLOCK, Bench, DISK, SIZE, SOON, alone, during, program, seed};
use support::filesystem::SmallFilesystem;
use support::{await_some, run};
use weir_block::Nanos;
use weir_block::size::Size;
use weir_lab::{Lab, LabConfig};
use weir_load::verify::{Atomicity, History, Initial, Layout};
use weir_load::verifying::{Locate, Progress, Settings, VerifyingLoad};
use weir_load::workload::Span;
use weir_nbd::Uri;
use weir_nbd::client::{NbdClient, NbdError};
use weir_node::api::{CreateDisk, CreateVolume, DiskView, Export, Medium};

const MIB: u64 = 1 << 20;

/// Memory for each write log: the least that there is.
const LOG: u64 = 64 * MIB;

/// The disk whose backing has no trouble.
const HEALTHY: &str = "d2";

/// The protocol's `ENOSPC`.
const ENOSPC: u32 = 28;

/// Bytes that the slow backing takes in a second.
const SLOW: u64 = 6 * MIB;

/// Longest time without any answer that a guest may see (P10), on a machine that does much else.
const LONGEST_STALL: Duration = Duration::from_secs(2);

/// A lab of two nodes whose volume is a small filesystem.
///
/// The order of its parts is that in which they end.
struct Place {
    bench: Bench,
    filesystem: SmallFilesystem,
}

impl Place {
    fn up(policy: &str) -> Place {
        Place::up_with(policy, |_| {})
    }

    fn up_with(policy: &str, adapt: impl FnOnce(&mut LabConfig)) -> Place {
        let filesystem = SmallFilesystem::mount(64 * MIB);
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(filesystem.path(), directory.path().join("pool")).unwrap();
        let mut config = config(directory.path().join("lab"));
        adapt(&mut config);
        let lab = Lab::up(&config).unwrap();
        let place = Place { bench: Bench { lab, directory, medium: Medium::Ram, etcd: None }, filesystem };
        place.create("pool", DISK, policy);
        place.bench.wait_effective();
        place
    }

    /// A volume in the directory of this name, and an open disk in it.
    fn create(&self, volume: &str, disk: &str, policy: &str) {
        let client = self.bench.lab.client("n1").unwrap();
        let path = self.bench.directory.path().join(volume);
        client.create_volume(&CreateVolume::dir(volume, path)).unwrap();
        let wanted = CreateDisk {
            name: disk.into(),
            volume: volume.into(),
            size: SIZE,
            logical_block: 512,
            policy: policy.into(),
            medium: Medium::Ram,
            limit: None,
        };
        client.create_disk(&wanted).unwrap();
        client.export(disk, &Export::default()).unwrap();
    }

    /// Another disk on the same node, whose backing has no trouble.
    fn create_healthy(&self) {
        std::fs::create_dir(self.bench.directory.path().join("healthy")).unwrap();
        self.create("healthy", HEALTHY, "write-back+1");
    }

    fn file(&self) -> PathBuf {
        self.bench.directory.path().join("pool").join(format!("{DISK}.raw"))
    }

    /// A disk on n1, wherever [`DISK`] is.
    fn uri(&self, disk: &str) -> Uri {
        Uri::unix(&self.bench.lab.node("n1").unwrap().nbd_unix, disk)
    }

    /// A load that waits as long as a guest would.
    fn load(&self, disk: &str, history: History, rate: Option<u64>) -> VerifyingLoad {
        let settings = Settings {
            read_percent: 20,
            rate,
            seed: history.run(),
            reconnect_for: SOON,
            timeout: Duration::from_secs(120),
            atomicity: Atomicity::Block,
            ..Settings::default()
        };
        let uri = self.uri(disk);
        let locate: Locate = Box::new(move |_| Some(uri.clone()));
        VerifyingLoad::new(history, settings, locate)
    }

    /// The number of events of this kind about [`DISK`], and the last one's text.
    fn events(&self, kind: &str) -> (usize, String) {
        let events = self.bench.lab.client("n1").unwrap().events().unwrap();
        let mut told = events.into_iter().filter(|event| event.kind == kind && event.subject == DISK);
        let first = told.next();
        let texts: Vec<_> = first.into_iter().chain(told).map(|event| event.text).collect();
        (texts.len(), texts.last().cloned().unwrap_or_default())
    }

    fn await_event(&self, kind: &str) -> String {
        let told = || Some(self.events(kind)).filter(|(times, _)| *times > 0).map(|(_, text)| text);
        await_some(SOON, told, || format!("no event {kind}{}", self.bench.logs()))
    }

    /// Waits until the log is full, as far as whole writes fit.
    fn await_full_log(&self) -> DiskView {
        self.bench.wait(|view| {
            let detail = view.detail.as_ref().unwrap();
            detail.log_used_bytes > detail.log_bytes - detail.log_bytes / 20
        })
    }

    /// After the trouble: everything is destaged and the disk simply serves.
    fn await_drained(&self) {
        self.await_event("backing-recovered");
        self.bench.wait(|view| {
            let detail = view.detail.as_ref().unwrap();
            view.state == "serving" && view.reason.is_empty() && detail.dirty_bytes == 0
        });
    }

    /// Ends all processes in good order and starts them again.
    fn restart(self) -> Place {
        let Place { bench: Bench { lab, directory, medium, etcd }, filesystem } = self;
        let dir = lab.dir().to_owned();
        lab.down().unwrap();
        let lab = Lab::up(&config(dir)).unwrap();
        let export = Export { on: Some("n1".into()), accept_loss: false };
        lab.any_client().unwrap().export(DISK, &export).unwrap();
        let place = Place { bench: Bench { lab, directory, medium, etcd }, filesystem };
        place.bench.wait_effective();
        place
    }
}

fn config(dir: PathBuf) -> LabConfig {
    let mut config = LabConfig::new(dir, program());
    (config.nodes, config.log) = (2, Size(LOG));
    config
}

/// A history of a part of a new disk.
fn history(run: u64, offset: u64, length: u64) -> History {
    History::new(Layout::uniform(Span { offset, length }, BLOCK).unwrap(), run, Initial::Zeroes)
}

/// Every block holds what was acknowledged last.
fn assert_sound(place: &Place, load: &mut VerifyingLoad) {
    let found = load.check_all().unwrap_or_else(|error| panic!("{error}{}", place.bench.logs()));
    assert_eq!(found.mismatches, 0, "{:#?}{}", found.first, place.bench.logs());
    assert_eq!(load.found().mismatches, 0, "{:#?}{}", load.found().first, place.bench.logs());
    let progress = load.progress();
    assert_eq!((progress.failed(), progress.reconnects()), (0, 0), "{}", place.bench.logs());
}

/// Reads the disk's file itself.
fn check_file(place: &Place, history: &mut History) {
    let file = File::open(place.file()).unwrap();
    let mut data = vec![0; BLOCK as usize];
    for block in 0..history.layout().blocks() {
        file.read_exact_at(&mut data, history.layout().block(block).offset).unwrap();
        history
            .check(block, &data, Atomicity::Block)
            .unwrap_or_else(|found| panic!("in the backing: {found}"));
    }
}

/// The load's answers stop: for half a second there is none.
fn await_stall(progress: &Progress) {
    let mut last = (progress.acknowledged(), Nanos::now());
    let stalled = || {
        let now = progress.acknowledged();
        if now != last.0 {
            last = (now, Nanos::now());
        }
        (Nanos::now() - last.1 > Duration::from_millis(500)).then_some(())
    };
    await_some(SOON, stalled, || format!("{} writes and no end", progress.acknowledged()));
}

/// The load goes on.
fn await_progress(place: &Place, progress: &Progress) {
    let stuck = progress.acknowledged();
    let goes_on = || (progress.acknowledged() > stuck + 1000).then_some(());
    await_some(SOON, goes_on, || format!("the writers still wait{}", place.bench.logs()));
}

#[test]
fn a_full_backing_stops_destage_and_loses_nothing() {
    let _turn = alone();
    let seed = seed();
    let place = Place::up("write-back+1");
    place.create_healthy();
    // One part of the disk is written before and shortly after the backing is full, the other one until the log is full too.
    let mut few = place.load(DISK, history(seed, 0, 8 * MIB), Some(2000));
    few.run(Duration::from_millis(500)).unwrap();
    place.filesystem.fill(64 << 10);
    few.run(Duration::from_millis(1000)).unwrap();
    let told = place.await_event("backing-error");
    assert!(told.contains("No space left"), "{told}");
    let view = place.bench.wait(|view| view.state == "degraded");
    assert!(view.reason.contains("No space left"), "{}", view.reason);

    let many = place.load(DISK, history(seed + 1, 8 * MIB, SIZE - 8 * MIB), None);
    let progress = many.progress();
    let (mut many, ()) = during(many, Duration::ZERO, || {
        place.await_full_log();
        await_stall(&progress);
        // All acknowledged data is there, half of it in the log only, and reads of it do not stall.
        assert_sound(&place, &mut few);
        assert_eq!(place.events("backing-error").0, 1, "told once, not with every attempt");
        // Its neighbour notices nothing.
        let mut other = place.load(HEALTHY, history(seed + 2, 0, SIZE), Some(500));
        other.run(Duration::from_secs(2)).unwrap();
        let beside = other.progress();
        assert!(beside.acknowledged() > 600, "{} of some 800", beside.acknowledged());
        assert!(beside.longest_stall() < LONGEST_STALL, "{:?}", beside.longest_stall());
        assert_sound(&place, &mut other);

        place.filesystem.empty();
        await_progress(&place, &progress);
    });
    place.await_drained();
    for load in [&mut few, &mut many] {
        assert_sound(&place, load);
    }
    let histories = [few.into_history(), many.into_history()];
    let place = place.restart();
    for mut history in histories {
        assert_sound(&place, &mut place.load(DISK, history.clone(), None));
        check_file(&place, &mut history);
    }
}

/// With the configured wait over, a write for which the log has no room gets the backing's error; what was acknowledged
/// stays, reads go on, and with the trouble over so do writes (P9).
#[test]
fn a_full_log_refuses_writes_when_the_configured_wait_is_over() {
    const WAIT: Duration = Duration::from_secs(2);
    let _turn = alone();
    let seed = seed();
    let place = Place::up_with("write-back+1", |config| config.full_volume_wait = WAIT);
    let mut load = place.load(DISK, history(seed, 0, 8 * MIB), Some(2000));
    load.run(Duration::from_millis(500)).unwrap();
    place.filesystem.fill(64 << 10);
    let mut nbd = NbdClient::connect(&place.uri(DISK)).unwrap();
    let mebibyte = vec![5; MIB as usize];
    let (mut acknowledged, began) = (Vec::new(), Nanos::now());
    let (refused, waited) = loop {
        let (at, asked) = (8 * MIB + acknowledged.len() as u64 % 24 * MIB, Nanos::now());
        match nbd.write(at, &mebibyte, false) {
            Ok(()) => acknowledged.push(at),
            Err(error) => break (error, Nanos::now() - asked),
        }
        assert!(Nanos::now() - began < SOON * 2, "{} MiB and no end", acknowledged.len());
    };
    assert!(matches!(refused, NbdError::Request { errno: ENOSPC, .. }), "{refused}");
    assert!(waited >= WAIT, "{waited:?}");
    let told = place.await_event("log-jammed");
    assert!(told.contains("No space left") && told.contains("stay in the log"), "{told}");
    let mut back = vec![0; MIB as usize];
    for at in &acknowledged {
        nbd.read(*at, &mut back).unwrap();
        assert_eq!(back, mebibyte, "at {at}");
    }
    assert_sound(&place, &mut load);
    place.filesystem.empty();
    place.await_event("log-has-room");
    nbd.write(8 * MIB, &mebibyte, true).unwrap();
    place.await_drained();
    assert_sound(&place, &mut load);
}

/// An immutable file takes no writes, not even on open descriptors: the behaviour of a filesystem that was remounted
/// read-only, which Linux permits only without open writers.
#[test]
fn a_backing_that_takes_no_writes_for_a_while() {
    let _turn = alone();
    let seed = seed();
    let place = Place::up("write-back+1");
    let file = place.file();
    let file = file.to_str().unwrap();
    let load = place.load(DISK, history(seed, 0, SIZE), None);
    let progress = load.progress();
    let (mut load, ()) = during(load, Duration::ZERO, || {
        run("chattr", ["+i", file]);
        let told = place.await_event("backing-error");
        assert!(told.contains("takes no writes"), "{told}");
        place.await_full_log();
        await_stall(&progress);
        run("chattr", ["-i", file]);
        await_progress(&place, &progress);
    });
    place.await_drained();
    assert_sound(&place, &mut load);
    let mut history = load.into_history();
    let place = place.restart();
    assert_sound(&place, &mut place.load(DISK, history.clone(), None));
    check_file(&place, &mut history);
}

#[test]
fn write_through_tells_the_guest_that_there_is_no_space_if_it_is_not_to_wait() {
    let _turn = alone();
    let place = Place::up_with("write-through", |config| config.full_volume_wait = Duration::ZERO);
    let mut nbd = NbdClient::connect(&place.uri(DISK)).unwrap();
    let block = |number: u8| vec![number; 256 << 10];
    nbd.write(0, &block(1), true).unwrap();
    place.filesystem.fill(64 << 10);
    let refused = nbd.write(4 * MIB, &block(2), false).unwrap_err();
    assert!(matches!(refused, NbdError::Request { errno: ENOSPC, .. }), "{refused}");
    // Requests that need no new space still work: reads, and writes to allocated blocks.
    let mut back = block(0);
    nbd.read(0, &mut back).unwrap();
    assert_eq!(back, block(1));
    nbd.write(0, &block(3), true).unwrap();
    nbd.read(0, &mut back).unwrap();
    assert_eq!(back, block(3));
    place.filesystem.empty();
    nbd.write(4 * MIB, &block(4), true).unwrap();
    nbd.read(4 * MIB, &mut back).unwrap();
    assert_eq!(back, block(4));
    let view = place.bench.disk().unwrap();
    assert!(view.state == "degraded" && view.reason.contains("its volume is full"), "for a minute: {view:?}");
    assert_eq!(place.events("volume-full").0, 1);
}

/// The load's rate in every quarter of a second.
fn series(progress: &Progress, lasts: Duration) -> Vec<u64> {
    let (start, mut last, mut series) = (Nanos::now(), progress.acknowledged(), Vec::new());
    while Nanos::now() < start + lasts {
        thread::sleep(Duration::from_millis(250));
        let now = progress.acknowledged();
        series.push(now - last);
        last = now;
    }
    series
}

#[test]
fn a_full_log_slows_to_what_the_backing_takes() {
    let _turn = alone();
    let seed = seed();
    let place = Place::up("write-back+1");
    place.create_healthy();
    // Most of it is allocated then: otherwise the filesystem's journal would take its part of the slow device.
    let mut load = place.load(DISK, history(seed, 0, SIZE), None);
    load.run(Duration::from_secs(1)).unwrap();
    let pids: Vec<u32> = place.bench.lab.nodes().iter().map(|node| node.process.unwrap().pid).collect();
    let throttle = place.filesystem.throttle(SLOW, pids);

    let other = place.load(HEALTHY, history(seed + 1, 0, SIZE), Some(500));
    let (progress, other_progress) = (load.progress(), other.progress());
    let (mut load, (mut other, rates)) = during(load, Duration::ZERO, || {
        place.bench.wait(|view| view.detail.as_ref().unwrap().log_used_bytes > LOG / 2);
        let (other, rates) = during(other, Duration::ZERO, || series(&progress, Duration::from_secs(10)));
        (other, rates)
    });
    let throttled = throttle.is_some();
    drop(throttle);
    let stalls = [progress.longest_stall(), other_progress.longest_stall()];
    let late: u64 = rates[rates.len() / 2..].iter().sum();
    let rate = late * u64::from(BLOCK) / 5;
    eprintln!(
        "throttled {throttled}; stalls {stalls:?}; {rate} bytes/s; the other {}; {rates:?}",
        other_progress.acknowledged()
    );
    let last = &rates[rates.len() / 4..];
    assert!(last.iter().all(|&done| done > 0), "it stands still at times: {rates:?}{}", place.bench.logs());
    assert!(stalls.iter().all(|stall| *stall < LONGEST_STALL), "{stalls:?}{}", place.bench.logs());
    if throttled {
        assert!((SLOW / 2..SLOW * 2).contains(&rate), "{rate} bytes/s, the backing takes {SLOW}; {rates:?}");
    }
    assert!(other_progress.acknowledged() > 3000, "{} of some 4000", other_progress.acknowledged());
    for load in [&mut load, &mut other] {
        assert_sound(&place, load);
    }
}
