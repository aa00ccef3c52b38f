//! The io_uring engine.

use std::io;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};

use super::Interest;
use super::slot::{FileKind, FileOperation};
use crate::clock::Nanos;

/// Completions of our own cancellations carry this; nobody waits for them.
const NOBODY: u64 = u64::MAX;

/// Threads that the kernel may have at work for this ring on calls that wait: syncs, and everything on FUSE and NFS. The
/// kernel's own limit is a few times the number of processors; one backing that hangs would have them all, and no other disk
/// of the shard would get a sync through.
const WAITING_CALLS: u32 = 1024;

/// Giving the processor away takes longer than this when somebody else ran on it meanwhile.
const OTHERS_RAN: Duration = Duration::from_micros(4);

pub(super) struct Uring {
    ring: IoUring,
    /// Completions taken while making room for submissions; the next wait hands them out.
    early: Vec<(usize, i32)>,
}

impl Uring {
    pub fn new(entries: u32) -> io::Result<Uring> {
        let completions = entries.saturating_mul(8);
        // Completions are worked off when we wait, on this thread, not by interrupting it. Kernels before 6.1 do
        // not know the flags; they get a plain ring.
        let ring = IoUring::builder()
            .setup_cqsize(completions)
            .setup_single_issuer()
            .setup_defer_taskrun()
            // Shows in shared memory that there is such work: polling then needs no system call.
            .setup_taskrun_flag()
            .build(entries)
            .or_else(|_| IoUring::builder().setup_cqsize(completions).build(entries))?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "io_uring without timed waits (kernel < 5.11)",
            ));
        }
        // A kernel before 5.15 does not know this limit, and has its own.
        let _ = ring.submitter().register_iowq_max_workers(&mut [WAITING_CALLS, 0]);
        Ok(Uring { ring, early: Vec::new() })
    }

    pub fn watch(&mut self, key: usize, fd: i32, interest: Interest) {
        let events = match interest {
            Interest::Read => libc::POLLIN | libc::POLLRDHUP,
            Interest::Write => libc::POLLOUT,
        };
        self.push(opcode::PollAdd::new(types::Fd(fd), events as u32).build().user_data(key as u64));
    }

    pub fn unwatch(&mut self, key: usize) {
        self.push(opcode::PollRemove::new(key as u64).build().user_data(NOBODY));
    }

    pub fn start(&mut self, key: usize, operation: &FileOperation) {
        let fd = types::Fd(operation.file.as_raw_fd());
        let rest = operation.rest();
        let entry = match operation.kind {
            FileKind::Read => {
                let vector = rest[0];
                opcode::Read::new(fd, vector.iov_base.cast(), vector.iov_len as u32)
                    .offset(operation.offset)
                    .build()
            }
            FileKind::Write { durable } if rest.len() == 1 => {
                let vector = rest[0];
                opcode::Write::new(fd, vector.iov_base.cast_const().cast(), vector.iov_len as u32)
                    .offset(operation.offset)
                    .rw_flags(write_flags(durable))
                    .build()
            }
            FileKind::Write { durable } => {
                let count = rest.len().min(libc::UIO_MAXIOV as usize) as u32;
                opcode::Writev::new(fd, rest.as_ptr(), count)
                    .offset(operation.offset)
                    .rw_flags(write_flags(durable))
                    .build()
            }
            FileKind::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            FileKind::Allocate { mode, length } => {
                opcode::Fallocate::new(fd, length).offset(operation.offset).mode(mode).build()
            }
        };
        // FUSE takes a dozen requests at once, and whoever begins one more waits: that must not be the shard.
        let flags = if operation.file.is_aside() { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        self.push(entry.flags(flags).user_data(key as u64));
    }

    /// Submits everything, then looks for something to do until `until`, or until `woken` says so. Gives the processor away
    /// at every look, so that whoever is to answer us can run; if somebody did, it will not halt while we sleep, so
    /// that sleeping is cheaper than looking on.
    pub fn poll(&mut self, until: Nanos, woken: impl Fn() -> bool) -> io::Result<bool> {
        if let Err(error) = self.ring.submit()
            && !is_passing(&error)
        {
            return Err(error);
        }
        loop {
            if !self.early.is_empty()
                || self.ring.submission().taskrun()
                || !self.ring.completion().is_empty()
                || woken()
            {
                return Ok(true);
            }
            let before = Nanos::now();
            if before >= until {
                return Ok(false);
            }
            std::thread::yield_now();
            if Nanos::now() - before > OTHERS_RAN {
                return Ok(false);
            }
        }
    }

    /// Submits everything and waits for at least one completion, at most `timeout`.
    pub fn wait(&mut self, timeout: Option<Duration>, finished: &mut Vec<(usize, i32)>) -> io::Result<()> {
        let timeout = if self.early.is_empty() { timeout } else { Some(Duration::ZERO) };
        let waited = match timeout {
            None => self.ring.submit_and_wait(1),
            Some(timeout) => {
                let spec = types::Timespec::from(timeout);
                self.ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&spec))
            }
        };
        if let Err(error) = waited
            && !is_passing(&error)
        {
            return Err(error);
        }
        finished.append(&mut self.early);
        take_completions(&mut self.ring, finished);
        Ok(())
    }

    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: the reactor's slot owns the memory behind the entry until its completion has been taken.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            // The queue is full: hand over what is there.
            let Err(error) = self.ring.submit() else { continue };
            match error.raw_os_error() {
                // The kernel holds back completions and takes nothing more before they are fetched.
                Some(libc::EBUSY | libc::EAGAIN) => take_completions(&mut self.ring, &mut self.early),
                Some(libc::EINTR) => {}
                _ => panic!("io_uring takes no submissions any more: {error}"),
            }
        }
    }
}

/// Time is up, a signal came, or completions must be taken before more fit in: all of them go on.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN))
}

fn take_completions(ring: &mut IoUring, finished: &mut Vec<(usize, i32)>) {
    for completion in ring.completion() {
        if completion.user_data() != NOBODY {
            finished.push((completion.user_data() as usize, completion.result()));
        }
    }
}

fn write_flags(durable: bool) -> i32 {
    if durable { libc::RWF_DSYNC } else { 0 }
}
