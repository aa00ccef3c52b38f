//! The owner's own copy of the log.

use super::messages::Held;

/// What may be counted on of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Own {
    /// In memory: a record counts once it is appended.
    Memory,
    /// On flash: what is at rest counts.
    Flash(Held),
    /// On flash that fails. What is in the arena can still be read and destaged, but nothing is acknowledged on the strength
    /// of it any more: only with the replicas *and* the backing.
    Failed,
}

impl Own {
    /// This copy holds everything up to here, as far as acknowledging depends on it.
    pub fn last(self) -> u64 {
        match self {
            Own::Flash(held) => held.last,
            Own::Memory | Own::Failed => u64::MAX,
        }
    }

    /// Whether one could go on from it after a restart, if it has to be as `due` says.
    pub fn covers(self, due: Held) -> bool {
        match self {
            Own::Memory => true,
            Own::Flash(held) => held.covers(due),
            Own::Failed => false,
        }
    }
}
