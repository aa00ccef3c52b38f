//! Clients that did not negotiate the block sizes, and so may use any offset and length.

use std::sync::atomic::Ordering;

use weir_nbd::protocol::{command, error};

use crate::support::{RawClient, Server, ServerConfig, python};

const SIZE: usize = 1 << 20;

fn server(logical_block: u32) -> Server {
    let mut config = ServerConfig::one(SIZE as u64);
    config.disks[0].2.logical_block = logical_block;
    config.reactor.buffer_limit = 8 << 20;
    Server::start(config)
}

fn write(cookie: u64, offset: usize, data: &[u8]) -> Vec<u8> {
    let head = RawClient::request(command::WRITE, 0, cookie, offset as u64, data.len() as u32);
    [head, data.to_vec()].concat()
}

/// Does random requests and compares with what a plain array of bytes would hold.
#[test]
fn any_offset_and_length_behaves_as_an_array_of_bytes() {
    for (block, structured) in [(512, false), (512, true), (4096, true)] {
        let server = server(block);
        server.knobs().reversed.store(true, Ordering::Relaxed);
        let mut client = RawClient::enter_without_sizes(server.socket(), "disk", structured);
        let mut random = fastrand::Rng::with_seed(block.into());
        let mut expected = vec![0; SIZE];
        for round in 0..300u64 {
            let most = if round % 20 == 0 { SIZE } else { 3 * block as usize };
            let at = random.usize(..SIZE - 1);
            let length = random.usize(1..=most.min(SIZE - at));
            let range = at..at + length;
            match random.u8(..8) {
                0 => {
                    let head = RawClient::request(command::WRITE_ZEROES, 0, round, at as u64, length as u32);
                    client.send(&head);
                    assert_eq!(client.answer(0).error, 0);
                    expected[range.clone()].fill(0);
                }
                1 => {
                    // Whole blocks inside may read as zeroes from now on, and nothing else.
                    client.send(&RawClient::request(command::TRIM, 0, round, at as u64, length as u32));
                    assert_eq!(client.answer(0).error, 0);
                    let start = at.next_multiple_of(block as usize);
                    let end = range.end / block as usize * block as usize;
                    if start < end {
                        expected[start..end].fill(0);
                    }
                }
                _ => {
                    let mut data = vec![0; length];
                    random.fill(&mut data);
                    client.send(&write(round, at, &data));
                    assert_eq!(client.answer(0).error, 0);
                    expected[range.clone()].copy_from_slice(&data);
                }
            }
            let from = at.saturating_sub(random.usize(..1000));
            let to = (range.end + random.usize(..1000)).min(SIZE);
            client.send(&RawClient::request(command::READ, 0, round, from as u64, (to - from) as u32));
            assert!(client.answer(to - from).data == expected[from..to], "round {round}: {range:?}");
        }
        client.send(&RawClient::request(command::READ, 0, 1, SIZE as u64 - 1, 2));
        assert_eq!(client.answer(0).error, error::EINVAL);
        server.wait_until("all memory is back", |state| state.lent == 0);
    }
}

/// Neighbours in one block, each with bytes of its own, and one that writes whole blocks beside them.
#[test]
fn neighbours_in_a_block_do_not_undo_each_other() {
    const CLIENTS: usize = 5;
    const OWN: usize = 100;
    let server = server(512);
    let socket = server.socket().to_owned();
    let threads: Vec<_> = (0..CLIENTS)
        .map(|own| {
            let socket = socket.clone();
            std::thread::spawn(move || {
                let mut client = RawClient::enter_without_sizes(&socket, "disk", own % 2 == 0);
                for round in 0..200u8 {
                    // Two at once: bytes of the first block, and a range across several.
                    let (inside, across) = (own * OWN, 8192 + own * 512 * 2 + 256);
                    let mut bytes = write(1, inside, &[round; OWN]);
                    bytes.extend(write(2, across, &[round; 1024]));
                    client.send(&bytes);
                    let mut errors = [client.answer(0), client.answer(0)].map(|answer| answer.error);
                    errors.sort_unstable();
                    assert_eq!(errors, [0, 0]);
                    client.send(&RawClient::request(command::READ, 0, 3, inside as u64, OWN as u32));
                    assert_eq!(client.answer(OWN).data, [round; OWN], "client {own}");
                    client.send(&RawClient::request(command::READ, 0, 4, across as u64, 1024));
                    assert_eq!(client.answer(1024).data, [round; 1024], "client {own}");
                }
            })
        })
        .collect();
    let mut aligned = RawClient::enter(server.socket(), "disk", true);
    for round in 0..400u64 {
        aligned.verify_block(64 << 10, round as u8);
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn an_error_while_the_ends_are_read_fails_the_write_and_frees_the_others() {
    let server = server(512);
    let mut client = RawClient::enter_without_sizes(server.socket(), "disk", true);
    server.knobs().broken_from.store(4096, Ordering::Relaxed);
    client.send(&[write(1, 4100, &[1; 10]), write(2, 0, &[2; 512])].concat());
    let mut answers = [client.answer(0), client.answer(0)].map(|answer| (answer.cookie, answer.error));
    answers.sort_unstable();
    assert_eq!(answers, [(1, error::EIO), (2, 0)]);
    server.knobs().broken_from.store(0, Ordering::Relaxed);
    client.send(&write(3, 4100, &[3; 10]));
    assert_eq!(client.answer(0).error, 0);
}

/// A client that goes away while it waits to be alone, or while it is, does not block others.
#[test]
fn who_goes_away_in_the_middle_holds_nobody_up() {
    let server = server(512);
    server.knobs().frozen.store(true, Ordering::Relaxed);
    let mut first = RawClient::enter_without_sizes(server.socket(), "disk", true);
    let mut second = RawClient::enter_without_sizes(server.socket(), "disk", true);
    first.send(&write(1, 10, &[1; 10]));
    server.wait_until("the first is being prepared", |state| state.in_flight == 1);
    second.send(&write(1, 20, &[2; 10]));
    std::thread::sleep(std::time::Duration::from_millis(20));
    drop((first, second));
    server.knobs().frozen.store(false, Ordering::Relaxed);
    server.nudge();
    server.wait_until("they are forgotten", |state| state.connections == 0 && state.lent == 0);
    let mut third = RawClient::enter_without_sizes(server.socket(), "disk", true);
    third.send(&write(1, 30, &[3; 10]));
    assert_eq!(third.answer(0).error, 0);
    RawClient::enter(server.socket(), "disk", true).verify_block(0, 9);
}

#[test]
fn libnbd_without_block_sizes_and_the_old_way_in() {
    let server = server(512);
    let script = "
import nbd, sys
for settings in ({'request_block_size': False}, {'handshake_flags': 0, 'request_structured_replies': False}):
    h = nbd.NBD()
    for name, value in settings.items():
        getattr(h, 'set_' + name)(value)
    h.set_strict_mode(0)
    h.connect_uri(sys.argv[1])
    h.pwrite(b'x' * 1000, 333)
    assert h.pread(1002, 332) == b'\\0' + b'x' * 1000 + b'\\0', settings
    h.zero(998, 334)
    assert h.pread(1000, 333) == b'x' + bytes(998) + b'x'
    h.zero(1334, 0)
    h.shutdown()
print('fine')
";
    assert_eq!(python(script, &[&server.unix_uri("disk")]).trim(), "fine");
}

/// A client whose socket ends while it waits to be alone is found dead by the reply to its own last change. Nothing else wakes the
/// shard then.
#[test]
fn a_client_that_is_found_dead_while_it_waits_to_be_alone_lets_the_others_go_on() {
    let server = server(512);
    server.knobs().frozen.store(true, Ordering::Relaxed);
    let mut first = RawClient::enter_without_sizes(server.socket(), "disk", true);
    let mut second = RawClient::enter(server.socket(), "disk", true);
    first.send(&[write(1, 8192, &[1; 512]), write(2, 10, &[2; 10])].concat());
    server.wait_until("one change is at the layer", |state| state.in_flight == 1);
    second.send(&write(1, 4096, &[3; 512]));
    // The request is held, which cannot be seen from outside.
    std::thread::sleep(std::time::Duration::from_millis(50));
    drop(first);
    server.knobs().frozen.store(false, Ordering::Relaxed);
    server.nudge();
    assert_eq!(second.answer(0).error, 0);
}
