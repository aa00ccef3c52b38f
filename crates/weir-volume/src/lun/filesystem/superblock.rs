//! Which filesystem a LUN has, read from its first blocks: before a mount, which changes it.
//!
//! Sources: Linux `fs/ext4/ext4.h` (`struct ext4_super_block`), `fs/xfs/libxfs/xfs_format.h` (`struct xfs_dsb`).
//!
//! | ext4, little-endian, from byte 1024 | offset | bytes |
//! |---|---|---|
//! | blocks, low and high half | 0x04, 0x150 | 4, 4 |
//! | block size, as log2 of KiB | 0x18 | 4 |
//! | magic, 0xEF53 | 0x38 | 2 |
//! | compatible, incompatible, read-only compatible features | 0x5C, 0x60, 0x64 | 4 each |
//! | UUID, label | 0x68, 0x78 | 16 each |
//! | device number of the journal | 0xE4 | 4 |
//! | default mount options | 0x100 | 4 |
//! | mount options in words | 0x200 | 64 |
//! | CRC32C of all before | 0x3FC | 4 |
//!
//! | XFS, big-endian, from byte 0 | offset | bytes |
//! |---|---|---|
//! | magic, `XFSB` | 0 | 4 |
//! | block size | 4 | 4 |
//! | blocks, realtime blocks | 8, 16 | 8 each |
//! | UUID | 32 | 16 |
//! | first block of the log; 0: on another device | 48 | 8 |
//! | version, in the low 4 bits | 100 | 2 |
//! | sector size | 102 | 2 |
//! | label | 108 | 12 |
//! | features, read-only compatible | 212 | 4 |
//! | CRC32C of the sector, little-endian | 224 | 4 |

use std::fmt;

/// Bytes to read: both superblocks, with the largest sector of XFS.
pub const READ: usize = 32 << 10;

/// Largest block, in bytes: that of a disk's requests.
const LARGEST_BLOCK: u32 = 4096;
const PARTS: &str = "parts of a block are written through the page cache, past which nodes write";

const EXT4_AT: usize = 1024;
const EXT4_BYTES: usize = 1024;
const EXT4_MAGIC: u16 = 0xEF53;
const EXT4_HAS_JOURNAL: u32 = 0x4;
const EXT4_JOURNAL_DEVICE: u32 = 0x8;
const EXT4_EXTENTS: u32 = 0x40;
const EXT4_MMP: u32 = 0x100;
const EXT4_INLINE_DATA: u32 = 0x8000;
const EXT4_ENCRYPT: u32 = 0x1_0000;
const EXT4_METADATA_CHECKSUMS: u32 = 0x400;
/// The part of the default mount options that names the journal's mode, and the value of `data=journal`.
const EXT4_JOURNAL_MODE: u32 = 0x60;
const EXT4_JOURNAL_DATA: u32 = 0x20;

const XFS_MAGIC: u32 = 0x5846_5342;
const XFS_VERSION: u16 = 5;
const XFS_REFLINK: u32 = 0x4;
const XFS_CHECKSUM_AT: usize = 224;

/// A filesystem that a shared volume can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// ext4.
    Ext4,
    /// XFS.
    Xfs,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Kind {
    /// As the kernel knows it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Ext4 => "ext4",
            Kind::Xfs => "xfs",
        }
    }
}

/// What is on a LUN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A filesystem.
    Filesystem(Superblock),
    /// Anything else, or nothing: [`crate::lun::survey`] looks at more than the first bytes.
    Other,
}

/// What its superblock says of a filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Which one.
    pub kind: Kind,
    /// Its identity.
    pub uuid: [u8; 16],
    /// Its label; may be empty.
    pub label: String,
    /// Bytes of a block.
    pub block: u32,
    /// Smallest unit of its own writes, in bytes: a path to the LUN must not need larger ones.
    pub sector: u32,
    /// Bytes that it uses of the LUN.
    pub size: u64,
    /// Files can share blocks: clones cost no space.
    pub reflink: bool,
    /// Why a shared volume cannot use it.
    pub unsuitable: Option<Unsuitable>,
}

/// Why a shared volume cannot use a filesystem.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsuitable {
    /// A property that breaks the protocol.
    #[error("{feature}: {reason}; format it without, or choose another one")]
    Feature {
        /// Its name, as mkfs or mount has it.
        feature: &'static str,
        /// What goes wrong.
        reason: &'static str,
    },
    /// The superblock's checksum is wrong.
    #[error("its superblock is damaged (checksum); run its own check, e2fsck or xfs_repair")]
    Damaged,
    /// A number in it makes no sense.
    #[error("its superblock is damaged ({0}); run its own check, e2fsck or xfs_repair")]
    Nonsense(&'static str),
}

/// What the first bytes of a LUN say.
#[must_use]
pub fn parse(bytes: &[u8]) -> Content {
    xfs(bytes).or_else(|| ext4(bytes)).map_or(Content::Other, Content::Filesystem)
}

fn refused(feature: &'static str, reason: &'static str) -> Unsuitable {
    Unsuitable::Feature { feature, reason }
}

fn ext4(bytes: &[u8]) -> Option<Superblock> {
    let sb = bytes.get(EXT4_AT..EXT4_AT + EXT4_BYTES)?;
    if little16(sb, 0x38) != EXT4_MAGIC {
        return None;
    }
    let (compatible, incompatible, read_only) = (little32(sb, 0x5C), little32(sb, 0x60), little32(sb, 0x64));
    let is_journaled_data = little32(sb, 0x100) & EXT4_JOURNAL_MODE == EXT4_JOURNAL_DATA
        || words(&sb[0x200..0x240]).contains("data=journal");
    let has = |feature: u32| incompatible & feature != 0;
    let checksum_fails = read_only & EXT4_METADATA_CHECKSUMS != 0
        // Linux stores the CRC without its final inversion.
        && little32(sb, 0x3FC) != !crc32c::crc32c(&sb[..0x3FC]);
    let log_of_block = little32(sb, 0x18);
    let unsuitable = match () {
        () if checksum_fails => Some(Unsuitable::Damaged),
        () if log_of_block > 6 => Some(Unsuitable::Nonsense("block size")),
        () if 1024 << log_of_block > LARGEST_BLOCK => Some(refused("blocks of more than 4096 bytes", PARTS)),
        () if has(EXT4_JOURNAL_DEVICE) => Some(refused("a journal device", "it is no filesystem")),
        () if compatible & EXT4_HAS_JOURNAL == 0 => {
            Some(refused("no journal (^has_journal)", "a crash of the coordinator leaves it inconsistent"))
        }
        () if little32(sb, 0xE4) != 0 => {
            Some(refused("an external journal", "other nodes do not reach that device"))
        }
        () if is_journaled_data => Some(refused(
            "data=journal",
            "the replay of its journal overwrites what another node has written directly",
        )),
        () if has(EXT4_INLINE_DATA) => Some(refused("inline_data", "such files have no blocks of their own")),
        () if has(EXT4_ENCRYPT) => {
            Some(refused("encrypt", "what another node writes directly is not encrypted"))
        }
        () if !has(EXT4_EXTENTS) => {
            Some(refused("no extents (^extent)", "a disk has too many blocks without"))
        }
        () if has(EXT4_MMP) => Some(refused("mmp", "each mount after a crash waits for up to 44 s")),
        () => None,
    };
    let block = 1024 << log_of_block.min(6);
    let blocks = u64::from(little32(sb, 0x04)) | u64::from(little32(sb, 0x150)) << 32;
    Some(Superblock {
        kind: Kind::Ext4,
        uuid: array(sb, 0x68),
        label: words(&sb[0x78..0x88]),
        block,
        sector: block,
        size: blocks.saturating_mul(u64::from(block)),
        reflink: false,
        unsuitable,
    })
}

fn xfs(bytes: &[u8]) -> Option<Superblock> {
    let head = bytes.get(..512)?;
    if big32(head, 0) != XFS_MAGIC {
        return None;
    }
    let (block, sector) = (big32(head, 4), u32::from(big16(head, 102)));
    let is_sector = sector.is_power_of_two() && (512..=READ as u32).contains(&sector);
    let is_damaged = || {
        let Some(whole) = bytes.get(..sector as usize) else { return true };
        let mut whole = whole.to_vec();
        whole[XFS_CHECKSUM_AT..XFS_CHECKSUM_AT + 4].fill(0);
        little32(head, XFS_CHECKSUM_AT) != crc32c::crc32c(&whole)
    };
    let unsuitable = match () {
        () if !is_sector => Some(Unsuitable::Nonsense("sector size")),
        () if !(block.is_power_of_two() && (512..=65_536).contains(&block)) => {
            Some(Unsuitable::Nonsense("block size"))
        }
        () if block > LARGEST_BLOCK => Some(refused("blocks of more than 4096 bytes", PARTS)),
        () if big16(head, 100) & 0xF != XFS_VERSION => {
            Some(refused("version 4 (crc=0)", "it has no checksums of its metadata"))
        }
        () if is_damaged() => Some(Unsuitable::Damaged),
        () if big64(head, 16) != 0 => {
            Some(refused("a realtime section", "its blocks are on a device that other nodes do not reach"))
        }
        () if big64(head, 48) == 0 => {
            Some(refused("an external log", "other nodes do not reach that device"))
        }
        () => None,
    };
    Some(Superblock {
        kind: Kind::Xfs,
        uuid: array(head, 32),
        label: words(&head[108..120]),
        block,
        sector,
        size: big64(head, 8).saturating_mul(u64::from(block)),
        reflink: big32(head, 212) & XFS_REFLINK != 0,
        unsuitable,
    })
}

/// Text up to the first zero.
fn words(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// `N` bytes at an offset that the caller has checked.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

fn little16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

fn little32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn big16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

fn big32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

fn big64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_content_is_no_filesystem_and_short_content_is_no_panic() {
        assert_eq!(parse(&[0; 4096]), Content::Other);
        assert_eq!(parse(&[]), Content::Other);
        let mut bytes = vec![0; 4096];
        bytes[0..4].copy_from_slice(b"LVM2");
        assert_eq!(parse(&bytes), Content::Other);
        // A superblock that is cut off, at each length.
        bytes[0..4].copy_from_slice(b"XFSB");
        bytes[EXT4_AT + 0x38..EXT4_AT + 0x3A].copy_from_slice(&EXT4_MAGIC.to_le_bytes());
        for length in 0..bytes.len() {
            drop(parse(&bytes[..length]));
        }
    }

    /// A damaged superblock has any content.
    #[test]
    fn no_superblock_panics() {
        let mut rng = fastrand::Rng::with_seed(7);
        for round in 0..20_000 {
            let mut bytes: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(4096).collect();
            if round % 2 == 0 {
                bytes[0..4].copy_from_slice(b"XFSB");
            } else {
                bytes[EXT4_AT + 0x38..EXT4_AT + 0x3A].copy_from_slice(&EXT4_MAGIC.to_le_bytes());
            }
            let Content::Filesystem(found) = parse(&bytes) else { panic!("round {round}: no filesystem") };
            assert!(found.kind == Kind::Ext4 || found.unsuitable.is_some(), "{found:?}");
        }
    }
}
