//! The proof of identity of a node or client: its private key and its certificate.

use std::sync::{Arc, PoisonError, RwLock};

use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::pki_types::CertificateDer;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use zeroize::Zeroizing;

use crate::certificate::{CaCertificate, Facts, NotACertificate};
use crate::key::Key;
use crate::name::Fingerprint;
use crate::pem;
use crate::protocol::{NODE_API_PROTOCOL, PEER_PROTOCOL};

/// A key and a certificate that do not belong together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCredentials {
    /// No certificate.
    #[error("there is no certificate with the key")]
    Empty,
    /// Not a certificate of this kind.
    #[error(transparent)]
    Certificate(#[from] NotACertificate),
    /// Of another key.
    #[error("the certificate was made for another key")]
    OtherKey,
    /// The TLS library refused the key.
    #[error("the key cannot be used for TLS: {0}")]
    Unusable(String),
}

/// A private key, its certificate, and the certificate of the authority.
pub struct Credentials {
    key: Key,
    chain: Vec<CertificateDer<'static>>,
    facts: Facts,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("facts", &self.facts).finish_non_exhaustive()
    }
}

impl Credentials {
    /// Puts a key and its chain together: the certificate, then that of the authority.
    ///
    /// # Errors
    /// [`BadCredentials`].
    pub fn new(key: Key, chain: Vec<CertificateDer<'static>>) -> Result<Credentials, BadCredentials> {
        let facts = Facts::read(chain.first().ok_or(BadCredentials::Empty)?)?;
        if facts.key != key.public().id() {
            return Err(BadCredentials::OtherKey);
        }
        Ok(Credentials { key, chain, facts })
    }

    /// The certificate's content.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The certificate, then that of the authority.
    #[must_use]
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    /// The authority that has signed the certificate, as the chain says.
    #[must_use]
    pub fn authority(&self) -> Option<Fingerprint> {
        let authority = CaCertificate::from_der(self.chain.get(1)?).ok()?;
        Some(authority.fingerprint())
    }

    /// The key; a renewal may use it again.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Key and certificates as text; secret.
    pub(crate) fn pem(&self) -> Zeroizing<String> {
        pem::concat(&[&self.key.pem(), &self.certificates_pem()])
    }

    pub(crate) fn certificates_pem(&self) -> String {
        pem::encode_certificates(self.chain.iter().map(AsRef::as_ref))
    }

    fn certified(&self) -> Result<Arc<CertifiedKey>, BadCredentials> {
        let provider = rustls::crypto::ring::default_provider();
        let certified = CertifiedKey::from_der(self.chain.clone(), self.key.pkcs8(), &provider);
        certified.map(Arc::new).map_err(|error| BadCredentials::Unusable(error.to_string()))
    }
}

/// The present credentials; TLS configurations read them at every handshake, so that a renewal needs no new configuration.
///
/// During a rotation there are two: nodes get to see the present certificate, because they refuse one that was replaced; clients
/// the former one, because the files of a client may not have the new authority.
#[derive(Debug)]
pub struct CredentialStore(RwLock<Shown>);

#[derive(Debug)]
struct Shown {
    present: Arc<CertifiedKey>,
    for_clients: Option<Arc<CertifiedKey>>,
}

impl CredentialStore {
    /// A store.
    ///
    /// # Errors
    /// [`BadCredentials::Unusable`].
    pub fn new(credentials: &Credentials) -> Result<Arc<CredentialStore>, BadCredentials> {
        let shown = Shown { present: credentials.certified()?, for_clients: None };
        Ok(Arc::new(CredentialStore(RwLock::new(shown))))
    }

    /// Replaces the credentials, for handshakes from now on. Open connections stay.
    ///
    /// # Errors
    /// [`BadCredentials::Unusable`]; the former credentials stay.
    pub fn set(&self, credentials: &Credentials) -> Result<(), BadCredentials> {
        let certified = credentials.certified()?;
        self.0.write().unwrap_or_else(PoisonError::into_inner).present = certified;
        Ok(())
    }

    /// Shows other credentials to clients that are no nodes, for handshakes from now on; `None`: the same as to nodes.
    ///
    /// # Errors
    /// As [`CredentialStore::set`].
    pub fn set_for_clients(&self, credentials: Option<&Credentials>) -> Result<(), BadCredentials> {
        let certified = credentials.map(Credentials::certified).transpose()?;
        self.0.write().unwrap_or_else(PoisonError::into_inner).for_clients = certified;
        Ok(())
    }

    // Only whole values are ever stored, so a panic elsewhere leaves a valid one.
    fn present(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner).present)
    }

    fn for_clients(&self) -> Arc<CertifiedKey> {
        let shown = self.0.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(shown.for_clients.as_ref().unwrap_or(&shown.present))
    }
}

impl ResolvesServerCert for CredentialStore {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        // Unproven, and without effect but on which of two good certificates is shown.
        let of_node = |protocol: &[u8]| protocol == PEER_PROTOCOL || protocol == NODE_API_PROTOCOL;
        let is_node = hello.alpn().is_some_and(|mut protocols| protocols.any(of_node));
        Some(if is_node { self.present() } else { self.for_clients() })
    }
}

impl ResolvesClientCert for CredentialStore {
    // The hints name authorities; a node has one certificate and shows it, so that the refusal names it.
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.present())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
