//! Connecting to servers that do not want it to end.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::Duration;

use weir_block::Nanos;
use weir_nbd::client::{Dialed, NbdError, list_exports};
use weir_nbd::{Address, Uri};

const LIMIT: Duration = Duration::from_millis(400);

/// A listener whose connections are served by `serve`.
fn server(serve: fn(UnixStream)) -> (tempfile::TempDir, Uri) {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    thread::spawn(move || listener.incoming().map_while(Result::ok).for_each(serve));
    (directory, Uri::unix(&socket, "d"))
}

fn greet(stream: &mut UnixStream) {
    stream.write_all(b"NBDMAGICIHAVEOPT\x00\x03").unwrap();
    let mut flags = [0; 4];
    stream.read_exact(&mut flags).unwrap();
}

/// A reply to an option: one export in the list.
fn listed(name: &[u8]) -> Vec<u8> {
    let body = [&(name.len() as u32).to_be_bytes()[..], name].concat();
    let head = [0x0003_e889_0455_65a9_u64.to_be_bytes(), [0, 0, 0, 3, 0, 0, 0, 2]].concat();
    [&head[..], &(body.len() as u32).to_be_bytes(), &body].concat()
}

#[test]
fn a_server_that_says_nothing_or_little_at_a_time_is_left_in_time() {
    let silent = server(|stream| {
        thread::sleep(Duration::from_secs(2));
        drop(stream);
    });
    let slow = server(|mut stream| {
        for byte in b"NBDMAGICIHAVEOPT" {
            let _ = stream.write_all(&[*byte]);
            thread::sleep(Duration::from_millis(100));
        }
    });
    for (_directory, uri) in [silent, slow] {
        let began = Nanos::now();
        let refused = Dialed::dial(&uri, true, true, LIMIT).unwrap_err();
        assert!(matches!(refused, NbdError::Connect { .. }), "{refused}");
        assert!((Nanos::now() - began) < 4 * LIMIT, "{:?}", (Nanos::now() - began));
    }
}

#[test]
fn a_list_without_an_end_is_cut_off() {
    let (_directory, uri) = server(|mut stream| {
        greet(&mut stream);
        let name = [b'x'; 1000];
        while stream.write_all(&listed(&name)).is_ok() {}
    });
    let refused = list_exports(&uri.address, Duration::from_secs(20)).unwrap_err();
    assert!(refused.to_string().contains("longer than 1 MiB"), "{refused}");
}

#[test]
fn the_names_are_those_that_the_server_lists() {
    let (_directory, uri) = server(|mut stream| {
        greet(&mut stream);
        let mut option = [0; 16];
        stream.read_exact(&mut option).unwrap();
        let end = [0x0003_e889_0455_65a9_u64.to_be_bytes(), [0, 0, 0, 3, 0, 0, 0, 1]].concat();
        let replies = [listed(b""), listed(b"vm1"), end, vec![0; 4]].concat();
        stream.write_all(&replies).unwrap();
    });
    let names = list_exports(&uri.address, LIMIT).unwrap();
    assert_eq!(names, Some(vec![String::new(), "vm1".to_owned()]));
    let nobody = Address::Unix("/nonexistent/s".into());
    assert!(matches!(list_exports(&nobody, LIMIT), Err(NbdError::Connect { .. })));
}
