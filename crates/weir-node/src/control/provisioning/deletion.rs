//! The deletion of a disk: its record, and then its file.

use std::sync::Arc;
use std::time::Duration;

use weir_cluster::records::{DiskRecord, Step, keys};
use weir_cluster::registry::{Entry, RegistryError, Transaction};
use weir_volume::snapshot;

use super::exports::forget_export;
use super::note::Note;
use super::{Files, to_its_end};
use crate::control::node::{Node, unavailable};
use crate::error::{ApiError, ApiErrorKind};
use crate::units::count;

/// Longest wait for the storage to remove a file (P10). A large sparse file can take longer, and its removal goes on.
const REMOVED: Duration = Duration::from_secs(10);

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
pub(super) async fn late(node: &Node, record: &DiskRecord) -> ApiError {
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
    // The coordinator of the LUN's volume finds the note and removes the file.
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
            ApiError::new(error.kind, message).code(&error.code).hint(remedy)
        }),
        Err(RegistryError::Conflict { .. }) => {
            let message = format!("disk {} has just been opened", record.name);
            Err(ApiError::new(ApiErrorKind::Refused, message))
        }
        Err(error) => Err(unavailable(error)),
    }
}
