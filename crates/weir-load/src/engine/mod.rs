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
    /// Whether the engine uses the bytes of a write; if not, they need not be unique.
    const CARRIES_DATA: bool = true;

    /// `null`, `io_uring`, `psync` or `nbd`, as in a summary.
    fn name(&self) -> &'static str;

    /// The first `length` bytes of a slot's buffer: the payload of the next write in that slot. The content stays until the
    /// caller or a read changes it.
    fn buffer(&mut self, slot: u32, length: u32) -> &mut [u8];

    /// The data of a finished read in that slot. Only if the engine keeps data.
    fn data(&self, slot: u32, length: u32) -> &[u8];

    /// Queues a request; the next [`Engine::reap`] submits it.
    fn queue(&mut self, io: Io);

    /// Submits all queued requests in one batch, waits until at least one request is answered or `until` has passed
    /// ([`Nanos::NEVER`]: without limit), and appends all answered ones.
    ///
    /// # Errors
    /// The target is unusable. A single failed request is not an error: see [`Done::errno`].
    fn reap(&mut self, until: Nanos, done: &mut Vec<Done>) -> Result<(), LoadError>;

    /// The text of one of the engine's error numbers.
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
