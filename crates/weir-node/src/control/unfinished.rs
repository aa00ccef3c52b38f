//! The files of disks that are being made or deleted. A process can be killed between the file and the disk's record; so what it is
//! about to do is in the registry first, and whoever comes next can tell a file that is nobody's from one that is somebody's.
//!
//! Making: note, file, then in one transaction the disk's record in the place of the note. Deleting: in one transaction the note in
//! the place of the disk's record, then file, note. A note whose process has ended is taken over by compare-and-swap, and then
//! its file is removed; of a file that was being made only if nothing was ever written to it, because that one is ours for certain.
//! A process that stands still between its last look at the note and the removal, until others have taken it for ended and made
//! a disk of the same name, would remove that one: the storage is not fenced against it.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, NodeRef, Record, Step, UnfinishedRecord, keys};
use weir_cluster::registry::{Entry, RegistryError, Transaction};
use weir_volume::DirVolume;

use super::decide::is_live;
use super::node::{Node, blocking, unavailable};
use crate::api::{ApiError, ApiErrorKind};

/// Between two looks for what others have left.
const LOOK: Duration = Duration::from_secs(3);

/// How long whoever wants the name waits for a step that is under way, and how often it asks.
const UNDER_WAY: Duration = Duration::from_secs(3);
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// What this process knows of unfinished steps.
#[derive(Debug, Default)]
pub struct Unfinished {
    /// Those under way here.
    here: Mutex<BTreeSet<String>>,
    /// Since when others have been seen to be gone.
    gone: Mutex<HashMap<NodeRef, Nanos>>,
}

/// A note of this process, under way while the value lives.
struct Note<'a> {
    node: &'a Node,
    key: String,
    revision: u64,
    record: UnfinishedRecord,
    /// Only dropped.
    _under_way: UnderWay<'a>,
}

struct UnderWay<'a>(&'a Unfinished, String);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        lock(&self.0.here).remove(&self.1);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the file of a disk, and then its record.
///
/// # Errors
/// There is such a disk or file, the volume refuses, or the registry does not answer.
pub async fn make(node: &Node, record: &DiskRecord) -> Result<(), ApiError> {
    let (name, size) = (record.name.clone(), record.size);
    let exists = || ApiError::new(ApiErrorKind::Exists, format!("there is a disk {} already", record.name));
    let volume = node.volume(&record.volume).await?.path;
    finish_others(node, &name).await?;
    // A file that is not ours must not stand under our note at any time.
    let (directory, file) = (volume.clone(), name.clone());
    blocking(move || DirVolume::open(directory)?.check_free(&file)).await?;
    let disk = keys::disk(&name);
    let note = match Note::write(node, record, Step::Making, Transaction::new().absent(disk.clone())).await {
        Err(RegistryError::Conflict { .. }) => return Err(exists()),
        note => note.map_err(unavailable)?,
    };
    let (directory, file) = (volume, name.clone());
    if let Err(error) = blocking(move || DirVolume::open(directory)?.create_disk(&file, size)).await {
        // Nothing is left behind by that.
        note.strike_off().await;
        return Err(error);
    }
    let commit = Transaction::new()
        .unchanged(note.key.clone(), note.revision)
        .delete(note.key.clone())
        .absent(disk.clone())
        .put(disk, record.encode());
    match node.registry.transact(commit).await {
        Ok(_) => Ok(()),
        // Taken over: the file is no longer ours to remove.
        Err(RegistryError::Conflict { .. }) => Err(exists()),
        // In doubt. If it was not committed, the note says whose the file is.
        Err(error) => Err(unavailable(error)),
    }
}

/// Removes a disk's record, which is `entry`, and then its file.
///
/// # Errors
/// [`ApiErrorKind::Refused`]: the record has changed. Or the file cannot be removed now: that is tried again.
pub async fn remove(node: &Node, entry: &Entry, record: &DiskRecord) -> Result<(), ApiError> {
    let gone = Transaction::new().unchanged(entry.key.clone(), entry.mod_revision).delete(entry.key.clone());
    match Note::write(node, record, Step::Removing, gone).await {
        Ok(note) => note.finish().await.map(drop),
        Err(RegistryError::Conflict { .. }) => {
            let message = format!("disk {} has just been opened", record.name);
            Err(ApiError::new(ApiErrorKind::Refused, message))
        }
        Err(error) => Err(unavailable(error)),
    }
}

/// Finishes what a process that has ended left of a disk without a record; waits a little for one that is at it. The file that
/// was removed, if there was something to finish.
///
/// # Errors
/// Somebody is, or may be, at it still.
pub async fn finish_others(node: &Node, disk: &str) -> Result<Option<PathBuf>, ApiError> {
    let deadline = Nanos::now() + UNDER_WAY;
    loop {
        let Some(entry) = node.registry.get(&keys::unfinished(disk)).await.map_err(unavailable)? else {
            return Ok(None);
        };
        match take_over(node, &entry).await {
            Err(error) if error.kind == ApiErrorKind::Unavailable && Nanos::now() < deadline => {
                weir_task::sleep(ASK_AGAIN).await;
            }
            finished => return finished.map(Some),
        }
    }
}

/// Finishes what others have left, from time to time.
pub async fn keep_finished(node: Arc<Node>) {
    loop {
        if let Ok(listing) = node.registry.list(keys::UNFINISHED).await {
            for entry in listing.entries {
                match take_over(&node, &entry).await {
                    Ok(path) => {
                        tracing::info!(path = %path.display(), "removed; its disk was never finished")
                    }
                    Err(error) => tracing::debug!(key = entry.key, %error, "left for later"),
                }
            }
        }
        weir_task::sleep(LOOK).await;
    }
}

async fn take_over(node: &Node, entry: &Entry) -> Result<PathBuf, ApiError> {
    let record = UnfinishedRecord::of(entry)
        .map_err(|error| ApiError::new(ApiErrorKind::Failed, error.to_string()))?;
    let wait = |message: String| Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"));
    if let Err(until) = is_over(node, &record) {
        let UnfinishedRecord { disk, by, .. } = record;
        return wait(format!(
            "disk {disk} is being made or deleted by {by}, or was when it fell silent{until}"
        ));
    }
    let replaces = Transaction::new().unchanged(entry.key.clone(), entry.mod_revision);
    match Note::put(node, record, replaces).await {
        Ok(note) => {
            let (disk, path) = (note.record.disk.clone(), note.finish().await?);
            let text = format!(
                "{} was left by a process that ended while it made or deleted the disk",
                path.display()
            );
            node.journal.tell("leftover-removed", &disk, text);
            Ok(path)
        }
        Err(RegistryError::Conflict { .. }) => wait(format!("{} has just changed", entry.key)),
        Err(error) => Err(unavailable(error)),
    }
}

/// Whether the process that wrote a note does nothing about it any more.
fn is_over(node: &Node, record: &UnfinishedRecord) -> Result<(), String> {
    let by = &record.by;
    if *by == node.session.node_ref() {
        let under_way = lock(&node.unfinished.here).contains(&record.disk);
        return if under_way { Err(String::new()) } else { Ok(()) };
    }
    if is_live(&node.world.nodes.now(), by) {
        return Err(String::new());
    }
    let grace = node.config.lease.fence_grace;
    let since = *lock(&node.unfinished.gone).entry(by.clone()).or_insert_with(Nanos::now);
    if node.world.has_stopped(by) || Nanos::now() >= since + grace.0 {
        return Ok(());
    }
    Err(format!("; it is taken to have ended {grace} after that"))
}

impl<'a> Note<'a> {
    /// Notes a step about a disk, in one transaction with what comes before it.
    async fn write(
        node: &'a Node,
        disk: &DiskRecord,
        step: Step,
        before: Transaction,
    ) -> Result<Note<'a>, RegistryError> {
        let by = node.session.node_ref();
        let record = UnfinishedRecord { disk: disk.name.clone(), volume: disk.volume.clone(), step, by };
        Note::put(node, record, before.absent(keys::unfinished(&disk.name))).await
    }

    async fn put(
        node: &'a Node,
        record: UnfinishedRecord,
        before: Transaction,
    ) -> Result<Note<'a>, RegistryError> {
        let record = UnfinishedRecord { by: node.session.node_ref(), ..record };
        let key = keys::unfinished(&record.disk);
        let under_way = UnderWay(&node.unfinished, record.disk.clone());
        if !lock(&node.unfinished.here).insert(record.disk.clone()) {
            std::mem::forget(under_way);
            return Err(RegistryError::Conflict { current: Vec::new() });
        }
        let committed = node.registry.transact(before.put(key.clone(), record.encode())).await?;
        Ok(Note { node, key, revision: committed.revision, record, _under_way: under_way })
    }

    /// Removes the file and strikes the note off. The file's path.
    async fn finish(self) -> Result<PathBuf, ApiError> {
        let volume = self.node.volume(&self.record.volume).await?.path;
        let entry = self.node.registry.get(&self.key).await.map_err(unavailable)?;
        if entry.is_none_or(|entry| entry.mod_revision != self.revision) {
            let message = format!("disk {}: another node has taken this step over", self.record.disk);
            return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"));
        }
        let (name, step) = (self.record.disk.clone(), self.record.step);
        let removed = blocking(move || {
            let volume = DirVolume::open(volume)?;
            let path = volume.disk_path(&name)?;
            match step {
                Step::Making => volume.delete_unwritten(&name)?,
                Step::Removing => volume.delete_if_there(&name)?,
            }
            Ok(path)
        });
        let path = removed.await?;
        self.strike_off().await;
        Ok(path)
    }

    /// The step is done, or left nothing. If the registry does not answer, somebody does it later.
    async fn strike_off(self) {
        let strike = Transaction::new().unchanged(self.key.clone(), self.revision).delete(self.key.clone());
        if let Err(error) = self.node.registry.transact(strike).await {
            tracing::debug!(key = self.key, %error, "struck off later");
        }
    }
}
