//! Requests to the nodes that have the authority's key.

use weir_identity::{Endpoint, Fingerprint, Host, JoinAnswer, LARGEST_MESSAGE};

use super::records::Snapshot;

use crate::error::{ApiError, ApiErrorKind};
use crate::https::{self, FORWARDED};
use crate::identity::NodeIdentity;

/// Has a node with the authority's key answer, other than this one. What is sent proves itself, or this node's certificate does:
/// it does not matter who carries it. `forwarded`: how often nodes have forwarded the request, this one included.
///
/// # Errors
/// The node refuses, in its words; or none answers.
pub async fn ask(
    identity: &NodeIdentity,
    snapshot: &Snapshot,
    path: &str,
    body: &[u8],
    forwarded: u32,
) -> Result<JoinAnswer, ApiError> {
    let failed = |error: &dyn std::fmt::Display| ApiError::new(ApiErrorKind::Failed, error.to_string());
    let signer: Fingerprint = snapshot.signer()?.fingerprint();
    let (mut silent, mut refused) = (Vec::new(), None);
    for other in snapshot.nodes.iter().filter(|one| snapshot.can_sign(one) && one.node != *identity.name()) {
        let Some(api) = other.api else { continue };
        let tls = identity.api_client(&other.node).map_err(|error| failed(&error))?;
        let endpoint = Endpoint { host: Host::Ip(api.ip()), port: api.port() };
        let headers = [(FORWARDED, forwarded.to_string())];
        match https::post(&endpoint, &tls, path, body.to_vec(), &headers).await {
            // A node says itself that it signs: another one is asked after anything but a certificate.
            Ok(https::Answer::Done(bytes)) if bytes.len() <= LARGEST_MESSAGE => {
                match JoinAnswer::decode(&bytes) {
                    Ok(answer) => return Ok(answer),
                    Err(error) => silent.push(format!("{}: {error}", other.node)),
                }
            }
            Ok(https::Answer::Done(_)) => silent.push(format!("{}: its answer is too long", other.node)),
            Ok(https::Answer::Refused(error)) if error.kind == ApiErrorKind::Unavailable => {
                silent.push(format!("{}: {error}", other.node));
            }
            Ok(https::Answer::Refused(error)) => refused = Some(error),
            Err(reason) => silent.push(format!("{}: {reason}", other.node)),
        }
    }
    if let Some(refused) = refused {
        return Err(refused);
    }
    let message = format!(
        "no node with the key of the certificate authority ({signer}) answers: {}",
        if silent.is_empty() { "none has an API over TLS".to_owned() } else { silent.join("; ") }
    );
    Err(ApiError::new(ApiErrorKind::Unavailable, message))
}
