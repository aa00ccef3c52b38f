//! A small filesystem on a loop device, which can be full and slow.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::run;
use crate::common::throttle::Throttle;

const IMAGE: &str = "image";
const MOUNT: &str = "mount";

/// One filesystem, mounted while the value lives. Processes with open files there must end before.
pub struct SmallFilesystem {
    directory: tempfile::TempDir,
    device: String,
}

impl SmallFilesystem {
    /// Makes an ext4 of `size` bytes and mounts it.
    pub fn mount(size: u64) -> SmallFilesystem {
        // Small filesystems would get blocks of 1 KiB, in which little of what disks do stays together.
        let ready = "lazy_itable_init=0,lazy_journal_init=0";
        SmallFilesystem::made(size, "ext4", &["-b", "4096", "-m", "0", "-E", ready])
    }

    /// Makes an XFS of `size` bytes, at least 300 MiB, and mounts it.
    pub fn mount_xfs(size: u64) -> SmallFilesystem {
        SmallFilesystem::made(size, "xfs", &[])
    }

    fn made(size: u64, kind: &str, options: &[&str]) -> SmallFilesystem {
        assert!(rustix::process::geteuid().is_root(), "loop mounts need root: run this test as root");
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join(IMAGE);
        File::create(&image).unwrap().set_len(size).unwrap();
        std::fs::create_dir(directory.path().join(MOUNT)).unwrap();
        let image = image.to_str().unwrap();
        run(&format!("mkfs.{kind}"), ["-q"].iter().chain(options).chain(&[image]));
        let device = run("losetup", ["--find", "--show", "--direct-io=on", image]).trim().to_owned();
        // From here on it is cleaned up, whatever fails.
        let filesystem = SmallFilesystem { directory, device };
        run("mount", ["-t", kind, &filesystem.device, filesystem.path().to_str().unwrap()]);
        filesystem
    }

    /// Its root directory.
    pub fn path(&self) -> PathBuf {
        self.directory.path().join(MOUNT)
    }

    /// Bytes that files can still take.
    pub fn available(&self) -> u64 {
        let numbers = rustix::fs::statvfs(self.path()).unwrap();
        numbers.f_bavail * numbers.f_frsize
    }

    /// Takes space until only `left` bytes are available.
    pub fn fill(&self, left: u64) {
        let filler = File::options().create(true).append(true).open(self.filler()).unwrap();
        loop {
            let taken = self.available().saturating_sub(left);
            let length = filler.metadata().unwrap().len();
            match rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), length, taken) {
                // Destage takes space, too.
                Err(rustix::io::Errno::NOSPC) => {}
                filled => break filled.unwrap(),
            }
        }
        assert!(self.available() <= left, "{} bytes left instead of {left}", self.available());
    }

    /// Gives back so many bytes of what [`SmallFilesystem::fill`] took.
    pub fn give_back(&self, bytes: u64) {
        let filler = File::options().write(true).open(self.filler()).unwrap();
        let length = filler.metadata().unwrap().len();
        filler.set_len(length.checked_sub(bytes).unwrap()).unwrap();
    }

    /// Gives back what [`SmallFilesystem::fill`] took.
    pub fn empty(&self) {
        fs::remove_file(self.filler()).unwrap();
    }

    fn filler(&self) -> PathBuf {
        self.path().join("filler")
    }

    /// All changes of the filesystem block until the value is dropped.
    pub fn freeze(&self) -> Frozen {
        run("fsfreeze", ["--freeze", self.path().to_str().unwrap()]);
        Frozen(self.path())
    }

    /// Lets the processes write no more than so many bytes in a second to this device; `None` where the kernel has no
    /// way for it (cgroup v1, `blkio.throttle`).
    pub fn throttle(&self, rate: u64, processes: impl IntoIterator<Item = u32>) -> Option<Throttle> {
        Throttle::new(Path::new(&self.device), rate, processes)
    }
}

impl Drop for SmallFilesystem {
    fn drop(&mut self) {
        // Quietly: a failure here must not hide the test's own.
        let tidy = |program: &str, arguments: &[&str]| {
            let _ = Command::new(program).args(arguments).stderr(Stdio::null()).status();
        };
        // Lazily, so that the mount is gone even if a killed process has not quite ended.
        tidy("umount", &["--lazy", &self.path().to_string_lossy()]);
        tidy("losetup", &["-d", &self.device]);
    }
}

/// A filesystem that stands still.
pub struct Frozen(PathBuf);

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = Command::new("/usr/sbin/fsfreeze").arg("--unfreeze").arg(&self.0).status();
    }
}
