//! Identities in a cluster: its certificate authority, join tokens, certificates, revocation, and the TLS configurations that
//! check them. Knows nothing of disks, exports, frames or the registry, and has no clock: every function takes the time, in
//! seconds since 1970, and TLS configurations take a `TimeProvider`.
//!
//! # Rules
//!
//! - An identity is a URI in a certificate ([`Identity`]). A node's certificate says which node it is; what that node may ask for
//!   is the registry's word, never the certificate's.
//! - TLS 1.3 only, no resumption. Trust and credentials change under a configuration ([`TrustStore`], [`CredentialStore`]).
//! - A certificate has a record before anyone has it ([`IssuedRecord`]), so that it can be revoked.
//! - Revocation covers a whole name; no two hosts' clocks are compared for it ([`Revocations`]).
//! - A token's secret never leaves the host that has the token: its bearer signs with a key derived from it ([`Secret::sign`]), and
//!   the registry holds only the public key ([`TokenRecord`]). So neither a node that answers or forwards a request to join nor a
//!   reader of the registry can join with it. The request goes only to a node of the cluster that made the token
//!   ([`joining_client`]), and the answer is believed only as far as an authority in the token has signed it.
//! - Only a certificate with a record renews ([`renew`]); a connection ends with the trust in the authority that signed its
//!   certificate ([`Trust::recheck`]).
//!
//! # What a node calls
//!
//! *Records.* One key each, versioned JSON, changed by compare-and-swap: [`Authorities`], [`Revocations`], [`Names`], one
//! [`TokenRecord`] for each token, one [`IssuedRecord`] for each serial number. The node's own record also says which authorities its handshakes
//! use ([`NodeTrusts`]), and which hosts its certificate may name.
//!
//! *`weir cluster init`*: [`ClusterId::random`], [`Authority::create`], [`Store::create_authority`]; then for the first node
//! [`Store::joining_key`], [`Authority::issue_node`], [`Credentials::new`]; then the records; then [`Store::replace_trust`],
//! [`Store::create_node`], [`Store::forget_joining_key`]. A host with `node.pem` is refused. An attempt that ended after the records
//! is known by its key.
//!
//! *`weir cluster invite`*: [`invite`] with the fingerprints of [`Authorities::trusted`] and the API's addresses; write the
//! [`TokenRecord`]; print [`Token::text`].
//!
//! *`weir cluster join`*: parse the token; [`Store::joining_key`], [`Joiner::new`]; connect to each endpoint in turn with
//! [`joining_client`]; post [`Joiner::request`]; [`JoinAnswer::decode`],
//! [`Joiner::complete`]; [`Store::replace_trust`], [`Store::create_node`],
//! [`Store::forget_joining_key`], in this order: a host with `node.pem` has joined. The node that answers reads the records, calls
//! [`JoinRequest::decode`] and [`admit`], and writes everything in the [`Admission`] in *one* transaction that requires all of its
//! conditions; on failure it reads again and repeats. It answers only after that, and at most a few times a second for each
//! address. Bodies are at most [`LARGEST_MESSAGE`] bytes. Only a node that holds the authority's key answers; others forward.
//!
//! *A running node*: at start [`Store::node`], [`Store::trust`], [`Store::revocations`], [`Trust::new`], [`TrustStore::new`] with a [`Witness`] that writes
//! the audit log, [`CredentialStore::new`]. At every change of [`Authorities`] or [`Revocations`]: first
//! [`TrustStore::set`] and [`Trust::recheck`] for every open connection, and close those that fail: a directory that cannot be
//! written must not delay a revocation. Then [`Store::replace_trust`] and [`Store::replace_revocations`], and last the node's record: what
//! it announces must survive a restart. While the registry is away the last trust counts
//! (P12). A connection may outlive the certificate that opened it by no more than the interval of that check; reconnect before
//! [`Facts::not_after`], when no request is under way.
//!
//! *Peers*: [`Tls::peer_server`], [`Tls::peer_client`]; after the handshake [`peer`] gives the identity that the greeting's name
//! must equal. *API*: [`Tls::api_server`]; [`other_end`] gives the client's role, or nobody. *NBD*: [`Tls::nbd_server`];
//! [`Client::may_open`]. A failed handshake is logged with [`explain()`].
//!
//! *Renewal*: from [`Facts::renew_at`] on, or at once if [`Authorities::must_renew`]: [`Joiner::renewal`] over the API with the
//! node's certificate; the answering node calls [`renew`] and writes the record; then [`Joiner::complete`],
//! [`Store::replace_node`], [`CredentialStore::set`]. Then the node writes
//! [`Revocations::with_replaced`]. A failure is an event, and is repeated.
//!
//! *`weir cluster revoke`*: [`Revocations::revoking_node`]; a join with a token of
//! `invite --readmit`: [`Revocations::readmitting`]. *`rotate`*: a new [`Authority`], [`Store::create_next_authority`], then [`Authorities::introduce`],
//! [`Authorities::renew`] and [`Store::promote_next_authority`], [`Authorities::retire`], each when the one before has reached
//! everyone; [`Authorities::obstacles`] says who has not. Between the second step and the third a node shows clients its former
//! certificate ([`Store::keep_former_node`], [`CredentialStore::set_for_clients`]): the files of a client from before the rotation
//! name only the former authority. Those that were made in between name both, and [`still_trusted`] with
//! [`Store::replace_client_trust`] takes the former one out of them. *`list`*: [`IssuedRecord`]s with [`lasts`].

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod authority;
mod certificate;
mod credentials;
mod explain;
mod hex;
mod identity;
mod invitation;
mod join;
mod key;
mod name;
mod pem;
mod protocol;
mod random;
mod request;
mod revocation;
mod rotation;
mod store;
mod store_error;
mod tls;
mod token;
mod trust;
mod verify;
mod when;

pub use authority::{
    Authority, AuthorityError, CA_LIFETIME, Issued, IssuedRecord, NODE_LIFETIME, SHORTEST_LIFETIME,
};
pub use certificate::{CaCertificate, Facts, NotACertificate};
pub use credentials::{BadCredentials, CredentialStore, Credentials};
pub use explain::{explain, lasts};
pub use identity::{Client, Grant, Identity, MOST_EXPORTS, Node, NotAnIdentity, Role};
pub use invitation::{
    Invitation, InviteError, LONGEST_TTL, Presented, SHORTEST_TTL, TokenRecord, TokenRefused,
    Use as TokenUse, invite, redeem,
};
pub use join::{
    Admission, BadAnswer, BadMessage, ClientAdmission, Condition, JOIN_VERSION, JoinAnswer, JoinRefused,
    JoinRequest, Joined, Joiner, LARGEST_MESSAGE, Names, RecordId, Records, RenewRequest, Seen, admit,
    admit_client, renew,
};
pub use key::{Key, NotAKey, PublicKey};
pub use name::{
    ClusterId, ExportName, Fingerprint, Host, KeyId, LONGEST_EXPORT, LONGEST_NAME, Malformed, Name, Serial,
    TokenId, TokenKey,
};
pub use protocol::{API_PROTOCOL, NODE_API_PROTOCOL, PEER_PROTOCOL};
pub use random::NoRandomness;
pub use request::{BadRequest, MOST_HOSTS};
pub use revocation::{Holder, Revocation, Revocations, RevokedSerial};
pub use rotation::{
    Authorities, NodeTrusts, NotOfTheCluster, Obstacle, RotationRefused, StoredCa, Use, still_trusted,
};
pub use store::Store;
pub use store_error::StoreError;
pub use tls::{ClientCertificate, Tls, joining_client, other_end, peer, provider};
pub use token::{
    Claim, Endpoint, LONGEST_TOKEN, MOST_ENDPOINTS, MOST_PINS, Proof, Secret, Token, TokenError,
};
pub use trust::{BadTrust, Mistrust, OtherEnd, Purpose, Trust, TrustStore, Witness};
pub use verify::Accept;
pub use when::{MOST_SKEW, span, unix};
