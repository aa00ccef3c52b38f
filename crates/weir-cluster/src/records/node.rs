//! Records of nodes, volumes and events.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Medium, Record, RecordError, check_name, is_zero};
use crate::machine::Machine;

/// One process of a node. A restarted node is the same node and another process: the former one's RAM and rights are gone, its
/// flash remains ([`DiskRecord::counts`]).
///
/// Two are equal when they name the same process, whatever their flash identity.
///
/// [`DiskRecord::counts`]: super::DiskRecord::counts
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeRef {
    /// The node's name.
    pub node: String,
    /// Unique for each start of a process of that node.
    pub incarnation: u64,
    /// Identity of the process's flash medium.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash: Option<u64>,
}

impl NodeRef {
    /// Names a process of a node.
    #[must_use]
    pub fn new(node: impl Into<String>, incarnation: u64) -> NodeRef {
        NodeRef { node: node.into(), incarnation, flash: None }
    }

    /// With a flash medium.
    #[must_use]
    pub fn with_flash(self, flash: Option<u64>) -> NodeRef {
        NodeRef { flash, ..self }
    }

    fn process(&self) -> (&str, u64) {
        (&self.node, self.incarnation)
    }
}

impl PartialEq for NodeRef {
    fn eq(&self, other: &NodeRef) -> bool {
        self.process() == other.process()
    }
}

impl Eq for NodeRef {}

impl PartialOrd for NodeRef {
    fn partial_cmp(&self, other: &NodeRef) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for NodeRef {
    fn cmp(&self, other: &NodeRef) -> Ordering {
        self.process().cmp(&other.process())
    }
}

impl Hash for NodeRef {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.process().hash(state);
    }
}

impl fmt::Display for NodeRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.node, self.incarnation)
    }
}

/// `nodes/<name>`: a node with a valid lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// The node's name.
    pub name: String,
    /// The incarnation of the node's process.
    pub incarnation: u64,
    /// Identity of its flash medium, if any: unchanged by a restart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash: Option<u64>,
    /// Address for messages of its peers.
    pub peer_address: SocketAddr,
    /// Address of its NBD export over TCP in plain text, if any.
    pub nbd_tcp: Option<SocketAddr>,
    /// Address of its NBD export over TLS, if any. A node of an older version has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd_tls: Option<SocketAddr>,
    /// The Unix socket of its NBD export.
    pub nbd_unix: PathBuf,
    /// The Unix socket of its API.
    pub api: PathBuf,
    /// Its fault domain (rack, chassis, feed).
    pub fault_domain: String,
    /// Its media for logs, each at most once. Empty in the record of an older version of Weir.
    #[serde(default)]
    pub media: Vec<MediumSpace>,
    /// Number of its logs: one for each of its own disks, one for each copy of another owner's log.
    ///
    /// Each costs about the same space, and a share of the node's network and processor. Bytes per second would describe only the
    /// current moment, and placement would chase it.
    #[serde(default)]
    pub load: u64,
    /// It takes the clients of its disks that other nodes forward, and forwards its own. An older version does not say; it does.
    #[serde(default = "yes", skip_serializing_if = "Clone::clone")]
    pub forwards: bool,
}

fn yes() -> bool {
    true
}

/// A node's space on one medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediumSpace {
    /// The medium.
    pub medium: Medium,
    /// Bytes for write logs, its own and copies of others'.
    pub bytes: u64,
    /// Free bytes of that.
    pub free: u64,
    /// Bytes of one more log.
    pub log: u64,
}

impl NodeRecord {
    /// The record's process.
    #[must_use]
    pub fn node_ref(&self) -> NodeRef {
        NodeRef::new(&*self.name, self.incarnation).with_flash(self.flash)
    }

    /// The node's space on `medium`; `None` when it lacks it or does not report it.
    #[must_use]
    pub fn space(&self, medium: Medium) -> Option<&MediumSpace> {
        self.media.iter().find(|space| space.medium == medium)
    }

    /// Whether the node supports logs on `medium`.
    #[must_use]
    pub fn offers(&self, medium: Medium) -> bool {
        // A node that does not report is of a version with memory only.
        self.space(medium).is_some() || (self.media.is_empty() && medium == Medium::Ram)
    }

    /// Whether one more log fits on `medium`. True for a node that does not report its space.
    #[must_use]
    pub fn has_room(&self, medium: Medium) -> bool {
        self.space(medium).map_or(self.offers(medium), |space| space.free >= space.log)
    }
}

impl Record for NodeRecord {
    const KIND: &'static str = "node";

    fn check(&self) -> Result<(), RecordError> {
        check_name(&self.name)?;
        check_name(&self.fault_domain)?;
        let twice = |(index, space): (usize, &MediumSpace)| {
            self.media[..index].iter().any(|earlier| earlier.medium == space.medium)
        };
        if self.media.iter().enumerate().any(twice) {
            let reason = "it lists a medium twice".to_owned();
            return Err(RecordError::Contradiction { kind: Self::KIND, reason });
        }
        Ok(())
    }
}

/// `members/<name>`: a node that belongs to the cluster, up or down, until it is removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRecord {
    /// The node's name.
    pub name: String,
    /// Its fault domain when it last joined.
    pub fault_domain: String,
    /// The time since which another node has seen it without a lease, in milliseconds since 1970; absent while it is up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_since_unix_ms: Option<u64>,
}

impl Record for MemberRecord {
    const KIND: &'static str = "member";

    fn check(&self) -> Result<(), RecordError> {
        check_name(&self.name)?;
        check_name(&self.fault_domain)
    }
}

/// The kind of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum VolumeKind {
    /// A directory.
    Dir,
    /// A shared block device with a filesystem of its own.
    Lun,
    /// An NBD server, of which each disk is an export.
    Nbd,
}

/// The server of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NbdRecord {
    /// Its URI without an export, as `nbd://10.0.0.7:10809/`, the same for every node.
    pub server: String,
}

/// The LUN of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LunRecord {
    /// By which operators know it: its WWN or serial number.
    pub identity: String,
    /// `ext4` or `xfs`.
    pub filesystem: String,
    /// The filesystem's identity, by which nodes find the LUN, in 32 hexadecimal digits.
    pub uuid: String,
    /// The volume's identity in the heartbeat area, in 32 hexadecimal digits.
    pub mark: String,
    /// First byte of the heartbeat area on the LUN.
    pub heartbeat: u64,
    /// The operator wants every request to go through the coordinator's filesystem.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub redirected: bool,
}

impl LunRecord {
    /// The 16 bytes of an identity in hexadecimal digits.
    #[must_use]
    pub fn bytes(text: &str) -> Option<[u8; 16]> {
        let number = u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32)?;
        Some(number.to_be_bytes())
    }
}

/// `volumes/<name>`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// The volume's name.
    pub name: String,
    /// Its kind.
    pub kind: VolumeKind,
    /// The directory; empty, if the volume is a server.
    #[serde(default, skip_serializing_if = "is_empty")]
    pub path: PathBuf,
    /// The identity stored in the directory, so that a node detects an unmounted or different one.
    pub id: u64,
    /// The LUN, of a volume that is one. Its path is that on the node where it was made: a LUN is known by its identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lun: Option<LunRecord>,
    /// The server, of a volume that is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<NbdRecord>,
}

fn is_empty(path: &Path) -> bool {
    path.as_os_str().is_empty()
}

impl VolumeRecord {
    /// A volume in a directory.
    #[must_use]
    pub fn dir(name: impl Into<String>, path: PathBuf, id: u64) -> VolumeRecord {
        VolumeRecord { name: name.into(), kind: VolumeKind::Dir, path, id, lun: None, nbd: None }
    }

    /// A volume that is an NBD server.
    #[must_use]
    pub fn nbd(name: impl Into<String>, server: String, id: u64) -> VolumeRecord {
        let (kind, nbd) = (VolumeKind::Nbd, Some(NbdRecord { server }));
        VolumeRecord { name: name.into(), kind, path: PathBuf::new(), id, lun: None, nbd }
    }

    /// Where it is, for people: its path, or its server.
    #[must_use]
    pub fn place(&self) -> String {
        match &self.nbd {
            Some(nbd) => nbd.server.clone(),
            None => self.path.display().to_string(),
        }
    }
}

impl Record for VolumeRecord {
    const KIND: &'static str = "volume";

    fn check(&self) -> Result<(), RecordError> {
        check_name(&self.name)?;
        let is_server = self.kind == VolumeKind::Nbd;
        if is_server != is_empty(&self.path) || is_server != self.nbd.is_some() {
            let reason = "a volume has a path, or a server if it is of the kind nbd".to_owned();
            return Err(RecordError::Contradiction { kind: Self::KIND, reason });
        }
        if !is_server && !self.path.is_absolute() {
            let reason = format!("its path {} is not absolute", self.path.display());
            return Err(RecordError::Contradiction { kind: Self::KIND, reason });
        }
        let is_whole =
            |lun: &LunRecord| [&lun.uuid, &lun.mark].into_iter().all(|id| LunRecord::bytes(id).is_some());
        let fits = match self.kind {
            VolumeKind::Dir | VolumeKind::Nbd => self.lun.is_none(),
            VolumeKind::Lun => self.lun.as_ref().is_some_and(is_whole),
        };
        if !fits {
            let reason = "its LUN is not that of its kind".to_owned();
            return Err(RecordError::Contradiction { kind: Self::KIND, reason });
        }
        Ok(())
    }
}

/// `coordinators/<identity of the volume>`: who coordinates a volume on a LUN, and who may have its filesystem mounted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoordinatorRecord {
    /// The volume's name.
    pub volume: String,
    /// Grows with each claim.
    pub epoch: u64,
    /// The coordinator; it may not have mounted yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coordinator: Option<NodeRef>,
    /// Processes that may have the filesystem mounted.
    #[serde(default)]
    pub mounts: Vec<NodeRef>,
    /// The process that an operator wants to coordinate it: the coordinator gives it up, and this one claims it first. A claim ends
    /// the wish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<NodeRef>,
}

impl Record for CoordinatorRecord {
    const KIND: &'static str = "coordinator";

    fn check(&self) -> Result<(), RecordError> {
        let nodes =
            self.coordinator.iter().chain(&self.mounts).chain(&self.next).map(|process| &process.node);
        nodes.chain([&self.volume]).try_for_each(|name| check_name(name))
    }
}

/// The source of the knowledge that a process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoppedHow {
    /// The registry's server saw it end.
    ProcessEnded,
    /// An operator's statement, after ensuring it (fencing, power off).
    Operator,
}

/// `stopped/<node>/<incarnation>`: this process has ended and will send nothing more.
///
/// Requests that it submitted to its kernel may still reach the storage while the *machine* runs. Processes on that machine can
/// check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoppedRecord {
    /// The process.
    pub node: NodeRef,
    /// The source of that knowledge.
    pub how: StoppedHow,
    /// Time of writing, in milliseconds since 1970.
    pub time_unix_ms: u64,
    /// Its machine. Absent if unknown, and from an earlier version of Weir.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
}

impl Record for StoppedRecord {
    const KIND: &'static str = "stopped";

    fn check(&self) -> Result<(), RecordError> {
        check_name(&self.node.node)
    }
}

/// `released/<disk>/<epoch>/<node>`: a former owner was refused, and has no more I/O to the disk in flight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleasedRecord {
    /// The disk.
    pub disk: String,
    /// The last epoch in which the process owned it.
    pub epoch: u64,
    /// The process.
    pub node: NodeRef,
    /// Time of writing, in milliseconds since 1970.
    pub time_unix_ms: u64,
}

impl Record for ReleasedRecord {
    const KIND: &'static str = "released";

    fn check(&self) -> Result<(), RecordError> {
        check_name(&self.disk)?;
        check_name(&self.node.node)
    }
}

/// The operation of a process on a disk's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Creating it; the disk's record follows.
    Making,
    /// Deleting it; the disk's record is gone.
    Removing,
}

/// `unfinished/<disk>`: a process creates or deletes the file of a disk without a record. After that process's end the file is
/// orphaned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnfinishedRecord {
    /// The disk.
    pub disk: String,
    /// The volume with the file, which has the disk's name.
    pub volume: String,
    /// The operation.
    pub step: Step,
    /// The process.
    pub by: NodeRef,
    /// Losses of a deletion apart from the file, for the event that tells its end.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub lost: String,
    /// The mark on the file of a disk that begins as a snapshot; 0 of one that begins empty.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub clone: u64,
}

impl Record for UnfinishedRecord {
    const KIND: &'static str = "unfinished";

    fn check(&self) -> Result<(), RecordError> {
        check_name(&self.disk)?;
        check_name(&self.volume)?;
        check_name(&self.by.node)
    }
}

/// `events/…`: an event for operators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRecord {
    /// Time of the event, in milliseconds since 1970, by the clock of `node`.
    pub time_unix_ms: u64,
    /// The reporting node.
    pub node: String,
    /// The kind of event, one word (`takeover`, `lease-lost`, …).
    pub kind: String,
    /// The subject: a disk, a volume, a node.
    pub subject: String,
    /// A sentence.
    pub text: String,
}

impl Record for EventRecord {
    const KIND: &'static str = "event";
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods)]
mod tests {
    use super::*;

    /// As an earlier Weir writes it.
    const BEFORE_MEDIA: &str = r#"{"v":1,"name":"a","incarnation":7,"peer_address":"127.0.0.1:7420","nbd_tcp":null,"nbd_unix":"/n","api":"/a","fault_domain":"r1"}"#;

    #[test]
    fn a_record_without_media_means_memory_only() {
        let old = NodeRecord::decode(BEFORE_MEDIA.as_bytes()).unwrap();
        assert_eq!((old.media.as_slice(), old.load, old.nbd_tls), (&[][..], 0, None));
        assert_eq!(NodeRecord { nbd_tls: None, ..old.clone() }.encode(), old.encode());
        assert!(old.has_room(Medium::Ram) && !old.offers(Medium::Flash) && !old.has_room(Medium::Flash));
    }

    /// An earlier version reads what this one writes, and the other way round.
    #[test]
    fn a_node_forwards_unless_its_record_says_that_it_does_not() {
        let old = NodeRecord::decode(BEFORE_MEDIA.as_bytes()).unwrap();
        let text = |record: &NodeRecord| String::from_utf8(record.encode()).unwrap();
        assert!(old.forwards && !text(&old).contains("forwards"), "{}", text(&old));
        let refuses = NodeRecord { forwards: false, ..old };
        assert!(text(&refuses).contains(r#""forwards":false"#), "{}", text(&refuses));
        assert_eq!(NodeRecord::decode(&refuses.encode()).unwrap(), refuses);
    }

    /// As an earlier Weir writes it, and as this one does.
    #[test]
    fn the_machine_of_a_process_may_be_unknown() {
        let old = br#"{"v":1,"node":{"node":"a","incarnation":7},"how":"process-ended","time_unix_ms":5}"#;
        let mut record = StoppedRecord::decode(old).unwrap();
        assert_eq!((&record.machine, record.encode().as_slice()), (&None, &old[..]));
        record.machine = Some(Machine { boot: "b".into(), devices: 6 });
        assert_eq!(StoppedRecord::decode(&record.encode()).unwrap(), record);
    }

    #[test]
    fn one_more_log_fits_or_not() {
        let mut node = NodeRecord::decode(BEFORE_MEDIA.as_bytes()).unwrap();
        node.media = vec![MediumSpace { medium: Medium::Flash, bytes: 300, free: 100, log: 100 }];
        assert!(node.has_room(Medium::Flash) && !node.offers(Medium::Ram));
        assert_eq!(NodeRecord::decode(&node.encode()).unwrap(), node);
        node.media[0].free = 99;
        assert!(node.offers(Medium::Flash) && !node.has_room(Medium::Flash));
        node.media.push(node.media[0]);
        assert!(NodeRecord::decode(&node.encode()).is_err(), "a medium twice");
    }
}
