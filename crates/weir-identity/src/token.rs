//! Join tokens: what an operator carries from the cluster to a new host.
//!
//! The text is `weir-join-1.` and the unpadded URL-safe base64 (RFC 4648 §5) of, in this order:
//!
//! | bytes | content |
//! |---|---|
//! | 2 | length of all that follows, checksum included, big-endian |
//! | 8 | id of the token |
//! | 32 | secret |
//! | 1, then 32 each | number of authorities (1 or 2), SHA-256 fingerprint of each |
//! | 1, then 1 and text each | number of endpoints (1 to 8), length and text of each, `HOST:PORT` |
//! | 4 | CRC-32C of the whole text's version and all bytes above, big-endian |
//!
//! The version is outside of the encoding, so that any later version can be named.

use std::fmt;
use std::str::FromStr;

use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use base64::{DecodeError, Engine};
use ring::digest::SHA256_OUTPUT_LEN;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::name::{Fingerprint, Host, Name, TokenId, TokenKey, sha256};
use crate::random::{self, NoRandomness};

/// Most endpoints in one token.
pub const MOST_ENDPOINTS: usize = 8;
/// Most authorities in one token: two while the authority is rotated.
pub const MOST_PINS: usize = 2;
/// Longest text of a token, in bytes.
pub const LONGEST_TOKEN: usize = 4096;

const PREFIX: &str = "weir-join-";
const VERSION: &str = "1";
const CHECKSUM: usize = 4;

/// Separates the signing key from all other hashes of the same secret.
const KEY_CONTEXT: &[u8] = b"weir join token 1 signing key";
/// Separates these signatures from all others by the same key.
const CLAIM_CONTEXT: &[u8] = b"weir join request 1";

/// The secret of a token. Never shown except in the token's text, and never sent: its bearer signs with a key derived from it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<[u8; 32]>);

impl Secret {
    /// A secret from its bytes.
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Secret {
        Secret(Zeroizing::new(bytes))
    }

    pub(crate) fn random() -> Result<Secret, NoRandomness> {
        random::bytes().map(Secret::new)
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The signing key of the token with this secret. The secret is random, so a derivation that is slow to compute would add
    /// nothing.
    fn signing(&self, token: TokenId) -> Ed25519KeyPair {
        let seed = Zeroizing::new(sha256(&[KEY_CONTEXT, &token.0, self.bytes()]));
        // Fails only for seeds of another length.
        Ed25519KeyPair::from_seed_unchecked(&*seed).expect("a seed has 32 bytes")
    }

    /// The public key of the token with this secret: whoever has it can check signatures, and make none.
    #[must_use]
    pub fn key(&self, token: TokenId) -> TokenKey {
        let mut key = TokenKey([0; 32]);
        key.0.copy_from_slice(self.signing(token).public_key().as_ref());
        key
    }

    /// Signs a claim. A signature is worth nothing for another claim.
    #[must_use]
    pub fn sign(&self, claim: &Claim<'_>) -> Proof {
        Proof(URL_SAFE_NO_PAD.encode(self.signing(claim.token).sign(&claim.message())))
    }
}

/// The request of a token's bearer. The signature covers all of it: a node that forwards the request cannot put its own key
/// or another name into it.
#[derive(Clone, Copy, Debug)]
pub struct Claim<'a> {
    /// The token.
    pub token: TokenId,
    /// The requested name.
    pub name: &'a Name,
    /// The request for a certificate (PKCS #10), in base64 of its DER form.
    pub csr: &'a str,
    /// The host's time, in seconds since 1970.
    pub clock: u64,
}

impl Claim<'_> {
    /// One sequence of bytes for each claim: parts of variable length have theirs before them.
    fn message(&self) -> Vec<u8> {
        let Claim { token, name, csr, clock } = self;
        let mut message = [CLAIM_CONTEXT, &token.0, &clock.to_be_bytes()].concat();
        for part in [name.as_str(), csr] {
            message.extend((part.len() as u64).to_be_bytes());
            message.extend(part.as_bytes());
        }
        message
    }
}

/// The signature of a token's bearer, in base64. It may be shown: it proves nothing but its claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Proof(String);

impl Proof {
    pub(crate) fn is_of(&self, key: &TokenKey, claim: &Claim<'_>) -> bool {
        let signature = URL_SAFE_NO_PAD.decode(&self.0).unwrap_or_default();
        UnparsedPublicKey::new(&ED25519, key.0).verify(&claim.message(), &signature).is_ok()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Where a node answers: `HOST:PORT`, an IPv6 address in brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// The host.
    pub host: Host,
    /// The TCP port, not 0.
    pub port: u16,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(std::net::IpAddr::V6(address)) => write!(f, "[{address}]:{}", self.port),
            host => write!(f, "{host}:{}", self.port),
        }
    }
}

impl FromStr for Endpoint {
    type Err = TokenError;
    fn from_str(text: &str) -> Result<Endpoint, TokenError> {
        let bad = || TokenError::Endpoint(text.chars().take(80).collect());
        let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host: Host = bare.unwrap_or(host).parse().map_err(|_| bad())?;
        let is_v6 = matches!(host, Host::Ip(std::net::IpAddr::V6(_)));
        let port: u16 = port.parse().map_err(|_| bad())?;
        let endpoint = Endpoint { host, port };
        // One endpoint has one form: no "+9", no "009", no brackets around names.
        if port == 0 || is_v6 != bare.is_some() || !endpoint.to_string().eq_ignore_ascii_case(text) {
            return Err(bad());
        }
        Ok(endpoint)
    }
}

/// The reason why a text is not a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// Another kind of text.
    #[error(
        "not a join token: a token begins with \"weir-join-\"; copy the whole line that `weir cluster invite` printed"
    )]
    NotAToken,
    /// Of another version of Weir.
    #[error(
        "the token has version {0:?}, this build reads version 1; use the same version of Weir on both hosts"
    )]
    Version(String),
    /// A character that no token has.
    #[error("the token has {character:?} at position {position}; copy it again, as one line without spaces")]
    Character {
        /// The character.
        character: char,
        /// Its position, from 1.
        position: usize,
    },
    /// Cut off.
    #[error("the token is truncated{}; copy the whole line", .needs.map(|needs| format!(": {has} of {needs} characters are there")).unwrap_or_default())]
    Truncated {
        /// Characters of the text.
        has: usize,
        /// Characters that it should have, unless not even that can be read.
        needs: Option<usize>,
    },
    /// Something was added.
    #[error("the token is too long: {has} characters, of which {needs} belong to it; copy only the token")]
    TooLong {
        /// Characters of the text.
        has: usize,
        /// Characters that it should have.
        needs: usize,
    },
    /// Changed on its way.
    #[error("the token's checksum is wrong: a character has changed; copy it again")]
    Checksum,
    /// Whole, but not as this version makes them.
    #[error("the token is damaged or made by another program: {0}")]
    Content(&'static str),
    /// Not `HOST:PORT`.
    #[error("{0:?} is not an endpoint: write HOST:PORT, an IPv6 address in brackets")]
    Endpoint(String),
    /// Too many or too few.
    #[error("a token names 1 to {MOST_ENDPOINTS} endpoints and 1 to {MOST_PINS} authorities")]
    Count,
    /// Too much text.
    #[error("the endpoints are too long for a token; name fewer")]
    Space,
}

/// A join token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// Finds its record.
    pub id: TokenId,
    /// Proves that its bearer was invited.
    pub secret: Secret,
    /// The authorities, one of which must have signed the certificate of the node that answers.
    pub pins: Vec<Fingerprint>,
    /// Nodes that answer a join.
    pub endpoints: Vec<Endpoint>,
}

impl Token {
    /// A new token with a random id and secret.
    ///
    /// # Errors
    /// [`TokenError::Count`], [`TokenError::Space`].
    pub fn new(
        id: TokenId,
        secret: Secret,
        pins: Vec<Fingerprint>,
        endpoints: Vec<Endpoint>,
    ) -> Result<Token, TokenError> {
        if !(1..=MOST_PINS).contains(&pins.len()) || !(1..=MOST_ENDPOINTS).contains(&endpoints.len()) {
            return Err(TokenError::Count);
        }
        // A DNS name has at most 253 bytes, so one length byte may not hold it with its port.
        if endpoints.iter().any(|one| one.to_string().len() > usize::from(u8::MAX)) {
            return Err(TokenError::Space);
        }
        Ok(Token { id, secret, pins, endpoints })
    }

    /// The text that the operator carries. Secret.
    #[must_use]
    pub fn text(&self) -> Zeroizing<String> {
        let mut body = Zeroizing::new(vec![0, 0]);
        body.extend(self.id.0);
        body.extend(self.secret.bytes());
        // The numbers fit, see `new`.
        body.push(self.pins.len() as u8);
        self.pins.iter().for_each(|pin| body.extend(pin.0));
        body.push(self.endpoints.len() as u8);
        for endpoint in &self.endpoints {
            let text = endpoint.to_string();
            body.push(text.len() as u8);
            body.extend(text.as_bytes());
        }
        let length = (body.len() - 2 + CHECKSUM) as u16;
        body[..2].copy_from_slice(&length.to_be_bytes());
        let checksum = checksum(&body);
        body.extend(checksum);
        Zeroizing::new(format!("{PREFIX}{VERSION}.{}", URL_SAFE_NO_PAD.encode(&*body)))
    }
}

fn checksum(body: &[u8]) -> [u8; CHECKSUM] {
    crc32c::crc32c_append(crc32c::crc32c(VERSION.as_bytes()), body).to_be_bytes()
}

impl FromStr for Token {
    type Err = TokenError;

    /// Reads a token; spaces and line breaks around it do not count.
    fn from_str(text: &str) -> Result<Token, TokenError> {
        let text = text.trim();
        let rest = text.strip_prefix(PREFIX).ok_or(TokenError::NotAToken)?;
        let (version, encoded) =
            rest.split_once('.').ok_or(TokenError::Truncated { has: text.len(), needs: None })?;
        if version != VERSION {
            return Err(TokenError::Version(version.chars().take(16).collect()));
        }
        let outside = text.len() - encoded.len();
        let body = decode(encoded, outside)?;
        let needs = outside + encoded_length(2 + usize::from(u16::from_be_bytes([body[0], body[1]])));
        match text.len().cmp(&needs) {
            std::cmp::Ordering::Less => {
                return Err(TokenError::Truncated { has: text.len(), needs: Some(needs) });
            }
            std::cmp::Ordering::Greater => return Err(TokenError::TooLong { has: text.len(), needs }),
            std::cmp::Ordering::Equal => {}
        }
        let Some((content, sum)) = body.split_last_chunk::<CHECKSUM>() else {
            return Err(TokenError::Content("it is too short"));
        };
        if checksum(content) != *sum {
            return Err(TokenError::Checksum);
        }
        parse(&content[2..])
    }
}

/// Characters of the unpadded base64 of `bytes` bytes.
fn encoded_length(bytes: usize) -> usize {
    (bytes * 4).div_ceil(3)
}

/// At least the two bytes of the length.
fn decode(encoded: &str, outside: usize) -> Result<Zeroizing<Vec<u8>>, TokenError> {
    if encoded.len() + outside > LONGEST_TOKEN {
        return Err(TokenError::TooLong { has: encoded.len() + outside, needs: LONGEST_TOKEN });
    }
    let known = |character: char| character.is_ascii_alphanumeric() || "-_".contains(character);
    if let Some((index, character)) = encoded.char_indices().find(|(_, character)| !known(*character)) {
        return Err(TokenError::Character { character, position: outside + index + 1 });
    }
    // A text of any length has a first part that decodes: its length tells whether the rest is missing.
    let announced = URL_SAFE_NO_PAD.decode(encoded.get(..4).unwrap_or_default()).unwrap_or_default();
    let &[high, low, ..] = &announced[..] else {
        return Err(TokenError::Truncated { has: outside + encoded.len(), needs: None });
    };
    let needs = encoded_length(2 + usize::from(u16::from_be_bytes([high, low])));
    URL_SAFE_NO_PAD.decode(encoded).map(Zeroizing::new).map_err(|error| match error {
        _ if encoded.len() < needs => {
            TokenError::Truncated { has: outside + encoded.len(), needs: Some(outside + needs) }
        }
        _ if encoded.len() > needs => {
            TokenError::TooLong { has: outside + encoded.len(), needs: outside + needs }
        }
        DecodeError::InvalidLength(_) => TokenError::Content("its length is impossible"),
        _ => TokenError::Checksum,
    })
}

fn parse(content: &[u8]) -> Result<Token, TokenError> {
    let mut rest = content;
    let id = take(&mut rest).map(TokenId)?;
    let secret = take(&mut rest).map(Secret::new)?;
    let [pins] = take(&mut rest)?;
    let pins =
        (0..pins).map(|_| take::<SHA256_OUTPUT_LEN>(&mut rest).map(Fingerprint)).collect::<Result<_, _>>()?;
    let [endpoints] = take(&mut rest)?;
    let mut endpoint = || {
        let [length] = take(&mut rest)?;
        let (text, after) = rest.split_at_checked(length.into()).ok_or(TOO_SHORT)?;
        rest = after;
        std::str::from_utf8(text).map_err(|_| TokenError::Content("an endpoint is not text"))?.parse()
    };
    let endpoints = (0..endpoints).map(|_| endpoint()).collect::<Result<_, _>>()?;
    if !rest.is_empty() {
        return Err(TokenError::Content("bytes follow its end"));
    }
    Token::new(id, secret, pins, endpoints)
}

const TOO_SHORT: TokenError = TokenError::Content("it ends too early");

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], TokenError> {
    let (taken, after) = rest.split_first_chunk().ok_or(TOO_SHORT)?;
    *rest = after;
    Ok(*taken)
}
