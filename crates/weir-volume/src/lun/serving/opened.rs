//! A disk's file and the LUN, opened for the coordinator: that blocks, so a thread does it.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use weir_block::SharedFile;

use super::file_work::{FileWork, WorkFile};
use crate::backing::{Mark, device_queue};
use crate::lun::filesystem::extent_sizes::prepare_file;
use crate::lun::filesystem::space::Zeroes;
use crate::lun::filesystem::{FilesystemError, Kind, Mounted, open_lun};

/// A disk of a volume that this node coordinates, before it is on a shard.
pub struct OpenedDisk {
    /// For threads.
    pub(super) work: Arc<dyn FileWork>,
    /// For the shard.
    pub(super) file: SharedFile,
    /// This node's own path, for nodes that have none.
    pub(super) lun: SharedFile,
    /// Bytes.
    pub(super) size: u64,
}

impl OpenedDisk {
    /// A disk of `size` bytes: its file, for what blocks and for the shard, and the LUN.
    #[must_use]
    pub fn new(work: Arc<dyn FileWork>, file: SharedFile, lun: SharedFile, size: u64) -> OpenedDisk {
        OpenedDisk { work, file, lun, size }
    }

    /// Opens the file of a disk in the filesystem's root directory, and the LUN. Blocks. `mark`: this process's ([`open_lun`]).
    ///
    /// # Errors
    /// [`FilesystemError`].
    pub fn open(mounted: &Arc<Mounted>, name: &str, mark: Mark) -> Result<OpenedDisk, FilesystemError> {
        let opened = OpenedDisk::open_in(mounted, name, mark);
        if let Err(FilesystemError::System { source, .. }) = &opened {
            // No look here: whoever serves another disk waits for this.
            mounted.suspect(source);
        }
        opened
    }

    fn open_in(mounted: &Arc<Mounted>, name: &str, mark: Mark) -> Result<OpenedDisk, FilesystemError> {
        let file = mounted.open(name)?;
        let path = mounted.lun().join(name);
        let failed = |action| FilesystemError::system(action, &path);
        let is_apart = mounted.superblock().kind == Kind::Xfs && mounted.superblock().reflink;
        let hint = if is_apart { prepare_file(&file, &path)? } else { None };
        if let Some(size) = hint {
            mounted.tell_hint(name, size);
        }
        let found = file.metadata().map_err(failed("examine"))?;
        let (size, grants) = (found.len(), hint.is_none() && mounted.trusts(found.ino()));
        let in_order = mounted.open_without_times(&file).map_err(failed("open"))?;
        let lun = open_lun(mounted.lun(), mounted.superblock().uuid, mounted.identity(), true, Some(mark))?;
        let waits_for_rotation = device_queue::waits_for_rotation(&lun);
        let (zeroes, mounted) = (Zeroes::default(), Arc::clone(mounted));
        let work = WorkFile { file, path, zeroes, mounted, grants: grants.into() };
        let file = SharedFile::on_disk(in_order, waits_for_rotation);
        let lun = SharedFile::on_disk(lun, waits_for_rotation);
        Ok(OpenedDisk::new(Arc::new(work), file, lun, size))
    }
}
