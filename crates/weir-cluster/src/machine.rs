//! The machine of a process: determines which processes can observe its I/O.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A running kernel, and the device nodes visible to a process. A process on the same `Machine` can observe in the kernel another
/// process's I/O after its end, because a path leads both to the same file or device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The kernel's boot id.
    pub boot: String,
    /// The filesystem at `/dev`: containers of one machine may have different ones.
    pub devices: u64,
}

impl Machine {
    /// The machine of this process. `None` if the kernel does not report it.
    #[must_use]
    pub fn here() -> Option<Machine> {
        Machine::with_devices_at("/dev".as_ref())
    }

    /// The machine of another local process.
    pub(crate) fn of_process(pid: i32) -> Option<Machine> {
        Machine::with_devices_at(format!("/proc/{pid}/root/dev").as_ref())
    }

    fn with_devices_at(path: &Path) -> Option<Machine> {
        Some(Machine { boot: boot_id()?, devices: std::fs::metadata(path).ok()?.dev() })
    }
}

/// The id of this boot.
pub(crate) fn boot_id() -> Option<String> {
    Some(std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned())
}
