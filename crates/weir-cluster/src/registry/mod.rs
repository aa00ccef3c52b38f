//! The interface of a registry, shaped after etcd's so that etcd can stand behind it.

mod error;
pub(crate) mod value;
mod watch;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use error::{RegistryError, RegistryErrorKind};
pub(crate) use watch::{Batch, Delivery, WatchSink};
pub use watch::{Change, Watch, WatchEvent};

/// Longest key, in bytes.
pub const MAX_KEY: usize = 1 << 10;
/// Longest value, in bytes.
pub const MAX_VALUE: usize = 1 << 20;
/// Most operations, and most comparisons, in one transaction.
pub const MAX_TRANSACTION: usize = 128;
/// Most bytes of keys and values in one transaction.
pub const MAX_TRANSACTION_BYTES: usize = 2 << 20;
/// Shortest time to live of a lease.
pub const MIN_TTL: Duration = Duration::from_millis(100);
/// Longest time to live of a lease.
pub const MAX_TTL: Duration = Duration::from_secs(3600);
/// Transactions that a watcher may fall behind before it gets [`RegistryError::Compacted`].
pub const WATCH_QUEUE: usize = 1024;

/// What every method of [`Registry`] returns: a boxed future, so that the trait stays object-safe.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = Result<T, RegistryError>> + Send + 'a>>;

/// Names a lease. Never 0, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// One key and what it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The key, at most [`MAX_KEY`] bytes.
    pub key: String,
    /// The value, at most [`MAX_VALUE`] bytes.
    #[serde(with = "value")]
    pub value: Vec<u8>,
    /// The revision of the registry at which this value was put.
    pub mod_revision: u64,
    /// The lease that the key vanishes with.
    pub lease: Option<LeaseId>,
}

/// All keys under a prefix at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// In the order of the keys' bytes.
    pub entries: Vec<Entry>,
    /// The revision that the listing shows. A watch after it misses nothing.
    pub revision: u64,
}

/// What a compared key must look like for the transaction to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Expect {
    /// There is no such key.
    Absent,
    /// The key was last put at this revision.
    ModRevision(u64),
}

/// One condition of a transaction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compare {
    /// The key looked at.
    pub key: String,
    /// What it must look like.
    pub expect: Expect,
}

/// One change in a transaction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Sets a key, whether or not it exists.
    Put {
        /// The key.
        key: String,
        /// Its new value.
        #[serde(with = "value")]
        value: Vec<u8>,
        /// The lease it vanishes with; replaces any earlier one.
        lease: Option<LeaseId>,
    },
    /// Removes a key. It is no error if there is none.
    Delete {
        /// The key.
        key: String,
    },
}

impl Op {
    /// The key that is changed.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Op::Put { key, .. } | Op::Delete { key } => key,
        }
    }
}

/// Changes that happen together, at one revision, or not at all. No key may be changed twice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transaction {
    /// All must hold.
    pub compares: Vec<Compare>,
    /// What is changed.
    pub ops: Vec<Op>,
}

impl Transaction {
    /// A transaction that does nothing yet.
    #[must_use]
    pub fn new() -> Transaction {
        Transaction::default()
    }

    /// Demands that `key` does not exist.
    #[must_use]
    pub fn absent(self, key: impl Into<String>) -> Transaction {
        self.when(Compare { key: key.into(), expect: Expect::Absent })
    }

    /// Demands that `key` was last put at `mod_revision`.
    #[must_use]
    pub fn unchanged(self, key: impl Into<String>, mod_revision: u64) -> Transaction {
        self.when(Compare { key: key.into(), expect: Expect::ModRevision(mod_revision) })
    }

    /// Adds a condition.
    #[must_use]
    pub fn when(mut self, compare: Compare) -> Transaction {
        self.compares.push(compare);
        self
    }

    /// Sets `key`, without a lease.
    #[must_use]
    pub fn put(mut self, key: impl Into<String>, value: impl Into<Vec<u8>>) -> Transaction {
        self.ops.push(Op::Put { key: key.into(), value: value.into(), lease: None });
        self
    }

    /// Sets `key` until `lease` ends.
    #[must_use]
    pub fn put_leased(mut self, key: impl Into<String>, value: impl Into<Vec<u8>>, lease: LeaseId) -> Self {
        self.ops.push(Op::Put { key: key.into(), value: value.into(), lease: Some(lease) });
        self
    }

    /// Removes `key`.
    #[must_use]
    pub fn delete(mut self, key: impl Into<String>) -> Transaction {
        self.ops.push(Op::Delete { key: key.into() });
        self
    }

    /// Checks the limits, before the transaction goes anywhere.
    pub(crate) fn check(&self) -> Result<(), RegistryError> {
        let malformed = |reason: String| Err(RegistryError::Malformed { reason });
        if self.compares.len() > MAX_TRANSACTION || self.ops.len() > MAX_TRANSACTION {
            return malformed(format!(
                "a transaction takes at most {MAX_TRANSACTION} comparisons and operations"
            ));
        }
        let mut bytes = 0;
        for compare in &self.compares {
            check_key(&compare.key)?;
            bytes += compare.key.len();
        }
        let mut changed = std::collections::BTreeSet::new();
        for op in &self.ops {
            check_key(op.key())?;
            bytes += op.key().len();
            if !changed.insert(op.key()) {
                return malformed(format!("the transaction changes key {:?} twice", op.key()));
            }
            if let Op::Put { value, .. } = op {
                bytes += value.len();
                if value.len() > MAX_VALUE {
                    return malformed(format!(
                        "a value takes at most {MAX_VALUE} bytes, not {}",
                        value.len()
                    ));
                }
            }
        }
        if bytes > MAX_TRANSACTION_BYTES {
            return malformed(format!(
                "a transaction takes at most {MAX_TRANSACTION_BYTES} bytes, not {bytes}"
            ));
        }
        Ok(())
    }
}

/// A key is not empty and not too long.
pub(crate) fn check_key(key: &str) -> Result<(), RegistryError> {
    if key.is_empty() || key.len() > MAX_KEY {
        let reason = format!("a key has 1 to {MAX_KEY} bytes, not {}", key.len());
        return Err(RegistryError::Malformed { reason });
    }
    Ok(())
}

/// A prefix may be empty (everything) and is not longer than a key.
pub(crate) fn check_prefix(prefix: &str) -> Result<(), RegistryError> {
    if prefix.len() > MAX_KEY {
        let reason = format!("a prefix has at most {MAX_KEY} bytes, not {}", prefix.len());
        return Err(RegistryError::Malformed { reason });
    }
    Ok(())
}

/// A transaction that has happened and is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// The revision of its changes; the current one when it changed nothing.
    pub revision: u64,
}

/// Whether somebody can tell when this process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessWatch {
    /// The registry sees the process: its end revokes the lease at once and is written under `stopped/`.
    Watched,
    /// The registry cannot see the process; the lease alone tells of it.
    NotWatched,
}

/// Where the cluster keeps what all nodes must agree on.
///
/// All methods may be called from many tasks at once. Reads see every change that was committed before
/// they were called. [`RegistryError::Unavailable`] from a changing call leaves open whether the change
/// was made: read before trying again (a compare-and-swap makes trying again safe).
pub trait Registry: Send + Sync {
    /// One key, or `None`.
    fn get<'a>(&'a self, key: &'a str) -> Pending<'a, Option<Entry>>;

    /// All keys that start with `prefix`, at one revision.
    fn list<'a>(&'a self, prefix: &'a str) -> Pending<'a, Listing>;

    /// Makes all changes if all conditions hold, else none ([`RegistryError::Conflict`]).
    fn transact(&self, transaction: Transaction) -> Pending<'_, Committed>;

    /// Every change under `prefix` with a revision above `after_revision`, once and in order.
    ///
    /// With [`Listing::revision`] nothing is missed. [`RegistryError::Compacted`], here or later from
    /// [`Watch::next`], means that the changes in between are no longer known: list again.
    fn watch<'a>(&'a self, prefix: &'a str, after_revision: u64) -> Pending<'a, Watch>;

    /// A new lease that lives for `ttl` ([`MIN_TTL`] to [`MAX_TTL`]).
    fn grant(&self, ttl: Duration) -> Pending<'_, LeaseId>;

    /// Lets the lease live for its full time again; returns that time.
    fn keep_alive(&self, lease: LeaseId) -> Pending<'_, Duration>;

    /// Ends the lease; its keys vanish. It is no error if it has ended.
    fn revoke(&self, lease: LeaseId) -> Pending<'_, ()>;

    /// Says that the calling process is `incarnation` of node `name` and lives under `lease`.
    fn register_process<'a>(
        &'a self,
        name: &'a str,
        incarnation: u64,
        lease: LeaseId,
    ) -> Pending<'a, ProcessWatch>;
}
