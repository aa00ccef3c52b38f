//! A non-blocking stream socket on a shard.
//!
//! Shards read and write sockets by plain system calls at batch boundaries, and use the ring only to *wait*. The kernel then
//! never holds a pointer into memory that Weir reuses (a log arena, a receive buffer), and one `recv` takes all bytes that have
//! arrived, and one `sendmsg` sends all answers.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::operation::{Interest, Token};
pub use crate::operation::{Received, Sent};
use crate::reactor::{Reactor, WatchId};
use crate::{sim, wire};

/// A connection for a shard.
#[derive(Debug)]
pub enum Stream {
    /// A connected kernel stream socket.
    Kernel(OwnedFd),
    /// One end of a simulated connection, on a reactor of the same world.
    Simulated(sim::End),
    /// A connected kernel stream socket whose bytes are encrypted.
    Protected(OwnedFd, Box<dyn Protection>),
}

/// Encrypts and decrypts the bytes of one connection, after its handshake. Calls return at once; memory is bounded.
pub trait Protection: std::fmt::Debug + Send {
    /// Decrypts what has arrived at `fd` into the targets, one after the other. A result below their length is everything that
    /// has arrived.
    ///
    /// # Errors
    /// The connection is broken, its bytes were changed on the way, or it ended without the other side's farewell.
    fn receive(&mut self, fd: BorrowedFd<'_>, targets: &mut [IoSliceMut<'_>]) -> io::Result<Received>;

    /// Encrypts the slices and sends them. The result counts bytes of which nothing is left to send; the others come first in
    /// the next call, unchanged.
    ///
    /// # Errors
    /// The connection is broken.
    fn send(&mut self, fd: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> io::Result<Sent>;

    /// Sends the farewell after which an end of the connection is no truncation, if the socket takes it at once.
    fn end(&mut self, fd: BorrowedFd<'_>);
}

impl Stream {
    /// The descriptor, for use without a reactor.
    ///
    /// # Errors
    /// A simulated connection has none.
    pub fn into_fd(self) -> io::Result<OwnedFd> {
        match self {
            Stream::Kernel(fd) => Ok(fd),
            Stream::Simulated(_) => Err(io::Error::other("a simulated connection has no descriptor")),
            Stream::Protected(..) => Err(io::Error::other("an encrypted connection needs its keys")),
        }
    }
}

impl From<OwnedFd> for Stream {
    fn from(fd: OwnedFd) -> Stream {
        Stream::Kernel(fd)
    }
}

impl From<UnixStream> for Stream {
    fn from(stream: UnixStream) -> Stream {
        Stream::Kernel(stream.into())
    }
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Stream {
        Stream::Kernel(stream.into())
    }
}

impl From<sim::End> for Stream {
    fn from(end: sim::End) -> Stream {
        Stream::Simulated(end)
    }
}

/// A connected stream socket, non-blocking, watched through its shard's reactor.
#[derive(Debug)]
pub struct Socket {
    stream: Stream,
    token: Token,
    watching_read: Option<WatchId>,
    watching_write: Option<WatchId>,
    watching_hang_up: Option<WatchId>,
}

impl Socket {
    /// Takes a connected socket and makes it non-blocking. Its events will carry `token`.
    ///
    /// # Errors
    /// The descriptor is not one whose flags can be changed.
    pub fn new(stream: impl Into<Stream>, token: Token) -> io::Result<Socket> {
        let stream = stream.into();
        if let Stream::Kernel(fd) | Stream::Protected(fd, _) = &stream {
            rustix::io::ioctl_fionbio(fd, true)?;
            // Small answers must not wait for the acknowledgement of earlier ones. Fails on Unix sockets, which have no such delay.
            let _ = rustix::net::sockopt::set_tcp_nodelay(fd, true);
        }
        Ok(Socket { stream, token, watching_read: None, watching_write: None, watching_hang_up: None })
    }

    /// The token that this socket's events carry.
    #[must_use]
    pub fn token(&self) -> Token {
        self.token
    }

    /// Call with every event of this socket before anything else.
    pub fn on_event(&mut self, interest: Interest) {
        match interest {
            Interest::Read => self.watching_read = None,
            Interest::Write => self.watching_write = None,
            Interest::HangUp => self.watching_hang_up = None,
        }
    }

    /// Requests an event when data is readable. Idempotent.
    pub fn watch_read(&mut self, reactor: &mut Reactor) {
        if self.watching_read.is_none() {
            self.watching_read = Some(reactor.watch(self.as_raw_fd(), Interest::Read, self.token));
        }
    }

    /// Requests an event when there is room to send. Idempotent.
    pub fn watch_write(&mut self, reactor: &mut Reactor) {
        if self.watching_write.is_none() {
            self.watching_write = Some(reactor.watch(self.as_raw_fd(), Interest::Write, self.token));
        }
    }

    /// Requests an event when [`Socket::has_hung_up`] may have changed, for a user who does not read meanwhile. Idempotent.
    pub fn watch_hang_up(&mut self, reactor: &mut Reactor) {
        if self.watching_hang_up.is_none() {
            self.watching_hang_up = Some(reactor.watch(self.as_raw_fd(), Interest::HangUp, self.token));
        }
    }

    /// Whether nobody can read what is sent: the connection broke, or the other side has closed its Unix socket. A peer that has closed
    /// only its sending half still reads. Over TCP a full close looks the same until it answers something sent with a reset.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        match &self.stream {
            Stream::Simulated(end) => end.has_ended(),
            Stream::Kernel(fd) | Stream::Protected(fd, _) => {
                let mut polled = [PollFd::new(fd, PollFlags::empty())];
                let is_known = poll(&mut polled, Some(&Timespec::default())).is_ok();
                is_known && polled[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
            }
        }
    }

    /// Reads the bytes that have arrived into `target`, without waiting. A result below the target's length is everything that
    /// has arrived.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn receive(&mut self, target: &mut [u8]) -> io::Result<Received> {
        match &mut self.stream {
            Stream::Kernel(fd) => wire::receive(fd.as_fd(), target),
            Stream::Simulated(end) => end.receive(&mut [IoSliceMut::new(target)]),
            Stream::Protected(fd, protection) => {
                protection.receive(fd.as_fd(), &mut [IoSliceMut::new(target)])
            }
        }
    }

    /// Reads the bytes that have arrived into the targets, one after the other, without waiting: the rest of a large payload into
    /// its buffer and the bytes after it elsewhere, in one call.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn receive_vectored(&mut self, targets: &mut [IoSliceMut<'_>]) -> io::Result<Received> {
        match &mut self.stream {
            Stream::Kernel(fd) => wire::receive_vectored(fd.as_fd(), targets),
            Stream::Simulated(end) => end.receive(targets),
            Stream::Protected(fd, protection) => protection.receive(fd.as_fd(), targets),
        }
    }

    /// Sends the slices in order, without waiting. Uses at most the first 1024. The bytes that were not sent come first in the
    /// next call, unchanged.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<Sent> {
        match &mut self.stream {
            Stream::Kernel(fd) => wire::send(fd.as_fd(), slices),
            Stream::Simulated(end) => end.send(slices),
            Stream::Protected(fd, protection) => protection.send(fd.as_fd(), slices),
        }
    }

    /// Tells the other end that nothing more is sent; what it sends can still be read. A simulated connection has no such word.
    pub fn finish(&mut self) {
        if let Stream::Protected(fd, protection) = &mut self.stream {
            protection.end(fd.as_fd());
        }
        if let Stream::Kernel(fd) | Stream::Protected(fd, _) = &self.stream {
            let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
        }
    }

    /// Stops watching and shuts the connection down. Call before dropping. Only events that the last
    /// [`Reactor::wait`] has already returned can still carry this socket's token.
    pub fn close(&mut self, reactor: &mut Reactor) {
        let watches = [self.watching_read.take(), self.watching_write.take(), self.watching_hang_up.take()];
        for watch in watches.into_iter().flatten() {
            reactor.unwatch(watch);
        }
        if let Stream::Protected(fd, protection) = &mut self.stream {
            protection.end(fd.as_fd());
        }
        match &mut self.stream {
            Stream::Kernel(fd) | Stream::Protected(fd, _) => {
                let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
            }
            Stream::Simulated(end) => end.close(),
        }
    }

    /// The descriptor, for socket options; a simulated connection's number.
    #[must_use]
    pub fn as_raw_fd(&self) -> RawFd {
        match &self.stream {
            Stream::Kernel(fd) | Stream::Protected(fd, _) => fd.as_raw_fd(),
            Stream::Simulated(end) => end.number(),
        }
    }
}
