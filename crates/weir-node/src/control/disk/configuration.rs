//! The news that an open disk gets of its record: epoch, set, policy, limit, and the copies that are to go.

use std::num::NonZeroU64;
use std::time::Duration;

use tokio::sync::oneshot;
use weir_accel::Configuration;
use weir_cluster::node_state::{Leaving, leaving};
use weir_cluster::records::{DiskRecord, Limit, Mode, NodeRef, Policy};
use weir_cluster::{ownership, placement};
use weir_export::Rate;

use super::DiskTask;
use crate::control::decide::Local;
use crate::shard::messages::Command;

impl DiskTask {
    /// Tells the shard what the registry has.
    pub(super) async fn configure(&mut self, record: &DiskRecord) {
        let disk = self.name.clone();
        self.local = Local::Open { epoch: record.epoch };
        self.tell_size(record).await;
        self.node.here.update(record);
        let configuration = self.tell_configuration(record);
        self.send(Command::Configured { disk: disk.clone(), configuration }).await;
        if self.told_policy.replace(record.policy) != Some(record.policy) {
            self.send(Command::SetPolicy { disk, wanted_replicas: self.wanted_replicas(record) }).await;
        }
        self.tell_limit(record).await;
    }

    /// The policy that the open disk is to strive for: `None` is write-through.
    fn wanted_replicas(&self, record: &DiskRecord) -> Option<usize> {
        match record.policy {
            _ if self.empties => None,
            Policy::WriteThrough => None,
            policy @ (Policy::WriteBack(_) | Policy::Strict(_)) => Some(policy.replicas()),
        }
    }

    /// Has the disk be write-through for a while, with an empty log, or as its policy says again.
    pub(super) async fn set_empties(&mut self, record: &DiskRecord, empties: bool) {
        if std::mem::replace(&mut self.empties, empties) != empties {
            let wanted_replicas = self.wanted_replicas(record);
            self.send(Command::SetPolicy { disk: self.name.clone(), wanted_replicas }).await;
        }
    }

    /// Tells the shard the record's size. A resize whose answer was lost has changed the record alone, and new clients get the record's size.
    async fn tell_size(&mut self, record: &DiskRecord) {
        let size = record.size;
        if self.told_size.replace(size).is_some_and(|told| told != size) {
            // The file was lengthened before the record was changed.
            let (disk, done) = (self.name.clone(), oneshot::channel().0);
            self.send(Command::Resize { disk, size, done }).await;
        }
    }

    /// Has the open disk keep to the record's limit.
    pub(super) async fn tell_limit(&mut self, record: &DiskRecord) {
        if std::mem::replace(&mut self.told_limit, record.limit) != record.limit {
            let (disk, rate) = (self.name.clone(), record.limit.and_then(rate));
            self.send(Command::SetRate { disk, rate }).await;
        }
    }

    /// The record's configuration, as the shard needs it and is about to be told.
    pub(super) fn tell_configuration(&mut self, record: &DiskRecord) -> Configuration {
        let live = self.node.records.nodes.now();
        let misplaced = placement::misplaced(record.policy, &self.me.node, &record.replicas, &live);
        self.told_leaving = self.leaving(record);
        let Leaving { replaced, dropped } = self.told_leaving.clone();
        Configuration {
            epoch: record.epoch,
            replicas: record.replicas.iter().map(|replica| replica.node.clone()).collect(),
            write_back: record.mode == Mode::WriteBack,
            wanted_replicas: self.wanted_replicas(record),
            // A copy that is to go in any case takes the disk to write-through when no other node can have it.
            strict: record.policy.is_strict() || !dropped.is_empty(),
            misplaced: misplaced.into_iter().map(str::to_owned).chain(dropped).collect(),
            leaving: replaced,
        }
    }

    /// The replicas on nodes that are drained or quarantined, as far as they are to be replaced.
    pub(super) fn leaving(&self, record: &DiskRecord) -> Leaving {
        let (states, live) = (self.node.records.node_states(), self.node.records.nodes.now());
        // A copy that is being filled has its room already.
        let is_filled = |peer: &&NodeRef| self.filled.contains(&peer.node);
        let filling: Vec<NodeRef> = self.connected.values().filter(is_filled).cloned().collect();
        let now = weir_task::unix_millis();
        leaving(record, &self.me.node, &states, &live, &self.node.rules, now, &filling)
    }

    /// Tells the open disk of replicas that are to be replaced, by an epoch of its own: the shard takes no configuration twice.
    pub(super) async fn settle_leaving(&mut self, record: &DiskRecord) {
        let is_open = record.owner.as_ref() == Some(&self.me) && self.local != Local::Closed;
        if !is_open || self.leaving(record) == self.told_leaving {
            return;
        }
        let me = self.me.clone();
        if let Err(error) = self.change(|record| ownership::renew(record, &me, record.epoch)).await {
            self.later(&error);
        } else {
            // The task decides again at once, and configures the disk.
            self.retry_at = None;
        }
    }
}

/// The limit, in the shard's terms.
pub(super) fn rate(limit: Limit) -> Option<Rate> {
    let Limit { iops, bytes_per_second, burst_ms } = limit;
    let per_second = |rate: Option<u64>| rate.and_then(NonZeroU64::new);
    let (iops, bytes_per_second) = (per_second(iops), per_second(bytes_per_second));
    let burst = Duration::from_millis(burst_ms);
    (iops.is_some() || bytes_per_second.is_some()).then_some(Rate { iops, bytes_per_second, burst })
}
