//! A limit to what some processes write to a device (cgroup v1, `blkio.throttle`). What they have issued beyond it waits in the kernel, and
//! reaches the device later, whatever becomes of the processes, and of the device's read-only flag.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Lifted when dropped.
pub struct Throttle {
    group: PathBuf,
    /// Its numbers.
    device: String,
}

impl Throttle {
    /// Lets the processes write no more than so many bytes in a second to a device; `None` where the kernel has no way for it.
    pub fn new(device: &Path, rate: u64, processes: impl IntoIterator<Item = u32>) -> Option<Throttle> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let group = Path::new("/sys/fs/cgroup/blkio").join(format!("weir-{}-{number}", std::process::id()));
        let numbers = fs::metadata(device).ok()?.rdev();
        let device = format!("{}:{}", rustix::fs::major(numbers), rustix::fs::minor(numbers));
        fs::create_dir(&group).ok()?;
        let throttle = Throttle { group, device };
        throttle.set(rate).ok()?;
        for process in processes {
            fs::write(throttle.group.join("cgroup.procs"), process.to_string()).ok()?;
        }
        Some(throttle)
    }

    /// Sets the limit in bytes per second; 0 lifts it.
    fn set(&self, rate: u64) -> io::Result<()> {
        self.set_for("write", rate)
    }

    /// They read no more than so many bytes in a second, either.
    pub fn limit_reads(&self, rate: u64) -> io::Result<()> {
        self.set_for("read", rate)
    }

    fn set_for(&self, what: &str, rate: u64) -> io::Result<()> {
        let file = format!("blkio.throttle.{what}_bps_device");
        fs::write(self.group.join(file), format!("{} {rate}", self.device))
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        let _ = (self.set(0), self.limit_reads(0));
        // The processes must be somewhere else before their group can go.
        let members = fs::read_to_string(self.group.join("cgroup.procs")).unwrap_or_default();
        for process in members.lines() {
            let _ = fs::write(self.group.with_file_name("cgroup.procs"), process);
        }
        let _ = fs::remove_dir(&self.group);
    }
}
