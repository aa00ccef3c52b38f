//! A node's flash device: a preallocated file or a block device, cut into slots ([`super::format`]).
//!
//! A node opens and formats it by plain blocking calls when it starts. Slots are taken without any I/O here: a lease has the
//! entry to write to the table ([`SlotLease::entry`]), and its holder writes that through the ring of its shard and reports
//! when it is durable ([`SlotLease::entered`]). Until then no frame is written to the slot, and no other log gets it; the one
//! write that enters the new owner ends the old one's entry.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weir_block::SharedFile;
use weir_block::sim::MediumFile;

use super::error::FlashError;
use super::file::DeviceFile;
use super::format::{
    Slot, Taken, format, give_up_elder, read_slots, read_superblock, ring_bytes, slot_block, slot_offset,
};
use super::recovery::ReadAt;
use crate::log::BLOCK;
use crate::planted::Planted;

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

/// The table of slots as it is on the device, and the leases that are about to change it. No I/O happens while it is locked.
#[derive(Debug)]
struct Table {
    slots: Vec<Slot>,
    /// The highest that was ever given to a change.
    generation: u64,
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
        // It is not shared yet.
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

    /// The device's path.
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

    /// The disks whose logs are kept here: name and identity.
    #[must_use]
    pub fn disks(&self) -> Vec<(String, u64)> {
        let taken = |slot: &Slot| slot.taken.as_ref().map(|taken| (taken.disk.clone(), taken.disk_id));
        self.lock().slots.iter().filter_map(taken).collect()
    }

    /// The slot of a disk's log that is kept here: for recovery, or to be given up.
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

    /// A slot for a new log of a disk. An unused log of the same disk is given up. Nothing is written yet: see
    /// [`SlotLease::entry`].
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
        // It is changed in single assignments: a holder that panicked has not left it half changed.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The next header of a slot.
#[derive(Debug)]
struct Change {
    generation: u64,
    taken: Option<Taken>,
}

/// A slot held by a log.
#[derive(Debug)]
pub struct SlotLease {
    device: Arc<FlashDevice>,
    disk: String,
    number: usize,
    instance: u64,
    /// To be entered.
    change: Option<Change>,
    /// The change that is being written.
    entering: Option<Change>,
    /// The kernel has a write to this slot or to its header.
    writing: bool,
}

impl SlotLease {
    /// The disk that holds the slot.
    #[must_use]
    pub fn disk(&self) -> &str {
        &self.disk
    }

    /// The instance in its frames.
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
        let header = 1 - self.device.lock().slots[self.number].header;
        let block = slot_block(change.generation, change.taken.as_ref());
        self.entering = Some(change);
        Some((slot_offset(self.number, header), block))
    }

    /// The entry is durable.
    pub fn entered(&mut self) {
        let Some(Change { generation, taken }) = self.entering.take() else { return };
        let slot = &mut self.device.lock().slots[self.number];
        *slot = Slot { generation, header: 1 - slot.header, taken, leased: true };
    }

    /// The entry could not be written: the slot counts as before, and its next holder overwrites any result of this.
    pub fn not_entered(&mut self) {
        self.entering = None;
    }

    /// A write to the slot or to its header begins or ends. Dropping the lease meanwhile does not free the slot.
    pub fn set_writing(&mut self, writing: bool) {
        self.writing = writing;
    }

    /// Makes the device report that it fails.
    pub fn report_failure(&self) {
        self.device.failed.store(true, Ordering::Release);
    }

    /// A new log of the disk begins here, with another instance, which is to be entered. Until then the slot keeps its old
    /// entry.
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

/// SplitMix64's finalizer (Steele, Lea, Flood 2014): spreads every bit of the input over the output.
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
