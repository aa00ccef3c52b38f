//! A node's flash device: a preallocated file or a block device, cut into slots. Version 3 of its format.
//!
//! All integers are little-endian.
//!
//! | where | what |
//! |---|---|
//! | block 0 | the superblock, 4096 bytes |
//! | from block 1 | two slot headers of 4096 bytes for each slot; the intact one of the higher generation counts, and of several slots of one disk the one of the highest |
//! | from the next MiB | the rings of the slots, each `ring` bytes ([`super::frame`]) |
//!
//! Opened and formatted by plain blocking calls, when a node starts. Given out in slots without any I/O here: a lease says what
//! is to be written to the table ([`SlotLease::entry`]), and whoever holds it writes that through the ring of its shard and tells
//! when it is durable ([`SlotLease::entered`]). Until then no frame is written to the slot, and nobody else gets it; the one
//! write that enters the new owner ends the old one's entry.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weir_block::SharedFile;
use weir_block::sim::MediumFile;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::file::DeviceFile;
use super::recovery::{ReadAt, RecoveryError};
use crate::log::{BLOCK, LARGEST_RECORD, RESERVE};
use crate::planted::Planted;

const SUPERBLOCK: U64 = U64::from_bytes(*b"WEIRFLSH");
const SLOT: U64 = U64::from_bytes(*b"WEIRSLOT");
/// Of the device, and of the frames on it ([`super::frame`]).
const VERSION: u32 = 3;
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
struct Superblock {
    magic: U64,
    version: U32,
    checksum: U32,
    medium: U64,
    log_bytes: U64,
    ring: U64,
    slots: U64,
    start: U64,
}

/// Who has a slot.
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

/// Why a flash device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FlashError {
    /// The system refuses.
    #[error("{}: {source}", path.display())]
    System {
        /// The device.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// Another process has it, or one that has ended and of which a write has not come back.
    #[error(
        "{}: another process uses this flash device, or a write of one that has ended is still on its way to it", .0.display()
    )]
    InUse(PathBuf),
    /// It holds something that is not Weir's.
    #[error(
        "{}: holds something that is not a flash medium of Weir's; name another file, or erase its first 4 KiB if \
         nobody needs it", .0.display()
    )]
    Foreign(PathBuf),
    /// It was formatted by a build with another format.
    #[error("{}: has format version {version}, this build reads {VERSION}; drain it with the build that wrote it", path.display())]
    Version {
        /// The device.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// It was formatted for logs of another size and logs are in it.
    #[error(
        "{}: formatted for logs of {formatted} bytes, of which {taken} are in use; set resources.log back to that, drain \
         and release those disks, then change it", path.display()
    )]
    OtherSize {
        /// The device.
        path: PathBuf,
        /// Bytes of log per slot.
        formatted: u64,
        /// Slots in use.
        taken: usize,
    },
    /// Not even one log fits.
    #[error("{}: {size} bytes are too few; one log of this size needs {needed}", path.display())]
    TooSmall {
        /// The device.
        path: PathBuf,
        /// Its size.
        size: u64,
        /// What one slot takes.
        needed: u64,
    },
    /// It has shrunk since it was formatted.
    #[error(
        "{}: has {size} bytes and was formatted for {needed}, so logs at its end are cut off; put the whole file or device back, \
         or name another one and let the disks be filled anew from their other copies", path.display()
    )]
    Short {
        /// The device.
        path: PathBuf,
        /// Its size.
        size: u64,
        /// What it had when it was formatted, at least.
        needed: u64,
    },
    /// All slots are taken.
    #[error("{}: all {slots} logs that fit are in use; make it larger or use another node", path.display())]
    Full {
        /// The device.
        path: PathBuf,
        /// How many there are.
        slots: usize,
    },
    /// What is at rest cannot be used.
    #[error(transparent)]
    Recovery(#[from] RecoveryError),
}

/// A node's flash device, open for as long as the process lives; no other process can open it meanwhile.
#[derive(Debug)]
pub struct FlashDevice {
    path: PathBuf,
    file: DeviceFile,
    medium: u64,
    ring: u64,
    start: u64,
    table: Mutex<Table>,
    failed: AtomicBool,
    planted: Planted,
}

/// The table of slots as it is on the device, and who is about to change it. Nobody does I/O while it is locked.
#[derive(Debug)]
struct Table {
    slots: Vec<Slot>,
    /// The highest that was ever given to a change.
    generation: u64,
}

#[derive(Clone, Debug)]
struct Slot {
    generation: u64,
    /// Which of its two headers is the one that counts: the other is written next.
    place: u64,
    taken: Option<Taken>,
    /// Somebody holds its lease.
    leased: bool,
}

impl Slot {
    const EMPTY: Slot = Slot { generation: 0, place: 1, taken: None, leased: false };
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Taken {
    disk: String,
    disk_id: u64,
    instance: u64,
}

impl FlashDevice {
    /// Opens the device at `path` for logs of `log_bytes`. A file that does not exist is made, `size` bytes long and written
    /// through once, because overwriting is many times faster than filling holes; one that holds nothing is formatted, with
    /// `medium` as its identity.
    ///
    /// # Errors
    /// See [`FlashError`].
    pub fn open(path: &Path, size: u64, log_bytes: u64, medium: u64) -> Result<Arc<FlashDevice>, FlashError> {
        let file = DeviceFile::open(path, size)?;
        FlashDevice::over(path, file, (log_bytes, ring_bytes(log_bytes)), medium)
    }

    /// As [`FlashDevice::open`], over a simulated file, which is there already; with rings of `ring` bytes, so that they go round
    /// more often than those of real logs.
    ///
    /// # Errors
    /// See [`FlashError`].
    pub fn simulated(
        file: MediumFile,
        log_bytes: u64,
        ring: u64,
        medium: u64,
        planted: Planted,
    ) -> Result<Arc<FlashDevice>, FlashError> {
        let mut device = FlashDevice::over(
            Path::new("simulated"),
            DeviceFile::Simulated(file),
            (log_bytes, ring),
            medium,
        )?;
        // Nobody else has it yet.
        Arc::get_mut(&mut device).expect("made a moment ago").planted = planted;
        Ok(device)
    }

    /// Takes a device as it is, or formats it with slots for logs of so many bytes in rings of so many.
    fn over(
        path: &Path,
        file: DeviceFile,
        (log_bytes, ring): (u64, u64),
        medium: u64,
    ) -> Result<Arc<FlashDevice>, FlashError> {
        let system = |source| FlashError::System { path: path.to_owned(), source };
        let size = file.length().map_err(system)?;
        let known = read_superblock(&file, size, path)?;
        let (superblock, slots) = match known {
            Some(superblock) => {
                let needed = superblock.start.get() + superblock.slots.get() * superblock.ring.get();
                if size < needed {
                    return Err(FlashError::Short { path: path.to_owned(), size, needed });
                }
                let mut slots = read_slots(&file, &superblock).map_err(system)?;
                give_up_elder(&file, &mut slots).map_err(system)?;
                let taken = slots.iter().filter(|slot| slot.taken.is_some()).count();
                match superblock.log_bytes.get() {
                    formatted if formatted == log_bytes => (superblock, slots),
                    _ if taken == 0 => format(&file, path, size, (log_bytes, ring), medium)?,
                    formatted => {
                        return Err(FlashError::OtherSize { path: path.to_owned(), formatted, taken });
                    }
                }
            }
            None => format(&file, path, size, (log_bytes, ring), medium)?,
        };
        let generation = slots.iter().map(|slot| slot.generation).max().unwrap_or(0);
        Ok(Arc::new(FlashDevice {
            path: path.to_owned(),
            file,
            medium: superblock.medium.get(),
            ring: superblock.ring.get(),
            start: superblock.start.get(),
            table: Mutex::new(Table { slots, generation }),
            failed: AtomicBool::new(false),
            planted: Planted::default(),
        }))
    }

    /// The identity of the medium: stays when the process ends, changes when it is formatted.
    #[must_use]
    pub fn medium(&self) -> u64 {
        self.medium
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a write has failed since it was opened.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Slots in all, and slots that are free.
    #[must_use]
    pub fn slots(&self) -> (usize, usize) {
        let Table { slots, .. } = &*self.lock();
        (slots.len(), slots.iter().filter(|slot| slot.taken.is_none() && !slot.leased).count())
    }

    /// The disks whose logs are at rest here: name and identity.
    #[must_use]
    pub fn disks(&self) -> Vec<(String, u64)> {
        let taken = |slot: &Slot| slot.taken.as_ref().map(|taken| (taken.disk.clone(), taken.disk_id));
        self.lock().slots.iter().filter_map(taken).collect()
    }

    /// The slot of a disk's log that is at rest here: for recovery, or to be given up.
    #[must_use]
    pub fn find(self: &Arc<FlashDevice>, disk: &str) -> Option<SlotLease> {
        let mut table = self.lock();
        let held = |slot: &Slot| !slot.leased && slot.taken.as_ref().is_some_and(|taken| taken.disk == disk);
        let number = table.slots.iter().position(held)?;
        let slot = &mut table.slots[number];
        slot.leased = true;
        let instance = slot.taken.as_ref().map_or(0, |taken| taken.instance);
        Some(SlotLease {
            device: Arc::clone(self),
            disk: disk.to_owned(),
            number,
            instance,
            change: None,
            entering: None,
            writing: false,
        })
    }

    /// A slot for a new log of a disk. What was at rest of the same disk and is in nobody's hands is given up. Nothing is
    /// written yet: see [`SlotLease::entry`].
    ///
    /// # Errors
    /// All slots are taken.
    pub fn take(self: &Arc<FlashDevice>, disk: &str, disk_id: u64) -> Result<SlotLease, FlashError> {
        let mut table = self.lock();
        let Table { slots, .. } = &mut *table;
        let same = |slot: &Slot| !slot.leased && slot.taken.as_ref().is_some_and(|taken| taken.disk == disk);
        let free = |slot: &Slot| slot.taken.is_none() && !slot.leased;
        let number = slots.iter().position(same).or_else(|| slots.iter().position(free));
        let full = || FlashError::Full { path: self.path.clone(), slots: slots.len() };
        let number = number.ok_or_else(full)?;
        slots[number].leased = true;
        drop(table);
        let mut lease = SlotLease {
            device: Arc::clone(self),
            disk: disk.to_owned(),
            number,
            instance: 0,
            change: None,
            entering: None,
            writing: false,
        };
        lease.begin_anew(disk_id);
        Ok(lease)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // It is changed in single assignments: whoever panicked while holding it has not left it half changed.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a slot's next header says.
#[derive(Debug)]
struct Change {
    generation: u64,
    taken: Option<Taken>,
}

/// A slot in somebody's hands.
#[derive(Debug)]
pub struct SlotLease {
    device: Arc<FlashDevice>,
    disk: String,
    number: usize,
    instance: u64,
    /// To be entered.
    change: Option<Change>,
    /// What is being entered.
    entering: Option<Change>,
    /// The kernel has a write to this slot or to its header.
    writing: bool,
}

impl SlotLease {
    /// The disk that it was taken for, or found to be of.
    #[must_use]
    pub fn disk(&self) -> &str {
        &self.disk
    }

    /// What its frames carry.
    #[must_use]
    pub fn instance(&self) -> u64 {
        self.instance
    }

    /// Bytes of its ring.
    #[must_use]
    pub fn ring(&self) -> u64 {
        self.device.ring
    }

    /// Bytes from the start of the device to its ring.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.device.start + self.number as u64 * self.device.ring
    }

    /// The device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.device.path
    }

    /// Another descriptor of the device, for direct I/O where there is such a thing. Opens nothing.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn file(&self) -> Result<SharedFile, FlashError> {
        self.device.file.share().map_err(|source| FlashError::System { path: self.path().to_owned(), source })
    }

    /// The bug that is planted in what is done with it, if there is one.
    pub(super) fn planted(&self) -> Planted {
        self.device.planted
    }

    /// The header that is to be written now, and where: bytes from the start of the device. `None` when the table is as it should
    /// be. The header that counts so far stays as it is beside it.
    pub fn entry(&mut self) -> Option<(u64, [u8; BLOCK as usize])> {
        let change = self.change.take()?;
        let place = 1 - self.device.lock().slots[self.number].place;
        let block = slot_block(change.generation, change.taken.as_ref());
        self.entering = Some(change);
        Some((slot_offset(self.number, place), block))
    }

    /// The entry is durable.
    pub fn entered(&mut self) {
        let Some(Change { generation, taken }) = self.entering.take() else { return };
        let slot = &mut self.device.lock().slots[self.number];
        *slot = Slot { generation, place: 1 - slot.place, taken, leased: true };
    }

    /// The entry could not be written: the slot counts as before, and whoever has it next writes over what came of this.
    pub fn not_entered(&mut self) {
        self.entering = None;
    }

    /// A write to the slot or to its header begins or ends. Who lets go of the lease in between does not make the slot free.
    pub fn set_writing(&mut self, writing: bool) {
        self.writing = writing;
    }

    /// Tells whoever asks that the device fails.
    pub fn report_failure(&self) {
        self.device.failed.store(true, Ordering::Release);
    }

    /// A new log of the disk begins here, with another instance: that is to be entered. Until then the slot is what it was.
    pub fn begin_anew(&mut self, disk_id: u64) {
        let mut table = self.device.lock();
        table.generation += 1;
        let generation = table.generation;
        self.instance = mix(self.device.medium ^ mix(((self.number as u64) << 48) ^ generation));
        let taken = Taken { disk: self.disk.clone(), disk_id, instance: self.instance };
        self.change = Some(Change { generation, taken: Some(taken) });
    }

    /// Its log is not needed any more: that is to be entered. The slot stays in these hands until then. Should the process end
    /// before, the next one finds this log, unless there is a younger one of the same disk.
    pub fn give_up(&mut self) {
        let mut table = self.device.lock();
        table.generation += 1;
        self.change = Some(Change { generation: table.generation, taken: None });
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        if !self.writing {
            self.device.lock().slots[self.number].leased = false;
        }
    }
}

impl ReadAt for SlotLease {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.device.file.read_exact_at(buffer, self.start() + offset)
    }
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

/// Where a slot's header is, of which there are two.
fn slot_offset(number: usize, place: u64) -> u64 {
    BLOCK + (number as u64 * 2 + place) * BLOCK
}

/// SplitMix64's finalizer (Steele, Lea, Flood 2014): spreads every bit of the input over the output.
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

fn read_superblock(file: &DeviceFile, size: u64, path: &Path) -> Result<Option<Superblock>, FlashError> {
    let system = |source| FlashError::System { path: path.to_owned(), source };
    let mut block = [0u8; BLOCK as usize];
    file.read_exact_at(&mut block[..size.min(BLOCK) as usize], 0).map_err(system)?;
    if block.iter().all(|byte| *byte == 0) {
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

fn format(
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
            for place in 0..2 {
                file.write_all_at(&[0; BLOCK as usize], slot_offset(number, place))?;
            }
        }
        file.sync_data()?;
        file.write_all_at(&block, 0)?;
        file.sync_data()
    };
    write().map_err(|source| FlashError::System { path: path.to_owned(), source })?;
    Ok((superblock, vec![Slot::EMPTY; slots as usize]))
}

fn read_slots(file: &DeviceFile, superblock: &Superblock) -> io::Result<Vec<Slot>> {
    let mut slots = Vec::new();
    let mut block = [0u8; BLOCK as usize];
    for number in 0..superblock.slots.get().min(MOST_SLOTS) as usize {
        let mut slot = Slot::EMPTY;
        for place in 0..2 {
            file.read_exact_at(&mut block, slot_offset(number, place))?;
            if let Some((generation, taken)) = read_slot(&block).filter(|(read, _)| *read > slot.generation) {
                slot = Slot { generation, place, taken, leased: false };
            }
        }
        slots.push(slot);
    }
    Ok(slots)
}

/// Of several logs of one disk the youngest counts: the process ended before it could enter that the others were given up. That
/// is entered here, before the youngest can be given up in its turn: an elder one would then be taken for the disk's log (P4).
fn give_up_elder(file: &DeviceFile, slots: &mut [Slot]) -> io::Result<()> {
    let elder: Vec<usize> = (0..slots.len()).filter(|number| is_elder(slots, *number)).collect();
    let mut newest = slots.iter().map(|slot| slot.generation).max().unwrap_or(0);
    for number in &elder {
        newest += 1;
        let (generation, place) = (newest, 1 - slots[*number].place);
        file.write_all_at(&slot_block(generation, None), slot_offset(*number, place))?;
        slots[*number] = Slot { generation, place, ..Slot::EMPTY };
    }
    if elder.is_empty() { Ok(()) } else { file.sync_data() }
}

fn is_elder(slots: &[Slot], number: usize) -> bool {
    let Slot { generation, taken: Some(mine), .. } = &slots[number] else { return false };
    let same = |other: &Slot| other.taken.as_ref().is_some_and(|taken| taken.disk == mine.disk);
    slots.iter().any(|other| other.generation > *generation && same(other))
}

fn slot_block(generation: u64, taken: Option<&Taken>) -> [u8; BLOCK as usize] {
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
