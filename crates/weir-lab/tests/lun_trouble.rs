//! A cluster shared volume on a LUN that stands idle, hangs, or is handled wrongly: paths that lead to another LUN, mounts by hand, a second
//! cluster. Needs root, for loop devices and mounts.
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use common::lun::{LunBench, RedirectedLoad, eventually, run, set_devices};
use common::throttle::Throttle;
use common::{DISK, SOON, alone, during, new_history, program, seed};
use weir_block::Nanos;
use weir_lab::volatile_disk::LoopDevice;
use weir_lab::{Lab, LabConfig};
use weir_load::verify::{Atomicity, History};
use weir_load::verifying::{Settings, VerifyingLoad};
use weir_node::api::{
    ApiError, ApiErrorKind, CloneDisk, ConfirmFenced, CreateDisk, CreateVolume, Delete, Export, Medium,
    VolumeView,
};

fn number(node: &str) -> usize {
    node[1..].parse().unwrap()
}

/// Whether a node has an event of this kind whose text has these words.
fn told(pool: &LunBench, node: &str, kind: &str, words: &str) -> Option<()> {
    let client = pool.bench.lab.client(node).unwrap().patience(Duration::from_secs(5));
    let events = client.events().ok()?;
    events.iter().any(|event| event.kind == kind && event.text.contains(words)).then_some(())
}

/// Verified load for a while.
fn works(pool: &LunBench, history: History, seed: u64) -> History {
    let (mut load, ()) = during(pool.bench.load(history, seed), Duration::from_secs(1), || {});
    pool.bench.judge(&mut load, seed);
    load.into_history()
}

/// Nobody asks for anything that would find it out.
#[test]
fn an_idle_coordinator_whose_filesystem_shuts_down_gives_the_volume_back() {
    for format in ["xfs", "ext4"] {
        let _turn = alone();
        let seed = seed();
        let pool = LunBench::up(3, format, "write-through", |_| {});
        let history = works(&pool, new_history(seed), seed);
        let coordinator = pool.coordinator();
        let epoch = pool.lun(&coordinator).epoch;
        assert!(pool.shut_down(&coordinator));
        let since = Nanos::now();
        eventually(&pool, "given back", || (pool.lun("n1").epoch > epoch).then_some(()));
        let next = pool.coordinator();
        eprintln!("{format}: from {coordinator} to {next} within {:?}", Nanos::now() - since);
        // Events are written behind what they tell.
        eventually(&pool, "told", || told(&pool, &coordinator, "volume-trouble", "gives the volume back"));
        eventually(&pool, "well", || pool.lun(&coordinator).notice.is_empty().then_some(()));
        works(&pool, history, seed);
    }
}

/// What its coordinator cannot do any more, the next one can: nobody is told that the storage is broken.
#[test]
fn whoever_makes_a_disk_while_the_filesystem_shuts_down_is_told_to_try_again() {
    for format in ["xfs", "ext4"] {
        let _turn = alone();
        let pool = LunBench::up(3, format, "write-through", |_| {});
        let coordinator = pool.coordinator();
        let client = pool.bench.lab.client(&coordinator).unwrap().patience(SOON);
        let mut refusals = Vec::new();
        for round in 0..3 {
            let (coordinator, name) = (pool.coordinator(), format!("new{round}"));
            assert!(pool.shut_down(&coordinator));
            let since = Nanos::now();
            let made = loop {
                match client.create_disk(&disk(&name)) {
                    Ok(made) => break made,
                    Err(error) => refusals.push(error),
                }
                assert!(Nanos::now() - since < SOON, "{refusals:#?}{}", pool.bench.logs());
                std::thread::sleep(Duration::from_millis(20));
            };
            assert_eq!(made.name, name);
            eprintln!("{format}: made after {:?}", Nanos::now() - since);
        }
        for refusal in &refusals {
            assert_eq!(refusal.kind, ApiErrorKind::Unavailable, "{refusals:#?}");
        }
        let told = |words: &str| refusals.iter().any(|refusal| refusal.message.contains(words));
        assert!(told("has failed on this node, which gives the volume back"), "{refusals:#?}");
        let export = Export::default();
        let uri = client.export("new0", &export).unwrap().uris[0].clone();
        assert!(qemu_io(&uri, "write -P 7 0 1M").status.success());
    }
}

/// The filesystem allows no more writes on the node that finds the damage. The next one would find it, too.
#[test]
fn damage_is_told_as_damage_and_does_not_take_the_volume_from_node_to_node_for_ever() {
    let _turn = alone();
    let mut pool = LunBench::up(3, "ext4", "write-through", |_| {});
    pool.bench.lab.any_client().unwrap().create_disk(&disk("bad")).unwrap();
    all_anew(&mut pool, |image| damage_inode(image, "bad.raw"));
    let epoch = pool.lun("n1").epoch;
    let client = pool.bench.lab.any_client().unwrap().patience(SOON);
    let refused = client.delete("bad", &Delete { force: true, ..Delete::default() }).unwrap_err();
    assert_eq!(refused.kind, ApiErrorKind::Failed, "{refused}");
    assert!(refused.message.contains("is deleted, but its file is not removed yet"), "{refused}");
    assert!(refused.hint.contains("e2fsck"), "{refused}");

    // Each node has tried, and told why. From then on it stays with one of them.
    let warned = |node: &&str| {
        let log = std::fs::read_to_string(&pool.bench.lab.node(node).unwrap().log).unwrap();
        log.contains("is tried again") && log.contains("Bad message")
    };
    eventually(&pool, "tried", || {
        (["n1", "n2", "n3"].iter().filter(|node| warned(node)).count() >= 2).then_some(())
    });
    eventually(&pool, "settled", || {
        let before = pool.lun("n1").epoch;
        std::thread::sleep(Duration::from_secs(10));
        (pool.lun("n1").epoch == before).then_some(())
    });
    let changes = pool.lun("n1").epoch - epoch;
    assert!((2..=4).contains(&changes), "{changes} changes of the coordinator");
    pool.coordinator();
    client.create_disk(&disk("good")).unwrap();

    all_anew(&mut pool, |image| {
        let repair = Command::new("e2fsck").args(["-f", "-y"]).arg(image).output().unwrap();
        // "File system errors corrected" (e2fsck(8)).
        assert_eq!(repair.status.code(), Some(1), "{repair:?}");
    });
    let coordinator = pool.coordinator();
    eventually(&pool, "removed", || told(&pool, &coordinator, "disk-deleted", "bad.raw is gone"));
    client.create_disk(&disk("bad")).unwrap();
}

/// Does something to the LUN's image while no node runs.
fn all_anew(pool: &mut LunBench, change: impl FnOnce(&Path)) {
    const NODES: [&str; 3] = ["n1", "n2", "n3"];
    NODES.iter().for_each(|node| pool.bench.lab.kill(node).unwrap());
    change(&pool.luns.image());
    // The kernel drops the blocks that it has cached.
    NODES
        .iter()
        .for_each(|node| run(Command::new("blockdev").arg("--flushbufs").arg(pool.luns.path(number(node)))));
    NODES.iter().for_each(|node| pool.bench.lab.start(node).unwrap());
    pool.coordinator();
}

/// Changes a byte of a file's inode, without its checksum.
fn damage_inode(image: &Path, file: &str) {
    let output = Command::new("debugfs").args(["-R", &format!("imap /{file}")]).arg(image).output().unwrap();
    // "Inode 13 is part of block group 0\n\tlocated at block 49, offset 0x0c00"
    let said = String::from_utf8(output.stdout).unwrap();
    let words: Vec<&str> = said.split([' ', ',', '\n', '\t']).collect();
    let after = |word: &str| words[words.iter().rposition(|one| *one == word).expect(&said) + 1..].to_vec();
    let block: u64 = after("block")[0].parse().unwrap();
    let offset = u64::from_str_radix(after("offset")[0].trim_start_matches("0x"), 16).unwrap();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(image).unwrap();
    // The time of the last access (Linux, `struct ext4_inode`).
    let (at, mut byte) = (block * 4096 + offset + 8, [0]);
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
    file.sync_all().unwrap();
}

/// Its filesystem has nothing to write, and so does not notice.
#[test]
fn an_idle_coordinator_without_a_path_gives_the_volume_back_to_one_that_has_one() {
    let _turn = alone();
    let seed = seed();
    let pool = LunBench::up(3, "xfs", "write-through", |_| {});
    let history = works(&pool, new_history(seed), seed);
    let (coordinator, _) = pool.apart();
    pool.luns.break_path(number(&coordinator), true);
    let since = Nanos::now();
    eventually(&pool, "another one's", || {
        let serving = ["n1", "n2", "n3"].into_iter().find(|node| pool.lun(node).phase == "serving");
        serving.filter(|node| *node != coordinator)
    });
    eprintln!("within {:?}", Nanos::now() - since);
    let history = works(&pool, history, seed);
    pool.luns.break_path(number(&coordinator), false);
    works(&pool, history, seed);
}

/// No fence command reaches its host; the operator has switched that off.
#[test]
fn a_volume_whose_coordinator_nobody_can_fence_is_served_on_the_operators_word() {
    let _turn = alone();
    let seed = seed();
    let mut pool = LunBench::up(3, "ext4", "write-through", |_| {});
    let (coordinator, owner) = pool.apart();
    let client = pool.bench.lab.client(&owner).unwrap().patience(SOON);
    let confirm = |node: &str, dry_run| {
        client.confirm_fenced("pool", &ConfirmFenced { node: node.to_owned(), dry_run })
    };
    let refused = |node: &str, words: &str| {
        let refused = confirm(node, false).unwrap_err();
        assert!(refused.kind == ApiErrorKind::Refused && refused.message.contains(words), "{refused}");
    };
    pool.luns.break_fences(true);
    let load = pool.bench.load(new_history(seed), seed);
    let progress = load.progress();
    let (mut load, next) = during(load, Duration::from_secs(1), || {
        pool.await_all_direct(&owner);
        refused(&coordinator, "is up");
        let epoch = pool.lun(&owner).epoch;
        assert!(pool.crash(&coordinator));
        let nobody_serves = || {
            let phases = ["n1", "n2", "n3"].into_iter().filter(|node| *node != coordinator);
            assert!(phases.map(|node| pool.lun(node).phase).all(|phase| phase != "serving"));
        };
        // Each attempt is another epoch, and ends at the fence.
        eventually(&pool, "tried again", || {
            nobody_serves();
            let lun = pool.lun(&owner);
            (lun.epoch > epoch + 1 && lun.trouble.contains("no answer")).then_some(())
        });
        // It is up, and may count as having the filesystem mounted, too, while it tries.
        refused(&owner, &owner);
        let would = eventually(&pool, "down", || confirm(&coordinator, true).ok());
        assert!(!would.done && !would.processes.is_empty(), "{would:?}");
        nobody_serves();
        let since = Nanos::now();
        let done = confirm(&coordinator, false).unwrap();
        assert!(done.done && done.processes == would.processes, "{done:?}");
        let next = pool.coordinator();
        eprintln!("{next} serves {:?} after the operator's word", Nanos::now() - since);
        eventually(&pool, "told", || told(&pool, &owner, "fence-confirmed", &coordinator));
        let before = progress.acknowledged();
        eventually(&pool, "going on", || (progress.acknowledged() > before + 100).then_some(()));
        next
    });
    assert_ne!(next, coordinator);
    assert!(pool.luns.fenced().is_empty(), "{:?}", pool.luns.fenced());
    eprintln!("longest stall {:?}", progress.longest_stall());
    pool.bench.judge(&mut load, seed);
    // The new coordinator does redirected I/O again, too.
    let (changes, _) = {
        let load = RedirectedLoad::begin(&pool.bench, &owner);
        std::thread::sleep(Duration::from_millis(300));
        load.end()
    };
    assert!(changes > 0);
    pool.ends_clean();
}

/// What keeps a coordinator from answering, although its connections and its session stand.
#[derive(Clone, Copy, Debug)]
enum Hang {
    Process,
    Lun,
}

/// Guests wait, but not for ever, and hear of it; direct I/O goes on, and all is well when it answers (P4, P9).
fn a_silent_coordinator(hang: Hang) {
    const WAIT: Duration = Duration::from_secs(4);
    let _turn = alone();
    let seed = seed();
    let pool = LunBench::up(3, "xfs", "write-through", |config| {
        // Longer than it stands still.
        (config.lease_ttl, config.coordinator_wait) = (Duration::from_secs(60), WAIT);
    });
    let (coordinator, owner) = pool.apart();
    let client = pool.bench.lab.client(&owner).unwrap();
    let wanted = CreateDisk { size: 64 << 20, ..disk("fresh") };
    client.create_disk(&wanted).unwrap();
    let export = Export { on: Some(owner.clone()), ..Export::default() };
    let uri = client.export("fresh", &export).unwrap().uris[0].clone();
    // All blocks are the owner's by now, unless they are written for the first time.
    let history = works(&pool, new_history(seed), seed);
    let history = works(&pool, history, seed);
    let process = pool.bench.lab.process(&coordinator).unwrap().unwrap();
    let epoch = pool.lun(&owner).epoch;
    let (mut load, ()) = during(pool.bench.load(history, seed), Duration::ZERO, || {
        let throttle = match hang {
            Hang::Process => pool.bench.lab.pause(&coordinator).map(|()| None).unwrap(),
            Hang::Lun => {
                let found = Throttle::new(pool.luns.path(number(&coordinator)), 1, [process.pid]);
                let throttle = found.expect("the kernel has cgroup v1's blkio.throttle");
                throttle.limit_reads(1).unwrap();
                Some(throttle)
            }
        };
        let since = Nanos::now();
        let output = write(&uri, "0");
        let waited = Nanos::now() - since;
        assert!(!output.status.success(), "{output:?}");
        assert!(waited > WAIT * 3 / 4 && waited < WAIT * 2 + Duration::from_secs(5), "{waited:?}");
        eprintln!("{hang:?}: an error after {waited:?}");
        let words = "has answered nothing for longer than lun.coordinator_wait";
        eventually(&pool, "told", || told(&pool, &owner, "volume-recovery-failed", words));
        // It stands still until the end of this: whatever is to be seen comes, and stays.
        eventually(&pool, "shown", || {
            let view = pool.bench.lab.client(&owner).unwrap().patience(SOON).disk("fresh").ok()?;
            let is_shown = view.state == "degraded" && view.reason.contains("does not answer");
            let reasons = view.detail?.route?.reasons;
            (is_shown && reasons.iter().any(|one| one.flag == "coordinator-silent")).then_some(())
        });
        if matches!(hang, Hang::Lun) {
            let words = "has not answered for more than";
            eventually(&pool, "told by the coordinator", || {
                told(&pool, &coordinator, "volume-trouble", words)
            });
        }
        drop(throttle);
        if matches!(hang, Hang::Process) {
            pool.bench.lab.resume(&coordinator).unwrap();
        }
    });
    eventually(&pool, "written", || write(&uri, "0").status.success().then_some(()));
    eventually(&pool, "well", || {
        let view = pool.bench.disk_named("fresh").filter(|view| view.state == "serving")?;
        view.detail?.route?.reasons.is_empty().then_some(())
    });
    eventually(&pool, "well", || pool.lun(&coordinator).notice.is_empty().then_some(()));
    assert_eq!((pool.coordinator(), pool.lun(&owner).epoch), (coordinator, epoch), "it is the same one");
    eprintln!("{hang:?}: direct I/O stalled for {:?}", load.progress().longest_stall());
    pool.bench.judge(&mut load, seed);
    let read = qemu_io(&uri, "read -P 7 0 4k");
    assert!(read.status.success() && !String::from_utf8_lossy(&read.stdout).contains("failed"), "{read:?}");
}

#[test]
fn a_coordinator_that_stands_still_fails_requests_after_a_while_and_comes_back() {
    a_silent_coordinator(Hang::Process);
}

#[test]
fn a_coordinator_whose_lun_hangs_fails_requests_after_a_while_and_comes_back() {
    a_silent_coordinator(Hang::Lun);
}

fn qemu_io(uri: &str, command: &str) -> Output {
    Command::new("timeout").args(["60", "qemu-io", "-f", "raw", "-c", command, uri]).output().unwrap()
}

/// Blocks that nobody has written before go through the coordinator.
fn write(uri: &str, at: &str) -> Output {
    qemu_io(uri, &format!("write -P 7 {at} 4k"))
}

fn disk(name: &str) -> CreateDisk {
    CreateDisk {
        name: name.into(),
        volume: "pool".into(),
        size: 1 << 20,
        logical_block: 4096,
        policy: "write-through".into(),
        medium: Medium::Ram,
        limit: None,
    }
}

fn volume(name: &str, path: &Path) -> CreateVolume {
    CreateVolume {
        name: name.into(),
        kind: "lun".into(),
        path: path.to_owned(),
        server: None,
        format: Some("xfs".into()),
        identity: None,
        destroy: true,
    }
}

fn swap(links: &[PathBuf; 2]) {
    let targets = [std::fs::read_link(&links[0]).unwrap(), std::fs::read_link(&links[1]).unwrap()];
    for (link, target) in links.iter().zip(targets.into_iter().rev()) {
        std::fs::remove_file(link).unwrap();
        symlink(target, link).unwrap();
    }
}

/// Another LUN, with a path for each of two nodes.
struct SecondLun {
    devices: [LoopDevice; 2],
    directory: tempfile::TempDir,
}

impl SecondLun {
    fn new() -> SecondLun {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let image = directory.path().join("second");
        std::fs::File::create(&image).unwrap().set_len(400 << 20).unwrap();
        SecondLun { devices: [1, 2].map(|_| LoopDevice::attach(&image).unwrap()), directory }
    }
}

/// Each of two disks, on two LUNs, has what was written to it, also after it has been opened anew on the first node.
fn is_all_where_it_was(pool: &LunBench, when: &str) {
    for (name, byte) in [("a1", 7), ("b1", 8)] {
        let client = pool.bench.lab.client("n2").unwrap().patience(SOON);
        for node in ["n2", "n1"] {
            eventually(pool, "moved", || client.move_disk(name, node).ok());
            let read = || {
                let uri = pool.bench.disk_named(name)?.uris.first()?.clone();
                let output = qemu_io(&uri, &format!("read -P {byte} 0 1M"));
                output.status.success().then_some((uri, output))
            };
            let (uri, output) = eventually(pool, "read", read);
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(!said.contains("failed"), "{when}, {name} on {node}: {said}{}", pool.bench.logs());
            let again = qemu_io(&uri, &format!("write -P {byte} 0 1M"));
            assert!(again.status.success(), "{when}, {name} on {node}: {again:?}");
        }
    }
}

/// Links of a node lead to each other's LUN, while it runs and before it starts: what counts is what is on the LUN.
#[test]
fn two_luns_whose_paths_are_swapped_are_not_mixed_up() {
    let _turn = alone();
    let mut pool = LunBench::up(2, "xfs", "write-through", |_| {});
    let second = SecondLun::new();
    let links = ["a", "b"].map(|name| second.directory.path().join(name));
    symlink(pool.luns.path(1), &links[0]).unwrap();
    symlink(second.devices[0].path(), &links[1]).unwrap();
    let others = [pool.luns.path(2).to_owned(), second.devices[1].path().to_owned()];
    for (node, devices) in [("n1", &links), ("n2", &others)] {
        set_devices(&pool.bench.lab, node, devices);
        restart(&mut pool, node);
    }
    let client = pool.bench.lab.client("n1").unwrap().patience(Duration::from_secs(60));
    let mut wanted = volume("other", &links[1]);
    wanted.identity = client.plan_volume(&wanted).unwrap().identity;
    client.create_volume(&wanted).unwrap();
    for (name, volume, byte) in [("a1", "pool", 7), ("b1", "other", 8)] {
        client.create_disk(&CreateDisk { volume: volume.into(), ..disk(name) }).unwrap();
        let uri = client.export(name, &Export::default()).unwrap().uris[0].clone();
        assert!(qemu_io(&uri, &format!("write -P {byte} 0 1M")).status.success());
    }
    is_all_where_it_was(&pool, "as they were");
    swap(&links);
    // The node does not use a path that leads elsewhere: the coordinator does that I/O.
    is_all_where_it_was(&pool, "swapped while the node runs");
    let log = std::fs::read_to_string(&pool.bench.lab.node("n1").unwrap().log).unwrap();
    assert!(log.contains("does not lead to the LUN of this volume any more"), "{}", pool.bench.logs());
    restart(&mut pool, "n1");
    let found = eventually(&pool, "found", || {
        let volumes = pool.bench.lab.client("n1").unwrap().volumes().ok()?;
        let path = |one: VolumeView| one.lun?.path.map(|path| (one.name, path));
        let mut found: Vec<(String, PathBuf)> = volumes.into_iter().filter_map(path).collect();
        found.sort();
        (found.len() == 2).then_some(found)
    });
    assert_eq!(found, [("other".into(), links[0].clone()), ("pool".into(), links[1].clone())]);
    is_all_where_it_was(&pool, "swapped before a start");
    // One LUN at two paths of this host: nobody says which one is to be used.
    let twice = pool.luns.another_path();
    set_devices(&pool.bench.lab, "n1", &[links[1].clone(), twice.path().to_owned()]);
    restart(&mut pool, "n1");
    let notice = eventually(&pool, "told", || {
        Some(pool.lun("n1").notice).filter(|notice| notice.contains("lun.devices"))
    });
    for path in [&*links[1], twice.path()] {
        assert!(notice.contains(path.to_str().unwrap()), "{notice}");
    }
    for node in ["n1", "n2"] {
        pool.bench.lab.kill(node).unwrap();
    }
}

fn restart(pool: &mut LunBench, node: &str) {
    pool.bench.lab.kill(node).unwrap();
    pool.bench.lab.start(node).unwrap();
    pool.coordinator();
}

/// A mount by hand shares the filesystem: the kernel does not refuse it. Without one, a defragmenter has nothing to work on.
#[test]
fn a_defragmenter_finds_no_filesystem_and_a_mount_by_hand_is_reported() {
    for (format, defragmenter) in [("xfs", "xfs_fsr"), ("ext4", "e4defrag")] {
        let _turn = alone();
        let seed = seed();
        let pool = LunBench::up(3, format, "write-through", |_| {});
        let (coordinator, owner) = pool.apart();
        let (mut load, ()) = during(pool.bench.load(new_history(seed), seed), Duration::from_secs(1), || {
            for node in [&coordinator, &owner] {
                let output = Command::new(defragmenter).arg(pool.luns.path(number(node))).output().unwrap();
                // What xfs_fsr ignores is no failure to it.
                let said = String::from_utf8_lossy(&output.stdout);
                let is_refused = !output.status.success() || said.contains("ignoring");
                assert!(is_refused, "{defragmenter} on {node}: {output:?}");
            }
            let directory = tempfile::tempdir().unwrap();
            run(Command::new("mount").arg(pool.luns.path(number(&coordinator))).arg(directory.path()));
            let at = directory.path().display();
            let words = format!("is mounted at {at}, and not by Weir");
            eventually(&pool, "reported", || told(&pool, &coordinator, "volume-trouble", &words));
            let notice = pool.lun(&coordinator).notice;
            run(Command::new("umount").arg(directory.path()));
            assert!(notice.contains(&format!("umount {at}")), "{notice}");
            eventually(&pool, "well", || pool.lun(&coordinator).notice.is_empty().then_some(()));
        });
        pool.bench.judge(&mut load, seed);
    }
}

/// Not by this path, and the kernel does not see that both lead to one LUN.
#[test]
fn a_lun_that_is_mounted_by_another_path_is_refused() {
    let _turn = alone();
    let pool = LunBench::up(1, "xfs", "write-through", |_| {});
    let second = SecondLun::new();
    let [mounted, given] = second.devices.each_ref().map(LoopDevice::path);
    run(Command::new("mkfs.ext4").arg("-q").arg(mounted));
    let directory = tempfile::tempdir().unwrap();
    run(Command::new("mount").arg(mounted).arg(directory.path()));
    let client = pool.bench.lab.client("n1").unwrap().patience(Duration::from_secs(60));
    for format in [Some("xfs".to_owned()), None] {
        let wanted = CreateVolume { format, ..volume("other", given) };
        for refused in [client.plan_volume(&wanted).map(drop), client.create_volume(&wanted).map(drop)] {
            let refused = refused.unwrap_err();
            let words = format!("is mounted at {}", directory.path().display());
            assert!(refused.kind == ApiErrorKind::Refused && refused.message.contains(&words), "{refused}");
        }
    }
    run(Command::new("umount").arg(directory.path()));
    // Its nodes would not find it.
    let refused = client.plan_volume(&volume("other", given)).unwrap_err();
    assert!(refused.message.contains("is not among lun.devices"), "{refused}");
}

/// Nothing says which of its paths is to be used.
#[test]
fn a_lun_at_two_paths_of_its_host_is_refused() {
    let _turn = alone();
    let second = SecondLun::new();
    let paths = second.devices.each_ref().map(|device| device.path().to_owned());
    let files = tempfile::tempdir().unwrap();
    let mut config = LabConfig::new(files.path().join("lab"), program());
    (config.nodes, config.luns) = (1, vec![paths[0].clone()]);
    let mut lab = Lab::up(&config).unwrap();
    let mut list = |devices: &[PathBuf]| {
        set_devices(&lab, "n1", devices);
        lab.kill("n1").unwrap();
        lab.start("n1").unwrap();
        lab.client("n1").unwrap().patience(Duration::from_secs(60))
    };
    let client = list(&paths);
    for (path, format) in paths.iter().zip([Some("xfs".to_owned()), None]) {
        let wanted = CreateVolume { format, ..volume("pool", path) };
        for refused in [client.plan_volume(&wanted).map(drop), client.create_volume(&wanted).map(drop)] {
            let refused = refused.unwrap_err();
            assert_eq!(refused.kind, ApiErrorKind::Refused, "{refused}");
            let both = paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
            let words = format!("is at more than one path ({both}): set lun.devices to the one");
            assert!(refused.message.contains(&words), "{refused}");
        }
    }
    assert!(client.volumes().unwrap().is_empty());
    // As it says.
    let plan = list(&paths[..1]).plan_volume(&volume("pool", &paths[0])).unwrap();
    assert!(plan.identity.is_some(), "{plan:?}");
    lab.down().unwrap();
}

/// A node that starts before its path is there does direct I/O when it is, also of disks that are open already.
#[test]
fn a_path_that_comes_after_a_disk_is_used() {
    let _turn = alone();
    let seed = seed();
    let mut pool = LunBench::up(3, "xfs", "write-through", |_| {});
    let history = works(&pool, new_history(seed), seed);
    let (coordinator, owner) = pool.apart();
    let node = ["n1", "n2", "n3"].into_iter().find(|node| *node != coordinator && *node != owner).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("lun");
    set_devices(&pool.bench.lab, node, std::slice::from_ref(&link));
    restart(&mut pool, node);
    let client = pool.bench.lab.client(node).unwrap().patience(SOON);
    eventually(&pool, "moved", || client.move_disk(DISK, node).ok());
    let route = || pool.bench.disk().and_then(|view| view.detail?.route).unwrap_or_default();
    eventually(&pool, "redirected", || (route().state == "block-redirected").then_some(()));
    let health = client.status().unwrap().health.to_string();
    assert!(health.contains(&format!("disk {DISK} is block-redirected: no-disk-connectivity")), "{health}");
    let (mut load, ()) = during(pool.bench.load(history, seed), Duration::from_secs(1), || {
        symlink(pool.luns.path(number(node)), &link).unwrap();
        eventually(&pool, "direct", || (route().state == "direct").then_some(()));
    });
    pool.bench.judge(&mut load, seed);
    assert!(route().direct > 0, "{:?}", route());
}

/// Whoever presents one LUN to two clusters.
#[test]
fn a_lun_that_another_cluster_uses_is_refused() {
    let _turn = alone();
    let pool = LunBench::up(1, "xfs", "write-through", |_| {});
    let path = pool.luns.another_path();
    let files = tempfile::tempdir().unwrap();
    let mut config = LabConfig::new(files.path().join("other"), program());
    (config.nodes, config.luns) = (1, vec![path.path().to_owned()]);
    let other = Lab::up(&config).unwrap();
    let client = other.client("n1").unwrap().patience(Duration::from_secs(60));
    let identity = Some(pool.lun("n1").identity);
    for format in [Some("xfs".to_owned()), None] {
        let wanted = CreateVolume { format, identity: identity.clone(), ..volume("mine", path.path()) };
        for refused in [client.plan_volume(&wanted).map(drop), client.create_volume(&wanted).map(drop)] {
            let refused = refused.unwrap_err();
            assert!(refused.message.contains("in use") && refused.message.contains("n1"), "{refused}");
        }
    }
    other.down().unwrap();
    assert_eq!(pool.lun("n1").phase, "serving");
    let seed = seed();
    works(&pool, new_history(seed), seed);
}

/// The clones have the blocks, too.
#[test]
fn clones_outlive_the_golden_image_that_they_were_made_of() {
    let _turn = alone();
    let seed = seed();
    let pool = LunBench::up(2, "xfs", "write-through", |_| {});
    let history = works(&pool, new_history(seed), seed);
    let client = pool.bench.lab.any_client().unwrap().patience(SOON);
    client.create_snapshot(DISK, "v1", &[]).unwrap();
    let clone = |name: &str| CloneDisk {
        name: name.into(),
        snapshot: Some("v1".into()),
        policy: "write-through".into(),
        medium: Medium::Ram,
        limit: None,
    };
    for name in ["c1", "c2"] {
        client.clone_disk(DISK, &clone(name)).unwrap();
    }
    client.export("c1", &Export::default()).unwrap();
    let named = Delete { name: DISK.into(), ..Delete::default() };
    let refused = client.delete(DISK, &named).unwrap_err();
    assert!(refused.message.contains("snapshot"), "{refused}");
    client.delete_snapshot(DISK, "v1", false).unwrap();
    eventually(&pool, "deleted", || client.delete(DISK, &named).ok());
    // Another disk takes the space that is free now.
    let uri = pool.bench.create_sized("next", "write-through", 256 << 20);
    assert!(qemu_io(&uri.to_string(), "write -P 9 0 256M").status.success());
    client.export("c2", &Export::default()).unwrap();
    let mut history = history;
    for name in ["c1", "c2"] {
        let settings = Settings { seed, atomicity: Atomicity::Block, ..Settings::default() };
        let mut load = VerifyingLoad::new(history, settings, pool.bench.locate_named(name));
        let found = load.check_all().unwrap();
        assert_eq!((found.mismatches, load.progress().failed()), (0, 0), "{name}: {:#?}", found.first);
        history = load.into_history();
    }
}

/// A name is part of a path and of keys.
#[test]
fn names_with_slashes_are_refused_everywhere() {
    let _turn = alone();
    let pool = LunBench::up(1, "xfs", "write-through", |_| {});
    let client = pool.bench.lab.client("n1").unwrap();
    let invalid = |error: ApiError| assert_eq!(error.kind, ApiErrorKind::Invalid, "{error}");
    for name in ["a/b", "/a", "../a", "a/", ".."] {
        invalid(client.create_disk(&disk(name)).unwrap_err());
        invalid(client.create_volume(&volume(name, pool.luns.path(1))).unwrap_err());
        invalid(client.plan_volume(&volume(name, pool.luns.path(1))).unwrap_err());
        invalid(client.create_snapshot(DISK, name, &[]).unwrap_err());
        let clone = CloneDisk {
            name: name.into(),
            snapshot: None,
            policy: "write-through".into(),
            medium: Medium::Ram,
            limit: None,
        };
        invalid(client.clone_disk(DISK, &clone).unwrap_err());
        let elsewhere = CreateDisk { volume: name.into(), ..disk("a") };
        let exported = client.export(name, &Export::default());
        for error in [client.disk(name), exported, client.create_disk(&elsewhere)].map(Result::unwrap_err) {
            assert!(matches!(error.kind, ApiErrorKind::Invalid | ApiErrorKind::NotFound), "{error}");
        }
    }
}
