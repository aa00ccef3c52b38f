//! Moves this node's disks to other nodes while it is drained or quarantined, and disks back to the nodes that a drain has moved
//! them away from.
//!
//! [`mod@weir_cluster::node_state::drain`] plans it anew for each step, from the records as they are then. The copies of other owners'
//! logs are those owners' business: each replaces its own (see `settle_leaving` of a disk's task).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use weir_block::Nanos;
use weir_cluster::node_state::{self, Plan};
use weir_cluster::placement::has_copy;
use weir_cluster::records::{DiskRecord, NodeRef};

use super::disk::{Request, Why};
use super::{Node, Tasks};
use crate::error::ApiError;

/// Moves at once: each fills a copy of a log and holds its disk's clients for a moment.
const AT_ONCE: usize = 4;

/// Pause before a disk that could not be moved is tried again.
const AGAIN: Duration = Duration::from_secs(2);

/// Longest time between two looks: a quarantine ends by the clock.
const LOOK: Duration = Duration::from_secs(1);

/// A move that has ended.
type Ended = (String, Result<u64, ApiError>);

/// Moves disks for as long as the node lives.
pub async fn keep(node: Arc<Node>, tasks: Arc<Tasks>) {
    let mut changes = node.records.changes();
    let (ended, mut endings) = mpsc::channel::<Ended>(AT_ONCE);
    // The disks on their way: `None`; those that are tried again at a time.
    let mut known: BTreeMap<String, Option<Nanos>> = BTreeMap::new();
    loop {
        let now = Nanos::now();
        known.retain(|_, again| again.is_none_or(|again| again > now));
        let under_way = known.values().filter(|again| again.is_none()).count();
        let wanted = wanted(&node).into_iter().filter(|step| !known.contains_key(&step.disk));
        let wanted: Vec<Step> = wanted.take(AT_ONCE - under_way).collect();
        for Step { disk, to, why } in wanted {
            known.insert(disk.clone(), None);
            let (node, tasks, ended) = (Arc::clone(&node), Arc::clone(&tasks), ended.clone());
            weir_task::spawn(async move {
                let moved = tasks.ask(&disk, &node, |done| Request::Move { to, why, done }).await;
                let _ = ended.send((disk, moved)).await;
            });
        }
        tokio::select! {
            biased;
            Some((disk, moved)) = endings.recv() => match moved {
                Ok(_) => drop(known.remove(&disk)),
                Err(error) => {
                    tracing::debug!(disk, %error, "it is moved later");
                    known.insert(disk, Some(Nanos::now() + AGAIN));
                }
            },
            () = changes.next() => {}
            () = weir_task::sleep(LOOK) => {}
        }
    }
}

/// A disk of this node, and the process that is to have it.
struct Step {
    disk: String,
    to: NodeRef,
    why: Why,
}

/// The disks of this node that belong elsewhere at present.
fn wanted(node: &Node) -> Vec<Step> {
    if node.here.is_stopping() {
        return Vec::new();
    }
    let me = &node.config.name;
    let states = node.records.node_states();
    let barred = node_state::barred(&states, &node.rules, weir_task::unix_millis());
    if !barred.contains(me) {
        return returning(node);
    }
    let is_drained = states.nodes.get(me).is_some_and(|state| state.drain.is_some());
    let why = if is_drained { Why::Drained } else { Why::Quarantined };
    let (disks, live) = (node.records.disks.now(), node.records.nodes.now());
    let steps = plan(node, me).moves.into_iter().filter_map(|moved| {
        // A guest that migrates has named the node for its disk.
        let follower = disks.get(&moved.disk).and_then(|disk| disk.follower.clone());
        if let Some(to) = follower.filter(|follower| !barred.contains(&follower.node)) {
            // It stays with its guest when the drain ends.
            return Some(Step { disk: moved.disk, to, why: Why::Followed });
        }
        let to = live.get(&moved.to)?.node_ref();
        Some(Step { disk: moved.disk, to, why })
    });
    steps.collect()
}

/// The plan for `name` by the present records: what its drain moves, replaces, and leaves.
#[must_use]
pub fn plan(node: &Node, name: &str) -> Plan {
    let fewer = node.records.node_states().nodes.get(name).and_then(|state| state.drain);
    plan_with(node, name, fewer.is_some_and(|drain| drain.fewer_copies))
}

/// As [`plan`], with or without the permission that disks end with fewer copies than their policies request.
#[must_use]
pub fn plan_with(node: &Node, name: &str, fewer_copies: bool) -> Plan {
    let (disks, live) = (node.records.disks.now(), node.records.nodes.now());
    node_state::plan(name, &disks, &live, &node.barred(), &node.rules, fewer_copies)
}

/// Disks of this node that a drain has moved away from nodes that take disks again. Not one whose guest migrates.
fn returning(node: &Node) -> Vec<Step> {
    let me = &node.config.name;
    let (disks, live, barred) = (node.records.disks.now(), node.records.nodes.now(), node.barred());
    let is_mine = |disk: &&DiskRecord| disk.owner.as_ref().is_some_and(|owner| owner.node == *me);
    let mine = disks.values().filter(is_mine).filter(|disk| disk.follower.is_none());
    let steps = mine.filter_map(|disk| {
        let home = disk.home.as_ref().filter(|home| *home != me && !barred.contains(*home))?;
        let record = live.get(home)?;
        let holds =
            disk.replicas.iter().any(|replica| replica.node == *home && has_copy(disk, replica, &live));
        let fits = holds || record.has_room(disk.medium);
        fits.then(|| Step { disk: disk.name.clone(), to: record.node_ref(), why: Why::Returned })
    });
    steps.collect()
}
