//! The note in the registry that a step on a disk's file is in progress.

use std::path::{Path, PathBuf};

use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, Record, Step, UnfinishedRecord, VolumeKind, keys};
use weir_cluster::registry::{RegistryError, Transaction};
use weir_volume::disk_files::delete_unwritten;
use weir_volume::snapshot::{self, Snapshot};

use super::Files;
use crate::control::intents::UnderWay;
use crate::control::lun_disks;
use crate::control::node::{Node, unavailable};
use crate::error::{ApiError, ApiErrorKind};

/// A note of this process, under way while the value lives.
pub(super) struct Note<'a> {
    node: &'a Node,
    pub(super) key: String,
    pub(super) revision: u64,
    pub(super) record: UnfinishedRecord,
    /// Only dropped.
    _under_way: UnderWay<'a>,
}

impl<'a> Note<'a> {
    /// Notes a step about a disk, in one transaction with what comes before it.
    pub(super) async fn write(
        node: &'a Node,
        disk: &DiskRecord,
        step: Step,
        (lost, clone): (&str, u64),
        before: Transaction,
    ) -> Result<Note<'a>, RegistryError> {
        let (disk, volume, by) = (disk.name.clone(), disk.volume.clone(), node.session.node_ref());
        let record = UnfinishedRecord { disk, volume, step, by, lost: lost.to_owned(), clone };
        let before = before.absent(keys::unfinished(&record.disk));
        Note::put(node, record, before).await
    }

    pub(super) async fn put(
        node: &'a Node,
        record: UnfinishedRecord,
        before: Transaction,
    ) -> Result<Note<'a>, RegistryError> {
        let record = UnfinishedRecord { by: node.session.node_ref(), ..record };
        let key = keys::unfinished(&record.disk);
        let Some(under_way) = node.intents.begin(&record.disk) else {
            return Err(RegistryError::Conflict { current: Vec::new() });
        };
        let committed = node.registry.transact(before.put(key.clone(), record.encode())).await?;
        Ok(Note { node, key, revision: committed.revision, record, _under_way: under_way })
    }

    /// Removes the file, tells the end of a deletion, and removes the note. Whoever finishes a deletion tells of it: the record that
    /// says what is lost is the note's. Returns the file's path.
    pub(super) async fn finish(self) -> Result<PathBuf, ApiError> {
        let volume = self.node.volume(&self.record.volume).await?;
        if volume.kind == VolumeKind::Lun {
            lun_disks::stop_serving(self.node, &volume.name, Some(&self.record.disk)).await;
        }
        let volume_name = volume.name.clone();
        let files = Files::of(self.node, volume);
        if !is_noted(self.node, &self.key, self.revision).await? {
            let message = format!("disk {}: another node has taken this step over", self.record.disk);
            return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"));
        }
        let (name, step, clone) = (self.record.disk.clone(), self.record.step, self.record.clone);
        let removed = files.with(move |files| {
            let path = files.disk_path(&name)?;
            let snapshots = match step {
                Step::Making => {
                    delete_unwritten(&**files, &name, clone)?;
                    Vec::new()
                }
                Step::Removing => {
                    snapshot::remove_unfinished(&**files, &name)?;
                    // There was none when the deletion was decided. Without their disk, nobody could list or delete them, and they would
                    // keep its name from the next one.
                    let snapshots = snapshot::remove_all(&**files, &name)?;
                    files.delete_if_there(&name)?;
                    snapshots
                }
            };
            Ok((path, snapshots))
        });
        let (path, snapshots) = removed.await?;
        if step == Step::Removing {
            self.node.coordinators.update(&volume_name, |state| state.deleted = Some(Nanos::now()));
            self.tell_deleted(&path, &snapshots);
        }
        self.strike_off().await;
        Ok(path)
    }

    fn tell_deleted(&self, path: &Path, snapshots: &[Snapshot]) {
        let UnfinishedRecord { disk, lost, .. } = &self.record;
        let mut text = format!("{} is gone", path.display());
        if !snapshots.is_empty() {
            let names: Vec<String> =
                snapshots.iter().map(|one| format!("{}@{}", one.disk, one.name)).collect();
            text += &format!(", with what was made during its deletion: {}", names.join(", "));
        }
        if !lost.is_empty() {
            text += &format!("; lost: {lost}");
        }
        self.node.journal.tell("disk-deleted", disk, text);
    }

    /// The step is done, or left nothing. If the registry does not answer, a later process removes the note.
    pub(super) async fn strike_off(self) {
        let strike = Transaction::new().unchanged(self.key.clone(), self.revision).delete(self.key.clone());
        if let Err(error) = self.node.registry.transact(strike).await {
            tracing::debug!(key = self.key, %error, "struck off later");
        }
    }
}

/// Whether the note `key` is still that of `revision`.
pub(super) async fn is_noted(node: &Node, key: &str, revision: u64) -> Result<bool, ApiError> {
    let entry = node.registry.get(key).await.map_err(unavailable)?;
    Ok(entry.is_some_and(|entry| entry.mod_revision == revision))
}
