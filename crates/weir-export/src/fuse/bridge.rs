//! Between the kernel's device and an NBD connection: requests of a file become requests of a client, and replies become answers.

use std::borrow::Cow;
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use slab::Slab;
use tokio::sync::oneshot;
use weir_block::{Protection, Received, Sent};
use weir_nbd::protocol::{
    EXTENDED_REPLY_MAGIC, EXTENDED_REQUEST_MAGIC, ExtendedReply, ExtendedRequest, ExtendedStatusDescriptor,
    command, command_flag, error, extent_flag, reply_flag, reply_type,
};
use weir_nbd::server::{BASE_ALLOCATION_ID, Session};
use zerocopy::{FromBytes, IntoBytes};

use super::file::{Asked, File, Io, IoKind, answer};
use super::wire::{LONGEST_REQUEST, WriteOut};

/// Requests that are taken from the kernel in one go. Each is a system call, and the connection has its turn in between.
const BATCH: usize = 32;

/// Bytes of a request's header on the connection.
const HEAD: usize = size_of::<ExtendedRequest>();

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

/// A request without an answer.
#[derive(Debug)]
struct Waiting {
    unique: u64,
    kind: IoKind,
    offset: u64,
    length: u64,
    /// Data of a read of which more is to come.
    parts: Vec<u8>,
}

/// The file while somebody has it open and the disk is here, on the disk's shard. Dropping it gives the file back, with what is not
/// answered.
#[derive(Debug)]
pub struct Bridge {
    /// Present until it is dropped.
    file: Option<File>,
    back: Option<oneshot::Sender<File>>,
    /// The last request that was taken from the kernel.
    request: Box<[u8]>,
    /// The header for the connection, of which `head_taken` bytes are taken.
    head: [u8; HEAD],
    head_taken: usize,
    /// Bytes of `request` that are to follow it.
    payload: Range<usize>,
    waiting: Slab<Waiting>,
    has_ended: bool,
}

impl Bridge {
    /// Serves `file` until its last opener or the connection is gone, then gives it to `back`. The descriptor of the connection is the
    /// kernel's device.
    #[must_use]
    pub fn new(file: File, back: oneshot::Sender<File>) -> Bridge {
        Bridge {
            file: Some(file),
            back: Some(back),
            request: vec![0; LONGEST_REQUEST].into_boxed_slice(),
            head: [0; HEAD],
            head_taken: HEAD,
            payload: 0..0,
            waiting: Slab::new(),
            has_ended: false,
        }
    }

    /// Puts the rest of the last request into the targets, from `filled` on. Returns up to where they are filled then.
    fn pour(&mut self, targets: &mut [IoSliceMut<'_>], filled: usize) -> usize {
        let head = copy(&self.head[self.head_taken..], targets, filled);
        self.head_taken += head;
        let payload = copy(&self.request[self.payload.clone()], targets, filled + head);
        self.payload.start += payload;
        filled + head + payload
    }

    /// The request for the connection.
    fn translate(&mut self, io: Io) {
        let (flags, command) = match io.kind {
            IoKind::Read => (0, command::READ),
            IoKind::Write { sync: true } => (command_flag::PAYLOAD_LEN | command_flag::FUA, command::WRITE),
            IoKind::Write { sync: false } => (command_flag::PAYLOAD_LEN, command::WRITE),
            IoKind::Flush => (0, command::FLUSH),
            IoKind::Zero { unmap: true } => (0, command::WRITE_ZEROES),
            IoKind::Zero { unmap: false } => (command_flag::NO_HOLE, command::WRITE_ZEROES),
            IoKind::Seek { .. } => (0, command::BLOCK_STATUS),
        };
        let Io { unique, kind, offset, length, payload } = io;
        let cookie = self.waiting.insert(Waiting { unique, kind, offset, length, parts: Vec::new() });
        let request = ExtendedRequest {
            magic: EXTENDED_REQUEST_MAGIC.into(),
            flags: flags.into(),
            command: command.into(),
            cookie: (cookie as u64).into(),
            offset: offset.into(),
            length: length.into(),
        };
        self.head.copy_from_slice(request.as_bytes());
        (self.head_taken, self.payload) = (0, payload);
    }

    /// Takes one request from the kernel. False: there is none now, or the last opener has gone.
    fn take_one(&mut self, device: BorrowedFd<'_>) -> io::Result<bool> {
        let Some(file) = &mut self.file else { return Ok(false) };
        let length = match rustix::io::read(device, &mut self.request[..]) {
            Ok(length) => length,
            Err(Errno::AGAIN) => return Ok(false),
            // Interrupted; or its sender has gone.
            Err(Errno::INTR | Errno::NOENT) => return Ok(true),
            Err(Errno::NODEV) => {
                self.has_ended = true;
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        match file.take(device, &self.request[..length])? {
            Asked::Nothing => {}
            Asked::Open { unique } => file.opened(device, unique)?,
            Asked::Closed | Asked::Ended => {
                self.has_ended = true;
                return Ok(false);
            }
            Asked::Io(io) => self.translate(io),
        }
        Ok(true)
    }

    /// One reply of the connection, which begins at the cursor.
    fn reply(&mut self, device: BorrowedFd<'_>, cursor: &mut Cursor<'_, '_>) -> io::Result<()> {
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
        let unique = waiting.unique;
        match kind {
            reply_type::NONE => waiting.finish(device),
            reply_type::OFFSET_DATA if waiting.parts.is_empty() => {
                let data = body.get(size_of::<u64>()..).ok_or_else(broken)?;
                if data.len() as u64 != waiting.length {
                    return Err(broken());
                }
                answer(device, unique, None, &[IoSlice::new(data)]).map(drop)
            }
            reply_type::OFFSET_DATA => {
                waiting.keep(&body)?;
                waiting.finish(device)
            }
            reply_type::BLOCK_STATUS_EXT => match waiting.found(&body) {
                Some(at) => answer(device, unique, None, &[IoSlice::new(at.as_bytes())]).map(drop),
                None => answer(device, unique, Some(Errno::NXIO), &[]).map(drop),
            },
            reply_type::ERROR => {
                let number = body.get(..4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
                let number = number.ok_or_else(broken)?;
                let Some(file) = self.file.as_mut().filter(|_| number == error::ESHUTDOWN) else {
                    let reason = String::from_utf8_lossy(body.get(6..).unwrap_or_default()).into_owned();
                    tracing::debug!(?waiting.kind, waiting.offset, waiting.length, reason, "fuse: a request fails");
                    return answer(device, unique, Some(errno(number)), &[]).map(drop);
                };
                // The disk leaves this node, or is opened anew: it waits for that.
                file.keep_waiting(device, unique)
            }
            _ => Err(broken()),
        }
    }
}

impl Waiting {
    /// Keeps a part of a read. `body` is the offset, and the data.
    fn keep(&mut self, body: &[u8]) -> io::Result<()> {
        let (at, data) = body.split_first_chunk::<8>().ok_or_else(broken)?;
        let at = u64::from_be_bytes(*at).checked_sub(self.offset).ok_or_else(broken)?;
        if self.kind != IoKind::Read || at + data.len() as u64 > self.length {
            return Err(broken());
        }
        self.parts.resize(self.length as usize, 0);
        self.parts[at as usize..at as usize + data.len()].copy_from_slice(data);
        Ok(())
    }

    /// Answers with success.
    fn finish(&self, device: BorrowedFd<'_>) -> io::Result<()> {
        let written = WriteOut { size: self.length as u32, padding: 0 };
        let body: &[u8] = match self.kind {
            IoKind::Read if self.parts.len() as u64 == self.length => &self.parts,
            IoKind::Read | IoKind::Seek { .. } => return Err(broken()),
            IoKind::Write { .. } => written.as_bytes(),
            IoKind::Flush | IoKind::Zero { .. } => return answer(device, self.unique, None, &[]).map(drop),
        };
        answer(device, self.unique, None, &[IoSlice::new(body)]).map(drop)
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

impl Protection for Bridge {
    fn receive(&mut self, fd: BorrowedFd<'_>, targets: &mut [IoSliceMut<'_>]) -> io::Result<Received> {
        let room: usize = targets.iter().map(|target| target.len()).sum();
        let mut filled = self.pour(targets, 0);
        for _ in 0..BATCH {
            if filled == room || self.has_ended || !self.take_one(fd)? {
                break;
            }
            filled = self.pour(targets, filled);
        }
        Ok(match filled {
            0 if self.has_ended => Received::End,
            0 => Received::Nothing,
            filled => Received::Bytes(filled),
        })
    }

    fn send(&mut self, fd: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> io::Result<Sent> {
        // The kernel takes each answer whole and at once, and the connection offers whole replies.
        let mut cursor = Cursor { slices, at: 0 };
        while !cursor.is_at_end() {
            self.reply(fd, &mut cursor)?;
        }
        Ok(Sent::Bytes(slices.iter().map(|slice| slice.len()).sum()))
    }

    fn end(&mut self, _fd: BorrowedFd<'_>) {
        self.has_ended = true;
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        let (Some(mut file), Some(back)) = (self.file.take(), self.back.take()) else { return };
        file.leave_unanswered(self.waiting.drain().map(|waiting| waiting.unique));
        // This fails when the task that mounted the file has ended; then the file is unmounted, too.
        let _ = back.send(file);
    }
}

/// Copies as much as fits into the targets, from `filled` on.
fn copy(from: &[u8], targets: &mut [IoSliceMut<'_>], filled: usize) -> usize {
    let (mut skip, mut copied) = (filled, 0);
    for target in targets {
        let full = skip.min(target.len());
        skip -= full;
        let room = &mut target[full..];
        let length = room.len().min(from.len() - copied);
        room[..length].copy_from_slice(&from[copied..copied + length]);
        copied += length;
    }
    copied
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
    fn copies_go_into_the_targets_one_after_the_other() {
        let (mut one, mut two) = ([0; 3], [0; 4]);
        let mut targets = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
        assert_eq!(copy(b"ab", &mut targets, 0), 2);
        assert_eq!(copy(b"cdefgh", &mut targets, 2), 5);
        assert_eq!(copy(b"x", &mut targets, 7), 0);
        assert_eq!((&one, &two), (b"abc", b"defg"));
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
            Waiting { unique: 1, kind, offset: 100, length: 900, parts: Vec::new() }.found(&status(extents))
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
