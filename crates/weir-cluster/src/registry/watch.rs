//! The two ends of a watch: the sender never waits, the receiver never misses a change unnoticed.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::{Entry, RegistryError, WATCH_QUEUE};

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// It was set.
    Put(Entry),
    /// It was removed, or its lease ended.
    Delete {
        /// The key.
        key: String,
    },
}

impl Change {
    /// The key that changed.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Change::Put(entry) => &entry.key,
            Change::Delete { key } => key,
        }
    }
}

/// One change for a watcher. Changes of one transaction share a revision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchEvent {
    /// The registry's revision of the change.
    pub revision: u64,
    /// The change.
    pub change: Change,
}

/// The changes of one revision. Kept together so that a resumed watch never repeats or loses a part of a transaction. An empty
/// batch means no changes up to `revision`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// The registry's revision of all these changes.
    pub revision: u64,
    /// In the order of the transaction's operations.
    pub changes: Vec<Change>,
}

impl Batch {
    /// The part of the batch under `prefix`.
    #[must_use]
    pub fn under(&self, prefix: &str) -> Batch {
        let changes =
            self.changes.iter().filter(|change| change.key().starts_with(prefix)).cloned().collect();
        Batch { revision: self.revision, changes }
    }
}

/// The receiving end of a watch. Dropping it ends the watch.
#[derive(Debug)]
pub struct Watch {
    backlog: VecDeque<WatchEvent>,
    batches: mpsc::Receiver<Batch>,
    end: Arc<OnceLock<RegistryError>>,
    /// The client that feeds the watch: it must live as long as the watch.
    feeder: Option<Box<dyn Any + Send + Sync>>,
}

impl Watch {
    /// Keeps `client` alive as long as the watch.
    pub(crate) fn fed_by(mut self, client: impl Any + Send + Sync) -> Watch {
        self.feeder = Some(Box::new(client));
        self
    }

    /// The next change; waits for one.
    ///
    /// # Errors
    /// [`RegistryError::Compacted`] when this watcher was too slow or was away for too long, and
    /// [`RegistryError::Unavailable`] when the registry has gone. Both are final: list and watch again.
    pub async fn next(&mut self) -> Result<WatchEvent, RegistryError> {
        loop {
            if let Some(event) = self.backlog.pop_front() {
                return Ok(event);
            }
            let batch = self.next_batch().await?;
            let revision = batch.revision;
            self.backlog.extend(batch.changes.into_iter().map(|change| WatchEvent { revision, change }));
        }
    }

    /// The next batch, for forwarding. Do not mix with [`Watch::next`].
    pub(crate) async fn next_batch(&mut self) -> Result<Batch, RegistryError> {
        match self.batches.recv().await {
            Some(batch) => Ok(batch),
            None => {
                Err(self.end.get().cloned().unwrap_or_else(|| RegistryError::unavailable("it was closed")))
            }
        }
    }
}

/// The result of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// It is in the watcher's queue.
    Queued,
    /// The watcher has ended, or is too slow and was cut off. Drop it.
    Gone,
}

/// The delivering end of a watch.
#[derive(Debug)]
pub struct WatchSink {
    batches: mpsc::Sender<Batch>,
    end: Arc<OnceLock<RegistryError>>,
}

impl WatchSink {
    /// Both ends, with room for [`WATCH_QUEUE`] transactions and those of `past`.
    #[must_use]
    pub fn open(past: Vec<Batch>) -> (WatchSink, Watch) {
        let (sender, batches) = mpsc::channel(WATCH_QUEUE + past.len());
        for batch in past {
            // The queue is large enough for all of them.
            let _ = sender.try_send(batch);
        }
        let end = Arc::new(OnceLock::new());
        let watch = Watch { backlog: VecDeque::new(), batches, end: Arc::clone(&end), feeder: None };
        (WatchSink { batches: sender, end }, watch)
    }

    /// Queues a batch without waiting. A watcher with a full queue is cut off (P10): it still gets its queued batches, then
    /// [`RegistryError::Compacted`].
    pub fn deliver(&self, batch: Batch) -> Delivery {
        let oldest = batch.revision;
        match self.batches.try_send(batch) {
            Ok(()) => Delivery::Queued,
            Err(mpsc::error::TrySendError::Closed(_)) => Delivery::Gone,
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.close(RegistryError::Compacted { oldest });
                Delivery::Gone
            }
        }
    }

    /// Sets the reason for the watch's end; the caller then drops the sink. The first reason counts.
    pub fn close(&self, reason: RegistryError) {
        let _ = self.end.set(reason);
    }

    /// Whether the receiver was dropped.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.batches.is_closed()
    }

    /// Returns when the receiver is dropped.
    pub async fn abandoned(&self) {
        self.batches.closed().await;
    }
}
