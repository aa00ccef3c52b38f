//! Nodes that stop, are killed in the middle of a step, and start again: what was acknowledged is not lost without a word, and
//! nothing half done stands in the way. Needs root, for loop mounts.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::fs::{File, rename};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

use common::{Bench, DISK, SIZE, SOON, alone, program, seed};
use support::filesystem::SmallFilesystem;
use tokio::runtime::Runtime;
use weir_block::Nanos;
use weir_cluster::records::{NodeRef, Record, Step, UnfinishedRecord, keys};
use weir_cluster::{Client as RegistryClient, ClientConfig, Registry};
use weir_lab::process::ProcessState;
use weir_lab::volatile_disk::VolatileDisk;
use weir_lab::{Ending, Lab, LabFlash};
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{ApiErrorKind, CreateDisk, CreateVolume, Delete, Export, Medium};

const MIB: u64 = 1 << 20;

/// Mebibytes that are written: more than one checkpoint takes, and less than the log.
const WRITTEN: u64 = 28;

/// The time that a stopping node waits for a log without progress.
const STOP_WAIT: Duration = Duration::from_secs(5);

fn uri(bench: &Bench) -> Uri {
    bench.wait(|view| !view.uris.is_empty()).uris[0].parse().unwrap()
}

/// Another, small, disk.
fn wanted(name: &str, policy: &str) -> CreateDisk {
    CreateDisk {
        name: name.into(),
        volume: "pool".into(),
        size: MIB,
        logical_block: 512,
        policy: policy.into(),
        medium: Medium::Ram,
        limit: None,
    }
}

/// `weir lab down` as an operator calls it.
fn lab_down(bench: &Bench, arguments: &[&str]) -> Output {
    Command::new(program())
        .env("WEIR_LAB", bench.lab.dir())
        .args(["lab", "down"])
        .args(arguments)
        .output()
        .unwrap()
}

/// Every mebibyte of the disk's first `written` is its own number, in the backing.
fn check_file(bench: &Bench, written: u64) {
    let file = File::open(bench.directory.path().join("pool").join(format!("{DISK}.raw"))).unwrap();
    let mut data = vec![0; MIB as usize];
    for number in 0..written {
        file.read_exact_at(&mut data, number * MIB).unwrap();
        assert!(data.iter().all(|byte| u64::from(*byte) == number + 1), "MiB {number}");
    }
}

/// `WRITTEN` MiB acknowledged and flushed, of which the backing, which is full, has less.
fn half_destaged(filesystem: &SmallFilesystem) -> Bench {
    let bench = Bench::up_on(&filesystem.path(), 2, "write-back+1", |config| config.stop_wait = STOP_WAIT);
    let mut nbd = NbdClient::connect(&uri(&bench)).unwrap();
    for number in 0..WRITTEN {
        if number == 8 {
            // Records that destage takes at this moment would be missing for filling the log.
            bench.wait(|view| view.detail.as_ref().is_some_and(|detail| detail.dirty_bytes == 0));
            filesystem.fill(64 << 10);
        }
        nbd.write(number * MIB, &vec![number as u8 + 1; MIB as usize], false).unwrap();
    }
    nbd.flush().unwrap();
    bench.wait(|view| view.reason.contains("No space left"));
    bench
}

/// A lab that has acknowledged writes in memory only refuses to end. Returns its explanation.
fn refused(bench: &Bench) -> String {
    let refused = lab_down(bench, &[]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(4), "{said}{}", bench.logs());
    assert!(said.contains(DISK) && said.contains("--force"), "{said}");
    said
}

/// With room again, the lab ends, and its backing has everything.
fn ends_with_all(bench: &Bench, filesystem: &SmallFilesystem) {
    filesystem.empty();
    let ended = lab_down(bench, &["--wait"]);
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    check_file(bench, WRITTEN);
}

#[test]
fn a_lab_that_would_lose_acknowledged_writes_does_not_end_unless_told() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount(64 * MIB);
    let bench = half_destaged(&filesystem);
    let said = refused(&bench);
    assert!(said.contains("No space left"), "{said}");
    let mut nbd = NbdClient::connect(&uri(&bench)).unwrap();
    let mut back = vec![0; MIB as usize];
    nbd.read(23 * MIB, &mut back).unwrap();
    assert_eq!(back, vec![24; MIB as usize], "it goes on");
    drop(nbd);
    // With the order to wait, it ends when there is room again, and not when no node answers.
    thread::scope(|scope| {
        let ends = scope.spawn(|| lab_down(&bench, &["--wait"]));
        thread::sleep(Duration::from_secs(1));
        ["n1", "n2"].iter().for_each(|node| bench.lab.pause(node).unwrap());
        thread::sleep(Duration::from_millis(500));
        ["n1", "n2"].iter().for_each(|node| bench.lab.resume(node).unwrap());
        thread::sleep(Duration::from_secs(1));
        let log = std::fs::read_to_string(&bench.lab.node("n1").unwrap().log).unwrap();
        let waits = !ends.is_finished();
        filesystem.empty();
        assert!(waits && !log.contains("stopping"), "it did not wait: {log}");
        let ended = ends.join().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    });
    check_file(&bench, WRITTEN);
}

/// The only ones who know of the writes are an owner that stands still, or a replica whose owner has just been killed.
#[test]
fn a_lab_whose_owner_does_not_answer_does_not_end_with_its_writes() {
    let _turn = alone();
    for kill in [false, true] {
        let filesystem = SmallFilesystem::mount(64 * MIB);
        let mut bench = half_destaged(&filesystem);
        let owner = bench.owner();
        match kill {
            true => bench.lab.kill(&owner).unwrap(),
            false => bench.lab.pause(&owner).unwrap(),
        }
        refused(&bench);
        ends_with_all(&bench, &filesystem);
    }
}

/// The only process that has the log stood still for so long that the registry counts it as gone.
#[test]
fn a_lab_whose_last_copy_has_lost_its_lease_does_not_end_with_its_writes() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount(64 * MIB);
    let mut bench = half_destaged(&filesystem);
    let view = bench.wait(|view| !view.replicas.is_empty());
    let owner = view.owner.unwrap();
    // Both, so that neither can replace the other.
    [&owner, &view.replicas[0]].iter().for_each(|node| bench.lab.pause(node).unwrap());
    thread::sleep(Duration::from_secs(3));
    bench.lab.kill(&owner).unwrap();
    refused(&bench);
    ends_with_all(&bench, &filesystem);
}

/// A successor that cannot open the disk holds its log, but cannot report on it yet.
#[test]
fn a_lab_whose_disk_is_being_opened_does_not_end_with_its_writes() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount(64 * MIB);
    let mut bench = half_destaged(&filesystem);
    let view = bench.wait(|view| !view.replicas.is_empty());
    // The replica takes over when `lab down` resumes it.
    bench.lab.pause(&view.replicas[0]).unwrap();
    bench.lab.kill(&view.owner.unwrap()).unwrap();
    let file = filesystem.path().join(format!("{DISK}.raw"));
    let away = file.with_extension("away");
    rename(&file, &away).unwrap();
    let said = refused(&bench);
    assert!(said.contains(&format!("not open on its owner {}; {0} may", view.replicas[0])), "{said}");
    rename(&away, &file).unwrap();
    ends_with_all(&bench, &filesystem);
}

/// An owner that drains the log of another has acknowledged nothing of it itself.
#[test]
fn a_lab_does_not_end_with_what_an_owner_has_inherited() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount(64 * MIB);
    let mut bench = half_destaged(&filesystem);
    bench.lab.client("n1").unwrap().set_policy(DISK, "write-through").unwrap();
    let owner = bench.owner();
    bench.lab.kill(&owner).unwrap();
    let view = bench.wait(|view| view.owner.as_ref() != Some(&owner) && view.detail.is_some());
    refused(&bench);
    let ended = lab_down(&bench, &["--force"]);
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(
        said.contains(&format!("disk {DISK}: ")) && said.contains(&format!("on {}", view.owner.unwrap())),
        "{said}"
    );
}

/// One checkpoint reaches the backing, and then it is full again: that is neither the end of the wait, nor of the refusal.
#[test]
fn a_lab_does_not_take_one_checkpoint_for_an_empty_log() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount(64 * MIB);
    let bench = half_destaged(&filesystem);
    let before = bench.wait(|_| true).detail.unwrap();
    // Asserts come after all threads can end.
    let (moved, refused, waited, ended) = thread::scope(|scope| {
        let waits = scope.spawn(|| lab_down(&bench, &["--wait"]));
        let refuses = scope.spawn(|| lab_down(&bench, &[]));
        thread::sleep(Duration::from_secs(2));
        filesystem.give_back(17 * MIB);
        let refused = refuses.join().unwrap();
        let waited = !waits.is_finished();
        let moved = bench.disk().and_then(|view| view.detail);
        filesystem.empty();
        (moved, refused, waited, waits.join().unwrap())
    });
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(4), "{said}{}", bench.logs());
    assert!(waited, "{}", bench.logs());
    let moved = moved.unwrap();
    assert!(moved.destaged > before.destaged && moved.dirty_bytes > 0, "no single checkpoint: {moved:?}");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    check_file(&bench, WRITTEN);
}

#[test]
fn a_lab_that_is_forced_to_end_says_what_is_lost() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount(64 * MIB);
    let bench = half_destaged(&filesystem);
    let began = Nanos::now();
    let ended = lab_down(&bench, &["--force"]);
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(
        said.contains("lost") && said.contains(&format!("disk {DISK}: ")) && said.contains("on n1"),
        "{said}"
    );
    assert!(Nanos::now() - began < Duration::from_secs(25), "{:?}", Nanos::now() - began);
    let log = std::fs::read_to_string(&bench.lab.node("n1").unwrap().log).unwrap();
    assert!(log.contains("what only this node had is lost"), "{log}");
}

/// A node may stop if a replica stays: that node takes over the disk with everything.
#[test]
fn a_node_may_stop_while_others_have_its_log() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount(64 * MIB);
    let mut bench = half_destaged(&filesystem);
    let node = bench.lab.node("n1").unwrap().process.unwrap();
    node.signal(rustix::process::Signal::TERM).unwrap();
    assert!(node.wait(Duration::from_secs(20)).unwrap(), "it ends");
    let log = std::fs::read_to_string(&bench.lab.node("n1").unwrap().log).unwrap();
    assert!(!log.contains("is lost"), "{log}");
    bench.wait(|view| view.owner.as_deref() == Some("n2"));
    filesystem.empty();
    bench.wait(|view| view.detail.as_ref().is_some_and(|detail| detail.dirty_bytes == 0));
    bench.lab.kill("n1").unwrap_err();
    let lab = Lab::open(bench.lab.dir()).unwrap();
    lab.down_as(Ending::Refuse, |_| {}).unwrap();
    check_file(&bench, WRITTEN);
}

/// A log that does not move holds a stop up for `limits.stop_wait` and no longer, however busy the copies of other owners' logs are.
#[test]
fn a_node_that_stops_does_not_wait_for_disks_of_others() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount(64 * MIB);
    let bench = half_destaged(&filesystem);
    let path = bench.directory.path().join("roomy");
    std::fs::create_dir(&path).unwrap();
    let client = bench.lab.client("n2").unwrap();
    client.create_volume(&CreateVolume::dir("roomy", path)).unwrap();
    client.create_disk(&CreateDisk { volume: "roomy".into(), ..wanted("busy", "write-back+1") }).unwrap();
    client.export("busy", &Export::default()).unwrap();
    support::await_some(
        SOON,
        || client.disk("busy").ok().filter(|disk| disk.replicas == ["n1"]),
        || format!("no replica{}", bench.logs()),
    );
    let node = bench.lab.node("n1").unwrap().process.unwrap();
    let mut nbd = NbdClient::connect(&Uri::unix(&bench.lab.node("n2").unwrap().nbd_unix, "busy")).unwrap();
    node.signal(rustix::process::Signal::TERM).unwrap();
    let began = Nanos::now();
    let mut number = 0;
    while node.state() == ProcessState::Running && Nanos::now() - began < 4 * STOP_WAIT {
        nbd.write(number % 256 * 4096, &[1; 4096], false).unwrap();
        number += 1;
        thread::sleep(Duration::from_millis(2));
    }
    let took = Nanos::now() - began;
    eprintln!("ended after {took:?}, beside {number} writes");
    assert!(took >= STOP_WAIT && took < 2 * STOP_WAIT, "{took:?}{}", bench.logs());
    drop(nbd);
    filesystem.empty();
}

/// A node is killed while it makes and deletes disks, again and again: afterwards each disk either is there or can be made, and can be
/// deleted, and no file is left that no record names.
#[test]
fn disks_that_were_half_made_or_half_deleted_do_not_stay_in_the_way() {
    const ROUNDS: u64 = 40;
    let _turn = alone();
    let mut random = fastrand::Rng::with_seed(seed());
    let mut bench = Bench::up(2, "write-through", |_| {});
    let mut unfinished = 0;
    for round in 0..ROUNDS {
        let name = format!("r{}", round % 4);
        let client = bench.lab.client("n2").unwrap();
        let time = Duration::from_micros(random.u64(0..30_000));
        thread::scope(|scope| {
            scope.spawn(|| {
                // Until it is killed.
                while client.create_disk(&wanted(&name, "write-through")).is_ok()
                    && client.delete(&name, &Delete::default()).is_ok()
                {}
            });
            thread::sleep(time);
            bench.lab.kill("n2").unwrap();
        });
        let other = bench.lab.client("n1").unwrap();
        let file = bench.directory.path().join("pool").join(format!("{name}.raw"));
        let recorded = other.disk(&name).is_ok();
        unfinished += u32::from(file.exists() != recorded);
        let make_again = || match other.create_disk(&wanted(&name, "write-through")) {
            // n1 has lost its lease: the registry waits for slow storage, as long as for the syncs of tests beside this one.
            Err(error) if error.message.contains("no node that is up") => None,
            made => Some(made.map(drop)),
        };
        let made = if recorded {
            Ok(())
        } else {
            support::await_some(SOON, make_again, || format!("round {round}{}", bench.logs()))
        };
        // The node may have executed a request that arrived before the kill after our check.
        let made = made.or_else(|error| if error.kind == ApiErrorKind::Exists { Ok(()) } else { Err(error) });
        let result = made.and_then(|()| other.delete(&name, &Delete::default()).map(drop));
        result.unwrap_or_else(|error| panic!("round {round}, recorded {recorded}: {error}{}", bench.logs()));
        assert!(!file.exists());
        bench.lab.start("n2").unwrap();
    }
    eprintln!("{unfinished} of {ROUNDS} kills left a file without a record or the other way round");
}

/// Waits until a disk can be made and deleted, and then deletes it: neither its record nor its file is in the way any more.
fn make_and_delete(bench: &Bench, on: &str, name: &str) {
    let client = bench.lab.client(on).unwrap();
    let made = || match client.create_disk(&wanted(name, "write-through")) {
        Err(error) if client.disk(name).is_err() => Err(error),
        _ => Ok(()),
    };
    let why = || format!("{:?}{}", made(), bench.logs());
    support::await_some(SOON, || made().ok(), why);
    client.delete(name, &Delete::default()).unwrap();
    assert!(!bench.directory.path().join("pool").join(format!("{name}.raw")).exists());
}

/// The registry's note about the creation, or deletion, of a disk called `left`.
struct Notes {
    runtime: Runtime,
    registry: RegistryClient,
    key: String,
}

impl Notes {
    fn of(bench: &Bench) -> Notes {
        let runtime = Runtime::new().unwrap();
        let socket = bench.lab.dir().join("registry.sock");
        let registry = runtime.block_on(async { RegistryClient::new(&socket, ClientConfig::default()) });
        Notes { runtime, registry: registry.unwrap(), key: keys::unfinished("left") }
    }

    fn put(&self, note: &UnfinishedRecord) {
        self.runtime.block_on(self.registry.transact(note.create(self.key.clone()))).unwrap();
    }

    /// The process that works on it, if any.
    fn by(&self) -> Option<NodeRef> {
        let entry = self.runtime.block_on(self.registry.get(&self.key)).unwrap();
        entry.map(|entry| UnfinishedRecord::of(&entry).unwrap().by)
    }

    /// Whether it comes to be so.
    fn wait(&self, wanted: impl Fn(Option<NodeRef>) -> bool) -> bool {
        let deadline = Nanos::now() + SOON;
        while !wanted(self.by()) {
            if Nanos::now() > deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(20));
        }
        true
    }
}

/// The storage hangs while a disk is created, and the client does not wait so long. The call to the storage is in flight all
/// the same, and its file is orphaned if no process waits for it.
#[test]
fn a_disk_is_made_or_not_when_its_client_has_gone() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount(64 * MIB);
    let bench = Bench::up_on(&filesystem.path(), 2, "write-through", |_| {});
    let frozen = filesystem.freeze();
    let client = bench.lab.client("n1").unwrap().patience(Duration::from_secs(1));
    client.create_disk(&wanted("left", "write-through")).unwrap_err();
    // By then the cleanup of others' leftovers has run at least once.
    thread::sleep(Duration::from_secs(7));
    drop(frozen);
    thread::sleep(Duration::from_secs(2));
    let file = filesystem.path().join("left.raw");
    assert_eq!(file.exists(), client.disk("left").is_ok(), "a file without a record{}", bench.logs());
    make_and_delete(&bench, "n2", "left");
}

/// A node stands still, with its storage, while it makes a disk. Others take that over and find nothing to remove; then it goes on.
#[test]
fn what_a_maker_that_stood_still_has_made_too_late_goes_again() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount(64 * MIB);
    let bench = Bench::up_on(&filesystem.path(), 2, "write-through", |config| {
        config.fence_grace = Duration::from_secs(2);
    });
    let maker = bench.lab.client("n1").unwrap();
    let notes = Notes::of(&bench);
    thread::scope(|scope| {
        let frozen = filesystem.freeze();
        let made = scope.spawn(|| maker.create_disk(&wanted("left", "write-through")));
        let noted = notes.wait(|by| by.is_some());
        thread::sleep(Duration::from_millis(500));
        bench.lab.pause("n1").unwrap();
        let taken_over = noted && notes.wait(|by| by.is_none());
        drop(frozen);
        bench.lab.resume("n1").unwrap();
        let made = made.join().unwrap();
        assert!(taken_over, "{noted} {made:?}{}", bench.logs());
        made.unwrap_err();
    });
    make_and_delete(&bench, "n2", "left");
}

/// A node on which the volume is not mounted, or not even its directory there, leaves to others what a process has left there.
#[test]
fn what_was_left_is_removed_where_the_volume_is() {
    let _turn = alone();
    let [mounted, unmounted] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let bench = Bench::up_on(mounted.path(), 2, "write-through", |config| {
        config.fence_grace = Duration::from_secs(4);
    });
    let pool = bench.directory.path().join("pool");
    let leads_to = |to: &Path| {
        std::fs::remove_file(&pool).unwrap();
        symlink(to, &pool).unwrap();
    };
    leads_to(unmounted.path());
    let file = mounted.path().join("left.raw");
    std::fs::write(&file, [1; 4096]).unwrap();
    let left_by = NodeRef::new("n9", 1);
    let note = UnfinishedRecord {
        disk: "left".into(),
        volume: "pool".into(),
        step: Step::Removing,
        by: left_by.clone(),
        lost: String::new(),
        clone: 0,
    };
    let notes = Notes::of(&bench);
    notes.put(&note);
    let other = bench.lab.client("n2").unwrap();
    let refused = other.delete("left", &Delete::default()).unwrap_err();
    assert_eq!(refused.kind, ApiErrorKind::Unavailable, "{refused}");
    // Longer than it takes to be sure that its process has ended, and to look twice.
    for elsewhere in [unmounted.path(), Path::new("/nonexistent")] {
        leads_to(elsewhere);
        thread::sleep(Duration::from_secs(11));
        assert_eq!(notes.by(), Some(left_by.clone()), "{}{}", elsewhere.display(), bench.logs());
    }
    let refused = other.create_disk(&wanted("other", "write-through")).unwrap_err();
    assert!(file.exists(), "{refused}");
    leads_to(mounted.path());
    assert!(notes.wait(|by| by.is_none()) && !file.exists(), "{:?}{}", notes.by(), bench.logs());
    make_and_delete(&bench, "n2", "left");
}

/// The disks are closed, and the flash does not answer to what is written there then.
#[test]
fn a_stop_does_not_wait_for_flash_that_hangs() {
    let _turn = alone();
    let place = tempfile::tempdir().unwrap();
    let flash = VolatileDisk::create(&place.path().join("flash"), 160 * MIB).unwrap();
    let bench = Bench::up(1, "write-back+0", |config| {
        config.flash = LabFlash::Devices(vec![flash.path()]);
    });
    NbdClient::connect(&uri(&bench)).unwrap().write(0, &vec![1; MIB as usize], true).unwrap();
    bench.wait(|view| view.detail.as_ref().is_some_and(|detail| detail.dirty_bytes == 0));
    // The flash gets that state, too.
    thread::sleep(Duration::from_secs(1));
    flash.fail_power();
    let node = bench.lab.node("n1").unwrap().process.unwrap();
    node.signal(rustix::process::Signal::TERM).unwrap();
    let began = Nanos::now();
    while node.state() == ProcessState::Running && Nanos::now() - began < Duration::from_secs(40) {
        thread::sleep(Duration::from_millis(20));
    }
    let (took, state) = (Nanos::now() - began, node.state());
    // Otherwise I/O in flight there would keep the process.
    flash.power_off();
    eprintln!("{state:?} after {took:?}");
    assert!(state == ProcessState::Gone && took < Duration::from_secs(20), "{took:?}{}", bench.logs());
}

/// A port is taken for a moment when a node starts again.
#[test]
fn a_node_waits_for_its_addresses() {
    let _turn = alone();
    let mut bench = Bench::up(2, "write-through", |_| {});
    let status = bench.lab.client("n2").unwrap().status().unwrap();
    let peers: SocketAddr =
        status.nodes.iter().find(|node| node.name == "n1").unwrap().peer_address.parse().unwrap();
    let nbd = bench.lab.node("n1").unwrap().nbd_tcp;
    for address in [peers, nbd] {
        bench.lab.kill("n1").unwrap();
        let taken = TcpListener::bind(address).unwrap();
        thread::scope(|scope| {
            scope.spawn(move || {
                thread::sleep(Duration::from_secs(1));
                drop(taken);
            });
            bench.lab.start("n1").unwrap_or_else(|error| panic!("{address}: {error}"));
        });
    }
}

/// A growth was killed when the file was longer and the record was not.
#[test]
fn a_growth_that_was_killed_does_not_stand_in_the_way_of_a_smaller_one() {
    let _turn = alone();
    let bench = Bench::up(2, "write-back+1", |_| {});
    let file = bench.directory.path().join("pool").join(format!("{DISK}.raw"));
    File::options().write(true).open(&file).unwrap().set_len(4 * SIZE).unwrap();
    let client = bench.lab.client("n1").unwrap();
    assert_eq!(client.resize(DISK, 2 * SIZE).unwrap().size, 2 * SIZE);
    let mut nbd = NbdClient::connect(&uri(&bench)).unwrap();
    assert_eq!(nbd.export().size, 2 * SIZE);
    nbd.write(2 * SIZE - 4096, &[7; 4096], true).unwrap();
    nbd.write(2 * SIZE, &[7; 4096], true).unwrap_err();
    client.export(DISK, &Export::default()).unwrap();
}
