//! A disk that another node owns is released here, and the registry is told that its I/O has ended.

use std::sync::Arc;

use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, Record, ReleasedRecord, keys};
use weir_cluster::registry::RegistryError;

use super::{DiskTask, RETRY};
use crate::control::decide::Local;
use crate::shard::messages::Command;

impl DiskTask {
    /// Another node owns the disk: end all I/O here, then say so (P4).
    pub(super) async fn release_disk(&mut self, epoch: u64, record: Option<DiskRecord>) {
        self.node.rights.end(&self.name);
        self.node.here.remove(&self.name);
        let disk = self.name.clone();
        let keep = record.as_ref().is_some_and(|record| record.is_replica(&self.me));
        (self.local, self.arrival) = (Local::Closed, None);
        (self.doubt, self.refused, self.holds_clients, self.closing) = (None, false, false, None);
        let ended = self.ask_until(|done| Command::ReleaseDisk { disk, keep, done }, None, |_| None).await;
        // Should this node take the disk over again, the owner that was silent then has owned it since and may write (P4).
        self.forget_formers();
        let Some(record) = record else { return };
        let owner = record.owner.as_ref().map_or_else(|| "nobody".to_owned(), ToString::to_string);
        self.event(
            "released",
            format!("{} is no longer its owner, {owner} is, in epoch {epoch}", self.me.node),
        );
        if ended.is_ok() {
            let mine = record.former.iter().find(|former| former.node == self.me);
            self.owed_releases.extend(mine.map(|former| former.epoch));
            self.write_owed_releases().await;
        }
    }

    /// Writes all that is owed: the disk may have come and gone again before the registry answered.
    pub(super) async fn write_owed_releases(&mut self) {
        if self.note_at.is_some_and(|at| at > Nanos::now()) {
            return;
        }
        self.note_at = None;
        while let Some(&epoch) = self.owed_releases.first() {
            let note = ReleasedRecord {
                disk: self.name.clone(),
                epoch,
                node: self.me.clone(),
                time_unix_ms: weir_task::unix_millis(),
            };
            let note = note.create(keys::released(&self.name, epoch, &self.me.node));
            let node = Arc::clone(&self.node);
            let noted = self.meanwhile(async move { node.registry.transact(note).await }).await;
            match noted.unwrap_or_else(|taken| Err(RegistryError::Unavailable { reason: taken.to_string() }))
            {
                Ok(_) | Err(RegistryError::Conflict { .. }) => drop(self.owed_releases.pop_first()),
                Err(error) => {
                    tracing::debug!(disk = self.name, %error, "a release is still to be noted");
                    self.note_at = Some(Nanos::now() + RETRY);
                    return;
                }
            }
        }
    }
}
