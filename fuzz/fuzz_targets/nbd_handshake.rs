//! Arbitrary bytes to the NBD handshake, in arbitrary pieces: it never panics, never buffers more than one option, and has the
//! same result as with all bytes at once.

#![cfg_attr(feature = "link", no_main)]

use libfuzzer_sys::fuzz_target;
use weir_block::LayerInfo;
use weir_nbd::server::{Directory, ExportInfo, Handshake, Listed, MOST_OPTION_BYTES, NotServed, Step};

struct OneDisk;

impl Directory for OneDisk {
    fn list(&self) -> Vec<Listed> {
        vec![Listed { name: "a".into(), description: "b".into() }]
    }

    fn lookup(&self, name: &str) -> Result<ExportInfo, NotServed> {
        if !matches!(name, "a" | "") {
            return Err(NotServed::Unknown("elsewhere".into()));
        }
        let layer = LayerInfo {
            size: 1 << 20,
            logical_block: 512,
            preferred_block: 4096,
            max_transfer: 1 << 20,
            writable: true,
            fast_zeroes: true,
            discards: true,
        };
        Ok(ExportInfo { name: "a".into(), description: "b".into(), layer })
    }
}

// The first byte is the size of the pieces.
fuzz_target!(|input: &[u8]| {
    let Some((&piece, bytes)) = input.split_first() else { return };
    let in_pieces = converse(bytes.chunks(usize::from(piece).max(1)));
    assert_eq!(in_pieces, converse(std::iter::once(bytes)));
});

fn converse<'a>(mut pieces: impl Iterator<Item = &'a [u8]>) -> (Step, Vec<u8>, Vec<u8>) {
    let mut out = Vec::new();
    let mut handshake = Handshake::new(&mut out);
    let mut received = 0;
    loop {
        match handshake.step(&OneDisk, &mut out) {
            Step::Continue => {}
            Step::NeedMore => match pieces.next() {
                Some(piece) => {
                    received = received.max(piece.len());
                    handshake.receive(piece);
                }
                None => {
                    let kept = handshake.into_leftover();
                    assert!(kept.len() < MOST_OPTION_BYTES as usize + 16, "an unprocessed option");
                    return (Step::NeedMore, out, kept);
                }
            },
            end => {
                pieces.for_each(|piece| handshake.receive(piece));
                return (end, out, handshake.into_leftover());
            }
        }
    }
}

/// In the place of libFuzzer's.
#[cfg(not(feature = "link"))]
fn main() {}
