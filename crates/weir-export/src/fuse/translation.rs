//! Requests of a file as requests of an NBD connection, and the replies as answers to the kernel.

use std::borrow::Cow;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use slab::Slab;
use weir_nbd::protocol::{
    EXTENDED_REPLY_MAGIC, EXTENDED_REQUEST_MAGIC, ExtendedReply, ExtendedRequest, ExtendedStatusDescriptor,
    command, command_flag, error, extent_flag, reply_flag, reply_type, transmission_flag,
};
use weir_nbd::server::{BASE_ALLOCATION_ID, Session};
use zerocopy::{FromBytes, IntoBytes};

use super::file::{File, Io, IoKind, Sender, answer};
use super::wire::WriteOut;

/// Bytes of a request's header on the connection.
pub const HEAD: usize = size_of::<ExtendedRequest>();

/// The NBD session of a file, as if negotiated: extended headers, for ranges of any length and for extents, and no minimum block size,
/// because a program may read and write any bytes of a file.
#[must_use]
pub fn session(disk: &str) -> Session {
    Session {
        export: disk.to_owned(),
        structured_replies: true,
        extended_headers: true,
        block_sizes: false,
        base_allocation: Some(BASE_ALLOCATION_ID),
        flags: 0,
    }
}

/// As [`session`], for a connection that only reads.
#[must_use]
pub fn reading_session(disk: &str) -> Session {
    Session { flags: transmission_flag::READ_ONLY, ..session(disk) }
}

/// A request without an answer.
#[derive(Debug)]
struct Waiting {
    sender: Sender,
    /// Its sender has ended, and got its answer.
    is_over: bool,
    kind: IoKind,
    offset: u64,
    length: u64,
    /// Data of a read of which more is to come.
    parts: Vec<u8>,
    /// Bytes of it that have come.
    filled: u64,
}

/// The requests of a file that are under way on a connection, in the [`session`] of its disk.
#[derive(Debug, Default)]
pub struct Translation {
    waiting: Slab<Waiting>,
    /// Bytes that their reads ask for.
    bytes: u64,
}

impl Translation {
    /// Requests under way.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.waiting.len()
    }

    /// Whether somebody waits for one of them.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        self.waiting.iter().any(|(_, waiting)| !waiting.is_over)
    }

    /// Bytes that are being read.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The connection is gone: what is under way is left to `file`.
    pub fn leave(&mut self, file: &mut File) {
        self.bytes = 0;
        let left = self.waiting.drain().filter(|waiting| !waiting.is_over);
        file.leave_unanswered(left.map(|waiting| (waiting.sender, waiting.kind)));
    }

    /// As [`File::interrupt`], of a request that is under way, too. The reply to it has no receiver then.
    ///
    /// # Errors
    /// The mount is over.
    pub fn interrupt(&mut self, file: &mut File, device: BorrowedFd<'_>, unique: u64) -> io::Result<()> {
        let mut waiting = self.waiting.iter_mut().map(|(_, waiting)| waiting);
        let Some(waiting) = waiting.find(|waiting| waiting.sender.unique == unique) else {
            return file.interrupt(device, unique);
        };
        if waiting.is_over || !waiting.sender.lets_go_of(waiting.kind) {
            return Ok(());
        }
        waiting.is_over = true;
        file.refuse(device, unique, Errno::INTR)
    }

    /// The header of a request for the connection. A write's bytes follow it.
    pub fn request(&mut self, io: &Io) -> [u8; HEAD] {
        let (flags, command) = match io.kind {
            IoKind::Read => (0, command::READ),
            IoKind::Write { sync: true } => (command_flag::PAYLOAD_LEN | command_flag::FUA, command::WRITE),
            IoKind::Write { sync: false } => (command_flag::PAYLOAD_LEN, command::WRITE),
            IoKind::Flush => (0, command::FLUSH),
            IoKind::Zero { unmap: true } => (0, command::WRITE_ZEROES),
            IoKind::Zero { unmap: false } => (command_flag::NO_HOLE, command::WRITE_ZEROES),
            IoKind::Seek { .. } => (0, command::BLOCK_STATUS),
        };
        let &Io { sender, kind, offset, length, .. } = io;
        self.bytes += read_bytes(kind, length);
        let (parts, is_over) = (Vec::new(), false);
        let cookie = self.waiting.insert(Waiting { sender, is_over, kind, offset, length, parts, filled: 0 });
        let request = ExtendedRequest {
            magic: EXTENDED_REQUEST_MAGIC.into(),
            flags: flags.into(),
            command: command.into(),
            cookie: (cookie as u64).into(),
            offset: offset.into(),
            length: length.into(),
        };
        let mut head = [0; HEAD];
        head.copy_from_slice(request.as_bytes());
        head
    }

    /// Turns whole replies of the connection, which lie in pieces, into answers of `file` at `device`.
    ///
    /// # Errors
    /// A reply does not fit its request, or is not whole; or the mount is over.
    pub fn replies(
        &mut self,
        file: &mut File,
        device: BorrowedFd<'_>,
        slices: &[IoSlice<'_>],
    ) -> io::Result<()> {
        let mut cursor = Cursor { slices, at: 0 };
        while !cursor.is_at_end() {
            self.reply(file, device, &mut cursor)?;
        }
        Ok(())
    }

    /// The one that begins at the cursor.
    fn reply(
        &mut self,
        file: &mut File,
        device: BorrowedFd<'_>,
        cursor: &mut Cursor<'_, '_>,
    ) -> io::Result<()> {
        let header = cursor.fixed::<{ size_of::<ExtendedReply>() }>().ok_or_else(broken)?;
        let header = ExtendedReply::read_from_bytes(&header).map_err(|_| broken())?;
        let length = usize::try_from(header.length.get()).map_err(|_| broken())?;
        let body = cursor.bytes(length).ok_or_else(broken)?;
        let slot = usize::try_from(header.cookie.get()).map_err(|_| broken())?;
        if header.magic != EXTENDED_REPLY_MAGIC || !self.waiting.contains(slot) {
            return Err(broken());
        }
        let kind = header.kind.get();
        if header.flags.get() & reply_flag::DONE == 0 {
            return match kind {
                reply_type::OFFSET_DATA => self.waiting[slot].keep(&body),
                _ => Err(broken()),
            };
        }
        let mut waiting = self.waiting.remove(slot);
        self.bytes -= read_bytes(waiting.kind, waiting.length);
        if waiting.is_over {
            return Ok(());
        }
        let waited = file.waiting();
        let answered = waiting.answer(file, device, kind, &body);
        if file.waiting() == waited {
            file.count_answer();
        }
        if answered.is_err() {
            // Whoever waits for it learns how that ends.
            file.leave_unanswered([(waiting.sender, waiting.kind)]);
        }
        answered
    }
}

fn read_bytes(kind: IoKind, length: u64) -> u64 {
    if kind == IoKind::Read { length } else { 0 }
}

impl Waiting {
    /// Answers with the last reply, of this kind.
    fn answer(&mut self, file: &mut File, device: BorrowedFd<'_>, kind: u16, body: &[u8]) -> io::Result<()> {
        let unique = self.sender.unique;
        match kind {
            reply_type::NONE => self.finish(device),
            reply_type::OFFSET_DATA if self.parts.is_empty() && self.kind == IoKind::Read => {
                let data = body.get(size_of::<u64>()..).ok_or_else(broken)?;
                if data.len() as u64 != self.length {
                    return Err(broken());
                }
                answer(device, unique, None, &[IoSlice::new(data)]).map(drop)
            }
            reply_type::OFFSET_DATA => {
                self.keep(body)?;
                self.finish(device)
            }
            reply_type::BLOCK_STATUS_EXT if matches!(self.kind, IoKind::Seek { .. }) => {
                match self.found(body) {
                    Some(at) => answer(device, unique, None, &[IoSlice::new(at.as_bytes())]).map(drop),
                    None => answer(device, unique, Some(Errno::NXIO), &[]).map(drop),
                }
            }
            reply_type::ERROR => {
                let number = body.get(..4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
                let number = number.ok_or_else(broken)?;
                if number != error::ESHUTDOWN {
                    let reason = String::from_utf8_lossy(body.get(6..).unwrap_or_default()).into_owned();
                    tracing::debug!(?self.kind, self.offset, self.length, reason, "fuse: a request fails");
                    return answer(device, unique, Some(errno(number)), &[]).map(drop);
                }
                // The disk leaves its node, or is opened anew: it waits for that.
                file.keep_waiting(device, self.sender, self.kind)
            }
            _ => Err(broken()),
        }
    }

    /// Keeps a part of a read. `body` is the offset, and the data.
    fn keep(&mut self, body: &[u8]) -> io::Result<()> {
        let (at, data) = body.split_first_chunk::<8>().ok_or_else(broken)?;
        let at = u64::from_be_bytes(*at).checked_sub(self.offset).ok_or_else(broken)?;
        let end = at.checked_add(data.len() as u64).ok_or_else(broken)?;
        if self.kind != IoKind::Read || end > self.length {
            return Err(broken());
        }
        self.parts.resize(self.length as usize, 0);
        self.filled += data.len() as u64;
        self.parts[at as usize..end as usize].copy_from_slice(data);
        Ok(())
    }

    /// Answers with success.
    fn finish(&self, device: BorrowedFd<'_>) -> io::Result<()> {
        let written = WriteOut { size: self.length as u32, padding: 0 };
        let body: &[u8] = match self.kind {
            IoKind::Read if self.filled == self.length => &self.parts,
            IoKind::Read | IoKind::Seek { .. } => return Err(broken()),
            IoKind::Write { .. } => written.as_bytes(),
            IoKind::Flush | IoKind::Zero { .. } => {
                return answer(device, self.sender.unique, None, &[]).map(drop);
            }
        };
        answer(device, self.sender.unique, None, &[IoSlice::new(body)]).map(drop)
    }

    /// The place that a search finds; `None`: only holes follow. Where the description ends before anything is found, data follows as far as
    /// the caller need know: what is said to be a hole has to be one, and data may be zeroes.
    fn found(&self, body: &[u8]) -> Option<u64> {
        let hole = self.kind == IoKind::Seek { hole: true };
        let end = self.offset + self.length;
        let mut at = self.offset;
        let mut rest = body.get(2 * size_of::<u32>()..).unwrap_or_default();
        while let Ok((extent, behind)) = ExtendedStatusDescriptor::read_from_prefix(rest) {
            let is_hole = extent.flags.get() & u64::from(extent_flag::HOLE) != 0;
            if is_hole == hole {
                return Some(at);
            }
            at = at.saturating_add(extent.length.get());
            rest = behind;
        }
        match hole {
            true => Some(end),
            false => (at < end).then_some(at),
        }
    }
}

/// A place in bytes that lie in pieces.
struct Cursor<'a, 'b> {
    slices: &'a [IoSlice<'b>],
    /// In the first of them.
    at: usize,
}

impl<'a> Cursor<'a, '_> {
    fn is_at_end(&self) -> bool {
        self.slices.iter().map(|slice| slice.len()).sum::<usize>() == self.at
    }

    /// The next bytes; a copy only if they are in several pieces.
    fn bytes(&mut self, length: usize) -> Option<Cow<'a, [u8]>> {
        while self.slices.first().is_some_and(|slice| self.at == slice.len()) {
            (self.slices, self.at) = (&self.slices[1..], 0);
        }
        if let Some(bytes) = self.slices.first().and_then(|slice| slice.get(self.at..self.at + length)) {
            self.at += length;
            return Some(Cow::Borrowed(bytes));
        }
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let slice = self.slices.first()?;
            let taken = (length - bytes.len()).min(slice.len() - self.at);
            bytes.extend_from_slice(&slice[self.at..self.at + taken]);
            self.at += taken;
            if self.at == slice.len() {
                (self.slices, self.at) = (&self.slices[1..], 0);
            }
        }
        Some(Cow::Owned(bytes))
    }

    fn fixed<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.as_ref().try_into().ok()
    }
}

/// The protocol's error as the system's; the numbers are the same.
fn errno(number: u32) -> Errno {
    match i32::try_from(number) {
        Ok(number @ 1..=4095) => Errno::from_raw_os_error(number),
        _ => Errno::IO,
    }
}

fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a reply of the connection does not fit its request")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_reads_across_pieces() {
        let pieces: Vec<_> = [&b"ab"[..], b"", b"cdef", b"g"].into_iter().map(IoSlice::new).collect();
        let mut cursor = Cursor { slices: &pieces, at: 0 };
        assert_eq!(cursor.bytes(1).as_deref(), Some(&b"a"[..]));
        assert_eq!(cursor.fixed::<3>(), Some(*b"bcd"));
        assert!(matches!(cursor.bytes(2), Some(Cow::Borrowed(b"ef"))));
        assert!(!cursor.is_at_end());
        assert_eq!(cursor.bytes(1).as_deref(), Some(&b"g"[..]));
        assert!(cursor.is_at_end());
        assert_eq!(cursor.bytes(1), None);
    }

    #[test]
    fn a_search_finds_the_first_extent_of_its_kind_or_says_the_safe_thing() {
        let status = |extents: &[(u64, u32)]| {
            let mut body = vec![0; 8];
            for &(length, flags) in extents {
                let one = ExtendedStatusDescriptor { length: length.into(), flags: u64::from(flags).into() };
                body.extend_from_slice(one.as_bytes());
            }
            body
        };
        let search = |hole, extents: &[(u64, u32)]| {
            let kind = IoKind::Seek { hole };
            let sender = Sender { unique: 1, thread: 0 };
            let (parts, is_over) = (Vec::new(), false);
            Waiting { sender, is_over, kind, offset: 100, length: 900, parts, filled: 0 }
                .found(&status(extents))
        };
        let (data, hole, zero) = (0, extent_flag::HOLE | extent_flag::ZERO, extent_flag::ZERO);
        assert_eq!(search(false, &[(50, hole), (10, data)]), Some(150));
        assert_eq!(search(true, &[(50, zero), (10, hole)]), Some(150));
        assert_eq!(search(false, &[(900, hole)]), None, "only holes");
        assert_eq!(search(true, &[(900, data)]), Some(1000), "the end is a hole");
        assert_eq!(search(false, &[(300, hole)]), Some(400), "nobody knows: data");
        assert_eq!(search(true, &[(300, data)]), Some(1000), "nobody knows: data up to the end");
    }
}
