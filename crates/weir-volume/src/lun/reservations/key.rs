//! The key by which a LUN knows a process of a node:
//!
//! | bits | content |
//! |---|---|
//! | 63–56 | 0x57 (`W`): a key of Weir |
//! | 55–44 | the volume, and thus the cluster: a hash of the volume's random identity |
//! | 43–20 | the node: a hash of the host's number |
//! | 19–0 | the process: a hash of its incarnation |
//!
//! A fence is a node's: whoever makes one removes all keys with the node's bits, whichever process has registered them. A process looks
//! for its own key by all of its bits, so that it does not take a former process's registration for its own.
//!
//! Two nodes may have the same bits (for 32 nodes: 1 of 30,000 clusters). A fence of one then hits the other one, too, which has itself
//! admitted again; a node refuses to fence one with its own bits.

use std::fmt;

use weir_block::hash::{FNV_BASIS, fnv1a};

use crate::lun::claim::Process;
use crate::lun::heartbeat::VolumeId;

const MARK: u64 = 0x57;
const VOLUME_BITS: u32 = 12;
const NODE_BITS: u32 = 24;
const PROCESS_BITS: u32 = 20;

/// A key. Never zero, which stands for none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key(pub u64);

impl Key {
    /// The key of a process for a volume. All builds of Weir compute the same one.
    #[must_use]
    pub fn new(volume: VolumeId, process: Process<u64>) -> Key {
        let volume = hash(volume.0, VOLUME_BITS);
        let node = hash(process.node.to_le_bytes(), NODE_BITS);
        let process = hash(process.incarnation.to_le_bytes(), PROCESS_BITS);
        Key(((MARK << VOLUME_BITS | volume) << NODE_BITS | node) << PROCESS_BITS | process)
    }

    /// Whether both are keys of one node, for one volume.
    #[must_use]
    pub fn is_same_node(self, other: Key) -> bool {
        self.0 >> PROCESS_BITS == other.0 >> PROCESS_BITS
    }

    /// Whether both are keys for one volume.
    #[must_use]
    pub fn is_same_volume(self, other: Key) -> bool {
        self.0 >> (PROCESS_BITS + NODE_BITS) == other.0 >> (PROCESS_BITS + NODE_BITS)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#018x}", self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn hash(bytes: impl IntoIterator<Item = u8>, bits: u32) -> u64 {
    let hash = fnv1a(FNV_BASIS, bytes);
    // The low bits alone depend on the low bits of the input alone.
    (hash ^ hash >> 32) & ((1 << bits) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: VolumeId = VolumeId([7; 16]);

    fn key(volume: VolumeId, node: u64, incarnation: u64) -> Key {
        Key::new(volume, Process { node, incarnation })
    }

    #[test]
    fn a_key_tells_volume_node_and_process_apart() {
        let own = key(VOLUME, 1, 1_700_000_000_000);
        let (restarted, other) = (key(VOLUME, 1, 1_700_000_000_001), key(VOLUME, 2, 1_700_000_000_000));
        let elsewhere = key(VolumeId([8; 16]), 1, 1_700_000_000_000);
        assert!(own != restarted && own.is_same_node(restarted) && own.is_same_volume(restarted));
        assert!(own != other && !own.is_same_node(other) && own.is_same_volume(other));
        assert!(own != elsewhere && !own.is_same_node(elsewhere) && !own.is_same_volume(elsewhere));
    }

    /// LUNs keep keys of other builds.
    #[test]
    fn keys_have_the_documented_layout() {
        let own = key(VOLUME, 1, 2);
        assert_eq!(own.0 >> 56, 0x57);
        assert_eq!(own.to_string(), "0x5784de7de8d54843");
        let changed = own.0 ^ key(VOLUME, 1, 3).0;
        assert!(changed != 0 && changed < 1 << 20, "{changed:#x}");
        let changed = own.0 ^ key(VOLUME, 3, 2).0;
        assert!(changed != 0 && changed.trailing_zeros() >= 20 && changed < 1 << 44, "{changed:#x}");
    }
}
