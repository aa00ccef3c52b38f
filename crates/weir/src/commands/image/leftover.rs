//! Temporary clones of exports. One that is left by an export that was killed is removed by the next export.
//!
//! A clone's name has the host's boot, the process, and the time. So an export knows which are its host's and without a process; those of other
//! hosts count as left when they are old. One that has a client is never removed.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use weir_node::api::{ApiErrorKind, Delete};
use weir_node::client::Client;

use crate::failure::Failure;

const PREFIX: &str = "export";

/// After this long, a clone without clients is nobody's, whichever host has made it.
const LEFT: Duration = Duration::from_secs(3600);

/// Which export has made a clone.
#[derive(Debug, PartialEq, Eq)]
struct Maker {
    /// Of its host.
    boot: String,
    process: u32,
    /// Seconds since 1970.
    since: u64,
}

impl Maker {
    fn here() -> Maker {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot: String = boot.chars().filter(char::is_ascii_hexdigit).take(8).collect();
        Maker { boot, process: std::process::id(), since: now() }
    }

    fn of(name: &str) -> Option<Maker> {
        let mut parts = name.split('-');
        let (prefix, boot, process, since) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        if prefix != PREFIX || parts.next().is_some() || boot.len() != 8 {
            return None;
        }
        Some(Maker { boot: boot.to_owned(), process: process.parse().ok()?, since: since.parse().ok()? })
    }

    /// Whether it has ended, as seen by `other`, at that one's time.
    fn is_gone(&self, other: &Maker, has_process: impl Fn(u32) -> bool) -> bool {
        let is_old = other.since.saturating_sub(self.since) > LEFT.as_secs();
        is_old || self.boot == other.boot && !has_process(self.process)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The name of a clone for this process.
pub fn name() -> String {
    let Maker { boot, process, since } = Maker::here();
    format!("{PREFIX}-{boot:0<8}-{process}-{since}")
}

/// Removes clones that exports have left.
///
/// # Errors
/// No node answers. One that cannot be removed now stays.
pub fn remove(client: &Client) -> Result<(), Failure> {
    let (me, has_process) = (Maker::here(), |process: u32| Path::new(&format!("/proc/{process}")).exists());
    for disk in client.disks()? {
        if !Maker::of(&disk.name).is_some_and(|maker| maker.is_gone(&me, has_process)) {
            continue;
        }
        // Not by force: one with a client is in use.
        match client.delete(&disk.name, &Delete::default()) {
            Ok(_) => eprintln!("removed {}, which an earlier export has left", disk.name),
            Err(error) if error.kind == ApiErrorKind::NotFound => {}
            Err(error) => eprintln!("disk {}, which an earlier export has left, stays: {error}", disk.name),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_clones_without_a_process_or_of_long_ago_are_left() {
        let me = Maker { boot: "0123abcd".into(), process: 9, since: 10_000 };
        let gone = |name: &str| Maker::of(name).map(|maker| maker.is_gone(&me, |process| process == 7));
        assert_eq!(gone("export-0123abcd-7-9999"), Some(false));
        assert_eq!(gone("export-0123abcd-8-9999"), Some(true));
        assert_eq!(gone("export-ffffffff-8-9999"), Some(false), "another host's");
        assert_eq!(gone("export-ffffffff-8-6399"), Some(true));
        for other in ["export", "export-db-1-2", "vm1", "export-0123abcd-8-9999-x", "export-0123abcd-x-1"] {
            assert_eq!(gone(other), None, "{other}");
        }
        assert_eq!(Maker::of(&name()).map(|maker| maker.process), Some(std::process::id()));
    }
}
