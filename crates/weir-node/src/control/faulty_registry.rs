//! For tests: a registry that loses transactions on request.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use weir_cluster::Embedded;
use weir_cluster::records::keys;
use weir_cluster::registry::{
    Batch, Committed, Entry, LeaseId, Listing, Pending, ProcessWatch, Registry, RegistryError, Transaction,
    Watch, WatchEvent, WatchSink,
};

/// Longer than a disk's task waits for its shard before a move.
const SILENCE: Duration = Duration::from_secs(6);

/// The fate of transactions.
#[derive(Default)]
pub struct RegistryFaults {
    /// So many are lost on their way there, and their senders learn of it at once.
    pub lost: AtomicUsize,
    /// The answers to so many are lost.
    pub unanswered: AtomicUsize,
    /// The next one is lost, and its sender waits for long.
    pub loses: AtomicBool,
    /// No transaction is answered, for ever.
    pub hangs: AtomicBool,
    /// One does.
    pub hung: AtomicBool,
    /// All are lost, and their senders learn of it at once.
    pub refuses: AtomicBool,
    /// Reads so far.
    pub reads: AtomicUsize,
    /// Reads and listings are not answered.
    pub away: AtomicBool,
    /// Reads wait, without an end.
    pub mute: AtomicBool,
    /// So many listings are not answered.
    pub lost_lists: AtomicUsize,
    /// Transactions of other processes after each of the next listings, in order; none after one that has failed.
    pub after_listing: Mutex<VecDeque<Vec<Transaction>>>,
    /// The next one is not answered, and is carried out after the next read.
    pub delays: AtomicBool,
    /// The next ones are carried out, and answered with these errors.
    pub answered_with: Mutex<VecDeque<RegistryError>>,
    /// Nothing is read any more after such an answer.
    pub deafens: AtomicBool,
    /// Nothing is read.
    pub deaf: AtomicBool,
    /// Views of the disks hear of no change.
    pub blind: AtomicBool,
}

impl RegistryFaults {
    /// Ends [`RegistryFaults::deafens`].
    pub fn hear_again(&self) {
        self.deafens.store(false, Ordering::Relaxed);
        self.deaf.store(false, Ordering::Relaxed);
    }
}

/// Carries transactions out, with these faults.
pub struct FaultyRegistry {
    registry: Embedded,
    pub faults: Arc<RegistryFaults>,
    delayed: Mutex<Option<Transaction>>,
}

impl FaultyRegistry {
    pub fn open(directory: &Path, faults: Arc<RegistryFaults>) -> FaultyRegistry {
        let registry = Embedded::open(&directory.join("registry")).unwrap();
        FaultyRegistry { registry, faults, delayed: Mutex::default() }
    }
}

/// Whether this is one of those that are still to be lost.
fn lose(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

fn unheard<T>() -> Result<T, RegistryError> {
    Err(RegistryError::Unavailable { reason: "nothing is heard".into() })
}

impl Registry for FaultyRegistry {
    fn get<'a>(&'a self, key: &'a str) -> Pending<'a, Option<Entry>> {
        self.faults.reads.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            while self.faults.mute.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            if self.faults.away.load(Ordering::Relaxed) || self.faults.deaf.load(Ordering::Relaxed) {
                return unheard();
            }
            let answer = self.registry.get(key).await;
            let delayed = self.delayed.lock().unwrap().take();
            if let Some(delayed) = delayed {
                self.registry.transact(delayed).await.unwrap();
            }
            answer
        })
    }
    fn list<'a>(&'a self, prefix: &'a str) -> Pending<'a, Listing> {
        Box::pin(async move {
            if self.faults.away.load(Ordering::Relaxed) || lose(&self.faults.lost_lists) {
                return unheard();
            }
            let answer = self.registry.list(prefix).await;
            let next = self.faults.after_listing.lock().unwrap().pop_front();
            for transaction in next.into_iter().flatten() {
                if self.registry.transact(transaction).await.is_err() {
                    self.faults.after_listing.lock().unwrap().clear();
                    break;
                }
            }
            answer
        })
    }
    fn transact(&self, transaction: Transaction) -> Pending<'_, Committed> {
        Box::pin(async move {
            if self.faults.hangs.load(Ordering::Relaxed) {
                self.faults.hung.store(true, Ordering::Relaxed);
                std::future::pending::<()>().await;
            }
            if self.faults.refuses.load(Ordering::Relaxed) || lose(&self.faults.lost) {
                return unheard();
            }
            if self.faults.loses.swap(false, Ordering::Relaxed) {
                tokio::time::sleep(SILENCE).await;
                return unheard();
            }
            if self.faults.delays.swap(false, Ordering::Relaxed) {
                *self.delayed.lock().unwrap() = Some(transaction);
                return unheard();
            }
            let answer = self.registry.transact(transaction).await;
            let instead = self.faults.answered_with.lock().unwrap().pop_front();
            if let Some(error) = instead {
                let deafens = self.faults.deafens.load(Ordering::Relaxed);
                self.faults.deaf.store(deafens, Ordering::Relaxed);
                return Err(error);
            }
            if lose(&self.faults.unanswered) { unheard() } else { answer }
        })
    }
    fn watch<'a>(&'a self, prefix: &'a str, after_revision: u64) -> Pending<'a, Watch> {
        Box::pin(async move {
            let mut watch = self.registry.watch(prefix, after_revision).await?;
            if prefix != keys::DISKS {
                return Ok(watch);
            }
            let (sink, delayed) = WatchSink::open(Vec::new());
            let faults = Arc::clone(&self.faults);
            tokio::spawn(async move {
                while let Ok(WatchEvent { revision, change }) = watch.next().await {
                    while faults.blind.load(Ordering::Relaxed) {
                        tokio::time::sleep(Duration::from_millis(2)).await;
                    }
                    sink.deliver(Batch { revision, changes: vec![change] });
                }
            });
            Ok(delayed)
        })
    }
    fn grant(&self, ttl: Duration) -> Pending<'_, LeaseId> {
        self.registry.grant(ttl)
    }
    fn keep_alive(&self, lease: LeaseId) -> Pending<'_, Duration> {
        self.registry.keep_alive(lease)
    }
    fn revoke(&self, lease: LeaseId) -> Pending<'_, ()> {
        self.registry.revoke(lease)
    }
    fn register_process<'a>(
        &'a self,
        name: &'a str,
        incarnation: u64,
        lease: LeaseId,
    ) -> Pending<'a, ProcessWatch> {
        self.registry.register_process(name, incarnation, lease)
    }
}
