//! A disk's file and the LUN, opened for the coordinator: that blocks, so a thread does it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use weir_block::SharedFile;

use super::file_work::{FileWork, WorkFile};
use crate::backing::{Mark, device_queue};
use crate::lun::filesystem::space::Zeroes;
use crate::lun::filesystem::{FilesystemError, Kind, Mounted, open_lun};

/// `_IOR('X', 31, struct fsxattr)`, `_IOW('X', 32, struct fsxattr)` (Linux, `include/uapi/linux/fs.h`).
const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801C_581F_u32 as libc::Ioctl;
const FS_IOC_FSSETXATTR: libc::Ioctl = 0x401C_5820_u32 as libc::Ioctl;
const FS_XFLAG_COWEXTSIZE: u32 = 0x0001_0000;

/// Bytes that XFS copies around a write to shared blocks. With its default of 128 KiB it keeps what it has allocated for the neighbours: they
/// look written and unshared, and the next write there moves them (`VOLUME.md` §1).
const COPY: u32 = 4096;

#[repr(C)]
#[derive(Default)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copy_extent_size: u32,
    zero: [u8; 8],
}

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
        let file = mounted.open(name)?;
        let path = mounted.lun().join(name);
        let failed = |action| FilesystemError::system(action, &path);
        if mounted.superblock().kind == Kind::Xfs && mounted.superblock().reflink {
            set_copy_size(&file).map_err(failed("set the copy-on-write size of"))?;
        }
        let size = file.metadata().map_err(failed("examine"))?.len();
        let in_order = mounted.open_without_times(&file).map_err(failed("open"))?;
        let lun = open_lun(mounted.lun(), mounted.superblock().uuid, true, Some(mark))?;
        let waits_for_rotation = device_queue::waits_for_rotation(&lun);
        let work = WorkFile { file, path, zeroes: Zeroes::default(), mounted: Arc::clone(mounted) };
        let file = SharedFile::on_disk(in_order, waits_for_rotation);
        let lun = SharedFile::on_disk(lun, waits_for_rotation);
        Ok(OpenedDisk::new(Arc::new(work), file, lun, size))
    }
}

fn set_copy_size(file: &File) -> io::Result<()> {
    let mut attributes = Attributes::default();
    // SAFETY: the kernel writes one structure.
    if unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FSGETXATTR, &raw mut attributes) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if attributes.copy_extent_size == COPY {
        return Ok(());
    }
    attributes.flags |= FS_XFLAG_COWEXTSIZE;
    attributes.copy_extent_size = COPY;
    // SAFETY: the kernel reads one structure.
    match unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FSSETXATTR, &raw const attributes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
