//! Which filesystem a file is on, as far as its I/O and its locks depend on that.

use std::fs::File;
use std::io;

/// A filesystem that this kernel keeps by itself, without a server; or another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filesystem {
    /// ext2, ext3 and ext4, which have one number.
    Ext4,
    Xfs,
    Btrfs,
    /// tmpfs or ramfs.
    Memory,
    Overlay,
    /// Any other: FUSE, NFS and the like among them.
    Other,
}

impl Filesystem {
    /// That of an open file, by the number that `statfs(2)` gives.
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
