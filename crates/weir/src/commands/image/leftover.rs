//! Temporary clones of exports. One that is left by an export that was killed is removed by the next export on its host.
//!
//! A clone's name has the host's boot and the process, so an export knows which are its host's and without a process. Of another host's, without
//! clients, it says what can be done: nobody here knows whether that export is only about to begin. One that has a client is never removed.

use std::path::Path;

use weir_block::Nanos;
use weir_node::api::{ApiErrorKind, Delete, DiskView};
use weir_node::client::Client;

use crate::failure::Failure;

const PREFIX: &str = "export";

/// Which export has made a clone.
#[derive(Debug, PartialEq, Eq)]
struct Maker {
    /// Of its host.
    boot: String,
    process: u32,
}

impl Maker {
    fn here() -> Maker {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot: String = boot.chars().filter(char::is_ascii_hexdigit).take(8).collect();
        Maker { boot: format!("{boot:0<8}"), process: std::process::id() }
    }

    fn of(name: &str) -> Option<Maker> {
        let mut parts = name.split('-');
        let (prefix, boot, process, number) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        if prefix != PREFIX || parts.next().is_some() || boot.len() != 8 || number.parse::<u64>().is_err() {
            return None;
        }
        Some(Maker { boot: boot.to_owned(), process: process.parse().ok()? })
    }
}

/// The name of a clone for this process.
pub fn name() -> String {
    let Maker { boot, process } = Maker::here();
    format!("{PREFIX}-{boot}-{process}-{}", Nanos::now().0)
}

/// Removes clones that exports have left.
///
/// # Errors
/// No node answers. One that cannot be removed now stays.
pub fn remove(client: &Client) -> Result<(), Failure> {
    let me = Maker::here();
    for DiskView { name, detail, .. } in client.disks()? {
        let Some(maker) = Maker::of(&name) else { continue };
        if maker.boot != me.boot {
            if detail.is_none_or(|detail| detail.clients == 0) {
                eprintln!(
                    "{name} is of an export on another host: if none runs there, `weir disk delete {name}`"
                );
            }
            continue;
        }
        if Path::new(&format!("/proc/{}", maker.process)).exists() {
            continue;
        }
        // Not by force: one with a client is in use.
        match client.delete(&name, &Delete::default()) {
            Ok(_) => eprintln!("removed {name}, which an earlier export has left"),
            Err(error) if error.kind == ApiErrorKind::NotFound => {}
            Err(error) => eprintln!("disk {name}, which an earlier export has left, stays: {error}"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_says_who_has_made_it_and_no_other_disk_does() {
        assert_eq!(Maker::of(&name()), Some(Maker::here()));
        let made = Maker { boot: "0123abcd".into(), process: 7 };
        assert_eq!(Maker::of("export-0123abcd-7-99"), Some(made));
        for other in ["export", "export-db-1-2", "vm1", "export-0123abcd-8-9-x", "export-0123abcd-x-1"] {
            assert_eq!(Maker::of(other), None, "{other}");
        }
    }
}
