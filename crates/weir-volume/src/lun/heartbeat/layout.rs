//! The layout of the heartbeat area, version 1. All numbers are little-endian; every block ends the same way.
//!
//! Block 0, the head:
//!
//! | field | offset | bytes |
//! |---|---|---|
//! | magic, `WEIRAREA` | 0 | 8 |
//! | version | 8 | 4 |
//! | slots | 12 | 4 |
//! | volume | 16 | 16 |
//! | zeroes | 32 | 4060 |
//! | CRC32C of all before | 4092 | 4 |
//!
//! Blocks 1 to [`SLOTS`], one slot each: zeroes, or a heartbeat:
//!
//! | field | offset | bytes |
//! |---|---|---|
//! | magic, `WEIRBEAT` | 0 | 8 |
//! | version | 8 | 4 |
//! | 1 while it beats, 0 after a clean end | 12 | 4 |
//! | volume | 16 | 16 |
//! | node | 32 | 8 |
//! | incarnation | 40 | 8 |
//! | epoch | 48 | 8 |
//! | count | 56 | 8 |
//! | length of the name | 64 | 4 |
//! | the node's name, UTF-8 | 68 | 256 |
//! | zeroes | 324 | 3768 |
//! | CRC32C of all before | 4092 | 4 |

use weir_block::zeroes::is_zero;

use std::fmt;

/// Bytes of a block: the largest logical block of a device.
pub const BLOCK: usize = 4096;
/// Slots for heartbeats.
pub const SLOTS: usize = 63;
/// Bytes of the area.
pub const AREA: usize = (1 + SLOTS) * BLOCK;
/// The version that this code reads and writes.
pub const VERSION: u32 = 1;
/// Longest name that is kept, in bytes; of a longer one, the first part.
pub const LONGEST_NAME: usize = 256;

const HEAD_MAGIC: [u8; 8] = *b"WEIRAREA";
const BEAT_MAGIC: [u8; 8] = *b"WEIRBEAT";
const NAME_AT: usize = 68;
const CHECKSUM_AT: usize = BLOCK - 4;

/// One block.
pub type Block = [u8; BLOCK];

/// The identity of a volume, which no other volume of any cluster has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VolumeId(pub [u8; 16]);

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// One heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beat {
    /// The host, by which the LUN knows it.
    pub node: u64,
    /// Its process.
    pub incarnation: u64,
    /// The epoch in which it coordinates.
    pub epoch: u64,
    /// Grows with each heartbeat of the process.
    pub count: u64,
    /// It goes on. Otherwise this is the last one: the process has unmounted.
    pub goes_on: bool,
    /// For messages.
    pub name: String,
}

/// The content of the head block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// Nothing but zeroes.
    Zeroes,
    /// The head of an area.
    Area(VolumeId),
    /// The head of an area in a layout that this code does not know.
    Newer(u32),
    /// The head of an area, damaged.
    Damaged,
    /// Something else.
    Other,
}

/// The content of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slot {
    /// Nobody has used it.
    Empty,
    /// A heartbeat of this volume.
    Beat(Beat),
    /// It does not check, or is of another volume: half written, damaged, or written by something else. With the block's checksum, by
    /// which a change shows.
    Other(u32),
}

/// Writes the head of an area.
#[must_use]
pub fn encode_head(volume: VolumeId) -> Block {
    let mut block = begin(HEAD_MAGIC, SLOTS as u32, volume);
    seal(&mut block);
    block
}

/// Reads the head of an area.
#[must_use]
pub fn decode_head(block: &Block) -> Head {
    if is_zero(block) {
        return Head::Zeroes;
    }
    if block[..8] != HEAD_MAGIC {
        return Head::Other;
    }
    if !checks(block) {
        return Head::Damaged;
    }
    match (u32_at(block, 8), u32_at(block, 12)) {
        (VERSION, slots) if slots as usize == SLOTS => Head::Area(volume_of(block)),
        (version, _) => Head::Newer(version),
    }
}

/// Writes a heartbeat.
#[must_use]
pub fn encode_beat(volume: VolumeId, beat: &Beat) -> Block {
    let mut block = begin(BEAT_MAGIC, beat.goes_on.into(), volume);
    for (at, number) in [(32, beat.node), (40, beat.incarnation), (48, beat.epoch), (56, beat.count)] {
        block[at..at + 8].copy_from_slice(&number.to_le_bytes());
    }
    let ends = beat.name.char_indices().map(|(at, letter)| at + letter.len_utf8());
    let name = &beat.name[..ends.take_while(|end| *end <= LONGEST_NAME).last().unwrap_or(0)];
    block[64..68].copy_from_slice(&(name.len() as u32).to_le_bytes());
    block[NAME_AT..NAME_AT + name.len()].copy_from_slice(name.as_bytes());
    seal(&mut block);
    block
}

/// Reads a slot of the area of `volume`.
#[must_use]
pub fn decode_slot(volume: VolumeId, block: &Block) -> Slot {
    if is_zero(block) {
        return Slot::Empty;
    }
    beat(volume, block).map_or_else(|| Slot::Other(crc32c::crc32c(block)), Slot::Beat)
}

fn beat(volume: VolumeId, block: &Block) -> Option<Beat> {
    let is_ours = block[..8] == BEAT_MAGIC && u32_at(block, 8) == VERSION && volume_of(block) == volume;
    if !is_ours || !checks(block) {
        return None;
    }
    let length = u32_at(block, 64) as usize;
    let name = block[NAME_AT..NAME_AT + LONGEST_NAME].get(..length)?;
    Some(Beat {
        node: u64_at(block, 32),
        incarnation: u64_at(block, 40),
        epoch: u64_at(block, 48),
        count: u64_at(block, 56),
        goes_on: u32_at(block, 12) != 0,
        name: std::str::from_utf8(name).ok()?.to_owned(),
    })
}

fn begin(magic: [u8; 8], number: u32, volume: VolumeId) -> Block {
    let mut block = [0; BLOCK];
    block[..8].copy_from_slice(&magic);
    block[8..12].copy_from_slice(&VERSION.to_le_bytes());
    block[12..16].copy_from_slice(&number.to_le_bytes());
    block[16..32].copy_from_slice(&volume.0);
    block
}

fn seal(block: &mut Block) {
    let checksum = crc32c::crc32c(&block[..CHECKSUM_AT]);
    block[CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
}

fn checks(block: &Block) -> bool {
    crc32c::crc32c(&block[..CHECKSUM_AT]) == u32_at(block, CHECKSUM_AT)
}

fn volume_of(block: &Block) -> VolumeId {
    VolumeId(array(block, 16))
}

fn u32_at(block: &Block, at: usize) -> u32 {
    u32::from_le_bytes(array(block, at))
}

fn u64_at(block: &Block, at: usize) -> u64 {
    u64::from_le_bytes(array(block, at))
}

fn array<const N: usize>(block: &Block, at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&block[at..at + N]);
    array
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const VOLUME: VolumeId = VolumeId(*b"0123456789abcdef");

    fn example() -> Beat {
        Beat { node: 7, incarnation: 1 << 40, epoch: 3, count: 99, goes_on: true, name: "hyper-1".into() }
    }

    #[test]
    fn golden_layouts() {
        let head = encode_head(VOLUME);
        assert_eq!(head[..32], *b"WEIRAREA\x01\0\0\0\x3f\0\0\x000123456789abcdef");
        assert_eq!(head[CHECKSUM_AT..], HEAD_CHECKSUM.to_le_bytes());
        let beat = encode_beat(VOLUME, &example());
        assert_eq!(beat[..32], *b"WEIRBEAT\x01\0\0\0\x01\0\0\x000123456789abcdef");
        assert_eq!(
            beat[32..64],
            *b"\x07\0\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\x03\0\0\0\0\0\0\0\x63\0\0\0\0\0\0\0"
        );
        assert_eq!(beat[64..76], *b"\x07\0\0\0hyper-1\0");
        assert_eq!(beat[CHECKSUM_AT..], BEAT_CHECKSUM.to_le_bytes());
    }

    const HEAD_CHECKSUM: u32 = 0xCA37_8558;
    const BEAT_CHECKSUM: u32 = 0x3BED_280C;

    #[test]
    fn what_was_written_is_read() {
        assert_eq!(decode_head(&encode_head(VOLUME)), Head::Area(VOLUME));
        assert_eq!(decode_head(&[0; BLOCK]), Head::Zeroes);
        let last = Beat { goes_on: false, name: String::new(), ..example() };
        for beat in [example(), last] {
            assert_eq!(decode_slot(VOLUME, &encode_beat(VOLUME, &beat)), Slot::Beat(beat));
        }
        assert_eq!(decode_slot(VOLUME, &[0; BLOCK]), Slot::Empty);
        // A name that is too long, with its end in the middle of a character.
        let long = Beat { name: format!("{}ü", "x".repeat(LONGEST_NAME - 1)), ..example() };
        let Slot::Beat(read) = decode_slot(VOLUME, &encode_beat(VOLUME, &long)) else { panic!("{long:?}") };
        assert_eq!(read.name, "x".repeat(LONGEST_NAME - 1));
    }

    #[test]
    fn what_is_not_ours_is_told_from_ours() {
        let mut newer = encode_head(VOLUME);
        newer[8] = 2;
        seal(&mut newer);
        assert_eq!(decode_head(&newer), Head::Newer(2));
        newer[100] = 1;
        assert_eq!(decode_head(&newer), Head::Damaged);
        assert_eq!(decode_head(&[1; BLOCK]), Head::Other);
        let block = encode_beat(VOLUME, &example());
        assert!(matches!(decode_slot(VolumeId([0; 16]), &block), Slot::Other(_)), "of another volume");
        // A length beyond the name, in a block that checks.
        let mut wrong = block;
        wrong[64..68].copy_from_slice(&u32::MAX.to_le_bytes());
        seal(&mut wrong);
        assert!(matches!(decode_slot(VOLUME, &wrong), Slot::Other(_)));
    }

    /// Each byte of a block counts, and none makes a panic.
    #[test]
    fn no_changed_byte_goes_unnoticed() {
        let (head, beat) = (encode_head(VOLUME), encode_beat(VOLUME, &example()));
        for at in 0..BLOCK {
            let (mut head, mut beat) = (head, beat);
            head[at] ^= 0x10;
            beat[at] ^= 0x10;
            assert!(matches!(decode_head(&head), Head::Damaged | Head::Other), "{at}");
            assert!(matches!(decode_slot(VOLUME, &beat), Slot::Other(_)), "{at}");
        }
    }
}
