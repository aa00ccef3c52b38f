//! The files of snapshots and clones, on XFS and on a filesystem without reflinks.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use common::{Mount, scratch_in_memory};
use weir_volume::disk_files::delete_unwritten;
use weir_volume::snapshot::{self, Entry, Files, Replacement, Unfinished};
use weir_volume::{DirVolume, VolumeError};

const MIB: u64 = 1 << 20;

fn xfs() -> (Mount, DirVolume) {
    let mount = Mount::new("mkfs.xfs", 300 * MIB).expect("loop devices");
    let volume = DirVolume::open(&mount.path).unwrap();
    volume.create_disk("d", MIB).unwrap();
    (mount, volume)
}

fn write(volume: &DirVolume, byte: u8) {
    volume.open("d.raw").unwrap().write_all_at(&vec![byte; MIB as usize], 0).unwrap();
}

fn bytes(volume: &DirVolume, name: &str) -> Vec<u8> {
    fs::read(volume.path().join(name)).unwrap()
}

fn snapshot(volume: &DirVolume, name: &str, number: u64) {
    let unfinished = Unfinished::begin(volume, "d", name, number).unwrap();
    snapshot::share(&volume.open("d.raw").unwrap(), &unfinished.file).unwrap();
    let made = unfinished.finish(volume).unwrap();
    assert_eq!((made.disk.as_str(), made.name.as_str(), made.size), ("d", name, MIB));
}

fn names(volume: &DirVolume) -> Vec<String> {
    let mut names: Vec<String> =
        volume.list(&|_| true).unwrap().into_iter().map(|entry| entry.name).collect();
    names.sort();
    names
}

#[test]
fn a_snapshot_is_there_when_it_is_complete_and_keeps_what_it_has() {
    let (_mount, volume) = xfs();
    write(&volume, 1);
    let unfinished = Unfinished::begin(&volume, "d", "one", 1).unwrap();
    snapshot::share(&volume.open("d.raw").unwrap(), &unfinished.file).unwrap();
    assert_eq!(snapshot::list(&volume, None).unwrap(), []);
    write(&volume, 2);
    unfinished.finish(&volume).unwrap();
    assert!(matches!(Unfinished::begin(&volume, "d", "one", 3), Err(VolumeError::Exists { .. })));
    snapshot(&volume, "two", 4);
    Unfinished::begin(&volume, "d", "three", 5).unwrap().abandon(&volume).unwrap();
    let late = Unfinished::begin(&volume, "d", "three", 6).unwrap();
    drop(volume.create("d@three.snap").unwrap());
    let late = late.finish(&volume).unwrap_err();
    assert!(matches!(&late, VolumeError::Exists { name, .. } if name == "d@three"), "{late:?}");
    snapshot::remove(&volume, "d", "three").unwrap();
    assert_eq!(names(&volume), ["d.raw", "d@one.snap", "d@two.snap"]);
    assert!(bytes(&volume, "d@one.snap").iter().all(|byte| *byte == 1));
    assert!(bytes(&volume, "d@two.snap").iter().all(|byte| *byte == 2));
    snapshot::remove(&volume, "d", "one").unwrap();
    assert!(matches!(snapshot::remove(&volume, "d", "one"), Err(VolumeError::NotFound(_))));
    let left: Vec<String> =
        snapshot::list(&volume, Some("d")).unwrap().into_iter().map(|one| one.name).collect();
    assert_eq!(left, ["two"]);
    for (disk, name) in
        [("d", "a/b"), ("d", ".."), ("d", ""), ("d", "x@y"), ("../d", "s"), ("d", &"x".repeat(65))]
    {
        assert!(
            matches!(snapshot::remove(&volume, disk, name), Err(VolumeError::InvalidName { .. })),
            "{name}"
        );
    }
}

/// A directory whose changes do not become durable.
struct Failing<'a>(&'a DirVolume);

impl Files for Failing<'_> {
    fn path(&self, name: &str) -> PathBuf {
        Files::path(self.0, name)
    }

    fn open(&self, name: &str) -> Result<File, VolumeError> {
        Files::open(self.0, name)
    }

    fn create(&self, name: &str) -> Result<File, VolumeError> {
        self.0.create(name)
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), VolumeError> {
        self.0.rename(from, to)
    }

    fn replace(&self, from: &str, to: &str) -> Result<(), VolumeError> {
        self.0.replace(from, to)
    }

    fn remove(&self, name: &str) -> Result<(), VolumeError> {
        self.0.remove(name)
    }

    fn list(&self, is_wanted: &dyn Fn(&str) -> bool) -> Result<Vec<Entry>, VolumeError> {
        self.0.list(is_wanted)
    }

    fn sync(&self) -> Result<(), VolumeError> {
        let (what, path) = ("syncing", self.0.path().to_path_buf());
        Err(VolumeError::Io { what, path, source: io::Error::from_raw_os_error(libc::EIO) })
    }
}

/// It was told that there is none, and another attempt found it there.
#[test]
fn a_snapshot_that_does_not_become_durable_is_not_left() {
    let directory = tempfile::tempdir().unwrap();
    let volume = DirVolume::open(directory.path()).unwrap();
    volume.create_disk("d", MIB).unwrap();
    let failing = Failing(&volume);
    let failed = Unfinished::begin(&failing, "d", "s", 1).unwrap().finish(&failing).unwrap_err();
    assert!(failed.to_string().contains("syncing"), "{failed}");
    assert_eq!(names(&volume), ["d.raw"]);
}

/// In a directory there may be files of others.
#[test]
fn what_only_looks_unfinished_stays() {
    let directory = tempfile::tempdir().unwrap();
    let volume = DirVolume::open(directory.path()).unwrap();
    volume.create_disk("d", MIB).unwrap();
    let others = ["d@.new", "d@0000000000000001.tmp.new", "d@000000000000000A.new", "d@notes.new"];
    for name in others.iter().chain(&["d@0000000000000001.new", "d@copy-00000000000000ff.new"]) {
        drop(volume.create(name).unwrap());
    }
    snapshot::remove_unfinished(&volume, "d").unwrap();
    assert_eq!(names(&volume), [&["d.raw"], &others[..]].concat());
    assert!(snapshot::interrupted(&volume).unwrap().is_empty());
}

/// Its maker has ended. One of another disk may be somebody's.
#[test]
fn what_was_never_finished_goes_with_the_next_snapshot() {
    let (_mount, volume) = xfs();
    volume.create_disk("e", MIB).unwrap();
    let left = Unfinished::begin(&volume, "d", "s", 1).unwrap();
    drop(Unfinished::begin(&volume, "e", "s", 2).unwrap());
    snapshot(&volume, "s", 3);
    assert_eq!(names(&volume), ["d.raw", "d@s.snap", "e.raw", "e@0000000000000002.new"]);
    assert!(matches!(left.finish(&volume), Err(VolumeError::NotFound(_))));
    assert!(bytes(&volume, "d@s.snap").iter().all(|byte| *byte == 0));
}

#[test]
fn a_disk_goes_back_and_grows_no_shorter() {
    let (_mount, volume) = xfs();
    write(&volume, 1);
    snapshot(&volume, "s", 1);
    write(&volume, 2);
    volume.lengthen("d", 2 * MIB).unwrap();
    snapshot::keep(&volume, "d", "kept", 2).unwrap();
    let before = volume.open("d.raw").unwrap();
    let rollback = Replacement::of_snapshot(&volume, ("d", "s"), 3).unwrap();
    assert_eq!(bytes(&volume, "d.raw")[0], 2, "not before it is replaced");
    assert!(rollback.replace(&volume, || true).unwrap());
    assert_eq!(names(&volume), ["d.raw", "d@kept.snap", "d@s.snap"]);
    let after = bytes(&volume, "d.raw");
    assert_eq!(after.len() as u64, 2 * MIB);
    assert!(
        after[..MIB as usize].iter().all(|byte| *byte == 1)
            && after[MIB as usize..].iter().all(|byte| *byte == 0)
    );
    // Whoever has the former file open writes to neither.
    before.write_all_at(&[9; 4096], 0).unwrap();
    assert_eq!((bytes(&volume, "d.raw")[0], bytes(&volume, "d@kept.snap")[0]), (1, 2));
    write(&volume, 3);
    assert_eq!(bytes(&volume, "d@s.snap")[0], 1);
}

#[test]
fn a_rollback_that_does_not_happen_leaves_nothing() {
    let (_mount, volume) = xfs();
    write(&volume, 1);
    snapshot(&volume, "s", 1);
    write(&volume, 3);
    let absent = Replacement::of_snapshot(&volume, ("d", "none"), 2).unwrap_err();
    assert!(matches!(absent, VolumeError::NotFound(_)), "{absent:?}");
    let taken = snapshot::keep(&volume, "d", "s", 2).unwrap_err();
    assert!(matches!(taken, VolumeError::Exists { .. }), "{taken:?}");
    let refused = Replacement::of_snapshot(&volume, ("d", "s"), 2).unwrap().replace(&volume, || false);
    assert!(!refused.unwrap());
    assert_eq!(bytes(&volume, "d.raw")[0], 3);
    assert_eq!(names(&volume), ["d.raw", "d@s.snap"]);
    // Somebody has taken the disk over meanwhile.
    let late = Replacement::of_snapshot(&volume, ("d", "s"), 4).unwrap();
    snapshot::remove_unfinished(&volume, "d").unwrap();
    let barred = late.replace(&volume, || true).unwrap_err();
    assert!(matches!(barred, VolumeError::NotFound(_)), "{barred:?}");
    assert_eq!((names(&volume), bytes(&volume, "d.raw")[0]), (vec!["d.raw".into(), "d@s.snap".into()], 3));
    // Its maker ends: the next one removes the file.
    drop(Replacement::of_snapshot(&volume, ("d", "s"), 4).unwrap());
    assert_eq!(names(&volume).len(), 3);
    Replacement::of_snapshot(&volume, ("d", "s"), 5).unwrap().replace(&volume, || true).unwrap();
    assert_eq!(names(&volume), ["d.raw", "d@s.snap"]);
    // A disk that has grown since keeps what it has grown by.
    let late = Replacement::of_snapshot(&volume, ("d", "s"), 6).unwrap();
    volume.lengthen("d", 2 * MIB).unwrap();
    let grown = late.replace(&volume, || true).unwrap_err();
    assert!(matches!(grown, VolumeError::InvalidSize { .. }), "{grown:?}");
    assert_eq!(names(&volume), ["d.raw", "d@s.snap"]);
    assert_eq!(bytes(&volume, "d.raw").len() as u64, 2 * MIB);
    fs::File::options().write(true).open(volume.path().join("d.raw")).unwrap().set_len(MIB / 2).unwrap();
    Replacement::of_snapshot(&volume, ("d", "s"), 7).unwrap_err();
    assert_eq!(names(&volume), ["d.raw", "d@s.snap"]);
}

#[test]
fn a_clone_is_told_from_any_other_file_by_its_mark() {
    let (_mount, volume) = xfs();
    write(&volume, 1);
    snapshot(&volume, "s", 1);
    snapshot::clone_disk(&volume, ("d", "s"), "c", 2 * MIB, 77).unwrap();
    let clone = bytes(&volume, "c.raw");
    assert_eq!(clone.len() as u64, 2 * MIB);
    assert!(clone[..MIB as usize].iter().all(|byte| *byte == 1));
    assert!(clone[MIB as usize..].iter().all(|byte| *byte == 0));
    volume.open("c.raw").unwrap().write_all_at(&[9; 4096], 0).unwrap();
    assert_eq!(bytes(&volume, "d@s.snap")[0], 1);
    let exists = snapshot::clone_disk(&volume, ("d", "s"), "c", MIB, 78).unwrap_err();
    assert!(matches!(exists, VolumeError::Exists { ref name, .. } if name == "c"), "{exists:?}");
    let small = snapshot::clone_disk(&volume, ("d", "s"), "x", 4096, 79).unwrap_err();
    assert!(matches!(small, VolumeError::InvalidSize { .. }), "{small:?}");
    assert_eq!(names(&volume), ["c.raw", "d.raw", "d@s.snap"]);
    for other in [0, 78] {
        delete_unwritten(&volume, "c", other).unwrap();
        assert!(
            snapshot::is_clone(&volume, "c", 77).unwrap()
                && !snapshot::is_clone(&volume, "c", other).unwrap()
        );
    }
    delete_unwritten(&volume, "c", 77).unwrap();
    assert_eq!(names(&volume), ["d.raw", "d@s.snap"]);
    assert!(!snapshot::is_clone(&volume, "c", 77).unwrap());
}

#[test]
fn a_filesystem_without_reflinks_says_so() {
    let directory = scratch_in_memory();
    let volume = DirVolume::open(directory.path()).unwrap();
    volume.create_disk("d", MIB).unwrap();
    let unfinished = Unfinished::begin(&volume, "d", "s", 1).unwrap();
    let error = snapshot::share(&volume.open("d.raw").unwrap(), &unfinished.file).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
    let error = snapshot::clone_error(directory.path().into(), error);
    assert!(matches!(error, VolumeError::NoReflinks(_)), "{error:?}");
}
