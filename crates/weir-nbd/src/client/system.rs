//! System calls of the client's sockets.

use std::io;

/// Repeats a system call that a signal interrupts. `call` returns a number of bytes, or a negative one and sets `errno`.
pub(super) fn uninterrupted(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(bytes) = usize::try_from(call()) {
            return Ok(bytes);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
