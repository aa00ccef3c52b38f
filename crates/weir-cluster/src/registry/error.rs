//! Errors of a registry, and the remedy for each.

use serde::{Deserialize, Serialize};

use super::{Entry, LeaseId};

/// The action required of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegistryErrorKind {
    /// Try again later; after a change, read first, because the change may have happened.
    Retry,
    /// Another change came first: read again and decide again.
    Conflict,
    /// Get a new lease and re-create the keys of the old one.
    NewLease,
    /// Changes were missed: list again, then watch from there.
    ListAgain,
    /// The call is wrong and will always fail.
    Caller,
    /// An operator has to act.
    Operator,
}

/// The reason why a call to the registry failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum RegistryError {
    /// The registry cannot be reached or does not answer in time.
    #[error("the registry is unavailable ({reason}); try again, and read before repeating a change")]
    Unavailable {
        /// The observed cause.
        reason: String,
    },
    /// A condition of the transaction did not hold; nothing was changed.
    #[error("another change came first; read again and decide again")]
    Conflict {
        /// The current entries of the compared keys that exist.
        current: Vec<Entry>,
    },
    /// The lease has expired, was revoked or never existed.
    #[error("lease {lease} has ended; grant a new one and register again")]
    LeaseExpired {
        /// The lease of the call.
        lease: LeaseId,
    },
    /// The history no longer has the requested changes.
    #[error("the changes before revision {oldest} are no longer known; list again and watch from there")]
    Compacted {
        /// The oldest change in the history.
        oldest: u64,
    },
    /// The call breaks a rule or a limit.
    #[error("malformed request: {reason}")]
    Malformed {
        /// The rule or limit.
        reason: String,
    },
    /// A limit of the registry is reached (P10).
    #[error("the registry is full: {reason}")]
    Full {
        /// The limit, and the remedy.
        reason: String,
    },
    /// Stored data fails verification (P11).
    #[error(
        "the registry's data is damaged: {reason}; restore the file from a copy or set the cluster up again"
    )]
    Corrupt {
        /// The failed verification.
        reason: String,
    },
    /// The registry's file or socket cannot be used at all.
    #[error("{reason}")]
    Setup {
        /// The operation and the system's error.
        reason: String,
    },
}

impl RegistryError {
    /// The action required of the caller.
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

    /// [`RegistryError::Unavailable`] for an observed cause.
    #[must_use]
    pub fn unavailable(reason: impl Into<String>) -> RegistryError {
        RegistryError::Unavailable { reason: reason.into() }
    }

    /// [`RegistryError::Malformed`] for a rule or limit.
    #[must_use]
    pub fn malformed(reason: impl Into<String>) -> RegistryError {
        RegistryError::Malformed { reason: reason.into() }
    }
}
