//! The state that only the owner of a disk knows, requested from that node, so that any node answers for any disk.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::NodeRef;

use super::Operations;
use crate::api::{Owned, VolumePart};
use crate::client::Other;
use crate::control::decide::is_live;
use crate::control::readers;
use crate::shard::messages::DiskStatus;

/// Longest wait for another node.
const PATIENCE: Duration = Duration::from_millis(500);

/// Longest wait for this node's shards for another node's request: below [`PATIENCE`], so that one slow shard does not make the
/// whole node silent.
const SHARDS: Duration = Duration::from_millis(250);

/// A node that did not answer is not waited for again for this long.
const SILENCE: Duration = Duration::from_secs(2);

/// Nodes that did not answer, and since when.
#[derive(Debug, Default)]
pub(super) struct Silent(Mutex<BTreeMap<NodeRef, Nanos>>);

impl Silent {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeRef, Nanos>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a node did not answer a moment ago.
    fn has(&self, node: &NodeRef, now: Nanos) -> bool {
        self.lock().get(node).is_some_and(|at| now < *at + SILENCE)
    }

    fn heard(&self, node: &NodeRef, answers: bool) {
        let (mut silent, now) = (self.lock(), Nanos::now());
        // Also removes processes that have ended since.
        silent.retain(|other, at| other != node && now < *at + SILENCE);
        if !answers {
            silent.insert(node.clone(), now);
        }
    }
}

/// The reports of the disks' owners, each on its own. `None`: a node does not answer.
#[derive(Debug, Default)]
pub(super) struct Said(BTreeMap<NodeRef, Option<Owned>>);

/// The state of one disk beyond its record.
pub(super) enum Known<'a> {
    /// Its owner has it open.
    Open(&'a DiskStatus),
    /// Its owner does not have it open.
    NotOpen {
        /// It was closed with nothing dirty, and the registry does not have that yet.
        unreleased: bool,
        /// Its owner copies it to fewer extents, and is so far, in per cent.
        compacting: Option<u64>,
        /// Why its owner could not open it.
        why: Option<&'a str>,
        /// Bytes in its log.
        undestaged: Option<u64>,
    },
    /// Its owner does not answer.
    Silent,
}

impl Said {
    #[cfg(test)]
    pub(super) fn new(said: BTreeMap<NodeRef, Option<Owned>>) -> Said {
        Said(said)
    }

    /// Whether a node did not answer.
    pub(super) fn is_silent(&self, node: &NodeRef) -> bool {
        self.0.get(node).is_some_and(Option::is_none)
    }

    /// A node's part in the coordination of a volume, if it knows the volume.
    pub(super) fn part(&self, node: &NodeRef, volume: &str) -> Option<&VolumePart> {
        let owned = self.0.get(node).and_then(Option::as_ref)?;
        owned.volumes.iter().find(|part| part.volume == volume)
    }

    /// The report of `owner` on `disk`.
    pub(super) fn of(&self, owner: &NodeRef, disk: &str) -> Known<'_> {
        let Some(owned) = self.0.get(owner).and_then(Option::as_ref) else { return Known::Silent };
        match owned.disks.iter().find(|status| status.disk == disk) {
            Some(status) => Known::Open(status),
            None => Known::NotOpen {
                unreleased: owned.unreleased.iter().any(|name| name == disk),
                compacting: owned.compacting.get(disk).copied(),
                why: owned.unopened.get(disk).map(String::as_str),
                undestaged: owned.undestaged.get(disk).copied(),
            },
        }
    }
}

impl Operations {
    /// The state that only this node knows, of the disks that it owns, for other nodes.
    pub async fn owned(&self) -> Owned {
        let (owned, volumes) = tokio::join!(
            async { self.owned_of(self.node.shards.status_within(SHARDS).await).await },
            self.volume_parts()
        );
        Owned { volumes, ..owned }
    }

    pub(super) async fn owned_of(&self, statuses: Vec<DiskStatus>) -> Owned {
        self.backings.look_soon(&self.node).await;
        let unopened = self.node.here.all_unopened();
        let (open, copies): (Vec<_>, Vec<_>) =
            statuses.into_iter().partition(|status| status.role == "owner");
        let copies = copies.into_iter().filter(|copy| unopened.contains_key(&copy.disk));
        let undestaged = copies.map(|copy| (copy.disk, copy.dirty_bytes)).collect();
        let disks = open.into_iter().map(|status| {
            let faults = self.backings.fault_of(&status.disk).into_iter().collect();
            let readers = readers::of(&self.node, &status.disk);
            let forwarders = self.node.forwarders.of(&status.disk);
            DiskStatus { faults, readers, forwarders, ..status }
        });
        let unreleased = self.node.here.unreleased().into_iter().collect();
        let compacting = self.node.coordinators.compactions.all_under_way();
        let disks = disks.collect();
        Owned { disks, unreleased, compacting, unopened, undestaged, volumes: Vec::new() }
    }

    /// Asks the owners that live, all at once; none of them for longer than half a second.
    pub(super) async fn ask_owners(&self, owners: BTreeSet<NodeRef>, own: Owned) -> Said {
        let me = self.me();
        let live = self.node.records.nodes.now();
        let mut said = BTreeMap::from([(me.clone(), Some(own))]);
        let mut asked = Vec::new();
        for owner in owners.into_iter().filter(|owner| *owner != me && is_live(&live, owner)) {
            let Some(record) = live.get(&owner.node) else { continue };
            if self.silent.has(&owner, Nanos::now()) {
                said.insert(owner, None);
                continue;
            }
            let Ok(at) = self.api_of(record) else { continue };
            let (silent, process) = (Arc::clone(&self.silent), owner.clone());
            // A task, so that its result is kept also if the client has gone.
            let task = tokio::spawn(async move {
                let other = Other { at: &at, process: &process, forwarded: 1 };
                let answer = other.owned(PATIENCE).await;
                silent.heard(&process, answer.is_ok());
                answer.ok()
            });
            asked.push((owner, task));
        }
        for (owner, task) in asked {
            said.insert(owner, task.await.ok().flatten());
        }
        Said(said)
    }
}
