//! What an accelerator tells the node that it runs on.

use crate::config::Configuration;
use crate::owner::Watermarks;

/// What the accelerator asks of, or tells, the node that it runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccelNotice {
    /// Connect to this node, or to any node but these; answer with `peer_connected` or `peer_unavailable`.
    WantPeer {
        /// `None`: choose.
        node: Option<String>,
        /// Who is there already: the choice goes with these.
        connected: Vec<String>,
        /// Not these.
        exclude: Vec<String>,
    },
    /// Have this configuration committed; answer with `configured` or `not_configured`.
    WantConfiguration {
        /// The epoch that the change starts from.
        epoch: u64,
        /// The new set.
        replicas: Vec<String>,
        /// The new effective mode.
        write_back: bool,
    },
    /// Somebody has seen this epoch, and it is not ours: ask the registry (P2).
    Fenced(u64),
    /// Tell the operator.
    Tell(&'static str, String),
}

/// The accelerator's state, for people.
#[derive(Clone, Debug)]
pub struct AccelStatus {
    /// The committed configuration.
    pub configuration: Configuration,
    /// The watermarks.
    pub marks: Watermarks,
    /// Why something waits; empty when nothing is unusual.
    pub reason: String,
    /// Bytes acknowledged and not destaged.
    pub dirty_bytes: u64,
    /// Bytes of the arena in use.
    pub log_used: u64,
    /// Bytes of the arena.
    pub log_bytes: u64,
    /// How the log empties.
    pub destage: DestageStatus,
}

/// How a log empties into its backing.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DestageStatus {
    /// Bytes of the log that are freed per second, lately; overwrites that needed no writing included.
    pub rate: u64,
    /// Age of the oldest record that the backing does not hold, in milliseconds; absent when all is clean. After a
    /// takeover it counts from then.
    pub oldest_dirty_ms: Option<u64>,
    /// How long until all that is dirty now is in the backing, at that rate, in milliseconds; absent while nobody knows.
    pub time_to_clean_ms: Option<u64>,
    /// Time since the last checkpoint was complete, in milliseconds; absent before the first.
    pub checkpoint_age_ms: Option<u64>,
    /// Bytes of the log that checkpoints have dealt with since the disk was opened here.
    pub destaged_bytes: u64,
    /// Of those, bytes that need not be written because they were overwritten within their checkpoint.
    pub coalesced_bytes: u64,
    /// Writes that a checkpoint keeps in flight.
    pub depth: usize,
}
