//! Errors of a volume or a backing as a whole, as opposed to one request.

use std::io;
use std::path::{Path, PathBuf};

use weir_nbd::client::NbdError;

/// Whether a filesystem reports corrupted metadata (`EFSCORRUPTED` of ext4 and XFS) or a wrong checksum (ext4's `EFSBADCRC`).
pub(crate) fn is_damage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EUCLEAN | libc::EBADMSG))
}

/// The reason why a volume or a disk cannot be opened, created, changed or deleted.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The path of a `dir` volume is not a directory.
    #[error("{} is not a directory; a `dir` volume needs one", .0.display())]
    NotADirectory(PathBuf),
    /// Only the coordinator of a volume on a LUN reaches its files.
    #[error(
        "this node does not coordinate volume {0}, and only its coordinator makes, measures and deletes disks in it"
    )]
    NotCoordinator(String),
    /// Each disk of a volume that is an NBD server is an export there.
    #[error(
        "volume {0} is an NBD server: its disks are exports there and have no files, so there are no snapshots, clones or compactions of \
         them here; whatever serves them may have its own"
    )]
    NoFiles(String),
    /// The directory exists, but its identity file is missing or belongs to another volume.
    #[error(
        "{} is not volume {id:016x}, which is registered at this path; check that its filesystem is mounted on this node. If this is the volume, write that number into its file .weir-volume",
        .path.display()
    )]
    NotTheVolume {
        /// The directory.
        path: PathBuf,
        /// The expected identity.
        id: u64,
    },
    /// A volume's identity file without an identity.
    #[error(
        "{} is not the mark of a volume, which has 16 hexadecimal digits; restore it, or remove it if no volume is registered there",
        .0.display()
    )]
    NotAMark(PathBuf),
    /// A directory that belongs to the system, or a path that leads elsewhere.
    #[error("{} cannot be a volume: {reason}", .path.display())]
    Unsuitable {
        /// The path as given.
        path: PathBuf,
        /// The reason why it is unsuitable.
        reason: String,
    },
    /// A directory that is already a volume, perhaps under another path.
    #[error("{} is the directory of volume {volume} ({})", .path.display(), .other.display())]
    SameDirectory {
        /// The path as given.
        path: PathBuf,
        /// The volume that has it.
        volume: String,
        /// That volume's path.
        other: PathBuf,
    },
    /// A disk's path is neither a regular file nor a block device.
    #[error("{} is neither a regular file nor a block device", .0.display())]
    NotABacking(PathBuf),
    /// A disk's file lacks its end.
    #[error(
        "{} has {length} bytes, and its disk has {size}: the file was truncated or replaced; put the disk's own file back",
        .path.display()
    )]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        length: u64,
        /// The disk's size in bytes.
        size: u64,
    },
    /// A disk of that name already exists.
    #[error("disk {name} already exists ({})", .path.display())]
    Exists {
        /// The disk's name.
        name: String,
        /// Its file.
        path: PathBuf,
    },
    /// The path does not exist.
    #[error("{} does not exist", .0.display())]
    NotFound(PathBuf),
    /// A name that could leave the directory, be hidden, or mislead.
    #[error("disk name {name:?} {reason}")]
    InvalidName {
        /// The name as given.
        name: String,
        /// The violated rule.
        reason: &'static str,
    },
    /// An invalid size.
    #[error("{}: a size of {size} bytes {reason}", .path.display())]
    InvalidSize {
        /// The disk's file or device.
        path: PathBuf,
        /// The size, in bytes.
        size: u64,
        /// The violated rule, and a remedy.
        reason: &'static str,
    },
    /// The storage cannot do I/O in the disk's logical block.
    #[error(
        "{}: the disk's logical block is {asked} bytes, but the storage supports direct I/O only in units of {able} bytes",
        .path.display()
    )]
    LogicalBlock {
        /// The disk's file or device.
        path: PathBuf,
        /// The disk record's unit, in bytes.
        asked: u32,
        /// The storage's unit, in bytes.
        able: u32,
    },
    /// A block device with a mounted filesystem, or part of LVM or RAID.
    #[error("{} is in use by this host (mounted, or part of LVM or RAID); writing to it would destroy data", .0.display())]
    Busy(PathBuf),
    /// Files of snapshots without their disk.
    #[error(
        "snapshots of an earlier disk {disk} are left, {disk}@{snapshot} for one; move or remove their files first"
    )]
    SnapshotsLeft {
        /// The disk.
        disk: String,
        /// One of them.
        snapshot: String,
    },
    /// Snapshots and clones share blocks with their disk, which the filesystem cannot.
    #[error(
        "the filesystem of {} has no reflinks, which snapshots and clones need; XFS and btrfs have them. `weir disk clone --copy` copies a disk that nobody uses",
        .0.display()
    )]
    NoReflinks(PathBuf),
    /// Thick disks need space that the filesystem allocates before anything is written.
    #[error(
        "the filesystem of {} allocates no space ahead (fallocate), which a thick disk needs; ext4, XFS and btrfs do. Make it thin",
        .0.display()
    )]
    NoThickDisks(PathBuf),
    /// The filesystem is full.
    #[error("no space left on the filesystem of {}", .0.display())]
    NoSpace(PathBuf),
    /// A copy of a disk's file was not ended, because this node stops, or does not coordinate the disk's volume any more.
    #[error("copying {} was stopped: this node stops, or does not coordinate its volume any more", .0.display())]
    Stopped(PathBuf),
    /// The filesystem of a LUN has shut down on its coordinator, which may be fenced, or does not reach the LUN any more.
    #[error(
        "{what} {}: {source}; the volume's filesystem has failed on this node, which gives the volume back if that \
         lasts",
        .path.display()
    )]
    FilesystemFailed {
        /// The operation, as in "opening".
        what: &'static str,
        /// The file or device.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The NBD server that a volume or a disk is on.
    #[error(transparent)]
    Nbd(#[from] NbdTrouble),
    /// Not allowed, by permissions or because the filesystem is mounted read-only.
    #[error("{what} {} is not allowed: {source}", .path.display())]
    Permission {
        /// The operation, as in "opening".
        what: &'static str,
        /// The file or device.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Any other kernel error.
    #[error("{what} {}: {source}", .path.display())]
    Io {
        /// The operation, as in "opening".
        what: &'static str,
        /// The file or device.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

impl VolumeError {
    /// The filesystem has found damage on its storage.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        matches!(self, VolumeError::Io { source, .. } if is_damage(source))
    }

    /// Classifies a kernel error by the party that can act on it. `what` as in "opening".
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

/// Why a disk cannot be on an export.
#[derive(Debug, thiserror::Error)]
pub enum NbdTrouble {
    /// The server, or its connection.
    #[error(transparent)]
    Server(#[from] NbdError),
    /// The server would take any name for the same bytes.
    #[error("{server} does not list an export `{export}`; it lists {listed}")]
    Unlisted {
        /// The server.
        server: String,
        /// The export.
        export: String,
        /// What it lists, in words.
        listed: String,
    },
    /// What the export is, or lacks.
    #[error("the export `{export}` of {server} {reason}")]
    Unfit {
        /// The server.
        server: String,
        /// The export.
        export: String,
        /// The reason.
        reason: String,
    },
}

impl NbdTrouble {
    /// The server answers, and what it says of the export is why the disk cannot be there.
    pub(crate) fn is_about_export(&self) -> bool {
        match self {
            NbdTrouble::Server(error) => matches!(error, NbdError::Refused { is_unknown: true, .. }),
            NbdTrouble::Unlisted { .. } | NbdTrouble::Unfit { .. } => true,
        }
    }
}
