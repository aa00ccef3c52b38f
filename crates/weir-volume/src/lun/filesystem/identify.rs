//! Reads what is on a LUN, without mounting it.

use std::fs::File;
use std::os::unix::fs::FileExt;
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
