//! Disks.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use weir_cluster::records::{Limit, Medium};

use crate::control::node::random;
use crate::shard::messages::DiskStatus;

/// A disk, from the registry's record and its owner's report.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.disk/2")]
pub struct DiskView {
    /// Its name.
    pub name: String,
    /// The volume that holds it.
    pub volume: String,
    /// The export that it is, in a volume that is an NBD server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
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
    /// `importing` (an image is being written to it, or was when its import was cut off: with the reason), `closed`, `opening`, `serving`,
    /// `degraded` (with the reason), `closing`, `releasing`, `silent` (its owner, or the shard there, does not answer), `takeover` (its owner is gone, and another node takes over), or `unavailable` (no copy of its log is left).
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
    /// Bytes of acknowledged writes in the log of a disk that its owner could not open: at most so many, as its former owner may have
    /// destaged some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undestaged_bytes: Option<u64>,
    /// The registry is away; the rest is the asked node's view from this many seconds ago.
    #[serde(default)]
    pub registry_age_seconds: Option<f64>,
}

impl DiskView {
    /// Bytes of acknowledged writes that only its log has, if that is known.
    #[must_use]
    pub fn dirty_bytes(&self) -> Option<u64> {
        self.detail.as_ref().map(|detail| detail.dirty_bytes).or(self.undestaged_bytes)
    }

    /// The state of a disk whose owner is gone and that another node takes over.
    pub const TAKEOVER: &str = "takeover";

    /// The state of a disk of whose log no copy is left.
    pub const UNAVAILABLE: &str = "unavailable";

    /// The state of a disk that is the target of an import: nobody else may use it.
    pub const IMPORTING: &str = "importing";
    /// It is closed, and its file is copied to one in fewer extents; benign.
    pub const COMPACTING: &str = "compacting";
}

/// All disks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.disks/1")]
pub struct Disks {
    /// By name.
    pub disks: Vec<DiskView>,
}

/// Makes a thin disk. A thick one is an import ([`BeginImport`]) of zeroes, which [`FillDisk`] writes.
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

/// Makes a disk of an export of its volume's server, which holds what the export holds: nothing is written to it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdoptExport {
    /// The disk's name.
    pub name: String,
    /// The volume, which is of the kind `nbd`.
    pub volume: String,
    /// The export; absent: that of the disk's name.
    #[serde(default)]
    pub export: Option<String>,
    /// Bytes; the export must have as many. Absent: as many as it has.
    #[serde(default, rename = "size_bytes")]
    pub size: Option<u64>,
    /// 512 or 4096; absent: the smallest that the server allows.
    #[serde(default, rename = "logical_block_bytes")]
    pub logical_block: Option<u32>,
    /// As of [`CreateDisk`].
    pub policy: String,
    /// As of [`CreateDisk`].
    #[serde(default)]
    pub medium: Medium,
    /// As of [`CreateDisk`].
    #[serde(default)]
    pub limit: Option<DiskLimit>,
}

/// Makes a disk that an import is about to fill. Until its end ([`OfImport`]) nobody else may use it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BeginImport {
    /// Proves the importer; not 0. The client chooses it at random: if no answer comes, it asks again with the same number, and the disk that
    /// was made meanwhile is its own.
    pub number: u64,
    /// The disk.
    pub disk: CreateDisk,
    /// Bytes that the import will write: the disk is not made if its volume has fewer.
    pub needed_bytes: u64,
}

impl BeginImport {
    /// An import of its own number.
    #[must_use]
    pub fn new(disk: CreateDisk, needed_bytes: u64) -> BeginImport {
        BeginImport { number: random().max(1), disk, needed_bytes }
    }
}

/// An import that has begun.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.import/1")]
pub struct Importing {
    /// [`BeginImport::number`].
    pub number: u64,
    /// The disk.
    pub disk: DiskView,
}

impl Importing {
    /// The name of the export that the import alone may open.
    #[must_use]
    pub fn export(&self) -> String {
        export_of_import(&self.disk.name, self.number)
    }
}

/// The name of a disk's export for an import.
#[must_use]
pub fn export_of_import(disk: &str, number: u64) -> String {
    format!("{disk}{OF_IMPORT}{number:016x}")
}

/// The disk and the number of such a name.
#[must_use]
pub fn import_of_export(export: &str) -> Option<(&str, u64)> {
    let (disk, number) = export.split_once(OF_IMPORT)?;
    Some((disk, u64::from_str_radix(number, 16).ok()?))
}

/// No disk has this in its name, and URIs have it as it is.
const OF_IMPORT: &str = "~import-";

/// The import's client opens the disk, or has written all of it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OfImport {
    /// [`Importing::number`].
    pub number: u64,
}

/// Gives the disk of an import space of its own from `from` on, which reads as zeroes: a disk all of which has that is thick, and does not
/// run out of space. As much as is done in about a second.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FillDisk {
    /// [`Importing::number`].
    pub number: u64,
    /// The first byte; a multiple of 4096. What the disk has from there on is lost.
    #[serde(rename = "from_bytes")]
    pub from: u64,
}

/// How far the space of a disk has come.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.filled/1")]
pub struct Filled {
    /// The end of what is done: the next step begins there, if that is not the disk's size.
    #[serde(rename = "filled_bytes")]
    pub end: u64,
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

/// Copies a disk that no client uses to fewer extents.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompactDisk {
    /// Only say what would be done.
    #[serde(default)]
    pub dry_run: bool,
}

/// A copy of a disk to fewer extents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.compaction/1")]
pub struct CompactionView {
    /// The disk.
    pub disk: String,
    /// `planned` for a dry run, `copying`, or `done`.
    pub state: String,
    /// Extents of its file before.
    pub extents: u64,
    /// Extents of its file now; absent until it is done.
    pub extents_after: Option<u64>,
    /// Bytes that are copied altogether.
    #[serde(rename = "total_bytes")]
    pub bytes: u64,
    /// Bytes that have been copied.
    #[serde(rename = "copied_bytes")]
    pub copied: u64,
    /// Bytes that the disk shared with snapshots and clones, and has for itself afterwards.
    #[serde(rename = "unshared_bytes")]
    pub shared: u64,
    /// The disk was open, and is closed now.
    pub was_open: bool,
}

/// Deletes a disk and its data.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Delete {
    /// The disk's name again, so that a request meant for another disk does no harm; not needed with `force` or `dry_run`.
    #[serde(default)]
    pub name: String,
    /// Also when clients are connected, when its owner is gone, or cannot open it; never while the owner is isolated and serves it. An
    /// export or a block device, which stays, is destaged first, if the disk is open.
    #[serde(default)]
    pub force: bool,
    /// As `force`, and never destaged first: what the write log alone has is lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub discard: bool,
    /// Only say what would be deleted.
    #[serde(default)]
    pub dry_run: bool,
    /// Only while the import with this number has not ended: its client gives the disk up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub import: Option<u64>,
}

/// The result of a deletion, or of a dry run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.deleted-disk/2")]
pub struct Deleted {
    /// The disk.
    pub disk: String,
    /// Its file, export or block device.
    pub path: PathBuf,
    /// That stays, with all its data: an export or a block device. A file is removed.
    #[serde(default)]
    pub stays: bool,
    /// Bytes that the file occupies; absent if it is not there, or its storage does not answer.
    #[serde(rename = "allocated_bytes")]
    pub allocated: Option<u64>,
    /// What is lost apart from the file, and the reason: acknowledged writes of a disk that its owner cannot open. Empty (null in JSON) otherwise.
    #[serde(default, with = "crate::null_if_empty")]
    pub lost: String,
    /// The clients that the deletion disconnects. Empty (null in JSON) if there are none, or if that is unknown.
    #[serde(default, with = "crate::null_if_empty")]
    pub connected: String,
    /// False for a dry run.
    pub done: bool,
}

/// The answers of several deletions that one command asked for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.deleted-disks/1")]
pub struct DeletedDisks {
    /// In the order of the command.
    pub deleted: Vec<Deleted>,
}
