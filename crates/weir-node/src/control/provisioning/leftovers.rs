//! Steps of ended processes: another process finishes them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::{Record, Step, UnfinishedRecord, keys};
use weir_cluster::registry::{Entry, RegistryError, Transaction};

use super::note::Note;
use super::{ASK_AGAIN, Files, UNDER_WAY, to_its_end};
use crate::control::decide::is_live;
use crate::control::failures::{Failures, Pauses};
use crate::control::node::{Node, unavailable};
use crate::error::{ApiError, ApiErrorKind, DAMAGED, FILESYSTEM_FAILED};

/// The kind of the event that tells that something was removed whose maker has ended.
pub const LEFTOVER_REMOVED: &str = "leftover-removed";

/// Between two looks for what others have left, and the longest wait for one step of that: its end may come later.
const LOOK: Duration = Duration::from_secs(3);

/// After a step that met damage, or a filesystem that failed. Damage can shut the filesystem down: an attempt every few seconds would take a
/// volume on a LUN from one coordinator to the next for ever. A request for that name tries at once.
const AFTER_HARM: Pauses = Pauses { first: Duration::from_secs(60), longest: Duration::from_secs(3600) };

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
#[derive(Debug, Default)]
struct Attempts {
    /// Those after which the filesystem may have failed.
    harmful: Failures,
    /// The time of the next attempt.
    next: Nanos,
    /// The reason that the log has.
    told: String,
}

impl Attempts {
    /// Returns whether the log lacks the reason.
    fn failed(&mut self, error: &ApiError, now: Nanos) -> bool {
        let reason = error.to_string();
        if does_harm(error) {
            self.next = now + self.harmful.failed(&reason, AFTER_HARM).0;
        }
        let is_new = self.told != reason;
        self.told = reason;
        is_new
    }
}

fn does_harm(error: &ApiError) -> bool {
    [DAMAGED, FILESYSTEM_FAILED].contains(&error.code.as_str())
}

/// By the keys of the notes.
type Failed = Arc<Mutex<BTreeMap<String, Attempts>>>;

/// Finishes what others have left, from time to time.
pub async fn keep_finished(node: Arc<Node>) {
    let (mut nodes, failed) = (node.records.nodes.changes(), Failed::default());
    loop {
        if let Ok(listing) = node.registry.list(keys::UNFINISHED).await {
            finish_all(&node, listing.entries, &failed).await;
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
async fn finish_all(node: &Arc<Node>, notes: Vec<Entry>, failed: &Failed) {
    let is_due = |note: &Entry| {
        let failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.get(&note.key).is_none_or(|attempts| Nanos::now() >= attempts.next)
    };
    let is_there = |key: &String| notes.iter().any(|note| note.key == *key);
    failed.lock().unwrap_or_else(PoisonError::into_inner).retain(|key, _| is_there(key));
    for note in notes.iter().filter(|note| is_due(note)) {
        // Counts also an attempt that fails late.
        let (node, note, failed) = (Arc::clone(node), note.clone(), Arc::clone(failed));
        let finish = to_its_end(async move {
            finish_one(&node, &note, &failed).await;
            Ok(())
        });
        // A volume that does not answer must not hold up the others.
        if weir_task::timeout(LOOK, finish).await.is_err() {
            tracing::debug!("a step of another process takes long, and goes on");
        }
    }
}

async fn finish_one(node: &Node, note: &Entry, failed: &Failed) {
    let key = &note.key;
    match take_over(node, note).await.map_err(ApiError::from) {
        Ok(path) => {
            tracing::info!(path = %path.display(), "removed; another process had begun to make or delete its disk");
        }
        Err(error) if error.kind == ApiErrorKind::Failed || does_harm(&error) => {
            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
            if failed.entry(key.clone()).or_default().failed(&error, Nanos::now()) {
                tracing::warn!(key, %error, "what another process has begun to make or delete stays, and is tried again");
            }
        }
        Err(error) => tracing::debug!(key, %error, "left for later"),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_harm_the_volume_is_tried_more_and_more_rarely_and_each_reason_is_logged_once() {
        let mut attempts = Attempts::default();
        let error = |code: &str, text: &str| ApiError::new(ApiErrorKind::Failed, text).code(code);
        let minute = Duration::from_secs(60);
        let now = Nanos(0) + minute;

        assert!(attempts.failed(&error("", "not mounted"), now));
        assert!(!attempts.failed(&error("", "not mounted"), now));
        assert!(attempts.next <= now, "whoever has mounted it does not wait");

        assert!(attempts.failed(&error(DAMAGED, "damaged"), now));
        assert_eq!(attempts.next, now + minute);
        assert!(attempts.failed(&error("", "not mounted"), now));
        assert!(attempts.failed(&error(FILESYSTEM_FAILED, "shut down"), now));
        assert_eq!(attempts.next, now + 2 * minute, "another reason in between changes nothing");
    }
}
