//! The state of the embedded registry without its file and its thread, for simulations: the caller supplies the time and the
//! delivery of changes to watchers.

use std::time::{Duration, Instant};

use weir_block::Nanos;

use super::state::State;
use crate::records::{NodeRef, Record, StoppedHow, StoppedRecord, keys};
use crate::registry::{
    Batch, Committed, Delivery, Entry, LeaseId, Listing, Op, RegistryError, Transaction, Watch, WatchSink,
    check_key, check_prefix,
};

/// A registry with caller-supplied time. All calls return at once.
#[derive(Debug)]
pub struct Memory {
    state: State,
    /// The instant of time 0; only differences matter.
    origin: Instant,
}

/// The delivering end of a watch.
#[derive(Debug)]
pub struct Feed {
    prefix: String,
    seen: u64,
    sink: WatchSink,
}

impl Memory {
    /// An empty registry.
    #[must_use]
    #[expect(
        clippy::disallowed_methods,
        reason = "the state counts from any instant; only differences matter"
    )]
    pub fn new() -> Memory {
        Memory { state: State::default(), origin: Instant::now() }
    }

    fn instant(&self, now: Nanos) -> Instant {
        self.origin + Duration::from_nanos(now.0)
    }

    /// One key.
    ///
    /// # Errors
    /// The key is malformed.
    pub fn get(&self, key: &str) -> Result<Option<Entry>, RegistryError> {
        check_key(key)?;
        Ok(self.state.get(key))
    }

    /// All keys that start with `prefix`.
    ///
    /// # Errors
    /// The prefix is malformed.
    pub fn list(&self, prefix: &str) -> Result<Listing, RegistryError> {
        check_prefix(prefix)?;
        Ok(self.state.list(prefix))
    }

    /// Makes all changes if all conditions hold.
    ///
    /// # Errors
    /// As [`Registry::transact`](crate::Registry::transact).
    pub fn transact(&mut self, transaction: Transaction) -> Result<Committed, RegistryError> {
        transaction.check()?;
        let committed = self.state.transact(transaction);
        self.state.unsaved = Default::default();
        committed
    }

    /// A new lease.
    ///
    /// # Errors
    /// The time to live is outside its bounds, or there are too many leases.
    pub fn grant(&mut self, ttl: Duration, now: Nanos) -> Result<LeaseId, RegistryError> {
        let now = self.instant(now);
        self.state.grant(ttl, now)
    }

    /// Extends a lease to its full time again.
    ///
    /// # Errors
    /// The lease has ended.
    pub fn keep_alive(&mut self, lease: LeaseId, now: Nanos) -> Result<Duration, RegistryError> {
        let now = self.instant(now);
        self.state.keep_alive(lease, now)
    }

    /// Ends a lease.
    pub fn revoke(&mut self, lease: LeaseId) {
        self.state.revoke(lease);
        self.state.unsaved = Default::default();
    }

    /// The registry has seen the end of the process under `lease`.
    pub fn end_process(&mut self, lease: LeaseId, node: NodeRef, now: Nanos) {
        let key = keys::stopped(&node);
        let (how, time_unix_ms) = (StoppedHow::ProcessEnded, now.0 / 1_000_000);
        let note = StoppedRecord { node, how, time_unix_ms, machine: None };
        self.state.end_process(lease, vec![Op::Put { key, value: note.encode(), lease: None }]);
        self.state.unsaved = Default::default();
    }

    /// Ends expired leases. If the registry was paused and could not receive keep-alives, extends them to their full time
    /// instead.
    pub fn expire(&mut self, now: Nanos, stalled: bool) -> Vec<LeaseId> {
        let now = self.instant(now);
        let over = self.state.expire(now, stalled);
        self.state.unsaved = Default::default();
        over
    }

    /// End of the next lease to expire.
    #[must_use]
    pub fn next_deadline(&self) -> Nanos {
        let next = self.state.next_deadline();
        next.map_or(Nanos::NEVER, |at| {
            Nanos(u64::try_from((at - self.origin).as_nanos()).unwrap_or(u64::MAX))
        })
    }

    /// The revision of the last change.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.state.revision
    }

    /// A watch of changes under `prefix` after a revision; [`Feed::deliver`] sends them to the receiver.
    ///
    /// # Errors
    /// The prefix is malformed, or the changes are no longer known.
    pub fn watch(&self, prefix: &str, after: u64) -> Result<(Feed, Watch), RegistryError> {
        check_prefix(prefix)?;
        self.state.since(prefix, after)?;
        let (sink, watch) = WatchSink::open(Vec::new());
        Ok((Feed { prefix: prefix.to_owned(), seen: after, sink }, watch))
    }
}

impl Default for Memory {
    fn default() -> Memory {
        Memory::new()
    }
}

impl Feed {
    /// Whether the receiver has yet to receive changes.
    #[must_use]
    pub fn is_behind(&self, registry: &Memory) -> bool {
        self.seen < registry.state.revision
    }

    /// Sends all changes so far to the receiver. Returns whether it still listens; after too long an absence it has to list
    /// again.
    pub fn deliver(&mut self, registry: &Memory) -> bool {
        let missed = match registry.state.since(&self.prefix, self.seen) {
            Ok(missed) => missed,
            Err(error) => {
                self.sink.close(error);
                return false;
            }
        };
        self.seen = registry.state.revision;
        let told = |batch: Batch| self.sink.deliver(batch) == Delivery::Queued;
        missed.into_iter().all(told) && !self.sink.is_abandoned()
    }
}
