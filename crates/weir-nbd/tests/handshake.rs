//! The handshake's state machine: its answers, and its robustness against any bytes in any pieces.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use weir_block::LayerInfo;
use weir_nbd::protocol::{
    EXPORT_NAME_PADDING, OPTION_MAGIC, OPTION_REPLY_MAGIC, info, option, option_reply, transmission_flag,
};
use weir_nbd::server::{
    Directory, ExportInfo, Handshake, HandshakeError, Listed, MOST_OPTION_BYTES, NotServed, Session, Step,
};

struct OneDisk;

impl Directory for OneDisk {
    fn list(&self) -> Vec<Listed> {
        vec![Listed { name: "disk".into(), description: "of a test".into() }]
    }

    fn lookup(&self, name: &str) -> Result<ExportInfo, NotServed> {
        if !matches!(name, "disk" | "") {
            return Err(NotServed::Unknown(format!("{name} is on node b")));
        }
        let layer = LayerInfo {
            size: 1 << 20,
            logical_block: 4096,
            preferred_block: 4096,
            max_transfer: u32::MAX,
            writable: true,
            fast_zeroes: true,
            discards: true,
        };
        Ok(ExportInfo { name: "disk".into(), description: "of a test".into(), layer })
    }
}

fn option(number: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend((body.len() as u32).to_be_bytes());
    bytes.extend(body);
    bytes
}

fn go_body(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut body = (name.len() as u32).to_be_bytes().to_vec();
    body.extend(name.as_bytes());
    body.extend((wanted.len() as u16).to_be_bytes());
    body.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    body
}

fn context_body(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut body = (name.len() as u32).to_be_bytes().to_vec();
    body.extend(name.as_bytes());
    body.extend((queries.len() as u32).to_be_bytes());
    for query in queries {
        body.extend((query.len() as u32).to_be_bytes());
        body.extend(query.as_bytes());
    }
    body
}

/// Feeds the pieces one after the other; returns the last step, all output, and the leftover.
fn converse(pieces: &[&[u8]]) -> (Step, Vec<u8>, Vec<u8>) {
    let mut out = Vec::new();
    let mut handshake = Handshake::new(&mut out);
    let mut pieces = pieces.iter();
    loop {
        match handshake.step(&OneDisk, &mut out) {
            Step::Continue => {}
            Step::NeedMore => match pieces.next() {
                Some(piece) => handshake.receive(piece),
                None => return (Step::NeedMore, out, Vec::new()),
            },
            end => {
                pieces.for_each(|piece| handshake.receive(piece));
                return (end, out, handshake.into_leftover());
            }
        }
    }
}

/// Option, kind and body of every reply after the greeting.
fn replies(mut out: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    out = &out[18..];
    let mut replies = Vec::new();
    while !out.is_empty() {
        assert_eq!(out[..8], OPTION_REPLY_MAGIC.to_be_bytes());
        let word = |at: usize| u32::from_be_bytes(out[at..at + 4].try_into().unwrap());
        let length = word(16) as usize;
        replies.push((word(8), word(12), out[20..20 + length].to_vec()));
        out = &out[20 + length..];
    }
    replies
}

/// The flags, then these options.
fn after_flags(options: &[Vec<u8>]) -> (Step, Vec<(u32, u32, Vec<u8>)>) {
    let bytes = [vec![0, 0, 0, 3], options.concat()].concat();
    let (step, out, leftover) = converse(&[&bytes]);
    assert!(leftover.is_empty());
    (step, replies(&out))
}

fn kinds(replies: &[(u32, u32, Vec<u8>)]) -> Vec<(u32, u32)> {
    replies.iter().map(|(option, kind, _)| (*option, *kind)).collect()
}

#[test]
fn go_describes_the_export_and_begins_the_session() {
    let wanted = [info::BLOCK_SIZE, info::NAME, info::DESCRIPTION, 77];
    let (step, told) = after_flags(&[
        option(option::STRUCTURED_REPLY, &[]),
        option(option::SET_META_CONTEXT, &context_body("", &["base:allocation", "x-other:thing"])),
        option(option::GO, &go_body("disk", &wanted)),
    ]);
    let Step::Attach(session) = step else { panic!("{step:?}") };
    let flags = session.flags;
    assert_eq!(
        session,
        Session {
            export: "disk".into(),
            structured_replies: true,
            extended_headers: false,
            block_sizes: true,
            base_allocation: Some(1),
            flags,
        }
    );
    assert!(flags & transmission_flag::SEND_DF != 0 && flags & transmission_flag::CAN_MULTI_CONN != 0);
    assert_eq!(
        told[1],
        (option::SET_META_CONTEXT, option_reply::META_CONTEXT, b"\0\0\0\x01base:allocation".to_vec())
    );
    let bodies: Vec<_> =
        told.iter().filter(|told| told.1 == option_reply::INFO).map(|told| told.2.clone()).collect();
    assert_eq!(bodies[0][..10], [0, 0, 0, 0, 0, 0, 0, 16, 0, 0]);
    assert_eq!(bodies[1], b"\0\x01disk");
    assert_eq!(bodies[2], b"\0\x02of a test");
    assert_eq!(bodies[3], [0, 3, 0, 0, 16, 0, 0, 0, 16, 0, 2, 0, 0, 0], "4 KiB, 4 KiB, 32 MiB");
    assert_eq!(told.last().unwrap(), &(option::GO, option_reply::ACK, vec![]));
}

#[test]
fn export_name_answers_with_and_without_padding() {
    for (flags, padding) in [(0u32, EXPORT_NAME_PADDING), (1, EXPORT_NAME_PADDING), (2, 0), (3, 0)] {
        let bytes = [&flags.to_be_bytes()[..], &option(option::EXPORT_NAME, b"disk"), b"ahead"].concat();
        let (step, out, leftover) = converse(&[&bytes]);
        assert!(matches!(step, Step::Attach(_)));
        assert_eq!(out.len(), 18 + 10 + padding, "flags {flags}");
        assert_eq!(leftover, b"ahead");
    }
    let bytes = [&3u32.to_be_bytes()[..], &option(option::EXPORT_NAME, b"nowhere")].concat();
    let (step, out, _) = converse(&[&bytes]);
    assert!(matches!(step, Step::Refused(HandshakeError::NoSuchExport { .. })), "{step:?}");
    assert_eq!(out.len(), 18, "there is no way to say no");
}

#[test]
fn what_is_not_understood_is_answered_and_skipped() {
    let (step, told) = after_flags(&[
        option(option::STARTTLS, &[]),
        option(option::EXTENDED_HEADERS, b"data"),
        option(4711, b"whatever"),
        option(option::LIST, b"data"),
        option(option::STRUCTURED_REPLY, b"data"),
        option(option::SET_META_CONTEXT, &context_body("disk", &["base:allocation"])),
        option(option::INFO, &[0, 0, 0, 9]),
        option(option::GO, &go_body("nowhere", &[])),
        option(option::LIST, &[]),
        option(option::ABORT, b"ignored"),
    ]);
    assert_eq!(step, Step::Aborted);
    use option_reply::{ACK, ERR_INVALID, ERR_UNKNOWN, ERR_UNSUP, SERVER};
    let expected = [
        (option::STARTTLS, ERR_UNSUP),
        (option::EXTENDED_HEADERS, ERR_INVALID),
        (4711, ERR_UNSUP),
        (option::LIST, ERR_INVALID),
        (option::STRUCTURED_REPLY, ERR_INVALID),
        (option::SET_META_CONTEXT, ERR_INVALID),
        (option::INFO, ERR_INVALID),
        (option::GO, ERR_UNKNOWN),
        (option::LIST, SERVER),
        (option::LIST, ACK),
        (option::ABORT, ACK),
    ];
    assert_eq!(kinds(&told), expected);
    assert_eq!(told[7].2, b"nowhere is on node b");
    assert_eq!(told[8].2, b"\0\0\0\x04diskof a test");
}

#[test]
fn contexts_are_listed_by_wildcard_but_selected_by_name() {
    use option_reply::{ACK, META_CONTEXT};
    let cases = [
        (option::LIST_META_CONTEXT, vec![], true, false),
        (option::LIST_META_CONTEXT, vec!["base:"], true, false),
        (option::LIST_META_CONTEXT, vec!["other:"], false, false),
        (option::SET_META_CONTEXT, vec![], false, false),
        (option::SET_META_CONTEXT, vec!["base:"], false, false),
        (option::SET_META_CONTEXT, vec!["base:other"], false, false),
        (option::SET_META_CONTEXT, vec!["base:", "base:allocation"], true, true),
    ];
    for (number, queries, told_of, selected) in cases {
        let (step, told) = after_flags(&[
            option(option::STRUCTURED_REPLY, &[]),
            option(number, &context_body("disk", &queries)),
            option(option::GO, &go_body("disk", &[])),
        ]);
        let of_option: Vec<_> = kinds(&told).into_iter().filter(|(option, _)| *option == number).collect();
        let expected =
            if told_of { vec![(number, META_CONTEXT), (number, ACK)] } else { vec![(number, ACK)] };
        assert_eq!(of_option, expected, "{number} {queries:?}");
        let Step::Attach(session) = step else { panic!("{step:?}") };
        assert_eq!(session.base_allocation.is_some(), selected, "{number} {queries:?}");
    }
}

#[test]
fn a_later_selection_replaces_the_earlier_even_when_it_fails() {
    for second in [context_body("disk", &[]), context_body("nowhere", &["base:allocation"]), vec![1, 2]] {
        let (step, _) = after_flags(&[
            option(option::STRUCTURED_REPLY, &[]),
            option(option::SET_META_CONTEXT, &context_body("disk", &["base:allocation"])),
            option(option::SET_META_CONTEXT, &second),
            option(option::GO, &go_body("disk", &[])),
        ]);
        let Step::Attach(session) = step else { panic!("{step:?}") };
        assert_eq!(session.base_allocation, None);
    }
}

#[test]
fn a_stream_that_is_no_nbd_ends_at_once() {
    let (step, ..) = converse(&[b"GET / HTTP/1.1\r\n\r\n"]);
    assert!(matches!(step, Step::Refused(HandshakeError::UnknownClientFlags(_))), "{step:?}");
    let (step, ..) = converse(&[&[0, 0, 0, 3], b"GET / HTTP/1.1\r\n\r\n"]);
    assert!(matches!(step, Step::Refused(HandshakeError::BadOptionMagic(_))), "{step:?}");
}

#[test]
fn an_option_that_is_too_long_is_answered_and_skipped() {
    let long = |number| option(number, &vec![7; MOST_OPTION_BYTES as usize + 1]);
    let go = option(option::GO, &go_body("disk", &[]));
    let bytes = [vec![0, 0, 0, 3], long(option::INFO), long(4711), go].concat();
    for piece in [100, 4096, bytes.len()] {
        let pieces: Vec<_> = bytes.chunks(piece).collect();
        let (step, out, _) = converse(&pieces);
        let Step::Attach(session) = step else { panic!("{step:?}") };
        assert!(!session.block_sizes, "it has not asked for them");
        let expected = [
            (option::INFO, option_reply::ERR_TOO_BIG),
            (4711, option_reply::ERR_TOO_BIG),
            (option::GO, option_reply::INFO),
            (option::GO, option_reply::ACK),
        ];
        assert_eq!(kinds(&replies(&out)), expected);
    }
    let announced = |number, length: u32| {
        let mut long = option(number, &[]);
        long[12..16].copy_from_slice(&length.to_be_bytes());
        converse(&[&[0, 0, 0, 3], &long])
    };
    let (step, out, _) = announced(option::INFO, u32::MAX);
    assert!(matches!(step, Step::Refused(HandshakeError::OptionTooLong { .. })), "{step:?}");
    assert_eq!(kinds(&replies(&out)), [(option::INFO, option_reply::ERR_TOO_BIG)], "not without end");
    let (step, out, _) = announced(option::EXPORT_NAME, MOST_OPTION_BYTES + 1);
    assert!(matches!(step, Step::Refused(HandshakeError::OptionTooLong { .. })), "{step:?}");
    assert_eq!(kinds(&replies(&out)), [], "there is no way to say no");
    let (step, out, _) = announced(option::ABORT, u32::MAX);
    assert_eq!((step, kinds(&replies(&out))), (Step::Aborted, vec![(option::ABORT, option_reply::ACK)]));
    let endless = [vec![0, 0, 0, 3], long(4711).repeat(600)].concat();
    let (step, ..) = converse(&endless.chunks(1 << 20).collect::<Vec<_>>());
    assert!(matches!(step, Step::Refused(HandshakeError::OptionTooLong { .. })), "{step:?}");
}

#[test]
fn extended_headers_include_structured_replies_and_exclude_the_old_way_in() {
    let go = option(option::GO, &go_body("disk", &[info::BLOCK_SIZE]));
    let contexts = option(option::SET_META_CONTEXT, &context_body("disk", &["base:allocation"]));
    for options in [
        vec![option(option::EXTENDED_HEADERS, &[]), contexts.clone(), go.clone()],
        vec![option(option::STRUCTURED_REPLY, &[]), option(option::EXTENDED_HEADERS, &[]), contexts, go],
    ] {
        let (step, _) = after_flags(&options);
        let Step::Attach(session) = step else { panic!("{step:?}") };
        assert!(session.extended_headers && session.structured_replies && session.block_sizes);
        assert_eq!(session.base_allocation, Some(1));
        assert!(session.flags & transmission_flag::SEND_DF != 0);
    }
    let (step, told) =
        after_flags(&[option(option::EXTENDED_HEADERS, &[]), option(option::STRUCTURED_REPLY, &[])]);
    assert_eq!(step, Step::NeedMore);
    let refused = (option::STRUCTURED_REPLY, option_reply::ERR_EXT_HEADER_REQD);
    assert_eq!(kinds(&told), [(option::EXTENDED_HEADERS, option_reply::ACK), refused]);
    let (step, _) =
        after_flags(&[option(option::EXTENDED_HEADERS, &[]), option(option::EXPORT_NAME, b"disk")]);
    assert_eq!(step, Step::Refused(HandshakeError::ExportNameWithExtendedHeaders));
}

/// Options, well-formed and not.
fn any_option() -> impl Strategy<Value = Vec<u8>> {
    let number = prop_oneof![0u32..13, any::<u32>()];
    let name = prop_oneof![Just("disk".to_owned()), Just(String::new()), "[a-zß]{0,9}"];
    let queries = proptest::collection::vec("(base:|base:allocation|[a-z:]{0,8})", 0..4);
    let body = prop_oneof![
        Just(Vec::new()),
        proptest::collection::vec(any::<u8>(), 0..64),
        (name.clone(), proptest::collection::vec(any::<u16>(), 0..5)).prop_map(|(n, w)| go_body(&n, &w)),
        (name, queries).prop_map(|(name, queries)| {
            context_body(&name, &queries.iter().map(String::as_str).collect::<Vec<_>>())
        }),
    ];
    (number, body).prop_map(|(number, body)| option(number, &body))
}

proptest! {
    /// The result for a client's bytes does not depend on their division into pieces.
    #[test]
    fn cuts_do_not_matter(
        flags in prop_oneof![4 => 0u32..4, 1 => any::<u32>()],
        options in proptest::collection::vec(any_option(), 0..8),
        noise in proptest::collection::vec(any::<u8>(), 0..40),
        cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..12),
    ) {
        let bytes = [flags.to_be_bytes().to_vec(), options.concat(), noise].concat();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
        prop_assert_eq!(converse(&[&bytes]), converse(&pieces));
    }

    /// No input makes it panic, and it does not keep more than one option.
    #[test]
    fn noise_does_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        converse(&[&bytes]);
        converse(&[&[0, 0, 0, 3], &bytes]);
    }
}
