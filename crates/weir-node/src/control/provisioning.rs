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

mod failures;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::{
    DiskRecord, NodeRef, Record, Step, UnfinishedRecord, VolumeKind, VolumeRecord, keys,
};
use weir_cluster::registry::{Entry, RegistryError, Transaction};
use weir_volume::disk_files::delete_unwritten;
use weir_volume::snapshot::{self, Snapshot};
use weir_volume::{DirVolume, DiskFiles, LunVolume, VolumeError};

use self::failures::Failures;
use super::decide::is_live;
use super::intents::UnderWay;
use super::lun_disks;
use super::node::{Node, blocking, random, unavailable};
use crate::error::{ApiError, ApiErrorKind};
use crate::units::count;

/// The kind of the event that tells that something was removed whose maker has ended.
pub const LEFTOVER_REMOVED: &str = "leftover-removed";

/// Between two looks for what others have left, and the longest wait for one step of that: its end may come later.
const LOOK: Duration = Duration::from_secs(3);

/// The time that a request for the name waits for a step in progress, and its interval of polling.
const UNDER_WAY: Duration = Duration::from_secs(3);
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Longest wait for the storage to remove a file (P10). A large sparse file can take longer, and its removal goes on.
const REMOVED: Duration = Duration::from_secs(10);

/// A note of this process, under way while the value lives.
struct Note<'a> {
    node: &'a Node,
    key: String,
    revision: u64,
    record: UnfinishedRecord,
    /// Only dropped.
    _under_way: UnderWay<'a>,
}

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

/// Removes a disk's record, which is `entry`, and then its file; also if its waiter has gone. Then an event says so, with what
/// was `lost` apart from the file.
///
/// # Errors
/// [`ApiErrorKind::Refused`]: the record has changed. Or the file cannot be removed now: that is tried again. Or the storage has
/// not answered for 10 s.
pub async fn remove(
    node: &Arc<Node>,
    entry: &Entry,
    record: &DiskRecord,
    lost: String,
) -> Result<(), ApiError> {
    let work = {
        let (node, entry, record) = (Arc::clone(node), entry.clone(), record.clone());
        to_its_end(async move { remove_here(&node, &entry, &record, &lost).await })
    };
    match weir_task::timeout(REMOVED, work).await {
        Ok(removed) => removed,
        Err(_) => Err(late(node, record).await),
    }
}

/// The storage has not answered in time. What is certain by now, and how to see the end.
async fn late(node: &Node, record: &DiskRecord) -> ApiError {
    let (name, seconds) = (&record.name, REMOVED.as_secs());
    let (message, remedy) = match node.registry.get(&keys::disk(name)).await {
        Ok(None) => (
            format!("disk {name} is deleted, but the storage has not removed its file for {seconds} s"),
            format!("the removal goes on; the event `disk-deleted` of {name} in `weir events` tells its end"),
        ),
        Err(error) => (
            format!(
                "neither the storage nor the registry ({error}) has answered for {seconds} s: it is not known whether disk \
                 {name} is deleted"
            ),
            format!("`weir disk show {name}` tells when the registry answers; the deletion goes on when both do"),
        ),
        Ok(Some(_)) => (
            format!("the storage has not answered for {seconds} s; disk {name} is still there"),
            "check the volume's storage; the deletion goes on when it answers, and `weir events` then has the event \
             `disk-deleted`"
                .to_owned(),
        ),
    };
    ApiError::new(ApiErrorKind::Unavailable, message).hint(remedy)
}

/// Refuses the deletion of a disk that has got the name of the disk with the identity `id`, for which the deletion was checked.
///
/// # Errors
/// [`ApiErrorKind::Refused`].
pub fn check_same(id: u64, now: &DiskRecord) -> Result<(), ApiError> {
    if now.id == id {
        return Ok(());
    }
    let message = format!("disk {} was deleted meanwhile, and there is another one of this name", now.name);
    Err(ApiError::new(ApiErrorKind::Refused, message).hint("delete it again if that one is to go, too"))
}

/// Refuses the deletion of a disk that has snapshots.
///
/// # Errors
/// [`ApiErrorKind::Refused`].
pub fn check_no_snapshots(disk: &str, snapshots: &[String]) -> Result<(), ApiError> {
    let Some(first) = snapshots.first() else { return Ok(()) };
    let count = count(snapshots.len() as u64, "snapshot");
    let message = format!("disk {disk} has {count}, the oldest is {disk}@{first}");
    let hint = format!("`weir snapshot delete {disk}@{first}`; clones of it stay as they are");
    Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint))
}

async fn remove_here(node: &Node, entry: &Entry, record: &DiskRecord, lost: &str) -> Result<(), ApiError> {
    // The storage may take long to answer, and nothing may open the disk meanwhile.
    let Some(_deletion) = node.intents.begin_deletion(&record.name) else {
        let message = format!("disk {} is being deleted already", record.name);
        return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("`weir events` tells its end"));
    };
    if node.intents.is_under_way(&record.name) {
        let message = format!("disk {} is being made, or a snapshot of it is", record.name);
        return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"));
    }
    let (files, name) = (Files::of(node, node.volume(&record.volume).await?), record.name.clone());
    if let Files::None(_) = files {
        return forget_export(node, entry, record, lost).await;
    }
    // Whoever coordinates the LUN's volume finds the note, and removes the file.
    let is_others = matches!(files, Files::Lun(_, None));
    if !is_others {
        // Without the mount, no file would be found, and none removed.
        let snapshots = files.with(move |files| snapshot::list(&**files, Some(&name))).await?;
        let names: Vec<String> = snapshots.into_iter().map(|one| one.name).collect();
        check_no_snapshots(&record.name, &names)?;
    }
    let gone = Transaction::new().unchanged(entry.key.clone(), entry.mod_revision).delete(entry.key.clone());
    match Note::write(node, record, Step::Removing, (lost, 0), gone).await {
        Ok(_) if is_others => Ok(()),
        Ok(note) => note.finish().await.map(drop).map_err(|error| {
            let message = format!(
                "disk {} is deleted, but its file is not removed yet: {}",
                record.name, error.message
            );
            let remedy = if error.hint.is_empty() || error.kind == ApiErrorKind::Unavailable {
                "a node removes the file as soon as it reaches it".to_owned()
            } else {
                error.hint
            };
            ApiError::new(error.kind, message).hint(remedy)
        }),
        Err(RegistryError::Conflict { .. }) => {
            let message = format!("disk {} has just been opened", record.name);
            Err(ApiError::new(ApiErrorKind::Refused, message))
        }
        Err(error) => Err(unavailable(error)),
    }
}

/// Makes the record of a disk whose data is there already: an export of its volume's server. Nothing is written there.
///
/// # Errors
/// Another disk has the name or the export, or the registry does not answer.
pub async fn adopt_export(node: &Node, record: &DiskRecord) -> Result<(), ApiError> {
    let key = keys::disk(&record.name);
    loop {
        // Read before the disks: whoever makes one of this volume meanwhile rewrites it.
        let (volume, _) = node.volume_entry(&record.volume).await?;
        check_export_free(node, record).await?;
        let commit = in_volume(&volume)
            .absent(keys::unfinished(&record.name))
            .absent(key.clone())
            .put(key.clone(), record.encode());
        match node.registry.transact(commit).await {
            Ok(_) => return Ok(()),
            Err(RegistryError::Conflict { .. })
                if node.volume_entry(&record.volume).await?.0.mod_revision != volume.mod_revision => {}
            Err(RegistryError::Conflict { .. }) => {
                let message = format!("there is a disk {} already", record.name);
                return Err(ApiError::new(ApiErrorKind::Exists, message));
            }
            Err(error) => return Err(unavailable(error)),
        }
    }
}

/// Two disks must not have the same bytes.
async fn check_export_free(node: &Node, record: &DiskRecord) -> Result<(), ApiError> {
    for entry in node.registry.list(keys::DISKS).await.map_err(unavailable)?.entries {
        let Ok(other) = DiskRecord::of(&entry) else {
            let message = format!("{} cannot be read: it may have the export", entry.key);
            return Err(ApiError::new(ApiErrorKind::Refused, message)
                .hint("a newer version has written it; run the same version on all nodes"));
        };
        if other.volume == record.volume && other.source == record.source && other.name != record.name {
            let message = format!("disk {} of volume {} has that export", other.name, other.volume);
            return Err(ApiError::new(ApiErrorKind::Exists, message));
        }
    }
    Ok(())
}

/// Removes the record of a disk that is an export, and leaves that as it is.
async fn forget_export(node: &Node, entry: &Entry, record: &DiskRecord, lost: &str) -> Result<(), ApiError> {
    let gone = Transaction::new().unchanged(entry.key.clone(), entry.mod_revision).delete(entry.key.clone());
    match node.registry.transact(gone).await {
        Ok(_) => {
            let lost = if lost.is_empty() { String::new() } else { format!("; lost: {lost}") };
            let text = format!("it is forgotten; its export stays as it is{lost}");
            node.journal.tell("disk-deleted", &record.name, text);
            Ok(())
        }
        Err(RegistryError::Conflict { .. }) => {
            let message = format!("disk {} has just been opened", record.name);
            Err(ApiError::new(ApiErrorKind::Refused, message))
        }
        Err(error) => Err(unavailable(error)),
    }
}

/// Refuses to delete a disk on a LUN, or on a server, to whose blocks former owners may still write: they would be another disk's (I4). In a
/// directory the kernel frees a file's blocks only when nobody has it open any more, for requests in flight either; a device stays.
///
/// # Errors
/// That, or there is no such volume.
pub async fn check_former(node: &Node, record: &DiskRecord) -> Result<(), ApiError> {
    check_former_at(node, record, Nanos::now()).await
}

async fn check_former_at(node: &Node, record: &DiskRecord, now: Nanos) -> Result<(), ApiError> {
    let volume = node.volume(&record.volume).await?.kind;
    if !matches!(volume, VolumeKind::Lun | VolumeKind::Nbd) {
        return Ok(());
    }
    let (name, grace) = (&record.name, node.config.lease.fence_grace);
    // An owner that is gone is not a former one before another node has taken the disk over. Its I/O outlasts its process, and nobody can
    // see it on a LUN or at a server: so its end counts after the time that a takeover waits for (P4).
    let gone = record.owner.as_ref().filter(|owner| **owner != node.session.node_ref());
    let opens =
        format!("`weir disk export {name}` opens it, and its owner finds out within {grace}: delete it then");
    if volume == VolumeKind::Nbd {
        return check_export(node, record, gone, now);
    }
    let hint = match gone {
        None if record.former.is_empty() => return Ok(()),
        Some(gone) if record.former.is_empty() => {
            match node.intents.ended_since(gone, |process| node.records.has_stopped(process), now) {
                Some(since) if now >= since + grace.0 => return Ok(()),
                Some(since) => {
                    let wait = (since + grace.0 - now).as_secs_f64().ceil();
                    format!(
                        "{gone} has ended: delete the disk again in {wait} s (lease.fence_grace). Or {opens}"
                    )
                }
                None => opens,
            }
        }
        _ => opens,
    };
    let message = format!("former owners of disk {name} may still write to its blocks on the LUN");
    Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint))
}

/// An export stays, and its server may be gone for ever: so nobody has to open the disk before it is forgotten.
fn check_export(
    node: &Node,
    record: &DiskRecord,
    gone: Option<&NodeRef>,
    now: Nanos,
) -> Result<(), ApiError> {
    let (name, grace) = (&record.name, node.config.lease.fence_grace);
    let is_gone = |owner: &&NodeRef| !is_live(&node.records.nodes.now(), owner);
    for owner in record.former.iter().map(|former| &former.node).chain(gone.filter(is_gone)) {
        let ended = node.intents.ended_since(owner, |process| node.records.has_stopped(process), now);
        let hint = match ended {
            Some(since) if now >= since + grace.0 => continue,
            Some(since) => {
                let wait = (since + grace.0 - now).as_secs_f64().ceil();
                format!("{owner} has ended: delete the disk again in {wait} s (lease.fence_grace)")
            }
            None => format!(
                "`weir disk export {name}` opens it, and its owner finds out within {grace}: delete it then"
            ),
        };
        let message = format!("former owners of disk {name} may still write to its export");
        return Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint));
    }
    Ok(())
}

/// Finishes the step of an ended process on a disk without a record; waits a little for a process that is working on it.
/// Returns the removed file, if there was something to finish.
///
/// # Errors
/// A process is, or may be, still working on it.
pub async fn finish_others(node: &Arc<Node>, disk: &str) -> Result<Option<PathBuf>, ApiError> {
    let deadline = Nanos::now() + UNDER_WAY;
    loop {
        let Some(entry) = node.registry.get(&keys::unfinished(disk)).await.map_err(unavailable)? else {
            return Ok(None);
        };
        let taken = {
            let node = Arc::clone(node);
            to_its_end(async move { Ok(take_over(&node, &entry).await) }).await?
        };
        match taken {
            Err(NotTaken::Yet(_)) if Nanos::now() < deadline => weir_task::sleep(ASK_AGAIN).await,
            finished => return Ok(Some(finished?)),
        }
    }
}

/// Finishes what others have left, from time to time.
pub async fn keep_finished(node: Arc<Node>) {
    let (mut nodes, mut failures) = (node.records.nodes.changes(), Failures::default());
    loop {
        if let Ok(listing) = node.registry.list(keys::UNFINISHED).await {
            failures.keep(listing.entries.iter().map(|entry| &*entry.key));
            for entry in listing.entries {
                let key = entry.key.clone();
                if !failures.is_due(&key, Nanos::now()) {
                    continue;
                }
                let finish = {
                    let node = Arc::clone(&node);
                    to_its_end(async move {
                        let path = take_over(&node, &entry).await?;
                        tracing::info!(path = %path.display(), "removed; another process had begun to make or delete its disk");
                        Ok(())
                    })
                };
                // A volume that does not answer must not hold up the others.
                match weir_task::timeout(LOOK, finish).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) if error.kind == ApiErrorKind::Failed => {
                        if failures.add(&key, &error.to_string(), Nanos::now()) {
                            tracing::warn!(key, %error, "what another process has begun to make or delete stays, and is tried again");
                        }
                    }
                    Ok(Err(error)) => tracing::debug!(key, %error, "left for later"),
                    Err(_) => tracing::debug!(key, "this takes long, and goes on"),
                }
            }
        }
        let again = Nanos::now() + LOOK;
        // Also who comes back only for a moment has been there.
        while let Ok(Ok(())) = weir_task::timeout(again - Nanos::now(), nodes.changed()).await {
            let live = nodes.borrow_and_update().clone();
            node.intents.forget_live(|process| is_live(&live, process));
        }
        weir_task::sleep(again - Nanos::now()).await;
    }
}

/// Why a step that another process has begun is not finished.
#[derive(Debug)]
enum NotTaken {
    /// That process works on it, or another one does: not for long.
    Yet(ApiError),
    /// Another attempt would fail, too.
    Failed(ApiError),
}

impl From<NotTaken> for ApiError {
    fn from(reason: NotTaken) -> ApiError {
        match reason {
            NotTaken::Yet(error) | NotTaken::Failed(error) => error,
        }
    }
}

impl From<ApiError> for NotTaken {
    fn from(error: ApiError) -> NotTaken {
        NotTaken::Failed(error)
    }
}

async fn take_over(node: &Node, entry: &Entry) -> Result<PathBuf, NotTaken> {
    let record = UnfinishedRecord::of(entry)
        .map_err(|error| ApiError::new(ApiErrorKind::Failed, error.to_string()))?;
    let wait = |message: String| {
        Err(NotTaken::Yet(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again")))
    };
    let files = Files::of(node, node.volume(&record.volume).await?);
    // A former coordinator has unmounted the filesystem, or is fenced: no step of its on a file goes on.
    let is_former = matches!(files, Files::Lun(_, Some(_))) && record.by != node.session.node_ref();
    if let Err(until) = is_over(node, &record)
        && !is_former
    {
        let UnfinishedRecord { disk, by, .. } = record;
        return wait(format!(
            "disk {disk} is being made or deleted by {by}, or was when it fell silent{until}"
        ));
    }
    let Some(_alone) = node.intents.begin_leftovers(&record.volume) else {
        let message = format!("volume {} has not answered an earlier request yet", record.volume);
        return wait(message);
    };
    files.with(|_| Ok(())).await?;
    let replaces = Transaction::new().unchanged(entry.key.clone(), entry.mod_revision);
    match Note::put(node, record, replaces).await {
        Ok(note) => {
            let (disk, step, path) = (note.record.disk.clone(), note.record.step, note.finish().await?);
            if step == Step::Making {
                let text =
                    format!("{} was left by a process that ended while it made the disk", path.display());
                node.journal.tell(LEFTOVER_REMOVED, &disk, text);
            }
            Ok(path)
        }
        Err(RegistryError::Conflict { .. }) => wait(format!("{} has just changed", entry.key)),
        Err(error) => Err(unavailable(error).into()),
    }
}

/// Whether the process that wrote a note does nothing about it any more.
fn is_over(node: &Node, record: &UnfinishedRecord) -> Result<(), String> {
    let by = &record.by;
    if *by == node.session.node_ref() {
        let under_way = node.intents.is_under_way(&record.disk);
        return if under_way { Err(String::new()) } else { Ok(()) };
    }
    let grace = node.config.lease.fence_grace;
    let is_live = is_live(&node.records.nodes.now(), by);
    let Some(since) = node.intents.gone_since(by, is_live, Nanos::now()) else {
        return Err(String::new());
    };
    if node.records.has_stopped(by) || Nanos::now() >= since + grace.0 {
        return Ok(());
    }
    Err(format!("; it is taken to have ended {grace} after that"))
}

/// Whether the note `key` is still that of `revision`.
async fn is_noted(node: &Node, key: &str, revision: u64) -> Result<bool, ApiError> {
    let entry = node.registry.get(key).await.map_err(unavailable)?;
    Ok(entry.is_some_and(|entry| entry.mod_revision == revision))
}

impl<'a> Note<'a> {
    /// Notes a step about a disk, in one transaction with what comes before it.
    async fn write(
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

    async fn put(
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
    async fn finish(self) -> Result<PathBuf, ApiError> {
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
    async fn strike_off(self) {
        let strike = Transaction::new().unchanged(self.key.clone(), self.revision).delete(self.key.clone());
        if let Err(error) = self.node.registry.transact(strike).await {
            tracing::debug!(key = self.key, %error, "struck off later");
        }
    }
}

#[cfg(test)]
mod tests;
