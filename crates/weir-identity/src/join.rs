//! How a host becomes a node, and how a node renews its certificate: messages and decisions. The caller carries the messages and
//! reads and writes the registry.
//!
//! 1. The joining host makes a key and a request for a certificate ([`Joiner::new`]), and stores both: a repeated request must be
//!    the same host's.
//! 2. It connects with [`crate::joining_client`]. The handshake fails unless the node that answers belongs to the cluster that
//!    made the token. The host signs its request with a key derived from the token's secret ([`JoinRequest`]); the secret stays
//!    with it. So a node that answers, or forwards the request, cannot ask for a certificate of its own with that token.
//! 3. The node decides ([`admit`]), writes all that the decision says in one transaction ([`Admission`]), and answers.
//! 4. The host checks the answer ([`Joiner::complete`]) and stores it.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rcgen::CertificateParams;
use rustls::pki_types::CertificateDer;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::authority::{self, Authority, AuthorityError, Issued, IssuedRecord};
use crate::certificate::{CaCertificate, Facts, NotACertificate};
use crate::credentials::{BadCredentials, Credentials};
use crate::identity::{Client, Grant, Identity, Node};
use crate::invitation::{self, Presented, TokenRecord, TokenRefused};
use crate::key::{Key, PublicKey};
use crate::name::{ClusterId, Fingerprint, Host, KeyId, Name, Serial, TokenId};
use crate::pem;
use crate::request::{self, BadRequest, Wanted};
use crate::revocation::{Holder, Revocations};
use crate::token::{Claim, Proof, Token};
use crate::trust::{BadTrust, Mistrust, Purpose, Trust, signed};
use crate::when::{self, MOST_SKEW};

/// The version of the messages.
pub const JOIN_VERSION: u64 = 1;
/// Largest message, in bytes.
pub const LARGEST_MESSAGE: usize = 64 << 10;

/// A joining host asks for a certificate. No part of it is secret.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JoinRequest {
    /// [`JOIN_VERSION`].
    pub v: u64,
    /// The token.
    pub token: TokenId,
    /// The signature of the token's bearer over all below.
    proof: Proof,
    /// The requested name.
    pub name: Name,
    /// The request for a certificate (PKCS #10), in base64 of its DER form.
    pub csr: String,
    /// The host's time, in seconds since 1970.
    pub clock: u64,
}

impl JoinRequest {
    fn claim(&self) -> Claim<'_> {
        Claim { token: self.token, name: &self.name, csr: &self.csr, clock: self.clock }
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
        "node {0} exists; choose another name. Only if the host of {0} is gone or has lost its key: `weir cluster revoke {0}`, then \
         join with a token of `weir cluster invite --readmit --for {0}`"
    )]
    NameTaken(Name),
    /// A name that clients of another node use for it, or the other way round.
    #[error("{wanted} is a host name of node {of}; choose another name")]
    HostTaken {
        /// The requested name or host.
        wanted: String,
        /// The node that has it.
        of: Name,
    },
    /// A revoked name.
    #[error(
        "the name {0} was revoked; choose another one, or readmit it: `weir cluster invite --readmit --for {0}`"
    )]
    NameRevoked(Name),
    /// A revoked name of a client.
    #[error("the client name {0} was revoked; choose another one")]
    ClientRevoked(Name),
    /// A key that may be in wrong hands.
    #[error(
        "this host's key was revoked together with a node's certificate; move its directory of keys away, so that it makes a new \
         key, then join with a new token"
    )]
    KeyRevoked,
    /// A copy of an old certificate.
    #[error("this certificate was replaced by a newer one of {0}; only the newest one renews")]
    Replaced(Name),
    /// A certificate that the cluster does not know.
    #[error(
        "the cluster has no record of this certificate of {0}; whoever made it had the authority's key: rotate the authority"
    )]
    NoRecord(Name),
    /// Too late.
    #[error("this certificate of {0} has ended; join with a new token")]
    Ended(Name),
    /// Too early.
    #[error(
        "this certificate of {name} is not due before {}, and the clock of the node that signs says {}; compare the clocks",
        when::at(*.at), when::at(*.now)
    )]
    NotDue {
        /// Whose.
        name: Name,
        /// When it is due, in seconds since 1970.
        at: u64,
        /// The time of the node that signs.
        now: u64,
    },
    /// Renewed again and again.
    #[error(
        "{0} has {MOST_CERTIFICATES} valid certificates; something asks for new ones and does not use them: see the log of {0}"
    )]
    TooMany(Name),
    /// Not a node.
    #[error("only nodes renew their certificates here")]
    NotANode,
    /// The authority.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
}

/// Certificates of one node that count at once: lost answers leave some.
const MOST_CERTIFICATES: usize = 8;

/// The names that nodes have, by [`Name::folded`], and the key of each. Every admission and renewal changes this record, and
/// requires that nobody else has changed it meanwhile: so two decisions on one state never both count.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// By name, in lower case.
    pub nodes: BTreeMap<String, KeyId>,
}

impl Names {
    fn with(&self, name: &Name, key: KeyId) -> Names {
        let mut names = self.clone();
        names.nodes.insert(name.folded(), key);
        names
    }
}

/// A record as it was read.
#[derive(Debug)]
pub struct Seen<'a, R: ?Sized> {
    /// Its content; that of a missing one.
    pub record: &'a R,
    /// The registry's revision of it; `None`: it does not exist.
    pub revision: Option<u64>,
}

// Derived, they would be bound to records that can be copied.
impl<R: ?Sized> Clone for Seen<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R: ?Sized> Copy for Seen<'_, R> {}

/// The registry's records that answer a request.
#[derive(Clone, Copy, Debug)]
pub struct Records<'a> {
    /// The record of the request's token, if there is one.
    pub token: Option<Seen<'a, TokenRecord>>,
    /// All certificates, as of a revision not before that of any other record here.
    pub issued: &'a [IssuedRecord],
    /// All names.
    pub names: Seen<'a, Names>,
    /// All revocations.
    pub revoked: Seen<'a, Revocations>,
    /// The trusted authorities, from the record of [`crate::Authorities`].
    pub authorities: Seen<'a, [CaCertificate]>,
}

/// A record in the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordId {
    /// [`crate::Authorities`].
    Authorities,
    /// [`Revocations`].
    Revocations,
    /// [`Names`].
    Names,
    /// A [`TokenRecord`].
    Token(TokenId),
    /// An [`IssuedRecord`].
    Issued(Serial),
}

/// A record must not have changed since the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Which.
    pub record: RecordId,
    /// Its revision; `None`: it must not exist.
    pub revision: Option<u64>,
}

/// A decision to give a host a certificate. All records go to the registry in one transaction, which requires all `conditions`;
/// if one does not hold, the caller reads again and decides again. The answer goes out only after the transaction.
#[derive(Clone, Debug)]
pub struct Admission {
    /// The conditions of the transaction.
    pub conditions: Vec<Condition>,
    /// The token with its use; `None` for a renewal.
    pub token: Option<TokenRecord>,
    /// The names with this node's.
    pub names: Names,
    /// The new certificate's record.
    pub issued: IssuedRecord,
    /// The revocations without the name that a token readmits; `None`: they stay.
    pub revoked: Option<Revocations>,
    /// The answer.
    pub answer: JoinAnswer,
}

/// Decides on a joining host: token, name, request. `now` is this node's time, `lifetime` the certificate's validity, in seconds.
///
/// # Errors
/// [`JoinRefused`]. Before the token's signature is checked, nothing else of the request is looked at.
pub fn admit(
    authority: &Authority,
    records: Records<'_>,
    request: &JoinRequest,
    now: u64,
    lifetime: u64,
) -> Result<Admission, JoinRefused> {
    let JoinRequest { proof, name, csr, .. } = request;
    let token = records.token.map(|seen| seen.record);
    let claim = request.claim();
    invitation::proven(token, &claim, proof)?;
    let wanted = request::read(csr)?;
    let key = wanted.key.id();
    let token = invitation::redeem(token, &Presented { claim, proof, key }, now)?;
    let revoked = records.revoked.record;
    let issued = || records.issued.iter().map(|record| &record.facts);
    let readmitted = revoked.names_node(name).then(|| revoked.readmitting(Holder::Node, name, issued(), now));
    if readmitted.is_some() && !token.readmits {
        return Err(JoinRefused::NameRevoked(name.clone()));
    }
    if revoked.of_key(key, issued()).is_some() {
        return Err(JoinRefused::KeyRevoked);
    }
    free(records, name, &wanted, now)?;
    let identity = Identity::Node(Node { cluster: authority.certificate().cluster(), name: name.clone() });
    request::allowed(&wanted, &identity, &token.hosts)?;
    let issued = authority.issue_node(name, &wanted.hosts, &wanted.key, now, lifetime)?;
    Ok(Admission { revoked: readmitted, ..admission(Some(token), records, issued) })
}

/// No other node has this name, or is called so.
fn free(records: Records<'_>, name: &Name, wanted: &Wanted, now: u64) -> Result<(), JoinRefused> {
    let counts = |record: &&IssuedRecord| {
        now <= record.facts.not_after && records.revoked.record.covering(&record.facts).is_none()
    };
    for record in records.issued.iter().filter(counts) {
        let Identity::Node(other) = &record.facts.identity else { continue };
        if other.name == *name && record.facts.key == wanted.key.id() {
            continue;
        }
        if other.name.resembles(name.as_str()) {
            return Err(JoinRefused::NameTaken(other.name.clone()));
        }
        let of = || other.name.clone();
        let named = |host: &Host| matches!(host, Host::Dns(text) if name.resembles(text));
        if record.hosts.iter().any(named) {
            return Err(JoinRefused::HostTaken { wanted: name.to_string(), of: of() });
        }
        let names = |host: &&Host| matches!(host, Host::Dns(text) if other.name.resembles(text));
        if let Some(host) = wanted.hosts.iter().find(names) {
            return Err(JoinRefused::HostTaken { wanted: host.to_string(), of: of() });
        }
    }
    Ok(())
}

/// Decides on the renewal of a node's certificate. `presented` is the certificate of the connection, see [`crate::other_end`];
/// `hosts` the names and addresses that the node may have beside its name.
///
/// `signs`: the node itself has the authority's key, and renews its own certificate: also one that has ended, because nobody else may be
/// there to sign.
///
/// # Errors
/// [`JoinRefused`]. A certificate without a record renews nothing: a thief of an authority's key would turn forged certificates
/// into real ones, which outlive that authority.
pub fn renew(
    authority: &Authority,
    records: Records<'_>,
    presented: &Facts,
    hosts: &[Host],
    request: &RenewRequest,
    (now, lifetime): (u64, u64),
    signs: bool,
) -> Result<Admission, JoinRefused> {
    let Identity::Node(node) = &presented.identity else { return Err(JoinRefused::NotANode) };
    let revoked = records.revoked.record;
    if revoked.is_replaced(presented) {
        return Err(JoinRefused::Replaced(node.name.clone()));
    }
    if revoked.covering(presented).is_some() {
        return Err(JoinRefused::NameRevoked(node.name.clone()));
    }
    let signers = records.authorities.record;
    let trusted = |record: &IssuedRecord| signers.iter().any(|one| one.fingerprint() == record.ca);
    if !records.issued.iter().any(|record| record.facts == *presented && trusted(record)) {
        return Err(JoinRefused::NoRecord(node.name.clone()));
    }
    if now > presented.not_after && !signs {
        return Err(JoinRefused::Ended(node.name.clone()));
    }
    let (signer, early) =
        (authority.certificate().fingerprint(), presented.renew_at().saturating_sub(MOST_SKEW));
    let signed_by = records.issued.iter().find(|record| record.facts == *presented).map(|record| record.ca);
    // Each certificate is a record, and an entry of the revocations if its holder is revoked: no holder makes as many as it likes.
    if now < early && signed_by == Some(signer) {
        return Err(JoinRefused::NotDue { name: node.name.clone(), at: presented.renew_at(), now });
    }
    let counts = |one: &&IssuedRecord| {
        one.facts.identity == presented.identity
            && now <= one.facts.not_after
            && revoked.covering(&one.facts).is_none()
    };
    if records.issued.iter().filter(counts).count() >= MOST_CERTIFICATES {
        return Err(JoinRefused::TooMany(node.name.clone()));
    }
    let wanted = request::read(&request.csr)?;
    request::allowed(&wanted, &presented.identity, hosts)?;
    let issued = authority.issue_node(&node.name, &wanted.hosts, &wanted.key, now, lifetime)?;
    Ok(admission(None, records, issued))
}

/// Decides on a client's request for a certificate, which someone who may do so makes for it.
///
/// # Errors
/// [`JoinRefused`].
pub fn admit_client(
    authority: &Authority,
    records: Records<'_>,
    (name, grant): (&Name, &Grant),
    csr: &str,
    (now, lifetime): (u64, u64),
) -> Result<ClientAdmission, JoinRefused> {
    let revoked = records.revoked.record;
    if revoked.clients.keys().any(|other| other.resembles(name.as_str())) {
        return Err(JoinRefused::ClientRevoked(name.clone()));
    }
    let wanted = request::read(csr)?;
    let cluster = authority.certificate().cluster();
    let identity = Identity::Client(Client { cluster, name: name.clone(), grant: grant.clone() });
    request::allowed(&wanted, &identity, &[])?;
    if let Some(host) = wanted.hosts.first() {
        return Err(BadRequest::Host(host.clone()).into());
    }
    if revoked.of_key(wanted.key.id(), records.issued.iter().map(|record| &record.facts)).is_some() {
        return Err(JoinRefused::KeyRevoked);
    }
    let issued = authority.issue_client(name, grant, &wanted.key, now, lifetime)?;
    let conditions = conditions(records, &issued.record.facts);
    let answer = answer(&issued, records.authorities.record);
    Ok(ClientAdmission { conditions, issued: issued.record, answer })
}

/// A decision to give a client a certificate; as [`Admission`].
#[derive(Clone, Debug)]
pub struct ClientAdmission {
    /// The conditions of the transaction.
    pub conditions: Vec<Condition>,
    /// The new certificate's record.
    pub issued: IssuedRecord,
    /// The answer.
    pub answer: JoinAnswer,
}

fn answer(issued: &Issued, authorities: &[CaCertificate]) -> JoinAnswer {
    let authorities = authorities.iter().map(CaCertificate::pem).collect();
    JoinAnswer { v: JOIN_VERSION, certificates: issued.pem(), authorities }
}

fn conditions(records: Records<'_>, facts: &Facts) -> Vec<Condition> {
    let Records { revoked, authorities, .. } = records;
    vec![
        Condition { record: RecordId::Revocations, revision: revoked.revision },
        Condition { record: RecordId::Authorities, revision: authorities.revision },
        Condition { record: RecordId::Issued(facts.serial), revision: None },
    ]
}

fn admission(token: Option<TokenRecord>, records: Records<'_>, issued: Issued) -> Admission {
    let Records { token: seen, names, authorities, .. } = records;
    let answer = answer(&issued, authorities.record);
    let facts = &issued.record.facts;
    let mut conditions = conditions(records, facts);
    conditions.push(Condition { record: RecordId::Names, revision: names.revision });
    if let Some(seen) = seen {
        conditions.push(Condition { record: RecordId::Token(seen.record.id), revision: seen.revision });
    }
    let name = facts.identity.name().expect("the authority issued it for a node, which has a name");
    let names = names.record.with(name, facts.key);
    Admission { conditions, token, names, issued: issued.record, revoked: None, answer }
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
    /// One of the authorities is none that whoever asked trusts.
    #[error(
        "the answer names the certificate authority {0}, which the files of the one who asked do not; nothing was stored"
    )]
    NotTrusted(Fingerprint),
    /// Signed by someone else, or not valid now.
    #[error("the answer's certificate: {0}")]
    Mistrust(#[from] Mistrust),
    /// For someone else.
    #[error("the answer's certificate is for {found}, not for {expected}")]
    OtherName {
        /// Whom it is for.
        found: String,
        /// The requested identity.
        expected: String,
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
        let claim = Claim { token: token.id, name: &self.name, csr: &self.csr, clock };
        JoinRequest {
            v: JOIN_VERSION,
            token: token.id,
            proof: token.secret.sign(&claim),
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

    /// Checks the answer at this host's time: signed by an authority in `pins`, for this host's key and name. `pins` are the
    /// token's, or for a renewal the authorities trusted so far. An authority that `pins` does not name is left out: the node
    /// that answers may be hostile, and only the registry says which authority follows.
    ///
    /// # Errors
    /// [`BadAnswer`].
    pub fn complete(self, answer: &JoinAnswer, pins: &[Fingerprint], now: u64) -> Result<Joined, BadAnswer> {
        let mut authorities = CaCertificate::all_from_pem(answer.authorities.as_bytes())?;
        authorities.retain(|one| pins.contains(&one.fingerprint()));
        let of = |cluster, name| Identity::Node(Node { cluster, name });
        self.checked(answer, authorities, of, &[Purpose::Server, Purpose::Client], now)
    }

    /// Checks the answer for a client. `pins`: the authorities that whoever asked trusts already; `None` if the answer came over a
    /// node's local socket, which is trusted. A node of another host may be hostile, and the new files would trust whomever it
    /// names.
    ///
    /// # Errors
    /// [`BadAnswer`].
    pub fn complete_client(
        self,
        answer: &JoinAnswer,
        pins: Option<&[Fingerprint]>,
        grant: Grant,
        now: u64,
    ) -> Result<Joined, BadAnswer> {
        let authorities = CaCertificate::all_from_pem(answer.authorities.as_bytes())?;
        let is_known = |one: &CaCertificate| pins.is_none_or(|pins| pins.contains(&one.fingerprint()));
        // Leaving it out would make files that the next step of a rotation makes useless.
        if let Some(other) = authorities.iter().find(|one| !is_known(one)) {
            return Err(BadAnswer::NotTrusted(other.fingerprint()));
        }
        let of = |cluster, name| Identity::Client(Client { cluster, name, grant });
        self.checked(answer, authorities, of, &[Purpose::Client], now)
    }

    fn checked(
        self,
        answer: &JoinAnswer,
        authorities: Vec<CaCertificate>,
        expected: impl FnOnce(ClusterId, Name) -> Identity,
        purposes: &[Purpose],
        now: u64,
    ) -> Result<Joined, BadAnswer> {
        let cluster = authorities.first().ok_or(BadAnswer::OtherPin)?.cluster();
        let chain: Vec<CertificateDer<'static>> =
            pem::certificates(answer.certificates.as_bytes()).map_err(NotACertificate::Encoding)?;
        let credentials = Credentials::new(self.key, chain)?;
        let facts = credentials.facts();
        let expected = expected(cluster, self.name.clone());
        // The issuer adds the identities of the exports' disks.
        if facts.identity.clone().by_names() != expected.clone().by_names() {
            return Err(BadAnswer::OtherName {
                found: facts.identity.to_string(),
                expected: expected.to_string(),
            });
        }
        let trust = Trust::new(cluster, authorities, Revocations::default())?;
        for purpose in purposes {
            signed(&credentials.chain()[0], facts, trust.authorities(), *purpose, now)?;
        }
        Ok(Joined { authorities: trust.authorities().to_vec(), credentials, cluster })
    }

    /// The key's public part, to recognise a repeated request.
    #[must_use]
    pub fn key(&self) -> PublicKey {
        self.key.public()
    }
}
