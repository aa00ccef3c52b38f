//! The transmission phase, request by request.

use std::io::{Read, Write};
use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::prelude::*;
use weir_block::{LayerInfo, ReactorConfig, RequestKind};
use weir_export::nbd::Limits;
use weir_nbd::protocol::{command, command_flag, error};
use weir_nbd::server::Session;

use crate::support::{Answer, Bench, RawClient, Server, ServerConfig, answers, memory_file, writable};

const MIB: usize = 1 << 20;

fn request(command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    RawClient::request(command, 0, cookie, offset, length)
}

fn write(cookie: u64, offset: u64, data: &[u8]) -> Vec<u8> {
    [request(command::WRITE, cookie, offset, data.len() as u32), data.to_vec()].concat()
}

fn good(cookie: u64, data: &[u8]) -> Answer {
    Answer { cookie, error: 0, data: data.to_vec() }
}

fn enter(server: &Server, structured: bool) -> RawClient {
    RawClient::enter(server.socket(), "disk", structured)
}

fn one(size: usize) -> Server {
    Server::start(ServerConfig::one(size as u64))
}

#[test]
fn every_error_has_its_number_and_the_stream_stays_in_step() {
    let server = one(MIB);
    for structured in [false, true] {
        let mut client = enter(&server, structured);
        let end = MIB as u64;
        let cases = [
            (request(command::READ, 1, end, 512), error::EINVAL),
            (request(command::READ, 1, u64::MAX - 511, 512), error::EINVAL),
            (request(command::READ, 1, 0, 0), error::EINVAL),
            (request(command::READ, 1, 100, 512), error::EINVAL),
            (request(command::READ, 1, 0, 513), error::EINVAL),
            (write(1, end, &[1; 512]), error::ENOSPC),
            (write(1, 1, &[1; 512]), error::EINVAL),
            (write(1, 0, &[1; 100]), error::EINVAL),
            (write(1, 0, &vec![1; 2 * MIB]), error::ENOSPC),
            (write(1, 0, &[]), error::EINVAL),
            (request(command::TRIM, 1, end, 512), error::EINVAL),
            (request(command::WRITE_ZEROES, 1, end, 512), error::ENOSPC),
            (request(command::CACHE, 1, end, 512), error::EINVAL),
            (request(command::BLOCK_STATUS, 1, 0, 512), error::EINVAL),
            (request(command::FLUSH, 1, 0, 512), error::EINVAL),
            (request(99, 1, 0, 0), error::EINVAL),
            (RawClient::request(command::READ, 1 << 15, 1, 0, 512), error::EINVAL),
            (RawClient::request(command::FLUSH, command_flag::REQ_ONE, 1, 0, 0), error::EINVAL),
        ];
        for (bytes, expected) in cases {
            client.send(&bytes);
            let answer = client.answer(0);
            assert_eq!((answer.cookie, answer.error), (1, expected), "{:02x?}", &bytes[..28]);
            assert_eq!(structured, !answer.data.is_empty(), "structured errors have words");
        }
        client.verify_block(0, 9);
    }
    assert_eq!(server.look().meter.kind(RequestKind::Write).errors, 0, "refusals never reach the layer");
}

#[test]
fn errors_of_the_layer_reach_the_client() {
    let server = one(MIB);
    let mut client = enter(&server, true);
    for (errno, expected) in [
        (libc::EIO, error::EIO),
        (libc::ENOSPC, error::ENOSPC),
        (libc::EROFS, error::EPERM),
        (libc::ENOMEM, error::ENOMEM),
        (libc::EOPNOTSUPP, error::EINVAL),
    ] {
        server.knobs().failing.store(errno as usize, Ordering::Relaxed);
        client.send(&write(5, 0, &[1; 512]));
        let expected = Answer { cookie: 5, error: expected, data: b"the test wants it so".to_vec() };
        assert_eq!(client.answer(0), expected);
    }
    let fast = RawClient::request(command::WRITE_ZEROES, command_flag::FAST_ZERO, 6, 0, 512);
    client.send(&fast);
    assert_eq!(client.answer(0).error, error::ENOTSUP);
    server.knobs().failing.store(0, Ordering::Relaxed);
    client.verify_block(0, 3);
    let meter = server.look().meter;
    assert_eq!(meter.kind(RequestKind::Write).errors, 5);
    assert_eq!(meter.kind(RequestKind::Write).completions, 1);
    assert_eq!(meter.in_flight(), 0);
}

#[test]
fn writes_of_all_sizes_arrive_whole_in_any_pieces() {
    let server = one(40 * MIB);
    let mut client = enter(&server, false);
    let mut random = fastrand::Rng::with_seed(3);
    let sizes =
        [512, 4096, 31 << 10, 32 << 10, 33 << 10, 200 << 10, 256 << 10, 300 << 10, MIB, 5 * MIB, 32 * MIB];
    for piece in [usize::MAX, 100_003] {
        for size in sizes {
            let mut data = vec![0; size];
            random.fill(&mut data);
            let bytes = [write(1, 512, &data), write(2, 33 * MIB as u64, &data[..512])].concat();
            for part in bytes.chunks(piece.min(bytes.len())) {
                client.send(part);
            }
            let mut got = [client.answer(0), client.answer(0)];
            got.sort();
            assert_eq!(got, [good(1, &[]), good(2, &[])]);
            client.send(&request(command::READ, 3, 512, size as u32));
            assert!(client.answer(size) == good(3, &data), "{size} bytes in pieces of {piece}");
        }
    }
    server.wait_until("all memory is back", |state| state.lent == 0);
}

#[test]
fn a_full_layer_pushes_back_and_loses_nothing() {
    let server = one(MIB);
    server.knobs().room.store(3, Ordering::Relaxed);
    let mut client = enter(&server, false);
    let bytes: Vec<u8> = (0..200u8).flat_map(|i| write(i.into(), u64::from(i) * 4096, &[i; 4096])).collect();
    let mut sender = client.stream.try_clone().unwrap();
    let sending = std::thread::spawn(move || sender.write_all(&bytes).unwrap());
    let mut cookies: Vec<u64> = (0..200).map(|_| client.answer(0).cookie).collect();
    sending.join().unwrap();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..200).collect::<Vec<_>>());
    assert_eq!(server.knobs().deepest.load(Ordering::Relaxed), 3);
    for i in [0u8, 77, 199] {
        client.send(&request(command::READ, 1, u64::from(i) * 4096, 4096));
        assert_eq!(client.answer(4096).data, [i; 4096]);
    }
}

#[test]
fn a_client_that_does_not_read_is_not_served_further_and_gets_all_of_it_later() {
    let mut config = ServerConfig::one(64 << 20);
    config.limits = Limits { requests: 16, bytes: 8 * MIB, ..Limits::default() };
    let server = Server::start(config);
    let mut client = enter(&server, true);
    let bytes: Vec<u8> =
        (0..64).flat_map(|i| request(command::READ, i, i * MIB as u64, MIB as u32)).collect();
    client.send(&bytes);
    server.wait_until("eight replies wait", |state| state.lent >= 7 * MIB);
    std::thread::sleep(Duration::from_millis(50));
    let state = server.look();
    assert!(state.most_lent <= 8 * MIB, "{state:?}");
    assert!(state.meter.kind(RequestKind::Read).arrivals <= 16);
    enter(&server, true).verify_block(0, 7);
    let mut cookies: Vec<u64> = (0..64)
        .map(|_| {
            let answer = client.answer(0);
            assert_eq!((answer.error, answer.data.len()), (0, MIB));
            answer.cookie
        })
        .collect();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..64).collect::<Vec<_>>());
}

#[test]
fn disconnecting_waits_for_what_is_in_flight() {
    let server = one(MIB);
    server.knobs().frozen.store(true, Ordering::Relaxed);
    let mut client = enter(&server, false);
    client.send(&[write(1, 0, &[5; 4096]), request(command::DISC, 2, 0, 0), b"ignored".to_vec()].concat());
    server.wait_until("the write is at the layer", |state| state.in_flight == 1);
    server.knobs().frozen.store(false, Ordering::Relaxed);
    server.nudge();
    assert_eq!(client.answer(0), good(1, &[]));
    assert!(client.is_closed());
    server.wait_until("the connection is forgotten", |state| state.connections == 0);
}

#[test]
fn a_client_that_vanishes_with_requests_in_flight_leaves_nothing() {
    let server = one(64 * MIB);
    server.knobs().frozen.store(true, Ordering::Relaxed);
    let mut client = enter(&server, false);
    for i in 0..20 {
        client.send(&request(command::READ, i, 0, MIB as u32));
    }
    client.send(&write(21, 0, &vec![5; 2 * MIB])[..MIB]);
    server.wait_until("twenty reads are at the layer", |state| state.in_flight == 20);
    drop(client);
    std::thread::sleep(Duration::from_millis(20));
    server.knobs().frozen.store(false, Ordering::Relaxed);
    server.nudge();
    server.wait_until("everything is given back", |state| state.connections == 0 && state.lent == 0);
    assert_eq!(server.look().meter.in_flight(), 0);
}

#[test]
fn closing_a_disk_answers_what_is_in_flight() {
    let mut server = one(MIB);
    server.knobs().frozen.store(true, Ordering::Relaxed);
    let mut client = enter(&server, false);
    let mut idle = enter(&server, false);
    client.send(&write(1, 0, &[5; 4096]));
    server.wait_until("the write is at the layer", |state| state.in_flight == 1);
    server.knobs().frozen.store(false, Ordering::Relaxed);
    server.close();
    assert_eq!(client.answer(0), good(1, &[]));
    assert!(client.is_closed());
    assert!(idle.is_closed());
}

/// A client that keeps many requests in flight, and sends another after every answer, until the server hangs up. Returns the
/// errors that it received, and the number of unanswered requests of the first burst.
fn asks_on(mut client: RawClient, burst: u64) -> (Vec<u32>, u64) {
    let (mut errors, mut answered) = (Vec::new(), 0);
    let mut head = [0; 16];
    while client.stream.read_exact(&mut head).is_ok() {
        errors.push(u32::from_be_bytes(head[4..8].try_into().unwrap()));
        answered += u64::from(u64::from_be_bytes(head[8..].try_into().unwrap()) < burst);
        let _ = client.stream.write_all(&write(burst, 0, &[1; 4096]));
    }
    (errors, burst - answered)
}

#[test]
fn closing_answers_all_that_a_busy_client_has_asked_for() {
    for structured in [false, true] {
        let mut server = one(MIB);
        server.knobs().frozen.store(true, Ordering::Relaxed);
        let mut clients: Vec<_> = (0..3).map(|_| enter(&server, structured)).collect();
        let burst: Vec<u8> = (0..64).flat_map(|at| write(at, at * 4096, &[7; 4096])).collect();
        clients.iter_mut().for_each(|client| client.send(&burst));
        let clients: Vec<_> =
            clients.into_iter().map(|client| std::thread::spawn(move || asks_on(client, 64))).collect();
        server.wait_until("some are at the layer", |state| state.in_flight > 0);
        server.knobs().frozen.store(false, Ordering::Relaxed);
        let start = weir_block::Nanos::now();
        server.close();
        for client in clients {
            let (errors, unanswered) = client.join().unwrap();
            assert!(errors.iter().all(|&error| error == 0), "served, not refused");
            assert_eq!(unanswered, 0);
        }
        assert!((weir_block::Nanos::now() - start).as_millis() < 1500, "it does not take its whole time");
    }
}

#[test]
fn closing_refuses_what_cannot_be_served() {
    let mut server = one(40 * MIB);
    // Room for one request, which does not come back before the time is over.
    server.knobs().room.store(1, Ordering::Relaxed);
    server.knobs().frozen.store(true, Ordering::Relaxed);
    let mut client = enter(&server, true);
    let mut half = enter(&server, true);
    half.send(&write(1, 0, &vec![1; 8 * MIB])[..MIB]);
    client.send(
        &[write(1, 0, &[5; 4096]), write(2, 0, &[6; 4096]), request(command::READ, 3, 0, 4096)].concat(),
    );
    server.wait_until("one is at the layer", |state| state.in_flight == 1);
    let closing = std::thread::spawn(move || server.close_and_thaw(Duration::from_millis(2200)));
    let mut told = [client.answer(0), client.answer(0), client.answer(0)];
    told.sort();
    assert_eq!(
        told.map(|answer| (answer.cookie, answer.error)),
        [(1, 0), (2, error::ESHUTDOWN), (3, error::ESHUTDOWN)]
    );
    let _ = client.stream.write_all(&request(command::DISC, 4, 0, 0));
    assert!(client.is_closed());
    assert_eq!(half.answer(0).error, error::ESHUTDOWN, "half a write is refused too");
    closing.join().unwrap();
}

#[test]
fn the_meter_counts_from_parsing_to_the_reply() {
    let server = one(MIB);
    let mut client = enter(&server, true);
    for i in 0..10 {
        client.verify_block(i * 4096, i as u8);
    }
    server.knobs().frozen.store(true, Ordering::Relaxed);
    client.send(&request(command::READ, 1, 0, 512));
    server.wait_until("the read is at the layer", |state| state.in_flight == 1);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(server.look().meter.in_flight(), 1);
    server.knobs().frozen.store(false, Ordering::Relaxed);
    server.nudge();
    client.answer(0);
    server.wait_until("the reply is counted", |state| state.meter.in_flight() == 0);
    let meter = server.look().meter;
    let read = meter.kind(RequestKind::Read);
    assert_eq!((read.arrivals, read.completions, read.bytes), (11, 11, 10 * 4096 + 512));
    assert!(read.latency.max() >= 30_000_000, "the wait is in the latency");
    assert_eq!(meter.kind(RequestKind::Write).completions, 10);
}

#[test]
fn both_engines_serve() {
    for engine in [weir_block::Engine::Uring, weir_block::Engine::Epoll] {
        let mut config = ServerConfig::one(MIB as u64);
        config.reactor.engine = engine;
        let server = Server::start(config);
        enter(&server, true).verify_block(4096, 0x77);
    }
}

/// A request of a client that mostly behaves.
fn any_request() -> impl Strategy<Value = (u16, u16, u64, u32)> {
    let command =
        prop_oneof![8 => 0u16..2, 4 => 3u16..8, 1 => any::<u16>().prop_filter("ends it", |c| *c != 2)];
    let flags = prop_oneof![6 => Just(0u16), 2 => Just(1u16), 1 => 0u16..32, 1 => any::<u16>()];
    let offset = prop_oneof![8 => (0u64..256).prop_map(|block| block * 512), 1 => any::<u64>()];
    let length = prop_oneof![8 => (0u32..32).prop_map(|blocks| blocks * 512), 2 => (60u32..200).prop_map(|b| b * 512), 1 => 0u32..2000];
    (command, flags, offset, length)
}

fn small_bench(buffer_limit: usize) -> Bench {
    let reactor = ReactorConfig { entries: 32, buffer_limit, ..ReactorConfig::default() };
    // So small that many reads and writes go in parts.
    let info = LayerInfo { max_transfer: 24 << 10, ..writable(256 * 512) };
    Bench::new(memory_file(), info, Limits { requests: 8, ..Limits::default() }, reactor)
}

/// The client's answers, in the order of its requests, and whether the server hung up.
fn outcome(bytes: &[u8], pieces: &[usize], agreed: &Session, lengths: &[usize]) -> (Vec<Answer>, bool) {
    let mut bench = small_bench(4 * MIB);
    let leftover = pieces.first().copied().unwrap_or(0);
    let mut client = bench.attach_as(agreed.clone(), &bytes[..leftover]);
    let mut received = Vec::new();
    let mut at = leftover;
    let mut closed = bench.settle(&mut client, &mut received);
    for &end in pieces.iter().skip(1).chain([&bytes.len()]) {
        closed = closed || bench.say(&mut client, &bytes[at..end], &mut received);
        at = end;
    }
    let mut answers = answers(&received, |cookie| lengths.get(cookie as usize).copied().unwrap_or(0));
    answers.sort();
    (answers, closed)
}

proptest! {

    /// However the network cuts a client's bytes, each request has the same answer.
    #[test]
    fn cuts_do_not_matter(
        requests in proptest::collection::vec(any_request(), 1..24),
        noise in proptest::collection::vec(any::<u8>(), 0..60),
        cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..20),
        form in 0u8..3,
    ) {
        let (structured_replies, extended_headers) = (form > 0, form > 1);
        let agreed = Session { structured_replies, extended_headers, block_sizes: true, ..Session::default() };
        let mut bytes = Vec::new();
        let mut lengths = Vec::new();
        for (cookie, (command, flags, offset, length)) in requests.into_iter().enumerate() {
            bytes.extend(if extended_headers {
                RawClient::extended_request(command, flags, cookie as u64, offset, length.into())
            } else {
                RawClient::request(command, flags, cookie as u64, offset, length)
            });
            if command == command::WRITE {
                bytes.extend((0..length).map(|at| (at / 512 + cookie as u32) as u8));
            }
            lengths.push(if command == command::READ { length as usize } else { 0 });
        }
        bytes.extend(noise);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.sort_unstable();
        prop_assert_eq!(outcome(&bytes, &[], &agreed, &lengths), outcome(&bytes, &cuts, &agreed, &lengths));
    }

    /// Any requests with any offsets and lengths get as many answers, and the server keeps nothing of them.
    #[test]
    fn any_requests_are_answered(
        requests in proptest::collection::vec((any_request(), 0u64..1024, 0u32..1024), 1..24),
        structured_replies: bool,
    ) {
        let agreed = Session { structured_replies, ..Session::default() };
        let (mut bytes, mut lengths) = (Vec::new(), Vec::new());
        for (cookie, ((command, flags, offset, length), before, more)) in requests.into_iter().enumerate() {
            let (offset, length) = (offset.saturating_sub(before), length + more);
            bytes.extend(RawClient::request(command, flags, cookie as u64, offset, length));
            bytes.extend(vec![7; if command == command::WRITE { length as usize } else { 0 }]);
            lengths.push(if command == command::READ { length as usize } else { 0 });
        }
        let (answers, closed) = outcome(&bytes, &[], &agreed, &lengths);
        prop_assert!(!closed);
        let cookies: Vec<_> = answers.iter().map(|answer| answer.cookie).collect();
        prop_assert_eq!(cookies, (0..lengths.len() as u64).collect::<Vec<_>>());
    }

    /// Bytes that mean nothing end the connection, and nothing is left of it.
    #[test]
    fn noise_does_no_harm(
        bytes in proptest::collection::vec(any::<u8>(), 32..400),
        extended_headers: bool,
        block_sizes: bool,
    ) {
        let mut bench = small_bench(MIB);
        let agreed = Session { structured_replies: true, extended_headers, block_sizes, ..Session::default() };
        let mut client = bench.attach_as(agreed, &[]);
        let mut received = Vec::new();
        prop_assert!(bench.say(&mut client, &bytes, &mut received));
        prop_assert_eq!(bench.nbd.connections(), 0);
        prop_assert_eq!(bench.reactor.buffers().lent(), 0);
    }
}

#[test]
fn many_clients_on_one_socket_each_get_a_turn() {
    let mut bench = small_bench(4 * MIB);
    let mut greedy = bench.attach(false, &[]);
    let mut modest = bench.attach(false, &[]);
    let flood: Vec<u8> = (0..2000).flat_map(|i| request(command::READ, i, 0, 512)).collect();
    greedy.write_all(&flood).unwrap();
    modest.write_all(&request(command::READ, 1, 0, 512)).unwrap();
    let mut rounds = 0;
    let mut buffer = [0; 528];
    while modest.read(&mut buffer).is_err() {
        bench.turn();
        rounds += 1;
        assert!(rounds < 4, "the modest client waits for the greedy one");
    }
    let mut received = Vec::new();
    bench.settle(&mut greedy, &mut received);
    assert_eq!(received.len(), 2000 * 528);
}
