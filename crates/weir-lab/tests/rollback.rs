//! Disks that go back to a snapshot: they have its content or the one from before, whatever happens meanwhile, and nothing of an earlier log
//! comes after it (P4).
#![allow(clippy::unwrap_used)]

mod common;
mod support;

use std::thread;
use std::time::Duration;

use common::lun::LunBench;
use common::rounds::soak;
use common::{Bench, DISK, SIZE, SOON, alone, seed};
use support::filesystem::SmallFilesystem;
use weir_block::Nanos;
use weir_lab::Lab;
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;
use weir_node::api::{ApiError, ApiErrorKind, CloneDisk, Delete, Export, Medium, RollBack, RolledBack};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 61;

fn connect(lab: &Lab, disk: &str) -> NbdClient {
    let view = lab.any_client().unwrap().disk(disk).unwrap();
    let uri: Uri = view.uris.first().unwrap_or_else(|| panic!("{view:#?}")).parse().unwrap();
    NbdClient::connect(&uri).unwrap()
}

fn places() -> impl Iterator<Item = u64> {
    (0..BLOCKS).map(|number| number * (SIZE / BLOCKS / BLOCK as u64) * BLOCK as u64)
}

/// Writes one number to all blocks.
fn fill(lab: &Lab, disk: &str, number: u64) {
    let mut client = connect(lab, disk);
    let data = number.to_le_bytes().repeat(BLOCK / 8);
    places().for_each(|at| client.write(at, &data, false).unwrap());
}

/// The number that all blocks of a disk have. Opens it.
fn content(lab: &Lab, disk: &str) -> u64 {
    lab.any_client().unwrap().export(disk, &Export::default()).unwrap();
    let mut client = connect(lab, disk);
    let mut read = |at| {
        let mut data = vec![0; BLOCK];
        client.read(at, &mut data).unwrap();
        let number = u64::from_le_bytes(data[..8].try_into().unwrap());
        assert_eq!(data, number.to_le_bytes().repeat(BLOCK / 8), "{disk}: a torn block at {at}");
        number
    };
    let found: Vec<u64> = places().map(&mut read).collect();
    assert!(found.iter().all(|number| *number == found[0]), "{disk} is a mix: {found:?}");
    found[0]
}

fn to(snapshot: &str) -> RollBack {
    RollBack { snapshot: snapshot.into(), ..RollBack::default() }
}

fn discarding(snapshot: &str) -> RollBack {
    RollBack { discard_current: true, ..to(snapshot) }
}

/// A client that has just gone counts for a moment.
fn roll_back(lab: &Lab, wanted: &RollBack) -> Result<RolledBack, ApiError> {
    let deadline = Nanos::now() + SOON;
    loop {
        match lab.any_client().unwrap().roll_back(DISK, wanted) {
            Err(error) if error.message.contains("connected to it") && Nanos::now() < deadline => {
                thread::sleep(Duration::from_millis(20));
            }
            done => return done,
        }
    }
}

fn names(lab: &Lab) -> Vec<String> {
    lab.any_client().unwrap().snapshots(DISK).unwrap().into_iter().map(|one| one.name).collect()
}

fn goes_back_and_forth(bench: &Bench) {
    let (lab, client) = (&bench.lab, bench.lab.any_client().unwrap());
    fill(lab, DISK, 1);
    client.create_snapshot(DISK, "one", &[]).unwrap();
    fill(lab, DISK, 2);
    is_refused(lab);
    let would = roll_back(lab, &RollBack { dry_run: true, ..to("one") }).unwrap();
    assert!(would.was_open && !would.done, "{would:?}");
    assert_eq!((content(lab, DISK), names(lab)), (2, vec!["one".to_owned()]));

    let done = roll_back(lab, &to("one")).unwrap_or_else(|error| panic!("{error:?}{}", bench.logs()));
    let kept = done.kept.clone().unwrap();
    assert!(done.was_open && done.done && kept.starts_with("before-rollback-"), "{done:?}");
    assert!(client.disk(DISK).unwrap().owner.is_none(), "it is closed");
    assert_eq!(content(lab, DISK), 1);
    // Neither changes the other.
    fill(lab, DISK, 3);
    let clone = |name: &str, snapshot: &str| {
        let clone = CloneDisk {
            name: name.into(),
            snapshot: Some(snapshot.into()),
            policy: "write-through".into(),
            medium: Medium::Ram,
            limit: None,
        };
        client.clone_disk(DISK, &clone).unwrap();
        content(lab, name)
    };
    assert_eq!((clone("first", "one"), clone("second", &kept)), (1, 2));

    // Forth, without keeping anything; then the disk is open on another node, where it was before.
    let done = roll_back(lab, &discarding(&kept)).unwrap();
    assert_eq!((done.kept, names(lab)), (None, vec!["one".to_owned(), kept.clone()]));
    assert_eq!(content(lab, DISK), 2);
    for node in lab.nodes() {
        client.move_disk(DISK, &node.name).unwrap();
        assert_eq!(content(lab, DISK), 2, "on {}", node.name);
    }
    let done = roll_back(lab, &RollBack { keep_as: Some("two".into()), ..to("one") }).unwrap();
    assert_eq!(done.kept.as_deref(), Some("two"));
    // A closed one.
    let done = roll_back(lab, &discarding("two")).unwrap();
    assert!(!done.was_open);
    assert_eq!(content(lab, DISK), 2);
    let events = client.events().unwrap();
    assert_eq!(events.iter().filter(|event| event.kind == "disk-rolled-back").count(), 4, "{events:#?}");
    // It can be filled again, with blocks of its own.
    fill(lab, DISK, 4);
    assert_eq!((content(lab, DISK), content(lab, "first"), content(lab, "second")), (4, 1, 2));
}

fn is_refused(lab: &Lab) {
    let client = lab.any_client().unwrap();
    let guest = connect(lab, DISK);
    let used = client.roll_back(DISK, &to("one")).unwrap_err();
    assert_eq!(used.kind, ApiErrorKind::Refused, "{used:?}");
    assert!(used.message.contains("connected to it"), "{used:?}");
    drop(guest);
    let absent = client.roll_back(DISK, &to("none")).unwrap_err();
    assert_eq!(absent.kind, ApiErrorKind::NotFound, "{absent:?}");
    let taken = client.roll_back(DISK, &RollBack { keep_as: Some("one".into()), ..to("one") }).unwrap_err();
    assert_eq!(taken.kind, ApiErrorKind::Exists, "{taken:?}");
    let both = RollBack { keep_as: Some("kept".into()), ..discarding("one") };
    assert_eq!(client.roll_back(DISK, &both).unwrap_err().kind, ApiErrorKind::Invalid);
    assert_eq!((content(lab, DISK), names(lab)), (2, vec!["one".to_owned()]));
}

#[test]
fn on_a_lun() {
    let _turn = alone();
    let pool = LunBench::up(3, "xfs", "write-back+1", |_| {});
    let coordinator = pool.coordinator();
    let other = pool.bench.lab.nodes().iter().map(|node| node.name.clone()).find(|name| *name != coordinator);
    pool.bench.lab.any_client().unwrap().move_disk(DISK, &other.unwrap()).unwrap();
    goes_back_and_forth(&pool.bench);
}

#[test]
fn in_a_directory() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount_xfs(512 << 20);
    let bench = Bench::up_on(&filesystem.path(), 2, "write-back+1", |_| {});
    let client = bench.lab.any_client().unwrap();
    client.delete(DISK, &Delete { force: true, ..Delete::default() }).unwrap();
    bench.create_with_blocks(DISK, "write-back+1", 4096);
    bench.wait_effective();
    goes_back_and_forth(&bench);
    let files = std::fs::read_dir(filesystem.path()).unwrap();
    let left: Vec<_> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    assert!(left.iter().all(|name| !name.ends_with(".new")), "{left:?}");
    drop(bench);
}

/// The host of the coordinator, which replaces the file, crashes in the middle of that: the disk has one content or the other.
#[test]
fn a_crash_leaves_one_content_or_the_other() {
    let _turn = alone();
    let seed = seed();
    let mut found = [0, 0];
    let mut pool = LunBench::up(2, "xfs", "write-through", |_| {});
    fill(&pool.bench.lab, DISK, 1);
    pool.bench.lab.any_client().unwrap().create_snapshot(DISK, "one", &[]).unwrap();
    for round in 0..soak().unwrap_or(5) {
        let coordinator = pool.coordinator();
        let now = content(&pool.bench.lab, DISK);
        if now == 1 {
            fill(&pool.bench.lab, DISK, 2);
        }
        pool.bench.lab.any_client().unwrap().move_disk(DISK, &coordinator).unwrap();
        let client = pool.bench.lab.client(&coordinator).unwrap();
        let wait = Duration::from_millis(seed.wrapping_mul(round + 7) % 120);
        // Its own client has gone.
        roll_back(&pool.bench.lab, &RollBack { dry_run: true, ..to("one") }).unwrap();
        let rolling = thread::spawn(move || client.roll_back(DISK, &discarding("one")));
        thread::sleep(wait);
        assert!(pool.crash(&coordinator));
        let answer = rolling.join().unwrap();
        pool.coordinator();
        let now = content_when_open(&pool);
        found[(now == 1) as usize] += 1;
        assert!(now == 1 || answer.is_err(), "{answer:?} and {now}");
        pool.bench.lab.start(&coordinator).unwrap();
        // Whatever was left unfinished is no snapshot, and in nobody's way.
        assert_eq!(names(&pool.bench.lab), ["one"]);
    }
    eprintln!("the content from before: {}, the snapshot's: {}", found[0], found[1]);
}

fn content_when_open(pool: &LunBench) -> u64 {
    let deadline = Nanos::now() + SOON;
    loop {
        let opened = pool.bench.lab.any_client().unwrap().export(DISK, &Export::default());
        match opened {
            Ok(_) => return content(&pool.bench.lab, DISK),
            Err(error) => assert!(Nanos::now() < deadline, "{error:?}{}", pool.bench.logs()),
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Its log may have what the file lacks.
#[test]
fn a_disk_whose_owner_is_gone_does_not_go_back() {
    let _turn = alone();
    let mut pool = LunBench::up(3, "xfs", "write-back+0", |_| {});
    let coordinator = pool.coordinator();
    let other = pool.bench.lab.nodes().iter().map(|node| node.name.clone()).find(|name| *name != coordinator);
    let other = other.unwrap();
    pool.bench.lab.any_client().unwrap().move_disk(DISK, &other).unwrap();
    pool.bench.wait_effective();
    pool.bench.lab.any_client().unwrap().create_snapshot(DISK, "one", &[]).unwrap();
    pool.bench.lab.kill(&other).unwrap();
    let client = pool.bench.lab.client(&coordinator).unwrap();
    let deadline = Nanos::now() + SOON;
    let refused = loop {
        let error = client.roll_back(DISK, &to("one")).unwrap_err();
        if error.kind == ApiErrorKind::Refused || Nanos::now() > deadline {
            break error;
        }
        thread::sleep(Duration::from_millis(100));
    };
    assert!(refused.message.contains("is gone") && refused.hint.contains("weir disk export"), "{refused:?}");
    assert_eq!(client.snapshots(DISK).unwrap().len(), 1);
}

/// A former owner that stands still has a log and leases of the content from before. The disk goes back when it has ended, has let go, or has
/// been silent for the fence grace; when it goes on afterwards, the disk is the snapshot.
#[test]
fn a_former_owner_that_comes_back_changes_nothing() {
    let _turn = alone();
    let pool = LunBench::up(3, "xfs", "write-back+1", |_| {});
    let (lab, coordinator) = (&pool.bench.lab, pool.coordinator());
    let other = lab.nodes().iter().map(|node| node.name.clone()).find(|name| *name != coordinator).unwrap();
    lab.any_client().unwrap().move_disk(DISK, &other).unwrap();
    pool.bench.wait_effective();
    fill(lab, DISK, 1);
    lab.any_client().unwrap().create_snapshot(DISK, "one", &[]).unwrap();
    fill(lab, DISK, 2);
    lab.pause(&other).unwrap();
    let client = lab.client(&coordinator).unwrap();
    let deadline = Nanos::now() + SOON;
    while client.disk(DISK).unwrap().owner.is_none_or(|owner| owner == other) {
        assert!(Nanos::now() < deadline, "nobody takes over{}", pool.bench.logs());
        thread::sleep(Duration::from_millis(50));
    }
    let early = client.roll_back(DISK, &to("one"));
    eprintln!("beside a former owner: {early:?}");
    lab.resume(&other).unwrap();
    let done = loop {
        match &early {
            Ok(done) => break done.clone(),
            Err(_) => match client.roll_back(DISK, &to("one")) {
                Ok(done) => break done,
                Err(error) => assert!(Nanos::now() < deadline, "{error:?}{}", pool.bench.logs()),
            },
        }
        client.export(DISK, &Export::default()).ok();
        thread::sleep(Duration::from_millis(100));
    };
    thread::sleep(Duration::from_secs(1));
    assert_eq!(content(lab, DISK), 1);
    assert!(done.kept.is_some());
}

/// A successor removes the file that its predecessor has prepared for a rollback before it opens the disk, so that a predecessor that stood
/// still changes nothing when it goes on.
#[test]
fn a_successor_removes_what_its_predecessor_would_rename() {
    let _turn = alone();
    let filesystem = SmallFilesystem::mount_xfs(512 << 20);
    let bench = Bench::up_on(&filesystem.path(), 2, "write-through", |_| {});
    let lab = &bench.lab;
    lab.any_client().unwrap().move_disk(DISK, "n1").unwrap();
    fill(lab, DISK, 2);
    let prepared = filesystem.path().join(format!("{DISK}@00000000000000ff.new"));
    std::fs::write(&prepared, b"another content").unwrap();
    lab.pause("n1").unwrap();
    let successor = lab.client("n2").unwrap();
    let deadline = Nanos::now() + SOON;
    while let Err(error) = successor.export(DISK, &Export::default()) {
        assert!(Nanos::now() < deadline, "{error:?}{}", bench.logs());
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(content(lab, DISK), 2);
    assert!(!prepared.exists(), "{}", bench.logs());
    lab.resume("n1").unwrap();
    drop(bench);
}
