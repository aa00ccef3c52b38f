//! Processes named so that a recycled process id is never taken for them.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// A process, and when it started: the two together are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since boot, from `/proc/PID/stat` (proc(5), field 22).
    pub start_time: u64,
}

/// The state of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProcessState {
    /// It runs.
    Running,
    /// SIGSTOP holds it.
    Paused,
    /// It has ended.
    Gone,
}

impl ProcessId {
    /// The process that has `pid` now.
    ///
    /// # Errors
    /// There is none.
    pub fn of(pid: u32) -> io::Result<ProcessId> {
        let (start_time, _) = stat(pid)?;
        Ok(ProcessId { pid, start_time })
    }

    /// The process's state. A zombie has ended.
    #[must_use]
    pub fn state(&self) -> ProcessState {
        match stat(self.pid) {
            Ok((start_time, _)) if start_time != self.start_time => ProcessState::Gone,
            Ok((_, 'Z' | 'X')) | Err(_) => ProcessState::Gone,
            Ok((_, 'T' | 't')) => ProcessState::Paused,
            Ok(_) => ProcessState::Running,
        }
    }

    /// Sends a signal to this process and to no other. No error if it has ended.
    ///
    /// # Errors
    /// The system does not allow it.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match self.open()? {
            Some(process) => match pidfd_send_signal(&process, signal) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
                Err(error) => Err(error.into()),
            },
            None => Ok(()),
        }
    }

    /// Waits until it has ended; false when it has not within `patience`.
    ///
    /// # Errors
    /// The system does not allow it.
    pub fn wait(&self, patience: Duration) -> io::Result<bool> {
        let Some(process) = self.open()? else { return Ok(true) };
        let timeout =
            Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: i64::from(patience.subsec_nanos()) };
        loop {
            match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout)) {
                Ok(ended) => return Ok(ended > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// A descriptor of this very process: opened first, then checked, so that the id cannot change hands in between.
    fn open(&self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let process = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(process) => process,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        Ok((self.state() != ProcessState::Gone).then_some(process))
    }
}

/// Start time and state letter of a process.
fn stat(pid: u32) -> io::Result<(u64, char)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let odd = || io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat is not understood"));
    // The command's name may hold anything, also parentheses; the fields begin after the last one.
    let (_, fields) = text.rsplit_once(')').ok_or_else(odd)?;
    let mut fields = fields.split_whitespace();
    let state = fields.next().and_then(|state| state.chars().next()).ok_or_else(odd)?;
    // `state` is field 3, the start time field 22.
    let start_time = fields.nth(18).and_then(|ticks| ticks.parse().ok()).ok_or_else(odd)?;
    Ok((start_time, state))
}

/// Starts a program in a process group of its own (the terminal's Ctrl-C is not meant for it), with everything that it says
/// appended to `log`.
///
/// # Errors
/// The program or the log cannot be opened.
pub fn spawn(program: &Path, arguments: &[&std::ffi::OsStr], log: &Path) -> io::Result<(Child, ProcessId)> {
    use std::os::unix::process::CommandExt;
    let log = File::options().create(true).append(true).open(log)?;
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()?;
    // A child that we have not waited for keeps its id, even when it has ended already.
    let id = ProcessId::of(child.id())?;
    Ok((child, id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_paused_resumed_and_ended() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let (mut child, id) = spawn(Path::new("/bin/sleep"), &["60".as_ref()], &log).unwrap();
        assert_eq!(id.state(), ProcessState::Running);
        id.signal(Signal::STOP).unwrap();
        while id.state() != ProcessState::Paused {
            std::thread::yield_now();
        }
        id.signal(Signal::CONT).unwrap();
        assert!(!id.wait(Duration::from_millis(20)).unwrap());
        id.signal(Signal::KILL).unwrap();
        assert!(id.wait(Duration::from_secs(10)).unwrap());
        assert_eq!(id.state(), ProcessState::Gone, "a zombie has ended");
        child.wait().unwrap();
        assert!(id.wait(Duration::ZERO).unwrap());
        id.signal(Signal::KILL).unwrap();
    }

    #[test]
    fn a_recycled_id_is_not_taken_for_the_process() {
        let me = ProcessId::of(std::process::id()).unwrap();
        let former = ProcessId { start_time: me.start_time - 1, ..me };
        assert_eq!(me.state(), ProcessState::Running);
        assert_eq!(former.state(), ProcessState::Gone);
        former.signal(Signal::KILL).unwrap();
    }
}
