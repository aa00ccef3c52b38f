//! Replacing a cluster's certificate authority without an outage: in three steps, each of which waits until the one before it has
//! reached everyone. Pure: the registry holds the state, and each step replaces it unless it has changed meanwhile.
//!
//! ```text
//! settled ──introduce──► introducing ──renew──► renewing ──retire──► settled
//!    ▲                       │        all nodes trust both   nothing of the old one
//!    └───────abandon─────────┘                               is in use
//! ```

use serde::{Deserialize, Serialize};

use crate::authority::IssuedRecord;
use crate::certificate::{CaCertificate, NotACertificate};
use crate::credentials::Credentials;
use crate::identity::Identity;
use crate::invitation::TokenRecord;
use crate::name::{Fingerprint, Name, Serial, TokenId};
use crate::revocation::Revocations;
use crate::when::{self, MOST_SKEW};

/// Most reasons that one refusal names.
const MOST_NAMED: usize = 8;

/// An authority's certificate in the registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct StoredCa(CaCertificate);

impl StoredCa {
    /// The certificate.
    #[must_use]
    pub fn certificate(&self) -> &CaCertificate {
        &self.0
    }
}

impl TryFrom<String> for StoredCa {
    type Error = NotACertificate;
    fn try_from(pem: String) -> Result<StoredCa, NotACertificate> {
        let mut all = CaCertificate::all_from_pem(pem.as_bytes())?;
        match (all.pop(), all.is_empty()) {
            (Some(one), true) => Ok(StoredCa(one)),
            _ => Err(NotACertificate::Encoding("one certificate was expected".into())),
        }
    }
}

impl From<StoredCa> for String {
    fn from(ca: StoredCa) -> String {
        ca.0.pem()
    }
}

/// The authorities of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
pub enum Authorities {
    /// One authority.
    Settled {
        /// It signs, and is trusted.
        ca: StoredCa,
    },
    /// A second one is made known. It signs nothing yet: a node that has not heard of it would refuse the certificate.
    Introducing {
        /// It signs, and is trusted.
        ca: StoredCa,
        /// It is trusted.
        next: StoredCa,
        /// Since when, in seconds since 1970.
        since: u64,
    },
    /// The new one signs; every node renews its certificate.
    Renewing {
        /// It signs, and is trusted.
        ca: StoredCa,
        /// It is trusted.
        former: StoredCa,
        /// Since when, in seconds since 1970.
        since: u64,
    },
}

/// The authorities that a node reports to trust.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTrusts {
    /// The node.
    pub node: Name,
    /// The authorities that its handshakes use.
    pub authorities: Vec<Fingerprint>,
}

/// Who holds back the next step of a rotation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// A node that has not said that it trusts the new authority.
    Unaware(Name),
    /// A certificate that the authority to be removed has signed, and that counts.
    Certificate {
        /// Whose it is.
        identity: Identity,
        /// Its serial number.
        serial: Serial,
        /// Last second of its validity, since 1970.
        until: u64,
    },
    /// An unused token: the host that has it would believe no certificate of the new authority.
    Token {
        /// The token.
        id: TokenId,
        /// First second at which it is no longer valid, since 1970.
        until: u64,
    },
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Obstacle::Unaware(node) => write!(f, "node {node}"),
            Obstacle::Certificate { identity, serial, .. } => write!(f, "{identity} (serial {serial})"),
            Obstacle::Token { id, .. } => write!(f, "the unused token {id}"),
        }
    }
}

/// The reason why a step is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RotationRefused {
    /// Not the step that follows.
    #[error("the certificate authority is {found}; {step} needs it {needed}")]
    OtherPhase {
        /// The step.
        step: &'static str,
        /// The present phase.
        found: &'static str,
        /// The phase from which the step leads on.
        needed: &'static str,
    },
    /// Of another cluster, or the same one again.
    #[error("the new certificate authority {0} is the present one, or of another cluster")]
    NotNew(Fingerprint),
    /// Not valid.
    #[error("the new certificate authority is valid from {} to {}, not at {}", when::at(*.from), when::at(*.to), when::at(*.now))]
    NotValid {
        /// First second of its validity.
        from: u64,
        /// Last second of its validity.
        to: u64,
        /// The time of the step.
        now: u64,
    },
    /// Not everyone has heard of the new one, or would believe it.
    #[error(
        "these do not trust the new certificate authority yet: {}; wait for the nodes, or revoke those that will not come back; wait \
         until the tokens expire, or withdraw them",
        listed(.0)
    )]
    NotEverywhere(Vec<Obstacle>),
    /// The one to be removed is needed.
    #[error("certificates of the certificate authority to be removed are in use: {}; renew or revoke them first", listed(.0))]
    InUse(Vec<Obstacle>),
}

fn listed<T: ToString>(all: &[T]) -> String {
    let named: Vec<String> = all.iter().take(MOST_NAMED).map(ToString::to_string).collect();
    match all.len().saturating_sub(MOST_NAMED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// The files of a client are not those of a client that the cluster knows: they stay as they are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotOfTheCluster {
    /// Of an authority that is not trusted, or that the files do not name.
    #[error("the client's certificate is of the certificate authority {0}, which the cluster does not trust")]
    Untrusted(Fingerprint),
    /// Nobody's, as far as the files say.
    #[error("the client's certificate comes without that of its authority")]
    Alone,
}

/// The authorities that the files of a client go on naming: those of `named` that are among the cluster's, `current`, as a node
/// says. None is added. The authority of the client's own certificate has to be among them: else whoever has the key of a former one
/// could, as a node, have the client trust nobody but itself.
///
/// # Errors
/// [`NotOfTheCluster`].
pub fn still_trusted(
    own: &Credentials,
    named: Vec<CaCertificate>,
    current: &[Fingerprint],
) -> Result<Vec<CaCertificate>, NotOfTheCluster> {
    let mut kept = named;
    kept.retain(|one| current.contains(&one.fingerprint()));
    let signer = own.authority().ok_or(NotOfTheCluster::Alone)?;
    let is_kept = kept.iter().any(|one| one.fingerprint() == signer);
    if is_kept { Ok(kept) } else { Err(NotOfTheCluster::Untrusted(signer)) }
}

impl Authorities {
    /// The state of a new cluster.
    #[must_use]
    pub fn new(ca: CaCertificate) -> Authorities {
        Authorities::Settled { ca: StoredCa(ca) }
    }

    /// The authority that signs.
    #[must_use]
    pub fn signer(&self) -> &CaCertificate {
        let (Authorities::Settled { ca }
        | Authorities::Introducing { ca, .. }
        | Authorities::Renewing { ca, .. }) = self;
        &ca.0
    }

    /// All authorities that are trusted, the one that signs first. Tokens name all of them.
    #[must_use]
    pub fn trusted(&self) -> Vec<CaCertificate> {
        match self {
            Authorities::Settled { ca } => vec![ca.0.clone()],
            Authorities::Introducing { ca, next: other, .. }
            | Authorities::Renewing { ca, former: other, .. } => {
                vec![ca.0.clone(), other.0.clone()]
            }
        }
    }

    /// Step 1: makes `next` known beside the present authority.
    ///
    /// # Errors
    /// [`RotationRefused`].
    pub fn introduce(&self, next: CaCertificate, now: u64) -> Result<Authorities, RotationRefused> {
        let Authorities::Settled { ca } = self else {
            return Err(self.not("introducing another one", "settled"));
        };
        if next.fingerprint() == ca.0.fingerprint() || next.cluster() != ca.0.cluster() {
            return Err(RotationRefused::NotNew(next.fingerprint()));
        }
        let (from, to) = (next.facts().not_before, next.facts().not_after);
        if !(from..=to).contains(&now) {
            return Err(RotationRefused::NotValid { from, to, now });
        }
        Ok(Authorities::Introducing { ca: ca.clone(), next: StoredCa(next), since: now })
    }

    /// Back from step 1: forgets the new authority, which has signed nothing that is in use.
    ///
    /// # Errors
    /// [`RotationRefused`].
    pub fn abandon(&self, use_: Use<'_>, now: u64) -> Result<Authorities, RotationRefused> {
        let Authorities::Introducing { ca, next, .. } = self else {
            return Err(self.not("abandoning the new one", "introducing another one"));
        };
        use_.free_of(next.0.fingerprint(), now)?;
        Ok(Authorities::Settled { ca: ca.clone() })
    }

    /// Step 2: the new authority signs from now on. Every member must have said that it trusts it, also one that is down: it
    /// would come back and refuse everyone. Every token that a host may still use must name it: that host would refuse a node
    /// that has renewed its certificate.
    ///
    /// # Errors
    /// [`RotationRefused`].
    pub fn renew(
        &self,
        members: &[NodeTrusts],
        tokens: &[TokenRecord],
        now: u64,
    ) -> Result<Authorities, RotationRefused> {
        let Authorities::Introducing { ca, next, .. } = self else {
            return Err(self.not("renewing certificates", "introducing another one"));
        };
        let obstacles = unaware(next.0.fingerprint(), members, tokens, now);
        if !obstacles.is_empty() {
            return Err(RotationRefused::NotEverywhere(obstacles));
        }
        Ok(Authorities::Renewing { ca: next.clone(), former: ca.clone(), since: now })
    }

    /// Step 3: removes the former authority, once nothing of it is in use.
    ///
    /// # Errors
    /// [`RotationRefused`].
    pub fn retire(&self, use_: Use<'_>, now: u64) -> Result<Authorities, RotationRefused> {
        let Authorities::Renewing { ca, former, .. } = self else {
            return Err(self.not("removing the former one", "renewing certificates"));
        };
        use_.free_of(former.0.fingerprint(), now)?;
        Ok(Authorities::Settled { ca: ca.clone() })
    }

    /// Who holds back the next step, in any phase: whom [`Authorities::renew`] or [`Authorities::retire`] would name.
    #[must_use]
    pub fn obstacles(&self, members: &[NodeTrusts], use_: Use<'_>, now: u64) -> Vec<Obstacle> {
        match self {
            Authorities::Settled { .. } => Vec::new(),
            Authorities::Introducing { next, .. } => unaware(next.0.fingerprint(), members, use_.tokens, now),
            Authorities::Renewing { former, .. } => use_.of(former.0.fingerprint(), now),
        }
    }

    /// The next step, whoever holds it back: the caller answers for those. `None` if no rotation is under way.
    #[must_use]
    pub fn forced(&self, now: u64) -> Option<Authorities> {
        match self {
            Authorities::Settled { .. } => None,
            Authorities::Introducing { ca, next, .. } => {
                Some(Authorities::Renewing { ca: next.clone(), former: ca.clone(), since: now })
            }
            Authorities::Renewing { ca, .. } => Some(Authorities::Settled { ca: ca.clone() }),
        }
    }

    /// A node with a certificate of `issuer` renews it now, whatever its age: the signer has changed.
    #[must_use]
    pub fn must_renew(&self, issuer: Fingerprint) -> bool {
        self.signer().fingerprint() != issuer
    }

    fn not(&self, step: &'static str, needed: &'static str) -> RotationRefused {
        let found = match self {
            Authorities::Settled { .. } => "settled",
            Authorities::Introducing { .. } => "introducing another one",
            Authorities::Renewing { .. } => "renewing certificates",
        };
        RotationRefused::OtherPhase { step, found, needed }
    }
}

/// The certificates and tokens in the registry.
#[derive(Clone, Copy, Debug)]
pub struct Use<'a> {
    /// All certificates.
    pub issued: &'a [IssuedRecord],
    /// All tokens.
    pub tokens: &'a [TokenRecord],
    /// All revocations; one that is revoked or replaced is not in use.
    pub revoked: &'a Revocations,
}

impl Use<'_> {
    fn free_of(&self, ca: Fingerprint, now: u64) -> Result<(), RotationRefused> {
        let all = self.of(ca, now);
        if all.is_empty() { Ok(()) } else { Err(RotationRefused::InUse(all)) }
    }

    /// The uses that the cluster's members, and hosts that may join, still have for an authority.
    fn of(&self, ca: Fingerprint, now: u64) -> Vec<Obstacle> {
        let counts = |one: &&IssuedRecord| {
            // Ended on every clock of the cluster.
            one.facts.not_after.saturating_add(MOST_SKEW) >= now
                && self.revoked.covering(&one.facts).is_none()
        };
        // A client does not renew its certificate; a later one for the same name and rights takes its place.
        let has_other = |one: &IssuedRecord| {
            // For whichever disks: one that was made again under its name has another identity.
            let identity = |one: &IssuedRecord| one.facts.identity.clone().by_names();
            let same = |other: &IssuedRecord| other.ca != ca && identity(other) == identity(one);
            matches!(one.facts.identity, Identity::Client(_)) && self.issued.iter().filter(counts).any(same)
        };
        let of_ca = self.issued.iter().filter(counts).filter(|one| one.ca == ca && !has_other(one));
        let certificates = of_ca.map(|one| Obstacle::Certificate {
            identity: one.facts.identity.clone(),
            serial: one.facts.serial,
            until: one.facts.not_after,
        });
        let mut all: Vec<_> = certificates.collect();
        // By name: serial numbers, by which the registry lists them, are random.
        all.sort_by_cached_key(ToString::to_string);
        // A host with such a token would refuse every node.
        all.extend(self.tokens.iter().filter(|one| one.pins == [ca]).filter_map(|one| open(one, now)));
        all
    }
}

/// Who would not believe a certificate of the authority `next`.
fn unaware(next: Fingerprint, members: &[NodeTrusts], tokens: &[TokenRecord], now: u64) -> Vec<Obstacle> {
    let nodes = members.iter().filter(|one| !one.authorities.contains(&next));
    let nodes = nodes.map(|one| Obstacle::Unaware(one.node.clone()));
    let tokens = tokens.iter().filter(|one| !one.pins.contains(&next)).filter_map(|one| open(one, now));
    nodes.chain(tokens).collect()
}

/// A token that a host may still use, until it has ended on every clock.
fn open(token: &TokenRecord, now: u64) -> Option<Obstacle> {
    let is_open = token.is_open(now.saturating_sub(MOST_SKEW));
    is_open.then_some(Obstacle::Token { id: token.id, until: token.expires })
}
