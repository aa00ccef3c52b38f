//! The implementation of the trait.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::TxnOp;
use tokio::time::Instant;
use weir_cluster::registry::{
    Committed, Entry, LeaseId, Listing, MAX_TTL, MIN_TTL, Op, Pending, ProcessWatch, Registry, RegistryError,
    Transaction, Watch, check_key, check_prefix,
};

use crate::calls::{Core, Kind};
use crate::config::{ConfigError, EtcdConfig};
use crate::failure::{Again, Failure, Refusal};
use crate::layout::Range;
use crate::links::{self, Link};
pub use crate::transaction::MAX_REQUEST;
use crate::transaction::{self, Answer, entries, entry, lease_id, outcome, page, strange};
use crate::watch;

/// Entries per read of a listing: with the largest values together below the largest answer.
const PAGE: i64 = 128;

/// A registry in etcd; clones share its connections. It connects when it is first used, and again when a connection fails; no call
/// lasts longer than [`EtcdConfig::request_timeout`].
///
/// The first call looks for the registry under the prefix. Where etcd has no key under it, the call sets up a new registry; where it
/// has keys that Weir did not write, every call fails with [`RegistryError::Setup`].
#[derive(Clone)]
pub struct Etcd {
    core: Arc<Core>,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EtcdConfig { endpoints, prefix, .. } = &self.core.config;
        f.debug_struct("Etcd").field("endpoints", endpoints).field("prefix", prefix).finish_non_exhaustive()
    }
}

impl Etcd {
    /// A client. Checks the settings and reads the files; etcd need not be there yet.
    ///
    /// # Errors
    /// A value breaks a rule, or a file cannot be used.
    pub fn new(config: EtcdConfig) -> Result<Etcd, ConfigError> {
        config.check()?;
        links::check(&config, &config.read()?)?;
        Ok(Etcd { core: Arc::new(Core::new(config)) })
    }

    async fn read_page(&self, deadline: Instant, ops: &[TxnOp]) -> Result<Answer, Refusal> {
        self.core.guarded(Kind::Repeatable, deadline, ops).await
    }

    /// All keys of `range`, at the revision of the first page.
    async fn read_all(&self, range: &Range, deadline: Instant) -> Result<Listing, Refusal> {
        let layout = &self.core.layout;
        let mut listing = Listing::default();
        let mut first = range.first.clone();
        loop {
            let at = i64::try_from(listing.revision).ok().filter(|revision| *revision > 0);
            let answer = self.read_page(deadline, &[page(range, first, PAGE, at)]).await?;
            if at.is_none() {
                listing.revision = answer.revision();
            }
            let found = transaction::range(answer.parts.into_iter().next()).map_err(Refusal::Error)?;
            // The smallest key after the page's last one, whoever wrote that.
            let next = found.kvs.last().filter(|_| found.more).map(|last| [&*last.key, &[0]].concat());
            listing.entries.extend(entries(layout, found).map_err(Refusal::Error)?);
            match next {
                Some(next) => first = next,
                None => return Ok(listing),
            }
        }
    }

    /// The lease of `transaction` that has ended.
    async fn ended_lease(&self, transaction: &Transaction, deadline: Instant) -> RegistryError {
        let leases = transaction
            .ops
            .iter()
            .filter_map(|op| if let Op::Put { lease, .. } = op { *lease } else { None });
        let mut leases: Vec<LeaseId> = leases.collect();
        leases.sort_unstable();
        leases.dedup();
        for lease in &leases[..leases.len().saturating_sub(1)] {
            let Ok(id) = lease_id(*lease) else { return RegistryError::LeaseExpired { lease: *lease } };
            let ask = |link: Link| async move { Ok(link.lease().time_to_live(id, None).await?.ttl()) };
            if let Ok(..0) = self.core.call(Kind::Repeatable, deadline, ask).await {
                return RegistryError::LeaseExpired { lease: *lease };
            }
        }
        // All others are alive.
        match leases.last() {
            Some(lease) => RegistryError::LeaseExpired { lease: *lease },
            None => strange(),
        }
    }

    /// Extends a lease, and confirms that the true leader did it.
    ///
    /// A leader that was deposed without knowing it also answers, for a lease that its successor may be about to end. etcd reports the
    /// answering member's term with the renewal; a linearizable read through the same member in the same term afterwards proves
    /// that there was no later leader when the lease was renewed.
    async fn renew(&self, link: Link, lease: i64, deadline: Instant) -> Result<Duration, Failure> {
        let marker = self.core.marker(deadline).await.map_err(Failure::Refused)?;
        let renewal = self.core.keepers.extend(&link, lease).await?;
        let Some(ttl) = u64::try_from(renewal.ttl()).ok().filter(|ttl| *ttl > 0) else {
            return Err(Failure::Refused(Refusal::LeaseEnded));
        };
        let read = self.core.guarded_at(link, marker, &[]).await?.header;
        let renewed = renewal.header().ok_or_else(strange)?;
        if (renewed.member_id(), renewed.raft_term()) != (read.member_id, read.raft_term) {
            return Err(Again::in_doubt("etcd's leader changed during a keep-alive").into());
        }
        Ok(Duration::from_secs(ttl))
    }
}

impl Registry for Etcd {
    fn is_set_up(&self) -> Pending<'_, bool> {
        Box::pin(async move { self.core.is_set_up(self.core.deadline()).await.map_err(Refusal::error) })
    }

    fn get<'a>(&'a self, key: &'a str) -> Pending<'a, Option<Entry>> {
        Box::pin(async move {
            check_key(key)?;
            let ops = [TxnOp::get(self.core.layout.key(key), None)];
            let answer = self.read_page(self.core.deadline(), &ops).await.map_err(Refusal::error)?;
            let found = transaction::range(answer.parts.into_iter().next())?.kvs.into_iter().next();
            found.map_or(Ok(None), |found| entry(&self.core.layout, found))
        })
    }

    fn list<'a>(&'a self, prefix: &'a str) -> Pending<'a, Listing> {
        Box::pin(async move {
            check_prefix(prefix)?;
            let (range, deadline) = (self.core.layout.under(prefix), self.core.deadline());
            loop {
                match self.read_all(&range, deadline).await {
                    // Compacted between two pages.
                    Err(Refusal::Compacted) if Instant::now() < deadline => {}
                    other => return other.map_err(Refusal::error),
                }
            }
        })
    }

    fn transact(&self, transaction: Transaction) -> Pending<'_, Committed> {
        Box::pin(async move {
            let layout = &self.core.layout;
            transaction.check()?;
            transaction::check(layout, &transaction)?;
            let deadline = self.core.deadline();
            let ops = [TxnOp::txn(transaction::of(layout, &transaction)?)];
            let answer = match self.core.guarded(Kind::Change, deadline, &ops).await {
                Err(Refusal::LeaseEnded) => return Err(self.ended_lease(&transaction, deadline).await),
                other => other.map_err(Refusal::error)?,
            };
            let revision = answer.revision();
            outcome(layout, answer.parts.into_iter().next())?;
            Ok(Committed { revision })
        })
    }

    fn watch<'a>(&'a self, prefix: &'a str, after_revision: u64) -> Pending<'a, Watch> {
        Box::pin(async move {
            check_prefix(prefix)?;
            let range = self.core.layout.under(prefix);
            watch::start(&self.core, range, after_revision, self.core.deadline()).await
        })
    }

    fn grant(&self, ttl: Duration) -> Pending<'_, LeaseId> {
        Box::pin(async move {
            if !(MIN_TTL..=MAX_TTL).contains(&ttl) {
                let reason = format!("a lease lives {MIN_TTL:?} to {MAX_TTL:?}, not {ttl:?}");
                return Err(RegistryError::malformed(reason));
            }
            let deadline = self.core.deadline();
            self.core.marker(deadline).await.map_err(Refusal::error)?;
            // Rounded up: a longer lease is always safe, a shorter one never. etcd itself raises it to its own minimum.
            let seconds = i64::try_from(ttl.as_millis().div_ceil(1000)).unwrap_or(i64::MAX);
            let ask = |link: Link| async move { Ok(link.lease().grant(seconds, None).await?.id()) };
            // A lease whose grant was lost ends by itself.
            let id = self.core.call(Kind::Repeatable, deadline, ask).await.map_err(Refusal::error)?;
            u64::try_from(id).ok().filter(|id| *id > 0).map(LeaseId).ok_or_else(strange)
        })
    }

    fn keep_alive(&self, lease: LeaseId) -> Pending<'_, Duration> {
        Box::pin(async move {
            let (id, deadline) = (lease_id(lease)?, self.core.deadline());
            self.core.marker(deadline).await.map_err(Refusal::error)?;
            let renewed =
                self.core.call(Kind::Repeatable, deadline, |link| self.renew(link, id, deadline)).await;
            renewed.map_err(|refusal| match refusal {
                Refusal::LeaseEnded => RegistryError::LeaseExpired { lease },
                other => other.error(),
            })
        })
    }

    fn revoke(&self, lease: LeaseId) -> Pending<'_, ()> {
        Box::pin(async move {
            let Ok(id) = lease_id(lease) else { return Ok(()) };
            let deadline = self.core.deadline();
            self.core.marker(deadline).await.map_err(Refusal::error)?;
            let ask = |link: Link| async move { Ok(link.lease().revoke(id).await.map(drop)?) };
            match self.core.call(Kind::Repeatable, deadline, ask).await {
                Ok(()) | Err(Refusal::LeaseEnded) => Ok(()),
                Err(refusal) => Err(refusal.error()),
            }
        })
    }

    /// etcd cannot detect the end of a process: only the lease shows its state.
    fn register_process<'a>(&'a self, _: &'a str, _: u64, lease: LeaseId) -> Pending<'a, ProcessWatch> {
        Box::pin(async move {
            self.keep_alive(lease).await?;
            Ok(ProcessWatch::NotWatched)
        })
    }
}
