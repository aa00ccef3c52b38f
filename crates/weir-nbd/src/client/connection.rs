//! One connection in the transmission phase, batched in both directions.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::net::{SendFlags, sockopt};
use weir_block::{Extent, Nanos};
use zerocopy::IntoBytes;

use super::batch::Batch;
use super::body::Body;
use super::decoder::{Decoder, Done, LARGEST_CONTROL};
use super::dial::Dialed;
use super::error::NbdError;
use super::handshake::Export;
use super::slot::{NbdCommand, Slot};
use super::system::uninterrupted;
use crate::protocol::{EXTENDED_REQUEST_MAGIC, ExtendedRequest, REQUEST_MAGIC, RequestHeader, command};
use crate::uri::Uri;

/// Most bytes in one receive: more than a full queue of 4 KiB reads, and no more than a part of the CPU's second-level cache.
const MOST_RECEIVED: usize = 256 << 10;

/// From this many bytes on, the connection receives data directly into its slot.
const WORTH_DIRECT: usize = 32 << 10;

/// Room for the largest chunk that must be complete before the decoder parses it.
const INBOX: usize = LARGEST_CONTROL + MOST_RECEIVED;

/// Options of a connection.
#[derive(Clone, Debug)]
pub struct Options {
    /// Maximum number of requests in flight, 1 to 65536.
    pub depth: u32,
    /// Negotiate structured replies (and with them block status). Simple replies are cheaper for a plain load.
    pub structured_replies: bool,
    /// With structured replies: negotiate extended headers first, for requests of 4 GiB and more.
    pub extended_headers: bool,
    /// Keep the data of reads; otherwise discard it on receipt.
    pub keep_data: bool,
    /// Timeout of connecting and negotiating.
    pub connect_timeout: Duration,
    /// Longest time without a byte from the server while requests are in flight.
    pub timeout: Duration,
}

impl Default for Options {
    /// Depth 32, extended headers or else structured replies, data kept, 5 s to connect, 30 s without a byte.
    fn default() -> Options {
        Options {
            depth: 32,
            structured_replies: true,
            extended_headers: true,
            keep_data: true,
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(30),
        }
    }
}

/// Most receives of one [`Connection::receive_now`]: others want their turn, too.
const RECEIVES: usize = 8;

/// A connection to an export. Belongs to one thread at a time. The data of its requests is in buffers of its own, or wherever `D` says.
#[derive(Debug)]
pub struct Connection<D = Vec<u8>> {
    socket: OwnedFd,
    export: Export,
    slots: Vec<Slot<D>>,
    in_flight: usize,
    batch: Batch,
    decoder: Decoder,
    inbox: Box<[u8]>,
    /// Bytes of `inbox` received and not yet decoded.
    filled: usize,
    timeout: Duration,
    /// Time without a byte so far, over waits that were shorter than `timeout`.
    silence: Duration,
}

impl Connection {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// The server cannot be reached, refuses the export, or does not speak NBD.
    pub fn open(uri: &Uri, options: &Options) -> Result<Connection, NbdError> {
        let (structured, extended) = (options.structured_replies, options.extended_headers);
        let dialed = Dialed::dial(uri, structured, extended, options.connect_timeout)?;
        Connection::over(dialed, options)
    }

    /// The first `length` bytes of a slot's buffer, to be filled before a write is started there.
    ///
    /// # Panics
    /// When the slot is in flight.
    pub fn buffer(&mut self, slot: u32, length: u32) -> &mut [u8] {
        let slot = &mut self.slots[slot as usize];
        assert!(!slot.busy, "the buffer of a request in flight is not to be touched");
        slot.data.make_room(length as usize);
        &mut slot.data[..length as usize]
    }

    /// The data of a finished read.
    #[must_use]
    pub fn data(&self, slot: u32, length: u32) -> &[u8] {
        &self.slots[slot as usize].data[..length as usize]
    }
}

impl<D: Body + Default> Connection<D> {
    /// Over a connection whose handshake is over.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn over(dialed: Dialed, options: &Options) -> Result<Connection<D>, NbdError> {
        let Dialed { address, socket, export } = dialed;
        // One call should send a full queue. The kernel caps this (`net.core.wmem_max`).
        let _ = sockopt::set_socket_send_buffer_size(&socket, 4 << 20);
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(options.timeout))
            .map_err(|source| NbdError::Connect { address, source: source.into() })?;
        Ok(Connection {
            socket,
            slots: (0..options.depth).map(|_| Slot::new()).collect(),
            in_flight: 0,
            batch: Batch::new(export.extended_headers),
            decoder: Decoder::new(export.allocation_context, export.extended_headers, options.keep_data),
            export,
            inbox: vec![0; INBOX].into_boxed_slice(),
            filled: 0,
            timeout: options.timeout,
            silence: Duration::ZERO,
        })
    }

    /// As [`Connection::start`], with the request's own data: of a write, its bytes; of a read, the place for them, which is long enough.
    /// A slot above the depth is made.
    ///
    /// # Panics
    /// When the slot is in flight.
    pub fn start_with(&mut self, slot: u32, command: NbdCommand, data: D) {
        while self.slots.len() <= slot as usize {
            self.slots.push(Slot::new());
        }
        let entry = &mut self.slots[slot as usize];
        assert!(!entry.busy, "slot {slot} is in flight");
        entry.data = data;
        self.start(slot, command);
    }

    /// The data of a request that is finished, or whose connection has failed.
    pub fn take(&mut self, slot: u32) -> D {
        std::mem::take(&mut self.slots[slot as usize].data)
    }
}

impl<D: Body> Connection<D> {
    /// The server's description of the export.
    #[must_use]
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// Requests started and not yet answered.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The extents of a finished block status.
    #[must_use]
    pub fn extents(&self, slot: u32) -> &[Extent] {
        &self.slots[slot as usize].extents
    }

    /// Starts a request in a free slot. The next [`Connection::pump`] sends it.
    ///
    /// # Panics
    /// When the slot is in flight.
    pub fn start(&mut self, slot: u32, command: NbdCommand) {
        let entry = &mut self.slots[slot as usize];
        assert!(!entry.busy, "slot {slot} is in flight");
        entry.begin(command);
        self.in_flight += 1;
        self.batch.push(slot);
    }

    /// Sends the started requests and waits until something has arrived or `until` has passed
    /// ([`Nanos::NEVER`]: as long as the timeout allows; a time in the past polls). Appends the finished requests.
    ///
    /// # Errors
    /// The connection is unusable; every request in flight has an unknown outcome.
    pub fn pump(&mut self, until: Nanos, done: &mut Vec<Done>) -> Result<(), NbdError> {
        let fd = self.socket.as_raw_fd();
        self.batch.send(fd, &self.slots).map_err(|error| self.broken(error))?;
        if self.in_flight == 0 {
            sleep_until(until);
            return Ok(());
        }
        if until == Nanos::NEVER && self.batch.is_empty() {
            // The one system call that both waits and receives.
            return self.receive(0, done).map(drop);
        }
        if self.wait(until)? {
            self.batch.send(fd, &self.slots).map_err(|error| self.broken(error))?;
            self.receive(libc::MSG_DONTWAIT, done)?;
        }
        Ok(())
    }

    /// Sends as much of the started requests as the socket takes at once, for a caller that waits for the socket itself.
    ///
    /// # Errors
    /// As [`Connection::pump`].
    pub fn send_now(&mut self) -> Result<(), NbdError> {
        let fd = self.socket.as_raw_fd();
        self.batch.send(fd, &self.slots).map_err(|error| self.broken(error))
    }

    /// Takes what has arrived, without waiting, and appends the finished requests. True if there may be more.
    ///
    /// # Errors
    /// As [`Connection::pump`], but for the timeout: the caller has its own.
    pub fn receive_now(&mut self, done: &mut Vec<Done>) -> Result<bool, NbdError> {
        for _ in 0..RECEIVES {
            if !self.receive(libc::MSG_DONTWAIT, done)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether something that was started is not sent yet.
    #[must_use]
    pub fn wants_to_send(&self) -> bool {
        !self.batch.is_empty()
    }

    /// Whether the server may have seen something of the request in flight in a slot.
    #[must_use]
    pub fn has_begun(&self, slot: u32) -> bool {
        self.batch.has_begun(slot)
    }

    /// Closes the connection so that this host sends nothing more of it, also not what the socket has taken.
    pub fn reset(self) {
        // A Unix socket has no such choice, and delivers at once.
        let _ = sockopt::set_socket_linger(&self.socket, Some(Duration::ZERO));
    }

    /// Ends the session with `DISC` and abandons the requests in flight.
    pub fn disconnect(self) {
        if self.in_flight > 0 || !self.batch.is_empty() {
            return;
        }
        let (magic, command) = (REQUEST_MAGIC.into(), command::DISC.into());
        let (flags, cookie, offset) = (0.into(), 0.into(), 0.into());
        let compact = RequestHeader { magic, flags, command, cookie, offset, length: 0.into() };
        let magic = EXTENDED_REQUEST_MAGIC.into();
        let extended = ExtendedRequest { magic, flags, command, cookie, offset, length: 0.into() };
        let disconnect = if self.export.extended_headers { extended.as_bytes() } else { compact.as_bytes() };
        // If it does not fit, closing the socket has the same effect.
        let _ = rustix::net::send(&self.socket, disconnect, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }

    /// Waits for the socket; false when `until` has passed first.
    fn wait(&mut self, until: Nanos) -> Result<bool, NbdError> {
        let start = Nanos::now();
        let patience = self.timeout.saturating_sub(self.silence);
        let limit = (until - start).min(patience);
        let mut events = libc::POLLIN;
        if !self.batch.is_empty() {
            events |= libc::POLLOUT;
        }
        if poll(self.socket.as_raw_fd(), events, limit).map_err(|error| self.broken(error))? {
            return Ok(true);
        }
        self.silence += Nanos::now() - start;
        if self.silence >= self.timeout { Err(self.too_long()) } else { Ok(false) }
    }

    /// Calls `recv` once and processes all bytes received. False if there were none.
    fn receive(&mut self, flags: i32, done: &mut Vec<Done>) -> Result<bool, NbdError> {
        let direct =
            self.decoder.target().filter(|&(_, from, to)| to - from >= WORTH_DIRECT && self.filled == 0);
        let mut pieces = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2];
        let mut wanted = 0;
        if let Some((slot, from, to)) = direct {
            pieces[0] = piece(&mut self.slots[slot as usize].data.target()[from..to]);
            wanted = to - from;
        }
        let room = (self.filled + MOST_RECEIVED).min(INBOX);
        pieces[1] = piece(&mut self.inbox[self.filled..room]);
        let fd = self.socket.as_raw_fd();
        let received = match receive(fd, &mut pieces, flags) {
            Ok(0) => return Err(NbdError::Closed { in_flight: self.in_flight }),
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && flags == 0 => {
                return Err(self.too_long());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(self.broken(error)),
        };
        self.silence = Duration::ZERO;
        let before = done.len();
        let direct_bytes = received.min(wanted);
        self.decoder.data_arrived(direct_bytes, &mut self.slots, done).map_err(NbdError::Protocol)?;
        self.filled += received - direct_bytes;
        let taken = self
            .decoder
            .feed(&self.inbox[..self.filled], &mut self.slots, done)
            .map_err(NbdError::Protocol)?;
        if !self.batch.is_empty() && done[before..].iter().any(|one| self.batch.has_rest(one.slot)) {
            // Its data is still to be sent.
            done.truncate(before);
            return Err(NbdError::Protocol("an answer to a request that is not wholly sent"));
        }
        self.inbox.copy_within(taken..self.filled, 0);
        self.filled -= taken;
        self.in_flight -= done.len() - before;
        Ok(true)
    }

    fn broken(&self, source: io::Error) -> NbdError {
        NbdError::Broken { in_flight: self.in_flight, source }
    }

    fn too_long(&self) -> NbdError {
        NbdError::Timeout { after: self.timeout, in_flight: self.in_flight }
    }
}

fn piece(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

impl<D> AsFd for Connection<D> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Receives into the pieces in order; the first may be empty.
fn receive(fd: RawFd, pieces: &mut [libc::iovec; 2], flags: i32) -> io::Result<usize> {
    uninterrupted(|| {
        if pieces[0].iov_len == 0 {
            // SAFETY: the piece is writable memory that the caller borrows during the call.
            return unsafe { libc::recv(fd, pieces[1].iov_base, pieces[1].iov_len, flags) };
        }
        // SAFETY: an all-zero msghdr is valid (no name, no control data).
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = pieces.as_mut_ptr();
        message.msg_iovlen = pieces.len();
        // SAFETY: the pieces are writable memory that the caller borrows during the call.
        unsafe { libc::recvmsg(fd, &raw mut message, flags) }
    })
}

/// Whether one of `events` (or an error) comes within `limit`.
fn poll(fd: RawFd, events: i16, limit: Duration) -> io::Result<bool> {
    let mut entry = libc::pollfd { fd, events, revents: 0 };
    let timeout = libc::timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    // SAFETY: one valid entry and a valid timespec; no signal mask.
    let ready = unsafe { libc::ppoll(&raw mut entry, 1, &raw const timeout, std::ptr::null()) };
    if ready >= 0 {
        return Ok(ready > 0);
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::Interrupted { Ok(false) } else { Err(error) }
}

fn sleep_until(until: Nanos) {
    if until != Nanos::NEVER {
        std::thread::sleep(until - Nanos::now());
    }
}
