//! Copies out of mapped files that survive `SIGBUS`.
//!
//! The kernel sends `SIGBUS` for an access to a mapped page that it cannot provide: the file has been truncated, or its memory is
//! exhausted or corrupt. By default that ends the process, and with it all other disks. Here the handler puts a zero page in the
//! place of the missing one, so that the copy ends, and the caller learns that the copy is not the file's content.

use std::cell::Cell;
use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence};

/// The kernel's smallest page, in bytes.
const PAGE: usize = 4096;

thread_local! {
    /// The mapped range that this thread copies from, and whether a page was missing. Constant initialisation and no destructor,
    /// so that the handler may use it at any time.
    static COPYING: Cell<Copying> = const { Cell::new(Copying { start: 0, end: 0, missed: false }) };
}

#[derive(Clone, Copy)]
struct Copying {
    start: usize,
    end: usize,
    missed: bool,
}

/// Copies `length` bytes. Returns false if the kernel could not provide a page; `target` then holds zeroes in its place, and the
/// mapping must be given up.
///
/// # Safety
/// `source` is readable for `length` bytes, in a mapping of a file that this process alone unmaps; `target` is writable for
/// `length` bytes and does not overlap it. [`install`] has succeeded.
pub(super) unsafe fn copy(source: *const u8, target: *mut u8, length: usize) -> bool {
    let start = source as usize;
    COPYING.set(Copying { start, end: start + length, missed: false });
    // The handler runs on this thread: order matters to the compiler only.
    compiler_fence(Ordering::SeqCst);
    // SAFETY: by the contract above. Another process may change the bytes meanwhile; any value is valid for a byte.
    unsafe { ptr::copy_nonoverlapping(source, target, length) };
    compiler_fence(Ordering::SeqCst);
    !COPYING.replace(Copying { start: 0, end: 0, missed: false }).missed
}

/// Installs the handler, once for the process.
///
/// # Errors
/// The kernel refuses the handler.
pub(super) fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let mut previous = no_action();
        // SAFETY: reads the present action into `previous`.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut previous) } < 0 {
            return Err(errno());
        }
        // Before the handler can run: it passes on what is not ours.
        let _ = PREVIOUS.set(previous);
        let mut action = no_action();
        action.sa_sigaction = on_bus_error as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler is async-signal-safe: it uses a thread-local without initialiser, a set `OnceLock`, and system calls.
        if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } < 0 {
            return Err(errno());
        }
        Ok(())
    });
    installed.map_err(io::Error::from_raw_os_error)
}

/// The action before ours: that of Rust's runtime, which reports an exhausted stack.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`, which has an address for SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    let copying = COPYING.get();
    if (copying.start..copying.end).contains(&address) && replace_page(address) {
        COPYING.set(Copying { missed: true, ..copying });
        return;
    }
    // Not ours: the access repeats under the previous action, which ends the process.
    if let Some(previous) = PREVIOUS.get() {
        // SAFETY: restores an action that the kernel gave us.
        unsafe { libc::sigaction(signal, previous, ptr::null_mut()) };
    }
}

/// Puts a page of zeroes in the place of the missing one.
fn replace_page(address: usize) -> bool {
    let page = (address & !(PAGE - 1)) as *mut libc::c_void;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the page belongs to the mapping that this thread copies from, which is given up after the copy.
    let mapped = unsafe { libc::mmap(page, PAGE, libc::PROT_READ, flags, -1, 0) };
    mapped != libc::MAP_FAILED
}

fn no_action() -> libc::sigaction {
    // SAFETY: all zeroes is the default action with an empty mask.
    unsafe { std::mem::zeroed() }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)
}
