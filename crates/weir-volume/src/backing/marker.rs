//! Marks on backings, by which the end of a former owner's I/O is seen in the kernel (P4).
//!
//! The end of a process is not the end of its I/O: the kernel goes on with what it was handed, for as long as the storage takes. But it
//! keeps the open file description of each request until that request has come back, and with the description its locks. So an owner
//! leaves a lock of its own on the description that its I/O goes through. Once its process has ended, nobody else holds that
//! description: the lock is there as long as a request is under way, and not a moment longer than the kernel needs to clear up.
//!
//! The lock is a shared one (`F_OFD_SETLK`), on one byte far behind any end, which the process's name selects. It keeps nobody out.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::filesystem::Filesystem;
use crate::error::VolumeError;

/// The first byte of those that stand for processes. No file is as large.
const FIRST: u64 = 1 << 62;

/// Device nodes of the machine's kernel are here; only those are the same ones for everybody who sees this directory.
const DEVICES: &str = "/dev";

/// Stands for one process on everything that it does I/O to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    byte: u64,
}

/// What is to be seen of a process that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    /// Its mark: the kernel has requests of it under way, or is clearing up behind them.
    UnderWay,
    /// No mark: none of its requests will reach the storage any more.
    Gone,
    /// It cannot be known here.
    Unknown,
}

impl Mark {
    /// The mark of the process with this name, which must be its own for good. All builds of Weir know it by the same mark.
    #[must_use]
    pub fn of(process: &str) -> Mark {
        // FNV-1a. Two processes with one mark would only wait for each other's I/O.
        let hash = process.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        Mark { byte: FIRST | (hash & (FIRST - 1)) }
    }

    /// Leaves the mark on this open file description, for as long as that lives, wherever a successor would look for it.
    pub(super) fn leave(self, file: &File) -> io::Result<()> {
        if !keeps_locks_itself(file)? {
            return Ok(());
        }
        let mut lock = self.lock(libc::F_RDLCK);
        // SAFETY: the kernel reads a lock that lives until the call returns.
        let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) };
        if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// What is to be seen on the file or device at `path` of a process of this machine that has ended. Opens it, and so may wait for the
    /// storage.
    ///
    /// # Errors
    /// It cannot be opened or examined.
    pub fn look(self, path: &Path) -> Result<Trace, VolumeError> {
        let failed = |error| VolumeError::from_io("looking for a former owner's requests to", path, error);
        // A FIFO in the place of a file must not be waited for.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
        self.look_at(&file).map_err(failed)
    }

    fn look_at(self, file: &File) -> io::Result<Trace> {
        if !keeps_locks_itself(file)? || !is_known_to_all(file)? {
            return Ok(Trace::Unknown);
        }
        let mut lock = self.lock(libc::F_WRLCK);
        // SAFETY: the kernel reads and writes a lock that lives until the call returns.
        let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
        if answer != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(if lock.l_type == libc::F_UNLCK as libc::c_short { Trace::Gone } else { Trace::UnderWay })
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

/// Whether locks on `file` are kept by this kernel and nobody else, so that they are left whenever they are asked for, and are seen by
/// whoever opens the same file. A filesystem with a server asks that, which may have no locks, or lose them.
fn keeps_locks_itself(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.file_type().is_block_device() || Filesystem::of(file)? != Filesystem::Other)
}

/// Whether all processes that see the same [`DEVICES`] mean the same inode by a path that leads to `file`. Locks on a block device are
/// kept at its node, and a container may have other nodes for the same device.
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
        while mark.look(path).unwrap() == Trace::UnderWay && Nanos::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(mark.look(path).unwrap(), Trace::Gone);
    }

    /// Whoever holds the description after the owner's end, be it the kernel or, as here, another process, holds the mark.
    #[test]
    fn a_mark_stays_as_long_as_somebody_has_the_description() {
        let place = file();
        let (mark, other) = (Mark::of("a#1"), Mark::of("a#2"));
        assert_eq!(mark.look(place.path()).unwrap(), Trace::Gone, "nobody has been here");
        let owner = opened(place.path());
        mark.leave(&owner).unwrap();
        let held = Stdio::from(owner.try_clone().unwrap());
        let mut child = Command::new("sleep").arg("3600").stdin(held).spawn().unwrap();
        assert_eq!(mark.look(place.path()).unwrap(), Trace::UnderWay);
        drop(owner);
        assert_eq!(mark.look(place.path()).unwrap(), Trace::UnderWay, "the description is still held");
        // The successor has the file open as well, and its mark is its own.
        let successor = opened(place.path());
        other.leave(&successor).unwrap();
        assert_eq!(mark.look_at(&successor).unwrap(), Trace::UnderWay);
        assert_eq!(other.look(place.path()).unwrap(), Trace::UnderWay);
        child.kill().unwrap();
        child.wait().unwrap();
        // The kernel clears up behind a killed process in its own time.
        await_gone(&mark, place.path());
        assert_eq!(other.look(place.path()).unwrap(), Trace::UnderWay, "the successor's");
    }

    #[test]
    fn marks_keep_nobody_out() {
        let place = file();
        let (first, second) = (opened(place.path()), opened(place.path()));
        let mark = Mark::of("a#1");
        mark.leave(&first).unwrap();
        mark.leave(&second).unwrap();
        drop(first);
        assert_eq!(mark.look(place.path()).unwrap(), Trace::UnderWay, "the second description's");
        drop(second);
        // A process that another test has just forked holds every open file until it calls exec.
        await_gone(&mark, place.path());
    }

    #[test]
    fn where_nobody_keeps_locks_nothing_is_known() {
        // A filesystem of this kernel, but not one of those that disks lie on.
        assert_eq!(Mark::of("a#1").look(Path::new("/proc/self/status")).unwrap(), Trace::Unknown);
        assert!(Mark::of("a#1").look(Path::new("/nothing/here")).is_err());
    }

    /// Owner and successor may be of different builds.
    #[test]
    fn a_mark_is_the_same_in_every_build() {
        assert_eq!(Mark::of("a").byte, FIRST | (0xaf63_dc4c_8601_ec8c & (FIRST - 1)));
        assert_ne!(Mark::of("a#1"), Mark::of("a#2"));
    }
}
