//! The rules of [`crate::Trust`] as verifiers of rustls.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, PeerIncompatible,
    SignatureScheme,
};

use crate::certificate::{CaCertificate, Facts};
use crate::identity::Identity;
use crate::name::{Fingerprint, Name};
use crate::trust::{Mistrust, Purpose, TrustStore, signed};
use crate::when;

/// Whom one end of a connection accepts at the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Accept {
    /// This node only.
    Node(Name),
    /// Any node of the cluster.
    AnyNode,
    /// Any node or client of the cluster.
    Anyone,
}

impl Accept {
    fn check(&self, facts: &Facts) -> Result<(), Mistrust> {
        let who = || facts.identity.to_string();
        match (self, &facts.identity) {
            (Accept::Node(expected), Identity::Node(node)) if node.name != *expected => {
                Err(Mistrust::OtherNode { found: who(), expected: expected.clone() })
            }
            (_, Identity::Node(_)) | (Accept::Anyone, Identity::Client(_)) => Ok(()),
            (Accept::Anyone, _) => Err(Mistrust::OtherKind { who: who(), expected: "nodes and clients" }),
            _ => Err(Mistrust::OtherKind { who: who(), expected: "nodes" }),
        }
    }
}

/// The refusal in TLS's terms: where an alert exists for it, the other side gets that, so that its operator knows, too.
impl From<Mistrust> for Error {
    fn from(why: Mistrust) -> Error {
        Error::InvalidCertificate(match why {
            Mistrust::Expired { not_after, now, .. } => {
                CertificateError::ExpiredContext { time: when::unix(now), not_after: when::unix(not_after) }
            }
            Mistrust::NotYet { not_before, now, .. } => CertificateError::NotValidYetContext {
                time: when::unix(now),
                not_before: when::unix(not_before),
            },
            Mistrust::UnknownAuthority { .. } => CertificateError::UnknownIssuer,
            Mistrust::Revoked { .. } => CertificateError::Revoked,
            other => CertificateError::Other(OtherError(Arc::new(other))),
        })
    }
}

/// Signatures of handshakes, as every verifier here checks them.
#[derive(Debug)]
struct Signatures(Arc<CryptoProvider>);

impl Signatures {
    fn check(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// No configuration of this crate speaks TLS 1.2.
fn not_tls12() -> Error {
    Error::PeerIncompatible(PeerIncompatible::SupportedVersionsExtensionRequired)
}

macro_rules! handshake_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(not_tls12())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.signatures.check(message, certificate, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.signatures.schemes()
        }
    };
}

/// Accepts members of the cluster.
#[derive(Debug)]
pub(crate) struct Members {
    trust: Arc<TrustStore>,
    accept: Accept,
    /// A client may stay without a certificate.
    optional: bool,
    signatures: Signatures,
}

impl Members {
    pub fn new(
        trust: Arc<TrustStore>,
        accept: Accept,
        optional: bool,
        provider: Arc<CryptoProvider>,
    ) -> Arc<Members> {
        Arc::new(Members { trust, accept, optional, signatures: Signatures(provider) })
    }

    fn check(&self, certificate: &CertificateDer<'_>, purpose: Purpose, now: UnixTime) -> Result<(), Error> {
        let checked = self.trust.get().check(certificate, purpose, now.as_secs());
        checked.and_then(|facts| self.accept.check(&facts)).map_err(|why| {
            self.trust.report(certificate, &why);
            why.into()
        })
    }
}

impl ServerCertVerifier for Members {
    /// The name that the client asked for does not count: who answers is in the certificate's URI.
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(certificate, Purpose::Server, now).map(|()| ServerCertVerified::assertion())
    }

    handshake_signatures!();
}

impl ClientCertVerifier for Members {
    fn client_auth_mandatory(&self) -> bool {
        !self.optional
    }

    /// No hints: they would have to name the authorities of the time when the configuration was made.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(certificate, Purpose::Client, now).map(|()| ClientCertVerified::assertion())
    }

    handshake_signatures!();
}

/// Accepts a node whose chain ends in an authority of which only the fingerprint is known: for a host that joins.
#[derive(Debug)]
pub(crate) struct Pinned {
    pins: Vec<Fingerprint>,
    signatures: Signatures,
}

impl Pinned {
    pub fn new(pins: Vec<Fingerprint>, provider: Arc<CryptoProvider>) -> Arc<Pinned> {
        Arc::new(Pinned { pins, signatures: Signatures(provider) })
    }

    fn check(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: u64,
    ) -> Result<(), Mistrust> {
        let facts = Facts::read(leaf)?;
        let pinned = others.iter().find(|one| self.pins.contains(&Fingerprint::of(one)));
        let pinned = pinned.ok_or_else(|| {
            let all: Vec<String> = self.pins.iter().map(ToString::to_string).collect();
            Mistrust::OtherPin { expected: all.join(" or ") }
        })?;
        let authority = CaCertificate::from_der(pinned)?;
        let (found, expected) = (facts.identity.cluster(), authority.cluster());
        if found != expected {
            return Err(Mistrust::OtherCluster { who: facts.identity.to_string(), found, expected });
        }
        signed(leaf, &facts, &[authority], Purpose::Server, now)?;
        Accept::AnyNode.check(&facts)
    }
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(certificate, others, now.as_secs())?;
        Ok(ServerCertVerified::assertion())
    }

    handshake_signatures!();
}
