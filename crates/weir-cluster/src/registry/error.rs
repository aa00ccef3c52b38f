//! What a registry can answer instead of a result, and what to do about it.

use serde::{Deserialize, Serialize};

use super::{Entry, LeaseId};

/// What the caller has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegistryErrorKind {
    /// Try again later; after a change, read first, because it may have been made.
    Retry,
    /// Somebody was faster: read again and decide again.
    Conflict,
    /// Get a new lease and re-establish what hung on the old one.
    NewLease,
    /// Changes were missed: list again, then watch from there.
    ListAgain,
    /// The call is at fault and will fail each time.
    Caller,
    /// A person has to look.
    Operator,
}

/// Why a registry did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum RegistryError {
    /// The registry cannot be reached or does not answer in time.
    #[error("the registry is unavailable ({reason}); try again, and read before repeating a change")]
    Unavailable {
        /// What was seen.
        reason: String,
    },
    /// A condition of the transaction did not hold; nothing was changed.
    #[error("another change came first; read again and decide again")]
    Conflict {
        /// Those of the compared keys that exist, as they are now.
        current: Vec<Entry>,
    },
    /// The lease has expired, was revoked or never existed.
    #[error("lease {lease} has ended; grant a new one and register again")]
    LeaseExpired {
        /// The lease that was named.
        lease: LeaseId,
    },
    /// The asked-for changes are no longer, or not, known one by one.
    #[error("the changes before revision {oldest} are no longer known; list again and watch from there")]
    Compacted {
        /// The oldest change that is still known.
        oldest: u64,
    },
    /// The call breaks a rule or a limit.
    #[error("malformed request: {reason}")]
    Malformed {
        /// Which one.
        reason: String,
    },
    /// A bound of the registry is reached (P10).
    #[error("the registry is full: {reason}")]
    Full {
        /// Which bound, and what makes room.
        reason: String,
    },
    /// Stored data does not check (P11).
    #[error(
        "the registry's data is damaged: {reason}; restore the file from a copy or set the cluster up again"
    )]
    Corrupt {
        /// What does not check.
        reason: String,
    },
    /// The registry's file or socket cannot be used at all.
    #[error("{reason}")]
    Setup {
        /// What was tried and what the system said.
        reason: String,
    },
}

impl RegistryError {
    /// What the caller has to do.
    #[must_use]
    pub fn kind(&self) -> RegistryErrorKind {
        match self {
            RegistryError::Unavailable { .. } => RegistryErrorKind::Retry,
            RegistryError::Conflict { .. } => RegistryErrorKind::Conflict,
            RegistryError::LeaseExpired { .. } => RegistryErrorKind::NewLease,
            RegistryError::Compacted { .. } => RegistryErrorKind::ListAgain,
            RegistryError::Malformed { .. } => RegistryErrorKind::Caller,
            RegistryError::Full { .. } | RegistryError::Corrupt { .. } | RegistryError::Setup { .. } => {
                RegistryErrorKind::Operator
            }
        }
    }

    pub(crate) fn unavailable(reason: impl Into<String>) -> RegistryError {
        RegistryError::Unavailable { reason: reason.into() }
    }

    pub(crate) fn malformed(reason: impl Into<String>) -> RegistryError {
        RegistryError::Malformed { reason: reason.into() }
    }
}
