//! A host that joins: asks the nodes that the token names, and keeps the answer.

use std::sync::Arc;

use rustls::ClientConfig;
use weir_identity::{Credentials, Endpoint, Host, JoinAnswer, Joiner, Token, joining_client, provider};

use super::setup::own;
use super::views::Joined;
use crate::config::Config;
use crate::error::{ApiError, ApiErrorKind};
use crate::https::{self, Answer};
use crate::identity::WallClock;
use crate::timestamps::rfc3339;

/// The path of the request.
pub const JOIN: &str = "/v1/cluster/join";

fn failed(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(ApiErrorKind::Failed, error.to_string())
}

/// Joins the cluster that made `token`, at `now`: asks each of `endpoints` in turn, those of the token if there are none.
/// Repeated after a lost answer, it asks again with the same key.
///
/// # Errors
/// The cluster refuses, in its words; no node answers; the directory of keys cannot be used.
pub async fn join(
    config: &Config,
    token: &Token,
    endpoints: &[Endpoint],
    hosts: &[Host],
    now: impl Fn() -> u64,
) -> Result<Joined, ApiError> {
    let (store, name) = own(config)?;
    let key = store.joining_key().map_err(|error| match error {
        weir_identity::StoreError::Exists { path } => {
            let message = format!("this host has joined a cluster already: {} exists", path.display());
            ApiError::new(ApiErrorKind::Exists, message).hint("start the node; `weir cluster list` shows it")
        }
        error => error.into(),
    })?;
    let joiner = Joiner::new(key, name.clone(), hosts).map_err(failed)?;
    let tls = joining_client(&token.pins, Arc::new(WallClock), provider()).map_err(failed)?;
    let endpoints = if endpoints.is_empty() { &token.endpoints } else { endpoints };
    let body = serde_json::to_vec(&joiner.request(token, now())).map_err(failed)?;
    let answer = ask(endpoints, &Arc::new(tls), &body).await?;
    let joined = joiner.complete(&answer, &token.pins, now()).map_err(failed)?;
    let credentials: &Credentials = &joined.credentials;
    store.replace_trust(&joined.authorities)?;
    // Last: a host with it has joined.
    store.create_node(credentials)?;
    store.forget_joining_key()?;
    Ok(Joined {
        cluster: joined.cluster.to_string(),
        node: name,
        directory: config.identity.directory.clone().unwrap_or_default(),
        certificate_ends: rfc3339(credentials.facts().not_after.saturating_mul(1000)),
    })
}

/// The answer of the first node that answers. A refusal is an answer: another node would say the same.
async fn ask(endpoints: &[Endpoint], tls: &Arc<ClientConfig>, body: &[u8]) -> Result<JoinAnswer, ApiError> {
    let mut silent = Vec::new();
    for endpoint in endpoints {
        match https::post(endpoint, tls, JOIN, body.to_vec(), &[]).await {
            Ok(Answer::Done(bytes)) => return JoinAnswer::decode(&bytes).map_err(failed),
            Ok(Answer::Refused(error)) if error.kind == ApiErrorKind::Unavailable => {
                silent.push(format!("{endpoint}: {error}"));
            }
            Ok(Answer::Refused(error)) => return Err(error),
            Err(reason) => silent.push(format!("{endpoint}: {reason}")),
        }
    }
    let message = format!("no node could answer: {}", silent.join("; "));
    Err(ApiError::new(ApiErrorKind::Unavailable, message)
        .hint("is a node of the cluster up, and reachable from here? The token is still good"))
}
