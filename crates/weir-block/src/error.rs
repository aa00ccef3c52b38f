//! I/O errors: the failed operation, the party that can act on the error, and the source.

use std::fmt;

/// The party that has to act on an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// May succeed if tried again, perhaps elsewhere: lost path, timeout, full disk that may be freed.
    Retry,
    /// This node no longer owns what it tried to access (P2). A retry is wrong.
    Fence,
    /// The request or the configuration is wrong; a person or a client has to change it.
    Operator,
    /// An internal inconsistency: a bug in Weir.
    Bug,
}

/// The failure as an export can express it to a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// Outside the disk, misaligned, or otherwise malformed.
    InvalidArgument,
    /// The backing has no room.
    NoSpace,
    /// The layer cannot do this (for example a fast zero).
    NotSupported,
    /// The disk or its backing takes no writes.
    ReadOnly,
    /// No memory within the configured bound.
    NoMemory,
    /// The storage failed.
    Io,
    /// The answer to a destage flush after the connection to the storage broke: unflushed destage writes may be lost, and destage repeats
    /// them from the log.
    Lost,
    /// This node is no longer the owner.
    NotOwner,
    /// The disk is being closed.
    ShuttingDown,
}

/// An I/O error. Small and without allocation, so that an error storm costs no more than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct IoError {
    /// The party that has to act.
    pub kind: ErrorKind,
    /// The code returned to the guest.
    pub code: Code,
    /// The operation that failed.
    pub context: &'static str,
    /// The kernel's error number, 0 if none.
    pub errno: i32,
}

impl IoError {
    /// An error that Weir itself detected, without a kernel error.
    #[must_use]
    pub const fn new(kind: ErrorKind, code: Code, context: &'static str) -> IoError {
        IoError { kind, code, context, errno: 0 }
    }

    /// A malformed request: the client's fault.
    #[must_use]
    pub const fn invalid(context: &'static str) -> IoError {
        IoError::new(ErrorKind::Operator, Code::InvalidArgument, context)
    }

    /// Classifies a kernel error number.
    ///
    /// The table: `ENOSPC`/`EDQUOT` and errors of the way to the storage may be transient (retry: `ENOLINK`, `ETIMEDOUT`, `ENODEV`,
    /// `EIO` and whatever else); `EBADE` is a reservation's conflict (fence); `EROFS`/`EPERM`/`EACCES` need an operator;
    /// `EINVAL`/`EFAULT`/`EBADF` on a validated request is a bug.
    #[must_use]
    pub fn from_errno(errno: i32, context: &'static str) -> IoError {
        let (kind, code) = match errno {
            libc::ENOSPC | libc::EDQUOT => (ErrorKind::Retry, Code::NoSpace),
            libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => (ErrorKind::Operator, Code::NotSupported),
            libc::EROFS | libc::EPERM | libc::EACCES => (ErrorKind::Operator, Code::ReadOnly),
            // Another host has taken this one's key from the storage.
            libc::EBADE => (ErrorKind::Fence, Code::ReadOnly),
            libc::ENOMEM => (ErrorKind::Retry, Code::NoMemory),
            libc::EINVAL | libc::EFAULT | libc::EBADF => (ErrorKind::Bug, Code::Io),
            _ => (ErrorKind::Retry, Code::Io),
        };
        IoError { kind, code, context, errno }
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = match self.code {
            Code::InvalidArgument => "invalid request",
            Code::NoSpace => "no space left on the backing",
            Code::NotSupported => "not supported",
            Code::ReadOnly => "the backing takes no writes",
            Code::NoMemory => "no memory left within the configured limit",
            Code::Io => "storage error",
            Code::Lost => "it is written again",
            Code::NotOwner => "this node no longer owns the disk",
            Code::ShuttingDown => "the disk is being closed",
        };
        write!(f, "{}: {reason}", self.context)?;
        if self.errno != 0 {
            write!(f, " ({})", std::io::Error::from_raw_os_error(self.errno))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservations_conflict_is_a_fence_and_a_lost_path_is_not() {
        let of = |errno| IoError::from_errno(errno, "writing");
        assert_eq!((of(libc::EBADE).kind, of(libc::EBADE).code), (ErrorKind::Fence, Code::ReadOnly));
        for errno in [libc::ENOLINK, libc::ETIMEDOUT, libc::ENODEV, libc::ENXIO, libc::EIO] {
            assert_eq!((of(errno).kind, of(errno).code), (ErrorKind::Retry, Code::Io), "{errno}");
        }
    }
}
