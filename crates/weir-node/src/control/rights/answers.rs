//! Where the members of disks' sets are, and which of them leave this node's questions for grants unanswered.
//!
//! A member that the registry does not hear any more may still hear this node. So its place is remembered beyond its session, and a
//! connection to it that breaks is opened again.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::placement::Live;
use weir_cluster::records::{NodeRecord, NodeRef};

/// A process of a node, and its address for other nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::control) struct Place {
    pub process: NodeRef,
    pub address: SocketAddr,
}

impl From<&NodeRecord> for Place {
    fn from(record: &NodeRecord) -> Place {
        Place { process: record.node_ref(), address: record.peer_address }
    }
}

/// Questions that a process has left unanswered, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::control) struct Unanswered {
    pub process: NodeRef,
    /// The first one was sent then.
    pub since: Nanos,
    /// The last one was given up then.
    pub until: Nanos,
    count: u32,
}

impl Unanswered {
    /// Whether this is more than one late answer, over at least `patience`.
    pub fn is_silence(&self, patience: Duration) -> bool {
        self.count > 1 && self.until - self.since >= patience
    }
}

/// This node's knowledge of the other nodes, by their names.
#[derive(Debug, Default)]
pub(in crate::control) struct Answers(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    places: BTreeMap<String, Place>,
    unanswered: BTreeMap<String, Unanswered>,
}

impl Answers {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers where the live nodes are.
    pub fn learn(&self, live: &Live) {
        let mut known = self.lock();
        for (name, record) in live {
            let place = Place::from(record);
            if known.places.get(name) != Some(&place) {
                known.places.insert(name.clone(), place);
            }
        }
    }

    /// Forgets the places of all nodes but those `kept`.
    pub fn forget(&self, kept: impl Fn(&str) -> bool) {
        self.lock().places.retain(|name, _| kept(name));
    }

    /// The last known place of a node.
    pub fn place(&self, node: &str) -> Option<Place> {
        self.lock().places.get(node).cloned()
    }

    /// A question to `process`, sent at `sent`, has just been given up.
    pub fn not_answered(&self, process: &NodeRef, sent: Nanos) {
        let mut known = self.lock();
        let until = Nanos::now();
        match known.unanswered.get_mut(&process.node).filter(|before| before.process == *process) {
            Some(before) => (before.until, before.count) = (until, before.count.saturating_add(1)),
            None => {
                let first = Unanswered { process: process.clone(), since: sent, until, count: 1 };
                known.unanswered.insert(process.node.clone(), first);
            }
        }
    }

    /// The node has answered; or it has not been asked for a while, and nothing is known of it.
    pub fn start_over(&self, node: &str) {
        self.lock().unanswered.remove(node);
    }

    /// The questions that the node has left unanswered since its last answer.
    pub fn unanswered(&self, node: &str) -> Option<Unanswered> {
        self.lock().unanswered.get(node).cloned()
    }
}
