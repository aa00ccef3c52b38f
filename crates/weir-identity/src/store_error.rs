//! Why keys and certificates cannot be stored or loaded.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::name::Fingerprint;

/// Longest wait for another process that writes.
pub(crate) const LOCK_PATIENCE: Duration = Duration::from_secs(5);

/// The failure to store or load.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Exists already.
    #[error("{path} exists; it was not overwritten. If its cluster is gone, move it away first")]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// Does not exist.
    #[error("{path} does not exist; {hint}")]
    Missing {
        /// The file.
        path: PathBuf,
        /// How it comes into being.
        hint: &'static str,
    },
    /// No space.
    #[error(
        "{path} could not be written, because its filesystem is full ({source}); a former file of this name stays. Free some space \
         and repeat"
    )]
    Full {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Not allowed.
    #[error("{path}: no permission to {action} it ({source}); run as the user that owns it")]
    Forbidden {
        /// The file.
        path: PathBuf,
        /// The attempted action.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// Readable by others.
    #[error(
        "{path} has mode {mode:04o}, so others than its owner can {what}; run: chmod {wanted:04o} {path}"
    )]
    TooOpen {
        /// The file or directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// The access that others have.
        what: &'static str,
        /// The mode that it should have.
        wanted: u32,
    },
    /// Of another user.
    #[error(
        "{path} belongs to user {owner}, this process runs as user {user}; a key must belong to the user that uses it: run as that \
         user, or, as root: chown {user} {path}"
    )]
    OtherOwner {
        /// The file.
        path: PathBuf,
        /// The owner's number.
        owner: u32,
        /// This process's.
        user: u32,
    },
    /// Not what it should be.
    #[error("{path} is damaged: {reason}; {remedy}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// A directory is in the place of a file.
    #[error("{path} is a directory, and a file is expected there; move it away")]
    Directory {
        /// The directory.
        path: PathBuf,
    },
    /// Another process writes, and does not end.
    #[error(
        "{path} is locked by another process for more than {} s; end that process (`fuser {path}` names it) and repeat",
        LOCK_PATIENCE.as_secs()
    )]
    Busy {
        /// The file of the lock.
        path: PathBuf,
    },
    /// Another authority than the one that the registry names.
    #[error(
        "{path} has the authority {found}, and the registry says that {expected} signs; restore the file of that one"
    )]
    OtherAuthority {
        /// The file.
        path: PathBuf,
        /// The authority in it.
        found: Fingerprint,
        /// The expected one.
        expected: Fingerprint,
    },
    /// Any other error of the system.
    #[error("cannot {action} {path}: {source}")]
    System {
        /// The file.
        path: PathBuf,
        /// The attempted action.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl StoreError {
    pub(crate) fn system(path: &Path, action: &'static str, source: io::Error) -> StoreError {
        let path = path.to_path_buf();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreError::Full { path, source },
            io::ErrorKind::PermissionDenied => StoreError::Forbidden { path, action, source },
            io::ErrorKind::AlreadyExists => StoreError::Exists { path },
            io::ErrorKind::IsADirectory => StoreError::Directory { path },
            _ => StoreError::System { path, action, source },
        }
    }
}
