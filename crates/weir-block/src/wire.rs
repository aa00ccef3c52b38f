//! System calls on a connected stream socket. None of them waits.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::operation::{Received, Sent};

/// Most slices that one send uses.
const MOST_SLICES: usize = 1024;

/// Reads the bytes that have arrived into `target`.
///
/// # Errors
/// The connection is broken.
pub fn receive(fd: BorrowedFd<'_>, target: &mut [u8]) -> io::Result<Received> {
    loop {
        // SAFETY: `target` is writable memory of the given length for the duration of the call.
        let n = unsafe {
            libc::recv(fd.as_raw_fd(), target.as_mut_ptr().cast(), target.len(), libc::MSG_DONTWAIT)
        };
        if let Some(received) = received(n)? {
            return Ok(received);
        }
    }
}

/// Reads the bytes that have arrived into the targets, one after the other.
///
/// # Errors
/// The connection is broken.
pub fn receive_vectored(fd: BorrowedFd<'_>, targets: &mut [IoSliceMut<'_>]) -> io::Result<Received> {
    loop {
        // SAFETY: an all-zero msghdr is valid (no name, no control data).
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = targets.as_mut_ptr().cast();
        message.msg_iovlen = targets.len();
        // SAFETY: `IoSliceMut` has the layout of `iovec`; the targets are writable and outlive the call.
        let n = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        if let Some(received) = received(n)? {
            return Ok(received);
        }
    }
}

/// The result of a receive; `None`: the call was interrupted.
fn received(n: isize) -> io::Result<Option<Received>> {
    match usize::try_from(n) {
        Ok(0) => Ok(Some(Received::End)),
        Ok(bytes) => Ok(Some(Received::Bytes(bytes))),
        Err(_) => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(Some(Received::Nothing)),
            error if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            error => Err(error),
        },
    }
}

/// Sends the slices in order. Uses at most the first 1024.
///
/// # Errors
/// The connection is broken.
pub fn send(fd: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> io::Result<Sent> {
    let slices = &slices[..slices.len().min(MOST_SLICES)];
    loop {
        // SAFETY: an all-zero msghdr is valid (no name, no control data).
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = slices.as_ptr().cast_mut().cast();
        message.msg_iovlen = slices.len();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `IoSlice` has the layout of `iovec`; the slices outlive the call.
        let n = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) };
        if n >= 0 {
            return Ok(Sent::Bytes(n as usize));
        }
        match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => return Ok(Sent::Full),
            error if error.kind() == io::ErrorKind::Interrupted => {}
            error => return Err(error),
        }
    }
}

/// Nothing more is read: the socket is readable from now on, and has nothing.
pub fn stop_reading(fd: BorrowedFd<'_>) {
    // A connection that has ended already needs no end.
    let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Read);
}
