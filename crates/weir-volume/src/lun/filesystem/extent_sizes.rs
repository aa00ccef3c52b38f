//! How much XFS allocates around a write: its extent-size hints.
//!
//! Around a write to shared blocks it copies as much as the larger one of two hints says, that for copies and that for all extents. It keeps
//! what it has allocated for the neighbours: they look written and unshared, and the next write there moves them (`VOLUME.md` §1). So a
//! disk's file has the smallest hint for copies, and none for its extents.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use super::error::FilesystemError;

/// `_IOR('X', 31, struct fsxattr)`, `_IOW('X', 32, struct fsxattr)` (Linux, `include/uapi/linux/fs.h`).
const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801C_581F_u32 as libc::Ioctl;
const FS_IOC_FSSETXATTR: libc::Ioctl = 0x401C_5820_u32 as libc::Ioctl;
const FS_XFLAG_EXTSIZE: u32 = 0x0000_0800;
const FS_XFLAG_EXTSZINHERIT: u32 = 0x0000_1000;
const FS_XFLAG_COWEXTSIZE: u32 = 0x0001_0000;

/// Bytes that XFS copies around a write to shared blocks. Its default is 128 KiB.
const COPY: u32 = 4096;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copy_extent_size: u32,
    zero: [u8; 8],
}

/// Sets a disk's file up, before it is written to. Returns the hint that it keeps, in bytes, if it has one: the filesystem takes a hint from no
/// file that has extents. Nobody but the filesystem may write to blocks of such a file.
///
/// # Errors
/// The system's.
pub fn prepare_file(file: impl AsFd, path: &Path) -> Result<Option<u32>, FilesystemError> {
    let found = attributes(&file).map_err(FilesystemError::system("read the attributes of", path))?;
    let has_hint = found.flags & FS_XFLAG_EXTSIZE != 0;
    let wanted = Attributes {
        flags: found.flags & !FS_XFLAG_EXTSIZE | FS_XFLAG_COWEXTSIZE,
        extent_size: 0,
        copy_extent_size: COPY,
        ..found
    };
    if has_hint && found.extents > 0 {
        return Ok(Some(found.extent_size));
    }
    if !has_hint && found.copy_extent_size == COPY {
        return Ok(None);
    }
    set(&file, &wanted).map_err(FilesystemError::system("set the extent sizes of", path))?;
    Ok(None)
}

/// New files in a directory get no hint of it. It may have one from the format (`mkfs.xfs -d extszinherit=`), or from an operator.
///
/// # Errors
/// The system's.
pub(super) fn prepare_directory(directory: impl AsFd, path: &Path) -> Result<(), FilesystemError> {
    let failed = |action| FilesystemError::system(action, path);
    let found = attributes(&directory).map_err(failed("read the attributes of the root directory of"))?;
    if found.flags & FS_XFLAG_EXTSZINHERIT == 0 {
        return Ok(());
    }
    let wanted = Attributes { flags: found.flags & !FS_XFLAG_EXTSZINHERIT, extent_size: 0, ..found };
    set(&directory, &wanted).map_err(failed("clear the extent size of the root directory of"))?;
    let size = found.extent_size;
    tracing::warn!(lun = %path.display(), size, "new files would have got an extent-size hint; it is cleared");
    Ok(())
}

fn attributes(of: &impl AsFd) -> io::Result<Attributes> {
    let mut attributes = Attributes::default();
    // SAFETY: the kernel writes one structure.
    match unsafe { libc::ioctl(of.as_fd().as_raw_fd(), FS_IOC_FSGETXATTR, &raw mut attributes) } {
        0 => Ok(attributes),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set(of: &impl AsFd, attributes: &Attributes) -> io::Result<()> {
    // SAFETY: the kernel reads one structure.
    match unsafe { libc::ioctl(of.as_fd().as_raw_fd(), FS_IOC_FSSETXATTR, std::ptr::from_ref(attributes)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
