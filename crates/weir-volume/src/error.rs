//! What can go wrong with a volume or a backing as a whole, as opposed to one request.

use std::io;
use std::path::{Path, PathBuf};

/// Why a volume or a disk cannot be opened, made, changed or removed.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The path of a `dir` volume is something else.
    #[error("{} is not a directory; a `dir` volume needs one", .0.display())]
    NotADirectory(PathBuf),
    /// The directory is there, and what tells the volume from others is not in it, or is that of another one.
    #[error(
        "{} is not the volume {id:016x}, which is kept at this path; is its filesystem mounted on this node? If this is it, its file .weir-volume is to hold that number",
        .path.display()
    )]
    NotTheVolume {
        /// The directory.
        path: PathBuf,
        /// What it should say.
        id: u64,
    },
    /// A disk's path is neither a regular file nor a block device.
    #[error("{} is neither a regular file nor a block device", .0.display())]
    NotABacking(PathBuf),
    /// A disk of that name is there already.
    #[error("disk {name} exists already ({})", .path.display())]
    Exists {
        /// The disk's name.
        name: String,
        /// Its file.
        path: PathBuf,
    },
    /// Nothing is there.
    #[error("{} does not exist", .0.display())]
    NotFound(PathBuf),
    /// A name that could leave the directory, hide in it, or confuse a person.
    #[error("disk name {name:?} {reason}")]
    InvalidName {
        /// The name as given.
        name: String,
        /// The rule that it breaks.
        reason: &'static str,
    },
    /// A size that no disk can have here.
    #[error("{}: a size of {size} bytes {reason}", .path.display())]
    InvalidSize {
        /// The disk's file or device.
        path: PathBuf,
        /// The size, in bytes.
        size: u64,
        /// What is wrong with it, and what would do.
        reason: &'static str,
    },
    /// The storage cannot do I/O in the unit that the disk has.
    #[error(
        "{}: the disk's logical block is {asked} bytes, but the storage takes direct I/O only in units of {able} bytes",
        .path.display()
    )]
    LogicalBlock {
        /// The disk's file or device.
        path: PathBuf,
        /// The unit that the disk record names, in bytes.
        asked: u32,
        /// The unit of the storage, in bytes.
        able: u32,
    },
    /// A block device with a mounted filesystem, or part of LVM or RAID.
    #[error("{} is in use by this host (mounted, or part of LVM or RAID); writing to it would destroy data", .0.display())]
    Busy(PathBuf),
    /// The filesystem is full.
    #[error("no space left on the filesystem of {}", .0.display())]
    NoSpace(PathBuf),
    /// Not allowed, by permissions or because the filesystem is mounted read-only.
    #[error("{what} {} is not allowed: {source}", .path.display())]
    Permission {
        /// What was being done, as in "opening".
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Anything else that the kernel refused.
    #[error("{what} {}: {source}", .path.display())]
    Io {
        /// What was being done, as in "opening".
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl VolumeError {
    /// Sorts a kernel error by who can do something about it. `what` as in "opening".
    pub(crate) fn from_io(what: &'static str, path: &Path, source: io::Error) -> VolumeError {
        let path = path.to_path_buf();
        match source.raw_os_error() {
            Some(libc::ENOENT) => VolumeError::NotFound(path),
            Some(libc::ENOSPC | libc::EDQUOT) => VolumeError::NoSpace(path),
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => VolumeError::Permission { what, path, source },
            _ => VolumeError::Io { what, path, source },
        }
    }
}
