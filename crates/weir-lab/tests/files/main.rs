//! Disks as files: what programs do with them through the FUSE mount of a real node.
//!
//! `WEIR_FSX` sets how many random operations there are against a plain file's behaviour (some thousands by default), here and of the
//! program fsx (`make fsx`); `WEIR_SEED` replays.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod elsewhere;
mod fsx;
mod nodes;
mod postgresql;
#[path = "../power_cut/server.rs"]
#[allow(dead_code)]
mod server;
#[path = "../support/mod.rs"]
mod support;
mod tools;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use common::lun::run;
use common::{Bench, DISK, SIZE, SOON, alone};
use support::await_some;
use weir_lab::LabConfig;
use weir_node::api::{CreateDisk, Delete, Medium};

/// A lab whose nodes have the disks as files.
fn bench(nodes: usize, policy: &str) -> Bench {
    let fuse = |config: &mut LabConfig| config.fuse = true;
    Bench::up(nodes, policy, fuse)
}

/// The file of a disk on a node.
fn path(bench: &Bench, node: &str, disk: &str) -> PathBuf {
    bench.lab.dir().join(node).join("files/pool").join(format!("{disk}.raw"))
}

fn options(direct: bool) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(if direct { libc::O_DIRECT } else { 0 });
    options
}

/// Opens the file of a disk, once the node serves it.
fn open(bench: &Bench, node: &str, direct: bool) -> File {
    let path = path(bench, node, DISK);
    let opened = || options(direct).open(&path).ok();
    await_some(SOON, opened, || {
        format!("{}: {:?}{}", path.display(), options(direct).open(&path), bench.logs())
    })
}

fn errno(result: io::Result<impl Sized>) -> Option<i32> {
    result.map(drop).err().and_then(|error| error.raw_os_error())
}

/// A buffer for direct I/O.
struct Aligned {
    bytes: Vec<u8>,
    from: usize,
    length: usize,
}

impl Aligned {
    fn new(length: usize) -> Aligned {
        let bytes = vec![0; length + 4096];
        let from = bytes.as_ptr().align_offset(4096);
        Aligned { bytes, from, length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.from..self.from + self.length]
    }
}

#[test]
fn a_disk_is_a_file_of_its_size_that_only_root_may_use_and_nobody_resizes() {
    let _turn = alone();
    let bench = bench(1, "write-back+0");
    let path = path(&bench, "n1", DISK);
    let file = open(&bench, "n1", false);
    let found = std::fs::metadata(&path).unwrap();
    assert!(found.is_file());
    assert_eq!((found.len(), found.permissions().mode() & 0o7777, found.uid()), (SIZE, 0o600, 0));
    assert_eq!(errno(file.set_len(SIZE)), None, "to its own size");
    assert_eq!(errno(file.set_len(0)), Some(libc::EPERM));
    assert_eq!(errno(file.set_len(2 * SIZE)), Some(libc::EPERM));
    assert_eq!(errno(OpenOptions::new().write(true).truncate(true).open(&path)), Some(libc::EPERM));
    assert_eq!(errno(std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666))), Some(libc::EPERM));
    assert_eq!(errno(std::fs::remove_file(&path)), Some(libc::EBUSY), "it is a mount");

    // The end of a disk: what fits is written, and nothing is behind it.
    assert_eq!(file.write_at(&[7; 100], SIZE - 10).unwrap(), 10);
    assert_eq!(errno(file.write_at(&[7; 100], SIZE)), Some(libc::ENOSPC));
    let mut end = [1; 100];
    assert_eq!(file.read_at(&mut end, SIZE - 20).unwrap(), 20);
    assert_eq!((&end[..10], &end[10..20]), (&[0; 10][..], &[7; 10][..]));
    assert_eq!(file.read_at(&mut end, SIZE).unwrap(), 0);
    assert_eq!(
        errno(
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 4096)
                .map_err(io::Error::from)
        ),
        Some(libc::EOPNOTSUPP)
    );

    // Growing shows to those who have it open.
    let client = bench.lab.any_client().unwrap();
    client.resize(DISK, 2 * SIZE).unwrap();
    let grown = || (file.metadata().unwrap().len() == 2 * SIZE).then_some(());
    await_some(SOON, grown, || "it has not grown".to_owned());
    file.write_all_at(&[9; 512], 2 * SIZE - 512).unwrap();

    let volume = client.volumes().unwrap().remove(0);
    let files = volume.files.unwrap();
    assert_eq!((files.path.join("d1.raw"), &*files.transport), (path, "/dev/fuse"));
}

/// A copy of an image to a new name there is not a new disk.
#[test]
fn a_file_of_somebody_in_the_way_of_a_disks_is_reported_and_kept() {
    let _turn = alone();
    let bench = bench(1, "write-back+0");
    open(&bench, "n1", false);
    let (client, there) = (bench.lab.any_client().unwrap(), path(&bench, "n1", "d2"));
    std::fs::write(&there, "somebody's").unwrap();
    bench.create_sized("d2", "write-through", 1 << 20);
    let told = |kind: &str| {
        let events = client.events().unwrap();
        events.iter().filter(|event| event.kind == kind && event.subject == "d2").count()
    };
    await_some(SOON, || (told("file-missing") > 0).then_some(()), || bench.logs());
    assert_eq!(std::fs::read_to_string(&there).unwrap(), "somebody's");
    std::fs::remove_file(&there).unwrap();
    await_some(SOON, || (told("file-back") > 0).then_some(()), || bench.logs());
    assert_eq!(std::fs::metadata(&there).unwrap().len(), 1 << 20);
    assert_eq!(told("file-missing"), 1, "told once, not with every attempt");
    // The directory of a volume goes with its last file.
    for name in ["d2", DISK] {
        client.delete(name, &Delete { force: true, ..Delete::default() }).unwrap();
    }
    let directory = there.parent().unwrap();
    await_some(SOON, || (!directory.exists()).then_some(()), || bench.logs());
}

/// Has the kernel end the connection of a file, as an operator does with one that hangs.
fn abort(path: &Path) {
    const CONNECTIONS: &str = "/sys/fs/fuse/connections";
    let device = std::fs::metadata(path).unwrap().dev();
    let abort = format!("{CONNECTIONS}/{}/abort", libc::minor(device));
    if !Path::new(&abort).exists() {
        run(Command::new("mount").args(["-t", "fusectl", "fusectl", CONNECTIONS]));
    }
    std::fs::write(abort, "1").unwrap();
}

#[test]
fn a_file_whose_mount_has_ended_comes_back() {
    let _turn = alone();
    let bench = bench(1, "write-back+0");
    let path = path(&bench, "n1", DISK);
    let unmount = |path: &Path| run(Command::new("umount").arg("-l").arg(path));
    // A lazy unmount does not end the connection while a program has the file open: that case is left out.
    for (end, is_open) in [(&abort as &dyn Fn(&Path), false), (&abort, true), (&unmount, false)] {
        let user = open(&bench, "n1", false);
        user.write_all_at(b"here", 0).unwrap();
        user.sync_all().unwrap();
        let user = is_open.then_some(user);
        end(&path);
        let reads = || {
            let mut bytes = [0; 4];
            File::open(&path).ok()?.read_exact_at(&mut bytes, 0).ok()?;
            Some(bytes)
        };
        assert_eq!(&await_some(SOON, reads, || bench.logs()), b"here");
        drop(user);
    }
}

/// A disk with blocks of 4096 bytes: two programs write to halves of one block at once, and neither takes back what the other has
/// written.
#[test]
fn parts_of_a_block_are_written_without_harm_to_the_rest() {
    let _turn = alone();
    let bench = bench(1, "write-back+0");
    let client = bench.lab.any_client().unwrap();
    let wanted = CreateDisk {
        name: "wide".into(),
        volume: "pool".into(),
        size: 1 << 20,
        logical_block: 4096,
        policy: "write-through".into(),
        medium: Medium::Ram,
        limit: None,
    };
    client.create_disk(&wanted).unwrap();
    client.export("wide", &weir_node::api::Export::default()).unwrap();
    let path = path(&bench, "n1", "wide");
    await_some(SOON, || options(true).open(&path).ok(), || bench.logs());
    let writers: Vec<_> = (0..4_u64)
        .map(|number| {
            let (path, direct) = (path.clone(), number % 2 == 0);
            thread::spawn(move || {
                let file = options(direct).open(path).unwrap();
                let (mut data, mut back) = (Aligned::new(512), Aligned::new(512));
                for round in 0..300_u32 {
                    let value = (round as u8).wrapping_mul(4).wrapping_add(number as u8);
                    data.bytes().fill(value);
                    file.write_all_at(data.bytes(), 8192 + number * 512).unwrap();
                    file.read_exact_at(back.bytes(), 8192 + number * 512).unwrap();
                    assert_eq!(data.bytes(), back.bytes(), "round {round} of writer {number}");
                }
            })
        })
        .collect();
    for writer in writers {
        writer.join().unwrap();
    }
}

/// A program that has the file open holds neither a closing of the disk nor a stop of the node, and nothing is left of the mount.
#[test]
fn a_stop_leaves_no_mount() {
    let _turn = alone();
    let bench = bench(1, "write-through");
    let file = open(&bench, "n1", true);
    let mut data = Aligned::new(4096);
    data.bytes().fill(5);
    file.write_all_at(data.bytes(), 0).unwrap();
    let directory = path(&bench, "n1", DISK);
    let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let is_mounted = |path: &PathBuf| mounts().contains(path.to_str().unwrap());
    assert!(is_mounted(&directory));
    let Bench { lab, .. } = &bench;
    let dir = lab.dir().to_owned();
    let started = weir_block::Nanos::now();
    let process = lab.process("n1").unwrap().unwrap();
    support::run("kill", ["-TERM", &process.pid.to_string()]);
    // It is removed a moment after it was unmounted.
    let over = || (!is_mounted(&directory) && !directory.exists()).then_some(());
    await_some(SOON, over, || format!("something is left in {}{}", dir.display(), bench.logs()));
    assert!(weir_block::Nanos::now() - started < Duration::from_secs(20), "{}", bench.logs());
    drop(file);
}

#[test]
fn a_lab_of_killed_nodes_leaves_no_mount() {
    let _turn = alone();
    let bench = bench(1, "write-through");
    let path = path(&bench, "n1", DISK);
    assert!(path.exists());
    drop(bench);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(path.to_str().unwrap()), "{mounts}");
}
