//! The rights of the disks that this node owns, and the grants that it has given to others.

pub(super) mod answers;
pub(super) mod heard;
pub mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use weir_block::Nanos;
use weir_cluster::records::DiskRecord;
use weir_cluster::right::{Event, GrantRefusal, GrantSet, GrantTimes, Grants, Right, SessionLease};

use wire::Verdict;

/// The key of a member's grants for a disk: its name, and its identity, which distinguishes it from an earlier disk of that
/// name.
#[must_use]
pub fn key(record: &DiskRecord) -> String {
    format!("{}/{}", record.name, record.id)
}

/// An owner renews its grants so many times while they last: a lost question or two cost nothing.
const RENEWALS: u32 = 5;

/// Connections to one member at once for seals, beside those for renewals and for [`super::hearing`].
const SEALS: usize = 3;

/// The last renewal of an owner whose right the grants of its set upheld.
struct Heard {
    owner: String,
    epoch: u64,
    at: Nanos,
}

/// A right and where its end is published: the disk's shard compares that with the clock, and takes no lock.
struct Owned {
    right: Right,
    until: Arc<AtomicU64>,
}

struct Inner {
    session: SessionLease,
    owned: BTreeMap<String, Owned>,
    grants: Grants,
    /// By the key of the disk's grants.
    heard: BTreeMap<String, Heard>,
}

/// All rights and grants of one node. Every method returns at once.
pub struct Rights {
    times: GrantTimes,
    inner: Mutex<Inner>,
    /// The number of the session that all rights know of.
    session: watch::Sender<u64>,
    /// Requests grants sooner than planned.
    pub(super) hurry: Notify,
    /// By member: connections for seals.
    asking: Mutex<BTreeMap<String, Arc<Semaphore>>>,
    /// The members' answers about the owners that they hear.
    pub(super) heard: heard::Members,
    /// Where members are, and which of them do not answer.
    pub(super) answers: answers::Answers,
}

impl std::fmt::Debug for Rights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rights").field("times", &self.times).finish_non_exhaustive()
    }
}

impl Rights {
    /// No right and no grant, of a process that started at `started`. Grants last as long as sessions do.
    #[must_use]
    pub fn new(times: GrantTimes, session: SessionLease, started: Nanos) -> Rights {
        let grants = Grants::new(started, times.length);
        let inner = Inner { session, owned: BTreeMap::new(), grants, heard: BTreeMap::new() };
        let session = watch::Sender::new(session.number);
        Rights {
            times,
            inner: Mutex::new(inner),
            session,
            hurry: Notify::new(),
            asking: Mutex::default(),
            heard: heard::Members::default(),
            answers: answers::Answers::default(),
        }
    }

    /// A place for a connection to `member` for one seal, as long as the result lives. A member refuses a node with too
    /// many, and there may be hundreds of disks to seal at once.
    pub async fn place_to_ask(&self, member: &str) -> Option<OwnedSemaphorePermit> {
        let places = {
            let mut all = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(all.entry(member.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(SEALS))))
        };
        // Never closed, so there always is a place in the end.
        places.acquire_owned().await.ok()
    }

    /// The duration of grants.
    #[must_use]
    pub fn times(&self) -> GrantTimes {
        self.times
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This node's session in the registry is this one.
    pub fn on_session(&self, lease: SessionLease) {
        let mut inner = self.lock();
        inner.session = lease;
        for owned in inner.owned.values_mut() {
            owned.step(Event::Session(lease));
        }
        drop(inner);
        self.session.send_if_modified(|number| std::mem::replace(number, lease.number) != lease.number);
    }

    /// Tells when this node has another session, for which each disk's record has to be read.
    #[must_use]
    pub fn sessions(&self) -> watch::Receiver<u64> {
        self.session.subscribe()
    }

    /// The right of this node, which a linearizable read, sent while `session` was this node's, names as the owner of `disk`.
    /// Returns the end of the right, for the disk's shard.
    pub fn begin(&self, disk: &str, epoch: u64, set: GrantSet, session: SessionLease) -> Arc<AtomicU64> {
        let mut inner = self.lock();
        let until = Arc::new(AtomicU64::new(0));
        let right = Right::new(epoch, set, session, self.times);
        let mut owned = Owned { right, until: Arc::clone(&until) };
        owned.step(Event::Session(inner.session));
        if let Some(mut before) = inner.owned.insert(disk.to_owned(), owned) {
            before.step(Event::Ended);
        }
        self.hurry.notify_waiters();
        until
    }

    /// Something that bears on the right to `disk` has happened. Nothing when this node has none.
    pub fn step(&self, disk: &str, event: Event) {
        let hurries = matches!(event, Event::Proposed(_) | Event::Committed { .. });
        if let Some(owned) = self.lock().owned.get_mut(disk) {
            owned.step(event);
        }
        if hurries {
            self.hurry.notify_waiters();
        }
    }

    /// Another process owns `disk` since the tenure that began in epoch `since`. This does not affect a later tenure of this
    /// node.
    pub fn end_tenure(&self, disk: &str, since: u64) {
        let mut inner = self.lock();
        if inner.owned.get(disk).is_some_and(|owned| owned.right.since() == since)
            && let Some(mut owned) = inner.owned.remove(disk)
        {
            owned.step(Event::Ended);
        }
    }

    /// This node does not own `disk` any more.
    pub fn end(&self, disk: &str) {
        if let Some(mut owned) = self.lock().owned.remove(disk) {
            owned.step(Event::Ended);
        }
    }

    /// The first epoch of this node's tenure of `disk`, if it has the right to it or had it.
    #[must_use]
    pub fn tenure(&self, disk: &str) -> Option<u64> {
        self.lock().owned.get(disk).map(|owned| owned.right.since())
    }

    /// The session for which the record of `disk` has to be read, if there is one.
    #[must_use]
    pub fn unconfirmed(&self, disk: &str) -> Option<u64> {
        let inner = self.lock();
        let lacks = inner.owned.get(disk).is_some_and(|owned| owned.right.lacks_confirmation());
        lacks.then_some(inner.session.number)
    }

    /// The disks with a right, by name, and the first epoch of each tenure.
    #[must_use]
    pub fn tenures(&self) -> Vec<(String, u64)> {
        self.lock().owned.iter().map(|(disk, owned)| (disk.clone(), owned.right.since())).collect()
    }

    /// The members to ask for grants.
    #[must_use]
    pub fn members(&self) -> BTreeSet<String> {
        self.lock().owned.values().flat_map(|owned| owned.right.asks().cloned()).collect()
    }

    /// The questions for `member`: disks, each in an epoch; first those whose right the grants of their sets uphold, then the
    /// others.
    #[must_use]
    pub fn asked_of(&self, member: &str) -> [Vec<(String, u64)>; 2] {
        let (inner, now) = (self.lock(), Nanos::now());
        let mut asked = [Vec::new(), Vec::new()];
        for (disk, owned) in &inner.owned {
            if owned.right.asks().any(|node| node == member) {
                asked[usize::from(!owned.right.is_granted(now))].push((disk.clone(), owned.right.epoch()));
            }
        }
        asked
    }

    /// Applies the verdicts of `member` on the question sent at `sent`.
    pub fn answered(&self, member: &str, asked: &[(String, u64)], verdicts: &[Verdict], sent: Nanos) {
        let received = Nanos::now();
        self.answers.start_over(member);
        let mut inner = self.lock();
        for ((disk, epoch), verdict) in asked.iter().zip(verdicts) {
            let Some(owned) = inner.owned.get_mut(disk) else { continue };
            match verdict {
                Ok(_) => {
                    let member = member.to_owned();
                    owned.step(Event::Granted { member, epoch: *epoch, sent, received });
                }
                Err(refused) => tracing::debug!(disk, member, epoch, ?refused, "no grant"),
            }
        }
    }

    /// Longest time for the answer to one renewal.
    #[must_use]
    pub fn answer_limit(&self) -> Duration {
        self.times.length / 2
    }

    /// How long a member of a set has to leave questions unanswered before it counts as silent. One answer that is late costs
    /// [`Rights::answer_limit`] and a renewal, and must not suffice.
    #[must_use]
    pub fn patience(&self) -> Duration {
        self.answer_limit() + self.renewal() * 2
    }

    /// The time between two renewals of a grant.
    #[must_use]
    pub fn renewal(&self) -> Duration {
        self.times.length / RENEWALS
    }

    /// Another node's owner of `disk` asks this one for a grant. `known` is the epoch of the record, read since the start.
    ///
    /// # Errors
    /// As [`Grants::renew`].
    pub fn grant(
        &self,
        disk: &str,
        epoch: u64,
        length: Duration,
        known: Option<u64>,
    ) -> Result<(), GrantRefusal> {
        self.lock().grants.renew(Nanos::now(), disk, epoch, length, known)
    }

    /// A renewal of `owner` for `disk` (the key of its grants) came, in `epoch`, with a right that the grants of its set uphold.
    pub fn hear(&self, disk: &str, owner: &str, epoch: u64) {
        let heard = Heard { owner: owner.to_owned(), epoch, at: Nanos::now() };
        self.lock().heard.insert(disk.to_owned(), heard);
    }

    /// Whether this member hears the owner of `disk` (the key of its grants) in `epoch` or a later one. Not one that has missed
    /// two renewals: a dead owner's disk is taken over without delay.
    #[must_use]
    pub fn hears(&self, disk: &str, epoch: u64) -> bool {
        let (oldest, inner) = (self.oldest_heard(), self.lock());
        inner.heard.get(disk).is_some_and(|heard| heard.epoch >= epoch && heard.at > oldest)
    }

    /// The owners that this member hears: the keys of their disks' grants, and their nodes.
    #[must_use]
    pub fn all_heard(&self) -> Vec<(String, String)> {
        let (oldest, inner) = (self.oldest_heard(), self.lock());
        let heard = inner.heard.iter().filter(|(_, heard)| heard.at > oldest);
        heard.map(|(disk, heard)| (disk.clone(), heard.owner.clone())).collect()
    }

    fn oldest_heard(&self) -> Nanos {
        Nanos(Nanos::now().0.saturating_sub((self.renewal() * 2).as_nanos() as u64))
    }

    /// A new owner of `disk` seals this member. Returns how long the last grant to a former one still lasts.
    ///
    /// # Errors
    /// As [`Grants::seal`].
    pub fn seal(&self, disk: &str, epoch: u64, known: Option<u64>) -> Result<Duration, GrantRefusal> {
        let now = Nanos::now();
        self.lock().grants.seal(now, disk, epoch, known).map(|until| until - now)
    }

    /// Forgets the grants of disks that are not `kept` any more, once they have ended.
    pub fn forget(&self, kept: impl Fn(&str) -> bool) {
        let oldest = self.oldest_heard();
        let mut inner = self.lock();
        inner.heard.retain(|_, heard| heard.at > oldest);
        inner.grants.forget(Nanos::now(), kept);
    }
}

impl Owned {
    fn step(&mut self, event: Event) {
        let until = self.right.step(event);
        self.until.store(until.0, Ordering::Release);
    }
}
