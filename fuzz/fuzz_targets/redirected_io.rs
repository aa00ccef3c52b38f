//! Arbitrary frames of redirected I/O between a disk's owner and the coordinator of its volume: they are refused, or read as messages that
//! encode to the same meaning again.

#![cfg_attr(feature = "link", no_main)]

use libfuzzer_sys::fuzz_target;
use weir_block::BufferPool;
use weir_net::Frame;
use weir_volume::lun::redirect::wire;

fuzz_target!(|input: (u8, Vec<u8>, Vec<u8>)| {
    let (kind, meta, data) = input;
    let pool = BufferPool::new(8 << 20);
    let frame = Frame { kind: u16::from(kind), meta: &meta, data: &data };
    if let Ok(message) = wire::decode_to_coordinator(frame, &pool) {
        let text = format!("{message:?}");
        let encoded = wire::encode_to_coordinator(message);
        let data = encoded.data.as_ref().map_or(&[][..], |data| data.bytes());
        let again = Frame { kind: encoded.kind, meta: &encoded.meta, data };
        let again = wire::decode_to_coordinator(again, &pool).expect("what was read can be read again");
        assert_eq!(format!("{again:?}"), text);
    }
    if let Ok(message) = wire::decode_to_owner(frame, &pool) {
        for encoded in wire::encode_to_owner(message) {
            let data = encoded.data.as_ref().map_or(&[][..], |data| data.bytes());
            let again = Frame { kind: encoded.kind, meta: &encoded.meta, data };
            wire::decode_to_owner(again, &pool).expect("what was read can be read again");
        }
    }
});

/// In the place of libFuzzer's.
#[cfg(not(feature = "link"))]
fn main() {}
