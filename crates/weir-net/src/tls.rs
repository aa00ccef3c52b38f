//! TLS records on a shard: [`protect`] turns a connection whose handshake is done into a [`Stream`] that a shard uses like any
//! other. rustls makes and opens the records; this module moves bytes, in batches, and never waits.
//!
//! A send gathers everything offered into records of 16 KiB, however many frames that are, and hands all records to the kernel
//! in one call. A receive takes everything that has arrived in one call, decrypts it, and fills the caller's buffers. rustls's
//! buffered interface encrypts directly from the caller's slices; its unbuffered one needs them copied together first, and the
//! records copied once more.

use std::any::Any;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustls::{Connection, Error};
use weir_block::{Protection, Received, Sent, Stream, wire};

/// Bytes of received records that wait for their decryption (P10).
const RECEIVED: usize = 64 << 10;

/// Bytes that are encrypted ahead of what the socket takes (P10), and so the most that one call hands to the kernel. A request of
/// 128 KiB or 32 of 4 KiB, with the headers around them, leave in one call. More would delay the start of a larger request: the
/// other side decrypts while this one encrypts the rest.
const ENCRYPTED: usize = (128 + 16) << 10;

/// Reads of the socket in one receive. A peer may send records of one byte each, of which thousands fit a read and cost two
/// allocations and a decryption each: other connections of the shard have their turn in between.
const MOST_READS: usize = 4;

/// Encrypts a connection whose handshake is done. Nothing that it has read ahead is lost. `kept` lives as long as the connection.
///
/// # Errors
/// The bytes behind the handshake are no TLS records.
pub fn protect(
    fd: OwnedFd,
    mut connection: Connection,
    kept: Option<Arc<dyn Any + Send + Sync>>,
) -> io::Result<Stream> {
    connection.set_buffer_limit(Some(ENCRYPTED));
    let state = connection.process_new_packets().map_err(broken)?;
    let protection = Records {
        plain: state.plaintext_bytes_to_read(),
        closed: state.peer_has_closed(),
        connection,
        received: vec![0; RECEIVED].into(),
        start: 0,
        end: 0,
        ahead: 0,
        ended: false,
        failed: None,
        _kept: kept,
    };
    Ok(Stream::Protected(fd, Box::new(protection)))
}

struct Records {
    connection: Connection,
    /// Received records; those from `start` to `end` are not decrypted yet.
    received: Box<[u8]>,
    start: usize,
    end: usize,
    /// Decrypted bytes that the connection holds.
    plain: usize,
    /// The other side has said that it sends nothing more.
    closed: bool,
    /// This side has said that it sends nothing more. What still comes is not decrypted.
    ended: bool,
    /// An error behind bytes that were handed on in the same call; the next call reports it.
    failed: Option<io::Error>,
    /// Bytes at the front of what the caller offers that are encrypted already and not sent yet.
    ahead: usize,
    _kept: Option<Arc<dyn Any + Send + Sync>>,
}

impl std::fmt::Debug for Records {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Records").field("closed", &self.closed).finish_non_exhaustive()
    }
}

impl Protection for Records {
    fn receive(&mut self, fd: BorrowedFd<'_>, targets: &mut [IoSliceMut<'_>]) -> io::Result<Received> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if self.ended {
            return self.discard(fd);
        }
        let mut filled = 0;
        match self.fill(fd, targets, &mut filled) {
            Err(error) if filled > 0 => {
                // The data before the error is as good as if it had come alone. The caller has to find something to read, to
                // learn of the error.
                wire::stop_reading(fd);
                self.failed = Some(error);
                Ok(Received::Bytes(filled))
            }
            result => result,
        }
    }

    fn send(&mut self, fd: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> io::Result<Sent> {
        if !self.push(fd)? {
            return Ok(Sent::Full);
        }
        let before = std::mem::take(&mut self.ahead);
        let taken = if before == 0 {
            self.connection.writer().write_vectored(slices)?
        } else {
            let mut rest = slices.to_vec();
            let mut rest = &mut rest[..];
            IoSlice::advance_slices(&mut rest, before);
            self.connection.writer().write_vectored(rest)?
        };
        if self.push(fd)? {
            return Ok(Sent::Bytes(before + taken));
        }
        self.ahead = taken;
        Ok(if before > 0 { Sent::Bytes(before) } else { Sent::Full })
    }

    fn end(&mut self, fd: BorrowedFd<'_>) {
        self.ended = true;
        self.connection.send_close_notify();
        // If it does not reach the other side, that takes the end for a truncation, and nothing else follows.
        let _ = self.push(fd);
    }
}

impl Records {
    /// Fills the targets with decrypted bytes, `filled` of them, also if an error follows them.
    fn fill(
        &mut self,
        fd: BorrowedFd<'_>,
        targets: &mut [IoSliceMut<'_>],
        filled: &mut usize,
    ) -> io::Result<Received> {
        let (mut reads, mut drained) = (0, false);
        loop {
            let full = self.hand_on(targets, filled)?;
            if full {
                return Ok(Received::Bytes(*filled));
            }
            if self.decrypt(fd)? {
                continue;
            }
            if self.closed {
                return Ok(if *filled > 0 { Received::Bytes(*filled) } else { Received::End });
            }
            if drained || reads == MOST_READS {
                return Ok(if *filled > 0 { Received::Bytes(*filled) } else { Received::Nothing });
            }
            reads += 1;
            match wire::receive(fd, &mut self.received)? {
                Received::Bytes(bytes) => {
                    (self.start, self.end) = (0, bytes);
                    drained = bytes < self.received.len();
                }
                Received::Nothing => drained = true,
                // The next call reports it.
                Received::End if *filled > 0 => return Ok(Received::Bytes(*filled)),
                Received::End => return Err(truncated()),
            }
        }
    }

    /// Drops what comes after this side's end, without a look at it: nobody waits for it, and rustls does not expect it.
    fn discard(&mut self, fd: BorrowedFd<'_>) -> io::Result<Received> {
        (self.start, self.end, self.plain) = (0, 0, 0);
        for _ in 0..MOST_READS {
            match wire::receive(fd, &mut self.received)? {
                Received::Bytes(bytes) if bytes == self.received.len() => {}
                Received::End => return Ok(Received::End),
                Received::Bytes(_) | Received::Nothing => return Ok(Received::Nothing),
            }
        }
        Ok(Received::Nothing)
    }

    /// Fills the targets behind `filled` with decrypted bytes. Whether they are full.
    fn hand_on(&mut self, targets: &mut [IoSliceMut<'_>], filled: &mut usize) -> io::Result<bool> {
        let mut skip = *filled;
        for target in targets {
            if skip >= target.len() {
                skip -= target.len();
                continue;
            }
            let mut rest = &mut target[skip..];
            skip = 0;
            while !rest.is_empty() {
                if self.plain == 0 {
                    return Ok(false);
                }
                let bytes = io::Read::read(&mut self.connection.reader(), rest)?;
                self.plain -= bytes;
                *filled += bytes;
                rest = &mut rest[bytes..];
            }
        }
        Ok(true)
    }

    /// Decrypts received records up to the next that has content. Whether there was one.
    fn decrypt(&mut self, fd: BorrowedFd<'_>) -> io::Result<bool> {
        // rustls takes a few kilobytes at once.
        while self.start < self.end && self.plain == 0 && !self.closed {
            let mut rest = &self.received[self.start..self.end];
            self.start += self.connection.read_tls(&mut rest)?;
            let state = self.connection.process_new_packets().map_err(|error| {
                // The alert tells the other side why.
                let _ = self.push(fd);
                broken(error)
            })?;
            self.plain = state.plaintext_bytes_to_read();
            if state.peer_has_closed() {
                self.closed = true;
                // The caller waits for what is readable, and the other side need not close its socket.
                wire::stop_reading(fd);
            }
        }
        Ok(self.plain > 0)
    }

    /// Hands encrypted bytes to the socket. Whether all are sent.
    fn push(&mut self, fd: BorrowedFd<'_>) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut Wire(fd)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// The socket as rustls writes to it.
struct Wire<'a>(BorrowedFd<'a>);

impl Write for Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match wire::send(self.0, slices)? {
            Sent::Bytes(bytes) => Ok(bytes),
            Sent::Full => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn broken(error: Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {error}"))
}

fn truncated() -> io::Error {
    let text = "the connection broke, or its process ended: TLS's close_notify is missing";
    io::Error::new(io::ErrorKind::UnexpectedEof, text)
}
