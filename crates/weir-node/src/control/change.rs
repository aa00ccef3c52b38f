//! Changes of a disk's record: read, compute, compare-and-swap, read again when the answer is lost (P2, P3).

use weir_cluster::membership::{NodeSession, session_over};
use weir_cluster::ownership::Refusal;
use weir_cluster::records::{DiskRecord, NodeRef, Record, RecordError, keys};
use weir_cluster::registry::{Entry, Registry, RegistryError, Transaction};

use crate::error::{ApiError, ApiErrorKind};

/// Attempts at a change that others' changes overtake.
const ATTEMPTS: usize = 8;

/// Why a record was not changed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// The disk does not exist, or not any more.
    #[error("there is no disk {0}")]
    NoDisk(String),
    /// The rules do not allow it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The record cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The change was sent, and may be committed or be committed yet.
    #[error("the registry has not confirmed or rejected a change: {reason}")]
    Doubtful {
        /// The revision of the record that it was sent over. It cannot be committed any more once there is a later one.
        over: u64,
        /// The error instead of an answer.
        reason: String,
    },
    /// The registry does not answer, or this node has lost its place in it.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

impl ChangeError {
    /// Whether the disk is not `me`'s, as the registry has said.
    #[must_use]
    pub fn is_taken_from(&self, me: &NodeRef) -> bool {
        match self {
            ChangeError::Refused(Refusal::Fenced { owner, .. }) => owner.as_ref() != Some(me),
            ChangeError::NoDisk(_) => true,
            _ => false,
        }
    }

    /// The revision over which a change was sent that may still be committed, because it got no answer.
    #[must_use]
    pub fn doubt(&self) -> Option<u64> {
        match self {
            ChangeError::Doubtful { over, .. } => Some(*over),
            _ => None,
        }
    }

    fn in_doubt(self, over: Option<u64>) -> ChangeError {
        match over {
            Some(over) => ChangeError::Doubtful { over, reason: self.to_string() },
            None => self,
        }
    }
}

impl From<ChangeError> for ApiError {
    fn from(error: ChangeError) -> ApiError {
        let kind = match &error {
            ChangeError::NoDisk(_) => ApiErrorKind::NotFound,
            ChangeError::Refused(_) => ApiErrorKind::Refused,
            ChangeError::Record(_) => ApiErrorKind::Failed,
            ChangeError::Registry(_) | ChangeError::Doubtful { .. } => ApiErrorKind::Unavailable,
        };
        ApiError::new(kind, error.to_string())
    }
}

/// The record of a disk, and its entry for a compare-and-swap.
///
/// # Errors
/// There is none, it cannot be read, or the registry does not answer.
pub async fn read(registry: &dyn Registry, disk: &str) -> Result<(Entry, DiskRecord), ChangeError> {
    let entry = registry.get(&keys::disk(disk)).await?.ok_or_else(|| ChangeError::NoDisk(disk.to_owned()))?;
    let record = DiskRecord::of(&entry)?;
    Ok((entry, record))
}

/// A record after a change, or as it was when there was nothing to change.
#[derive(Clone, Debug)]
pub struct Changed {
    /// The record in the registry.
    pub record: DiskRecord,
    /// Since this revision.
    pub revision: u64,
}

/// Replaces the record of `disk` by the result of `compute`, while this node's session stands. With `taken_from`, only while
/// the session of that owner is over: an owner that has a new session by now may have read the record in between, and serves
/// on the strength of that (P2).
///
/// If the registry's answer is lost, the record is read again and decides, if it is of a later revision. `seen` becomes the
/// record as last read, also when a later attempt is refused: it shows what became of earlier attempts.
///
/// # Errors
/// As [`read`], and the errors of `compute`; [`RegistryError::Conflict`] when the owner is there again;
/// [`ChangeError::Doubtful`] once a sent change was neither confirmed nor certainly refused, whatever the result of later attempts.
pub async fn change(
    registry: &dyn Registry,
    session: &NodeSession,
    disk: &str,
    taken_from: Option<&NodeRef>,
    seen: &mut Option<Changed>,
    compute: impl Fn(&DiskRecord) -> Result<DiskRecord, Refusal>,
) -> Result<Changed, ChangeError> {
    let mut doubt = None;
    let mut last = ChangeError::from(RegistryError::Conflict { current: Vec::new() });
    for _ in 0..ATTEMPTS {
        match attempt(registry, session, disk, taken_from, &compute, seen, &mut doubt).await {
            Ok(Attempt::Done(changed)) => return Ok(*changed),
            Ok(Attempt::Again(error)) => last = error.into(),
            Err(error) => return Err(error.in_doubt(doubt)),
        }
    }
    Err(last.in_doubt(doubt))
}

/// The result of one attempt.
enum Attempt {
    Done(Box<Changed>),
    /// The record has changed meanwhile, or there was no answer.
    Again(RegistryError),
}

/// `doubt`: the revision over which a change was sent without an answer.
async fn attempt(
    registry: &dyn Registry,
    session: &NodeSession,
    disk: &str,
    taken_from: Option<&NodeRef>,
    compute: &impl Fn(&DiskRecord) -> Result<DiskRecord, Refusal>,
    seen: &mut Option<Changed>,
    doubt: &mut Option<u64>,
) -> Result<Attempt, ChangeError> {
    let over = match taken_from {
        Some(owner) => Some(session_over(registry, owner).await?),
        None => None,
    };
    let (entry, record) = read(registry, disk).await?;
    let revision = entry.mod_revision;
    *seen = Some(Changed { record: record.clone(), revision });
    // A change that was sent over an earlier revision is in this one, or will never be committed.
    *doubt = doubt.filter(|over| *over >= revision);
    let next = compute(&record)?;
    let done = |record, revision| Ok(Attempt::Done(Box::new(Changed { record, revision })));
    if next == record && doubt.is_none() {
        return done(record, revision);
    }
    let replace = next.replace(&entry).when(session.guard());
    let replace = over.into_iter().fold(replace, Transaction::when);
    match registry.transact(replace).await {
        Ok(committed) => done(next, committed.revision),
        Err(error @ RegistryError::Conflict { .. }) => Ok(Attempt::Again(error)),
        Err(error) if is_refusal(&error) => Err(error.into()),
        Err(error) => {
            *doubt = Some(revision);
            let (now, record) = read(registry, disk).await?;
            *seen = Some(Changed { record: record.clone(), revision: now.mod_revision });
            let is_committed = now.mod_revision > revision && record == next;
            if is_committed { done(record, now.mod_revision) } else { Ok(Attempt::Again(error)) }
        }
    }
}

/// Whether a transaction with this answer was certainly not committed. Any other error may be of a later step than the commit: a
/// registry that is full, damaged or set up wrongly can report that of a change that it has made.
pub(super) fn is_refusal(error: &RegistryError) -> bool {
    match error {
        RegistryError::Conflict { .. }
        | RegistryError::LeaseExpired { .. }
        | RegistryError::Malformed { .. } => true,
        RegistryError::Unavailable { .. }
        | RegistryError::Compacted { .. }
        | RegistryError::Full { .. }
        | RegistryError::Corrupt { .. }
        | RegistryError::Setup { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::control::faulty_registry::FaultyRegistry;
    use weir_cluster::membership::SessionConfig;
    use weir_cluster::ownership::{Gone, OwnerGone, claim_free, set_policy, take_over};
    use weir_cluster::records::{NodeRecord, Policy, Source};

    async fn change(
        registry: &dyn Registry,
        session: &NodeSession,
        disk: &str,
        taken_from: Option<&NodeRef>,
        compute: impl Fn(&DiskRecord) -> Result<DiskRecord, Refusal>,
    ) -> Result<Changed, ChangeError> {
        super::change(registry, session, disk, taken_from, &mut None, compute).await
    }

    async fn cluster(directory: &std::path::Path) -> (Arc<FaultyRegistry>, NodeSession) {
        let registry = Arc::new(FaultyRegistry::open(directory, Arc::default()));
        let node = NodeRecord {
            name: "n1".into(),
            incarnation: 1,
            flash: None,
            peer_address: ([127, 0, 0, 1], 1).into(),
            nbd_tcp: None,
            nbd_tls: None,
            nbd_unix: "/a".into(),
            api: "/b".into(),
            fault_domain: "default".into(),
            media: Vec::new(),
            load: 0,
            forwards: true,
        };
        let session = NodeSession::start(registry.clone(), node, SessionConfig::default()).await.unwrap();
        let disk =
            DiskRecord::new("d", "v", Source::File { name: "d".into() }, 1 << 20, 512, Policy::WriteThrough);
        registry.transact(disk.create(keys::disk("d"))).await.unwrap();
        (registry, session)
    }

    #[tokio::test]
    async fn a_lost_answer_is_read_up() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, session) = cluster(directory.path()).await;
        let me = session.node_ref();
        registry.faults.unanswered.store(1, Ordering::Relaxed);
        let claimed =
            change(&*registry, &session, "d", None, |record| claim_free(record, &me)).await.unwrap().record;
        assert_eq!((claimed.epoch, claimed.owner.as_ref()), (1, Some(&me)), "committed once, not twice");
        assert_eq!(read(&*registry, "d").await.unwrap().1, claimed);
    }

    #[tokio::test]
    async fn a_lost_request_is_made_again_but_not_for_ever() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, session) = cluster(directory.path()).await;
        let wanted = |record: &DiskRecord| {
            set_policy(record, weir_cluster::ownership::Caller::Other, Policy::WriteBack(1))
        };
        registry.faults.lost.store(3, Ordering::Relaxed);
        assert_eq!(change(&*registry, &session, "d", None, wanted).await.unwrap().record.epoch, 1);
        registry.faults.lost.store(1000, Ordering::Relaxed);
        let error = change(&*registry, &session, "d", None, wanted).await.unwrap_err();
        assert!(error.doubt().is_some(), "{error}");
    }

    /// etcd reports "no space" of changes that it has made.
    #[tokio::test]
    async fn only_a_certain_refusal_leaves_no_doubt() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, session) = cluster(directory.path()).await;
        let wanted = |copies| {
            move |record: &DiskRecord| {
                set_policy(record, weir_cluster::ownership::Caller::Other, Policy::WriteBack(copies))
            }
        };
        let reason = || "etcd's space quota is exceeded".to_owned();
        let uncertain = [
            RegistryError::Full { reason: reason() },
            RegistryError::Corrupt { reason: reason() },
            RegistryError::Setup { reason: reason() },
        ];
        for (error, copies) in uncertain.into_iter().zip([1, 2, 1]) {
            registry.faults.answered_with.lock().unwrap().push_back(error.clone());
            let changed = change(&*registry, &session, "d", None, wanted(copies)).await.unwrap();
            assert_eq!(changed.record.policy, Policy::WriteBack(copies), "{error}: it was committed");
            registry.faults.answered_with.lock().unwrap().push_back(error.clone());
            registry.faults.deafens.store(true, Ordering::Relaxed);
            let refused = change(&*registry, &session, "d", None, wanted(0)).await.unwrap_err();
            assert_eq!(refused.doubt(), Some(changed.revision), "{error} taken for a refusal: {refused}");
            registry.faults.hear_again();
        }
        for error in
            [RegistryError::LeaseExpired { lease: session.lease() }, RegistryError::malformed(reason())]
        {
            registry.faults.answered_with.lock().unwrap().push_back(error);
            let refused = change(&*registry, &session, "d", None, wanted(2)).await.unwrap_err();
            assert!(refused.doubt().is_none(), "{refused}");
        }
    }

    /// A sent change may commit late: the refusal of a later attempt says nothing about it.
    #[tokio::test]
    async fn a_refusal_does_not_end_an_earlier_attempts_doubt() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, session) = cluster(directory.path()).await;
        let attempts = AtomicUsize::new(0);
        let compute = |record: &DiskRecord| match attempts.fetch_add(1, Ordering::Relaxed) {
            0 => set_policy(record, weir_cluster::ownership::Caller::Other, Policy::WriteBack(1)),
            _ => Err(Refusal::NotOwned),
        };
        registry.faults.lost.store(1, Ordering::Relaxed);
        let error = change(&*registry, &session, "d", None, compute).await.unwrap_err();
        assert!(error.doubt().is_some(), "{error}");
        let refused = change(&*registry, &session, "d", None, |_| Err(Refusal::NotOwned)).await.unwrap_err();
        assert!(refused.doubt().is_none(), "nothing was sent: {refused}");
    }

    #[tokio::test]
    async fn a_node_that_was_given_up_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, session) = cluster(directory.path()).await;
        let me = session.node_ref();
        registry.revoke(session.lease()).await.unwrap();
        let error =
            change(&*registry, &session, "d", None, |record| claim_free(record, &me)).await.unwrap_err();
        assert!(matches!(error, ChangeError::Registry(RegistryError::Conflict { .. })), "{error}");
        assert_eq!(read(&*registry, "d").await.unwrap().1.owner, None);
        session.register_again().await.unwrap();
        change(&*registry, &session, "d", None, |record| claim_free(record, &me)).await.unwrap();
    }

    /// The session ends, the takeover reads that, the owner has a new session and confirms itself, and then the takeover's
    /// transaction comes.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_takeover_fails_when_the_owner_is_there_again() {
        let directory = tempfile::tempdir().unwrap();
        let (registry, session) = cluster(directory.path()).await;
        let (me, owner) = (session.node_ref(), NodeRef::new("n2", 1));
        let record = NodeRecord { name: "n2".into(), ..session.record() };
        let other = NodeSession::start(registry.clone(), record, SessionConfig::default()).await.unwrap();
        change(&*registry, &other, "d", None, |record| claim_free(record, &owner)).await.unwrap();
        let gone = OwnerGone { owner: owner.clone(), how: Gone::LeaseEnded };
        let taken =
            change(&*registry, &session, "d", Some(&owner), |record| take_over(record, &me, &gone)).await;
        assert!(matches!(taken, Err(ChangeError::Registry(RegistryError::Conflict { .. }))), "{taken:?}");
        registry.revoke(other.lease()).await.unwrap();
        let returns = AtomicUsize::new(0);
        let compute = |record: &DiskRecord| {
            if returns.fetch_add(1, Ordering::Relaxed) == 0 {
                tokio::task::block_in_place(|| {
                    tokio::runtime::Handle::current().block_on(other.register_again()).unwrap()
                });
            }
            take_over(record, &me, &gone)
        };
        let taken = change(&*registry, &session, "d", Some(&owner), compute).await;
        assert!(taken.is_err() && returns.load(Ordering::Relaxed) == 1, "{taken:?}");
        registry.revoke(other.lease()).await.unwrap();
        change(&*registry, &session, "d", Some(&owner), |record| take_over(record, &me, &gone))
            .await
            .unwrap();
    }
}
