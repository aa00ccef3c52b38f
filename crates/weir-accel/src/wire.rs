//! The messages between owner and replica, version 2: the meta parts of `weir-net` frames.
//!
//! All integers are little-endian. The numbers of [`MessageKind`] are fixed for ever; a new message gets a new
//! number, a changed one too.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::lineage::{Ancestor, Lineage};
use crate::log::{LARGEST_RECORD, Record, RecordKind};
use crate::owner::Held;

/// The smallest logical block; ranges are multiples of it.
const SECTOR: u64 = 512;

/// Above every sequence number that a log reaches: a million records a second for 70,000 years. Arithmetic with those below
/// cannot overflow.
pub const SEQUENCE_LIMIT: u64 = 1 << 61;

/// The kinds of frame on a replication channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum MessageKind {
    /// Owner to replica, first on every connection: [`Hello`]. (1 was a Hello that knew one ancestor only, 5 one that did not
    /// say whether the copy counts.)
    Hello = 6,
    /// Replica to owner, the answer to a Hello and to every batch: [`Confirm`]. (2 was one that knew no gap.)
    Confirm = 10,
    /// Owner to replica: [`Batch`], its [`RecordHeader`]s, and their data behind each other. (3 was one that came in order.)
    Batch = 11,
    /// Replica to owner: [`Refuse`].
    Refuse = 4,
}

impl MessageKind {
    /// The kind with this number on the wire.
    #[must_use]
    pub fn from_wire(number: u16) -> Option<MessageKind> {
        use MessageKind::{Batch, Confirm, Hello, Refuse};
        [Hello, Confirm, Batch, Refuse].into_iter().find(|kind| *kind as u16 == number)
    }
}

/// An owner introduces itself and the log that it wants to replicate. 64 bytes.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | epoch of the owner (P2) |
/// | 8 | 8 | lineage: the epoch at which this owner opened the log |
/// | 16 | 8 | lineage of the log that it was inherited from, 0 if from none |
/// | 24 | 8 | last record inherited |
/// | 32 | 8 | lineage before that one, 0 if none is known |
/// | 40 | 8 | last record inherited from that |
/// | 48 | 8 | last record freed: the copy begins behind it |
/// | 56 | 4 | 1 when the registry counts the replica's copy, else 0 |
/// | 60 | 4 | zero |
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Hello {
    /// See the table.
    pub epoch: U64,
    /// See the table.
    pub lineage: U64,
    /// See the table.
    pub inherited_lineage: U64,
    /// See the table.
    pub inherited_last: U64,
    /// See the table.
    pub before_lineage: U64,
    /// See the table.
    pub before_last: U64,
    /// See the table.
    pub freed: U64,
    /// See the table.
    pub counted: U32,
    /// Zero.
    pub zero: U32,
}

impl Hello {
    /// From an owner in `epoch` with a log of this lineage that has freed its records up to `freed`, to a node whose copy the
    /// registry counts or does not.
    #[must_use]
    pub fn new(epoch: u64, lineage: Lineage, freed: u64, counted: bool) -> Hello {
        let [inherited, before] = lineage.ancestors;
        Hello {
            epoch: epoch.into(),
            lineage: lineage.epoch.into(),
            inherited_lineage: inherited.lineage.into(),
            inherited_last: inherited.last.into(),
            before_lineage: before.lineage.into(),
            before_last: before.last.into(),
            freed: freed.into(),
            counted: u32::from(counted).into(),
            zero: 0.into(),
        }
    }

    /// The lineage of the owner's log.
    #[must_use]
    pub fn lineage(&self) -> Lineage {
        let ancestor = |lineage: U64, last: U64| Ancestor { lineage: lineage.get(), last: last.get() };
        let inherited = ancestor(self.inherited_lineage, self.inherited_last);
        let before = ancestor(self.before_lineage, self.before_last);
        Lineage { epoch: self.lineage.get(), ancestors: [inherited, before] }
    }
}

/// A replica says what it holds. 40 bytes.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | epoch that the replica has seen |
/// | 8 | 8 | last record held: all between the gap and it are held |
/// | 16 | 8 | last record freed |
/// | 24 | 8 | gap: the records behind the last one freed, up to this one, are not here; the last one freed if there is no gap |
/// | 32 | 4 | 1 when the copy is complete ([`Batch`]), else 0 |
/// | 36 | 4 | zero |
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Confirm {
    /// See the table.
    pub epoch: U64,
    /// See the table.
    pub last: U64,
    /// See the table.
    pub freed: U64,
    /// See the table.
    pub gap: U64,
    /// See the table.
    pub complete: U32,
    /// Zero.
    pub zero: U32,
}

impl Confirm {
    /// Says that this is held.
    #[must_use]
    pub fn new(held: Held) -> Confirm {
        let Held { epoch, last, freed, gap, complete } = held;
        Confirm {
            epoch: epoch.into(),
            last: last.into(),
            freed: freed.into(),
            gap: gap.into(),
            complete: u32::from(complete).into(),
            zero: 0.into(),
        }
    }

    /// The confirmed state.
    ///
    /// # Errors
    /// The message contradicts itself.
    pub fn held(&self) -> Result<Held, WireError> {
        let held = Held {
            epoch: self.epoch.get(),
            last: sequence(self.last)?,
            freed: sequence(self.freed)?,
            gap: sequence(self.gap)?,
            complete: self.complete.get() == 1,
        };
        let Held { last, freed, gap, complete, .. } = held;
        if freed > gap || gap > last || (complete && gap > freed) {
            return Err(WireError::Protocol("a copy that cannot be"));
        }
        Ok(held)
    }
}

/// A run of records: it follows the last one that the replica holds, or ends right before the first one, in the gap. A copy that holds
/// nothing and is not complete begins with whatever comes first. 32 bytes, then `count` × [`RecordHeader`].
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | epoch of the owner (P2) |
/// | 8 | 8 | sequence number of the first record; of the next one if there is none here |
/// | 16 | 8 | last record freed by the owner: the replica may free up to it (P6) |
/// | 24 | 4 | number of records |
/// | 28 | 4 | 1 when the replica holds every live record once it has taken this batch, else 0 |
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Batch {
    /// See the table.
    pub epoch: U64,
    /// See the table.
    pub first: U64,
    /// See the table.
    pub freed: U64,
    /// See the table.
    pub count: U32,
    /// See the table.
    pub complete: U32,
}

/// One record of a batch. 20 bytes; its data is in the frame's data part.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | offset on the disk, bytes |
/// | 8 | 4 | length, bytes |
/// | 12 | 4 | CRC-32C over sequence number, offset, length, kind and data (P11) |
/// | 16 | 1 | kind: 1 write, 2 zero, 3 discard |
/// | 17 | 1 | zero |
/// | 18 | 2 | zero |
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RecordHeader {
    /// See the table.
    pub offset: U64,
    /// See the table.
    pub length: U32,
    /// See the table.
    pub checksum: U32,
    /// See the table.
    pub kind: u8,
    /// Zero.
    pub zero: u8,
    /// Zero.
    pub zero2: U16,
}

/// A replica refuses an owner: it has seen a higher epoch. 8 bytes, the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Refuse {
    /// The epoch that the replica has seen.
    pub epoch: U64,
}

/// Why a message is not one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A kind that this build does not know.
    #[error("unknown message kind {0} on a replication channel; run the same release on both nodes")]
    Kind(u16),
    /// The meta part is not as long as its kind says.
    #[error("message of kind {0} with a wrong length")]
    Length(u16),
    /// The peer says something that makes no sense here.
    #[error("replication protocol broken: {0}")]
    Protocol(&'static str),
    /// A record does not match its checksum (P11).
    #[error("record {0} does not match its checksum")]
    Checksum(u64),
    /// The copy that a node found on its flash is complete, the registry may count it, and it is of another past.
    #[error(
        "this node's copy of the log is of another lineage; the node discards it when the registry does not count it any more"
    )]
    OtherPast,
    /// A message in an epoch that the registry has never been in, as far as this node knows.
    #[error("a message of epoch {epoch}, and this node knows the disk's record up to epoch {known}")]
    UnknownEpoch {
        /// The message's.
        epoch: u64,
        /// The highest that is known.
        known: u64,
    },
    /// An empty copy is to be begun for an owner whose epoch is over already, as the registry's record says.
    #[error("an owner of epoch {epoch} wants a new copy, and the registry was at epoch {known} before")]
    Outdated {
        /// The owner's.
        epoch: u64,
        /// The record's, as this node last read it.
        known: u64,
    },
}

impl RecordHeader {
    /// The header that announces a record.
    #[must_use]
    pub fn of(record: &Record) -> RecordHeader {
        RecordHeader {
            offset: record.offset.into(),
            length: record.length.into(),
            checksum: record.checksum.into(),
            kind: record.kind as u8,
            zero: 0,
            zero2: 0.into(),
        }
    }

    /// The record, not yet in a log.
    ///
    /// # Errors
    /// Unknown kind, a range that overflows, or more data than a record may have.
    pub fn parse(&self) -> Result<Record, WireError> {
        let kind = RecordKind::from_wire(self.kind).ok_or(WireError::Protocol("unknown kind of record"))?;
        let (offset, length) = (self.offset.get(), self.length.get());
        let aligned = offset.is_multiple_of(SECTOR) && u64::from(length).is_multiple_of(SECTOR);
        if length == 0 || !aligned || offset.checked_add(u64::from(length)).is_none() {
            return Err(WireError::Protocol("record with an impossible range"));
        }
        let record = Record { offset, length, checksum: self.checksum.get(), kind, position: 0 };
        if record.data_length() > LARGEST_RECORD {
            return Err(WireError::Protocol("record with too much data"));
        }
        Ok(record)
    }
}

/// Checks a sequence number that a peer has sent.
///
/// # Errors
/// It is not below [`SEQUENCE_LIMIT`].
pub fn sequence(number: U64) -> Result<u64, WireError> {
    match number.get() {
        number if number < SEQUENCE_LIMIT => Ok(number),
        _ => Err(WireError::Protocol("impossible sequence number")),
    }
}

/// Reads a fixed message.
///
/// # Errors
/// [`WireError::Length`] when the meta part has another length.
pub fn fixed<T: FromBytes + KnownLayout + Immutable + Unaligned + Copy>(
    kind: MessageKind,
    meta: &[u8],
) -> Result<T, WireError> {
    T::ref_from_bytes(meta).copied().map_err(|_| WireError::Length(kind as u16))
}

/// Reads a batch: its head and its record headers.
///
/// # Errors
/// [`WireError::Length`] when count and length do not agree.
pub fn batch(meta: &[u8]) -> Result<(Batch, &[RecordHeader]), WireError> {
    let wrong = WireError::Length(MessageKind::Batch as u16);
    let (head, rest) = Batch::ref_from_prefix(meta).map_err(|_| wrong)?;
    let headers = <[RecordHeader]>::ref_from_bytes(rest).map_err(|_| wrong)?;
    if headers.len() != head.count.get() as usize {
        return Err(wrong);
    }
    Ok((*head, headers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_layouts() {
        assert_eq!([size_of::<Hello>(), size_of::<Confirm>(), size_of::<Batch>()], [64, 40, 32]);
        let numbers = [MessageKind::Hello, MessageKind::Confirm, MessageKind::Batch, MessageKind::Refuse];
        assert_eq!(numbers.map(|kind| kind as u16), [6, 10, 11, 4]);
        let held = Held { epoch: 1, last: 5, freed: 2, gap: 3, complete: false };
        #[rustfmt::skip]
        assert_eq!(Confirm::new(held).as_bytes(), [
            1,0,0,0,0,0,0,0, 5,0,0,0,0,0,0,0, 2,0,0,0,0,0,0,0, 3,0,0,0,0,0,0,0, 0,0,0,0, 0,0,0,0,
        ]);
        assert_eq!(Confirm::new(held).held(), Ok(held));
        assert!(Confirm::new(Held { complete: true, ..held }).held().is_err(), "complete and a gap");
        assert!(Confirm::new(Held { gap: 6, ..held }).held().is_err(), "a gap behind its end");
        assert_eq!([size_of::<RecordHeader>(), size_of::<Refuse>()], [20, 8]);
        let hello = Hello::new(7, Lineage::new(1).continued(2, 10).continued(3, 20), 15, true);
        #[rustfmt::skip]
        assert_eq!(hello.as_bytes(), [
            7,0,0,0,0,0,0,0, 3,0,0,0,0,0,0,0, 2,0,0,0,0,0,0,0, 20,0,0,0,0,0,0,0,
            1,0,0,0,0,0,0,0, 10,0,0,0,0,0,0,0, 15,0,0,0,0,0,0,0, 1,0,0,0, 0,0,0,0,
        ]);
        assert_eq!(hello.lineage(), Lineage::new(1).continued(2, 10).continued(3, 20));
        let head =
            Batch { epoch: 1.into(), first: 2.into(), freed: 3.into(), count: 1.into(), complete: 1.into() };
        let record =
            Record { offset: 4096, length: 512, checksum: 0xAABB_CCDD, kind: RecordKind::Write, position: 9 };
        let bytes = [head.as_bytes(), RecordHeader::of(&record).as_bytes()].concat();
        #[rustfmt::skip]
        let golden = [
            1,0,0,0,0,0,0,0, 2,0,0,0,0,0,0,0, 3,0,0,0,0,0,0,0, 1,0,0,0, 1,0,0,0,
            0,16,0,0,0,0,0,0, 0,2,0,0, 0xDD,0xCC,0xBB,0xAA, 1, 0, 0,0,
        ];
        assert_eq!(bytes, golden);
        let (parsed, headers) = batch(&golden).expect("valid");
        assert_eq!((parsed, headers.len()), (head, 1));
        assert_eq!(headers[0].parse().expect("valid"), Record { position: 0, ..record });
        assert!(batch(&golden[..51]).is_err() && batch(&golden[..32]).is_err() && batch(&[]).is_err());
    }
}
