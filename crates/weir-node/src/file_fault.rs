//! Whether a file that is open is still the one at its path.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;

use weir_volume::FileIdentity;

/// The fault of a disk's backing file: what is at its path now is nothing, or another file. Waits for the storage.
#[must_use]
pub fn fault(file: &FileIdentity) -> Option<String> {
    let path = file.path.display();
    match std::fs::symlink_metadata(&file.path) {
        Ok(there) if (there.dev(), there.ino()) == (file.device, file.inode) => None,
        Ok(_) => Some(format!(
            "{path} is not its backing file any more, another file is there; what is written is lost when the disk is closed"
        )),
        Err(error) if error.kind() == ErrorKind::NotFound => Some(format!(
            "its backing file {path} was deleted or moved; what is written is lost when the disk is closed"
        )),
        // Nothing is known.
        Err(_) => None,
    }
}
