//! A disk is opened: with the record as it is by a linearizable read, in the way in which the disk has come.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use weir_cluster::ownership;
use weir_cluster::records::{DiskRecord, Medium, Mode, NodeRef};

use super::configuration::rate;
use super::{Came, DiskTask, record};
use crate::control::admission;
use crate::control::capacity::Role;
use crate::control::decide::Local;
use crate::control::owner_fences::mark_of;
use crate::shard::messages::{Arrival, Command, LogMedium, OpenDisk};

impl DiskTask {
    /// The consequence for the data of a takeover that leads to `next`.
    pub(super) fn arrival_after(&mut self, next: &DiskRecord) -> Arrival {
        // A tenure begins. Seals of an earlier one say nothing about who owned the disk in between.
        self.forget_formers();
        let (former, _) = self.former(next);
        match (next.mode, next.former.is_empty()) {
            (Mode::WriteBack, _) => Arrival::TakeOver { former },
            (Mode::WriteThrough, true) => Arrival::Clean,
            (Mode::WriteThrough, false) => Arrival::FromWriteThrough { former },
        }
    }

    /// The record with which this process opens the disk: read anew, because the right to serve rests on a linearizable read
    /// since the node's session began.
    ///
    /// If the disk was open before in the same tenure, or the outcome of a change is unknown, an epoch of its own comes
    /// first: a late release must not commit behind a disk that serves, and a log that begins anew needs a lineage of its
    /// own.
    pub(super) async fn record_to_open(&mut self, record: &DiskRecord) -> Result<DiskRecord, String> {
        let me = self.me.clone();
        let now = if self.doubt.is_some() || self.closed_since(record).is_some() {
            self.change(|record| ownership::renew(record, &me, record.epoch)).await
        } else {
            self.read(record::PATIENCE).await
        };
        let now = now.map_err(|error| error.to_string())?;
        if now.owner.as_ref() != Some(&me) || now.epoch < record.epoch {
            return Err("another node owns the disk now".into());
        }
        Ok(now)
    }

    pub(super) fn closed_since(&self, record: &DiskRecord) -> Option<u64> {
        closed_since(self.arrival, record, &self.me)
    }

    /// The arrival of the disk at this node, by the record with which it is opened.
    pub(super) fn arrival(&mut self, record: &DiskRecord) -> Arrival {
        match self.arrival {
            Some((epoch, Came::By(arrival))) if epoch == record.epoch => arrival,
            // The epoch in which it was closed has been ended by `record_to_open`: the log is empty. The former owners are who they were.
            _ if self.closed_since(record).is_some_and(|epoch| epoch < record.epoch) => {
                match self.arrival_after(record) {
                    Arrival::TakeOver { former } if !record.former.is_empty() => {
                        Arrival::FromWriteThrough { former }
                    }
                    Arrival::TakeOver { .. } => Arrival::Clean,
                    arrival => arrival,
                }
            }
            _ => self.arrival_after(record),
        }
    }

    /// The removal would take the file away from under the opened disk.
    pub(super) fn check_not_deleted(&self) -> Result<(), String> {
        match self.node.intents.is_being_deleted(&self.name) {
            true => Err("it is being deleted; `weir events` tells the end of that".into()),
            false => Ok(()),
        }
    }

    /// Opens the disk on its shard.
    pub(super) async fn open(&mut self, record: &DiskRecord) -> Result<(), String> {
        self.check_not_deleted()?;
        let session = *self.node.session.leased().borrow();
        let record = self.record_to_open(record).await?;
        let arrival = self.arrival(&record);
        // The log is taken from a sealed copy only.
        self.seal_own(&record)?;
        let serves_until = self.node.rights.begin(&self.name, record.epoch, record.grant_set(), session);
        let opened = self.open_with(&record, arrival, serves_until).await;
        if opened.is_err() {
            self.node.rights.end(&self.name);
        }
        opened
    }

    async fn open_with(
        &mut self,
        record: &DiskRecord,
        arrival: Arrival,
        serves_until: Arc<AtomicU64>,
    ) -> Result<(), String> {
        let (node, of) = (Arc::clone(&self.node), record.clone());
        let find = async move { node.place_of(&of).await };
        let place = self.meanwhile(find).await.map_err(|error| error.to_string())??;
        self.bar_replacement(record).await?;
        self.connected.clear();
        self.filled.clear();
        let disk = OpenDisk {
            disk: self.name.clone(),
            id: record.id,
            backing: place.backing,
            volume: place.volume,
            mark: mark_of(&self.me),
            size: record.size,
            logical_block: record.logical_block,
            log_bytes: self.node.config.resources.log.0,
            medium: log_medium(record),
            rate: record.limit.and_then(rate),
            configuration: self.tell_configuration(record),
            arrival,
            serves_until,
        };
        let node = Arc::clone(&self.node);
        let reservation = admission::admit(&node, &self.name, Role::Owner).await?;
        let file = self.ask(|done| Command::Open(Box::new(disk), done)).await??;
        drop(reservation);
        (self.arrival, self.told_policy, self.told_limit) = (None, Some(record.policy), record.limit);
        self.told_size = Some(record.size);
        self.failures.forget();
        self.not_ready = None;
        self.node.here.set_unopened(&self.name, None);
        self.formers.opened(arrival);
        self.local = Local::Open { epoch: record.epoch };
        self.node.here.insert(record, file);
        self.event("open", format!("{} serves it in epoch {}", self.me.node, record.epoch));
        Ok(())
    }
}

/// The epoch in which `me` closed the disk with nothing dirty, if no other node has owned it since: only then is the log of
/// the record still empty (P1).
///
/// An owner since then is among the former owners, with a later epoch: a disk in write-back changes hands in no other way,
/// and only an owner that has it open removes former owners from the record.
pub(super) fn closed_since(arrival: Option<(u64, Came)>, record: &DiskRecord, me: &NodeRef) -> Option<u64> {
    let Some((closed, Came::Closed)) = arrival else { return None };
    let mine = record.owner.as_ref() == Some(me) && closed <= record.epoch;
    let others = record.former.iter().any(|former| former.epoch >= closed);
    (mine && !others).then_some(closed)
}

/// The medium of a disk's log, in the shard's terms.
#[must_use]
pub fn log_medium(record: &DiskRecord) -> LogMedium {
    match record.medium {
        Medium::Flash => LogMedium::Flash { disk_id: record.id },
        _ => LogMedium::Ram,
    }
}
