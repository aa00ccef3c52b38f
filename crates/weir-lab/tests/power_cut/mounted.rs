//! Filesystems, made, mounted and checked by the tools that people use.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::SOON;
use crate::support::{await_some, run};

/// A filesystem of Linux.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Ext4,
    Xfs,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Ext4 => "ext4",
            Kind::Xfs => "xfs",
        }
    }

    /// Makes one on a device.
    pub fn make(self, device: &Path) {
        let device = device.as_os_str();
        match self {
            Kind::Ext4 => run("mkfs.ext4", ["-q".as_ref(), "-E".as_ref(), "nodiscard".as_ref(), device]),
            Kind::Xfs => run("mkfs.xfs", ["-q".as_ref(), "-K".as_ref(), device]),
        };
    }

    /// Finds nothing wrong. The log must have been replayed, which mounting does.
    ///
    /// # Panics
    /// Something is wrong; the tool's words are in the message.
    pub fn check(self, device: &Path) {
        let device = device.as_os_str();
        match self {
            Kind::Ext4 => run("e2fsck", ["-f".as_ref(), "-n".as_ref(), device]),
            Kind::Xfs => run("xfs_repair", ["-n".as_ref(), device]),
        };
    }
}

/// A mounted filesystem; unmounted when dropped.
#[derive(Debug)]
pub struct Mounted {
    at: PathBuf,
}

impl Mounted {
    /// Mounts `device` at `at`, which is made.
    pub fn mount(kind: Kind, device: &Path, at: &Path) -> Mounted {
        Mounted::with_options(kind, device, at, "defaults")
    }

    /// As [`Mounted::mount`], with the filesystem's own options.
    pub fn with_options(kind: Kind, device: &Path, at: &Path, options: &str) -> Mounted {
        fs::create_dir_all(at).unwrap();
        let arguments = ["-t", kind.name(), "-o", options].map(AsRef::as_ref);
        run("mount", arguments.into_iter().chain([device.as_os_str(), at.as_os_str()]));
        Mounted { at: at.to_owned() }
    }

    /// Its root directory.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// Unmounts. Afterwards the kernel remembers nothing of it.
    ///
    /// # Panics
    /// Something has a file open there for longer than a moment. (The files of a process that was killed with requests in
    /// its ring are closed a moment after it is gone.)
    pub fn unmount(self) {
        let unmounted = || {
            let status = Command::new("umount").arg(&self.at).stderr(Stdio::null()).status();
            status.unwrap().success().then_some(())
        };
        await_some(SOON, unmounted, || format!("{} is in use", self.at.display()));
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Quietly, and lazily, so that a process with open files there does not keep it for ever. After `unmount` there is
        // nothing to do.
        if rustix::fs::stat(&self.at).is_ok_and(|at| is_root(&self.at, at.st_dev)) {
            let _ = Command::new("umount").arg("--lazy").arg(&self.at).stderr(Stdio::null()).status();
        }
    }
}

/// Whether another filesystem begins at this directory.
fn is_root(directory: &Path, device: u64) -> bool {
    let parent = directory.parent().and_then(|parent| rustix::fs::stat(parent).ok());
    parent.is_some_and(|parent| parent.st_dev != device)
}
