//! Clients that mean harm, or are broken, beside one that goes on with its work.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use weir_block::Nanos;
use weir_export::nbd::Limits;
use weir_nbd::protocol::command;

use crate::support::{RawClient, Server, ServerConfig, Witness, memory_file, python, writable};

const MIB: usize = 1 << 20;

fn one(size: usize) -> Server {
    Server::start(ServerConfig::one(size as u64))
}

#[test]
fn libnbd_without_its_manners_is_answered_with_errors() {
    let server = one(MIB);
    let script = "
import nbd, sys, errno
h = nbd.NBD()
h.set_strict_mode(0)
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.connect_uri(sys.argv[1])
size = h.get_size()
def fails(expected, call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as error:
        assert error.errnum == expected, (call, arguments, error.errno, error.string)
    else:
        raise AssertionError((call, arguments))
nothing = lambda *_: 0
for _ in range(50):
    fails(errno.EINVAL, h.pread, 512, size)
    fails(errno.EINVAL, h.pread, 512, size - 256)
    fails(errno.EINVAL, h.pread, 100, 0)
    fails(errno.EINVAL, h.pread, 512, 7)
    fails(errno.ENOSPC, h.pwrite, bytes(512), size)
    fails(errno.EINVAL, h.pwrite, bytes(511), 0)
    fails(errno.EINVAL, h.trim, 512, size)
    fails(errno.ENOSPC, h.zero, 512, size)
    fails(errno.EINVAL, h.zero, 0, 0)
    fails(errno.EINVAL, h.trim, 0, 0)
    fails(errno.EINVAL, h.cache, 512, size)
    fails(errno.EINVAL, h.cache, 0, 0)
    fails(errno.EINVAL, h.block_status, 512, size, nothing)
    fails(errno.EINVAL, h.pread, 512, 0, nbd.CMD_FLAG_REQ_ONE)
    fails(errno.EINVAL, h.pwrite, bytes(512), 0, nbd.CMD_FLAG_DF)
    fails(errno.EINVAL, h.flush, nbd.CMD_FLAG_FAST_ZERO)
    h.pwrite(b'fine' * 128, 0, nbd.CMD_FLAG_FUA)
    assert h.pread(512, 0) == b'fine' * 128
print('fine')
";
    Witness::through(&server, || {
        assert_eq!(python(script, &[&server.unix_uri("disk")]).trim(), "fine");
        assert_eq!(python(script, &[&server.tcp_uri("disk")]).trim(), "fine");
    });
}

#[test]
fn a_wrong_magic_ends_only_its_own_connection() {
    let server = one(MIB);
    Witness::through(&server, || {
        for garbage in [&[0xff; 28][..], &[0; 4000], b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"] {
            for _ in 0..50 {
                let mut client = RawClient::enter(server.socket(), "disk", true);
                client.send(garbage);
                assert!(client.is_closed());
            }
        }
    });
}

#[test]
fn payloads_that_are_refused_are_thrown_away() {
    let server = one(MIB);
    Witness::through(&server, || {
        let mut client = RawClient::enter(server.socket(), "disk", true);
        // 40 MiB is more than any request may carry.
        let mut bytes = RawClient::request(command::WRITE, 0, 1, 0, 40 << 20);
        bytes.resize(28 + (40 << 20), 0xee);
        client.send(&bytes);
        assert_ne!(client.answer(0).error, 0);
        client.verify_block(0, 1);
        // One that announces 4 GiB and goes away is forgotten.
        client.send(&RawClient::request(command::WRITE, 0, 1, 0, u32::MAX));
        client.send(&[0; 100_000]);
        drop(client);
    });
    server.wait_until("they are forgotten", |state| state.connections == 0 && state.lent == 0);
}

#[test]
fn half_handshakes_do_not_keep_others_out() {
    let mut config = ServerConfig::one(MIB as u64);
    config.listener.deadline = Duration::from_millis(500);
    config.listener.handshakes = 64;
    let server = Server::start(config);
    Witness::through(&server, || {
        let mut clients: Vec<RawClient> = (0..200).map(|_| RawClient::connect(server.socket())).collect();
        for (i, client) in clients.iter_mut().enumerate() {
            // Each stops somewhere else; the server may have lost patience with it already.
            let bytes = [&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 6, 0, 0, 0, 200]].concat();
            let _ = client.stream.write_all(&bytes[..i % bytes.len()]);
        }
        RawClient::enter(server.socket(), "disk", true).verify_block(0, 2);
        for client in &mut clients {
            let mut rest = Vec::new();
            let _ = client.stream.read_to_end(&mut rest);
            assert!(rest.is_empty() || rest.starts_with(b"NBDMAGIC"), "no more than the greeting");
        }
    });
}

/// The deadline does not help a new client in time: silent connections end when it needs their place.
#[test]
fn silent_connections_do_not_delay_a_new_client() {
    for silent in [300, 2_000] {
        let server = one(MIB);
        let connections: Vec<TcpStream> =
            (0..silent).map(|_| TcpStream::connect(server.tcp()).unwrap()).collect();
        let asked = Nanos::now();
        let script = "import nbd, sys; h = nbd.NBD(); h.connect_uri(sys.argv[1]); print(h.get_size())";
        assert_eq!(python(script, &[&server.tcp_uri("disk")]).trim(), MIB.to_string());
        let waited = Nanos::now() - asked;
        println!("{silent} silent connections: a new client is served after {waited:?}");
        // A tenth of the deadline for a handshake, most of it for the interpreter's start on a busy machine.
        assert!(waited < Duration::from_secs(5), "{waited:?} beside {silent}");
        drop(connections);
    }
}

#[test]
fn clients_that_stop_reading_or_writing_leave_memory_for_others() {
    let mut config = ServerConfig::one(64 << 20);
    config.reactor.buffer_limit = 64 * MIB;
    config.limits = Limits { stall: Duration::from_millis(300), ..Limits::default() };
    let server = Server::start(config);
    Witness::through(&server, || {
        let mut stalled = Vec::new();
        for i in 0..40 {
            let mut client = RawClient::enter(server.socket(), "disk", true);
            if i % 2 == 0 {
                // Wants a lot and takes nothing.
                let reads: Vec<u8> =
                    (0..64).flat_map(|i| RawClient::request(command::READ, 0, i, 0, MIB as u32)).collect();
                client.send(&reads);
            } else {
                // Announces a lot and stops.
                client.send(&RawClient::request(command::WRITE, 0, 1, 0, 8 << 20));
                client.send(&vec![0; 40 << 10]);
            }
            stalled.push(client);
        }
        let state = server.look();
        assert!(state.most_lent <= 64 * MIB, "{state:?}");
        let mut fresh = RawClient::enter(server.socket(), "disk", true);
        fresh.verify_block(0, 3);
        // A large one too, once those that do not move are put out.
        fresh.send(&RawClient::request(command::READ, 0, 9, 0, 12 << 20));
        let answer = fresh.answer(0);
        assert_eq!((answer.error, answer.data.len()), (0, 12 << 20));
        drop(stalled);
    });
    server.wait_until("all memory is back", |state| state.lent == 0);
}

/// Times of reads of 64 KiB, one after the other, sorted.
fn times_of_reads(client: &mut RawClient) -> Vec<Duration> {
    let mut times: Vec<Duration> = (0..1_000)
        .map(|_| {
            let asked = Nanos::now();
            client.send(&RawClient::request(command::READ, 0, 1, 0, 64 << 10));
            let answer = client.answer(0);
            assert_eq!((answer.error, answer.data.len()), (0, 64 << 10));
            Nanos::now() - asked
        })
        .collect();
    times.sort_unstable();
    times
}

/// With shares for connections alone, the other disk waits until these clients are disconnected: 30 s.
#[test]
fn clients_that_never_read_leave_memory_for_another_disk() {
    let mut config = ServerConfig::one(64 << 20);
    config.disks.push(("other".into(), memory_file(), writable(64 << 20)));
    let server = Server::start(config);
    let mut polite = RawClient::enter(server.socket(), "other", true);
    let before = times_of_reads(&mut polite);
    let reads: Vec<u8> =
        (0..128).flat_map(|i| RawClient::request(command::READ, 0, i, 0, 64 << 10)).collect();
    let hostile: Vec<RawClient> = (0..400)
        .map(|_| {
            let mut client = RawClient::enter(server.socket(), "disk", true);
            client.send(&reads);
            client
        })
        .collect();
    let beside = times_of_reads(&mut polite);
    let p99 = |times: &[Duration]| times[990];
    println!("p99 of another disk: {:?} before, {:?} beside 400 hostile clients", p99(&before), p99(&beside));
    assert!(beside[999] < Duration::from_secs(3), "{:?}", beside[999]);
    // A new client of that disk, at depth, gets its share, too.
    let mut deep = RawClient::enter(server.socket(), "other", true);
    deep.send(&reads);
    (0..128).for_each(|i| assert_eq!(deep.answer(i).error, 0));
    drop(hostile);
    server.wait_until("all memory is back", |state| state.lent == 0);
}

#[test]
fn beyond_its_limit_a_disk_takes_no_more_connections() {
    let mut config = ServerConfig::one(MIB as u64);
    config.limits.connections = 3;
    let server = Server::start(config);
    let mut clients: Vec<_> = (0..3).map(|_| RawClient::enter(server.socket(), "disk", true)).collect();
    assert!(RawClient::enter(server.socket(), "disk", true).is_closed());
    clients.iter_mut().for_each(|client| client.verify_block(0, 1));
    drop(clients.pop());
    server.wait_until("one left", |state| state.connections == 2);
    RawClient::enter(server.socket(), "disk", true).verify_block(0, 2);
}
