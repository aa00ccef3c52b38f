//! Steps of ended processes: another process finishes them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::{Record, Step, UnfinishedRecord, keys};
use weir_cluster::registry::{Entry, RegistryError, Transaction};

use super::note::Note;
use super::{ASK_AGAIN, Files, UNDER_WAY, to_its_end};
use crate::control::decide::is_live;
use crate::control::failures::{Failures, Pauses};
use crate::control::node::{Node, unavailable};
use crate::error::{ApiError, ApiErrorKind, DAMAGED};

/// The kind of the event that tells that something was removed whose maker has ended.
pub const LEFTOVER_REMOVED: &str = "leftover-removed";

/// Between two looks for what others have left, and the longest wait for one step of that: its end may come later.
const LOOK: Duration = Duration::from_secs(3);

/// After a step that met damage. Damage can shut the filesystem down: an attempt every few seconds would take a volume on a LUN from one
/// coordinator to the next for ever. Whoever makes a disk of that name tries at once.
const DAMAGE: Pauses = Pauses { first: Duration::from_secs(60), longest: Duration::from_secs(3600) };

/// After any other failure, such as a volume that is not mounted.
const OTHERWISE: Pauses = Pauses { first: LOOK, longest: LOOK };

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

/// Failed attempts at a note of another process.
#[derive(Default)]
struct Attempts {
    failures: Failures,
    /// The time of the next attempt.
    next: Nanos,
}

/// Finishes what others have left, from time to time.
pub async fn keep_finished(node: Arc<Node>) {
    let (mut nodes, mut failed) = (node.records.nodes.changes(), BTreeMap::new());
    loop {
        if let Ok(listing) = node.registry.list(keys::UNFINISHED).await {
            finish_all(&node, listing.entries, &mut failed).await;
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

/// Finishes the steps of `notes` that are due.
async fn finish_all(node: &Arc<Node>, notes: Vec<Entry>, failed: &mut BTreeMap<String, Attempts>) {
    failed.retain(|key, _| notes.iter().any(|note| note.key == *key));
    for note in notes {
        let key = note.key.clone();
        if failed.get(&key).is_some_and(|attempts| Nanos::now() < attempts.next) {
            continue;
        }
        let finish = {
            let node = Arc::clone(node);
            to_its_end(async move {
                let path = take_over(&node, &note).await?;
                tracing::info!(path = %path.display(), "removed; another process had begun to make or delete its disk");
                Ok(())
            })
        };
        // A volume that does not answer must not hold up the others.
        match weir_task::timeout(LOOK, finish).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) if error.kind == ApiErrorKind::Failed => {
                let attempts = failed.entry(key.clone()).or_default();
                let pauses = if error.code == DAMAGED { DAMAGE } else { OTHERWISE };
                let (pause, is_new) = attempts.failures.failed(&error.to_string(), pauses);
                attempts.next = Nanos::now() + pause;
                if is_new {
                    tracing::warn!(key, %error, "what another process has begun to make or delete stays, and is tried again");
                }
            }
            Ok(Err(error)) => tracing::debug!(key, %error, "left for later"),
            Err(_) => tracing::debug!(key, "this takes long, and goes on"),
        }
    }
}

/// Why a step that another process has begun is not finished.
#[derive(Debug)]
pub(super) enum NotTaken {
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

pub(super) async fn take_over(node: &Node, entry: &Entry) -> Result<PathBuf, NotTaken> {
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
