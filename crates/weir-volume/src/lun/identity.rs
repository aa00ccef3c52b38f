//! By which a LUN is known on every host, whatever its path is.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Begin of the identity of a device that has none.
const BY_SIZE: &str = "size-";

/// By which the LUN at a path is known on every host, if it has a WWN, a serial number, or the like. Does not open it.
#[must_use]
pub fn identity_at(path: &Path) -> Option<String> {
    let metadata = std::fs::metadata(path).ok().filter(|found| found.file_type().is_block_device())?;
    identity_of(metadata.rdev())
}

/// As [`identity_at`], of a device by its number.
#[must_use]
pub fn identity_of(device: u64) -> Option<String> {
    Some(identity(device, 0)).filter(|identity| !identity.starts_with(BY_SIZE))
}

/// By which a device is known on every host: its WWN, its serial number; of a loop device, its file. A device that has none of these is
/// known by its size, which is better than nothing.
#[must_use]
pub fn identity(device: u64, size: u64) -> String {
    let base = PathBuf::from(format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device)));
    let read = |name: &str| -> io::Result<String> {
        Ok(std::fs::read_to_string(base.join(name))?.split_whitespace().collect::<Vec<_>>().join("-"))
    };
    let known = ["wwid", "device/wwid", "serial", "device/serial", "dm/uuid"];
    let part = |name: &str| read(name).ok();
    if let Some(number) = part("partition") {
        let whole = known.iter().find_map(|name| part(&format!("../{name}")).filter(|text| !text.is_empty()));
        return format!("{}-part{number}", whole.unwrap_or_else(|| format!("{BY_SIZE}{size}")));
    }
    if let Some(found) = known.iter().find_map(|name| part(name).filter(|text| !text.is_empty())) {
        return found;
    }
    let backing = std::fs::read_to_string(base.join("loop/backing_file")).ok();
    match backing.and_then(|path| std::fs::metadata(path.trim_end()).ok()) {
        Some(file) => format!("file-{:x}-{}", file.dev(), file.ino()),
        None => format!("{BY_SIZE}{size}"),
    }
}
