//! Load on a file or a block device, over a ring of its own: registered file, registered buffers, direct I/O.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::rc::Rc;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use weir_block::{Nanos, Region};

use super::file::{FileOptions, SHORT, check_polling, errno_text, open};
use super::{Done, Engine, rest};
use crate::error::LoadError;
use crate::io::Io;
use crate::tally::IoKind;

/// The engine submits after every so many requests, and the rest of the batch with the wait: the device processes the first
/// requests while the engine prepares the others, and the kernel still submits several at once. Of 1, 2, 4, 8, 16 and 32,
/// measured at depth 32, this number has as many requests per second as single submission and the least CPU time for each.
const SUBMIT_AFTER: usize = 4;

/// A file or device behind a ring.
pub struct FileEngine {
    ring: IoUring,
    /// Registered as file 0 of the ring; kept open here.
    _file: File,
    region: Rc<Region>,
    options: FileOptions,
    stride: usize,
    direct: bool,
    registered_buffers: bool,
    /// Length of the request in each slot: a shorter transfer is an error.
    lengths: Vec<u32>,
    waiting: u32,
}

impl FileEngine {
    /// Opens `path` with direct I/O where the filesystem can do it, buffered where not.
    ///
    /// # Errors
    /// The file cannot be opened, the kernel gives no ring, there is no memory for the buffers, or completions are to be
    /// polled for where they cannot be.
    pub fn open(path: &Path, options: FileOptions) -> Result<FileEngine, LoadError> {
        let failed = |what: &'static str| move |source| LoadError::File { path: path.into(), what, source };
        let (file, direct) = open(path, options.writes)?;
        if options.poll {
            check_polling(path)?;
        }
        let entries = options.depth.next_power_of_two();
        let ring = ring(entries, options.poll).map_err(failed(
            "the kernel gives no io_uring (see kernel.io_uring_disabled; --engine psync does without) for",
        ))?;
        ring.submitter().register_files(&[file.as_raw_fd()]).map_err(failed("cannot register"))?;
        let stride = (options.block_size as usize).next_multiple_of(4096);
        let region = Region::new(stride * options.depth as usize)
            .map_err(failed("there is no memory for the buffers of"))?;
        let mut engine = FileEngine {
            ring,
            _file: file,
            region: Rc::new(region),
            options,
            stride,
            direct,
            registered_buffers: false,
            lengths: vec![0; options.depth as usize],
            waiting: 0,
        };
        engine.register_buffers();
        Ok(engine)
    }

    /// Whether I/O bypasses the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Registered buffers save the kernel the mapping of each request. They count as locked memory, and where the
    /// limit for that is too low the load works without.
    fn register_buffers(&mut self) {
        let buffers: Vec<libc::iovec> = (0..self.options.depth as usize)
            .map(|slot| libc::iovec {
                iov_base: self.region.address(slot * self.stride, self.stride).cast(),
                iov_len: self.stride,
            })
            .collect();
        // SAFETY: the region stays mapped until the ring is gone (`Drop` waits for what is in flight).
        self.registered_buffers = unsafe { self.ring.submitter().register_buffers(&buffers) }.is_ok();
    }

    fn entry(&self, io: Io) -> squeue::Entry {
        let file = types::Fixed(0);
        let memory = self.region.address(io.slot as usize * self.stride, io.length as usize);
        let flags = if self.options.fua { libc::RWF_DSYNC } else { 0 };
        let index = io.slot as u16;
        let entry = match (io.kind, self.registered_buffers) {
            (IoKind::Flush, _) => opcode::Fsync::new(file).build(),
            (IoKind::Read, true) => {
                opcode::ReadFixed::new(file, memory, io.length, index).offset(io.offset).build()
            }
            (IoKind::Read, false) => opcode::Read::new(file, memory, io.length).offset(io.offset).build(),
            (IoKind::Write, true) => opcode::WriteFixed::new(file, memory, io.length, index)
                .offset(io.offset)
                .rw_flags(flags)
                .build(),
            (IoKind::Write, false) => {
                opcode::Write::new(file, memory, io.length).offset(io.offset).rw_flags(flags).build()
            }
        };
        entry.user_data(u64::from(io.slot))
    }

    fn enter(&mut self, until: Nanos) -> io::Result<()> {
        let entered = if until == Nanos::NEVER {
            self.ring.submit_and_wait(1)
        } else {
            let spec = types::Timespec::from(until - Nanos::now());
            self.ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&spec))
        };
        match entered {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY)) => {
                Err(error)
            }
            _ => Ok(()),
        }
    }

    fn collect(&mut self, done: &mut Vec<Done>) {
        for completion in self.ring.completion() {
            self.waiting -= 1;
            let slot = completion.user_data() as u32;
            done.push(Done { slot, errno: errno(&completion, self.lengths[slot as usize]) });
        }
    }
}

impl Engine for FileEngine {
    fn name(&self) -> &'static str {
        if self.direct { "io_uring" } else { "io_uring (buffered)" }
    }

    fn buffer(&mut self, slot: u32, length: u32) -> &mut [u8] {
        let memory = self.region.address(slot as usize * self.stride, length as usize);
        // SAFETY: the range is inside the region (checked by `address`), each slot has its own part, and the caller
        // asks for the buffer of a slot only while nothing is in flight there; `&mut self` excludes other users.
        unsafe { std::slice::from_raw_parts_mut(memory, length as usize) }
    }

    fn data(&self, slot: u32, length: u32) -> &[u8] {
        self.region.bytes(slot as usize * self.stride, length as usize)
    }

    #[inline]
    fn queue(&mut self, io: Io) {
        let entry = self.entry(io);
        self.lengths[io.slot as usize] = io.length;
        // SAFETY: the memory is the slot's part of the region, which outlives the ring's work on it.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("the ring has an entry for every slot");
        self.waiting += 1;
        if self.ring.submission().len() >= SUBMIT_AFTER {
            // The wait submits the rest, and reports an error.
            let _ = self.ring.submit();
        }
    }

    fn reap(&mut self, until: Nanos, done: &mut Vec<Done>) -> Result<(), LoadError> {
        if self.waiting == 0 {
            rest(until);
            return Ok(());
        }
        loop {
            self.enter(until).map_err(LoadError::Ring)?;
            self.collect(done);
            if !done.is_empty() || until != Nanos::NEVER {
                return Ok(());
            }
        }
    }

    fn errno_text(&self, errno: u32) -> String {
        errno_text(errno)
    }
}

impl Drop for FileEngine {
    /// Waits for what is in flight: the kernel works on the region.
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.waiting > 0 {
            if self.enter(Nanos::NEVER).is_err() {
                // The ring is broken and the kernel may still write: leak rather than free under it.
                std::mem::forget(Rc::clone(&self.region));
                return;
            }
            self.collect(&mut done);
        }
    }
}

/// A ring whose completions are processed in the waiting thread if the kernel supports that (6.1), or at least without
/// interrupting it (5.19), or else a plain ring.
fn ring(entries: u32, poll: bool) -> io::Result<IoUring> {
    let builder = || {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(entries * 2);
        if poll {
            builder.setup_iopoll();
        }
        builder
    };
    let deferred = builder().setup_single_issuer().setup_defer_taskrun().build(entries);
    deferred.or_else(|_| builder().setup_coop_taskrun().build(entries)).or_else(|_| builder().build(entries))
}

/// The error number of a request; 0 for success.
fn errno(completion: &cqueue::Entry, length: u32) -> u32 {
    match completion.result() {
        error if error < 0 => error.unsigned_abs(),
        moved if moved as u32 == length => 0,
        _ => SHORT,
    }
}
