//! Load on a file or a block device by plain system calls, one request at a time: preadv2(2), pwritev2(2), fdatasync(2).

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::path::Path;

use rustix::io::{Errno, ReadWriteFlags};
use weir_block::{Buffer, BufferPool, Nanos};

use super::file::{FileOptions, SHORT, errno_text, open};
use super::{Done, Engine, rest};
use crate::error::LoadError;
use crate::io::Io;
use crate::tally::IoKind;

/// A file or device that is read and written in place. Its thread sleeps in the kernel while a request is in flight.
#[derive(Debug)]
pub struct PsyncEngine {
    file: File,
    direct: bool,
    fua: bool,
    buffer: Buffer,
    queued: Option<Io>,
}

impl PsyncEngine {
    /// Opens `path` with direct I/O where the filesystem can do it, buffered where not. The depth must be 1.
    ///
    /// # Errors
    /// The file cannot be opened, or there is no memory for the buffer.
    pub fn open(path: &Path, options: FileOptions) -> Result<PsyncEngine, LoadError> {
        let (file, direct) = open(path, options.writes)?;
        let length = options.block_size as usize;
        let buffer = BufferPool::new(length).take(length).ok_or_else(|| LoadError::File {
            path: path.into(),
            what: "there is no memory for the buffer of",
            source: std::io::ErrorKind::OutOfMemory.into(),
        })?;
        Ok(PsyncEngine { file, direct, fua: options.fua, buffer, queued: None })
    }

    /// The error number; 0 for success.
    fn make(&mut self, io: Io) -> u32 {
        let memory = &mut self.buffer.bytes_mut()[..io.length as usize];
        let flags = if self.fua { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
        loop {
            let moved = match io.kind {
                IoKind::Read => rustix::io::preadv2(
                    &self.file,
                    &mut [IoSliceMut::new(memory)],
                    io.offset,
                    ReadWriteFlags::empty(),
                ),
                IoKind::Write => rustix::io::pwritev2(&self.file, &[IoSlice::new(memory)], io.offset, flags),
                IoKind::Flush => rustix::fs::fdatasync(&self.file).map(|()| 0),
            };
            return match moved {
                Ok(moved) if moved == memory.len() => 0,
                Ok(_) => SHORT,
                Err(Errno::INTR) => continue,
                Err(error) => error.raw_os_error() as u32,
            };
        }
    }
}

impl Engine for PsyncEngine {
    fn name(&self) -> &'static str {
        if self.direct { "psync" } else { "psync (buffered)" }
    }

    fn buffer(&mut self, _slot: u32, length: u32) -> &mut [u8] {
        &mut self.buffer.bytes_mut()[..length as usize]
    }

    fn data(&self, _slot: u32, length: u32) -> &[u8] {
        &self.buffer.bytes()[..length as usize]
    }

    #[inline]
    fn queue(&mut self, io: Io) {
        debug_assert!(self.queued.is_none(), "the depth is 1");
        self.queued = Some(io);
    }

    fn reap(&mut self, until: Nanos, done: &mut Vec<Done>) -> Result<(), LoadError> {
        match self.queued.take() {
            None => rest(until),
            Some(io) => {
                let errno = self.make(io);
                done.push(Done { slot: io.slot, errno });
            }
        }
        Ok(())
    }

    fn errno_text(&self, errno: u32) -> String {
        errno_text(errno)
    }
}
