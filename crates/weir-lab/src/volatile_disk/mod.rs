//! A disk with a volatile cache, and a way to cut its power.
//!
//! Written data stays in memory until a flush; a power cut discards it, or keeps a random part ([`Survivors`]). It is an
//! ordinary block device (`/dev/loopN` over a file of a FUSE filesystem that this process serves), so filesystems, flash
//! media and backings use it like any other.
//!
//! A cut has three acts, because a process must not learn of a power cut that ends it too:
//! 1. [`VolatileDisk::fail_power`]: from this moment nothing reaches the medium and no request is answered;
//! 2. the processes of the host are killed, and then [`VolatileDisk::power_off`]: requests fail, so that the kernel can
//!    release the processes, and users of a mount unmount it;
//! 3. [`VolatileDisk::power_on`]: the disk is back with what survived, under the same path.

mod loop_device;
mod server;
mod store;

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::error::LabError;
use crate::one_file::OneFile;
use server::Disk;
use store::Store;

pub use loop_device::LoopDevice;
pub use store::{BLOCK, SECTOR, Survivors, Toll};

/// A block device whose unflushed writes are lost with its power. Dropping it removes everything; all users must have closed
/// or unmounted it before.
pub struct VolatileDisk {
    // Before its file.
    device: Option<LoopDevice>,
    file: OneFile,
    disk: Disk,
    directory: PathBuf,
}

impl VolatileDisk {
    /// Makes a disk of `size` bytes, a multiple of 4096, full of zeroes. `directory` is created and must be its own.
    /// Needs root.
    ///
    /// # Errors
    /// FUSE or a loop device is not available, or the directory is in use.
    pub fn create(directory: &Path, size: u64) -> Result<VolatileDisk, LabError> {
        if size == 0 || !size.is_multiple_of(BLOCK) {
            return Err(LabError::Invalid(format!(
                "a disk of {size} bytes: the size must be a multiple of {BLOCK}"
            )));
        }
        let mount = directory.join("fuse");
        let making = || LabError::system(format!("making a volatile disk in {}", directory.display()));
        fs::create_dir_all(&mount).map_err(making())?;
        let medium = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(directory.join("medium"))
            .and_then(|file| file.set_len(size).map(|()| file))
            .map_err(making())?;
        let disk = Disk::new(Store::new(medium, size));
        let file = OneFile::serve(disk.clone(), &mount, "weir-volatile-disk")?;
        let mut made = VolatileDisk { device: None, file, disk, directory: directory.to_owned() };
        made.attach()?;
        Ok(made)
    }

    /// The block device: a link whose name stays the same across cuts.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.join("device")
    }

    /// Flushes that have reached the disk, each by FLUSH, FUA, fsync or a write with `RWF_DSYNC`.
    #[must_use]
    pub fn flushes(&self) -> u64 {
        self.disk.flushes()
    }

    /// From now on the disk answers flushes and does nothing, as bad disks do. A test that nothing is lost must fail on
    /// such a disk, or it proves nothing.
    pub fn lie_about_flushes(&self) {
        self.disk.lie();
    }

    /// From now on, writes of nothing but `byte` take until [`VolatileDisk::release`], and all others pass them.
    pub fn hold(&self, byte: u8) {
        self.disk.hold(byte);
    }

    /// Bytes of the writes that are held.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.disk.held_bytes()
    }

    /// Writes the held data now, over later writes. Nothing is held any more.
    pub fn release(&self) {
        self.disk.release();
    }

    /// The power fails: data that is not flushed yet is no longer certain to reach the medium, and all requests wait for an
    /// answer.
    pub fn fail_power(&self) {
        self.disk.fail_power();
    }

    /// All requests fail from now on, those that wait too.
    pub fn power_off(&self) {
        self.disk.power_off();
    }

    /// The power comes back. The device is a new one that remembers nothing of before; its link is the same.
    ///
    /// # Errors
    /// Something still has the device open or mounted.
    pub fn power_on(&mut self, survivors: Survivors) -> Result<Toll, LabError> {
        // The kernel's remaining requests to the old device must have no effect, so the device goes while there is no power.
        self.disk.power_off();
        if let Some(device) = self.device.take() {
            device.detach()?;
        }
        let toll = self.disk.power_on(survivors).map_err(LabError::system(format!(
            "writing the surviving blocks to the medium in {}",
            self.directory.display()
        )))?;
        self.attach()?;
        Ok(toll)
    }

    fn attach(&mut self) -> Result<(), LabError> {
        let device = LoopDevice::attach(&self.file.path())?;
        let link = self.path();
        let _ = fs::remove_file(&link);
        symlink(device.path(), &link).map_err(LabError::system(format!("linking {}", link.display())))?;
        self.device = Some(device);
        Ok(())
    }
}

impl Drop for VolatileDisk {
    fn drop(&mut self) {
        // Requests that still wait would wait for ever.
        self.disk.power_off();
        drop(self.device.take());
    }
}
