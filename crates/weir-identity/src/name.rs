//! Names and numbers in certificates, tokens and records: each of them one type, checked where it is made.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::hex;
use crate::random::{self, NoRandomness};

/// Longest name of a node or client, in bytes. A certificate's common name has the same limit (RFC 5280, `ub-common-name`).
pub const LONGEST_NAME: usize = 64;
/// Longest name of an export, in bytes.
pub const LONGEST_EXPORT: usize = 255;
/// Longest DNS name, in bytes (RFC 1035 §2.3.4).
const LONGEST_HOST: usize = 253;

/// A text that is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {expected}")]
pub struct Malformed {
    /// The text, truncated.
    pub text: String,
    /// The expected form, in words.
    pub expected: &'static str,
}

impl Malformed {
    fn new(text: &str, expected: &'static str) -> Malformed {
        // Truncated, so that a text from outside cannot flood the log.
        Malformed { text: text.chars().take(LONGEST_NAME + 1).collect(), expected }
    }
}

/// Text and serialised form of a type that parses and displays itself.
macro_rules! serialised_as_text {
    ($($name:ident),*) => {$(
        impl TryFrom<String> for $name {
            type Error = Malformed;
            fn try_from(text: String) -> Result<$name, Malformed> {
                text.parse()
            }
        }
        impl From<$name> for String {
            fn from(value: $name) -> String {
                value.to_string()
            }
        }
    )*};
}

/// A fixed number of bytes that people see as hexadecimal digits.
macro_rules! hexadecimal {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, $expected:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(pub [u8; $bytes]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&hex::encode(&self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl FromStr for $name {
            type Err = Malformed;
            fn from_str(text: &str) -> Result<$name, Malformed> {
                hex::decode(text).map($name).ok_or_else(|| Malformed::new(text, $expected))
            }
        }

        serialised_as_text!($name);
    };
}

hexadecimal!(
    /// The random number that names a cluster in its certificates.
    ClusterId, 16, "the id of a cluster: 32 hexadecimal digits"
);
hexadecimal!(
    /// The SHA-256 of a certificate's DER form.
    Fingerprint, 32, "a SHA-256 fingerprint: 64 hexadecimal digits"
);
hexadecimal!(
    /// The serial number of a certificate. Random; the first bit is 0 and the second 1, so that its DER form has the same
    /// length.
    Serial, 16, "a serial number: 32 hexadecimal digits"
);
hexadecimal!(
    /// The SHA-256 of a public key's DER form (`SubjectPublicKeyInfo`).
    KeyId, 32, "the SHA-256 of a key: 64 hexadecimal digits"
);
hexadecimal!(
    /// The public part of a join token; finds its record.
    TokenId, 8, "the id of a token: 16 hexadecimal digits"
);

hexadecimal!(
    /// The public key (Ed25519) with which a token's record checks the signature of its bearer.
    TokenKey, 32, "a public key: 64 hexadecimal digits"
);

impl ClusterId {
    /// A new random id.
    ///
    /// # Errors
    /// [`NoRandomness`].
    pub fn random() -> Result<ClusterId, NoRandomness> {
        random::bytes().map(ClusterId)
    }
}

impl Serial {
    /// A new random number.
    ///
    /// # Errors
    /// [`NoRandomness`].
    pub(crate) fn random() -> Result<Serial, NoRandomness> {
        let mut bytes: [u8; 16] = random::bytes()?;
        bytes[0] = bytes[0] & 0x3f | 0x40;
        Ok(Serial(bytes))
    }
}

impl Fingerprint {
    /// The fingerprint of a certificate.
    #[must_use]
    pub fn of(der: &[u8]) -> Fingerprint {
        Fingerprint(sha256(&[der]))
    }
}

impl KeyId {
    /// The id of a public key, from its `SubjectPublicKeyInfo`.
    #[must_use]
    pub fn of(spki: &[u8]) -> KeyId {
        KeyId(sha256(&[spki]))
    }
}

/// The SHA-256 of all parts in a row.
pub(crate) fn sha256(parts: &[&[u8]]) -> [u8; 32] {
    let mut context = ring::digest::Context::new(&ring::digest::SHA256);
    parts.iter().for_each(|part| context.update(part));
    let mut digest = [0; 32];
    digest.copy_from_slice(context.finish().as_ref());
    digest
}

/// The name of a node or a client: 1 to [`LONGEST_NAME`] letters, digits, `-`, `_`, `.`, not starting with `.` or `-`. The rule
/// is that of the registry's keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

impl Name {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The form in which two names are compared: DNS and people take `Node-1` and `node-1` for the same.
    #[must_use]
    pub fn folded(&self) -> String {
        self.0.to_ascii_lowercase()
    }

    /// Another name that is taken for this one.
    #[must_use]
    pub fn resembles(&self, other: &str) -> bool {
        self.0.eq_ignore_ascii_case(other)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Name {
    type Err = Malformed;
    fn from_str(text: &str) -> Result<Name, Malformed> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let good = (1..=LONGEST_NAME).contains(&text.len())
            && !text.starts_with(['.', '-'])
            && text.bytes().all(allowed);
        let expected = "a name: use 1 to 64 letters, digits, '-', '_', '.', not starting with '.' or '-'";
        if good { Ok(Name(text.into())) } else { Err(Malformed::new(text, expected)) }
    }
}

/// The name of an export: 1 to [`LONGEST_EXPORT`] letters, digits, `-`, `_`, `.`, `/`; then, in a certificate for one disk, `#` and the
/// 16 hexadecimal digits of the disk's identity, because a name may become another disk's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ExportName {
    name: String,
    disk: Option<u64>,
}

impl ExportName {
    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The export of the disk with this identity, and of no other that gets its name later.
    #[must_use]
    pub fn of_disk(self, id: u64) -> ExportName {
        ExportName { disk: Some(id), ..self }
    }

    /// The export of whichever disk has the name.
    #[must_use]
    pub fn of_any_disk(self) -> ExportName {
        ExportName { disk: None, ..self }
    }

    /// Whether this is the export `name` of the disk with the identity `disk`.
    #[must_use]
    pub fn is(&self, name: &str, disk: Option<u64>) -> bool {
        self.name == name && (self.disk.is_none() || self.disk == disk)
    }
}

impl fmt::Display for ExportName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.disk.map_or(Ok(()), |id| write!(f, "#{id:016x}"))
    }
}

impl FromStr for ExportName {
    type Err = Malformed;
    fn from_str(text: &str) -> Result<ExportName, Malformed> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte);
        let malformed =
            || Malformed::new(text, "an export's name: use 1 to 255 letters, digits, '-', '_', '.', '/'");
        let (name, id) = text.split_once('#').map_or((text, None), |(name, id)| (name, Some(id)));
        if !(1..=LONGEST_EXPORT).contains(&name.len()) || !name.bytes().all(allowed) {
            return Err(malformed());
        }
        let export = ExportName { name: name.into(), disk: None };
        let Some(id) = id else { return Ok(export) };
        let export = u64::from_str_radix(id, 16).map(|id| export.of_disk(id)).map_err(|_| malformed())?;
        // One export has one form.
        if export.to_string() == text { Ok(export) } else { Err(malformed()) }
    }
}

/// Where a host is reached: a DNS name or an address. Clients other than Weir compare it with the certificate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Host {
    /// A DNS name, in lower case.
    Dns(String),
    /// An IP address.
    Ip(IpAddr),
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Dns(name) => f.write_str(name),
            Host::Ip(address) => address.fmt(f),
        }
    }
}

impl FromStr for Host {
    type Err = Malformed;
    fn from_str(text: &str) -> Result<Host, Malformed> {
        if let Ok(address) = text.parse() {
            return Ok(Host::Ip(address));
        }
        let label = |label: &str| {
            (1..=63).contains(&label.len())
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        };
        // No top-level domain is a number (RFC 3696 §2): "10.0.0.300" is a mistyped address.
        let numeric_end =
            text.rsplit('.').next().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()));
        if text.len() <= LONGEST_HOST && !numeric_end && text.split('.').all(label) {
            return Ok(Host::Dns(text.to_ascii_lowercase()));
        }
        Err(Malformed::new(text, "a DNS name or an IP address (no port, no wildcard)"))
    }
}

serialised_as_text!(Name, ExportName, Host);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_rule_of_the_registry() {
        for good in ["a", "node-1", "rack_2.host", &"x".repeat(64)] {
            assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
        }
        for bad in ["", ".a", "-a", "a b", "a/b", "ä", "a\0", &"x".repeat(65)] {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
        for good in ["vol/disk-1", "d#00000000000000ff"] {
            assert_eq!(good.parse::<ExportName>().unwrap().to_string(), good);
        }
        for bad in [
            "",
            "a?b",
            "a b",
            "a%2f",
            &"x".repeat(256),
            "d#",
            "d#ff",
            "d#00000000000000FF",
            "#00000000000000ff",
        ] {
            assert!(bad.parse::<ExportName>().is_err(), "{bad:?}");
        }
        let old: ExportName = "d".parse().unwrap();
        assert!(old.is("d", None) && old.is("d", Some(1)) && !old.is("e", Some(1)));
        let export = old.of_disk(1);
        assert!(export.is("d", Some(1)) && !export.is("d", Some(2)) && !export.is("d", None));
    }

    #[test]
    fn hosts_are_names_or_addresses() {
        for (text, shown) in [("Host.Example", "host.example"), ("10.0.0.1", "10.0.0.1"), ("::1", "::1")] {
            assert_eq!(text.parse::<Host>().unwrap().to_string(), shown);
        }
        for bad in ["", "10.0.0.300", "*.example", "a..b", "-a", "a-", "a_b", "host:9", "[::1]"] {
            assert!(bad.parse::<Host>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn numbers_are_read_back_and_nothing_else_is() {
        let id = ClusterId([0xa5; 16]);
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["", "a5", &"a".repeat(31), &"a".repeat(33), &"g".repeat(32), &"é".repeat(16)] {
            assert!(bad.parse::<ClusterId>().is_err(), "{bad:?}");
        }
        let serials: Vec<Serial> = (0..64).map(|_| Serial::random().unwrap()).collect();
        assert!(serials.iter().all(|serial| serial.0[0] & 0xc0 == 0x40));
        assert!((1..64).all(|i| serials[i] != serials[i - 1]));
    }
}
