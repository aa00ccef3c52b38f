//! The operator's fence command: a program that keeps a node from a LUN, and lets it back (IPMI, a switch, a hypervisor's API; tier 2 of
//! `VOLUME.md` §2).
//!
//! It is run as
//!
//! ```text
//! COMMAND fence NODE      exit code 0: NODE certainly neither reads nor writes the LUN, and nothing that it has issued is on its way there
//! COMMAND admit NODE      exit code 0: NODE, which runs it, reads and writes the LUN
//! ```
//!
//! with `WEIR_VOLUME`, `WEIR_LUN` (the path on the node that runs it), `WEIR_EPOCH` and `WEIR_INCARNATION` in its environment, in a process
//! group of its own. Any other exit code is a failure, and the last line on its standard error is the reason. It may be run again at any
//! time, and on several nodes at once. What has not ended within the time limit is killed with its group, and has failed; what it has done
//! until then may stay done.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// Bytes of standard error that are kept: the last ones.
const KEPT: usize = 4096;
/// How long the reason is awaited after the end: somebody else may hold the pipe.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// What the command is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Keep the node from the LUN.
    Fence,
    /// Let it back.
    Admit,
}

impl Action {
    fn word(self) -> &'static str {
        match self {
            Action::Fence => "fence",
            Action::Admit => "admit",
        }
    }
}

/// The command for one LUN.
#[derive(Clone, Debug)]
pub struct FenceCommand {
    /// The program.
    pub program: PathBuf,
    /// Its time.
    pub limit: Duration,
    /// The volume's name.
    pub volume: String,
    /// The LUN's path on this node.
    pub lun: PathBuf,
}

/// The reason why it has not done its work.
#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    /// It was not run.
    #[error("cannot run the fence command {}: {source}", .program.display())]
    Run {
        /// The program.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It has failed.
    #[error("`{} {} {node}` failed ({how}){}", .program.display(), .action.word(), after_colon(.said))]
    Failed {
        /// The program.
        program: PathBuf,
        /// The first argument.
        action: Action,
        /// The second one.
        node: String,
        /// The exit code, or the signal.
        how: String,
        /// Its last line on standard error.
        said: String,
    },
}

fn after_colon(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!(": {said}") }
}

impl FenceCommand {
    /// Runs it to its end, or to the time limit.
    ///
    /// # Errors
    /// [`FenceError`]. What it has done until then may stay done.
    pub fn run(&self, action: Action, node: &str, incarnation: u64, epoch: u64) -> Result<(), FenceError> {
        let run = |source| FenceError::Run { program: self.program.clone(), source };
        let mut child = self.start(action, node, incarnation, epoch).map_err(run)?;
        let said = child.stderr.take().map(last_words);
        let ended = within(&mut child, self.limit).map_err(run)?;
        let how = match ended {
            Some(status) if status.success() => return Ok(()),
            Some(status) => describe(status),
            None => format!("it was killed after {} s", self.limit.as_secs_f64()),
        };
        let said = said.and_then(|said| said.recv_timeout(LAST_WORDS).ok()).unwrap_or_default();
        Err(FenceError::Failed { program: self.program.clone(), action, node: node.into(), how, said })
    }

    fn start(&self, action: Action, node: &str, incarnation: u64, epoch: u64) -> io::Result<Child> {
        Command::new(&self.program)
            .args([action.word(), node])
            .env("WEIR_VOLUME", &self.volume)
            .env("WEIR_LUN", &self.lun)
            .env("WEIR_EPOCH", epoch.to_string())
            .env("WEIR_INCARNATION", incarnation.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
    }
}

/// Waits for the end; kills the process group when the time is over. `None`: it was killed.
fn within(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let pid = Pid::from_child(child);
    let descriptor = pidfd_open(pid, PidfdFlags::empty())?;
    if has_ended(&descriptor, limit)? {
        return child.wait().map(Some);
    }
    // Gone meanwhile, if it fails.
    let _ = kill_process_group(pid, Signal::KILL);
    // Nobody is to wait for one that hangs in the kernel: it stays a zombie.
    if has_ended(&descriptor, LAST_WORDS)? {
        child.wait()?;
    }
    Ok(None)
}

fn has_ended(descriptor: &OwnedFd, limit: Duration) -> io::Result<bool> {
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    match poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&limit)) {
        Ok(count) => Ok(count > 0),
        // No handler of this process interrupts system calls. If one does, the limit is shorter.
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Reads to the end, in a thread: a command that says much is not to wait for a reader.
fn last_words(mut from: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        let (mut kept, mut some) = (Vec::new(), [0; KEPT]);
        while let Ok(bytes @ 1..) = from.read(&mut some) {
            kept.extend_from_slice(&some[..bytes]);
            kept.drain(..kept.len().saturating_sub(KEPT));
        }
        let text = String::from_utf8_lossy(&kept);
        let last = text.lines().map(str::trim).rfind(|line| !line.is_empty());
        // Nobody waits any more, if it fails.
        let _ = send.send(last.unwrap_or_default().to_owned());
    });
    receive
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "it has ended without a status".into(),
    }
}

/// Whether a program can be run: for the check of a configuration.
///
/// # Errors
/// It is not there, no file, or not executable.
pub fn check(program: &Path) -> io::Result<()> {
    if !program.is_absolute() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "its path is not absolute"));
    }
    if !std::fs::metadata(program)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file"));
    }
    Ok(rustix::fs::access(program, rustix::fs::Access::EXEC_OK)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use weir_block::Nanos;

    use super::*;

    fn command(directory: &Path, script: &str) -> FenceCommand {
        let program = directory.join("fence");
        // A script that is being written cannot be run: another test's child may hold it for a moment.
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let limit = Duration::from_secs(10);
        FenceCommand { program, limit, volume: "v".into(), lun: "/dev/lun".into() }
    }

    fn run(command: &FenceCommand) -> Result<(), String> {
        for _ in 0..100 {
            match command.run(Action::Fence, "n2", 7, 3) {
                Err(FenceError::Run { source, .. }) if source.raw_os_error() == Some(libc::ETXTBSY) => {
                    thread::sleep(Duration::from_millis(10));
                }
                other => return other.map_err(|error| error.to_string()),
            }
        }
        panic!("the script stays busy");
    }

    #[test]
    fn it_gets_what_the_contract_names() {
        let directory = tempfile::tempdir().unwrap();
        let said = directory.path().join("said");
        let words = "$1 $2 $WEIR_VOLUME $WEIR_LUN $WEIR_EPOCH $WEIR_INCARNATION";
        let command = command(directory.path(), &format!("echo {words} > {}", said.display()));
        run(&command).unwrap();
        assert_eq!(std::fs::read_to_string(&said).unwrap(), "fence n2 v /dev/lun 3 7\n");
        check(&command.program).unwrap();
    }

    #[test]
    fn a_failure_says_why() {
        let directory = tempfile::tempdir().unwrap();
        let failed = |script: &str| run(&command(directory.path(), script)).unwrap_err();
        let text = failed("echo first >&2; echo 'the BMC does not answer' >&2; echo >&2; exit 3");
        assert!(text.ends_with("fence n2` failed (exit code 3): the BMC does not answer"), "{text}");
        let text = failed("kill -9 $$");
        assert!(text.ends_with("failed (signal 9)"), "{text}");
        // More than a pipe holds.
        let text = failed("yes 'a long story' | head -n 100000 >&2; exit 1");
        assert!(text.ends_with("exit code 1): a long story"), "{text}");
    }

    #[test]
    fn what_takes_too_long_is_killed_with_its_children() {
        let directory = tempfile::tempdir().unwrap();
        let pid = directory.path().join("pid");
        let script = format!("sleep 3600 & echo $! > {}; echo waiting >&2; wait", pid.display());
        let command =
            FenceCommand { limit: Duration::from_millis(300), ..command(directory.path(), &script) };
        let began = Nanos::now();
        let text = run(&command).unwrap_err();
        assert!(text.ends_with("failed (it was killed after 0.3 s): waiting"), "{text}");
        assert!(Nanos::now() - began < Duration::from_secs(5));
        let pid = std::fs::read_to_string(pid).unwrap();
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        let deadline = Nanos::now() + Duration::from_secs(5);
        // A zombie, until whoever inherits it looks.
        while !state().is_empty() && !state().contains(") Z ") {
            assert!(Nanos::now() < deadline, "{}", state());
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_program_that_cannot_be_run_is_told() {
        let absent = FenceCommand {
            program: "/nothing/here".into(),
            limit: Duration::from_secs(1),
            volume: "v".into(),
            lun: "/dev/lun".into(),
        };
        assert!(run(&absent).unwrap_err().starts_with("cannot run the fence command /nothing/here"));
        for path in ["/nothing/here", "fence", "/", "/etc/passwd"] {
            assert!(check(Path::new(path)).is_err(), "{path}");
        }
    }
}
