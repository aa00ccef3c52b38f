//! Certificates for hosts that join and nodes that renew, by a node that has the authority's key.

use weir_cluster::registry::{Registry, RegistryError};
use weir_identity::{
    Admission, Authority, Facts, Fingerprint, JoinAnswer, JoinRefused, JoinRequest, NODE_LIFETIME,
    RenewRequest, Store, StoreError, admit, renew,
};

use super::records::{Snapshot, Unusable, transaction};
use crate::error::{ApiError, ApiErrorKind};

/// Decisions on one request, while other changes come first.
const ATTEMPTS: usize = 10;

/// The authority that signs, if this node has its key.
///
/// # Errors
/// The key cannot be read.
pub fn authority(store: &Store, snapshot: &Snapshot) -> Result<Option<Authority>, ApiError> {
    Ok(key_of(store, snapshot.signer()?.fingerprint())?)
}

/// The authority `signer`, if this node has its key. A rotation may have made it the one that signs a moment ago, or while this
/// node was down: its key is then still beside the former one. That of a former authority signs nothing.
///
/// # Errors
/// [`StoreError`].
pub fn key_of(store: &Store, signer: Fingerprint) -> Result<Option<Authority>, StoreError> {
    let mut unusable = None;
    for stored in [store.authority(), store.next_authority()] {
        match stored {
            Ok(authority) if authority.certificate().fingerprint() == signer => return Ok(Some(authority)),
            Ok(_) | Err(StoreError::Missing { .. }) => {}
            Err(error) => unusable = unusable.or(Some(error)),
        }
    }
    unusable.map_or(Ok(None), Err)
}

/// Decides on a host that joins, and writes the decision.
///
/// # Errors
/// The decision is no; `None`: this node does not have the authority's key.
pub async fn join(
    registry: &dyn Registry,
    store: &Store,
    request: &JoinRequest,
    now: u64,
) -> Result<Option<JoinAnswer>, ApiError> {
    decide(registry, store, |authority, snapshot| {
        admit(authority, snapshot.records(Some(request.token)), request, now, NODE_LIFETIME)
    })
    .await
}

/// Decides on the renewal of a node that has `presented` its certificate, and writes the decision. `own`: it is this node.
///
/// # Errors
/// As [`join`].
pub async fn renewal(
    registry: &dyn Registry,
    store: &Store,
    presented: &Facts,
    request: &RenewRequest,
    own: bool,
    now: u64,
) -> Result<Option<JoinAnswer>, ApiError> {
    decide(registry, store, |authority, snapshot| {
        // Those that its invitation allowed.
        let record = snapshot.issued.iter().find(|one| one.facts.serial == presented.serial);
        let hosts = record.map(|one| &one.hosts[..]).unwrap_or_default();
        renew(authority, snapshot.records(None), presented, hosts, request, (now, NODE_LIFETIME), own)
    })
    .await
}

async fn decide(
    registry: &dyn Registry,
    store: &Store,
    decision: impl Fn(&Authority, &Snapshot) -> Result<Admission, JoinRefused>,
) -> Result<Option<JoinAnswer>, ApiError> {
    for _ in 0..ATTEMPTS {
        let snapshot = Snapshot::read(registry).await?;
        // Another node may have a key that it can use.
        let key = key_of(store, snapshot.signer()?.fingerprint()).map_err(|error| {
            let message = format!("this node cannot use the key of the certificate authority: {error}");
            ApiError::new(ApiErrorKind::Unavailable, message).hint(
                "that file is on the host of the node that says so: mend it there; the token is still good",
            )
        })?;
        let Some(authority) = key else { return Ok(None) };
        let admission = decision(&authority, &snapshot).map_err(refused)?;
        match registry.transact(transaction(&admission)).await {
            Ok(_) => return Ok(Some(admission.answer)),
            Err(RegistryError::Conflict { .. }) => {}
            Err(error) => return Err(Unusable::from(error).into()),
        }
    }
    Err(busy())
}

/// A request that is not allowed now.
pub(super) fn refused(message: impl std::fmt::Display) -> ApiError {
    ApiError::new(ApiErrorKind::Refused, message.to_string())
}

/// The records change faster than they can be decided on.
pub(super) fn busy() -> ApiError {
    ApiError::new(ApiErrorKind::Unavailable, "the cluster's identities keep changing; try again")
}
