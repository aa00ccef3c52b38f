//! The factory of backings: opens any [`BackingKind`] and returns a boxed layer, so that a shard does not know the kinds.
//!
//! Another route to a disk's bytes is another [`BackingKind`] here and another implementation of [`OpenedBacking`] and
//! [`Backing`].

use std::fmt;
use std::path::{Path, PathBuf};
use std::thread;

use weir_block::{Nanos, OwnerId, Reactor, SharedFile};
use weir_nbd::Uri;

use crate::backing::{BackingOptions, FileBacking, FileIdentity, Mark, OpenedFile, Trace, device_queue};
use crate::error::VolumeError;
use crate::interface::{Backing, OpenedBacking};
use crate::lun::filesystem::{FilesystemError, open_lun};
use crate::nbd::{NbdOptions, OpenedNbd};
use crate::routed::{RoutedBacking, RoutedOptions};

/// The storage of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackingKind {
    /// A raw file, or a block device, of this machine.
    Path(PathBuf),
    /// A disk of a volume on a LUN.
    Lun {
        /// The volume.
        volume: String,
        /// The disk's file, on the volume's filesystem.
        file: String,
        /// This node's path to the LUN, if it has one.
        lun: Option<PathBuf>,
        /// The identity of the LUN's filesystem.
        filesystem: [u8; 16],
        /// The LUN's own.
        identity: String,
    },
    /// An export of an NBD server.
    Nbd {
        /// The server; the export of the URI is not used.
        server: Uri,
        /// The export.
        export: String,
    },
}

/// A disk of a volume on a LUN, before it is on its shard.
struct OpenedLun {
    name: PathBuf,
    lun: Option<SharedFile>,
    options: RoutedOptions,
}

impl BackingKind {
    /// Opens it. Blocks on the storage, so a shard never calls it.
    ///
    /// # Errors
    /// As for the kind; [`OpenedFile::open`], for example.
    pub fn open(&self, options: &BackingOptions) -> Result<Box<dyn OpenedBacking>, VolumeError> {
        match self {
            BackingKind::Path(path) => Ok(Box::new(OpenedFile::open(path, options)?)),
            BackingKind::Nbd { server, export } => {
                let options = NbdOptions {
                    server: server.clone(),
                    export: export.clone(),
                    size: options.size.unwrap_or(0),
                    logical_block: options.logical_block.unwrap_or(4096),
                    depth: options.depth,
                    server_wait: options.server_wait,
                    fence_grace: options.fence_grace,
                };
                Ok(Box::new(OpenedNbd::open(options)?))
            }
            BackingKind::Lun { volume, file, lun, filesystem, identity } => {
                let name = Path::new(volume).join(file);
                // A path that cannot be opened is none: the coordinator does the I/O.
                let lun = lun.as_ref().and_then(|path| {
                    let BackingOptions { writable, mark, .. } = *options;
                    let opened = BackingKind::open_path(path, *filesystem, identity, writable, mark);
                    opened.map_err(|error| tracing::warn!(%error, "no direct I/O to a volume's LUN")).ok()
                });
                let size = options.size.unwrap_or(0);
                let logical_block = options.logical_block.unwrap_or(4096);
                let BackingOptions { depth, coordinator_wait, full_volume_wait, .. } = *options;
                let options =
                    RoutedOptions { size, logical_block, depth, coordinator_wait, full_volume_wait };
                Ok(Box::new(OpenedLun { name, lun, options }))
            }
        }
    }

    /// Opens a path to the LUN of this identity that has a filesystem of that identity, for direct I/O. Blocks. `mark`: this process's.
    ///
    /// # Errors
    /// It cannot be opened, or leads to another LUN.
    pub fn open_path(
        path: &Path,
        filesystem: [u8; 16],
        identity: &str,
        writable: bool,
        mark: Option<Mark>,
    ) -> Result<SharedFile, FilesystemError> {
        let lun = open_lun(path, filesystem, Some(identity), writable, mark)?;
        let waits_for_rotation = device_queue::waits_for_rotation(&lun);
        Ok(SharedFile::on_disk(lun, waits_for_rotation))
    }

    /// Whether I/O of an ended process of this machine is still in flight. Blocks on the storage.
    ///
    /// # Errors
    /// It cannot be opened or examined.
    pub fn probe(&self, mark: Mark) -> Result<Trace, VolumeError> {
        match self {
            BackingKind::Path(path) => mark.probe(path),
            // Each node may have a device of its own for one LUN, even on one machine.
            BackingKind::Lun { .. } => Ok(Trace::Unknown),
            // What a process has sent is at the server.
            BackingKind::Nbd { .. } => Ok(Trace::Unknown),
        }
    }
}

impl fmt::Display for BackingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackingKind::Path(path) => path.display().fmt(f),
            BackingKind::Lun { volume, file, .. } => write!(f, "{file} in volume {volume}"),
            BackingKind::Nbd { server, export } => write!(f, "the export `{export}` of {}", server.address),
        }
    }
}

impl Backing for FileBacking {
    fn owner(&self) -> OwnerId {
        FileBacking::owner(self)
    }

    fn resize(&mut self, size: u64) -> Result<(), VolumeError> {
        FileBacking::resize(self, size)
    }

    fn lacks_space(&self, now: Nanos) -> bool {
        FileBacking::lacks_space(self, now)
    }

    fn stop_waiting(&mut self) {
        FileBacking::stop_waiting(self);
    }
}

impl OpenedBacking for OpenedFile {
    fn attach(self: Box<Self>, reactor: &mut Reactor) -> Result<Box<dyn Backing>, VolumeError> {
        Ok(Box::new(FileBacking::new(reactor, *self)?))
    }

    fn discard(self: Box<Self>) {
        // If the thread cannot start, the closure is dropped here and closes the file.
        let _ = thread::Builder::new().name("weir-close".into()).spawn(move || drop(self));
    }

    fn file(&self) -> Option<FileIdentity> {
        OpenedFile::file(self)
    }
}

impl OpenedBacking for OpenedLun {
    fn attach(self: Box<Self>, reactor: &mut Reactor) -> Result<Box<dyn Backing>, VolumeError> {
        let OpenedLun { name, lun, options } = *self;
        let routed = RoutedBacking::new(reactor, lun, options);
        Ok(Box::new(routed.map_err(|error| VolumeError::from_io("opening", &name, error))?))
    }

    fn discard(self: Box<Self>) {
        // As above.
        let _ = thread::Builder::new().name("weir-close".into()).spawn(move || drop(self));
    }
}
