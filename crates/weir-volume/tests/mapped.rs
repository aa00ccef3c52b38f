//! Files in memory, which are read through a mapping: holes stay holes, and a truncated file is no reason to end.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};

use common::{Shard, done, reactor, scratch_in_memory};
use weir_block::{Engine, Request};
use weir_volume::{BackingOptions, StorageKind};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

fn shard(path: &Path) -> Shard {
    let shard = Shard::new(reactor(Engine::Auto), path, &BackingOptions::default());
    assert_eq!(shard.backing.storage_kind(), StorageKind::Memory);
    shard
}

fn disk(directory: &tempfile::TempDir, size: u64) -> (PathBuf, File) {
    let path = directory.path().join("disk.raw");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(size).unwrap();
    (path, file)
}

#[test]
fn reading_holes_allocates_nothing() {
    let directory = scratch_in_memory();
    let (path, file) = disk(&directory, 16 * MIB);
    // More islands in the first 2 MiB than one lookup answers.
    (0..200).for_each(|island| file.write_all_at(&[7; 512], island * 2 * PAGE + 1024).unwrap());
    file.write_all_at(&[8; 5000], 9 * MIB).unwrap();
    let mut expected = vec![0; 16 * MIB as usize];
    file.read_exact_at(&mut expected, 0).unwrap();
    let blocks = file.metadata().unwrap().blocks();
    let mut shard = shard(&path);
    for length in [PAGE as usize, 512, 64 << 10, MIB as usize] {
        for offset in (0..expected.len()).step_by(length.max(PAGE as usize)) {
            assert!(
                shard.read(offset as u64, length).unwrap() == expected[offset..offset + length],
                "{offset}"
            );
        }
    }
    assert_eq!(file.metadata().unwrap().blocks(), blocks);
    shard.write(4 * MIB, &[9; 1024]).unwrap();
    assert_eq!(shard.read(4 * MIB, 512).unwrap(), [9; 512]);
    assert_eq!(shard.read(4 * MIB + 1024, 512).unwrap(), [0; 512]);
    assert_eq!(file.metadata().unwrap().blocks(), blocks + PAGE / 512, "one page more");
}

#[test]
fn discarded_pages_stay_discarded() {
    let directory = scratch_in_memory();
    let (path, file) = disk(&directory, 8 * MIB);
    let mut shard = shard(&path);
    shard.write(0, &vec![5; 4 * MIB as usize]).unwrap();
    assert!(shard.read(MIB, MIB as usize).unwrap().iter().all(|&byte| byte == 5));
    let discard = Request::Discard { tag: shard.tag(), offset: 0, length: 4 * MIB, fua: false };
    shard.ask(discard).map(done).unwrap();
    assert!(shard.read(0, 4 * MIB as usize).unwrap().iter().all(|&byte| byte == 0));
    assert_eq!(file.metadata().unwrap().blocks(), 0);
}

#[test]
fn a_file_truncated_by_somebody_reads_as_zeroes() {
    let directory = scratch_in_memory();
    let (path, file) = disk(&directory, 8 * MIB);
    let mut shard = shard(&path);
    shard.write(0, &vec![6; 8 * MIB as usize]).unwrap();
    assert_eq!(shard.read(6 * MIB, 512).unwrap(), [6; 512]);
    file.set_len(2 * MIB).unwrap();
    let mut expected = vec![6; MIB as usize];
    expected.resize(2 * MIB as usize, 0);
    assert!(shard.read(MIB, 2 * MIB as usize).unwrap() == expected, "half of it is behind the end now");
    assert_eq!(shard.read(6 * MIB, 512).unwrap(), [0; 512]);
    shard.write(6 * MIB, &[7; 512]).unwrap();
    assert_eq!(shard.read(6 * MIB, 512).unwrap(), [7; 512]);
    assert_eq!(shard.read(0, 512).unwrap(), [6; 512]);
}

#[test]
fn a_resized_disk_is_read_to_its_end() {
    let directory = scratch_in_memory();
    let (path, file) = disk(&directory, 2 * MIB);
    let mut shard = shard(&path);
    shard.write(0, &vec![1; 2 * MIB as usize]).unwrap();
    file.set_len(6 * MIB).unwrap();
    shard.backing.resize(6 * MIB).unwrap();
    shard.write(5 * MIB, &[2; 4096]).unwrap();
    assert_eq!(shard.read(5 * MIB, 4096).unwrap(), [2; 4096]);
    assert_eq!(shard.read(3 * MIB, 4096).unwrap(), [0; 4096]);
    assert_eq!(shard.read(MIB, 4096).unwrap(), [1; 4096]);
}

/// In the child: a bus error outside of a backing's reads.
const CHILD: &str = "WEIR_TEST_BUS_ERROR";

#[test]
fn a_bus_error_elsewhere_still_ends_the_process() {
    let directory = scratch_in_memory();
    let (path, file) = disk(&directory, MIB);
    if std::env::var_os(CHILD).is_some() {
        let mut shard = shard(&path);
        shard.write(0, &[1; 4096]).unwrap();
        shard.read(0, 4096).unwrap();
        let (null, length) = (std::ptr::null_mut(), PAGE as usize);
        let (protection, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        // SAFETY: a new mapping, never unmapped.
        let mapped = unsafe { rustix::mm::mmap(null, length, protection, flags, &file, 0) }.unwrap();
        file.set_len(0).unwrap();
        // SAFETY: raises SIGBUS, which is the purpose.
        let byte = unsafe { mapped.cast::<u8>().read_volatile() };
        panic!("read {byte} behind the end of a file");
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "a_bus_error_elsewhere_still_ends_the_process"]).env(CHILD, "1");
    let output = child.output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{}", String::from_utf8_lossy(&output.stdout));
}
