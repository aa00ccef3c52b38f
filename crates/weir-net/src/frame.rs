//! The frame format, version 1. Golden bytes are in the tests below.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `WEIR` as the first four bytes on the wire.
pub const MAGIC: [u8; 4] = *b"WEIR";

/// This build's version of the frame format.
pub const VERSION: u16 = 1;

/// Most bytes of a frame's meta part (P10).
pub const LARGEST_META: usize = 256 << 10;

/// Most bytes of a frame's data part (P10).
pub const LARGEST_DATA: usize = 4 << 20;

/// The 32 bytes before each frame. All integers are little-endian.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 4 | magic `WEIR` |
/// | 4 | 2 | version of the frame format |
/// | 6 | 2 | kind, defined by the user of the channel |
/// | 8 | 4 | bytes of meta, directly after the header |
/// | 12 | 4 | bytes of data, directly after the meta |
/// | 16 | 8 | number of the frame on this connection, from 0: detects lost and repeated frames |
/// | 24 | 4 | CRC-32C of bytes 0 to 23 and of the meta |
/// | 28 | 4 | zero |
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, PartialEq, Eq)]
#[repr(C)]
pub struct FrameHeader {
    magic: [u8; 4],
    version: U16,
    kind: U16,
    meta_length: U32,
    data_length: U32,
    number: U64,
    checksum: U32,
    zero: U32,
}

/// Bytes of a [`FrameHeader`].
pub const HEADER: usize = size_of::<FrameHeader>();

/// A received frame, still in the receive buffer.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// The sender's kind.
    pub kind: u16,
    /// Verified by the frame's checksum.
    pub meta: &'a [u8],
    /// Not verified here: its checksums are in the meta part.
    pub data: &'a [u8],
}

/// Why bytes are not a frame. The connection is unusable: the boundary of the next frame is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Not a Weir peer, or the stream lost synchronisation.
    #[error("not a Weir frame: the magic is {0:02x?}; is something else connected to the peer port?")]
    Magic([u8; 4]),
    /// The peer is of another release.
    #[error("peer speaks frame version {0}, this build {VERSION}; run the same release on both nodes")]
    Version(u16),
    /// Above [`LARGEST_META`] or [`LARGEST_DATA`].
    #[error("frame too large: {meta} bytes of meta, {data} bytes of data")]
    TooLarge {
        /// Announced length.
        meta: usize,
        /// Announced length.
        data: usize,
    },
    /// Corrupted in transit (P11).
    #[error("frame {0} does not match its checksum")]
    Checksum(u64),
    /// Lost or repeated in transit.
    #[error("received frame {got}, expected frame {expected}")]
    OutOfOrder {
        /// Number received.
        got: u64,
        /// Number expected.
        expected: u64,
    },
}

/// Appends header and meta of a frame to `out`; the data follows on the wire.
///
/// # Panics
/// When a part exceeds its limit: a bug in the sender's batching.
pub fn encode(out: &mut Vec<u8>, kind: u16, number: u64, meta: &[u8], data_length: usize) {
    assert!(meta.len() <= LARGEST_META && data_length <= LARGEST_DATA, "frame over its limit");
    let mut header = FrameHeader {
        magic: MAGIC,
        version: VERSION.into(),
        kind: kind.into(),
        meta_length: (meta.len() as u32).into(),
        data_length: (data_length as u32).into(),
        number: number.into(),
        checksum: 0.into(),
        zero: 0.into(),
    };
    header.checksum = checksum(&header, meta).into();
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(meta);
}

fn checksum(header: &FrameHeader, meta: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&header.as_bytes()[..24]), meta)
}

/// Decodes the frame numbered `expected` at the start of `bytes`, and returns it with its length in bytes. `None` while it is
/// incomplete.
///
/// # Errors
/// See [`FrameError`]. A bad header is reported as soon as it has arrived, before its lengths are used.
pub fn decode(bytes: &[u8], expected: u64) -> Result<Option<(Frame<'_>, usize)>, FrameError> {
    let Ok((header, rest)) = FrameHeader::ref_from_prefix(bytes) else { return Ok(None) };
    if header.magic != MAGIC {
        return Err(FrameError::Magic(header.magic));
    }
    if header.version.get() != VERSION {
        return Err(FrameError::Version(header.version.get()));
    }
    let (meta, data) = (header.meta_length.get() as usize, header.data_length.get() as usize);
    if meta > LARGEST_META || data > LARGEST_DATA {
        return Err(FrameError::TooLarge { meta, data });
    }
    if rest.len() < meta + data {
        return Ok(None);
    }
    let number = header.number.get();
    let (meta, rest) = rest.split_at(meta);
    if checksum(header, meta) != header.checksum.get() {
        return Err(FrameError::Checksum(number));
    }
    if number != expected {
        return Err(FrameError::OutOfOrder { got: number, expected });
    }
    let frame = Frame { kind: header.kind.get(), meta, data: &rest[..data] };
    Ok(Some((frame, HEADER + meta.len() + data)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<u8> {
        let mut bytes = Vec::new();
        encode(&mut bytes, 7, 3, b"meta", 4);
        bytes.extend_from_slice(b"data");
        bytes
    }

    #[test]
    fn golden_bytes() {
        let expected: Vec<u8> = [
            &b"WEIR"[..],
            &[1, 0, 7, 0, 4, 0, 0, 0, 4, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0],
            &crc32c::crc32c(&[&sample()[..24], b"meta"].concat()).to_le_bytes(),
            &[0, 0, 0, 0],
            b"metadata",
        ]
        .concat();
        assert_eq!(sample(), expected);
    }

    #[test]
    fn every_prefix_waits_and_the_whole_is_a_frame() {
        let bytes = sample();
        for length in 0..bytes.len() {
            assert!(decode(&bytes[..length], 3).expect("a prefix is no error").is_none());
        }
        let (frame, used) = decode(&bytes, 3).expect("valid").expect("whole");
        assert_eq!((frame.kind, frame.meta, frame.data, used), (7, &b"meta"[..], &b"data"[..], bytes.len()));
    }

    #[test]
    fn every_flipped_bit_outside_the_data_is_detected() {
        let bytes = sample();
        for position in (0..28).chain(32..36) {
            for bit in 0..8 {
                let mut broken = bytes.clone();
                broken[position] ^= 1 << bit;
                let accepted = matches!(decode(&broken, 3), Ok(Some(_)));
                assert!(!accepted, "byte {position} bit {bit}");
            }
        }
        assert_eq!(decode(&bytes, 4).unwrap_err(), FrameError::OutOfOrder { got: 3, expected: 4 });
    }
}
