//! Volumes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.volume/1")]
pub struct VolumeView {
    /// Its name.
    pub name: String,
    /// Kind of backing: `dir`, `lun` or `nbd`.
    pub kind: String,
    /// Its path on every node; of a LUN, that on the node where it was made; empty, if it is a server.
    pub path: PathBuf,
    /// The URI of the NBD server that it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// The exports that the server listed when the volume was made, if it lists any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exports: Option<Vec<String>>,
    /// Disks in it.
    pub disks: usize,
    /// The volume is full (`volume-full`): writes of these disks, or their destage, find no space.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub full_for: Vec<String>,
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

/// A problem that a node has with a volume on a LUN.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeNotice {
    /// The node.
    pub node: String,
    /// Whether it has a path to the LUN. Where it has none, I/O goes through the coordinator.
    pub has_path: bool,
    /// The problem, in words.
    pub notice: String,
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
    /// The node that an operator wants to coordinate it, until that has claimed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moves_to: Option<String>,
    /// The asked node's part: `absent`, `claiming`, `fencing`, `listening`, `mounting`, `serving` or `draining`.
    pub phase: String,
    /// A problem that the operator should know of; empty if there is none.
    pub notice: String,
    /// The same of all nodes that are up, the asked one among them, while the volume is served.
    #[serde(default)]
    pub notices: Vec<NodeNotice>,
    /// How the asked node keeps another one from the LUN: `reservations`, `fence-command` or `operator`.
    pub fencing: String,
    /// Every request goes through the coordinator's filesystem, as an operator wants.
    #[serde(default)]
    pub redirected: bool,
}

/// Makes a volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    /// Its name.
    pub name: String,
    /// Kind of backing: `dir`, `lun` or `nbd`.
    pub kind: String,
    /// Its path on every node: an existing directory. Of a LUN: a block device of the asked node. Absent for a server.
    #[serde(default)]
    pub path: PathBuf,
    /// The URI of an NBD server, which every node reaches by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
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
        let (server, format, identity, destroy) = (None, None, None, false);
        CreateVolume { name: name.into(), kind: "dir".into(), path, server, format, identity, destroy }
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

/// Moves the coordination of a volume on a LUN.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveVolume {
    /// The node that is to coordinate it.
    pub to: String,
    /// Only say what would be done.
    #[serde(default)]
    pub dry_run: bool,
}

/// The result of a [`MoveVolume`], or its preview.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.moved-volume/1")]
pub struct MovedVolume {
    /// The volume.
    pub volume: String,
    /// The node that coordinated it.
    pub from: String,
    /// The node that coordinates it now, or would.
    pub to: String,
    /// The present coordination's; it grows with each claim.
    pub epoch: u64,
    /// From the request until the volume was served again; absent for a dry run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// False for a dry run.
    pub done: bool,
}

/// Whether all I/O of a volume on a LUN goes through its coordinator's filesystem.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetRedirected {
    /// It does.
    pub redirected: bool,
}

/// The storage has moved a volume to another LUN.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetIdentity {
    /// That LUN's identity: its WWN or serial number.
    pub identity: String,
    /// Only say what would be done.
    #[serde(default)]
    pub dry_run: bool,
}

/// The result of a [`SetIdentity`], or its preview.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.changed-identity/1")]
pub struct ChangedIdentity {
    /// The volume.
    pub volume: String,
    /// The identity of its LUN before.
    pub from: String,
    /// That of its LUN now, or as it would be.
    pub to: String,
    /// False for a dry run.
    pub done: bool,
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

/// All volumes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.volumes/1")]
pub struct Volumes {
    /// By name.
    pub volumes: Vec<VolumeView>,
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
    /// Its directory, or its server, which stays.
    pub path: PathBuf,
    /// False for a dry run.
    pub done: bool,
}

/// The current exports of a volume's NBD server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.server-exports/1")]
pub struct ServerExports {
    /// The volume.
    pub volume: String,
    /// Those that the server lists; absent if it lists none to anybody.
    pub exports: Option<Vec<ServerExport>>,
}

/// An export that a server lists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerExport {
    /// Its name.
    pub name: String,
    /// The disk that it is; absent: none.
    pub disk: Option<String>,
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
    /// The node that looked deleted a disk or a snapshot there so many seconds ago, and the filesystem may still be freeing its space: until
    /// then it counts as used, and as shared or other. Absent if that is long ago.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deleted_seconds_ago: Option<u64>,
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
