//! Handshakes over loopback sockets: who is let in, who is not, and what both ends are told.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/connection.rs"]
mod connection;

use std::collections::BTreeSet;
use std::sync::Arc;

use common::*;
use connection::{Outcome, connect, connect_shared};
use rustls::pki_types::CertificateDer;
use rustls::version::TLS12;
use rustls::{ClientConfig, HandshakeKind, ProtocolVersion, RootCertStore};
use weir_identity::{
    Authority, ClientCertificate, Credentials, Fingerprint, Grant, Holder, Identity, Key, Mistrust, OtherEnd,
    Revocations, Role, Trust, explain, joining_client,
};

/// A node `server` and one that connects to it.
fn ends(server: &Authority, client: &Credentials, client_trust: Trust) -> (End, End) {
    let listening = End::new(&node(server, "server"), trust(&[server], Revocations::default()));
    (listening, End::new(client, client_trust))
}

fn peers(server: &End, client: &End) -> (Outcome, Outcome) {
    let to = client.tls.peer_client(&client.own, &name("server")).unwrap();
    connect(server.tls.peer_server(&server.own).unwrap(), to)
}

fn node_name(met: &Outcome) -> String {
    let facts = met.as_ref().unwrap().as_peer.as_ref().unwrap();
    facts.identity.to_string()
}

/// Both ends refuse, and say why: `found` is the word of the end that found it, `told` that of the other.
fn refused(outcome: (Outcome, Outcome), at_server: &str, at_client: &str) {
    let server = explain(&outcome.0.expect_err("the server refuses"));
    let client = explain(&outcome.1.expect_err("the client is refused"));
    assert!(server.contains(at_server), "the server says: {server}");
    assert!(client.contains(at_client), "the client says: {client}");
}

#[test]
fn two_nodes_of_a_cluster_know_each_other() {
    let ca = authority(1);
    let (server, client) = ends(&ca, &node(&ca, "b"), trust(&[&ca], Revocations::default()));
    let (at_server, at_client) = peers(&server, &client);
    assert_eq!((node_name(&at_server), node_name(&at_client)), ("node b".into(), "node server".into()));
    let met = at_server.unwrap();
    assert_eq!((met.version, met.kind), (ProtocolVersion::TLSv1_3, HandshakeKind::Full));
    let fastest = client.tls.provider.cipher_suites[0].suite();
    assert_eq!(met.suite, fastest, "both prefer the fastest cipher of this processor");
    assert!(server.log.take().is_empty() && client.log.take().is_empty());
}

#[test]
fn a_peer_without_a_certificate_is_nobody() {
    let ca = authority(1);
    let (server, client) = ends(&ca, &node(&ca, "b"), trust(&[&ca], Revocations::default()));
    let mut anonymous = client.tls.api_client(None, None).unwrap();
    anonymous.alpn_protocols = vec![weir_identity::PEER_PROTOCOL.to_vec()];
    let outcome = connect(server.tls.peer_server(&server.own).unwrap(), anonymous);
    refused(outcome, "presented no certificate", "this host presented no certificate");
}

#[test]
fn a_node_of_another_authority_is_refused_by_either_end() {
    // The same cluster id does not help: the signature decides.
    let (ca, other) = (authority(1), authority(1));
    let (server, client) = ends(&ca, &node(&other, "b"), trust(&[&ca], Revocations::default()));
    refused(
        peers(&server, &client),
        "not signed by a certificate authority of this cluster",
        "of another cluster",
    );
    let [(Some(who), Mistrust::UnknownAuthority { .. })] = &server.log.take()[..] else {
        panic!("one refusal")
    };
    assert_eq!(who.to_string(), "node b");

    let (server, client) = ends(&ca, &node(&ca, "b"), trust(&[&other], Revocations::default()));
    refused(
        peers(&server, &client),
        "of another cluster",
        "not signed by a certificate authority of this cluster",
    );
}

#[test]
fn a_forged_authority_in_the_chain_counts_for_nothing() {
    let (ca, other) = (authority(1), authority(1));
    let key = Key::generate().unwrap();
    let leaf = other.issue_node(&name("b"), &[], &key.public(), NOW, 10 * DAY).unwrap().chain[0].clone();
    let chain: Vec<CertificateDer<'static>> =
        vec![leaf, ca.certificate().der().clone(), other.certificate().der().clone()];
    let forged = Credentials::new(key, chain).unwrap();
    let (server, client) = ends(&ca, &forged, trust(&[&ca], Revocations::default()));
    refused(
        peers(&server, &client),
        "not signed by a certificate authority of this cluster",
        "of another cluster",
    );
    // Nor for a host that joins: the leaf must be signed by the authority of the token.
    let listening = End::new(&forged, trust(&[&ca], Revocations::default()));
    let pins = [ca.certificate().fingerprint()];
    let joining = joining_client(&pins, Clock::at(NOW), weir_identity::provider()).unwrap();
    let outcome = connect(listening.tls.api_server(&listening.own).unwrap(), joining);
    refused(outcome, "of another cluster", "not signed by a certificate authority of this cluster");
}

#[test]
fn a_node_of_another_cluster_is_refused_though_the_same_key_signed_it() {
    let (ca, twin) = twins();
    let (server, client) = ends(&ca, &node(&twin, "b"), trust(&[&ca], Revocations::default()));
    let word = "node b belongs to cluster 02020202020202020202020202020202, this is cluster 0101";
    refused(peers(&server, &client), word, "may not be used there");
}

/// Two authorities of different clusters with one key and one name.
fn twins() -> (Authority, Authority) {
    let pair = rcgen::KeyPair::generate().unwrap();
    let twin = |cluster: u8| {
        let mut params = rcgen::CertificateParams::default();
        let uri = format!("weir://{}/ca", weir_identity::ClusterId([cluster; 16]));
        params.subject_alt_names = vec![rcgen::SanType::URI(uri.try_into().unwrap())];
        params.serial_number = Some(rcgen::SerialNumber::from_slice(&[0x41; 16]));
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let der = params.self_signed(&pair).unwrap().der().clone();
        let certificate = weir_identity::CaCertificate::from_der(&der).unwrap();
        Authority::from_parts(certificate, Key::from_pkcs8(&pair.serialize_der()).unwrap()).unwrap()
    };
    (twin(1), twin(2))
}

#[test]
fn clocks_decide_in_words() {
    let ca = authority(1);
    let expired = node_at(&ca, "b", NOW - 90 * DAY - HOUR).0;
    let (server, client) = ends(&ca, &expired, trust(&[&ca], Revocations::default()));
    refused(
        peers(&server, &client),
        "ended 1 h ago, at 2026-11-23T11:00:00Z; renew it, or set the clock: it is 2026-11-23T12:00:00Z here",
        "not valid at this time by its clock",
    );
    // Just made, and the server's clock is one hour behind: five minutes of it are allowed for.
    let (server, client) = ends(&ca, &node_at(&ca, "b", NOW).0, trust(&[&ca], Revocations::default()));
    server.clock.set(NOW - HOUR);
    refused(
        peers(&server, &client),
        "not valid before 2026-11-23T11:55:00Z, which is 55 min ahead of this host's clock (2026-11-23T11:00:00Z)",
        "not valid at this time by its clock",
    );
    for skew in [0, 299] {
        server.clock.set(NOW - skew);
        assert!(peers(&server, &client).0.is_ok(), "a clock {skew} s behind");
    }
    // The client's clock decides about the server's certificate.
    client.clock.set(NOW + 100 * DAY);
    refused(peers(&server, &client), "not valid at this time by its clock", "ended 11 d ago");
}

#[test]
fn a_revoked_node_is_refused_also_by_configurations_that_knew_it() {
    let ca = authority(1);
    let (credentials, issued) = node_at(&ca, "b", NOW - DAY);
    let (server, client) = ends(&ca, &credentials, trust(&[&ca], Revocations::default()));
    let to = Arc::new(client.tls.peer_client(&client.own, &name("server")).unwrap());
    let from = Arc::new(server.tls.peer_server(&server.own).unwrap());
    for _ in 0..2 {
        // No session is resumed: that would skip the check.
        assert_eq!(connect_shared(&from, &to).0.unwrap().kind, HandshakeKind::Full);
    }
    let facts = &issued.record.facts;
    let by_serial = Revocations::default().with_certificate(facts, "stolen", NOW - 60);
    let by_name = Revocations::default().with_name(Holder::Node, &name("b"), [], "stolen", NOW - 60);
    for revoked in [by_serial, by_name] {
        server.tls.trust.set(trust(&[&ca], revoked));
        refused(connect_shared(&from, &to), "revoked", "this host's certificate is revoked");
        let [(Some(who), why)] = &server.log.take()[..] else { panic!("one refusal") };
        assert_eq!(who.to_string(), "node b");
        assert_eq!(why.to_string(), "node b was revoked at 2026-11-23T11:59:00Z (stolen)");
        // Open connections are checked again by their owner.
        let open = OtherEnd::read(&issued.chain[0]).unwrap();
        let again = server.tls.trust.get().recheck(&open, NOW);
        assert!(matches!(again, Err(Mistrust::Revoked { .. })), "{again:?}");
    }
    server.tls.trust.set(trust(&[&ca], Revocations::default()));
    assert!(connect_shared(&from, &to).0.is_ok());
}

#[test]
fn a_replaced_certificate_opens_nothing_new_and_closes_nothing() {
    let ca = authority(1);
    let (old, old_issued) = node_at(&ca, "b", NOW - DAY);
    let (_, new_issued) = node_at(&ca, "b", NOW);
    let revoked = Revocations::default().with_replaced(
        &new_issued.record.facts,
        [(&old_issued.record.facts, 1), (&new_issued.record.facts, 2)],
        NOW,
    );
    let (server, client) = ends(&ca, &old, trust(&[&ca], Revocations::default()));
    server.tls.trust.set(trust(&[&ca], revoked));
    let word = "the certificate of node b was replaced by a newer one, seen at 2026-11-23T12:00:00Z";
    refused(peers(&server, &client), word, "may not be used there");
    let present = server.tls.trust.get();
    let [was, is] = [&old_issued, &new_issued].map(|one| OtherEnd::read(&one.chain[0]).unwrap());
    assert_eq!(present.recheck(&was, NOW), Ok(()));
    assert_eq!(present.recheck(&is, NOW), Ok(()));
    assert!(present.recheck(&was, NOW + 90 * DAY).is_err(), "until it ends");
}

/// The key of an authority is stolen: its removal must end the connections of forged certificates.
#[test]
fn a_connection_ends_with_the_trust_in_the_authority_that_signed_for_it() {
    let (stolen, new) = (authority(1), authority(1));
    let server = End::new(&node(&new, "server"), trust(&[&new, &stolen], Revocations::default()));
    let thief = End::new(&node(&stolen, "b"), trust(&[&new, &stolen], Revocations::default()));
    let met = peers(&server, &thief).0.unwrap().as_peer.unwrap();
    assert_eq!(server.tls.trust.get().recheck(&met, NOW), Ok(()));
    server.tls.trust.set(trust(&[&new], Revocations::default()));
    let again = server.tls.trust.get().recheck(&met, NOW);
    assert!(matches!(again, Err(Mistrust::UnknownAuthority { .. })), "{again:?}");
}

#[test]
fn a_client_of_tls_1_2_is_refused() {
    let ca = authority(1);
    let (server, _) = ends(&ca, &node(&ca, "b"), trust(&[&ca], Revocations::default()));
    let configs = [
        server.tls.peer_server(&server.own),
        server.tls.api_server(&server.own),
        server.tls.nbd_server(&server.own, ClientCertificate::Optional),
    ];
    for config in configs {
        let mut roots = RootCertStore::empty();
        roots.add(ca.certificate().der().clone()).unwrap();
        let old = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_protocol_versions(&[&TLS12])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        refused(connect(config.unwrap(), old), "Weir speaks TLS 1.3 only", "it speaks only TLS 1.3");
    }
}

#[test]
fn two_authorities_overlap() {
    let (old, new) = (authority(1), authority(1));
    let both = || trust(&[&new, &old], Revocations::default());
    let issuers = [&old, &new];
    for by_server in issuers {
        for by_client in issuers {
            let server = End::new(&node(by_server, "server"), both());
            let client = End::new(&node(by_client, "b"), both());
            assert_eq!(node_name(&peers(&server, &client).0), "node b");
            // The end of the overlap.
            server.tls.trust.set(trust(&[&new], Revocations::default()));
            assert_eq!(peers(&server, &client).0.is_ok(), std::ptr::eq(by_client, &new));
        }
    }
}

#[test]
fn a_renewal_needs_no_new_configuration() {
    let (old, new) = (authority(1), authority(1));
    let (server, client) = ends(&old, &node(&old, "b"), trust(&[&old], Revocations::default()));
    let to = Arc::new(client.tls.peer_client(&client.own, &name("server")).unwrap());
    let from = Arc::new(server.tls.peer_server(&server.own).unwrap());
    let serial = |outcome: (Outcome, Outcome)| {
        (outcome.0.unwrap().other.unwrap().serial, outcome.1.unwrap().other.unwrap().serial)
    };
    let before = serial(connect_shared(&from, &to));
    for end in [&server, &client] {
        end.tls.trust.set(trust(&[&new, &old], Revocations::default()));
    }
    server.own.set(&node(&new, "server")).unwrap();
    client.own.set(&node(&new, "b")).unwrap();
    let after = serial(connect_shared(&from, &to));
    assert!(before.0 != after.0 && before.1 != after.1);
}

#[test]
fn the_node_that_answers_must_be_the_one_that_was_meant() {
    let ca = authority(1);
    let (server, client) = ends(&ca, &node(&ca, "b"), trust(&[&ca], Revocations::default()));
    let to = client.tls.peer_client(&client.own, &name("c")).unwrap();
    let outcome = connect(server.tls.peer_server(&server.own).unwrap(), to);
    refused(outcome, "may not be used there", "node server answers where node c was expected");
}

#[test]
fn a_client_is_no_peer_and_cannot_answer_as_a_node() {
    let ca = authority(1);
    let admin = client(&ca, "alice", &Grant::Role(Role::Admin));
    let (server, alice) = ends(&ca, &admin, trust(&[&ca], Revocations::default()));
    refused(
        peers(&server, &alice),
        "client alice may not speak here: only nodes may",
        "may not be used there",
    );
    let rogue = End::new(&admin, trust(&[&ca], Revocations::default()));
    let outcome = connect(
        rogue.tls.api_server(&rogue.own).unwrap(),
        server.tls.api_client(Some(&server.own), None).unwrap(),
    );
    refused(outcome, "", "client alice may not speak here: only nodes may");
}

#[test]
fn a_connection_for_another_protocol_is_no_peer_connection() {
    let ca = authority(1);
    let (server, client) = ends(&ca, &node(&ca, "b"), trust(&[&ca], Revocations::default()));
    let http = client.tls.api_client(Some(&client.own), None).unwrap();
    let outcome = connect(server.tls.peer_server(&server.own).unwrap(), http);
    refused(outcome, "another protocol than this port's", "expects another protocol");
    // One that names no protocol completes the handshake, and `peer` refuses it.
    let none = client.tls.nbd_client(Some(&client.own), None).unwrap();
    let met = connect(server.tls.peer_server(&server.own).unwrap(), none).0.unwrap();
    assert!(matches!(met.as_peer, Err(Mistrust::OtherProtocol { .. })), "{:?}", met.as_peer);
}

#[test]
fn the_api_takes_anyone_of_the_cluster_and_nobody_who_lies() {
    let (ca, other) = (authority(1), authority(1));
    let viewer = client(&ca, "eve", &Grant::Role(Role::Viewer));
    let (server, eve) = ends(&ca, &viewer, trust(&[&ca], Revocations::default()));
    let api = || server.tls.api_server(&server.own).unwrap();
    let met = connect(api(), eve.tls.api_client(Some(&eve.own), None).unwrap()).0.unwrap();
    let Identity::Client(who) = met.other.unwrap().identity.clone() else { panic!("a client") };
    assert_eq!((who.name, who.grant), (name("eve"), Grant::Role(Role::Viewer)));
    let met = connect(api(), eve.tls.api_client(None, Some(&name("server"))).unwrap()).0.unwrap();
    assert_eq!(met.other, None, "without a certificate: nobody, and let in");
    let liar =
        End::new(&client(&other, "eve", &Grant::Role(Role::Admin)), trust(&[&ca], Revocations::default()));
    let outcome = connect(api(), liar.tls.api_client(Some(&liar.own), None).unwrap());
    refused(outcome, "not signed by a certificate authority of this cluster", "of another cluster");
    let revoked = Revocations::default().with_name(Holder::Client, &name("eve"), [], "left", NOW);
    server.tls.trust.set(trust(&[&ca], revoked));
    let outcome = connect(api(), eve.tls.api_client(Some(&eve.own), None).unwrap());
    refused(outcome, "revoked", "this host's certificate is revoked");
}

/// A client's files from before a rotation name only the former authority; nodes refuse a certificate that was replaced.
#[test]
fn in_a_rotation_clients_see_the_former_certificate_and_nodes_the_new_one() {
    let (old, new) = (authority(1), authority(1));
    let both = || trust(&[&new, &old], Revocations::default());
    let (former, present) = (node(&old, "server"), node(&new, "server"));
    let server = End::new(&present, both());
    server.own.set_for_clients(Some(&former)).unwrap();
    let eve =
        End::new(&client(&old, "eve", &Grant::Role(Role::Viewer)), trust(&[&old], Revocations::default()));
    let other = End::new(&node(&new, "other"), trust(&[&new], Revocations::default()));
    let api = || server.tls.api_server(&server.own).unwrap();
    let nbd = || server.tls.nbd_server(&server.own, ClientCertificate::Required).unwrap();
    let by_api = || connect(api(), eve.tls.api_client(Some(&eve.own), None).unwrap());
    let by_nbd = || connect(nbd(), eve.tls.nbd_client(Some(&eve.own), None).unwrap());
    let shown = |outcomes: (Outcome, Outcome)| outcomes.1.unwrap().other.unwrap().serial;
    assert_eq!(shown(by_api()), former.facts().serial);
    assert_eq!(shown(by_nbd()), former.facts().serial);
    let node_api = other.tls.node_api_client(&other.own, &name("server")).unwrap();
    assert_eq!(shown(connect(api(), node_api)), present.facts().serial);
    assert_eq!(node_name(&peers(&server, &other).1), "node server");
    // The former authority is removed: nobody sees that certificate any more.
    server.own.set_for_clients(None).unwrap();
    refused(by_api(), "authority", "not signed by a certificate authority of this cluster");
}

#[test]
fn nbd_asks_for_a_certificate_as_configured() {
    let ca = authority(1);
    let exports = BTreeSet::from(["vm1".parse().unwrap()]);
    let (server, guest) =
        ends(&ca, &client(&ca, "guest", &Grant::Exports(exports)), trust(&[&ca], Revocations::default()));
    for (certificate, lets_nobody_in) in
        [(ClientCertificate::Required, false), (ClientCertificate::Optional, true)]
    {
        let nbd = || server.tls.nbd_server(&server.own, certificate).unwrap();
        let met = connect(nbd(), guest.tls.nbd_client(Some(&guest.own), None).unwrap()).0.unwrap();
        let Identity::Client(who) = met.other.unwrap().identity.clone() else { panic!("a client") };
        assert!(who.may_open("vm1", None) && !who.may_open("vm2", None) && who.role().is_none());
        let anonymous = connect(nbd(), guest.tls.nbd_client(None, None).unwrap());
        assert_eq!(anonymous.0.is_ok(), lets_nobody_in);
        if !lets_nobody_in {
            refused(anonymous, "presented no certificate", "this host presented no certificate");
        }
    }
}

#[test]
fn a_joining_host_talks_only_to_the_cluster_of_its_token() {
    let (ca, other) = (authority(1), authority(1));
    let server = End::new(&node(&ca, "server"), trust(&[&ca], Revocations::default()));
    let joining = |pins: &[Fingerprint], now: u64| {
        let client = joining_client(pins, Clock::at(now), weir_identity::provider()).unwrap();
        connect(server.tls.api_server(&server.own).unwrap(), client)
    };
    let (right, wrong) = (ca.certificate().fingerprint(), other.certificate().fingerprint());
    for pins in [&[right][..], &[wrong, right]] {
        let (at_server, at_client) = joining(pins, NOW);
        assert_eq!(at_server.unwrap().other, None);
        assert_eq!(at_client.unwrap().other.unwrap().identity.to_string(), "node server");
    }
    let word = format!("no certificate of its chain has the fingerprint {wrong}");
    refused(joining(&[wrong], NOW), "may not be used there", &word);
    refused(joining(&[right], NOW + 91 * DAY), "by its clock", "ended 2 d ago");
    refused(joining(&[right], NOW - 2 * DAY), "by its clock", "ahead of this host's clock");
}

/// Why a rotation waits for open tokens: once nodes have renewed, a host with an older token refuses all of them.
#[test]
fn a_token_of_before_a_rotation_refuses_renewed_nodes() {
    let (old, new) = (authority(1), authority(1));
    let pins = |all: &[&Authority]| -> Vec<Fingerprint> {
        all.iter().map(|one| one.certificate().fingerprint()).collect()
    };
    let server = End::new(&node(&new, "server"), trust(&[&new, &old], Revocations::default()));
    let joining = |pins: &[Fingerprint]| {
        let client = joining_client(pins, Clock::at(NOW), weir_identity::provider()).unwrap();
        connect(server.tls.api_server(&server.own).unwrap(), client)
    };
    refused(
        joining(&pins(&[&old])),
        "may not be used there",
        "no certificate of its chain has the fingerprint",
    );
    assert!(joining(&pins(&[&old, &new])).1.is_ok());
}

#[test]
fn plain_text_at_a_port_with_tls_is_called_that() {
    use std::io::{Read, Write};
    let ca = authority(1);
    let (server, _) = ends(&ca, &node(&ca, "b"), trust(&[&ca], Revocations::default()));
    let config = Arc::new(server.tls.peer_server(&server.own).unwrap());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let greeting = std::thread::spawn(move || {
        let mut socket = std::net::TcpStream::connect(address).unwrap();
        socket.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let _ = socket.read(&mut [0; 64]);
    });
    let (mut socket, _) = listener.accept().unwrap();
    let mut connection = rustls::ServerConnection::new(config).unwrap();
    let error = connection.complete_io(&mut socket).unwrap_err();
    drop(socket);
    greeting.join().unwrap();
    let error = error.into_inner().unwrap().downcast::<rustls::Error>().unwrap();
    assert!(explain(&error).contains("the other side does not speak TLS"), "{}", explain(&error));
}
