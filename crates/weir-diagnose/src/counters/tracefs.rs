//! The kernel's tracing filesystem for a child process. A fresh machine has not mounted it, and a measurement changes nothing
//! on the machine: the child gets a mount namespace of its own with tracefs in it, which ends with the child.

use std::io;
use std::path::Path;
use std::process::{Child, Command};
use std::thread;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// The usual mount point of tracefs, and the one below debugfs.
const PLACES: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// Why a child that traces cannot be started.
#[derive(Debug)]
pub(super) enum Refused {
    /// There is no tracefs, and none can be mounted.
    NoTracefs(io::Error),
    /// The program cannot be run.
    NotRun(io::Error),
}

/// Starts `command` where it finds tracefs.
pub(super) fn spawn(mut command: Command) -> Result<Child, Refused> {
    if PLACES.iter().any(|place| Path::new(place).join("events").is_dir()) {
        return command.spawn().map_err(Refused::NotRun);
    }
    // A mount namespace is a thread's, and its children's; this thread ends afterwards.
    let started = thread::scope(|scope| {
        let start = || {
            mount_for_this_thread().map_err(Refused::NoTracefs)?;
            command.spawn().map_err(Refused::NotRun)
        };
        scope.spawn(start).join()
    });
    started.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn mount_for_this_thread() -> io::Result<()> {
    // SAFETY: the flag takes this thread's mounts, root and working directory apart from the other threads', and no file
    // descriptor.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    // Without this the mount would spread to where the namespace came from.
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    Ok(mount("tracefs", PLACES[0], "tracefs", MountFlags::empty(), None)?)
}
