//! The operator's fence command: a program that keeps a node from a LUN, and lets it back (IPMI, a switch, a hypervisor's API; tier 2 of
//! `VOLUME.md` §2).
//!
//! It is run as
//!
//! ```text
//! COMMAND fence NODE      exit code 0: NODE certainly neither reads nor writes the LUN, and nothing that it has issued is on its way there
//! COMMAND admit NODE      exit code 0: NODE, on which it runs, reads and writes the LUN
//! ```
//!
//! with `WEIR_VOLUME`, `WEIR_LUN` (the path on the node that runs it), `WEIR_NODE` (the host's number: a name may be another host's
//! later), `WEIR_INCARNATION`, and for `fence` `WEIR_EPOCH` in its environment, in a process group of its own. Any other exit code is a
//! failure, and the last line on its standard error is the reason. It may be run again at any time, and on several nodes at once.
//!
//! What has not ended within the time limit is killed, and has failed; what it has done until then may stay done. When it has ended, its
//! group is killed. After the end of all processes that `admit` has started, nothing that they asked for may take effect: a fence that it
//! lifts later is another coordinator's proof. They inherit a descriptor that is a lock, by which Weir knows that all have ended; so they
//! must not close descriptors that they do not know.

use std::fs::File;
use std::io::{self, PipeWriter, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use weir_block::Nanos;

use super::children::inherits_nothing;

/// Bytes of standard error that are kept: the last ones.
const KEPT: usize = 4096;
/// Longest wait for the reason, and for the end of a process that was killed.
const AFTERWARDS: Duration = Duration::from_secs(2);
/// Pause between two attempts to get the lock.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

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
    /// The program. Without one, the operator keeps nodes from the LUN, and says so.
    pub program: Option<PathBuf>,
    /// Its time.
    pub limit: Duration,
    /// The volume's name.
    pub volume: String,
    /// The LUN's path on this node.
    pub lun: PathBuf,
    /// A file of this node for the lock of `admit`, for this LUN alone.
    pub lock: PathBuf,
}

/// The node that is fenced or admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its name.
    pub name: String,
    /// The host's number.
    pub node: u64,
    /// Its process.
    pub incarnation: u64,
}

/// The reason why it has not done its work.
#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    /// None is configured.
    #[error(
        "node {node} may have the filesystem of volume {volume} mounted, and no fence command is configured (lun.fence_command): make sure \
         that it cannot write to the LUN, for example by switching it off, and run `weir volume confirm-fenced {volume} {node}`"
    )]
    NoCommand {
        /// The volume.
        volume: String,
        /// The node.
        node: String,
    },
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
    /// Has a node fenced, in an epoch. Waits for the command's end, or for the time limit.
    ///
    /// # Errors
    /// [`FenceError`]. The node may be fenced, or be fenced later.
    pub fn fence(&self, target: &Target, epoch: u64) -> Result<(), FenceError> {
        self.run(Action::Fence, target, Some(epoch), None)
    }

    /// Has this node admitted. Waits until nothing of the command runs any more, however long that takes.
    ///
    /// # Errors
    /// [`FenceError`]: it is not admitted, and will not be.
    pub fn admit(&self, target: &Target) -> Result<(), FenceError> {
        let lock = self.locked().map_err(self.not_run())?;
        let result = self.run(Action::Admit, target, None, Some(lock));
        // Free when the command's last process has ended.
        self.locked().map_err(self.not_run())?;
        result
    }

    /// Waits for the lock under which this node is admitted. It is that of the file's description: whoever inherits that holds it, and so
    /// does a process that has ended, until the kernel has let go of its last call.
    ///
    /// # Errors
    /// The lock cannot be opened.
    pub fn locked(&self) -> io::Result<File> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&self.lock)?;
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(Errno::WOULDBLOCK | Errno::INTR) => thread::sleep(LOOK_AGAIN),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn not_run(&self) -> impl Fn(io::Error) -> FenceError {
        |source| FenceError::Run {
            program: self.program.clone().unwrap_or_else(|| self.lock.clone()),
            source,
        }
    }

    fn run(
        &self,
        action: Action,
        target: &Target,
        epoch: Option<u64>,
        lock: Option<File>,
    ) -> Result<(), FenceError> {
        let Some(program) = self.program.clone() else {
            return match action {
                // Nobody has kept it from there.
                Action::Admit => Ok(()),
                Action::Fence => {
                    let (volume, node) = (self.volume.clone(), target.name.clone());
                    Err(FenceError::NoCommand { volume, node })
                }
            };
        };
        let (pipe, said) = last_words().map_err(self.not_run())?;
        let started = self.start(&program, action, target, epoch, lock, pipe);
        let mut child = started.map_err(self.not_run())?;
        let how = match within(&mut child, self.limit) {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => describe(status),
            Ok(None) => format!("it was killed after {} s", self.limit.as_secs_f64()),
            Err(error) => format!("it was killed: its end cannot be awaited: {error}"),
        };
        let said = said.recv_timeout(AFTERWARDS).unwrap_or_default();
        let node = target.name.clone();
        Err(FenceError::Failed { program, action, node, how, said })
    }

    fn start(
        &self,
        program: &Path,
        action: Action,
        target: &Target,
        epoch: Option<u64>,
        lock: Option<File>,
        errors: PipeWriter,
    ) -> io::Result<Child> {
        if target.name.starts_with('-') {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a node's name begins with a hyphen"));
        }
        let mut command = Command::new(program);
        command
            .args([action.word(), &target.name])
            .env("WEIR_VOLUME", &self.volume)
            .env("WEIR_LUN", &self.lun)
            .env("WEIR_NODE", target.node.to_string())
            .env("WEIR_INCARNATION", target.incarnation.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .process_group(0);
        if let Some(epoch) = epoch {
            command.env("WEIR_EPOCH", epoch.to_string());
        }
        // Before the lock gets its exception.
        inherits_nothing(&mut command);
        if let Some(lock) = lock {
            let descriptor = lock.as_raw_fd();
            // Not standard input, which a shell replaces for what it runs in the background.
            // SAFETY: between fork and exec, `fcntl` is allowed, and the closure owns the descriptor.
            unsafe {
                command.pre_exec(move || {
                    let _ = &lock;
                    match libc::fcntl(descriptor, libc::F_SETFD, 0) {
                        -1 => Err(io::Error::last_os_error()),
                        _ => Ok(()),
                    }
                });
            }
        }
        command.spawn()
    }
}

/// Waits for the end, then kills what is left of the process group. `None`: the time was over.
fn within(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let pid = Pid::from_child(child);
    let descriptor = pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from);
    let ended = descriptor.and_then(|descriptor| Ok((has_ended(&descriptor, limit)?, descriptor)));
    // Before the process is reaped: its number, and so its group's, is nobody else's yet. Nothing is left, if it fails.
    let _ = kill_process_group(pid, Signal::KILL);
    let (has_ended_itself, descriptor) = ended?;
    // Nobody is to wait for one that hangs in the kernel: it stays a zombie.
    match has_ended(&descriptor, AFTERWARDS)? {
        true => child.wait().map(|status| has_ended_itself.then_some(status)),
        false => Ok(None),
    }
}

fn has_ended(descriptor: &OwnedFd, limit: Duration) -> io::Result<bool> {
    let end = Nanos::now() + limit;
    loop {
        let rest = end - Nanos::now();
        let rest = Timespec { tv_sec: rest.as_secs() as i64, tv_nsec: rest.subsec_nanos().into() };
        match poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&rest)) {
            Ok(count) => return Ok(count > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A pipe, and the last line that was written to it when its writers are gone. A thread reads it: a command that says much is not to wait.
fn last_words() -> io::Result<(PipeWriter, mpsc::Receiver<String>)> {
    let (mut from, to) = io::pipe()?;
    let (send, receive) = mpsc::channel();
    thread::Builder::new().name("weir-fence".into()).spawn(move || {
        let (mut kept, mut some) = (Vec::new(), [0; KEPT]);
        while let Ok(bytes @ 1..) = from.read(&mut some) {
            kept.extend_from_slice(&some[..bytes]);
            kept.drain(..kept.len().saturating_sub(KEPT));
        }
        let text = String::from_utf8_lossy(&kept);
        let last = text.lines().map(str::trim).rfind(|line| !line.is_empty());
        let printable = last.unwrap_or_default().chars().filter(|letter| !letter.is_control());
        // Nobody waits any more, if it fails.
        let _ = send.send(printable.collect());
    })?;
    Ok((to, receive))
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

    use super::*;

    fn command(directory: &Path, script: &str) -> FenceCommand {
        let program = directory.join("fence");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let limit = Duration::from_secs(10);
        FenceCommand {
            program: Some(program),
            limit,
            volume: "v".into(),
            lun: "/dev/lun".into(),
            lock: directory.join("lock"),
        }
    }

    fn target() -> Target {
        Target { name: "n2".into(), node: 44, incarnation: 7 }
    }

    /// Repeats it while the script is busy: a child of another test may hold it open for a moment.
    fn patiently(run: impl Fn() -> Result<(), FenceError>) -> Result<(), String> {
        for _ in 0..100 {
            match run() {
                Err(FenceError::Run { source, .. }) if source.raw_os_error() == Some(libc::ETXTBSY) => {
                    thread::sleep(Duration::from_millis(10));
                }
                other => return other.map_err(|error| error.to_string()),
            }
        }
        panic!("the script stays busy");
    }

    fn run(command: &FenceCommand) -> Result<(), String> {
        patiently(|| command.fence(&target(), 3))
    }

    #[test]
    fn it_gets_what_the_contract_names() {
        let directory = tempfile::tempdir().unwrap();
        let said = directory.path().join("said");
        let words = "$1 $2 $WEIR_VOLUME $WEIR_LUN $WEIR_NODE $WEIR_INCARNATION $WEIR_EPOCH";
        let command = command(directory.path(), &format!("echo {words} > {}", said.display()));
        run(&command).unwrap();
        assert_eq!(std::fs::read_to_string(&said).unwrap(), "fence n2 v /dev/lun 44 7 3\n");
        patiently(|| command.admit(&target())).unwrap();
        assert_eq!(std::fs::read_to_string(&said).unwrap(), "admit n2 v /dev/lun 44 7\n");
        let hyphen = Target { name: "-f".into(), ..target() };
        assert!(command.fence(&hyphen, 3).unwrap_err().to_string().contains("hyphen"));
        check(command.program.as_deref().unwrap()).unwrap();
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
        let command = FenceCommand { limit: Duration::from_secs(3), ..command(directory.path(), &script) };
        let began = Nanos::now();
        let text = run(&command).unwrap_err();
        assert!(text.ends_with("failed (it was killed after 3 s): waiting"), "{text}");
        assert!(Nanos::now() - began < Duration::from_secs(30));
        let pid = std::fs::read_to_string(pid).unwrap();
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        let deadline = Nanos::now() + Duration::from_secs(5);
        // A zombie, until whoever inherits it looks.
        while !state().is_empty() && !state().contains(") Z ") {
            assert!(Nanos::now() < deadline, "{}", state());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// A child that has left the process group, as one in another session, is not killed; what it does late would undo a later fence.
    #[test]
    fn an_admission_is_over_when_its_last_process_is() {
        let directory = tempfile::tempdir().unwrap();
        let done = directory.path().join("done");
        let script = format!("setsid sh -c 'sleep 2; touch {}' & sleep 0.5; exit 1", done.display());
        let command = command(directory.path(), &script);
        let text = patiently(|| command.admit(&target())).unwrap_err();
        assert!(text.ends_with("admit n2` failed (exit code 1)"), "{text}");
        assert!(done.exists(), "it was reported as failed while it could still take effect");
        drop(command.locked().unwrap());
    }

    #[test]
    fn a_program_that_cannot_be_run_is_told() {
        let absent = FenceCommand {
            program: Some("/nothing/here".into()),
            limit: Duration::from_secs(1),
            volume: "v".into(),
            lun: "/dev/lun".into(),
            lock: std::env::temp_dir().join("weir-no-lock"),
        };
        assert!(run(&absent).unwrap_err().starts_with("cannot run the fence command /nothing/here"));
        for path in ["/nothing/here", "fence", "/", "/etc/passwd"] {
            assert!(check(Path::new(path)).is_err(), "{path}");
        }
    }
}
