//! The reactor's record of an operation until the kernel has completed it.

use crate::operation::{FileOperation, Interest, Token};

/// One entry of the reactor's table; its index is the kernel's user data.
pub(super) enum Slot {
    Watch {
        serial: u64,
        fd: i32,
        interest: Interest,
        token: Token,
    },
    /// A cancelled watch that waits for its last completion.
    Abandoned,
    Waker,
    File(FileOperation),
}
