//! Fast copies in memory on AMD processors.
//!
//! glibc 2.33 to 2.39 copies pieces above about 2 KiB with `rep movsb` on processors that announce a fast one. AMD's Zen 3 and Zen 4
//! announce it, but copy only a few gigabytes a second with it to an address that is not aligned, where a loop with vector registers
//! is ten times as fast (glibc bug 30994). This slows TLS: rustls copies each record three times, to any address. On Debian 12 and a
//! Zen 4, receiving a frame of 4 KiB took twice the processor time.
//!
//! glibc 2.40 does not use the instruction on these processors. Older ones have a tunable for it, which glibc reads once, when a
//! process starts. So the process starts itself again with that set; with a newer glibc this changes nothing. An operator's own
//! setting is kept.

use std::env;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The environment variable with glibc's settings, separated by colons.
const TUNABLES: &str = "GLIBC_TUNABLES";
/// The size from which glibc uses `rep movsb`, in bytes.
const THRESHOLD: &str = "glibc.cpu.x86_rep_movsb_threshold";
/// Larger than any copy.
const NEVER: &str = "0x40000000";
/// Set in a process that was started again. glibc removes its settings from the environment of a program with file capabilities or
/// another user's rights: without a sign of its own, such a process would start itself again for ever.
const RESTARTED: &str = "WEIR_VECTOR_COPIES";

/// Starts this program again, with the same arguments and the same process id, if its copies are slow. Call it first:
/// before anything is read, and before there is a second thread.
///
/// # Errors
/// The program cannot be started again: it goes on, with slow copies.
pub fn restart_if_slow() -> io::Result<()> {
    let present = env::var_os(TUNABLES).unwrap_or_default();
    // An operator's settings that are no text stay as they are.
    let Some(present) = present.to_str().filter(|_| env::var_os(RESTARTED).is_none()) else { return Ok(()) };
    let Some(tunables) = faster(present, has_slow_instruction()) else { return Ok(()) };
    // The path, not /proc/self/exe: the process keeps its name in `ps`.
    let program = env::current_exe()?;
    if program.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"ld")) {
        return Err(io::Error::other(format!("{} has loaded this program", program.display())));
    }
    let mut arguments = env::args_os();
    let name = arguments.next().unwrap_or_default();
    let mut again = Command::new(program);
    let error = again.arg0(name).args(arguments).env(TUNABLES, tunables).env(RESTARTED, "1").exec();
    // The attempt has set it to end the process.
    // SAFETY: no handler is installed, and there is no other thread.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    Err(error)
}

/// The settings with which copies are faster than with `present`; `None` if none are needed, or the operator has chosen.
fn faster(present: &str, has_slow_instruction: bool) -> Option<String> {
    if !has_slow_instruction || present.split(':').any(|one| one.split('=').next() == Some(THRESHOLD)) {
        return None;
    }
    let others = if present.is_empty() { String::new() } else { format!("{present}:") };
    Some(format!("{others}{THRESHOLD}={NEVER}"))
}

/// Whether glibc may choose an instruction that is slow on this processor.
#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
#[allow(unused_unsafe, reason = "newer versions of Rust declare the instruction safe")]
fn has_slow_instruction() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};

    // SAFETY: every x86-64 processor has the instruction.
    let vendor = unsafe { __cpuid(0) };
    let is_amd =
        [vendor.ebx, vendor.edx, vendor.ecx] == [*b"Auth", *b"enti", *b"cAMD"].map(u32::from_le_bytes);
    // SAFETY: as above. "Enhanced rep movsb": leaf 7, EBX, bit 9.
    is_amd && vendor.eax >= 7 && unsafe { __cpuid_count(7, 0) }.ebx & 1 << 9 != 0
}

#[cfg(not(all(target_arch = "x86_64", target_env = "gnu")))]
fn has_slow_instruction() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_missing_is_set() {
        let ours = format!("{THRESHOLD}={NEVER}");
        assert_eq!(faster("", true), Some(ours.clone()));
        assert_eq!(faster("glibc.malloc.check=1", true), Some(format!("glibc.malloc.check=1:{ours}")));
        // Another tunable whose name begins alike.
        let other = format!("{THRESHOLD}_other=1");
        assert_eq!(faster(&other, true), Some(format!("{other}:{ours}")));
        assert_eq!(faster("", false), None);
    }

    #[test]
    fn it_restarts_once_and_keeps_the_choice_of_an_operator() {
        let ours = faster("glibc.malloc.check=1", true).unwrap();
        assert_eq!(faster(&ours, true), None);
        assert_eq!(faster(&format!("{THRESHOLD}=4096"), true), None);
    }
}
