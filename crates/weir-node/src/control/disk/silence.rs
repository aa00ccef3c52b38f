//! Members of an open disk's set that answer nobody any more: a paused host, a cut link.
//!
//! The disk itself notices only when it expects a confirmation, that is, when something is written. Until then its data has fewer
//! copies than anybody sees. So the owner's task watches two other signs, and both have to be absent: the member's session in the
//! registry, and its answers to this node's questions for grants. A member that is cut off from the registry alone keeps its copy.
//! Only questions that were asked count: this node goes on asking a member at its last known place ([`crate::control::grants`]).
//!
//! Another process of the node is a proof: the channel's other end is gone, though the channel stands.

use std::collections::BTreeMap;

use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, NodeRecord, NodeRef};

use super::DiskTask;
use crate::control::decide::Local;
use crate::shard::messages::Command;

/// The replicas' nodes whose processes the registry does not hear.
#[derive(Debug, Default)]
pub(super) struct Unheard {
    nodes: BTreeMap<String, Missed>,
    /// The task is to look again then.
    due: Option<Nanos>,
}

#[derive(Clone, Copy, Debug)]
struct Missed {
    since: Nanos,
    /// The open disk was told.
    told: Option<Nanos>,
}

/// This node's knowledge of a replica's process.
enum Sign {
    /// The registry hears it.
    Live,
    /// Its node has started another one since.
    Replaced,
    /// The registry does not hear it, and this node's questions are unanswered.
    Silent,
    /// The registry does not hear it. Before this time it does not count as silent.
    Unheard(Nanos),
}

impl DiskTask {
    /// Tells the open disk of replicas whose nodes have fallen silent. It is told again and again, because it may have been about to
    /// connect to such a node. Says when to look again.
    pub(super) async fn settle_silent(&mut self, record: &DiskRecord) -> Option<Nanos> {
        let is_open = matches!(self.local, Local::Open { .. });
        if !is_open || record.owner.as_ref() != Some(&self.me) {
            self.unheard = Unheard::default();
            return None;
        }
        let (now, patience) = (Nanos::now(), self.node.rights.patience());
        let before = std::mem::take(&mut self.unheard);
        // This node was paused, or the task was busy: what it knows of the others may be from before that.
        let is_late = before.due.is_some_and(|due| now > due + self.node.rights.renewal());
        for replica in &record.replicas {
            let name = &replica.node;
            let missed = before.nodes.get(name).filter(|_| !is_late).copied();
            let mut missed = missed.unwrap_or(Missed { since: now, told: None });
            let repeat = missed.told.map_or(now, |told| told + patience);
            let tell_at = match self.sign(record, replica, now) {
                Sign::Live => continue,
                Sign::Replaced => repeat,
                Sign::Silent => repeat.max(missed.since + patience),
                Sign::Unheard(not_before) => not_before.max(missed.since + patience),
            };
            let mut again = tell_at;
            if now >= tell_at {
                self.send(Command::PeerSilent { disk: self.name.clone(), node: name.clone() }).await;
                (missed.told, again) = (Some(now), now + patience);
            }
            self.unheard.nodes.insert(name.clone(), missed);
            self.unheard.due = self.unheard.due.into_iter().chain([again]).min();
        }
        self.unheard.due
    }

    fn sign(&self, record: &DiskRecord, replica: &NodeRef, now: Nanos) -> Sign {
        let (live, rights) = (self.node.records.nodes.now(), &self.node.rights);
        let known = live.get(&replica.node).map(NodeRecord::node_ref);
        // A record that this build cannot read is a live node's.
        if known.is_none() && live.exists(&replica.node) {
            return Sign::Live;
        }
        let is_live = known.is_some();
        let known = known.or_else(|| rights.answers.place(&replica.node).map(|place| place.process));
        // The record may name the process before the one that the disk is being copied to.
        let named = self.connected.get(&replica.node).unwrap_or(replica);
        match known {
            // Also on the same flash: its log may be lost, and the channel led to the former process.
            Some(known) if known.incarnation > named.incarnation => Sign::Replaced,
            // Not an earlier process: the view of the nodes lags behind the record.
            Some(known) if is_live && record.counts(named, &known) => Sign::Live,
            _ => match rights.answers.unanswered(&replica.node) {
                Some(unanswered) if unanswered.is_silence(rights.patience()) => Sign::Silent,
                Some(unanswered) => {
                    Sign::Unheard((unanswered.since + rights.patience()).max(now + rights.renewal()))
                }
                None => Sign::Unheard(now + rights.patience()),
            },
        }
    }
}
