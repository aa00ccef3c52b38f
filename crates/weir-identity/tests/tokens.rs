//! Join tokens: their text, and what happens to one on its way.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use proptest::collection::vec;
use proptest::prelude::*;
use weir_identity::{
    Endpoint, Fingerprint, Invitation, InviteError, LONGEST_TOKEN, Secret, Token, TokenError, TokenId, invite,
};

fn token() -> Token {
    let endpoints =
        ["host-a.example:7401", "10.0.0.2:7401", "[fd00::3]:7401"].map(|one| one.parse().unwrap());
    let pins = vec![Fingerprint([0x11; 32]), Fingerprint([0x22; 32])];
    Token::new(TokenId([0xa5; 8]), Secret::new([0x5a; 32]), pins, endpoints.into()).unwrap()
}

/// The format is a contract between versions: a change of it needs a new version number.
#[test]
fn the_text_of_a_token_is_the_golden_one() {
    let golden = include_str!("golden/token.txt");
    assert_eq!(*token().text(), golden.trim_end());
    assert_eq!(golden.parse(), Ok(token()));
}

#[test]
fn each_damage_is_called_by_its_name() {
    let text = token().text().to_string();
    let length = text.len();
    let read = |text: &str| text.parse::<Token>().unwrap_err();
    assert_eq!(read(""), TokenError::NotAToken);
    assert_eq!(read("weir-token-1.AAAA"), TokenError::NotAToken);
    assert_eq!(read(&text.replace("join-1", "join-2")), TokenError::Version("2".into()));
    assert_eq!(read("weir-join-1"), TokenError::Truncated { has: 11, needs: None });
    for cut in "weir-join-1.".len()..length {
        let TokenError::Truncated { has, needs } = read(&text[..cut]) else { panic!("cut at {cut}") };
        assert!(
            has == cut && (needs == Some(length) || (needs.is_none() && cut < 16)),
            "cut at {cut}: {has} of {needs:?}"
        );
    }
    let word = read(&text[..100]).to_string();
    assert_eq!(
        word,
        format!("the token is truncated: 100 of {length} characters are there; copy the whole line")
    );
    assert_eq!(read("weir-join-1").to_string(), "the token is truncated; copy the whole line");
    assert_eq!(read(&format!("{text}A")), TokenError::TooLong { has: length + 1, needs: length });
    assert_eq!(
        read(&format!("{text}{text}")),
        TokenError::Character { character: '.', position: length + 12 }
    );
    assert_eq!(read(&text.replacen("paW", "paX", 1)), TokenError::Checksum);
    let split = format!("{}\n{}", &text[..60], &text[60..]);
    assert_eq!(read(&split), TokenError::Character { character: '\n', position: 61 });
    assert_eq!(read(&text.replacen('A', "é", 1)), TokenError::Character { character: 'é', position: 13 });
    assert!(matches!(
        read(&format!("weir-join-1.{}", "A".repeat(LONGEST_TOKEN))),
        TokenError::TooLong { .. }
    ));
    // Spaces around it come from copying.
    assert_eq!(format!("  {text}\r\n").parse(), Ok(token()));
}

#[test]
fn a_token_never_shows_its_secret_unless_asked() {
    assert!(!format!("{:?}", token()).contains("90"), "{:?}", token());
    assert!(format!("{:?}", token()).contains("Secret(…)"));
}

#[test]
fn endpoints_have_one_form() {
    for good in ["a:1", "10.0.0.1:65535", "[::1]:7401", "Host-1.example:7401"] {
        assert!(good.parse::<Endpoint>().is_ok(), "{good}");
    }
    for bad in [
        "",
        "a",
        "a:",
        ":1",
        "a:0",
        "a:65536",
        "a:+1",
        "a:01",
        "::1:7401",
        "[a]:1",
        "[10.0.0.1]:1",
        "a b:1",
        "[::1]7401",
    ] {
        assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
    }
}

#[test]
fn an_invitation_has_limits() {
    let make = |ttl, endpoints: usize| {
        let endpoints = vec!["a:1".parse().unwrap(); endpoints];
        invite(
            Invitation {
                only_for: None,
                hosts: vec![],
                pins: vec![Fingerprint([1; 32])],
                endpoints,
                ttl,
                readmits: false,
            },
            NOW,
        )
    };
    assert_eq!(make(59, 1).unwrap_err(), InviteError::Ttl(59));
    assert_eq!(make(7 * DAY + 1, 1).unwrap_err(), InviteError::Ttl(7 * DAY + 1));
    assert_eq!(make(HOUR, 0).unwrap_err(), InviteError::Token(TokenError::Count));
    assert_eq!(make(HOUR, 9).unwrap_err(), InviteError::Token(TokenError::Count));
    let ((one, record), (two, _)) = (make(HOUR, 8).unwrap(), make(HOUR, 8).unwrap());
    assert!(one.id != two.id && one.secret != two.secret);
    // The record is public within the cluster.
    let stored = serde_json::to_string(&record).unwrap();
    let text = one.text();
    let read: Token = text.parse().unwrap();
    assert_eq!(read, one);
    assert!(!stored.contains(&text[30..60]) && stored.contains(&one.id.to_string()));
    assert_eq!(serde_json::from_str::<weir_identity::TokenRecord>(&stored).unwrap(), record);
}

fn tokens() -> impl Strategy<Value = Token> {
    let endpoint = prop_oneof![
        ("[a-z]{1,20}(\\.[a-z0-9]{0,10}[a-z]){0,3}", 1..u16::MAX)
            .prop_map(|(host, port)| format!("{host}:{port}")),
        (any::<[u8; 4]>(), 1..u16::MAX)
            .prop_map(|(ip, port)| format!("{}:{port}", std::net::Ipv4Addr::from(ip))),
        (any::<[u8; 16]>(), 1..u16::MAX)
            .prop_map(|(ip, port)| format!("[{}]:{port}", std::net::Ipv6Addr::from(ip))),
    ];
    let pins = vec(any::<[u8; 32]>().prop_map(Fingerprint), 1..=2);
    (any::<[u8; 8]>(), any::<[u8; 32]>(), pins, vec(endpoint, 1..=8)).prop_map(
        |(id, secret, pins, endpoints)| {
            let endpoints = endpoints.iter().map(|one| one.parse().unwrap()).collect();
            Token::new(TokenId(id), Secret::new(secret), pins, endpoints).unwrap()
        },
    )
}

#[derive(Clone, Debug)]
enum Mutation {
    Replace(usize, char),
    Insert(usize, char),
    Remove(usize),
    Swap(usize, usize),
    Cut(usize),
}

fn mutations() -> impl Strategy<Value = Mutation> {
    let at = any::<prop::sample::Index>().prop_map(|at| at.index(1 << 16));
    let character = prop_oneof![
        proptest::char::range('0', 'z'),
        proptest::sample::select(vec!['-', '_', '.', '=', '+', '/', ' ', 'é']),
    ];
    prop_oneof![
        (at.clone(), character.clone()).prop_map(|(at, with)| Mutation::Replace(at, with)),
        (at.clone(), character).prop_map(|(at, with)| Mutation::Insert(at, with)),
        at.clone().prop_map(Mutation::Remove),
        (at.clone(), at.clone()).prop_map(|(one, other)| Mutation::Swap(one, other)),
        at.prop_map(Mutation::Cut),
    ]
}

fn mutate(text: &str, mutation: &Mutation) -> String {
    let mut all: Vec<char> = text.chars().collect();
    let length = all.len().max(1);
    match *mutation {
        _ if all.is_empty() => {}
        Mutation::Replace(at, with) => all[at % length] = with,
        Mutation::Insert(at, with) => all.insert(at % length, with),
        Mutation::Remove(at) => drop(all.remove(at % length)),
        Mutation::Swap(one, other) => all.swap(one % length, other % length),
        Mutation::Cut(at) => all.truncate(at % length),
    }
    all.into_iter().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_token_is_read_back(token in tokens()) {
        prop_assert_eq!(token.text().parse(), Ok(token));
    }

    #[test]
    fn a_changed_token_is_refused_or_the_same(token in tokens(), changes in vec(mutations(), 1..4)) {
        let text = token.text();
        let changed = changes.iter().fold(text.to_string(), |text, change| mutate(&text, change));
        match changed.parse::<Token>() {
            Ok(read) => {
                prop_assert_eq!(changed.trim(), text.as_str());
                prop_assert_eq!(read, token);
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn any_text_is_refused_without_a_panic(text in "(weir-join-1\\.)?[ -~]{0,200}") {
        prop_assert!(text.parse::<Token>().is_err());
    }
}
