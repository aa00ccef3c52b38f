//! The registry's records of identities.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use weir_cluster::records::{Record, RecordError, keys};
use weir_cluster::registry::{
    Compare, Entry, Expect, Op, Registry, RegistryError, RegistryErrorKind, Transaction,
};
use weir_identity::{
    Admission, Authorities, CaCertificate, Condition, Fingerprint, IssuedRecord, Name, Names, RecordId,
    Records, Revocations, Seen, TokenId, TokenRecord,
};

use crate::error::{ApiError, ApiErrorKind};

/// A record of `weir-identity`, as versioned JSON in the registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Stored<T>(pub T);

macro_rules! stored {
    ($($record:ty => $kind:literal),*) => {$(
        impl Record for Stored<$record> {
            const KIND: &'static str = $kind;
        }
    )*};
}

stored!(
    Authorities => "authorities",
    Revocations => "revocations",
    Names => "names",
    TokenRecord => "token",
    IssuedRecord => "certificate"
);

/// `identity/nodes/NAME`: what a node says about itself once it is durable there. Stays while the node is down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announced {
    /// The node.
    pub node: Name,
    /// The authorities that its handshakes trust.
    pub trusts: Vec<Fingerprint>,
    /// The address of its API over TLS, if it has one.
    pub api: Option<SocketAddr>,
    /// It has the key of the first of these authorities, which signs.
    pub signs: bool,
}

impl Record for Announced {
    const KIND: &'static str = "announced node";
}

/// The key of a node's [`Announced`].
#[must_use]
pub fn announced(name: &Name) -> String {
    format!("{}{name}", keys::ANNOUNCED)
}

/// The key of a record.
#[must_use]
pub fn key(record: RecordId) -> String {
    match record {
        RecordId::Authorities => keys::AUTHORITIES.into(),
        RecordId::Revocations => keys::REVOCATIONS.into(),
        RecordId::Names => keys::NAMES.into(),
        RecordId::Token(id) => format!("{}{id}", keys::TOKENS),
        RecordId::Issued(serial) => format!("{}{serial}", keys::ISSUED),
    }
}

/// The operation that puts a record.
#[must_use]
pub fn put<T>(record: RecordId, value: T) -> Op
where
    Stored<T>: Record,
{
    Stored(value).put(key(record))
}

/// The condition that a record has not changed since it was read.
#[must_use]
pub fn unchanged(condition: Condition) -> Compare {
    let expect = condition.revision.map_or(Expect::Absent, Expect::ModRevision);
    Compare { key: key(condition.record), expect }
}

/// The transaction of a decision to issue a certificate.
#[must_use]
pub fn transaction(admission: &Admission) -> Transaction {
    let Admission { conditions, token, names, issued, revoked, answer: _ } = admission;
    let mut ops =
        vec![put(RecordId::Names, names.clone()), put(RecordId::Issued(issued.facts.serial), issued.clone())];
    ops.extend(token.iter().map(|token| put(RecordId::Token(token.id), token.clone())));
    ops.extend(revoked.iter().map(|revoked| put(RecordId::Revocations, revoked.clone())));
    Transaction { compares: conditions.iter().map(|one| unchanged(*one)).collect(), ops }
}

/// Writes a decision on the records; false if another change came first: read again, and decide again.
///
/// # Errors
/// The registry does not take it.
pub async fn write(registry: &dyn Registry, transaction: Transaction) -> Result<bool, ApiError> {
    match registry.transact(transaction).await {
        Ok(_) => Ok(true),
        Err(RegistryError::Conflict { .. }) => Ok(false),
        Err(error) => Err(Unusable::from(error).into()),
    }
}

/// The code of [`Unusable::NoAuthority`].
pub const NO_AUTHORITY: &str = "no-authority";

/// Why the records cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// The registry.
    #[error("{0}")]
    Registry(#[from] RegistryError),
    /// A record.
    #[error("{key} in the registry: {}", damage(source))]
    Record {
        /// Its key.
        key: String,
        /// The reason.
        source: RecordError,
    },
    /// No cluster.
    #[error("the registry has no certificate authority of this cluster")]
    NoAuthority,
    /// A cluster of which the most important record is missing.
    #[error(
        "the registry has a cluster's identities, and not its certificate authority: the key {} is missing. Restore that key from a \
         backup of the registry; nothing can replace it",
        keys::AUTHORITIES
    )]
    AuthorityLost,
}

/// No identity's record can be deleted and made anew.
fn damage(error: &RecordError) -> String {
    match error {
        RecordError::Malformed { reason, .. } => {
            format!("it is damaged: {reason}; restore this key from a backup of the registry")
        }
        other => other.to_string(),
    }
}

impl From<Unusable> for ApiError {
    fn from(error: Unusable) -> ApiError {
        let kind = match &error {
            // An operator has to act: it does not pass by trying again.
            Unusable::Registry(error) if error.kind() == RegistryErrorKind::Operator => ApiErrorKind::Failed,
            Unusable::Registry(_) => ApiErrorKind::Unavailable,
            Unusable::Record { .. } | Unusable::AuthorityLost => ApiErrorKind::Failed,
            Unusable::NoAuthority => ApiErrorKind::Refused,
        };
        let answer = ApiError::new(kind, error.to_string());
        match error {
            Unusable::NoAuthority => {
                answer.code(NO_AUTHORITY).hint("`weir cluster init` on the cluster's first host makes one")
            }
            _ => answer,
        }
    }
}

/// All records at one revision of the registry.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The authorities, and the revision of their record; `None` before `weir cluster init`.
    pub authorities: Option<(Authorities, u64)>,
    /// What is revoked.
    pub revoked: (Revocations, Option<u64>),
    /// The nodes' names.
    pub names: (Names, Option<u64>),
    /// The tokens, by id.
    pub tokens: BTreeMap<TokenId, (TokenRecord, u64)>,
    /// The certificates.
    pub issued: Vec<IssuedRecord>,
    /// The revision of each of `issued`.
    pub made: Vec<u64>,
    /// The nodes.
    pub nodes: Vec<Announced>,
    /// The revision of all this.
    pub revision: u64,
    trusted: Vec<CaCertificate>,
}

impl Snapshot {
    /// Reads all records.
    ///
    /// # Errors
    /// [`Unusable`].
    pub async fn read(registry: &dyn Registry) -> Result<Snapshot, Unusable> {
        let listing = registry.list(keys::IDENTITY).await?;
        let mut snapshot = Snapshot { revision: listing.revision, ..Snapshot::default() };
        for entry in &listing.entries {
            snapshot.take(entry)?;
        }
        let trusted = snapshot.authorities.as_ref().map(|(authorities, _)| authorities.trusted());
        snapshot.trusted = trusted.unwrap_or_default();
        Ok(snapshot)
    }

    /// As [`Snapshot::read`], and blank where no registry has been set up: the question sets none up.
    ///
    /// # Errors
    /// [`Unusable`].
    pub async fn read_existing(registry: &dyn Registry) -> Result<Snapshot, Unusable> {
        match registry.is_set_up().await? {
            true => Snapshot::read(registry).await,
            false => Ok(Snapshot::default()),
        }
    }

    fn take(&mut self, entry: &Entry) -> Result<(), Unusable> {
        let revision = entry.mod_revision;
        match &*entry.key {
            keys::AUTHORITIES => self.authorities = Some((of(entry)?, revision)),
            keys::REVOCATIONS => self.revoked = (of(entry)?, Some(revision)),
            keys::NAMES => self.names = (of(entry)?, Some(revision)),
            key if key.starts_with(keys::TOKENS) => {
                let token: TokenRecord = of(entry)?;
                self.tokens.insert(token.id, (token, revision));
            }
            key if key.starts_with(keys::ISSUED) => {
                self.issued.push(of(entry)?);
                self.made.push(revision);
            }
            key if key.starts_with(keys::ANNOUNCED) => {
                // Each node writes its own: an unreadable one, or one in another's name, must not stop revocations.
                match Announced::of(entry) {
                    Ok(node) if announced(&node.node) == key => self.nodes.push(node),
                    Ok(node) => {
                        tracing::warn!(key, node = %node.node, "a record in another node's name is left out")
                    }
                    Err(error) => tracing::warn!(key, %error, "an unreadable record is left out"),
                }
            }
            // Of a later version.
            _ => {}
        }
        Ok(())
    }

    /// The authorities that are trusted, the one that signs first; none before `weir cluster init`.
    #[must_use]
    pub fn trusted(&self) -> &[CaCertificate] {
        &self.trusted
    }

    /// The authority that signs.
    ///
    /// # Errors
    /// [`Unusable::NoAuthority`] or [`Unusable::AuthorityLost`].
    pub fn signer(&self) -> Result<&CaCertificate, Unusable> {
        let none = || if self.is_blank() { Unusable::NoAuthority } else { Unusable::AuthorityLost };
        self.trusted.first().ok_or_else(none)
    }

    /// Whether the registry has no record of identities at all: `weir cluster init` was never run on it.
    #[must_use]
    pub fn is_blank(&self) -> bool {
        let has_none = self.tokens.is_empty() && self.issued.is_empty() && self.nodes.is_empty();
        has_none && self.authorities.is_none() && self.names.1.is_none() && self.revoked.1.is_none()
    }

    /// Whether a node has said that it has the key of the authority that signs now, and may use it. A node that was down during a
    /// rotation has said it of the former one.
    #[must_use]
    pub fn can_sign(&self, node: &Announced) -> bool {
        let signer = self.trusted.first().map(CaCertificate::fingerprint);
        self.is_signer(node) && node.trusts.first().copied() == signer
    }

    /// Whether a node may be able to sign: during a rotation, one that has the new authority's key has not said so yet.
    #[must_use]
    pub fn may_sign(&self, node: &Announced) -> bool {
        let known = |one: &CaCertificate| node.trusts.contains(&one.fingerprint());
        self.is_signer(node) && self.trusted.iter().any(known)
    }

    fn is_signer(&self, node: &Announced) -> bool {
        node.signs && !self.revoked.0.names_node(&node.node)
    }

    /// The records on which a certificate is decided.
    #[must_use]
    pub fn records(&self, token: Option<TokenId>) -> Records<'_> {
        let token = token.and_then(|id| self.tokens.get(&id));
        Records {
            token: token.map(|(record, revision)| Seen { record, revision: Some(*revision) }),
            issued: &self.issued,
            names: Seen { record: &self.names.0, revision: self.names.1 },
            revoked: Seen { record: &self.revoked.0, revision: self.revoked.1 },
            authorities: Seen {
                record: &self.trusted,
                revision: self.authorities.as_ref().map(|(_, revision)| *revision),
            },
        }
    }
}

fn of<T>(entry: &Entry) -> Result<T, Unusable>
where
    T: DeserializeOwned + Serialize,
    Stored<T>: Record,
{
    Stored::of(entry).map(|Stored(record)| record).map_err(bad(entry))
}

fn bad(entry: &Entry) -> impl FnOnce(RecordError) -> Unusable {
    let key = entry.key.clone();
    move |source| Unusable::Record { key, source }
}
