//! Errors of requests and connections.

use std::io;
use std::time::Duration;

use super::slot::NbdCommand;
use crate::protocol::error as errno;
use crate::uri::Address;

/// A failed request or a failed connection. [`NbdError::is_connection`] tells which.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// The server could not be reached.
    #[error("cannot connect to {address}: {source}")]
    Connect {
        /// Where.
        address: Address,
        /// Why.
        source: io::Error,
    },
    /// The server said no during the handshake.
    #[error("{address} refuses the export `{export}`: {reason}")]
    Refused {
        /// Where.
        address: Address,
        /// What was asked for.
        export: String,
        /// The server has no such export. Otherwise something forbids its use, at least for now.
        is_unknown: bool,
        /// The server's words, or ours for its number.
        reason: String,
    },
    /// The connection ended.
    #[error("the server closed the connection with {in_flight} request(s) in flight")]
    Closed {
        /// Requests whose outcome is not known.
        in_flight: usize,
    },
    /// The connection broke.
    #[error("the connection broke with {in_flight} request(s) in flight: {source}")]
    Broken {
        /// Requests whose outcome is not known.
        in_flight: usize,
        /// Why.
        source: io::Error,
    },
    /// Nothing came for too long.
    #[error("no answer from the server for {after:?} ({in_flight} request(s) in flight)")]
    Timeout {
        /// How long.
        after: Duration,
        /// Requests whose outcome is not known.
        in_flight: usize,
    },
    /// The server does not keep to the protocol.
    #[error("the server violates the NBD protocol: {0}")]
    Protocol(&'static str),
    /// The server failed a request.
    #[error("{command} failed: {}", errno_text(*.errno))]
    Request {
        /// Which.
        command: NbdCommand,
        /// The protocol's error number.
        errno: u32,
    },
    /// The export cannot do that, or the request does not fit it.
    #[error("{command}: {reason}")]
    Impossible {
        /// Which.
        command: NbdCommand,
        /// Why.
        reason: &'static str,
    },
}

impl NbdError {
    /// Whether the connection is of no use any more. Otherwise only one request failed.
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
