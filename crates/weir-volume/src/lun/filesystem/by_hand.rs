//! Finds mounts of a LUN that are none of ours. The kernel refuses no second mount of a device on one host: it shares the filesystem. So
//! whoever mounts the LUN by hand reaches all files of the volume, and a defragmenter there moves blocks that other nodes write to.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The mount tables of this process and of the host: a detached mount is in neither.
const TABLES: [&str; 2] = ["/proc/self/mountinfo", "/proc/1/mountinfo"];

/// Where a LUN is mounted, as far as this process sees. A table that cannot be read has nothing.
#[must_use]
pub fn mounts_of(lun: &Path) -> Vec<PathBuf> {
    let Ok(found) = rustix::fs::stat(lun) else { return Vec::new() };
    let device = format!("{}:{}", rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev));
    let tables = TABLES.iter().filter_map(|table| std::fs::read_to_string(table).ok());
    let mut all: Vec<PathBuf> = tables.flat_map(|table| of_device(&table, &device)).collect();
    all.sort();
    all.dedup();
    all
}

/// The mount points of a device (`proc_pid_mountinfo(5)`).
fn of_device(table: &str, device: &str) -> Vec<PathBuf> {
    let point = |line: &str| {
        let fields: Vec<&str> = line.split(' ').collect();
        (fields.get(2) == Some(&device)).then(|| fields.get(4).map(|field| unescaped(field))).flatten()
    };
    table.lines().filter_map(point).collect()
}

/// Spaces and the like are three octal digits behind a backslash.
fn unescaped(field: &str) -> PathBuf {
    let bytes = field.as_bytes();
    let (mut plain, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while let Some(&byte) = bytes.get(at) {
        let digits = (byte == b'\\').then(|| field.get(at + 1..at + 4)).flatten();
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(escaped) => (plain.push(escaped), at += 4),
            None => (plain.push(byte), at += 1),
        };
    }
    PathBuf::from(OsString::from_vec(plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_device_whatever_its_path() {
        let table = "22 1 253:0 / / rw shared:1 - ext4 /dev/vda rw\n\
                     40 22 7:3 / /mnt/my\\040disks rw,relatime shared:9 - xfs /dev/loop3 rw\n\
                     41 22 7:30 / /mnt/b rw - xfs /dev/loop30 rw\n\
                     broken";
        assert_eq!(of_device(table, "7:3"), [Path::new("/mnt/my disks")]);
        assert_eq!(of_device(table, "7:4"), [] as [&Path; 0]);
        assert_eq!(unescaped("a\\9b\\"), Path::new("a\\9b\\"));
    }
}
