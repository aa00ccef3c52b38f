//! Engines move bytes to and from a target. The generator chooses the requests and measures their latency.

mod file;
mod layer;
mod nbd;
mod null;
mod psync;
mod uring;

use weir_block::Nanos;

pub use self::file::FileOptions;
pub use self::layer::LayerLoad;
pub use self::nbd::NbdEngine;
pub use self::null::NullEngine;
pub use self::psync::PsyncEngine;
pub use self::uring::FileEngine;
pub use weir_nbd::client::Done;

use crate::error::LoadError;
use crate::io::Io;

/// A target, open for one thread.
pub trait Engine {
    /// Whether the bytes of a write go anywhere; if not, they need not be made different from each other.
    const CARRIES_DATA: bool = true;

    /// `null`, `io_uring`, `psync` or `nbd`, as in a summary.
    fn name(&self) -> &'static str;

    /// The first `length` bytes of a slot's buffer: what the next write in that slot will carry. The content stays
    /// until it is changed here or by a read.
    fn buffer(&mut self, slot: u32, length: u32) -> &mut [u8];

    /// What a finished read in that slot brought. Only while the engine was told to keep data.
    fn data(&self, slot: u32, length: u32) -> &[u8];

    /// Takes a request; it leaves with the next [`Engine::reap`].
    fn queue(&mut self, io: Io);

    /// Submits everything queued in one batch, waits until at least one request is answered or `until` has passed
    /// ([`Nanos::NEVER`]: as long as it takes), and appends all that are answered.
    ///
    /// # Errors
    /// The target is of no use any more. A single failed request is not an error: see [`Done::errno`].
    fn reap(&mut self, until: Nanos, done: &mut Vec<Done>) -> Result<(), LoadError>;

    /// One of the engine's error numbers in words.
    fn errno_text(&self, errno: u32) -> String {
        std::io::Error::from_raw_os_error(errno as i32).to_string()
    }
}

/// Waits until `until` when nothing is in flight that could end the wait; not at all for [`Nanos::NEVER`].
fn rest(until: Nanos) {
    if until != Nanos::NEVER {
        std::thread::sleep(until - Nanos::now());
    }
}
