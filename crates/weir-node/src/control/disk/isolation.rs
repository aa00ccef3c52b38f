//! A disk whose owner is isolated: the registry does not hear the owner, members of the disk's set do. It stays with its owner for the
//! resiliency period, as long as the set's grants uphold the owner's right. This is policy: a takeover is as safe as ever.

use std::sync::Arc;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::node_state::hold;
use weir_cluster::ownership::Gone;
use weir_cluster::placement::successors;
use weir_cluster::records::{DiskRecord, Isolation, NodeRef, NodeStatesRecord};
use weir_cluster::right::GrantSet;

use super::DiskTask;
use crate::control::decide::Decision;
use crate::control::{grants, hearing};

impl DiskTask {
    /// If this node is about to take the disk over from an owner that is only isolated: the time at which to look again.
    pub(super) async fn held_until(
        &mut self,
        decision: &Decision,
        record: Option<&DiskRecord>,
    ) -> Option<Nanos> {
        let (Decision::TakeOver(evidence), Some(record)) = (decision, record) else { return None };
        if evidence.how == Gone::Stopped {
            return None;
        }
        // The record may have come while the task was waiting.
        self.note_isolation(Nanos::now());
        let seen = self.owner_gone.as_ref().filter(|gone| gone.owner == evidence.owner);
        let since = seen.map_or_else(Nanos::now, OwnerGone::isolated_since);
        let node = Arc::clone(&self.node);
        let left = |heard| {
            let (states, now) = (node.records.node_states(), weir_task::unix_millis());
            hold(&states, &node.rules, now, &evidence.owner, heard, Nanos::now() - since)
        };
        left(true)?;
        // Of replicas, all have to grant, so the first one's own ears suffice: where others ask, too, one short break of any of them
        // would cost the owner its disk. Guards are asked for a takeover by any node.
        let is_first = || {
            let (live, barred) = (node.records.nodes.now(), node.barred());
            successors(record, &live, &barred, Duration::ZERO).contains(&self.me)
        };
        let asks = matches!(record.grant_set(), GrantSet::Guards(_)) || !is_first();
        let asked = (Arc::clone(&self.node), record.clone());
        let others = async move { hearing::others_hear(&asked.0, &asked.1).await };
        let heard = grants::hears(&node, record) || asks && self.meanwhile(others).await.unwrap_or(false);
        let left = left(heard)?;
        // Its turns begin once nobody hears the owner.
        if let Some(vacant) = &mut self.vacant {
            vacant.since = Nanos::now();
        }
        Some(Nanos::now() + left.min(node.rights.renewal()))
    }

    /// Notes the isolation of an owner without a session.
    pub(super) fn note_isolation(&mut self, now: Nanos) {
        if let Some(gone) = &mut self.owner_gone {
            gone.note_isolation(&self.node.records.node_states(), now);
        }
    }
}

/// An owner without a session.
#[derive(Clone, Debug)]
pub(super) struct OwnerGone {
    pub owner: NodeRef,
    /// When this node saw that first.
    pub since: Nanos,
    /// Its isolation in the record, and when this node saw that first.
    isolation: Option<(Isolation, Nanos)>,
}

impl OwnerGone {
    pub fn new(owner: NodeRef, since: Nanos) -> OwnerGone {
        OwnerGone { owner, since, isolation: None }
    }

    /// Another isolation than before shows that the owner has been back, also to a node that was itself cut off meanwhile. (Or a node
    /// whose clock is right has corrected its time: then the period is longer, by what that clock was ahead at most.)
    fn note_isolation(&mut self, states: &NodeStatesRecord, now: Nanos) {
        let isolation = states.nodes.get(&self.owner.node).and_then(|state| state.isolation);
        if let Some(isolation) = isolation.filter(|isolation| isolation.incarnation == self.owner.incarnation)
            && self.isolation.is_none_or(|(known, _)| known != isolation)
        {
            self.isolation = Some((isolation, now));
        }
    }

    /// The time since which the owner has been isolated, by this node's clock.
    fn isolated_since(&self) -> Nanos {
        self.isolation.map_or(self.since, |(_, since)| since)
    }
}
