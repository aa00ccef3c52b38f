//! State and messages of nodes, owners and clients in the model.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, FormerOwner, NodeRef, Policy};
use weir_cluster::right::Right;

/// One value of the register, in the order of writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The epoch in which the owner's tenure began.
    pub tenure: u64,
    /// Counts the owner's writes.
    pub number: u64,
}

/// A client's request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Whether it is a write.
    pub is_write: bool,
    /// The newest answered version at its arrival.
    pub newest: Version,
}

/// An operator's request.
#[derive(Clone, Debug)]
pub enum Order {
    /// Another owner: one of the replicas.
    Move { to: NodeRef, since: Nanos },
    /// Another policy, with these replicas.
    Set { policy: Policy, replicas: Vec<NodeRef>, since: Nanos },
}

/// A sent change with unknown outcome.
#[derive(Clone, Debug)]
pub struct Proposal {
    pub id: u64,
    pub base: u64,
    pub next: Rc<DiskRecord>,
    pub sent: Nanos,
}

/// Messages between nodes.
#[derive(Clone, Debug)]
pub enum Message {
    /// The owner requests a grant.
    Renew { epoch: u64, sent: Nanos },
    /// The grant.
    Granted { epoch: u64, sent: Nanos },
    /// The new owner ends earlier epochs.
    Seal { epoch: u64 },
    /// Earlier epochs are over after this time.
    Sealed { remaining: Duration },
    /// The owner's log.
    Append { epoch: u64, tenure: u64, newest: Version, freed: Version },
    /// The log is stored.
    Confirm { tenure: u64, newest: Version },
    /// The epoch is over or unknown.
    Refused,
}

/// A copy of the log of one register: its newest record, and the destaged position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The tenure of the owner that filled it.
    pub tenure: u64,
    pub newest: Version,
    pub freed: Version,
}

/// A former owner whose right may still be valid.
#[derive(Clone, Debug)]
pub struct Wait {
    pub former: FormerOwner,
    /// End of the last grant of each sealed member, by this node's clock.
    pub sealed: BTreeMap<String, Nanos>,
    pub is_over: bool,
}

/// An open disk.
pub struct Owner {
    pub right: Right,
    pub since: u64,
    pub record: Rc<DiskRecord>,
    pub revision: u64,
    pub waits: Vec<Wait>,
    /// Time at which the last former right was proved over.
    pub silent_at: Option<Nanos>,
    /// Time at which the former owner's session was found absent.
    pub gone_at: Nanos,
    /// Every member has all writes up to here.
    pub acked: Version,
    pub confirms: BTreeMap<u64, Version>,
    /// Writes that are not acknowledged yet.
    pub writes: Vec<(Request, Version, Nanos)>,
    pub destages: bool,
    /// Bypassing writes in flight.
    pub bypasses: u32,
    pub proposals: Vec<Proposal>,
    pub proposed_at: Nanos,
    pub order: Option<Order>,
    /// Processes that get the log before the record names them.
    pub joiners: Vec<NodeRef>,
    pub number: u64,
    pub asked_grants: Nanos,
    pub asked_seals: Nanos,
    pub appended: Nanos,
}
