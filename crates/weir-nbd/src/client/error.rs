//! Errors of requests and connections.

use std::io;
use std::time::Duration;

use super::slot::NbdCommand;
use crate::protocol::error as errno;
use crate::uri::Address;

/// A failed request or a failed connection. [`NbdError::is_connection`] distinguishes them.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// The server could not be reached.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// The server's address.
        address: Address,
        /// The reason.
        source: io::Error,
    },
    /// The server refused the export during the handshake.
    #[error("{address} refuses the export `{export}`: {reason}")]
    Refused {
        /// The server's address.
        address: Address,
        /// The requested export.
        export: String,
        /// The server has no such export. Otherwise the export exists but is unavailable, perhaps temporarily.
        is_unknown: bool,
        /// The server's message, or ours for its error number.
        reason: String,
    },
    /// The connection ended.
    #[error("the server closed the connection with {in_flight} request(s) in flight")]
    Closed {
        /// Number of requests with an unknown outcome.
        in_flight: usize,
    },
    /// The connection broke.
    #[error("the connection broke with {in_flight} request(s) in flight: {source}")]
    Broken {
        /// Number of requests with an unknown outcome.
        in_flight: usize,
        /// The reason.
        source: io::Error,
    },
    /// The server sent nothing within the timeout.
    #[error("no answer from the server for {after:?} ({in_flight} request(s) in flight)")]
    Timeout {
        /// The timeout.
        after: Duration,
        /// Number of requests with an unknown outcome.
        in_flight: usize,
    },
    /// The server violates the protocol.
    #[error("the server violates the NBD protocol: {0}")]
    Protocol(&'static str),
    /// The server failed a request.
    #[error("{command} failed: {}", errno_text(*.errno))]
    Request {
        /// The request.
        command: NbdCommand,
        /// The protocol's error number.
        errno: u32,
    },
    /// The export does not support the request, or the request violates its limits.
    #[error("{command}: {reason}")]
    Impossible {
        /// The request.
        command: NbdCommand,
        /// The reason.
        reason: &'static str,
    },
}

impl NbdError {
    /// Whether the server cannot be reached at present, or breaks off: it may be another time.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(
            self,
            NbdError::Connect { .. }
                | NbdError::Closed { .. }
                | NbdError::Broken { .. }
                | NbdError::Timeout { .. }
        )
    }

    /// Whether the connection is unusable. Otherwise only one request failed.
    #[must_use]
    pub fn is_connection(&self) -> bool {
        !matches!(self, NbdError::Request { .. } | NbdError::Impossible { .. })
    }
}

/// An error number of the protocol in words.
#[must_use]
pub fn errno_text(number: u32) -> String {
    let text = match number {
        errno::EPERM => "EPERM, the export takes no writes",
        errno::EIO => "EIO, the storage failed",
        errno::ENOMEM => "ENOMEM, the server is out of memory",
        errno::EINVAL => "EINVAL, the server calls the request malformed",
        errno::ENOSPC => "ENOSPC, no space left or beyond the end of the export",
        errno::EOVERFLOW => "EOVERFLOW, too large for one answer",
        errno::ENOTSUP => "ENOTSUP, the server cannot do this",
        errno::ESHUTDOWN => "ESHUTDOWN, the server is closing the export",
        _ => return format!("error {number}"),
    };
    text.into()
}
