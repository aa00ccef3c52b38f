//! Which certificates a node accepts, at a given time.

use std::sync::{Arc, PoisonError, RwLock};

use rustls::pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert};

use crate::certificate::{CaCertificate, Facts, NotACertificate};
use crate::identity::Identity;
use crate::name::{ClusterId, Fingerprint, Name};
use crate::revocation::{Revocation, Revocations};
use crate::when;

/// The use of a certificate by its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// It answers connections.
    Server,
    /// It makes connections.
    Client,
}

/// A reason after a sentence, if there is one.
fn in_parentheses(reason: &str) -> String {
    if reason.is_empty() { String::new() } else { format!(" ({reason})") }
}

/// The reason why a certificate is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mistrust {
    /// Not readable, or not of a Weir cluster.
    #[error("{0}")]
    Foreign(#[from] NotACertificate),
    /// No authority that counts has signed it.
    #[error(
        "the certificate of {who} is not signed by a certificate authority of this cluster ({why}); join this cluster with a token"
    )]
    UnknownAuthority {
        /// The claimed identity.
        who: String,
        /// The verifier's word.
        why: String,
    },
    /// Too late.
    #[error(
        "the certificate of {who} ended {} ago, at {}; renew it, or set the clock: it is {} here",
        when::span(.now.saturating_sub(*.not_after)), when::at(*.not_after), when::at(*.now)
    )]
    Expired {
        /// Whose it is.
        who: String,
        /// Last second of its validity, since 1970.
        not_after: u64,
        /// The second of the check.
        now: u64,
    },
    /// Too early.
    #[error(
        "the certificate of {who} is not valid before {}, which is {} ahead of this host's clock ({}); set the clocks",
        when::at(*.not_before), when::span(.not_before.saturating_sub(*.now)), when::at(*.now)
    )]
    NotYet {
        /// Whose it is.
        who: String,
        /// First second of its validity, since 1970.
        not_before: u64,
        /// The second of the check.
        now: u64,
    },
    /// Its holder has a newer one.
    #[error(
        "the certificate of {who} was replaced by a newer one, seen at {}; whoever shows it has an old copy of the key: restart the \
         node if it is the node itself, revoke it if it is not",
        when::at(*.at)
    )]
    Replaced {
        /// Whose it is.
        who: String,
        /// When the newer one was seen, in seconds since 1970.
        at: u64,
    },
    /// Revoked.
    #[error("{who} was revoked at {}{}", when::at(*.at), in_parentheses(reason))]
    Revoked {
        /// Whose it is.
        who: String,
        /// When, in seconds since 1970.
        at: u64,
        /// Why.
        reason: String,
    },
    /// Of another cluster.
    #[error("{who} belongs to cluster {found}, this is cluster {expected}")]
    OtherCluster {
        /// Whose it is.
        who: String,
        /// Its cluster.
        found: ClusterId,
        /// This cluster.
        expected: ClusterId,
    },
    /// A node was expected, or a client.
    #[error("{who} may not speak here: only {expected} may")]
    OtherKind {
        /// Whose it is.
        who: String,
        /// The permitted kind of client or node.
        expected: &'static str,
    },
    /// Another node answers.
    #[error("{found} answers where node {expected} was expected; is the address of {expected} still right?")]
    OtherNode {
        /// The identity of the peer.
        found: String,
        /// The expected node.
        expected: Name,
    },
    /// A chain without the authority that the token names.
    #[error(
        "the node that answers is not of the cluster that made the token: no certificate of its chain has the fingerprint {expected}; \
         someone else may answer at this address; nothing was sent"
    )]
    OtherPin {
        /// The fingerprints in the token.
        expected: String,
    },
    /// No certificate at all.
    #[error("the other side presented no certificate; nodes speak only to nodes that prove who they are")]
    Nobody,
    /// Another protocol.
    #[error("the other side does not speak {expected:?} over TLS")]
    OtherProtocol {
        /// The protocol (ALPN).
        expected: String,
    },
}

/// The certificate of the other end of a connection, which the handshake has checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherEnd {
    facts: Facts,
    certificate: CertificateDer<'static>,
}

impl OtherEnd {
    /// Reads a certificate that was checked, or this host's own.
    ///
    /// # Errors
    /// [`Mistrust::Foreign`].
    pub fn read(certificate: &CertificateDer<'_>) -> Result<OtherEnd, Mistrust> {
        Ok(OtherEnd { facts: Facts::read(certificate)?, certificate: certificate.clone().into_owned() })
    }

    /// Its content.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }
}

impl std::ops::Deref for OtherEnd {
    type Target = Facts;

    fn deref(&self) -> &Facts {
        &self.facts
    }
}

/// The authorities of a cluster and what it has revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trust {
    cluster: ClusterId,
    authorities: Vec<CaCertificate>,
    revoked: Revocations,
}

/// Authorities that cannot be trusted together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadTrust {
    /// Not one or two.
    #[error("a cluster has one certificate authority, or two while they are rotated, not {0}")]
    Count(usize),
    /// Of different clusters.
    #[error("the certificate authority {0} is of another cluster")]
    OtherCluster(Fingerprint),
}

impl Trust {
    /// Trust in the authorities of one cluster: one, or two while they are rotated.
    ///
    /// # Errors
    /// [`BadTrust`].
    pub fn new(
        cluster: ClusterId,
        authorities: Vec<CaCertificate>,
        revoked: Revocations,
    ) -> Result<Trust, BadTrust> {
        if !(1..=2).contains(&authorities.len()) {
            return Err(BadTrust::Count(authorities.len()));
        }
        if let Some(other) = authorities.iter().find(|one| one.cluster() != cluster) {
            return Err(BadTrust::OtherCluster(other.fingerprint()));
        }
        Ok(Trust { cluster, authorities, revoked })
    }

    /// The cluster.
    #[must_use]
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// The authorities.
    #[must_use]
    pub fn authorities(&self) -> &[CaCertificate] {
        &self.authorities
    }

    /// The revoked certificates and names.
    #[must_use]
    pub fn revoked(&self) -> &Revocations {
        &self.revoked
    }

    /// Checks a certificate: signed by an authority that is valid itself, of this cluster, valid now, for this purpose, not revoked.
    ///
    /// # Errors
    /// [`Mistrust`].
    pub fn check(&self, der: &CertificateDer<'_>, purpose: Purpose, now: u64) -> Result<Facts, Mistrust> {
        let facts = Facts::read(der)?;
        self.of_this_cluster(&facts)?;
        signed(der, &facts, &self.authorities, purpose, now)?;
        if let Some(by) = self.revoked.covering(&facts).filter(|_| self.revoked.is_replaced(&facts)) {
            return Err(Mistrust::Replaced { who: facts.identity.to_string(), at: by.at });
        }
        not_revoked(&facts, self.revoked.covering(&facts))?;
        Ok(facts)
    }

    /// Checks again what may have changed since [`Trust::check`]: for connections that are open for long. An authority that is
    /// not trusted any more, because its key was stolen, may have signed it. A certificate that its holder has replaced by a
    /// newer one still counts here, until it ends.
    ///
    /// # Errors
    /// [`Mistrust::Expired`], [`Mistrust::OtherCluster`], [`Mistrust::UnknownAuthority`], [`Mistrust::Revoked`].
    pub fn recheck(&self, other: &OtherEnd, now: u64) -> Result<(), Mistrust> {
        let OtherEnd { facts, certificate } = other;
        self.of_this_cluster(facts)?;
        // First: a revoked node must learn that also where its certificate has ended.
        not_revoked(facts, self.revoked.ending(facts))?;
        // Every certificate is a client's; what a server's may do was checked at the handshake.
        signed(certificate, facts, &self.authorities, Purpose::Client, now)
    }

    fn of_this_cluster(&self, facts: &Facts) -> Result<(), Mistrust> {
        let (found, expected) = (facts.identity.cluster(), self.cluster);
        if found == expected {
            return Ok(());
        }
        Err(Mistrust::OtherCluster { who: facts.identity.to_string(), found, expected })
    }
}

fn not_revoked(facts: &Facts, by: Option<&Revocation>) -> Result<(), Mistrust> {
    by.map_or(Ok(()), |by| {
        let who = facts.identity.to_string();
        Err(Mistrust::Revoked { who, at: by.at, reason: by.reason.clone() })
    })
}

/// Checks the signature by one of `authorities`, the validity of both at `now` and the purpose.
pub(crate) fn signed(
    der: &CertificateDer<'_>,
    facts: &Facts,
    authorities: &[CaCertificate],
    purpose: Purpose,
    now: u64,
) -> Result<(), Mistrust> {
    let who = || facts.identity.to_string();
    let unknown =
        |why: &dyn std::fmt::Display| Mistrust::UnknownAuthority { who: who(), why: why.to_string() };
    // A trust anchor has no validity for webpki: an authority that has ended is left out here.
    let valid = |one: &&CaCertificate| (one.facts().not_before..=one.facts().not_after).contains(&now);
    let anchors: Result<Vec<_>, _> =
        authorities.iter().filter(valid).map(|one| anchor_from_trusted_cert(one.der())).collect();
    let anchors = anchors.map_err(|error| unknown(&error))?;
    let certificate = EndEntityCert::try_from(der).map_err(|error| unknown(&error))?;
    let algorithms = rustls::crypto::ring::default_provider().signature_verification_algorithms.all;
    let checked = certificate.verify_for_usage(
        algorithms,
        &anchors,
        &[],
        when::unix(now),
        required(purpose),
        None,
        None,
    );
    let seconds = |time: UnixTime| time.as_secs();
    match checked {
        Ok(_) => Ok(()),
        Err(webpki::Error::CertExpired { not_after, .. }) => {
            Err(Mistrust::Expired { who: who(), not_after: seconds(not_after), now })
        }
        Err(webpki::Error::CertNotValidYet { not_before, .. }) => {
            Err(Mistrust::NotYet { who: who(), not_before: seconds(not_before), now })
        }
        Err(webpki::Error::RequiredEkuNotFoundContext(_)) => {
            let expected = match purpose {
                Purpose::Server => "nodes",
                Purpose::Client => "nodes and clients",
            };
            Err(Mistrust::OtherKind { who: who(), expected })
        }
        Err(error) => Err(unknown(&error)),
    }
}

/// The purpose, which the certificate must name: the authority makes none without.
fn required(purpose: Purpose) -> KeyUsage {
    // The DER form of 1.3.6.1.5.5.7.3.1 and .2 (RFC 5280 §4.2.1.12).
    KeyUsage::required(match purpose {
        Purpose::Server => &[0x2b, 6, 1, 5, 5, 7, 3, 1],
        Purpose::Client => &[0x2b, 6, 1, 5, 5, 7, 3, 2],
    })
}

/// Hears of refused certificates, for the audit log. Called from within a handshake: must not block.
pub trait Witness: std::fmt::Debug + Send + Sync {
    /// A certificate was refused. `who` is what it claims, which is proven only if the reason says so.
    fn refused(&self, who: Option<&Identity>, why: &Mistrust);
}

/// The present trust; TLS configurations read it at every handshake, so that a change needs no new configuration.
#[derive(Debug)]
pub struct TrustStore {
    present: RwLock<Arc<Trust>>,
    witness: Option<Arc<dyn Witness>>,
}

impl TrustStore {
    /// A store. `witness` hears of every refusal.
    #[must_use]
    pub fn new(trust: Trust, witness: Option<Arc<dyn Witness>>) -> Arc<TrustStore> {
        Arc::new(TrustStore { present: RwLock::new(Arc::new(trust)), witness })
    }

    /// The present trust.
    #[must_use]
    pub fn get(&self) -> Arc<Trust> {
        // Only whole values are ever stored, so a panic elsewhere leaves a valid one.
        Arc::clone(&self.present.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the trust. From now on handshakes use it; the caller checks open connections by [`Trust::recheck`].
    pub fn set(&self, trust: Trust) {
        *self.present.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(trust);
    }

    pub(crate) fn report(&self, der: &CertificateDer<'_>, why: &Mistrust) {
        if let Some(witness) = &self.witness {
            let facts = Facts::read(der).ok();
            witness.refused(facts.as_ref().map(|facts| &facts.identity), why);
        }
    }
}
