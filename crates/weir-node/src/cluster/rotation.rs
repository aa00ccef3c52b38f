//! The rotation of the cluster's authority: `weir cluster rotate`, and the node with the key, which takes the second step by itself.
//!
//! The record of [`Authorities`] has the phase, and each step is one change of it. A crash at any point leaves the former phase or
//! the next one; the key of the new authority is stored before anybody hears of it, and put in the former one's place once the
//! record says that it signs. The last step is an operator's: clients do not renew their certificates, and nobody but the operator
//! knows whether they have new ones.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use weir_cluster::records::keys;
use weir_cluster::registry::{Registry, Transaction};
use weir_identity::{
    Authorities, Authority, CaCertificate, Condition, Fingerprint, Identity, IssuedRecord, Name, NodeTrusts,
    Obstacle, RecordId, Store, StoreError, TokenRecord, Use,
};

use super::admission::{self, busy, refused};
use super::records::{Snapshot, put, unchanged, write};
use super::unix_seconds;
use super::views::{Rotate, RotationView, WaitView, time};
use crate::control::Node;
use crate::error::{ApiError, ApiErrorKind};
use crate::https::HTTPS;

/// Decisions on one request, while other changes come first.
const ATTEMPTS: usize = 10;

/// Pause between two looks at what holds the second step back: time alone can end it.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Longest wait for a change of the authorities before the files are looked at again.
const LOOK: Duration = Duration::from_secs(3600);

/// The records that decide on a step.
struct Seen {
    authorities: Authorities,
    members: Vec<NodeTrusts>,
    tokens: Vec<TokenRecord>,
}

impl Seen {
    fn of(snapshot: &Snapshot, now: u64) -> Option<Seen> {
        let (authorities, _) = snapshot.authorities.as_ref()?;
        Some(Seen {
            authorities: authorities.clone(),
            members: members(snapshot, now),
            tokens: snapshot.tokens.values().map(|(token, _)| token.clone()).collect(),
        })
    }

    fn obstacles(&self, of: &Authorities, snapshot: &Snapshot, now: u64) -> Vec<Obstacle> {
        let use_ = Use { issued: &snapshot.issued, tokens: &self.tokens, revoked: &snapshot.revoked.0 };
        of.obstacles(&self.members, use_, now)
    }
}

/// All nodes that can come back, with what they have announced: also one that is down, or has not started yet.
fn members(snapshot: &Snapshot, now: u64) -> Vec<NodeTrusts> {
    // One with a certificate of an authority that was removed has to join again.
    let trusted = |one: &IssuedRecord| snapshot.trusted().iter().any(|ca| ca.fingerprint() == one.ca);
    let counts = |one: &&IssuedRecord| {
        now <= one.facts.not_after && trusted(one) && snapshot.revoked.0.covering(&one.facts).is_none()
    };
    let name = |one: &IssuedRecord| match &one.facts.identity {
        Identity::Node(node) => Some(node.name.clone()),
        _ => None,
    };
    let mut names: Vec<Name> = snapshot.issued.iter().filter(counts).filter_map(name).collect();
    names.sort();
    names.dedup();
    let announced = |node: &Name| snapshot.nodes.iter().find(|one| one.node == *node);
    let trusts = |node: Name| {
        let authorities = announced(&node).map(|one| one.trusts.clone()).unwrap_or_default();
        NodeTrusts { node, authorities }
    };
    names.into_iter().map(trusts).collect()
}

/// The rotation that is under way, if any.
pub(super) fn under_way(snapshot: &Snapshot, now: u64) -> Option<RotationView> {
    let seen = Seen::of(snapshot, now)?;
    let waits = seen.obstacles(&seen.authorities, snapshot, now);
    Some(view(&seen.authorities, &waits, true)).filter(|view| view.phase != RotationView::SETTLED)
}

fn view(authorities: &Authorities, obstacles: &[Obstacle], done: bool) -> RotationView {
    let (phase, since) = match authorities {
        Authorities::Settled { .. } => (RotationView::SETTLED, None),
        Authorities::Introducing { since, .. } => (RotationView::INTRODUCING, Some(*since)),
        Authorities::Renewing { since, .. } => (RotationView::RENEWING, Some(*since)),
    };
    let mut fingerprints = authorities.trusted().into_iter().map(|one| one.fingerprint().to_string());
    RotationView {
        phase: phase.into(),
        authority: fingerprints.next().unwrap_or_default(),
        other: fingerprints.next(),
        since: since.map(time),
        waits_for: obstacles.iter().map(wait).collect(),
        trust_former: Vec::new(),
        done,
    }
}

fn wait(obstacle: &Obstacle) -> WaitView {
    let (kind, name, reason, ends) = match obstacle {
        Obstacle::Unaware(node) => {
            ("node", node.to_string(), "it does not trust the new authority yet", None)
        }
        Obstacle::Certificate { identity, until, .. } => {
            let kind = if matches!(identity, Identity::Client(_)) { "client" } else { "node" };
            let name = identity.name().map(ToString::to_string).unwrap_or_default();
            (kind, name, "it has a certificate of the former authority", Some(*until))
        }
        Obstacle::Token { id, until } => {
            ("token", id.to_string(), "it is unused, and names only the former authority", Some(*until))
        }
    };
    WaitView { kind: kind.into(), name, reason: reason.into(), ends: ends.map(time) }
}

/// Begins a rotation, goes on with it, ends it or takes it back. `turns`: one of all steps in this directory of keys is taken at a
/// time, because each changes the record and the files. `is_there`: whether the node of a name runs, or may run.
///
/// # Errors
/// This node does not have the key; the step is not the one that follows; someone still depends on the former authority.
pub async fn rotate(
    registry: &dyn Registry,
    (store, turns): (&Store, &Mutex<()>),
    wanted: Rotate,
    is_there: impl Fn(&str) -> bool,
    now: u64,
) -> Result<RotationView, ApiError> {
    let _turn = turns.lock().await;
    for _ in 0..ATTEMPTS {
        let snapshot = Snapshot::read(registry).await?;
        let signer = snapshot.signer()?.fingerprint();
        let Some(seen) = Seen::of(&snapshot, now) else { return Err(busy()) };
        if admission::key_of(store, signer)?.is_none() {
            return Err(no_key(&snapshot));
        }
        promote(store, signer)?;
        let step = step(store, &snapshot, &seen, wanted, &is_there, now)?;
        let Some(next) = step.next.filter(|_| !wanted.dry_run) else {
            return Ok(view(&seen.authorities, &step.waits, !wanted.dry_run));
        };
        if !write(registry, transaction(&snapshot, &next, step.withdrawn, now)).await? {
            continue;
        }
        if let (true, Authorities::Introducing { next, .. }) = (wanted.abandon, &seen.authorities) {
            store.forget_next_authority(next.certificate().fingerprint())?;
        }
        promote(store, next.signer().fingerprint())?;
        let trust_former = if wanted.finish { trust_former(&snapshot, signer, now) } else { Vec::new() };
        let snapshot = Snapshot::read(registry).await?;
        let Some(seen) = Seen::of(&snapshot, now) else { return Err(busy()) };
        let waits = seen.obstacles(&seen.authorities, &snapshot, now);
        return Ok(RotationView { trust_former, ..view(&seen.authorities, &waits, true) });
    }
    Err(busy())
}

/// The clients with certificates that `signer` has signed before the former authority was removed: their files name both, until
/// `weir cluster trust` takes the former one out of them.
fn trust_former(snapshot: &Snapshot, signer: Fingerprint, now: u64) -> Vec<String> {
    let counts = |one: &&IssuedRecord| {
        one.ca == signer
            && now <= one.facts.not_after
            && snapshot.revoked.0.covering(&one.facts).is_none()
            && matches!(one.facts.identity, Identity::Client(_))
    };
    let issued = snapshot.issued.iter().filter(counts);
    let mut names: Vec<String> =
        issued.filter_map(|one| Some(one.facts.identity.name()?.to_string())).collect();
    names.sort();
    names.dedup();
    names
}

/// What a request comes to.
struct Step {
    /// The next state; `None`: nothing is to be changed now.
    next: Option<Authorities>,
    /// Tokens that it withdraws.
    withdrawn: Vec<TokenRecord>,
    /// Who holds it back, or would.
    waits: Vec<Obstacle>,
}

fn step(
    store: &Store,
    snapshot: &Snapshot,
    seen: &Seen,
    wanted: Rotate,
    is_there: &impl Fn(&str) -> bool,
    now: u64,
) -> Result<Step, ApiError> {
    let Rotate { finish, abandon, force, dry_run, no_begin } = wanted;
    let wait = |waits| Step { next: None, withdrawn: Vec::new(), waits };
    let to = |next| Step { next: Some(next), withdrawn: Vec::new(), waits: Vec::new() };
    let waits = seen.obstacles(&seen.authorities, snapshot, now);
    match &seen.authorities {
        Authorities::Settled { .. } if finish || abandon || no_begin => {
            Err(refused("no rotation of the certificate authority is under way")
                .hint("`weir cluster rotate` begins one"))
        }
        Authorities::Settled { ca } => {
            let fresh = || Authority::create(ca.certificate().cluster(), now);
            let next = match store.next_authority() {
                Ok(next) => next,
                Err(StoreError::Missing { .. }) => {
                    let next = fresh().map_err(|error| failed(&error))?;
                    if !dry_run {
                        // Before anybody hears of it: it could never sign without its key.
                        store.create_next_authority(&next)?;
                    }
                    next
                }
                Err(error) => return Err(error.into()),
            };
            let next = seen.authorities.introduce(next.certificate().clone(), now).map_err(refused)?;
            // Those that run hear of it by themselves.
            let mut waits = seen.obstacles(&next, snapshot, now);
            waits.retain(|one| !matches!(one, Obstacle::Unaware(node) if is_there(node.as_str())));
            Ok(Step { waits, ..to(next) })
        }
        Authorities::Introducing { .. } if abandon => {
            let use_ = Use { issued: &snapshot.issued, tokens: &seen.tokens, revoked: &snapshot.revoked.0 };
            seen.authorities.abandon(use_, now).map(to).map_err(refused)
        }
        Authorities::Introducing { .. } if finish => Err(held_back(
            "the new certificate authority does not sign yet",
            &waits,
            "`weir cluster list` shows the progress; --abandon takes the rotation back",
        )),
        Authorities::Introducing { next, .. } => {
            has_next(store, next.certificate())?;
            if waits.is_empty() || force {
                return pass(seen, waits, is_there, now);
            }
            Ok(wait(waits))
        }
        Authorities::Renewing { .. } if abandon => {
            Err(refused("the new certificate authority signs already: the rotation cannot be taken back")
                .hint("--finish ends it; another rotation can follow"))
        }
        Authorities::Renewing { .. } if finish && !dry_run => match waits.is_empty() || force {
            true => pass(seen, waits, is_there, now),
            false => Err(held_back(
                "certificates of the former authority are in use",
                &waits,
                "wait for the nodes, or revoke those that will not come back; make new certificates for the clients (`weir cluster \
                 client`); --force does not wait for clients and for nodes that are down",
            )),
        },
        Authorities::Renewing { .. } => Ok(wait(waits)),
    }
}

/// The next step without those who hold it back: clients and nodes that are down. Tokens are withdrawn. A node that runs is never
/// left behind: the others would turn it away while it serves its disks.
fn pass(
    seen: &Seen,
    waits: Vec<Obstacle>,
    is_there: &impl Fn(&str) -> bool,
    now: u64,
) -> Result<Step, ApiError> {
    let node = |one: &Obstacle| match one {
        Obstacle::Unaware(node) => Some(node.to_string()),
        Obstacle::Certificate { identity: Identity::Node(node), .. } => Some(node.name.to_string()),
        _ => None,
    };
    let running: Vec<Obstacle> =
        waits.iter().filter(|one| node(one).is_some_and(|name| is_there(&name))).cloned().collect();
    if !running.is_empty() {
        return Err(held_back(
            "a node that runs is not left behind",
            &running,
            "it follows by itself; if it does not, its log says why, and `weir cluster revoke NAME` stops it",
        ));
    }
    let of = |one: &TokenRecord| {
        waits.iter().any(|wait| matches!(wait, Obstacle::Token { id, .. } if *id == one.id))
    };
    let withdrawn = seen.tokens.iter().filter(|one| of(one)).filter_map(|one| one.withdrawn(now)).collect();
    Ok(Step { next: seen.authorities.forced(now), withdrawn, waits: Vec::new() })
}

fn held_back(message: &str, waits: &[Obstacle], hint: &str) -> ApiError {
    const MOST: usize = 8;
    let named: Vec<String> = waits
        .iter()
        .take(MOST)
        .map(|one| {
            let WaitView { kind, name, reason, .. } = wait(one);
            format!("{kind} {name} ({reason})")
        })
        .collect();
    let more = waits.len().saturating_sub(MOST);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let who = if named.is_empty() { String::new() } else { format!(": {}{more}", named.join(", ")) };
    refused(format!("{message}{who}")).hint(hint)
}

/// The key of the authority that follows must be here: it was made on one node.
fn has_next(store: &Store, next: &CaCertificate) -> Result<(), ApiError> {
    if is_next_here(store, next)? {
        return Ok(());
    }
    let message = format!(
        "the key of the new certificate authority {} is not in {}",
        next.fingerprint(),
        store.directory().display()
    );
    Err(refused(message)
        .hint("run the command on the node where the rotation began; --abandon takes it back"))
}

fn is_next_here(store: &Store, next: &CaCertificate) -> Result<bool, StoreError> {
    match store.next_authority() {
        Ok(found) => Ok(found.certificate().fingerprint() == next.fingerprint()),
        Err(StoreError::Missing { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// This node cannot sign; says who can.
pub(crate) fn no_key(snapshot: &Snapshot) -> ApiError {
    let signers: Vec<_> = snapshot.nodes.iter().filter(|one| snapshot.can_sign(one)).collect();
    let error = refused("this node does not have the key of the certificate authority");
    let names: Vec<String> = signers.iter().map(|one| one.node.to_string()).collect();
    let error = match signers.iter().find_map(|one| Some((&one.node, one.api?))) {
        Some((node, api)) => error.elsewhere(node.to_string(), format!("{HTTPS}{api}")),
        None => error,
    };
    match names.is_empty() {
        true => {
            error.hint("no node has it: restore ca.pem in identity.directory of the first node from a backup")
        }
        false => error.hint(format!(
            "run the command on {}, or with --credentials DIR, to have it asked there",
            names.join(" or ")
        )),
    }
}

fn failed(error: &dyn std::fmt::Display) -> ApiError {
    ApiError::new(ApiErrorKind::Failed, error.to_string())
}

fn transaction(
    snapshot: &Snapshot,
    next: &Authorities,
    withdrawn: Vec<TokenRecord>,
    now: u64,
) -> Transaction {
    let token = |one: &TokenRecord| snapshot.tokens.get(&one.id).map(|(_, revision)| *revision);
    let mut conditions = vec![
        Condition {
            record: RecordId::Authorities,
            revision: snapshot.authorities.as_ref().map(|(_, revision)| *revision),
        },
        Condition { record: RecordId::Revocations, revision: snapshot.revoked.1 },
    ];
    conditions.extend(
        withdrawn.iter().map(|one| Condition { record: RecordId::Token(one.id), revision: token(one) }),
    );
    let mut ops = vec![put(RecordId::Authorities, next.clone())];
    if matches!(next, Authorities::Settled { .. }) {
        ops.push(put(RecordId::Revocations, snapshot.revoked.0.pruned(now)));
    }
    ops.extend(withdrawn.into_iter().map(|one| put(RecordId::Token(one.id), one)));
    Transaction { compares: conditions.into_iter().map(unchanged).collect(), ops }
}

/// Puts the new authority's key in the place of the former one, if the registry says that it signs.
fn promote(store: &Store, signer: Fingerprint) -> Result<(), StoreError> {
    match store.next_authority() {
        Ok(next) if next.certificate().fingerprint() == signer => store.promote_next_authority(signer),
        Ok(_) | Err(StoreError::Missing { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Takes the second step once every node trusts the new authority, on the node that has its key, until the node stops. Also ends
/// what a crash has interrupted.
pub async fn keep(node: Arc<Node>) {
    let Some(identity) = node.identity.clone() else { return };
    let mut told = String::new();
    loop {
        let advanced = advance(&*node.registry, identity.rotation(), unix_seconds()).await;
        let advanced = advanced.unwrap_or_else(|error| {
            let reason = error.to_string();
            if reason != told {
                tracing::warn!(reason, "the rotation of the certificate authority does not go on");
                told = reason;
            }
            Advanced::default()
        });
        if let Some(signer) = advanced.signs {
            let text = format!(
                "the new certificate authority {signer} signs from now on: every node trusts it, and renews its certificate"
            );
            node.journal.tell("rotation-renewing", &node.config.name, text);
        }
        match advanced.settled_at {
            Some(revision) => changed(&*node.registry, revision).await,
            None => weir_task::sleep(LOOK_AGAIN).await,
        }
    }
}

/// Waits until the record of authorities is another one than at `revision`.
async fn changed(registry: &dyn Registry, revision: u64) {
    let change = async {
        match registry.watch(keys::AUTHORITIES, revision).await {
            Ok(mut watch) => watch.next().await.is_ok(),
            Err(_) => false,
        }
    };
    if !weir_task::timeout(LOOK, change).await.unwrap_or(true) {
        weir_task::sleep(LOOK_AGAIN).await;
    }
}

/// What [`advance`] has found.
#[derive(Debug, Default)]
struct Advanced {
    /// The revision after which only a change of the record matters; `None`: time matters, too.
    settled_at: Option<u64>,
    /// The authority that signs from now on, because this node has taken the step.
    signs: Option<Fingerprint>,
}

/// Goes on with a rotation if this node can.
async fn advance(
    registry: &dyn Registry,
    (store, turns): (&Store, &Mutex<()>),
    now: u64,
) -> Result<Advanced, ApiError> {
    let _turn = turns.lock().await;
    let snapshot = Snapshot::read(registry).await?;
    let Some(seen) = Seen::of(&snapshot, now) else { return Ok(Advanced::default()) };
    promote(store, seen.authorities.signer().fingerprint())?;
    let settled = Advanced { settled_at: Some(snapshot.revision), signs: None };
    let Authorities::Introducing { next, .. } = &seen.authorities else { return Ok(settled) };
    // The node that has the key goes on. A key that cannot be read is no other node's.
    if !is_next_here(store, next.certificate())? {
        return Ok(settled);
    }
    let Ok(renewing) = seen.authorities.renew(&seen.members, &seen.tokens, now) else {
        return Ok(Advanced::default());
    };
    let signer = renewing.signer().fingerprint();
    if !write(registry, transaction(&snapshot, &renewing, Vec::new(), now)).await? {
        return Ok(Advanced::default());
    }
    promote(store, signer)?;
    Ok(Advanced { settled_at: None, signs: Some(signer) })
}

#[cfg(test)]
mod tests;
