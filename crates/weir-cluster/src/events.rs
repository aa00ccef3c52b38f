//! The cluster's events, for operators; bounded in number.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::records::{EventRecord, NodeRef, Record, keys};
use crate::registry::{MAX_TRANSACTION, Registry, RegistryError, Transaction};

/// Events kept; the oldest are pruned, with some delay.
pub const MAX_EVENTS: usize = 1000;
/// Longest text of an event, in bytes; longer ones are truncated.
pub const MAX_TEXT: usize = 4096;
/// Events between two prunings by one process.
const PRUNE_EVERY: u64 = 32;

/// Writes and reads events.
pub struct Events {
    registry: Arc<dyn Registry>,
    node: NodeRef,
    written: AtomicU64,
}

impl Events {
    /// Events written by `node`.
    #[must_use]
    pub fn new(registry: Arc<dyn Registry>, node: NodeRef) -> Events {
        Events { registry, node, written: AtomicU64::new(0) }
    }

    /// Writes an event.
    ///
    /// # Errors
    /// The registry's error. Events are informative: callers only log a loss.
    pub async fn record(&self, kind: &str, subject: &str, text: &str) -> Result<(), RegistryError> {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let time_unix_ms = weir_task::unix_millis();
        let event = EventRecord {
            time_unix_ms,
            node: self.node.node.clone(),
            kind: cut(kind).to_owned(),
            subject: cut(subject).to_owned(),
            text: cut(text).to_owned(),
        };
        let key = keys::event(time_unix_ms, &self.node, number);
        self.registry.transact(Transaction { compares: Vec::new(), ops: vec![event.put(key)] }).await?;
        if number % PRUNE_EVERY == PRUNE_EVERY - 1 {
            self.prune().await?;
        }
        Ok(())
    }

    /// The newest events, at most `limit`, oldest first. Unreadable ones are left out.
    ///
    /// # Errors
    /// The registry's error.
    pub async fn recent(&self, limit: usize) -> Result<Vec<EventRecord>, RegistryError> {
        let entries = self.registry.list(keys::EVENTS).await?.entries;
        let newest = &entries[entries.len().saturating_sub(limit)..];
        Ok(newest.iter().filter_map(|entry| EventRecord::of(entry).ok()).collect())
    }

    async fn prune(&self) -> Result<(), RegistryError> {
        let entries = self.registry.list(keys::EVENTS).await?.entries;
        let surplus = entries.len().saturating_sub(MAX_EVENTS);
        for oldest in entries[..surplus].chunks(MAX_TRANSACTION) {
            let delete = oldest.iter().fold(Transaction::new(), |some, entry| some.delete(&*entry.key));
            self.registry.transact(delete).await?;
        }
        Ok(())
    }
}

/// The beginning of `text`, at most [`MAX_TEXT`] bytes, whole characters.
fn cut(text: &str) -> &str {
    let end = (0..=MAX_TEXT.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}
