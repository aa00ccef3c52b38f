//! The layout of a flash device, version 3: the superblock, the slot table, and the rings that hold the frames.
//!
//! All integers are little-endian.
//!
//! | where | what |
//! |---|---|
//! | block 0 | the superblock, 4096 bytes |
//! | from block 1 | two slot headers of 4096 bytes for each slot; the intact one of the higher generation counts, and of several slots of one disk the one of the highest |
//! | from the next MiB | the rings of the slots, each `ring` bytes ([`super::frame`]) |

use std::io;
use std::path::Path;

use weir_block::zeroes::is_zero;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::VERSION;
use super::error::FlashError;
use super::file::DeviceFile;
use crate::log::{BLOCK, LARGEST_RECORD, RESERVE};

const SUPERBLOCK: U64 = U64::from_bytes(*b"WEIRFLSH");
const SLOT: U64 = U64::from_bytes(*b"WEIRSLOT");
const MIB: u64 = 1 << 20;

/// Most slots of a device (P10).
const MOST_SLOTS: u64 = 4096;

/// Longest name of a disk, in bytes.
const LONGEST_NAME: usize = 255;

/// Bytes of a ring beyond the arena's: frames of which only a part is needed, and those that say that others are not.
const SLACK: u64 = 8 * MIB;

/// The first block of a device.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | `WEIRFLSH` |
/// | 8 | 4 | version, 3 |
/// | 12 | 4 | CRC-32C over the fields from here on |
/// | 16 | 8 | identity of the medium, drawn at random when it was formatted |
/// | 24 | 8 | bytes of log that a slot has room for |
/// | 32 | 8 | bytes of a slot's ring |
/// | 40 | 8 | number of slots |
/// | 48 | 8 | bytes from the start of the device to the first ring |
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Superblock {
    pub(super) magic: U64,
    pub(super) version: U32,
    pub(super) checksum: U32,
    pub(super) medium: U64,
    pub(super) log_bytes: U64,
    pub(super) ring: U64,
    pub(super) slots: U64,
    pub(super) start: U64,
}

/// The header of a slot: the disk that the slot belongs to.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | `WEIRSLOT` |
/// | 8 | 4 | version, 3 |
/// | 12 | 4 | CRC-32C over the fields from here on |
/// | 16 | 8 | generation: higher than any in the table before |
/// | 24 | 8 | instance that the frames of this disk's log carry |
/// | 32 | 8 | identity of the disk, as in its record |
/// | 40 | 2 | 1 taken, 0 free |
/// | 42 | 2 | bytes of the name |
/// | 44 | 4 | zero |
/// | 48 | 256 | name of the disk, padded with zeroes |
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SlotHeader {
    magic: U64,
    version: U32,
    checksum: U32,
    generation: U64,
    instance: U64,
    disk_id: U64,
    taken: U16,
    name_length: U16,
    zero: U32,
    name: [u8; LONGEST_NAME + 1],
}

/// A slot, as its header says, and whether it is leased.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) generation: u64,
    /// The number of its valid header; the other one is written next.
    pub(super) header: u64,
    pub(super) taken: Option<Taken>,
    /// A lease exists.
    pub(super) leased: bool,
}

impl Slot {
    const EMPTY: Slot = Slot { generation: 0, header: 1, taken: None, leased: false };
}

/// The log that is in a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) disk: String,
    pub(super) disk_id: u64,
    pub(super) instance: u64,
}

/// Bytes of the ring of a slot for logs of `log_bytes`.
#[must_use]
pub fn ring_bytes(log_bytes: u64) -> u64 {
    const { assert!(SLACK >= 4 * LARGEST_RECORD as u64 + 64 * BLOCK) };
    (log_bytes + RESERVE + SLACK).next_multiple_of(MIB)
}

/// Bytes of a device for `slots` logs of `log_bytes`.
#[must_use]
pub fn device_bytes(slots: u64, log_bytes: u64) -> u64 {
    bytes_of(slots, ring_bytes(log_bytes))
}

fn bytes_of(slots: u64, ring: u64) -> u64 {
    first_ring(slots) + slots * ring
}

fn first_ring(slots: u64) -> u64 {
    (BLOCK + slots * 2 * BLOCK).next_multiple_of(MIB)
}

/// The offset of a header of a slot, which has two.
pub(super) fn slot_offset(number: usize, header: u64) -> u64 {
    BLOCK + (number as u64 * 2 + header) * BLOCK
}

pub(super) fn read_superblock(
    file: &DeviceFile,
    size: u64,
    path: &Path,
) -> Result<Option<Superblock>, FlashError> {
    let system = |source| FlashError::System { path: path.to_owned(), source };
    let mut block = [0u8; BLOCK as usize];
    file.read_exact_at(&mut block[..size.min(BLOCK) as usize], 0).map_err(system)?;
    if is_zero(&block) {
        return Ok(None);
    }
    let (superblock, _) =
        Superblock::read_from_prefix(&block).map_err(|_| FlashError::Foreign(path.to_owned()))?;
    if superblock.magic != SUPERBLOCK {
        return Err(FlashError::Foreign(path.to_owned()));
    }
    let version = superblock.version.get();
    if version != VERSION {
        return Err(FlashError::Version { path: path.to_owned(), version });
    }
    if crc32c::crc32c(&superblock.as_bytes()[16..]) != superblock.checksum.get() {
        let source =
            io::Error::new(io::ErrorKind::InvalidData, "its first block does not match its checksum");
        return Err(system(source));
    }
    Ok(Some(superblock))
}

pub(super) fn format(
    file: &DeviceFile,
    path: &Path,
    size: u64,
    (log_bytes, ring): (u64, u64),
    medium: u64,
) -> Result<(Superblock, Vec<Slot>), FlashError> {
    let mut slots = (size / ring).min(MOST_SLOTS);
    while slots > 0 && bytes_of(slots, ring) > size {
        slots -= 1;
    }
    if slots == 0 {
        let needed = bytes_of(1, ring);
        return Err(FlashError::TooSmall { path: path.to_owned(), size, needed });
    }
    let mut superblock = Superblock {
        magic: SUPERBLOCK,
        version: VERSION.into(),
        checksum: 0.into(),
        medium: medium.into(),
        log_bytes: log_bytes.into(),
        ring: ring.into(),
        slots: slots.into(),
        start: first_ring(slots).into(),
    };
    superblock.checksum = crc32c::crc32c(&superblock.as_bytes()[16..]).into();
    let mut block = [0u8; BLOCK as usize];
    block[..size_of::<Superblock>()].copy_from_slice(superblock.as_bytes());
    let write = || {
        // The slots first: a superblock promises that they are as it says.
        for number in 0..slots as usize {
            for header in 0..2 {
                file.write_all_at(&[0; BLOCK as usize], slot_offset(number, header))?;
            }
        }
        file.sync_data()?;
        file.write_all_at(&block, 0)?;
        file.sync_data()
    };
    write().map_err(|source| FlashError::System { path: path.to_owned(), source })?;
    Ok((superblock, vec![Slot::EMPTY; slots as usize]))
}

pub(super) fn read_slots(file: &DeviceFile, superblock: &Superblock) -> io::Result<Vec<Slot>> {
    let mut slots = Vec::new();
    let mut block = [0u8; BLOCK as usize];
    for number in 0..superblock.slots.get().min(MOST_SLOTS) as usize {
        let mut slot = Slot::EMPTY;
        for header in 0..2 {
            file.read_exact_at(&mut block, slot_offset(number, header))?;
            if let Some((generation, taken)) = read_slot(&block).filter(|(read, _)| *read > slot.generation) {
                slot = Slot { generation, header, taken, leased: false };
            }
        }
        slots.push(slot);
    }
    Ok(slots)
}

/// Of several logs of one disk the youngest counts: the process ended before it could enter that the others were given up. That
/// is entered here, before the youngest can be given up in its turn: an elder one would then be taken for the disk's log (P4).
pub(super) fn give_up_elder(file: &DeviceFile, slots: &mut [Slot]) -> io::Result<()> {
    let elder: Vec<usize> = (0..slots.len()).filter(|number| is_elder(slots, *number)).collect();
    let mut newest = slots.iter().map(|slot| slot.generation).max().unwrap_or(0);
    for number in &elder {
        newest += 1;
        let (generation, header) = (newest, 1 - slots[*number].header);
        file.write_all_at(&slot_block(generation, None), slot_offset(*number, header))?;
        slots[*number] = Slot { generation, header, ..Slot::EMPTY };
    }
    if elder.is_empty() { Ok(()) } else { file.sync_data() }
}

fn is_elder(slots: &[Slot], number: usize) -> bool {
    let Slot { generation, taken: Some(mine), .. } = &slots[number] else { return false };
    let same = |other: &Slot| other.taken.as_ref().is_some_and(|taken| taken.disk == mine.disk);
    slots.iter().any(|other| other.generation > *generation && same(other))
}

pub(super) fn slot_block(generation: u64, taken: Option<&Taken>) -> [u8; BLOCK as usize] {
    let name = taken.map_or(&[][..], |taken| taken.disk.as_bytes());
    let mut header = SlotHeader {
        magic: SLOT,
        version: VERSION.into(),
        checksum: 0.into(),
        generation: generation.into(),
        instance: taken.map_or(0, |taken| taken.instance).into(),
        disk_id: taken.map_or(0, |taken| taken.disk_id).into(),
        taken: u16::from(taken.is_some()).into(),
        name_length: (name.len() as u16).into(),
        zero: 0.into(),
        name: [0; LONGEST_NAME + 1],
    };
    header.name[..name.len()].copy_from_slice(name);
    header.checksum = crc32c::crc32c(&header.as_bytes()[16..]).into();
    let mut block = [0u8; BLOCK as usize];
    block[..size_of::<SlotHeader>()].copy_from_slice(header.as_bytes());
    block
}

fn read_slot(block: &[u8]) -> Option<(u64, Option<Taken>)> {
    let (header, _) = SlotHeader::read_from_prefix(block).ok()?;
    let intact = header.magic == SLOT
        && header.version.get() == VERSION
        && crc32c::crc32c(&header.as_bytes()[16..]) == header.checksum.get();
    if !intact {
        return None;
    }
    let name = header.name.get(..usize::from(header.name_length.get()))?;
    let taken = (header.taken.get() == 1).then(|| Taken {
        disk: String::from_utf8_lossy(name).into_owned(),
        disk_id: header.disk_id.get(),
        instance: header.instance.get(),
    });
    Some((header.generation.get(), taken))
}
