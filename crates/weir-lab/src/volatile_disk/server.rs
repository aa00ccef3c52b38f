//! One file of a FUSE filesystem, which is the disk.

use std::ffi::OsStr;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite,
    Request, WriteFlags,
};

use super::store::{Store, Survivors, Toll};

/// The file's name.
pub const FILE: &str = "disk";

/// The file's inode.
const INODE: INodeNo = INodeNo(2);

/// The time for which the kernel may cache names and attributes: they never change.
const UNCHANGED: Duration = Duration::from_secs(3600);

/// The duration of a flush. An instant flush would hardly ever be in flight when the power fails.
const FLUSH_TIME: Duration = Duration::from_micros(300);

/// The disk's supply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Power {
    /// There.
    On,
    /// Gone this moment: the disk neither executes nor answers requests. They wait, because their processes must be gone
    /// before they could learn of it.
    Failing,
    /// Gone: requests fail.
    Off,
}

/// A request without an answer.
enum Waiting {
    Read(ReplyData),
    Write(ReplyWrite),
    Flush(ReplyEmpty),
}

/// Writes that take long while others pass.
struct Held {
    /// Those of nothing but this.
    byte: u8,
    writes: Vec<(u64, Vec<u8>, ReplyWrite)>,
}

struct State {
    power: Power,
    store: Store,
    waiting: Vec<Waiting>,
    held: Option<Held>,
    flushes: u64,
    lies: bool,
}

impl State {
    fn flush(&mut self) -> io::Result<()> {
        if !self.lies {
            self.store.flush()?;
        }
        self.flushes += 1;
        Ok(())
    }

    fn write(&mut self, offset: u64, data: &[u8], reply: ReplyWrite) {
        match self.store.write(offset, data) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error.into()),
        }
    }
}

/// The disk; clones are the same one.
#[derive(Clone)]
pub struct Disk(Arc<Mutex<State>>);

impl Disk {
    pub fn new(store: Store) -> Disk {
        let (power, waiting) = (Power::On, Vec::new());
        let (held, flushes, lies) = (None, 0, false);
        Disk(Arc::new(Mutex::new(State { power, store, waiting, held, flushes, lies })))
    }

    /// From now on, writes of nothing but `byte` take until [`Disk::release`].
    pub fn hold(&self, byte: u8) {
        self.state().held = Some(Held { byte, writes: Vec::new() });
    }

    /// Bytes of the writes that are held.
    pub fn held_bytes(&self) -> usize {
        self.state().held.iter().flat_map(|held| &held.writes).map(|(_, data, _)| data.len()).sum()
    }

    /// Writes the held data; nothing is held any more.
    pub fn release(&self) {
        let mut state = self.state();
        for (offset, data, reply) in state.held.take().into_iter().flat_map(|held| held.writes) {
            state.write(offset, &data, reply);
        }
    }

    /// From now on nothing reaches the medium and no request is answered.
    pub fn fail_power(&self) {
        self.state().power = Power::Failing;
    }

    /// Waiting requests fail, as do all later ones.
    pub fn power_off(&self) {
        let mut state = self.state();
        state.power = Power::Off;
        for (_, _, reply) in state.held.take().into_iter().flat_map(|held| held.writes) {
            reply.error(Errno::EIO);
        }
        for waiting in state.waiting.drain(..) {
            match waiting {
                Waiting::Read(reply) => reply.error(Errno::EIO),
                Waiting::Write(reply) => reply.error(Errno::EIO),
                Waiting::Flush(reply) => reply.error(Errno::EIO),
            }
        }
    }

    /// The power comes back to a disk that has only the survivors.
    pub fn power_on(&self, survivors: Survivors) -> io::Result<Toll> {
        let mut state = self.state();
        let toll = state.store.lose(survivors)?;
        state.power = Power::On;
        Ok(toll)
    }

    /// Flushes do nothing any more and succeed.
    pub fn lie(&self) {
        self.state().lies = true;
    }

    /// Flushes that were answered.
    pub fn flushes(&self) -> u64 {
        self.state().flushes
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match inode {
            INodeNo::ROOT => (FileType::Directory, 0o755, 0),
            INODE => (FileType::RegularFile, 0o600, self.state().store.size()),
            _ => return None,
        };
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Filesystem for Disk {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Several requests at once, as to any disk. A kernel without it sends them one by one, which is as right.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(INODE).filter(|_| parent == INodeNo::ROOT && name == FILE) {
            Some(attributes) => reply.entry(&UNCHANGED, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Some(attributes) => reply.attr(&UNCHANGED, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // A page cache in front of the disk would answer for it.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut state = self.state();
        match state.power {
            Power::On => match state.store.read(offset, u64::from(size)) {
                Ok(data) => reply.data(&data),
                Err(error) => reply.error(error.into()),
            },
            Power::Failing => state.waiting.push(Waiting::Read(reply)),
            Power::Off => reply.error(Errno::EIO),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut state = self.state();
        match state.power {
            Power::On => match &mut state.held {
                Some(held) if data.iter().all(|byte| *byte == held.byte) => {
                    held.writes.push((offset, data.to_vec(), reply));
                }
                _ => state.write(offset, data, reply),
            },
            Power::Failing => state.waiting.push(Waiting::Write(reply)),
            Power::Off => reply.error(Errno::EIO),
        }
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        thread::sleep(FLUSH_TIME);
        let mut state = self.state();
        match state.power {
            Power::On => match state.flush() {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(error.into()),
            },
            Power::Failing => state.waiting.push(Waiting::Flush(reply)),
            Power::Off => reply.error(Errno::EIO),
        }
    }
}
