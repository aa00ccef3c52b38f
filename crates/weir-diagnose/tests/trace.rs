//! The block layer's tracepoints by a real bpftrace, on a loop device whose requests are known. As root.
#![allow(clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use weir_block::BufferPool;
use weir_diagnose::counters::{Traced, Tracer};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;

/// Requests of others (udev looks at a device that comes).
const STRAY: u64 = 16;

/// A loop device over a file; detached when dropped.
struct Loop {
    device: PathBuf,
    _directory: tempfile::TempDir,
}

impl Loop {
    fn new() -> Loop {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("disk");
        File::create(&file).unwrap().set_len(BLOCKS * BLOCK).unwrap();
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&file).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "loop devices need root: {said}");
        let device = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
        Loop { device, _directory: directory }
    }

    fn name(&self) -> &str {
        self.device.file_name().unwrap().to_str().unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
    }
}

/// Reads these blocks one after the other, past the page cache.
fn read(device: &Path, blocks: impl Iterator<Item = u64>) {
    const O_DIRECT: i32 = 0o40000;
    let file = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(device).unwrap();
    let mut buffer = BufferPool::new(BLOCK as usize).take(BLOCK as usize).unwrap();
    blocks.for_each(|block| file.read_exact_at(buffer.bytes_mut(), block * BLOCK).unwrap());
}

#[test]
fn arrivals_their_order_and_who_made_them_are_counted() {
    let disk = Loop::new();
    let mut tracer = Tracer::start(disk.name()).unwrap();
    let mut during = |load: &dyn Fn()| -> Traced {
        let before = tracer.print().unwrap();
        load();
        before.until(&tracer.print().unwrap())
    };
    let upward = during(&|| read(&disk.device, 0..BLOCKS));
    let downward = during(&|| read(&disk.device, (0..BLOCKS).rev()));
    let shared = during(&|| {
        std::thread::scope(|scope| {
            (0..3).for_each(|third| {
                let device = &disk.device;
                scope.spawn(move || read(device, (third..BLOCKS).step_by(3)));
            });
        });
    });
    for traced in [upward, downward, shared] {
        assert!((BLOCKS..=BLOCKS + STRAY).contains(&traced.arrivals), "{traced:?}");
        assert!(traced.device_ns.is_some_and(|time| time > 100.0 && time < 1e9), "{traced:?}");
        assert!(traced.queue_ns.is_some(), "{traced:?}");
    }
    // Down to the first one, and what others ask for in between.
    assert!(upward.inversions <= 1 + STRAY, "{upward:?}");
    assert!(downward.inversions >= BLOCKS - 2, "{downward:?}");
    assert!((3..=3 + STRAY).contains(&shared.submitters), "{shared:?}");
    assert!(upward.submitters < shared.submitters, "{upward:?}, {shared:?}");
}
