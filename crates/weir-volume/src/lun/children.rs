//! Programs that this process starts inherit nothing of a volume: a descriptor of a file there would keep the volume mounted.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// The program gets no descriptor beyond its standard ones, also of those that have no flag for that yet: one call of XFS opens a file without
/// ([`super::filesystem::Mounted::open_without_times`]). A kernel before 5.11 leaves those open.
pub(super) fn inherits_nothing(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec a system call is allowed that takes no memory.
    unsafe {
        command.pre_exec(|| {
            libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int);
            Ok(())
        })
    }
}

/// The program ends when the calling thread does, also with a process that is killed. The thread has to wait for the program's end.
pub(super) fn ends_with_this_thread(command: &mut Command) -> &mut Command {
    let parent = rustix::process::getpid();
    // SAFETY: between fork and exec system calls are allowed that take no memory.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            // It may have ended before the signal was set.
            match rustix::process::getppid() {
                Some(now) if now == parent => Ok(()),
                _ => Err(std::io::ErrorKind::BrokenPipe.into()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test")]

    use std::fs::File;
    use std::os::fd::AsRawFd;

    use rustix::io::{FdFlags, fcntl_setfd};

    use super::*;

    #[test]
    fn a_descriptor_without_the_flag_is_not_inherited() {
        let file = File::open("/dev/null").unwrap();
        fcntl_setfd(&file, FdFlags::empty()).unwrap();
        let has_it = |command: &mut Command| {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            command.args(["-e", &path]).status().unwrap().success()
        };
        assert!(has_it(&mut Command::new("test")));
        assert!(!has_it(inherits_nothing(&mut Command::new("test"))));
    }
}
