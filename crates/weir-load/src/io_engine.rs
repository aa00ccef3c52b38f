//! The system calls of a load on a file or block device.

use serde::{Deserialize, Serialize};

/// The interface by which a load reads and writes files and block devices. Other targets have their own engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IoEngine {
    /// A ring of its own for each thread: many requests in flight, registered file and buffers.
    #[default]
    IoUring,
    /// preadv2(2) and pwritev2(2): one request per thread at a time, the simplest interface.
    Psync,
}

impl IoEngine {
    /// `io_uring` or `psync`, as on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            IoEngine::IoUring => "io_uring",
            IoEngine::Psync => "psync",
        }
    }
}
