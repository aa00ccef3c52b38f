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

/// A failure that persists is an event once in this time.
const REMIND: u64 = 86_400;

/// Attempts to write which certificate was replaced, while other changes come first.
const ATTEMPTS: usize = 10;

/// Renews the certificate when it is due, until the node stops. Open connections go on with the certificate that opened them.
pub async fn keep(node: Arc<Node>) {
    let Some(identity) = node.identity.clone() else { return };
    let mut told: Option<(String, u64)> = None;
    loop {
        let own = match due(&identity) {
            Ok(own) => own,
            Err(wait) => {
                weir_task::sleep(wait).await;
                continue;
            }
        };
        match renew(&node, &identity, &own).await {
            Ok(renewed) => {
                told = None;
                let text = format!("the certificate of {} was renewed, {}", identity.name(), lasts(&renewed));
                node.journal.tell("certificate-renewed", identity.name().as_str(), text);
                if let Err(error) = replaced(&*node.registry, &renewed).await {
                    tracing::warn!(%error, "the former certificate stays valid until it ends");
                }
            }
            Err(error) => {
                let reason = error.to_string();
                let is_told = |(words, at): &(String, u64)| *words == reason && now() < at + REMIND;
                if !told.as_ref().is_some_and(is_told) {
                    let name = identity.name();
                    let text = format!("the certificate of {name} is not renewed, {}: {reason}", lasts(&own));
                    node.journal.tell("renewal-failed", name.as_str(), text);
                    told = Some((reason, now()));
                }
                weir_task::sleep(AGAIN).await;
            }
        }
    }
}

fn lasts(facts: &Facts) -> String {
    weir_identity::lasts(facts, now())
}

/// The certificate, if it is time to renew it; otherwise the time until the next look.
fn due(identity: &NodeIdentity) -> Result<Facts, Duration> {
    let own = identity.certificate();
    match own.renew_at().saturating_sub(now()) {
        0 => Ok(own),
        left => Err(Duration::from_secs(left).min(LOOK)),
    }
}

/// Gets a certificate for a new key, stores it and uses it for handshakes from now on.
async fn renew(node: &Node, identity: &NodeIdentity, own: &Facts) -> Result<Facts, ApiError> {
    let failed = |error: &dyn std::fmt::Display| ApiError::new(ApiErrorKind::Failed, error.to_string());
    match identity.own_certificate() {
        Err(why @ Mistrust::Expired { .. }) => {
            return Err(
                failed(&why).hint("join with a new token: `weir cluster revoke`, then `invite --readmit`")
            );
        }
        Err(why) => return Err(failed(&why)),
        Ok(_) => {}
    }
    let snapshot = Snapshot::read(&*node.registry).await?;
    let record = snapshot.issued.iter().find(|one| one.facts.serial == own.serial);
    let hosts = record.map(|one| one.hosts.clone()).unwrap_or_default();
    let key = Key::generate().map_err(|error| failed(&error))?;
    let joiner = Joiner::new(key, identity.name().clone(), &hosts).map_err(|error| failed(&error))?;
    let request: RenewRequest = joiner.renewal();
    let answer = match admission::renewal(&*node.registry, identity.store(), own, &request, now()).await? {
        Some(answer) => answer,
        None => {
            let body = serde_json::to_vec(&request).map_err(|error| failed(&error))?;
            signers::ask(identity, &snapshot, RENEW, &body, 1).await?
        }
    };
    let pins: Vec<_> = snapshot.trusted().iter().map(|one| one.fingerprint()).collect();
    let renewed = joiner.complete(&answer, &pins, now()).map_err(|error| failed(&error))?;
    // Durable before it is used: what is in force must survive a restart.
    identity.store().replace_node(&renewed.credentials)?;
    identity.set_credentials(&renewed.credentials).map_err(|error| failed(&error))?;
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
