//! The cluster's certificate authority: signs certificates of nodes and clients.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType, SerialNumber, string::Ia5String,
};
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::certificate::{CaCertificate, Facts, NotACertificate};
use crate::identity::{Client, Grant, Identity, MOST_EXPORTS, Node};
use crate::key::{Key, NotAKey, PublicKey};
use crate::name::{ClusterId, Fingerprint, Host, Name, Serial};
use crate::pem;
use crate::random::NoRandomness;
use crate::when::{self, MOST_SKEW};

/// Validity of an authority's certificate, in seconds: ten years.
pub const CA_LIFETIME: u64 = 3650 * 86_400;
/// Validity of a node's certificate unless configured, in seconds: 90 days; the node renews it after 60.
pub const NODE_LIFETIME: u64 = 90 * 86_400;
/// Shortest validity of a certificate, in seconds. Clocks that differ by [`MOST_SKEW`] leave enough of it.
pub const SHORTEST_LIFETIME: u64 = 600;

/// The reason why a certificate was not made.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// No random numbers.
    #[error(transparent)]
    Randomness(#[from] NoRandomness),
    /// Another kind of key.
    #[error(transparent)]
    Key(#[from] NotAKey),
    /// The key is not that of the certificate.
    #[error("the private key does not belong to the certificate of the authority")]
    OtherKey,
    /// Not that of an authority.
    #[error("the authority's certificate: {0}")]
    Certificate(#[from] NotACertificate),
    /// The authority cannot sign at this time.
    #[error(
        "the cluster's certificate authority is valid from {} to {}, and it is {} by this host's clock; {}",
        when::at(*.not_before), when::at(*.not_after), when::at(*.now), remedy(*.not_before, *.now)
    )]
    NotValid {
        /// First second of its validity.
        not_before: u64,
        /// Last second of its validity.
        not_after: u64,
        /// The second at which it was to sign.
        now: u64,
    },
    /// Too short to be useful.
    #[error("a certificate is valid for at least {}, not {}", when::span(SHORTEST_LIFETIME), when::span(*.0))]
    TooShort(u64),
    /// Exports are missing, or too many.
    #[error("a client's certificate names 1 to {MOST_EXPORTS} exports, not {0}")]
    Exports(usize),
    /// The encoder refused.
    #[error("the certificate could not be made: {0}")]
    Encoding(#[from] rcgen::Error),
}

fn remedy(not_before: u64, now: u64) -> &'static str {
    match now < not_before {
        true => {
            "correct the clock; if it is right, the authority was made by one that was ahead, and signs from that time on: \
             set the cluster up anew, in another identity.directory and registry.prefix"
        }
        false => "correct the clock, or rotate the authority",
    }
}

/// The registry's record of a certificate. It is written before the certificate is handed out: a certificate without a record
/// could not be revoked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IssuedRecord {
    /// Its content.
    pub facts: Facts,
    /// The authority that signed it.
    pub ca: Fingerprint,
    /// Names and addresses in it beside the identity: no other node may have one of them as its name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<Host>,
}

/// A new certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// The certificate, then that of the authority.
    pub chain: Vec<CertificateDer<'static>>,
    /// For the registry.
    pub record: IssuedRecord,
}

impl Issued {
    /// The chain as text.
    #[must_use]
    pub fn pem(&self) -> String {
        pem::encode_certificates(self.chain.iter().map(AsRef::as_ref))
    }
}

/// The authority, with its private key.
pub struct Authority {
    certificate: CaCertificate,
    issuer: Issuer<'static, KeyPair>,
    secret: Zeroizing<String>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority")
            .field("certificate", &self.certificate.fingerprint())
            .finish_non_exhaustive()
    }
}

impl Authority {
    /// A new authority of `cluster`, valid from `now` (seconds since 1970) for [`CA_LIFETIME`].
    ///
    /// # Errors
    /// [`AuthorityError::Randomness`].
    pub fn create(cluster: ClusterId, now: u64) -> Result<Authority, AuthorityError> {
        let key = Key::generate()?;
        let serial = Serial::random()?;
        let mut params = template(&Identity::Authority(cluster), serial)?;
        // Two authorities of one cluster differ in name: some TLS libraries find the signer by it.
        params.distinguished_name = common_name(&format!("Weir CA {:.8}", serial.to_string()));
        params.not_before = when::calendar(now.saturating_sub(MOST_SKEW));
        params.not_after = when::calendar(now.saturating_add(CA_LIFETIME));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(key.pair())?;
        Authority::from_parts(CaCertificate::from_der(certificate.der())?, key)
    }

    /// An authority from its certificate and key.
    ///
    /// # Errors
    /// [`AuthorityError::OtherKey`], [`AuthorityError::Encoding`].
    pub fn from_parts(certificate: CaCertificate, key: Key) -> Result<Authority, AuthorityError> {
        if certificate.facts().key != key.public().id() {
            return Err(AuthorityError::OtherKey);
        }
        let secret = key.pem();
        let issuer = Issuer::from_ca_cert_der(certificate.der(), key.into_pair())?;
        Ok(Authority { certificate, issuer, secret })
    }

    /// Its certificate.
    #[must_use]
    pub fn certificate(&self) -> &CaCertificate {
        &self.certificate
    }

    /// Its private key as text; secret.
    pub(crate) fn key_pem(&self) -> &str {
        &self.secret
    }

    /// A certificate for a node, valid for `lifetime` seconds from `now` (since 1970), but not longer than the authority's.
    /// `hosts`: where clients other than Weir reach it.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn issue_node(
        &self,
        name: &Name,
        hosts: &[Host],
        key: &PublicKey,
        now: u64,
        lifetime: u64,
    ) -> Result<Issued, AuthorityError> {
        let cluster = self.certificate.cluster();
        let identity = Identity::Node(Node { cluster, name: name.clone() });
        let usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        self.issue(identity, hosts, usages, key, now, lifetime)
    }

    /// A certificate for a client of the API or of exports, valid for `lifetime` seconds from `now`.
    ///
    /// # Errors
    /// [`AuthorityError`].
    pub fn issue_client(
        &self,
        name: &Name,
        grant: &Grant,
        key: &PublicKey,
        now: u64,
        lifetime: u64,
    ) -> Result<Issued, AuthorityError> {
        if let Grant::Exports(exports) = grant
            && !(1..=MOST_EXPORTS).contains(&exports.len())
        {
            return Err(AuthorityError::Exports(exports.len()));
        }
        let cluster = self.certificate.cluster();
        let identity = Identity::Client(Client { cluster, name: name.clone(), grant: grant.clone() });
        self.issue(identity, &[], vec![ExtendedKeyUsagePurpose::ClientAuth], key, now, lifetime)
    }

    fn issue(
        &self,
        identity: Identity,
        hosts: &[Host],
        usages: Vec<ExtendedKeyUsagePurpose>,
        key: &PublicKey,
        now: u64,
        lifetime: u64,
    ) -> Result<Issued, AuthorityError> {
        let Facts { not_before, not_after, .. } = *self.certificate.facts();
        // No certificate may outlive the authority: its end would stop the whole cluster.
        if now < not_before || now.saturating_add(SHORTEST_LIFETIME) > not_after {
            return Err(AuthorityError::NotValid { not_before, not_after, now });
        }
        if lifetime < SHORTEST_LIFETIME {
            return Err(AuthorityError::TooShort(lifetime));
        }
        let mut params = template(&identity, Serial::random()?)?;
        params.distinguished_name = common_name(identity.name().map_or("", Name::as_str));
        params.not_before = when::calendar(now.saturating_sub(MOST_SKEW).max(not_before));
        params.not_after = when::calendar(now.saturating_add(lifetime).min(not_after));
        params.extended_key_usages = usages;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        for host in hosts {
            params.subject_alt_names.push(san(host)?);
        }
        let der = params.signed_by(&key.for_signing()?, &self.issuer)?.der().clone();
        let record = IssuedRecord {
            facts: Facts::read(&der)?,
            ca: self.certificate.fingerprint(),
            hosts: hosts.to_vec(),
        };
        Ok(Issued { chain: vec![der, self.certificate.der().clone()], record })
    }
}

/// The name of a host in a certificate or in a request for one.
pub(crate) fn san(host: &Host) -> Result<SanType, rcgen::Error> {
    Ok(match host {
        Host::Dns(name) => SanType::DnsName(Ia5String::try_from(name.as_str())?),
        Host::Ip(address) => SanType::IpAddress(*address),
    })
}

/// The identity as names of a certificate or of a request for one.
pub(crate) fn sans(identity: &Identity) -> Result<Vec<SanType>, rcgen::Error> {
    identity.uris().into_iter().map(|uri| Ok(SanType::URI(Ia5String::try_from(uri)?))).collect()
}

pub(crate) fn common_name(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}

fn template(identity: &Identity, serial: Serial) -> Result<CertificateParams, AuthorityError> {
    let mut params = CertificateParams::default();
    params.serial_number = Some(SerialNumber::from_slice(&serial.0));
    params.subject_alt_names = sans(identity)?;
    Ok(params)
}
