//! Requests up to the largest payload, processed in parts where a layer or the memory takes less at once.

use std::sync::atomic::Ordering;

use weir_nbd::Uri;
use weir_nbd::client::{NbdClient, Options};
use weir_nbd::protocol::{command, command_flag, error};

use crate::support::{Answer, RawClient, Server, ServerConfig};

const MIB: usize = 1 << 20;
const LARGEST: usize = 32 * MIB;

fn server(buffers: usize, max_transfer: usize) -> Server {
    let mut config = ServerConfig::one(40 << 20);
    config.reactor.buffer_limit = buffers;
    config.disks[0].2.max_transfer = max_transfer as u32;
    Server::start(config)
}

fn request(command: u16, cookie: u64, offset: usize, length: usize) -> Vec<u8> {
    RawClient::request(command, 0, cookie, offset as u64, length as u32)
}

fn noise(length: usize) -> Vec<u8> {
    let mut data = vec![0; length];
    fastrand::Rng::with_seed(length as u64).fill(&mut data);
    data
}

#[test]
fn what_is_advertised_works_whatever_the_memory() {
    let data = noise(LARGEST);
    for (buffers, max_transfer) in
        [(8 * MIB, LARGEST), (64 * MIB, LARGEST), (256 * MIB, LARGEST), (256 * MIB, MIB)]
    {
        let server = server(buffers, max_transfer);
        let uri: Uri = server.unix_uri("disk").parse().unwrap();
        for (structured_replies, extended_headers) in [(false, false), (true, false), (true, true)] {
            let options = Options { structured_replies, extended_headers, depth: 2, ..Options::default() };
            let mut client = NbdClient::connect_with(&uri, &options).unwrap();
            let export = client.export();
            assert_eq!((export.maximum_block as usize, export.extended_headers), (LARGEST, extended_headers));
            client.write(4096, &data, extended_headers).unwrap();
            let mut back = vec![0; LARGEST];
            client.read(4096, &mut back).unwrap();
            assert!(back == data, "{buffers} bytes of memory, {options:?}");
            client.write_zeroes(4096, LARGEST as u64, Default::default()).unwrap();
            client.disconnect();
        }
        server.wait_until("all memory is back", |state| state.lent == 0);
        let state = server.look();
        assert!(state.most_lent <= buffers, "{} bytes of buffers were lent out", state.most_lent);
        let writes = state.meter.kind(weir_block::RequestKind::Write);
        assert_eq!((writes.completions, writes.bytes), (3, 3 * LARGEST as u64), "one request each");
        assert_eq!(state.meter.in_flight(), 0);
        let is_split = buffers < 160 * MIB || max_transfer < LARGEST;
        assert_eq!(writes.splits > 0, is_split, "{buffers} {max_transfer}");
    }
}

#[test]
fn what_is_larger_is_refused_and_the_connection_goes_on() {
    let server = server(64 * MIB, LARGEST);
    for structured in [false, true] {
        let mut client = RawClient::enter(server.socket(), "disk", structured);
        client.send(&request(command::READ, 1, 0, LARGEST + 512));
        let expected = if structured { error::EOVERFLOW } else { error::EINVAL };
        assert_eq!(client.answer(0).error, expected);
        client.send(&request(command::WRITE, 2, 0, LARGEST + 512));
        client.send(&vec![1; LARGEST + 512]);
        assert_eq!(client.answer(0).error, error::EINVAL);
        client.verify_block(0, 9);
    }
    let mut client = RawClient::enter(server.socket(), "disk", true);
    let whole = |flags| RawClient::request(command::READ, flags, 3, 0, LARGEST as u32);
    client.send(&whole(command_flag::DF));
    assert_eq!(client.answer(0).error, error::EOVERFLOW, "it would have to be in memory as a whole");
    client.send(&whole(0));
    let chunks = client.chunks();
    assert!(chunks.len() > 1);
    assert_eq!(chunks.iter().map(|chunk| chunk.data.len()).sum::<usize>(), LARGEST);
    let roomy = self::server(256 * MIB, LARGEST);
    let mut client = RawClient::enter(roomy.socket(), "disk", true);
    client.send(&whole(command_flag::DF));
    assert_eq!(client.answer(0).data.len(), LARGEST);
}

#[test]
fn an_error_in_the_middle_is_told_as_far_as_the_protocol_lets() {
    let server = server(16 * MIB, LARGEST);
    server.knobs().broken_from.store(20 << 20, Ordering::Relaxed);
    let mut client = RawClient::enter(server.socket(), "disk", true);
    let mut bytes = [request(command::WRITE, 1, 0, LARGEST), vec![7; LARGEST]].concat();
    bytes.extend(request(command::READ, 2, 0, LARGEST));
    bytes.extend(request(command::READ, 3, 0, 4096));
    client.send(&bytes);
    let told = client.answer(0);
    assert_eq!((told.cookie, told.error), (1, error::EIO));
    let mut chunks = client.chunks();
    let last = chunks.pop().unwrap();
    assert_eq!((last.cookie, last.error), (2, error::EIO));
    assert!(chunks.iter().all(|chunk| chunk.error == 0 && chunk.data.iter().all(|&byte| byte == 7)));
    assert_eq!(client.answer(0).data, [7; 4096], "the connection goes on");
    let mut client = RawClient::enter(server.socket(), "disk", false);
    client.send(&request(command::READ, 1, 21 << 20, LARGEST / 2));
    assert_eq!(client.answer(0).error, error::EIO, "nothing of it is out");
    client.verify_block(0, 3);
    client.send(&request(command::READ, 2, 0, LARGEST));
    assert_eq!(client.read(16)[4..8], [0; 4], "it begins well");
    let mut rest = Vec::new();
    let _ = std::io::Read::read_to_end(&mut client.stream, &mut rest);
    assert!(rest.len() < LARGEST, "and ends with the connection: {} bytes", rest.len());
    server.wait_until("all memory is back", |state| state.lent == 0 && state.meter.in_flight() == 0);
}

#[test]
fn others_go_on_beside_large_requests_and_order_is_kept() {
    let server = server(16 * MIB, LARGEST);
    for structured in [false, true] {
        let mut large = RawClient::enter(server.socket(), "disk", structured);
        let mut small = RawClient::enter(server.socket(), "disk", structured);
        let data = noise(LARGEST / 2);
        let mut bytes = request(command::READ, 1, 0, 4096);
        bytes.extend(request(command::WRITE, 2, 0, data.len()));
        bytes.extend_from_slice(&data);
        bytes.extend(request(command::FLUSH, 3, 0, 0));
        let mut sender = large.stream.try_clone().unwrap();
        let sending = std::thread::spawn(move || std::io::Write::write_all(&mut sender, &bytes).unwrap());
        for at in 0..50 {
            small.verify_block((36 << 20) + at * 4096, at as u8);
        }
        let mut cookies: Vec<_> =
            (0..3).map(|at| large.answer(if at == 0 { 4096 } else { 0 }).cookie).collect();
        cookies.sort_unstable();
        assert_eq!(cookies, [1, 2, 3]);
        sending.join().unwrap();
        large.send(&request(command::READ, 4, 0, data.len()));
        let back = if structured {
            large.chunks().into_iter().flat_map(|chunk| chunk.data).collect()
        } else {
            large.answer(data.len()).data
        };
        assert!(back == data);
    }
}

#[test]
fn a_client_that_vanishes_in_the_middle_leaves_nothing() {
    let server = server(16 * MIB, LARGEST);
    for structured in [false, true] {
        let mut writes = RawClient::enter(server.socket(), "disk", structured);
        writes.send(&request(command::WRITE, 1, 0, LARGEST));
        writes.send(&vec![1; 5 * MIB + 1000]);
        let mut reads = RawClient::enter(server.socket(), "disk", structured);
        reads.send(&request(command::READ, 1, 0, LARGEST));
        assert_eq!(reads.read(4).len(), 4);
        drop((reads, writes));
        server.wait_until("everything is given back", |state| state.connections == 0 && state.lent == 0);
        assert_eq!(server.look().meter.in_flight(), 0);
    }
    let answer = Answer { cookie: 2, error: 0, data: vec![] };
    let mut client = RawClient::enter(server.socket(), "disk", false);
    client.send(&request(command::FLUSH, 2, 0, 0));
    assert_eq!(client.answer(0), answer);
}
