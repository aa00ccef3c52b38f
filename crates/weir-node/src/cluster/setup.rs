//! The first node: makes the cluster's authority and its own certificate.

use weir_cluster::registry::{Compare, Expect, Registry, RegistryError, Transaction};
use weir_identity::{
    Authorities, Authority, ClusterId, Credentials, Host, Issued, Key, NODE_LIFETIME, Name, Names, RecordId,
    Revocations, Store, StoreError,
};

use super::records::{Snapshot, Unusable, put};
use super::views::Made;
use crate::config::Config;
use crate::error::{ApiError, ApiErrorKind};

fn failed(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(ApiErrorKind::Failed, error.to_string())
}

/// The directory of the node's keys, opened, and its name.
///
/// # Errors
/// The configuration has none; or it cannot be used.
pub fn own(config: &Config) -> Result<(Store, Name), ApiError> {
    let invalid = |message: String| ApiError::new(ApiErrorKind::Invalid, message);
    let directory = config.identity.directory.as_ref().ok_or_else(|| {
        invalid("the configuration does not set identity.directory, where this node's keys are kept".into())
            .hint("add `[identity]` with `directory = \"/var/lib/weir/identity\"`, then repeat")
    })?;
    let store = Store::open(directory)?;
    let name = config.name.parse().map_err(|error| invalid(format!("{error}")))?;
    Ok((store, name))
}

/// Makes the cluster's authority and the first node's certificate, at `now`. What a crashed attempt has left is used.
///
/// # Errors
/// The cluster has an authority already; the registry, or the directory of keys, cannot be used.
pub async fn init(
    config: &Config,
    registry: &dyn Registry,
    hosts: &[Host],
    now: u64,
) -> Result<Made, ApiError> {
    let (store, name) = own(config)?;
    if let Some((authorities, _)) = Snapshot::read(registry).await?.authorities {
        return Err(exists(&authorities));
    }
    let authority = authority(&store, now)?;
    let key = Key::generate().map_err(failed)?;
    let issued = authority.issue_node(&name, hosts, &key.public(), now, NODE_LIFETIME).map_err(failed)?;
    let credentials = Credentials::new(key, issued.chain.clone()).map_err(failed)?;
    // No record names an earlier certificate: it counts nowhere.
    store.replace_node(&credentials)?;
    store.replace_trust(std::slice::from_ref(authority.certificate()))?;
    store.replace_revocations(&Revocations::default())?;
    match registry.transact(records(&authority, &name, &issued)).await {
        Ok(_) => {}
        Err(RegistryError::Conflict { .. }) => {
            let other = Snapshot::read(registry).await?.authorities;
            return Err(other.map_or_else(super::admission::busy, |(authorities, _)| exists(&authorities)));
        }
        Err(error) => return Err(Unusable::from(error).into()),
    }
    let certificate = authority.certificate();
    Ok(Made {
        cluster: certificate.cluster().to_string(),
        authority: certificate.fingerprint().to_string(),
        node: name,
        directory: config.identity.directory.clone().unwrap_or_default(),
    })
}

fn exists(authorities: &Authorities) -> ApiError {
    let fingerprint = authorities.signer().fingerprint();
    let message = format!("the cluster of this registry has a certificate authority already ({fingerprint})");
    ApiError::new(ApiErrorKind::Exists, message)
        .hint("`weir cluster invite` on one of its nodes makes a token, with which this host joins")
}

fn authority(store: &Store, now: u64) -> Result<Authority, ApiError> {
    match store.authority() {
        Ok(authority) => return Ok(authority),
        Err(StoreError::Missing { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    // A host of another cluster must not forget that one.
    if !matches!(store.node(), Err(StoreError::Missing { .. })) {
        let message = "this host has joined a cluster already, and that cluster's registry is another one";
        return Err(ApiError::new(ApiErrorKind::Exists, message)
            .hint("move the directory of keys (identity.directory) away, or set the right registry"));
    }
    let authority = Authority::create(ClusterId::random().map_err(failed)?, now).map_err(failed)?;
    store.create_authority(&authority)?;
    Ok(authority)
}

fn records(authority: &Authority, name: &Name, issued: &Issued) -> Transaction {
    let serial = RecordId::Issued(issued.record.facts.serial);
    let names = Names { nodes: [(name.folded(), issued.record.facts.key)].into() };
    let absent = |record| Compare { key: super::records::key(record), expect: Expect::Absent };
    Transaction {
        compares: [RecordId::Authorities, RecordId::Names, RecordId::Revocations, serial].map(absent).into(),
        ops: vec![
            put(RecordId::Authorities, Authorities::new(authority.certificate().clone())),
            put(RecordId::Names, names),
            put(RecordId::Revocations, Revocations::default()),
            put(serial, issued.record.clone()),
        ],
    }
}
