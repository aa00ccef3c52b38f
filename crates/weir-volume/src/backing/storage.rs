//! The kind of storage at a path, and its requirements.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use super::device_queue;
use super::filesystem::Filesystem;
use super::options::{BackingOptions, EngineChoice};
use crate::error::VolumeError;

/// Memory alignment that every gathered piece has (see `weir_block::Destage`), in bytes.
const PIECE_ALIGNMENT: u32 = 512;

/// The kind of storage of a backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StorageKind {
    /// A file on a filesystem with a device or server.
    File,
    /// A block device.
    Device,
    /// A file in this host's memory (tmpfs, ramfs).
    Memory,
}

/// An opened file or device, before its first request.
pub(super) struct Storage {
    pub file: File,
    pub kind: StorageKind,
    /// Bypasses the page cache.
    pub direct: bool,
    /// Length of the file or device, in bytes.
    pub length: u64,
    /// Smallest unit of an offset or length, in bytes: 512 or 4096.
    pub logical_block: u32,
    /// Smallest write without a penalty, in bytes.
    pub preferred_block: u32,
    /// Whether to try `FALLOC_FL_PUNCH_HOLE`.
    pub punches: bool,
    /// Whether to try `FALLOC_FL_ZERO_RANGE`.
    pub zeroes: bool,
    /// Requests can start without blocking. Otherwise each occupies a thread of the ring (FUSE, NFS).
    pub begins_at_once: bool,
    /// A disk with a mechanism and no write cache.
    pub waits_for_rotation: bool,
    /// Device and inode of the opened file.
    pub identity: (u64, u64),
}

impl Storage {
    /// Blocks while the storage does not answer.
    pub fn open(path: &Path, options: &BackingOptions) -> Result<Storage, VolumeError> {
        let failed = |error| VolumeError::from_io("opening", path, error);
        let not_a_backing = || VolumeError::NotABacking(path.to_path_buf());
        // In a volume, a link could lead anywhere.
        let in_volume = options.volume.is_some();
        // Check the type before opening: opening a FIFO would block, opening a tape would rewind it.
        let metadata = if in_volume { std::fs::symlink_metadata(path) } else { std::fs::metadata(path) };
        let device = is_device(&metadata.map_err(failed)?).ok_or_else(not_a_backing)?;
        if device && options.writable {
            refuse_if_claimed(path)?;
        }
        let flags = if in_volume { libc::O_NOFOLLOW } else { 0 };
        let opened = OpenOptions::new().read(true).write(options.writable).custom_flags(flags).open(path);
        let file = opened.map_err(|error| match error.raw_os_error() {
            Some(libc::ELOOP) => not_a_backing(),
            _ => failed(error),
        })?;
        // The path may lead to something else by now.
        let metadata = file.metadata().map_err(failed)?;
        if is_device(&metadata) != Some(device) {
            return Err(not_a_backing());
        }
        do_not_record_access_times(&file);
        // Before any request: a successor that sees no mark assumes that no request is in flight.
        if let Some(mark) = options.mark {
            mark.set(&file).map_err(|error| VolumeError::from_io("marking", path, error))?;
        }
        let kind = if device { StorageKind::Device } else { kind_of(&file).map_err(failed)? };
        // Synchronous writes use borrowed memory of any alignment.
        let cached = kind == StorageKind::Memory || options.engine == EngineChoice::Inline;
        let alignment = if cached { None } else { direct(&file, kind).map_err(failed)? };
        let able = alignment.unwrap_or(512);
        let logical_block = choose_logical_block(path, options.logical_block, able)?;
        let length = length(file.as_raw_fd()).map_err(failed)?;
        let (punches, zeroes) = if options.writable { zeroing(kind, &metadata) } else { (false, false) };
        let physical = if device { physical_block(file.as_raw_fd()) } else { 4096 };
        Ok(Storage {
            kind,
            direct: alignment.is_some(),
            length,
            logical_block,
            preferred_block: physical.clamp(4096, 64 << 10),
            punches,
            zeroes,
            begins_at_once: begins_at_once(&file, kind).map_err(failed)?,
            waits_for_rotation: device_queue::waits_for_rotation(&file),
            identity: (metadata.dev(), metadata.ino()),
            file,
        })
    }
}

/// Reads of a disk change no inode. The kernel refuses it to users who are neither root nor the file's owner; for them it goes on
/// recording.
fn do_not_record_access_times(file: &File) {
    if let Ok(flags) = rustix::fs::fcntl_getfl(file) {
        let _refused = rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::NOATIME);
    }
}

/// Whether this is a block device or a regular file; `None` if it is neither.
fn is_device(metadata: &std::fs::Metadata) -> Option<bool> {
    let device = metadata.file_type().is_block_device();
    (device || metadata.is_file()).then_some(device)
}

/// The length of a file or device, in bytes.
pub(super) fn length(fd: RawFd) -> io::Result<u64> {
    // SAFETY: no pointers. Also works for block devices, where `st_size` is zero.
    let end = unsafe { libc::lseek(fd, 0, libc::SEEK_END) };
    u64::try_from(end).map_err(|_| io::Error::last_os_error())
}

/// A device with a filesystem mounted, or taken by LVM or RAID, refuses an exclusive open. We do not stay exclusive:
/// the next owner must be able to open the device before a former one detects that it is fenced (P2).
fn refuse_if_claimed(path: &Path) -> Result<(), VolumeError> {
    const ATTEMPTS: u32 = 5;
    for attempt in 1..=ATTEMPTS {
        match OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path) {
            Ok(_) => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                // Another owner may be testing at this moment; retry.
                if attempt < ATTEMPTS {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            Err(error) => return Err(VolumeError::from_io("opening", path, error)),
        }
    }
    Err(VolumeError::Busy(path.to_path_buf()))
}

fn kind_of(file: &File) -> io::Result<StorageKind> {
    Ok(if Filesystem::of(file)? == Filesystem::Memory { StorageKind::Memory } else { StorageKind::File })
}

/// Switches to direct I/O. The unit for offsets and lengths in bytes, or `None` without suitable direct I/O: then all I/O uses
/// the page cache, which a flush writes out.
fn direct(file: &File, kind: StorageKind) -> io::Result<Option<u32>> {
    let (memory, offset) = match direct_alignment(file)? {
        Some((0, _) | (_, 0)) => return Ok(None),
        Some(alignment) => alignment,
        None if kind == StorageKind::Device => {
            let block = logical_block(file.as_raw_fd());
            (block, block)
        }
        None => (PIECE_ALIGNMENT, 0),
    };
    if memory > PIECE_ALIGNMENT {
        return Ok(None);
    }
    let flags = rustix::fs::fcntl_getfl(file)?;
    match rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::DIRECT) {
        Ok(()) if offset == 0 => Ok(Some(probe_offset_unit(file))),
        Ok(()) => Ok(Some(offset)),
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Alignment of memory and of offsets as the filesystem reports it (Linux 6.1 and later); zero means no direct I/O.
fn direct_alignment(file: &File) -> io::Result<Option<(u32, u32)>> {
    let mask = rustix::fs::StatxFlags::from_bits_retain(libc::STATX_DIOALIGN);
    let stat = rustix::fs::statx(file, "", rustix::fs::AtFlags::EMPTY_PATH, mask)?;
    let stated = stat.stx_mask & libc::STATX_DIOALIGN != 0;
    Ok(stated.then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align)))
}

/// If the filesystem does not report it, one read off a 4096-byte boundary shows it.
fn probe_offset_unit(file: &File) -> u32 {
    #[repr(align(4096))]
    struct Aligned([u8; 512]);
    let mut sector = Aligned([0; 512]);
    // SAFETY: 512 writable bytes.
    let read = unsafe { libc::pread(file.as_raw_fd(), sector.0.as_mut_ptr().cast(), 512, 512) };
    if read < 0 { 4096 } else { 512 }
}

fn choose_logical_block(path: &Path, asked: Option<u32>, able: u32) -> Result<u32, VolumeError> {
    let asked = asked.unwrap_or(if able <= 512 { 512 } else { 4096 });
    if !matches!(asked, 512 | 4096) || asked < able {
        return Err(VolumeError::LogicalBlock { path: path.to_path_buf(), asked, able });
    }
    Ok(asked)
}

/// Whether to try punching holes, and zeroing ranges without writing zeroes. Files are not tested here: `fallocate` waits for all
/// direct I/O to the file, even for a former owner's that is stuck behind a slow device. The backing does not repeat an operation
/// that fails as unsupported.
fn zeroing(kind: StorageKind, metadata: &std::fs::Metadata) -> (bool, bool) {
    match kind {
        // Without hardware support the kernel would write the zeroes itself, which is slow and cannot be interrupted.
        StorageKind::Device => {
            let offloads = device_queue::attribute(metadata.rdev(), "write_zeroes_max_bytes")
                .and_then(|most| most.parse::<u64>().ok())
                .is_some_and(|most| most > 0);
            (offloads, offloads)
        }
        StorageKind::File => (true, true),
        StorageKind::Memory => (true, false),
    }
}

/// Whether a request starts without blocking: on block devices and on local filesystems that honour `RWF_NOWAIT`. Others accept
/// the flag and block nevertheless (FUSE, with more than a dozen requests in flight).
fn begins_at_once(file: &File, kind: StorageKind) -> io::Result<bool> {
    if kind != StorageKind::File {
        return Ok(true);
    }
    Ok(matches!(Filesystem::of(file)?, Filesystem::Ext4 | Filesystem::Xfs | Filesystem::Btrfs))
}

fn logical_block(fd: RawFd) -> u32 {
    let mut size: libc::c_int = 0;
    // SAFETY: BLKSSZGET writes one int.
    let answer = unsafe { libc::ioctl(fd, libc::BLKSSZGET, &raw mut size) };
    if answer < 0 { 4096 } else { size as u32 }
}

fn physical_block(fd: RawFd) -> u32 {
    let mut size: libc::c_uint = 0;
    // SAFETY: BLKPBSZGET writes one unsigned int.
    let answer = unsafe { libc::ioctl(fd, libc::BLKPBSZGET, &raw mut size) };
    if answer < 0 { 4096 } else { size }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn reads_do_not_change_access_times() {
        let kept = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        kept.as_file().set_len(1 << 20).unwrap();
        // Also a filesystem mounted with relatime would record the next access.
        let times = std::fs::FileTimes::new().set_accessed(SystemTime::UNIX_EPOCH);
        kept.as_file().set_times(times).unwrap();

        let options = BackingOptions { engine: EngineChoice::Inline, ..BackingOptions::default() };
        let storage = Storage::open(kept.path(), &options).unwrap();
        storage.file.read_exact_at(&mut [0; 4096], 0).unwrap();

        let accessed = || std::fs::metadata(kept.path()).unwrap().accessed().unwrap();
        assert_eq!(accessed(), SystemTime::UNIX_EPOCH);
        File::open(kept.path()).unwrap().read_exact_at(&mut [0; 4096], 0).unwrap();
        assert_ne!(
            accessed(),
            SystemTime::UNIX_EPOCH,
            "this filesystem records no access: the test shows nothing"
        );
    }
}
