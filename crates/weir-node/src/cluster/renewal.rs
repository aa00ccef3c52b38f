//! A running node renews its certificate before that ends.

use std::sync::Arc;
use std::time::Duration;

use weir_cluster::registry::{Registry, RegistryError, Transaction};
use weir_identity::{Condition, Facts, Joiner, Key, Mistrust, RecordId, RenewRequest};

use super::records::{Snapshot, Unusable, put, unchanged};
use super::{admission, signers, unix_seconds as now};
use crate::control::Node;
use crate::error::{ApiError, ApiErrorKind};
use crate::identity::NodeIdentity;

/// The path of the request.
const RENEW: &str = "/v1/cluster/renew";

/// Longest time between two looks at the clock: it can be set.
const LOOK: Duration = Duration::from_secs(3600);

/// Pause after a failure. There are weeks left, and the nodes that sign must not be flooded.
const AGAIN: Duration = Duration::from_secs(60);

/// Pause after a failure while the authority is rotated: the whole cluster waits for this node.
const AGAIN_IN_ROTATION: Duration = Duration::from_secs(5);

/// A failure that persists is an event once in this time.
const REMIND: u64 = 86_400;

/// Attempts to write which certificate was replaced, while other changes come first.
const ATTEMPTS: usize = 10;

/// Renews the certificate when it is due, or another authority signs, until the node stops. Connections that are open go on until the former one ends.
pub async fn keep(node: Arc<Node>) {
    let Some(identity) = node.identity.clone() else { return };
    let (mut told, mut is_settled) = (None, false);
    loop {
        identity.forget_ended_former();
        let own = identity.certificate();
        let left = own.renew_at().saturating_sub(now());
        let due = left == 0 || identity.must_renew();
        if due {
            attempt(&node, &identity, &own, &mut told).await;
            is_settled = false;
        }
        if !is_settled {
            is_settled = match replaced(&*node.registry, &identity.certificate()).await {
                Ok(()) => true,
                Err(error) => {
                    tracing::debug!(%error, "former certificates of this node stay valid for now");
                    false
                }
            };
        }
        // Also after a success: a node that signs by a wrong clock must not be asked without end.
        let pause = match (due || !is_settled, identity.must_renew()) {
            (_, true) => AGAIN_IN_ROTATION,
            (true, false) => AGAIN,
            (false, false) => Duration::from_secs(left).clamp(AGAIN, LOOK),
        };
        tokio::select! {
            () = weir_task::sleep(pause) => {}
            () = identity.authorities_changed() => {}
        }
    }
}

/// Renews once, and says how that went; a failure that persists, once a day.
async fn attempt(node: &Node, identity: &NodeIdentity, own: &Facts, told: &mut Option<(ApiErrorKind, u64)>) {
    let name = identity.name();
    match renew(node, identity, own).await {
        Ok(renewed) => {
            *told = None;
            let text = format!("the certificate of {name} was renewed, {}", lasts(&renewed));
            node.journal.tell("certificate-renewed", name.as_str(), text);
        }
        Err(error) => {
            tracing::warn!(%error, "the certificate is not renewed");
            // By kind: the words may have the time in them.
            if told.is_none_or(|(kind, at)| kind != error.kind || now() >= at + REMIND) {
                let text = format!("the certificate of {name} is not renewed, {}: {error}", lasts(own));
                node.journal.tell("renewal-failed", name.as_str(), text);
                *told = Some((error.kind, now()));
            }
        }
    }
}

fn lasts(facts: &Facts) -> String {
    weir_identity::lasts(facts, now())
}

/// Gets a certificate for a new key, stores it and uses it for handshakes from now on.
async fn renew(node: &Node, identity: &NodeIdentity, own: &Facts) -> Result<Facts, ApiError> {
    let failed = |error: &dyn std::fmt::Display| ApiError::new(ApiErrorKind::Failed, error.to_string());
    let ended = match identity.own_certificate() {
        Err(why @ Mistrust::Expired { .. }) => {
            Some(failed(&why).hint("join with a new token: `weir cluster revoke`, then `invite --readmit`"))
        }
        Err(why) => return Err(failed(&why)),
        Ok(_) => None,
    };
    let snapshot = Snapshot::read(&*node.registry).await?;
    let record = snapshot.issued.iter().find(|one| one.facts.serial == own.serial);
    let hosts = record.map(|one| one.hosts.clone()).unwrap_or_default();
    let key = Key::generate().map_err(|error| failed(&error))?;
    let joiner = Joiner::new(key, identity.name().clone(), &hosts).map_err(|error| failed(&error))?;
    let request: RenewRequest = joiner.renewal();
    let ask = async || {
        let body = serde_json::to_vec(&request).map_err(|error| failed(&error))?;
        signers::ask(identity, &snapshot, RENEW, &body, 1).await
    };
    let own_answer = admission::renewal(&*node.registry, identity.store(), own, &request, true, now()).await;
    let answer = match (own_answer, ended) {
        // Also after its end: nobody else may be there who could sign.
        (Ok(Some(answer)), _) => answer,
        // Another node would refuse it.
        (_, Some(ended)) => return Err(ended),
        (Ok(None), None) => ask().await?,
        // A copy of the authority's key that this node cannot use keeps no other node from signing.
        (Err(error), None) if error.kind == ApiErrorKind::Unavailable => ask().await.map_err(|_| error)?,
        (Err(error), None) => return Err(error),
    };
    let pins: Vec<_> = snapshot.trusted().iter().map(|one| one.fingerprint()).collect();
    let renewed = joiner.complete(&answer, &pins, now()).map_err(|error| failed(&error))?;
    if renewed.credentials.facts().renew_at() <= now() {
        return Err(failed(
            &"the new certificate is due by this host's clock; compare it with the signing node's",
        ));
    }
    identity.replace_credentials(&renewed.credentials).map_err(|error| failed(&error))?;
    Ok(renewed.credentials.facts().clone())
}

/// Writes that the former certificates of this node open no connection any more.
async fn replaced(registry: &dyn Registry, own: &Facts) -> Result<(), ApiError> {
    for _ in 0..ATTEMPTS {
        let snapshot = Snapshot::read(registry).await?;
        let issued = snapshot.issued.iter().map(|one| &one.facts).zip(snapshot.made.iter().copied());
        let (revoked, revision) = &snapshot.revoked;
        let next = revoked.with_replaced(own, issued, now());
        if next == *revoked {
            return Ok(());
        }
        let condition = Condition { record: RecordId::Revocations, revision: *revision };
        let ops = vec![put(RecordId::Revocations, next)];
        match registry.transact(Transaction { compares: vec![unchanged(condition)], ops }).await {
            Ok(_) => return Ok(()),
            Err(RegistryError::Conflict { .. }) => {}
            Err(error) => return Err(Unusable::from(error).into()),
        }
    }
    Err(admission::busy())
}
