//! Why a load cannot start, or ends early.

use std::io;
use std::path::PathBuf;

use weir_block::size::Size;
use weir_nbd::UriError;
use weir_nbd::client::NbdError;

use crate::verify::{HistoryError, LayoutError};
use crate::workload::WorkloadError;

/// Why a load could not be started or had to end.
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
        /// Which.
        path: PathBuf,
        /// The operation that failed.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The ring broke.
    #[error("io_uring failed: {0}")]
    Ring(io::Error),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// Completions that cannot be polled for.
    #[error("{} cannot be polled: {why}; leave --poll out", path.display())]
    NoPolling {
        /// Which.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// An engine or a way of waiting that is for files and devices only.
    #[error("{what} is for files and block devices, and {target} is neither: leave it out")]
    NotAFile {
        /// The target, as it was named.
        target: String,
        /// The option.
        what: &'static str,
    },
    /// Nothing is kept there that could be judged.
    #[error("{0} keeps nothing that could be judged: name a file, a block device or an export")]
    NothingThere(String),
    /// Neither a file nor a block device.
    #[error("{} is neither a file nor a block device", .0.display())]
    NotATarget(PathBuf),
    /// A target that does not exist and whose size is not known.
    #[error("{} does not exist: give a size to create it", .0.display())]
    NoSize(PathBuf),
    /// The null target needs a size.
    #[error("`{0}` is not a null target: write null, or null:<size> such as null:1G")]
    Null(String),
    /// The pass before a load failed.
    #[error("filling {target} before the load failed: {error}")]
    Prefill {
        /// The target, as it was named.
        target: String,
        /// The error of the first failed request.
        error: String,
    },
    /// The pass before a load would be, or has become, larger than was allowed.
    #[error(
        "{target}: {what}; name a smaller range (--size), allow more (--prefill-size, --prefill-time), or leave the filling \
         out (--no-prefill)"
    )]
    PrefillLimit {
        /// The target, as it was named.
        target: String,
        /// What is too much.
        what: String,
    },
    /// Writing would destroy something.
    #[error(
        "{target} holds data ({found}), and this load would overwrite it: pass --destroy if it may be lost"
    )]
    NotEmpty {
        /// The target, as it was named.
        target: String,
        /// The first data on it.
        found: String,
    },
    /// Writing to a target that takes no writes.
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
        /// The target, as it was named.
        target: String,
        /// Smallest.
        minimum: Size,
        /// Largest.
        maximum: Size,
        /// The workload's.
        block_size: Size,
    },
    /// Blocks that had to be judged could not be read.
    #[error("{failed} block(s) could not be read and are not judged; the server failed the reads")]
    NotJudged {
        /// How many.
        failed: u64,
    },
    /// The connection to a verified export could not be made again in time.
    #[error("no export could be reached for {waited:?} ({attempts} attempts), last: {last}")]
    Unreachable {
        /// How long.
        waited: std::time::Duration,
        /// How often it was tried.
        attempts: u64,
        /// The last reason.
        last: String,
    },
}
