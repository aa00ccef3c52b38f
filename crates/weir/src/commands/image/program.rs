//! Runs qemu-img, which is ended when the command is interrupted, and when it takes too long to look at an image.

use std::io::{IsTerminal, PipeReader};
use std::os::fd::AsFd;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};

use super::pieces;
use super::source::Image;
use crate::commands::interrupts::{Interrupts, Signals};
use crate::failure::Failure;
use crate::options::Output;

/// Longest time for a look at an image, which reads its tables: those of 10 TiB are 1.3 GB.
const LOOK: Duration = Duration::from_secs(900);

/// Bytes kept of qemu-img's error output, which can have a line for each of millions of damaged clusters.
const MOST_SAID: u64 = 16 << 10;

/// From its making on, an interrupt does not end this process: whoever has made it cleans up.
pub struct Programs {
    interrupts: Interrupts,
    shows_progress: bool,
}

/// How qemu-img has ended.
struct Ended {
    status: ExitStatus,
    /// The begin of its errors.
    said: String,
}

impl Programs {
    /// # Errors
    /// The system's.
    pub fn new(output: Output) -> Result<Programs, Failure> {
        let shows_progress = output == Output::Text && std::io::stderr().is_terminal();
        Ok(Programs { interrupts: Interrupts::new()?, shows_progress })
    }

    /// Has qemu-img check an image: one that was cut off would be imported with zeroes in place of what is missing. `shown`: its path.
    ///
    /// # Errors
    /// It is damaged, or takes too long; qemu-img cannot be run; this command is interrupted.
    pub fn check(&mut self, image: &Image, shown: &str) -> Result<(), Failure> {
        let mut command = Command::new("qemu-img");
        command.args(["check", "-q"]).args(image.arguments()).stdout(Stdio::null());
        let Ended { status, said } = self.run(command, Some(LOOK))?;
        // 3: nothing but clusters that are not used.
        if status.success() || status.code() == Some(3) {
            return Ok(());
        }
        let first = said.lines().next().unwrap_or_default();
        let message = format!("{shown} is damaged, or a part of it is missing: {first}");
        Err(Failure::refused(message).hint(format!("`qemu-img check {shown}` says more")))
    }

    /// The bytes of an image, or of an export, that are neither holes nor zeroes: what an import writes.
    ///
    /// # Errors
    /// As [`Programs::check`]; it is in too many pieces.
    pub fn allocated(&mut self, image: &Image) -> Result<u64, Failure> {
        self.data_of(image, pieces::MOST)
    }

    fn data_of(&mut self, image: &Image, most_pieces: u64) -> Result<u64, Failure> {
        let (list, written): (PipeReader, _) = std::io::pipe()?;
        let mut command = Command::new("qemu-img");
        command.args(["map", "--output", "json"]).args(image.arguments()).stdout(written);
        // Ends with qemu-img, which ends, too, when nobody reads what it writes.
        let adding_up = std::thread::Builder::new()
            .name("weir-image-map".into())
            .spawn(move || pieces::data_of(list, most_pieces))?;
        let ended = self.run(command, Some(LOOK))?;
        let sum = adding_up.join().map_err(|_| Failure::failed("the list of qemu-img map is not read"))?;
        match (sum, ended) {
            (Ok(sum), Ended { status, .. }) if status.success() => Ok(sum),
            (Err(error), _) if error.is_data() => {
                Err(Failure::refused(format!("qemu-img map says of the image what is not imported: {error}"))
                    .hint("make the image again, where you trust it: `qemu-img convert -O qcow2`"))
            }
            (Err(error), Ended { status, .. }) if status.success() => {
                Err(Failure::failed(format!("qemu-img map says what nobody understands: {error}")))
            }
            (_, Ended { status, said }) => Err(Failure::failed(format!("{}, {status}", named(&said)))),
        }
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
        command.stdout(progress);
        let Ended { status, said } = self.run(command, None)?;
        match status.success() {
            true => Ok(()),
            false => Err(Failure::failed(format!("{}, {status}", named(&said)))),
        }
    }

    /// Runs a program to its end.
    ///
    /// # Errors
    /// It cannot be run, or has not ended in `limit`; this command is interrupted. It has ended in each case.
    fn run(&mut self, mut command: Command, limit: Option<Duration>) -> Result<Ended, Failure> {
        command.stdin(Stdio::null()).stderr(Stdio::piped());
        // An interrupt from the terminal is for this process, which ends the other.
        command.process_group(0).kill_on_drop(true);
        let parent = rustix::process::getpid();
        // SAFETY: two system calls, and nothing else, between fork and exec.
        unsafe { command.pre_exec(move || ends_with(parent)) };
        let (runtime, signals) = self.interrupts.parts();
        runtime.block_on(async {
            let mut child = command.spawn().map_err(|error| cannot_run(&error))?;
            // It has ends of pipes that are the child's now.
            drop(command);
            let said = tokio::spawn(begin_of(child.stderr.take()));
            let status = ending(&mut child, signals, limit).await?;
            Ok(Ended { status, said: said.await.unwrap_or_default() })
        })
    }
}

/// Waits for the end of a program, or ends it.
async fn ending(
    child: &mut Child,
    signals: &mut Signals,
    limit: Option<Duration>,
) -> Result<ExitStatus, Failure> {
    let failure = tokio::select! {
        status = child.wait() => return Ok(status?),
        () = signals.next() => Failure::failed("interrupted"),
        limit = elapsed(limit) => {
            let message = format!("qemu-img has looked at the image for {limit:?}, and is not done");
            Failure::refused(message).hint(
                "check the storage that it is on; or make the image again, where you trust it: `qemu-img convert -O qcow2`",
            )
        }
    };
    // It has ended when this returns: nothing of it is written to the disk afterwards.
    let _ = child.kill().await;
    Err(failure)
}

async fn elapsed(limit: Option<Duration>) -> Duration {
    match limit {
        Some(limit) => tokio::time::sleep(limit).await,
        None => std::future::pending().await,
    }
    limit.unwrap_or_default()
}

/// Reads everything, and keeps the begin.
async fn begin_of(errors: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut errors) = errors else { return String::new() };
    let mut kept = Vec::new();
    let _ = (&mut errors).take(MOST_SAID).read_to_end(&mut kept).await;
    let _ = tokio::io::copy(&mut errors, &mut tokio::io::sink()).await;
    String::from_utf8_lossy(&kept).into_owned()
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

/// What the program has said, with its name once.
fn named(said: &str) -> String {
    let said = said.trim();
    format!("qemu-img: {}", said.strip_prefix("qemu-img: ").unwrap_or(said))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use weir_block::Nanos;

    use super::*;
    use crate::cli::Format;

    const CLUSTER: u64 = 64 << 10;
    /// Entries of a table of the second level, of which each covers a cluster.
    const ENTRIES: u64 = CLUSTER / 8;

    /// An image of seven clusters whose table of the second level is named `times`: every second cluster of the disk is the same one. Its
    /// reference counts, of 64 bits, are right.
    fn repeated(path: &Path, times: u64) {
        let [refcount_table, refcounts, first, second, data, end] = [1, 2, 3, 4, 5, 6u64];
        let mut image = vec![0; usize::try_from(end * CLUSTER).unwrap()];
        let mut put = |at: u64, bytes: &[u8]| {
            let at = usize::try_from(at).unwrap();
            image[at..at + bytes.len()].copy_from_slice(bytes);
        };
        put(0, b"QFI\xfb\0\0\0\x03");
        put(20, &16u32.to_be_bytes());
        put(24, &(times * ENTRIES * CLUSTER).to_be_bytes());
        put(36, &u32::try_from(times).unwrap().to_be_bytes());
        put(40, &(first * CLUSTER).to_be_bytes());
        put(48, &(refcount_table * CLUSTER).to_be_bytes());
        put(56, &1u32.to_be_bytes());
        // Reference counts of 1 << 6 bits, and the header's length.
        put(96, &6u32.to_be_bytes());
        put(100, &104u32.to_be_bytes());
        put(refcount_table * CLUSTER, &(refcounts * CLUSTER).to_be_bytes());
        let references = [1, 1, 1, 1, times, times * ENTRIES / 2];
        for (at, count) in (0u64..).zip(references) {
            put(refcounts * CLUSTER + at * 8, &count.to_be_bytes());
        }
        for at in 0..times {
            put(first * CLUSTER + at * 8, &(second * CLUSTER).to_be_bytes());
        }
        for at in (0..ENTRIES).step_by(2) {
            put(second * CLUSTER + at * 8, &(data * CLUSTER).to_be_bytes());
        }
        std::fs::write(path, image).unwrap();
    }

    fn programs() -> Option<Programs> {
        let is_there = std::process::Command::new("qemu-img").arg("--version").output().is_ok();
        if !is_there {
            eprintln!("skipped: no qemu-img here");
        }
        is_there.then(|| Programs::new(Output::Json).unwrap())
    }

    /// It filled the memory of the host.
    #[test]
    fn a_small_image_in_many_pieces_is_given_up() {
        let Some(mut programs) = programs() else { return };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.qcow2");
        repeated(&path, 8);
        let image = Image::of_file(&path, Format::Qcow2).unwrap();
        programs.check(&image, "a.qcow2").unwrap();
        assert_eq!(programs.allocated(&image).unwrap(), 8 * ENTRIES / 2 * CLUSTER);
        let refused = programs.data_of(&image, 1000).unwrap_err();
        assert!(refused.message.contains("more than 1000 pieces"), "{refused:?}");
    }

    #[test]
    fn a_program_that_takes_too_long_is_ended() {
        let Some(mut programs) = programs() else { return };
        let mut endless = Command::new("sleep");
        endless.arg("600").stdout(Stdio::null());
        let begun = Nanos::now();
        let refused = programs.run(endless, Some(Duration::from_millis(50))).err().unwrap();
        assert!(refused.message.contains("50ms, and is not done"), "{refused:?}");
        assert!(Nanos::now() - begun < Duration::from_secs(60));
    }

    #[test]
    fn only_the_begin_of_many_errors_is_kept() {
        let Some(mut programs) = programs() else { return };
        let mut talks = Command::new("sh");
        talks.args(["-c", "yes bad | head -c 1000000 >&2"]).stdout(Stdio::null());
        let ended = programs.run(talks, None).unwrap();
        assert_eq!((ended.status.success(), ended.said.len() as u64), (true, MOST_SAID));
    }

    /// The header was looked at before qemu-img opens the image.
    #[test]
    fn a_backing_file_that_comes_later_is_not_read() {
        let Some(mut programs) = programs() else { return };
        let directory = tempfile::tempdir().unwrap();
        let (base, path) = (directory.path().join("base"), directory.path().join("a.qcow2"));
        std::fs::write(&base, vec![0x11; 1 << 20]).unwrap();
        let mut made = std::process::Command::new("qemu-img");
        made.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&base).arg(&path);
        assert!(made.status().unwrap().success());
        let image = Image::of_file(&path, Format::Qcow2).unwrap();
        assert_eq!(programs.allocated(&image).unwrap(), 0);
    }
}
