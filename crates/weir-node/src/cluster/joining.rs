//! A host that joins: asks the nodes that the token names, and keeps the answer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use weir_identity::{
    CaCertificate, Credentials, Endpoint, Fingerprint, Host, JoinAnswer, Joined as Admitted, Joiner,
    Revocations, Store, StoreError, Token, joining_client, provider,
};

use super::records::Snapshot;
use super::setup::own;
use super::views::Joined;
use crate::config::Config;
use crate::error::{ApiError, ApiErrorKind};
use crate::https::{self, Answer, NoAnswer};
use crate::identity::WallClock;
use crate::registry::registry;
use crate::timestamps::rfc3339;

/// Longest wait for the registry, which a host needs no sooner than its node starts.
const REGISTRY: Duration = Duration::from_secs(5);

/// The path of the request.
pub const JOIN: &str = "/v1/cluster/join";

fn failed(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(ApiErrorKind::Failed, error.to_string())
}

/// Refuses a token of another cluster than the configured registry's, before any of it is sent: the host would be a node of a cluster
/// whose registry it does not use. Returns why the two could not be compared, if they could not.
async fn check_registry(config: &Config, token: &Token) -> Result<Option<String>, ApiError> {
    let place = config.registry.keys();
    let read = async {
        let words = |error: &dyn std::fmt::Display| error.to_string();
        let registry = registry(config).map_err(|error| words(&error))?;
        Snapshot::read_existing(&*registry).await.map_err(|error| words(&error))
    };
    let snapshot = match weir_task::timeout(REGISTRY, read).await {
        Ok(Ok(snapshot)) => snapshot,
        Ok(Err(reason)) => return Ok(Some(reason)),
        Err(_) => return Ok(Some(format!("no answer within {} s", REGISTRY.as_secs()))),
    };
    let trusted: Vec<Fingerprint> = snapshot.trusted().iter().map(CaCertificate::fingerprint).collect();
    if trusted.iter().any(|one| token.pins.contains(one)) {
        return Ok(None);
    }
    let other = match trusted.first() {
        Some(one) => format!(
            "has an authority that the token does not name ({one}): another cluster, or a new authority"
        ),
        None => "has no cluster with identities".to_owned(),
    };
    let message = format!("the configured registry, {place}, {other}; the cluster was asked nothing");
    Err(ApiError::new(ApiErrorKind::Refused, message).hint(
        "`weir cluster invite` on a node of this registry's cluster makes a token for it; if the token is for the right cluster, set \
         that cluster's registry (registry.prefix, registry.etcd or registry.socket in the configuration)",
    ))
}

/// Refuses where the trust of a cluster is stored that is not the token's: it would be replaced. An interrupted attempt with the
/// same token has left what the token names.
fn check_trust(store: &Store, token: &Token) -> Result<(), ApiError> {
    let trusted = match store.trust() {
        Ok(trusted) => trusted,
        Err(StoreError::Missing { .. }) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if trusted.iter().any(|one| token.pins.contains(&one.fingerprint())) {
        return Ok(());
    }
    let directory = store.directory().display();
    let clusters = trusted.iter().map(|one| one.cluster().to_string()).collect::<BTreeSet<_>>();
    let clusters = clusters.into_iter().collect::<Vec<_>>().join(", ");
    let message = format!(
        "{directory}/trust.pem is that of cluster {clusters}, and the token does not name its authority; nothing was replaced, and the \
         cluster was asked nothing"
    );
    Err(ApiError::new(ApiErrorKind::Exists, message).hint(format!(
        "if this host is to be a node of that cluster, use a token of it, and if its authority was rotated since, move trust.pem away, and \
         repeat; if that cluster is gone, move {directory} away, and repeat"
    )))
}

/// Joins the cluster that made `token`, at `now`: asks each of `endpoints` in turn, those of the token if there are none.
/// Repeated after a lost answer, it asks again with the same key. `warn` gets what an operator should know and does not prevent it.
///
/// # Errors
/// The cluster refuses, in its words; no node answers; the directory of keys cannot be used.
pub async fn join(
    config: &Config,
    token: &Token,
    endpoints: &[Endpoint],
    hosts: &[Host],
    now: impl Fn() -> u64,
    warn: impl Fn(&str),
) -> Result<Joined, ApiError> {
    let (store, name) = own(config)?;
    if matches!(store.node(), Err(StoreError::Missing { .. })) {
        check_trust(&store, token)?;
    }
    let key = store.joining_key().map_err(|error| match error {
        StoreError::Exists { path } => {
            let message = format!("this host has joined a cluster already: {} exists", path.display());
            let directory = store.directory().display();
            ApiError::new(ApiErrorKind::Exists, message).hint(format!(
                "start the node; `weir cluster list` shows it. If its cluster is gone, move {directory} away, and repeat"
            ))
        }
        error => error.into(),
    })?;
    if let Some(reason) = check_registry(config, token).await? {
        let place = config.registry.place();
        warn(&format!("whether the registry at {place} is the token's cluster's was not checked: {reason}"));
    }
    let joiner = Joiner::new(key, name.clone(), hosts).map_err(failed)?;
    let tls = joining_client(&token.pins, Arc::new(WallClock), provider()).map_err(failed)?;
    let endpoints = if endpoints.is_empty() { &token.endpoints } else { endpoints };
    let body = serde_json::to_vec(&joiner.request(token, now())).map_err(failed)?;
    let answer = ask(endpoints, &Arc::new(tls), &body).await?;
    let joined = joiner.complete(&answer, &token.pins, now()).map_err(failed)?;
    let credentials: &Credentials = &joined.credentials;
    keep(&store, &joined, now()).map_err(|error| {
        ApiError::from(error).hint(
            "the cluster has admitted this host: once that is mended, run the same command with the same token again",
        )
    })?;
    Ok(Joined {
        cluster: joined.cluster.to_string(),
        node: name,
        directory: config.identity.directory.clone().unwrap_or_default(),
        certificate_ends: rfc3339(credentials.facts().not_after.saturating_mul(1000)),
    })
}

/// Stores what the cluster has answered.
fn keep(store: &Store, joined: &Admitted, now: u64) -> Result<(), StoreError> {
    store.replace_trust(&joined.authorities)?;
    // A former node of this host may have been revoked by name; its certificates stay revoked.
    let former = store.revocations()?;
    store.replace_revocations(&Revocations::default().with_certificates_of(&former, now))?;
    // Last: a host with it has joined.
    store.create_node(&joined.credentials)?;
    store.forget_joining_key()
}

/// The answer of the first node that answers. A refusal is an answer: another node would say the same.
async fn ask(endpoints: &[Endpoint], tls: &Arc<ClientConfig>, body: &[u8]) -> Result<JoinAnswer, ApiError> {
    let (mut silent, mut hints) = (Vec::new(), Vec::new());
    for endpoint in endpoints {
        match https::post(endpoint, tls, JOIN, body.to_vec(), &[]).await {
            Ok(Answer::Done(bytes)) => return JoinAnswer::decode(&bytes).map_err(failed),
            Ok(Answer::Refused(error)) if error.kind == ApiErrorKind::Unavailable => {
                silent.push(format!("{endpoint}: {error}"));
                hints.push(error.hint);
            }
            Ok(Answer::Refused(error)) => return Err(error),
            Err(reason) => {
                silent.push(format!("{endpoint}: {reason}"));
                match reason {
                    NoAnswer::Mistrusted(_) => hints.push(
                        "check the address; if it is right, `weir cluster invite` on a node there makes a new token".into(),
                    ),
                    NoAnswer::NotYet(_) => {
                        hints.push("set this host's clock, and repeat; the token is still good".into());
                    }
                    NoAnswer::Refused(_) | NoAnswer::Unreachable(_) => {}
                }
            }
        }
    }
    let message = format!("no node could admit this host: {}", silent.join("; "));
    // A node's answer helps more than the question whether one answers.
    let said = hints.into_iter().find(|hint| !hint.is_empty());
    let hint = said.unwrap_or_else(|| {
        "is a node of the cluster up, and reachable from here? The token is still good".into()
    });
    Err(ApiError::new(ApiErrorKind::Unavailable, message).hint(hint))
}
