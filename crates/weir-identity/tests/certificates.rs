//! What other programs see in the certificates: compared with a file that is checked in.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use std::fmt::Write;
use weir_identity::{
    Authority, ClusterId, Grant, Key, Mistrust, NODE_LIFETIME, Purpose, Revocations, Role, Trust,
};
use x509_parser::prelude::{FromDer, X509Certificate};

fn describe(text: &mut String, title: &str, der: &[u8]) {
    let (_, certificate) = X509Certificate::from_der(der).unwrap();
    writeln!(text, "{title}").unwrap();
    let subject = certificate.subject().to_string();
    // The authority's name ends with a random number.
    let subject = if subject.starts_with("CN=Weir CA ") { "CN=Weir CA ……" } else { &subject };
    writeln!(text, "  subject {subject}").unwrap();
    writeln!(text, "  serial number of {} bytes", certificate.raw_serial().len()).unwrap();
    let validity = certificate.validity();
    writeln!(text, "  valid {} to {}", validity.not_before, validity.not_after).unwrap();
    writeln!(text, "  key {}", certificate.public_key().parsed().map(|key| key.key_size()).unwrap()).unwrap();
    for extension in certificate.extensions() {
        let critical = if extension.critical { "critical " } else { "" };
        match extension.parsed_extension() {
            x509_parser::extensions::ParsedExtension::SubjectAlternativeName(names) => {
                for name in &names.general_names {
                    writeln!(text, "  {critical}name {name}").unwrap();
                }
            }
            x509_parser::extensions::ParsedExtension::KeyUsage(usage) => {
                writeln!(text, "  {critical}usage {usage}").unwrap();
            }
            x509_parser::extensions::ParsedExtension::ExtendedKeyUsage(usage) => {
                let (server, client) = (usage.server_auth, usage.client_auth);
                writeln!(
                    text,
                    "  {critical}server {server}, client {client}, others {}",
                    !usage.other.is_empty()
                )
                .unwrap();
            }
            x509_parser::extensions::ParsedExtension::BasicConstraints(constraints) => {
                let (ca, path) = (constraints.ca, constraints.path_len_constraint);
                writeln!(text, "  {critical}authority {ca}, path {path:?}").unwrap();
            }
            x509_parser::extensions::ParsedExtension::SubjectKeyIdentifier(_)
            | x509_parser::extensions::ParsedExtension::AuthorityKeyIdentifier(_) => {
                writeln!(text, "  {critical}key identifier {}", extension.oid).unwrap();
            }
            other => panic!("an extension that nobody asked for: {other:?}"),
        }
    }
}

#[test]
fn certificates_look_as_recorded() {
    let ca = Authority::create(ClusterId([0xc1; 16]), NOW).unwrap();
    let key = Key::generate().unwrap().public();
    let hosts = [host("node-1.example"), host("10.0.0.1"), host("fd00::1")];
    let node = ca.issue_node(&name("node-1"), &hosts, &key, NOW, NODE_LIFETIME).unwrap();
    let admin = ca.issue_client(&name("alice"), &Grant::Role(Role::Admin), &key, NOW, DAY).unwrap();
    let exports = Grant::Exports(["vm1", "vol/vm2"].map(|one| one.parse().unwrap()).into());
    let guest = ca.issue_client(&name("guest"), &exports, &key, NOW, DAY).unwrap();
    let mut text = String::new();
    describe(&mut text, "authority", ca.certificate().der());
    describe(&mut text, "node", &node.chain[0]);
    describe(&mut text, "client with a role", &admin.chain[0]);
    describe(&mut text, "client with exports", &guest.chain[0]);
    let golden = include_str!("golden/certificates.txt");
    assert_eq!(text, golden, "the certificates now look like this:\n{text}");
    for issued in [&node, &admin, &guest] {
        assert_eq!(&issued.chain[1], ca.certificate().der());
    }
}

#[test]
fn a_client_names_at_least_one_export_and_not_too_many() {
    let ca = authority(1);
    let key = Key::generate().unwrap().public();
    for count in [0, 65] {
        let exports = (0..count).map(|i| i.to_string().parse().unwrap()).collect();
        let refused = ca.issue_client(&name("guest"), &Grant::Exports(exports), &key, NOW, DAY).unwrap_err();
        assert_eq!(refused.to_string(), format!("a client's certificate names 1 to 64 exports, not {count}"));
    }
}

/// Our authority makes no such certificate, but whoever has stolen its key could.
#[test]
fn an_authority_that_has_ended_vouches_for_nobody() {
    let at = |seconds: u64| time::OffsetDateTime::from_unix_timestamp(seconds as i64).unwrap();
    let cluster = ClusterId([1; 16]);
    let params = |uri: String, from: u64, to: u64| {
        let mut params = rcgen::CertificateParams::default();
        params.subject_alt_names = vec![rcgen::SanType::URI(uri.try_into().unwrap())];
        params.serial_number = Some(rcgen::SerialNumber::from_slice(&[0x41; 16]));
        (params.not_before, params.not_after) = (at(from), at(to));
        params
    };
    let pair = rcgen::KeyPair::generate().unwrap();
    let mut ca = params(format!("weir://{cluster}/ca"), NOW - 10 * DAY, NOW - DAY);
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
    let root = weir_identity::CaCertificate::from_der(ca.self_signed(&pair).unwrap().der()).unwrap();
    let mut leaf = params(format!("weir://{cluster}/node/b"), NOW - 2 * DAY, NOW + 10 * DAY);
    leaf.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
    let own = rcgen::KeyPair::generate().unwrap();
    let leaf = leaf.signed_by(&own, &rcgen::Issuer::from_params(&ca, &pair)).unwrap();
    let trust = Trust::new(cluster, vec![root], Revocations::default()).unwrap();
    let check = |purpose, now| trust.check(leaf.der(), purpose, now).map(|facts| facts.identity.to_string());
    assert_eq!(check(Purpose::Server, NOW - DAY), Ok("node b".into()));
    assert!(matches!(check(Purpose::Server, NOW - DAY + 1), Err(Mistrust::UnknownAuthority { .. })));
    assert!(matches!(check(Purpose::Client, NOW - DAY), Err(Mistrust::OtherKind { .. })), "a server's only");
}

#[test]
fn a_revocation_without_a_reason_has_no_empty_parentheses() {
    let why = |reason: &str| {
        let (who, reason) = ("node a".to_owned(), reason.to_owned());
        weir_identity::Mistrust::Revoked { who, at: NOW, reason }.to_string()
    };
    assert_eq!(why(""), "node a was revoked at 2026-11-23T12:00:00Z");
    assert_eq!(why("stolen"), "node a was revoked at 2026-11-23T12:00:00Z (stolen)");
}
