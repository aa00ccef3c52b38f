//! A file or device between its opening, which blocks, and its first request.

use std::path::{Path, PathBuf};

use super::options::BackingOptions;
use super::storage::{Storage, StorageKind};
use crate::error::VolumeError;
use crate::volume::DirVolume;

/// Identifies an open file of a volume, to distinguish it from a later file at the same path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    /// The path at which it was opened.
    pub path: PathBuf,
    /// The device of its filesystem.
    pub device: u64,
    /// Its inode.
    pub inode: u64,
}

/// An opened and examined file or block device, before it becomes a [`FileBacking`](super::FileBacking) on its shard. Opening
/// blocks on the storage, so another thread does it.
pub struct OpenedFile {
    pub(super) path: PathBuf,
    pub(super) storage: Storage,
    pub(super) size: u64,
    pub(super) options: BackingOptions,
}

impl OpenedFile {
    /// Opens the file or block device at `path`. Blocks while the storage does not answer, so a shard never calls it. Dropping
    /// closes the file and may block, too.
    ///
    /// # Errors
    /// [`VolumeError::NotFound`], [`VolumeError::NotABacking`], [`VolumeError::Busy`] (a device that this host uses
    /// otherwise), [`VolumeError::InvalidSize`], [`VolumeError::LogicalBlock`], [`VolumeError::Permission`],
    /// [`VolumeError::NotTheVolume`].
    pub fn open(path: &Path, options: &BackingOptions) -> Result<OpenedFile, VolumeError> {
        if let (Some(id), Some(directory)) = (options.volume, path.parent()) {
            DirVolume::open_as(directory, id)?;
        }
        let storage = Storage::open(path, options)?;
        let size = options.size.unwrap_or(storage.length);
        check_size(path, size, storage.logical_block)?;
        check_device(path, size, storage.kind, storage.length)?;
        check_file(path, size, &storage, options)?;
        Ok(OpenedFile { path: path.to_path_buf(), storage, size, options: options.clone() })
    }

    /// The file of a volume that is open; `None` for a device, or for a path outside of volumes.
    #[must_use]
    pub fn file(&self) -> Option<FileIdentity> {
        let is_watchable = self.options.volume.is_some() && self.storage.kind != StorageKind::Device;
        let (device, inode) = self.storage.identity;
        is_watchable.then(|| FileIdentity { path: self.path.clone(), device, inode })
    }
}

pub(super) fn check_device(
    path: &Path,
    size: u64,
    storage_kind: StorageKind,
    length: u64,
) -> Result<(), VolumeError> {
    if storage_kind == StorageKind::Device && size > length {
        let reason = "is larger than the device";
        return Err(VolumeError::InvalidSize { path: path.to_path_buf(), size, reason });
    }
    Ok(())
}

/// A volume's file is made, and lengthened, before the disk's record says its size.
fn check_file(
    path: &Path,
    size: u64,
    storage: &Storage,
    options: &BackingOptions,
) -> Result<(), VolumeError> {
    let is_of_volume = options.volume.is_some() && storage.kind != StorageKind::Device;
    if is_of_volume && storage.length < size {
        let (path, length) = (path.to_path_buf(), storage.length);
        return Err(VolumeError::TooShort { path, length, size });
    }
    Ok(())
}

pub(super) fn check_size(path: &Path, size: u64, logical_block: u32) -> Result<(), VolumeError> {
    let reason = if size == 0 {
        "is not a disk"
    } else if !size.is_multiple_of(u64::from(logical_block)) {
        "is not a multiple of the logical block (512 or 4096); lengthen the file"
    } else {
        return Ok(());
    };
    Err(VolumeError::InvalidSize { path: path.to_path_buf(), size, reason })
}
