//! Memory used by clients (P10). Alone in its process, so that nothing else is measured.

#![allow(clippy::unwrap_used)]

#[path = "nbd/support/mod.rs"]
#[allow(dead_code, unused_imports, reason = "the other tests use the rest")]
mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use support::{RawClient, Server, ServerConfig, Witness};
use weir_nbd::protocol::option;

const MIB: usize = 1 << 20;

/// Resident memory that 10,000 idle clients may cost.
const IDLE_CLIENTS_COST: usize = 32 * MIB;

/// Resident memory that 10,000 clients may cost of which each has stopped in the middle of a request.
const HALF_REQUESTS_COST: usize = 64 * MIB;

#[test]
fn clients_are_cheap() {
    raise_descriptor_limit(11_000);
    a_client_that_asks_for_the_list_for_ever_makes_nothing_pile_up();
    ten_thousand_idle_clients_are_cheap();
}

/// Ten thousand clients in a process of their own, since a process has a limited number of descriptors. It says when
/// they are connected, and when each has sent half a request, and waits for a line in between.
const CROWD: &str = "
import resource, socket, struct, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
def exactly(s, length):
    data = b''
    while len(data) < length:
        more = s.recv(length - len(data))
        assert more, 'the server hung up'
        data += more
    return data
def enter():
    s = socket.socket(socket.AF_UNIX)
    s.connect(sys.argv[1])
    exactly(s, 18)
    s.sendall(struct.pack('>I8sIIIH', 3, b'IHAVEOPT', 7, 6, 0, 0))
    while True:
        magic, option, kind, length = struct.unpack('>QIII', exactly(s, 20))
        exactly(s, length)
        if kind == 1:
            return s
def read(s):
    s.sendall(struct.pack('>IHHQQI', 0x25609513, 0, 0, 1, 0, 4096))
    exactly(s, 16 + 4096)
crowd = [enter() for _ in range(10000)]
for s in crowd[::10]:
    read(s)
print('connected', flush=True)
sys.stdin.readline()
for s in crowd[::97]:
    read(s)
for s in crowd:
    s.sendall(struct.pack('>IHHQQI', 0x25609513, 0, 1, 1, 0, 16384) + bytes(1000))
print('half', flush=True)
sys.stdin.readline()
";

fn ten_thousand_idle_clients_are_cheap() {
    raise_descriptor_limit(11_000);
    let server = one(MIB);
    Witness::through(&server, || {
        let before = memory_of();
        let mut crowd = Command::new("/usr/bin/python3")
            .args(["-c", CROWD, server.socket().to_str().unwrap()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this test needs /usr/bin/python3");
        let mut said = BufReader::new(crowd.stdout.take().unwrap()).lines();
        assert_eq!(said.next().unwrap().unwrap(), "connected");
        server.wait_until("all are there", |state| state.connections == 10_001);
        let cost = memory_of().saturating_sub(before);
        assert!(cost < IDLE_CLIENTS_COST, "10,000 clients cost {} MiB", cost / MIB);
        let mut orders = crowd.stdin.take().unwrap();
        orders.write_all(b"\n").unwrap();
        assert_eq!(said.next().unwrap().unwrap(), "half");
        let cost = memory_of().saturating_sub(before);
        assert!(cost < HALF_REQUESTS_COST, "10,000 half requests cost {} MiB", cost / MIB);
        eprintln!("10,000 clients with half a request each cost {} KiB", cost >> 10);
        orders.write_all(b"\n").unwrap();
        assert!(crowd.wait().unwrap().success());
    });
    server.wait_until("they are gone", |state| state.connections == 0);
}

fn a_client_that_asks_for_the_list_for_ever_makes_nothing_pile_up() {
    let server = one(MIB);
    let before = memory_of();
    Witness::through(&server, || {
        let mut client = RawClient::connect(server.socket());
        client.send(&[0, 0, 0, 3]);
        client.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
        let list = [b"IHAVEOPT", &option::LIST.to_be_bytes()[..], &[0; 4]].concat().repeat(1000);
        // It never reads. At some point the server does not read either.
        let mut sent = 0;
        while let Ok(length) = client.stream.write(&list) {
            sent += length;
            assert!(sent < 64 * MIB, "the server reads on although its answers are not taken");
        }
    });
    assert!(memory_of() < before + 16 * MIB);
}

fn raise_descriptor_limit(wanted: u64) {
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if limit.current.is_some_and(|current| current < wanted) {
        limit.current = Some(wanted);
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit)
            .expect("this test needs 11,000 descriptors; raise the hard limit (ulimit -Hn)");
    }
}

fn one(size: usize) -> Server {
    Server::start(ServerConfig::one(size as u64))
}

/// Resident memory of this process, in bytes.
fn memory_of() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = status.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}
