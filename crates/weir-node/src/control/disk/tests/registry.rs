//! A registry that falls silent when it is told to.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use weir_cluster::Embedded;
use weir_cluster::registry::{
    Committed, Entry, LeaseId, Listing, Pending, ProcessWatch, Registry, RegistryError, Transaction, Watch,
};

/// Longer than a disk's task waits for its shard before a move.
const SILENCE: Duration = Duration::from_secs(6);

/// Carries transactions out, unless it is silent: then their senders hear after a while that nothing was heard.
pub struct Silencing {
    registry: Embedded,
    silent: Arc<AtomicBool>,
}

impl Silencing {
    pub fn open(directory: &Path, silent: Arc<AtomicBool>) -> Silencing {
        Silencing { registry: Embedded::open(&directory.join("registry")).unwrap(), silent }
    }
}

impl Registry for Silencing {
    fn get<'a>(&'a self, key: &'a str) -> Pending<'a, Option<Entry>> {
        self.registry.get(key)
    }
    fn list<'a>(&'a self, prefix: &'a str) -> Pending<'a, Listing> {
        self.registry.list(prefix)
    }
    fn transact(&self, transaction: Transaction) -> Pending<'_, Committed> {
        Box::pin(async move {
            if self.silent.load(Ordering::Relaxed) {
                tokio::time::sleep(SILENCE).await;
                return Err(RegistryError::Unavailable { reason: "silent".into() });
            }
            self.registry.transact(transaction).await
        })
    }
    fn watch<'a>(&'a self, prefix: &'a str, after_revision: u64) -> Pending<'a, Watch> {
        self.registry.watch(prefix, after_revision)
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
