//! Attributes of a block device's queue (sysfs).

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use rustix::fs::{major, minor};

/// Whether a block device, or that of a file, has a mechanism and no write cache, as far as the kernel knows. May block while the kernel
/// changes the device's settings.
pub(crate) fn waits_for_rotation(file: &File) -> bool {
    let Ok(metadata) = file.metadata() else { return false };
    let device = if metadata.file_type().is_block_device() { metadata.rdev() } else { metadata.dev() };
    let is = |name, value: &str| attribute(device, name).is_some_and(|found| found == value);
    is("rotational", "1") && is("write_cache", "write through")
}

/// An attribute of a device.
pub(super) fn attribute(device: u64, name: &str) -> Option<String> {
    let directory = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    // A partition has no queue; its disk is one directory up.
    let mut places = ["queue", "../queue"].iter().map(|queue| format!("{directory}/{queue}/{name}"));
    Some(places.find_map(|path| fs::read_to_string(path).ok())?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test")]

    use super::*;

    #[test]
    fn what_has_no_device_waits_for_none() {
        assert!(!waits_for_rotation(&File::open("/proc/self/status").unwrap()));
        assert!(!waits_for_rotation(&File::open("/dev/null").unwrap()));
    }
}
