//! The proof of identity of a node or client: its private key and its certificate.

use std::sync::{Arc, PoisonError, RwLock};

use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::pki_types::CertificateDer;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use zeroize::Zeroizing;

use crate::certificate::{Facts, NotACertificate};
use crate::key::Key;
use crate::pem;

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
#[derive(Debug)]
pub struct CredentialStore(RwLock<Arc<CertifiedKey>>);

impl CredentialStore {
    /// A store.
    ///
    /// # Errors
    /// [`BadCredentials::Unusable`].
    pub fn new(credentials: &Credentials) -> Result<Arc<CredentialStore>, BadCredentials> {
        Ok(Arc::new(CredentialStore(RwLock::new(credentials.certified()?))))
    }

    /// Replaces the credentials, for handshakes from now on. Open connections stay.
    ///
    /// # Errors
    /// [`BadCredentials::Unusable`]; the former credentials stay.
    pub fn set(&self, credentials: &Credentials) -> Result<(), BadCredentials> {
        let certified = credentials.certified()?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = certified;
        Ok(())
    }

    fn present(&self) -> Arc<CertifiedKey> {
        // Only whole values are ever stored, so a panic elsewhere leaves a valid one.
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ResolvesServerCert for CredentialStore {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.present())
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
