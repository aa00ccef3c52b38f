//! Invitations: the record of a token, and its redemption. Pure: the caller reads and writes the registry.

use serde::{Deserialize, Serialize};

use crate::name::{Fingerprint, Host, KeyId, Name, TokenId, TokenKey};
use crate::random::{self, NoRandomness};
use crate::token::{Claim, Endpoint, Proof, Secret, Token, TokenError};
use crate::when::{self, MOST_SKEW};

/// Longest validity of a token, in seconds: a week.
pub const LONGEST_TTL: u64 = 7 * 86_400;
/// Shortest validity of a token, in seconds.
pub const SHORTEST_TTL: u64 = 60;

/// The registry's record of a token. Whoever reads it cannot make the token from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// The token's id.
    pub id: TokenId,
    /// Checks the signature of the token's bearer, see [`Secret::key`].
    key: TokenKey,
    /// The only name under which the token admits a node; any name that is free otherwise.
    pub only_for: Option<Name>,
    /// Names and addresses that the node may have in its certificate, beside its own name.
    pub hosts: Vec<Host>,
    /// The authorities that the token names.
    pub pins: Vec<Fingerprint>,
    /// Second of its making, since 1970.
    pub made: u64,
    /// First second at which it is no longer valid, since 1970.
    pub expires: u64,
    /// Its use, if any.
    pub used: Option<Use>,
    /// Since when it admits nobody, because its node was revoked or the token withdrawn, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub void: Option<u64>,
    /// It admits `only_for` also where that name is revoked, and lifts the revocation of the name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub readmits: bool,
}

impl TokenRecord {
    /// It may still admit a host that has not joined with it.
    #[must_use]
    pub fn is_open(&self, now: u64) -> bool {
        self.used.is_none() && self.void.is_none() && now < self.expires
    }

    /// The record of a token that the revocation of node `name` voids: it was used by that node, or is only for it. `None` for
    /// any other.
    #[must_use]
    pub fn voided_by(&self, name: &Name, now: u64) -> Option<TokenRecord> {
        let of = |other: &Name| other.resembles(name.as_str());
        let concerned =
            self.used.as_ref().is_some_and(|used| of(&used.name)) || self.only_for.as_ref().is_some_and(of);
        concerned.then(|| self.withdrawn(now)).flatten()
    }

    /// The record once it admits nobody any more; `None` if that is so already.
    #[must_use]
    pub fn withdrawn(&self, now: u64) -> Option<TokenRecord> {
        self.void.is_none().then(|| TokenRecord { void: Some(now), ..self.clone() })
    }
}

/// The use of a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    /// The name of the node.
    pub name: Name,
    /// Its key.
    pub key: KeyId,
    /// When, in seconds since 1970.
    pub at: u64,
}

/// The reason why no invitation was made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InviteError {
    /// No random numbers.
    #[error(transparent)]
    Randomness(#[from] NoRandomness),
    /// A field does not fit into a token.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// Too short or too long.
    #[error("a token is valid for {} to {}, not for {}", when::span(SHORTEST_TTL), when::span(LONGEST_TTL), when::span(*.0))]
    Ttl(u64),
}

/// The content of an invitation.
#[derive(Clone, Debug)]
pub struct Invitation {
    /// The name of the node, if it is known.
    pub only_for: Option<Name>,
    /// Names and addresses for the node's certificate.
    pub hosts: Vec<Host>,
    /// The authorities trusted at present.
    pub pins: Vec<Fingerprint>,
    /// Nodes that answer a join.
    pub endpoints: Vec<Endpoint>,
    /// Validity in seconds, [`SHORTEST_TTL`] to [`LONGEST_TTL`].
    pub ttl: u64,
    /// Lifts the revocation of `only_for` when a host joins with the token, and not before.
    pub readmits: bool,
}

/// Makes a token and its record. The record must be in the registry before the token is shown.
///
/// # Errors
/// [`InviteError`].
pub fn invite(invitation: Invitation, now: u64) -> Result<(Token, TokenRecord), InviteError> {
    let Invitation { only_for, hosts, pins, endpoints, ttl, readmits } = invitation;
    if !(SHORTEST_TTL..=LONGEST_TTL).contains(&ttl) {
        return Err(InviteError::Ttl(ttl));
    }
    let token = Token::new(TokenId(random::bytes()?), Secret::random()?, pins.clone(), endpoints)?;
    let record = TokenRecord {
        id: token.id,
        key: token.secret.key(token.id),
        only_for,
        hosts,
        pins,
        made: now,
        expires: now.saturating_add(ttl),
        used: None,
        void: None,
        readmits,
    };
    Ok((token, record))
}

/// The reason why a token admits nobody. Its text goes to the joining host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenRefused {
    /// No such token, or not its secret. One answer for both: who guesses learns nothing.
    #[error("the cluster has no such token; make a new one with `weir cluster invite`")]
    Unknown,
    /// Too late.
    #[error(
        "the token expired {} ago, at {}, by the cluster's clock; make a new one with `weir cluster invite`",
        when::span(now.saturating_sub(*.expires)), when::at(*.expires)
    )]
    Expired {
        /// First second at which it was no longer valid.
        expires: u64,
        /// The answering node's time.
        now: u64,
    },
    /// The node that answers has an earlier time than the node that invited.
    #[error(
        "the token was made at {}, which is {} ahead of the answering node's clock; set the clocks of the cluster's nodes",
        when::at(*.made), when::span(made.saturating_sub(*.now))
    )]
    FromTheFuture {
        /// When it was made.
        made: u64,
        /// The answering node's time.
        now: u64,
    },
    /// The joining host's clock differs too much for certificates to work.
    #[error(
        "this host's clock is {} {} the cluster's, which says {}; set it (at most {} apart), then join again with the same token",
        when::span(cluster.abs_diff(*.joiner)), if joiner < cluster { "behind" } else { "ahead of" },
        when::at(*.cluster), when::span(MOST_SKEW)
    )]
    ClockSkew {
        /// The joining host's time.
        joiner: u64,
        /// The answering node's time.
        cluster: u64,
    },
    /// Used by another host.
    #[error(
        "the token was used at {} by node {}; every host needs its own: make one with `weir cluster invite`",
        when::at(used.at), used.name
    )]
    Used {
        /// By whom and when.
        used: Use,
    },
    /// Its node was revoked, or the token withdrawn.
    #[error("the token was withdrawn at {}, by itself or with its node; an administrator must make another one", when::at(*.0))]
    Void(u64),
    /// Made for another name.
    #[error("the token is for node {only_for}, not for {name}; join under that name, or make another token")]
    OtherName {
        /// The name in the record.
        only_for: Name,
        /// The requested name.
        name: Name,
    },
}

/// The proof that a joining host presents.
#[derive(Clone, Debug)]
pub struct Presented<'a> {
    /// The request of the host.
    pub claim: Claim<'a>,
    /// Its signature, see [`Secret::sign`].
    pub proof: &'a Proof,
    /// The host's key.
    pub key: KeyId,
}

/// Checks a token against its record, at the answering node's time. Returns the record with its use; the caller replaces the
/// record by it if nobody has changed it meanwhile, before it answers: so a token admits one host.
///
/// The same host may present its token again, with the same name and key: the first answer may have been lost.
///
/// # Errors
/// [`TokenRefused`]. Nothing but [`TokenRefused::Unknown`] is said to whoever cannot sign with the secret.
pub fn redeem(
    record: Option<&TokenRecord>,
    by: &Presented<'_>,
    now: u64,
) -> Result<TokenRecord, TokenRefused> {
    let record = proven(record, &by.claim, by.proof)?;
    let Claim { name, clock, .. } = by.claim;
    let (made, expires) = (record.made, record.expires);
    if now.saturating_add(MOST_SKEW) < made {
        return Err(TokenRefused::FromTheFuture { made, now });
    }
    if now >= expires {
        return Err(TokenRefused::Expired { expires, now });
    }
    if let Some(at) = record.void {
        return Err(TokenRefused::Void(at));
    }
    // Before the name: joining under that one would be refused, too.
    if let Some(used) = &record.used {
        let same = used.name == *name && used.key == by.key;
        return if same { Ok(record.clone()) } else { Err(TokenRefused::Used { used: used.clone() }) };
    }
    if let Some(only_for) = record.only_for.as_ref().filter(|only_for| *only_for != name) {
        return Err(TokenRefused::OtherName { only_for: only_for.clone(), name: name.clone() });
    }
    // Last: it is the only refusal after which the same token is worth another try.
    if now.abs_diff(clock) > MOST_SKEW {
        return Err(TokenRefused::ClockSkew { joiner: clock, cluster: now });
    }
    let used = Some(Use { name: name.clone(), key: by.key, at: now });
    Ok(TokenRecord { used, ..record.clone() })
}

/// The record, if the bearer of its token has made this claim.
pub(crate) fn proven<'a>(
    record: Option<&'a TokenRecord>,
    claim: &Claim<'_>,
    proof: &Proof,
) -> Result<&'a TokenRecord, TokenRefused> {
    let record = record.filter(|record| record.id == claim.token).ok_or(TokenRefused::Unknown)?;
    if proof.is_of(&record.key, claim) { Ok(record) } else { Err(TokenRefused::Unknown) }
}
