//! The nodes' states: this node reports that it is there, and which owners it hears that the registry does not.
//!
//! The rules are in [`weir_cluster::node_state`]; all nodes write one record by compare-and-swap.

use std::sync::Arc;

use weir_cluster::node_state::{Effect, Event, NotRemovable, UnknownNode, may_remove, step};
use weir_cluster::records::{DiskRecord, NodeRef, NodeStatesRecord, Record, RecordError, keys};
use weir_cluster::registry::{Compare, Entry, Expect, RegistryError, Transaction};

use super::Node;
use super::change::is_refusal;
use super::rights::key;

/// Attempts at a change that other nodes' changes overtake.
const ATTEMPTS: usize = 8;

/// Why the nodes' states were not changed.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The event names an unknown node.
    #[error(transparent)]
    Unknown(#[from] UnknownNode),
    /// The node has to stay.
    #[error(transparent)]
    Stays(#[from] NotRemovable),
    /// A record cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The registry does not answer, or a condition does not hold.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

/// Keeps this node's part of the record true.
pub async fn keep(node: Arc<Node>) {
    let (mut changes, mut sessions) = (node.records.changes(), node.rights.sessions());
    loop {
        if let Err(error) = report_presence(&node).await {
            tracing::debug!(%error, "this node's state is written later");
        }
        for owner in isolated(&node) {
            if let Err(error) = report_isolation(&node, &owner).await {
                tracing::debug!(%owner, %error, "its isolation is not recorded");
            }
        }
        tokio::select! {
            biased;
            () = changes.next() => {}
            changed = sessions.changed() => if changed.is_err() { return },
            () = weir_task::sleep(node.rights.times().length) => {}
        }
    }
}

/// This node has a session: it is a node of the cluster, and not isolated any more.
async fn report_presence(node: &Node) -> Result<(), StateError> {
    let me = &node.config.name;
    let states = node.records.node_states();
    if states.nodes.get(me).is_some_and(|state| state.isolation.is_none()) {
        return Ok(());
    }
    change(node, &Event::Present { node: me.clone() }, node.session.guard()).await
}

/// The owners that the registry does not hear and that this node does, as far as that is not in the record.
///
/// Not one that has ended, which its members have heard until a moment ago; nor one whose node has another process, which has a session
/// or is about to get one.
fn isolated(node: &Node) -> Vec<NodeRef> {
    let heard = node.rights.all_heard();
    if heard.is_empty() {
        return Vec::new();
    }
    let (disks, live, states) =
        (node.records.disks.now(), node.records.nodes.now(), node.records.node_states());
    let is_heard =
        |owner: &NodeRef, key: &str| heard.iter().any(|(disk, from)| disk == key && *from == owner.node);
    let is_recorded = |owner: &NodeRef| {
        let isolation = states.nodes.get(&owner.node).and_then(|state| state.isolation);
        isolation.is_some_and(|isolation| isolation.incarnation == owner.incarnation)
    };
    let owners = disks.values().filter_map(|disk| Some((disk.owner.as_ref()?, key(disk))));
    let is_gone = |owner: &NodeRef| !live.exists(&owner.node) && !node.records.has_stopped(owner);
    let isolated =
        owners.filter(|(owner, key)| is_gone(owner) && !is_recorded(owner) && is_heard(owner, key));
    let mut isolated: Vec<NodeRef> = isolated.map(|(owner, _)| owner.clone()).collect();
    isolated.sort();
    isolated.dedup();
    isolated
}

pub(super) async fn report_isolation(node: &Node, owner: &NodeRef) -> Result<(), StateError> {
    let event = Event::Isolated { node: owner.node.clone(), incarnation: owner.incarnation };
    // The view of sessions and ended processes may lag behind.
    let absent = [keys::session(&owner.node), keys::stopped(owner)];
    let conditions = absent.map(|key| Compare { key, expect: Expect::Absent });
    change_if(node, &event, &conditions).await
}

/// Removes a node that is down and will not come back from the record.
///
/// # Errors
/// As [`change`]; [`StateError::Stays`]: it is up, or a disk counts on it.
pub async fn remove(node: &Node, name: &str) -> Result<(), StateError> {
    // By the registry and not by the view, which may lag behind: the node may have the only copy of a log by now.
    let entries = node.registry.list(keys::DISKS).await?.entries;
    let disks = entries.iter().map(|entry| DiskRecord::of(entry).map(|disk| (disk.name.clone(), disk)));
    let disks = disks.collect::<Result<_, _>>()?;
    may_remove(name, &disks, &node.records.nodes.now(), &node.rules)?;
    let absent = Compare { key: keys::session(name), expect: Expect::Absent };
    change_if(node, &Event::Removed { node: name.to_owned() }, &[absent]).await
}

/// Applies an event to the record, on a condition. The operator hears of the consequences.
///
/// # Errors
/// As [`StateError`]; [`RegistryError::Conflict`] also when other nodes overtake every attempt.
pub async fn change(node: &Node, event: &Event, condition: Compare) -> Result<(), StateError> {
    change_if(node, event, &[condition]).await
}

async fn change_if(node: &Node, event: &Event, conditions: &[Compare]) -> Result<(), StateError> {
    let mut last = RegistryError::Conflict { current: Vec::new() };
    // One time for all attempts: from the same record, they all make the same one.
    let now = weir_task::unix_millis();
    let mut doubt: Option<Doubt> = None;
    for _ in 0..ATTEMPTS {
        let entry = node.registry.get(keys::NODE_STATES).await?;
        let revision = entry.as_ref().map_or(0, |entry| entry.mod_revision);
        let states = entry.as_ref().map(NodeStatesRecord::of).transpose()?.unwrap_or_default();
        if let Some(sent) = doubt.take_if(|sent| sent.over < revision)
            && sent.next == states
        {
            sent.effects.iter().for_each(|effect| tell(node, effect));
            return Ok(());
        }
        let (next, effects) = step(&states, &node.rules, now, event)?;
        if next == states {
            return Ok(());
        }
        let put = match &entry {
            Some(entry) => next.replace(entry),
            None => next.create(keys::NODE_STATES),
        };
        match node.registry.transact(conditions.iter().cloned().fold(put, Transaction::when)).await {
            Ok(_) => {
                effects.iter().for_each(|effect| tell(node, effect));
                return Ok(());
            }
            Err(RegistryError::Conflict { current }) => {
                let is_broken = conditions.iter().any(|condition| is_broken(condition, &current));
                last = RegistryError::Conflict { current };
                if is_broken {
                    break;
                }
            }
            Err(error) if is_refusal(&error) => return Err(error.into()),
            Err(error) => {
                doubt = Some(Doubt { over: revision, next, effects });
                last = error;
            }
        }
    }
    Err(last.into())
}

/// A change that was sent and neither confirmed nor refused. Whoever reads it later must tell of it: nobody else does.
struct Doubt {
    /// The revision of the record that it was sent over.
    over: u64,
    next: NodeStatesRecord,
    effects: Vec<Effect>,
}

/// Whether a condition does not hold, by the entries of the compared keys.
fn is_broken(condition: &Compare, current: &[Entry]) -> bool {
    let revision = current.iter().find(|entry| entry.key == condition.key).map(|entry| entry.mod_revision);
    match condition.expect {
        Expect::Absent => revision.is_some(),
        Expect::ModRevision(expected) => revision != Some(expected),
    }
}

fn tell(node: &Node, effect: &Effect) {
    let (kind, subject, text) = match effect {
        Effect::Isolated { node: name, count } => {
            let period = node.config.nodes.resiliency_period;
            let text = format!(
                "the registry does not hear {name}, members of its disks' sets do: its disks stay there for at most {period} \
                 (isolation {count} within an hour)"
            );
            ("isolated", name, text)
        }
        Effect::Quarantined { node: name, .. } => {
            let text = format!(
                "{name} was isolated too often: nothing is placed there for {}",
                node.config.nodes.quarantine_duration
            );
            ("quarantined", name, text)
        }
        Effect::QuarantineRefused { node: name, limit } => {
            let text = format!(
                "{name} was isolated too often, but {limit} of the nodes may be quarantined, and are"
            );
            ("quarantine-refused", name, text)
        }
        Effect::QuarantineEnded { node: name } => {
            ("quarantine-ended", name, format!("the quarantine of {name} has ended; it takes disks again"))
        }
        Effect::DrainStarted { node: name } => {
            ("drain", name, format!("nothing is placed on {name} any more, and its disks are moved away"))
        }
        Effect::Resumed { node: name } => ("resumed", name, format!("{name} takes disks again")),
    };
    node.journal.tell(kind, subject, text);
}
