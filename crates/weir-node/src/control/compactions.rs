//! Disks whose files this node copies to fewer pieces, as the coordinator of their volumes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use weir_block::Nanos;
use weir_volume::compaction::Pieces;

use crate::error::ApiError;

/// How long the outcome of one is remembered, for whoever follows it.
const REMEMBERED: Duration = Duration::from_secs(600);

/// One of them.
#[derive(Debug)]
pub struct Compaction {
    /// The epoch of the coordination in which it runs: it ends with that.
    pub epoch: u64,
    /// The disk's file before.
    pub before: Pieces,
    /// Bytes that are copied.
    pub copied: AtomicU64,
    /// The extents of the new file.
    pub extents: AtomicU64,
    outcome: OnceLock<(Nanos, Result<(), ApiError>)>,
}

impl Compaction {
    /// One that begins.
    #[must_use]
    pub fn new(epoch: u64, before: Pieces) -> Compaction {
        let (copied, extents) = (AtomicU64::new(0), AtomicU64::new(0));
        Compaction { epoch, before, copied, extents, outcome: OnceLock::new() }
    }

    /// It is over.
    pub fn end(&self, outcome: Result<(), ApiError>) {
        // It ends once.
        let _ = self.outcome.set((Nanos::now(), outcome));
    }

    /// How it has ended, if it has.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<(), ApiError>> {
        self.outcome.get().map(|(_, outcome)| outcome.clone())
    }

    /// How far it is, in per cent; `None`: it is over.
    fn percent(&self) -> Option<u64> {
        let copied = self.copied.load(Ordering::Relaxed).saturating_mul(100);
        self.outcome.get().is_none().then(|| (copied / self.before.bytes.max(1)).min(100))
    }

    fn is_remembered(&self, now: Nanos) -> bool {
        self.outcome.get().is_none_or(|(at, _)| now < *at + REMEMBERED)
    }
}

/// All of them, by disk.
#[derive(Debug, Default)]
pub struct Compactions(Mutex<BTreeMap<String, Arc<Compaction>>>);

impl Compactions {
    /// Begins one, and forgets old ones.
    ///
    /// # Errors
    /// One of the disk is under way; how far it is, in per cent. A second question may find none: it may end at any time.
    pub fn begin(&self, disk: &str, compaction: &Arc<Compaction>) -> Result<(), u64> {
        let (mut all, now) = (self.lock(), Nanos::now());
        all.retain(|_, one| one.is_remembered(now));
        if let Some(percent) = all.get(disk).and_then(|one| one.percent()) {
            return Err(percent);
        }
        all.insert(disk.to_owned(), Arc::clone(compaction));
        Ok(())
    }

    /// The last one of a disk.
    #[must_use]
    pub fn get(&self, disk: &str) -> Option<Arc<Compaction>> {
        self.lock().get(disk).cloned()
    }

    /// How far the copy of a disk is that is under way, in per cent.
    #[must_use]
    pub fn under_way(&self, disk: &str) -> Option<u64> {
        self.get(disk).and_then(|one| one.percent())
    }

    /// All copies that are under way, by disk.
    #[must_use]
    pub fn all_under_way(&self) -> BTreeMap<String, u64> {
        self.lock().iter().filter_map(|(disk, one)| Some((disk.clone(), one.percent()?))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Compaction>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_under_way_until_it_has_ended_and_is_remembered_for_a_while() {
        let all = Compactions::default();
        let one = Arc::new(Compaction::new(3, Pieces { bytes: 200, ..Pieces::default() }));
        assert_eq!((all.begin("d", &one), all.begin("d", &one)), (Ok(()), Err(0)));
        one.copied.store(50, Ordering::Relaxed);
        assert_eq!(all.begin("d", &one), Err(25), "the refusal needs no second look");
        assert_eq!((all.under_way("d"), all.under_way("e")), (Some(25), None));
        assert_eq!(all.all_under_way(), BTreeMap::from([("d".to_owned(), 25)]));
        one.end(Ok(()));
        assert!(all.under_way("d").is_none() && all.all_under_way().is_empty());
        assert!(all.get("d").is_some_and(|one| one.outcome() == Some(Ok(()))));
        assert!(one.is_remembered(Nanos::now()) && !one.is_remembered(Nanos::now() + REMEMBERED));
    }
}
