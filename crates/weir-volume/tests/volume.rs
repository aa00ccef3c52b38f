//! `dir` volumes: creating, growing and deleting disks, and refusals.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Mount, reactor, scratch};
use weir_block::{Engine, Layer};
use weir_volume::disk_files::delete_unwritten;
use weir_volume::{BackingOptions, DirVolume, FileBacking, OpenedFile, VolumeError};

const MIB: u64 = 1 << 20;

#[test]
fn a_disks_life() {
    let directory = scratch();
    let volume = DirVolume::open(directory.path()).unwrap();
    assert!(matches!(volume.allocated("web-1"), Err(VolumeError::NotFound(_))));
    volume.create_disk("web-1", 64 * MIB).unwrap();
    volume.create_disk("db_2.data", MIB).unwrap();
    std::fs::create_dir(directory.path().join("directory.raw")).unwrap();
    assert!(matches!(volume.allocated("directory"), Err(VolumeError::NotABacking(_))));
    assert_eq!(volume.allocated("web-1").unwrap(), 0, "sparse");
    let path = volume.disk_path("web-1").unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().write_all(&[1; 8192]).unwrap();
    assert!(volume.allocated("web-1").unwrap() >= 8192);
    let mode = std::fs::metadata(path).unwrap().mode();
    assert_eq!(mode & 0o077, 0, "a guest's disk is private");

    volume.lengthen("web-1", 128 * MIB).unwrap();
    volume.lengthen("web-1", 128 * MIB).unwrap();
    let mut reactor = reactor(Engine::Auto);
    let backing =
        FileBacking::open(&mut reactor, &volume.disk_path("web-1").unwrap(), &BackingOptions::default())
            .unwrap();
    assert_eq!(backing.info().size, 128 * MIB);

    volume.delete("web-1").unwrap();
    assert!(matches!(volume.delete("web-1"), Err(VolumeError::NotFound(_))));
    assert!(matches!(volume.lengthen("web-1", MIB), Err(VolumeError::NotFound(_))));
    assert!(volume.allocated("db_2.data").is_ok(), "others stay");
}

/// A resize was killed between growing the file and changing the record: a smaller resize works, and the record defines the
/// disk's size.
#[test]
fn a_file_longer_than_its_disk_can_still_grow() {
    let directory = scratch();
    let volume = DirVolume::open(directory.path()).unwrap();
    volume.create_disk("disk", MIB).unwrap();
    let mut reactor = reactor(Engine::Auto);
    let options = BackingOptions { size: Some(MIB), ..BackingOptions::default() };
    let mut backing = FileBacking::open(&mut reactor, &volume.disk_path("disk").unwrap(), &options).unwrap();
    volume.lengthen("disk", 8 * MIB).unwrap();
    volume.lengthen("disk", 2 * MIB).unwrap();
    assert_eq!(std::fs::metadata(volume.disk_path("disk").unwrap()).unwrap().len(), 8 * MIB);
    backing.resize(2 * MIB).unwrap();
    assert_eq!(backing.info().size, 2 * MIB);
    assert_eq!(backing.info().size, 2 * MIB);
}

/// Two nodes grow the same disk: a former owner that does not know yet, and its successor.
#[test]
fn concurrent_growths_never_truncate_each_other() {
    const ROUNDS: u64 = 3000;
    // In memory, where syncing takes no time, for enough rounds.
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let volume = DirVolume::open(directory.path()).unwrap();
    volume.create_disk("disk", 4096).unwrap();
    let file = File::open(volume.disk_path("disk").unwrap()).unwrap();
    let (start, end) = (Barrier::new(3), Barrier::new(3));
    std::thread::scope(|scope| {
        for further in [0, 1] {
            let (volume, start, end) = (&volume, &start, &end);
            scope.spawn(move || {
                for round in 1..=ROUNDS {
                    start.wait();
                    volume.lengthen("disk", (2 * round + further) * 4096).unwrap();
                    end.wait();
                }
            });
        }
        let mut cut = 0;
        for round in 1..=ROUNDS {
            start.wait();
            end.wait();
            cut += u32::from(file.metadata().unwrap().len() != (2 * round + 1) * 4096);
        }
        assert_eq!(cut, 0, "rounds of {ROUNDS} in which the shorter growth cut off the longer one");
    });
}

#[test]
fn half_created_or_half_deleted_disks_can_be_removed_repeatedly() {
    let directory = scratch();
    let volume = DirVolume::open(directory.path()).unwrap();
    volume.check_free("disk").unwrap();
    volume.create_disk("disk", MIB).unwrap();
    assert!(matches!(volume.check_free("disk"), Err(VolumeError::Exists { .. })));
    delete_unwritten(&volume, "disk", 0).unwrap();
    delete_unwritten(&volume, "disk", 0).unwrap();
    volume.check_free("disk").unwrap();
    std::fs::write(volume.disk_path("disk").unwrap(), [7; 4096]).unwrap();
    delete_unwritten(&volume, "disk", 0).unwrap();
    assert!(volume.check_free("disk").is_err(), "the disk has data");
    volume.delete_if_there("disk").unwrap();
    volume.delete_if_there("disk").unwrap();
    volume.check_free("disk").unwrap();
}

#[test]
fn a_disk_is_never_created_twice() {
    let directory = scratch();
    let volume = DirVolume::open(directory.path()).unwrap();
    volume.create_disk("one", MIB).unwrap();
    let path = volume.disk_path("one").unwrap();
    std::fs::write(&path, [7; 4096]).unwrap();
    let error = volume.create_disk("one", MIB).unwrap_err();
    assert!(matches!(&error, VolumeError::Exists { name, .. } if name == "one"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), [7; 4096], "the existing disk is unchanged");
}

#[test]
fn names_and_sizes_are_checked() {
    let directory = scratch();
    let volume = DirVolume::open(directory.path()).unwrap();
    let long = "x".repeat(129);
    for name in ["", ".", "..", "../up", "a/b", ".hidden", "-flag", "white space", "ümlaut", "nul\0", &long]
    {
        assert!(matches!(volume.create_disk(name, MIB), Err(VolumeError::InvalidName { .. })), "{name:?}");
        assert!(matches!(volume.delete(name), Err(VolumeError::InvalidName { .. })), "{name:?}");
    }
    volume.create_disk(&"x".repeat(128), MIB).unwrap();
    for size in [0, 1, 512, 4097, !4095] {
        assert!(matches!(volume.create_disk("sized", size), Err(VolumeError::InvalidSize { .. })), "{size}");
    }
    // More than ext4 supports for one file.
    assert!(matches!(volume.create_disk("sized", 1 << 60), Err(VolumeError::InvalidSize { .. })));
    // Another process may own the path by now: its creator checks, and removes the file.
    assert!(matches!(volume.check_free("sized"), Err(VolumeError::Exists { .. })));
    delete_unwritten(&volume, "sized", 0).unwrap();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn links_do_not_lead_out_of_the_volume() {
    let directory = scratch();
    let outside = directory.path().join("outside");
    std::fs::write(&outside, [1; 4096]).unwrap();
    let inside = directory.path().join("volume");
    std::fs::create_dir(&inside).unwrap();
    symlink(&outside, inside.join("link.raw")).unwrap();
    let volume = DirVolume::open(&inside).unwrap();
    assert!(matches!(volume.allocated("link"), Err(VolumeError::NotABacking(_))));
    let options = BackingOptions { volume: Some(volume.identify(7).unwrap()), ..BackingOptions::default() };
    let link = volume.disk_path("link").unwrap();
    let refused = OpenedFile::open(&link, &options).err().expect("refused");
    assert!(matches!(refused, VolumeError::NotABacking(_)), "{refused}");
    assert!(volume.lengthen("link", 8192).is_err());
    assert_eq!(std::fs::read(&outside).unwrap(), [1; 4096]);
}

#[test]
fn another_directory_is_not_taken_for_the_volume() {
    let (directory, unmounted) = (scratch(), scratch());
    let volume = DirVolume::open(directory.path()).unwrap();
    assert_eq!(volume.identify(7).unwrap(), 7);
    assert_eq!(volume.identify(8).unwrap(), 7, "it has one");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    DirVolume::open_as(directory.path(), 7).unwrap();
    for (path, id) in [(directory.path(), 8), (unmounted.path(), 7)] {
        assert!(matches!(DirVolume::open_as(path, id), Err(VolumeError::NotTheVolume { .. })), "{id}");
    }
    // Nor its disks: where another filesystem is mounted, a file of the same name is another disk's.
    for path in [directory.path(), unmounted.path()] {
        DirVolume::open(path).unwrap().create_disk("disk", MIB).unwrap();
    }
    let open = |path: &Path, id| {
        let options = BackingOptions { volume: Some(id), ..BackingOptions::default() };
        OpenedFile::open(&path.join("disk.raw"), &options).err()
    };
    assert!(open(directory.path(), 7).is_none());
    for (path, id) in [(directory.path(), 8), (unmounted.path(), 7)] {
        assert!(matches!(open(path, id), Some(VolumeError::NotTheVolume { .. })), "{id}");
    }
}

#[test]
fn a_file_that_lacks_its_end_is_not_opened() {
    let directory = scratch();
    let volume = DirVolume::open(directory.path()).unwrap();
    volume.identify(7).unwrap();
    volume.create_disk("disk", MIB).unwrap();
    let path = directory.path().join("disk.raw");
    let open = |size| {
        let options = BackingOptions { volume: Some(7), size: Some(size), ..BackingOptions::default() };
        OpenedFile::open(&path, &options).map(|_| ())
    };
    open(MIB).unwrap();
    open(MIB / 2).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(MIB - 4096).unwrap();
    let error = open(MIB).unwrap_err();
    assert!(
        matches!(error, VolumeError::TooShort { length, size, .. } if (length, size) == (MIB - 4096, MIB))
    );
    assert!(error.to_string().contains("was truncated or replaced"), "{error}");
}

/// A mark that cannot be read is not taken for another volume's, and nothing else there is waited for or followed.
#[test]
fn what_is_no_mark_is_told() {
    let directory = scratch();
    let (volume, mark) = (DirVolume::open(directory.path()).unwrap(), directory.path().join(".weir-volume"));
    let check = |what: &str| {
        let error = volume.identify(7).unwrap_err();
        assert!(matches!(&error, VolumeError::NotAMark(path) if *path == mark), "{what}: {error}");
        let error = DirVolume::open_as(directory.path(), 7).unwrap_err();
        assert!(matches!(error, VolumeError::NotTheVolume { id: 7, .. }), "{what}: {error}");
        std::fs::remove_file(&mark).unwrap();
    };
    for content in [&b""[..], b"xyz\n", b"\xff", &[b'0'; 1 << 20]] {
        std::fs::write(&mark, content).unwrap();
        check("content");
    }
    let elsewhere = directory.path().join("elsewhere");
    std::fs::write(&elsewhere, "0000000000000007\n").unwrap();
    symlink(&elsewhere, &mark).unwrap();
    check("a link");
    common::run(std::process::Command::new("mkfifo").arg(&mark));
    check("a FIFO");
    assert_eq!(volume.identify(7).unwrap(), 7);
}

/// Between the look at a file and its opening, its name may come to be a link.
#[test]
fn a_link_that_comes_while_a_disk_is_opened_is_not_followed() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let outside = directory.path().join("outside");
    std::fs::write(&outside, [1; 4096]).unwrap();
    let inside = directory.path().join("volume");
    std::fs::create_dir(&inside).unwrap();
    let volume = DirVolume::open(&inside).unwrap();
    let options = BackingOptions { volume: Some(volume.identify(7).unwrap()), ..BackingOptions::default() };
    let (disk, making) = (volume.disk_path("disk").unwrap(), inside.join("making"));
    let file = || std::fs::write(&making, [2; 4096]).and_then(|()| std::fs::rename(&making, &disk)).unwrap();
    file();
    let over = AtomicBool::new(false);
    let inode = std::fs::metadata(&outside).unwrap().ino();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                symlink(&outside, &making).and_then(|()| std::fs::rename(&making, &disk)).unwrap();
                file();
            }
        });
        // Both outcomes must occur often, however the threads are scheduled.
        let (mut opened, mut refused, mut outside) = (0, 0, 0);
        while opened < 20_000 || refused < 20_000 {
            match OpenedFile::open(&disk, &options) {
                Ok(file) => {
                    opened += 1;
                    outside += usize::from(file.file().unwrap().inode == inode);
                }
                Err(VolumeError::NotABacking(_)) => refused += 1,
                Err(error) => {
                    over.store(true, Ordering::Relaxed);
                    panic!("{error}");
                }
            }
        }
        over.store(true, Ordering::Relaxed);
        assert_eq!(outside, 0, "a file outside of the volume was opened");
    });
}

/// An open file identifies itself, regardless of a later file at its path.
#[test]
fn an_opened_file_says_which_one_it_is() {
    let directory = scratch();
    let volume = DirVolume::open(directory.path()).unwrap();
    let options = BackingOptions { volume: Some(volume.identify(7).unwrap()), ..BackingOptions::default() };
    let path = volume.disk_path("disk").unwrap();
    volume.create_disk("disk", MIB).unwrap();
    let metadata = std::fs::metadata(&path).unwrap();
    let opened = OpenedFile::open(&path, &options).unwrap();
    std::fs::rename(&path, directory.path().join("moved")).unwrap();
    volume.create_disk("disk", MIB).unwrap();
    let file = opened.file().unwrap();
    assert_eq!((file.device, file.inode), (metadata.dev(), metadata.ino()));
    assert_eq!(file.path, path);
    let anywhere = OpenedFile::open(&path, &BackingOptions::default()).unwrap();
    assert_eq!(anywhere.file(), None, "it is in no volume");
}

#[test]
fn a_volume_is_a_directory() {
    let directory = scratch();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(matches!(DirVolume::open(&file), Err(VolumeError::NotADirectory(_))));
    assert!(matches!(DirVolume::open(directory.path().join("none")), Err(VolumeError::NotFound(_))));
}

#[test]
fn an_unwritable_filesystem_is_reported() {
    let Some(mount) = Mount::new("mkfs.ext4", 16 << 20) else { return };
    let volume = DirVolume::open(&mount.path).unwrap();
    // All inodes are used: not even a sparse file can be created.
    let none_left =
        (0..).find_map(|i| std::fs::File::create(mount.path.join(format!("filler-{i}"))).err()).unwrap();
    assert_eq!(none_left.raw_os_error(), Some(libc::ENOSPC));
    assert!(matches!(volume.create_disk("disk", MIB), Err(VolumeError::NoSpace(_))));
    common::run(std::process::Command::new("mount").args(["-o", "remount,ro"]).arg(&mount.path));
    let error = volume.create_disk("disk", MIB).unwrap_err();
    assert!(matches!(error, VolumeError::Permission { .. }), "{error}");
}
