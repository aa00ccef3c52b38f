//! What a running node does when the records of identities change: it trusts whom they say, and announces that.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use weir_cluster::records::{Record, keys};
use weir_cluster::registry::Transaction;
use weir_identity::CaCertificate;

use super::records::{Announced, Snapshot, announced};
use crate::control::Node;
use crate::identity::NodeIdentity;

/// Pause after a failure, or where no authority exists yet.
const AGAIN: Duration = Duration::from_secs(1);

/// Follows the records until the node stops. While the registry is away, what it said last counts (P12). `api`: the address of
/// this node's API over TLS.
pub async fn keep(node: Arc<Node>, api: Option<SocketAddr>) {
    let Some(identity) = node.identity.clone() else { return };
    let mut told = String::new();
    loop {
        let reason = match follow(&node, &identity, api).await {
            Ok(()) => String::new(),
            Err(reason) => reason,
        };
        if !reason.is_empty() && reason != told {
            tracing::warn!(reason, "the cluster's identities: what was known last counts");
        }
        told = reason;
        weir_task::sleep(AGAIN).await;
    }
}

/// Applies the records, and every change, until the watch ends.
async fn follow(node: &Node, identity: &NodeIdentity, api: Option<SocketAddr>) -> Result<(), String> {
    let words = |error: &dyn std::fmt::Display| error.to_string();
    loop {
        let snapshot = Snapshot::read(&*node.registry).await.map_err(|error| words(&error))?;
        apply(node, identity, &snapshot)?;
        announce(node, identity, &snapshot, api).await?;
        let watch = node.registry.watch(keys::IDENTITY, snapshot.revision).await;
        watch.map_err(|error| words(&error))?.next().await.map_err(|error| words(&error))?;
    }
}

/// Trusts whom the records say.
fn apply(node: &Node, identity: &NodeIdentity, snapshot: &Snapshot) -> Result<(), String> {
    if snapshot.trusted().is_empty() {
        return Err("the registry has no certificate authority".into());
    }
    let ended = |why| {
        let text = format!("a connection was ended: {why}");
        tracing::warn!("{text}");
        node.journal.tell("peer-refused", &node.config.name, text);
    };
    let trusted = snapshot.trusted().to_vec();
    identity.set_trust(trusted, snapshot.revoked.0.clone(), ended).map_err(|error| error.to_string())?;
    Ok(())
}

/// Writes what this node trusts, now that it is durable here.
async fn announce(
    node: &Node,
    identity: &NodeIdentity,
    snapshot: &Snapshot,
    api: Option<SocketAddr>,
) -> Result<(), String> {
    let signer = snapshot.signer().map_err(|error| error.to_string())?.fingerprint();
    let signs = identity.store().authority().is_ok_and(|own| own.certificate().fingerprint() == signer);
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
