//! The registry's records: versioned JSON, verified when read.

mod clock;
mod disk;
pub mod keys;
mod limit;
mod medium;
mod migration;
mod node;
mod node_states;
mod setup;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::registry::{Entry, Op, Transaction};

pub use clock::ClockRecord;
pub use disk::{DiskRecord, FormerOwner, MAX_FORMER, MAX_REPLICAS, Mode, Policy, Source, Spread};
pub use limit::Limit;
pub use medium::{Medium, NotAMedium};
pub use migration::{EpochBaseRecord, MigrationRecord};
pub use node::{
    CoordinatorRecord, EventRecord, LunRecord, MediumSpace, MemberRecord, NodeRecord, NodeRef,
    ReleasedRecord, Step, StoppedHow, StoppedRecord, UnfinishedRecord, VolumeKind, VolumeRecord,
};
pub use node_states::{Drain, Isolation, MAX_ISOLATIONS, NodeStateRecord, NodeStatesRecord, Quarantine};
pub use setup::SetupRecord;

/// The version that this build writes, and the newest that it reads.
pub const VERSION: u64 = 1;
/// Longest name of a node, volume or disk, in bytes.
pub const MAX_NAME: usize = 64;

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The reason why a record cannot be read or must not be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Written by a newer version of Weir.
    #[error("the {kind} record has version {found}, this build supports up to {VERSION}; upgrade this node")]
    TooNew {
        /// The kind of record.
        kind: &'static str,
        /// Its version.
        found: u64,
    },
    /// Not a record of this kind.
    #[error("not a {kind} record: {reason}; delete the key or restore it")]
    Malformed {
        /// The expected kind of record.
        kind: &'static str,
        /// The reason.
        reason: String,
    },
    /// A name that cannot be part of a key.
    #[error(
        "{name:?} is not a name: use 1 to {MAX_NAME} letters, digits, '-', '_', '.', not starting with '.' or '-'"
    )]
    BadName {
        /// The given name.
        name: String,
    },
    /// The record contradicts itself.
    #[error("the {kind} record contradicts itself: {reason}")]
    Contradiction {
        /// The kind of record.
        kind: &'static str,
        /// The contradiction.
        reason: String,
    },
}

#[derive(Deserialize)]
struct Version {
    v: u64,
}

#[derive(Serialize)]
struct Versioned<'a, R> {
    v: u64,
    #[serde(flatten)]
    record: &'a R,
}

/// A typed value of the registry.
pub trait Record: Serialize + DeserializeOwned + Clone + PartialEq + Send + Sync + 'static {
    /// Its name in messages.
    const KIND: &'static str;

    /// Checks rules that the types do not express.
    ///
    /// # Errors
    /// [`RecordError::BadName`] or [`RecordError::Contradiction`].
    fn check(&self) -> Result<(), RecordError> {
        Ok(())
    }

    /// The record as JSON, with its version.
    fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(&Versioned { v: VERSION, record: self })
            .expect("records are structs of strings and numbers, which always serialise")
    }

    /// Reads and checks a record.
    ///
    /// # Errors
    /// Any [`RecordError`].
    fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let malformed =
            |error: serde_json::Error| RecordError::Malformed { kind: Self::KIND, reason: error.to_string() };
        // The version first: a newer record may not parse, and the error must name the version.
        let Version { v } = serde_json::from_slice(bytes).map_err(malformed)?;
        if v > VERSION {
            return Err(RecordError::TooNew { kind: Self::KIND, found: v });
        }
        let record: Self = serde_json::from_slice(bytes).map_err(malformed)?;
        record.check()?;
        Ok(record)
    }

    /// Reads the record of an entry.
    ///
    /// # Errors
    /// Any [`RecordError`].
    fn of(entry: &Entry) -> Result<Self, RecordError> {
        Self::decode(&entry.value)
    }

    /// The operation that puts this record, without a lease.
    fn put(&self, key: impl Into<String>) -> Op {
        Op::Put { key: key.into(), value: self.encode(), lease: None }
    }

    /// A transaction that creates this record unless the key exists.
    fn create(&self, key: impl Into<String>) -> Transaction {
        let key = key.into();
        Transaction::new().absent(key.clone()).put(key, self.encode())
    }

    /// A transaction that replaces `entry` by this record, unless `entry` has changed (P3).
    fn replace(&self, entry: &Entry) -> Transaction {
        Transaction::new()
            .unchanged(entry.key.clone(), entry.mod_revision)
            .put(entry.key.clone(), self.encode())
    }
}

/// Checks the name of a node, volume or disk.
///
/// # Errors
/// [`RecordError::BadName`].
pub fn check_name(name: &str) -> Result<(), RecordError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > MAX_NAME || name.starts_with(['.', '-']) || !name.bytes().all(allowed)
    {
        // Truncated, so that a name from outside cannot flood the log.
        return Err(RecordError::BadName { name: name.chars().take(MAX_NAME + 1).collect() });
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "node-1", "vm_7.disk", "0", &"x".repeat(64)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", ".a", "-a", "a/b", "a b", "ä", "a\0", &"x".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_newer_record_is_refused_clearly() {
        let error = VolumeRecord::decode(br#"{"v":2,"something":"else"}"#).unwrap_err();
        assert_eq!(error, RecordError::TooNew { kind: "volume", found: 2 });
        assert!(error.to_string().contains("upgrade"));
        for bad in [&b""[..], b"{}", b"{\"v\":1}", b"[1]", b"{\"v\":-1}", b"\xff"] {
            assert!(matches!(VolumeRecord::decode(bad), Err(RecordError::Malformed { .. })));
        }
    }
}
