//! Deadlines, retries, and the check that the keys are this registry's.

use std::collections::{BTreeMap, BTreeSet};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use etcd_client::proto::PbTxnResponse;
use etcd_client::{Compare, CompareOp, GetOptions, Txn, TxnOp};
use tokio::sync::OnceCell;
use tokio::time::{Instant, timeout_at};
use weir_cluster::RegistryError;

use crate::config::EtcdConfig;
use crate::failure::{Again, Failure, NO_CONNECTION, Refusal, advice};
use crate::keepers::Keepers;
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
    pub keepers: Keepers,
    /// The marker, once it has been seen.
    marker: OnceCell<Marker>,
}

/// An attempt under way.
struct Running<'a, T> {
    endpoint: usize,
    work: Pin<Box<dyn Future<Output = Result<T, Failure>> + Send + 'a>>,
}

/// The first attempt to end, and its endpoint. Cancel safe.
async fn first_of<T>(running: &mut Vec<Running<'_, T>>) -> (usize, Result<T, Failure>) {
    poll_fn(|context| {
        for index in 0..running.len() {
            if let Poll::Ready(outcome) = running[index].work.as_mut().poll(context) {
                return Poll::Ready((running.swap_remove(index).endpoint, outcome));
            }
        }
        Poll::Pending
    })
    .await
}

/// The endpoints that a call has tried.
struct Tried<'a> {
    links: &'a Links,
    /// In the order of their attempts.
    endpoints: Vec<usize>,
    answered: bool,
}

impl Tried<'_> {
    /// The endpoint of the next attempt.
    fn next(&self) -> usize {
        let current = *self.links.current().borrow();
        match self.endpoints.last() {
            Some(last) if self.endpoints.contains(&current) => (last + 1) % self.links.count(),
            _ => current,
        }
    }

    /// 1 for the attempts of the first round of all endpoints, 2 for those of the second, then 4.
    fn rounds(&self) -> u32 {
        1 << (self.endpoints.len() / self.links.count()).min(4)
    }

    fn answers(&mut self, endpoint: usize) {
        self.answered = true;
        self.links.prefer(endpoint, &self.endpoints);
    }
}

/// A call that ends without an answer, or that its caller gives up: the next one begins where this one has come to.
impl Drop for Tried<'_> {
    fn drop(&mut self) {
        if let Some(last) = self.endpoints.last().filter(|_| !self.answered) {
            self.links.prefer(*last, &self.endpoints);
        }
    }
}

/// The meaning of a refusal for a call of this kind.
fn of_kind(kind: Kind, refusal: Refusal) -> Refusal {
    match refusal {
        // etcd makes the change that exceeds its quota, and then reports the quota.
        Refusal::Error(RegistryError::Full { reason }) if kind == Kind::Change => {
            Refusal::Error(RegistryError::unavailable(reason))
        }
        other => other,
    }
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
        Core { config, layout, links, keepers: Keepers::default(), marker: OnceCell::new() }
    }

    pub fn deadline(&self) -> Instant {
        Instant::now() + self.config.request_timeout
    }

    /// Makes attempts until one succeeds, is refused, or the deadline passes.
    ///
    /// A slow answer is still an answer: an attempt that may be repeated goes on to the deadline while others begin at other endpoints,
    /// one after each [`EtcdConfig::attempt_timeout`], then more rarely. Calls and watches move to the endpoint that answers first.
    pub async fn call<T, F>(
        &self,
        kind: Kind,
        deadline: Instant,
        attempt: impl Fn(Link) -> F + Sync,
    ) -> Result<T, Refusal>
    where
        T: Send,
        F: Future<Output = Result<T, Failure>> + Send,
    {
        let mut failed = 0_usize;
        let mut unidentified = BTreeSet::new();
        let mut running = Vec::new();
        let mut tried = Tried { links: &self.links, endpoints: Vec::new(), answered: false };
        let mut reasons = BTreeMap::new();
        while Instant::now() < deadline {
            let endpoint = tried.next();
            let limit = self.config.attempt_timeout * tried.rounds();
            tried.endpoints.push(endpoint);
            let work = Box::pin(self.attempt(kind, limit, deadline, endpoint, &attempt));
            running.push(Running { endpoint, work });
            let patience = match kind {
                Kind::Repeatable => deadline.min(Instant::now() + limit),
                Kind::Change => deadline,
            };
            let Ok((endpoint, outcome)) = timeout_at(patience, first_of(&mut running)).await else {
                continue;
            };
            let again = match outcome {
                Err(Failure::Again(again)) => again,
                Ok(done) => {
                    tried.answers(endpoint);
                    return Ok(done);
                }
                Err(Failure::Refused(refusal)) => {
                    tried.answers(endpoint);
                    return Err(of_kind(kind, refusal));
                }
            };
            self.links.leave(endpoint, &again.reason);
            // An attempt that the deadline has cut short says less than the one before it, and whoever logs each reason once (P10) would log
            // both.
            let is_in_doubt = again.in_doubt && kind == Kind::Change;
            if Instant::now() < deadline || is_in_doubt || !reasons.contains_key(&endpoint) {
                reasons.insert(endpoint, again.reason);
            }
            // First of all: a change that was begun is in doubt, whatever ended it.
            if is_in_doubt {
                break;
            }
            if again.identity {
                unidentified.insert(endpoint);
            }
            if unidentified.len() == self.links.count() {
                let reason = format!("no endpoint of etcd can be used: {}", self.failures(&reasons));
                return Err(Refusal::Error(RegistryError::Setup { reason }));
            }
            failed += 1;
            if failed.is_multiple_of(self.links.count()) {
                tokio::time::sleep_until(deadline.min(Instant::now() + PAUSE)).await;
            }
        }
        Err(Refusal::Error(RegistryError::unavailable(format!("etcd, {}", self.failures(&reasons)))))
    }

    /// The last failure of each endpoint that was tried, and what to do.
    fn failures(&self, reasons: &BTreeMap<usize, String>) -> String {
        if reasons.is_empty() {
            let endpoints: Vec<&str> =
                (0..self.links.count()).map(|number| self.links.name(number)).collect();
            return format!("{}: no answer in time", endpoints.join(", "));
        }
        let mut parts: Vec<String> = reasons
            .iter()
            .map(|(number, reason)| format!("{}: {reason}", self.links.name(*number)))
            .collect();
        let mut advices: Vec<&str> = reasons.values().map(|reason| advice(reason)).collect();
        advices.retain(|advice| !advice.is_empty());
        advices.sort_unstable();
        advices.dedup();
        parts.extend(advices.into_iter().map(str::to_owned));
        parts.join("; ")
    }

    async fn attempt<T, F>(
        &self,
        kind: Kind,
        limit: Duration,
        deadline: Instant,
        endpoint: usize,
        attempt: &(impl Fn(Link) -> F + Sync),
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>> + Send,
    {
        let until = |limit| match kind {
            Kind::Repeatable => deadline,
            Kind::Change => deadline.min(Instant::now() + limit),
        };
        let Ok(link) = timeout_at(until(limit), self.links.link(endpoint)).await else {
            return Err(Again::not_done(format!("{NO_CONNECTION} {limit:?}")).into());
        };
        // A change that was lost with a leader would wait for etcd's own limit of 7 s.
        let end = until(2 * self.config.attempt_timeout);
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
        let mut found = self.find_own(deadline).await?;
        loop {
            if let Some(marker) = found {
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
            found = self.find(deadline).await?;
        }
    }

    /// Whether the registry is there. Sets none up.
    pub async fn is_set_up(&self, deadline: Instant) -> Result<bool, Refusal> {
        Ok(self.find_own(deadline).await?.is_some())
    }

    /// As [`Core::find`], and refuses a prefix inside another registry.
    async fn find_own(&self, deadline: Instant) -> Result<Option<Marker>, Refusal> {
        // At the same time: etcd may be far away.
        let (is_outer, found) = tokio::join!(self.refuse_outer(deadline), self.find(deadline));
        is_outer?;
        found
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
    /// Attempts at every endpoint take so long, or for ever.
    async fn answered(core: &Core, takes: &[Option<Duration>], patience: Duration) -> Option<usize> {
        let attempt = |link: Link| async move {
            match takes[link.endpoint] {
                Some(long) => tokio::time::sleep(long).await,
                None => std::future::pending().await,
            }
            Ok::<_, Failure>(link.endpoint)
        };
        let call = core.call(Kind::Repeatable, core.deadline(), attempt);
        tokio::time::timeout(patience, call).await.ok().map(|answer| answer.unwrap())
    }

    fn current(core: &Core) -> usize {
        *core.links.current().borrow()
    }

    #[tokio::test]
    async fn a_slow_endpoint_is_not_left_and_a_silent_one_is() {
        let mut core = core(3).await;
        let (quick, slow) = (Some(Duration::ZERO), Some(Duration::from_millis(500)));
        core.config.attempt_timeout = Duration::from_millis(100);
        let long = Duration::from_secs(5);
        assert_eq!(answered(&core, &[slow, slow, slow], long).await, Some(0));
        assert_eq!(current(&core), 0, "all are slow");
        assert_eq!(answered(&core, &[None, quick, quick], long).await, Some(1));
        assert_eq!(current(&core), 1, "calls and watches move to the one that answers");
        // The caller gives up before the third endpoint's turn.
        let short = Duration::from_millis(150);
        assert_eq!(answered(&core, &[quick, None, None], short).await, None);
        assert_eq!(current(&core), 2, "the next call begins where this one has come to");
        assert_eq!(answered(&core, &[quick, None, None], short).await, Some(0));
        assert_eq!(current(&core), 0);
    }
}
