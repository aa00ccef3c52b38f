//! Key pairs and public keys. One kind only: ECDSA on P-256, which every TLS library has.

use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData, SubjectPublicKeyInfo};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use x509_parser::oid_registry::{OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY};
use x509_parser::prelude::FromDer;
use x509_parser::x509;
use zeroize::Zeroizing;

use crate::name::KeyId;
use crate::pem;
use crate::random::NoRandomness;

/// Bytes of an uncompressed point of the curve (SEC 1 §2.3.3), and its first byte.
const POINT: (usize, u8) = (65, 4);

/// A key that is no ECDSA key on P-256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the key is not an ECDSA key on the curve P-256 in PKCS #8 form")]
pub struct NotAKey;

/// A private key with its public key.
pub struct Key(KeyPair);

impl Key {
    /// A new key.
    ///
    /// # Errors
    /// [`NoRandomness`].
    pub fn generate() -> Result<Key, NoRandomness> {
        // Nothing else can fail with a fixed algorithm.
        KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map(Key).map_err(|_| NoRandomness)
    }

    /// Reads a key from its PKCS #8 form.
    ///
    /// # Errors
    /// [`NotAKey`].
    pub fn from_pkcs8(der: &[u8]) -> Result<Key, NotAKey> {
        let key =
            KeyPair::from_pkcs8_der_and_sign_algo(&PrivatePkcs8KeyDer::from(der), &PKCS_ECDSA_P256_SHA256);
        key.map(Key).map_err(|_| NotAKey)
    }

    /// The public key.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.subject_public_key_info())
    }

    pub(crate) fn pkcs8(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.0.serialize_der()).into()
    }

    /// The PKCS #8 form as text; secret.
    pub(crate) fn pem(&self) -> Zeroizing<String> {
        pem::encode_secret("PRIVATE KEY", self.0.serialized_der())
    }

    pub(crate) fn pair(&self) -> &KeyPair {
        &self.0
    }

    pub(crate) fn into_pair(self) -> KeyPair {
        self.0
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key({})", self.public().id())
    }
}

/// A public key, as its `SubjectPublicKeyInfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKey(Vec<u8>);

impl PublicKey {
    /// Reads a key from its `SubjectPublicKeyInfo`.
    ///
    /// # Errors
    /// [`NotAKey`].
    pub fn from_spki(der: &[u8]) -> Result<PublicKey, NotAKey> {
        let (rest, info) = x509::SubjectPublicKeyInfo::from_der(der).map_err(|_| NotAKey)?;
        let curve = info.algorithm.parameters.as_ref().and_then(|parameters| parameters.as_oid().ok());
        let point = info.subject_public_key.data.as_ref();
        // The algorithm of the CSR's signature says nothing about the key's curve.
        let good = rest.is_empty()
            && info.algorithm.algorithm == OID_KEY_TYPE_EC_PUBLIC_KEY
            && curve == Some(OID_EC_P256)
            && (point.len(), point.first().copied()) == (POINT.0, Some(POINT.1));
        if good { Ok(PublicKey(der.to_vec())) } else { Err(NotAKey) }
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> KeyId {
        KeyId::of(&self.0)
    }

    pub(crate) fn for_signing(&self) -> Result<SubjectPublicKeyInfo, NotAKey> {
        SubjectPublicKeyInfo::from_der(&self.0).map_err(|_| NotAKey)
    }
}
