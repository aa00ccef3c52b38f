//! By which a LUN is known on every host, whatever its path is.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Begin of the identity of a device that has none.
const BY_SIZE: &str = "size-";
/// Begin of the identity of a loop device.
const BY_FILE: &str = "file-";
/// Begin of the identity of a device of dm-crypt, which ends with the name that the host has given it.
const BY_CRYPT: &str = "CRYPT-";
/// Begin of the identity of a multipath device.
const BY_MULTIPATH: &str = "mpath-";

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

/// The paths of this host to the LUN of an identity, among `devices`, or among all of its devices. A loop device's file, whose storage may
/// hang, is looked at only for a LUN that is a loop device itself.
#[must_use]
pub fn paths_of(identity: &str, devices: &[PathBuf]) -> Vec<PathBuf> {
    let all = if devices.is_empty() { block_devices() } else { devices.to_vec() };
    let has_it = |path: &PathBuf| {
        let found = std::fs::metadata(path).ok().filter(|found| found.file_type().is_block_device());
        let Some(device) = found.map(|found| found.rdev()) else { return false };
        let own = match identity.starts_with(BY_FILE) {
            true => identity_of(device),
            false => by_attributes(device),
        };
        own.as_deref() == Some(identity)
    };
    all.into_iter().filter(has_it).collect()
}

/// All block devices of this host, partitions among them.
#[must_use]
pub fn block_devices() -> Vec<PathBuf> {
    let Ok(devices) = std::fs::read_dir("/sys/class/block") else { return Vec::new() };
    let mut all: Vec<PathBuf> = devices
        .flatten()
        .map(|device| Path::new("/dev").join(device.file_name().to_string_lossy().replace('!', "/")))
        .collect();
    all.sort();
    all
}

/// Whether a device is a part of another one, as a path is of a multipath device.
#[must_use]
pub fn is_held(path: &Path) -> bool {
    let holders = std::fs::metadata(path).and_then(|found| base(found.rdev()).join("holders").read_dir());
    holders.is_ok_and(|mut holders| holders.next().is_some())
}

/// Whether a device is the LUN of this identity by any path, or a part of it, or a larger one that it is a part of. What is on a logical
/// volume is not seen.
#[must_use]
pub fn overlaps(identity: &str, device: u64) -> bool {
    // The storage of a loop device's file may hang: only a LUN that is a loop device itself is compared by files.
    let other = match identity.starts_with(BY_FILE) {
        true => self::identity(device, 0),
        false => by_attributes(device).unwrap_or_default(),
    };
    overlap(identity, &other)
}

/// Whether two identities are of one LUN, of a part of it, or of a larger one that it is a part of.
#[must_use]
pub fn overlap(one: &str, other: &str) -> bool {
    if one.is_empty() || other.is_empty() || one.starts_with(BY_SIZE) || other.starts_with(BY_SIZE) {
        return false;
    }
    let ((one, its_part), (other, other_part)) = (whole(one), whole(other));
    one == other && (its_part.is_none() || other_part.is_none() || its_part == other_part)
}

/// Whether two identities are those of two LUNs: what one has may be a copy of what the other has, made by the storage. Only a LUN's own
/// names tell: a host numbers files, sizes repeat, and a device of dm-crypt may have another name on each host. Nor do words of multipath
/// tell whose counterpart at a path is not known.
#[must_use]
pub fn are_different(one: &str, other: &str) -> bool {
    let tells = |identity: &str| {
        let of_host = [BY_SIZE, BY_FILE, BY_CRYPT].iter().any(|begin| identity.starts_with(begin));
        !identity.is_empty() && !of_host
    };
    let of_multipath = |identity: &str| whole(identity).0.starts_with(BY_MULTIPATH);
    tells(one) && tells(other) && of_multipath(one) == of_multipath(other) && !overlap(one, other)
}

/// The whole device that a LUN is, or is a part of, in the same words for each of its paths.
#[must_use]
pub fn device_of(identity: &str) -> String {
    whole(identity).0
}

/// The whole device of an identity, and the number of the partition, in the same words for a path and for the multipath device over it.
fn whole(identity: &str) -> (String, Option<&str>) {
    let (identity, part) = match identity.strip_prefix("part").and_then(|rest| rest.split_once("-mpath-")) {
        Some((part, rest)) => (format!("{BY_MULTIPATH}{rest}"), Some(part)),
        None => match identity.rsplit_once("-part") {
            Some((whole, part)) if part.bytes().all(|byte| byte.is_ascii_digit()) => {
                (whole.to_owned(), Some(part))
            }
            _ => (identity.to_owned(), None),
        },
    };
    (without_multipath(&identity).unwrap_or(identity), part)
}

/// A path's words for what multipath has a name for: 3 and 2 stand for NAA and EUI-64 of SCSI (`scsi_id`), and NVMe's names are whole.
fn without_multipath(identity: &str) -> Option<String> {
    let name = identity.strip_prefix(BY_MULTIPATH)?;
    if name.starts_with("eui.") || name.starts_with("uuid.") || name.starts_with("nvme.") {
        return Some(name.to_owned());
    }
    let naa = name.strip_prefix('3').map(|number| format!("naa.{number}"));
    naa.or_else(|| name.strip_prefix('2').map(|number| format!("eui.{number}")))
}

/// By which a device is known on every host: its WWN, its serial number; of a loop device, its file. A device that has none of these is
/// known by its size, which is better than nothing.
#[must_use]
pub fn identity(device: u64, size: u64) -> String {
    by_attributes(device).or_else(|| by_file(device)).unwrap_or_else(|| {
        let part = partition(device).map_or_else(String::new, |number| format!("-part{number}"));
        format!("{BY_SIZE}{size}{part}")
    })
}

/// Its number, of a partition.
fn partition(device: u64) -> Option<String> {
    let number = std::fs::read_to_string(base(device).join("partition")).ok()?;
    Some(number.trim().to_owned())
}

fn base(device: u64) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device)))
}

fn by_attributes(device: u64) -> Option<String> {
    let read = |name: &str| {
        let text = std::fs::read_to_string(base(device).join(name)).ok()?;
        Some(text.split_whitespace().collect::<Vec<_>>().join("-")).filter(|text| !text.is_empty())
    };
    let known = ["wwid", "device/wwid", "serial", "device/serial", "dm/uuid"];
    let found = |at: &str| known.iter().find_map(|name| read(&format!("{at}{name}")));
    match partition(device) {
        Some(number) => Some(format!("{}-part{number}", found("../")?)),
        None => found(""),
    }
}

/// A loop device's file, and the part of it.
fn by_file(device: u64) -> Option<String> {
    let attribute = |name: &str| std::fs::read_to_string(base(device).join("loop").join(name)).ok();
    let file = std::fs::metadata(attribute("backing_file")?.trim_end()).ok()?;
    let number = |name: &str| attribute(name).and_then(|text| text.trim().parse().ok()).unwrap_or(0u64);
    let (offset, limit) = (number("offset"), number("sizelimit"));
    let place = if (offset, limit) == (0, 0) { String::new() } else { format!("-{offset}-{limit}") };
    Some(format!("{BY_FILE}{:x}-{}{place}", file.dev(), file.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lun_is_known_by_its_paths_and_its_parts() {
        let lun = "naa.600508b400105e21";
        let same = [
            (lun, lun),
            (lun, "naa.600508b400105e21-part1"),
            ("naa.600508b400105e21-part1", lun),
            (lun, "mpath-3600508b400105e21"),
            (lun, "part2-mpath-3600508b400105e21"),
            ("file-fe00-12", "file-fe00-12"),
            ("eui.0025385b71b00001", "mpath-eui.0025385b71b00001"),
            ("eui.0025385b71b00001", "mpath-20025385b71b00001"),
            ("uuid.6ba7b810-9dad", "part1-mpath-uuid.6ba7b810-9dad"),
        ];
        let others = [
            ("naa.600508b400105e21-part1", "naa.600508b400105e21-part2"),
            (lun, "naa.600508b400105e22"),
            ("file-fe00-12", "file-fe00-12-1048576-0"),
            ("size-1000", "size-1000"),
            (lun, ""),
            ("", ""),
        ];
        for (one, other) in same {
            assert!(overlap(one, other) && overlap(other, one), "{one} {other}");
            assert_eq!(device_of(one), device_of(other));
        }
        for (one, other) in others {
            assert!(!overlap(one, other) && !overlap(other, one), "{one} {other}");
        }
    }

    #[test]
    fn only_a_luns_own_names_tell_that_it_is_another_one() {
        let lun = "naa.600508b400105e21";
        let copies = [
            (lun, "naa.600508b400105e22"),
            (lun, "mpath-3600508b400105e22"),
            (lun, "naa.600508b400105e22-part1"),
            ("mpath-3600508b400105e21", "part1-mpath-3600508b400105e22"),
            ("naa.600508b400105e21-part1", "naa.600508b400105e21-part2"),
            ("eui.0025385b71b00001", "uuid.6ba7b810-9dad"),
            ("LVM-abc", "LVM-abd"),
            ("mpath-1VENDOR_disk_1", "mpath-1VENDOR_disk_2"),
        ];
        let unknown = [
            (lun, "size-1000"),
            ("size-1000-part1", lun),
            (lun, "file-fe00-12"),
            ("file-fe00-12", "file-fe00-13"),
            (lun, ""),
            ("", ""),
            ("CRYPT-LUKS2-6ba7b810-a", "CRYPT-LUKS2-6ba7b810-b"),
            ("t10.VENDOR-disk-1", "mpath-1VENDOR_disk_1"),
            (lun, lun),
            (lun, "mpath-3600508b400105e21"),
            (lun, "part1-mpath-3600508b400105e21"),
        ];
        for (pairs, expected) in [(&copies[..], true), (&unknown[..], false)] {
            for (one, other) in pairs {
                assert_eq!(are_different(one, other), expected, "{one} {other}");
                assert_eq!(are_different(other, one), expected, "{other} {one}");
            }
        }
    }
}
