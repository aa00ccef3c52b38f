//! The files of disks that are being created or deleted. A process can be killed between the file and the disk's record. So
//! it writes its intent to the registry first, and any later process can tell an orphaned file from one in use.
//!
//! Creating: note (the same transaction rewrites the volume's record, so that a concurrent deletion of the volume fails), file,
//! then in one transaction the disk's record instead of the note. Deleting: in one transaction the note instead of the disk's
//! record, then file, note. Another process takes over a note whose process has ended, by compare-and-swap, and then removes
//! its file. A file that was being created it removes only if nothing was ever written to it: that file is ours for certain.
//! Only a node on which the volume is mounted takes a note over: elsewhere a missing file proves nothing.
//!
//! A step goes on when its client has gone: while a call to the storage is in flight, its note counts as in progress. One
//! case is not covered: a process stops between its last check of the note and the removal, and others meanwhile take it for
//! ended and create a disk of the same name. It would then remove that disk's file: the storage is not fenced against it.
//!
//! This file creates disks. [`note`] has the notes, [`deletion`] and [`former`] the deletion of disks, [`leftovers`] the steps of ended
//! processes, and [`exports`] the disks that have no files.

mod deletion;
mod exports;
mod former;
mod leftovers;
mod note;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, Record, Step, VolumeKind, VolumeRecord, keys};
use weir_cluster::registry::{Entry, RegistryError, Transaction};
use weir_volume::snapshot;
use weir_volume::{DirVolume, DiskFiles, LunVolume, VolumeError};

pub use self::deletion::{check_no_snapshots, check_same, remove};
pub use self::exports::adopt_export;
pub use self::former::check_former;
pub use self::leftovers::{LEFTOVER_REMOVED, finish_others, keep_finished};
use self::note::{Note, is_noted};
use super::node::{Node, blocking, random, unavailable};
use crate::error::{ApiError, ApiErrorKind};

/// The time that a request for the name waits for a step in progress, and its interval of polling.
const UNDER_WAY: Duration = Duration::from_secs(3);
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Runs a step to its end, also if its waiter goes away, for example because the client has disconnected. Cut off in the
/// middle, it would leave a call to the storage in flight without a record of it.
pub(crate) async fn to_its_end<T: Send + 'static>(
    step: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    let cut_off = |_| ApiError::new(ApiErrorKind::Failed, "the step did not complete; see this node's log");
    weir_task::spawn(step).await.map_err(cut_off)?
}

/// Where the files of a volume's disks are, as this node reaches them.
pub(crate) enum Files {
    /// In its directory, if that is the volume.
    Dir(VolumeRecord),
    /// On the filesystem of its LUN, if this node coordinates it.
    Lun(String, Option<LunVolume>),
    /// Nowhere: the volume is a server.
    None(String),
}

impl Files {
    pub(crate) fn of(node: &Node, volume: VolumeRecord) -> Files {
        match volume.kind {
            VolumeKind::Lun => {}
            VolumeKind::Nbd => return Files::None(volume.name),
            _ => return Files::Dir(volume),
        }
        let mounted = node.coordinators.get(&volume.name).mounted;
        Files::Lun(volume.name, mounted.map(|(_, mounted)| LunVolume(mounted)))
    }

    /// Does `work`, which blocks, on a thread.
    ///
    /// # Errors
    /// As [`Files::run`].
    pub(crate) async fn with<T: Send + 'static>(
        self,
        work: impl FnOnce(&Arc<dyn DiskFiles>) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<T, ApiError> {
        blocking(move || self.run(work)).await
    }

    /// Does `work`. Blocks.
    ///
    /// # Errors
    /// Those of `work`, judged ([`DiskFiles::judge`]); the directory is not the volume; or this node does not coordinate it.
    pub(crate) fn run<T>(
        &self,
        work: impl FnOnce(&Arc<dyn DiskFiles>) -> Result<T, VolumeError>,
    ) -> Result<T, VolumeError> {
        let files = self.open()?;
        work(&files).map_err(|error| files.judge(error))
    }

    fn open(&self) -> Result<Arc<dyn DiskFiles>, VolumeError> {
        match self {
            Files::Dir(volume) => Ok(Arc::new(DirVolume::open_as(&volume.path, volume.id)?)),
            Files::Lun(_, Some(volume)) => Ok(Arc::new(volume.clone())),
            Files::Lun(name, None) => Err(VolumeError::NotCoordinator(name.clone())),
            Files::None(name) => Err(VolumeError::NoFiles(name.clone())),
        }
    }
}

/// The part of a transaction that adds the first trace of a disk to a volume: it requires the volume's record as it was read, and
/// rewrites it. A process that deletes the volume reads that record before it checks for disks, so its deletion then fails.
pub(crate) fn in_volume(volume: &Entry) -> Transaction {
    Transaction::new()
        .unchanged(volume.key.clone(), volume.mod_revision)
        .put(volume.key.clone(), volume.value.clone())
}

/// What a disk holds at first.
#[derive(Clone, Debug)]
pub enum Origin {
    /// Zeroes.
    Empty,
    /// Zeroes, until an import has written its image to it.
    Image {
        /// The import's.
        number: u64,
    },
    /// What a snapshot in the same volume holds.
    Snapshot {
        /// The snapshot's disk.
        disk: String,
        /// The snapshot.
        snapshot: String,
    },
}

/// Creates the file of a disk, and then its record; also if its waiter has gone.
///
/// # Errors
/// There is such a disk or file, the volume refuses, or the registry does not answer.
pub async fn make(node: &Arc<Node>, record: &DiskRecord, origin: Origin) -> Result<(), ApiError> {
    let (node, record) = (Arc::clone(node), record.clone());
    to_its_end(async move { make_here(&node, &record, origin).await }).await
}

async fn make_here(node: &Arc<Node>, record: &DiskRecord, origin: Origin) -> Result<(), ApiError> {
    // Tells our file from any other.
    let clone = if matches!(origin, Origin::Snapshot { .. }) { random().max(1) } else { 0 };
    let (name, size) = (record.name.clone(), record.size);
    let exists = || ApiError::new(ApiErrorKind::Exists, format!("there is a disk {} already", record.name));
    let disk = keys::disk(&name);
    let (note, volume) = loop {
        let (entry, volume) = node.volume_entry(&record.volume).await?;
        finish_others(node, &name).await?;
        // A file that is not ours must not stand under our note at any time.
        let (files, file) = (Files::of(node, volume.clone()), name.clone());
        files
            .with(move |files| {
                files.check_free(&file)?;
                // Of an earlier disk of this name: they would count as the new one's.
                match snapshot::list(&**files, Some(&file))?.first() {
                    None => Ok(()),
                    Some(one) => Err(VolumeError::SnapshotsLeft { disk: file, snapshot: one.name.clone() }),
                }
            })
            .await?;
        let before = in_volume(&entry).absent(disk.clone());
        match Note::write(node, record, Step::Making, ("", clone), before).await {
            Ok(note) => break (note, volume),
            // Meanwhile another disk was begun in the volume, or the volume was replaced.
            Err(RegistryError::Conflict { .. })
                if node.volume_entry(&record.volume).await?.0.mod_revision != entry.mod_revision => {}
            Err(RegistryError::Conflict { .. }) => return Err(exists()),
            Err(error) => return Err(unavailable(error)),
        }
    };
    let (files, file) = (Files::of(node, volume), name.clone());
    let made = files.with(move |files| match &origin {
        Origin::Empty | Origin::Image { .. } => files.create_disk(&file, size),
        Origin::Snapshot { disk, snapshot } => {
            snapshot::clone_disk(&**files, (disk, snapshot), &file, size, clone)
        }
    });
    if let Err(error) = made.await {
        match error.kind {
            // The file of a process that does not use notes.
            ApiErrorKind::Exists => note.strike_off().await,
            _ => undo(node, record, clone, Some(note)).await,
        }
        return Err(error);
    }
    let commit = Transaction::new()
        .unchanged(note.key.clone(), note.revision)
        .delete(note.key.clone())
        .absent(disk.clone())
        .put(disk, record.encode());
    match node.registry.transact(commit).await {
        Ok(_) => Ok(()),
        // Another process took the note over while this one stood still, and may have checked before the file was there.
        Err(RegistryError::Conflict { .. }) => {
            drop(note);
            undo(node, record, clone, None).await;
            Err(exists())
        }
        // In doubt. If it was not committed, the note says whose the file is.
        Err(error) => Err(unavailable(error)),
    }
}

/// Removes the file of a disk that could not be created, under our note; if that is not ours any more, under a new one. If it
/// does not succeed now, [`keep_finished`] retries, provided that there is a note.
async fn undo(node: &Node, record: &DiskRecord, clone: u64, note: Option<Note<'_>>) {
    let undone = match note {
        None => undo_anew(node, record, clone).await,
        Some(note) => {
            let (key, revision) = (note.key.clone(), note.revision);
            match note.finish().await {
                Ok(_) => Ok(()),
                Err(error) if matches!(is_noted(node, &key, revision).await, Ok(true)) => Err(error),
                Err(_) => undo_anew(node, record, clone).await,
            }
        }
    };
    if let Err(error) = undone {
        tracing::info!(disk = record.name, %error, "the removal of an incomplete file is retried later");
    }
}

/// Removes the file under a new note, which there can be only while no disk has the name and no other process works on it. A
/// process that does cannot create the disk, because our file is in its way, and leaves the file alone: so this waits a
/// little for its end.
async fn undo_anew(node: &Node, record: &DiskRecord, clone: u64) -> Result<(), ApiError> {
    let (deadline, disk) = (Nanos::now() + UNDER_WAY, keys::disk(&record.name));
    loop {
        let nobody = in_volume(&node.volume_entry(&record.volume).await?.0).absent(disk.clone());
        let error = match Note::write(node, record, Step::Making, ("", clone), nobody).await {
            Ok(note) => return note.finish().await.map(drop),
            Err(error) => error,
        };
        if node.registry.get(&disk).await.map_err(unavailable)?.is_some() {
            // Ours was removed in between: the file is that disk's.
            return Ok(());
        }
        if Nanos::now() >= deadline {
            return Err(unavailable(error));
        }
        weir_task::sleep(ASK_AGAIN).await;
    }
}

#[cfg(test)]
mod tests;
