//! Operations on the cluster's identities.

use std::sync::Arc;

use weir_identity::{JoinAnswer, JoinRequest, OtherEnd, RenewRequest};

use super::{Answer, Operations};
use crate::api::NodeView;
use crate::api::{ApiError, ApiErrorKind};
use crate::cluster::joining::JOIN;
use crate::cluster::records::{NO_AUTHORITY, Snapshot};
use crate::cluster::views::{
    ClusterView, Invite, Invited, NewClient, Revoke, Revoked, Rotate, RotationView, Withdraw, Withdrawn,
};
use crate::cluster::{admission, changes, rotation, signers, unix_seconds as now};
use crate::identity::NodeIdentity;

impl Operations {
    fn identity(&self) -> Answer<&Arc<NodeIdentity>> {
        self.node.identity.as_ref().ok_or_else(|| {
            ApiError::new(ApiErrorKind::Refused, "this node has no identity")
                .hint("set identity.directory, and see `weir cluster init` and `weir cluster join`")
        })
    }

    /// The identities of the cluster.
    ///
    /// # Errors
    /// There is no authority; the registry does not answer.
    pub async fn cluster(&self) -> Answer<ClusterView> {
        changes::list(&*self.node.registry, now()).await.map_err(|error| self.of_member(error))
    }

    /// A node with an identity has a cluster: another one is no remedy where the registry knows none.
    fn of_member(&self, error: ApiError) -> ApiError {
        match &self.node.identity {
            Some(identity) if error.code == NO_AUTHORITY => error.hint(identity.no_cluster()),
            _ => error,
        }
    }

    /// Makes a token.
    ///
    /// # Errors
    /// As [`Operations::cluster`]; the request is wrong, or nobody could answer a host that joins.
    pub async fn invite(&self, wanted: Invite) -> Answer<Invited> {
        let nodes = self.nodes();
        let is_there = |name: &str| nodes.iter().any(|one| one.name == name && one.is_there());
        let can_join =
            |snapshot: &Snapshot| signers::check(self.node.identity.as_deref(), snapshot, is_there);
        let invited = changes::invite(&*self.node.registry, &wanted, can_join, now()).await;
        let invited = invited.map_err(|error| self.of_member(error))?;
        let whom = wanted.only_for.map_or_else(|| "any name".to_owned(), |name| format!("node {name}"));
        let text = format!("token {} for {whom}, until {}", invited.id, invited.expires);
        self.node.journal.tell("invited", &invited.id.to_string(), text);
        Ok(invited)
    }

    /// Revokes a node or a client.
    ///
    /// # Errors
    /// As [`Operations::cluster`]; there is none of that name.
    pub async fn revoke(&self, wanted: Revoke) -> Answer<Revoked> {
        let mut revoked = changes::revoke(&*self.node.registry, &wanted, now()).await?;
        if !wanted.client {
            (revoked.owns, revoked.copies) = self.parts_of(revoked.name.as_str());
        }
        if revoked.done {
            let text = format!("{} {} was revoked: {}", revoked.kind, revoked.name, wanted.reason);
            self.node.journal.tell("revoked", revoked.name.as_str(), text);
        }
        Ok(revoked)
    }

    /// The disks that a node owns, and those of whose logs it keeps copies.
    fn parts_of(&self, node: &str) -> (Vec<String>, Vec<String>) {
        let (mut owns, mut copies) = (Vec::new(), Vec::new());
        self.node.records.for_each_disk(|disk| {
            if disk.owner.as_ref().is_some_and(|owner| owner.node == node) {
                owns.push(disk.name.clone());
            } else if disk.replicas.iter().any(|replica| replica.node == node) {
                copies.push(disk.name.clone());
            }
        });
        (owns, copies)
    }

    /// Withdraws a token.
    ///
    /// # Errors
    /// As [`Operations::cluster`]; there is none, or it was used.
    pub async fn withdraw(&self, wanted: Withdraw) -> Answer<Withdrawn> {
        let withdrawn = changes::withdraw(&*self.node.registry, wanted.token, now()).await?;
        let text = format!("token {} admits nobody any more", withdrawn.id);
        self.node.journal.tell("withdrawn", &withdrawn.id.to_string(), text);
        Ok(withdrawn)
    }

    /// Issues the certificate of a client.
    ///
    /// # Errors
    /// This node does not have the authority's key: another node's word is not enough to make an administrator.
    pub async fn new_client(&self, wanted: NewClient) -> Answer<JoinAnswer> {
        let store = self.identity()?.store();
        let answer = changes::client(&*self.node.registry, store, &wanted, now()).await?;
        let Some(answer) = answer else {
            return Err(rotation::no_key(&Snapshot::read(&*self.node.registry).await?));
        };
        let purpose = match wanted.role {
            Some(role) => format!("as {role}"),
            None => {
                let exports: Vec<String> = wanted.exports.iter().map(ToString::to_string).collect();
                format!("for exports: {}", exports.join(", "))
            }
        };
        let text = format!("client {} got a certificate {purpose}", wanted.name);
        self.node.journal.tell("client-admitted", wanted.name.as_str(), text);
        Ok(answer)
    }

    /// Begins a rotation of the cluster's authority, goes on with it, ends it or takes it back.
    ///
    /// # Errors
    /// As [`Operations::cluster`]; this node does not have the key; someone still depends on the former authority.
    pub async fn rotate(&self, wanted: Rotate) -> Answer<RotationView> {
        let keys = self.identity()?.rotation();
        let before = changes::list(&*self.node.registry, now()).await?.rotation;
        let nodes = self.nodes();
        // One that is isolated may serve its disks without the registry.
        let runs = |one: &NodeView| !one.peer_address.is_empty() || one.state == NodeView::ISOLATED;
        let is_there = |name: &str| nodes.iter().any(|one| one.name == name && runs(one));
        let view = rotation::rotate(&*self.node.registry, keys, wanted, is_there, now()).await?;
        let phase_before = before.as_ref().map_or(RotationView::SETTLED, |it| &*it.phase);
        if view.done && view.phase != phase_before {
            let authority = &view.authority;
            let by_force = if wanted.force { ", by force" } else { "" };
            let other = view.other.as_deref().unwrap_or_default();
            let (kind, text) = match (&*view.phase, wanted.abandon) {
                (RotationView::INTRODUCING, _) => (
                    "rotation-begun",
                    format!("a new certificate authority {other} is to follow {authority}"),
                ),
                (RotationView::RENEWING, _) => (
                    "rotation-renewing",
                    format!("the new certificate authority {authority} signs from now on{by_force}"),
                ),
                (_, true) => ("rotation-abandoned", format!("certificate authority {authority} stays")),
                (_, false) => {
                    let former = before.and_then(|it| it.other).unwrap_or_default();
                    let text = format!(
                        "{authority} is the only certificate authority; {former} was removed{by_force}"
                    );
                    ("rotation-finished", text)
                }
            };
            self.node.journal.tell(kind, &self.me().node, text);
        }
        Ok(view)
    }

    /// Answers a host that joins, or has a node with the authority's key answer it.
    ///
    /// # Errors
    /// It does not join, for the reason in the error; no node with the key answers.
    pub async fn join(&self, body: &[u8]) -> Answer<JoinAnswer> {
        let request = JoinRequest::decode(body)
            .map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))?;
        let store = self.identity()?.store();
        match admission::join(&*self.node.registry, store, &request, now()).await? {
            Some(answer) => {
                let text = format!("host {} got a certificate with token {}", request.name, request.token);
                self.node.journal.tell("admitted", request.name.as_str(), text);
                Ok(answer)
            }
            None => self.to_signer(JOIN, body).await,
        }
    }

    /// Renews the certificate of a node, which has `presented` it.
    ///
    /// # Errors
    /// As [`Operations::join`].
    pub async fn renew(&self, presented: &OtherEnd, body: &[u8]) -> Answer<JoinAnswer> {
        let request = RenewRequest::decode(body)
            .map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))?;
        let store = self.identity()?.store();
        let answer =
            admission::renewal(&*self.node.registry, store, presented, &request, false, now()).await?;
        answer.ok_or_else(|| {
            ApiError::new(
                ApiErrorKind::Unavailable,
                "this node does not have the key of the certificate authority",
            )
        })
    }

    /// Has a node with the authority's key answer.
    async fn to_signer(&self, path: &str, body: &[u8]) -> Answer<JoinAnswer> {
        if self.forwarded > 0 {
            return Err(ApiError::new(
                ApiErrorKind::Unavailable,
                "the request was forwarded to a node without the authority's key",
            ));
        }
        let snapshot = Snapshot::read(&*self.node.registry).await?;
        signers::ask(self.identity()?, &snapshot, path, body, self.forwarded + 1).await
    }
}
