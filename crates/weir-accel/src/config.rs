//! Inputs of an accelerator: the disk's configuration, limits, and the right to serve.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use weir_block::Nanos;

use crate::lineage::Lineage;
use crate::log::Log;

/// The configuration of a disk as the registry has it: the fencing token, the set, the effective mode (P2, P3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// Grows with each change of owner or replica set.
    pub epoch: u64,
    /// Nodes, other than the owner, that must hold each write before it is acknowledged. Empty with
    /// `write_back` means `write-back+0`.
    pub replicas: Vec<String>,
    /// False: acknowledged from the backing.
    pub write_back: bool,
    /// `N` of the requested `write-back+N`; `None` when `write-through` is requested.
    pub wanted_replicas: Option<usize>,
    /// True: fewer replicas than wanted, or some in other fault domains, do not suffice; the disk then goes to
    /// `write-through`.
    pub strict: bool,
    /// Members of `replicas` on nodes that the policy does not want. They count as long as they are in the set (P1), and are
    /// replaced.
    pub misplaced: Vec<String>,
    /// Members of `replicas` on nodes that are to have no copies, because an operator drains them, say. As `misplaced`, but they stay
    /// for as long as no other node can have the copy, also under a strict policy.
    pub leaving: Vec<String>,
}

impl Configuration {
    /// The members of the set that others are to replace.
    pub fn to_go(&self) -> impl Iterator<Item = &String> {
        self.misplaced.iter().chain(&self.leaving)
    }

    /// The effective policy, as users see it.
    #[must_use]
    pub fn effective(&self) -> String {
        if self.write_back { format!("write-back+{}", self.replicas.len()) } else { "write-through".into() }
    }
}

/// The certain knowledge about the former owner. Each variant includes the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Former {
    /// It may still be in its right. In write-back it may answer reads; its writes go unacknowledged, for they need a copy that is
    /// sealed by now. In write-through it may acknowledge writes as well.
    Serving,
    /// Its right is over. Its I/O to the backing may be in flight.
    Silent,
    /// It has no I/O to the backing in flight, or there was no former owner.
    Stopped,
}

/// Limits and times of one disk's accelerator.
#[derive(Clone, Debug)]
pub struct AccelConfig {
    /// Bytes of the log's arena; at least [`AccelConfig::SMALLEST_LOG`].
    pub log_bytes: u64,
    /// A replica that does not confirm within this time is lost.
    pub peer_deadline: Duration,
    /// Dirty data waits at most this long for company before a checkpoint is begun.
    pub destage_delay: Duration,
    /// Writes wait at most this long for room in a log that frees nothing; then they get an error (P9). More than zero.
    pub full_log_wait: Duration,
    /// The same while destage finds no space in the backing. Zero: writes get an error as soon as it has found none.
    pub full_volume_wait: Duration,
    /// Most records of a batch to a replica.
    pub batch_records: usize,
    /// Most records of a checkpoint, unless they belong together.
    pub checkpoint_records: u64,
    /// Until when this node may serve the disk, in nanoseconds of the machine's clock; the node's control plane moves it. Nothing is
    /// answered and nothing handed to the backing beyond it (P2, P4), but for reads of a LUN, which may begin a turn later.
    pub serves_until: Arc<AtomicU64>,
}

impl AccelConfig {
    /// A log must be able to hold the largest request (32 MiB) and what it wastes at its end.
    pub const SMALLEST_LOG: u64 = 64 << 20;

    /// Default limit for writes that wait for room: longer than most outages of storage, shorter than an operator wants to
    /// search for the reason of a blocked guest.
    pub const FULL_LOG_WAIT: Duration = Duration::from_secs(600);

    /// Default delay before records are destaged while the log has room.
    pub const DESTAGE_DELAY: Duration = Duration::from_millis(100);

    /// Enough for a batch to be worth its message; a replica's table of them stays small.
    pub const BATCH_RECORDS: usize = 1024;

    /// Sorting more at once would hold up the shard.
    pub const CHECKPOINT_RECORDS: u64 = 8192;

    /// Defaults with a right that never ends, for a disk that no other node could own.
    #[must_use]
    pub fn standalone(log_bytes: u64) -> AccelConfig {
        AccelConfig {
            log_bytes: log_bytes.max(Self::SMALLEST_LOG),
            peer_deadline: Duration::from_secs(1),
            destage_delay: Self::DESTAGE_DELAY,
            full_log_wait: Self::FULL_LOG_WAIT,
            full_volume_wait: Self::FULL_LOG_WAIT,
            batch_records: Self::BATCH_RECORDS,
            checkpoint_records: Self::CHECKPOINT_RECORDS,
            serves_until: Arc::new(AtomicU64::new(u64::MAX)),
        }
    }

    pub(crate) fn holds_right(&self, now: Nanos) -> bool {
        now.0 < self.serves_until.load(Ordering::Acquire)
    }
}

/// The log that a new owner begins with.
pub enum Inheritance {
    /// Nothing dirty anywhere.
    Nothing,
    /// This node's complete replica of the former owner's log.
    Replica {
        /// The records.
        log: Log,
        /// The copy's lineage.
        lineage: Lineage,
    },
}
