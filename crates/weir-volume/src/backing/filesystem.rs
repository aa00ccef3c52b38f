//! The filesystem of a file, where I/O and locks depend on it.

use std::fs::File;
use std::io;

/// A local filesystem of this kernel, or another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filesystem {
    /// ext2, ext3 and ext4, which share one magic number.
    Ext4,
    Xfs,
    Btrfs,
    /// tmpfs or ramfs.
    Memory,
    Overlay,
    /// Any other, such as FUSE and NFS.
    Other,
}

impl Filesystem {
    /// The filesystem of an open file, from the magic number of `statfs(2)`.
    pub(super) fn of(file: &File) -> io::Result<Filesystem> {
        Ok(match rustix::fs::fstatfs(file)?.f_type as u64 {
            0xef53 => Filesystem::Ext4,
            0x5846_5342 => Filesystem::Xfs,
            0x9123_683e => Filesystem::Btrfs,
            0x0102_1994 | 0x8584_58f6 => Filesystem::Memory,
            0x794c_7630 => Filesystem::Overlay,
            _ => Filesystem::Other,
        })
    }
}
