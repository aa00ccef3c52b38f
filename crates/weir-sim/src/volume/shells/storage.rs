//! The LUN with its paths, and the coordinator's filesystem on it, as files of the simulated world.
//!
//! A block of 4096 bytes holds one value in all its words: a version and the block of the disk for which it was written; zero is zeroes. So
//! each write tells where it belongs, whoever sends it, and bytes that were changed under way are seen.

use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weir_block::IoError;
use weir_block::sim::Storage;
use weir_volume::lun::leases::{Lease, Piece};
use weir_volume::lun::router::Range;
use weir_volume::lun::serving::{Change, FileWork, Layout};
use weir_volume::planted::{Bug, Planted};

use super::{BLOCK, BLOCKS, PIECE_BLOCKS};
use crate::volume::checks::shared_as_own;
use crate::volume::filesystem::{Copying, Filesystem};

/// Low bits of a value: the block of the disk.
const BLOCK_BITS: u32 = 12;

/// What a write of this version puts into a block of the disk.
pub fn value_of(version: u64, block: usize) -> u64 {
    version << BLOCK_BITS | block as u64
}

/// The version of a value.
pub fn version_of(value: u64) -> u64 {
    value >> BLOCK_BITS
}

/// The block that it belongs to.
fn home_of(value: u64) -> usize {
    (value & ((1 << BLOCK_BITS) - 1)) as usize
}

/// Fills whole blocks with their values.
pub fn fill(bytes: &mut [u8], mut value: impl FnMut(usize) -> u64) {
    for (number, block) in bytes.chunks_mut(BLOCK as usize).enumerate() {
        let word = value(number).to_le_bytes();
        block.chunks_mut(word.len()).for_each(|target| target.copy_from_slice(&word));
    }
}

/// The value of a block's bytes; `None`: it has several.
pub fn value_in(bytes: &[u8]) -> Option<u64> {
    let mut words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    let first = words.next()?;
    words.all(|word| word == first).then_some(first)
}

/// A change of what the disk's file has in a block.
#[derive(Clone, Copy, Debug)]
pub struct Changed {
    pub block: usize,
    pub before: u64,
    pub now: u64,
}

/// A node's path to the LUN.
#[derive(Clone, Copy, Debug)]
pub struct NodePath {
    /// It reaches the LUN.
    pub is_up: bool,
    /// The LUN refuses its writes.
    pub is_fenced: bool,
}

/// The LUN and the filesystem.
pub struct Lun {
    pub filesystem: Filesystem,
    rng: fastrand::Rng,
    /// The values that survive a loss of the LUN's cache.
    durable: Vec<u64>,
    /// What the file has, by block: from which time on, and what.
    log: Vec<Vec<(u64, u64)>>,
    /// Not looked at yet.
    changes: Vec<Changed>,
    ticks: u64,
    pub paths: Vec<NodePath>,
    /// The present mount; none after its node has crashed.
    mount: Option<u64>,
    mounts: u64,
    /// No space is left.
    pub is_full: bool,
    /// Once in so many pieces of work, and flushes (never when 0), one fails.
    pub fails: u32,
    pub violation: Option<String>,
    planted: Planted,
}

/// Shared by the world's files.
#[derive(Clone)]
pub struct SharedLun(Arc<Mutex<Lun>>);

impl SharedLun {
    pub fn new(seed: u64, planted: Planted) -> SharedLun {
        let filesystem = Filesystem::new(BLOCKS, PIECE_BLOCKS, false);
        SharedLun(Arc::new(Mutex::new(Lun {
            durable: vec![0; filesystem.lun.len()],
            filesystem,
            rng: fastrand::Rng::with_seed(seed),
            log: vec![vec![(0, 0)]; BLOCKS],
            changes: Vec::new(),
            ticks: 0,
            paths: Vec::new(),
            mount: None,
            mounts: 0,
            is_full: false,
            fails: 0,
            violation: None,
            planted,
        })))
    }

    pub fn lock(&self) -> MutexGuard<'_, Lun> {
        // A panic inside ends the run.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A path of a node's process, as a file of the world.
    pub fn path(&self) -> (usize, Box<dyn Storage>) {
        let mut lun = self.lock();
        lun.paths.push(NodePath { is_up: true, is_fenced: false });
        let number = lun.paths.len() - 1;
        (number, Box::new(LunPath { lun: self.clone(), number }))
    }

    /// Mounts the filesystem by a path. The disk's file, for a shard and for what blocks.
    pub fn mount(&self, path: usize) -> (Box<dyn Storage>, Arc<dyn FileWork>) {
        let mut lun = self.lock();
        lun.mounts += 1;
        lun.mount = Some(lun.mounts);
        let mount = lun.mounts;
        drop(lun);
        let file = DiskFile { lun: self.clone(), path, mount };
        let null = File::open("/dev/null").expect("every Linux has it");
        (Box::new(file.clone()), Arc::new(Work { file, null }))
    }
}

impl Lun {
    /// The number of the next event, in the order of all.
    pub fn tick(&mut self) -> u64 {
        self.ticks += 1;
        self.ticks
    }

    pub fn take_changes(&mut self) -> Vec<Changed> {
        std::mem::take(&mut self.changes)
    }

    pub fn fail(&mut self, text: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(text());
        }
    }

    /// Records what the file has now.
    fn observe(&mut self) {
        let tick = self.tick();
        for block in 0..BLOCKS {
            let now = self.filesystem.read(block);
            let before = self.log[block].last().map_or(0, |last| last.1);
            if now != before {
                self.log[block].push((tick, now));
                self.changes.push(Changed { block, before, now });
            }
        }
    }

    /// The values that the block has had from a time on, after those that it had before, the newest of these first.
    pub fn values_since(&self, block: usize, since: u64) -> (impl Iterator<Item = u64>, &[(u64, u64)]) {
        let (before, later) =
            self.log[block].split_at(self.log[block].partition_point(|(at, _)| *at <= since));
        (before.iter().rev().map(|(_, value)| *value), later)
    }

    /// Whether the block has had a value at some time between two.
    pub fn had(&self, block: usize, value: u64, since: u64) -> bool {
        let (mut before, later) = self.values_since(block, since);
        before.next() == Some(value) || later.iter().any(|(_, other)| *other == value)
    }

    /// What a crash of the LUN and the coordinator would leave.
    pub fn durable(&self, block: usize) -> u64 {
        self.filesystem.read_after_crash(block, &self.durable)
    }

    fn sync(&mut self) {
        self.durable.clone_from(&self.filesystem.lun);
        self.filesystem.make_durable();
    }

    fn commit_copies(&mut self, copying: Copying, is_durable: bool) {
        let blocks: Vec<usize> = copying.blocks().collect();
        self.filesystem.commit(copying, is_durable, &mut self.rng);
        // A filesystem writes what it has copied before it points there.
        blocks.into_iter().for_each(|at| self.durable[at] = self.filesystem.lun[at]);
    }

    /// The coordinator's node has crashed, or its filesystem has shut down: what it had not committed is lost.
    pub fn crash(&mut self) {
        if self.mount.take().is_some() {
            self.filesystem.lose_uncommitted(&mut self.rng);
            self.observe();
        }
    }

    /// A clean end of the mount.
    pub fn unmount(&mut self) {
        self.sync();
        self.mount = None;
    }

    /// A clone of the disk, or a move of a piece as by a defragmenter.
    pub fn change(&mut self, number: u64) {
        if number.is_multiple_of(2) {
            self.filesystem.clone_file(number % 6, &mut self.rng);
        } else {
            let piece = self.rng.u64(0..BLOCKS as u64 / PIECE_BLOCKS) * PIECE_BLOCKS;
            let copying = self.filesystem.begin((piece, piece + PIECE_BLOCKS), true, &mut self.rng);
            self.commit_copies(copying, true);
        }
        self.observe();
    }

    fn path_error(&self, path: usize, writes: bool) -> Result<(), i32> {
        match self.paths[path] {
            NodePath { is_fenced: true, .. } if writes => Err(libc::EBADE),
            NodePath { is_up: false, .. } => Err(libc::EIO),
            NodePath { .. } => Ok(()),
        }
    }

    fn fails(&mut self) -> bool {
        self.fails > 0 && self.rng.u32(0..self.fails) == 0
    }

    /// I3, I4: a write goes to the block of the file for which it was meant, and which may be written directly.
    fn check_target(&mut self, at: usize, value: u64) {
        let is_home = |block: usize| {
            self.filesystem.own(block) == Some(at)
                && self.filesystem.is_true(block, Lease::ReadWrite(at as u64))
        };
        let block = if value == 0 { self.filesystem.block_at(at) } else { Some(home_of(value)) };
        if !block.is_some_and(|block| block < BLOCKS && is_home(block)) {
            let version = version_of(value);
            self.fail(|| {
                format!("I4: a write of version {version} for block {block:?} goes to block {at} of the LUN, which is not its own")
            });
        }
    }
}

/// A node's path to the LUN.
struct LunPath {
    lun: SharedLun,
    number: usize,
}

fn torn(at: u64) -> String {
    format!("a write at byte {at} has bytes of several versions in one block")
}

impl Storage for LunPath {
    fn read(&mut self, offset: u64, target: &mut [u8]) -> Result<(), i32> {
        let lun = self.lun.lock();
        lun.path_error(self.number, false)?;
        fill(target, |number| lun.filesystem.lun[offset as usize / BLOCK as usize + number]);
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8], durable: bool) -> Result<(), i32> {
        let mut lun = self.lun.lock();
        lun.path_error(self.number, true)?;
        let first = (offset / BLOCK) as usize;
        for (at, block) in (first..).zip(bytes.chunks(BLOCK as usize)) {
            let Some(value) = value_in(block) else {
                lun.fail(|| torn(offset));
                continue;
            };
            lun.check_target(at, value);
            lun.filesystem.lun[at] = value;
            if durable {
                lun.durable[at] = value;
            }
        }
        lun.observe();
        Ok(())
    }

    fn sync(&mut self) -> Result<(), i32> {
        let mut lun = self.lun.lock();
        lun.path_error(self.number, true)?;
        if lun.fails() {
            return Err(libc::EIO);
        }
        // Not what the filesystem has in its log.
        lun.durable = lun.filesystem.lun.clone();
        Ok(())
    }
}

/// The disk's file, in one mount.
#[derive(Clone)]
struct DiskFile {
    lun: SharedLun,
    path: usize,
    mount: u64,
}

impl DiskFile {
    fn is_mounted(&self, lun: &Lun) -> bool {
        lun.mount == Some(self.mount)
    }

    fn check(&self, lun: &Lun, writes: bool) -> Result<(), i32> {
        lun.path_error(self.path, writes)?;
        if self.is_mounted(lun) { Ok(()) } else { Err(libc::EIO) }
    }
}

impl Storage for DiskFile {
    fn read(&mut self, offset: u64, target: &mut [u8]) -> Result<(), i32> {
        let lun = self.lun.lock();
        self.check(&lun, false)?;
        fill(target, |number| lun.filesystem.read(offset as usize / BLOCK as usize + number));
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8], durable: bool) -> Result<(), i32> {
        let mut lun = self.lun.lock();
        lun.path_error(self.path, true)?;
        let start = offset / BLOCK;
        let range = (start, start + bytes.len() as u64 / BLOCK);
        let needs_space = lun.filesystem.needs_space(range);
        if !self.is_mounted(&lun) {
            // The kernel of a node that has crashed sends what it had begun, where nothing had to be allocated.
            if needs_space {
                return Err(libc::EIO);
            }
        } else if needs_space {
            if lun.is_full {
                return Err(libc::ENOSPC);
            }
            let Lun { filesystem, rng, .. } = &mut *lun;
            let copying = filesystem.begin(range, false, rng);
            lun.commit_copies(copying, false);
        }
        for (block, bytes) in (start..).zip(bytes.chunks(BLOCK as usize)) {
            let Some(value) = value_in(bytes) else {
                lun.fail(|| torn(offset));
                continue;
            };
            if value != 0 && home_of(value) as u64 != block {
                lun.fail(|| format!("version {} goes to block {block} of the file", version_of(value)));
            }
            lun.filesystem.write((block, block + 1), value);
        }
        if durable {
            lun.sync();
        }
        lun.observe();
        Ok(())
    }

    fn sync(&mut self) -> Result<(), i32> {
        let mut lun = self.lun.lock();
        self.check(&lun, true)?;
        lun.sync();
        Ok(())
    }
}

/// The same, for what blocks.
struct Work {
    file: DiskFile,
    /// A change gets a file. Those of the simulation do not use it.
    null: File,
}

fn blocks((start, end): Range) -> Range {
    (start / BLOCK, end / BLOCK)
}

impl Work {
    /// Makes everything durable; one piece of work in so many fails.
    fn sync(&self, lun: &mut Lun) -> Result<(), IoError> {
        let failed = |errno| IoError::from_errno(errno, "the simulated filesystem");
        self.file.check(lun, true).map_err(failed)?;
        if lun.fails() {
            return Err(failed(libc::EIO));
        }
        if !lun.planted.has(Bug::GrantBeforeCommit) {
            lun.sync();
        }
        Ok(())
    }

    fn layout(lun: &Lun, range: Range) -> Vec<Piece> {
        let layout = lun.filesystem.layout(blocks(range));
        let layout = if lun.planted.has(Bug::GrantShared) { shared_as_own(layout) } else { layout };
        let layout = match lun.planted.has(Bug::GrantUnwritten) {
            true => lun.filesystem.unwritten_as_written(layout),
            false => layout,
        };
        layout.into_iter().map(in_bytes).collect()
    }
}

fn in_bytes(Piece { start, end, lease }: Piece) -> Piece {
    let lease = match lease {
        Lease::ReadWrite(at) => Lease::ReadWrite(at * BLOCK),
        Lease::ReadOnly(at) => Lease::ReadOnly(at * BLOCK),
        other => other,
    };
    Piece { start: start * BLOCK, end: end * BLOCK, lease }
}

impl FileWork for Work {
    fn path(&self) -> &Path {
        Path::new("disk")
    }

    fn commit(&self, ranges: &[Range]) -> Vec<Layout> {
        let mut lun = self.file.lun.lock();
        let synced = self.sync(&mut lun);
        ranges.iter().map(|range| synced.map(|()| Work::layout(&lun, *range))).collect()
    }

    fn look(&self, range: Range) -> Layout {
        let mut lun = self.file.lun.lock();
        self.sync(&mut lun)?;
        Ok(Work::layout(&lun, range))
    }

    /// What this filesystem begins, it ends.
    fn settle(&self, _: Range, around: Range) -> Layout {
        self.look(around)
    }

    fn distrust(&self) {}

    fn punch(&self, range: Range, around: Range) -> Layout {
        let mut lun = self.file.lun.lock();
        self.file.check(&lun, true).map_err(|errno| IoError::from_errno(errno, "freeing"))?;
        let Lun { filesystem, rng, .. } = &mut *lun;
        filesystem.punch(blocks(range), 0, rng);
        lun.observe();
        self.sync(&mut lun)?;
        Ok(Work::layout(&lun, around))
    }

    fn allocate(&self, range: Range) -> Result<Option<Vec<Piece>>, IoError> {
        let mut lun = self.file.lun.lock();
        self.file.check(&lun, true).map_err(|errno| IoError::from_errno(errno, "allocating"))?;
        if lun.is_full {
            return Ok(None);
        }
        let (start, end) = blocks(range);
        // Some of it, when that fails.
        let fails = lun.fails();
        let until = if fails { lun.rng.u64(start..end) } else { end };
        let Lun { filesystem, rng, .. } = &mut *lun;
        let copying = filesystem.begin_allocation((start, until), rng);
        lun.commit_copies(copying, false);
        lun.observe();
        if fails {
            return Err(IoError::from_errno(libc::ENOSPC, "allocating"));
        }
        self.sync(&mut lun)?;
        Ok(Some(Work::layout(&lun, range)))
    }

    fn change(&self, change: Change) -> Result<(), IoError> {
        let failed = |errno| IoError::from_errno(errno, "changing");
        self.file.check(&self.file.lun.lock(), true).map_err(failed)?;
        change(&self.null).map_err(|error| failed(error.raw_os_error().unwrap_or(libc::EIO)))?;
        self.sync(&mut self.file.lun.lock())
    }

    fn is_usable(&self) -> bool {
        let lun = self.file.lun.lock();
        self.file.check(&lun, true).is_ok()
    }
}
