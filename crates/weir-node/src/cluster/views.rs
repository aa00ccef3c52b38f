//! Requests and answers about the cluster's identities.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use weir_identity::{ExportName, Grant, Host, MOST_EXPORTS, Name, Revocation, Role, TokenId};

use crate::timestamps::rfc3339;

/// A time in seconds since 1970, as RFC 3339 in UTC.
pub(super) fn time(seconds: u64) -> String {
    rfc3339(seconds.saturating_mul(1000))
}

/// A new cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.cluster-made/1")]
pub struct Made {
    /// The cluster's id.
    pub cluster: String,
    /// The fingerprint of its certificate authority (SHA-256).
    pub authority: String,
    /// Its first node.
    pub node: Name,
    /// The directory with the keys of both.
    pub directory: PathBuf,
}

/// Asks for a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Invite {
    /// The only name that may join with it.
    pub only_for: Option<Name>,
    /// Names and addresses that the node's certificate may have beside its name.
    #[serde(default)]
    pub hosts: Vec<Host>,
    /// Validity in seconds.
    pub ttl_seconds: u64,
    /// Lets a revoked name join again.
    #[serde(default)]
    pub readmit: bool,
}

/// A token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.cluster-invitation/1")]
pub struct Invited {
    /// The token; secret.
    pub token: String,
    /// Its id, which `weir cluster list` shows.
    pub id: TokenId,
    /// When it ends: RFC 3339, UTC.
    pub expires: String,
}

/// A host that has become a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.cluster-joined/1")]
pub struct Joined {
    /// The cluster's id.
    pub cluster: String,
    /// The node.
    pub node: Name,
    /// The directory with its key.
    pub directory: PathBuf,
    /// When its certificate ends, unless it is renewed: RFC 3339, UTC.
    pub certificate_ends: String,
}

/// The identities of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.cluster/1")]
pub struct ClusterView {
    /// The cluster's id.
    pub cluster: String,
    /// The fingerprints of the trusted authorities (SHA-256), the one that signs first.
    pub authorities: Vec<String>,
    /// Certificates of nodes and clients, by name, the newest first.
    pub certificates: Vec<CertificateView>,
    /// Tokens that have not expired.
    pub tokens: Vec<TokenView>,
    /// Revoked names.
    pub revoked: Vec<RevokedView>,
    /// The rotation of the authority that is under way.
    #[serde(default)]
    pub rotation: Option<RotationView>,
}

/// Rotates the cluster's authority: begins, or goes on with what is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rotate {
    /// Remove the former authority.
    #[serde(default)]
    pub finish: bool,
    /// Forget the new authority, which signs nothing yet.
    #[serde(default)]
    pub abandon: bool,
    /// Wait neither for nodes that are down nor for clients, and withdraw tokens that hold the step back.
    #[serde(default)]
    pub force: bool,
    /// Only say what would be waited for.
    #[serde(default)]
    pub dry_run: bool,
    /// Go on with the rotation that is under way; begin none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_begin: bool,
}

/// The rotation of the cluster's authority.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.cluster-rotation/1")]
pub struct RotationView {
    /// `settled`: one authority; `introducing`: the nodes hear of a new one, which signs nothing yet; `renewing`: the new one signs,
    /// and certificates of the former one still count.
    pub phase: String,
    /// The fingerprint of the authority that signs (SHA-256).
    pub authority: String,
    /// That of the one that follows, or of the former one.
    pub other: Option<String>,
    /// Since when: RFC 3339, UTC.
    pub since: Option<String>,
    /// Who holds back the next step.
    pub waits_for: Vec<WaitView>,
    /// After the former authority was removed: the clients whose files, made during the rotation, trust it until
    /// `weir cluster trust` removes it from them.
    #[serde(default)]
    pub trust_former: Vec<String>,
    /// False for a dry run.
    pub done: bool,
}

impl RotationView {
    /// A cluster with this authority alone.
    #[must_use]
    pub fn settled(authority: String) -> RotationView {
        RotationView {
            phase: RotationView::SETTLED.into(),
            authority,
            other: None,
            since: None,
            waits_for: Vec::new(),
            trust_former: Vec::new(),
            done: true,
        }
    }

    /// The phase of a cluster with one authority.
    pub const SETTLED: &str = "settled";
    /// The phase in which the new authority signs nothing yet.
    pub const INTRODUCING: &str = "introducing";
    /// The phase in which the new authority signs, and the former one is still trusted.
    pub const RENEWING: &str = "renewing";
}

/// Who holds back the next step of a rotation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitView {
    /// `node`, `client` or `token`.
    pub kind: String,
    /// The name, or the token's id.
    pub name: String,
    /// Why.
    pub reason: String,
    /// When that ends by itself: RFC 3339, UTC.
    pub ends: Option<String>,
}

/// A certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateView {
    /// `node` or `client`.
    pub kind: String,
    /// Its name.
    pub name: Name,
    /// A client's role, or the exports that it may open; empty for a node.
    pub grant: String,
    /// The serial number.
    pub serial: String,
    /// `valid for 3 d 2 h`, `renewal due, …`, `ended …`, `replaced`, `revoked: …`, `its authority was removed`.
    pub state: String,
    /// When it ends: RFC 3339, UTC.
    pub ends: String,
    /// A node's names and addresses beside its name.
    pub hosts: Vec<Host>,
    /// The node has the key of the authority that signs.
    pub signs: bool,
    /// The fingerprint of the authority that has signed it.
    #[serde(default)]
    pub authority: String,
}

/// A token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenView {
    /// Its id.
    pub id: TokenId,
    /// The only name that may join with it.
    pub only_for: Option<Name>,
    /// `open`, `open, readmits NAME`, `used by NAME`, `withdrawn`.
    pub state: String,
    /// When it ends: RFC 3339, UTC.
    pub expires: String,
}

/// A revoked name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevokedView {
    /// `node` or `client`.
    pub kind: String,
    /// The name.
    pub name: Name,
    /// When: RFC 3339, UTC.
    pub at: String,
    /// Why.
    pub reason: String,
}

impl RevokedView {
    /// The revocation `by` of a `name` of this kind.
    #[must_use]
    pub fn of(kind: &str, name: &Name, by: &Revocation) -> RevokedView {
        RevokedView { kind: kind.into(), name: name.clone(), at: time(by.at), reason: by.reason.clone() }
    }
}

/// Withdraws a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Withdraw {
    /// Its id.
    pub token: TokenId,
}

/// A token that admits nobody any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.cluster-withdrawn/1")]
pub struct Withdrawn {
    /// Its id.
    pub id: TokenId,
    /// The only name that could have joined with it.
    pub only_for: Option<Name>,
}

/// Revokes a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Revoke {
    /// The node's name, or the client's.
    pub name: Name,
    /// It is a client's.
    #[serde(default)]
    pub client: bool,
    /// Why, for people.
    #[serde(default)]
    pub reason: String,
    /// Only say what would be revoked.
    #[serde(default)]
    pub dry_run: bool,
    /// Also the last node that has the authority's key.
    #[serde(default)]
    pub lose_authority: bool,
}

/// What was revoked, or would be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.cluster-revoked/1")]
pub struct Revoked {
    /// `node` or `client`.
    pub kind: String,
    /// The name.
    pub name: Name,
    /// Its earlier revocation, which stays.
    pub earlier: Option<RevokedView>,
    /// Certificates that count no more.
    pub certificates: usize,
    /// Tokens that admit nobody any more.
    pub tokens: Vec<TokenId>,
    /// Open tokens for any name: whoever has one can still join.
    pub open_tokens: Vec<TokenId>,
    /// Disks that the node owns, as this one knows: it destages and closes them before it stops.
    pub owns: Vec<String>,
    /// Disks of whose logs it keeps copies: their owners replace it.
    pub copies: Vec<String>,
    /// False for a dry run.
    pub done: bool,
}

/// Asks for the certificate of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewClient {
    /// The client's name.
    pub name: Name,
    /// What it may do at the API; absent for a client of exports.
    #[serde(default)]
    pub role: Option<Role>,
    /// The exports that it may see and open; empty for a client of the API.
    #[serde(default)]
    pub exports: BTreeSet<ExportName>,
    /// Its request for a certificate (PKCS #10), in base64 of its DER form.
    pub csr: String,
    /// Validity in seconds.
    pub ttl_seconds: u64,
}

impl NewClient {
    /// What it may do.
    ///
    /// # Errors
    /// It is for the API and for exports, for neither, or for too many exports.
    pub fn grant(&self) -> Result<Grant, String> {
        match self.role {
            Some(role) if self.exports.is_empty() => Ok(Grant::Role(role)),
            None if (1..=MOST_EXPORTS).contains(&self.exports.len()) => {
                Ok(Grant::Exports(self.exports.clone()))
            }
            Some(_) => Err("a client's certificate is for the API or for exports, not for both".into()),
            None => Err(format!("a client has a role, or 1 to {MOST_EXPORTS} exports")),
        }
    }
}

/// The files of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.cluster-client/1")]
pub struct ClientMade {
    /// The client's name.
    pub name: Name,
    /// What it may do at the API; absent for a client of exports.
    pub role: Option<Role>,
    /// The exports that it may see and open.
    pub exports: BTreeSet<ExportName>,
    /// The directory with its key and certificates.
    pub directory: PathBuf,
    /// When its certificate ends: RFC 3339, UTC.
    pub certificate_ends: String,
}

/// The authorities that a client's files name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "schema", rename = "weir.cluster-trust/1")]
pub struct ClientTrust {
    /// The directory with the files.
    pub directory: PathBuf,
    /// The fingerprints of the authorities that they name now (SHA-256).
    pub authorities: Vec<String>,
    /// Those that were removed from them.
    pub removed: Vec<String>,
}
