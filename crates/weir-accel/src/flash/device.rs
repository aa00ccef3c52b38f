//! A node's flash device: a preallocated file or a block device, cut into slots. Version 1 of its format.
//!
//! All integers are little-endian.
//!
//! | where | what |
//! |---|---|
//! | block 0 | the superblock, 4096 bytes |
//! | from block 1 | two slot headers of 4096 bytes for each slot; the intact one of the higher generation counts |
//! | from the next MiB | the rings of the slots, each `ring` bytes ([`super::frame`]) |
//!
//! Opened, formatted and given out in slots by plain blocking calls: that happens when a node starts and when a disk comes or
//! goes, not for an I/O.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::recovery::{ReadAt, RecoveryError};
use crate::log::{BLOCK, LARGEST_RECORD, RESERVE};

const SUPERBLOCK: U64 = U64::from_bytes(*b"WEIRFLSH");
const SLOT: U64 = U64::from_bytes(*b"WEIRSLOT");
const VERSION: u32 = 1;
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
/// | 8 | 4 | version, 1 |
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
/// | 8 | 4 | version, 1 |
/// | 12 | 4 | CRC-32C over the fields from here on |
/// | 16 | 8 | generation: raised with each change |
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
    /// Another process has it.
    #[error("{}: another process uses this flash device", .0.display())]
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
    /// For superblock, slot headers and recovery.
    file: File,
    medium: u64,
    ring: u64,
    start: u64,
    slots: Mutex<Vec<Slot>>,
    failed: AtomicBool,
}

#[derive(Clone, Debug)]
struct Slot {
    generation: u64,
    taken: Option<Taken>,
    /// Somebody holds its lease.
    leased: bool,
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
        let system = |source| FlashError::System { path: path.to_owned(), source };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(system)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => return Err(FlashError::InUse(path.to_owned())),
            Err(std::fs::TryLockError::Error(source)) => return Err(system(source)),
        }
        let mut found = length(&file).map_err(system)?;
        if is_unfinished(&file, found, size).map_err(system)? {
            fill(&file, size).map_err(system)?;
            sync_directory(path).map_err(system)?;
            found = size;
        }
        let size = found;
        let known = read_superblock(&file, path)?;
        let (superblock, slots) = match known {
            Some(superblock) => {
                let needed = superblock.start.get() + superblock.slots.get() * superblock.ring.get();
                if size < needed {
                    return Err(FlashError::Short { path: path.to_owned(), size, needed });
                }
                let slots = read_slots(&file, &superblock).map_err(system)?;
                let taken = slots.iter().filter(|slot| slot.taken.is_some()).count();
                match superblock.log_bytes.get() {
                    formatted if formatted == log_bytes => (superblock, slots),
                    _ if taken == 0 => format(&file, path, size, log_bytes, medium)?,
                    formatted => {
                        return Err(FlashError::OtherSize { path: path.to_owned(), formatted, taken });
                    }
                }
            }
            None => format(&file, path, size, log_bytes, medium)?,
        };
        Ok(Arc::new(FlashDevice {
            path: path.to_owned(),
            file,
            medium: superblock.medium.get(),
            ring: superblock.ring.get(),
            start: superblock.start.get(),
            slots: Mutex::new(slots),
            failed: AtomicBool::new(false),
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
        let slots = self.lock();
        (slots.len(), slots.iter().filter(|slot| slot.taken.is_none() && !slot.leased).count())
    }

    /// The disks whose logs are at rest here: name and identity.
    #[must_use]
    pub fn disks(&self) -> Vec<(String, u64)> {
        let taken = |slot: &Slot| slot.taken.as_ref().map(|taken| (taken.disk.clone(), taken.disk_id));
        self.lock().iter().filter_map(taken).collect()
    }

    /// The slot of a disk's log that is at rest here, for recovery.
    #[must_use]
    pub fn find(self: &Arc<FlashDevice>, disk: &str) -> Option<SlotLease> {
        let mut slots = self.lock();
        let held = |slot: &Slot| !slot.leased && slot.taken.as_ref().is_some_and(|taken| taken.disk == disk);
        let number = slots.iter().position(held)?;
        let slot = &mut slots[number];
        slot.leased = true;
        let instance = slot.taken.as_ref().map_or(0, |taken| taken.instance);
        Some(SlotLease { device: Arc::clone(self), number, instance })
    }

    /// A slot for a new log of a disk. What was at rest of the same disk and is in nobody's hands is given up.
    ///
    /// # Errors
    /// All slots are taken, or the device refuses.
    pub fn take(self: &Arc<FlashDevice>, disk: &str, disk_id: u64) -> Result<SlotLease, FlashError> {
        let mut slots = self.lock();
        let same = |slot: &Slot| !slot.leased && slot.taken.as_ref().is_some_and(|taken| taken.disk == disk);
        let free = |slot: &Slot| slot.taken.is_none() && !slot.leased;
        let number = slots.iter().position(same).or_else(|| slots.iter().position(free));
        let full = || FlashError::Full { path: self.path.clone(), slots: slots.len() };
        let number = number.ok_or_else(full)?;
        let slot = &mut slots[number];
        let generation = slot.generation + 1;
        let instance = mix(self.medium ^ mix(((number as u64) << 48) ^ generation));
        let taken = Taken { disk: disk.to_owned(), disk_id, instance };
        self.write_slot(number, generation, Some(&taken))
            .map_err(|source| FlashError::System { path: self.path.clone(), source })?;
        *slot = Slot { generation, taken: Some(taken), leased: true };
        Ok(SlotLease { device: Arc::clone(self), number, instance })
    }

    /// Gives up what is at rest of a disk and in nobody's hands.
    pub fn forget(self: &Arc<FlashDevice>, disk: &str) {
        if let Some(lease) = self.find(disk) {
            lease.free();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        // The table is changed in one assignment: whoever panicked while holding it has not left it half changed.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_slot(&self, number: usize, generation: u64, taken: Option<&Taken>) -> io::Result<()> {
        let block = slot_block(generation, taken);
        self.file.write_all_at(&block, slot_offset(number, generation))?;
        self.file.sync_data()
    }
}

/// A slot in somebody's hands.
#[derive(Debug)]
pub struct SlotLease {
    device: Arc<FlashDevice>,
    number: usize,
    instance: u64,
}

impl SlotLease {
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

    /// Another descriptor of the device, for direct I/O where there is such a thing.
    ///
    /// # Errors
    /// The system refuses.
    pub fn file(&self) -> Result<File, FlashError> {
        let open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(self.path());
        open(libc::O_DIRECT)
            .or_else(|error| match error.raw_os_error() {
                // A file in memory; good for tests only.
                Some(libc::EINVAL) => open(0),
                _ => Err(error),
            })
            .map_err(|source| FlashError::System { path: self.path().to_owned(), source })
    }

    /// Tells whoever asks that the device fails.
    pub fn report_failure(&self) {
        self.device.failed.store(true, Ordering::Release);
    }

    /// Gives the slot back: its log is not needed any more.
    pub fn free(self) {
        self.give_up();
    }

    /// Its log is not needed any more. The slot stays in these hands, because a write may be under way; but should the process
    /// end now, the next one must not find this log beside a younger one of the same disk.
    pub fn give_up(&self) {
        let mut slots = self.device.lock();
        let slot = &mut slots[self.number];
        let generation = slot.generation + 1;
        match self.device.write_slot(self.number, generation, None) {
            Ok(()) => *slot = Slot { generation, taken: None, leased: true },
            // It stays taken, by a log that the registry does not name; the next start finds that out.
            Err(error) => tracing::warn!(%error, "a slot of the flash device could not be given back"),
        }
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        self.device.lock()[self.number].leased = false;
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
    first_ring(slots) + slots * ring_bytes(log_bytes)
}

fn first_ring(slots: u64) -> u64 {
    (BLOCK + slots * 2 * BLOCK).next_multiple_of(MIB)
}

fn slot_offset(number: usize, generation: u64) -> u64 {
    BLOCK + (number as u64 * 2 + generation % 2) * BLOCK
}

/// SplitMix64's finalizer (Steele, Lea, Flood 2014): spreads every bit of the input over the output.
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

fn length(file: &File) -> io::Result<u64> {
    let metadata = file.metadata()?;
    if metadata.file_type().is_block_device() {
        use std::io::Seek;
        return (&mut &*file).seek(io::SeekFrom::End(0));
    }
    Ok(metadata.len())
}

/// Whether this is a new file, or one that somebody began to fill and did not live to finish: shorter than it is to be, and
/// nothing but zeroes. Formatted as it is, it would have fewer slots than the operator asked for, or none.
fn is_unfinished(file: &File, found: u64, size: u64) -> io::Result<bool> {
    if found >= size || !file.metadata()?.file_type().is_file() {
        return Ok(false);
    }
    let mut chunk = vec![0u8; 4 * MIB as usize];
    let mut at = 0;
    while at < found {
        let read = file.read_at(&mut chunk, at)?;
        if read == 0 || chunk[..read].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        at += read as u64;
    }
    Ok(true)
}

/// Makes sure that a new file is still there after a loss of power: its own sync need not cover its name.
fn sync_directory(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

/// Writes zeroes over the whole of a new file, or of one that was begun.
fn fill(file: &File, size: u64) -> io::Result<()> {
    let zeroes = vec![0u8; 4 * MIB as usize];
    let mut at = 0;
    while at < size {
        let part = (size - at).min(zeroes.len() as u64);
        file.write_all_at(&zeroes[..part as usize], at)?;
        at += part;
    }
    file.sync_all()
}

fn read_superblock(file: &File, path: &Path) -> Result<Option<Superblock>, FlashError> {
    let system = |source| FlashError::System { path: path.to_owned(), source };
    let mut block = [0u8; BLOCK as usize];
    let read = file.read_at(&mut block, 0).map_err(system)?;
    if block[..read].iter().all(|byte| *byte == 0) {
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
    file: &File,
    path: &Path,
    size: u64,
    log_bytes: u64,
    medium: u64,
) -> Result<(Superblock, Vec<Slot>), FlashError> {
    let ring = ring_bytes(log_bytes);
    let mut slots = (size / ring).min(MOST_SLOTS);
    while slots > 0 && device_bytes(slots, log_bytes) > size {
        slots -= 1;
    }
    if slots == 0 {
        let needed = device_bytes(1, log_bytes);
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
            for generation in 0..2 {
                file.write_all_at(&[0; BLOCK as usize], slot_offset(number, generation))?;
            }
        }
        file.sync_data()?;
        file.write_all_at(&block, 0)?;
        file.sync_data()
    };
    write().map_err(|source| FlashError::System { path: path.to_owned(), source })?;
    let slot = Slot { generation: 0, taken: None, leased: false };
    Ok((superblock, vec![slot; slots as usize]))
}

fn read_slots(file: &File, superblock: &Superblock) -> io::Result<Vec<Slot>> {
    let mut slots = Vec::new();
    let mut block = [0u8; BLOCK as usize];
    for number in 0..superblock.slots.get().min(MOST_SLOTS) as usize {
        let mut slot = Slot { generation: 0, taken: None, leased: false };
        for parity in 0..2 {
            file.read_exact_at(&mut block, slot_offset(number, parity))?;
            if let Some((generation, taken)) = read_slot(&block).filter(|(read, _)| *read > slot.generation) {
                slot = Slot { generation, taken, leased: false };
            }
        }
        slots.push(slot);
    }
    Ok(slots)
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
