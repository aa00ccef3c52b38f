//! The data path of a node: a shard is one thread with one reactor that owns some disks and all that belongs
//! to them. Nothing is shared between shards; they and the control plane talk through [`messages`].

pub mod barrier;
pub mod counters;
mod disk;
mod dispatch;
pub mod health;
mod load;
pub mod messages;
pub mod opener;
pub(crate) mod profile;
pub(crate) mod queue;
pub mod stack;
mod thread;

pub use queue::ShardQueue;
pub use thread::{Turned, Turning};

/// The number of the shard that has `disk`, on a node with so many `shards` (at least one).
#[must_use]
pub fn shard_of(disk: &str, shards: usize) -> usize {
    crc32c::crc32c(disk.as_bytes()) as usize % shards
}

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use weir_accel::flash::FlashDevice;
use weir_accel::planted::Planted;
use weir_block::{Engine, Reactor, ReactorConfig};

use health::Health;
use messages::{Command, Notice};
use opener::Storage;
use stack::Wrap;

/// Commands that may wait for a shard (P10).
const COMMANDS: usize = 4096;

/// The common configuration of a node's shards.
#[derive(Clone)]
pub struct ShardConfig {
    /// Most bytes of buffers for requests under way.
    pub buffer_bytes: usize,
    /// Longest busy-poll before the thread blocks; zero: it blocks at once.
    pub busy_poll: Duration,
    /// Bytes of a replica's log; the same on all nodes.
    pub log_bytes: u64,
    /// A replica that does not confirm within this time is lost (P9).
    pub peer_deadline: Duration,
    /// Writes wait at most this long for room in a log that frees nothing (P9).
    pub full_log_wait: Duration,
    /// Writes wait at most this long for space on a full volume; zero: not at all.
    pub full_volume_wait: Duration,
    /// Requests that need the coordinator of a volume wait for one at most this long (P9).
    pub coordinator_wait: Duration,
    /// Requests to a disk on an NBD server wait for one that is away at most this long (P9).
    pub server_wait: Duration,
    /// What was under way on a connection to an NBD server when it broke may land for this long (P4).
    pub nbd_fence_grace: Duration,
    /// The time that records may wait to be destaged while the log has room.
    pub destage_delay: Duration,
    /// Filesystems of this host may be on its disks: memory that the thread needs does not wait for their dirty pages.
    pub io_flusher: bool,
    /// The reactor's engine.
    pub engine: Engine,
    /// Opens the backings.
    pub storage: Arc<dyn Storage>,
    /// The node's flash device, if it has one.
    pub flash: Option<Arc<FlashDevice>>,
    /// Puts layers around those of each disk.
    pub wrap: Arc<dyn Wrap>,
    /// A bug on purpose, for the simulator alone.
    pub planted: Planted,
}

/// A running shard.
pub struct Shard {
    /// The way to it.
    pub queue: ShardQueue,
    thread: JoinHandle<()>,
}

impl Shard {
    /// Starts the thread of shard `number`. Its disks' notices go to `notices`.
    ///
    /// # Errors
    /// No thread, or no reactor, is available.
    pub fn start(number: usize, config: ShardConfig, notices: mpsc::Sender<Notice>) -> io::Result<Shard> {
        let (commands, queue) = mpsc::channel::<Command>(COMMANDS);
        let health = Arc::new(Health::default());
        let published = Arc::clone(&health);
        let (ready, started) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name(format!("weir-shard-{number}")).spawn(move || {
            if config.io_flusher
                && let Err(error) = rustix::process::configure_io_flusher_behavior(true)
            {
                tracing::warn!(%error, "a shard may wait for memory that only its own disks can free");
            }
            let reactor_config = ReactorConfig {
                buffer_limit: config.buffer_bytes,
                engine: config.engine,
                poll: config.busy_poll,
                ..ReactorConfig::default()
            };
            let turning = Reactor::new(reactor_config)
                .map(|reactor| Turning::new(reactor, config, queue, notices, published));
            match turning {
                Ok(mut shard) => {
                    // A closed channel means that the starter is gone, and the queue with it.
                    let _ = ready.send(Ok(shard.waker()));
                    shard.run();
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        })?;
        let waker = started.recv().map_err(|_| io::Error::other("the shard ended while starting"))??;
        Ok(Shard { queue: ShardQueue::new(commands, move || waker.wake()).with_health(health), thread })
    }

    /// Waits for the thread, which ends after [`Command::Stop`].
    pub fn join(self) {
        if self.thread.join().is_err() {
            tracing::error!("a shard's thread ended with a panic");
        }
    }
}

/// Answers a question whose asker may have gone.
fn answer<T>(to: oneshot::Sender<T>, value: T) {
    let _ = to.send(value);
}
