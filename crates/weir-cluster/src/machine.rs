//! Which machine a process runs on, as far as that says who sees its I/O.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A running kernel, and the device nodes that a process sees there. Who has the same one can see in the kernel what becomes of
/// the process's I/O after its end, because one path leads both to the same file or device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The kernel's number of this boot.
    pub boot: String,
    /// The filesystem at `/dev`: containers of one machine may have different ones.
    pub devices: u64,
}

impl Machine {
    /// That of this process. `None` where the kernel does not say.
    #[must_use]
    pub fn here() -> Option<Machine> {
        Machine::with_devices_at("/dev".as_ref())
    }

    /// That of another process of this machine.
    pub(crate) fn of_process(pid: i32) -> Option<Machine> {
        Machine::with_devices_at(format!("/proc/{pid}/root/dev").as_ref())
    }

    fn with_devices_at(path: &Path) -> Option<Machine> {
        Some(Machine { boot: boot_id()?, devices: std::fs::metadata(path).ok()?.dev() })
    }
}

/// Which boot of the machine this is.
pub(crate) fn boot_id() -> Option<String> {
    Some(std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned())
}
