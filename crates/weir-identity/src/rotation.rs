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
use crate::invitation::TokenRecord;
use crate::name::{Fingerprint, Name, TokenId};
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
    /// Not everyone has heard of the new one.
    #[error(
        "these nodes do not trust the new certificate authority yet: {}; wait for them, or remove those that will not come back",
        listed(.0)
    )]
    NotEverywhere(Vec<Name>),
    /// Hosts with these tokens would refuse every node.
    #[error(
        "these tokens do not name the new certificate authority, and hosts may still join with them: {}; wait until they expire, or \
         withdraw them",
        listed(.0)
    )]
    Invited(Vec<TokenId>),
    /// The one to be removed is needed.
    #[error("certificates of the certificate authority to be removed are in use: {}; renew or revoke them first", listed(.0))]
    InUse(Vec<String>),
}

fn listed<T: ToString>(all: &[T]) -> String {
    let named: Vec<String> = all.iter().take(MOST_NAMED).map(ToString::to_string).collect();
    match all.len().saturating_sub(MOST_NAMED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
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
        let without = |one: &&NodeTrusts| !one.authorities.contains(&next.0.fingerprint());
        let missing: Vec<Name> = members.iter().filter(without).map(|one| one.node.clone()).collect();
        if !missing.is_empty() {
            return Err(RotationRefused::NotEverywhere(missing));
        }
        // Until it has ended on every clock.
        let open = |one: &&TokenRecord| one.is_open(now.saturating_sub(MOST_SKEW));
        let without = |one: &&TokenRecord| !one.pins.contains(&next.0.fingerprint());
        let invited: Vec<TokenId> = tokens.iter().filter(open).filter(without).map(|one| one.id).collect();
        if !invited.is_empty() {
            return Err(RotationRefused::Invited(invited));
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
        // Ended on every clock of the cluster.
        let ended = |last: u64| last.saturating_add(MOST_SKEW) < now;
        let certificates = self
            .issued
            .iter()
            .filter(|one| one.ca == ca && !ended(one.facts.not_after))
            .filter(|one| self.revoked.covering(&one.facts).is_none())
            .map(|one| format!("{} (serial {})", one.facts.identity, one.facts.serial));
        // A host with such a token would refuse every node.
        let tokens = self
            .tokens
            .iter()
            .filter(|one| one.pins == [ca] && one.is_open(now.saturating_sub(MOST_SKEW)))
            .map(|one| format!("the unused token {}", one.id));
        let all: Vec<String> = certificates.chain(tokens).collect();
        if all.is_empty() { Ok(()) } else { Err(RotationRefused::InUse(all)) }
    }
}
