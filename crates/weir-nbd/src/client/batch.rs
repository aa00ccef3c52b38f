//! Outgoing requests: one `sendmsg` sends the whole queue.

use std::io;
use std::os::fd::RawFd;

use zerocopy::IntoBytes;

use super::body::Body;
use super::slot::{NbdCommand, Slot};
use super::system::uninterrupted;
use crate::protocol::{EXTENDED_REQUEST_MAGIC, ExtendedRequest, REQUEST_MAGIC, RequestHeader, command_flag};

/// Most pieces that one `sendmsg` takes (`UIO_MAXIOV`).
const MOST_PIECES: usize = 1024;

/// Started requests, in order, and the number of bytes sent.
#[derive(Debug)]
pub(super) struct Batch {
    /// Headers have the extended form.
    extended: bool,
    /// Slots of the requests being sent. Their headers follow each other in `headers`.
    sending: Vec<u32>,
    headers: Vec<u8>,
    /// The first of them that is not wholly sent: those before it may be answered, and their slots be used again.
    first: usize,
    /// Bytes of that one that are sent, payload included.
    sent: usize,
    /// Requests started while `sending` was in progress.
    waiting: Vec<u32>,
    pieces: Vec<libc::iovec>,
}

// SAFETY: `pieces` is only scratch space of `Batch::send`; outside that call its pointers mean nothing.
unsafe impl Send for Batch {}

impl Batch {
    pub fn new(extended: bool) -> Batch {
        let (sending, headers, waiting, pieces) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Batch { extended, sending, headers, first: 0, sent: 0, waiting, pieces }
    }

    /// Adds the request in a slot.
    pub fn push(&mut self, slot: u32) {
        self.waiting.push(slot);
    }

    /// Whether anything of the request in a slot has been sent.
    pub fn has_begun(&self, slot: u32) -> bool {
        !self.waiting.contains(&slot)
    }

    /// Whether a part of the request in a slot is still to be sent.
    pub fn has_rest(&self, slot: u32) -> bool {
        self.sending[self.first..].contains(&slot) || self.waiting.contains(&slot)
    }

    /// Whether everything is sent.
    pub fn is_empty(&self) -> bool {
        self.sending.is_empty() && self.waiting.is_empty()
    }

    /// Sends as much as the socket takes now.
    pub fn send<D: Body>(&mut self, fd: RawFd, slots: &[Slot<D>]) -> io::Result<()> {
        loop {
            if self.sending.is_empty() {
                if self.waiting.is_empty() {
                    return Ok(());
                }
                self.begin(slots);
            }
            self.collect(slots);
            match send(fd, &self.pieces) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => self.advance(bytes, slots),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// So many more bytes are sent.
    fn advance<D: Body>(&mut self, bytes: usize, slots: &[Slot<D>]) {
        self.sent += bytes;
        while let Some(&index) = self.sending.get(self.first) {
            let size = self.header() + payload(&slots[index as usize]);
            if self.sent < size {
                return;
            }
            self.sent -= size;
            self.first += 1;
        }
        self.sending.clear();
        self.first = 0;
    }

    /// Bytes of a header.
    fn header(&self) -> usize {
        if self.extended { size_of::<ExtendedRequest>() } else { size_of::<RequestHeader>() }
    }

    fn begin<D: Body>(&mut self, slots: &[Slot<D>]) {
        std::mem::swap(&mut self.sending, &mut self.waiting);
        (self.first, self.sent) = (0, 0);
        self.headers.clear();
        for &index in &self.sending {
            push_header(&mut self.headers, &slots[index as usize], index, self.extended);
        }
    }

    /// Lists the unsent pieces. Headers without payloads between them become one piece.
    fn collect<D: Body>(&mut self, slots: &[Slot<D>]) {
        self.pieces.clear();
        let header = self.header();
        let (mut skip, mut start, mut end) = (self.sent, self.first * header, self.first * header);
        for &index in &self.sending[self.first..] {
            end += header;
            let slot = &slots[index as usize];
            let payload = payload(slot);
            if payload > 0 {
                add(&mut self.pieces, &mut skip, &self.headers[start..end]);
                slot.data.pieces(payload, &mut |piece| add(&mut self.pieces, &mut skip, piece));
                start = end;
            }
        }
        add(&mut self.pieces, &mut skip, &self.headers[start..end]);
    }
}

/// Appends the header of the request in a slot.
fn push_header<D: Body>(headers: &mut Vec<u8>, slot: &Slot<D>, index: u32, extended: bool) {
    let (command, flags) = slot.command.wire();
    let (offset, length) = slot.command.range();
    let cookie = slot.cookie(index).into();
    if extended {
        let payload = if payload(slot) == 0 { 0 } else { command_flag::PAYLOAD_LEN };
        let header = ExtendedRequest {
            magic: EXTENDED_REQUEST_MAGIC.into(),
            flags: (flags | payload).into(),
            command: command.into(),
            cookie,
            offset: offset.into(),
            length: length.into(),
        };
        return headers.extend_from_slice(header.as_bytes());
    }
    let header = RequestHeader {
        magic: REQUEST_MAGIC.into(),
        flags: flags.into(),
        command: command.into(),
        cookie,
        offset: offset.into(),
        // The caller ensures that it fits.
        length: (length as u32).into(),
    };
    headers.extend_from_slice(header.as_bytes());
}

/// Appends `bytes` without the first `skip` of them, and reduces `skip` by the number skipped.
fn add(pieces: &mut Vec<libc::iovec>, skip: &mut usize, bytes: &[u8]) {
    let skipped = bytes.len().min(*skip);
    *skip -= skipped;
    let rest = &bytes[skipped..];
    if !rest.is_empty() {
        pieces.push(libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() });
    }
}

/// Bytes that follow the request's header.
fn payload<D>(slot: &Slot<D>) -> usize {
    match slot.command {
        NbdCommand::Write { length, .. } => length as usize,
        _ => 0,
    }
}

fn send(fd: RawFd, pieces: &[libc::iovec]) -> io::Result<usize> {
    const FLAGS: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    uninterrupted(|| match pieces {
        // Reads are a single piece: the kernel need not copy and check a message header first.
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
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::CommandFlags;

    /// Byte by byte as in the document.
    #[test]
    fn golden_headers() {
        let header = |command, extended| {
            let mut slot = Slot::<Vec<u8>>::new();
            slot.begin(command);
            slot.data = vec![0; 512];
            let mut bytes = Vec::new();
            push_header(&mut bytes, &slot, 3, extended);
            bytes
        };
        let write = NbdCommand::Write { offset: 1 << 32, length: 512, flags: CommandFlags::FUA };
        let compact =
            [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2, 0];
        assert_eq!(header(write, false), compact);
        let extended = [
            0x21, 0xe4, 0x1c, 0x71, 0, 0x21, 0, 1, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 2, 0,
        ];
        assert_eq!(header(write, true), extended);
        let trim = NbdCommand::Trim { offset: 512, length: 5 << 32, flags: CommandFlags::NONE };
        let extended = [
            0x21, 0xe4, 0x1c, 0x71, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 5,
            0, 0, 0, 0,
        ];
        assert_eq!(header(trim, true), extended);
    }
}
