//! The registry's state in memory and all its rules. No I/O; the caller supplies the time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::time::{Duration, Instant};

use super::{HISTORY, HISTORY_BYTES, MAX_DATA, MAX_KEYS, MAX_LEASES};
use crate::registry::{
    Batch, Change, Committed, Compare, Entry, Expect, LeaseId, Listing, MAX_TTL, MIN_TTL, Op, RegistryError,
    Transaction,
};

/// A lease: its time to live, its deadline, and its keys.
#[derive(Debug)]
pub(super) struct Lease {
    pub ttl: Duration,
    pub deadline: Instant,
    pub keys: BTreeSet<String>,
}

/// Changes since the last commit; the file must have them before any caller gets an answer.
#[derive(Debug, Default)]
pub(super) struct Unsaved {
    pub batches: Vec<Batch>,
    /// Leases granted (with their time to live) or ended.
    pub leases: Vec<(LeaseId, Option<Duration>)>,
}

impl Unsaved {
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.leases.is_empty()
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// The revision of the last change.
    pub revision: u64,
    /// The number of the last lease granted.
    pub last_lease: u64,
    /// Changes up to this revision are no longer in the history.
    pub floor: u64,
    pub entries: BTreeMap<String, Entry>,
    pub leases: BTreeMap<LeaseId, Lease>,
    pub history: VecDeque<Batch>,
    history_bytes: usize,
    data_bytes: usize,
    pub unsaved: Unsaved,
}

impl State {
    /// Restores an entry from the file.
    pub fn restore_entry(&mut self, entry: Entry) {
        self.data_bytes += size(&entry);
        if let Some(lease) = entry.lease.and_then(|id| self.leases.get_mut(&id)) {
            lease.keys.insert(entry.key.clone());
        }
        self.entries.insert(entry.key.clone(), entry);
    }

    /// Restores a transaction from the file, in the order of revisions.
    pub fn restore_history(&mut self, batch: Batch) {
        self.history_bytes += batch.changes.iter().map(change_size).sum::<usize>();
        self.history.push_back(batch);
    }

    pub fn get(&self, key: &str) -> Option<Entry> {
        self.entries.get(key).cloned()
    }

    pub fn list(&self, prefix: &str) -> Listing {
        let from = self.entries.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        let entries =
            from.take_while(|(key, _)| key.starts_with(prefix)).map(|(_, entry)| entry.clone()).collect();
        Listing { entries, revision: self.revision }
    }

    /// Applies a transaction that has passed [`Transaction::check`].
    pub fn transact(&mut self, transaction: Transaction) -> Result<Committed, RegistryError> {
        if !transaction.compares.iter().all(|compare| self.holds(compare)) {
            let keys: BTreeSet<&str> = transaction.compares.iter().map(|compare| &*compare.key).collect();
            let current = keys.into_iter().filter_map(|key| self.get(key)).collect();
            return Err(RegistryError::Conflict { current });
        }
        self.check_ops(&transaction.ops)?;
        self.apply(transaction.ops);
        Ok(Committed { revision: self.revision })
    }

    fn holds(&self, compare: &Compare) -> bool {
        let revision = self.entries.get(&compare.key).map(|entry| entry.mod_revision);
        match compare.expect {
            Expect::Absent => revision.is_none(),
            Expect::ModRevision(expected) => revision == Some(expected),
        }
    }

    /// All checks that can refuse the operations, before the first is applied.
    fn check_ops(&self, ops: &[Op]) -> Result<(), RegistryError> {
        let (mut keys, mut bytes) = (self.entries.len(), self.data_bytes);
        for op in ops {
            if let Some(old) = self.entries.get(op.key()) {
                keys -= 1;
                bytes -= size(old);
            }
            if let Op::Put { key, value, lease } = op {
                keys += 1;
                bytes += key.len() + value.len();
                if let Some(lease) = lease.filter(|lease| !self.leases.contains_key(lease)) {
                    return Err(RegistryError::LeaseExpired { lease });
                }
            }
        }
        // Operations that shrink the registry are always allowed, even if an older version allowed more data.
        if (keys > MAX_KEYS && keys > self.entries.len()) || (bytes > MAX_DATA && bytes > self.data_bytes) {
            let reason = format!("it holds at most {MAX_KEYS} keys and {MAX_DATA} bytes; delete some");
            return Err(RegistryError::Full { reason });
        }
        Ok(())
    }

    /// Applies checked changes, all at one new revision (none, if nothing changes).
    fn apply(&mut self, ops: Vec<Op>) {
        let revision = self.revision + 1;
        let mut changes = Vec::new();
        for op in ops {
            if let Some(old) = self.entries.remove(op.key()) {
                self.data_bytes -= size(&old);
                if let Some(lease) = old.lease.and_then(|id| self.leases.get_mut(&id)) {
                    lease.keys.remove(&old.key);
                }
            } else if matches!(op, Op::Delete { .. }) {
                continue;
            }
            changes.push(match op {
                Op::Delete { key } => Change::Delete { key },
                Op::Put { key, value, lease } => {
                    let entry = Entry { key, value, mod_revision: revision, lease };
                    self.restore_entry(entry.clone());
                    Change::Put(entry)
                }
            });
        }
        if !changes.is_empty() {
            self.revision = revision;
            self.add_to_history(Batch { revision, changes });
        }
    }

    fn add_to_history(&mut self, batch: Batch) {
        self.unsaved.batches.push(batch.clone());
        self.restore_history(batch);
        while self.history.len() > HISTORY || self.history_bytes > HISTORY_BYTES {
            let Some(oldest) = self.history.pop_front() else { break };
            self.history_bytes -= oldest.changes.iter().map(change_size).sum::<usize>();
            self.floor = oldest.revision;
        }
    }

    /// The changes under `prefix` after revision `after`.
    pub fn since(&self, prefix: &str, after: u64) -> Result<Vec<Batch>, RegistryError> {
        // A revision from the future belongs to another registry: the file was recreated.
        if after < self.floor || after > self.revision {
            return Err(RegistryError::Compacted { oldest: self.floor + 1 });
        }
        let missed =
            self.history.iter().filter(|batch| batch.revision > after).map(|batch| batch.under(prefix));
        Ok(missed.filter(|batch| !batch.changes.is_empty()).collect())
    }

    pub fn grant(&mut self, ttl: Duration, now: Instant) -> Result<LeaseId, RegistryError> {
        if ttl < MIN_TTL || ttl > MAX_TTL {
            let reason = format!("a lease lives {MIN_TTL:?} to {MAX_TTL:?}, not {ttl:?}");
            return Err(RegistryError::Malformed { reason });
        }
        if self.leases.len() >= MAX_LEASES {
            return Err(RegistryError::Full {
                reason: format!("it holds at most {MAX_LEASES} leases; revoke some"),
            });
        }
        self.last_lease += 1;
        let id = LeaseId(self.last_lease);
        self.leases.insert(id, Lease { ttl, deadline: now + ttl, keys: BTreeSet::new() });
        self.unsaved.leases.push((id, Some(ttl)));
        Ok(id)
    }

    pub fn keep_alive(&mut self, id: LeaseId, now: Instant) -> Result<Duration, RegistryError> {
        let lease = self.leases.get_mut(&id).ok_or(RegistryError::LeaseExpired { lease: id })?;
        lease.deadline = now + lease.ttl;
        Ok(lease.ttl)
    }

    pub fn revoke(&mut self, id: LeaseId) {
        self.end_process(id, Vec::new());
    }

    /// Ends a lease and applies `ops` at the same revision.
    pub fn end_process(&mut self, id: LeaseId, mut ops: Vec<Op>) -> Committed {
        if let Some(lease) = self.leases.remove(&id) {
            self.unsaved.leases.push((id, None));
            let vanishing = lease.keys.into_iter().filter(|key| ops.iter().all(|op| op.key() != key));
            let deletes: Vec<Op> = vanishing.map(|key| Op::Delete { key }).collect();
            ops.splice(0..0, deletes);
        }
        self.apply(ops);
        Committed { revision: self.revision }
    }

    /// Ends expired leases. `stalled` means that this process was paused and could not receive keep-alives: then they get their
    /// full time again instead.
    pub fn expire(&mut self, now: Instant, stalled: bool) -> Vec<LeaseId> {
        let over = self.leases.iter().filter(|(_, lease)| lease.deadline <= now).map(|(id, _)| *id);
        let over: Vec<LeaseId> = over.collect();
        for id in &over {
            match self.leases.get_mut(id) {
                Some(lease) if stalled => lease.deadline = now + lease.ttl,
                _ => self.revoke(*id),
            }
        }
        if stalled { Vec::new() } else { over }
    }

    /// End of the next lease to expire.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.leases.values().map(|lease| lease.deadline).min()
    }
}

fn size(entry: &Entry) -> usize {
    entry.key.len() + entry.value.len()
}

fn change_size(change: &Change) -> usize {
    match change {
        Change::Put(entry) => size(entry),
        Change::Delete { key } => key.len(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_happens_whole_or_not_at_all() {
        let mut state = State::default();
        let first = state.transact(Transaction::new().absent("a").put("a", "1").put("b", "1")).unwrap();
        assert_eq!(first.revision, 1);
        let refused = state.transact(Transaction::new().unchanged("a", 1).absent("b").put("c", "x"));
        let Err(RegistryError::Conflict { current }) = refused else { panic!("{refused:?}") };
        assert_eq!(current.iter().map(|entry| &*entry.key).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((state.revision, state.get("c")), (1, None));
        let dead = state.transact(Transaction::new().delete("a").put_leased("d", "x", LeaseId(9)));
        assert_eq!(dead, Err(RegistryError::LeaseExpired { lease: LeaseId(9) }));
        assert!(state.get("a").is_some(), "a refused transaction must not delete");
    }

    #[test]
    fn a_transaction_without_change_makes_no_revision() {
        let mut state = State::default();
        assert_eq!(state.transact(Transaction::new().delete("a")).unwrap().revision, 0);
        assert!(state.unsaved.is_empty());
    }

    #[test]
    fn keys_end_with_their_own_lease() {
        let (mut state, now) = (State::default(), Instant::now());
        let (short, long) = (MIN_TTL, Duration::from_secs(9));
        let (a, b) = (state.grant(short, now).unwrap(), state.grant(long, now).unwrap());
        let put = Transaction::new()
            .put_leased("moved", "", a)
            .put_leased("kept", "", a)
            .put_leased("other", "", b);
        state.transact(put).unwrap();
        state.transact(Transaction::new().put_leased("moved", "", b)).unwrap();
        assert_eq!(state.expire(now + short, false), [a]);
        assert_eq!(state.list("").entries.iter().map(|e| &*e.key).collect::<Vec<_>>(), ["moved", "other"]);
        assert_eq!(state.keep_alive(a, now), Err(RegistryError::LeaseExpired { lease: a }));
        assert_eq!(state.next_deadline(), Some(now + long));
    }

    #[test]
    fn a_paused_registry_ends_no_lease() {
        let (mut state, now) = (State::default(), Instant::now());
        let lease = state.grant(MIN_TTL, now).unwrap();
        let late = now + Duration::from_secs(60);
        assert!(state.expire(late, true).is_empty());
        assert_eq!(state.next_deadline(), Some(late + MIN_TTL));
        assert_eq!(state.expire(late + MIN_TTL, false), [lease]);
    }

    #[test]
    fn history_is_bounded_and_reports_it() {
        let mut state = State::default();
        for count in 0..HISTORY + 10 {
            state.transact(Transaction::new().put("k", count.to_string())).unwrap();
        }
        assert_eq!((state.history.len(), state.floor), (HISTORY, 10));
        assert_eq!(state.since("", 9), Err(RegistryError::Compacted { oldest: 11 }));
        assert_eq!(state.since("", 10).unwrap().len(), HISTORY);
        assert_eq!(state.since("other", 10).unwrap().len(), 0);
        assert!(
            state.since("", state.revision + 1).is_err(),
            "a future revision belongs to another registry"
        );
    }
}
