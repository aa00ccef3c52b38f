//! SIGINT and SIGTERM: the measurement ends early, and its nodes, servers and files go with it.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Failure, Outcome};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_signal(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Handles both signals from now on. A lab's nodes have process groups of their own, so an ended measurement would leave them
/// running.
pub fn heed() {
    let handler = on_signal as extern "C" fn(libc::c_int);
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler stores to an atomic, which is safe in a signal handler.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

/// # Errors
/// A signal has arrived.
pub fn check() -> Outcome<()> {
    match INTERRUPTED.load(Ordering::Relaxed) {
        true => Err(Failure("interrupted".into())),
        false => Ok(()),
    }
}
