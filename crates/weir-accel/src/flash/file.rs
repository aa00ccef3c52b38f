//! The file under a flash device: a file or block device of the system, or a simulated file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use weir_block::SharedFile;
use weir_block::sim::MediumFile;
use weir_block::zeroes::is_zero;

use super::error::FlashError;

/// Bytes that are read or written at once while a file is looked through or filled.
const CHUNK: usize = 4 << 20;

/// For the plain blocking calls of a start, and to be shared with the reactors for everything after it.
#[derive(Debug)]
pub(super) enum DeviceFile {
    System {
        /// For the blocking calls.
        file: File,
        /// For frames and slot headers, with direct I/O where there is such a thing. Locked: no other process opens the device
        /// meanwhile.
        direct: File,
    },
    Simulated(MediumFile),
}

impl DeviceFile {
    /// Opens the device at `path`. A file that does not exist is made, `size` bytes long and written through once.
    pub(super) fn open(path: &Path, size: u64) -> Result<DeviceFile, FlashError> {
        let system = |source| FlashError::System { path: path.to_owned(), source };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(system)?;
        let direct = open_direct(path).map_err(system)?;
        // Locks the description that frames are written through, and no other: the kernel holds it as long as a write is in
        // flight, also for a process that was killed. Such a write would overwrite the next process's data.
        match direct.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => return Err(FlashError::InUse(path.to_owned())),
            Err(std::fs::TryLockError::Error(source)) => return Err(system(source)),
        }
        let found = length(&file).map_err(system)?;
        if is_unfinished(&file, found, size).map_err(system)? {
            fill(&file, size).map_err(system)?;
            sync_directory(path).map_err(system)?;
        }
        Ok(DeviceFile::System { file, direct })
    }

    /// Its length in bytes.
    pub(super) fn length(&self) -> io::Result<u64> {
        match self {
            DeviceFile::System { file, .. } => length(file),
            DeviceFile::Simulated(file) => Ok(file.length()),
        }
    }

    /// Reads the whole of `target`.
    pub(super) fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            DeviceFile::System { file, .. } => file.read_exact_at(target, offset),
            DeviceFile::Simulated(file) => file.read_exact_at(target, offset),
        }
    }

    /// Writes all of `bytes`.
    pub(super) fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        match self {
            DeviceFile::System { file, .. } => file.write_all_at(bytes, offset),
            DeviceFile::Simulated(file) => file.write_all_at(bytes, offset),
        }
    }

    /// Makes all completed writes durable.
    pub(super) fn sync_data(&self) -> io::Result<()> {
        match self {
            DeviceFile::System { file, .. } => file.sync_data(),
            DeviceFile::Simulated(file) => file.sync_data(),
        }
    }

    /// Another descriptor, for a reactor. Opens nothing.
    pub(super) fn share(&self) -> io::Result<SharedFile> {
        match self {
            DeviceFile::System { direct, .. } => direct.try_clone().map(SharedFile::new),
            DeviceFile::Simulated(file) => Ok(file.shared()),
        }
    }
}

/// Opens a device for direct I/O, where there is such a thing.
fn open_direct(path: &Path) -> io::Result<File> {
    let open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    open(libc::O_DIRECT).or_else(|error| match error.raw_os_error() {
        // A file in memory; good for tests only.
        Some(libc::EINVAL) => open(0),
        _ => Err(error),
    })
}

fn length(file: &File) -> io::Result<u64> {
    let metadata = file.metadata()?;
    if metadata.file_type().is_block_device() {
        use std::io::Seek;
        return (&mut &*file).seek(io::SeekFrom::End(0));
    }
    Ok(metadata.len())
}

/// Whether this is a new file, or one whose process ended while it filled the file: shorter than it should be, and nothing
/// but zeroes. Formatted as it is, it would have fewer slots than the operator requested, or none.
fn is_unfinished(file: &File, found: u64, size: u64) -> io::Result<bool> {
    if found >= size || !file.metadata()?.file_type().is_file() {
        return Ok(false);
    }
    let mut chunk = vec![0u8; CHUNK];
    let mut at = 0;
    while at < found {
        let read = file.read_at(&mut chunk, at)?;
        if read == 0 || !is_zero(&chunk[..read]) {
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
    let zeroes = vec![0u8; CHUNK];
    let mut at = 0;
    while at < size {
        let part = (size - at).min(zeroes.len() as u64);
        file.write_all_at(&zeroes[..part as usize], at)?;
        at += part;
    }
    file.sync_all()
}
