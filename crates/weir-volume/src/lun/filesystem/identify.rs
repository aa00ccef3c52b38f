//! Reads what is on a LUN, without mounting it.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use super::error::FilesystemError;
use super::superblock::{Content, READ, parse};

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
/// gives the name of a device that is gone to the next one that comes. Blocks.
///
/// # Errors
/// [`FilesystemError::System`], [`FilesystemError::OtherLun`].
pub fn open_lun(path: &Path, filesystem: [u8; 16], writable: bool) -> Result<File, FilesystemError> {
    let failed = || FilesystemError::system("open", path);
    // Direct I/O would want aligned memory.
    let found = File::open(path).map_err(failed())?;
    match content(&found, path)? {
        Content::Filesystem(superblock) if superblock.uuid == filesystem => {}
        Content::Filesystem(_) | Content::Other => {
            return Err(FilesystemError::OtherLun { path: path.to_path_buf(), filesystem });
        }
    }
    let flags = libc::O_DIRECT | libc::O_CLOEXEC;
    let same = format!("/proc/self/fd/{}", found.as_raw_fd());
    OpenOptions::new().read(true).write(writable).custom_flags(flags).open(same).map_err(failed())
}
