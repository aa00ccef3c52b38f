//! Loop devices: a file as a block device.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use weir_block::Nanos;

use crate::error::LabError;

/// Time limit for the kernel to release an unused device.
const PATIENCE: Duration = Duration::from_secs(10);

/// A loop device with direct I/O to its file; gone when dropped.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    /// The kernel's name of its file: another process may have reused the device's number.
    file: String,
}

impl LoopDevice {
    /// Puts a loop device on `file`. Needs root, and `losetup` and `blockdev` (util-linux).
    ///
    /// FLUSH and FUA of the device become fsync of the file (Linux, `drivers/block/loop.c`).
    ///
    /// # Errors
    /// One of them is missing or refuses.
    pub fn attach(file: &Path) -> Result<LoopDevice, LabError> {
        LoopDevice::with_sectors(file, 512)
    }

    /// As [`LoopDevice::attach`], with sectors of 512 or 4096 bytes.
    ///
    /// # Errors
    /// As [`LoopDevice::attach`].
    pub fn with_sectors(file: &Path, bytes: u32) -> Result<LoopDevice, LabError> {
        let sectors = format!("--sector-size={bytes}");
        let shown = run(
            "losetup",
            [
                "--find".as_ref(),
                "--show".as_ref(),
                "--direct-io=on".as_ref(),
                sectors.as_ref(),
                file.as_os_str(),
            ],
        )?;
        let path = PathBuf::from(shown.trim());
        let file = backing_file(&path)
            .ok_or_else(|| LabError::Invalid(format!("{} was taken away at once", path.display())))?;
        let device = LoopDevice { path, file };
        // The kernel keeps what `blockdev --setro` has set, also while the device has no file.
        run("blockdev", ["--setrw".as_ref(), device.path.as_os_str()])?;
        // And what [`LoopDevice::set_rotating`] has set: no flush would reach the file. Where that is refused nobody has set it.
        let _ = device.set_queue("write_cache", "write back");
        Ok(device)
    }

    fn set_queue(&self, attribute: &str, value: &str) -> Result<(), LabError> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let path = format!("/sys/block/{name}/queue/{attribute}");
        fs::write(&path, value).map_err(LabError::system(format!("writing {path}")))
    }

    /// The kernel takes it for a disk with a mechanism and no write cache: no flush reaches the file any more.
    ///
    /// # Errors
    /// The system's.
    pub fn set_rotating(&self) -> Result<(), LabError> {
        self.set_queue("rotational", "1")?;
        self.set_queue("write_cache", "write through")
    }

    /// `/dev/loop` and a number.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the device and waits until its file is closed. The kernel's cache of it is gone then.
    ///
    /// # Errors
    /// Something has the device open or mounted.
    pub fn detach(self) -> Result<(), LabError> {
        run("losetup", ["--detach".as_ref(), self.path.as_os_str()])?;
        let deadline = Nanos::now() + PATIENCE;
        // A device in use is not refused but kept until its last user goes, so the answer alone says little.
        while self.is_attached() {
            if Nanos::now() > deadline {
                return Err(LabError::Invalid(format!(
                    "{} is still in use; see `lsblk {0}` and `fuser -v {0}`",
                    self.path.display()
                )));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn is_attached(&self) -> bool {
        backing_file(&self.path).is_some_and(|file| file == self.file)
    }
}

/// The file of a loop device, also a deleted one; `None` when it has none (`loop/backing_file` in sysfs).
fn backing_file(device: &Path) -> Option<String> {
    let name = device.file_name()?;
    let file = fs::read_to_string(Path::new("/sys/block").join(name).join("loop/backing_file")).ok()?;
    let file = file.trim_end_matches('\n');
    Some(file.strip_suffix(" (deleted)").unwrap_or(file).to_owned())
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if self.is_attached() {
            let _ = run("losetup", ["--detach".as_ref(), self.path.as_os_str()]);
        }
    }
}

fn run<const N: usize>(program: &'static str, arguments: [&OsStr; N]) -> Result<String, LabError> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output =
        output.map_err(LabError::system("running losetup or blockdev (package `mount` or `util-linux`)"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(LabError::Invalid(format!("{said} (loop devices need root)")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
