//! Requests for certificates (PKCS #10, RFC 2986): read from outside, and compared with what is allowed.

use std::net::IpAddr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::cri_attributes::ParsedCriAttribute;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;

use crate::identity::Identity;
use crate::key::{NotAKey, PublicKey};
use crate::name::{Host, Name};

/// Largest request, in bytes of its DER form.
const LARGEST_REQUEST: usize = 16 << 10;
/// Most names and addresses of one node.
pub const MOST_HOSTS: usize = 16;

/// The reason why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// Not a request.
    #[error("it is not a PKCS #10 request in base64: {0}")]
    Encoding(String),
    /// Signed by another key than the one in it.
    #[error("its signature does not prove that the sender has the key")]
    Signature,
    /// Another kind of key.
    #[error(transparent)]
    Key(#[from] NotAKey),
    /// Something that this program does not ask for.
    #[error("it asks for {0}, which a node's certificate does not have")]
    Extra(&'static str),
    /// Another name.
    #[error("its subject is {found:?}, not {expected}")]
    Subject {
        /// The subject in it.
        found: String,
        /// The name that is allowed.
        expected: String,
    },
    /// A name or address that is not allowed.
    #[error("it asks for the host {0}, which the invitation does not name; invite with `--host {0}`")]
    Host(Host),
    /// Too many names.
    #[error("it asks for more than {MOST_HOSTS} hosts")]
    TooManyHosts,
}

/// The content of a certificate request. Its signature is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub subject: String,
    pub hosts: Vec<Host>,
    pub key: PublicKey,
}

/// Reads a request, in base64, and checks its signature. Nothing but a subject's name and hosts may be in it.
pub(crate) fn read(text: &str) -> Result<Wanted, BadRequest> {
    if text.len() > LARGEST_REQUEST {
        return Err(BadRequest::Encoding(format!("it is longer than {LARGEST_REQUEST} bytes")));
    }
    let der = URL_SAFE_NO_PAD.decode(text).map_err(|error| BadRequest::Encoding(error.to_string()))?;
    let parsed = X509CertificationRequest::from_der(&der);
    let (rest, request) = parsed.map_err(|error| BadRequest::Encoding(error.to_string()))?;
    if !rest.is_empty() {
        return Err(BadRequest::Encoding("bytes follow it".into()));
    }
    let info = &request.certification_request_info;
    let key = PublicKey::from_spki(info.subject_pki.raw)?;
    request.verify_signature().map_err(|_| BadRequest::Signature)?;
    Ok(Wanted { subject: subject(info)?, hosts: hosts(info)?, key })
}

type Info<'a> = x509_parser::certification_request::X509CertificationRequestInfo<'a>;

/// The common name, which is the whole subject.
fn subject(info: &Info<'_>) -> Result<String, BadRequest> {
    let mut names = info.subject.iter_common_name();
    let (Some(name), None, 1) = (names.next(), names.next(), info.subject.iter_attributes().count()) else {
        return Err(BadRequest::Extra("a subject other than one common name"));
    };
    let name = name.as_str().map_err(|_| BadRequest::Extra("a subject that is not text"))?;
    // Truncated, so that a name from outside cannot flood the log.
    Ok(name.chars().take(80).collect())
}

fn hosts(info: &Info<'_>) -> Result<Vec<Host>, BadRequest> {
    let mut hosts = Vec::new();
    for attribute in info.iter_attributes() {
        let ParsedCriAttribute::ExtensionRequest(request) = attribute.parsed_attribute() else {
            return Err(BadRequest::Extra("an unknown attribute"));
        };
        for extension in &request.extensions {
            let ParsedExtension::SubjectAlternativeName(names) = extension.parsed_extension() else {
                return Err(BadRequest::Extra("an extension other than alternative names"));
            };
            for name in &names.general_names {
                hosts.push(host(name)?);
            }
        }
    }
    if hosts.len() > MOST_HOSTS { Err(BadRequest::TooManyHosts) } else { Ok(hosts) }
}

fn host(name: &GeneralName<'_>) -> Result<Host, BadRequest> {
    match name {
        GeneralName::DNSName(name) => name.parse().map_err(|_| BadRequest::Extra("a name that is no host's")),
        GeneralName::IPAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
            let address = v4.or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from));
            address.map(Host::Ip).map_err(|_| BadRequest::Extra("an address of another length"))
        }
        // The authority writes the identity itself, whatever the request says.
        _ => Err(BadRequest::Extra("a name that is no host's")),
    }
}

/// Compares a request with the identity that its sender has proven, and with the hosts that were allowed to it. A node may also
/// be called by its own name.
pub(crate) fn allowed(wanted: &Wanted, identity: &Identity, hosts: &[Host]) -> Result<(), BadRequest> {
    let expected = identity.name().map_or("", Name::as_str);
    if wanted.subject != expected {
        return Err(BadRequest::Subject { found: wanted.subject.clone(), expected: expected.into() });
    }
    let own = expected.parse().ok().filter(|host| matches!(host, Host::Dns(_)));
    let other = wanted.hosts.iter().find(|host| !hosts.contains(host) && own.as_ref() != Some(host));
    other.map_or(Ok(()), |host| Err(BadRequest::Host(host.clone())))
}
