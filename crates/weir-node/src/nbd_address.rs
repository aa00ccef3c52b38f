//! A TCP address of the NBD export, as the configuration has it: `"ADDRESS:PORT"`, or
//! `{ address = "ADDRESS:PORT", plaintext = true }`.

use std::fmt;
use std::net::SocketAddr;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An address, and whether TLS is required there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdAddress {
    /// Address and port; port 0 takes a free one.
    pub address: SocketAddr,
    /// Clients speak plain text, and whoever reaches the address opens every disk. False unless it is written, except on loopback
    /// addresses: TLS is required.
    pub plaintext: bool,
}

/// The longer form.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    address: SocketAddr,
    plaintext: Option<bool>,
}

impl NbdAddress {
    /// An address in plain text.
    #[must_use]
    pub fn plaintext(address: SocketAddr) -> NbdAddress {
        NbdAddress { address, plaintext: true }
    }

    fn new(address: SocketAddr, plaintext: Option<bool>) -> NbdAddress {
        NbdAddress { address, plaintext: plaintext.unwrap_or(is_plain_by_default(address)) }
    }

    /// Why a node without an identity cannot listen here, and what to do.
    #[must_use]
    pub fn needs_identity(&self) -> String {
        let remedy = "join the cluster (`weir cluster join`) and set identity.directory";
        if is_plain_by_default(self.address) {
            return format!("TLS is required there, and needs this node's key: {remedy}");
        }
        format!(
            "other hosts reach this address, so TLS is required there, and needs this node's key: {remedy}; or, in a network of \
             trusted hosts only, write {{ address = \"{}\", plaintext = true }}",
            self.address
        )
    }
}

/// Whoever connects is on this host.
fn is_plain_by_default(address: SocketAddr) -> bool {
    address.ip().is_loopback()
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl Serialize for NbdAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let NbdAddress { address, plaintext } = *self;
        if plaintext == is_plain_by_default(address) {
            return address.serialize(serializer);
        }
        Table { address, plaintext: Some(plaintext) }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for NbdAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<NbdAddress, D::Error> {
        deserializer.deserialize_any(Form)
    }
}

struct Form;

impl<'de> Visitor<'de> for Form {
    type Value = NbdAddress;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"ADDRESS:PORT\", or { address = \"ADDRESS:PORT\", plaintext = true }")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<NbdAddress, E> {
        let address = text.parse().map_err(|_| E::custom(format!("{text:?} is not ADDRESS:PORT")))?;
        Ok(NbdAddress::new(address, None))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<NbdAddress, A::Error> {
        let Table { address, plaintext } = Table::deserialize(MapAccessDeserializer::new(map))?;
        Ok(NbdAddress::new(address, plaintext))
    }
}
