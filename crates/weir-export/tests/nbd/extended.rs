//! Extended headers, byte by byte and with our own client. (QEMU asks for them from 8.2 on, libnbd from 1.18 on.)

use weir_block::ExtentState;
use weir_nbd::Uri;
use weir_nbd::client::{NbdClient, Options};
use weir_nbd::protocol::{OPTION_MAGIC, command, command_flag, option, option_reply, transmission_flag};

use crate::support::{RawClient, Server, ServerConfig};

const MIB: u64 = 1 << 20;

fn option_bytes(option: u32, body: &[u8]) -> Vec<u8> {
    [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &(body.len() as u32).to_be_bytes(), body]
        .concat()
}

fn request(command: u16, flags: u16, cookie: u64, offset: u64, length: u64) -> Vec<u8> {
    let words = [cookie, offset, length].map(u64::to_be_bytes);
    let magic = 0x21e4_1c71u32.to_be_bytes();
    [&magic[..], &flags.to_be_bytes(), &command.to_be_bytes(), words.as_flattened()].concat()
}

fn reply(flags: u16, kind: u16, cookie: u64, offset: u64, body: &[u8]) -> Vec<u8> {
    let words = [cookie, offset, body.len() as u64].map(u64::to_be_bytes);
    let magic = 0x6e8a_278cu32.to_be_bytes();
    [&magic[..], &flags.to_be_bytes(), &kind.to_be_bytes(), words.as_flattened(), body].concat()
}

/// Greeting, flags, extended headers, `base:allocation`, and GO with the block sizes.
fn enter(server: &Server) -> RawClient {
    enter_asking(server, b"\0\x01\0\x03")
}

/// As [`enter`], with these information requests: a number, and as many items.
fn enter_asking(server: &Server, information: &[u8]) -> RawClient {
    let mut client = RawClient::connect(server.socket());
    client.read(18);
    client.send(&[0, 0, 0, 3]);
    client.send(&option_bytes(option::EXTENDED_HEADERS, &[]));
    assert_eq!(client.option_reply(), (option::EXTENDED_HEADERS, option_reply::ACK, vec![]));
    client.send(&option_bytes(option::STRUCTURED_REPLY, &[]));
    assert_eq!(client.option_reply().1, option_reply::ERR_EXT_HEADER_REQD);
    let context =
        [&4u32.to_be_bytes()[..], b"disk", &1u32.to_be_bytes(), &15u32.to_be_bytes(), b"base:allocation"];
    client.send(&option_bytes(option::SET_META_CONTEXT, &context.concat()));
    assert_eq!(client.option_reply().1, option_reply::META_CONTEXT);
    assert_eq!(client.option_reply().1, option_reply::ACK);
    client.send(&option_bytes(option::GO, &[b"\0\0\0\x04disk", information].concat()));
    let (_, _, export) = client.option_reply();
    let flags = u16::from_be_bytes([export[10], export[11]]);
    assert!(flags & transmission_flag::SEND_DF != 0, "replies are chunks");
    while client.option_reply().1 != option_reply::ACK {}
    client
}

#[test]
fn golden_conversation() {
    let server = Server::start(ServerConfig::one(16 * MIB));
    let mut client = enter(&server);
    let mut say = |bytes: &[u8], expected: &[u8]| {
        client.send(bytes);
        assert_eq!(client.read(expected.len()), expected);
    };
    let write = [request(command::WRITE, command_flag::PAYLOAD_LEN, 1, 4096, 512), vec![7; 512]].concat();
    say(&write, &reply(1, 0, 1, 4096, &[]));
    let data = [&4096u64.to_be_bytes()[..], &[7; 512]].concat();
    say(&request(command::READ, 0, 2, 4096, 512), &reply(1, 1, 2, 4096, &data));
    say(&request(command::FLUSH, 0, 3, 0, 0), &reply(1, 0, 3, 0, &[]));
    say(&request(command::CACHE, 0, 4, 0, 16 * MIB), &reply(1, 0, 4, 0, &[]));
    let extents = [(4096u64, 3u64), (4096, 0), (16 * MIB - 8192, 3)];
    let status: Vec<u8> = [1u32, 3].iter().flat_map(|word| word.to_be_bytes()).collect();
    let extents = extents.iter().flat_map(|(length, flags)| [length.to_be_bytes(), flags.to_be_bytes()]);
    let status = [status, extents.flatten().collect()].concat();
    say(&request(command::BLOCK_STATUS, 0, 5, 0, 16 * MIB), &reply(1, 6, 5, 0, &status));
    let words = b"the range ends beyond the end of the disk";
    let error = [&22u32.to_be_bytes()[..], &(words.len() as u16).to_be_bytes(), words].concat();
    say(&request(command::TRIM, 0, 6, 512, 1 << 60), &reply(1, 0x8001, 6, 512, &error));
    say(&request(command::TRIM, 0, 7, 0, 16 * MIB), &reply(1, 0, 7, 0, &[]));
    // "A server SHOULD gracefully consume length bytes of payload (even if it then replies with an NBD_EINVAL failure)".
    let words = b"a flag is not valid with this command";
    let error = [&22u32.to_be_bytes()[..], &(words.len() as u16).to_be_bytes(), words].concat();
    let filtered =
        [request(command::BLOCK_STATUS, command_flag::PAYLOAD_LEN, 8, 0, 12), vec![0; 12]].concat();
    say(&filtered, &reply(1, 0x8001, 8, 0, &error));
    // QEMU does not say that a write carries data.
    let write = [request(command::WRITE, 0, 9, 0, 512), vec![8; 512]].concat();
    say(&write, &reply(1, 0, 9, 0, &[]));
    client.send(&request(command::DISC, 0, 10, 0, 0));
    assert!(client.is_closed());
}

#[test]
fn a_payload_beyond_the_maximum_and_a_compact_request_end_the_connection() {
    let server = Server::start(ServerConfig::one(MIB));
    for bytes in [
        request(command::WRITE, command_flag::PAYLOAD_LEN, 1, 0, (32 << 20) + 1),
        request(command::READ, command_flag::PAYLOAD_LEN, 1, 0, u64::MAX),
        [RawClient::request(command::READ, 0, 1, 0, 512), vec![0; 4]].concat(),
    ] {
        let mut client = enter(&server);
        client.send(&bytes);
        assert!(client.is_closed());
    }
}

/// "offset: MUST match the request", also when the server rounds a discard to whole blocks and sends it down in parts.
#[test]
fn a_rounded_discard_is_answered_with_the_offset_of_its_request() {
    let server = Server::start(ServerConfig::one(4 << 30));
    let mut client = enter_asking(&server, &[0, 0]);
    client.send(&request(command::TRIM, 0, 1, 1, 3 << 30));
    let expected = reply(1, 0, 1, 1, &[]);
    assert_eq!(client.read(expected.len()), expected);
}

#[test]
fn ranges_beyond_32_bits_are_one_request() {
    const SIZE: u64 = 3 << 40;
    let server = Server::start(ServerConfig::one(SIZE));
    let uri: Uri = server.unix_uri("disk").parse().unwrap();
    let mut client = NbdClient::connect(&uri).unwrap();
    assert!(client.export().extended_headers);
    client.write(5 << 30, &[1; 4096], false).unwrap();
    client.write(9 << 30, &[2; 4096], false).unwrap();
    client.trim(0, 8 << 30, Default::default()).unwrap();
    let mut data = [9; 4096];
    client.read(5 << 30, &mut data).unwrap();
    assert_eq!(data, [0; 4096]);
    client.read(9 << 30, &mut data).unwrap();
    assert_eq!(data, [2; 4096]);
    let mut at = 0;
    while at < 10 << 30 {
        let extents = client.block_status(at, SIZE - at).unwrap();
        for extent in &extents {
            let holds_data = extent.state == ExtentState::Allocated;
            assert_eq!(
                holds_data,
                extent.offset <= 9 << 30 && extent.offset + extent.length > 9 << 30,
                "{extents:?}"
            );
        }
        at = extents.last().map(|extent| extent.offset + extent.length).unwrap();
    }
    client.write_zeroes(4096, 10 << 30, Default::default()).unwrap();
    client.read(9 << 30, &mut data).unwrap();
    assert_eq!(data, [0; 4096]);
    assert_eq!(server.look().meter.kind(weir_block::RequestKind::Discard).completions, 1);
    let compact = Options { extended_headers: false, ..Options::default() };
    let mut client = NbdClient::connect_with(&uri, &compact).unwrap();
    assert!(!client.export().extended_headers && client.export().structured_replies);
    let error = client.trim(0, 8 << 30, Default::default()).unwrap_err().to_string();
    assert!(error.contains("extended headers"), "{error}");
}
