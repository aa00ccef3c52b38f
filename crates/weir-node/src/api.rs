//! The HTTP API in JSON. Shared by the server ([`crate::http`]) and the [`crate::client`].
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/ping` | nothing, at once: the node answers |
//! | `GET /v1/status` | [`NodeStatus`] |
//! | `GET /v1/owned` | [`Owned`]: the state that only a disk's owner knows; for other nodes |
//! | `POST /v1/nodes/NAME/forget` | [`NodeView`] |
//! | `GET /v1/volumes`, `POST /v1/volumes` ([`CreateVolume`]) | [`Volumes`], [`VolumeView`] |
//! | `POST /v1/volumes/plan` ([`CreateVolume`]) | [`VolumePlan`] |
//! | `GET /v1/volumes/NAME/usage` | [`VolumeUsage`] |
//! | `POST /v1/volumes/NAME/delete` ([`DeleteVolume`]) | [`DeletedVolume`] |
//! | `POST /v1/volumes/NAME/confirm-fenced` ([`ConfirmFenced`]) | [`ConfirmedFenced`] |
//! | `POST /v1/volumes/NAME/redirected` ([`SetRedirected`]) | [`VolumeView`] |
//! | `GET /v1/disks`, `POST /v1/disks` ([`CreateDisk`]) | [`Disks`], [`DiskView`] |
//! | `GET /v1/disks/NAME` | [`DiskView`] |
//! | `POST /v1/disks/NAME/policy` ([`SetPolicy`]) | [`DiskView`] |
//! | `POST /v1/disks/NAME/export` ([`Export`]) | [`DiskView`] |
//! | `POST /v1/disks/NAME/move` ([`Move`]) | [`Moved`] |
//! | `POST /v1/disks/NAME/follow` ([`Follow`]) | [`DiskView`] |
//! | `POST /v1/disks/NAME/limit` ([`SetLimit`]) | [`DiskView`] |
//! | `POST /v1/disks/NAME/resize` ([`Resize`]) | [`DiskView`] |
//! | `POST /v1/disks/NAME/lengthen` ([`Resize`]) | [`Resize`]: only the file; for other nodes |
//! | `POST /v1/disks/NAME/delete` ([`Delete`]) | [`Deleted`] |
//! | `GET /v1/disks/NAME/snapshots`, `POST /v1/disks/NAME/snapshots` ([`CreateSnapshot`]) | [`Snapshots`]: all; those that were made |
//! | `POST /v1/disks/NAME/delete-snapshot` ([`DeleteSnapshot`]) | [`SnapshotView`] |
//! | `POST /v1/disks/NAME/rollback` ([`RollBack`]) | [`RolledBack`] |
//! | `POST /v1/disks/NAME/clone` ([`CloneDisk`]) | [`DiskView`], of the clone |
//! | `POST /v1/disks/NAME/barrier` ([`Barrier`]) | [`BarrierStood`]; for other nodes |
//! | `GET /v1/disks/NAME/meters` | [`Meters`] |
//! | `GET /v1/disks/NAME/profile` | `weir_profile::Profile`, since the disk was opened |
//! | `POST /v1/disks/NAME/profile` ([`RecordProfile`]) | `weir_profile::Profile`, when the time is over |
//! | `POST /v1/disks/NAME/load` ([`RunLoad`]) | `weir_load::Summary` |
//! | `GET /v1/events` | [`EventList`] |
//! | `GET /metrics` | the turns of the shards, in Prometheus' text format |
//!
//! Any node answers for any disk; a change that only a node of another host can make is answered with 307, the [`Elsewhere`] in the
//! error, and a `Location`. Everything that goes wrong is an [`ApiError`], with the HTTP status that fits its kind; a node that has
//! not joined the cluster answers every request with 503 and [`NOT_JOINED`].

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use weir_block::{KindMeter, LayerMeter, RequestKind};
pub use weir_cluster::records::Medium;
use weir_cluster::records::{Limit, MediumSpace};
use weir_load::Workload;

pub use crate::error::{ApiError, ApiErrorKind, Elsewhere, NOT_JOINED};
use crate::nbd_address::NbdAddress;
use crate::shard::health::Look;
use crate::shard::messages::{DiskStatus, LoadLayer};

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
    /// Its part in the coordination of volumes on LUNs.
    #[serde(default)]
    pub volumes: Vec<VolumePart>,
}

/// A node's part in the coordination of a volume on a LUN.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumePart {
    /// The volume.
    pub volume: String,
    /// `absent`, `claiming`, `fencing`, `mounting`, `serving` or `draining`.
    pub phase: String,
    /// A problem that the operator should know of; empty if there is none.
    pub notice: String,
    /// The filesystem's bytes, and those that are free; only the coordinator knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub space: Option<(u64, u64)>,
}

/// A volume that nobody serves.
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

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.volume/1")]
pub struct VolumeView {
    /// Its name.
    pub name: String,
    /// Kind of backing: `dir`.
    pub kind: String,
    /// Its path on every node; of a LUN, that on the node where it was made.
    pub path: PathBuf,
    /// Disks in it.
    pub disks: usize,
    /// Of a volume on a LUN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lun: Option<LunView>,
    /// Where its disks are files, if they are on the asked node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<FilesView>,
}

/// The disks of a volume as files on the asked node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesView {
    /// Their directory. Each is `DISK.raw` there.
    pub path: PathBuf,
    /// How requests come from the kernel: `/dev/fuse`.
    pub transport: String,
}

/// A LUN that is a volume, as the asked node sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LunView {
    /// By which it is known on every host: its WWN or serial number.
    pub identity: String,
    /// `ext4` or `xfs`.
    pub filesystem: String,
    /// The filesystem's identity.
    pub uuid: String,
    /// The path of it on the asked node; absent: that node does not find it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// The node that coordinates it; absent: none does, and [`LunView::trouble`] says who is about to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coordinator: Option<String>,
    /// Why nobody serves the volume; empty if a node does.
    #[serde(default)]
    pub trouble: String,
    /// Bytes of its filesystem; absent while nobody serves it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Of those, bytes that are free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// Grows with each claim.
    pub epoch: u64,
    /// Nodes whose processes may have the filesystem mounted.
    pub mounts: Vec<String>,
    /// The asked node's part: `absent`, `claiming`, `fencing`, `mounting`, `serving` or `draining`.
    pub phase: String,
    /// A problem that the operator should know of; empty if there is none.
    pub notice: String,
    /// How the asked node keeps another one from the LUN: `reservations`, `fence-command` or `operator`.
    pub fencing: String,
    /// Every request goes through the coordinator's filesystem, as an operator wants.
    #[serde(default)]
    pub redirected: bool,
}

/// A disk, from the registry's record and its owner's report.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.disk/2")]
pub struct DiskView {
    /// Its name.
    pub name: String,
    /// The volume that holds it.
    pub volume: String,
    /// Bytes.
    #[serde(rename = "size_bytes")]
    pub size: u64,
    /// Bytes that it takes up in its volume, fewer for a sparse disk; only in the answer about one disk, and only if the
    /// asked node can access its file.
    #[serde(default)]
    #[serde(rename = "allocated_bytes")]
    pub allocated: Option<u64>,
    /// 512 or 4096.
    #[serde(rename = "logical_block_bytes")]
    pub logical_block: u32,
    /// Requested policy.
    pub requested: String,
    /// Effective policy; empty (null in JSON) when the disk is not open.
    #[serde(default, with = "crate::null_if_empty")]
    pub effective: String,
    /// The medium of its write log.
    #[serde(default)]
    pub medium: Medium,
    /// The highest rate at which its clients are served.
    #[serde(default)]
    pub limit: Option<DiskLimit>,
    /// The node that it is open on.
    pub owner: Option<String>,
    /// The fencing token (P2).
    pub epoch: u64,
    /// Current replica set.
    pub replicas: Vec<String>,
    /// Those of them without a copy: the node is down, or has lost it in a restart.
    #[serde(default)]
    pub lost_replicas: Vec<String>,
    /// The number of replicas that are up in the owner's fault domain.
    #[serde(default)]
    pub inside: u8,
    /// The number of replicas that are up in other fault domains.
    #[serde(default)]
    pub outside: u8,
    /// The node whose clients may use it already, and whose first write moves it there.
    #[serde(default)]
    pub follower: Option<String>,
    /// `closed`, `opening`, `serving`, `degraded` (with the reason), `closing`, `releasing`, `silent` (its owner, or the shard there, does
    /// not answer), `takeover` (its owner is gone, and another node takes over), or `unavailable` (no copy of its log is left).
    pub state: String,
    /// Why it is not simply serving; empty (null in JSON) otherwise.
    #[serde(default, with = "crate::null_if_empty")]
    pub reason: String,
    /// Parts of the request that the cluster cannot satisfy.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Its export addresses.
    pub uris: Vec<String>,
    /// Watermarks and the like, as its owner says; absent when no node has it open, or its owner does not answer.
    pub detail: Option<DiskStatus>,
    /// The registry is away; the rest is the asked node's view from this many seconds ago.
    #[serde(default)]
    pub registry_age_seconds: Option<f64>,
}

impl DiskView {
    /// The state of a disk whose owner is gone and that another node takes over.
    pub const TAKEOVER: &str = "takeover";

    /// The state of a disk of whose log no copy is left.
    pub const UNAVAILABLE: &str = "unavailable";
}

/// Makes a volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    /// Its name.
    pub name: String,
    /// Kind of backing: `dir` or `lun`.
    pub kind: String,
    /// Its path on every node: an existing directory. Of a LUN: a block device of the asked node.
    pub path: PathBuf,
    /// Make this filesystem on the LUN: `xfs` or `ext4`. Whatever is there is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// The LUN's identity, repeated: nothing is done without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// The format may destroy what is on the LUN: needed where that is not blank.
    #[serde(default)]
    pub destroy: bool,
}

impl CreateVolume {
    /// A volume in a directory.
    #[must_use]
    pub fn dir(name: impl Into<String>, path: PathBuf) -> CreateVolume {
        let (format, identity, destroy) = (None, None, false);
        CreateVolume { name: name.into(), kind: "dir".into(), path, format, identity, destroy }
    }
}

/// The steps that Weir would take to make a volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.volume-plan/1")]
pub struct VolumePlan {
    /// The volume's name.
    pub volume: String,
    /// In words.
    pub action: String,
    /// The LUN's identity, which is to be repeated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// The LUN is not blank: what is there would be destroyed.
    #[serde(default)]
    pub destroys: bool,
}

/// The operator's word that a node cannot write to a volume's LUN.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfirmFenced {
    /// The node.
    pub node: String,
    /// Only say what would be done.
    #[serde(default)]
    pub dry_run: bool,
}

/// Whether all I/O of a volume on a LUN goes through its coordinator's filesystem.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetRedirected {
    /// It does.
    pub redirected: bool,
}

/// The effect of the operator's confirmation, or its preview.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.confirmed-fenced/1")]
pub struct ConfirmedFenced {
    /// The volume.
    pub volume: String,
    /// The node.
    pub node: String,
    /// Its processes that no longer count as having the filesystem mounted.
    pub processes: Vec<u64>,
    /// It was done.
    pub done: bool,
}

/// All disks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.disks/1")]
pub struct Disks {
    /// By name.
    pub disks: Vec<DiskView>,
}

/// All volumes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.volumes/1")]
pub struct Volumes {
    /// By name.
    pub volumes: Vec<VolumeView>,
}

/// Recent events.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.events/1")]
pub struct EventList {
    /// Oldest first.
    pub events: Vec<EventView>,
}

/// The meters of a disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.meters/1")]
pub struct Meters {
    /// From the top.
    pub meters: Vec<MeterView>,
}

/// Deletes a volume that has no disks. Other files in its directory stay.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeleteVolume {
    /// Only say what would be deleted.
    #[serde(default)]
    pub dry_run: bool,
}

/// The result of a deletion, or of a dry run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.deleted-volume/1")]
pub struct DeletedVolume {
    /// The volume.
    pub volume: String,
    /// Its directory, which stays.
    pub path: PathBuf,
    /// False for a dry run.
    pub done: bool,
}

/// Makes a disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateDisk {
    /// Its name.
    pub name: String,
    /// The volume to put it in.
    pub volume: String,
    /// Bytes.
    #[serde(rename = "size_bytes")]
    pub size: u64,
    /// 512 or 4096.
    #[serde(rename = "logical_block_bytes")]
    pub logical_block: u32,
    /// `write-through`, `write-back+N`, or with places `write-back+1in+1out`.
    pub policy: String,
    /// The medium of its write log, on the owner and on all replicas.
    #[serde(default)]
    pub medium: Medium,
    /// The highest rate at which its clients are served.
    #[serde(default)]
    pub limit: Option<DiskLimit>,
}

/// The highest rate at which a disk's clients are served; at least one rate is set. Reads, writes, zeroing and discards are requests;
/// the bytes are those of reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskLimit {
    /// Requests per second.
    #[serde(default)]
    pub iops: Option<u64>,
    /// Bytes per second.
    #[serde(default)]
    pub bytes_per_second: Option<u64>,
    /// After a pause, what the rates allow in so many milliseconds passes at once.
    #[serde(default = "default_burst")]
    pub burst_ms: u64,
}

fn default_burst() -> u64 {
    DiskLimit::BURST_MS
}

impl DiskLimit {
    /// The burst unless another one is set.
    pub const BURST_MS: u64 = Limit::BURST_MS;
}

impl From<Limit> for DiskLimit {
    fn from(limit: Limit) -> DiskLimit {
        let Limit { iops, bytes_per_second, burst_ms } = limit;
        DiskLimit { iops, bytes_per_second, burst_ms }
    }
}

impl From<DiskLimit> for Limit {
    fn from(limit: DiskLimit) -> Limit {
        let DiskLimit { iops, bytes_per_second, burst_ms } = limit;
        Limit { iops, bytes_per_second, burst_ms }
    }
}

impl std::fmt::Display for DiskLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Limit::from(*self).fmt(f)
    }
}

/// Sets the limit of a disk, on line, in place of the one that it has.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetLimit {
    /// The limit; `null`: none.
    pub limit: Option<DiskLimit>,
}

/// Changes the requested policy, on line.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetPolicy {
    /// `write-through`, `write-back+N`, or with places `write-back+1in+1out`.
    pub policy: String,
}

/// Makes a node the disk's owner, if it has none.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// The node; absent: the one asked.
    #[serde(default)]
    pub on: Option<String>,
    /// Open a disk whose log is lost: acknowledged writes are missing.
    #[serde(default)]
    pub accept_loss: bool,
}

/// Moves a disk to another node, while guests use it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Move {
    /// The node that is to own it.
    pub to: String,
    /// Only if that node follows the disk: a client has written there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub as_follower: bool,
}

/// Lets clients on another node use the disk before it is there. Reads are answered by the owner; the first write moves it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Follow {
    /// The node; absent: no node any more.
    #[serde(default)]
    pub to: Option<String>,
}

/// The result of a [`Move`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.moved/1")]
pub struct Moved {
    /// The node that owned it; absent if there was none.
    pub from: Option<String>,
    /// The node that owns it now.
    pub to: String,
    /// Bytes that were acknowledged and not in the backing when it changed hands.
    pub dirty_bytes: u64,
    /// The disk on its new owner.
    pub disk: DiskView,
}

/// Grows a disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// Bytes; not less than now.
    #[serde(rename = "size_bytes")]
    pub size: u64,
}

/// Deletes a disk and its data.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Delete {
    /// The disk's name again, so that a request meant for another disk does no harm; not needed with `force` or `dry_run`.
    #[serde(default)]
    pub name: String,
    /// Also when clients are connected, when its owner is gone, or cannot open it; never while the owner is isolated and serves it.
    #[serde(default)]
    pub force: bool,
    /// Only say what would be deleted.
    #[serde(default)]
    pub dry_run: bool,
}

/// The result of a deletion, or of a dry run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.deleted-disk/2")]
pub struct Deleted {
    /// The disk.
    pub disk: String,
    /// Its file.
    pub path: PathBuf,
    /// Bytes that the file occupies; absent if it is not there, or its storage does not answer.
    #[serde(rename = "allocated_bytes")]
    pub allocated: Option<u64>,
    /// What is lost apart from the file, and the reason: acknowledged writes of a disk that its owner cannot open. Empty (null in JSON) otherwise.
    #[serde(default, with = "crate::null_if_empty")]
    pub lost: String,
    /// False for a dry run.
    pub done: bool,
}

/// Makes a snapshot of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateSnapshot {
    /// Its name: at most 64 letters, digits, `.`, `_`, `-`.
    pub name: String,
    /// Other disks of the volume, of which snapshots of the same name are made at the same point in time.
    #[serde(default)]
    pub group: Vec<String>,
}

/// Deletes a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeleteSnapshot {
    /// Its name.
    pub name: String,
    /// Only say what would be deleted.
    #[serde(default)]
    pub dry_run: bool,
}

/// What the disks and snapshots of a volume take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.volume-usage/1")]
pub struct VolumeUsage {
    /// The volume.
    pub volume: String,
    /// Bytes of its filesystem.
    #[serde(rename = "size_bytes")]
    pub size: u64,
    /// Those that can still be used.
    #[serde(rename = "available_bytes")]
    pub available: u64,
    /// Those that are used: `exclusive_bytes`, `shared_bytes` and `other_bytes`.
    #[serde(rename = "used_bytes")]
    pub used: u64,
    /// Bytes that one disk or snapshot has alone.
    #[serde(rename = "exclusive_bytes")]
    pub exclusive: u64,
    /// Bytes that several have, each counted once; absent if that is not known of all of them.
    #[serde(rename = "shared_bytes")]
    pub shared: Option<u64>,
    /// Bytes of everything else: what the filesystem itself needs, and in a directory all other files; absent as `shared_bytes`.
    #[serde(rename = "other_bytes")]
    pub other: Option<u64>,
    /// Nothing but the volume is on the filesystem.
    pub filesystem_is_its_own: bool,
    /// Disks and snapshots, by the names of their files.
    pub items: Vec<UsageItem>,
}

/// What one file of a volume takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageItem {
    /// `disk` (a clone is one), `snapshot`, or `unfinished`: it is being made, or was when its maker ended, and is removed when a snapshot of
    /// the disk is made.
    pub kind: String,
    /// The disk, `DISK@SNAPSHOT`, or the unfinished file.
    pub name: String,
    /// Bytes of the disk.
    #[serde(rename = "size_bytes")]
    pub size: u64,
    /// Bytes of its blocks, those that it shares included.
    #[serde(rename = "allocated_bytes")]
    pub allocated: u64,
    /// Bytes that no other file has: they are free when it is deleted. Absent if there was no time to look, or the filesystem cannot tell.
    #[serde(rename = "exclusive_bytes")]
    pub exclusive: Option<u64>,
    /// Bytes that at least one other file has. Absent if there was no time to look, or the filesystem cannot tell.
    #[serde(rename = "shared_bytes")]
    pub shared: Option<u64>,
    /// Pieces that it is in. Absent if there was no time to look, or the filesystem cannot tell.
    pub extents: Option<u64>,
}

/// Gives a disk that no client uses the content of one of its snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RollBack {
    /// The snapshot's name.
    pub snapshot: String,
    /// The name of the snapshot that keeps the present content; absent: one with the present time.
    #[serde(default)]
    pub keep_as: Option<String>,
    /// Keep no snapshot of the present content.
    #[serde(default)]
    pub discard_current: bool,
    /// Only say what would be done.
    #[serde(default)]
    pub dry_run: bool,
}

/// A disk that has gone back to a snapshot, or would.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.rolled-back/1")]
pub struct RolledBack {
    /// The disk.
    pub disk: String,
    /// The snapshot.
    pub snapshot: String,
    /// When that was made (RFC 3339).
    pub made: String,
    /// The snapshot that has the disk's content from before; absent if that is discarded.
    pub kept: Option<String>,
    /// The disk was open, and is closed now.
    pub was_open: bool,
    /// False for a dry run.
    pub done: bool,
}

/// Makes a disk that begins as a snapshot of another one, in the same volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloneDisk {
    /// The name of the new disk.
    pub name: String,
    /// The snapshot; absent: the disk as it is now.
    #[serde(default)]
    pub snapshot: Option<String>,
    /// As of [`CreateDisk`].
    pub policy: String,
    /// As of [`CreateDisk`].
    #[serde(default)]
    pub medium: Medium,
    /// As of [`CreateDisk`].
    #[serde(default)]
    pub limit: Option<DiskLimit>,
}

/// A snapshot of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.snapshot/1")]
pub struct SnapshotView {
    /// The disk.
    pub disk: String,
    /// Its own name.
    pub name: String,
    /// Bytes of the disk at that time.
    #[serde(rename = "size_bytes")]
    pub size: u64,
    /// Bytes of its blocks, those that it shares with the disk, other snapshots and clones included.
    #[serde(rename = "allocated_bytes")]
    pub allocated: u64,
    /// When it was made (RFC 3339).
    pub made: String,
}

/// The snapshots of a disk, the oldest first.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.snapshots/1")]
pub struct Snapshots {
    /// They.
    pub snapshots: Vec<SnapshotView>,
}

/// A step of a barrier: it brings what was acknowledged to the backing of a disk, and nothing from behind that, until it is lowered, or for ten
/// seconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Barrier {
    /// Tells it from others.
    pub number: u64,
    /// What is to be done.
    pub step: BarrierStep,
}

/// What is to be done with a barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BarrierStep {
    /// Raise it. Answered when the disk is there.
    Raise,
    /// Raise it, and hold the disk's clients, so that barriers of several disks are of one time. Answered at once.
    Hold,
    /// Clients go on. Answered when the disk is there; with false, if they were not held until now.
    Release,
    /// Lower it.
    Lower,
}

/// Whether the disk is at its barrier, or was until it was lowered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarrierStood {
    /// It is, or was.
    pub stood: bool,
}

/// Runs a load on a layer of an open disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunLoad {
    /// Where.
    pub layer: LoadLayer,
    /// What.
    pub workload: Workload,
    /// Also when clients are connected: a load measures theirs as well, and one that writes destroys their data.
    #[serde(default)]
    pub force: bool,
}

/// Records a disk's profile, from now on and for some time.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordProfile {
    /// Milliseconds, 100 to 604 800 000 (7 days).
    pub length_ms: u64,
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

/// The meter of one layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeterView {
    /// `export`, `accel`, `backing`, …
    pub layer: String,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Integral of the number in flight, in request-seconds.
    #[serde(rename = "occupancy_request_seconds")]
    pub occupancy: f64,
    /// The kinds that were seen.
    pub kinds: Vec<KindView>,
}

/// The figures of one layer for one kind of request. Latencies in microseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KindView {
    /// `read`, `write`, …
    pub kind: RequestKind,
    /// Requests taken.
    pub arrivals: u64,
    /// Answered with success.
    pub completions: u64,
    /// Answered with an error.
    pub errors: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
    /// Extra requests made out of one.
    pub splits: u64,
    /// Requests saved by joining.
    pub merges: u64,
    /// Mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 99 of 100 were faster.
    pub p99_us: f64,
    /// 999 of 1000 were faster.
    pub p999_us: f64,
    /// The slowest.
    pub max_us: f64,
    /// The whole histogram: nanoseconds (within 1 %) and how many took about as long. Differences of two of them are
    /// the histogram of the time between.
    pub latency_ns: Vec<(u64, u64)>,
}

impl From<&LayerMeter> for MeterView {
    fn from(meter: &LayerMeter) -> MeterView {
        let kinds = RequestKind::ALL.iter().map(|&kind| (kind, meter.meter.kind(kind)));
        MeterView {
            layer: meter.layer.to_owned(),
            in_flight: meter.meter.in_flight(),
            occupancy: meter.meter.occupancy() as f64 / 1e9,
            kinds: kinds
                .filter(|(_, seen)| seen.arrivals > 0)
                .map(|(kind, seen)| KindView::new(kind, seen))
                .collect(),
        }
    }
}

impl KindView {
    fn new(kind: RequestKind, seen: &KindMeter) -> KindView {
        let quantile = |q: f64| seen.latency.value_at_quantile(q) as f64 / 1e3;
        KindView {
            kind,
            arrivals: seen.arrivals,
            completions: seen.completions,
            errors: seen.errors,
            bytes: seen.bytes,
            splits: seen.splits,
            merges: seen.merges,
            mean_us: seen.latency.mean() / 1e3,
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            max_us: seen.latency.max() as f64 / 1e3,
            latency_ns: seen
                .latency
                .iter_recorded()
                .map(|at| (at.value_iterated_to(), at.count_at_value()))
                .collect(),
        }
    }
}
