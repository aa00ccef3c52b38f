//! What the kernel says of the queue of a block device.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use rustix::fs::{major, minor};
use weir_block::SharedFile;

/// Shares a block device, or a file on one, on this shard. Does not block on the storage.
pub(crate) fn share(file: File) -> SharedFile {
    if rotates(&file) { SharedFile::rotating(file) } else { SharedFile::new(file) }
}

/// Whether the kernel takes the device for a disk with a mechanism. Of an unknown one it does not.
fn rotates(file: &File) -> bool {
    let Ok(metadata) = file.metadata() else { return false };
    let is_device = metadata.file_type().is_block_device();
    attribute(if is_device { metadata.rdev() } else { metadata.dev() }, "rotational") == Some(1)
}

/// An attribute of a device that is a number.
pub(super) fn attribute(device: u64, name: &str) -> Option<u64> {
    let directory = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    // A partition has no queue; its disk is one directory up.
    let mut places = ["queue", "../queue"].iter().map(|queue| format!("{directory}/{queue}/{name}"));
    places.find_map(|path| fs::read_to_string(path).ok())?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test")]

    use super::*;

    #[test]
    fn what_has_no_device_does_not_rotate() {
        assert!(!rotates(&File::open("/proc/self/status").unwrap()));
        assert!(!rotates(&File::open("/dev/null").unwrap()));
    }
}
