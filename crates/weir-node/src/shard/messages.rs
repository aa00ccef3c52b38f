//! Messages between the control plane (tokio) and a shard (its own thread).
//!
//! Both directions are bounded queues. The control plane decides nothing about data: it carries out a disk's requests (a
//! compare-and-swap in the registry, a connection to a peer) and passes the registry's records to the shard. The shard never
//! waits for an answer.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use tokio::sync::oneshot;
use weir_accel::{Configuration, DestageStatus, Former};
use weir_block::{IoError, LayerMeter, SharedFile, Stream};
use weir_export::{Client, Delays, Rate};
use weir_load::{Summary, Workload};
use weir_profile::Profile;
use weir_volume::lun::route_status::{Reason, RouteStatus};
use weir_volume::lun::serving::{Change, OpenedDisk};
use weir_volume::{BackingKind, BackingOptions, FileIdentity, Mark, Trace};

use super::barrier::BarrierError;

/// The way in which a disk comes to this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Nothing dirty anywhere: an empty log.
    Clean,
    /// This node holds a complete replica of the former owner's log and goes on from it.
    TakeOver {
        /// The certain knowledge about the former owners (P2, P4).
        former: Former,
    },
    /// Nothing dirty (write-through), but there was another owner before (P2, P4).
    FromWriteThrough {
        /// The certain knowledge about the former owners.
        former: Former,
    },
}

/// A disk to be opened for writing on a shard.
#[derive(Clone, Debug)]
pub struct OpenDisk {
    /// Name of the disk; unique in the cluster.
    pub disk: String,
    /// Tells the disk from earlier ones of its name, whose files had the same path.
    pub id: u64,
    /// Its backing.
    pub backing: BackingKind,
    /// The identity of the file's volume, from the file's directory; `None` for a device.
    pub volume: Option<u64>,
    /// This process's, by which a successor sees whether I/O of it is under way (P4).
    pub mark: Mark,
    /// Bytes.
    pub size: u64,
    /// 512 or 4096.
    pub logical_block: u32,
    /// Bytes of the write log's arena.
    pub log_bytes: u64,
    /// The medium of its log.
    pub medium: LogMedium,
    /// The highest rate at which its clients are served.
    pub rate: Option<Rate>,
    /// As committed in the registry.
    pub configuration: Configuration,
    /// The origin of its log.
    pub arrival: Arrival,
    /// Until when this node may serve the disk, in nanoseconds of the machine's clock. It answers nothing beyond (P2).
    pub serves_until: Arc<AtomicU64>,
}

/// The outcome of opening a disk: the file of a volume that it has open, if it has one; or in words why it is not open.
pub type Opening = Result<Option<FileIdentity>, String>;

/// The medium of a disk's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogMedium {
    /// In memory.
    Ram,
    /// On this node's flash.
    Flash {
        /// Tells the disk from earlier ones of its name.
        disk_id: u64,
    },
}

/// Why a backing was not opened to see whether that is possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unopened {
    /// It cannot be opened, or its storage does not answer.
    Fails(String),
    /// Too many others are being opened; this says nothing about it.
    Busy(String),
}

/// To a shard.
#[derive(Debug)]
#[expect(missing_docs, reason = "the sentence above each variant names its fields")]
pub enum Command {
    /// Open a disk that this node has just come to own in the registry.
    Open(Box<OpenDisk>, oneshot::Sender<Opening>),
    /// Open a disk's backing and close it again. Answered with the outcome.
    CanOpen {
        disk: String,
        backing: BackingKind,
        options: Box<BackingOptions>,
        answer: oneshot::Sender<Result<(), Unopened>>,
    },
    /// Destage everything, end all I/O, close. Answered when nothing is under way any more. `unless_used`: not if it has clients.
    Close { disk: String, unless_used: bool, done: oneshot::Sender<Result<(), NotClosed>> },
    /// The registry says that another node owns the disk now: end all I/O; `keep` the log as a replica, or drop it. Answered
    /// when no I/O is in flight any more, so that the new owner can go on (P4).
    ReleaseDisk { disk: String, keep: bool, done: oneshot::Sender<()> },
    /// This node is to own the disk next: have it in the replica set. `None`: no longer.
    Successor { disk: String, node: Option<String> },
    /// Clients on this node may use the disk, and those of no other node beside the owner's: disconnect them.
    FollowerIs { disk: String, node: Option<String> },
    /// Stop destaging. Answered when no write is on its way to the backing and every replica knows this owner.
    HoldDestage { disk: String, done: oneshot::Sender<()> },
    /// Destage goes on.
    ResumeDestage { disk: String },
    /// Take no new requests from clients. Answered when all requests taken are answered, or after a bounded time; the replies are
    /// kept until `ResumeClients` or `ReleaseDisk`.
    HoldClients { disk: String, done: oneshot::Sender<()> },
    /// The disk stays here: serve its clients again.
    ResumeClients { disk: String },
    /// A change that the disk (or an operator) requested is committed.
    Configured { disk: String, configuration: Configuration },
    /// A change that the disk requested is not possible now; it may ask again after a while.
    NotConfigured { disk: String, reason: String },
    /// More is certain about the former owners now (P2, P4).
    Former { disk: String, former: Former },
    /// Check the backing of an open disk for I/O of a process that has ended (P4). Not answered if no check is possible.
    Look { disk: String, mark: Mark, answer: oneshot::Sender<Trace> },
    /// The registry names this owner still, though a replica has refused it.
    StillOwner { disk: String },
    /// A connection to `node` for replicating `disk` is there.
    PeerConnected { disk: String, node: String, stream: Stream },
    /// No connection to `node` is possible (or to any node at all, if `node` is empty).
    PeerUnavailable { disk: String, node: String, reason: String },
    /// `node` answers nobody any more, although its connection stands.
    PeerSilent { disk: String, node: String },
    /// An owner has connected to this node to replicate `disk` here. `known_epoch` is that of the disk's record.
    Replicate { disk: String, medium: LogMedium, known_epoch: u64, owner: String, stream: Stream },
    /// A log of this disk is on this node's flash: read it, and keep it as a replica.
    Recover { disk: String, done: oneshot::Sender<Result<(), String>> },
    /// Whether a complete copy of the disk's log is here, as a replica.
    HasCopy { disk: String, answer: oneshot::Sender<bool> },
    /// The record of a disk whose copy is kept here, or may be, has come to this epoch and names this owner.
    RecordIs { disk: String, epoch: u64, owner: Option<String> },
    /// A replica kept here for a disk that is gone, or whose set does not name this node any more.
    ForgetReplica { disk: String, below_epoch: u64 },
    /// An NBD client chose this disk.
    Attach { disk: String, client: Box<Client> },
    /// The requested policy changed.
    SetPolicy { disk: String, wanted_replicas: Option<usize> },
    /// The limit of the rate at which clients are served changed.
    SetRate { disk: String, rate: Option<Rate> },
    /// The disk's size changed (grown).
    Resize { disk: String, size: u64, done: oneshot::Sender<Result<(), String>> },
    /// The file of a disk that is served to its owner has grown.
    Lengthened { disk: String, size: u64 },
    /// Bring everything that was acknowledged to the backing of an open disk, and nothing from behind that. Answered at once. With `holds`, clients
    /// hear of nothing from then on until `ReleaseBarrier`, or for less than a second.
    RaiseBarrier { disk: String, number: u64, holds: bool, done: oneshot::Sender<Result<(), BarrierError>> },
    /// Clients that are held for a barrier go on. Answered with whether they were held until now.
    ReleaseBarrier { disk: String, number: u64, done: oneshot::Sender<bool> },
    /// Answered when the backing is as `RaiseBarrier` says.
    AwaitBarrier { disk: String, number: u64, done: oneshot::Sender<Result<(), BarrierError>> },
    /// Destage goes on. Answered with whether the backing has been as `RaiseBarrier` has said until now.
    LowerBarrier { disk: String, number: u64, done: oneshot::Sender<bool> },
    /// The states of this shard's disks.
    Status { answer: oneshot::Sender<Vec<DiskStatus>> },
    /// The meters of one disk, from the export down.
    Meters { disk: String, answer: oneshot::Sender<Option<Vec<LayerMeter>>> },
    /// The meter of a disk that this node serves to its owner, as the coordinator of its volume.
    ServedMeter { disk: String, answer: oneshot::Sender<Option<LayerMeter>> },
    /// The profile of one disk, since it was opened.
    Profile { disk: String, answer: oneshot::Sender<Option<Box<Profile>>> },
    /// Record the profile of one disk for `length`; answered when that is over.
    RecordProfile { disk: String, length: Duration, answer: oneshot::Sender<Result<Box<Profile>, String>> },
    /// Run a load straight onto a layer of an open disk.
    Load {
        disk: String,
        layer: LoadLayer,
        workload: Box<Workload>,
        force: bool,
        answer: oneshot::Sender<Result<Summary, String>>,
    },
    /// This node coordinates the volume of a disk, in `epoch`: serve it to its owner, who is of the epoch `owner` at least. Answered when that
    /// is begun, or with the reason why not.
    Serve {
        disk: String,
        opened: OpenedServed,
        epoch: u64,
        owner: Option<u64>,
        done: oneshot::Sender<Result<(), String>>,
    },
    /// Change the layout of a disk that is served here, when its owner has given up all that it holds. Answered when that is done.
    ChangeServed {
        disk: String,
        number: u64,
        change: ServedChange,
        done: oneshot::Sender<Result<(), IoError>>,
    },
    /// Nobody waits for a change of a served disk any more: it is not made if it has not begun.
    ForgetChange { disk: String, number: u64 },
    /// This node does not coordinate the volume of a disk any more. Answered when nothing of it is under way.
    StopServing { disk: String, done: oneshot::Sender<()> },
    /// The owner of a disk that is served here has connected; it is of the epoch `epoch` at most.
    OwnerConnected { disk: String, stream: Stream, epoch: u64 },
    /// Another node coordinates the volume of an open disk now, or nobody does.
    LoseCoordinator { disk: String },
    /// This node is fenced from the LUN of an open disk: give up what it holds there. Answered when nothing of it is under way there.
    DropLeases { disk: String, done: oneshot::Sender<()> },
    /// The LUN of an open disk lets this node write again.
    Admitted { disk: String },
    /// This node's path to the LUN of an open disk: the answer to `WantPath`.
    Path { disk: String, lun: SharedFile },
    /// Whether an operator wants all I/O of an open disk to go through its volume's coordinator; read when this arrives.
    Redirect { disk: String, wanted: Arc<AtomicBool> },
    /// Until when an operator's move of the volume's coordination accounts for the lack of a coordinator, in nanoseconds.
    Handovers { disk: String, until: Arc<AtomicU64> },
    /// A connection to the coordinator of an open disk's volume is there.
    CoordinatorConnected { disk: String, stream: Stream },
    /// This node coordinates the volume of an open disk, and serves it.
    CoordinatorHere { disk: String },
    /// Close every disk (destaging first), then end the thread.
    Stop { done: oneshot::Sender<()> },
}

/// Why a disk is not closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotClosed {
    /// It has so many clients, and goes on as before.
    Used(usize),
    /// Another reason.
    Failed(String),
}

/// A disk of a volume that this node coordinates, on its way to its shard.
pub struct OpenedServed(pub OpenedDisk);

impl fmt::Debug for OpenedServed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OpenedServed")
    }
}

/// A change of a served disk's layout, on its way to its shard.
pub struct ServedChange(pub Change);

impl fmt::Debug for ServedChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServedChange")
    }
}

/// The layer that a load is put on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadLayer {
    /// Below the accelerator; refused while the log is not empty and, for writing, while clients are connected.
    Backing,
    /// The same of a disk of a volume on a LUN, by its node's own path also while the operator has all I/O redirected.
    Direct,
    /// The accelerator under its effective policy.
    Accel,
}

impl LoadLayer {
    /// A load there does not go through the log.
    #[must_use]
    pub fn is_below_log(self) -> bool {
        self != LoadLayer::Accel
    }
}

/// A configuration that an open disk wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedConfiguration {
    /// The epoch that the change starts from.
    pub epoch: u64,
    /// The new set.
    pub replicas: Vec<String>,
    /// The new effective mode.
    pub write_back: bool,
    /// The policy that the disk strove for when it asked; `None` is write-through. It may have been told another since.
    pub wanted_replicas: Option<usize>,
}

/// From a shard.
#[derive(Debug)]
#[expect(missing_docs, reason = "the sentence above each variant names its fields")]
pub enum Notice {
    /// Commit the configuration if the epoch is still the same; answer with `Configured` or `NotConfigured`.
    WantConfiguration { disk: String, wanted: WantedConfiguration },
    /// Connect to a node other than `exclude` that goes with those that are `connected` (chosen by medium, room and fault
    /// domain); answer with `PeerConnected` or `PeerUnavailable`. With `node` set: to that node.
    WantPeer { disk: String, node: Option<String>, connected: Vec<String>, exclude: Vec<String> },
    /// A replica knows a higher epoch: this node does not own the disk any more. The control plane reads the registry
    /// and sends `ReleaseDisk`.
    Refused { disk: String, epoch: u64 },
    /// The LUN of a disk that is open or served here has refused this node's I/O, or the volume's filesystem has shut down.
    Fenced { disk: String },
    /// An open disk has no way to its volume's coordinator; answer with `CoordinatorConnected` or `CoordinatorHere`. It asks again.
    WantCoordinator { disk: String },
    /// An open disk has had no path to its volume's LUN so far; answer with `Path`, if this node has one. It asks again.
    WantPath { disk: String },
    /// Something that the operator should read.
    Event { disk: String, kind: &'static str, text: String },
}

/// The state of a disk on a shard, owned or replicated.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct DiskStatus {
    /// Name.
    pub disk: String,
    /// `owner` or `replica`.
    pub role: String,
    /// `opening`, `serving`, `degraded` (with the reason), `closing`, `releasing`, or for a replica `complete`, `filling`; `silent` when the shard
    /// does not answer.
    pub state: String,
    /// Why it is not simply serving; empty otherwise.
    pub reason: String,
    /// Current epoch.
    pub epoch: u64,
    /// `write-through` or `write-back+N`.
    pub effective: String,
    /// The watermarks: the last sequence number of each.
    pub appended: u64,
    /// In the log of every replica.
    pub replicated: u64,
    /// Answered.
    pub acknowledged: u64,
    /// The last that this owner, or the one whose log it has inherited, can have answered; of a replica, nothing.
    pub promised: u64,
    /// In the backing, and flushed.
    pub destaged: u64,
    /// Gone from the log.
    pub freed: u64,
    /// Bytes acknowledged and not destaged.
    pub dirty_bytes: u64,
    /// Bytes of the log's arena in use.
    pub log_used_bytes: u64,
    /// Bytes of the log's arena.
    pub log_bytes: u64,
    /// Destage rates and ages; of a replica, nothing.
    pub destage: DestageStatus,
    /// Connected export clients.
    pub clients: usize,
    /// What the disk's limit has delayed since it was opened here; of a replica, nothing.
    #[serde(default)]
    pub limit_delays: LimitDelays,
    /// Requests in flight at the top of the accelerator.
    pub in_flight: usize,
    /// Faults of its backing that the node has seen beside the I/O.
    #[serde(default)]
    pub faults: Vec<String>,
    /// The nodes on which programs read its file; each counts among the clients.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readers: Vec<String>,
    /// The nodes that forward clients of theirs, which count among the clients.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwarders: Vec<String>,
    /// Its volume is full: writes that need space wait or fail, and so does destage; of a replica, nothing.
    #[serde(default)]
    pub is_full: bool,
    /// By which way its I/O goes, of a disk of a volume on a LUN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub route: Option<RouteView>,
}

/// By which way the I/O of a disk goes, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RouteView {
    /// `direct`, `block-redirected`, `file-redirected` or `paused`.
    pub state: String,
    /// Why it is not simply direct.
    pub reasons: Vec<RouteReason>,
    /// Parts of requests that this node did on the LUN, since the disk was opened.
    pub direct: u64,
    /// Parts that the coordinator did on the LUN.
    pub block: u64,
    /// Requests that the coordinator did through its filesystem.
    pub file: u64,
    /// Parts of reads in holes.
    pub zeroes: u64,
    /// Parts of requests that crossed from one extent to another.
    pub splits: u64,
}

/// A reason flag.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RouteReason {
    /// Its name.
    pub flag: String,
    /// Nobody has to do anything.
    pub benign: bool,
}

impl From<RouteStatus> for RouteView {
    fn from(status: RouteStatus) -> RouteView {
        let RouteStatus { state, reasons, counts } = status;
        let reason = |one: Reason| RouteReason { flag: one.name().to_owned(), benign: one.is_benign() };
        RouteView {
            state: state.name().to_owned(),
            reasons: reasons.iter().map(reason).collect(),
            direct: counts.direct,
            block: counts.block,
            file: counts.file,
            zeroes: counts.zeroes,
            splits: counts.splits,
        }
    }
}

/// Clients' requests that a disk's limit has delayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LimitDelays {
    /// The number of requests that have waited.
    pub requests: u64,
    /// The sum of their waits, each from when it was the next of its connection.
    pub seconds: f64,
    /// Connections whose next request waits now.
    pub waiting: usize,
}

impl From<Delays> for LimitDelays {
    fn from(delays: Delays) -> LimitDelays {
        let Delays { requests, waited, waiting } = delays;
        LimitDelays { requests, seconds: waited.as_secs_f64(), waiting }
    }
}

impl DiskStatus {
    /// The state of a disk whose backing is being opened. Its numbers are zero, whatever its log holds.
    pub const OPENING: &str = "opening";

    /// The state of a disk that serves, and of which something is not as it should be.
    pub const DEGRADED: &str = "degraded";

    /// The state of a replica that does not have the whole log yet.
    pub const FILLING: &str = "filling";

    /// The state of a disk that belongs to another node, or will be opened anew here. Its numbers are those of its former log.
    pub const RELEASING: &str = "releasing";

    /// The state of a disk whose shard does not answer. Its numbers are those of its last answer.
    pub const SILENT: &str = "silent";

    /// Whether the numbers are those of the disk's log now.
    #[must_use]
    pub fn is_current(&self) -> bool {
        ![DiskStatus::OPENING, DiskStatus::RELEASING, DiskStatus::SILENT].contains(&&*self.state)
    }
}
