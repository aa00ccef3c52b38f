//! `dir` volumes: a directory, one raw sparse file per disk.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::error::VolumeError;

/// Suffix of disk files; Weir ignores all other files in the directory.
const SUFFIX: &str = ".raw";

/// The file with the volume's identity: 16 hexadecimal digits and a line feed.
const IDENTITY: &str = ".weir-volume";

/// Most bytes of that file: 16 digits, and what an editor puts behind them.
const LONGEST_IDENTITY: u64 = 32;

/// Longest name of a disk, in bytes: leaves room for the suffix in every filesystem's 255.
const LONGEST_NAME: usize = 128;

/// The unit of a disk's size, in bytes: the larger of the two logical blocks, so that either can be chosen later.
const SIZE_UNIT: u64 = 4096;

/// A directory that holds disks.
#[derive(Debug)]
pub struct DirVolume {
    path: PathBuf,
    /// Used to sync directory entries.
    directory: File,
}

impl DirVolume {
    /// Opens the directory at `path`, which must exist.
    ///
    /// # Errors
    /// [`VolumeError::NotFound`], [`VolumeError::NotADirectory`], [`VolumeError::Permission`].
    pub fn open(path: impl Into<PathBuf>) -> Result<DirVolume, VolumeError> {
        let path = path.into();
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(&path);
        match opened {
            Ok(directory) => Ok(DirVolume { path, directory }),
            Err(error) if error.raw_os_error() == Some(libc::ENOTDIR) => {
                Err(VolumeError::NotADirectory(path))
            }
            Err(error) => Err(VolumeError::from_io("opening", &path, error)),
        }
    }

    /// As [`DirVolume::open`], for a directory that is to become a volume: not one of the system's, by a path without detours.
    ///
    /// # Errors
    /// As [`DirVolume::open`], and [`VolumeError::Unsuitable`].
    pub fn open_new(path: impl Into<PathBuf>) -> Result<DirVolume, VolumeError> {
        let path = path.into();
        let unsuitable =
            |reason: &str| Err(VolumeError::Unsuitable { path: path.clone(), reason: reason.to_owned() });
        if !path.is_absolute() {
            return unsuitable("the path is relative; each node has a working directory of its own");
        }
        if path.components().any(|part| matches!(part, Component::ParentDir)) {
            return unsuitable("the path has `..` in it; write where it leads");
        }
        let real =
            std::fs::canonicalize(&path).map_err(|error| VolumeError::from_io("opening", &path, error))?;
        if std::fs::metadata(&real).is_ok_and(|found| found.file_type().is_block_device()) {
            return unsuitable("it is a block device; --kind lun makes a volume of one");
        }
        match is_of_system(&real) {
            false => DirVolume::open(path),
            true if real == path => unsuitable("the directory belongs to the system; make one of its own"),
            true => unsuitable(&format!("it leads to {}, which belongs to the system", real.display())),
        }
    }

    /// Checks that this directory is not that of `volume` at `path`, also through a symbolic link or a second mount.
    ///
    /// # Errors
    /// [`VolumeError::SameDirectory`].
    pub fn check_other(&self, volume: &str, path: &Path) -> Result<(), VolumeError> {
        let own = self
            .directory
            .metadata()
            .map_err(|error| VolumeError::from_io("examining", &self.path, error))?;
        // A path that does not exist, or not on this machine, is not this directory.
        let same =
            std::fs::metadata(path).is_ok_and(|other| (other.dev(), other.ino()) == (own.dev(), own.ino()));
        if !same && path != self.path {
            return Ok(());
        }
        let (path, other) = (self.path.clone(), path.to_owned());
        Err(VolumeError::SameDirectory { path, volume: volume.to_owned(), other })
    }

    /// As [`DirVolume::open`], and checks that the directory is volume `id`. An unmounted mount point would otherwise look like
    /// an empty volume.
    ///
    /// # Errors
    /// As [`DirVolume::open`], and [`VolumeError::NotTheVolume`].
    pub fn open_as(path: impl Into<PathBuf>, id: u64) -> Result<DirVolume, VolumeError> {
        let volume = DirVolume::open(path)?;
        match volume.identity() {
            Ok(Some(found)) if found == id => Ok(volume),
            Ok(_) | Err(VolumeError::NotAMark(_)) => Err(VolumeError::NotTheVolume { path: volume.path, id }),
            Err(error) => Err(error),
        }
    }

    /// The volume's identity. If there is none, writes `new` durably into the directory. It is permanent: a volume created later
    /// in the same directory takes it over.
    ///
    /// # Errors
    /// [`VolumeError::NotAMark`], [`VolumeError::Permission`], [`VolumeError::NoSpace`], [`VolumeError::Io`].
    pub fn identify(&self, new: u64) -> Result<u64, VolumeError> {
        let (path, making) = (self.path.join(IDENTITY), self.path.join(format!("{IDENTITY}.{new:016x}")));
        if let Some(present) = self.identity()? {
            return Ok(present);
        }
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&making)?;
            writeln!(file, "{new:016x}")?;
            file.sync_all()?;
            // The first caller wins: a link appears with all of its content, or not at all.
            std::fs::hard_link(&making, &path)
        };
        let written = write();
        let _ = std::fs::remove_file(&making);
        match written {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(VolumeError::from_io("marking", &path, error));
            }
            _ => self.sync_directory()?,
        }
        self.identity()?.ok_or_else(|| VolumeError::NotTheVolume { path: self.path.clone(), id: new })
    }

    /// The identity in the directory, if any. Neither follows a link nor waits for the writer of a FIFO.
    fn identity(&self) -> Result<Option<u64>, VolumeError> {
        let path = self.path.join(IDENTITY);
        let failed = |error| VolumeError::from_io("reading", &path, error);
        let opened =
            OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path);
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
                return Err(VolumeError::NotAMark(path));
            }
            Err(error) => return Err(failed(error)),
        };
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(VolumeError::NotAMark(path));
        }
        let mut bytes = Vec::new();
        file.take(LONGEST_IDENTITY + 1).read_to_end(&mut bytes).map_err(failed)?;
        let text = std::str::from_utf8(&bytes).ok().filter(|text| text.len() as u64 <= LONGEST_IDENTITY);
        let number = text.and_then(|text| u64::from_str_radix(text.trim_end(), 16).ok());
        number.map(Some).ok_or(VolumeError::NotAMark(path))
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the disk `name`, whether or not it exists.
    ///
    /// # Errors
    /// [`VolumeError::InvalidName`].
    pub fn disk_path(&self, name: &str) -> Result<PathBuf, VolumeError> {
        DirVolume::path_of(&self.path, name)
    }

    /// The path of the disk `name` in the volume at `directory`. Does not access the storage.
    ///
    /// # Errors
    /// [`VolumeError::InvalidName`].
    pub fn path_of(directory: &Path, name: &str) -> Result<PathBuf, VolumeError> {
        Ok(directory.join(DirVolume::file_of(name)?))
    }

    /// The name of the file of the disk `name`.
    ///
    /// # Errors
    /// [`VolumeError::InvalidName`].
    pub fn file_of(name: &str) -> Result<String, VolumeError> {
        check_name(name)?;
        Ok(format!("{name}{SUFFIX}"))
    }

    /// The disk whose file has this name, if it can be one.
    pub(crate) fn disk_of(file: &str) -> Option<&str> {
        file.strip_suffix(SUFFIX).filter(|name| check_name(name).is_ok())
    }

    /// Creates a sparse disk of `size` bytes (a multiple of 4096) that reads as zeroes. On return it is durable. After a failure
    /// its file may exist: only the caller knows whether it still owns the path, and then removes it with
    /// [`delete_unwritten`](crate::disk_files::delete_unwritten).
    ///
    /// # Errors
    /// [`VolumeError::Exists`], [`VolumeError::InvalidName`], [`VolumeError::InvalidSize`], [`VolumeError::NoSpace`],
    /// [`VolumeError::Permission`].
    pub fn create_disk(&self, name: &str, size: u64) -> Result<(), VolumeError> {
        let path = self.disk_path(name)?;
        check_size(&path, size)?;
        let created = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path);
        let file = match created {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(VolumeError::Exists { name: name.to_owned(), path });
            }
            Err(error) => return Err(VolumeError::from_io("creating", &path, error)),
        };
        set_size(&file, &path, size)?;
        self.sync_directory()
    }

    /// Grows a disk's file to `size` bytes (a multiple of 4096), durably. An open disk also needs [`Backing::resize`](crate::Backing::resize). A
    /// longer file is unchanged: an earlier attempt may have ended between this step and the disk's record, which alone defines
    /// the disk's size.
    ///
    /// # Errors
    /// [`VolumeError::NotFound`], [`VolumeError::InvalidSize`], [`VolumeError::NoSpace`], [`VolumeError::Permission`].
    pub fn lengthen(&self, name: &str, size: u64) -> Result<(), VolumeError> {
        let path = self.disk_path(name)?;
        check_size(&path, size)?;
        let file = OpenOptions::new()
            .write(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
            .map_err(|error| VolumeError::from_io("opening", &path, error))?;
        grow(&file, &path, size)?;
        file.sync_all().map_err(|error| VolumeError::from_io("syncing", &path, error))
    }

    /// Checks that a disk of this name can be created.
    ///
    /// # Errors
    /// [`VolumeError::Exists`], [`VolumeError::InvalidName`], [`VolumeError::Permission`].
    pub fn check_free(&self, name: &str) -> Result<(), VolumeError> {
        let path = self.disk_path(name)?;
        match std::fs::symlink_metadata(&path) {
            Ok(_) => Err(VolumeError::Exists { name: name.to_owned(), path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(VolumeError::from_io("examining", &path, error)),
        }
    }

    /// As [`DirVolume::delete`], but a missing disk is no error, so that the step can be repeated.
    ///
    /// # Errors
    /// [`VolumeError::InvalidName`], [`VolumeError::Permission`].
    pub fn delete_if_there(&self, name: &str) -> Result<(), VolumeError> {
        match self.delete(name) {
            Err(VolumeError::NotFound(_)) => self.sync_directory(),
            result => result,
        }
    }

    /// Deletes a disk and its data, durably. The filesystem frees its space when the last holder closes it.
    ///
    /// # Errors
    /// [`VolumeError::NotFound`], [`VolumeError::InvalidName`], [`VolumeError::Permission`].
    pub fn delete(&self, name: &str) -> Result<(), VolumeError> {
        let path = self.disk_path(name)?;
        std::fs::remove_file(&path).map_err(|error| VolumeError::from_io("deleting", &path, error))?;
        self.sync_directory()
    }

    /// Bytes that a disk occupies in the filesystem; fewer than its size if sparse.
    ///
    /// # Errors
    /// [`VolumeError::NotFound`], [`VolumeError::InvalidName`], [`VolumeError::Permission`], [`VolumeError::NotABacking`].
    pub fn allocated(&self, name: &str) -> Result<u64, VolumeError> {
        let path = self.disk_path(name)?;
        let metadata = std::fs::symlink_metadata(&path);
        let metadata = metadata.map_err(|error| VolumeError::from_io("examining", &path, error))?;
        if metadata.is_file() { Ok(metadata.blocks() * 512) } else { Err(VolumeError::NotABacking(path)) }
    }

    pub(crate) fn sync_directory(&self) -> Result<(), VolumeError> {
        self.directory.sync_all().map_err(|error| VolumeError::from_io("syncing", &self.path, error))
    }
}

/// Whether a directory, its path without links, belongs to the system: data written there would disturb it, or be lost.
fn is_of_system(path: &Path) -> bool {
    const THEMSELVES: [&str; 9] =
        ["/", "/home", "/opt", "/root", "/tmp", "/var", "/var/lib", "/var/log", "/var/tmp"];
    const WITH_ALL_BELOW: [&str; 12] = [
        "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr",
    ];
    // Memory and removable media that are meant for users.
    const EXCEPT_BELOW: [&str; 3] = ["/dev/shm", "/run/media", "/run/user"];
    let is_below = |parent: &&str| path != Path::new(parent) && path.starts_with(parent);
    let below = WITH_ALL_BELOW.iter().any(|parent| path.starts_with(parent));
    THEMSELVES.iter().any(|own| path == Path::new(own)) || (below && !EXCEPT_BELOW.iter().any(is_below))
}

/// Names are also used in commands, URLs and metrics: letters, digits, `.`, `_`, `-`, starting with a letter or digit.
pub(crate) fn check_name(name: &str) -> Result<(), VolumeError> {
    let reason = if name.is_empty() {
        "is empty"
    } else if name.len() > LONGEST_NAME {
        "is longer than 128 bytes"
    } else if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
        "may only have letters, digits, '.', '_' and '-'"
    } else if !name.as_bytes()[0].is_ascii_alphanumeric() {
        "must start with a letter or a digit"
    } else {
        return Ok(());
    };
    Err(VolumeError::InvalidName { name: name.to_owned(), reason })
}

pub(crate) fn check_size(path: &Path, size: u64) -> Result<(), VolumeError> {
    let reason = if size == 0 {
        "is not a disk"
    } else if !size.is_multiple_of(SIZE_UNIT) {
        "is not a multiple of 4096"
    } else if i64::try_from(size).is_err() {
        "is more than any filesystem supports"
    } else {
        return Ok(());
    };
    Err(VolumeError::InvalidSize { path: path.to_path_buf(), size, reason })
}

fn set_size(file: &File, path: &Path, size: u64) -> Result<(), VolumeError> {
    file.set_len(size).map_err(|error| cannot_size(path, size, error))?;
    file.sync_all().map_err(|error| VolumeError::from_io("syncing", path, error))
}

/// Grows a file to at least `size`. Allocating its last unit can never shrink it, even if a former owner's call arrives late and
/// a newer one has grown the file further; setting the length could (P4).
pub(crate) fn grow(file: &File, path: &Path, size: u64) -> Result<(), VolumeError> {
    let present =
        || file.metadata().map(|it| it.len()).map_err(|error| VolumeError::from_io("examining", path, error));
    if present()? >= size {
        return Ok(());
    }
    let allocated = rustix::fs::fallocate(file, FallocateFlags::empty(), size - SIZE_UNIT, SIZE_UNIT);
    match allocated {
        // This filesystem lacks the call, so only the length read before remains as a check.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) if present()? < size => {
            file.set_len(size).map_err(|error| cannot_size(path, size, error))
        }
        Err(Errno::OPNOTSUPP | Errno::NOSYS) | Ok(()) => Ok(()),
        Err(error) => Err(cannot_size(path, size, error.into())),
    }
}

fn cannot_size(path: &Path, size: u64, error: io::Error) -> VolumeError {
    if error.raw_os_error() != Some(libc::EFBIG) {
        return VolumeError::from_io("sizing", path, error);
    }
    let reason = "is more than this filesystem supports for one file";
    VolumeError::InvalidSize { path: path.to_path_buf(), size, reason }
}
