//! The format of a frame, version 3.
//!
//! All integers are little-endian. A slot begins with two blocks of 4096 bytes for frames *without* records; the ring of those
//! with records follows. A frame without records is one block, in the location that its number names (even: the first, odd: the
//! second), so it never covers the frame before it, and takes no room from the records.
//!
//! A frame with records begins at a multiple of 4096 bytes of the ring and is a multiple of 4096 bytes
//! long: one block of header and record table, then the data of each record, each rounded up to whole blocks (what is behind the
//! data in its last block means nothing). It never wraps: one that does not fit before the ring's end begins at its start.

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::VERSION;
use crate::lineage::{Ancestor, Lineage};
use crate::log::{BLOCK, Record};
use crate::wire::{RecordHeader, SEQUENCE_LIMIT};

/// `WEIRFRME`.
const MAGIC: U64 = U64::from_bytes(*b"WEIRFRME");

/// The copy is complete.
const COMPLETE: u32 = 1;

/// Bytes at the start of a slot for frames without records.
pub const STATE_ROOM: u64 = 2 * BLOCK;

/// Most records in one frame: the capacity of the header block.
pub const MOST_RECORDS: usize = (BLOCK as usize - size_of::<FrameHeader>()) / size_of::<RecordHeader>();

/// The position of a frame among the frames of its slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Location {
    /// Drawn at random when the disk gets the slot: frames of an earlier disk do not count.
    pub instance: u64,
    /// Incremented each time that the log is opened: frames that an earlier run left behind the end do not count.
    pub run: u64,
    /// Raised by one with each frame.
    pub number: u64,
    /// The number of the newest frame with records before this one; 0 if there is none.
    pub before: u64,
    /// The run of that frame: another run may have had a frame of this number, and left it lying.
    pub before_run: u64,
    /// Bytes on the endless ring; the remainder by the ring's length is the offset in it. Of a frame without records: where the
    /// next one with records begins.
    pub position: u64,
    /// Position of the oldest frame with records that is still needed.
    pub tail: u64,
    /// Bytes, a multiple of 4096.
    pub length: u64,
}

impl Location {
    /// Bytes from the start of the slot to the frame, which has records or has none; the ring takes `ring` bytes.
    #[must_use]
    pub fn offset(&self, has_records: bool, ring: u64) -> u64 {
        if has_records { STATE_ROOM + self.position % ring } else { self.number % 2 * BLOCK }
    }
}

/// Everything about the log but its records, as of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The highest epoch seen (P2).
    pub epoch: u64,
    /// The log's lineage.
    pub lineage: Lineage,
    /// The last record that is freed.
    pub freed: u64,
    /// Whether this copy may be taken over from, provided that the registry counts it.
    pub complete: bool,
}

/// The first 152 bytes of a frame; `count` × [`RecordHeader`] follow.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | `WEIRFRME` |
/// | 8 | 4 | version, 3 |
/// | 12 | 4 | CRC-32C over the header, this field zero, and the record table (P11) |
/// | 16 | 8 | instance of the slot |
/// | 24 | 8 | run |
/// | 32 | 8 | number of the frame |
/// | 40 | 8 | position on the endless ring |
/// | 48 | 8 | position of the oldest frame still needed |
/// | 56 | 8 | length of the frame |
/// | 64 | 8 | sequence number of the first record; of the next one if there is none here |
/// | 72 | 8 | last record freed |
/// | 80 | 8 | epoch |
/// | 88 | 40 | lineage: its epoch, lineage inherited from, last record inherited, the lineage before, last record of that |
/// | 128 | 4 | number of records |
/// | 132 | 4 | flags: 1 the copy is complete |
/// | 136 | 8 | number of the newest frame with records before this one, 0 for none |
/// | 144 | 8 | its run, 0 for none |
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FrameHeader {
    magic: U64,
    version: U32,
    checksum: U32,
    instance: U64,
    run: U64,
    number: U64,
    position: U64,
    tail: U64,
    length: U64,
    first: U64,
    freed: U64,
    epoch: U64,
    lineage: [U64; 5],
    count: U32,
    flags: U32,
    before: U64,
    before_run: U64,
}

/// A frame's header block, read and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The frame's location.
    pub location: Location,
    /// The log's state as of it.
    pub state: State,
    /// Sequence number of the first record; everything held from there on is replaced.
    pub first: u64,
    /// Its records, not yet in a log.
    pub records: Vec<Record>,
}

impl Frame {
    /// Writes the header block.
    ///
    /// # Panics
    /// More than [`MOST_RECORDS`].
    pub fn encode(
        location: &Location,
        state: &State,
        first: u64,
        records: &[RecordHeader],
        block: &mut [u8],
    ) {
        assert!(records.len() <= MOST_RECORDS, "a frame's table is one block");
        let [inherited, before] = state.lineage.ancestors;
        let lineage = [state.lineage.epoch, inherited.lineage, inherited.last, before.lineage, before.last];
        let header = FrameHeader {
            magic: MAGIC,
            version: VERSION.into(),
            checksum: 0.into(),
            instance: location.instance.into(),
            run: location.run.into(),
            number: location.number.into(),
            position: location.position.into(),
            tail: location.tail.into(),
            length: location.length.into(),
            first: first.into(),
            freed: state.freed.into(),
            epoch: state.epoch.into(),
            lineage: lineage.map(U64::from),
            count: (records.len() as u32).into(),
            flags: if state.complete { COMPLETE } else { 0 }.into(),
            before: location.before.into(),
            before_run: location.before_run.into(),
        };
        let table = size_of::<FrameHeader>();
        let end = table + size_of_val(records);
        block[..table].copy_from_slice(header.as_bytes());
        block[table..end].copy_from_slice(records.as_bytes());
        block[end..].fill(0);
        let sum = crc32c::crc32c(&block[..end]);
        block[12..16].copy_from_slice(&sum.to_le_bytes());
    }

    /// Reads a header block. `None` when it is none, or not intact; the data behind it is not looked at.
    #[must_use]
    pub fn decode(block: &[u8]) -> Option<Frame> {
        let (header, table) = FrameHeader::ref_from_prefix(block).ok()?;
        if header.magic != MAGIC || header.version.get() != VERSION {
            return None;
        }
        let count = header.count.get() as usize;
        let (records, _) = <[RecordHeader]>::ref_from_prefix_with_elems(table, count).ok()?;
        let unsummed = FrameHeader { checksum: 0.into(), ..*header };
        let sum = crc32c::crc32c_append(crc32c::crc32c(unsummed.as_bytes()), records.as_bytes());
        if sum != header.checksum.get() {
            return None;
        }
        let records = records.iter().map(|record| record.parse().ok()).collect::<Option<Vec<_>>>()?;
        let frame = Frame {
            location: Location {
                instance: header.instance.get(),
                run: header.run.get(),
                number: header.number.get(),
                before: header.before.get(),
                before_run: header.before_run.get(),
                position: header.position.get(),
                tail: header.tail.get(),
                length: header.length.get(),
            },
            state: State {
                epoch: header.epoch.get(),
                lineage: lineage(&header.lineage),
                freed: header.freed.get(),
                complete: header.flags.get() & COMPLETE != 0,
            },
            first: header.first.get(),
            records,
        };
        frame.makes_sense().then_some(frame)
    }

    /// Its last record, or the last one in any frame before it.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.first + self.records.len() as u64 - 1
    }

    fn makes_sense(&self) -> bool {
        let Location { run, number, before, before_run, position, tail, length, .. } = self.location;
        let data: u64 = self.records.iter().map(data_room).sum();
        length == BLOCK + data
            && [position, tail].iter().all(|at| at.is_multiple_of(BLOCK) && *at < SEQUENCE_LIMIT)
            && tail <= position
            && before < number
            && before_run <= run
            && (1..SEQUENCE_LIMIT).contains(&self.first)
            && self.state.freed < SEQUENCE_LIMIT
    }
}

/// Bytes that a record's data takes in a frame.
#[must_use]
pub fn data_room(record: &Record) -> u64 {
    (record.data_length() as u64).next_multiple_of(BLOCK)
}

fn lineage(fields: &[U64; 5]) -> Lineage {
    let [epoch, inherited, inherited_last, before, before_last] = fields.map(U64::get);
    let ancestors = [
        Ancestor { lineage: inherited, last: inherited_last },
        Ancestor { lineage: before, last: before_last },
    ];
    Lineage { epoch, ancestors }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::RecordKind;

    fn golden() -> (Location, State, Vec<Record>) {
        let location = Location {
            instance: 0x1122,
            run: 3,
            number: 9,
            before: 7,
            before_run: 2,
            position: 40960,
            tail: 8192,
            length: 8192,
        };
        let lineage = Lineage::new(1).continued(2, 10).continued(5, 20);
        let state = State { epoch: 6, lineage, freed: 30, complete: true };
        let record =
            Record { offset: 4096, length: 512, checksum: 0xAABB_CCDD, kind: RecordKind::Write, position: 0 };
        let zeroes = Record { offset: 0, length: 1 << 30, checksum: 7, kind: RecordKind::Zero, position: 0 };
        (location, state, vec![record, zeroes])
    }

    #[test]
    fn the_format_is_as_documented() {
        let (location, state, records) = golden();
        let headers: Vec<RecordHeader> = records.iter().map(RecordHeader::of).collect();
        let mut block = [0xEEu8; BLOCK as usize];
        Frame::encode(&location, &state, 31, &headers, &mut block);
        assert_eq!(block, *include_bytes!("../../tests/golden/frame-v3.bin"), "the format has changed");
        assert_eq!(Frame::decode(&block), Some(Frame { location, state, first: 31, records }));
        assert_eq!(size_of::<FrameHeader>(), 152);
    }

    #[test]
    fn nothing_spoiled_is_taken() {
        let golden = *include_bytes!("../../tests/golden/frame-v3.bin");
        for bit in 0..(152 + 2 * 20) * 8 {
            let mut block = golden;
            block[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Frame::decode(&block), None, "bit {bit}");
        }
        assert_eq!(Frame::decode(&golden[..100]), None);
        assert_eq!(Frame::decode(&golden[..150]), None);
    }
}
