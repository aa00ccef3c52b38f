//! Requests on their way out: as many as there are leave in one `sendmsg`.

use std::io;
use std::os::fd::RawFd;

use zerocopy::IntoBytes;

use super::slot::{NbdCommand, Slot};
use crate::protocol::{REQUEST_MAGIC, RequestHeader};

const HEADER: usize = size_of::<RequestHeader>();

/// Most pieces that one `sendmsg` takes (`UIO_MAXIOV`).
const MOST_PIECES: usize = 1024;

/// Requests that were started, in order, and how far they have been sent.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Slots of the requests being sent. Their headers follow each other in `headers`.
    sending: Vec<u32>,
    headers: Vec<u8>,
    /// Bytes of `sending` that have left, payloads included.
    sent: usize,
    /// Started while `sending` was on its way.
    waiting: Vec<u32>,
    pieces: Vec<libc::iovec>,
}

// SAFETY: `pieces` is only scratch space of `Batch::send`; outside that call its pointers mean nothing.
unsafe impl Send for Batch {}

impl Batch {
    /// Adds the request in a slot.
    pub fn push(&mut self, slot: u32) {
        self.waiting.push(slot);
    }

    /// Whether everything has left.
    pub fn is_empty(&self) -> bool {
        self.sending.is_empty() && self.waiting.is_empty()
    }

    /// Sends as much as the socket takes now.
    pub fn send(&mut self, fd: RawFd, slots: &[Slot]) -> io::Result<()> {
        loop {
            if self.sending.is_empty() {
                if self.waiting.is_empty() {
                    return Ok(());
                }
                self.begin(slots);
            }
            self.collect(slots);
            match send(fd, &self.pieces) {
                Ok(bytes) => self.sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
            if self.sent == self.length(slots) {
                self.sending.clear();
            }
        }
    }

    fn begin(&mut self, slots: &[Slot]) {
        std::mem::swap(&mut self.sending, &mut self.waiting);
        self.sent = 0;
        self.headers.clear();
        for &index in &self.sending {
            let slot = &slots[index as usize];
            let (command, flags) = slot.command.wire();
            let (offset, length) = slot.command.range();
            let header = RequestHeader {
                magic: REQUEST_MAGIC.into(),
                flags: flags.into(),
                command: command.into(),
                cookie: slot.cookie(index).into(),
                offset: offset.into(),
                length: length.into(),
            };
            self.headers.extend_from_slice(header.as_bytes());
        }
    }

    fn length(&self, slots: &[Slot]) -> usize {
        self.headers.len()
            + self.sending.iter().map(|&index| payload(&slots[index as usize]).len()).sum::<usize>()
    }

    /// Lists what is still to be sent. Headers without payloads between them become one piece.
    fn collect(&mut self, slots: &[Slot]) {
        self.pieces.clear();
        let (mut skip, mut start, mut end) = (self.sent, 0, 0);
        for &index in &self.sending {
            end += HEADER;
            let payload = payload(&slots[index as usize]);
            if !payload.is_empty() {
                add(&mut self.pieces, &mut skip, &self.headers[start..end]);
                add(&mut self.pieces, &mut skip, payload);
                start = end;
            }
        }
        add(&mut self.pieces, &mut skip, &self.headers[start..end]);
    }
}

/// Appends `bytes` without the first `skip` of them, and takes off what was skipped.
fn add(pieces: &mut Vec<libc::iovec>, skip: &mut usize, bytes: &[u8]) {
    let skipped = bytes.len().min(*skip);
    *skip -= skipped;
    let rest = &bytes[skipped..];
    if !rest.is_empty() {
        pieces.push(libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() });
    }
}

fn payload(slot: &Slot) -> &[u8] {
    match slot.command {
        NbdCommand::Write { length, .. } => &slot.data[..length as usize],
        _ => &[],
    }
}

fn send(fd: RawFd, pieces: &[libc::iovec]) -> io::Result<usize> {
    const FLAGS: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    loop {
        let sent = match pieces {
            // Reads are a single piece: the kernel need not be given a description to copy and check first.
            // SAFETY: the piece points into headers or a slot that the caller borrows during the call.
            [piece] => unsafe { libc::send(fd, piece.iov_base, piece.iov_len, FLAGS) },
            _ => {
                // SAFETY: an all-zero msghdr is valid (no name, no control data).
                let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
                message.msg_iov = pieces.as_ptr().cast_mut();
                message.msg_iovlen = pieces.len().min(MOST_PIECES);
                // SAFETY: the pieces point into headers and slots that the caller borrows during the call.
                unsafe { libc::sendmsg(fd, &raw const message, FLAGS) }
            }
        };
        if sent >= 0 {
            return Ok(sent as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
