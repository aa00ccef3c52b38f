//! Nodes, what they say of themselves and of the cluster, and events.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use weir_cluster::records::{Medium, MediumSpace};

use super::DiskView;
use crate::nbd_address::NbdAddress;
use crate::shard::health::Look;
use crate::shard::messages::DiskStatus;

/// A node's report on itself and on the cluster as it sees it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.status/2")]
pub struct NodeStatus {
    /// Its name.
    pub node: String,
    /// Its fault domain: nodes that fail together.
    pub fault_domain: String,
    /// Number of this process; grows with each start.
    pub incarnation: u64,
    /// Process id.
    pub pid: u32,
    /// Version of Weir.
    pub version: String,
    /// The cluster's health, in one line.
    pub health: Health,
    /// Whether the registry answers this node.
    pub registry: RegistryView,
    /// The nodes of the cluster, by name: those that are up, and those that are down until they are removed.
    pub nodes: Vec<NodeView>,
    /// All disks, by name.
    pub disks: Vec<DiskView>,
    /// Volumes on LUNs that nobody serves.
    #[serde(default)]
    pub troubles: Vec<VolumeTrouble>,
    /// Problems that nodes have with volumes on LUNs which somebody serves.
    #[serde(default)]
    pub notices: Vec<VolumeTrouble>,
    /// Replicas that this node keeps for other owners.
    pub replicas: Vec<DiskStatus>,
    /// The health of this node's shards, by number.
    #[serde(default)]
    pub shards: Vec<ShardView>,
    /// Where this node exports, without a disk: `nbd+unix:///?socket=…`, `nbd://…`, `nbds://…`.
    pub exports: Vec<String>,
    /// The TCP addresses of its NBD export, as configured.
    #[serde(default)]
    pub nbd: Vec<NbdView>,
    /// How this node's connections to other nodes are protected. A node that says nothing of it is of before there was TLS.
    #[serde(default)]
    pub peers: PeerProtection,
}

/// A TCP address of a node's NBD export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NbdView {
    /// Address and port; port 0 stands for any.
    pub address: String,
    /// Whoever reaches it opens every disk; otherwise TLS and a client's certificate are required.
    pub plaintext: bool,
}

impl From<&NbdAddress> for NbdView {
    fn from(one: &NbdAddress) -> NbdView {
        NbdView { address: one.to_string(), plaintext: one.plaintext }
    }
}

/// The protection of the connections between nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerProtection {
    /// Mutual TLS: both ends have proven which node they are.
    Tls,
    /// None: whoever reaches the port is believed.
    #[default]
    Plaintext,
}

impl std::fmt::Display for PeerProtection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            PeerProtection::Tls => "TLS",
            PeerProtection::Plaintext => "plaintext",
        })
    }
}

/// The cluster's health.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// The worst that holds.
    pub level: HealthLevel,
    /// Why it is not `ok`, one sentence each, the worst first.
    pub reasons: Vec<String>,
}

/// The level of health, from good to bad.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HealthLevel {
    /// Every disk is served as was requested, and every node is up.
    #[default]
    Ok,
    /// All acknowledged data is as safe as was requested, or in the storage; something is missing that was requested.
    Degraded,
    /// Acknowledged data exists in fewer copies than was requested, or in one place that may be lost, or is out of reach.
    AtRisk,
}

impl std::fmt::Display for Health {
    /// `ok`, `degraded: node n3 is down`, `at risk: …; …`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let level = match self.level {
            HealthLevel::Ok => "ok",
            HealthLevel::Degraded => "degraded",
            HealthLevel::AtRisk => "at risk",
        };
        match self.reasons.as_slice() {
            [] => f.write_str(level),
            reasons => write!(f, "{level}: {}", reasons.join("; ")),
        }
    }
}

/// Whether the registry answers, seen from one node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegistryView {
    /// `connected`, or `away`: the node shows the records that it read last.
    pub state: String,
    /// Why it is away, or is not taken for this node's cluster's; empty (null in JSON) otherwise.
    #[serde(default, with = "crate::null_if_empty")]
    pub reason: String,
    /// Time since the node last had an answer from it, in seconds.
    pub age_seconds: f64,
}

impl RegistryView {
    /// The state of a registry that answers.
    pub const CONNECTED: &str = "connected";

    /// The state of a registry that does not answer.
    pub const AWAY: &str = "away";
}

/// The state that only this node knows: of the disks that it owns.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.owned/1")]
pub struct Owned {
    /// Those that are open here.
    pub disks: Vec<DiskStatus>,
    /// Those that are closed here with nothing dirty, while the registry does not have that yet.
    pub unreleased: Vec<String>,
    /// Those that are being compacted here, and how far that is, in per cent.
    #[serde(default)]
    pub compacting: BTreeMap<String, u64>,
    /// Those that could not be opened here, and why.
    #[serde(default)]
    pub unopened: BTreeMap<String, String>,
    /// Bytes of acknowledged writes in the log of those, as far as its copy is here.
    #[serde(default)]
    pub undestaged: BTreeMap<String, u64>,
    /// Its part in the coordination of volumes on LUNs.
    #[serde(default)]
    pub volumes: Vec<VolumePart>,
}

/// A node's part in the coordination of a volume on a LUN.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumePart {
    /// The volume.
    pub volume: String,
    /// `absent`, `claiming`, `fencing`, `listening`, `mounting`, `serving` or `draining`.
    pub phase: String,
    /// A problem that the operator should know of; empty if there is none.
    pub notice: String,
    /// The node has found the LUN among its devices.
    #[serde(default)]
    pub has_path: bool,
    /// The filesystem's bytes, and those that are free; only the coordinator knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub space: Option<(u64, u64)>,
}

/// A volume on a LUN with a problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeTrouble {
    /// Its name.
    pub volume: String,
    /// The reason, in words.
    pub reason: String,
}

/// The turns of a shard (one thread with its disks).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardView {
    /// Its number, from 0.
    pub shard: usize,
    /// `ok`, `spins` (turns that do nothing, one after the other, within the last second), or `hangs` (a turn has lasted for over
    /// a second, and all its disks stand still).
    pub state: String,
    /// For how long it hangs, and in which disk's turn; empty (null in JSON) otherwise.
    #[serde(default, with = "crate::null_if_empty")]
    pub reason: String,
    /// Turns since the node started.
    pub turns: u64,
    /// Turns of single disks.
    pub disk_turns: u64,
    /// Turns that took longer than 10 ms.
    pub long_turns: u64,
    /// The longest turn, in milliseconds.
    pub longest_turn_ms: f64,
    /// The number of times that it was found spinning.
    pub spins: u64,
}

impl ShardView {
    /// The state of a shard of which a turn has lasted for over a second.
    pub const HANGS: &str = "hangs";

    /// Shard `shard`, looked at.
    #[must_use]
    pub fn new(shard: usize, look: &Look) -> ShardView {
        let (state, reason) = match look.hangs {
            Some(lasts) if look.disk.is_empty() => (ShardView::HANGS, format!("for {lasts:.1?}")),
            Some(lasts) => (ShardView::HANGS, format!("for {lasts:.1?}, in the turn of disk {}", look.disk)),
            None if look.spinning => ("spins", String::new()),
            None => ("ok", String::new()),
        };
        ShardView {
            shard,
            state: state.into(),
            reason,
            turns: look.turns,
            disk_turns: look.disk_turns,
            long_turns: look.long_turns,
            longest_turn_ms: look.longest.as_secs_f64() * 1e3,
            spins: look.spins,
        }
    }
}

/// A node, as the registry has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.node/2")]
pub struct NodeView {
    /// Its name.
    pub name: String,
    /// Its fault domain: nodes that fail together.
    pub fault_domain: String,
    /// `up`; `isolated`: the registry does not hear it, members of its disks' sets do; `quarantined`: isolated too often;
    /// `draining`, then `maintenance`: drained by an operator; `revoked`: it runs, and the other nodes turn it away; or `down`: it
    /// stays in the list until it is removed.
    pub state: String,
    /// Since when it is down: RFC 3339, UTC.
    #[serde(default)]
    pub down_since: Option<String>,
    /// Milliseconds by which its clock is ahead of the cluster's (behind: negative), as far as the asked node knows.
    #[serde(default)]
    pub clock_ahead_ms: Option<i64>,
    /// Address for replication; empty (null in JSON) when down.
    #[serde(default, with = "crate::null_if_empty")]
    pub peer_address: String,
    /// Its capacity for write logs, by medium; empty when down.
    #[serde(default)]
    pub media: Vec<MediumView>,
    /// Write logs that it keeps, its own disks' and copies of others'.
    #[serde(default)]
    #[serde(rename = "logs")]
    pub load: u64,
}

/// A node's capacity for write logs on one medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediumView {
    /// Which.
    pub medium: Medium,
    /// Bytes for write logs, its own and copies of others'.
    pub total_bytes: u64,
    /// Bytes of that which no log occupies.
    pub free_bytes: u64,
    /// Bytes that one more log takes.
    pub log_bytes: u64,
}

impl From<&MediumSpace> for MediumView {
    fn from(space: &MediumSpace) -> MediumView {
        let MediumSpace { medium, bytes, free, log } = *space;
        MediumView { medium, total_bytes: bytes, free_bytes: free, log_bytes: log }
    }
}

impl NodeView {
    /// The state of a node whose lease stands, and that takes disks.
    pub const UP: &str = "up";

    /// The state of a node that the registry does not hear, and members of its disks' sets do.
    pub const ISOLATED: &str = "isolated";

    /// The state of a drained node on which nothing counts any more.
    pub const MAINTENANCE: &str = "maintenance";

    /// Whether other nodes reach it and its copies count.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.state != NodeView::DOWN && self.state != NodeView::REVOKED
    }

    /// The state of a node whose lease stands, and that the other nodes turn away.
    pub const REVOKED: &str = "revoked";

    /// The state of any other.
    pub const DOWN: &str = "down";
}

/// The end of a quarantine, a drain or its end, or the removal of a node: what it changes, and what is left to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.node-work/1")]
pub struct NodeWork {
    /// The node.
    pub node: NodeView,
    /// Disks that it owns.
    pub disks: Vec<String>,
    /// Disks of other nodes that count on it, by a copy of the log or as a guard.
    pub copies: Vec<String>,
    /// Disks that its drain has moved away, and that return when it takes disks again.
    pub away: Vec<String>,
    /// Disks of the two first lists that stay as things are, with the reason.
    pub stays: Vec<StayingDisk>,
    /// Volumes on LUNs that it coordinates.
    #[serde(default)]
    pub volumes: Vec<CoordinatedVolume>,
}

/// A volume that a node coordinates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoordinatedVolume {
    /// The volume.
    pub volume: String,
    /// Why no other node would coordinate it; empty (null in JSON) if another one would, or if that was not asked for.
    #[serde(default, with = "crate::null_if_empty")]
    pub stays: String,
}

/// A disk that a drain leaves on its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StayingDisk {
    /// The disk.
    pub disk: String,
    /// The reason.
    pub reason: String,
}

/// Request to drain a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DrainNode {
    /// Disks may end with fewer copies than their policies request.
    #[serde(default)]
    pub fewer_copies: bool,
    /// Only say what the drain would do.
    #[serde(default)]
    pub dry_run: bool,
}

/// Recent events.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.events/1")]
pub struct EventList {
    /// Oldest first.
    pub events: Vec<EventView>,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.event/1")]
pub struct EventView {
    /// When: RFC 3339, UTC, milliseconds.
    pub at: String,
    /// The node that tells it.
    pub node: String,
    /// Its subject: a disk, a node; may be empty.
    pub subject: String,
    /// The kind of event, a word.
    pub kind: String,
    /// The sentence.
    pub text: String,
}
