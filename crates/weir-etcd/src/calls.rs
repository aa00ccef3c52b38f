//! Deadlines, retries, and the check that the keys are this registry's.

use std::collections::BTreeSet;
use std::future::Future;
use std::time::Duration;

use etcd_client::proto::PbTxnResponse;
use etcd_client::{Compare, CompareOp, GetOptions, Txn, TxnOp};
use tokio::sync::OnceCell;
use tokio::time::{Instant, timeout_at};
use weir_cluster::RegistryError;

use crate::config::EtcdConfig;
use crate::failure::{Again, Failure, Refusal};
use crate::layout::{Layout, Marker};
use crate::links::{Link, Links};
use crate::transaction::{Answer, answer, guarded, range, strange};

/// Pause after all endpoints have failed.
const PAUSE: Duration = Duration::from_millis(50);

/// The state that all handles and watches share.
pub(crate) struct Core {
    pub config: EtcdConfig,
    pub layout: Layout,
    pub links: Links,
    /// The marker, once it has been seen.
    marker: OnceCell<Marker>,
}

/// Whether a request may be sent twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A second execution has no effect that the caller can see.
    Repeatable,
    /// Sent again only when it was certainly not carried out: after a lost answer, a compare-and-swap would report a
    /// conflict with itself.
    Change,
}

impl Core {
    pub fn new(config: EtcdConfig) -> Core {
        let (layout, links) = (Layout::new(&config.prefix), Links::new(&config));
        Core { config, layout, links, marker: OnceCell::new() }
    }

    pub fn deadline(&self) -> Instant {
        Instant::now() + self.config.request_timeout
    }

    /// Makes attempts until one succeeds, is refused, or the deadline passes.
    pub async fn call<T, F>(
        &self,
        kind: Kind,
        deadline: Instant,
        attempt: impl Fn(Link) -> F,
    ) -> Result<T, Refusal>
    where
        F: Future<Output = Result<T, Failure>> + Send,
    {
        let mut failed = 0_usize;
        let mut unidentified = BTreeSet::new();
        loop {
            let endpoint = *self.links.current().borrow();
            let again = match self.attempt(kind, deadline, endpoint, &attempt).await {
                Ok(done) => return Ok(done),
                Err(Failure::Refused(Refusal::Error(RegistryError::Full { reason })))
                    if kind == Kind::Change =>
                {
                    // etcd makes the change that exceeds its quota, and then reports the quota.
                    return Err(Refusal::Error(RegistryError::unavailable(reason)));
                }
                Err(Failure::Refused(refusal)) => return Err(refusal),
                Err(Failure::Again(again)) => again,
            };
            let reason = format!("{}: {}", self.links.name(endpoint), again.reason);
            self.links.leave(endpoint, &again.reason);
            // First of all: a change that was begun is in doubt, whatever ended it.
            if again.in_doubt && kind == Kind::Change {
                return Err(Refusal::Error(RegistryError::unavailable(format!("etcd, {reason}"))));
            }
            if again.identity {
                unidentified.insert(endpoint);
            }
            if unidentified.len() == self.links.count() {
                let remedy =
                    "check registry.ca, registry.certificate and registry.key, and etcd's own certificates";
                let reason = format!("no endpoint of etcd can be used, the last {reason}; {remedy}");
                return Err(Refusal::Error(RegistryError::Setup { reason }));
            }
            if Instant::now() >= deadline {
                return Err(Refusal::Error(RegistryError::unavailable(format!("etcd, {reason}"))));
            }
            failed += 1;
            if failed.is_multiple_of(self.links.count()) {
                tokio::time::sleep_until(deadline.min(Instant::now() + PAUSE)).await;
            }
        }
    }

    async fn attempt<T, F>(
        &self,
        kind: Kind,
        deadline: Instant,
        endpoint: usize,
        attempt: &impl Fn(Link) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>> + Send,
    {
        let limit = self.config.attempt_timeout;
        let soon = deadline.min(Instant::now() + limit);
        let Ok(link) = timeout_at(soon, self.links.link(endpoint)).await else {
            return Err(Again::not_done(format!("no connection within {limit:?}")).into());
        };
        let end = match kind {
            Kind::Repeatable => deadline.min(Instant::now() + limit),
            // A change that was lost with a leader would wait for etcd's own limit of 7 s.
            Kind::Change => deadline.min(Instant::now() + 2 * limit),
        };
        let (link, outcome) = match link {
            Ok(link) => (Some(link.clone()), timeout_at(end, attempt(link)).await),
            Err(failure) => (None, Ok(Err(failure))),
        };
        match outcome {
            Ok(Err(Failure::Again(again))) => {
                if again.reconnect {
                    self.links.drop_link(endpoint, link.as_ref()).await;
                }
                Err(again.into())
            }
            Ok(other) => other,
            Err(_) => Err(Again::in_doubt("no answer in time").into()),
        }
    }

    /// Does `ops` in one transaction, if etcd has this registry's marker.
    pub async fn guarded(&self, kind: Kind, deadline: Instant, ops: &[TxnOp]) -> Result<Answer, Refusal> {
        let marker = self.marker(deadline).await?;
        self.call(kind, deadline, |link| self.guarded_at(link, marker, ops)).await
    }

    /// As [`Core::guarded`], once, at one endpoint.
    pub async fn guarded_at(&self, link: Link, marker: &Marker, ops: &[TxnOp]) -> Result<Answer, Failure> {
        let response = link.kv().txn(guarded(&self.layout, marker, ops.to_vec())).await?;
        Ok(answer(&self.layout, response)?)
    }

    /// The registry's marker. The first call looks for it in etcd, and sets up the registry where no key is.
    pub async fn marker(&self, deadline: Instant) -> Result<&Marker, Refusal> {
        let found = timeout_at(deadline, self.marker.get_or_try_init(|| self.identify(deadline))).await;
        let late = |_| Refusal::Error(RegistryError::unavailable("etcd: no answer in time"));
        found.map_err(late)?
    }

    async fn identify(&self, deadline: Instant) -> Result<Marker, Refusal> {
        self.refuse_outer(deadline).await?;
        loop {
            if let Some(marker) = self.find(deadline).await? {
                return Ok(marker);
            }
            let marker = Marker::new();
            let claim = |link: Link| {
                let request = self.claim(&marker);
                async move { Ok(link.kv().txn(request).await?.succeeded()) }
            };
            if self.call(Kind::Change, deadline, claim).await? {
                tracing::warn!(
                    prefix = self.layout.prefix(),
                    "no registry was there in etcd: set up a new one"
                );
                return Ok(marker);
            }
            // Another process was faster.
        }
    }

    /// Refuses a prefix inside another registry.
    async fn refuse_outer(&self, deadline: Instant) -> Result<(), Refusal> {
        for key in self.layout.outer_markers() {
            let read = |link: Link| {
                let key = key.clone();
                async move { Ok(link.kv().get(key, None).await?.0.kvs.into_iter().next()) }
            };
            let found = match self.call(Kind::Repeatable, deadline, read).await {
                // A user who may not read it may have a prefix of its own inside.
                Err(Refusal::Error(RegistryError::Setup { reason }))
                    if reason.contains("permission denied") =>
                {
                    None
                }
                other => other?,
            };
            if let Some(found) = found
                && Marker::parse(&key, &found.value).is_ok()
            {
                let prefix = self.layout.prefix();
                let reason = format!(
                    "registry.prefix = {prefix} is inside another registry ({key}); choose one outside of it"
                );
                return Err(Refusal::Error(RegistryError::Setup { reason }));
            }
        }
        Ok(())
    }

    /// The marker in etcd; `None` if no key is under the prefix.
    async fn find(&self, deadline: Instant) -> Result<Option<Marker>, Refusal> {
        let all = self.layout.all();
        let others = GetOptions::new().with_range(all.end.clone()).with_limit(1).with_keys_only();
        let ops = [TxnOp::get(self.layout.marker(), None), TxnOp::get(all.first.clone(), Some(others))];
        let read = |link: Link| {
            let request = Txn::new().and_then(ops.to_vec());
            async move { Ok(link.kv().txn(request).await?.0) }
        };
        let PbTxnResponse { responses, .. } = self.call(Kind::Repeatable, deadline, read).await?;
        let mut found = responses.into_iter().map(|part| range(part.response));
        let mut next = || found.next().unwrap_or_else(|| Err(strange())).map_err(Refusal::Error);
        let (marker, other) = (next()?.kvs.into_iter().next(), next()?.kvs.into_iter().next());
        if let Some(entry) = marker {
            return Marker::parse(&self.layout.marker(), &entry.value).map(Some).map_err(Refusal::Error);
        }
        let Some(other) = other else { return Ok(None) };
        let (prefix, key) = (self.layout.prefix(), String::from_utf8_lossy(&other.key));
        let reason = format!(
            "registry.prefix = {prefix} is not a registry of Weir: etcd has other keys under it, the first is {key}; choose \
             another prefix"
        );
        Err(Refusal::Error(RegistryError::Setup { reason }))
    }

    /// Puts the marker if no key is under the prefix.
    fn claim(&self, marker: &Marker) -> Txn {
        let all = self.layout.all();
        let nothing = Compare::create_revision(all.first, CompareOp::Equal, 0).with_range(all.end);
        Txn::new().when([nothing]).and_then([TxnOp::put(self.layout.marker(), marker.value(), None)])
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Endpoints whose connections exist; attempts in these tests do not use them.
    async fn core(endpoints: usize) -> Core {
        let config = EtcdConfig::new((0..endpoints).map(|number| format!("http://127.0.0.1:{}", 1 + number)));
        let core = Core::new(config);
        for endpoint in 0..endpoints {
            core.links.connect_later(endpoint).await;
        }
        core
    }

    async fn fails(core: &Core, kind: Kind, failure: impl Fn() -> Failure + Sync) -> RegistryError {
        let attempt = |_| {
            let failure = failure();
            async move { Err::<(), Failure>(failure) }
        };
        core.call(kind, core.deadline(), attempt).await.unwrap_err().error()
    }

    /// A session that TLS ends may have carried the request before.
    #[tokio::test]
    async fn a_change_that_was_begun_is_in_doubt_whatever_ended_it() {
        let core = core(1).await;
        let alert = |in_doubt| Again { identity: true, in_doubt, ..Again::not_done("received fatal alert") };
        let error = fails(&core, Kind::Change, || alert(true).into()).await;
        assert!(matches!(error, RegistryError::Unavailable { .. }), "{error:?}");
        for (kind, in_doubt) in [(Kind::Change, false), (Kind::Repeatable, true), (Kind::Repeatable, false)] {
            let error = fails(&core, kind, || alert(in_doubt).into()).await;
            assert!(matches!(error, RegistryError::Setup { .. }), "{kind:?}: {error:?}");
        }
    }

    /// etcd makes the change that exceeds its quota, and then reports the quota.
    #[tokio::test]
    async fn a_change_that_exceeds_the_quota_is_in_doubt() {
        let core = core(1).await;
        let full = || Failure::from(RegistryError::Full { reason: "compact and defragment it".into() });
        let error = fails(&core, Kind::Change, full).await;
        assert!(matches!(error, RegistryError::Unavailable { .. }), "{error:?}");
        assert!(error.to_string().contains("compact and defragment it"), "{error}");
        let error = fails(&core, Kind::Repeatable, full).await;
        assert!(matches!(error, RegistryError::Full { .. }), "{error:?}");
    }
}
