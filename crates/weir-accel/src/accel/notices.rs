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
    /// Destage throughput lately, bytes per second.
    pub destage_rate: u64,
}
