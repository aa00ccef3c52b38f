//! Records about a registry's move to another registry.

use serde::{Deserialize, Serialize};

use super::Record;

/// `migration`: nodes do not use a registry that has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum MigrationRecord {
    /// The keys of another registry are being copied to this one.
    Arriving {
        /// That registry, for people.
        from: String,
    },
    /// All keys are in another registry, whose nodes may have changed them since.
    Gone {
        /// That registry, for people.
        to: String,
    },
}

impl Record for MigrationRecord {
    const KIND: &'static str = "migration";
}

/// `epoch-base`: the epochs of new disks are above it.
///
/// A new disk's first epoch is above every epoch that a deleted disk of its name can have had, because each of those cost a revision
/// of the registry (P2). After a migration, the revisions of the former registry count, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpochBaseRecord {
    /// The sum of the last revisions of all former registries.
    pub revisions: u64,
}

impl Record for EpochBaseRecord {
    const KIND: &'static str = "epoch base";
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn stored_forms() {
        let gone = MigrationRecord::Gone { to: "/weir/a/ at h:1".into() };
        assert_eq!(gone.encode(), br#"{"v":1,"state":"gone","to":"/weir/a/ at h:1"}"#);
        assert_eq!(MigrationRecord::decode(&gone.encode()).unwrap(), gone);
        assert_eq!(EpochBaseRecord { revisions: 7 }.encode(), br#"{"v":1,"revisions":7}"#);
    }
}
