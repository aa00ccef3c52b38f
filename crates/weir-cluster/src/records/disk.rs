//! The record of a disk: its location, its policy and its configuration (owner, epoch, replica set).

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::limit::Limit;
use super::{Medium, NodeRef, Record, RecordError, check_name, is_zero};
use crate::right::{GrantSet, MAX_GUARDS};

/// Maximum number of replicas of a write log.
pub const MAX_REPLICAS: usize = 2;
/// Maximum number of former owners that may still have I/O in flight.
pub const MAX_FORMER: usize = 16;

/// The rule by which writes are acknowledged (P1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Policy {
    /// From the backing.
    WriteThrough,
    /// From the owner's log and this many replicas (0, 1 or 2), in other fault domains if there are any.
    WriteBack(u8),
    /// From the owner's log and replicas with exactly this spread, 1 or 2 in all. Written `write-back+1in+1out`.
    Strict(Spread),
}

/// Number of replicas inside and outside the owner's fault domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Spread {
    /// In the owner's fault domain.
    pub inside: u8,
    /// In other fault domains.
    pub outside: u8,
}

impl fmt::Display for Spread {
    /// `1in`, `2out`, `1in+1out`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [(self.inside, "in"), (self.outside, "out")];
        let parts = parts.iter().filter(|(count, _)| *count > 0);
        let parts: Vec<String> = parts.map(|(count, side)| format!("{count}{side}")).collect();
        f.pad(&parts.join("+"))
    }
}

impl Policy {
    /// Number of replicas.
    #[must_use]
    pub const fn replicas(self) -> usize {
        match self {
            Policy::WriteThrough => 0,
            Policy::WriteBack(count) => count as usize,
            Policy::Strict(Spread { inside, outside }) => inside as usize + outside as usize,
        }
    }

    /// Whether the spread over fault domains is mandatory.
    #[must_use]
    pub const fn is_strict(self) -> bool {
        matches!(self, Policy::Strict(_))
    }

    /// All policies.
    pub fn all() -> impl Iterator<Item = Policy> {
        let spreads = [(1, 0), (2, 0), (0, 1), (0, 2), (1, 1)];
        let strict = spreads.map(|(inside, outside)| Policy::Strict(Spread { inside, outside }));
        [Policy::WriteThrough].into_iter().chain((0..=2).map(Policy::WriteBack)).chain(strict)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Policy::WriteThrough => f.write_str("write-through"),
            Policy::WriteBack(count) => write!(f, "write-back+{count}"),
            Policy::Strict(spread) => write!(f, "write-back+{spread}"),
        }
    }
}

/// Not a policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a policy: use write-through, write-back+N with N = 0, 1 or 2 replicas anywhere, or write-back+1in, +2in, \
     +1out, +2out or +1in+1out for replicas inside and outside the owner's fault domain"
)]
pub struct NotAPolicy(String);

impl FromStr for Policy {
    type Err = NotAPolicy;

    fn from_str(text: &str) -> Result<Policy, NotAPolicy> {
        let named = Policy::all().find(|policy| policy.to_string() == text);
        named.ok_or_else(|| NotAPolicy(text.chars().take(64).collect()))
    }
}

impl TryFrom<String> for Policy {
    type Error = NotAPolicy;
    fn try_from(text: String) -> Result<Policy, NotAPolicy> {
        text.parse()
    }
}

impl From<Policy> for String {
    fn from(policy: Policy) -> String {
        policy.to_string()
    }
}

/// The location of a disk's data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// A file in the volume.
    File {
        /// Its name in the volume, valid by [`check_name`].
        name: String,
    },
    /// A block device.
    Device {
        /// Its absolute path.
        path: PathBuf,
    },
    /// An export of the volume's server.
    Export {
        /// Its name, which may be empty: the server's default.
        name: String,
    },
}

/// The effective mode, as opposed to the requested policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The backing acknowledges writes; the log has no write that the backing lacks.
    WriteThrough,
    /// The logs of the owner and all replicas acknowledge writes.
    WriteBack,
}

/// A former owner that may still have I/O to the backing in flight (P4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FormerOwner {
    /// The process.
    pub node: NodeRef,
    /// The last epoch in which it owned the disk.
    pub epoch: u64,
    /// The set whose grants may still uphold its right; absent once that right is proved over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<GrantSet>,
}

impl FormerOwner {
    /// A former owner whose right is over.
    #[must_use]
    pub fn silent(node: NodeRef, epoch: u64) -> FormerOwner {
        FormerOwner { node, epoch, set: None }
    }
}

/// `disks/<name>`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRecord {
    /// The disk's name.
    pub name: String,
    /// Random, set at creation: distinguishes the disk from an earlier one of its name, whose log may still be on some flash. 0
    /// for a disk of a Weir version without flash.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub id: u64,
    /// The volume it is in.
    pub volume: String,
    /// Its location in the volume.
    pub source: Source,
    /// Bytes, a multiple of `logical_block`.
    pub size: u64,
    /// 512 or 4096 bytes.
    pub logical_block: u32,
    /// The requested policy; for the effective one see [`DiskRecord::effective`].
    pub policy: Policy,
    /// The medium of its log.
    #[serde(default)]
    pub medium: Medium,
    /// The highest rate at which its clients are served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Limit>,
    /// The process that may write, if any (P2).
    pub owner: Option<NodeRef>,
    /// Grows by one with each change of the configuration.
    pub epoch: u64,
    /// The processes that hold a complete copy of the log, in the order of takeover.
    ///
    /// Processes and not nodes: a restarted node has lost its copy in RAM.
    pub replicas: Vec<NodeRef>,
    /// The nodes whose grants uphold the owner's right while the registry is away, for a disk without replicas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guards: Vec<String>,
    /// The effective mode.
    pub mode: Mode,
    /// Former owners that may still have I/O in flight, oldest first. The owner removes one with a `stopped/` or `released/` note
    /// ([`crate::ownership::forget_former`]).
    #[serde(default)]
    pub former: Vec<FormerOwner>,
    /// The process whose clients may use the disk before it moves there: their first write moves it. Survives a takeover by
    /// another node, and ends when the disk is moved or closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follower: Option<NodeRef>,
    /// The node that a drain has moved the disk away from: it moves back there when that node takes disks again. Ends when an
    /// operator moves or closes the disk, another node takes it over, or that node is removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<String>,
    /// The process that is to claim a disk without an owner, which its last owner has moved there; once it is gone, any node. Not the
    /// owner at once: that process may still have the disk open from an earlier tenure, with a log that is out of date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heir: Option<NodeRef>,
    /// The content is not complete: an image is being written to it, or was when the importer ended. The number is the import's own, and opens
    /// the disk to nobody else. 0: the disk is whole.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub importing: u64,
}

impl DiskRecord {
    /// The record of a disk that was never opened.
    #[must_use]
    pub fn new(
        name: &str,
        volume: &str,
        source: Source,
        size: u64,
        logical_block: u32,
        policy: Policy,
    ) -> Self {
        DiskRecord {
            name: name.to_owned(),
            id: 0,
            volume: volume.to_owned(),
            source,
            size,
            logical_block,
            policy,
            medium: Medium::Ram,
            limit: None,
            owner: None,
            epoch: 0,
            replicas: Vec::new(),
            guards: Vec::new(),
            mode: Mode::WriteThrough,
            former: Vec::new(),
            follower: None,
            home: None,
            heir: None,
            importing: 0,
        }
    }

    /// The effective policy; for the replicas' fault domains see [`crate::placement::spread`].
    #[must_use]
    pub fn effective(&self) -> Policy {
        match self.mode {
            Mode::WriteThrough => Policy::WriteThrough,
            // At most MAX_REPLICAS, ensured by `check`.
            Mode::WriteBack => Policy::WriteBack(u8::try_from(self.replicas.len()).unwrap_or(u8::MAX)),
        }
    }

    /// The set whose grants uphold the owner's right while the registry is away.
    #[must_use]
    pub fn grant_set(&self) -> GrantSet {
        match self.replicas.is_empty() {
            true => GrantSet::Guards(self.guards.clone()),
            false => GrantSet::Replicas(self.replicas.iter().map(|replica| replica.node.clone()).collect()),
        }
    }

    /// Whether `process` has the copy of the log recorded for `named`: it is that process, or, for a log on flash, it has that
    /// process's flash.
    #[must_use]
    pub fn counts(&self, named: &NodeRef, process: &NodeRef) -> bool {
        let same_flash = named.node == process.node && named.flash.is_some() && named.flash == process.flash;
        named == process || (self.medium == Medium::Flash && same_flash)
    }

    /// Whether `process` has a replica's copy.
    #[must_use]
    pub fn is_replica(&self, process: &NodeRef) -> bool {
        self.replicas.iter().any(|replica| self.counts(replica, process))
    }

    /// Whether `process` has the owner's copy.
    #[must_use]
    pub fn has_owners_copy(&self, process: &NodeRef) -> bool {
        self.owner.as_ref().is_some_and(|owner| self.counts(owner, process))
    }

    fn contradiction(&self) -> Option<String> {
        if !matches!(self.logical_block, 512 | 4096) {
            return Some(format!("a logical block has 512 or 4096 bytes, not {}", self.logical_block));
        }
        if self.size == 0 || !self.size.is_multiple_of(u64::from(self.logical_block)) {
            let (size, block) = (self.size, self.logical_block);
            return Some(format!("its size {size} is not a positive multiple of its logical block {block}"));
        }
        if let Some(reason) = self.limit.and_then(Limit::contradiction) {
            return Some(format!("its limit: {reason}"));
        }
        if self.owner.is_some() && self.heir.is_some() {
            return Some("it has an owner, and a process that is to claim it".into());
        }
        if self.replicas.len() > MAX_REPLICAS {
            return Some(format!("it has {} replicas, more than {MAX_REPLICAS}", self.replicas.len()));
        }
        if self.former.len() > MAX_FORMER {
            return Some(format!("it has {} former owners, more than {MAX_FORMER}", self.former.len()));
        }
        let owner = self.owner.as_ref().map(|owner| &owner.node);
        let guards: BTreeSet<&String> = self.guards.iter().chain(owner).collect();
        if self.guards.len() > MAX_GUARDS || guards.len() != self.guards.len() + usize::from(owner.is_some())
        {
            return Some(format!(
                "it has more than {MAX_GUARDS} guards, or one twice, or its owner among them"
            ));
        }
        if !self.guards.is_empty() && (owner.is_none() || !self.replicas.is_empty()) {
            return Some("it has guards, and no owner or replicas".into());
        }
        if self.policy.replicas() > MAX_REPLICAS {
            return Some(format!(
                "its policy requests {} replicas, more than {MAX_REPLICAS}",
                self.policy.replicas()
            ));
        }
        if self.policy.is_strict() && self.policy.replicas() == 0 {
            return Some("its policy sets a spread over fault domains without replicas".into());
        }
        let owner = self.owner.iter().map(|owner| &*owner.node);
        let mut nodes = BTreeSet::new();
        if !self.replicas.iter().map(|replica| &*replica.node).chain(owner).all(|node| nodes.insert(node)) {
            return Some("a node is in its configuration twice".into());
        }
        if let Some(follower) = &self.follower
            && self.owner.as_ref().is_none_or(|owner| owner.node == follower.node)
        {
            return Some("its follower is its owner, or it has no owner".into());
        }
        match (self.mode, &self.owner) {
            (Mode::WriteThrough, _) if !self.replicas.is_empty() => {
                Some("write-through with replicas".into())
            }
            (Mode::WriteBack, None) => Some("write-back without an owner".into()),
            (_, Some(_)) if self.epoch == 0 => Some("an owner in epoch 0".into()),
            _ => None,
        }
    }
}

impl Record for DiskRecord {
    const KIND: &'static str = "disk";

    fn check(&self) -> Result<(), RecordError> {
        check_name(&self.name)?;
        check_name(&self.volume)?;
        match &self.source {
            Source::File { name } => check_name(name)?,
            // The longest string of the protocol.
            Source::Export { name } if name.len() <= 4096 => {}
            Source::Export { .. } => {
                let reason = "the name of its export has more than 4096 bytes".to_owned();
                return Err(RecordError::Contradiction { kind: Self::KIND, reason });
            }
            Source::Device { path } if path.is_absolute() => {}
            Source::Device { path } => {
                let reason = format!("its device {} is not an absolute path", path.display());
                return Err(RecordError::Contradiction { kind: Self::KIND, reason });
            }
        }
        let former = self.former.iter().map(|former| &former.node);
        for node in self.owner.iter().chain(&self.replicas).chain(former).chain(&self.follower) {
            check_name(&node.node)?;
        }
        let sets = self.former.iter().filter_map(|former| former.set.as_ref());
        for node in sets.flat_map(GrantSet::members).chain(&self.guards) {
            check_name(node)?;
        }
        match self.contradiction() {
            Some(reason) => Err(RecordError::Contradiction { kind: Self::KIND, reason }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods)]
mod tests {
    use super::*;

    fn disk() -> DiskRecord {
        let source = Source::File { name: "d.img".into() };
        DiskRecord::new("d", "v", source, 1 << 20, 512, Policy::WriteBack(1))
    }

    #[test]
    fn policies_parse_what_they_print() {
        let all: Vec<String> = Policy::all().map(|policy| policy.to_string()).collect();
        let plain = ["write-through", "write-back+0", "write-back+1", "write-back+2"];
        let strict = ["1in", "2in", "1out", "2out", "1in+1out"].map(|spread| format!("write-back+{spread}"));
        assert_eq!(all, [plain.map(str::to_owned).as_slice(), strict.as_slice()].concat());
        for policy in Policy::all() {
            assert_eq!(policy.to_string().parse(), Ok(policy));
            assert!(policy.replicas() <= MAX_REPLICAS);
        }
        let wrong = "write-back write-back+3 write-back+-1 WRITE-THROUGH write-back+0in write-back+3out write-back+2in+1out";
        for bad in wrong.split(' ').chain(["", "write-back+", "write-back+1out+1in", "write-back+01in"]) {
            assert!(bad.parse::<Policy>().is_err(), "{bad}");
        }
    }

    #[test]
    fn media_parse_what_they_print() {
        for medium in [Medium::Ram, Medium::Flash] {
            assert_eq!(medium.to_string().parse(), Ok(medium));
            assert_eq!(serde_json::to_string(&medium).unwrap(), format!("\"{medium}\""));
        }
        let error = "RAM".parse::<Medium>().unwrap_err().to_string();
        assert!(error.contains("ram or flash"), "{error}");
    }

    #[test]
    fn a_disk_survives_json_and_shows_its_version() {
        let mut disk = disk();
        disk.owner = Some(NodeRef::new("a", 7));
        disk.replicas = vec![NodeRef::new("b", 8)];
        (disk.mode, disk.epoch) = (Mode::WriteBack, 3);
        disk.former = vec![FormerOwner::silent(NodeRef::new("c", 1), 2)];
        disk.former.push(FormerOwner {
            set: Some(GrantSet::Guards(vec!["e".into()])),
            ..FormerOwner::silent(NodeRef::new("d", 1), 1)
        });
        let text = String::from_utf8(disk.encode()).unwrap();
        assert!(text.starts_with("{\"v\":1,") && text.contains("\"policy\":\"write-back+1\""), "{text}");
        assert_eq!(DiskRecord::decode(text.as_bytes()).unwrap(), disk);
        assert_eq!(disk.effective(), Policy::WriteBack(1));
    }

    /// As the first version of Weir wrote it. Later fields are omitted at their defaults.
    const FIRST: &str = r#"{"v":1,"name":"d","volume":"v","source":{"file":{"name":"d.img"}},"size":1048576,"logical_block":512,"policy":"write-back+1","medium":"ram","owner":{"node":"a","incarnation":7},"epoch":3,"replicas":[{"node":"b","incarnation":8}],"mode":"write-back","former":[]}"#;

    #[test]
    fn records_of_the_first_version_are_read_and_written() {
        let mut disk = DiskRecord::decode(FIRST.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(disk.encode()).unwrap(), FIRST);
        let older = FIRST.replace(r#""medium":"ram","#, "").replace(r#","former":[]"#, "");
        assert_eq!(DiskRecord::decode(older.as_bytes()).unwrap(), disk);
        disk.policy = Policy::Strict(Spread { inside: 1, outside: 1 });
        (disk.medium, disk.follower) = (Medium::Flash, Some(NodeRef::new("c", 9)));
        let text = String::from_utf8(disk.encode()).unwrap();
        assert!(text.contains(r#""policy":"write-back+1in+1out","medium":"flash""#), "{text}");
        assert!(text.ends_with(r#""follower":{"node":"c","incarnation":9}}"#), "{text}");
        assert_eq!(DiskRecord::decode(text.as_bytes()).unwrap(), disk);
        disk.limit = Some(Limit { iops: Some(500), bytes_per_second: Some(1 << 20), burst_ms: 100 });
        let text = String::from_utf8(disk.encode()).unwrap();
        assert!(
            text.contains(r#","limit":{"iops":500,"bytes_per_second":1048576,"burst_ms":100},"owner""#),
            "{text}"
        );
        assert_eq!(DiskRecord::decode(text.as_bytes()).unwrap(), disk);
        disk.limit = Some(Limit { iops: None, bytes_per_second: Some(1 << 20), burst_ms: 5 });
        let text = String::from_utf8(disk.encode()).unwrap();
        assert!(text.contains(r#""limit":{"bytes_per_second":1048576,"burst_ms":5}"#), "{text}");
        assert_eq!(DiskRecord::decode(text.as_bytes()).unwrap(), disk);
    }

    #[test]
    fn contradictions_are_refused() {
        let limit = |iops, bytes_per_second, burst_ms| Some(Limit { iops, bytes_per_second, burst_ms });
        assert!(limit(Some(1), None, Limit::BURST_MS).and_then(Limit::contradiction).is_none());
        let corrupt: [&dyn Fn(&mut DiskRecord); 20] = [
            &|disk| disk.limit = limit(None, None, 100),
            &|disk| disk.limit = limit(Some(0), None, 100),
            &|disk| disk.limit = limit(Some(1), Some(0), 100),
            &|disk| disk.limit = limit(Some(1), None, 0),
            &|disk| disk.limit = limit(None, Some(1), 3_600_001),
            &|disk| disk.guards = vec!["b".into()],
            &|disk| {
                (disk.owner, disk.epoch) = (Some(NodeRef::new("a", 1)), 1);
                disk.guards = vec!["b".into(), "a".into()];
            },
            &|disk| disk.follower = Some(NodeRef::new("b", 1)),
            &|disk| {
                (disk.owner, disk.epoch) = (Some(NodeRef::new("a", 1)), 1);
                disk.follower = Some(NodeRef::new("a", 2));
            },
            &|disk| disk.policy = Policy::Strict(Spread::default()),
            &|disk| disk.policy = Policy::Strict(Spread { inside: 2, outside: 1 }),
            &|disk| disk.size = 0,
            &|disk| disk.size = 513,
            &|disk| disk.logical_block = 1024,
            &|disk| disk.replicas = vec![NodeRef::new("b", 1)],
            &|disk| disk.mode = Mode::WriteBack,
            &|disk| disk.owner = Some(NodeRef::new("a", 1)),
            &|disk| disk.source = Source::File { name: "../x".into() },
            &|disk| disk.source = Source::Device { path: "sda".into() },
            &|disk| {
                (disk.owner, disk.epoch, disk.mode) = (Some(NodeRef::new("a", 1)), 1, Mode::WriteBack);
                disk.replicas = vec![NodeRef::new("a", 2)];
            },
        ];
        for (case, corrupt) in corrupt.into_iter().enumerate() {
            let mut disk = disk();
            corrupt(&mut disk);
            assert!(DiskRecord::decode(&disk.encode()).is_err(), "case {case}");
        }
    }
}
