//! From an invitation to a node's certificate, and every way in which that is refused.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use rcgen::{CertificateParams, DnType, KeyPair, SanType};
use weir_identity::{
    Admission, Authority, BadAnswer, BadMessage, CaCertificate, Facts, Fingerprint, Holder, Identity,
    Invitation, IssuedRecord, JoinAnswer, JoinRefused, JoinRequest, Joiner, Key, MOST_SKEW, NODE_LIFETIME,
    Records, Revocations, Token, TokenRecord, TokenRefused, admit, invite, renew,
};

/// The registry and the node that answers.
struct Cluster {
    authority: Authority,
    authorities: Vec<CaCertificate>,
    tokens: Vec<TokenRecord>,
    issued: Vec<IssuedRecord>,
    revoked: Revocations,
}

impl Cluster {
    fn new() -> Cluster {
        let authority = authority(1);
        let authorities = vec![authority.certificate().clone()];
        Cluster { authority, authorities, tokens: vec![], issued: vec![], revoked: Revocations::default() }
    }

    fn invite(&mut self, only_for: Option<&str>, hosts: &[&str]) -> Token {
        let invitation = Invitation {
            only_for: only_for.map(name),
            hosts: hosts.iter().map(|one| host(one)).collect(),
            pins: self.authorities.iter().map(CaCertificate::fingerprint).collect(),
            endpoints: vec!["host-a:7401".parse().unwrap()],
            ttl: HOUR,
        };
        let (token, record) = invite(invitation, NOW).unwrap();
        self.tokens.push(record);
        token
    }

    fn decide(&self, request: &JoinRequest, now: u64) -> Result<Admission, JoinRefused> {
        let token = self.tokens.iter().find(|one| one.id == request.token);
        let records =
            Records { token, issued: &self.issued, revoked: &self.revoked, authorities: &self.authorities };
        admit(&self.authority, records, request, now, NODE_LIFETIME)
    }

    /// Decides, and writes to the registry.
    fn join(&mut self, request: &JoinRequest, now: u64) -> Result<JoinAnswer, JoinRefused> {
        let admission = self.decide(request, now)?;
        let used = admission.token.unwrap();
        let stored = self.tokens.iter_mut().find(|one| one.id == used.id).unwrap();
        *stored = used;
        self.issued.push(admission.issued);
        Ok(admission.answer)
    }
}

fn joiner(as_name: &str, hosts: &[&str]) -> Joiner {
    let hosts: Vec<_> = hosts.iter().map(|one| host(one)).collect();
    Joiner::new(Key::generate().unwrap(), name(as_name), &hosts).unwrap()
}

/// The request as it goes over the wire.
fn sent(joiner: &Joiner, token: &Token, clock: u64) -> JoinRequest {
    let text = serde_json::to_string(&joiner.request(token, clock)).unwrap();
    JoinRequest::decode(text.as_bytes()).unwrap()
}

fn word(refused: Result<impl std::fmt::Debug, JoinRefused>) -> String {
    refused.unwrap_err().to_string()
}

#[test]
fn a_host_joins_and_renews() {
    let mut cluster = Cluster::new();
    let token = cluster.invite(Some("b"), &["b.example", "10.0.0.2"]);
    let joiner_b = joiner("b", &["b", "b.example", "10.0.0.2"]);
    let answer = cluster.join(&sent(&joiner_b, &token, NOW), NOW).unwrap();
    let joined = joiner_b.complete(&answer, &token.pins, NOW).unwrap();
    assert_eq!(joined.cluster, cluster.authority.certificate().cluster());
    assert_eq!(joined.authorities, cluster.authorities);
    let facts = joined.credentials.facts().clone();
    assert_eq!(facts.identity.to_string(), "node b");
    assert_eq!((facts.not_before, facts.not_after), (NOW - MOST_SKEW, NOW + NODE_LIFETIME));
    assert_eq!(facts, cluster.issued[0].facts);
    assert_eq!(cluster.issued[0].ca, cluster.authorities[0].fingerprint());
    assert_eq!(cluster.tokens[0].used.as_ref().unwrap().name, name("b"));
    // Two thirds of 90 days, and five minutes that the certificate was older than it seems.
    assert!((NOW + 60 * DAY - MOST_SKEW..=NOW + 60 * DAY).contains(&facts.renew_at()));

    let again = joiner("b", &[]);
    let now = facts.renew_at();
    let records = Records {
        token: None,
        issued: &cluster.issued,
        revoked: &cluster.revoked,
        authorities: &cluster.authorities,
    };
    let renewed =
        renew(&cluster.authority, records, &facts, &[], &again.renewal(), (now, NODE_LIFETIME)).unwrap();
    assert_eq!(renewed.token, None);
    let pins: Vec<Fingerprint> = joined.authorities.iter().map(CaCertificate::fingerprint).collect();
    let renewed = again.complete(&renewed.answer, &pins, now).unwrap();
    let newer = renewed.credentials.facts();
    assert!(newer.serial != facts.serial && newer.key != facts.key && newer.not_after == now + NODE_LIFETIME);
    let replaced = cluster.revoked.with_replaced(newer, [&facts, newer], now);
    assert_eq!(replaced.serials.keys().collect::<Vec<_>>(), [&facts.serial]);
}

#[test]
fn a_token_admits_one_host() {
    let mut cluster = Cluster::new();
    let token = cluster.invite(None, &[]);
    let first = joiner("b", &[]);
    cluster.join(&sent(&first, &token, NOW), NOW).unwrap();
    let used = "the token was used at 2026-11-23T12:00:00Z by node b; every host needs its own";
    for other in [joiner("c", &[]), joiner("b", &[])] {
        assert_eq!(word(cluster.decide(&sent(&other, &token, NOW), NOW + 60)), used);
    }
    // The first answer was lost: the same host asks again, and gets a certificate for the same key.
    let answer = cluster.join(&sent(&first, &token, NOW + 60), NOW + 60).unwrap();
    assert_eq!(cluster.tokens[0].used.as_ref().unwrap().at, NOW);
    first.complete(&answer, &token.pins, NOW + 60).unwrap();
}

#[test]
fn clocks_and_expiry_are_said_in_words() {
    let mut cluster = Cluster::new();
    let token = cluster.invite(None, &[]);
    let host = joiner("b", &[]);
    let ask = |clock, now| cluster.decide(&sent(&host, &token, clock), now);
    assert_eq!(
        word(ask(NOW - HOUR, NOW)),
        "this host's clock is 1 h behind the cluster's, which says 2026-11-23T12:00:00Z; set it (at most 5 min apart), then \
         join again with the same token"
    );
    assert!(word(ask(NOW + HOUR, NOW)).starts_with("this host's clock is 1 h ahead of the cluster's"));
    assert!(ask(NOW + MOST_SKEW, NOW).is_ok() && ask(NOW - MOST_SKEW, NOW).is_ok());
    assert!(ask(NOW + MOST_SKEW + 1, NOW).is_err());
    assert_eq!(
        word(ask(NOW + HOUR, NOW + HOUR)),
        "the token expired 0 s ago, at 2026-11-23T13:00:00Z, by the cluster's clock; make a new one with `weir cluster \
         invite`"
    );
    assert!(ask(NOW + HOUR - 1, NOW + HOUR - 1).is_ok());
    assert!(word(ask(0, u64::MAX)).starts_with("the token expired"));
    assert!(
        word(ask(NOW, NOW - HOUR)).contains("1 h ahead of the answering node's clock; set the clocks of the")
    );
    assert!(
        ask(NOW - MOST_SKEW, NOW - MOST_SKEW).is_ok(),
        "a token of a node whose clock is ahead within bounds"
    );
}

#[test]
fn nobody_without_the_secret_learns_anything() {
    let mut cluster = Cluster::new();
    let token = cluster.invite(Some("b"), &[]);
    let host = joiner("x", &[]);
    let guessed = Token { secret: weir_identity::Secret::new([0; 32]), ..token.clone() };
    let unknown = Token { id: weir_identity::TokenId([0; 8]), ..token.clone() };
    let spent = NOW + DAY;
    for (token, now) in [(&guessed, NOW), (&unknown, NOW), (&guessed, spent)] {
        let refused = cluster.decide(&sent(&host, token, 0), now).unwrap_err();
        assert!(matches!(refused, JoinRefused::Token(TokenRefused::Unknown)), "{refused}");
    }
    // Not even that the request for a certificate is nonsense.
    let text = serde_json::to_value(sent(&host, &guessed, NOW)).unwrap();
    for (field, value) in [("csr", "nonsense"), ("secret", "short"), ("secret", "===")] {
        let mut text = text.clone();
        text[field] = value.into();
        let refused = cluster.decide(&serde_json::from_value(text).unwrap(), NOW).unwrap_err();
        assert!(matches!(refused, JoinRefused::Token(TokenRefused::Unknown)), "{refused}");
    }
    let right = cluster.decide(&sent(&host, &token, NOW), NOW);
    assert_eq!(
        word(right),
        "the token is for node b, not for x; join under that name, or make another token"
    );
}

#[test]
fn two_nodes_do_not_get_one_name() {
    let mut cluster = Cluster::new();
    let (one, two) = (cluster.invite(None, &[]), cluster.invite(None, &[]));
    cluster.join(&sent(&joiner("b", &[]), &one, NOW), NOW).unwrap();
    let twin = joiner("b", &[]);
    let taken =
        "node b exists; choose another name, or revoke the former node first: `weir cluster revoke b`";
    assert_eq!(word(cluster.decide(&sent(&twin, &two, NOW), NOW)), taken);
    let issued: Vec<Facts> = cluster.issued.iter().map(|one| one.facts.clone()).collect();
    cluster.revoked = cluster.revoked.with_name(Holder::Node, &name("b"), &issued, "reinstalled", NOW);
    assert!(word(cluster.decide(&sent(&twin, &two, NOW), NOW)).starts_with("the name b was revoked"));
    cluster.revoked = cluster.revoked.readmitting(Holder::Node, &name("b"));
    assert!(cluster.revoked.covering(&issued[0]).is_some(), "the former certificate stays revoked");
    cluster.join(&sent(&twin, &two, NOW), NOW).unwrap();
    assert!(cluster.revoked.covering(&cluster.issued[1].facts).is_none());
    assert!(cluster.revoked.pruned(NOW + NODE_LIFETIME).serials.len() == 1);
    assert!(cluster.revoked.pruned(NOW + NODE_LIFETIME + 2 * MOST_SKEW + 1).serials.is_empty());
}

/// A request with this content, signed by its own key.
fn raw(params: &CertificateParams, key: &KeyPair) -> Vec<u8> {
    params.serialize_request(key).unwrap().der().to_vec()
}

fn params(common_name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params
}

#[test]
fn a_request_asks_for_no_more_than_the_invitation_allows() {
    use base64::Engine;
    let mut cluster = Cluster::new();
    let token = cluster.invite(None, &["b.example"]);
    let template = serde_json::to_value(sent(&joiner("b", &[]), &token, NOW)).unwrap();
    let with = |der: &[u8]| {
        let mut request = template.clone();
        request["csr"] = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(der).into();
        cluster.decide(&serde_json::from_value(request).unwrap(), NOW)
    };
    let key = KeyPair::generate().unwrap();
    assert!(with(&raw(&params("b"), &key)).is_ok());

    let mut asks = params("b");
    asks.subject_alt_names =
        vec![SanType::DnsName("b.example".try_into().unwrap()), SanType::DnsName("B".try_into().unwrap())];
    assert!(with(&raw(&asks, &key)).is_ok(), "its own name and the one that the invitation names");
    asks.subject_alt_names = vec![SanType::DnsName("c.example".try_into().unwrap())];
    assert!(
        word(with(&raw(&asks, &key)))
            .contains("asks for the host c.example, which the invitation does not name")
    );
    asks.subject_alt_names = vec![SanType::IpAddress([10, 0, 0, 9].into())];
    assert!(word(with(&raw(&asks, &key))).contains("asks for the host 10.0.0.9"));
    let admin = format!("weir://{}/role/admin", cluster.authority.certificate().cluster());
    asks.subject_alt_names = vec![SanType::URI(admin.try_into().unwrap())];
    assert!(word(with(&raw(&asks, &key))).contains("a name that is no host's"));
    asks.subject_alt_names = vec![SanType::DnsName("b.example".try_into().unwrap()); 17];
    assert!(word(with(&raw(&asks, &key))).contains("more than 16 hosts"));

    assert!(word(with(&raw(&params("c"), &key))).contains("its subject is \"c\", not b"));
    let mut two = params("b");
    two.distinguished_name.push(DnType::OrganizationName, "x");
    assert!(word(with(&raw(&two, &key))).contains("a subject other than one common name"));
    let mut signs = params("b");
    signs.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    assert!(word(with(&raw(&signs, &key))).contains("an extension other than alternative names"));

    for kind in [&rcgen::PKCS_ED25519, &rcgen::PKCS_ECDSA_P384_SHA384] {
        let other = KeyPair::generate_for(kind).unwrap();
        assert!(word(with(&raw(&params("b"), &other))).contains("not an ECDSA key on the curve P-256"));
    }
    // Someone else's request with this host's name: the signature covers the whole of it.
    let good = raw(&params("b"), &key);
    let mut forged = good.clone();
    let at = forged.windows(65).position(|bytes| bytes == key.public_key_raw()).unwrap();
    forged[at..at + 65].copy_from_slice(KeyPair::generate().unwrap().public_key_raw());
    assert!(word(with(&forged)).contains("does not prove that the sender has the key"));
    assert!(word(with(&[&good[..], &[0]].concat())).contains("bytes follow it"));
    for cut in 0..good.len() {
        assert!(with(&good[..cut]).is_err(), "cut at {cut}");
    }
}

#[test]
fn requests_of_other_versions_and_forms_are_refused() {
    let mut cluster = Cluster::new();
    let token = cluster.invite(None, &[]);
    let request = sent(&joiner("b", &[]), &token, NOW);
    let decode = |text: &serde_json::Value| JoinRequest::decode(text.to_string().as_bytes());
    let mut text = serde_json::to_value(&request).unwrap();
    assert!(decode(&text).is_ok());
    text["name"] = "../b".into();
    assert!(decode(&text).unwrap_err().to_string().contains("\"../b\" is not a name"));
    text["v"] = 2.into();
    text["something"] = "new".into();
    assert_eq!(decode(&text).unwrap_err(), BadMessage::Version(2), "before all that may differ");
    text["v"] = "x".repeat(weir_identity::LARGEST_MESSAGE).into();
    assert!(decode(&text).unwrap_err().to_string().contains("is longer than 65536 bytes"));
    assert!(JoinRequest::decode(b"{}").is_err() && JoinAnswer::decode(b"[1]").is_err());
    let shown = format!("{request:?}");
    assert!(!shown.contains("secret") && shown.contains(&token.id.to_string()), "{shown}");
}

#[test]
fn an_answer_is_checked_before_it_is_stored() {
    let mut cluster = Cluster::new();
    let other = Cluster::new();
    let token = cluster.invite(None, &[]);
    let host = joiner("b", &[]);
    let answer = cluster.join(&sent(&host, &token, NOW), NOW).unwrap();
    // Each attempt uses up a joiner, so each gets one for the same key.
    let key = tempfile::tempdir().unwrap();
    let store = weir_identity::Store::open(key.path()).unwrap();
    let again = || Joiner::new(store.joining_key().unwrap(), name("b"), &[]).unwrap();
    let token = cluster.invite(None, &[]);
    cluster.issued.clear();
    let mine = cluster.join(&sent(&again(), &token, NOW), NOW).unwrap();
    let check = |answer: &JoinAnswer, now| again().complete(answer, &token.pins, now);
    assert!(check(&mine, NOW).is_ok());

    assert_eq!(
        check(&answer, NOW).unwrap_err(),
        BadAnswer::Credentials(weir_identity::BadCredentials::OtherKey)
    );
    let theirs: String = other.authorities.iter().map(CaCertificate::pem).collect();
    let swapped = JoinAnswer { authorities: theirs.clone(), ..mine.clone() };
    assert_eq!(check(&swapped, NOW).unwrap_err(), BadAnswer::OtherPin);
    // Both authorities, as during a rotation, are fine; a third one is not.
    let mine_pem = mine.authorities.clone();
    let both = JoinAnswer { authorities: mine_pem.clone() + &theirs, ..mine.clone() };
    assert_eq!(check(&both, NOW).unwrap().authorities.len(), 2);
    let three = JoinAnswer { authorities: mine_pem + &theirs + &theirs, ..mine.clone() };
    assert!(matches!(check(&three, NOW), Err(BadAnswer::Trust(_))));
    assert!(check(&mine, NOW - HOUR).unwrap_err().to_string().contains("ahead of this host's clock"));
    for broken in ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        assert!(check(&JoinAnswer { certificates: broken.into(), ..mine.clone() }, NOW).is_err());
    }
    // A certificate of the cluster, for this key, but for another name or by another authority.
    let named = cluster.authority.issue_node(&name("c"), &[], &again().key(), NOW, NODE_LIFETIME).unwrap();
    let named = JoinAnswer { certificates: named.pem(), ..mine.clone() };
    assert_eq!(
        check(&named, NOW).unwrap_err().to_string(),
        "the answer's certificate is for node c, not for node b"
    );
    let forged = other.authority.issue_node(&name("b"), &[], &again().key(), NOW, NODE_LIFETIME).unwrap();
    let forged = JoinAnswer { certificates: forged.pem(), ..mine };
    assert!(matches!(check(&forged, NOW), Err(BadAnswer::Mistrust(_))));
}

#[test]
fn only_a_node_renews_and_only_its_own() {
    let mut cluster = Cluster::new();
    let (credentials, issued) = node_at(&cluster.authority, "b", NOW);
    cluster.issued.push(issued.record);
    let facts = credentials.facts();
    let ask = |cluster: &Cluster, presented: &Facts, joiner: &Joiner, hosts: &[&str]| {
        let hosts: Vec<_> = hosts.iter().map(|one| host(one)).collect();
        let Cluster { authority, authorities, issued, revoked, .. } = cluster;
        let records = Records { token: None, issued, revoked, authorities };
        renew(authority, records, presented, &hosts, &joiner.renewal(), (NOW, NODE_LIFETIME))
    };
    assert!(ask(&cluster, facts, &joiner("b", &["b.example"]), &["b.example"]).is_ok());
    assert!(
        word(ask(&cluster, facts, &joiner("b", &["b.example"]), &[])).contains("asks for the host b.example")
    );
    assert!(word(ask(&cluster, facts, &joiner("c", &[]), &[])).contains("its subject is \"c\", not b"));
    let admin = client(&cluster.authority, "b", &weir_identity::Grant::Role(weir_identity::Role::Admin));
    assert!(matches!(admin.facts().identity, Identity::Client(_)));
    assert!(word(ask(&cluster, admin.facts(), &joiner("b", &[]), &[])).contains("only nodes"));
    cluster.revoked = cluster.revoked.with_certificate(facts, "stolen", NOW);
    assert!(word(ask(&cluster, facts, &joiner("b", &[]), &[])).contains("was revoked"));
}

#[test]
fn an_authority_signs_nothing_that_outlives_it() {
    let ca = Authority::create(weir_identity::ClusterId([1; 16]), NOW).unwrap();
    let end = ca.certificate().facts().not_after;
    let key = Key::generate().unwrap().public();
    let issue = |now, lifetime| ca.issue_node(&name("b"), &[], &key, now, lifetime);
    let last = issue(end - DAY, NODE_LIFETIME).unwrap().record.facts;
    assert_eq!(last.not_after, end);
    for now in [NOW - HOUR, end - 60, end + 1, u64::MAX] {
        assert!(
            issue(now, NODE_LIFETIME).unwrap_err().to_string().contains("correct the clock, or rotate"),
            "{now}"
        );
    }
    assert!(issue(NOW, 599).unwrap_err().to_string().contains("at least 10 min, not 9 min 59 s"));
}
