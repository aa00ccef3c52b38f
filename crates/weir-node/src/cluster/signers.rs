//! Requests to the nodes that have the authority's key.

use weir_identity::{Endpoint, Fingerprint, Host, JoinAnswer, LARGEST_MESSAGE};

use super::admission;
use super::records::{Announced, Snapshot};
use crate::error::{ApiError, ApiErrorKind};
use crate::https::{self, FORWARDED};
use crate::identity::NodeIdentity;

/// Has a node with the authority's key answer, other than this one. The request proves itself, or this node's certificate does:
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
    for other in others(snapshot, Some(identity)) {
        let Some(api) = other.api else {
            silent.push(format!("{}: its configuration does not set api.listen", other.node));
            continue;
        };
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
    let unavailable = |message: String| ApiError::new(ApiErrorKind::Unavailable, message);
    Err(match silent.is_empty() {
        true => {
            unavailable(format!("no node has the key of the certificate authority ({signer})")).hint(RESTORE)
        }
        false => unavailable(format!(
            "no node with the key of the certificate authority ({signer}) answers: {}",
            silent.join("; ")
        ))
        .hint("mend that node, or start it, and repeat"),
    })
}

/// The remedy where no node has the authority's key.
const RESTORE: &str = "restore ca.pem in identity.directory of the node that had it from a backup (mode 0600), restart that node, and repeat";

/// The nodes that say that they have the authority's key, without this one.
fn others<'a>(
    snapshot: &'a Snapshot,
    identity: Option<&'a NodeIdentity>,
) -> impl Iterator<Item = &'a Announced> {
    let me = identity.map(NodeIdentity::name);
    snapshot.nodes.iter().filter(move |one| snapshot.can_sign(one) && Some(&one.node) != me)
}

/// Why this node cannot sign though it may have to: its key cannot be used, or no other node has it. `None` before there is an
/// authority.
#[must_use]
pub fn obstacle(identity: &NodeIdentity, snapshot: &Snapshot) -> Option<String> {
    let signer = snapshot.signer().ok()?.fingerprint();
    let key = match admission::key_of(identity.store(), signer) {
        Ok(key) => key,
        Err(error) => return Some(error.to_string()),
    };
    let mut others = snapshot.nodes.iter().filter(|node| node.node != *identity.name());
    if key.is_some() || others.any(|node| snapshot.may_sign(node)) {
        return None;
    }
    let directory = identity.store().directory().display();
    Some(format!(
        "no node has the key of the certificate authority ({signer}), and neither has {directory}; {RESTORE}"
    ))
}

/// Refuses if no host could join now: no node that `is_there` can sign, and neither can this one.
///
/// # Errors
/// Who should be able to, and why it is not.
pub fn check(
    identity: Option<&NodeIdentity>,
    snapshot: &Snapshot,
    is_there: impl Fn(&str) -> bool,
) -> Result<(), ApiError> {
    let signer = snapshot.signer()?.fingerprint();
    let is_reached = |one: &Announced| one.api.is_some() && is_there(one.node.as_str());
    if others(snapshot, identity).any(is_reached) {
        return Ok(());
    }
    let own = identity.and_then(|identity| snapshot.nodes.iter().find(|one| one.node == *identity.name()));
    let refused = identity.and_then(NodeIdentity::refused_by_peers);
    let reason = match identity.map(|identity| admission::key_of(identity.store(), signer)) {
        // It announces no address, and a host that joins would refuse it, too.
        Some(Ok(Some(_))) if refused.is_some() => refused,
        Some(Ok(Some(_))) if own.is_none_or(|own| own.api.is_some()) => return Ok(()),
        Some(Ok(Some(_))) => {
            Some("this one has it, and its configuration does not set api.listen".to_owned())
        }
        Some(Err(error)) => Some(error.to_string()),
        Some(Ok(None)) | None => None,
    };
    let down: Vec<String> = others(snapshot, identity).map(|one| one.node.to_string()).collect();
    let hint = match (&reason, &down[..]) {
        (Some(_), _) => "mend that on the host of this node, and repeat".into(),
        (None, []) => RESTORE.into(),
        (None, down) => format!("start {} with api.listen set, and repeat", down.join(" or ")),
    };
    let kind = match reason.is_none() && !down.is_empty() {
        true => ApiErrorKind::Unavailable,
        false => ApiErrorKind::Refused,
    };
    let reason = reason.map(|error| format!(": {error}")).unwrap_or_default();
    let message = format!(
        "no host could join with a token: no node that is up has the key of the certificate authority ({signer}){reason}"
    );
    Err(ApiError::new(kind, message).hint(hint))
}
