//! How a host becomes a node, and how a node renews its certificate: messages and decisions. The caller carries the messages and
//! reads and writes the registry.
//!
//! 1. The joining host makes a key and a request for a certificate ([`Joiner::new`]), and stores both: a repeated request must be
//!    the same host's.
//! 2. It connects with [`crate::joining_client`]. The handshake fails unless the node that answers belongs to the cluster that
//!    made the token; only then the host sends the secret ([`JoinRequest`]).
//! 3. The node decides ([`admit`]), writes the token's use and the certificate's record in one transaction, and answers.
//! 4. The host checks the answer ([`Joiner::complete`]) and stores it.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rcgen::CertificateParams;
use rustls::pki_types::CertificateDer;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::authority::{self, Authority, AuthorityError, Issued, IssuedRecord};
use crate::certificate::{CaCertificate, Facts, NotACertificate};
use crate::credentials::{BadCredentials, Credentials};
use crate::identity::{Identity, Node};
use crate::invitation::{self, Presented, TokenRecord, TokenRefused};
use crate::key::{Key, PublicKey};
use crate::name::{ClusterId, Fingerprint, Host, Name, TokenId};
use crate::pem;
use crate::request::{self, BadRequest};
use crate::revocation::Revocations;
use crate::token::{Secret, Token};
use crate::trust::{BadTrust, Mistrust, Purpose, Trust, signed};

/// The version of the messages.
pub const JOIN_VERSION: u64 = 1;
/// Largest message, in bytes.
pub const LARGEST_MESSAGE: usize = 64 << 10;

/// A joining host asks for a certificate.
#[derive(Clone, Serialize, Deserialize)]
pub struct JoinRequest {
    /// [`JOIN_VERSION`].
    pub v: u64,
    /// The token.
    pub token: TokenId,
    /// Its secret, in base64.
    secret: Zeroizing<String>,
    /// The requested name.
    pub name: Name,
    /// The request for a certificate (PKCS #10), in base64 of its DER form.
    pub csr: String,
    /// The host's time, in seconds since 1970.
    pub clock: u64,
}

impl std::fmt::Debug for JoinRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let JoinRequest { v, token, name, clock, .. } = self;
        f.debug_struct("JoinRequest")
            .field("v", v)
            .field("token", token)
            .field("name", name)
            .field("clock", clock)
            .finish_non_exhaustive()
    }
}

/// A node asks for a new certificate. It proves who it is by the connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RenewRequest {
    /// [`JOIN_VERSION`].
    pub v: u64,
    /// As in [`JoinRequest`].
    pub csr: String,
}

/// Reads a message. Its version first: one of another version may have another form, and the error must name the version.
fn decode<M: DeserializeOwned>(bytes: &[u8]) -> Result<M, BadMessage> {
    #[derive(Deserialize)]
    struct Version {
        v: u64,
    }
    if bytes.len() > LARGEST_MESSAGE {
        return Err(BadMessage::Malformed(format!("it is longer than {LARGEST_MESSAGE} bytes")));
    }
    let malformed = |error: serde_json::Error| BadMessage::Malformed(error.to_string());
    let Version { v } = serde_json::from_slice(bytes).map_err(malformed)?;
    if v != JOIN_VERSION {
        return Err(BadMessage::Version(v));
    }
    serde_json::from_slice(bytes).map_err(malformed)
}

/// A message that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMessage {
    /// Of another version of Weir.
    #[error(
        "the message has version {0}, this side reads version {JOIN_VERSION}; use the same version of Weir on both hosts"
    )]
    Version(u64),
    /// Not a message of this kind.
    #[error("not a message of a joining host: {0}")]
    Malformed(String),
}

macro_rules! messages {
    ($($message:ident),*) => {$(
        impl $message {
            /// Reads the JSON form, at most [`LARGEST_MESSAGE`] bytes.
            ///
            /// # Errors
            /// [`BadMessage`].
            pub fn decode(bytes: &[u8]) -> Result<$message, BadMessage> {
                decode(bytes)
            }
        }
    )*};
}

messages!(JoinRequest, RenewRequest, JoinAnswer);

/// The certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinAnswer {
    /// [`JOIN_VERSION`].
    pub v: u64,
    /// The node's certificate, then that of the authority, as text.
    pub certificates: String,
    /// All authorities that the cluster trusts, as text.
    pub authorities: String,
}

/// The reason why a host does not join. Its text goes to that host.
#[derive(Debug, thiserror::Error)]
pub enum JoinRefused {
    /// The token.
    #[error(transparent)]
    Token(#[from] TokenRefused),
    /// The request for a certificate.
    #[error("the request for a certificate is not allowed: {0}")]
    Request(#[from] BadRequest),
    /// Two nodes with one name.
    #[error(
        "node {0} exists; choose another name, or revoke the former node first: `weir cluster revoke {0}`"
    )]
    NameTaken(Name),
    /// A revoked name.
    #[error(
        "the name {0} was revoked; choose another one, or readmit it: `weir cluster invite --readmit --for {0}`"
    )]
    NameRevoked(Name),
    /// Not a node.
    #[error("only nodes renew their certificates here")]
    NotANode,
    /// The authority.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
}

/// The registry's records that answer a join request.
#[derive(Clone, Copy, Debug)]
pub struct Records<'a> {
    /// The record of the request's token, if there is one.
    pub token: Option<&'a TokenRecord>,
    /// All certificates.
    pub issued: &'a [IssuedRecord],
    /// All revocations.
    pub revoked: &'a Revocations,
    /// The trusted authorities.
    pub authorities: &'a [CaCertificate],
}

/// A decision to admit a host. Both records go to the registry in one transaction, unless the former have changed meanwhile;
/// only then the answer goes out.
#[derive(Clone, Debug)]
pub struct Admission {
    /// The token with its use; `None` for a renewal.
    pub token: Option<TokenRecord>,
    /// The new certificate's record.
    pub issued: IssuedRecord,
    /// The answer.
    pub answer: JoinAnswer,
}

/// Decides on a joining host: token, name, request. `now` is this node's time, `lifetime` the certificate's validity, in seconds.
///
/// # Errors
/// [`JoinRefused`]. Before the token's secret is proven, nothing but the token's id is looked at.
pub fn admit(
    authority: &Authority,
    records: Records<'_>,
    request: &JoinRequest,
    now: u64,
    lifetime: u64,
) -> Result<Admission, JoinRefused> {
    let JoinRequest { v: _, token, secret, name, csr, clock } = request;
    let secret = decode_secret(secret).ok_or(TokenRefused::Unknown)?;
    let presented = |key| Presented { id: *token, secret: &secret, name, key, clock: *clock };
    invitation::proven(records.token, *token, &secret)?;
    let wanted = request::read(csr)?;
    let token = invitation::redeem(records.token, &presented(wanted.key.id()), now)?;
    if records.revoked.nodes.contains_key(name) {
        return Err(JoinRefused::NameRevoked(name.clone()));
    }
    let cluster = authority.certificate().cluster();
    let identity = Identity::Node(Node { cluster, name: name.clone() });
    let taken = records.issued.iter().map(|record| &record.facts).any(|facts| {
        facts.identity == identity
            && facts.key != wanted.key.id()
            && now <= facts.not_after
            && records.revoked.covering(facts).is_none()
    });
    if taken {
        return Err(JoinRefused::NameTaken(name.clone()));
    }
    request::allowed(&wanted, &identity, &token.hosts)?;
    let issued = authority.issue_node(name, &wanted.hosts, &wanted.key, now, lifetime)?;
    Ok(admission(Some(token), issued, records.authorities))
}

/// Decides on the renewal of a node's certificate. `presented` is the certificate of the connection, see [`crate::other_end`];
/// `hosts` the names and addresses that the node may have beside its name.
///
/// # Errors
/// [`JoinRefused`].
pub fn renew(
    authority: &Authority,
    records: Records<'_>,
    presented: &Facts,
    hosts: &[Host],
    request: &RenewRequest,
    (now, lifetime): (u64, u64),
) -> Result<Admission, JoinRefused> {
    let Identity::Node(node) = &presented.identity else { return Err(JoinRefused::NotANode) };
    if records.revoked.covering(presented).is_some() {
        return Err(JoinRefused::NameRevoked(node.name.clone()));
    }
    let wanted = request::read(&request.csr)?;
    request::allowed(&wanted, &presented.identity, hosts)?;
    let issued = authority.issue_node(&node.name, &wanted.hosts, &wanted.key, now, lifetime)?;
    Ok(admission(None, issued, records.authorities))
}

fn admission(token: Option<TokenRecord>, issued: Issued, authorities: &[CaCertificate]) -> Admission {
    let answer = JoinAnswer {
        v: JOIN_VERSION,
        certificates: issued.pem(),
        authorities: authorities.iter().map(CaCertificate::pem).collect(),
    };
    Admission { token, issued: issued.record, answer }
}

fn decode_secret(text: &str) -> Option<Secret> {
    let bytes = Zeroizing::new(URL_SAFE_NO_PAD.decode(text).ok()?);
    <[u8; 32]>::try_from(&bytes[..]).ok().map(Secret::new)
}

/// The reason why an answer is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadAnswer {
    /// Not certificates.
    #[error("the answer's certificates: {0}")]
    Certificate(#[from] NotACertificate),
    /// Not for this host's key.
    #[error("the answer: {0}")]
    Credentials(#[from] BadCredentials),
    /// The authorities do not go together.
    #[error("the answer: {0}")]
    Trust(#[from] BadTrust),
    /// None of the authorities is one that the token names.
    #[error("the answer names no certificate authority that the token names; nothing was stored")]
    OtherPin,
    /// Signed by someone else, or not valid now.
    #[error("the answer's certificate: {0}")]
    Mistrust(#[from] Mistrust),
    /// For someone else.
    #[error("the answer's certificate is for {found}, not for node {expected}")]
    OtherName {
        /// Whom it is for.
        found: String,
        /// The requested name.
        expected: Name,
    },
}

/// A joining host, or a node that renews its certificate.
#[derive(Debug)]
pub struct Joiner {
    key: Key,
    name: Name,
    csr: String,
}

/// The result of a join, for the host.
#[derive(Debug)]
pub struct Joined {
    /// Its key and certificate.
    pub credentials: Credentials,
    /// The cluster's authorities.
    pub authorities: Vec<CaCertificate>,
    /// The cluster.
    pub cluster: ClusterId,
}

impl Joiner {
    /// A host that asks for a certificate of `name`, for clients that reach it at `hosts`.
    ///
    /// # Errors
    /// [`AuthorityError::Encoding`].
    pub fn new(key: Key, name: Name, hosts: &[Host]) -> Result<Joiner, AuthorityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = authority::common_name(name.as_str());
        params.subject_alt_names = hosts.iter().map(authority::san).collect::<Result<_, _>>()?;
        let csr = URL_SAFE_NO_PAD.encode(params.serialize_request(key.pair())?.der());
        Ok(Joiner { key, name, csr })
    }

    /// The request to join, at this host's time.
    #[must_use]
    pub fn request(&self, token: &Token, clock: u64) -> JoinRequest {
        JoinRequest {
            v: JOIN_VERSION,
            token: token.id,
            secret: Zeroizing::new(URL_SAFE_NO_PAD.encode(token.secret.bytes())),
            name: self.name.clone(),
            csr: self.csr.clone(),
            clock,
        }
    }

    /// The request to renew.
    #[must_use]
    pub fn renewal(&self) -> RenewRequest {
        RenewRequest { v: JOIN_VERSION, csr: self.csr.clone() }
    }

    /// Checks the answer at this host's time: an authority in `pins`, signed by it or by one that it names beside itself, for this
    /// host's key and name. `pins` are the token's, or for a renewal the authorities trusted so far.
    ///
    /// # Errors
    /// [`BadAnswer`].
    pub fn complete(self, answer: &JoinAnswer, pins: &[Fingerprint], now: u64) -> Result<Joined, BadAnswer> {
        let authorities = CaCertificate::all_from_pem(answer.authorities.as_bytes())?;
        let pinned = authorities.iter().find(|one| pins.contains(&one.fingerprint()));
        let cluster = pinned.ok_or(BadAnswer::OtherPin)?.cluster();
        let chain: Vec<CertificateDer<'static>> =
            pem::certificates(answer.certificates.as_bytes()).map_err(NotACertificate::Encoding)?;
        let credentials = Credentials::new(self.key, chain)?;
        let facts = credentials.facts();
        let expected = Identity::Node(Node { cluster, name: self.name.clone() });
        if facts.identity != expected {
            return Err(BadAnswer::OtherName { found: facts.identity.to_string(), expected: self.name });
        }
        let trust = Trust::new(cluster, authorities, Revocations::default())?;
        for purpose in [Purpose::Server, Purpose::Client] {
            signed(&credentials.chain()[0], facts, trust.authorities(), purpose, now)?;
        }
        Ok(Joined { authorities: trust.authorities().to_vec(), credentials, cluster })
    }

    /// The key's public part, to recognise a repeated request.
    #[must_use]
    pub fn key(&self) -> PublicKey {
        self.key.public()
    }
}
