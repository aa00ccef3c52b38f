//! Runs qemu-img, which is ended when the command is interrupted.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Stdio;

use tokio::io::AsyncReadExt;
use tokio::process::Command;

use crate::cli::Format;
use crate::commands::interrupts::Interrupts;
use crate::failure::Failure;
use crate::options::Output;

/// A piece of what `qemu-img map` prints.
#[derive(serde::Deserialize)]
struct Piece {
    length: u64,
    data: bool,
    zero: bool,
}

/// From its making on, an interrupt does not end this process: whoever has made it cleans up.
pub struct Programs {
    interrupts: Interrupts,
    shows_progress: bool,
}

impl Programs {
    /// # Errors
    /// The system's.
    pub fn new(output: Output) -> Result<Programs, Failure> {
        let shows_progress = output == Output::Text && std::io::stderr().is_terminal();
        Ok(Programs { interrupts: Interrupts::new()?, shows_progress })
    }

    /// Has qemu-img check an image: one that was cut off would be imported with zeroes in place of what is missing.
    ///
    /// # Errors
    /// It is damaged, or qemu-img cannot be run.
    pub fn check(&self, image: &Path) -> Result<(), Failure> {
        let mut command = std::process::Command::new("qemu-img");
        command.args(["check", "-q", "-f", "qcow2"]).arg(image);
        let ended = command.stdin(Stdio::null()).output().map_err(|error| cannot_run(&error))?;
        // 3: nothing but clusters that are not used.
        if ended.status.success() || ended.status.code() == Some(3) {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&ended.stderr);
        let first = said.lines().next().unwrap_or_default();
        let message = format!("{} is damaged, or a part of it is missing: {first}", image.display());
        Err(Failure::refused(message).hint(format!("`qemu-img check {}` says more", image.display())))
    }

    /// The bytes of an image, or of an export, that are neither holes nor zeroes: what an import writes. `from`: its format, and where it is.
    ///
    /// # Errors
    /// qemu-img cannot be run, or fails.
    pub fn allocated(&self, (format, from): (Format, &str)) -> Result<u64, Failure> {
        let mut command = std::process::Command::new("qemu-img");
        command.args(["map", "--output", "json", "-f", format.name(), from]);
        let ended = command.stdin(Stdio::null()).output().map_err(|error| cannot_run(&error))?;
        if !ended.status.success() {
            let said = String::from_utf8_lossy(&ended.stderr);
            return Err(Failure::failed(format!("qemu-img: {}, {}", said.trim(), ended.status)));
        }
        let pieces: Vec<Piece> = serde_json::from_slice(&ended.stdout).map_err(|error| {
            Failure::failed(format!("qemu-img map says what nobody understands: {error}"))
        })?;
        Ok(pieces.iter().filter(|piece| piece.data && !piece.zero).map(|piece| piece.length).sum())
    }

    /// Runs `qemu-img convert` with these arguments, with its progress on standard error if that is a terminal.
    ///
    /// # Errors
    /// It is not there, it fails, or this command is interrupted.
    pub fn convert(&mut self, arguments: &[&str]) -> Result<(), Failure> {
        let mut command = Command::new("qemu-img");
        command.arg("convert").args(self.shows_progress.then_some("-p")).args(arguments);
        let progress = match self.shows_progress {
            // Standard output is for the result.
            true => Stdio::from(std::io::stderr().as_fd().try_clone_to_owned()?),
            false => Stdio::null(),
        };
        command.stdin(Stdio::null()).stdout(progress).stderr(Stdio::piped());
        // An interrupt from the terminal is for this process, which ends the other.
        command.process_group(0).kill_on_drop(true);
        let parent = rustix::process::getpid();
        // SAFETY: two system calls, and nothing else, between fork and exec.
        unsafe { command.pre_exec(move || ends_with(parent)) };
        let (runtime, signals) = self.interrupts.parts();
        runtime.block_on(async {
            let mut child = command.spawn().map_err(|error| cannot_run(&error))?;
            let mut errors = child.stderr.take();
            let said = tokio::spawn(async move {
                let mut text = String::new();
                if let Some(errors) = &mut errors {
                    let _ = errors.read_to_string(&mut text).await;
                }
                text
            });
            let status = tokio::select! {
                status = child.wait() => status?,
                () = signals.next() => return Err(interrupted(&mut child).await),
            };
            if status.success() {
                return Ok(());
            }
            let said = said.await.unwrap_or_default();
            Err(Failure::failed(format!("qemu-img: {}, {status}", said.trim())))
        })
    }
}

/// This process ends with its parent, also one that is killed: nobody would write on to a disk that nobody waits for.
fn ends_with(parent: rustix::process::Pid) -> std::io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    match rustix::process::getppid() {
        Some(now) if now == parent => Ok(()),
        _ => Err(std::io::ErrorKind::BrokenPipe.into()),
    }
}

fn cannot_run(error: &std::io::Error) -> Failure {
    let failure = Failure::failed(format!("qemu-img cannot be run: {error}"));
    failure.hint("it is in the package qemu-utils (Debian) or qemu-img (Fedora)")
}

async fn interrupted(child: &mut tokio::process::Child) -> Failure {
    // It has ended when this returns: nothing of it is written to the disk afterwards.
    let _ = child.kill().await;
    Failure::failed("interrupted")
}
