//! Files on several nodes: who may open them, and what becomes of them when a disk moves or a node dies.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use super::{Aligned, alone, bench, errno, open, options, path};
use crate::common::{Bench, DISK, SOON};
use crate::support::await_some;

/// Blocks of the writers, and their number.
pub(super) const BLOCK: usize = 4096;
pub(super) const BLOCKS: u64 = 512;

pub(super) fn move_to(bench: &Bench, node: &str) {
    let client = bench.lab.any_client().unwrap();
    client.move_disk(DISK, node).unwrap_or_else(|error| panic!("{error:?}{}", bench.logs()));
}

pub(super) fn write(file: &File, value: u8) {
    let mut data = Aligned::new(BLOCK);
    data.bytes().fill(value);
    file.write_all_at(data.bytes(), 0).unwrap();
}

pub(super) fn read(file: &File) -> std::io::Result<u8> {
    let mut data = Aligned::new(BLOCK);
    file.read_exact_at(data.bytes(), 0)?;
    Ok(data.bytes()[100])
}

#[test]
fn a_disk_is_opened_on_its_owner_alone_and_a_file_that_stays_open_serves_it_again_later() {
    let _turn = alone();
    let bench = bench(2, "write-back+1");
    let owner = bench.owner();
    let other = if owner == "n1" { "n2" } else { "n1" };
    let here = open(&bench, &owner, true);
    write(&here, 1);
    let refused = options(true).open(path(&bench, other, DISK));
    assert_eq!(errno(refused), Some(libc::EBUSY), "{}", bench.logs());
    assert!(bench.logs().contains("opening a disk's file is refused"), "the reason is in the log");

    move_to(&bench, other);
    let there = open(&bench, other, true);
    assert_eq!(read(&there).unwrap(), 1);
    write(&there, 2);
    assert_eq!(errno(read(&here)), Some(libc::EIO), "not what the disk was before");
    assert_eq!(errno(options(true).open(path(&bench, &owner, DISK))), Some(libc::EBUSY));

    bench.wait_effective();
    move_to(&bench, &owner);
    let again = || read(&here).ok();
    assert_eq!(await_some(SOON, again, || bench.logs()), 2);
    write(&here, 3);
    assert_eq!(errno(read(&there)), Some(libc::EIO));
}

/// Four writers of versioned blocks, which know of each block what was synced last.
pub(super) struct Writers {
    stop: Arc<AtomicBool>,
    pub(super) synced: Arc<Vec<AtomicU32>>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Writers {
    pub(super) fn start(bench: &Bench, node: &str) -> Writers {
        let stop = Arc::new(AtomicBool::new(false));
        let synced: Arc<Vec<AtomicU32>> = Arc::new((0..BLOCKS).map(|_| AtomicU32::new(0)).collect());
        let threads = (0..4)
            .map(|number| {
                let file = open(bench, node, number % 2 == 0);
                let (stop, synced) = (Arc::clone(&stop), Arc::clone(&synced));
                thread::spawn(move || {
                    let mut random = fastrand::Rng::with_seed(number);
                    let mut data = Aligned::new(BLOCK);
                    for version in 1.. {
                        let mine: Vec<u64> = (0..8).map(|_| random.u64(..BLOCKS / 4) * 4 + number).collect();
                        for block in &mine {
                            for piece in data.bytes().chunks_exact_mut(8) {
                                piece[..4].copy_from_slice(&u32::to_le_bytes(version));
                                piece[4..].copy_from_slice(&(*block as u32).to_le_bytes());
                            }
                            if file.write_all_at(data.bytes(), block * BLOCK as u64).is_err() {
                                return;
                            }
                        }
                        if stop.load(Ordering::Relaxed) || file.sync_data().is_err() {
                            return;
                        }
                        for block in mine {
                            synced[block as usize].store(version, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        Writers { stop, synced, threads }
    }

    pub(super) fn count(&self) -> usize {
        self.synced.iter().filter(|version| version.load(Ordering::Relaxed) > 0).count()
    }

    pub(super) fn end(self) -> Vec<u32> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().unwrap();
        }
        self.synced.iter().map(|version| version.load(Ordering::Relaxed)).collect()
    }
}

/// Every block is whole, and no older than what was synced.
pub(super) fn check(file: &File, synced: &[u32]) {
    for (block, least) in synced.iter().enumerate() {
        let version = version_of(file, block).unwrap();
        assert!(version >= *least, "block {block} has version {version}, and {least} was synced");
    }
}

/// The version of a block, which is whole.
pub(super) fn version_of(file: &File, block: usize) -> std::io::Result<u32> {
    let mut data = Aligned::new(BLOCK);
    file.read_exact_at(data.bytes(), (block * BLOCK) as u64)?;
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    let version = number(&data.bytes()[..4]);
    for piece in data.bytes().chunks_exact(8) {
        let whole = number(&piece[..4]) == version && (version == 0 || number(&piece[4..]) == block as u32);
        assert!(whole, "block {block} is torn or another's");
    }
    Ok(version)
}

fn killed_under_load(nodes: usize, policy: &str) {
    let _turn = alone();
    let mut bench = bench(nodes, policy);
    bench.wait_effective();
    let owner = bench.owner();
    let writers = Writers::start(&bench, &owner);
    let enough = || (writers.count() > 200).then_some(());
    await_some(SOON, enough, || bench.logs());
    thread::sleep(Duration::from_millis(300));
    bench.lab.kill(&owner).unwrap();
    let synced = writers.end();
    assert!(synced.iter().filter(|version| **version > 0).count() > 200);
    // Dead, and it says so.
    let dead = path(&bench, &owner, DISK);
    assert_eq!(errno(std::fs::metadata(&dead)), Some(libc::ENOTCONN));
    if nodes > 1 {
        let successor =
            bench.wait(|view| view.owner.as_ref().is_some_and(|now| *now != owner)).owner.unwrap();
        check(&open(&bench, &successor, true), &synced);
    }
    bench.lab.start(&owner).unwrap();
    if nodes > 1 {
        let listed = || std::fs::metadata(&dead).ok();
        await_some(SOON, listed, || bench.logs());
        assert_eq!(errno(options(true).open(&dead)), Some(libc::EBUSY), "{}", bench.logs());
        bench.wait_effective();
        move_to(&bench, &owner);
    }
    check(&open(&bench, &owner, true), &synced);
    let line = |line: &&str| line.contains(dead.to_str().unwrap());
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert_eq!(mounts.lines().filter(line).count(), 1, "the killed process's mount is gone: {mounts}");
}

/// P1: what a program has synced is there when another node takes the disk over.
#[test]
fn synced_data_survives_a_killed_owner() {
    killed_under_load(3, "write-back+1");
}

/// What a program has synced is there when the only node comes back.
#[test]
fn synced_data_survives_the_only_nodes_death_in_write_through() {
    killed_under_load(1, "write-through");
}
