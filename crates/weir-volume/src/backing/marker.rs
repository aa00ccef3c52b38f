//! Marks on backings: a successor sees in the kernel when a former owner's I/O has ended (P4).
//!
//! A process's I/O outlives the process: the kernel completes submitted requests, regardless of the storage's latency. Until a
//! request completes, the kernel keeps its open file description and the description's locks. So an owner sets a lock on the
//! description of its I/O. After the process's end only the kernel holds that description: the lock exists while a request is in
//! flight, plus the kernel's cleanup time.
//!
//! The lock is shared (`F_OFD_SETLK`), on one byte far beyond any file's end; the process's name selects the byte. It excludes no
//! other process.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use weir_block::hash::{FNV_BASIS, fnv1a};

use super::filesystem::Filesystem;
use crate::error::VolumeError;

/// The first byte of the range for marks. No file is as large.
const FIRST: u64 = 1 << 62;

/// The directory of device nodes. Only these nodes are common to all processes that share this directory.
const DEVICES: &str = "/dev";

/// Identifies one process on every file and device that it does I/O to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    byte: u64,
}

/// The trace of an ended process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    /// Its mark exists: the kernel has requests in flight, or is cleaning up.
    InFlight,
    /// No mark: no request of it can reach the storage.
    Gone,
    /// This process cannot determine it.
    Unknown,
}

impl Mark {
    /// The mark of the process with this unique name. All builds of Weir compute the same mark.
    #[must_use]
    pub fn of(process: &str) -> Mark {
        // On a collision two processes only wait for each other's I/O.
        let hash = fnv1a(FNV_BASIS, process.bytes());
        Mark { byte: FIRST | (hash & (FIRST - 1)) }
    }

    /// Sets the mark on this open file description, for its lifetime, on the byte that a successor checks.
    pub(crate) fn set(self, file: &File) -> io::Result<()> {
        if !keeps_locks_itself(file)? {
            return Ok(());
        }
        let mut lock = self.lock(libc::F_RDLCK);
        // SAFETY: the kernel reads a lock that outlives the call.
        let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) };
        if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The trace of an ended process of this machine on the file or device at `path`. Opens it, and so may block on the storage.
    ///
    /// # Errors
    /// It cannot be opened or examined.
    pub fn probe(self, path: &Path) -> Result<Trace, VolumeError> {
        let failed = |error| VolumeError::from_io("checking for a former owner's requests to", path, error);
        // Must not block on a FIFO at the file's path.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
        self.probe_file(&file).map_err(failed)
    }

    fn probe_file(self, file: &File) -> io::Result<Trace> {
        if !keeps_locks_itself(file)? || !is_known_to_all(file)? {
            return Ok(Trace::Unknown);
        }
        let mut lock = self.lock(libc::F_WRLCK);
        // SAFETY: the kernel reads and writes a lock that outlives the call.
        let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
        if answer != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(if lock.l_type == libc::F_UNLCK as libc::c_short { Trace::Gone } else { Trace::InFlight })
    }

    fn lock(self, kind: libc::c_int) -> libc::flock {
        // SAFETY: a struct of integers, of which zeroes are a value.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind as libc::c_short;
        lock.l_whence = libc::SEEK_SET as libc::c_short;
        // Below 2^63 by construction.
        lock.l_start = self.byte as libc::off_t;
        lock.l_len = 1;
        lock
    }
}

/// Whether this kernel alone keeps locks on `file`, so that setting them always works and every process that opens the file sees
/// them. A network filesystem delegates locks to its server, which may lack locks or lose them.
fn keeps_locks_itself(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.file_type().is_block_device() || Filesystem::of(file)? != Filesystem::Other)
}

/// Whether the path of `file` leads to the same inode for all processes with the same [`DEVICES`]. The kernel keeps locks on a
/// block device at its node, and a container may have other nodes for the device.
fn is_known_to_all(file: &File) -> io::Result<bool> {
    let metadata = file.metadata()?;
    Ok(!metadata.file_type().is_block_device() || metadata.dev() == std::fs::metadata(DEVICES)?.dev())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use weir_block::Nanos;

    use super::*;

    fn file() -> tempfile::NamedTempFile {
        tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap()
    }

    fn opened(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    fn await_gone(mark: &Mark, path: &Path) {
        let deadline = Nanos::now() + Duration::from_secs(10);
        while mark.probe(path).unwrap() == Trace::InFlight && Nanos::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(mark.probe(path).unwrap(), Trace::Gone);
    }

    /// The mark lives as long as any holder of the description: the kernel or, as here, another process.
    #[test]
    fn a_mark_lives_as_long_as_its_file_description() {
        let file = file();
        let (mark, other) = (Mark::of("a#1"), Mark::of("a#2"));
        assert_eq!(mark.probe(file.path()).unwrap(), Trace::Gone, "no mark was set");
        let owner = opened(file.path());
        mark.set(&owner).unwrap();
        let held = Stdio::from(owner.try_clone().unwrap());
        let mut child = Command::new("sleep").arg("3600").stdin(held).spawn().unwrap();
        assert_eq!(mark.probe(file.path()).unwrap(), Trace::InFlight);
        drop(owner);
        assert_eq!(mark.probe(file.path()).unwrap(), Trace::InFlight, "the description is still held");
        // The successor also has the file open, with a mark of its own.
        let successor = opened(file.path());
        other.set(&successor).unwrap();
        assert_eq!(mark.probe_file(&successor).unwrap(), Trace::InFlight);
        assert_eq!(other.probe(file.path()).unwrap(), Trace::InFlight);
        child.kill().unwrap();
        child.wait().unwrap();
        // The kernel cleans up after a killed process asynchronously.
        await_gone(&mark, file.path());
        assert_eq!(other.probe(file.path()).unwrap(), Trace::InFlight, "the successor's");
    }

    #[test]
    fn marks_exclude_no_other_process() {
        let file = file();
        let (first, second) = (opened(file.path()), opened(file.path()));
        let mark = Mark::of("a#1");
        mark.set(&first).unwrap();
        mark.set(&second).unwrap();
        drop(first);
        assert_eq!(mark.probe(file.path()).unwrap(), Trace::InFlight, "the second description's");
        drop(second);
        // A process that another test has just forked holds every open file until it calls exec.
        await_gone(&mark, file.path());
    }

    #[test]
    fn without_kernel_locks_the_trace_is_unknown() {
        // A filesystem of this kernel, but not one that disks use.
        assert_eq!(Mark::of("a#1").probe(Path::new("/proc/self/status")).unwrap(), Trace::Unknown);
        assert!(Mark::of("a#1").probe(Path::new("/nothing/here")).is_err());
    }

    /// Owner and successor may be of different builds.
    #[test]
    fn a_mark_is_the_same_in_every_build() {
        assert_eq!(Mark::of("a").byte, FIRST | (0xaf63_dc4c_8601_ec8c & (FIRST - 1)));
        assert_ne!(Mark::of("a#1"), Mark::of("a#2"));
    }
}
