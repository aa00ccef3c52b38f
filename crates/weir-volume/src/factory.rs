//! The factory of backings: opens any [`BackingKind`] and returns a boxed layer, so that a shard does not know the kinds.
//!
//! Another route to a disk's bytes (a redirected volume, `nbd://`) is another [`BackingKind`] here and another implementation of
//! [`OpenedBacking`] and [`Backing`].

use std::fmt;
use std::path::PathBuf;
use std::thread;

use weir_block::{Destage, OwnerId, Reactor};

use crate::backing::{BackingOptions, FileBacking, FileIdentity, Mark, OpenedFile, Trace};
use crate::error::VolumeError;

/// The lowest layer of a disk. The dynamic dispatch costs one virtual call for each request.
pub trait Backing: Destage {
    /// The owner of its events, which the shard passes to [`Layer::on_event`](weir_block::Layer::on_event).
    fn owner(&self) -> OwnerId;

    /// Sets the disk's size, in bytes. Does not block.
    ///
    /// # Errors
    /// [`VolumeError::InvalidSize`]: not a multiple of the logical block, or more than the storage has; the size is then
    /// unchanged.
    fn resize(&mut self, size: u64) -> Result<(), VolumeError>;
}

/// A backing opened by a thread, for use by a shard.
pub trait OpenedBacking: Send {
    /// Moves it to the shard of `reactor`. Does not block.
    ///
    /// # Errors
    /// As for the kind; [`FileBacking::new`], for example.
    fn attach(self: Box<Self>, reactor: &mut Reactor) -> Result<Box<dyn Backing>, VolumeError>;

    /// Closes it without blocking the caller.
    fn discard(self: Box<Self>);

    /// The file of a volume that it has open, if it has one.
    fn file(&self) -> Option<FileIdentity> {
        None
    }
}

/// The storage of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackingKind {
    /// A raw file, or a block device, of this machine.
    Path(PathBuf),
}

impl BackingKind {
    /// Opens it. Blocks on the storage, so a shard never calls it.
    ///
    /// # Errors
    /// As for the kind; [`OpenedFile::open`], for example.
    pub fn open(&self, options: &BackingOptions) -> Result<Box<dyn OpenedBacking>, VolumeError> {
        match self {
            BackingKind::Path(path) => Ok(Box::new(OpenedFile::open(path, options)?)),
        }
    }

    /// Whether I/O of an ended process of this machine is still in flight. Blocks on the storage.
    ///
    /// # Errors
    /// It cannot be opened or examined.
    pub fn probe(&self, mark: Mark) -> Result<Trace, VolumeError> {
        match self {
            BackingKind::Path(path) => mark.probe(path),
        }
    }
}

impl fmt::Display for BackingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackingKind::Path(path) => path.display().fmt(f),
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
}

impl<B: Backing + ?Sized> Backing for Box<B> {
    fn owner(&self) -> OwnerId {
        (**self).owner()
    }

    fn resize(&mut self, size: u64) -> Result<(), VolumeError> {
        (**self).resize(size)
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
