//! Reads what is on a LUN, without mounting it.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::error::FilesystemError;
use super::pages::{PAGE, Pages};
use super::superblock::{Content, READ, parse};
use crate::backing::Mark;
use crate::lun::identity::{are_different, identity_of};

/// Reads what is on an open LUN. `path` is for messages.
///
/// # Errors
/// It cannot be read. Whatever it has is no error.
pub fn content(lun: &File, path: &Path) -> Result<Content, FilesystemError> {
    let mut bytes = vec![0; READ];
    let mut read = 0;
    while read < READ {
        match lun.read_at(&mut bytes[read..], read as u64) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(FilesystemError::system("read", path)(error)),
        }
    }
    Ok(parse(&bytes[..read]))
}

/// Opens the LUN that has a filesystem of this identity for direct I/O, beside its mount. A path may lead to another LUN by now: a host
/// gives the name of a device that is gone to the next one that comes. `identity`: the LUN's own, if it is to be compared, as a copy of it has
/// the same filesystem. Blocks.
///
/// `mark`: that of the process that will write. Its successor on this host is not let at the LUN, and so lifts no fence, before the kernel
/// has ended what the process had issued.
///
/// # Errors
/// [`FilesystemError::System`], [`FilesystemError::OtherLun`], [`FilesystemError::Copy`].
pub fn open_lun(
    path: &Path,
    filesystem: [u8; 16],
    identity: Option<&str>,
    writable: bool,
    mark: Option<Mark>,
) -> Result<File, FilesystemError> {
    let failed = || FilesystemError::system("open", path);
    // Direct I/O would want aligned memory.
    let found = File::open(path).map_err(failed())?;
    match content(&found, path)? {
        Content::Filesystem(superblock) if superblock.uuid == filesystem => {}
        Content::Filesystem(_) | Content::Other => {
            return Err(FilesystemError::OtherLun { path: path.to_path_buf(), filesystem });
        }
    }
    if let Some(identity) = identity {
        check_identity(&found, path, identity)?;
    }
    let flags = libc::O_DIRECT | libc::O_CLOEXEC;
    let same = format!("/proc/self/fd/{}", found.as_raw_fd());
    let opened = OpenOptions::new().read(true).write(writable).custom_flags(flags).open(same);
    let lun = opened.map_err(failed())?;
    // Before any request: a successor that sees no mark assumes that no request is in flight.
    if let Some(mark) = mark {
        mark.set(&lun).map_err(FilesystemError::system("mark", path))?;
    }
    // The first look may have seen no more than what this host has in its buffers of a path that has failed.
    let mut first = Pages::new(PAGE);
    lun.read_exact_at(first.bytes_mut(), 0).map_err(FilesystemError::system("read", path))?;
    Ok(lun)
}

/// Refuses an open LUN that is a copy of the one of this identity.
fn check_identity(lun: &File, path: &Path, identity: &str) -> Result<(), FilesystemError> {
    let found = lun.metadata().map_err(FilesystemError::system("examine", path))?;
    let copy = identity_of(found.rdev()).filter(|other| are_different(identity, other));
    copy.map_or(Ok(()), |identity| Err(FilesystemError::Copy { path: path.to_path_buf(), identity }))
}
