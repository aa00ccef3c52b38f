//! A limit to what some processes write to a device (cgroup v1, `blkio.throttle`). What they have issued beyond it waits in the kernel, and
//! reaches the device later, whatever becomes of the processes, and of the device's read-only flag.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Lifted when dropped.
pub struct Throttle {
    group: PathBuf,
    /// Its numbers, and its path.
    device: String,
    path: PathBuf,
}

impl Throttle {
    /// Lets the processes write no more than so many bytes in a second to a device; `None` where the kernel has no way for it.
    pub fn new(device_path: &Path, rate: u64, processes: impl IntoIterator<Item = u32>) -> Option<Throttle> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let group = Path::new("/sys/fs/cgroup/blkio").join(format!("weir-{}-{number}", std::process::id()));
        let numbers = fs::metadata(device_path).ok()?.rdev();
        let device = format!("{}:{}", rustix::fs::major(numbers), rustix::fs::minor(numbers));
        fs::create_dir(&group).ok()?;
        let throttle = Throttle { group, device, path: device_path.to_owned() };
        throttle.set(rate).ok()?;
        for process in processes {
            fs::write(throttle.group.join("cgroup.procs"), process.to_string()).ok()?;
        }
        Some(throttle)
    }

    /// Lifts it, and returns when every write that it has held up is with the device. Lifting alone does not say when that is: on a busy
    /// machine writes were seen to reach the device seconds later. A flush waits in the kernel's queue behind them, whatever the device's
    /// read-only flag says.
    pub fn let_go(self) {
        let last = self.flush_behind();
        let _ = self.set(0);
        last.join().expect("a flush of the device");
    }

    /// A thread whose flush of the device is behind all writes that are held up.
    fn flush_behind(&self) -> JoinHandle<()> {
        let (group, path, (told, begins)) = (self.group.clone(), self.path.clone(), mpsc::channel());
        let flushing = thread::spawn(move || {
            let device = fs::File::open(path).expect("the device");
            let me = rustix::thread::gettid().as_raw_nonzero().to_string();
            fs::write(group.join("tasks"), &me).expect("a thread in its group");
            told.send(me.clone()).expect("whoever lifts the limit waits");
            let _ = device.sync_data();
            let _ = fs::write(group.with_file_name("tasks"), me);
        });
        let thread = begins.recv().expect("it flushes");
        // Until it waits for the kernel, or is done.
        let status = PathBuf::from(format!("/proc/self/task/{thread}/stat"));
        let waits = |stat: String| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" D"));
        while !flushing.is_finished() && !fs::read_to_string(&status).is_ok_and(waits) {
            thread::sleep(Duration::from_millis(1));
        }
        flushing
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
