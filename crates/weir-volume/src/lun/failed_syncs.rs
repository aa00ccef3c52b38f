//! Syncs of a shared LUN that have failed, counted by its coordinator for all disks of the volume.
//!
//! Storage whose sync fails may have lost whatever was written to it and not synced, whoever wrote it, and no later sync would tell (P8). So
//! each owner hears of a failed one, and the next flush of its disk fails.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use weir_block::Waker;

/// The count of one mount.
#[derive(Debug, Default)]
pub struct FailedSyncs {
    count: AtomicU64,
    /// Of the shards that serve the volume's disks.
    wakers: Mutex<Vec<Arc<Waker>>>,
}

impl FailedSyncs {
    /// How many there were since the mount.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// One has failed: every shard that serves a disk of the volume tells the owner. Returns how many there were before.
    pub fn add(&self) -> u64 {
        let before = self.count.fetch_add(1, Ordering::AcqRel);
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(|waker| waker.wake());
        before
    }

    /// One has failed with this error of the system. It does not count if it says nothing of the LUN.
    pub fn failed_with(&self, errno: i32) {
        if !is_of_path(errno) {
            self.add();
        }
    }

    /// This shard serves a disk of the volume.
    pub fn watch(&self, waker: Arc<Waker>) {
        let mut wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        if !wakers.iter().any(|known| Arc::ptr_eq(known, &waker)) {
            wakers.push(waker);
        }
    }
}

/// The error is that of the way to the LUN, or of a fence: the LUN itself has kept what it had.
#[must_use]
pub fn is_of_path(errno: i32) -> bool {
    const ALL: [i32; 11] = [
        libc::EPERM,
        libc::EACCES,
        libc::EROFS,
        libc::EBADE,
        libc::ENOLINK,
        libc::ENODEV,
        libc::ENXIO,
        libc::ETIMEDOUT,
        libc::EHOSTDOWN,
        libc::ENOTCONN,
        libc::ESHUTDOWN,
    ];
    ALL.contains(&errno)
}
