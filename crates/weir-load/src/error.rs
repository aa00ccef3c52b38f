//! Reasons why a load cannot start, or ends early.

use std::io;
use std::path::PathBuf;

use weir_block::size::Size;
use weir_nbd::UriError;
use weir_nbd::client::NbdError;

use crate::verify::{HistoryError, LayoutError};
use crate::workload::WorkloadError;

/// The reason why a load could not start or had to end.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The workload is not possible, or not on this target.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// An export's URI is malformed.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// A session with an export failed.
    #[error(transparent)]
    Nbd(#[from] NbdError),
    /// A verified range is not possible.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A history could not be saved or loaded.
    #[error(transparent)]
    History(#[from] HistoryError),
    /// A file or device could not be used.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// The path.
        path: PathBuf,
        /// The operation that failed.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
    /// The ring broke.
    #[error("io_uring failed: {0}")]
    Ring(io::Error),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// The device does not support polling for completions.
    #[error("{} cannot be polled: {why}; leave --poll out", path.display())]
    NoPolling {
        /// The path.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// An engine or a method of waiting that supports only files and devices.
    #[error("{what} is for files and block devices, and {target} is neither: leave it out")]
    NotAFile {
        /// The target, as given.
        target: String,
        /// The option.
        what: &'static str,
    },
    /// The target keeps no data to verify.
    #[error("{0} keeps nothing that could be judged: name a file, a block device or an export")]
    NothingThere(String),
    /// Neither a file nor a block device.
    #[error("{} is neither a file nor a block device", .0.display())]
    NotATarget(PathBuf),
    /// A target that does not exist, without a size to create it.
    #[error("{} does not exist: give a size to create it", .0.display())]
    NoSize(PathBuf),
    /// The null target needs a size.
    #[error("`{0}` is not a null target: write null, or null:<size> such as null:1G")]
    Null(String),
    /// The prefill failed.
    #[error("filling {target} before the load failed: {error}")]
    Prefill {
        /// The target, as given.
        target: String,
        /// The error of the first failed request.
        error: String,
    },
    /// The prefill would exceed, or has exceeded, its limit.
    #[error(
        "{target}: {what}; name a smaller range (--size), allow more (--prefill-size, --prefill-time), or leave the filling \
         out (--no-prefill)"
    )]
    PrefillLimit {
        /// The target, as given.
        target: String,
        /// The exceeded limit.
        what: String,
    },
    /// Writing would destroy something.
    #[error(
        "{target} holds data ({found}), and this load would overwrite it: pass --destroy if it may be lost"
    )]
    NotEmpty {
        /// The target, as given.
        target: String,
        /// The first data on it.
        found: String,
    },
    /// Writing to a read-only target.
    #[error("{0} takes no writes")]
    ReadOnly(String),
    /// FUA on an export that has none.
    #[error("{0} does not offer FUA: leave fua out")]
    NoFua(String),
    /// Flushes on an export that has none.
    #[error("{0} does not offer flushes: leave the flushes out")]
    NoFlush(String),
    /// Requests that an export does not take.
    #[error(
        "{target} takes requests whose offsets and sizes are multiples of {minimum} and at most {maximum}, not {block_size} (look at alignment and offset too)"
    )]
    BlockSize {
        /// The target, as given.
        target: String,
        /// Smallest.
        minimum: Size,
        /// Largest.
        maximum: Size,
        /// The workload's.
        block_size: Size,
    },
    /// Blocks that had to be verified could not be read.
    #[error("{failed} block(s) could not be read and are not judged; the server failed the reads")]
    NotJudged {
        /// Number of blocks.
        failed: u64,
    },
    /// The load could not reconnect to a verified export in time.
    #[error("no export could be reached for {waited:?} ({attempts} attempts), last: {last}")]
    Unreachable {
        /// Time spent on reconnecting.
        waited: std::time::Duration,
        /// Number of attempts.
        attempts: u64,
        /// The last reason.
        last: String,
    },
}
