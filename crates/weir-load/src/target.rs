//! Targets of a load, and whether a load may write to them.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use weir_block::size::{Size, format_size, parse_size};
use weir_block::zeroes::first_nonzero;
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;

use crate::error::LoadError;
use crate::io_engine::IoEngine;
use crate::workload::Workload;

/// Size of the null target when none is given.
const NULL_SIZE: u64 = 1 << 30;

/// Number of pieces of a target that are sampled before it is written, and bytes of each. Partition tables and filesystems have
/// their signatures in the first and the last piece.
const SAMPLES: u64 = 64;
const SAMPLE: u64 = 64 << 10;

/// The target of a load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Nothing: `null` or `null:<size>`.
    Null {
        /// Its nominal size, in bytes.
        size: u64,
    },
    /// A file or a block device.
    Path(PathBuf),
    /// An NBD export.
    Nbd(Uri),
}

impl FromStr for Target {
    type Err = LoadError;

    /// `null`, `null:1G`, `nbd://…`, `nbd+unix://…`, or else a path.
    fn from_str(text: &str) -> Result<Target, LoadError> {
        if text == "null" {
            return Ok(Target::Null { size: NULL_SIZE });
        }
        if let Some(size) = text.strip_prefix("null:") {
            let size = parse_size(size).map_err(|_| LoadError::Null(text.into()))?;
            return Ok(Target::Null { size });
        }
        if text.contains("://") {
            return Ok(Target::Nbd(text.parse()?));
        }
        Ok(Target::Path(text.into()))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Null { size: NULL_SIZE } => f.write_str("null"),
            Target::Null { size } => write!(f, "null:{}", Size(*size)),
            Target::Path(path) => write!(f, "{}", path.display()),
            Target::Nbd(uri) => write!(f, "{uri}"),
        }
    }
}

impl Target {
    /// Checks the target: returns its size in bytes, and (when `workload` writes) checks whether it may be written. Creates a
    /// missing file when the workload writes and gives a size.
    ///
    /// # Errors
    /// It cannot be opened, holds data and `destroy` is not set, or does not fit the workload.
    pub fn prepare(&self, workload: &Workload, destroy: bool) -> Result<u64, LoadError> {
        workload.validate()?;
        if !matches!(self, Target::Path(_)) {
            let asked = [(workload.engine == IoEngine::Psync, "engine psync"), (workload.poll, "polling")];
            if let Some((_, what)) = asked.into_iter().find(|(asked, _)| *asked) {
                return Err(LoadError::NotAFile { target: self.to_string(), what });
            }
        }
        match self {
            Target::Null { size } => Ok(*size),
            Target::Path(path) => self.prepare_path(path, workload, destroy),
            Target::Nbd(uri) => self.prepare_nbd(uri, workload, destroy),
        }
    }

    /// Checks, without a change of anything, that the target has no data that a writing load would overwrite. A missing file has
    /// none.
    ///
    /// # Errors
    /// [`LoadError::NotEmpty`]; or the target cannot be read.
    pub fn refuse_data(&self) -> Result<(), LoadError> {
        let found = match self {
            Target::Null { .. } => None,
            Target::Nbd(uri) => {
                let mut client = NbdClient::connect(uri)?;
                let found = data_in_export(&mut client)?;
                client.disconnect();
                found
            }
            Target::Path(path) => {
                let failed =
                    |what: &'static str| move |source| LoadError::File { path: path.into(), what, source };
                let file = match File::open(path) {
                    Ok(file) => file,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                    Err(error) => return Err(failed("cannot open")(error)),
                };
                let (is_file, size) = examine(path, &file)?;
                data_in(&file, is_file, size).map_err(failed("cannot examine"))?
            }
        };
        found.map_or(Ok(()), |found| Err(LoadError::NotEmpty { target: self.to_string(), found }))
    }

    fn prepare_path(&self, path: &Path, workload: &Workload, destroy: bool) -> Result<u64, LoadError> {
        let failed = |what: &'static str| move |source| LoadError::File { path: path.into(), what, source };
        let writes = workload.access.writes();
        let wanted = workload.size.map(|size| workload.offset.0 + size.0);
        // O_EXCL on a device: not while it is mounted or part of another device (open(2)). Files ignore it.
        let exclusive = if writes { libc::O_EXCL } else { 0 };
        let file = match OpenOptions::new().read(true).write(writes).custom_flags(exclusive).open(path) {
            Ok(file) => file,
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                return Err(failed("mounted or held by another device, unmount or release it first:")(error));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && writes => {
                let wanted = wanted.ok_or_else(|| LoadError::NoSize(path.into()))?;
                let file = OpenOptions::new().read(true).write(true).create_new(true).open(path);
                file.and_then(|file| file.set_len(wanted)).map_err(failed("cannot create"))?;
                return Ok(wanted);
            }
            Err(error) => return Err(failed("cannot open")(error)),
        };
        let (is_file, size) = examine(path, &file)?;
        if !writes {
            return Ok(size);
        }
        if !destroy && let Some(found) = data_in(&file, is_file, size).map_err(failed("cannot examine"))? {
            return Err(LoadError::NotEmpty { target: self.to_string(), found });
        }
        match wanted {
            Some(wanted) if is_file && wanted > size => {
                file.set_len(wanted).map_err(failed("cannot extend"))?;
                Ok(wanted)
            }
            _ => Ok(size),
        }
    }

    fn prepare_nbd(&self, uri: &Uri, workload: &Workload, destroy: bool) -> Result<u64, LoadError> {
        let mut client = NbdClient::connect(uri)?;
        let export = client.export().clone();
        let (minimum, maximum) = (u64::from(export.minimum_block), u64::from(export.maximum_block));
        let (block_size, target) = (workload.block_size, self.to_string());
        if !workload.fits(minimum, maximum) {
            return Err(LoadError::BlockSize {
                target,
                minimum: Size(minimum),
                maximum: Size(maximum),
                block_size,
            });
        }
        if workload.access.writes() {
            if export.is_read_only() {
                return Err(LoadError::ReadOnly(target));
            }
            if workload.fua && !export.can_fua() {
                return Err(LoadError::NoFua(target));
            }
            if workload.flush_every.is_some() && !export.can_flush() {
                return Err(LoadError::NoFlush(target));
            }
            if !destroy && let Some(found) = data_in_export(&mut client)? {
                return Err(LoadError::NotEmpty { target, found });
            }
        }
        client.disconnect();
        Ok(export.size)
    }
}

/// Whether an open target is a file (else it is a device), and its size in bytes.
fn examine(path: &Path, file: &File) -> Result<(bool, u64), LoadError> {
    let failed = |source| LoadError::File { path: path.into(), what: "cannot examine", source };
    let kind = file.metadata().map_err(failed)?;
    match kind.file_type() {
        kind if kind.is_block_device() => Ok((false, size_of_device(file).map_err(failed)?)),
        file_type if file_type.is_file() => Ok((true, kind.len())),
        _ => Err(LoadError::NotATarget(path.into())),
    }
}

/// A description of the first data in samples of an export, if any.
fn data_in_export(client: &mut NbdClient) -> Result<Option<String>, LoadError> {
    let export = client.export();
    let alignment = u64::from(export.minimum_block).max(512);
    let size = export.size / alignment * alignment;
    sampled(size, |offset, piece| client.read(offset, piece).map_err(LoadError::from))
}

/// A description of the first data in a file or device, if any.
fn data_in(file: &File, is_file: bool, size: u64) -> io::Result<Option<String>> {
    if !is_file {
        return sampled(size, |offset, piece| file.read_exact_at(piece, offset));
    }
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)) {
        Ok(offset) => Ok(Some(format!("data from byte {offset} on, of {}", format_size(size)))),
        // Past the end: the file is empty or one hole.
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The position of the first non-zero byte in samples spread over `size` bytes.
fn sampled<E>(size: u64, mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>) -> Result<Option<String>, E> {
    let mut piece = vec![0; SAMPLE.min(size) as usize];
    let last = size - piece.len() as u64;
    for sample in 0..SAMPLES.min(last / SAMPLE + 2) {
        // Multiples of 4 KiB, the last one flush with the end.
        let spread = u128::from(last) * u128::from(sample) / u128::from(SAMPLES.min(last / SAMPLE + 2) - 1);
        let offset = if spread as u64 == last { last } else { spread as u64 / 4096 * 4096 };
        read(offset, &mut piece)?;
        if let Some(at) = first_nonzero(&piece) {
            return Ok(Some(format!("data at byte {}", offset + at as u64)));
        }
    }
    Ok(None)
}

fn size_of_device(file: &File) -> io::Result<u64> {
    /// `BLKGETSIZE64`, from `linux/fs.h`: `_IOR(0x12, 114, size_t)`.
    const BLKGETSIZE64: libc::Ioctl = 0x8008_1272_u32 as libc::Ioctl;
    let mut size = 0u64;
    // SAFETY: the call writes one u64 to a valid address.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &raw mut size) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(size) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Access;
    use std::os::unix::fs::FileExt;

    fn writes(size: Option<u64>) -> Workload {
        Workload { access: Access::RandWrite, size: size.map(Size), ..Workload::default() }
    }

    #[test]
    fn targets_are_read_and_printed() {
        for text in
            ["null", "null:4GiB", "/dev/sdz", "relative/file", "nbd+unix:///d?socket=/s", "nbd://h:1/x"]
        {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
        assert!("null:x".parse::<Target>().unwrap_err().to_string().contains("null:1G"));
        assert!("nbd+unix:///x".parse::<Target>().unwrap_err().to_string().contains("socket="));
    }

    #[test]
    fn data_is_not_overwritten_unless_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let target = Target::Path(path.clone());
        let missing = target.prepare(&writes(None), false).unwrap_err().to_string();
        assert!(missing.contains("give a size"), "{missing}");
        assert_eq!(target.prepare(&writes(Some(1 << 20)), false).unwrap(), 1 << 20, "created");
        assert_eq!(target.prepare(&writes(Some(2 << 20)), false).unwrap(), 2 << 20, "empty and extended");
        File::options().write(true).open(&path).unwrap().write_all_at(b"precious", 1 << 19).unwrap();
        let refused = target.prepare(&writes(None), false).unwrap_err().to_string();
        assert!(refused.contains("holds data") && refused.contains("--destroy"), "{refused}");
        assert_eq!(target.prepare(&writes(None), true).unwrap(), 2 << 20);
        assert_eq!(target.prepare(&Workload::default(), false).unwrap(), 2 << 20, "reading does no harm");
        let other = Target::Path(directory.path().into()).prepare(&Workload::default(), false).unwrap_err();
        assert!(other.to_string().contains("neither a file nor a block device"), "{other}");
    }

    #[test]
    fn samples_reach_both_ends() {
        for size in [1u64, 512, 65536, 65537, 1 << 20, (1 << 30) + 512] {
            for data_at in [0, size - 1] {
                let found = sampled(size, |offset, piece| {
                    assert!(offset + piece.len() as u64 <= size);
                    if let Some(at) = data_at.checked_sub(offset).filter(|&at| at < piece.len() as u64) {
                        piece[at as usize] = 1;
                    }
                    Ok::<_, io::Error>(())
                });
                assert_eq!(found.unwrap(), Some(format!("data at byte {data_at}")));
            }
            assert_eq!(sampled(size, |_, _| Ok::<_, io::Error>(())).unwrap(), None);
        }
    }
}
