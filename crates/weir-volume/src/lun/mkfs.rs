//! The programs that make filesystems.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use super::children::{ends_with_this_thread, inherits_nothing};
use super::filesystem::Kind;
use super::setup_error::SetupError;

/// Between two looks at a program that is not done.
const LOOK: Duration = Duration::from_millis(50);

/// Makes a filesystem of `size` bytes, as long as `may_write`. Blocks.
///
/// # Errors
/// [`SetupError::Format`], [`SetupError::Ended`].
pub(super) fn make(
    kind: Kind,
    path: &Path,
    size: u64,
    label: &str,
    may_write: &dyn Fn() -> bool,
) -> Result<(), SetupError> {
    let label: String = label.chars().take(12).collect();
    let mut command = match kind {
        // A log of at most 64 MiB is replayed in a second; sectors of 4096 bytes suit every path.
        Kind::Xfs => {
            let mut command = Command::new("mkfs.xfs");
            command.args(["-q", "-f", "-K", "-s", "size=4096", "-m", "reflink=1,crc=1", "-l", "size=64m"]);
            command.arg("-d").arg(format!("size={size}")).arg("-L").arg(label).arg(path);
            command
        }
        Kind::Ext4 => {
            let mut command = Command::new("mkfs.ext4");
            // Direct I/O (-D), as mkfs.xfs does it: what a killed one has left in the page cache would be written later.
            command.args(["-q", "-F", "-D", "-b", "4096", "-J", "size=64", "-E", "nodiscard", "-L"]);
            command.arg(label).arg(path).arg((size / 4096).to_string());
            command
        }
    };
    let failed = |said: String| SetupError::Format { program: program(kind), path: path.to_path_buf(), said };
    match run(&mut command, may_write).map_err(|error| failed(error.to_string()))? {
        Run::Succeeded => Ok(()),
        Run::Failed(said) => Err(failed(said)),
        Run::Killed => Err(SetupError::Ended(path.to_path_buf())),
    }
}

/// Its name.
pub(super) fn program(kind: Kind) -> &'static str {
    match kind {
        Kind::Xfs => "mkfs.xfs",
        Kind::Ext4 => "mkfs.ext4",
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Run {
    Succeeded,
    /// The first line that it has said.
    Failed(String),
    Killed,
}

/// Runs a program to its end, or ends it when it may not go on, or with this process: what it has submitted until then is all that it writes.
/// When this process is gone, its setup key goes, too, and another node may begin.
fn run(command: &mut Command, may_go_on: &dyn Fn() -> bool) -> io::Result<Run> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = ends_with_this_thread(inherits_nothing(command)).spawn()?;
    let errors = child.stderr.take();
    // It would wait if nobody read what it says.
    let reader = thread::spawn(move || {
        let mut said = Vec::new();
        let _ = errors.map(|mut errors| errors.read_to_end(&mut said));
        said
    });
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if !may_go_on() {
            child.kill()?;
            child.wait()?;
            return Ok(Run::Killed);
        }
        thread::sleep(LOOK);
    };
    if status.success() {
        return Ok(Run::Succeeded);
    }
    let said = reader.join().unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    Ok(Run::Failed(said.lines().next().unwrap_or("it does not say why").to_owned()))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test")]

    use std::cell::Cell;

    use weir_block::Nanos;

    use super::*;

    #[test]
    fn a_program_that_may_not_go_on_is_ended() {
        let looks = Cell::new(0);
        let may_go_on = || looks.replace(looks.get() + 1) < 2;
        let began = Nanos::now();
        assert_eq!(run(Command::new("sleep").arg("600"), &may_go_on).unwrap(), Run::Killed);
        assert!(Nanos::now() - began < Duration::from_secs(300));
        let mut fails = Command::new("sh");
        fails.args(["-c", "echo first >&2; echo second >&2; exit 3"]);
        assert_eq!(run(&mut fails, &|| true).unwrap(), Run::Failed("first".into()));
        assert_eq!(run(&mut Command::new("true"), &|| true).unwrap(), Run::Succeeded);
    }
}
