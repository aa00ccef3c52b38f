//! The error that every request to a node may end with.

use serde::{Deserialize, Serialize};
use weir_identity::StoreError;

/// The kind of an error, by the caller's remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ApiErrorKind {
    /// There is no such thing.
    NotFound,
    /// There is one already.
    Exists,
    /// The request itself is wrong.
    Invalid,
    /// Not in the present state, or not without an explicit option.
    Refused,
    /// Not by this caller.
    Forbidden,
    /// Not now: the registry or a node cannot be reached. Try again.
    Unavailable,
    /// The storage or the system failed.
    Failed,
}

/// An error that says what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
#[serde(tag = "schema", rename = "weir.api-error/1")]
pub struct ApiError {
    /// The kind, as a word.
    pub kind: ApiErrorKind,
    /// The error within that kind, as a word, if programs need to distinguish it: [`NOT_JOINED`].
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub code: String,
    /// The problem, and its place.
    pub message: String,
    /// The remedy; empty if the message has it.
    pub hint: String,
    /// Another node can do it, for the same caller; answered with status 307. [`crate::client`] asks there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elsewhere: Option<Box<Elsewhere>>,
}

/// A node of another host, and its API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Elsewhere {
    /// Its name, which its certificate must have.
    pub node: String,
    /// `https://HOST:PORT`.
    pub api: String,
}

/// The code of the error of a node that has not joined the cluster yet.
pub const NOT_JOINED: &str = "not-joined";

/// The code of the error of a compaction that was interrupted: its coordinator has ended, or coordinates the volume no more.
pub const COMPACTION_INTERRUPTED: &str = "compaction-interrupted";

/// The code of the error of a compaction that has failed.
pub const COMPACTION_FAILED: &str = "compaction-failed";

/// The code of the error of a filesystem that reports damage on its storage.
pub const DAMAGED: &str = "damaged";

/// The code of the error of a filesystem that has failed as a whole on its node; another node may be able to do what was asked.
pub const FILESYSTEM_FAILED: &str = "filesystem-failed";

/// A compaction of `disk` was interrupted, in whichever way.
#[must_use]
pub fn compaction_interrupted(disk: &str) -> ApiError {
    let message = format!(
        "the compaction of disk {disk} was interrupted, because the node that copied it has ended or coordinates its volume no more: \
         the disk is as it was before"
    );
    let hint = format!("`weir disk compact {disk}` begins anew");
    ApiError::new(ApiErrorKind::Unavailable, message).code(COMPACTION_INTERRUPTED).hint(hint)
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> ApiError {
        let kind = match &error {
            StoreError::Exists { .. } => ApiErrorKind::Exists,
            StoreError::Missing { .. } => ApiErrorKind::NotFound,
            StoreError::Busy { .. } => ApiErrorKind::Unavailable,
            StoreError::Forbidden { .. }
            | StoreError::Directory { .. }
            | StoreError::TooOpen { .. }
            | StoreError::OtherOwner { .. }
            | StoreError::OtherAuthority { .. } => ApiErrorKind::Refused,
            StoreError::Full { .. } | StoreError::Damaged { .. } | StoreError::System { .. } => {
                ApiErrorKind::Failed
            }
        };
        ApiError::new(kind, error.to_string())
    }
}

impl ApiError {
    /// An error without a hint.
    pub fn new(kind: ApiErrorKind, message: impl Into<String>) -> ApiError {
        ApiError { kind, code: String::new(), message: message.into(), hint: String::new(), elsewhere: None }
    }

    /// Tells it from other errors of its kind.
    #[must_use]
    pub fn code(mut self, code: &str) -> ApiError {
        code.clone_into(&mut self.code);
        self
    }

    /// Says which node can do it.
    #[must_use]
    pub fn elsewhere(mut self, node: impl Into<String>, api: impl Into<String>) -> ApiError {
        self.elsewhere = Some(Box::new(Elsewhere { node: node.into(), api: api.into() }));
        self
    }

    /// Says what to do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> ApiError {
        self.hint = hint.into();
        self
    }
}
