//! The content of the cluster's certificates, and the certificate of its authority.

use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::identity::{Identity, NotAnIdentity};
use crate::name::{ClusterId, Fingerprint, KeyId, Serial};
use crate::pem;

/// The content of a certificate. Nothing here is verified: see [`crate::Trust::check`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// Its subject.
    pub identity: Identity,
    /// Its serial number.
    pub serial: Serial,
    /// The id of its key.
    pub key: KeyId,
    /// First second of its validity, since 1970.
    pub not_before: u64,
    /// Last second of its validity, since 1970.
    pub not_after: u64,
}

/// A certificate that this cluster did not make.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotACertificate {
    /// Not X.509.
    #[error("not an X.509 certificate: {0}")]
    Encoding(String),
    /// Made by another program.
    #[error("not a certificate of a Weir cluster: {0}")]
    Foreign(&'static str),
    /// Of nobody.
    #[error(transparent)]
    Identity(#[from] NotAnIdentity),
}

impl Facts {
    /// Reads a certificate.
    ///
    /// # Errors
    /// [`NotACertificate`].
    pub fn read(der: &[u8]) -> Result<Facts, NotACertificate> {
        let encoding = |error: &dyn std::fmt::Display| NotACertificate::Encoding(error.to_string());
        let (rest, certificate) = X509Certificate::from_der(der).map_err(|error| encoding(&error))?;
        if !rest.is_empty() {
            return Err(encoding(&"bytes follow it"));
        }
        let names = certificate.subject_alternative_name().map_err(|error| encoding(&error))?;
        let names = names.map_or(&[][..], |names| &names.value.general_names[..]);
        if names.iter().any(|name| matches!(name, GeneralName::Invalid(..))) {
            return Err(encoding(&"a name in it is invalid"));
        }
        let uris =
            names.iter().filter_map(|name| if let GeneralName::URI(uri) = name { Some(*uri) } else { None });
        let identity = Identity::from_uris(uris)?;
        let is_ca = certificate.basic_constraints().map_err(|error| encoding(&error))?;
        if is_ca.is_some_and(|constraints| constraints.value.ca) != matches!(identity, Identity::Authority(_))
        {
            return Err(NotACertificate::Foreign("its right to sign does not match its name"));
        }
        let serial = certificate.raw_serial().try_into().map(Serial);
        let validity = certificate.validity();
        let second = |time: x509_parser::time::ASN1Time| {
            u64::try_from(time.timestamp()).map_err(|_| NotACertificate::Foreign("it is of before 1970"))
        };
        Ok(Facts {
            identity,
            serial: serial.map_err(|_| NotACertificate::Foreign("its serial number has another length"))?,
            key: KeyId::of(certificate.public_key().raw),
            not_before: second(validity.not_before)?,
            not_after: second(validity.not_after)?,
        })
    }

    /// The second, since 1970, from which on the holder asks for a new certificate: two thirds of its validity.
    #[must_use]
    pub fn renew_at(&self) -> u64 {
        self.not_before + self.not_after.saturating_sub(self.not_before) / 3 * 2
    }
}

/// The certificate of a cluster's authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaCertificate {
    der: CertificateDer<'static>,
    cluster: ClusterId,
    fingerprint: Fingerprint,
    facts: Facts,
}

impl CaCertificate {
    /// Reads the certificate of an authority. Does not say that it may be trusted.
    ///
    /// # Errors
    /// [`NotACertificate`].
    pub fn from_der(der: &[u8]) -> Result<CaCertificate, NotACertificate> {
        let facts = Facts::read(der)?;
        let Identity::Authority(cluster) = facts.identity else {
            return Err(NotACertificate::Foreign("it is not that of a certificate authority"));
        };
        let der = CertificateDer::from(der.to_vec());
        Ok(CaCertificate { fingerprint: Fingerprint::of(&der), der, cluster, facts })
    }

    /// Reads a text with the certificates of authorities, one after the other.
    ///
    /// # Errors
    /// [`NotACertificate`].
    pub fn all_from_pem(text: &[u8]) -> Result<Vec<CaCertificate>, NotACertificate> {
        let all = pem::certificates(text).map_err(NotACertificate::Encoding)?;
        all.iter().map(|der| CaCertificate::from_der(der)).collect()
    }

    /// The text form.
    #[must_use]
    pub fn pem(&self) -> String {
        pem::encode("CERTIFICATE", &self.der)
    }

    /// The DER form.
    #[must_use]
    pub fn der(&self) -> &CertificateDer<'static> {
        &self.der
    }

    /// Its cluster.
    #[must_use]
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// Its fingerprint, which tokens carry.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Its content.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }
}
