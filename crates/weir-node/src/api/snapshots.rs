//! Snapshots, clones, and the barriers behind them.

use serde::{Deserialize, Serialize};
use weir_cluster::records::Medium;

use super::DiskLimit;

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
    /// As of [`CreateDisk`](super::CreateDisk).
    pub policy: String,
    /// As of [`CreateDisk`](super::CreateDisk).
    #[serde(default)]
    pub medium: Medium,
    /// As of [`CreateDisk`](super::CreateDisk).
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

/// Asks how many extents a disk's file is in, or a snapshot's.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LookAtLayout {
    /// The snapshot; absent: the disk itself.
    #[serde(default)]
    pub snapshot: Option<String>,
    // Nodes of earlier versions refuse what they do not know.
    /// What the blocks are to be shared for, if for anything: it is checked, too, and not done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Sharing>,
}

/// What the blocks of a disk are shared for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// A snapshot of it.
    Snapshot(CreateSnapshot),
    /// A disk that begins as it, or as its snapshot.
    Clone(CloneDisk),
}

/// The extents of a file, and what they cost when its blocks are shared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.layout/1")]
pub struct LayoutView {
    /// The disk.
    pub disk: String,
    /// Its snapshot, if that was asked for.
    pub snapshot: Option<String>,
    /// Extents; absent: too many to count them in five seconds.
    pub extents: Option<u64>,
    /// There are so many that a snapshot or a clone takes noticeable time.
    pub is_many: bool,
    /// About how long it takes to share the blocks; absent where `extents` is.
    pub share_seconds: Option<f64>,
    /// What follows from that, and what can be done; empty (null in JSON) if there are not many.
    #[serde(default, with = "crate::null_if_empty")]
    pub advice: String,
}
