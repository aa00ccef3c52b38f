//! The first node: makes the cluster's authority and its own certificate.

use weir_cluster::records::keys;
use weir_cluster::registry::{Registry, Transaction};
use weir_identity::{
    Authorities, Authority, ClusterId, Condition, Credentials, Host, Issued, NODE_LIFETIME, Name, Names,
    RecordId, Revocations, Store, StoreError,
};

use super::records::{Snapshot, Unusable, put, unchanged, write};
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

/// Makes the cluster's authority and the first node's certificate, at `now`. What an interrupted attempt has left is used.
///
/// `node.pem` comes last: a host that has it is a member, and nothing here touches it.
///
/// # Errors
/// This host is a member of a cluster; the cluster in the registry has an authority already, or has lost it; the registry, or the
/// directory of keys, cannot be used.
pub async fn init(
    config: &Config,
    registry: &dyn Registry,
    hosts: &[Host],
    now: u64,
    warn: impl Fn(&str),
) -> Result<Made, ApiError> {
    let (store, name) = own(config)?;
    refuse_member(&store)?;
    // This may be refused, and sets up no registry before it writes.
    let snapshot = Snapshot::read_existing(registry).await?;
    let authority = match &snapshot.authorities {
        Some((authorities, _)) if !is_interrupted(&store, &snapshot, &name)? => {
            return Err(exists(authorities));
        }
        // The registry's, as was just compared.
        Some(_) => store.authority()?,
        None if !snapshot.is_blank() => return Err(Unusable::AuthorityLost.into()),
        // The trust comes after the registry's records.
        None if !matches!(store.trust(), Err(StoreError::Missing { .. })) => {
            let directory = store.directory().display();
            let message = format!(
                "this host was a node of a cluster that is not in this registry: {directory}/trust.pem exists"
            );
            return Err(member(&store, message));
        }
        None => authority(&store, &config.registry.keys(), now)?,
    };
    // Stored before the registry names it: a repeated attempt has to be the same host's.
    let key = store.joining_key()?;
    let issued = authority.issue_node(&name, hosts, &key.public(), now, NODE_LIFETIME).map_err(failed)?;
    let credentials = Credentials::new(key, issued.chain.clone()).map_err(failed)?;
    if !write(registry, transaction(&snapshot, &authority, &name, &issued)).await? {
        let other = Snapshot::read(registry).await?.authorities;
        return Err(other.map_or_else(super::admission::busy, |(authorities, _)| exists(&authorities)));
    }
    let trusted = std::slice::from_ref(authority.certificate());
    let kept = store
        .replace_trust(trusted)
        .and_then(|()| store.replace_revocations(&snapshot.revoked.0))
        .and_then(|()| store.create_node(&credentials))
        .and_then(|()| store.forget_joining_key())
        .and_then(|()| store.forget_setup());
    kept.map_err(|error| {
        ApiError::from(error).hint(
            "the registry has the cluster already: once that is mended, run the same command again, and it goes on",
        )
    })?;
    if let Some(strangers) = without_identity(registry, &name).await {
        warn(&strangers);
    }
    let certificate = authority.certificate();
    Ok(Made {
        cluster: certificate.cluster().to_string(),
        authority: certificate.fingerprint().to_string(),
        node: name,
        directory: config.identity.directory.clone().unwrap_or_default(),
    })
}

/// Nodes that run in this registry: none of them has an identity of the cluster that has just been made.
async fn without_identity(registry: &dyn Registry, own: &Name) -> Option<String> {
    let listing = registry.list(keys::SESSIONS).await.ok()?;
    let names: Vec<&str> =
        listing.entries.iter().filter_map(|one| one.key.strip_prefix(keys::SESSIONS)).collect();
    let others: Vec<&str> = names.into_iter().filter(|name| *name != own.as_str()).collect();
    (!others.is_empty()).then(|| {
        format!(
            "these nodes run without an identity of this cluster: {}. Nodes with one cannot speak with them, and they are refused at \
             their next start: stop them, and have each of their hosts join",
            others.join(", ")
        )
    })
}

/// Refuses a host that is a node of a cluster already, whichever registry is configured.
fn refuse_member(store: &Store) -> Result<(), ApiError> {
    let directory = store.directory().display();
    let message = match store.node() {
        Err(StoreError::Missing { .. }) => return Ok(()),
        Ok(credentials) => {
            let identity = &credentials.facts().identity;
            let cluster = identity.cluster();
            format!("this host is {identity} of cluster {cluster} already: {directory}/node.pem exists")
        }
        Err(error) => {
            format!("this host is a node of a cluster already, and its key cannot be used: {error}")
        }
    };
    Err(member(store, message))
}

fn member(store: &Store, message: String) -> ApiError {
    ApiError::new(ApiErrorKind::Exists, message).hint(format!(
        "`weir cluster init` is for a host without a cluster, and has changed nothing. If the registry does not know this host's \
         cluster, set the right registry (registry.prefix, registry.etcd or registry.socket in the configuration), or restore the \
         registry from a backup. Only if that cluster is gone: move {} away, and repeat",
        store.directory().display()
    ))
}

/// Whether the registry's cluster is the one that an interrupted attempt on this host has made: no node of it has a certificate.
fn is_interrupted(store: &Store, snapshot: &Snapshot, name: &Name) -> Result<bool, ApiError> {
    let Some(key) = store.stored_joining_key()? else { return Ok(false) };
    let names = &snapshot.names.0.nodes;
    let is_ours = names.len() == 1 && names.get(&name.folded()) == Some(&key.public().id());
    Ok(is_ours && super::admission::authority(store, snapshot)?.is_some())
}

fn exists(authorities: &Authorities) -> ApiError {
    let fingerprint = authorities.signer().fingerprint();
    let message = format!("the cluster of this registry has a certificate authority already ({fingerprint})");
    ApiError::new(ApiErrorKind::Exists, message)
        .hint("`weir cluster invite` on one of its nodes makes a token, with which this host joins")
}

/// Two clusters must not have one authority: each would trust the other's nodes.
fn found(store: &Store, authority: &Authority) -> ApiError {
    let (cluster, directory) = (authority.certificate().cluster(), store.directory().display());
    let message = format!("{directory}/ca.pem is the authority of another cluster, {cluster}");
    ApiError::new(ApiErrorKind::Exists, message).hint(
        "if that cluster is gone, or this is a copy, move the file away, and repeat: each cluster has an authority of its own",
    )
}

/// The authority for the cluster of an empty registry: a new one, or that of an interrupted attempt for the same registry. What that
/// attempt has written to another registry is not known here.
fn authority(store: &Store, registry: &str, now: u64) -> Result<Authority, ApiError> {
    let noted = store.noted_setup()?;
    if let Some(other) = noted.as_ref().filter(|noted| *noted != registry) {
        return Err(elsewhere(store, other, registry));
    }
    match store.authority() {
        Ok(authority) if noted.is_some() => return Ok(authority),
        Ok(authority) => return Err(found(store, &authority)),
        Err(StoreError::Missing { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let authority = Authority::create(ClusterId::random().map_err(failed)?, now).map_err(failed)?;
    store.note_setup(registry)?;
    store.create_authority(&authority)?;
    Ok(authority)
}

/// Two registries must not name one authority: each would take the other's nodes for its own.
fn elsewhere(store: &Store, other: &str, registry: &str) -> ApiError {
    let directory = store.directory().display();
    let message = format!(
        "an interrupted `weir cluster init` on this host was for the registry at {other}, and the configuration names {registry}"
    );
    ApiError::new(ApiErrorKind::Exists, message).hint(format!(
        "set that registry again, and repeat: it goes on. Or, for a new cluster, move {directory} away, and repeat; what the attempt has \
         left under that other registry is then to be deleted there"
    ))
}

/// Writes the records of a cluster with one node, if there are none; of one that an interrupted attempt has made, only the
/// certificate.
fn transaction(snapshot: &Snapshot, authority: &Authority, name: &Name, issued: &Issued) -> Transaction {
    let serial = RecordId::Issued(issued.record.facts.serial);
    let authorities = snapshot.authorities.as_ref().map(|(_, revision)| *revision);
    let seen = [
        (RecordId::Authorities, authorities),
        (RecordId::Names, snapshot.names.1),
        (RecordId::Revocations, snapshot.revoked.1),
        (serial, None),
    ];
    let mut ops = vec![put(serial, issued.record.clone())];
    if authorities.is_none() {
        let names = Names { nodes: [(name.folded(), issued.record.facts.key)].into() };
        ops.push(put(RecordId::Authorities, Authorities::new(authority.certificate().clone())));
        ops.push(put(RecordId::Names, names));
        ops.push(put(RecordId::Revocations, Revocations::default()));
    }
    let compares = seen.map(|(record, revision)| unchanged(Condition { record, revision })).into();
    Transaction { compares, ops }
}

#[cfg(test)]
mod tests;
