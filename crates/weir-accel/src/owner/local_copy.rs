//! The owner's own copy of the log.

use super::messages::Held;

/// The part of the copy that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LocalCopy {
    /// In memory: a record counts once it is appended.
    Memory,
    /// On flash: durable records count.
    Flash(Held),
    /// On failed flash; this part is durable. Records in the arena can still be read and destaged. But as long as the
    /// registry counts this copy, the owner acknowledges nothing that the durable part lacks, not even with the replicas
    /// *and* the backing: the flash may work again after a restart of the node, and the durable part would then cover newer
    /// data (P4; the simulator found that).
    Failed(Held),
}

impl LocalCopy {
    /// This copy holds everything up to here, as far as acknowledging depends on it.
    pub fn last(self) -> u64 {
        match self {
            LocalCopy::Flash(held) | LocalCopy::Failed(held) => held.last,
            LocalCopy::Memory => u64::MAX,
        }
    }

    /// Whether nothing more becomes durable.
    pub fn has_failed(self) -> bool {
        matches!(self, LocalCopy::Failed(_))
    }

    /// Whether one could go on from it after a restart, if it has to be as `due` says.
    pub fn covers(self, due: Held) -> bool {
        match self {
            LocalCopy::Memory => true,
            LocalCopy::Flash(held) => held.covers(due),
            LocalCopy::Failed(_) => false,
        }
    }
}
