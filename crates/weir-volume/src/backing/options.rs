//! How a backing is opened.

use std::time::Duration;

use super::marker::Mark;

/// The execution of operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// Synchronous for files in memory, the reactor for everything else.
    #[default]
    Auto,
    /// Always the reactor.
    Reactor,
    /// Always synchronous, with the page cache. Blocks the shard: only for storage that never blocks.
    Inline,
}

/// Options for opening a backing.
#[derive(Clone, Debug)]
pub struct BackingOptions {
    /// Opens for writing.
    pub writable: bool,
    /// Size of the disk in bytes, from its record; without it, the size of the file or device. A shorter file reads as zeroes
    /// after its end.
    pub size: Option<u64>,
    /// 512 or 4096 bytes, from the disk's record; without it, 512 if the storage supports it, otherwise 4096.
    pub logical_block: Option<u32>,
    /// Maximum number of requests in flight (1 or more).
    pub depth: usize,
    /// The execution of operations.
    pub engine: EngineChoice,
    /// Shows a successor whether requests of this process are still in flight after its end.
    pub mark: Option<Mark>,
    /// Required identity of the file's directory as a volume ([`DirVolume::identify`](crate::DirVolume::identify)): if a
    /// different filesystem, or none, is mounted there, a file of the same name belongs to another disk.
    pub volume: Option<u64>,
    /// Requests to a disk of a volume on a LUN that need its coordinator wait for one for this long.
    pub coordinator_wait: Duration,
    /// Writes wait for space on a full volume for this long; zero: they fail at once.
    pub full_volume_wait: Duration,
    /// Requests to a disk on an NBD server wait for one that is away for this long.
    pub server_wait: Duration,
    /// What was under way on a connection to an NBD server when it broke may land for this long after it was closed.
    pub fence_grace: Duration,
}

impl Default for BackingOptions {
    fn default() -> BackingOptions {
        BackingOptions {
            writable: true,
            size: None,
            logical_block: None,
            depth: 256,
            engine: EngineChoice::Auto,
            mark: None,
            volume: None,
            coordinator_wait: Duration::from_secs(600),
            full_volume_wait: Duration::from_secs(600),
            server_wait: Duration::from_secs(600),
            fence_grace: Duration::from_secs(30),
        }
    }
}
