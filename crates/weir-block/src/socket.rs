//! A non-blocking stream socket on a shard.
//!
//! Sockets are read and written by plain system calls at batch boundaries, and only *waited for* through
//! the ring. The kernel then never holds a pointer into memory that Weir wants to reuse (a log arena, a
//! receive buffer), and one `recv` takes all that has arrived, one `sendmsg` answers all of it.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crate::reactor::{Interest, Reactor, Token, WatchId};

/// What a read from a socket brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// So many bytes (at least one).
    Bytes(usize),
    /// Nothing at present; a readable event will follow.
    Nothing,
    /// The other side closed its half.
    End,
}

/// What a send achieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// So many bytes left; may be fewer than offered.
    Bytes(usize),
    /// The kernel's buffer is full; a writable event will follow.
    Full,
}

/// A connected stream socket, non-blocking, watched through its shard's reactor.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    token: Token,
    watching_read: Option<WatchId>,
    watching_write: Option<WatchId>,
}

impl Socket {
    /// Takes a connected socket and makes it non-blocking. Its events will carry `token`.
    ///
    /// # Errors
    /// The descriptor is not one whose flags can be changed.
    pub fn new(fd: OwnedFd, token: Token) -> io::Result<Socket> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        // Small answers must not wait for the acknowledgement of earlier ones. Fails on Unix sockets, which have no such delay.
        let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
        Ok(Socket { fd, token, watching_read: None, watching_write: None })
    }

    /// The token that this socket's events carry.
    #[must_use]
    pub fn token(&self) -> Token {
        self.token
    }

    /// To be called with every event of this socket before anything else.
    pub fn on_event(&mut self, interest: Interest) {
        match interest {
            Interest::Read => self.watching_read = None,
            Interest::Write => self.watching_write = None,
        }
    }

    /// Asks for an event when there is something to read. Idempotent.
    pub fn watch_read(&mut self, reactor: &mut Reactor) {
        if self.watching_read.is_none() {
            self.watching_read = Some(reactor.watch(self.fd.as_raw_fd(), Interest::Read, self.token));
        }
    }

    /// Asks for an event when there is room to send. Idempotent.
    pub fn watch_write(&mut self, reactor: &mut Reactor) {
        if self.watching_write.is_none() {
            self.watching_write = Some(reactor.watch(self.fd.as_raw_fd(), Interest::Write, self.token));
        }
    }

    /// Reads what has arrived into `target`, without waiting.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn receive(&mut self, target: &mut [u8]) -> io::Result<Received> {
        loop {
            // SAFETY: `target` is writable memory of the given length for the duration of the call.
            let n = unsafe {
                libc::recv(self.fd.as_raw_fd(), target.as_mut_ptr().cast(), target.len(), libc::MSG_DONTWAIT)
            };
            match n {
                0 => return Ok(Received::End),
                n if n > 0 => return Ok(Received::Bytes(n as usize)),
                _ => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::WouldBlock => return Ok(Received::Nothing),
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
    }

    /// Reads what has arrived into the targets, one after the other, without waiting: the rest of a large payload to
    /// its place and what follows it elsewhere, in one call.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn receive_vectored(&mut self, targets: &mut [IoSliceMut<'_>]) -> io::Result<Received> {
        loop {
            // SAFETY: an all-zero msghdr is valid (no name, no control data).
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = targets.as_mut_ptr().cast();
            message.msg_iovlen = targets.len();
            // SAFETY: `IoSliceMut` has the layout of `iovec`; the targets are writable and outlive the call.
            let n = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
            match n {
                0 => return Ok(Received::End),
                n if n > 0 => return Ok(Received::Bytes(n as usize)),
                _ => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::WouldBlock => return Ok(Received::Nothing),
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
    }

    /// Sends the slices in order, without waiting. At most 1024 slices are looked at.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<Sent> {
        const MOST_SLICES: usize = 1024;
        loop {
            // SAFETY: an all-zero msghdr is valid (no name, no control data).
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = slices.as_ptr().cast_mut().cast();
            message.msg_iovlen = slices.len().min(MOST_SLICES);
            // SAFETY: `IoSlice` has the layout of `iovec`; the slices outlive the call.
            let n = unsafe {
                libc::sendmsg(
                    self.fd.as_raw_fd(),
                    &raw const message,
                    libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
                )
            };
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

    /// Stops watching and shuts the connection down. Call before dropping. Only events that the last
    /// [`Reactor::wait`] has already returned can still carry this socket's token.
    pub fn close(&mut self, reactor: &mut Reactor) {
        for watch in [self.watching_read.take(), self.watching_write.take()].into_iter().flatten() {
            reactor.unwatch(watch);
        }
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    /// The descriptor, for socket options.
    #[must_use]
    pub fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
