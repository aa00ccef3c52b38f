//! One of twenty disks of a shard has a backing that does not answer: the others notice nothing, the node reports the hanging
//! disk, and it takes over the disks that it should. Needs root, for FUSE and loop devices.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::fs::File;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::{Bench, SIZE, SOON, alone, program};
use support::{await_some, run};
use weir_block::{Engine, Nanos, Reactor, ReactorConfig, SharedFile, Token};
use weir_lab::volatile_disk::VolatileDisk;
use weir_lab::{Lab, LabConfig};
use weir_nbd::Uri;
use weir_nbd::client::{CommandFlags, NbdClient, NbdCommand, Options};
use weir_node::api::{CreateDisk, CreateVolume, DiskView, Export, Medium, NodeStatus};

/// Disks of the shard, the one that hangs included.
const DISKS: usize = 20;

/// The number of healthy disks that are written to and measured.
const MEASURED: usize = 4;

/// Requests that hang at the backing that does.
const STUCK: u32 = 128;

/// The duration of each measurement.
const MEASURES: Duration = Duration::from_secs(6);

/// The device under the volume that hangs, in bytes.
const LUN: u64 = 128 << 20;

/// An ext4 whose device can stop answering.
struct Lun {
    disk: VolatileDisk,
    at: PathBuf,
}

impl Lun {
    fn mount(directory: &Path) -> Lun {
        let disk = VolatileDisk::create(&directory.join("lun.disk"), LUN).unwrap();
        let at = directory.join("lun");
        std::fs::create_dir(&at).unwrap();
        run("mkfs.ext4", ["-q".as_ref(), "-E".as_ref(), "nodiscard".as_ref(), disk.path().as_os_str()]);
        run("mount", ["-t".as_ref(), "ext4".as_ref(), disk.path().as_os_str(), at.as_os_str()]);
        Lun { disk, at }
    }

    /// From now on no request is answered.
    fn hang(&self) {
        self.disk.fail_power();
    }
}

impl Drop for Lun {
    fn drop(&mut self) {
        // Waiting requests get an error, or the mount would stay.
        self.disk.power_off();
        let _ = Command::new("umount").arg("--lazy").arg(&self.at).stderr(Stdio::null()).status();
    }
}

/// Some nodes; all disks but those called otherwise are on n1.
struct Place {
    bench: Bench,
    lun: Lun,
}

impl Drop for Place {
    fn drop(&mut self) {
        // The nodes end only when their requests have.
        self.lun.disk.power_off();
    }
}

impl Place {
    fn up(nodes: usize) -> Place {
        let directory = tempfile::tempdir().unwrap();
        let lun = Lun::mount(directory.path());
        std::fs::create_dir(directory.path().join("pool")).unwrap();
        symlink(&lun.at, directory.path().join("slow")).unwrap();
        let mut config = LabConfig::new(directory.path().join("lab"), program());
        (config.nodes, config.lease_ttl, config.fence_grace) =
            (nodes, Duration::from_secs(2), Duration::from_secs(3));
        let lab = Lab::up(&config).unwrap();
        for volume in ["pool", "slow"] {
            let path = directory.path().join(volume);
            let wanted = CreateVolume::dir(volume, path);
            lab.client("n1").unwrap().create_volume(&wanted).unwrap();
        }
        Place { bench: Bench { lab, directory, medium: Medium::Ram, etcd: None }, lun }
    }

    fn create(&self, disk: &str, volume: &str, policy: &str) {
        let wanted = CreateDisk {
            name: disk.into(),
            volume: volume.into(),
            size: SIZE,
            logical_block: 4096,
            policy: policy.into(),
            medium: Medium::Ram,
            limit: None,
        };
        self.bench.lab.client("n1").unwrap().create_disk(&wanted).unwrap();
    }

    fn open(&self, disk: &str, on: &str) {
        let export = Export { on: Some(on.into()), accept_loss: false };
        self.bench.lab.client("n1").unwrap().export(disk, &export).unwrap();
    }

    fn uri(&self, disk: &str) -> Uri {
        Uri::unix(&self.bench.lab.node("n1").unwrap().nbd_unix, disk)
    }

    /// The status that n1 reports, and the time it took.
    fn status(&self) -> (NodeStatus, Duration) {
        let before = Nanos::now();
        let client = self.bench.lab.client("n1").unwrap().patience(Duration::from_secs(10));
        let status = client.status().unwrap_or_else(|error| panic!("{error}{}", self.bench.logs()));
        (status, Nanos::now() - before)
    }

    fn disk(&self, name: &str) -> DiskView {
        self.status().0.disks.into_iter().find(|disk| disk.name == name).unwrap()
    }

    /// Writes and flushes on some healthy disks for a while; the latencies of all requests, sorted.
    fn measure(&self) -> Vec<Duration> {
        let over = AtomicBool::new(false);
        let mut all: Vec<_> = thread::scope(|scope| {
            let writers: Vec<_> = (0..MEASURED)
                .map(|number| {
                    let (uri, over) = (self.uri(&format!("d{number}")), &over);
                    scope.spawn(move || writes(&uri, over))
                })
                .collect();
            thread::sleep(MEASURES);
            over.store(true, Ordering::Relaxed);
            writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
        });
        all.sort();
        all
    }
}

/// Some 200 writes in a second, each tenth followed by a flush, until it is over.
fn writes(uri: &Uri, over: &AtomicBool) -> Vec<Duration> {
    let mut nbd = NbdClient::connect(uri).unwrap();
    let (mut took, mut number) = (Vec::new(), 0);
    while !over.load(Ordering::Relaxed) {
        let before = Nanos::now();
        nbd.write(number * 4096 * 37 % SIZE / 4096 * 4096, &[number as u8; 4096], false).unwrap();
        if number % 10 == 9 {
            nbd.flush().unwrap();
        }
        took.push(Nanos::now() - before);
        number += 1;
        thread::sleep(Duration::from_millis(5));
    }
    took
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() - 1) * percent / 100]
}

fn show(when: &str, sorted: &[Duration]) {
    let [median, high] = [50, 99].map(|percent| percentile(sorted, percent));
    println!(
        "{when}: {} writes, median {median:?}, p99 {high:?}, slowest {:?}",
        sorted.len(),
        sorted.last().unwrap()
    );
}

#[test]
fn one_hung_backing_is_no_other_disks_trouble() {
    let _turn = alone();
    let mut place = Place::up(2);
    for number in 0..DISKS - 1 {
        let disk = format!("d{number}");
        place.create(&disk, "pool", if number % 2 == 0 { "write-back+0" } else { "write-through" });
        place.open(&disk, "n1");
    }
    for (disk, volume, policy, on) in [
        ("ill", "slow", "write-through", "n1"),
        ("ill-too", "slow", "write-through", ""),
        ("other", "pool", "write-back+1", "n2"),
    ] {
        place.create(disk, volume, policy);
        if !on.is_empty() {
            place.open(disk, on);
        }
    }
    await_some(
        SOON,
        || Some(place.disk("other")).filter(|disk| disk.replicas == ["n1"]),
        || format!("no replica{}", place.bench.logs()),
    );
    // Once to allocate the files, then as it is.
    place.measure();
    let before = place.measure();
    show("before", &before);

    place.lun.hang();
    // As many requests as the disk takes: every one of them waits from now on.
    let deep = Options { depth: STUCK, ..Options::default() };
    let mut stuck = NbdClient::connect_with(&place.uri("ill"), &deep).unwrap();
    for number in 0..u64::from(STUCK) {
        stuck
            .submit(
                NbdCommand::Write { offset: number * 4096, length: 4096, flags: CommandFlags::FUA },
                &[1; 4096],
            )
            .unwrap();
    }
    let _ = stuck.poll(Duration::from_millis(100)).unwrap();
    // And a disk is to be opened there, which waits as well.
    let lab = &place.bench.lab;
    let opening = lab.client("n1").unwrap();
    let beside = thread::scope(|scope| {
        let opened = scope.spawn(move || opening.export("ill-too", &Export::default()));
        let beside = place.measure();
        drop(opened);
        beside
    });
    show("beside a backing that hangs", &beside);
    let (status, took) = place.status();
    println!("status after {took:?}: {:?}", status.shards);
    for disk in status.disks.iter().filter(|disk| disk.name.starts_with("ill")) {
        println!("{}: {} {}", disk.name, disk.state, disk.reason);
    }
    assert!(took < Duration::from_secs(3), "{took:?}");
    let healthy = status.disks.iter().filter(|disk| disk.name.starts_with('d'));
    assert!(healthy.clone().count() == DISKS - 1 && healthy.clone().all(|disk| disk.state == "serving"));
    assert!(status.shards.iter().all(|shard| shard.state == "ok" && shard.spins == 0), "{:?}", status.shards);
    let (was, is) = (percentile(&before, 99), percentile(&beside, 99));
    println!("p99 {:.2} times of before", is.as_secs_f64() / was.as_secs_f64());
    assert!(is < was * 2 + Duration::from_millis(20), "p99 {is:?}, before {was:?}");
    assert!(*beside.last().unwrap() < Duration::from_secs(1), "{:?}", beside.last());

    // The other node dies, and its disk comes here.
    place.bench.lab.kill("n2").unwrap();
    let killed = Nanos::now();
    // Alone it has no replica any more, and says so.
    let here = |disk: &DiskView| disk.owner.as_deref() == Some("n1") && disk.detail.is_some();
    let taken = || Some(place.disk("other")).filter(here);
    await_some(SOON, taken, || format!("{:?}{}", place.disk("other"), place.bench.logs()));
    println!("the other node's disk was here after {:?}", Nanos::now() - killed);
    NbdClient::connect(&place.uri("other")).unwrap().write(0, &[1; 4096], false).unwrap();
}

/// The ring and its substitute keep a thread for each call to a FUSE file. One that hangs must not have them all.
#[test]
fn calls_that_hang_do_not_hold_up_those_of_other_files() {
    const HUNG: usize = 64;
    let _turn = alone();
    for engine in [Engine::Uring, Engine::Epoll] {
        let directory = tempfile::tempdir().unwrap();
        let disk = VolatileDisk::create(&directory.path().join("disk"), 1 << 20).unwrap();
        let hanging = SharedFile::offloaded(File::open(directory.path().join("disk/fuse/disk")).unwrap());
        let file = SharedFile::new(tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        let mut reactor = Reactor::new(ReactorConfig { engine, ..ReactorConfig::default() }).unwrap();
        let owner = reactor.new_owner();
        disk.fail_power();
        for slot in 0..HUNG {
            let buffer = reactor.buffers().take(4096).unwrap();
            reactor.read(&hanging, 0, buffer, Token { owner, slot: slot as u32 });
        }
        let token = Token { owner, slot: u32::MAX };
        let mut events = Vec::new();
        for _ in 0..10 {
            let before = Nanos::now();
            reactor.sync(&file, token);
            while events.is_empty() && Nanos::now() < before + SOON {
                reactor.wait(before + SOON, &mut events).unwrap();
            }
            let took = Nanos::now() - before;
            println!("{engine:?}: a sync beside {HUNG} calls that hang took {took:?}");
            let event = events.pop().unwrap();
            assert!(event.token == token && events.is_empty() && took < Duration::from_secs(2), "{took:?}");
        }
        // They fail, and are waited for.
        disk.power_off();
        while reactor.files_in_flight() > 0 {
            reactor.wait(Nanos::NEVER, &mut events).unwrap();
        }
        assert_eq!(events.len(), HUNG);
    }
}

/// Opening a file for a takeover must not wait for the dead owner's direct I/O, and least of all the shard.
#[test]
fn a_takeover_does_not_wait_for_what_the_dead_owner_has_under_way() {
    let _turn = alone();
    let place = Place::up(2);
    for number in 0..MEASURED {
        let disk = format!("d{number}");
        place.create(&disk, "pool", "write-back+0");
        place.open(&disk, "n1");
    }
    place.create("other", "slow", "write-back+1");
    place.open("other", "n2");
    let replicated = || Some(place.disk("other")).filter(|disk| disk.replicas == ["n1"]);
    await_some(SOON, replicated, || format!("no replica{}", place.bench.logs()));

    let n2 = place.bench.lab.node("n2").unwrap();
    let mut nbd = NbdClient::connect(&Uri::unix(&n2.nbd_unix, "other")).unwrap();
    for number in 0..256 {
        nbd.write(number * 4096, &[1; 4096], false).unwrap();
    }
    nbd.flush().unwrap();
    thread::sleep(Duration::from_secs(1));
    place.lun.hang();
    // Answered by the logs, and on their way to the backing when the owner dies. It stays a zombie while they are.
    for number in 0..256 {
        nbd.write(number * 4096, &[2; 4096], false).unwrap();
    }
    thread::sleep(Duration::from_secs(1));
    let pid = rustix::process::Pid::from_raw(n2.process.unwrap().pid as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let killed = Nanos::now();

    let (here, slowest) = thread::scope(|scope| {
        let beside = scope.spawn(|| place.measure());
        let mut reading = None;
        let mut slowest = Duration::ZERO;
        while reading.is_none() && Nanos::now() < killed + SOON {
            let (status, took) = place.status();
            slowest = slowest.max(took);
            let disk = status.disks.into_iter().find(|disk| disk.name == "other").unwrap();
            if disk.owner.as_deref() == Some("n1") && disk.detail.is_some() && disk.state != "opening" {
                let mut back = [0; 4096];
                let mut nbd = NbdClient::connect(&place.uri("other")).unwrap();
                nbd.read(17 * 4096, &mut back).unwrap();
                assert_eq!(back, [2; 4096]);
                reading = Some(Nanos::now() - killed);
            }
            thread::sleep(Duration::from_millis(50));
        }
        let beside = beside.join().unwrap();
        show("beside the takeover", &beside);
        (reading, slowest.max(*beside.last().unwrap()))
    });
    println!("read from its new owner after {here:?}; slowest write elsewhere, or status, {slowest:?}");
    assert!(here.is_some_and(|after| after < Duration::from_secs(10)), "{here:?}{}", place.bench.logs());
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
}

/// Writes that a killed owner's kernel still holds may reach the backing much later than the end of the process, and later
/// than any grace. The successor writes nothing there before that, or those writes would cover its own (P4).
#[test]
fn a_successor_writes_behind_the_last_write_of_a_killed_owner() {
    const BLOCKS: u64 = 8;
    let _turn = alone();
    let place = Place::up(3);
    let (bench, lab) = (&place.bench, &place.bench.lab);
    place.create("other", "slow", "write-back+1");
    place.open("other", "n1");
    // As its owner shows it, once it is as it is to be.
    let view = |owner: &str| {
        let view = lab.client(owner).unwrap().disk("other").ok()?;
        let there = view.detail.is_some() && view.owner.as_deref() == Some(owner);
        (there && view.effective == "write-back+1").then_some(view)
    };
    let dirty = |owner: &str| Some(view(owner)?.detail?.dirty_bytes);
    let clean = |owner: &str| dirty(owner).filter(|dirty| *dirty == 0);
    let otherwise = |what: &'static str| move || format!("{what}{}", bench.logs());
    let connect = |node: &str| NbdClient::connect(&Uri::unix(&lab.node(node).unwrap().nbd_unix, "other"));
    let write = |nbd: &mut NbdClient, byte: u8| {
        // Not side by side, so that they stay requests of their own.
        (0..BLOCKS).for_each(|block| nbd.write(block * 8192, &[byte; 4096], false).unwrap());
    };
    await_some(SOON, || view("n1"), otherwise("no replica"));
    let mut nbd = connect("n1").unwrap();
    // Blocks that are there already are overwritten without a word of the filesystem's.
    write(&mut nbd, 1);
    await_some(SOON, || clean("n1"), otherwise("not destaged"));

    place.lun.disk.hold(2);
    write(&mut nbd, 2);
    let bytes = BLOCKS as usize * 4096;
    let held = || (place.lun.disk.held_bytes() == bytes).then_some(());
    await_some(SOON, held, otherwise("not on its way to the backing"));
    let pid = lab.node("n1").unwrap().process.unwrap().pid;
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let killed = Nanos::now();

    let taken = || ["n2", "n3"].into_iter().find(|node| view(node).is_some());
    let successor = await_some(SOON, taken, otherwise("not taken over"));
    write(&mut connect(successor).unwrap(), 3);
    println!("written at the new owner {:?} after the kill", Nanos::now() - killed);
    // Twice the grace, and more.
    thread::sleep(Duration::from_secs(8));
    println!("dirty at the new owner: {:?}, held {}", dirty(successor), place.lun.disk.held_bytes());
    assert!(dirty(successor).unwrap() > 0, "it does not wait for the former owner{}", bench.logs());
    let events = lab.client(successor).unwrap().events().unwrap();
    assert!(events.iter().any(|event| event.kind == "former-io"), "{events:#?}");

    place.lun.disk.release();
    let released = Nanos::now();
    await_some(SOON, || clean(successor), otherwise("not destaged"));
    println!("destaged {:?} after the former owner's last write", Nanos::now() - released);
    let events = || lab.client(successor).unwrap().events().unwrap();
    let over = || events().iter().any(|event| event.kind == "former-io-over").then_some(());
    await_some(SOON, over, || format!("{:#?}", events()));
    let file = File::open(place.lun.at.join("other.raw")).unwrap();
    for block in 0..BLOCKS {
        let mut back = [0; 4096];
        file.read_exact_at(&mut back, block * 8192).unwrap();
        assert_eq!(back, [3; 4096], "block {block} is the former owner's");
    }
}
