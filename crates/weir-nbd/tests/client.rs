//! The NBD client against real servers.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashSet;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use common::{Server, TestDir};
use weir_block::{Extent, ExtentState, Nanos};
use weir_nbd::Uri;
use weir_nbd::client::{Answer, CommandFlags, NbdClient, NbdCommand, NbdError, Options};

const MIB: u64 = 1 << 20;

/// Every request of the client, with both kinds of replies.
fn exercise(server: &Server, structured_replies: bool) {
    let options = Options { structured_replies, ..Options::default() };
    let mut client = NbdClient::connect_with(&server.uri, &options).unwrap();
    assert_eq!(client.export().size, 16 * MIB);
    assert_eq!(client.export().structured_replies, structured_replies);
    let data: Vec<u8> = (0..3 * MIB).map(|at| (at % 251) as u8).collect();
    client.write(MIB, &data, false).unwrap();
    client.flush().unwrap();
    let mut back = vec![0; data.len()];
    client.read(MIB, &mut back).unwrap();
    assert!(back == data, "3 MiB come back as they were written");
    client.write(0, &[7; 512], client.export().can_fua()).unwrap();
    client.write_zeroes(MIB, 4096, CommandFlags::NONE).unwrap();
    client.trim(MIB + 4096, 4096, CommandFlags::NONE).unwrap();
    client.read(MIB, &mut back[..8192]).unwrap();
    assert_eq!(back[..4096], [0; 4096]);
    if structured_replies {
        // The server may report pages of zeroes as holes.
        let extents = client.block_status(0, 16 << 20).unwrap();
        let allocated = |extent: &Extent| extent.state == ExtentState::Allocated;
        assert!(extents.iter().any(|extent| allocated(extent) && extent.offset <= 2 * MIB), "{extents:?}");
        assert!(!allocated(extents.last().unwrap()), "{extents:?}");
    }
    client.write_zeroes(0, 16 << 20, CommandFlags::NONE).unwrap();
    client.disconnect();
}

#[test]
fn nbdkit_memory_over_unix_and_tcp() {
    let dir = TestDir::new();
    for server in [dir.nbdkit("memory", &["memory", "16M"]), dir.nbdkit_tcp(&["memory", "16M"])] {
        exercise(&server, true);
        exercise(&server, false);
    }
}

#[test]
fn nbdkit_file_and_qemu_nbd() {
    let dir = TestDir::new();
    let (first, second) = (dir.file("first", 16 * MIB), dir.file("second", 16 * MIB));
    for server in [dir.nbdkit("file", &["file", first.to_str().unwrap()]), dir.qemu_nbd("qemu", &second)] {
        exercise(&server, true);
        exercise(&server, false);
    }
}

#[test]
fn pipelined_requests_are_answered_each() {
    let dir = TestDir::new();
    let server = dir.nbdkit("memory", &["memory", "16M"]);
    let mut client = NbdClient::connect(&server.uri).unwrap();
    let mut waiting = HashSet::new();
    for block in 0..200u64 {
        let command = NbdCommand::Write { offset: block * 4096, length: 4096, flags: CommandFlags::NONE };
        waiting.insert(client.submit(command, &[block as u8; 4096]).unwrap());
    }
    while let Some(completed) = client.poll(Duration::from_secs(10)).unwrap() {
        assert_eq!(completed.result.unwrap(), Answer::Done);
        assert!(waiting.remove(&completed.ticket), "answered once");
    }
    assert!(waiting.is_empty() && client.in_flight() == 0);
    for block in 0..200u64 {
        client.submit(NbdCommand::Read { offset: block * 4096, length: 4096 }, &[]).unwrap();
    }
    let mut answers = 0;
    while let Some(completed) = client.poll(Duration::from_secs(10)).unwrap() {
        let (offset, _) = completed.command.range();
        assert_eq!(completed.result.unwrap(), Answer::Data(vec![(offset / 4096) as u8; 4096]));
        answers += 1;
    }
    assert_eq!(answers, 200);
}

#[test]
fn a_failed_request_leaves_the_connection_usable() {
    let dir = TestDir::new();
    let server = dir.nbdkit("memory", &["memory", "1M"]);
    for structured_replies in [true, false] {
        let options = Options { structured_replies, ..Options::default() };
        let mut client = NbdClient::connect_with(&server.uri, &options).unwrap();
        let error = client.read(MIB - 512, &mut [0; 1024]).unwrap_err();
        assert!(
            !error.is_connection() && error.to_string().contains("read of 1024 bytes at 1048064"),
            "{error}"
        );
        client.read(0, &mut [0; 1024]).unwrap();
    }
}

#[test]
fn what_the_server_does_not_offer_is_said_at_once() {
    let dir = TestDir::new();
    let server = dir.nbdkit("readonly", &["-r", "--filter=nozero", "memory", "1M"]);
    let options = Options { structured_replies: false, ..Options::default() };
    let mut client = NbdClient::connect_with(&server.uri, &options).unwrap();
    assert!(client.export().is_read_only());
    let status = client.block_status(0, 4096).unwrap_err().to_string();
    assert!(status.contains("does not offer block status"), "{status}");
    let trim = client.trim(0, 4096, CommandFlags::NONE).unwrap_err().to_string();
    assert!(trim.contains("does not offer trim"), "{trim}");
    let write = client.write(0, &[0; 512], false).unwrap_err();
    assert!(write.to_string().contains("EPERM"), "{write}");
}

#[test]
fn connecting_fails_in_words() {
    let dir = TestDir::new();
    let text = |uri: &Uri, options: &Options| NbdClient::connect_with(uri, options).unwrap_err().to_string();
    let missing = text(&Uri::unix(&dir.path("none"), ""), &Options::default());
    assert!(missing.contains("cannot connect") && missing.contains("none"), "{missing}");
    let refused = text(&Uri::tcp(common::free_port(), ""), &Options::default());
    assert!(refused.contains("refused"), "{refused}");
    let server = dir.qemu_nbd("qemu", &dir.file("disk", MIB));
    let unknown = text(&Uri { export: "other".into(), ..server.uri.clone() }, &Options::default());
    assert!(unknown.contains("`other`") && unknown.contains("no such export"), "{unknown}");
    let listener = UnixListener::bind(dir.path("mute")).unwrap();
    let impatient = Options { connect_timeout: Duration::from_millis(100), ..Options::default() };
    let mute = text(&Uri::unix(&dir.path("mute"), ""), &impatient);
    assert!(mute.contains("no answer to the handshake"), "{mute}");
    let chatter = std::thread::spawn(move || {
        let (_, _) = listener.accept().unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n").unwrap();
        stream
    });
    let other = text(&Uri::unix(&dir.path("mute"), ""), &impatient);
    assert!(other.contains("is this an NBD server?"), "{other}");
    drop(chatter.join().unwrap());
}

#[test]
fn a_silent_server_is_given_up_and_a_dead_one_noticed() {
    let dir = TestDir::new();
    let server = dir.nbdkit("slow", &["--filter=delay", "memory", "1M", "rdelay=5"]);
    let options = Options { timeout: Duration::from_millis(300), ..Options::default() };
    let mut client = NbdClient::connect_with(&server.uri, &options).unwrap();
    let start = Nanos::now();
    let error = client.read(0, &mut [0; 512]).unwrap_err();
    assert!(matches!(error, NbdError::Timeout { in_flight: 1, .. }), "{error}");
    assert!(Nanos::now() - start < Duration::from_secs(2));
    let mut client = NbdClient::connect(&server.uri).unwrap();
    client.submit(NbdCommand::Read { offset: 0, length: 512 }, &[]).unwrap();
    assert!(client.poll(Duration::from_millis(50)).unwrap().is_none(), "not yet");
    server.kill();
    let error = client.poll(Duration::from_secs(5)).unwrap_err();
    assert!(error.is_connection() && error.to_string().contains("1 request(s) in flight"), "{error}");
}
