//! Records of nodes, volumes and what happens to them.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Medium, Record, RecordError, check_name};
use crate::machine::Machine;

/// One process of a node. A node that starts again is the same node and another process: what the former
/// one had in RAM, and what it was allowed to do, is gone. What it had on flash is not ([`DiskRecord::counts`]).
///
/// Two are equal when they name the same process, whatever is known of its flash.
///
/// [`DiskRecord::counts`]: super::DiskRecord::counts
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeRef {
    /// The node's name.
    pub node: String,
    /// Unique for each start of a process of that node.
    pub incarnation: u64,
    /// Identity of the flash medium that the process has.
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

/// `nodes/<name>`: a node whose lease stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// The node's name.
    pub name: String,
    /// Which process of the node this is.
    pub incarnation: u64,
    /// Identity of its flash medium, if it has one: stays the same when the node starts again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flash: Option<u64>,
    /// Where it takes messages of its peers.
    pub peer_address: SocketAddr,
    /// Where it exports disks by NBD over TCP, if it does.
    pub nbd_tcp: Option<SocketAddr>,
    /// The Unix socket where it exports disks by NBD.
    pub nbd_unix: PathBuf,
    /// The Unix socket of its API.
    pub api: PathBuf,
    /// What it shares the fate of (rack, chassis, feed).
    pub fault_domain: String,
    /// The media on which it keeps logs, each at most once. Empty in the record of a Weir that does not tell.
    #[serde(default)]
    pub media: Vec<MediumSpace>,
    /// Logs that it keeps: one for each disk that it owns, one for each copy of another owner's log.
    ///
    /// Each of them costs about the same room, and a share of the node's network and processor for as long as it lasts. Bytes per
    /// second would say more about this moment and nothing about the next, and placements would run after them.
    #[serde(default)]
    pub load: u64,
}

/// What a node offers on one medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediumSpace {
    /// Which.
    pub medium: Medium,
    /// Bytes for write logs, its own and copies of others'.
    pub bytes: u64,
    /// Bytes of that which no log occupies.
    pub free: u64,
    /// Bytes that one more log takes.
    pub log: u64,
}

impl NodeRecord {
    /// The process that the record is of.
    #[must_use]
    pub fn node_ref(&self) -> NodeRef {
        NodeRef::new(&*self.name, self.incarnation).with_flash(self.flash)
    }

    /// What the node offers on `medium`; `None` when it does not have it, or does not tell.
    #[must_use]
    pub fn space(&self, medium: Medium) -> Option<&MediumSpace> {
        self.media.iter().find(|space| space.medium == medium)
    }

    /// Whether the node keeps logs on `medium` at all.
    #[must_use]
    pub fn offers(&self, medium: Medium) -> bool {
        // Who does not tell is of a version that knew memory only.
        self.space(medium).is_some() || (self.media.is_empty() && medium == Medium::Ram)
    }

    /// Whether one more log fits on `medium`. Who does not tell how much is left may have it.
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
        let twice = |(place, space): (usize, &MediumSpace)| {
            self.media[..place].iter().any(|earlier| earlier.medium == space.medium)
        };
        if self.media.iter().enumerate().any(twice) {
            let reason = "it offers a medium twice".to_owned();
            return Err(RecordError::Contradiction { kind: Self::KIND, reason });
        }
        Ok(())
    }
}

/// What a volume is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum VolumeKind {
    /// A directory.
    Dir,
}

/// `volumes/<name>`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// The volume's name.
    pub name: String,
    /// What it is made of.
    pub kind: VolumeKind,
    /// The directory.
    pub path: PathBuf,
    /// What is written in the directory, so that a node on which it is not mounted does not take another one for it.
    pub id: u64,
}

impl Record for VolumeRecord {
    const KIND: &'static str = "volume";

    fn check(&self) -> Result<(), RecordError> {
        check_name(&self.name)?;
        if !self.path.is_absolute() {
            let reason = format!("its path {} is not absolute", self.path.display());
            return Err(RecordError::Contradiction { kind: Self::KIND, reason });
        }
        Ok(())
    }
}

/// How it is known that a process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoppedHow {
    /// The registry's server saw it end.
    ProcessEnded,
    /// An operator says so, who made sure (fencing, power off).
    Operator,
}

/// `stopped/<node>/<incarnation>`: this process has ended and will send nothing any more.
///
/// Requests that it had handed to its kernel may still reach the storage if the *machine* runs on. On that machine one can look.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoppedRecord {
    /// The process.
    pub node: NodeRef,
    /// How that is known.
    pub how: StoppedHow,
    /// When it was written, in milliseconds since 1970.
    pub time_unix_ms: u64,
    /// Where it ran. Absent where nobody knows, and from an earlier Weir.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Machine>,
}

impl Record for StoppedRecord {
    const KIND: &'static str = "stopped";

    fn check(&self) -> Result<(), RecordError> {
        check_name(&self.node.node)
    }
}

/// `released/<disk>/<epoch>/<node>`: a former owner was refused, and has no I/O to the disk under way any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleasedRecord {
    /// The disk.
    pub disk: String,
    /// The last epoch in which the process owned it.
    pub epoch: u64,
    /// The process.
    pub node: NodeRef,
    /// When it was written, in milliseconds since 1970.
    pub time_unix_ms: u64,
}

impl Record for ReleasedRecord {
    const KIND: &'static str = "released";

    fn check(&self) -> Result<(), RecordError> {
        check_name(&self.disk)?;
        check_name(&self.node.node)
    }
}

/// What a process is doing with a disk's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Making it; the disk's record follows.
    Making,
    /// Removing it; the disk's record is gone.
    Removing,
}

/// `unfinished/<disk>`: a process makes or removes the file of a disk that has no record. Where that process has ended, the file
/// is nobody's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnfinishedRecord {
    /// The disk.
    pub disk: String,
    /// The volume with the file, which has the disk's name.
    pub volume: String,
    /// What is being done.
    pub step: Step,
    /// Who does it.
    pub by: NodeRef,
}

impl Record for UnfinishedRecord {
    const KIND: &'static str = "unfinished";

    fn check(&self) -> Result<(), RecordError> {
        check_name(&self.disk)?;
        check_name(&self.volume)?;
        check_name(&self.by.node)
    }
}

/// `events/…`: something that an operator may want to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRecord {
    /// When it happened, in milliseconds since 1970, by the clock of `node`.
    pub time_unix_ms: u64,
    /// The node that saw it.
    pub node: String,
    /// What kind of thing happened, one word (`takeover`, `lease-lost`, …).
    pub kind: String,
    /// What it happened to: a disk, a volume, a node.
    pub subject: String,
    /// In a sentence.
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
    fn a_record_without_media_is_of_a_node_with_memory() {
        let old = NodeRecord::decode(BEFORE_MEDIA.as_bytes()).unwrap();
        assert_eq!((old.media.as_slice(), old.load), (&[][..], 0));
        assert!(old.has_room(Medium::Ram) && !old.offers(Medium::Flash) && !old.has_room(Medium::Flash));
    }

    /// As an earlier Weir writes it, and as this one does.
    #[test]
    fn where_a_process_ran_may_be_unknown() {
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
