//! The interface of a registry, modelled on etcd's so that etcd can implement it.

mod error;
pub(crate) mod value;
mod watch;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use error::{RegistryError, RegistryErrorKind};
pub use watch::{Batch, Change, Delivery, Watch, WatchEvent, WatchSink};

/// Longest key, in bytes.
pub const MAX_KEY: usize = 1 << 10;
/// Longest value, in bytes.
pub const MAX_VALUE: usize = 1 << 20;
/// Maximum number of operations, and of comparisons, in one transaction: etcd's 128, less one for a comparison of its own.
pub const MAX_TRANSACTION: usize = 127;
/// Maximum size of keys and values in one transaction, in bytes.
pub const MAX_TRANSACTION_BYTES: usize = 2 << 20;
/// Shortest time to live of a lease.
pub const MIN_TTL: Duration = Duration::from_millis(100);
/// Longest time to live of a lease.
pub const MAX_TTL: Duration = Duration::from_secs(3600);
/// Transactions that a watcher may fall behind before it gets [`RegistryError::Compacted`].
pub const WATCH_QUEUE: usize = 1024;

/// The result of every method of [`Registry`]: a boxed future, so that the trait is object-safe.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = Result<T, RegistryError>> + Send + 'a>>;

/// The id of a lease. Never 0, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// One key and its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The key, at most [`MAX_KEY`] bytes.
    pub key: String,
    /// The value, at most [`MAX_VALUE`] bytes.
    #[serde(with = "value")]
    pub value: Vec<u8>,
    /// The registry's revision of this value.
    pub mod_revision: u64,
    /// The key's lease; the key ends with it.
    pub lease: Option<LeaseId>,
}

/// All keys under a prefix at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// In the order of the keys' bytes.
    pub entries: Vec<Entry>,
    /// The revision of the listing. A watch after it misses nothing.
    pub revision: u64,
}

/// The required state of a compared key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Expect {
    /// The key does not exist.
    Absent,
    /// The key was last put at this revision.
    ModRevision(u64),
}

/// One condition of a transaction.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compare {
    /// The compared key.
    pub key: String,
    /// Its required state.
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
        /// Its lease; replaces any earlier one.
        lease: Option<LeaseId>,
    },
    /// Removes a key. A missing key is no error.
    Delete {
        /// The key.
        key: String,
    },
}

impl Op {
    /// The changed key.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Op::Put { key, .. } | Op::Delete { key } => key,
        }
    }
}

/// Atomic changes at one revision. Must not change a key twice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transaction {
    /// Conditions; all must hold.
    pub compares: Vec<Compare>,
    /// The changes.
    pub ops: Vec<Op>,
}

impl Transaction {
    /// An empty transaction.
    #[must_use]
    pub fn new() -> Transaction {
        Transaction::default()
    }

    /// Requires that `key` does not exist.
    #[must_use]
    pub fn absent(self, key: impl Into<String>) -> Transaction {
        self.when(Compare { key: key.into(), expect: Expect::Absent })
    }

    /// Requires that `key` was last put at `mod_revision`.
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

    /// Checks the limits, before the transaction is sent.
    ///
    /// # Errors
    /// [`RegistryError::Malformed`] names the limit.
    pub fn check(&self) -> Result<(), RegistryError> {
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
///
/// # Errors
/// [`RegistryError::Malformed`] names the limit.
pub fn check_key(key: &str) -> Result<(), RegistryError> {
    if key.is_empty() || key.len() > MAX_KEY {
        let reason = format!("a key has 1 to {MAX_KEY} bytes, not {}", key.len());
        return Err(RegistryError::Malformed { reason });
    }
    Ok(())
}

/// A prefix may be empty (everything) and is not longer than a key.
///
/// # Errors
/// [`RegistryError::Malformed`] names the limit.
pub fn check_prefix(prefix: &str) -> Result<(), RegistryError> {
    if prefix.len() > MAX_KEY {
        let reason = format!("a prefix has at most {MAX_KEY} bytes, not {}", prefix.len());
        return Err(RegistryError::Malformed { reason });
    }
    Ok(())
}

/// A committed, durable transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// The revision of its changes; the current one if it changed nothing.
    pub revision: u64,
}

/// Whether the registry can detect this process's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessWatch {
    /// The registry watches the process: its end revokes the lease at once and is recorded under `stopped/`.
    Watched,
    /// The registry cannot watch the process; only the lease shows its state.
    NotWatched,
}

/// The store of the state that all nodes must agree on.
///
/// Many tasks may call all methods at once. A read sees every change committed before the call. After
/// [`RegistryError::Unavailable`] from a changing call the change may or may not have happened: read before a retry (a
/// compare-and-swap makes a retry safe).
pub trait Registry: Send + Sync {
    /// Whether a registry is there. Unlike every other call, this one sets none up; an embedded one is there when it answers.
    fn is_set_up(&self) -> Pending<'_, bool> {
        Box::pin(async { Ok(true) })
    }

    /// One key, or `None`.
    fn get<'a>(&'a self, key: &'a str) -> Pending<'a, Option<Entry>>;

    /// All keys that start with `prefix`, at one revision.
    fn list<'a>(&'a self, prefix: &'a str) -> Pending<'a, Listing>;

    /// Makes all changes if all conditions hold, else none ([`RegistryError::Conflict`]).
    fn transact(&self, transaction: Transaction) -> Pending<'_, Committed>;

    /// Every change under `prefix` with a revision above `after_revision`, once and in order.
    ///
    /// With [`Listing::revision`] no change is missed. [`RegistryError::Compacted`], here or later from [`Watch::next`], means
    /// that the history lacks the changes in between: list again.
    fn watch<'a>(&'a self, prefix: &'a str, after_revision: u64) -> Pending<'a, Watch>;

    /// A new lease that lives for `ttl` ([`MIN_TTL`] to [`MAX_TTL`]).
    fn grant(&self, ttl: Duration) -> Pending<'_, LeaseId>;

    /// Extends the lease to its full time again; returns that time.
    fn keep_alive(&self, lease: LeaseId) -> Pending<'_, Duration>;

    /// Ends the lease and removes its keys. An ended lease is no error.
    fn revoke(&self, lease: LeaseId) -> Pending<'_, ()>;

    /// Registers the calling process as `incarnation` of node `name` under `lease`.
    fn register_process<'a>(
        &'a self,
        name: &'a str,
        incarnation: u64,
        lease: LeaseId,
    ) -> Pending<'a, ProcessWatch>;
}
