//! Operators' requests: invitations, certificates of clients, revocations, the list.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use weir_cluster::registry::{Registry, Transaction};
use weir_identity::{
    CaCertificate, Condition, Endpoint, Grant, Holder, Host, Identity, Invitation, IssuedRecord, JoinAnswer,
    MOST_ENDPOINTS, Name, RecordId, Revocations, Store, TokenId, TokenRecord, admit_client,
    invite as make_token, lasts,
};

use super::admission::{self, busy, refused};
use super::records::{Snapshot, put, unchanged, write};
use super::rotation;
use super::views::{
    CertificateView, ClusterView, Invite, Invited, NewClient, Revoke, Revoked, RevokedView, TokenView,
    Withdrawn, time,
};
use crate::control::change::read;
use crate::error::{ApiError, ApiErrorKind};

/// Decisions on one request, while other changes come first.
const ATTEMPTS: usize = 10;

/// Makes a token, unless `can_join` refuses. Its record is written before the token is returned.
///
/// # Errors
/// No node has an API over TLS, so nobody could answer a host that joins; the request is wrong.
pub async fn invite(
    registry: &dyn Registry,
    wanted: &Invite,
    can_join: impl Fn(&Snapshot) -> Result<(), ApiError>,
    now: u64,
) -> Result<Invited, ApiError> {
    for _ in 0..ATTEMPTS {
        let snapshot = Snapshot::read(registry).await?;
        can_join(&snapshot)?;
        let readmits = readmits(&snapshot, wanted)?;
        let invitation = Invitation {
            only_for: wanted.only_for.clone(),
            hosts: wanted.hosts.clone(),
            pins: snapshot.trusted().iter().map(CaCertificate::fingerprint).collect(),
            endpoints: endpoints(&snapshot)?,
            ttl: wanted.ttl_seconds,
            readmits,
        };
        let (token, record) = make_token(invitation, now)
            .map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))?;
        let authorities = snapshot.authorities.as_ref().map(|(_, revision)| *revision);
        // A rotation that goes on meanwhile must find the token, or the token must name its authority.
        let conditions = [
            Condition { record: RecordId::Authorities, revision: authorities },
            // A revocation meanwhile has to withdraw the token.
            Condition { record: RecordId::Revocations, revision: snapshot.revoked.1 },
            Condition { record: RecordId::Token(record.id), revision: None },
        ];
        let ops = vec![put(RecordId::Token(record.id), record)];
        let compares = conditions.into_iter().map(unchanged).collect();
        if write(registry, Transaction { compares, ops }).await? {
            let expires = time(now.saturating_add(wanted.ttl_seconds));
            return Ok(Invited { token: token.text().to_string(), id: token.id, expires });
        }
    }
    Err(busy())
}

/// Whether the token is to lift the revocation of its name once a host joins with it.
fn readmits(snapshot: &Snapshot, wanted: &Invite) -> Result<bool, ApiError> {
    let revoked = &snapshot.revoked.0;
    let is_revoked = wanted.only_for.as_ref().filter(|name| revoked.names_node(name));
    match (is_revoked, wanted.readmit, &wanted.only_for) {
        (Some(_), true, _) => Ok(true),
        (Some(name), false, _) => Err(refused(format!("node {name} is revoked"))
            .hint("--readmit lets a host with a new key join under that name")),
        (None, true, None) => {
            Err(ApiError::new(ApiErrorKind::Invalid, "--readmit needs the name: --for NAME"))
        }
        (None, true, Some(name)) => Err(refused(format!("node {name} is not revoked"))),
        (None, false, Some(name)) if snapshot.names.0.nodes.contains_key(&name.folded()) => {
            Err(refused(format!("node {name} is a member already")).hint(format!(
                "choose another name; if its host has lost its key, `weir cluster revoke {name}` and then `weir cluster invite \
                 --readmit --for {name}` let a host with a new key join under that name"
            )))
        }
        (None, false, _) => Ok(false),
    }
}

/// Where nodes answer; those with the authority's key first.
fn endpoints(snapshot: &Snapshot) -> Result<Vec<Endpoint>, ApiError> {
    let mut nodes: Vec<_> = snapshot.nodes.iter().filter_map(|one| Some((one, one.api?))).collect();
    nodes.retain(|(node, _)| !snapshot.revoked.0.names_node(&node.node));
    nodes.sort_by_key(|(node, _)| !snapshot.can_sign(node));
    let endpoint = |(_, api): (_, SocketAddr)| Endpoint { host: Host::Ip(api.ip()), port: api.port() };
    let found: Vec<_> = nodes.into_iter().map(endpoint).take(MOST_ENDPOINTS).collect();
    if found.is_empty() {
        return Err(refused("no node has an API over TLS, where a host could join")
            .hint("set api.listen in a node's configuration, and restart that node"));
    }
    Ok(found)
}

/// Issues the certificate of a client. `None`: this node does not have the authority's key.
///
/// # Errors
/// The request is not allowed.
pub async fn client(
    registry: &dyn Registry,
    store: &Store,
    wanted: &NewClient,
    now: u64,
) -> Result<Option<JoinAnswer>, ApiError> {
    let NewClient { name, csr, ttl_seconds, .. } = wanted;
    let grant = wanted.grant().map_err(|reason| ApiError::new(ApiErrorKind::Invalid, reason))?;
    let grant = for_disks(registry, grant).await?;
    for _ in 0..ATTEMPTS {
        let snapshot = Snapshot::read(registry).await?;
        let Some(authority) = admission::authority(store, &snapshot)? else { return Ok(None) };
        let who = (name, &grant);
        let admission = admit_client(&authority, snapshot.records(None), who, csr, (now, *ttl_seconds));
        let admission = admission.map_err(refused)?;
        let compares = admission.conditions.iter().map(|one| unchanged(*one)).collect();
        let issued = admission.issued;
        let ops = vec![put(RecordId::Issued(issued.facts.serial), issued)];
        if write(registry, Transaction { compares, ops }).await? {
            return Ok(Some(admission.answer));
        }
    }
    Err(busy())
}

/// The grant with the identities of its exports' disks: the certificate outlives none of them, though another disk may get the name.
async fn for_disks(registry: &dyn Registry, grant: Grant) -> Result<Grant, ApiError> {
    let Grant::Exports(names) = grant else { return Ok(grant) };
    let mut exports = BTreeSet::new();
    for export in names {
        let (_, disk) = read(registry, export.name()).await.map_err(|error| {
            ApiError::from(error)
                .hint("a certificate is for a disk that there is: `weir disk list` shows them")
        })?;
        exports.insert(export.of_disk(disk.id));
    }
    Ok(Grant::Exports(exports))
}

/// Revokes a node or a client.
///
/// # Errors
/// There is none of that name.
pub async fn revoke(registry: &dyn Registry, wanted: &Revoke, now: u64) -> Result<Revoked, ApiError> {
    let Revoke { name: given, client, reason, dry_run, lose_authority } = wanted;
    let (holder, kind) = if *client { (Holder::Client, "client") } else { (Holder::Node, "node") };
    for _ in 0..ATTEMPTS {
        let snapshot = Snapshot::read(registry).await?;
        snapshot.signer()?;
        let of_name = |one: &&IssuedRecord| match &one.facts.identity {
            Identity::Node(node) => !client && node.name.resembles(given.as_str()),
            Identity::Client(other) => *client && other.name.resembles(given.as_str()),
            Identity::Authority(_) => false,
        };
        // As the certificate spells it: other records do.
        let name =
            snapshot.issued.iter().find(of_name).and_then(|one| one.facts.identity.name()).unwrap_or(given);
        if holder == Holder::Node && !lose_authority {
            keeps_authority(&snapshot, name)?;
        }
        let certificates: Vec<_> = snapshot.issued.iter().filter(of_name).map(|one| &one.facts).collect();
        let tokens = || snapshot.tokens.values().map(|(token, _)| token);
        let (revoked, void): (Revocations, Vec<TokenRecord>) = match holder {
            Holder::Node => {
                snapshot.revoked.0.revoking_node(name, certificates.clone(), tokens(), reason, now)
            }
            Holder::Client => {
                (snapshot.revoked.0.with_name(holder, name, certificates.clone(), reason, now), Vec::new())
            }
        };
        if certificates.is_empty() && void.is_empty() {
            let message = format!("there is no certificate and no token of {kind} {name}");
            return Err(ApiError::new(ApiErrorKind::NotFound, message)
                .hint("`weir cluster list` shows those that there are"));
        }
        let voided = |one: &&TokenRecord| void.iter().any(|other| other.id == one.id);
        let open = tokens().filter(|one| one.is_open(now) && !voided(one) && one.only_for.is_none());
        let names = if *client { &snapshot.revoked.0.clients } else { &snapshot.revoked.0.nodes };
        let earlier = names.iter().find(|(other, _)| other.resembles(name.as_str()));
        let view = Revoked {
            kind: kind.into(),
            name: name.clone(),
            earlier: earlier.map(|(name, by)| RevokedView::of(kind, name, by)),
            certificates: certificates.len(),
            tokens: void.iter().map(|one| one.id).collect(),
            open_tokens: open.map(|one| one.id).collect(),
            owns: Vec::new(),
            copies: Vec::new(),
            done: !dry_run,
        };
        if *dry_run {
            return Ok(view);
        }
        let revision_of = |one: &TokenRecord| snapshot.tokens.get(&one.id).map(|(_, revision)| *revision);
        // A join or renewal meanwhile changes the names: its certificate has to be in the list.
        let mut conditions = vec![
            Condition { record: RecordId::Revocations, revision: snapshot.revoked.1 },
            Condition { record: RecordId::Names, revision: snapshot.names.1 },
        ];
        conditions.extend(
            void.iter().map(|one| Condition { record: RecordId::Token(one.id), revision: revision_of(one) }),
        );
        let mut ops = vec![put(RecordId::Revocations, revoked.pruned(now))];
        ops.extend(void.into_iter().map(|one| put(RecordId::Token(one.id), one)));
        let compares = conditions.into_iter().map(unchanged).collect();
        if write(registry, Transaction { compares, ops }).await? {
            return Ok(view);
        }
    }
    Err(busy())
}

/// Refuses to revoke the last node that has the authority's key.
fn keeps_authority(snapshot: &Snapshot, name: &Name) -> Result<(), ApiError> {
    let mut signers = snapshot.nodes.iter().filter(|one| snapshot.can_sign(one));
    match (signers.next(), signers.next()) {
        (Some(only), None) if only.node == *name => Err(refused(format!(
            "only node {name} has the key of the certificate authority: without it no host can join, and no certificate be renewed"
        ))
        .hint(
            "copy ca.pem from its identity.directory to that of another node, and restart that; or --lose-authority, if the \
             host is gone",
        )),
        _ => Ok(()),
    }
}

/// Withdraws a token, so that it admits nobody.
///
/// # Errors
/// There is none of that id; it was used, and its node stays until that is revoked.
pub async fn withdraw(registry: &dyn Registry, id: TokenId, now: u64) -> Result<Withdrawn, ApiError> {
    for _ in 0..ATTEMPTS {
        let snapshot = Snapshot::read(registry).await?;
        let Some((record, revision)) = snapshot.tokens.get(&id) else {
            let message = format!("there is no token {id}");
            return Err(ApiError::new(ApiErrorKind::NotFound, message)
                .hint("`weir cluster list` shows those that there are"));
        };
        if let Some(used) = &record.used {
            return Err(refused(format!("token {id} was used by node {}", used.name))
                .hint(format!("`weir cluster revoke {}` revokes that node", used.name)));
        }
        let done = Withdrawn { id, only_for: record.only_for.clone() };
        let Some(withdrawn) = record.withdrawn(now) else { return Ok(done) };
        let condition = Condition { record: RecordId::Token(id), revision: Some(*revision) };
        let ops = vec![put(RecordId::Token(id), withdrawn)];
        if write(registry, Transaction { compares: vec![unchanged(condition)], ops }).await? {
            return Ok(done);
        }
    }
    Err(busy())
}

/// The identities of the cluster.
///
/// # Errors
/// There is no authority; the registry does not answer.
pub async fn list(registry: &dyn Registry, now: u64) -> Result<ClusterView, ApiError> {
    let snapshot = Snapshot::read(registry).await?;
    let cluster = snapshot.signer()?.cluster().to_string();
    let mut certificates: Vec<_> = snapshot
        .issued
        .iter()
        .zip(&snapshot.made)
        .map(|(one, made)| (certificate(&snapshot, one, now), made))
        .collect();
    certificates.sort_by(|(one, made), (other, later)| {
        (&one.kind, &one.name, later).cmp(&(&other.kind, &other.name, made)).reverse().reverse()
    });
    let revoked = &snapshot.revoked.0;
    let names = [("node", &revoked.nodes), ("client", &revoked.clients)];
    let revoked =
        names.iter().flat_map(|(kind, names)| names.iter().map(|(name, by)| RevokedView::of(kind, name, by)));
    Ok(ClusterView {
        cluster,
        authorities: snapshot.trusted().iter().map(|one| one.fingerprint().to_string()).collect(),
        certificates: certificates.into_iter().map(|(view, _)| view).collect(),
        tokens: snapshot
            .tokens
            .values()
            .filter(|(one, _)| now < one.expires)
            .map(|(one, _)| token(one))
            .collect(),
        revoked: revoked.collect(),
        rotation: rotation::under_way(&snapshot, now),
    })
}

fn certificate(snapshot: &Snapshot, record: &IssuedRecord, now: u64) -> CertificateView {
    let facts = &record.facts;
    let (kind, grant) = match &facts.identity {
        Identity::Client(client) => ("client", client.grant.to_string()),
        _ => ("node", String::new()),
    };
    let revoked = &snapshot.revoked.0;
    let state = match revoked.covering(facts) {
        _ if now > facts.not_after => lasts(facts, now),
        Some(_) if revoked.is_replaced(facts) => "replaced".into(),
        Some(by) if by.reason.is_empty() => "revoked".into(),
        Some(by) => format!("revoked: {}", by.reason),
        None if !snapshot.trusted().iter().any(|one| one.fingerprint() == record.ca) => {
            "its authority was removed".into()
        }
        None => lasts(facts, now),
    };
    // The authority itself has no record of this kind.
    let name = facts.identity.name().cloned().unwrap_or_else(|| "authority".parse().expect("a name"));
    let signs = kind == "node" && snapshot.nodes.iter().any(|one| one.node == name && snapshot.can_sign(one));
    CertificateView {
        kind: kind.into(),
        name,
        grant,
        serial: facts.serial.to_string(),
        state,
        ends: time(facts.not_after),
        hosts: record.hosts.clone(),
        signs,
        authority: record.ca.to_string(),
    }
}

fn token(record: &TokenRecord) -> TokenView {
    let state = match (&record.void, &record.used) {
        (Some(_), _) => "withdrawn".into(),
        (None, Some(used)) => format!("used by {}", used.name),
        (None, None) => match &record.only_for {
            Some(name) if record.readmits => format!("open, readmits {name}"),
            _ => "open".into(),
        },
    };
    TokenView { id: record.id, only_for: record.only_for.clone(), state, expires: time(record.expires) }
}
