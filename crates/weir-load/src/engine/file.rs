//! Opening of files and block devices, for every engine.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::LoadError;

/// Options for opening a file or device.
#[derive(Clone, Copy, Debug)]
pub struct FileOptions {
    /// Requests in flight, 1 to 4096.
    pub depth: u32,
    /// Largest request, in bytes.
    pub block_size: u32,
    /// Open for writing too.
    pub writes: bool,
    /// Each write is durable before it is answered (`RWF_DSYNC`).
    pub fua: bool,
    /// Poll for completions instead of waiting for interrupts (`IORING_SETUP_IOPOLL`); `psync` ignores it.
    pub poll: bool,
}

/// In place of an error number: a short transfer.
pub(super) const SHORT: u32 = u32::MAX;

/// The text of a file engine's error number.
pub(super) fn errno_text(errno: u32) -> String {
    match errno {
        SHORT => {
            "a request moved less than asked for: the target ends before it (was it made smaller?)".into()
        }
        errno => io::Error::from_raw_os_error(errno as i32).to_string(),
    }
}

/// Opens `path` with direct I/O where the filesystem can do it, buffered where not; true with direct I/O.
pub(super) fn open(path: &Path, writes: bool) -> Result<(File, bool), LoadError> {
    let open = |flags| OpenOptions::new().read(true).write(writes).custom_flags(flags).open(path);
    let opened = match open(libc::O_DIRECT) {
        Ok(file) => Ok((file, true)),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => open(0).map(|file| (file, false)),
        Err(error) => Err(error),
    };
    opened.map_err(|source| LoadError::File { path: path.into(), what: "cannot open", source })
}

/// Checks that the device of `path` has queues for polling. Without them some kernels fail every request, and others spin until
/// the interrupt comes, so that the measurement would be misleading.
pub(super) fn check_polling(path: &Path) -> Result<(), LoadError> {
    let refused = |why: String| Err(LoadError::NoPolling { path: path.into(), why });
    let Some(device) = device_of(path) else {
        return refused("no block device lies under it".into());
    };
    match polling_queues(&device) {
        Ok(true) => Ok(()),
        Ok(false) => {
            let name = device.file_name().unwrap_or_default().to_string_lossy().into_owned();
            refused(format!(
                "device {name} has no queue for polling (its driver makes some with a module parameter, \
                 such as nvme.poll_queues=2 or virtio_blk.poll_queues=2)"
            ))
        }
        Err(error) => refused(format!("{}: {error}", device.join("queue/io_poll").display())),
    }
}

/// The directory in `/sys` of the device that `path` is or lies on.
fn device_of(path: &Path) -> Option<PathBuf> {
    let metadata = fs::metadata(path).ok()?;
    let is_device = metadata.file_type().is_block_device();
    let number = if is_device { metadata.rdev() } else { metadata.dev() };
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let device = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    // A partition has no queue of its own.
    match device.join("partition").exists() {
        true => device.parent().map(Path::to_path_buf),
        false => Some(device),
    }
}

/// Of `queue/io_poll` (Documentation/ABI/stable/sysfs-block).
fn polling_queues(device: &Path) -> io::Result<bool> {
    let text = fs::read_to_string(device.join("queue/io_poll"))?;
    let count =
        u32::from_str(text.trim()).map_err(|_| io::Error::other(format!("holds `{}`", text.trim())))?;
    Ok(count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_says_whether_it_can_be_polled() {
        let device = tempfile::tempdir().unwrap();
        fs::create_dir(device.path().join("queue")).unwrap();
        for (text, can) in [("0\n", Some(false)), ("1\n", Some(true)), ("no\n", None)] {
            fs::write(device.path().join("queue/io_poll"), text).unwrap();
            assert_eq!(polling_queues(device.path()).ok(), can, "{text}");
        }
        assert!(polling_queues(&device.path().join("none")).is_err());
    }

    #[test]
    fn what_cannot_be_polled_is_refused_with_the_reason() {
        // A filesystem without a device, on every machine.
        let said = check_polling(Path::new("/proc/self/stat")).unwrap_err().to_string();
        assert!(said.contains("/proc/self/stat") && said.contains("no block device"), "{said}");
        assert!(said.contains("--poll"), "{said}");
    }
}
