//! A Weir disk as a block device of this machine, for filesystems and databases.
//!
//! `nbdfuse` (libnbd) shows the export as a file and a loop device with direct I/O stands on it; the kernel's FLUSH becomes
//! fsync of the file and then FLUSH of NBD.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use weir_lab::volatile_disk::LoopDevice;
use weir_nbd::Uri;

use crate::common::SOON;
use crate::mounted::{Kind, Mounted};
use crate::support::await_some;

/// A disk plugged in; unplugged when dropped.
pub struct Plugged {
    device: Option<LoopDevice>,
    nbdfuse: Child,
    at: PathBuf,
}

impl Plugged {
    /// Shows the export under `at`, a directory of its own.
    pub fn plug(uri: &Uri, at: &Path) -> Plugged {
        Plugged::with_sectors(uri, at, 512)
    }

    /// As [`Plugged::plug`], with sectors of 512 or 4096 bytes, as the disk has.
    pub fn with_sectors(uri: &Uri, at: &Path, sectors: u32) -> Plugged {
        fs::create_dir_all(at).unwrap();
        // In the foreground, so that its process is known. One connection, as QEMU has.
        let mut command = Command::new("nbdfuse");
        command.args(["--connections", "1"]).arg(at.join("nbd")).arg(uri.to_string()).stdin(Stdio::null());
        // It logs every cut, which is expected; a failed start is not.
        let log = at.with_extension("log");
        command.stderr(fs::File::create(&log).unwrap());
        let mut plugged = Plugged { device: None, nbdfuse: command.spawn().unwrap(), at: at.to_owned() };
        let there = || fs::metadata(at.join("nbd")).ok().filter(|file| file.len() > 0);
        let said =
            || format!("nbdfuse does not show {uri}: {}", fs::read_to_string(&log).unwrap_or_default());
        await_some(SOON, there, said);
        plugged.device = Some(LoopDevice::with_sectors(&at.join("nbd"), sectors).unwrap());
        plugged
    }

    /// The block device.
    pub fn path(&self) -> &Path {
        self.device.as_ref().unwrap().path()
    }

    /// The guest has no power: requests in flight fail, and nothing in the kernel's cache of the disk reaches it.
    pub fn cut(&mut self) {
        self.nbdfuse.kill().unwrap();
        self.nbdfuse.wait().unwrap();
    }

    /// Unmounts and unplugs after [`Plugged::cut`].
    pub fn power_off(mut self, mounted: Mounted) {
        mounted.unmount();
        self.device.take().unwrap().detach().unwrap();
    }

    /// Lets the filesystem's log be replayed, and looks for damage.
    pub fn replay_and_check(&self, kind: Kind, at: &Path) {
        Mounted::mount(kind, self.path(), at).unmount();
        kind.check(self.path());
    }
}

impl Drop for Plugged {
    fn drop(&mut self) {
        drop(self.device.take());
        let _ = self.nbdfuse.kill();
        let _ = self.nbdfuse.wait();
        let _ = Command::new("umount").arg("--lazy").arg(&self.at).stderr(Stdio::null()).status();
    }
}
