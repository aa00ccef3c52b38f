//! Replacing the authority: only in order, only when everyone has followed, and then completely.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use proptest::prelude::*;
use weir_identity::{
    Authorities, Authority, Facts, Fingerprint, Grant, Holder, Invitation, IssuedRecord, Key, NODE_LIFETIME,
    NodeTrusts, NotOfTheCluster, Obstacle, Revocations, RotationRefused, TokenRecord, Use, invite,
    still_trusted,
};

fn fingerprint(authority: &Authority) -> Fingerprint {
    authority.certificate().fingerprint()
}

fn settled(authority: &Authority) -> Authorities {
    Authorities::new(authority.certificate().clone())
}

fn token(pins: &[&Authority], now: u64) -> TokenRecord {
    let invitation = Invitation {
        only_for: None,
        hosts: vec![],
        pins: pins.iter().map(|one| fingerprint(one)).collect(),
        endpoints: vec!["a:1".parse().unwrap()],
        ttl: HOUR,
        readmits: false,
    };
    invite(invitation, now).unwrap().1
}

/// Certificates with the registry's revisions of their records, in the order of their making.
fn in_order(issued: &[IssuedRecord]) -> impl Iterator<Item = (&Facts, u64)> {
    issued.iter().map(|one| &one.facts).zip(1..)
}

const NOTHING: Use<'static> = Use {
    issued: &[],
    tokens: &[],
    revoked: &Revocations {
        serials: std::collections::BTreeMap::new(),
        nodes: std::collections::BTreeMap::new(),
        clients: std::collections::BTreeMap::new(),
    },
};

#[test]
fn a_rotation_goes_in_three_steps() {
    let (old, new) = (authority(1), authority(1));
    let start = settled(&old);
    let introducing = start.introduce(new.certificate().clone(), NOW).unwrap();
    assert_eq!(introducing.signer(), old.certificate(), "the new one signs nothing before all know it");
    assert_eq!(introducing.trusted(), [old.certificate().clone(), new.certificate().clone()]);
    assert!(!introducing.must_renew(fingerprint(&old)));

    let trusts = |node: &str, all: &[&Authority]| NodeTrusts {
        node: name(node),
        authorities: all.iter().map(|one| fingerprint(one)).collect(),
    };
    let (a, b) = (trusts("a", &[&old, &new]), trusts("b", &[&old]));
    assert_eq!(
        introducing.renew(&[a.clone(), b], &[], NOW).unwrap_err(),
        RotationRefused::NotEverywhere(vec![Obstacle::Unaware(name("b"))])
    );
    let renewing = introducing.renew(&[a, trusts("b", &[&new, &old])], &[], NOW).unwrap();
    assert_eq!(renewing.signer(), new.certificate());
    assert!(renewing.must_renew(fingerprint(&old)) && !renewing.must_renew(fingerprint(&new)));
    assert_eq!(renewing.trusted(), [new.certificate().clone(), old.certificate().clone()]);

    let (_, of_a) = node_at(&old, "a", NOW - DAY);
    let (_, new_of_a) = node_at(&new, "a", NOW);
    let issued = [of_a.record.clone(), new_of_a.record.clone()];
    let none = Revocations::default();
    let in_use = Use { issued: &issued, tokens: &[], revoked: &none };
    let word = renewing.retire(in_use, NOW).unwrap_err().to_string();
    assert!(word.contains(&format!("in use: node a (serial {})", of_a.record.facts.serial)), "{word}");
    // The node has presented its new certificate.
    let replaced = none.with_replaced(&new_of_a.record.facts, in_order(&issued), NOW);
    let end = renewing.retire(Use { revoked: &replaced, ..in_use }, NOW).unwrap();
    assert_eq!(end, settled(&new));
    // Or it has gone for good; or its certificate has ended on every clock.
    let gone = none.with_name(Holder::Node, &name("a"), [], "gone", NOW);
    assert!(renewing.retire(Use { revoked: &gone, ..in_use }, NOW).is_ok());
    let last = of_a.record.facts.not_after;
    assert!(renewing.retire(in_use, last + 300).is_err());
    assert!(renewing.retire(in_use, last + 301).is_ok());
}

#[test]
fn an_open_invitation_keeps_the_authority_that_it_names() {
    let (old, new) = (authority(1), authority(1));
    let introducing = settled(&old).introduce(new.certificate().clone(), NOW).unwrap();
    let renewing = introducing.renew(&[], &[], NOW).unwrap();
    let (early, late) = ([token(&[&old], NOW)], [token(&[&new, &old], NOW)]);
    let with = |tokens| Use { tokens, ..NOTHING };
    let word = renewing.retire(with(&early), NOW).unwrap_err().to_string();
    assert!(word.contains(&format!("the unused token {}", early[0].id)), "{word}");
    assert!(renewing.retire(with(&early), NOW + HOUR + 301).is_ok(), "expired");
    assert!(renewing.retire(with(&late), NOW).is_ok(), "it names the new one, too");
}

/// Clients do not renew their certificates: whoever has one of the new authority, with the same rights, is done.
#[test]
fn a_client_with_a_later_certificate_holds_nothing_back() {
    let (old, new) = (authority(1), authority(1));
    let introducing = settled(&old).introduce(new.certificate().clone(), NOW).unwrap();
    let renewing = introducing.renew(&[], &[], NOW).unwrap();
    let of = |authority: &Authority, exports: &[&str]| {
        let grant = Grant::Exports(exports.iter().map(|one| one.parse().unwrap()).collect());
        let key = Key::generate().unwrap().public();
        authority.issue_client(&name("guest"), &grant, &key, NOW, DAY).unwrap().record
    };
    let before = of(&old, &["db"]);
    let left = |issued: &[IssuedRecord]| renewing.obstacles(&[], Use { issued, ..NOTHING }, NOW);
    let (identity, serial, until) =
        (before.facts.identity.clone(), before.facts.serial, before.facts.not_after);
    let itself = [Obstacle::Certificate { identity, serial, until }];
    assert_eq!(left(std::slice::from_ref(&before)), itself);
    assert_eq!(left(&[before.clone(), of(&new, &["db", "x"])]), itself, "other rights");
    assert_eq!(left(&[before.clone(), of(&old, &["db"])]).len(), 2, "the same authority");
    assert_eq!(left(&[before.clone(), of(&new, &["db"])]), []);
    assert_eq!(left(&[before, of(&new, &["db#0000000000000007"])]), [], "the disk was made again");
    assert_eq!(renewing.forced(NOW).unwrap(), settled(&new), "whoever is left, if an operator says so");
}

/// A node's word takes authorities out of a client's files; it adds none, and does not take away what the client's own certificate
/// rests on.
#[test]
fn a_clients_files_trust_no_more_than_they_did_and_never_only_another_one() {
    let [former, present, stranger] = [authority(1), authority(1), authority(1)];
    let own = client(&present, "eve", &Grant::Role(weir_identity::Role::Viewer));
    let both = || vec![former.certificate().clone(), present.certificate().clone()];
    let kept = |current: &[&Authority]| {
        let current: Vec<Fingerprint> = current.iter().map(|one| fingerprint(one)).collect();
        still_trusted(&own, both(), &current)
    };
    assert_eq!(kept(&[&present]).unwrap(), [present.certificate().clone()]);
    assert_eq!(kept(&[&present, &former]).unwrap(), both(), "while the rotation is under way");
    assert_eq!(kept(&[&stranger, &present]).unwrap(), [present.certificate().clone()]);
    for hostile in [&[&former][..], &[&stranger], &[]] {
        assert_eq!(kept(hostile), Err(NotOfTheCluster::Untrusted(fingerprint(&present))));
    }
}

#[test]
fn a_step_out_of_order_changes_nothing() {
    let (old, new) = (authority(1), authority(1));
    let start = settled(&old);
    let word = |refused: Result<Authorities, RotationRefused>| refused.unwrap_err().to_string();
    let wants =
        "the certificate authority is settled; removing the former one needs it renewing certificates";
    assert_eq!(word(start.retire(NOTHING, NOW)), wants);
    assert!(word(start.renew(&[], &[], NOW)).contains("is settled"));
    assert!(word(start.abandon(NOTHING, NOW)).contains("is settled"));
    let introducing = start.introduce(new.certificate().clone(), NOW).unwrap();
    assert!(
        word(introducing.introduce(authority(1).certificate().clone(), NOW))
            .contains("is introducing another one")
    );
    assert!(word(introducing.retire(NOTHING, NOW)).contains("is introducing another one"));
    assert_eq!(introducing.abandon(NOTHING, NOW).unwrap(), start);
    let issued = [node_at(&new, "a", NOW).1.record];
    assert!(word(introducing.abandon(Use { issued: &issued, ..NOTHING }, NOW)).contains("node a"));
    let renewing = introducing.renew(&[], &[], NOW).unwrap();
    assert!(word(renewing.abandon(NOTHING, NOW)).contains("is renewing certificates"));

    assert!(word(start.introduce(old.certificate().clone(), NOW)).contains("is the present one"));
    assert!(word(start.introduce(authority(2).certificate().clone(), NOW)).contains("or of another cluster"));
    assert!(word(start.introduce(new.certificate().clone(), NOW + 3650 * DAY)).contains("is valid from"));
}

#[test]
fn the_state_is_read_back_from_the_registry() {
    let (old, new) = (authority(1), authority(1));
    let introducing = settled(&old).introduce(new.certificate().clone(), NOW).unwrap();
    let renewing = introducing.renew(&[], &[], NOW).unwrap();
    for state in [settled(&old), introducing, renewing] {
        let text = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<Authorities>(&text).unwrap(), state);
    }
    assert!(serde_json::from_str::<Authorities>(r#"{"phase":"settled","ca":""}"#).is_err());
}

#[derive(Clone, Debug)]
enum Step {
    Introduce,
    Abandon,
    Renew,
    Retire,
    /// A node hears of the present state.
    Hears(usize),
    /// A node renews its certificate if the state says so.
    Renews(usize),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => Just(Step::Introduce),
        1 => Just(Step::Abandon),
        3 => Just(Step::Renew),
        4 => Just(Step::Retire),
        8 => (0..3usize).prop_map(Step::Hears),
        8 => (0..3usize).prop_map(Step::Renews),
        1 => (1..3 * DAY).prop_map(Step::Wait),
    ]
}

/// A node: what it trusts, and who signed its certificate.
struct Member {
    trusts: Vec<Fingerprint>,
    certificate: IssuedRecord,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// At any time, and whatever the order of events, every node that is up accepts the certificate of every other.
    #[test]
    fn nodes_never_lose_sight_of_each_other(steps in proptest::collection::vec(steps(), 0..60)) {
        let pool: Vec<Authority> = (0..4).map(|_| authority(1)).collect();
        let by = |one: Fingerprint| pool.iter().find(|other| fingerprint(other) == one).unwrap();
        let mut state = settled(&pool[0]);
        let mut now = NOW;
        let mut issued: Vec<IssuedRecord> = Vec::new();
        let mut revoked = Revocations::default();
        let mut members: Vec<Member> = ["a", "b", "c"].iter().map(|node| {
            let certificate = node_at(&pool[0], node, now).1.record;
            issued.push(certificate.clone());
            Member { trusts: vec![fingerprint(&pool[0])], certificate }
        }).collect();
        let mut next = 1;
        for step in steps {
            let used = Use { issued: &issued, tokens: &[], revoked: &revoked };
            let told: Vec<NodeTrusts> = members.iter().enumerate()
                .map(|(i, one)| NodeTrusts { node: name(&format!("n{i}")), authorities: one.trusts.clone() }).collect();
            let changed = match step {
                Step::Introduce => state.introduce(pool[next % pool.len()].certificate().clone(), now).inspect(|_| next += 1),
                Step::Abandon => state.abandon(used, now),
                Step::Renew => state.renew(&told, &[], now),
                Step::Retire => state.retire(used, now),
                Step::Hears(i) => {
                    members[i].trusts = state.trusted().iter().map(|one| one.fingerprint()).collect();
                    Ok(state.clone())
                }
                Step::Renews(i) => {
                    // Its own trust is never older than the certificate that it gets: the answer carries both.
                    if state.must_renew(members[i].certificate.ca) {
                        now += 1;
                        let node = members[i].certificate.facts.identity.name().unwrap().to_string();
                        let new = node_at(by(state.signer().fingerprint()), &node, now).1.record;
                        issued.push(new.clone());
                        revoked = revoked.with_replaced(&new.facts, in_order(&issued), now);
                        members[i].certificate = new;
                        members[i].trusts = state.trusted().iter().map(|one| one.fingerprint()).collect();
                    }
                    Ok(state.clone())
                }
                Step::Wait(seconds) => {
                    // Less than a certificate's validity in all, so that none ends by age.
                    now = (now + seconds).min(NOW + NODE_LIFETIME / 2);
                    Ok(state.clone())
                }
            };
            state = changed.unwrap_or(state);
            for (i, one) in members.iter().enumerate() {
                for other in &members {
                    prop_assert!(other.trusts.contains(&one.certificate.ca), "node {i} is refused in {state:?}");
                }
                prop_assert!(revoked.covering(&one.certificate.facts).is_none());
                prop_assert!(state.trusted().iter().any(|ca| ca.fingerprint() == one.certificate.ca));
            }
        }
    }
}
