//! Members of an open disk's set that answer nobody any more: a paused host, a cut link.
//!
//! The disk itself notices only when it expects a confirmation, that is, when something is written. Until then its data has fewer
//! copies than anybody sees. So the owner's task watches two other signs, and both have to be absent: the member's session in the
//! registry, and its answers to this node's questions for grants. A member that is cut off from the registry alone keeps its copy.

use std::collections::BTreeMap;

use weir_block::Nanos;
use weir_cluster::records::DiskRecord;

use super::DiskTask;
use crate::control::decide::Local;
use crate::shard::messages::Command;

/// By node: since when the registry has not heard it, and whether the open disk was told that it is silent.
#[derive(Debug, Default)]
pub(super) struct Unheard(BTreeMap<String, (Nanos, bool)>);

impl DiskTask {
    /// Tells the open disk of replicas whose nodes have fallen silent, once each time. Says when to look again.
    pub(super) async fn settle_silent(&mut self, record: &DiskRecord) -> Option<Nanos> {
        let is_open = matches!(self.local, Local::Open { .. });
        if !is_open || record.owner.as_ref() != Some(&self.me) {
            self.unheard.0.clear();
            return None;
        }
        let (now, patience) = (Nanos::now(), self.node.rights.renewal() * 2);
        let live = self.node.records.nodes.now();
        let replicas = record.replicas.iter().map(|replica| &replica.node);
        let gone: Vec<&String> = replicas.filter(|node| !live.exists(node)).collect();
        self.unheard.0.retain(|node, _| gone.contains(&node));
        let (mut silent, mut again) = (Vec::new(), None::<Nanos>);
        for node in gone {
            let (since, told) = self.unheard.0.entry(node.clone()).or_insert((now, false));
            let answered = self.node.rights.answered_at(node);
            let over = answered.map_or(*since, |at| at.max(*since)) + patience;
            if *told {
                continue;
            }
            if now >= over {
                *told = true;
                silent.push(node.clone());
            } else {
                again = Some(again.map_or(over, |again| again.min(over)));
            }
        }
        for node in silent {
            self.send(Command::PeerSilent { disk: self.name.clone(), node }).await;
        }
        again
    }
}
