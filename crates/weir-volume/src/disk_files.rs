//! The disks of a volume as files: in a directory ([`DirVolume`]), or on the filesystem of a LUN that this node coordinates
//! ([`LunVolume`]).

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{FallocateFlags, FileType, RenameFlags, StatVfs, fallocate};
use rustix::io::Errno;
use weir_block::Nanos;

use crate::error::VolumeError;
use crate::lun::filesystem::space::{self, Zeroes};
use crate::lun::filesystem::{FilesystemError, Mounted, extents};
use crate::snapshot::{self, Entry, Files};
use crate::volume::{DirVolume, check_size, grow};

/// Bytes of a thick disk that are allocated before a look at the time: in a directory, and with zeroes written on a LUN.
const ALLOCATED: u64 = 16 << 30;
const WRITTEN: u64 = 16 << 20;

/// Makes, measures and removes the files of disks. Everything blocks.
pub trait DiskFiles: Files + Send + Sync {
    /// The path of a disk, for messages, whether or not it exists.
    ///
    /// # Errors
    /// [`VolumeError::InvalidName`].
    fn disk_path(&self, name: &str) -> Result<PathBuf, VolumeError>;

    /// Checks that a disk of this name can be made.
    ///
    /// # Errors
    /// [`VolumeError::Exists`], [`VolumeError::InvalidName`], or the system's.
    fn check_free(&self, name: &str) -> Result<(), VolumeError>;

    /// Makes a sparse disk of `size` bytes, durably. See [`DirVolume::create_disk`].
    ///
    /// # Errors
    /// As [`DirVolume::create_disk`].
    fn create_disk(&self, name: &str, size: u64) -> Result<(), VolumeError>;

    /// Gives a range of a disk's open file space of its own, and zeroes: as much of it as is done in the time `within`, and at least a step.
    /// Returns where that ends; it is durable up to there. What the range had is lost.
    ///
    /// # Errors
    /// [`VolumeError::NoSpace`], [`VolumeError::NoThickDisks`], or the system's.
    fn fill(&self, file: &File, path: &Path, range: Range<u64>, within: Duration)
    -> Result<u64, VolumeError>;

    /// Grows a disk's file to `size` bytes, durably. See [`DirVolume::lengthen`].
    ///
    /// # Errors
    /// As [`DirVolume::lengthen`].
    fn lengthen(&self, name: &str, size: u64) -> Result<(), VolumeError>;

    /// Removes a disk, durably. A missing one is no error.
    ///
    /// # Errors
    /// [`VolumeError::InvalidName`], or the system's.
    fn delete_if_there(&self, name: &str) -> Result<(), VolumeError>;

    /// Bytes that a disk takes in the filesystem.
    ///
    /// # Errors
    /// [`VolumeError::NotFound`], [`VolumeError::InvalidName`], or the system's.
    fn allocated(&self, name: &str) -> Result<u64, VolumeError>;

    /// The whole filesystem.
    ///
    /// # Errors
    /// The system's.
    fn space(&self) -> Result<Space, VolumeError>;

    /// The error of an operation on its files, or [`VolumeError::FilesystemFailed`] if the filesystem as a whole is the reason and another
    /// node can do what this one cannot.
    fn judge(&self, error: VolumeError) -> VolumeError {
        error
    }
}

/// A filesystem, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// All of it.
    pub size: u64,
    /// Not used by anything.
    pub free: u64,
    /// Those of them that everybody may use.
    pub available: u64,
}

impl From<StatVfs> for Space {
    fn from(found: StatVfs) -> Space {
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Space { size: bytes(found.f_blocks), free: bytes(found.f_bfree), available: bytes(found.f_bavail) }
    }
}

/// Removes a disk that was made and never written, or the clone with the mark `clone` ([`snapshot::clone_disk`]). Any other file with data
/// stays, and a missing one is no error.
///
/// # Errors
/// As [`DiskFiles::delete_if_there`].
pub fn delete_unwritten(files: &dyn DiskFiles, name: &str, clone: u64) -> Result<(), VolumeError> {
    if clone != 0 {
        snapshot::remove_unfinished(files, name)?;
    }
    match files.allocated(name) {
        Ok(0) => files.delete_if_there(name),
        Ok(_) if snapshot::is_clone(files, name, clone)? => files.delete_if_there(name),
        Ok(_) | Err(VolumeError::NotFound(_) | VolumeError::NotABacking(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

impl DiskFiles for DirVolume {
    fn disk_path(&self, name: &str) -> Result<PathBuf, VolumeError> {
        DirVolume::disk_path(self, name)
    }

    fn check_free(&self, name: &str) -> Result<(), VolumeError> {
        DirVolume::check_free(self, name)
    }

    fn create_disk(&self, name: &str, size: u64) -> Result<(), VolumeError> {
        DirVolume::create_disk(self, name, size)
    }

    /// What `fallocate` gives reads as zeroes, and all I/O goes through the filesystem.
    fn fill(
        &self,
        file: &File,
        path: &Path,
        range: Range<u64>,
        within: Duration,
    ) -> Result<u64, VolumeError> {
        let end = in_steps(range, ALLOCATED, within, |step| allocate_missing(file, path, step))?;
        file.sync_all().map_err(|error| VolumeError::from_io("syncing", path, error))?;
        Ok(end)
    }

    fn lengthen(&self, name: &str, size: u64) -> Result<(), VolumeError> {
        DirVolume::lengthen(self, name, size)
    }

    fn delete_if_there(&self, name: &str) -> Result<(), VolumeError> {
        DirVolume::delete_if_there(self, name)
    }

    fn allocated(&self, name: &str) -> Result<u64, VolumeError> {
        DirVolume::allocated(self, name)
    }

    fn space(&self) -> Result<Space, VolumeError> {
        let path = DirVolume::path(self);
        let found = rustix::fs::statvfs(path);
        found.map(Space::from).map_err(|error| VolumeError::from_io("measuring", path, error.into()))
    }
}

impl Files for DirVolume {
    fn path(&self, name: &str) -> PathBuf {
        DirVolume::path(self).join(name)
    }

    fn open(&self, name: &str) -> Result<File, VolumeError> {
        let path = Files::path(self, name);
        let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(&path);
        opened.map_err(|error| VolumeError::from_io("opening", &path, error))
    }

    fn create(&self, name: &str) -> Result<File, VolumeError> {
        let path = Files::path(self, name);
        let created = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        created.map_err(|error| VolumeError::from_io("creating", &path, error))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), VolumeError> {
        let (from, path) = (Files::path(self, from), Files::path(self, to));
        let renamed =
            rustix::fs::renameat_with(rustix::fs::CWD, &from, rustix::fs::CWD, &path, RenameFlags::NOREPLACE);
        renamed.map_err(|error| match error {
            Errno::EXIST => VolumeError::Exists { name: to.to_owned(), path: path.clone() },
            error => VolumeError::from_io("renaming a file to", &path, error.into()),
        })
    }

    fn replace(&self, from: &str, to: &str) -> Result<(), VolumeError> {
        let path = Files::path(self, to);
        std::fs::rename(Files::path(self, from), &path)
            .map_err(|error| VolumeError::from_io("renaming a file to", &path, error))
    }

    fn remove(&self, name: &str) -> Result<(), VolumeError> {
        let path = Files::path(self, name);
        std::fs::remove_file(&path).map_err(|error| VolumeError::from_io("removing", &path, error))
    }

    fn list(&self, is_wanted: &dyn Fn(&str) -> bool) -> Result<Vec<Entry>, VolumeError> {
        let directory = DirVolume::path(self).to_owned();
        let failed = |error| VolumeError::from_io("reading", &directory, error);
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&directory).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            // Others are no names of ours.
            let Some(name) = entry.file_name().into_string().ok().filter(|name| is_wanted(name)) else {
                continue;
            };
            // Removed since.
            let Ok(metadata) = entry.metadata() else { continue };
            let modified = metadata.modified().unwrap_or(UNIX_EPOCH);
            if metadata.is_file() {
                let (size, allocated) = (metadata.len(), metadata.blocks() * 512);
                found.push(Entry { name, size, allocated, modified });
            }
        }
        Ok(found)
    }

    fn sync(&self) -> Result<(), VolumeError> {
        self.sync_directory()
    }
}

/// A volume on a LUN, at its coordinator.
#[derive(Clone, Debug)]
pub struct LunVolume(pub Arc<Mounted>);

impl DiskFiles for LunVolume {
    fn disk_path(&self, name: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.0.lun().join(DirVolume::file_of(name)?))
    }

    fn check_free(&self, name: &str) -> Result<(), VolumeError> {
        let (file, path) = (DirVolume::file_of(name)?, self.disk_path(name)?);
        match self.0.stat(&file) {
            Ok(_) => Err(VolumeError::Exists { name: name.to_owned(), path }),
            Err(error) if error.is_absent() => Ok(()),
            Err(error) => Err(as_volume_error("examining", path, error)),
        }
    }

    fn create_disk(&self, name: &str, size: u64) -> Result<(), VolumeError> {
        let (file, path) = (DirVolume::file_of(name)?, self.disk_path(name)?);
        check_size(&path, size)?;
        let created = match self.0.create(&file) {
            Ok(created) => created,
            Err(FilesystemError::System { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {
                return Err(VolumeError::Exists { name: name.to_owned(), path });
            }
            Err(error) => return Err(as_volume_error("creating", path, error)),
        };
        let made = created.set_len(size).and_then(|()| created.sync_all());
        made.map_err(|error| VolumeError::from_io("creating", &path, error))?;
        self.0.sync().map_err(|error| as_volume_error("syncing", path, error))
    }

    /// Nodes write to the space directly, so the filesystem writes zeroes there first (`VOLUME.md` §1). All of it is allocated before that: nobody
    /// else takes it meanwhile.
    fn fill(
        &self,
        file: &File,
        path: &Path,
        range: Range<u64>,
        within: Duration,
    ) -> Result<u64, VolumeError> {
        allocate_missing(file, path, range.clone())?;
        let zeroes = Zeroes::default();
        in_steps(range, WRITTEN, within, |step| {
            let written = space::allocate(file, path, step, &zeroes);
            written.map(drop).map_err(|error| as_volume_error("writing zeroes to", path.to_owned(), error))
        })
    }

    /// Nothing moves: what other nodes hold of the file stays where it is (`VOLUME.md` §1).
    fn lengthen(&self, name: &str, size: u64) -> Result<(), VolumeError> {
        let path = self.disk_path(name)?;
        check_size(&path, size)?;
        let file = Files::open(self, &DirVolume::file_of(name)?)?;
        grow(&file, &path, size)?;
        file.sync_all().map_err(|error| VolumeError::from_io("syncing", &path, error))
    }

    fn delete_if_there(&self, name: &str) -> Result<(), VolumeError> {
        let (file, path) = (DirVolume::file_of(name)?, self.disk_path(name)?);
        match self.0.remove(&file) {
            Err(error) if !error.is_absent() => Err(as_volume_error("deleting", path, error)),
            _ => self.0.sync().map_err(|error| as_volume_error("syncing", path, error)),
        }
    }

    fn allocated(&self, name: &str) -> Result<u64, VolumeError> {
        let (file, path) = (DirVolume::file_of(name)?, self.disk_path(name)?);
        let stat = self.0.stat(&file).map_err(|error| as_volume_error("examining", path, error))?;
        Ok(stat.st_blocks as u64 * 512)
    }

    fn space(&self) -> Result<Space, VolumeError> {
        let failed = |error| as_volume_error("measuring", self.0.lun().to_owned(), error);
        self.0.statvfs().map(Space::from).map_err(failed)
    }

    fn judge(&self, error: VolumeError) -> VolumeError {
        match error {
            VolumeError::Io { what, path, source } | VolumeError::Permission { what, path, source }
                if self.0.has_failed(&source) =>
            {
                VolumeError::FilesystemFailed { what, path, source }
            }
            error => error,
        }
    }
}

impl Files for LunVolume {
    fn path(&self, name: &str) -> PathBuf {
        self.0.lun().join(name)
    }

    fn open(&self, name: &str) -> Result<File, VolumeError> {
        self.0.open(name).map_err(|error| as_volume_error("opening", self.path(name), error))
    }

    fn create(&self, name: &str) -> Result<File, VolumeError> {
        self.0.create(name).map_err(|error| as_volume_error("creating", self.path(name), error))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), VolumeError> {
        let path = self.path(to);
        self.0.rename(from, to).map_err(|error| match error {
            FilesystemError::System { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => {
                VolumeError::Exists { name: to.to_owned(), path }
            }
            error => as_volume_error("renaming a file to", path, error),
        })
    }

    fn replace(&self, from: &str, to: &str) -> Result<(), VolumeError> {
        let replaced = self.0.replace(from, to);
        replaced.map_err(|error| as_volume_error("renaming a file to", self.path(to), error))
    }

    fn remove(&self, name: &str) -> Result<(), VolumeError> {
        self.0.remove(name).map_err(|error| as_volume_error("removing", self.path(name), error))
    }

    fn list(&self, is_wanted: &dyn Fn(&str) -> bool) -> Result<Vec<Entry>, VolumeError> {
        let failed = |error| as_volume_error("reading", self.0.lun().to_owned(), error);
        let mut found = Vec::new();
        for name in self.0.names().map_err(failed)?.into_iter().filter(|name| is_wanted(name)) {
            let stat = match self.0.stat(&name) {
                Err(error) if error.is_absent() => continue,
                stat => stat.map_err(failed)?,
            };
            if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
                let since = Duration::new(stat.st_mtime.max(0) as u64, stat.st_mtime_nsec as u32);
                let (size, allocated) = (stat.st_size as u64, stat.st_blocks as u64 * 512);
                found.push(Entry { name, size, allocated, modified: UNIX_EPOCH + since });
            }
        }
        Ok(found)
    }

    fn sync(&self) -> Result<(), VolumeError> {
        self.0.sync().map_err(|error| as_volume_error("syncing", self.0.lun().to_owned(), error))
    }
}

/// Does `work` for one step of a range after another, until the end or until the time is over. Returns the end of what was done.
fn in_steps(
    range: Range<u64>,
    step: u64,
    within: Duration,
    mut work: impl FnMut(Range<u64>) -> Result<(), VolumeError>,
) -> Result<u64, VolumeError> {
    let (begun, mut at) = (Nanos::now(), range.start);
    while at < range.end {
        let end = range.end.min(at.saturating_add(step));
        work(at..end)?;
        at = end;
        if Nanos::now() - begun >= within {
            break;
        }
    }
    Ok(at)
}

/// As [`allocate`], wherever a range has no blocks yet: XFS refuses a range that is longer than what is free, also where it has blocks.
fn allocate_missing(file: &File, path: &Path, range: Range<u64>) -> Result<(), VolumeError> {
    // A filesystem that cannot tell gets the whole range.
    let found = extents(file, range.clone()).unwrap_or_default();
    let mut at = range.start;
    for extent in &found {
        allocate(file, path, at..extent.start.min(range.end))?;
        at = at.max(extent.end());
    }
    allocate(file, path, at..range.end)
}

/// The file keeps its size, and blocks that it has stay.
fn allocate(file: &File, path: &Path, range: Range<u64>) -> Result<(), VolumeError> {
    if range.is_empty() {
        return Ok(());
    }
    let allocated = fallocate(file, FallocateFlags::KEEP_SIZE, range.start, range.end - range.start);
    allocated.map_err(|error| match error {
        Errno::OPNOTSUPP => VolumeError::NoThickDisks(path.to_owned()),
        error => VolumeError::from_io("allocating space for", path, error.into()),
    })
}

fn as_volume_error(what: &'static str, path: PathBuf, error: FilesystemError) -> VolumeError {
    match error {
        FilesystemError::System { source, .. } => VolumeError::from_io(what, &path, source),
        other => VolumeError::Io { what, path, source: io::Error::other(other) },
    }
}
