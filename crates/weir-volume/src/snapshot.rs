//! Snapshots of disks: files beside the disk's own that share its blocks (`FICLONE`; XFS and btrfs), as the disk was at one point in time.
//!
//! Snapshot `s` of disk `d` is the file `d@s.snap`. Names of disks have no `@`, so that no snapshot is taken for a disk. The file gets
//! this name when it is complete and durable, so the directory is the whole truth about snapshots: there is no record of them
//! elsewhere. Until then it has a name that ends with `.new`, and whoever made it may have ended: such files are removed by the next snapshot of the disk,
//! and by the next coordinator of a volume on a LUN.
//!
//! A disk goes back to a snapshot by a file that shares the snapshot's blocks and takes the name of the disk's file ([`Replacement`]); so does a copy of
//! the disk in fewer pieces.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{XattrFlags, fgetxattr, fsetxattr, ioctl_ficlone};

use crate::error::VolumeError;
use crate::volume::{DirVolume, check_name};

/// Suffix of a complete snapshot.
const SUFFIX: &str = ".snap";

/// Suffix of one that is being made.
const UNFINISHED: &str = ".new";

/// Before the number of one to which a disk's content is copied.
const COPY: &str = "copy-";

/// Longest name of a snapshot, in bytes: with the disk's name and the rest it is less than the 255 of filesystems.
const LONGEST_NAME: usize = 64;

/// The attribute of a clone that tells its maker's file from any other.
const MARK: &str = "user.weir.clone";

/// A file of a volume's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Bytes of its blocks, those that it shares with others included.
    pub allocated: u64,
    /// When it was written last; a snapshot: when it was made.
    pub modified: SystemTime,
}

/// The directory of a volume: regular files by their names. Everything blocks.
pub trait Files {
    /// For messages.
    fn path(&self, name: &str) -> PathBuf;

    /// Opens a file for reading and writing.
    ///
    /// # Errors
    /// The system's; a link.
    fn open(&self, name: &str) -> Result<File, VolumeError>;

    /// Creates a file, mode 0600.
    ///
    /// # Errors
    /// The system's; it exists.
    fn create(&self, name: &str) -> Result<File, VolumeError>;

    /// Renames a file, unless there is another one of the new name.
    ///
    /// # Errors
    /// [`VolumeError::Exists`], or the system's.
    fn rename(&self, from: &str, to: &str) -> Result<(), VolumeError>;

    /// Renames a file to a name that another one may have, which is gone then. There is no moment without a file of that name.
    ///
    /// # Errors
    /// The system's.
    fn replace(&self, from: &str, to: &str) -> Result<(), VolumeError>;

    /// Removes a file.
    ///
    /// # Errors
    /// The system's.
    fn remove(&self, name: &str) -> Result<(), VolumeError>;

    /// All regular files of names that are wanted. The others are not looked at: a volume may have thousands.
    ///
    /// # Errors
    /// The system's.
    fn list(&self, is_wanted: &dyn Fn(&str) -> bool) -> Result<Vec<Entry>, VolumeError>;

    /// Makes all changes of names durable.
    ///
    /// # Errors
    /// The system's.
    fn sync(&self) -> Result<(), VolumeError>;
}

/// A snapshot of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The disk.
    pub disk: String,
    /// Its own name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Bytes of its blocks, those that it shares with the disk and other snapshots included.
    pub allocated: u64,
    /// When it was made.
    pub made: SystemTime,
}

/// The disk and the name of the snapshot that a file is, if it is one.
pub(crate) fn name_of(entry: &Entry) -> Option<(&str, &str)> {
    let (disk, name) = entry.name.strip_suffix(SUFFIX)?.split_once('@')?;
    check(disk, name).ok().map(|()| (disk, name))
}

/// Whether a file is the unfinished part of something.
pub(crate) fn is_unfinished(file: &str) -> bool {
    unfinished_of(file).is_some()
}

/// The disk of which a file is an unfinished part. In a directory, files of other names may be anybody's, whatever they begin and end with.
fn unfinished_of(file: &str) -> Option<Interrupted> {
    let (disk, rest) = file.strip_suffix(UNFINISHED)?.split_once('@')?;
    let number = rest.strip_prefix(COPY);
    let is_copy = number.is_some();
    let number = number.unwrap_or(rest);
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let is_number = number.len() == 16 && number.bytes().all(is_digit);
    is_number.then(|| Interrupted { disk: disk.to_owned(), is_copy })
}

impl Snapshot {
    fn of(entry: &Entry) -> Option<Snapshot> {
        let (disk, name) = name_of(entry)?;
        let Entry { size, allocated, modified, .. } = *entry;
        Some(Snapshot { disk: disk.to_owned(), name: name.to_owned(), size, allocated, made: modified })
    }

    /// When it was made, in milliseconds since 1970.
    #[must_use]
    pub fn made_unix_ms(&self) -> u64 {
        let since = self.made.duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }
}

/// Checks the names of a disk and a snapshot.
///
/// # Errors
/// [`VolumeError::InvalidName`].
pub fn check(disk: &str, snapshot: &str) -> Result<(), VolumeError> {
    check_name(disk)?;
    match check_name(snapshot) {
        Ok(()) if snapshot.len() > LONGEST_NAME => {
            Err(VolumeError::InvalidName { name: snapshot.to_owned(), reason: "is longer than 64 bytes" })
        }
        checked => checked,
    }
}

/// The name of a snapshot's file.
///
/// # Errors
/// [`VolumeError::InvalidName`].
pub fn file_of(disk: &str, snapshot: &str) -> Result<String, VolumeError> {
    check(disk, snapshot)?;
    Ok(format!("{disk}@{snapshot}{SUFFIX}"))
}

/// The snapshots of a disk, or of all disks; the oldest first.
///
/// # Errors
/// The system's.
pub fn list(files: &dyn Files, disk: Option<&str>) -> Result<Vec<Snapshot>, VolumeError> {
    let is_its =
        |name: &str| disk.is_none_or(|disk| name.split_once('@').is_some_and(|(own, _)| own == disk));
    let all = files.list(&|name| name.ends_with(SUFFIX) && is_its(name))?;
    let mut found: Vec<Snapshot> = all.iter().filter_map(Snapshot::of).collect();
    found.sort_by(|a, b| (&a.disk, a.made, &a.name).cmp(&(&b.disk, b.made, &b.name)));
    Ok(found)
}

/// A snapshot that is being made.
#[derive(Debug)]
pub struct Unfinished {
    disk: String,
    snapshot: String,
    name: String,
    /// Its file.
    pub file: File,
}

impl Unfinished {
    /// Begins a snapshot: its file is there, and empty. `number`: no other one has it. Removes what others have left unfinished: a disk
    /// has one snapshot made at a time, so that their makers have ended. If two nodes make one of a closed disk in a directory, one of them
    /// fails to finish.
    ///
    /// # Errors
    /// [`VolumeError::Exists`], [`VolumeError::InvalidName`], or the system's.
    pub fn begin(
        files: &dyn Files,
        disk: &str,
        snapshot: &str,
        number: u64,
    ) -> Result<Unfinished, VolumeError> {
        let complete = file_of(disk, snapshot)?;
        let own = format!("{disk}@");
        let all = files.list(&|name| name.starts_with(&own))?;
        if all.iter().any(|entry| entry.name == complete) {
            let name = format!("{disk}@{snapshot}");
            return Err(VolumeError::Exists { name, path: files.path(&complete) });
        }
        remove_unfinished_of(files, disk, &all)?;
        let name = format!("{disk}@{number:016x}{UNFINISHED}");
        let file = files.create(&name)?;
        Ok(Unfinished { disk: disk.to_owned(), snapshot: snapshot.to_owned(), name, file })
    }

    /// The snapshot is what its file holds, durably.
    ///
    /// # Errors
    /// [`VolumeError::Exists`], or the system's. The file is removed, if that is possible, whatever its name is by then.
    pub fn finish(self, files: &dyn Files) -> Result<Snapshot, VolumeError> {
        let complete = file_of(&self.disk, &self.snapshot)?;
        if let Err(error) = files.rename(&self.name, &complete) {
            let _ = files.remove(&self.name);
            return Err(named(error, || format!("{}@{}", self.disk, self.snapshot)));
        }
        let kept = files.sync().and_then(|()| {
            let found = list(files, Some(&self.disk))?.into_iter().find(|one| one.name == self.snapshot);
            found.ok_or_else(|| VolumeError::NotFound(files.path(&complete)))
        });
        if kept.is_err() {
            // It is told that there is none.
            let _left = files.remove(&complete).and_then(|()| files.sync());
        }
        kept
    }

    /// It is not made.
    ///
    /// # Errors
    /// The system's: the next snapshot removes the file.
    pub fn abandon(self, files: &dyn Files) -> Result<(), VolumeError> {
        files.remove(&self.name)
    }
}

/// A disk of which something is unfinished.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interrupted {
    /// The disk.
    pub disk: String,
    /// Its own content was being copied to another file.
    pub is_copy: bool,
}

/// The disks of which something is unfinished, whether whoever has begun it has ended or goes on.
///
/// # Errors
/// The system's.
pub fn interrupted(files: &dyn Files) -> Result<BTreeSet<Interrupted>, VolumeError> {
    Ok(files.list(&is_unfinished)?.iter().filter_map(|entry| unfinished_of(&entry.name)).collect())
}

/// Removes, durably, what was never finished of a disk: snapshots, rollbacks, and the disk itself as a clone. Whoever makes them does not
/// finish them any more.
///
/// # Errors
/// The system's.
pub fn remove_unfinished(files: &dyn Files, disk: &str) -> Result<(), VolumeError> {
    check_name(disk)?;
    remove_unfinished_of(files, disk, &files.list(&is_unfinished)?)
}

fn remove_unfinished_of(files: &dyn Files, disk: &str, all: &[Entry]) -> Result<(), VolumeError> {
    let is_its = |entry: &&Entry| unfinished_of(&entry.name).is_some_and(|one| one.disk == disk);
    let mut removes = false;
    for entry in all.iter().filter(is_its) {
        match files.remove(&entry.name) {
            // Finished or removed since.
            Err(VolumeError::NotFound(_)) => {}
            removed => removed?,
        }
        removes = true;
    }
    if removes { files.sync() } else { Ok(()) }
}

/// Removes a snapshot, durably. What no other file shares is free then.
///
/// # Errors
/// [`VolumeError::NotFound`], [`VolumeError::InvalidName`], or the system's.
pub fn remove(files: &dyn Files, disk: &str, snapshot: &str) -> Result<(), VolumeError> {
    files.remove(&file_of(disk, snapshot)?)?;
    files.sync()
}

/// Removes all snapshots of a disk, durably, and returns them.
///
/// # Errors
/// The system's.
pub fn remove_all(files: &dyn Files, disk: &str) -> Result<Vec<Snapshot>, VolumeError> {
    let found = list(files, Some(disk))?;
    for one in &found {
        match files.remove(&file_of(disk, &one.name)?) {
            // Its maker has removed it.
            Err(VolumeError::NotFound(_)) => {}
            removed => removed?,
        }
    }
    if !found.is_empty() {
        files.sync()?;
    }
    Ok(found)
}

/// Makes `to`, which is empty, share all blocks of `from`, durably.
///
/// # Errors
/// The system's; `EOPNOTSUPP`: the filesystem has no reflinks.
pub fn share(from: &File, to: &File) -> io::Result<()> {
    ioctl_ficlone(to, from).map_err(|error| match error {
        // From filesystems that do not know the call at all.
        rustix::io::Errno::NOTTY | rustix::io::Errno::INVAL => io::Error::from_raw_os_error(libc::EOPNOTSUPP),
        error => error.into(),
    })?;
    to.sync_all()
}

/// Makes a snapshot of a disk that nobody uses, durably.
///
/// # Errors
/// As [`Unfinished::begin`], and [`VolumeError::NoReflinks`]. Then none is made.
pub fn keep(files: &dyn Files, disk: &str, snapshot: &str, number: u64) -> Result<Snapshot, VolumeError> {
    let own = DirVolume::file_of(disk)?;
    let unfinished = Unfinished::begin(files, disk, snapshot, number)?;
    let shared = files.open(&own).and_then(|file| {
        share(&file, &unfinished.file).map_err(|error| clone_error(files.path(&own), error))
    });
    match shared {
        Ok(()) => unfinished.finish(files),
        Err(error) => {
            // What is left, the next snapshot removes.
            let _left = unfinished.abandon(files);
            Err(error)
        }
    }
}

/// A file that is to replace a disk's own.
#[derive(Debug)]
pub struct Replacement {
    name: String,
    own: String,
    /// Bytes.
    length: u64,
}

/// The files of a [`Replacement`] that is begun.
#[derive(Debug)]
pub struct Begun {
    /// It.
    pub replacement: Replacement,
    /// The disk's own.
    pub own: File,
    /// The new one.
    pub new: File,
    /// Bytes of the disk's own.
    pub size: u64,
}

impl Replacement {
    /// Begins an empty file. Removes what was left unfinished of the disk. `number`: no other unfinished file has it. `is_copy`: the disk's
    /// own content is copied to it ([`Interrupted::is_copy`]).
    ///
    /// # Errors
    /// [`VolumeError::NotFound`], or the system's.
    pub fn begin(files: &dyn Files, disk: &str, number: u64, is_copy: bool) -> Result<Begun, VolumeError> {
        let own = DirVolume::file_of(disk)?;
        remove_unfinished(files, disk)?;
        let (file, length) = (files.open(&own)?, length_of(files, &own)?);
        let name = format!("{disk}@{}{number:016x}{UNFINISHED}", if is_copy { COPY } else { "" });
        let new = files.create(&name)?;
        Ok(Begun { replacement: Replacement { name, own, length }, own: file, new, size: length })
    }

    /// Makes a file that holds what a snapshot of the disk holds, durably, as long as the disk's own: what the disk has grown by since the
    /// snapshot reads as zeroes.
    ///
    /// # Errors
    /// As [`Replacement::begin`]; [`VolumeError::NoReflinks`], [`VolumeError::InvalidSize`]. The file is removed then, if
    /// that is possible.
    pub fn of_snapshot(
        files: &dyn Files,
        (disk, snapshot): (&str, &str),
        number: u64,
    ) -> Result<Replacement, VolumeError> {
        let source = files.open(&file_of(disk, snapshot)?)?;
        let Begun { replacement, new: file, size, .. } = Replacement::begin(files, disk, number, false)?;
        let filled = share(&source, &file).and_then(|()| match file.metadata()?.len().cmp(&size) {
            Ordering::Less => file.set_len(size).and_then(|()| file.sync_all()),
            Ordering::Equal => Ok(()),
            // No disk shrinks.
            Ordering::Greater => Err(io::Error::from_raw_os_error(libc::EFBIG)),
        });
        match filled {
            Ok(()) => Ok(replacement),
            Err(error) => {
                let error = clone_error(files.path(&replacement.name), error);
                replacement.abandon(files);
                Err(error)
            }
        }
    }

    /// The disk's file is this one. It is durable with the next [`Files::sync`]. Nobody has the former one open. False if `may_replace`,
    /// which is asked immediately before, says no.
    ///
    /// # Errors
    /// The system's; the disk's file has grown meanwhile. The disk stays as it is then, and if the answer is false; the file is removed, if
    /// that is possible.
    pub fn replace(self, files: &dyn Files, may_replace: impl FnOnce() -> bool) -> Result<bool, VolumeError> {
        let grown = |size| {
            let (path, reason) = (files.path(&self.own), "is more than it had a moment ago; try again");
            if size > self.length { Err(VolumeError::InvalidSize { path, size, reason }) } else { Ok(()) }
        };
        let replaced = length_of(files, &self.own).and_then(grown).and_then(|()| match may_replace() {
            true => files.replace(&self.name, &self.own).map(|()| true),
            false => Ok(false),
        });
        if !matches!(replaced, Ok(true)) {
            self.abandon(files);
        }
        replaced
    }

    /// The disk's file stays as it is.
    pub fn abandon(self, files: &dyn Files) {
        // What is left, the next snapshot or replacement removes.
        let _left = files.remove(&self.name);
    }
}

fn length_of(files: &dyn Files, name: &str) -> Result<u64, VolumeError> {
    let metadata = files.open(name)?.metadata();
    metadata
        .map(|found| found.len())
        .map_err(|error| VolumeError::from_io("examining", &files.path(name), error))
}

/// Makes a disk of `size` bytes, durably, that begins as a snapshot and shares its blocks. `mark`, which is not 0 and which no other file
/// has, is left on it: see [`is_clone`].
///
/// # Errors
/// [`VolumeError::Exists`], [`VolumeError::NoReflinks`], [`VolumeError::InvalidSize`], or the system's. No file of the disk's name is
/// there then that was not there before.
pub fn clone_disk(
    files: &dyn Files,
    (disk, snapshot): (&str, &str),
    name: &str,
    size: u64,
    mark: u64,
) -> Result<(), VolumeError> {
    let source_name = file_of(disk, snapshot)?;
    let (own, path) = (DirVolume::file_of(name)?, files.path(&source_name));
    let source = files.open(&source_name)?;
    let length = source.metadata().map_err(|error| VolumeError::from_io("examining", &path, error))?.len();
    if length > size {
        return Err(VolumeError::InvalidSize { path, size, reason: "is less than the snapshot has" });
    }
    let unfinished = format!("{name}@{mark:016x}{UNFINISHED}");
    let file = files.create(&unfinished)?;
    let made = || {
        let failed = |error| clone_error(files.path(&unfinished), error);
        fsetxattr(&file, MARK, &mark.to_le_bytes(), XattrFlags::CREATE)
            .map_err(|error| failed(error.into()))?;
        share(&source, &file).map_err(failed)?;
        if size > length {
            file.set_len(size).and_then(|()| file.sync_all()).map_err(failed)?;
        }
        files.rename(&unfinished, &own)
    };
    if let Err(error) = made() {
        let _ = files.remove(&unfinished);
        return Err(named(error, || name.to_owned()));
    }
    files.sync()
}

/// Whether a disk's file was made by [`clone_disk`] with this mark. A missing one was not.
///
/// # Errors
/// The system's.
pub fn is_clone(files: &dyn Files, name: &str, mark: u64) -> Result<bool, VolumeError> {
    let own = DirVolume::file_of(name)?;
    let file = match files.open(&own) {
        Err(VolumeError::NotFound(_)) => return Ok(false),
        file => file?,
    };
    let mut found = [0; 8];
    match fgetxattr(&file, MARK, &mut found) {
        Ok(8) => Ok(u64::from_le_bytes(found) == mark && mark != 0),
        Ok(_) | Err(rustix::io::Errno::NODATA | rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::RANGE) => {
            Ok(false)
        }
        Err(error) => Err(VolumeError::from_io("examining", &files.path(&own), error.into())),
    }
}

/// An error that a name is taken, with the name that users know.
fn named(error: VolumeError, name: impl FnOnce() -> String) -> VolumeError {
    match error {
        VolumeError::Exists { path, .. } => VolumeError::Exists { name: name(), path },
        error => error,
    }
}

/// The error of a copy that shares blocks.
#[must_use]
pub fn clone_error(path: PathBuf, error: io::Error) -> VolumeError {
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::EXDEV) => VolumeError::NoReflinks(path),
        _ => VolumeError::from_io("copying", &path, error),
    }
}
