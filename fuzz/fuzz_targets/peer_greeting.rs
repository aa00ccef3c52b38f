//! Arbitrary bytes where a peer's greeting is expected, as they are and with lengths and checksum that fit: nothing panics, and a
//! greeting that is read has one form only, of which nothing beyond its end was read.

#![cfg_attr(feature = "link", no_main)]

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use libfuzzer_sys::fuzz_target;
use weir_node::peer::{Greeting, GreetingError};

/// Magic and version.
const BEGINNING: &[u8; 10] = b"WEIRPEER\x01\x00";
const HEADER: usize = 24;
const CHECKSUM: usize = 4;

// The first byte says what the others are.
fuzz_target!(|input: &[u8]| {
    let Some((&kind, bytes)) = input.split_first() else { return };
    let bytes = if kind % 2 == 0 { bytes.to_vec() } else { sealed(bytes) };
    let mut rest = &bytes[..];
    if let Ok(greeting) = read(&mut rest) {
        let read = &bytes[..bytes.len() - rest.len()];
        assert_eq!(greeting.encode(), read, "{greeting:?}");
    }
});

/// Everything has arrived, so that it never waits.
fn read(bytes: &mut &[u8]) -> Result<Greeting, GreetingError> {
    match pin!(Greeting::read(bytes)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(read) => read,
        Poll::Pending => panic!("it waits for bytes that are there, or for those after the end"),
    }
}

/// A greeting with this content, with the right lengths and checksum: three lengths of names, purpose, incarnation, names, and what
/// comes behind it.
fn sealed(content: &[u8]) -> Vec<u8> {
    let mut header = [0; HEADER];
    header[..BEGINNING.len()].copy_from_slice(BEGINNING);
    let (fields, names) = content.split_at(content.len().min(HEADER - 12));
    header[12..12 + fields.len()].copy_from_slice(fields);
    let length: usize = header[12..15].iter().map(|one| usize::from(*one)).sum();
    let whole = HEADER + length + CHECKSUM;
    header[10..12].copy_from_slice(&(whole as u16).to_le_bytes());
    let (names, behind) = names.split_at(names.len().min(length));
    let mut bytes = [&header[..], names].concat();
    bytes.resize(HEADER + length, b'a');
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    bytes.extend(behind);
    bytes
}

/// In the place of libFuzzer's.
#[cfg(not(feature = "link"))]
fn main() {}
