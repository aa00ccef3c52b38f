//! Snapshots of disks in use, and disks that begin as one: each is the disk at one point in time (P5), with everything that was acknowledged
//! before. `WEIR_ROUNDS` sets the number of clones, and of snapshots under load.
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::lun::LunBench;
use common::rounds::soak;
use common::{Bench, DISK, SIZE, alone, during, new_history, seed};
use support::filesystem::SmallFilesystem;
use weir_block::Nanos;
use weir_lab::Lab;
use weir_nbd::Uri;
use weir_nbd::client::{CommandFlags, NbdClient};
use weir_node::api::{ApiErrorKind, CloneDisk, Delete, Disks, Export, LookAtLayout, Medium};

const BLOCK: usize = 4096;

/// Blocks that the counting guest writes, one after the other and again.
const BLOCKS: u64 = 97;

/// The targets of `make snapshots`: the 99th percentile of the guest's pauses beside snapshots, and the mean time of a clone (200 in 5 s).
const PAUSE: Duration = Duration::from_millis(100);
const CLONED: Duration = Duration::from_millis(25);

/// Whether the times count: in the long form, with optimised programs.
fn is_measured() -> bool {
    soak().is_some() && !cfg!(debug_assertions)
}

fn connect(lab: &Lab, disk: &str) -> NbdClient {
    let view = lab.any_client().unwrap().disk(disk).unwrap();
    let uri: Uri = view.uris.first().unwrap_or_else(|| panic!("{view:#?}")).parse().unwrap();
    NbdClient::connect(&uri).unwrap()
}

/// Where write number `number` goes: far from its neighbours.
fn place(number: u64) -> u64 {
    (number % BLOCKS) * (SIZE / BLOCKS / BLOCK as u64) * BLOCK as u64
}

fn block(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK / 8)
}

/// A guest that writes one block after the other, each with its number, and each when the one before is acknowledged.
struct Counting {
    stop: AtomicBool,
    acknowledged: AtomicU64,
    /// The longest time that a write took since this was asked last, in nanoseconds.
    longest: AtomicU64,
}

impl Counting {
    fn new() -> Counting {
        Counting { stop: AtomicBool::new(false), acknowledged: AtomicU64::new(0), longest: AtomicU64::new(0) }
    }

    fn run(&self, lab: &Lab) {
        let mut guest = connect(lab, DISK);
        for number in 1.. {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let began = Nanos::now();
            guest.write(place(number), &block(number), false).unwrap();
            let took = Nanos::now() - began;
            self.longest.fetch_max(took.as_nanos() as u64, Ordering::Relaxed);
            self.acknowledged.store(number, Ordering::Release);
        }
    }
}

/// The number of the last write in a disk, which holds all before it, and nothing from after it.
fn last_write(lab: &Lab, disk: &str) -> u64 {
    let mut client = connect(lab, disk);
    let mut read = |at| {
        let mut data = vec![0; BLOCK];
        client.read(at, &mut data).unwrap();
        let number = u64::from_le_bytes(data[..8].try_into().unwrap());
        assert_eq!(data, block(number), "{disk}: a torn block at {at}");
        number
    };
    let found: Vec<u64> = (0..BLOCKS).map(|number| read(place(number))).collect();
    let last = *found.iter().max().unwrap();
    for (residue, number) in (0..BLOCKS).zip(&found) {
        let newest = (last + 1).saturating_sub(BLOCKS)..=last;
        let expected = newest.clone().find(|number| number % BLOCKS == residue).unwrap_or(0);
        assert_eq!(*number, expected, "{disk}: block {residue} of a disk whose last write is {last}");
    }
    last
}

fn clone_of(name: &str, snapshot: Option<&str>) -> CloneDisk {
    CloneDisk {
        name: name.into(),
        snapshot: snapshot.map(str::to_owned),
        policy: "write-back+0".into(),
        medium: Medium::Ram,
        limit: None,
    }
}

/// Snapshots of a disk in use are made `rounds` times; afterwards each is what the guest had written up to one point.
fn snapshots_are_points_in_time(bench: &Bench, rounds: u64) {
    let (lab, client) = (&bench.lab, bench.lab.any_client().unwrap());
    let guest = Counting::new();
    let mut before = Vec::new();
    let mut pauses = Vec::new();
    thread::scope(|scope| {
        let running = scope.spawn(|| guest.run(lab));
        for round in 0..rounds {
            thread::sleep(Duration::from_millis(150));
            guest.longest.store(0, Ordering::Relaxed);
            before.push(guest.acknowledged.load(Ordering::Acquire));
            let made = client.create_snapshot(DISK, &format!("s{round}"), &[]);
            let made = made.unwrap_or_else(|error| panic!("{error:?}{}", bench.logs()));
            assert_eq!((made.len(), made[0].disk.as_str(), made[0].size), (1, DISK, SIZE));
            thread::sleep(Duration::from_millis(100));
            pauses.push(Duration::from_nanos(guest.longest.load(Ordering::Relaxed)));
        }
        guest.stop.store(true, Ordering::Relaxed);
        running.join().unwrap();
    });
    pauses.sort();
    eprintln!("longest write beside each snapshot: {pauses:?}");
    let after = guest.acknowledged.load(Ordering::Acquire);
    assert_eq!(client.snapshots(DISK).unwrap().len() as u64, rounds);
    let mut lasts = Vec::new();
    for (round, acknowledged) in before.iter().enumerate() {
        let name = format!("c{round}");
        client.clone_disk(DISK, &clone_of(&name, Some(&format!("s{round}")))).unwrap();
        client.export(&name, &Export::default()).unwrap();
        let last = last_write(lab, &name);
        assert!(last >= *acknowledged && last <= after, "{last} after {acknowledged} of {after}");
        lasts.push(last);
    }
    assert!(lasts.is_sorted(), "{lasts:?}");
    eprintln!("acknowledged before {before:?}, in the snapshots {lasts:?}, in all {after}");
    assert_eq!(last_write(lab, DISK), after);
    clones_and_their_sources_do_not_change_each_other(bench, lasts[0]);
    snapshots_go(bench, rounds, lasts[0]);
}

fn clones_and_their_sources_do_not_change_each_other(bench: &Bench, first: u64) {
    let (lab, client) = (&bench.lab, bench.lab.any_client().unwrap());
    client.clone_disk(DISK, &clone_of("now", None)).unwrap();
    client.export("now", &Export::default()).unwrap();
    let before = last_write(lab, "now");
    let mut one = connect(lab, "now");
    for number in 1..=BLOCKS {
        one.write(place(number), &block(1 << 40), false).unwrap();
    }
    one.flush().unwrap();
    assert_eq!(last_write(lab, DISK), before);
    assert_eq!(last_write(lab, "c0"), first);
    let mut source = connect(lab, DISK);
    let mut data = vec![0; BLOCK];
    for number in before + 1..=before + BLOCKS {
        source.write(place(number), &block(number), false).unwrap();
        one.read(place(number), &mut data).unwrap();
        assert_eq!(data, block(1 << 40));
    }
    assert_eq!(last_write(lab, DISK), before + BLOCKS);
    let snapshots = client.snapshots(DISK).unwrap();
    assert!(snapshots.iter().all(|one| !one.name.starts_with("clone-")), "{snapshots:?}");
}

fn snapshots_go(bench: &Bench, rounds: u64, first: u64) {
    let (lab, client) = (&bench.lab, bench.lab.any_client().unwrap());
    let again = client.create_snapshot(DISK, "s0", &[]).unwrap_err();
    assert_eq!(again.kind, ApiErrorKind::Exists, "{again:?}");
    let refused = client.delete(DISK, &Delete { force: true, ..Delete::default() }).unwrap_err();
    assert!(refused.message.contains("snapshots"), "{refused:?}");
    client.export(DISK, &Export::default()).unwrap();
    assert!(client.delete_snapshot(DISK, "none", false).unwrap_err().kind == ApiErrorKind::NotFound);
    client.delete_snapshot(DISK, "s0", true).unwrap();
    for round in 0..rounds {
        client.delete_snapshot(DISK, &format!("s{round}"), false).unwrap();
    }
    assert_eq!(client.snapshots(DISK).unwrap(), []);
    let last = last_write(lab, DISK);
    // Its blocks are its own again, or will be; the clones' are theirs.
    let mut source = connect(lab, DISK);
    for number in last + 1..=last + 2 * BLOCKS {
        source.write(place(number), &block(number), true).unwrap();
    }
    assert_eq!(last_write(lab, DISK), last + 2 * BLOCKS);
    assert_eq!(last_write(lab, "c0"), first);
    // What it is a clone of can go.
    drop(source);
    client.delete(DISK, &Delete { force: true, ..Delete::default() }).unwrap();
    assert_eq!(last_write(lab, "c0"), first);
}

#[test]
fn on_a_lun_with_replicas() {
    let _turn = alone();
    let pool = LunBench::up(3, "xfs", "write-back+1", |_| {});
    snapshots_are_points_in_time(&pool.bench, 4);
}

#[test]
fn on_a_lun_whose_coordinator_is_another_node_than_the_owner() {
    let _turn = alone();
    let pool = LunBench::up(3, "xfs", "write-through", |_| {});
    let coordinator = pool.coordinator();
    let other = pool.bench.lab.nodes().iter().map(|node| node.name.clone()).find(|name| *name != coordinator);
    pool.bench.lab.any_client().unwrap().move_disk(DISK, &other.unwrap()).unwrap();
    snapshots_are_points_in_time(&pool.bench, 4);
}

#[test]
fn in_a_directory() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount_xfs(512 << 20);
    let bench = Bench::up_on(&filesystem.path(), 2, "write-back+1", |_| {});
    let client = bench.lab.any_client().unwrap();
    let small = client.create_snapshot(DISK, "s", &[]).unwrap_err();
    assert!(
        small.message.contains("blocks of 512 bytes") && small.hint.contains("--block 4096"),
        "{small:?}"
    );
    client.delete(DISK, &Delete { force: true, ..Delete::default() }).unwrap();
    bench.create_with_blocks(DISK, "write-back+1", 4096);
    bench.wait_effective();
    snapshots_are_points_in_time(&bench, 4);
    drop(bench);
}

/// A guest writes each number to one disk and then to another one, which another node owns. No snapshot has a write of the second disk without that of
/// the first.
#[test]
fn snapshots_of_a_group_are_of_one_time() {
    let _turn = alone();
    let pool = LunBench::up(3, "xfs", "write-back+1", |_| {});
    let (lab, client) = (&pool.bench.lab, pool.bench.lab.any_client().unwrap());
    let other = lab.nodes().iter().map(|node| node.name.clone()).find(|name| *name != pool.bench.owner());
    pool.bench.create("second", "write-through");
    client.move_disk("second", &other.unwrap()).unwrap();
    let (stop, longest) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut pauses = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut first, mut second) = (connect(lab, DISK), connect(lab, "second"));
            for number in 1.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                for guest in [&mut first, &mut second] {
                    let began = Nanos::now();
                    guest.write(place(number), &block(number), false).unwrap();
                    longest.fetch_max((Nanos::now() - began).as_nanos() as u64, Ordering::Relaxed);
                }
            }
        });
        for round in 0..8 {
            thread::sleep(Duration::from_millis(100));
            longest.store(0, Ordering::Relaxed);
            let made = client.create_snapshot(DISK, &format!("g{round}"), &["second".into()]);
            let made = made.unwrap_or_else(|error| panic!("{error:?}{}", pool.bench.logs()));
            assert_eq!(made.len(), 2);
            pauses.push(Duration::from_nanos(longest.load(Ordering::Relaxed)));
        }
        stop.store(true, Ordering::Relaxed);
    });
    pauses.sort();
    eprintln!("longest write beside each snapshot: {pauses:?}");
    for round in 0..8 {
        let last = [DISK, "second"].map(|disk| {
            let name = format!("{disk}-{round}");
            client.clone_disk(disk, &clone_of(&name, Some(&format!("g{round}")))).unwrap();
            client.export(&name, &Export::default()).unwrap();
            last_write(lab, &name)
        });
        assert!(last[0] == last[1] || last[0] == last[1] + 1, "round {round}: {last:?}");
    }
    let strange = client.create_snapshot(DISK, "x", &["nothing".into()]).unwrap_err();
    assert_eq!(strange.kind, ApiErrorKind::NotFound, "{strange:?}");
    // All or none.
    let again = client.create_snapshot("second", "g0", &[]).unwrap_err();
    assert_eq!(again.kind, ApiErrorKind::Exists, "{again:?}");
    client.delete_snapshot(DISK, "g0", false).unwrap();
    let again = client.create_snapshot(DISK, "g0", &["second".into()]).unwrap_err();
    assert_eq!(again.kind, ApiErrorKind::Exists, "{again:?}");
    assert!(client.snapshots(DISK).unwrap().iter().all(|one| one.name != "g0"));
}

/// Requests of any kind, deep queues, and the route from direct to redirected and back: the disk itself is always what it is.
#[test]
fn a_disk_under_load_stays_what_it_is_while_snapshots_come_and_go() {
    let _turn = alone();
    let seed = seed();
    let pool = LunBench::up(3, "xfs", "write-back+1", |_| {});
    let load = pool.bench.load(new_history(seed), seed);
    let (progress, mut stalls, mut made_in) = (load.progress(), Vec::new(), Vec::new());
    let (mut load, ()) = during(load, Duration::from_secs(1), || {
        let client = pool.bench.lab.any_client().unwrap();
        for round in 0..soak().unwrap_or(6) {
            let name = format!("s{round}");
            progress.take_longest_stall();
            let began = Nanos::now();
            client
                .create_snapshot(DISK, &name, &[])
                .unwrap_or_else(|error| panic!("{error:?}{}", pool.bench.logs()));
            made_in.push(Nanos::now() - began);
            thread::sleep(Duration::from_millis(300));
            stalls.push(progress.take_longest_stall());
            // Two stay at a time.
            if round >= 2 {
                client.delete_snapshot(DISK, &format!("s{}", round - 2), false).unwrap();
            }
        }
    });
    // The filesystem shares extents one by one.
    let usage = pool.bench.lab.any_client().unwrap().volume_usage("pool").unwrap();
    let extents = usage.items.iter().find(|item| item.name == DISK).and_then(|item| item.extents);
    for (what, mut times) in [("longest stall beside each", stalls), ("time to make each", made_in)] {
        times.sort();
        let of_hundred = |percent: usize| times[(times.len() * percent).div_ceil(100) - 1];
        let (half, most, all) = (of_hundred(50), of_hundred(99), of_hundred(100));
        let count = times.len();
        eprintln!(
            "{what} of {count} snapshots: p50 {half:?}, p99 {most:?}, longest {all:?} (at the end {extents:?} extents)"
        );
        if is_measured() && what.starts_with("longest stall") {
            assert!(most < PAUSE, "p99 of the {what} of {count} snapshots: {most:?}");
        }
    }
    pool.bench.judge(&mut load, seed);
}

#[test]
fn where_blocks_cannot_be_shared_that_is_said_and_nothing_is_left() {
    let _turn = alone();
    let pool = LunBench::up(2, "ext4", "write-back+0", |_| {});
    let client = pool.bench.lab.any_client().unwrap();
    let error = client.create_snapshot(DISK, "s", &[]).unwrap_err();
    assert_eq!(error.kind, ApiErrorKind::Refused, "{error:?}");
    assert!(error.message.contains("has no reflinks"), "{error:?}");
    assert_eq!(client.snapshots(DISK).unwrap(), []);
    let error = client.clone_disk(DISK, &clone_of("c", None)).unwrap_err();
    assert!(error.message.contains("has no reflinks"), "{error:?}");
    assert_eq!(client.disk("c").unwrap_err().kind, ApiErrorKind::NotFound);
    // The disk goes on.
    let mut guest = connect(&pool.bench.lab, DISK);
    guest.write(0, &block(7), true).unwrap();
}

/// What the command would refuse, its dry run refuses in the same words; and it makes nothing.
#[test]
fn a_dry_run_makes_the_checks_of_the_command() {
    let _turn = alone();
    let pool = LunBench::up(2, "xfs", "write-through", |_| {});
    let weir = |arguments: &[&str]| {
        let mut command = Command::new(common::program());
        let output = command.arg("--lab").arg(pool.bench.lab.dir()).args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let snapshot = format!("{DISK}@s");
    let create: &[&str] = &["snapshot", "create", &snapshot];
    let clone: &[&str] = &["disk", "clone", DISK, "c"];
    let of_none: &[&str] = &["disk", "clone", &format!("{DISK}@none"), "e"];
    let bad_policy: &[&str] = &["disk", "clone", DISK, "e", "--policy", "write-sideways"];
    let bad_name: &[&str] = &["snapshot", "create", &format!("{DISK}@-")];
    for command in [create, clone] {
        let dry = [command, &["--dry-run"]].concat();
        assert_eq!(weir(&dry).0, Some(0), "{:?}", weir(&dry));
        assert_eq!(weir(&dry).0, Some(0), "the dry run has made something: {:?}", weir(&dry));
        assert_eq!(weir(command).0, Some(0));
    }
    for command in [create, clone, of_none, bad_policy, bad_name] {
        let (code, said) = weir(command);
        let dry = weir(&[command, &["--dry-run"]].concat());
        assert!(code.is_some_and(|code| code != 0), "{command:?}: {said}");
        assert_eq!(dry, (code, said), "{command:?}");
    }
}

/// Writes the numbers, and then frees every other block of a part of the disk, so that its file is in many extents. Returns how many there are.
fn shatter(bench: &Bench) -> u64 {
    const PART: u64 = 8 << 20;
    let (client, mut guest) = (bench.lab.any_client().unwrap(), connect(&bench.lab, DISK));
    guest.write(0, &vec![0x6b; PART as usize], false).unwrap();
    for number in 1..=BLOCKS {
        guest.write(place(number), &block(number), false).unwrap();
    }
    // Last, because a write to new space would fill what is freed around it; and none of these blocks has a number.
    for at in (BLOCK as u64..PART).step_by(2 * BLOCK) {
        assert!((0..BLOCKS).all(|number| place(number) != at));
        guest.trim(at, BLOCK as u64, CommandFlags::default()).unwrap();
    }
    guest.flush().unwrap();
    let wanted = LookAtLayout { snapshot: None, before: None };
    client.layout(DISK, &wanted).unwrap().extents.unwrap()
}

/// A closed disk has no owner who could say when; an image is cloned often.
#[test]
fn a_golden_image_is_closed_and_has_many_clones() {
    let _turn = alone();
    let pool = LunBench::up(2, "xfs", "write-through", |_| {});
    let (lab, client) = (&pool.bench.lab, pool.bench.lab.any_client().unwrap());
    let extents = shatter(&pool.bench);
    assert!((900..=1_200).contains(&extents), "{extents}");
    client.create_snapshot(DISK, "v1", &[]).unwrap();
    let clones = soak().unwrap_or(40);
    let names: Vec<String> = (0..clones).map(|number| format!("vm{number}")).collect();
    let mut weir = Command::new(common::program());
    weir.arg("--lab").arg(lab.dir()).args(["--output", "json", "disk", "clone", "--policy", "write-back+0"]);
    let began = Nanos::now();
    let output = weir.arg(format!("{DISK}@v1")).args(&names).output().unwrap();
    let took = Nanos::now() - began;
    assert!(output.status.success(), "{output:?}");
    let made: Disks = serde_json::from_slice(&output.stdout).unwrap();
    assert!(made.disks.iter().map(|disk| &disk.name).eq(&names));
    eprintln!("{clones} clones of {extents} extents in {took:?}");
    if is_measured() {
        assert!(took < CLONED * u32::try_from(clones).unwrap(), "{clones} clones in {took:?}");
    }
    for name in ["vm0".to_owned(), format!("vm{}", clones - 1)] {
        client.export(&name, &Export::default()).unwrap();
        assert_eq!(last_write(lab, &name), BLOCKS);
    }
    let twice = client.clone_disk(DISK, &clone_of("vm0", Some("v1"))).unwrap_err();
    assert_eq!(twice.kind, ApiErrorKind::Exists, "{twice:?}");
    // One that cannot be made keeps no other one away.
    let mut weir = Command::new(common::program());
    weir.arg("--lab").arg(lab.dir()).args(["disk", "clone", &format!("{DISK}@v1"), "more1", "vm0", "more2"]);
    let output = weir.output().unwrap();
    let (said, shown) = (String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    assert!(
        said.contains("1 of 3 clones not made: vm0. The first, vm0: there is a disk vm0 already"),
        "{said}"
    );
    assert!(shown.contains("more1") && shown.contains("more2") && !output.status.success(), "{shown}");
    let absent = client.clone_disk(DISK, &clone_of("another", Some("v2"))).unwrap_err();
    assert_eq!(absent.kind, ApiErrorKind::NotFound, "{absent:?}");
}
