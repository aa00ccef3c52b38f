//! Records in a ring of memory: an owner's write log, or a replica of one.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

use weir_block::Region;

/// Most bytes of data in one record. Larger writes become several records.
pub const LARGEST_RECORD: usize = 1 << 20;

/// Bytes of the arena that an owner leaves to what its replicas lose where the ring ends: records may lie differently there.
pub(crate) const RESERVE: u64 = 2 * (LARGEST_RECORD as u64 + BLOCK);

/// The unit in which flash is written, in bytes.
pub const BLOCK: u64 = 4096;

/// The layout of records in the arena. All copies of a disk's log have the same, or one might be full before the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// For a log in memory: payloads begin at multiples of 512 bytes, so that they can be written to the backing with
    /// direct I/O from where they are.
    Memory,
    /// For a log that is kept on flash: whole blocks, and one before each record, which is what a record costs there at
    /// most (a frame of its own). So the room in the arena is room on the flash, however records are put into frames.
    Flash,
}

impl Layout {
    /// Payloads begin at multiples of this, and take room in multiples of it.
    fn alignment(self) -> u64 {
        match self {
            Layout::Memory => 512,
            Layout::Flash => BLOCK,
        }
    }

    /// Bytes that are left out before each record.
    fn gap(self) -> u64 {
        match self {
            Layout::Memory => 0,
            Layout::Flash => BLOCK,
        }
    }
}

/// The smallest weight of a record, in bytes.
const SMALLEST_WEIGHT: u64 = 512;

/// Most records in a log (P10): 24 bytes of description each on the wire, some 150 in memory with the index.
pub const MOST_RECORDS: usize = 1 << 20;

/// The effect of a record on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RecordKind {
    /// Carries data.
    Write = 1,
    /// The range reads as zeroes and stays allocated where the backing can do so.
    Zero = 2,
    /// The range reads as zeroes and its space may be given back.
    Discard = 3,
}

impl RecordKind {
    /// The kind with this number on the wire.
    #[must_use]
    pub fn from_wire(number: u8) -> Option<RecordKind> {
        [RecordKind::Write, RecordKind::Zero, RecordKind::Discard]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}

/// One acknowledged (or soon acknowledged) change. Its sequence number is its index in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Bytes from the start of the disk.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    /// CRC-32C over sequence number, offset, length, kind and data (P11).
    pub checksum: u32,
    /// The record's effect.
    pub kind: RecordKind,
    /// Position of the data on the endless ring; meaningless without data.
    pub position: u64,
}

impl Record {
    /// First byte after the range.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + u64::from(self.length)
    }

    /// The record's weight in limits that count bytes. Records without data have a weight, too: a range of zeroes may be a
    /// thousand times the log.
    #[must_use]
    pub fn weight(&self) -> u64 {
        (self.data_length() as u64).max(SMALLEST_WEIGHT)
    }

    /// Bytes that the record keeps in the arena.
    #[must_use]
    pub fn data_length(&self) -> usize {
        if self.kind == RecordKind::Write { self.length as usize } else { 0 }
    }
}

/// The checksum of a record, see [`Record::checksum`].
#[must_use]
pub fn checksum(sequence: u64, offset: u64, length: u32, kind: RecordKind, data: &[u8]) -> u32 {
    let mut head = [0u8; 21];
    head[..8].copy_from_slice(&sequence.to_le_bytes());
    head[8..16].copy_from_slice(&offset.to_le_bytes());
    head[16..20].copy_from_slice(&length.to_le_bytes());
    head[20] = kind as u8;
    crc32c::crc32c_append(crc32c::crc32c(&head), data)
}

/// A ring of records. Appends at the head, frees at the tail, both in order of sequence numbers. A copy that is being filled
/// also grows at the tail, downwards.
pub struct Log {
    region: Rc<Region>,
    layout: Layout,
    /// Bytes that an owner may fill.
    capacity: u64,
    /// Bytes of the region. Positions are on the endless ring; the physical position is the remainder by this.
    ring: u64,
    head: u64,
    tail: u64,
    /// From here on the arena is being read, by a write to flash: not even what is freed or cut off may be written over.
    pinned: Option<u64>,
    records: VecDeque<Record>,
    /// Sequence number of the oldest record held, or of the next one when there is none.
    first: u64,
}

impl Log {
    /// An empty log in memory for `bytes` of data, whose first record will have the number `first`.
    ///
    /// # Errors
    /// The kernel gives no memory.
    pub fn new(bytes: u64, first: u64) -> io::Result<Log> {
        Log::with_layout(Layout::Memory, bytes, first)
    }

    /// An empty log of `bytes`, whose first record will have the number `first`.
    ///
    /// # Errors
    /// The kernel gives no memory.
    pub fn with_layout(layout: Layout, bytes: u64, first: u64) -> io::Result<Log> {
        let region = Rc::new(Region::new((bytes + RESERVE) as usize)?);
        let ring = region.len() as u64;
        Ok(Log {
            region,
            layout,
            capacity: bytes,
            ring,
            head: ring,
            tail: ring,
            pinned: None,
            records: VecDeque::new(),
            first,
        })
    }

    /// Sequence number of the newest record; `freed` when there is none.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.first + self.records.len() as u64 - 1
    }

    /// Sequence number of the newest record that is gone.
    #[must_use]
    pub fn freed(&self) -> u64 {
        self.first - 1
    }

    /// The arena's memory, for sends and gather writes.
    #[must_use]
    pub fn region(&self) -> &Rc<Region> {
        &self.region
    }

    /// Bytes of the arena in use, including the waste at the ring's end.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.head - self.tail
    }

    /// Bytes that an owner may fill; a replica takes a little more.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Whether `bytes` of data, cut into `records` of which all but the last are 1 MiB long, certainly fit.
    #[must_use]
    pub fn has_room(&self, bytes: u64, records: u64) -> bool {
        // At most one record's length is lost where the ring ends, and the last record is rounded up.
        let gaps = (records + 1) * self.layout.gap();
        let need = bytes.next_multiple_of(self.layout.alignment()) + gaps + LARGEST_RECORD as u64;
        self.capacity.saturating_sub(self.used()) >= need
            && self.records.len() as u64 + records <= MOST_RECORDS as u64
    }

    /// The share of the log in use, in bytes or in records, whichever is more: 0 to 1.
    #[must_use]
    pub fn fill(&self) -> f64 {
        let bytes = self.used() as f64 / self.capacity as f64;
        bytes.max(self.records.len() as f64 / MOST_RECORDS as f64)
    }

    /// Bytes that certainly fit, as one write.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.capacity.saturating_sub(self.used() + LARGEST_RECORD as u64 + 2 * self.layout.gap())
    }

    /// Appends a change and returns its sequence number. `None` when there is no room ([`Log::has_room`]).
    ///
    /// # Panics
    /// If a write's data is not `length` bytes or larger than 1 MiB.
    pub fn append(&mut self, kind: RecordKind, offset: u64, length: u32, data: &[u8]) -> Option<u64> {
        let sequence = self.last() + 1;
        let checksum = checksum(sequence, offset, length, kind, data);
        self.push(Record { offset, length, checksum, kind, position: 0 }, data)?;
        Some(sequence)
    }

    /// Appends a record whose checksum is known and has been verified.
    pub fn push(&mut self, mut record: Record, data: &[u8]) -> Option<u64> {
        assert_eq!(record.data_length(), data.len(), "a record's data has its length");
        assert!(data.len() <= LARGEST_RECORD, "a record's data is bounded");
        if self.records.len() >= MOST_RECORDS {
            return None;
        }
        if self.records.is_empty() {
            self.settle_tail();
        }
        let gap = self.layout.gap();
        let size = gap + (data.len() as u64).next_multiple_of(self.layout.alignment());
        let rest = self.ring - self.head % self.ring;
        let position = if size > rest { self.head + rest } else { self.head };
        if position + size - self.tail > self.ring {
            return None;
        }
        record.position = position + gap;
        if !data.is_empty() {
            self.region.copy_in(self.arena_offset(record.position), data);
        }
        self.head = position + size;
        self.records.push_back(record);
        Some(self.last())
    }

    /// Puts a record in front of the oldest one, with the number before that one's. Its checksum is known and has been verified.
    /// Returns its number; `None` when there is no room, or no number, or the arena is pinned ([`Log::pin`]).
    ///
    /// # Panics
    /// If a write's data is not `length` bytes or larger than 1 MiB.
    pub fn push_front(&mut self, mut record: Record, data: &[u8]) -> Option<u64> {
        assert_eq!(record.data_length(), data.len(), "a record's data has its length");
        assert!(data.len() <= LARGEST_RECORD, "a record's data is bounded");
        if self.records.len() >= MOST_RECORDS || self.pinned.is_some() || self.first <= 1 {
            return None;
        }
        let gap = self.layout.gap();
        let size = gap + (data.len() as u64).next_multiple_of(self.layout.alignment());
        // Bytes between the ring's start and the record in front of which this one goes.
        let before = (self.tail - 1) % self.ring + 1;
        let end = if size > before { self.tail - before } else { self.tail };
        let start = end.checked_sub(size).filter(|start| self.head - start <= self.ring)?;
        record.position = start + gap;
        if !data.is_empty() {
            self.region.copy_in(self.arena_offset(record.position), data);
        }
        self.tail = start;
        self.first -= 1;
        self.records.push_front(record);
        Some(self.first)
    }

    /// Whether there are no records.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The record with this number.
    #[must_use]
    pub fn get(&self, sequence: u64) -> Option<&Record> {
        self.records.get(usize::try_from(sequence.checked_sub(self.first)?).ok()?)
    }

    /// Records numbered `from` to `to`, as far as they are held.
    pub fn range(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, &Record)> {
        let from = from.max(self.first);
        let start = (from - self.first) as usize;
        let end = ((to + 1).saturating_sub(self.first) as usize).min(self.records.len());
        let numbers = from..;
        numbers.zip(self.records.range(start.min(end)..end))
    }

    /// Offset in the region of a position on the ring.
    #[must_use]
    pub fn arena_offset(&self, position: u64) -> usize {
        (position % self.ring) as usize
    }

    /// A record's data.
    #[must_use]
    pub fn data(&self, record: &Record) -> &[u8] {
        self.region.bytes(self.arena_offset(record.position), record.data_length())
    }

    /// Frees everything up to `sequence`. Past the newest record the log becomes empty and goes on behind it.
    pub fn free_to(&mut self, sequence: u64) {
        while self.first <= sequence {
            match self.records.pop_front() {
                Some(_) => self.first += 1,
                None => self.first = sequence + 1,
            }
        }
        self.settle_tail();
    }

    /// Forgets everything after `sequence`: never acknowledged by the owner that wrote it.
    pub fn truncate_to(&mut self, sequence: u64) {
        while self.last() > sequence && !self.records.is_empty() {
            self.records.pop_back();
        }
        if self.pinned.is_none() {
            let end = self.records.back().map(|record| record.position + self.data_room(record));
            self.head = end.unwrap_or(self.tail).max(self.tail);
        }
        self.settle_tail();
    }

    /// Forgets everything; the next record will have the number `first`.
    pub fn reset(&mut self, first: u64) {
        self.records.clear();
        self.first = first;
        self.settle_tail();
    }

    fn settle_tail(&mut self) {
        if self.records.is_empty() && self.pinned.is_none() && self.head < self.ring {
            // The same position, with room below for what is put in front.
            self.head += self.ring;
        }
        let gap = self.layout.gap();
        let held = self.records.front().map_or(self.head, |record| record.position - gap);
        self.tail = self.pinned.map_or(held, |pinned| held.min(pinned));
    }

    /// From this position on the arena must stay as it is, whatever is freed, until it is pinned elsewhere or not at all.
    pub fn pin(&mut self, position: Option<u64>) {
        self.pinned = position;
        self.settle_tail();
    }

    /// Bytes of the arena from a record's position on that are its own: its data, rounded up.
    #[must_use]
    pub fn data_room(&self, record: &Record) -> u64 {
        (record.data_length() as u64).next_multiple_of(self.layout.alignment())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_are_dense_and_data_comes_back() {
        let mut log = Log::new(2 << 20, 1).expect("memory");
        assert_eq!((log.last(), log.freed()), (0, 0));
        assert_eq!(log.append(RecordKind::Write, 4096, 512, &[7; 512]), Some(1));
        assert_eq!(log.append(RecordKind::Zero, 0, 1 << 30, &[]), Some(2));
        assert_eq!(log.data(log.get(1).expect("held")), &[7; 512]);
        log.free_to(1);
        assert!(log.get(1).is_none());
        assert_eq!((log.last(), log.freed()), (2, 1));
        log.free_to(9);
        assert_eq!((log.last(), log.freed(), log.used()), (9, 9, 0));
    }

    #[test]
    fn room_is_counted_in_records_too() {
        let mut log = Log::new(2 << 20, 1).expect("memory");
        for _ in 0..MOST_RECORDS - 3 {
            log.append(RecordKind::Discard, 0, 512, &[]).expect("records without data need no arena");
        }
        assert!(log.fill() > 0.99, "admission slows down");
        assert!(!log.has_room(0, 4) && !log.has_room(512, 4));
        assert!(log.has_room(0, 3));
        for _ in 0..3 {
            assert!(log.append(RecordKind::Zero, 0, 1 << 30, &[]).is_some(), "promised");
        }
        assert_eq!(log.append(RecordKind::Zero, 0, 512, &[]), None);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Append(usize),
        Prepend(usize),
        Free(usize),
        Truncate(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (1usize..2049).prop_map(|units| Step::Append(units * 512)),
            2 => (1usize..2049).prop_map(|units| Step::Prepend(units * 512)),
            2 => (0usize..8).prop_map(Step::Free),
            1 => (0usize..4).prop_map(Step::Truncate),
        ]
    }

    proptest! {
        /// The ring against a list of byte vectors.
        #[test]
        fn behaves_like_a_list(steps in prop::collection::vec(step(), 1..200), flash: bool) {
            let layout = if flash { Layout::Flash } else { Layout::Memory };
            let mut log = Log::with_layout(layout, 4 << 20, 100).expect("memory");
            let mut list: VecDeque<(u64, Vec<u8>)> = VecDeque::new();
            let mut fill = 0u8;
            for step in steps {
                match step {
                    Step::Append(length) => {
                        fill = fill.wrapping_add(1);
                        let data = vec![fill; length];
                        let promised = log.has_room(length as u64, 1);
                        match log.append(RecordKind::Write, 0, length as u32, &data) {
                            Some(number) => list.push_back((number, data)),
                            None => prop_assert!(!promised, "has_room promised what append refused"),
                        }
                    }
                    Step::Prepend(length) => {
                        fill = fill.wrapping_add(1);
                        let data = vec![fill; length];
                        let number = log.freed();
                        let promised = log.has_room(length as u64, 1) && number > 0;
                        let record = Record { offset: 0, length: length as u32, checksum: 0, kind: RecordKind::Write, position: 0 };
                        match log.push_front(record, &data) {
                            Some(got) => {
                                prop_assert_eq!(got, number);
                                list.push_front((number, data));
                            }
                            None => prop_assert!(!promised, "has_room promised what push_front refused"),
                        }
                    }
                    Step::Free(count) => {
                        let to = log.freed() + count.min(list.len()) as u64;
                        log.free_to(to);
                        list.retain(|(number, _)| *number > to);
                    }
                    Step::Truncate(count) => {
                        let to = log.last() - count.min(list.len()) as u64;
                        log.truncate_to(to);
                        list.retain(|(number, _)| *number <= to);
                    }
                }
                prop_assert!(log.used() <= log.region().len() as u64);
                for (number, data) in &list {
                    let record = log.get(*number).expect("held");
                    prop_assert_eq!(log.data(record), &data[..]);
                }
                prop_assert_eq!(log.range(0, u64::MAX - 1).count(), list.len());
            }
        }
    }
}
