//! The heartbeat area on a LUN: where it is, and reading and writing it past every cache.
//!
//! It is at a fixed place, which every node can find without the filesystem: behind the filesystem's end, where a LUN that Weir formats has
//! space for it; otherwise the blocks of a file that nothing moves ([`in_file`]).
//!
//! Everything here blocks, for as long as the LUN does not answer.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use weir_block::zeroes::is_zero;

use super::layout::{
    AREA, BLOCK, Beat, Block, Head, SLOTS, Slot, VERSION, VolumeId, decode_head, decode_slot, encode_beat,
    encode_head,
};
use crate::lun::filesystem::error::REFUSED;
use crate::lun::filesystem::pages::Pages;
use crate::lun::filesystem::space::{Zeroes, allocate};
use crate::lun::filesystem::{Extent, FilesystemError, Mounted, Superblock, extents};
use crate::lun::leases::Lease;

/// The area begins at a multiple of this behind a filesystem, in bytes.
const ALIGNMENT: u64 = 1 << 20;
/// The file that holds the area where nothing is free behind the filesystem.
pub const FILE: &str = ".weir-heartbeat";

/// The reason why an area cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HeartbeatError {
    /// The system's answer.
    #[error("cannot {action} the heartbeat area of {} at byte {offset}: {source}", .lun.display())]
    System {
        /// The verb.
        action: &'static str,
        /// The LUN.
        lun: PathBuf,
        /// First byte of the area.
        offset: u64,
        /// Why.
        source: io::Error,
    },
    /// There is no area of this volume.
    #[error("{} has no heartbeat area of this volume at byte {offset}: {}", .lun.display(), describe(.found))]
    NoArea {
        /// The LUN.
        lun: PathBuf,
        /// Where it should be.
        offset: u64,
        /// What is there.
        found: Head,
    },
    /// The file for the area cannot be made, or its blocks cannot be found.
    #[error(transparent)]
    Filesystem(#[from] FilesystemError),
    /// The filesystem gave the file blocks in several places.
    #[error(
        "{} has no {AREA} bytes in one piece for {FILE}: the filesystem is full or fragmented; free some space, and try again",
        .lun.display()
    )]
    Fragmented {
        /// The LUN.
        lun: PathBuf,
    },
}

impl HeartbeatError {
    /// The LUN refuses this host's I/O: another node has fenced it. `EBADE` is a reservation's conflict; `EPERM` and `EROFS` a device that
    /// was set read-only.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        let errno = match self {
            HeartbeatError::System { source, .. } => source.raw_os_error(),
            _ => None,
        };
        errno.is_some_and(|errno| REFUSED.contains(&errno))
    }
}

fn describe(found: &Head) -> String {
    match found {
        Head::Zeroes => "there are only zeroes".into(),
        Head::Area(volume) => format!("there is that of volume {volume}"),
        Head::Newer(version) => {
            format!("it has layout version {version}, and this program knows version {VERSION}; update it")
        }
        Head::Damaged => "its first block is damaged".into(),
        Head::Other => "something else is there".into(),
    }
}

/// The place of the area on a LUN of `size` bytes behind its filesystem, if there is space: its first byte.
#[must_use]
pub fn behind(filesystem: &Superblock, size: u64) -> Option<u64> {
    let start = filesystem.size.checked_next_multiple_of(ALIGNMENT)?;
    (start.checked_add(AREA as u64)? <= size).then_some(start)
}

/// The volume whose area is at a place of a LUN, if there is one.
///
/// # Errors
/// [`HeartbeatError::System`].
pub fn volume_at(lun: &Path, offset: u64) -> Result<Option<VolumeId>, HeartbeatError> {
    match Area::at(lun, offset, VolumeId([0; 16]))?.head()? {
        Head::Area(found) => Ok(Some(found)),
        Head::Zeroes | Head::Newer(_) | Head::Damaged | Head::Other => Ok(None),
    }
}

/// Whether a new area may take a place of a LUN: only zeroes are there, or the area of a former volume.
///
/// # Errors
/// [`HeartbeatError::System`].
pub fn is_free(lun: &Path, offset: u64) -> Result<bool, HeartbeatError> {
    let mut area = Area::at(lun, offset, VolumeId([0; 16]))?;
    Ok(match area.head()? {
        Head::Area(_) | Head::Damaged => true,
        Head::Zeroes => is_zero(area.pages.bytes()),
        Head::Newer(_) | Head::Other => false,
    })
}

/// The place of the area in a file of a mounted filesystem: the first byte on the LUN. Makes the file if there is none. Nothing moves its
/// blocks: only the coordinator reaches the filesystem.
///
/// # Errors
/// [`HeartbeatError::Filesystem`], [`HeartbeatError::Fragmented`].
pub fn in_file(mounted: &Mounted) -> Result<u64, HeartbeatError> {
    let path = mounted.lun().join(FILE);
    let file = match mounted.open(FILE) {
        Ok(file) => file,
        Err(error) if error.is_absent() => return make_file(mounted, &path),
        Err(error) => return Err(error.into()),
    };
    let found = extents(&file, 0..AREA as u64);
    let found = found.map_err(FilesystemError::system("look at the extents of", &path))?;
    match place(&found) {
        Some(place) => Ok(place),
        // A crash came between its creation and its use.
        None if is_unused(&file).map_err(FilesystemError::system("read", &path))? => {
            drop(file);
            mounted.remove(FILE)?;
            make_file(mounted, &path)
        }
        None => Err(HeartbeatError::Fragmented { lun: mounted.lun().to_path_buf() }),
    }
}

fn make_file(mounted: &Mounted, path: &Path) -> Result<u64, HeartbeatError> {
    let file = mounted.create(FILE)?;
    let made = allocate(&file, path, 0..AREA as u64, &Zeroes::default());
    let found = made.map_err(HeartbeatError::from).and_then(|found| {
        place(&found).ok_or_else(|| HeartbeatError::Fragmented { lun: mounted.lun().to_path_buf() })
    });
    if found.is_err() {
        // Another attempt begins anew.
        mounted.remove(FILE)?;
    }
    mounted.sync()?;
    found
}

/// The place on the LUN of an area whose file has these extents: they are one piece of written blocks.
fn place(found: &[Extent]) -> Option<u64> {
    let first = found.first().filter(|extent| extent.start == 0 && extent.end() >= AREA as u64)?;
    match first.lease() {
        Lease::ReadWrite(at) => Some(at),
        _ => None,
    }
}

/// Whether a file has nothing but zeroes where the area would be.
fn is_unused(file: &File) -> io::Result<bool> {
    let mut pages = Pages::new(AREA);
    let mut read = 0;
    while read < AREA {
        match file.read_at(&mut pages.bytes_mut()[read..], read as u64)? {
            0 => break,
            // Direct reads go on at whole blocks.
            bytes if bytes.is_multiple_of(BLOCK) => read += bytes,
            bytes => {
                read += bytes;
                break;
            }
        }
    }
    Ok(is_zero(&pages.bytes()[..read]))
}

/// An open area.
#[derive(Debug)]
pub struct Area {
    file: File,
    lun: PathBuf,
    offset: u64,
    volume: VolumeId,
    pages: Pages,
}

impl Area {
    /// Makes an area where there are zeroes, or takes the one of this volume that is there.
    ///
    /// # Errors
    /// [`HeartbeatError::System`]; [`HeartbeatError::NoArea`]: something else is there, and stays.
    pub fn create(lun: &Path, offset: u64, volume: VolumeId) -> Result<Area, HeartbeatError> {
        let mut area = Area::at(lun, offset, volume)?;
        match area.head()? {
            Head::Area(found) if found == volume => Ok(area),
            Head::Zeroes if area.slots()?.iter().all(|slot| *slot == Slot::Empty) => {
                area.write(0, &encode_head(volume), "make")?;
                Ok(area)
            }
            // Behind a first block of zeroes.
            Head::Zeroes => Err(area.no_area(Head::Other)),
            found => Err(area.no_area(found)),
        }
    }

    /// Opens the area of a volume.
    ///
    /// # Errors
    /// [`HeartbeatError::System`], [`HeartbeatError::NoArea`].
    pub fn open(lun: &Path, offset: u64, volume: VolumeId) -> Result<Area, HeartbeatError> {
        let mut area = Area::at(lun, offset, volume)?;
        match area.head()? {
            Head::Area(found) if found == volume => Ok(area),
            found => Err(area.no_area(found)),
        }
    }

    fn at(lun: &Path, offset: u64, volume: VolumeId) -> Result<Area, HeartbeatError> {
        let mut options = OpenOptions::new();
        // Durable: the last epoch counts after a power failure.
        options.read(true).write(true).custom_flags(libc::O_DIRECT | libc::O_DSYNC | libc::O_CLOEXEC);
        let file = options.open(lun).map_err(failed("open", lun, offset))?;
        Ok(Area { file, lun: lun.to_path_buf(), offset, volume, pages: Pages::new(AREA) })
    }

    /// Reads all slots.
    ///
    /// # Errors
    /// [`HeartbeatError::System`]; [`HeartbeatError::is_refusal`].
    pub fn slots(&mut self) -> Result<Vec<Slot>, HeartbeatError> {
        self.read()?;
        let (blocks, _) = self.pages.bytes().as_chunks::<BLOCK>();
        Ok(blocks[1..].iter().map(|block| decode_slot(self.volume, block)).collect())
    }

    /// Writes a heartbeat, to the slot of its node. Two nodes may have one slot: each writes over the other's, and finds that out when it
    /// looks.
    ///
    /// # Errors
    /// [`HeartbeatError::System`]; [`HeartbeatError::is_refusal`]. It may have been written, or be written later.
    pub fn beat(&mut self, beat: &Beat) -> Result<(), HeartbeatError> {
        self.write(1 + slot_of(beat.node), &encode_beat(self.volume, beat), "write to")
    }

    fn head(&mut self) -> Result<Head, HeartbeatError> {
        self.read()?;
        let (blocks, _) = self.pages.bytes().as_chunks::<BLOCK>();
        Ok(decode_head(&blocks[0]))
    }

    fn read(&mut self) -> Result<(), HeartbeatError> {
        let (file, pages) = (&self.file, &mut self.pages);
        file.read_exact_at(pages.bytes_mut(), self.offset).map_err(failed("read", &self.lun, self.offset))
    }

    fn write(&mut self, block: usize, content: &Block, action: &'static str) -> Result<(), HeartbeatError> {
        let page = &mut self.pages.bytes_mut()[..BLOCK];
        page.copy_from_slice(content);
        let at = self.offset + (block * BLOCK) as u64;
        self.file.write_all_at(page, at).map_err(failed(action, &self.lun, self.offset))
    }

    fn no_area(&self, found: Head) -> HeartbeatError {
        HeartbeatError::NoArea { lun: self.lun.clone(), offset: self.offset, found }
    }
}

/// The slot of a node: the numbers of nodes may be of any kind, so their bits are mixed (Fibonacci hashing).
fn slot_of(node: u64) -> usize {
    ((node.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) % SLOTS as u64) as usize
}

fn failed(action: &'static str, lun: &Path, offset: u64) -> impl FnOnce(io::Error) -> HeartbeatError {
    move |source| HeartbeatError::System { action, lun: lun.to_path_buf(), offset, source }
}
