//! The disks of a volume as files: in a directory ([`DirVolume`]), or on the filesystem of a LUN that this node coordinates
//! ([`LunVolume`]).

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::VolumeError;
use crate::lun::filesystem::{FilesystemError, Mounted};
use crate::volume::{DirVolume, check_size};

/// Makes, measures and removes the files of disks. Everything blocks.
pub trait DiskFiles {
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

    /// Removes a disk that was made and never written. A file with data stays, and a missing one is no error.
    ///
    /// # Errors
    /// As [`DiskFiles::delete_if_there`].
    fn delete_unwritten(&self, name: &str) -> Result<(), VolumeError> {
        match self.allocated(name) {
            Ok(0) => self.delete_if_there(name),
            Ok(_) | Err(VolumeError::NotFound(_) | VolumeError::NotABacking(_)) => Ok(()),
            Err(error) => Err(error),
        }
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

    fn delete_if_there(&self, name: &str) -> Result<(), VolumeError> {
        DirVolume::delete_if_there(self, name)
    }

    fn allocated(&self, name: &str) -> Result<u64, VolumeError> {
        DirVolume::allocated(self, name)
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
}

fn as_volume_error(what: &'static str, path: PathBuf, error: FilesystemError) -> VolumeError {
    match error {
        FilesystemError::System { source, .. } => VolumeError::from_io(what, &path, source),
        other => VolumeError::Io { what, path, source: io::Error::other(other) },
    }
}
