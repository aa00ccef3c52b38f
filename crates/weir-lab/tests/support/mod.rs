//! Additions to `common` for some end-to-end tests: tools to run, a small filesystem of one's own, an address that follows
//! the disk, a load that keeps its latencies, measurements with it, and clients that mean harm.
#![allow(dead_code, clippy::unwrap_used)]

pub mod behaviour;
pub mod clients;
pub mod etcd_faults;
pub mod filesystem;
pub mod guest_load;
pub mod hostile;
pub mod picture;
pub mod relay;
pub mod writing;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use weir_block::Nanos;

/// Runs a tool and returns its output.
///
/// # Panics
/// It is missing or fails.
pub fn run<S: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = S>) -> String {
    run_in(Path::new("/"), program, arguments)
}

/// As [`run`], with files of the tool's own in `directory`.
pub fn run_in<S: AsRef<OsStr>>(
    directory: &Path,
    program: &str,
    arguments: impl IntoIterator<Item = S>,
) -> String {
    let mut command = Command::new(find(program));
    command.args(arguments).current_dir(directory).stdin(Stdio::null());
    let output = command.output().unwrap_or_else(|error| panic!("{program} cannot be run: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} ended with {}:\n{text}\n{errors}", output.status);
    text
}

/// Tools for filesystems are where the PATH of ordinary users does not lead.
fn find(program: &str) -> PathBuf {
    let places = ["/usr/sbin", "/sbin"].map(|place| Path::new(place).join(program));
    places.into_iter().find(|path| path.exists()).unwrap_or_else(|| program.into())
}

/// Polls until there is something.
///
/// # Panics
/// There is nothing for longer than `patience`; `otherwise` tells more.
pub fn await_some<T>(
    patience: Duration,
    mut look: impl FnMut() -> Option<T>,
    otherwise: impl FnOnce() -> String,
) -> T {
    let deadline = Nanos::now() + patience;
    loop {
        if let Some(found) = look() {
            return found;
        }
        if Nanos::now() > deadline {
            panic!("not within {patience:?}: {}", otherwise());
        }
        thread::sleep(Duration::from_millis(20));
    }
}
