//! A running node follows the records of identities: it trusts whom they say, and announces that.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use weir_cluster::records::{Record, keys};
use weir_cluster::registry::{Registry, RegistryError, Transaction};
use weir_identity::{BadTrust, CaCertificate, Mistrust};

use super::records::{Announced, Snapshot, Unusable, announced};
use super::{admission, signers};
use crate::config::Config;
use crate::control::Node;
use crate::identity::{IdentityError, NodeIdentity};
use crate::patience::Told;
use crate::registry::check_usable;

/// Pause after a failure, or where no authority exists yet.
const AGAIN: Duration = Duration::from_secs(1);

/// Refuses a registry of another cluster, one that has revoked this node, and for a node without identity one of a cluster with
/// identities: before the node has a session there, so that no other node counts on it. Waits for the registry, and while it has no
/// cluster though this node is a member of one; `waits` gets the reason.
///
/// # Errors
/// [`IdentityError`].
pub async fn check(
    config: &Config,
    registry: &dyn Registry,
    identity: Option<&NodeIdentity>,
    waits: impl Fn(&str),
) -> Result<(), IdentityError> {
    let place = || config.registry.keys();
    let snapshot = loop {
        let read = match identity {
            // A member sets up no registry.
            Some(_) => Snapshot::read_existing(registry).await,
            None => Snapshot::read(registry).await,
        };
        match (read, identity) {
            // Not refused: its content may be restored in a while. There is no disk to serve until then.
            (Ok(snapshot), Some(identity)) if snapshot.is_blank() => {
                // One that is only half migrated must not be restored from a backup. The look at that sets up a registry.
                let unusable = match registry.is_set_up().await {
                    Ok(true) => check_usable(registry, config).await.err(),
                    Ok(false) | Err(_) => None,
                };
                waits(&unusable.map_or_else(|| identity.no_cluster(), |error| error.to_string()));
            }
            (Ok(snapshot), _) => break snapshot,
            (Err(Unusable::Registry(error @ RegistryError::Unavailable { .. })), _) => {
                waits(&error.to_string())
            }
            // Its last trust counts; `keep` says so.
            (Err(_), Some(_)) => return Ok(()),
            // The registry has something of identities, whatever it is.
            (Err(Unusable::Record { .. }), None) => return Err(IdentityError::Lacking { registry: place() }),
            // Joining meets it again, and says what to do.
            (Err(_), None) => return Ok(()),
        }
        weir_task::sleep(AGAIN).await;
    };
    let Some(identity) = identity else {
        return match snapshot.is_blank() {
            true => Ok(()),
            false => Err(IdentityError::Lacking { registry: place() }),
        };
    };
    if snapshot.trusted().is_empty() {
        // Guests need their disks until the record is restored.
        let reason = lost(identity, &snapshot);
        tracing::error!("{reason}; what this node trusted last counts");
        identity.set_without_cluster(Some(reason));
        let own = identity.certificate().identity.cluster();
        if let Some(other) = snapshot.issued.iter().find(|one| one.facts.identity.cluster() != own) {
            return Err(identity.other_registry(place(), BadTrust::OtherCluster(other.ca)));
        }
    }
    let trusted = match snapshot.trusted() {
        [] => identity.tls().trust.get().authorities().to_vec(),
        trusted => trusted.to_vec(),
    };
    match identity.set_trust(trusted, snapshot.revoked.0.clone(), |_| {}) {
        // The new trust holds, as it does in a node that runs; the health line has the fault.
        Err(error @ IdentityError::Store(_)) => {
            tracing::error!(%error, "whom this node trusts is not stored")
        }
        set => set.map_err(|error| error.of_registry(&place(), identity))?,
    }
    match identity.check_stored() {
        Ok(()) | Err(Mistrust::Expired { .. } | Mistrust::NotYet { .. }) => Ok(()),
        Err(source) => Err(IdentityError::mistrusted(identity.store().directory(), identity.name(), source)),
    }
}

/// Follows the records until the node stops. While the registry is away, what it said last counts (P12). `api`: the address of
/// this node's API over TLS. `expel` gets the revocation of this node: it has to stop, because its peers turn it away, and
/// because whoever revoked it wants nothing of it in the cluster.
pub async fn keep(node: Arc<Node>, api: Option<SocketAddr>, expel: oneshot::Sender<Mistrust>) {
    let Some(identity) = node.identity.clone() else { return };
    let mut expel = Some(expel);
    let (mut told, mut unsigned) = (Told::default(), None);
    loop {
        let reason = match follow(&node, &identity, api, &mut unsigned).await {
            Ok(()) => String::new(),
            Err(reason) => reason,
        };
        let own = identity.own_certificate().err();
        if let Some(why @ Mistrust::Revoked { .. }) = own.clone()
            && let Some(expel) = expel.take()
        {
            // Nobody waits for it where the node stops anyway. A stop may take long: other revocations count meanwhile.
            let _ = expel.send(why);
        }
        if !reason.is_empty() && told.is_due(topic(own.as_ref(), &reason)) {
            tracing::warn!(reason, "the cluster's identities: what was known last counts");
        }
        weir_task::sleep(AGAIN).await;
    }
}

/// The subject of a line of the log: the words for this node's own certificate contain the time, and differ each second.
fn topic<'a>(own: Option<&Mistrust>, reason: &'a str) -> &'a str {
    if own.is_some() { "this node's own certificate" } else { reason }
}

/// Applies the records, and every change, until the watch ends. `unsigned`: why this node cannot sign, as it was logged last.
async fn follow(
    node: &Node,
    identity: &NodeIdentity,
    api: Option<SocketAddr>,
    unsigned: &mut Option<String>,
) -> Result<(), String> {
    let words = |error: &dyn std::fmt::Display| error.to_string();
    loop {
        let snapshot = Snapshot::read(&*node.registry).await.map_err(|error| words(&error))?;
        apply(node, identity, &snapshot)?;
        let now = signers::obstacle(identity, &snapshot);
        if let Some(reason) = now.as_ref().filter(|_| now != *unsigned) {
            tracing::warn!(reason, "this node can sign no certificate, so no host can join by it");
        }
        *unsigned = now;
        announce(node, identity, &snapshot, api).await?;
        let watch = node.registry.watch(keys::IDENTITY, snapshot.revision).await;
        watch.map_err(|error| words(&error))?.next().await.map_err(|error| words(&error))?;
    }
}

/// The authority's loss from the registry, in words.
fn lost(identity: &NodeIdentity, snapshot: &Snapshot) -> String {
    if snapshot.is_blank() { identity.no_cluster() } else { Unusable::AuthorityLost.to_string() }
}

/// Trusts whom the records say.
fn apply(node: &Node, identity: &NodeIdentity, snapshot: &Snapshot) -> Result<(), String> {
    if snapshot.trusted().is_empty() {
        let reason = lost(identity, snapshot);
        identity.set_without_cluster(Some(reason.clone()));
        return Err(reason);
    }
    let apis = snapshot.nodes.iter().filter_map(|one| Some((one.node.to_string(), one.api?)));
    identity.set_apis(apis.collect());
    let mut of_former = 0;
    let ended = |why| {
        if let Mistrust::UnknownAuthority { .. } = why {
            of_former += 1;
            return;
        }
        let text = format!("a connection was ended: {why}");
        tracing::warn!("{text}");
        node.journal.tell("peer-refused", &node.config.name, text);
    };
    let trusted = snapshot.trusted().to_vec();
    let set = identity.set_trust(trusted, snapshot.revoked.0.clone(), ended);
    if of_former > 0 {
        let text = format!(
            "{of_former} connections were ended that certificates of an authority have opened which is not trusted any more; whoever \
             has a later certificate connects again"
        );
        node.journal.tell("former-authority-ended", &node.config.name, text);
    }
    let set = set.map_err(|error| error.of_registry(&node.config.registry.keys(), identity));
    let other = |error: &&IdentityError| matches!(error, IdentityError::OtherRegistry { .. });
    identity.set_without_cluster(set.as_ref().err().filter(other).map(ToString::to_string));
    set.map_err(|error| error.to_string())?;
    identity.own_certificate().map(drop).map_err(|why| format!("other nodes refuse this one, stop it: {why}"))
}

/// Writes what this node trusts, now that it is durable here.
async fn announce(
    node: &Node,
    identity: &NodeIdentity,
    snapshot: &Snapshot,
    api: Option<SocketAddr>,
) -> Result<(), String> {
    let signer = snapshot.signer().map_err(|error| error.to_string())?.fingerprint();
    let signs = admission::key_of(identity.store(), signer).is_ok_and(|key| key.is_some());
    let name = identity.name().clone();
    let trusts = snapshot.trusted().iter().map(CaCertificate::fingerprint).collect();
    let own = Announced { node: name.clone(), trusts, api, signs };
    if snapshot.nodes.contains(&own) {
        return Ok(());
    }
    // Nobody else writes it.
    let put = Transaction { compares: Vec::new(), ops: vec![own.put(announced(&name))] };
    node.registry.transact(put).await.map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_behind_is_told_once_a_minute_and_not_each_second() {
        let mut told = Told::default();
        let due = (0..30).filter(|second| {
            let own = Mistrust::NotYet { who: "n1".into(), not_before: 3600, now: *second };
            told.is_due(topic(Some(&own), &own.to_string()))
        });
        assert_eq!(due.count(), 1);
        assert!(told.is_due(topic(None, "the registry has no certificate authority")));
    }
}
