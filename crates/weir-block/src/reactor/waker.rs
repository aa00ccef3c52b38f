//! Wakes a shard from another thread, only if it sleeps.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Ends a reactor's wait. Enqueue the work first, then wake.
#[derive(Debug)]
pub struct Waker {
    event: OwnedFd,
    sleeping: AtomicBool,
    notified: AtomicBool,
}

impl Waker {
    pub(super) fn new() -> io::Result<Waker> {
        // SAFETY: eventfd takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor without another owner.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Waker { event, sleeping: AtomicBool::new(false), notified: AtomicBool::new(false) })
    }

    /// Makes the shard check its queues. Costs a system call only when the shard sleeps.
    pub fn wake(&self) {
        if !self.notified.swap(true, Ordering::SeqCst) && self.sleeping.load(Ordering::SeqCst) {
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight readable bytes. It cannot fail: the counter is reset at every wake-up.
            unsafe { libc::write(self.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// Whether a wake-up arrived since the last wait.
    #[must_use]
    pub fn is_notified(&self) -> bool {
        self.notified.load(Ordering::Acquire)
    }

    /// False when a wake-up arrived meanwhile: then poll, do not sleep.
    pub(super) fn prepare_to_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        !self.notified.load(Ordering::SeqCst)
    }

    pub(super) fn awake(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
        // Before the queues are read: a message added after this wakes us again.
        self.notified.store(false, Ordering::SeqCst);
    }

    pub(super) fn drain(&self) {
        let mut count = [0u8; 8];
        // SAFETY: eight writable bytes; the descriptor is non-blocking.
        unsafe { libc::read(self.event.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    pub(super) fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}
