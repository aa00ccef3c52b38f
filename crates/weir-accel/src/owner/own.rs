//! The owner's own copy of the log.

use super::messages::Held;

/// What may be counted on of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Own {
    /// In memory: a record counts once it is appended.
    Memory,
    /// On flash: what is at rest counts.
    Flash(Held),
    /// On flash that fails; this is at rest. What is in the arena can still be read and destaged. But as long as the registry
    /// counts this copy, nothing is acknowledged that it lacks, not even with the replicas *and* the backing: the flash may
    /// work again when the node has started again, and then what is at rest would cover what is younger (P4; the simulator
    /// found that).
    Failed(Held),
}

impl Own {
    /// This copy holds everything up to here, as far as acknowledging depends on it.
    pub fn last(self) -> u64 {
        match self {
            Own::Flash(held) | Own::Failed(held) => held.last,
            Own::Memory => u64::MAX,
        }
    }

    /// Whether nothing more comes to rest.
    pub fn has_failed(self) -> bool {
        matches!(self, Own::Failed(_))
    }

    /// Whether one could go on from it after a restart, if it has to be as `due` says.
    pub fn covers(self, due: Held) -> bool {
        match self {
            Own::Memory => true,
            Own::Flash(held) => held.covers(due),
            Own::Failed(_) => false,
        }
    }
}
