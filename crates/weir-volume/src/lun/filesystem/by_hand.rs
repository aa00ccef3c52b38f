//! Finds mounts of a LUN that are none of ours. The kernel refuses no second mount of a device on one host: it shares the filesystem. So
//! whoever mounts the LUN by hand reaches all files of the volume, and a defragmenter there moves blocks that other nodes write to.

use std::path::{Path, PathBuf};

use weir_block::mounts::mounts;

use crate::lun::identity::{identity_of, overlaps};

/// The mount tables of this process and of the host: a detached mount is in neither.
const TABLES: [&str; 2] = ["/proc/self/mountinfo", "/proc/1/mountinfo"];

/// Where a LUN is mounted, by this path or another one that this host has to it, as far as this process sees. A table that cannot be read
/// has nothing.
#[must_use]
pub fn mounts_of(lun: &Path) -> Vec<PathBuf> {
    find(lun, true)
}

/// As [`mounts_of`], by another path of this host to it alone: this host's kernel does not know that both lead to one LUN.
#[must_use]
pub fn mounts_by_other_paths(lun: &Path) -> Vec<PathBuf> {
    find(lun, false)
}

fn find(lun: &Path, by_this_path: bool) -> Vec<PathBuf> {
    let Ok(found) = rustix::fs::stat(lun) else { return Vec::new() };
    let own = found.st_rdev;
    let identity = identity_of(own).unwrap_or_default();
    let is_it = |device: u64| if device == own { by_this_path } else { overlaps(&identity, device) };
    let tables = TABLES.iter().filter_map(|table| std::fs::read(table).ok());
    let mut all: Vec<PathBuf> = tables.flat_map(|table| of_device(&table, is_it)).collect();
    all.sort();
    all.dedup();
    all
}

/// The mount points of a device.
fn of_device(table: &[u8], is_it: impl Fn(u64) -> bool) -> Vec<PathBuf> {
    let mounts = mounts(table).filter(|mount| number(&mount.device).is_some_and(&is_it));
    mounts.map(|mount| mount.point).collect()
}

/// `MAJOR:MINOR` as a number. Filesystems without a device have a major number of 0.
fn number(device: &[u8]) -> Option<u64> {
    let (major, minor) = std::str::from_utf8(device).ok()?.split_once(':')?;
    let (major, minor) = (major.parse().ok()?, minor.parse().ok()?);
    (major != 0).then(|| rustix::fs::makedev(major, minor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_device_whatever_its_path() {
        let table = b"22 1 253:0 / / rw shared:1 - ext4 /dev/vda rw\n\
                     40 22 7:3 / /mnt/my\\040disks rw,relatime shared:9 - xfs /dev/loop3 rw\n\
                     41 22 7:30 / /mnt/b rw - xfs /dev/loop30 rw\n\
                     broken";
        let of = |major, minor| of_device(table, |device| device == rustix::fs::makedev(major, minor));
        assert_eq!(of(7, 3), [Path::new("/mnt/my disks")]);
        assert_eq!(of(7, 4), [] as [&Path; 0]);
    }
}
