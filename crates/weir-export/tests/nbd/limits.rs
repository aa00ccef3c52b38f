//! Limits of a disk's rate. Upper bounds hold exactly, because nothing makes a client faster than the limit; lower ones are generous,
//! because a busy machine makes it slower.

use std::num::NonZeroU64;
use std::sync::atomic::Ordering;
use std::time::Duration;

use weir_block::{Engine, Nanos, RequestKind};
use weir_export::Rate;
use weir_nbd::protocol::command;

use crate::support::{RawClient, Server, ServerConfig, memory_file, writable};

const MIB: u32 = 1 << 20;

fn iops(per_second: u64, burst_ms: u64) -> Option<Rate> {
    let burst = Duration::from_millis(burst_ms);
    Some(Rate { iops: NonZeroU64::new(per_second), bytes_per_second: None, burst })
}

fn bytes(per_second: u64, burst_ms: u64) -> Option<Rate> {
    let burst = Duration::from_millis(burst_ms);
    Some(Rate { iops: None, bytes_per_second: NonZeroU64::new(per_second), burst })
}

fn limited(rate: Option<Rate>) -> Server {
    let server = Server::start(ServerConfig::one(64 << 20));
    server.limit(rate);
    server
}

fn reads(count: u64, length: u32) -> Vec<u8> {
    (0..count).flat_map(|cookie| RawClient::request(command::READ, 0, cookie, 0, length)).collect()
}

/// Sends the requests, and the time until so many answers are there.
fn answered(client: &mut RawClient, requests: &[u8], count: u64) -> Duration {
    let start = Nanos::now();
    client.send(requests);
    (0..count).for_each(|_| assert_eq!(client.answer(0).error, 0));
    Nanos::now() - start
}

fn within(took: Duration, exactly: Duration) {
    assert!(took >= exactly, "{took:?}: faster than the limit allows, {exactly:?}");
    assert!(took < 2 * exactly + Duration::from_secs(2), "{took:?} instead of {exactly:?}");
}

#[test]
fn a_limit_of_requests_holds_and_is_reached() {
    let server = limited(iops(500, 10));
    let mut client = RawClient::enter(server.socket(), "disk", true);
    let before = server.look().turns;
    // Five pass at once; the last of the others waits for 495 / 500 s.
    let took = answered(&mut client, &reads(500, 512), 500);
    within(took, Duration::from_millis(990));
    let after = server.look();
    assert!(after.turns - before < 3_000, "{} turns: the shard spins", after.turns - before);
    assert!((400..=495).contains(&after.delays.requests), "{after:?}");
    assert_eq!(after.delays.waiting, 0, "{after:?}");
    let mean = after.delays.waited / after.delays.requests as u32;
    assert!((450..=900).contains(&mean.as_millis()), "on average 248 are before it, 495 ms: {mean:?}");
}

#[test]
fn a_limit_of_bytes_holds_also_for_requests_larger_than_the_burst() {
    // A burst of 1 MiB; the reads beyond 12 MiB go to the layer in parts.
    let mut config = ServerConfig::one(64 << 20);
    config.reactor.buffer_limit = 64 << 20;
    let server = Server::start(config);
    server.limit(bytes(64 << 20, 16));
    let mut client = RawClient::enter(server.socket(), "disk", true);
    let took = answered(&mut client, &reads(8, 4 * MIB), 8);
    within(took, Duration::from_millis(7 * 1000 / 16));
    let start = Nanos::now();
    client.send(&reads(3, 16 * MIB));
    for _ in 0..3 {
        let chunks = client.chunks();
        assert_eq!(chunks.iter().map(|chunk| chunk.data.len()).sum::<usize>(), 16 << 20);
    }
    within(Nanos::now() - start, Duration::from_millis(2 * 1000 / 4));
    // Writes, lent ones and ones that are received into a buffer of their own.
    server.limit(bytes(1 << 20, 16));
    let mut writes = Vec::new();
    for (cookie, length) in [16 << 10, 256 << 10, 16 << 10, 256 << 10].into_iter().enumerate() {
        writes.extend(RawClient::request(command::WRITE, 0, cookie as u64, 0, length));
        writes.resize(writes.len() + length as usize, 7);
    }
    within(answered(&mut client, &writes, 4), Duration::from_millis(250));
    client.verify_block(0, 9);
}

#[test]
fn zeroes_and_discards_count_as_requests_without_bytes_and_flushes_not_at_all() {
    let both = Rate { bytes_per_second: NonZeroU64::new(1), ..iops(20, 1).unwrap() };
    let server = limited(Some(both));
    let mut client = RawClient::enter(server.socket(), "disk", true);
    let changes =
        |kind| (0..5).flat_map(move |i| RawClient::request(kind, 0, i, 0, MIB)).collect::<Vec<u8>>();
    within(answered(&mut client, &changes(command::WRITE_ZEROES), 5), Duration::from_millis(200));
    within(answered(&mut client, &changes(command::TRIM), 5), Duration::from_millis(200));
    let flushes: Vec<u8> = (0..100).flat_map(|i| RawClient::request(command::FLUSH, 0, i, 0, 0)).collect();
    let took = answered(&mut client, &flushes, 100);
    assert!(took < Duration::from_secs(3), "{took:?}: at 20 in a second they would take 5 s");
}

#[test]
fn connections_take_turns() {
    let server = limited(iops(100, 1));
    let mut deep = RawClient::enter(server.socket(), "disk", true);
    deep.send(&reads(100, 512));
    server.wait_until("the deep one waits", |state| state.delays.waiting == 1);
    let mut shallow = RawClient::enter(server.socket(), "disk", true);
    // Every second request is its own; behind the other's queue, the first would take a second.
    let took = answered(&mut shallow, &reads(1, 4 * MIB), 1);
    assert!(took < Duration::from_millis(700), "{took:?}");
    (0..100).for_each(|i| assert_eq!(deep.answer(0).cookie, i));
}

#[test]
fn a_limit_is_changed_and_ends_while_requests_wait() {
    let server = limited(iops(1, 1));
    let mut clients: Vec<RawClient> = (0..20)
        .map(|_| {
            let mut client = RawClient::enter(server.socket(), "disk", true);
            client.send(&reads(20, 4096));
            client
        })
        .collect();
    server.wait_until("all wait", |state| state.delays.waiting == 20);
    clients.pop();
    server.limit(iops(1_000, 1));
    let start = Nanos::now();
    (0..20).for_each(|_| assert_eq!(clients[0].answer(0).error, 0));
    server.limit(None);
    for client in &mut clients[1..] {
        (0..20).for_each(|_| assert_eq!(client.answer(0).error, 0));
    }
    assert!(Nanos::now() - start < Duration::from_secs(5));
    server.wait_until("nobody waits", |state| state.delays.waiting == 0 && state.connections == 19);
    // The first of each had passed before it was changed, or has waited.
    let delays = server.look().delays;
    assert!((360..=380).contains(&delays.requests), "also those for which it has ended: {delays:?}");
}

/// Requests that have passed the limit and wait for room at the layer were charged once, and do not wait for the limit again.
#[test]
fn what_has_passed_the_limit_and_waits_for_room_does_not_wait_for_the_limit_again() {
    let server = limited(iops(20, 1));
    server.knobs().room.store(1, Ordering::Relaxed);
    server.knobs().frozen.store(true, Ordering::Relaxed);
    let mut clients: Vec<RawClient> = (0..20)
        .map(|_| {
            let mut client = RawClient::enter(server.socket(), "disk", true);
            client.send(&reads(1, 4096));
            client
        })
        .collect();
    // The last of them passes the limit after 19 / 20 s, and only the first has room.
    std::thread::sleep(Duration::from_millis(1200));
    server.knobs().room.store(0, Ordering::Relaxed);
    server.knobs().frozen.store(false, Ordering::Relaxed);
    server.nudge();
    let start = Nanos::now();
    clients.iter_mut().for_each(|client| assert_eq!(client.answer(0).error, 0));
    let took = Nanos::now() - start;
    assert!(took < Duration::from_millis(500), "{took:?}: they have waited for the limit already");
    let took = answered(&mut clients[0], &reads(1, 4096), 1);
    assert!(took < Duration::from_millis(500), "{took:?}: they were charged twice");
}

/// A client that hangs up leaves the line, and its requests with it: they cost the others nothing. Over TCP one more is served, whose
/// answer meets the closed socket.
#[test]
fn a_client_that_hangs_up_leaves_the_line_with_its_requests() {
    for (engine, tcp) in [Engine::Uring, Engine::Epoll].into_iter().flat_map(|it| [(it, false), (it, true)]) {
        let mut config = ServerConfig::one(64 << 20);
        config.reactor.engine = engine;
        let server = Server::start(config);
        server.limit(iops(2, 1));
        let mut gone = match tcp {
            true => RawClient::enter_tcp(server.tcp(), "disk"),
            false => RawClient::enter(server.socket(), "disk", true),
        };
        // More than the server receives of a client that waits.
        gone.send(&reads(3_000, 512));
        server.wait_until("it waits", |state| state.delays.waiting == 1);
        let mut stays = RawClient::enter(server.socket(), "disk", true);
        stays.send(&reads(1, 512));
        server.wait_until("both wait", |state| state.delays.waiting == 2);
        let passed = server.look().meter.kind(RequestKind::Read).arrivals;
        drop(gone);
        assert_eq!(stays.answer(0).error, 0);
        server.wait_until("it has left", |state| state.delays.waiting == 0 && state.connections == 1);
        let after = server.look().meter.kind(RequestKind::Read).arrivals;
        let of_nobody = after - passed - 1;
        assert!(
            of_nobody <= u64::from(tcp),
            "{engine:?}, TCP {tcp}: {of_nobody} requests of nobody were served"
        );
    }
}

/// A client that sends nothing more may still wait for its answers: libnbd closes its sending half after DISC.
#[test]
fn a_client_that_has_closed_its_sending_half_gets_its_answers() {
    for (engine, tcp) in [Engine::Uring, Engine::Epoll].into_iter().flat_map(|it| [(it, false), (it, true)]) {
        let mut config = ServerConfig::one(64 << 20);
        config.reactor.engine = engine;
        let server = Server::start(config);
        server.limit(iops(20, 1));
        let mut client = match tcp {
            true => RawClient::enter_tcp(server.tcp(), "disk"),
            false => RawClient::enter(server.socket(), "disk", true),
        };
        client.send(&reads(10, 512));
        client.stream.shutdown(std::net::Shutdown::Write).unwrap();
        (0..10).for_each(|_| assert_eq!(client.answer(0).error, 0, "{engine:?}, TCP {tcp}"));
    }
}

/// Whatever the limit: a queue that is left would end in errors, which QEMU passes on to its guest (P9).
#[test]
fn a_disk_that_closes_or_moves_answers_what_waits_for_its_limit() {
    for moves in [false, true] {
        let mut server = limited(iops(1, 1));
        let mut client = RawClient::enter(server.socket(), "disk", true);
        client.send(&reads(100, 512));
        server.wait_until("it waits", |state| state.delays.waiting == 1);
        if moves {
            server.hold_all();
            server.begin_to_dismiss();
        } else {
            server.close();
        }
        (0..100).for_each(|_| assert_eq!(client.answer(0).error, 0));
        assert!(client.is_closed());
    }
}

/// What is served while the limit rests is no debt: a disk that stays goes on at its rate.
#[test]
fn a_move_that_fails_leaves_no_debt() {
    let server = limited(iops(10, 1));
    let mut client = RawClient::enter(server.socket(), "disk", true);
    client.send(&reads(100, 512));
    server.wait_until("it waits", |state| state.delays.waiting == 1);
    server.hold_all();
    server.resume();
    (0..100).for_each(|_| assert_eq!(client.answer(0).error, 0));
    let took = answered(&mut client, &reads(2, 512), 2);
    assert!(took < Duration::from_secs(2), "{took:?}: 100 requests at 10 in a second are 10 s");
}

/// Clients that wait for their disk's limit hold none of the shard's memory, and another disk does not notice them.
#[test]
fn what_waits_holds_nothing_of_the_shard() {
    let mut config = ServerConfig::one(64 << 20);
    config.disks.push(("other".into(), memory_file(), writable(64 << 20)));
    let server = Server::start(config);
    server.limit(iops(1, 1));
    let mut requests = reads(60, 64 << 10);
    requests.extend(RawClient::request(command::WRITE, 0, 99, 0, 8 * MIB));
    requests.resize(requests.len() + (40 << 10), 0);
    let greedy: Vec<RawClient> = (0..100)
        .map(|_| {
            let mut client = RawClient::enter(server.socket(), "disk", true);
            client.send(&requests);
            client
        })
        .collect();
    server.wait_until("they wait", |state| state.delays.waiting == 100 && state.lent <= 2 << 20);
    let mut other = RawClient::enter(server.socket(), "other", true);
    let before = server.look().turns;
    let took = answered(&mut other, &reads(2_000, 4096), 2_000);
    assert!(took < Duration::from_secs(5), "{took:?}");
    let state = server.look();
    assert!(state.turns - before < 20_000 && state.lent <= 2 << 20, "{state:?}");
    drop(greedy);
}
