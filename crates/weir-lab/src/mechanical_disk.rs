//! The *simulated* disk of 15 000 revolutions a minute ([`crate::fault::disk`]) as a block device with several paths: a LUN of several nodes.
//!
//! Its bytes are in memory. It is a file of a FUSE filesystem that this process serves, with a loop device for each path.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fs, thread};

use fuser::{ReplyData, ReplyEmpty, ReplyWrite};
use slab::Slab;
use weir_block::{Nanos, RequestKind};

use crate::error::LabError;
use crate::fault::{Faults, Mechanism, Request, Switch, Timing};
use crate::one_file::{FailOnPanic, FileServer, OneFile};
use crate::volatile_disk::LoopDevice;

/// Longest sleep of the thread that answers: it looks whether the disk is over.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The disk. Its users have closed it before it is dropped.
pub struct MechanicalDisk {
    // Before their file.
    devices: Vec<LoopDevice>,
    _file: OneFile,
    shared: Arc<Shared>,
    switch: Switch,
    clock: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// The next deadline may be another one.
    changed: Condvar,
}

struct State {
    mechanism: Mechanism,
    data: Vec<u8>,
    waiting: Slab<Waiting>,
    is_over: bool,
}

/// A request without an answer.
enum Waiting {
    Read { offset: u64, bytes: u32, reply: ReplyData },
    Write { offset: u64, data: Vec<u8>, reply: ReplyWrite },
    Flush(ReplyEmpty),
}

impl MechanicalDisk {
    /// Makes a disk of `size` bytes, full of zeroes, with `paths` block devices. `directory` is created. Needs root. It answers at once until
    /// [`MechanicalDisk::turn`].
    ///
    /// # Errors
    /// FUSE or a loop device is not available.
    pub fn create(directory: &Path, size: usize, paths: usize) -> Result<MechanicalDisk, LabError> {
        let mount = directory.join("fuse");
        let making = LabError::system(format!("making a simulated disk in {}", directory.display()));
        fs::create_dir_all(&mount).map_err(making)?;
        let switch = Switch::default();
        let mechanism = Mechanism::new(switch.clone(), size as u64);
        let (data, waiting) = (vec![0; size], Slab::new());
        let state = Mutex::new(State { mechanism, data, waiting, is_over: false });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        let (ticking, place) = (Arc::clone(&shared), mount.clone());
        let clock =
            thread::Builder::new().name("simulated-disk".into()).spawn(move || ticking.answer(&place));
        let clock = clock.map_err(LabError::system("starting a thread for a simulated disk"))?;
        let file = OneFile::serve(Disk(Arc::clone(&shared)), &mount, "weir-simulated-disk")?;
        let device = |_| {
            let device = LoopDevice::attach(&file.path())?;
            device.set_rotating().map(|()| device)
        };
        let devices = (0..paths).map(device).collect::<Result<Vec<_>, LabError>>()?;
        Ok(MechanicalDisk { devices, _file: file, shared, switch, clock: Some(clock) })
    }

    /// Its block devices.
    #[must_use]
    pub fn paths(&self) -> Vec<PathBuf> {
        self.devices.iter().map(|device| device.path().to_owned()).collect()
    }

    /// It takes the time of such a disk, or answers at once.
    pub fn turn(&self, turns: bool) {
        self.switch.set(Faults { simulated_disk: turns, ..Faults::default() });
        self.shared.changed.notify_one();
    }
}

impl Drop for MechanicalDisk {
    fn drop(&mut self) {
        // What is under way ends at once.
        self.turn(false);
        self.devices.clear();
        self.shared.state().is_over = true;
        self.shared.changed.notify_one();
        // It cannot fail but by a panic, which was printed.
        let _ = self.clock.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers requests when their time has come, until the disk is over. `mount` is the place of its file.
    fn answer(&self, mount: &Path) {
        // By default the kernel may wake it 50 us late, which is almost a request. It is no less a disk if that is refused.
        let _ = rustix::thread::set_current_timer_slack(Some(NonZeroU64::MIN));
        let _fail_on_panic = FailOnPanic(mount);
        let mut state = self.state();
        while !state.is_over {
            let now = state.now();
            state.complete(now);
            let pause = (state.mechanism.deadline().max(now) - now).min(LOOK_AGAIN);
            let waited = self.changed.wait_timeout(state, pause);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn arrive(&self, kind: RequestKind, (offset, bytes): (u64, u64), waiting: Waiting) {
        let mut state = self.state();
        let now = state.now();
        let before = state.mechanism.deadline();
        let key = state.waiting.insert(waiting);
        state.mechanism.arrive(Request { key, kind, offset, bytes }, now);
        state.complete(now);
        let is_sooner = state.mechanism.deadline() < before;
        drop(state);
        if is_sooner {
            self.changed.notify_one();
        }
    }
}

impl State {
    /// The disk's time. It is read with the lock held, so that it never goes back.
    #[expect(clippy::unused_self, reason = "whoever has the state has the lock")]
    fn now(&self) -> Nanos {
        Nanos::now()
    }

    fn complete(&mut self, now: Nanos) {
        while let Some((key, _)) = self.mechanism.next(now) {
            match self.waiting.remove(key) {
                Waiting::Read { offset, bytes, reply } => {
                    let (start, end) = (offset as usize, offset as usize + bytes as usize);
                    reply.data(self.data.get(start..end.min(self.data.len())).unwrap_or_default());
                }
                Waiting::Write { offset, data, reply } => {
                    let start = offset as usize;
                    match self.data.get_mut(start..start + data.len()) {
                        Some(place) => {
                            place.copy_from_slice(&data);
                            reply.written(data.len() as u32);
                        }
                        None => reply.error(fuser::Errno::ENOSPC),
                    }
                }
                Waiting::Flush(reply) => reply.ok(),
            }
            self.mechanism.returned(key, now);
        }
    }
}

struct Disk(Arc<Shared>);

impl FileServer for Disk {
    fn size(&self) -> u64 {
        self.0.state().data.len() as u64
    }

    fn read(&self, offset: u64, bytes: u32, reply: ReplyData) {
        let waiting = Waiting::Read { offset, bytes, reply };
        self.0.arrive(RequestKind::Read, (offset, u64::from(bytes)), waiting);
    }

    fn write(&self, offset: u64, data: &[u8], reply: ReplyWrite) {
        let waiting = Waiting::Write { offset, data: data.to_vec(), reply };
        self.0.arrive(RequestKind::Write, (offset, data.len() as u64), waiting);
    }

    fn flush(&self, reply: ReplyEmpty) {
        self.0.arrive(RequestKind::Flush, (0, 0), Waiting::Flush(reply));
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test")]

    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const THREADS: usize = 8;
    /// Blocks of the disk: each has a byte of its own.
    const BLOCKS: u64 = 256;
    const REQUESTS: u64 = 16 * BLOCKS;
    /// Of a block that is written, between the disk's head and its medium.
    const TRANSFER: Duration = Duration::from_micros(31);

    /// A block that direct I/O takes.
    #[repr(C, align(4096))]
    struct Block([u8; 4096]);

    #[test]
    fn requests_by_several_paths_reach_one_disk_that_takes_its_time() {
        let directory = tempfile::tempdir().unwrap();
        let disk = MechanicalDisk::create(directory.path(), 1 << 20, 2).unwrap();
        disk.turn(true);
        let begin = Nanos::now();
        let paths = disk.paths();
        // One after the other in the disk's order, so that requests arrive while others are answered.
        let turn = AtomicU64::new(0);
        thread::scope(|scope| {
            for path in paths.iter().cycle().take(THREADS) {
                let mut options = fs::File::options();
                options.read(true).write(true).custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed());
                let file = options.open(path).unwrap();
                let turn = &turn;
                scope.spawn(move || {
                    while let at = turn.fetch_add(1, Ordering::Relaxed)
                        && at < REQUESTS
                    {
                        let (mut block, place) = (Block([at as u8; 4096]), at % BLOCKS * 4096);
                        if (at / BLOCKS).is_multiple_of(2) {
                            file.write_all_at(&block.0, place).unwrap();
                        } else {
                            file.read_exact_at(&mut block.0, place).unwrap();
                            assert!(
                                block.0.iter().all(|byte| u64::from(*byte) == at % BLOCKS),
                                "block {place}"
                            );
                        }
                    }
                });
            }
        });
        assert!(Nanos::now() - begin > REQUESTS as u32 / 2 * TRANSFER, "the disk takes its time");
        disk.turn(false);
    }
}
