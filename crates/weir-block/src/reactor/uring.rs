//! The io_uring engine.

use std::io;
use std::time::Duration;

use io_uring::{EnterFlags, IoUring, opcode, squeue, types};

use super::registered::RegisteredBuffers;
use crate::buffer::Buffer;
use crate::clock::Nanos;
use crate::operation::{FileKind, FileOperation, Interest};

/// User data of our cancellations, and of changes of the timer; their completions are ignored.
const IGNORED: u64 = u64::MAX;

/// User data of the ring's timer.
const TIMER: u64 = u64::MAX - 1;

/// Limit of the kernel's worker threads for this ring's blocking calls: syncs, and everything on FUSE and NFS. The kernel's
/// default is a few times the number of processors; one hung backing would occupy them all and block the syncs of the shard's
/// other disks.
const WAITING_CALLS: u32 = 1024;

/// The kernel merges none of so many requests of one call (Linux, `io_uring/io_uring.c`: `IO_PLUG_THRESHOLD`).
const UNMERGED: usize = 2;

/// `sched_yield` takes longer than this when another thread ran meanwhile.
const OTHERS_RAN: Duration = Duration::from_micros(4);

pub(super) struct Uring {
    ring: IoUring,
    /// Completions collected while making room for submissions; the next wait returns them.
    early: Vec<(usize, i32)>,
    timer: Timer,
    registered: RegisteredBuffers,
    /// The kernel can leave out the completion of what has succeeded (Linux 5.17).
    skips_success: bool,
}

/// One timer for all waits, in the ring. It is set anew only when it is not set, or too late: a shard's deadlines change with every turn, and
/// to program the processor's timer for each wait, and to cancel that, takes longer than a read of a fast device, above all in a
/// virtual machine, where it leaves the machine. The price is a turn for nothing when it comes too early.
#[derive(Default)]
struct Timer {
    /// The time for which it is set.
    at: Option<Nanos>,
    /// The kernel reads it when it takes the entry. In its place on the heap, because an entry that is refused stays in the queue.
    duration: Box<types::Timespec>,
}

impl Uring {
    pub fn new(entries: u32) -> io::Result<Uring> {
        let completions = entries.saturating_mul(8);
        // The kernel processes completions when this thread waits, without interrupting it. Kernels before 6.1 lack the flags and
        // get a plain ring.
        let ring = IoUring::builder()
            .setup_cqsize(completions)
            .setup_single_issuer()
            .setup_defer_taskrun()
            // Signals such work in shared memory: polling then needs no system call.
            .setup_taskrun_flag()
            .build(entries)
            .or_else(|_| IoUring::builder().setup_cqsize(completions).build(entries))?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "io_uring without timed waits (kernel < 5.11)",
            ));
        }
        // A kernel before 5.15 lacks this limit and keeps its own.
        let _ = ring.submitter().register_iowq_max_workers(&mut [WAITING_CALLS, 0]);
        let registered = RegisteredBuffers::new(&ring);
        let skips_success = ring.params().is_feature_skip_cqe_on_success();
        Ok(Uring { ring, early: Vec::new(), timer: Timer::default(), registered, skips_success })
    }

    /// Registers the memory of a buffer that has no number yet, if the kernel takes more.
    pub fn register(&mut self, buffer: &Buffer) {
        self.registered.add(&self.ring, buffer);
    }

    /// Memory has been released.
    pub fn unregister(&mut self, numbers: Vec<u16>) {
        self.registered.remove(&self.ring, numbers);
    }

    pub fn watch(&mut self, key: usize, fd: i32, interest: Interest) {
        let events = match interest {
            Interest::Read => libc::POLLIN | libc::POLLRDHUP,
            Interest::Write => libc::POLLOUT,
            // The kernel always reports the end of both directions, and also that of one.
            Interest::HangUp => 0,
        };
        self.push(opcode::PollAdd::new(types::Fd(fd), events as u32).build().user_data(key as u64));
    }

    pub fn unwatch(&mut self, key: usize) {
        self.push(opcode::PollRemove::new(key as u64).build().user_data(IGNORED));
    }

    pub fn start(&mut self, key: usize, operation: &FileOperation) {
        let fd = types::Fd(operation.file.as_raw_fd());
        let rest = operation.rest();
        let entry = match (operation.kind, operation.registration) {
            (FileKind::Read, Some(number)) => {
                let vector = rest[0];
                opcode::ReadFixed::new(fd, vector.iov_base.cast(), vector.iov_len as u32, number)
                    .offset(operation.offset)
                    .build()
            }
            (FileKind::Write { durable }, Some(number)) => {
                let vector = rest[0];
                opcode::WriteFixed::new(
                    fd,
                    vector.iov_base.cast_const().cast(),
                    vector.iov_len as u32,
                    number,
                )
                .offset(operation.offset)
                .rw_flags(write_flags(durable))
                .build()
            }
            (FileKind::Read, None) => {
                let vector = rest[0];
                opcode::Read::new(fd, vector.iov_base.cast(), vector.iov_len as u32)
                    .offset(operation.offset)
                    .build()
            }
            (FileKind::Write { durable }, None) if rest.len() == 1 => {
                let vector = rest[0];
                opcode::Write::new(fd, vector.iov_base.cast_const().cast(), vector.iov_len as u32)
                    .offset(operation.offset)
                    .rw_flags(write_flags(durable))
                    .build()
            }
            (FileKind::Write { durable }, None) => {
                let count = rest.len().min(libc::UIO_MAXIOV as usize) as u32;
                opcode::Writev::new(fd, rest.as_ptr(), count)
                    .offset(operation.offset)
                    .rw_flags(write_flags(durable))
                    .build()
            }
            (FileKind::Sync, _) => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            (FileKind::Allocate { mode, length }, _) => {
                opcode::Fallocate::new(fd, length).offset(operation.offset).mode(mode).build()
            }
        };
        // FUSE accepts a dozen requests at once and blocks the submitter of the next: the shard must not block.
        let flags = if operation.file.is_offloaded() { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        let entry = entry.flags(flags).user_data(key as u64);
        if operation.file.waits_for_rotation() {
            // An earlier one may be among those that wait.
            self.submit_before_merges();
            self.push(entry);
            self.submit_before_merges();
        } else {
            self.push(entry);
        }
    }

    /// Submits everything, then busy-polls until `until` or until `woken` returns true. Yields the processor at every poll, so
    /// that the peer can run. If another thread ran, the processor will not halt while we block, so that blocking is cheaper than
    /// polling on. Returns for how long other threads had the processor.
    pub fn poll(&mut self, until: Nanos, woken: impl Fn() -> bool) -> io::Result<Duration> {
        // The same call has the kernel finish what it can.
        if let Err(error) = self.look()
            && !is_transient(&error)
        {
            return Err(error);
        }
        loop {
            if !self.early.is_empty()
                || self.ring.submission().taskrun()
                || !self.ring.completion().is_empty()
                || woken()
            {
                return Ok(Duration::ZERO);
            }
            let before = Nanos::now();
            if before >= until {
                return Ok(Duration::ZERO);
            }
            std::thread::yield_now();
            let yielded = Nanos::now() - before;
            if yielded > OTHERS_RAN {
                return Ok(yielded);
            }
        }
    }

    /// Submits everything and waits for at least one completion, at most `timeout` from `now`; perhaps for a shorter time.
    pub fn wait(
        &mut self,
        now: Nanos,
        timeout: Option<Duration>,
        finished: &mut Vec<(usize, i32)>,
    ) -> io::Result<()> {
        // Work that the kernel has left for this thread is not put off.
        let submission = self.ring.submission();
        let needs_call = !submission.is_empty() || submission.taskrun();
        drop(submission);
        let has_some = !needs_call && !self.ring.completion().is_empty();
        let waited = match timeout {
            // A poll has submitted everything, and ended with these.
            _ if has_some => Ok(0),
            Some(timeout) if timeout.is_zero() || !self.early.is_empty() => self.look(),
            None if !self.early.is_empty() => self.look(),
            None => self.ring.submit_and_wait(1),
            Some(timeout) => {
                self.set_timer(now, timeout);
                // To make room for it, completions may have been collected.
                if self.early.is_empty() { self.ring.submit_and_wait(1) } else { self.look() }
            }
        };
        if let Err(error) = waited
            && !is_transient(&error)
        {
            return Err(error);
        }
        finished.append(&mut self.early);
        self.take_completions(finished);
        Ok(())
    }

    /// Submits everything and has the kernel finish what it can, without waiting.
    fn look(&mut self) -> io::Result<usize> {
        let entries = self.ring.submission().len() as u32;
        // SAFETY: without an argument, and the kernel takes only entries that were pushed.
        unsafe { self.ring.submitter().enter::<()>(entries, 0, EnterFlags::GETEVENTS.bits(), None) }
    }

    /// Ends a wait at `now + timeout` at the latest.
    fn set_timer(&mut self, now: Nanos, timeout: Duration) {
        let wanted = now + timeout;
        // One that should have expired has not: the host was suspended, which the kernel's timers do not count.
        if self.timer.at.is_some_and(|at| now < at && at <= wanted) {
            return;
        }
        // An entry of before that the kernel has not taken yet gets the newer value: the wait that needs it is this one.
        *self.timer.duration = types::Timespec::from(timeout);
        let duration: *const types::Timespec = &raw const *self.timer.duration;
        let entry = match self.timer.at {
            None => opcode::Timeout::new(duration).build().user_data(TIMER),
            // If it has expired meanwhile, its completion is there, and ends the wait.
            // Its own success is no event.
            Some(_) => {
                let update = opcode::TimeoutUpdate::new(TIMER, duration).build().user_data(IGNORED);
                if self.skips_success { update.flags(squeue::Flags::SKIP_SUCCESS) } else { update }
            }
        };
        self.timer.at = Some(wanted);
        self.push(entry);
    }

    fn take_completions(&mut self, finished: &mut Vec<(usize, i32)>) {
        if take_completions(&mut self.ring, &mut self.registered, finished) {
            self.timer.at = None;
        }
    }

    fn submit_before_merges(&mut self) {
        if self.ring.submission().len() >= UNMERGED {
            // Whatever is refused is submitted by the next call, which tells the reason.
            let _ = self.ring.submit();
        }
    }

    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: the reactor's slot owns the memory behind the entry until its completion has been taken.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            // The queue is full: submit its entries.
            let Err(error) = self.ring.submit() else { continue };
            match error.raw_os_error() {
                // The completion queue overflowed: the kernel accepts nothing more before we collect completions.
                Some(libc::EBUSY | libc::EAGAIN) => {
                    let mut early = std::mem::take(&mut self.early);
                    self.take_completions(&mut early);
                    self.early = early;
                }
                Some(libc::EINTR) => {}
                _ => panic!("io_uring no longer accepts submissions: {error}"),
            }
        }
    }
}

/// Timeout, signal, or full completion queue: the caller retries after each.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN))
}

/// Whether the timer has expired.
fn take_completions(
    ring: &mut IoUring,
    registered: &mut RegisteredBuffers,
    finished: &mut Vec<(usize, i32)>,
) -> bool {
    let mut has_expired = false;
    for completion in ring.completion() {
        match completion.user_data() {
            IGNORED => {}
            TIMER => has_expired = true,
            other if registered.take(other) => {}
            key => finished.push((key as usize, completion.result())),
        }
    }
    has_expired
}

fn write_flags(durable: bool) -> i32 {
    if durable { libc::RWF_DSYNC } else { 0 }
}
