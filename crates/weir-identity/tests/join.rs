//! From an invitation to a node's certificate, and every way in which that is refused.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use rcgen::{CertificateParams, DnType, KeyPair, SanType};
use weir_identity::{
    Admission, Authorities, Authority, BadAnswer, BadMessage, CaCertificate, Claim, Condition, Facts,
    Fingerprint, Holder, Identity, Invitation, IssuedRecord, JoinAnswer, JoinRefused, JoinRequest, Joiner,
    Key, MOST_SKEW, NODE_LIFETIME, Names, RecordId, Records, RenewRequest, Revocations, Seen, Token,
    TokenRecord, TokenRefused, admit, invite, renew,
};

/// The registry and the node that answers.
struct Cluster {
    authority: Authority,
    authorities: Vec<CaCertificate>,
    tokens: Vec<TokenRecord>,
    issued: Vec<IssuedRecord>,
    revoked: Revocations,
    names: Names,
}

/// The revision of a record: another one for every other content.
fn revision(record: &impl serde::Serialize) -> u64 {
    crc32c::crc32c(serde_json::to_string(record).unwrap().as_bytes()).into()
}

impl Cluster {
    fn new() -> Cluster {
        let authority = authority(1);
        let authorities = vec![authority.certificate().clone()];
        Cluster {
            authority,
            authorities,
            tokens: vec![],
            issued: vec![],
            revoked: Revocations::default(),
            names: Names::default(),
        }
    }

    fn revision_of(&self, record: RecordId) -> Option<u64> {
        match record {
            RecordId::Authorities => Some(revision(&self.authorities[0].pem())),
            RecordId::Revocations => Some(revision(&self.revoked)),
            RecordId::Names => Some(revision(&self.names)),
            RecordId::Token(id) => self.tokens.iter().find(|one| one.id == id).map(revision),
            RecordId::Issued(serial) => {
                self.issued.iter().find(|one| one.facts.serial == serial).map(revision)
            }
        }
    }

    fn records(&self, token: Option<weir_identity::TokenId>) -> Records<'_> {
        let token = self.tokens.iter().find(|one| Some(one.id) == token);
        Records {
            token: token
                .map(|record| Seen { record, revision: self.revision_of(RecordId::Token(record.id)) }),
            issued: &self.issued,
            names: Seen { record: &self.names, revision: self.revision_of(RecordId::Names) },
            revoked: Seen { record: &self.revoked, revision: self.revision_of(RecordId::Revocations) },
            authorities: Seen {
                record: &self.authorities,
                revision: self.revision_of(RecordId::Authorities),
            },
        }
    }

    /// The transaction.
    fn commit(&mut self, admission: Admission) -> Result<JoinAnswer, Condition> {
        let Admission { conditions, token, names, issued, revoked, answer } = admission;
        if let Some(broken) = conditions.iter().find(|one| self.revision_of(one.record) != one.revision) {
            return Err(*broken);
        }
        if let Some(used) = token {
            let stored = self.tokens.iter_mut().find(|one| one.id == used.id).unwrap();
            *stored = used;
        }
        self.issued.push(issued);
        self.revoked = revoked.unwrap_or_else(|| self.revoked.clone());
        self.names = names;
        Ok(answer)
    }

    fn issued_facts(&self) -> Vec<Facts> {
        self.issued.iter().map(|one| one.facts.clone()).collect()
    }

    /// As `weir cluster revoke` does it.
    fn revoke(&mut self, node: &str) {
        let (issued, tokens) = (self.issued_facts(), self.tokens.clone());
        let (revoked, void) = self.revoked.revoking_node(&name(node), &issued, &tokens, "stolen", NOW);
        self.revoked = revoked;
        for token in void {
            let stored = self.tokens.iter_mut().find(|one| one.id == token.id).unwrap();
            *stored = token;
        }
    }

    fn invite(&mut self, only_for: Option<&str>, hosts: &[&str]) -> Token {
        self.token(only_for, hosts, false)
    }

    fn token(&mut self, only_for: Option<&str>, hosts: &[&str], readmits: bool) -> Token {
        let invitation = Invitation {
            only_for: only_for.map(name),
            hosts: hosts.iter().map(|one| host(one)).collect(),
            pins: self.authorities.iter().map(CaCertificate::fingerprint).collect(),
            endpoints: vec!["host-a:7401".parse().unwrap()],
            ttl: HOUR,
            readmits,
        };
        let (token, record) = invite(invitation, NOW).unwrap();
        self.tokens.push(record);
        token
    }

    fn decide(&self, request: &JoinRequest, now: u64) -> Result<Admission, JoinRefused> {
        admit(&self.authority, self.records(Some(request.token)), request, now, NODE_LIFETIME)
    }

    /// Decides, and writes to the registry.
    fn join(&mut self, request: &JoinRequest, now: u64) -> Result<JoinAnswer, JoinRefused> {
        let admission = self.decide(request, now)?;
        assert!(admission.token.is_some());
        Ok(self.commit(admission).unwrap())
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
    let renewed = renew(
        &cluster.authority,
        cluster.records(None),
        &facts,
        &[],
        &again.renewal(),
        (now, NODE_LIFETIME),
        false,
    )
    .unwrap();
    assert_eq!(renewed.token, None);
    let pins: Vec<Fingerprint> = joined.authorities.iter().map(CaCertificate::fingerprint).collect();
    let renewed = again.complete(&renewed.answer, &pins, now).unwrap();
    let newer = renewed.credentials.facts();
    assert!(newer.serial != facts.serial && newer.key != facts.key && newer.not_after == now + NODE_LIFETIME);
    let replaced = cluster.revoked.with_replaced(newer, [(&facts, 1), (newer, 2)], now);
    assert_eq!(replaced.serials.keys().collect::<Vec<_>>(), [&facts.serial]);
}

#[test]
fn a_token_admits_one_host() {
    let mut cluster = Cluster::new();
    let token = cluster.invite(None, &[]);
    let first = joiner("b", &[]);
    cluster.join(&sent(&first, &token, NOW), NOW).unwrap();
    let used = "the token was used at 2026-11-23T12:00:00Z by node b; every host needs its own: make one with `weir cluster invite`";
    for other in [joiner("c", &[]), joiner("b", &[])] {
        assert_eq!(word(cluster.decide(&sent(&other, &token, NOW), NOW + 60)), used);
    }
    // Joining under the name that the token is for would help nobody.
    let named = cluster.invite(Some("d"), &[]);
    cluster.join(&sent(&joiner("d", &[]), &named, NOW), NOW).unwrap();
    assert!(word(cluster.decide(&sent(&joiner("e", &[]), &named, NOW), NOW)).contains("used at"));
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
    for (field, value) in [("csr", "nonsense"), ("proof", "short"), ("proof", "===")] {
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
    let taken = "node b exists; choose another name. Only if the host of b is gone or has lost its key: `weir cluster revoke b`, then join with a \
         token of `weir cluster invite --readmit --for b`";
    assert_eq!(word(cluster.decide(&sent(&twin, &two, NOW), NOW)), taken);
    let issued: Vec<Facts> = cluster.issued.iter().map(|one| one.facts.clone()).collect();
    cluster.revoked = cluster.revoked.with_name(Holder::Node, &name("b"), &issued, "reinstalled", NOW);
    assert!(word(cluster.decide(&sent(&twin, &two, NOW), NOW)).starts_with("the name b was revoked"));
    let back = cluster.token(Some("b"), &[], true);
    let second = sent(&joiner("b", &[]), &back, NOW);
    assert!(cluster.revoked.names_node(&name("b")), "the name stays revoked until the token is used");
    cluster.join(&sent(&twin, &back, NOW), NOW).unwrap();
    assert!(!cluster.revoked.names_node(&name("b")));
    assert!(cluster.revoked.covering(&issued[0]).is_some(), "the former certificate stays revoked");
    assert!(word(cluster.decide(&second, NOW)).contains("the token was used at"));
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
        let csr = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(der);
        // Its sender has the token.
        let claim = Claim { token: token.id, name: &name("b"), csr: &csr, clock: NOW };
        request["proof"] = serde_json::to_value(token.secret.sign(&claim)).unwrap();
        request["csr"] = csr.into();
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
    assert!(
        !shown.contains(&token.text()[20..60])
            && !shown.contains("secret")
            && shown.contains(&token.id.to_string()),
        "{shown}"
    );
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
    // Both authorities, as during a rotation, are fine if the token names both; a hostile node's own is not believed.
    let mine_pem = mine.authorities.clone();
    let both = JoinAnswer { authorities: mine_pem.clone() + &theirs, ..mine.clone() };
    assert_eq!(check(&both, NOW).unwrap().authorities, cluster.authorities);
    let pins: Vec<_> =
        [&cluster.authorities[0], &other.authorities[0]].map(CaCertificate::fingerprint).into();
    assert_eq!(again().complete(&both, &pins, NOW).unwrap().authorities.len(), 2);
    let three = JoinAnswer { authorities: mine_pem + &theirs + &theirs, ..mine.clone() };
    assert!(matches!(again().complete(&three, &pins, NOW), Err(BadAnswer::Trust(_))));
    let evil = other.authority.issue_node(&name("b"), &[], &again().key(), NOW, NODE_LIFETIME).unwrap();
    let evil = JoinAnswer { certificates: evil.pem(), ..both };
    assert!(matches!(check(&evil, NOW), Err(BadAnswer::Mistrust(_))), "its own authority signed");
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
        let records = cluster.records(None);
        let due = presented.renew_at();
        renew(&cluster.authority, records, presented, &hosts, &joiner.renewal(), (due, NODE_LIFETIME), false)
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

/// A forwarding node sees nothing else of the token than this request.
#[test]
fn a_forwarder_cannot_join_with_the_request_of_another_host() {
    let mut cluster = Cluster::new();
    let token = cluster.invite(None, &[]);
    let request = sent(&joiner("b", &[]), &token, NOW);
    let secret = {
        use base64::Engine;
        let body = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(&token.text()[12..]).unwrap();
        base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(&body[10..42])
    };
    let seen = serde_json::to_value(&request).unwrap();
    assert!(!seen.to_string().contains(&secret), "the secret stays with the host");
    let thief = joiner("c", &[]);
    let other = cluster.invite(None, &[]);
    let own = serde_json::to_value(sent(&thief, &other, NOW)).unwrap();
    for fields in [&["csr"][..], &["name"], &["csr", "name"], &["clock"], &["token"], &["proof"]] {
        let mut forged = seen.clone();
        fields.iter().for_each(|field| forged[field] = own[field].clone());
        if fields == ["clock"] {
            forged["clock"] = (NOW + 1).into();
        }
        let refused = cluster.decide(&serde_json::from_value(forged).unwrap(), NOW).unwrap_err();
        assert!(matches!(refused, JoinRefused::Token(TokenRefused::Unknown)), "{fields:?}: {refused}");
    }
    // Nor does the registry's record sign for anybody.
    let record = serde_json::to_string(&cluster.tokens[0]).unwrap();
    assert!(!record.contains(&secret), "{record}");
    cluster.join(&request, NOW).unwrap();
}

#[test]
fn a_readmitted_name_is_not_for_the_revoked_host() {
    let mut cluster = Cluster::new();
    let (token, later, other) =
        (cluster.invite(None, &[]), cluster.invite(Some("B"), &[]), cluster.invite(None, &[]));
    let host = joiner("b", &[]);
    cluster.join(&sent(&host, &token, NOW), NOW).unwrap();
    cluster.revoke("b");
    let void = "the token was withdrawn at 2026-11-23T12:00:00Z, by itself or with its node; an administrator must make another one";
    assert_eq!(word(cluster.decide(&sent(&host, &token, NOW), NOW)), void, "its own token");
    assert_eq!(word(cluster.decide(&sent(&joiner("B", &[]), &later, NOW), NOW)), void, "one for it");
    // With another token, but the key that was revoked: under its name and under another one.
    let fresh = cluster.token(Some("b"), &[], true);
    assert!(word(cluster.decide(&sent(&host, &fresh, NOW), NOW)).contains("this host's key was revoked"));
    // A new key is another host.
    cluster.join(&sent(&joiner("b", &[]), &fresh, NOW), NOW).unwrap();
    cluster.join(&sent(&joiner("c", &[]), &other, NOW), NOW).unwrap();
}

#[test]
fn a_renewal_that_a_revocation_has_missed_ends_with_the_readmission() {
    let mut cluster = Cluster::new();
    let token = cluster.invite(None, &[]);
    cluster.join(&sent(&joiner("b", &[]), &token, NOW), NOW).unwrap();
    let known = cluster.issued_facts();
    let due = known[0].renew_at();
    let request = joiner("b", &[]).renewal();
    let renewal = renew(
        &cluster.authority,
        cluster.records(None),
        &known[0],
        &[],
        &request,
        (due, NODE_LIFETIME),
        false,
    );
    cluster.commit(renewal.unwrap()).unwrap();
    // The revocation has read the certificates before; and it is spelled in another way.
    cluster.revoked = cluster.revoked.with_name(Holder::Node, &name("B"), &known, "stolen", due);
    let missed = cluster.issued[1].facts.clone();
    assert!(cluster.revoked.covering(&missed).is_some(), "the name covers it");
    let back = cluster.token(Some("b"), &[], true);
    cluster.join(&sent(&joiner("b", &[]), &back, NOW), NOW).unwrap();
    assert!(!cluster.revoked.names_node(&name("b")));
    assert!(cluster.revoked.ending(&missed).is_some(), "it stays revoked by its serial number");
    assert!(cluster.revoked.covering(&cluster.issued[2].facts).is_none());
}

#[test]
fn a_replaced_certificate_does_not_lock_its_key_out() {
    let mut cluster = Cluster::new();
    let token = cluster.invite(None, &[]);
    let host = joiner("b", &[]);
    for _ in 0..2 {
        cluster.join(&sent(&host, &token, NOW), NOW).unwrap();
    }
    let issued = cluster.issued_facts();
    cluster.revoked = cluster.revoked.with_replaced(&issued[1], issued.iter().zip(1..), NOW);
    assert!(cluster.revoked.is_replaced(&issued[0]) && !cluster.revoked.is_replaced(&issued[1]));
    cluster.join(&sent(&host, &token, NOW), NOW).unwrap();
    let refused = |facts: &Facts| {
        let request = joiner("b", &[]).renewal();
        word(renew(
            &cluster.authority,
            cluster.records(None),
            facts,
            &[],
            &request,
            (NOW, NODE_LIFETIME),
            false,
        ))
    };
    assert_eq!(
        refused(&issued[0]),
        "this certificate was replaced by a newer one of b; only the newest one renews"
    );
}

/// The order is the registry's, whatever the clocks of the hosts that signed said.
#[test]
fn the_later_certificate_is_the_one_that_the_registry_has_later() {
    let ca = authority(1);
    let (first, second) =
        (node_at(&ca, "b", NOW + 200).1.record.facts, node_at(&ca, "b", NOW).1.record.facts);
    let replaced = |facts: &Facts| {
        let list = Revocations::default().with_replaced(facts, [(&first, 1), (&second, 2)], NOW);
        list.serials.into_keys().collect::<Vec<_>>()
    };
    assert_eq!(replaced(&second), [first.serial]);
    assert_eq!(replaced(&first), []);
    let unknown = node_at(&ca, "b", NOW + 300).1.record.facts;
    assert_eq!(replaced(&unknown), [], "a certificate without a record replaces nothing");
}

#[test]
fn a_forged_certificate_renews_nothing() {
    let mut cluster = Cluster::new();
    let (_, issued) = node_at(&cluster.authority, "b", NOW);
    let facts = issued.record.facts.clone();
    let ask = |cluster: &Cluster, facts: &Facts, now: u64| {
        let request: RenewRequest = joiner("b", &[]).renewal();
        renew(&cluster.authority, cluster.records(None), facts, &[], &request, (now, NODE_LIFETIME), false)
    };
    // Signed by the authority's stolen key, so that a handshake accepts it, and never recorded.
    let no_record =
        "the cluster has no record of this certificate of b; whoever made it had the authority's key";
    assert!(word(ask(&cluster, &facts, NOW)).starts_with(no_record));
    cluster.issued.push(issued.record.clone());
    let due = facts.renew_at();
    assert!(word(ask(&cluster, &facts, due - MOST_SKEW - 1)).contains("is not due before"));
    assert!(ask(&cluster, &facts, due - MOST_SKEW).is_ok());
    let stretched = Facts { not_after: facts.not_after + DAY, ..facts.clone() };
    assert!(word(ask(&cluster, &stretched, NOW)).starts_with(no_record));
    assert!(ask(&cluster, &facts, facts.not_after).is_ok());
    assert!(word(ask(&cluster, &facts, facts.not_after + 1)).contains("has ended; join with a new token"));
    // Of a node that signs itself: nobody else may be there.
    let (request, late) = (joiner("b", &[]).renewal(), (facts.not_after + DAY, NODE_LIFETIME));
    assert!(renew(&cluster.authority, cluster.records(None), &facts, &[], &request, late, true).is_ok());
    // Again and again, and nothing of it is used.
    for _ in 1..8 {
        let admission = ask(&cluster, &facts, due).unwrap();
        cluster.commit(admission).unwrap();
    }
    assert!(word(ask(&cluster, &facts, due)).contains("b has 8 valid certificates"));
    // Of an authority that was removed.
    let gone = authority(1);
    cluster.authorities = vec![gone.certificate().clone()];
    assert!(word(ask(&cluster, &facts, NOW)).starts_with(no_record));
}

#[test]
fn of_two_decisions_on_one_state_only_one_counts() {
    let mut cluster = Cluster::new();
    let (one, two, three) = (cluster.invite(None, &[]), cluster.invite(None, &[]), cluster.invite(None, &[]));
    // Two hosts under one name.
    let [first, second] = [(&one, "b"), (&two, "B")]
        .map(|(token, name)| cluster.decide(&sent(&joiner(name, &[]), token, NOW), NOW).unwrap());
    cluster.commit(first).unwrap();
    assert_eq!(cluster.commit(second).unwrap_err().record, RecordId::Names);
    // One token, two names.
    let [first, second] =
        ["c", "d"].map(|name| cluster.decide(&sent(&joiner(name, &[]), &two, NOW), NOW).unwrap());
    cluster.commit(first).unwrap();
    assert!(cluster.commit(second).is_err());
    // A join and a revocation, a rotation.
    let join = cluster.decide(&sent(&joiner("e", &[]), &three, NOW), NOW).unwrap();
    cluster.revoke("e");
    assert_eq!(cluster.commit(join).unwrap_err().record, RecordId::Revocations);
    cluster.revoked = Revocations::default();
    let join = cluster.decide(&sent(&joiner("e", &[]), &three, NOW), NOW).unwrap();
    let renewal = {
        let facts = cluster.issued[0].facts.clone();
        let name = facts.identity.name().unwrap().to_string();
        let request = joiner(&name, &[]).renewal();
        let due = (facts.renew_at(), NODE_LIFETIME);
        renew(&cluster.authority, cluster.records(None), &facts, &[], &request, due, false).unwrap()
    };
    cluster.authorities.insert(0, authority(1).certificate().clone());
    assert_eq!(cluster.commit(join).unwrap_err().record, RecordId::Authorities);
    assert_eq!(cluster.commit(renewal).unwrap_err().record, RecordId::Authorities);
}

#[test]
fn names_that_are_taken_for_each_other_are_one_name() {
    let mut cluster = Cluster::new();
    let token = cluster.invite(None, &["Store.Example", "10.0.0.9"]);
    cluster.join(&sent(&joiner("Node-1", &["store.example", "10.0.0.9"]), &token, NOW), NOW).unwrap();
    assert_eq!(cluster.issued[0].hosts, [host("store.example"), host("10.0.0.9")]);
    let token = cluster.invite(None, &["node-1", "fine"]);
    let ask =
        |name: &str, hosts: &[&str]| word(cluster.decide(&sent(&joiner(name, hosts), &token, NOW), NOW));
    assert!(ask("node-1", &[]).starts_with("node Node-1 exists"));
    assert_eq!(ask("STORE.example", &[]), "STORE.example is a host name of node Node-1; choose another name");
    assert_eq!(ask("b", &["fine", "node-1"]), "node-1 is a host name of node Node-1; choose another name");
    cluster.revoke("Node-1");
    assert!(word(cluster.decide(&sent(&joiner("NODE-1", &[]), &token, NOW), NOW)).contains("was revoked"));
    cluster.join(&sent(&joiner("store.example", &[]), &token, NOW), NOW).unwrap();
}

/// A token of before a rotation must not leave its host before nodes that it refuses.
#[test]
fn a_rotation_waits_for_tokens_that_do_not_name_the_new_authority() {
    let mut cluster = Cluster::new();
    let old = cluster.invite(None, &[]);
    let next = authority(1);
    let introducing =
        Authorities::new(cluster.authorities[0].clone()).introduce(next.certificate().clone(), NOW).unwrap();
    let refused = introducing.renew(&[], &cluster.tokens, NOW).unwrap_err().to_string();
    assert!(refused.contains(&format!("the unused token {}", old.id)), "{refused}");
    assert!(introducing.renew(&[], &cluster.tokens, NOW + HOUR + MOST_SKEW - 1).is_err(), "on some clock");
    assert!(introducing.renew(&[], &cluster.tokens, NOW + HOUR + MOST_SKEW).is_ok());
    cluster.authorities = introducing.trusted();
    cluster.tokens.clear();
    cluster.invite(None, &[]);
    assert!(introducing.renew(&[], &cluster.tokens, NOW).is_ok(), "made since, with both");
}

#[test]
fn an_authority_signs_nothing_that_outlives_it() {
    let ca = Authority::create(weir_identity::ClusterId([1; 16]), NOW).unwrap();
    let end = ca.certificate().facts().not_after;
    let key = Key::generate().unwrap().public();
    let issue = |now, lifetime| ca.issue_node(&name("b"), &[], &key, now, lifetime);
    let last = issue(end - DAY, NODE_LIFETIME).unwrap().record.facts;
    assert_eq!(last.not_after, end);
    let early = issue(NOW - HOUR, NODE_LIFETIME).unwrap_err().to_string();
    assert!(early.contains("correct the clock; if it is right"), "{early}");
    for now in [end - 60, end + 1, u64::MAX] {
        assert!(
            issue(now, NODE_LIFETIME).unwrap_err().to_string().contains("correct the clock, or rotate"),
            "{now}"
        );
    }
    assert!(issue(NOW, 599).unwrap_err().to_string().contains("at least 10 min, not 9 min 59 s"));
}
