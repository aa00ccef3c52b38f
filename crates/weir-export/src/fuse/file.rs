//! The one file of a mount: answers what needs no disk, and says what does.

use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use super::wire::{
    Attributes, AttributesOut, FallocateIn, InHeader, InitIn, InitOut, InterruptIn, LARGEST, LseekIn, MAJOR,
    MINOR, NOTIFY_RESEND, OLDEST_MINOR, OpenIn, OpenOut, OutHeader, SETATTR_ACCESS, SETATTR_SIZE, SetattrIn,
    StatfsOut, TransferIn, capability, opcode, open_flag,
};

/// Asynchronous requests that the kernel has under way at most; as many as one client of a disk may.
const BACKGROUND: u16 = 128;

/// Seconds for which the kernel believes the size.
const ATTRIBUTES_VALID: u64 = 1;

/// The inode of the file, which is the root of its mount.
const ROOT: u64 = 1;

/// Requests that wait for the disk to come back, at most; further ones fail (P10).
const MOST_UNANSWERED: usize = 4096;

/// Connections that wait for answers to killed programs, at most: with more the next opener waits, too (P10).
const MOST_STALE: usize = 16;

/// Modes of `fallocate(2)`.
const KEEP_SIZE: u32 = 0x01;
const PUNCH_HOLE: u32 = 0x02;
const ZERO_RANGE: u32 = 0x10;

/// Whence of `lseek(2)`.
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// Owner and mode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Permission bits.
    pub mode: u32,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// Kind of an I/O request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    /// Reads.
    Read,
    /// Writes; `sync`: is answered only once the data is durable.
    Write {
        /// The opener or the write itself asks for that.
        sync: bool,
    },
    /// Makes answered writes durable.
    Flush,
    /// Makes a range read as zeroes; `unmap`: and frees its space.
    Zero {
        /// It is a hole afterwards.
        unmap: bool,
    },
    /// Looks for data, or for a hole.
    Seek {
        /// For a hole.
        hole: bool,
    },
}

impl IoKind {
    /// Whether it changes the disk.
    #[must_use]
    pub fn changes(self) -> bool {
        matches!(self, IoKind::Write { .. } | IoKind::Zero { .. })
    }
}

/// Somebody who waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sender {
    /// The kernel's number of the request.
    pub unique: u64,
    /// The thread that has sent it; 0 if the mount's namespace has no number for it.
    pub thread: u32,
}

/// A request for the disk, inside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Io {
    /// The thread that waits for the answer.
    pub sender: Sender,
    /// What it does.
    pub kind: IoKind,
    /// Bytes from the start of the disk.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Where in the request the bytes of a write are.
    pub payload: Range<usize>,
}

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// It is answered, or needs no answer.
    Nothing,
    /// Somebody opens the file: [`File::opened`] or [`File::refuse`].
    Open {
        /// The kernel's number of the request.
        unique: u64,
        /// Not for reading alone.
        writes: bool,
    },
    /// The last opener has closed the file.
    Closed,
    /// Something of the disk.
    Io(Io),
    /// The sender of this request has a signal, and waits until it is answered.
    Interrupted(u64),
    /// The mount is over.
    Ended,
}

/// The one file of a mount, between requests.
#[derive(Debug)]
pub struct File {
    name: String,
    access: Access,
    /// Bytes of the disk; may grow.
    size: Arc<AtomicU64>,
    /// The times of the file, in seconds.
    since: u64,
    /// The kernel can be told to send unanswered requests again.
    resends: bool,
    openers: u64,
    /// Requests that were taken and not answered: the disk has gone meanwhile.
    unanswered: Vec<(Sender, IoKind)>,
    /// Number of requests that the disk has answered, also those with an error.
    answers: u64,
    /// Held by connections whose last opener has gone before all was answered.
    stale: Arc<()>,
}

impl File {
    /// The file of disk `name`, at the time `since` (seconds of the wall clock).
    #[must_use]
    pub fn new(name: &str, access: Access, size: Arc<AtomicU64>, since: u64) -> File {
        let name = name.to_owned();
        let (unanswered, stale) = (Vec::new(), Arc::default());
        File { name, access, size, since, resends: false, openers: 0, unanswered, answers: 0, stale }
    }

    /// The disk.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether somebody has it open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.openers > 0
    }

    /// Whether somebody waits for an answer that only the disk can give.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        !self.unanswered.is_empty()
    }

    /// How many requests the disk has answered so far, with errors or without.
    #[must_use]
    pub fn answers(&self) -> u64 {
        self.answers
    }

    /// How many requests wait for the disk.
    pub(super) fn waiting(&self) -> usize {
        self.unanswered.len()
    }

    pub(super) fn count_answer(&mut self) {
        self.answers += 1;
    }

    /// For a connection that is to outlive its part in this file; `None`: there are enough of them (P10).
    pub(super) fn outlive(&self) -> Option<Arc<()>> {
        (Arc::strong_count(&self.stale) <= MOST_STALE).then(|| Arc::clone(&self.stale))
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Takes one request of the kernel; answers it at `device` if the disk is not needed.
    ///
    /// # Errors
    /// The mount is over, or the request is none.
    pub fn take(&mut self, device: BorrowedFd<'_>, request: &[u8]) -> io::Result<Asked> {
        let Ok((header, body)) = InHeader::read_from_prefix(request) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a request of the kernel is too short"));
        };
        let unique = header.unique;
        match self.act(device, &header, body) {
            Ok(Asked::Io(mut io)) => {
                let at = size_of::<InHeader>();
                io.payload = io.payload.start + at..io.payload.end + at;
                Ok(Asked::Io(io))
            }
            Ok(asked) => Ok(asked),
            Err(errno) => self.refuse(device, unique, errno).map(|()| Asked::Nothing),
        }
    }

    fn act(&mut self, device: BorrowedFd<'_>, header: &InHeader, body: &[u8]) -> Result<Asked, Errno> {
        let unique = header.unique;
        let sender = Sender::of(header);
        let done = |result: io::Result<()>| {
            if let Err(error) = result {
                tracing::debug!(%error, "fuse: an answer was not taken");
            }
            Ok(Asked::Nothing)
        };
        match header.opcode {
            opcode::INIT => done(self.initialise(device, unique, body)),
            opcode::GETATTR => done(self.describe(device, unique)),
            opcode::SETATTR => {
                self.check_change(&read(body)?)?;
                done(self.describe(device, unique))
            }
            opcode::OPEN => {
                let flags = read::<OpenIn>(body)?.flags & libc::O_ACCMODE as u32;
                Ok(Asked::Open { unique, writes: flags != libc::O_RDONLY as u32 })
            }
            opcode::RELEASE => {
                self.openers = self.openers.saturating_sub(1);
                let _ = answer(device, unique, None, &[]);
                Ok(if self.is_open() { Asked::Nothing } else { Asked::Closed })
            }
            opcode::STATFS => done(self.describe_filesystem(device, unique)),
            opcode::READ | opcode::WRITE => match self.transfer(header, body)? {
                Some(io) => Ok(Asked::Io(io)),
                None => done(answer(device, unique, None, &[]).map(drop)),
            },
            opcode::FSYNC => {
                Ok(Asked::Io(Io { sender, kind: IoKind::Flush, offset: 0, length: 0, payload: 0..0 }))
            }
            opcode::FALLOCATE => match self.allocate(sender, &read(body)?)? {
                Some(io) => Ok(Asked::Io(io)),
                None => done(answer(device, unique, None, &[]).map(drop)),
            },
            opcode::LSEEK => self.seek(sender, &read(body)?).map(Asked::Io),
            opcode::DESTROY => Ok(Asked::Ended),
            // None of these has an answer.
            opcode::INTERRUPT => Ok(Asked::Interrupted(read::<InterruptIn>(body)?.unique)),
            opcode::FORGET | opcode::BATCH_FORGET => Ok(Asked::Nothing),
            // The kernel remembers that, and does without.
            _ => Err(Errno::NOSYS),
        }
    }

    fn initialise(&mut self, device: BorrowedFd<'_>, unique: u64, body: &[u8]) -> io::Result<()> {
        let asked = InitIn::read_from_prefix(body).ok().map(|(asked, _)| asked);
        let Some(asked) = asked.filter(|asked| asked.major == MAJOR && asked.minor >= OLDEST_MINOR) else {
            tracing::error!("fuse: the kernel is too old: Linux 5.17 or later is needed");
            return self.refuse(device, unique, Errno::PROTO);
        };
        let wanted = capability::ASYNC_READ
            | capability::BIG_WRITES
            | capability::ASYNC_DIO
            | capability::MAX_PAGES
            | capability::INIT_EXT;
        let flags2 = asked.flags2 & capability::HAS_RESEND_2;
        self.resends = flags2 != 0;
        let reply = InitOut {
            major: MAJOR,
            minor: asked.minor.min(MINOR),
            max_readahead: 0,
            flags: wanted & asked.flags,
            max_background: BACKGROUND,
            congestion_threshold: BACKGROUND / 4 * 3,
            max_write: LARGEST,
            time_granularity: 1,
            max_pages: (LARGEST / 4096) as u16,
            flags2,
            ..InitOut::default()
        };
        answer(device, unique, None, &[IoSlice::new(reply.as_bytes())]).map(drop)
    }

    fn describe(&self, device: BorrowedFd<'_>, unique: u64) -> io::Result<()> {
        let (size, since) = (self.size(), self.since);
        let attributes = Attributes {
            inode: ROOT,
            size,
            blocks: size / 512,
            accessed: since,
            modified: since,
            changed: since,
            mode: libc::S_IFREG | self.access.mode,
            links: 1,
            uid: self.access.uid,
            gid: self.access.gid,
            block_size: 4096,
            ..Attributes::default()
        };
        let reply = AttributesOut { valid: ATTRIBUTES_VALID, valid_ns: 0, padding: 0, attributes };
        answer(device, unique, None, &[IoSlice::new(reply.as_bytes())]).map(drop)
    }

    fn describe_filesystem(&self, device: BorrowedFd<'_>, unique: u64) -> io::Result<()> {
        let reply = StatfsOut {
            blocks: self.size() / 4096,
            files: 1,
            block_size: 4096,
            name_length: 255,
            fragment_size: 4096,
            ..StatfsOut::default()
        };
        answer(device, unique, None, &[IoSlice::new(reply.as_bytes())]).map(drop)
    }

    /// The size is the disk's and the access that of the configuration; times are not kept, and may be set.
    fn check_change(&self, change: &SetattrIn) -> Result<(), Errno> {
        let resizes = change.valid & SETATTR_SIZE != 0 && change.size != self.size();
        if resizes || change.valid & SETATTR_ACCESS != 0 { Err(Errno::PERM) } else { Ok(()) }
    }

    /// A read or write, cut off at the end of the disk. `None`: a read that begins there.
    fn transfer(&self, header: &InHeader, body: &[u8]) -> Result<Option<Io>, Errno> {
        let Ok((transfer, data)) = TransferIn::read_from_prefix(body) else { return Err(Errno::INVAL) };
        let left = self.size().saturating_sub(transfer.offset);
        let (offset, length) = (transfer.offset, u64::from(transfer.size).min(left));
        let start = size_of::<TransferIn>();
        let sender = Sender::of(header);
        if header.opcode == opcode::READ {
            let whole = transfer.size <= LARGEST;
            let io = Io { sender, kind: IoKind::Read, offset, length, payload: 0..0 };
            return if whole { Ok((length > 0).then_some(io)) } else { Err(Errno::INVAL) };
        }
        if transfer.size as usize > data.len() || transfer.size == 0 {
            return Err(Errno::INVAL);
        }
        if length == 0 {
            return Err(Errno::NOSPC);
        }
        let sync = transfer.flags & libc::O_DSYNC as u32 != 0;
        let payload = start..start + length as usize;
        Ok(Some(Io { sender, kind: IoKind::Write { sync }, offset, length, payload }))
    }

    /// A range that is to read as zeroes, cut off at the end of the disk. `None`: nothing of it is inside.
    fn allocate(&self, sender: Sender, asked: &FallocateIn) -> Result<Option<Io>, Errno> {
        let end = asked.offset.checked_add(asked.length).ok_or(Errno::FBIG)?;
        let (unmap, grows) = match asked.mode {
            mode if mode == PUNCH_HOLE | KEEP_SIZE => (true, false),
            mode if mode == ZERO_RANGE | KEEP_SIZE => (false, false),
            ZERO_RANGE => (false, true),
            // Space for what is written later: a thin disk has no means to promise that.
            _ => return Err(Errno::OPNOTSUPP),
        };
        if asked.length == 0 {
            return Err(Errno::INVAL);
        }
        if grows && end > self.size() {
            return Err(Errno::NOSPC);
        }
        let length = end.min(self.size()).saturating_sub(asked.offset);
        let io = Io { sender, kind: IoKind::Zero { unmap }, offset: asked.offset, length, payload: 0..0 };
        Ok((length > 0).then_some(io))
    }

    fn seek(&self, sender: Sender, asked: &LseekIn) -> Result<Io, Errno> {
        let hole = match asked.whence {
            SEEK_DATA => false,
            SEEK_HOLE => true,
            _ => return Err(Errno::INVAL),
        };
        if asked.offset >= self.size() {
            return Err(Errno::NXIO);
        }
        let length = self.size() - asked.offset;
        Ok(Io { sender, kind: IoKind::Seek { hole }, offset: asked.offset, length, payload: 0..0 })
    }

    /// Somebody has the file open from now on, unless the opener has gone.
    ///
    /// # Errors
    /// The mount is over.
    pub fn opened(&mut self, device: BorrowedFd<'_>, unique: u64) -> io::Result<()> {
        // Without the page cache: reads see what another client of the disk has written, and no dirty page waits for this process. Private
        // mappings have pages all the same, which nothing here keeps up to date.
        let flags = open_flag::DIRECT_IO | open_flag::PARALLEL_DIRECT_WRITES;
        let reply = OpenOut { handle: 0, flags, backing: 0 };
        if answer(device, unique, None, &[IoSlice::new(reply.as_bytes())])? {
            self.openers += 1;
        }
        Ok(())
    }

    /// Answers with an error.
    ///
    /// # Errors
    /// The mount is over.
    pub fn refuse(&mut self, device: BorrowedFd<'_>, unique: u64, errno: Errno) -> io::Result<()> {
        answer(device, unique, Some(errno), &[]).map(drop)
    }

    /// A request is taken and has no answer yet; it waits for the disk.
    ///
    /// # Errors
    /// The mount is over.
    pub fn keep_waiting(&mut self, device: BorrowedFd<'_>, sender: Sender, kind: IoKind) -> io::Result<()> {
        if !self.resends || self.unanswered.len() >= MOST_UNANSWERED {
            return self.refuse(device, sender.unique, Errno::IO);
        }
        self.unanswered.push((sender, kind));
        Ok(())
    }

    /// The sender of a request that waits for the disk has a signal. If it ends by that, it waits no longer, unless the request changes
    /// the disk: what a program has begun to write before its end may not land after what the next one writes.
    ///
    /// # Errors
    /// The mount is over.
    pub fn interrupt(&mut self, device: BorrowedFd<'_>, unique: u64) -> io::Result<()> {
        let ends = |(sender, kind): &(Sender, IoKind)| sender.unique == unique && sender.lets_go_of(*kind);
        match self.unanswered.iter().position(ends) {
            Some(place) => {
                self.unanswered.swap_remove(place);
                self.refuse(device, unique, Errno::INTR)
            }
            None => Ok(()),
        }
    }

    /// Requests that the disk has not answered wait for it, or fail with [`File::give_up`].
    pub(super) fn leave_unanswered(&mut self, requests: impl IntoIterator<Item = (Sender, IoKind)>) {
        self.unanswered.extend(requests);
    }

    /// The disk is here: the kernel sends again what is not answered. A write may be executed twice, as by a client that reconnects.
    ///
    /// # Errors
    /// The mount is over.
    pub fn ask_again(&mut self, device: BorrowedFd<'_>) -> io::Result<()> {
        if self.unanswered.is_empty() {
            return Ok(());
        }
        if !self.resends {
            self.give_up(device);
            return Ok(());
        }
        let notice = OutHeader { length: size_of::<OutHeader>() as u32, error: NOTIFY_RESEND, unique: 0 };
        rustix::io::write(device, notice.as_bytes())?;
        self.unanswered.clear();
        Ok(())
    }

    /// The disk does not come: what waits for it fails.
    pub fn give_up(&mut self, device: BorrowedFd<'_>) {
        for (sender, _) in std::mem::take(&mut self.unanswered) {
            let _ = self.refuse(device, sender.unique, Errno::IO);
        }
    }
}

impl Sender {
    fn of(header: &InHeader) -> Sender {
        Sender { unique: header.unique, thread: header.pid }
    }

    /// Its end is certain, and nothing comes of the request after it. A program that handles its signal does not expect that a read of a
    /// file is cut short.
    pub(super) fn lets_go_of(self, kind: IoKind) -> bool {
        !kind.changes() && self.is_killed()
    }

    /// A signal that ends the process without a core dump leaves a SIGKILL with each of its threads (`complete_signal` in the kernel). The
    /// kernel tells of the first signal during a request alone: if that was another one (SIGTSTP, say), the sender waits for its answer.
    fn is_killed(self) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.thread));
        status.is_ok_and(|status| has_kill(&status))
    }
}

/// Whether a thread's `status` (proc(5)) has a SIGKILL pending.
fn has_kill(status: &str) -> bool {
    let pending = status.lines().find_map(|line| line.strip_prefix("SigPnd:"));
    let pending = pending.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    pending.is_some_and(|set| set & 1 << (libc::SIGKILL - 1) != 0)
}

fn read<T: FromBytes>(body: &[u8]) -> Result<T, Errno> {
    T::read_from_prefix(body).map(|(value, _)| value).map_err(|_| Errno::INVAL)
}

/// Answers a request: with an error, or with `body`. False: nobody waits for the answer any more.
pub(super) fn answer(
    device: BorrowedFd<'_>,
    unique: u64,
    errno: Option<Errno>,
    body: &[IoSlice<'_>],
) -> io::Result<bool> {
    let length = size_of::<OutHeader>() + body.iter().map(|piece| piece.len()).sum::<usize>();
    let error = errno.map_or(0, |errno| -errno.raw_os_error());
    let header = OutHeader { length: length as u32, error, unique };
    let head = IoSlice::new(header.as_bytes());
    let sent = match body {
        [] => rustix::io::writev(device, &[head]),
        [one] => rustix::io::writev(device, &[head, IoSlice::new(one)]),
        more => {
            let all: Vec<_> =
                std::iter::once(head).chain(more.iter().map(|piece| IoSlice::new(piece))).collect();
            rustix::io::writev(device, &all)
        }
    };
    match sent {
        Ok(_) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use proptest::prelude::*;

    use super::*;

    const SIZE: u64 = 1 << 20;

    fn file() -> File {
        let access = Access { mode: 0o600, uid: 0, gid: 0 };
        File::new("d", access, Arc::new(AtomicU64::new(SIZE)), 0)
    }

    fn request(opcode: u32, body: &[u8]) -> Vec<u8> {
        let length = (size_of::<InHeader>() + body.len()) as u32;
        let header = InHeader {
            length,
            opcode,
            unique: 7,
            node: ROOT,
            uid: 0,
            gid: 0,
            pid: 1,
            extensions: 0,
            padding: 0,
        };
        [header.as_bytes(), body].concat()
    }

    fn transfer(offset: u64, size: u32, flags: u32) -> TransferIn {
        TransferIn { handle: 0, offset, size, transfer_flags: 0, lock_owner: 0, flags, padding: 0 }
    }

    /// What is asked for; answers go nowhere.
    fn take(file: &mut File, request: &[u8]) -> Asked {
        let nowhere = std::fs::File::options().write(true).open("/dev/null").unwrap();
        file.take(nowhere.as_fd(), request).unwrap()
    }

    fn io(asked: Asked) -> Option<(IoKind, u64, u64, Range<usize>)> {
        match asked {
            Asked::Io(Io { kind, offset, length, payload, .. }) => Some((kind, offset, length, payload)),
            _ => None,
        }
    }

    #[test]
    fn transfers_end_with_the_disk() {
        let mut file = file();
        let mut ask = |opcode, transfer: TransferIn, data: &[u8]| {
            io(take(&mut file, &request(opcode, &[transfer.as_bytes(), data].concat())))
        };
        assert_eq!(
            ask(opcode::READ, transfer(SIZE - 3, 10, 0), &[]),
            Some((IoKind::Read, SIZE - 3, 3, 40..40))
        );
        assert_eq!(ask(opcode::READ, transfer(SIZE, 10, 0), &[]), None);
        assert_eq!(ask(opcode::READ, transfer(u64::MAX, 10, 0), &[]), None);
        let write = |sync| IoKind::Write { sync };
        assert_eq!(ask(opcode::WRITE, transfer(5, 4, 0), b"data"), Some((write(false), 5, 4, 80..84)));
        let sync = libc::O_SYNC as u32;
        assert_eq!(
            ask(opcode::WRITE, transfer(SIZE - 1, 4, sync), b"data"),
            Some((write(true), SIZE - 1, 1, 80..81))
        );
        assert_eq!(ask(opcode::WRITE, transfer(SIZE, 4, 0), b"data"), None);
        assert_eq!(ask(opcode::WRITE, transfer(0, 5, 0), b"data"), None, "it says more than it has");
    }

    #[test]
    fn a_thread_that_ends_by_a_signal_is_known() {
        assert!(has_kill("Name:\tdd\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000000002\n"));
        assert!(!has_kill("Name:\tSigPnd:\nSigPnd:\t0000000000000400\nShdPnd:\t0000000000000100\n"));
        let own = Sender { unique: 1, thread: std::process::id() };
        assert!(!own.lets_go_of(IoKind::Read));
        assert!(!Sender { thread: 0, ..own }.lets_go_of(IoKind::Read), "it is in another namespace");
    }

    #[test]
    fn an_opening_says_whether_it_is_for_reading_alone() {
        let mut file = file();
        let mut ask = |flags: i32| {
            let opening = OpenIn { flags: flags as u32, open_flags: 0 };
            take(&mut file, &request(opcode::OPEN, opening.as_bytes()))
        };
        for (flags, writes) in [
            (libc::O_RDONLY | libc::O_DIRECT, false),
            (libc::O_WRONLY, true),
            (libc::O_RDWR | libc::O_SYNC, true),
            // Linux's way to open a device for control alone.
            (libc::O_ACCMODE, true),
        ] {
            assert_eq!(ask(flags), Asked::Open { unique: 7, writes }, "{flags:o}");
        }
    }

    #[test]
    fn ranges_are_zeroed_within_the_disk_and_nothing_else_is_allocated() {
        let mut file = file();
        let mut ask = |mode, offset, length| {
            let asked = FallocateIn { handle: 0, offset, length, mode, padding: 0 };
            io(take(&mut file, &request(opcode::FALLOCATE, asked.as_bytes())))
                .map(|(kind, offset, length, _)| (kind, offset, length))
        };
        let zero = |unmap| IoKind::Zero { unmap };
        assert_eq!(ask(PUNCH_HOLE | KEEP_SIZE, 1, u64::MAX / 2), Some((zero(true), 1, SIZE - 1)));
        assert_eq!(ask(ZERO_RANGE | KEEP_SIZE, 1, 2 * SIZE), Some((zero(false), 1, SIZE - 1)));
        assert_eq!(ask(ZERO_RANGE, 0, SIZE), Some((zero(false), 0, SIZE)));
        for (mode, offset, length) in [
            (ZERO_RANGE, 1, SIZE),
            (0, 0, SIZE),
            (KEEP_SIZE, 0, SIZE),
            (PUNCH_HOLE, 0, SIZE),
            (PUNCH_HOLE | KEEP_SIZE, SIZE, 1),
            (PUNCH_HOLE | KEEP_SIZE, 0, 0),
            (PUNCH_HOLE | KEEP_SIZE, 2, u64::MAX),
        ] {
            assert_eq!(ask(mode, offset, length), None, "{mode:#x} {offset}+{length}");
        }
    }

    proptest! {
        /// Whatever comes, nothing outside the disk is asked for, and no byte outside the request is taken.
        #[test]
        fn no_request_reaches_beyond_the_disk(
            opcode in 0..60_u32,
            body in prop::collection::vec(any::<u8>(), 0..200),
            small in any::<bool>(),
        ) {
            let mut body = body;
            if small {
                // Offsets and lengths that may be inside.
                for (at, byte) in body.iter_mut().enumerate() {
                    if at % 8 > 2 {
                        *byte = 0;
                    }
                }
            }
            let request = request(opcode, &body);
            if let Some((kind, offset, length, payload)) = io(take(&mut file(), &request)) {
                prop_assert!(offset + length <= SIZE);
                prop_assert!(payload.end <= request.len());
                if matches!(kind, IoKind::Write { .. }) {
                    prop_assert_eq!(payload.len() as u64, length);
                }
            }
        }
    }
}
