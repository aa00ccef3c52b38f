//! What a server offers: its exports, and whether a disk can be on one. Everything that connects blocks.

use std::time::Duration;

use weir_nbd::Uri;
use weir_nbd::client::{Dialed, Export, NbdError, list_exports};

use crate::error::NbdTrouble;

/// The time for connecting and the handshake together.
pub const HANDSHAKE: Duration = Duration::from_secs(5);

/// Sizes of disks are multiples of this, in bytes.
const SIZE_UNIT: u64 = 4096;

/// The largest number of names that a message has.
const NAMED: usize = 8;

/// An export's name for people. A server's may hold anything.
fn quoted(name: &str) -> String {
    match name {
        "" => "the default export (--export '')".to_owned(),
        name => format!("`{}`", name.escape_debug()),
    }
}

/// The names of exports, in words.
#[must_use]
pub fn named(exports: &[String]) -> String {
    let more = exports.len().saturating_sub(NAMED);
    let names: Vec<String> = exports.iter().take(NAMED).map(|name| quoted(name)).collect();
    match (exports.len(), more) {
        (0, _) => "none".to_owned(),
        (_, 0) => names.join(", "),
        _ => format!("{} and {more} more", names.join(", ")),
    }
}

/// The exports that a server lists; `None` if it lists none to anybody.
///
/// # Errors
/// It cannot be reached, or is no NBD server.
pub fn survey(server: &Uri) -> Result<Option<Vec<String>>, NbdTrouble> {
    Ok(list_exports(&server.address, HANDSHAKE)?)
}

/// An export on which a disk is to be: its size in bytes, and the disk's logical block, which is the smallest that the server allows if
/// none is `wanted`.
///
/// # Errors
/// The server cannot be reached, or has no such export; the export is unfit for a disk.
pub fn describe(server: &Uri, export: &str, wanted: Option<u32>) -> Result<(u64, u32), NbdTrouble> {
    // A server that lists its exports and knows this one under no name may serve the same bytes under every name.
    if let Some(listed) = survey(server)?
        && !listed.iter().any(|name| name == export)
    {
        let (server, export) = (server.address.to_string(), export.to_owned());
        return Err(NbdTrouble::Unlisted { server, export, listed: named(&listed) });
    }
    let dialed = dial(server, export)?;
    let found = dialed.export();
    let block = wanted.unwrap_or(if found.minimum_block <= 512 { 512 } else { 4096 });
    let unfit = |reason| {
        let (server, export) = (server.address.to_string(), export.to_owned());
        NbdTrouble::Unfit { server, export, reason }
    };
    check(found, found.size, block).map_err(unfit)?;
    if found.size == 0 {
        return Err(unfit("is empty: give it a size there".to_owned()));
    }
    if !found.size.is_multiple_of(SIZE_UNIT) {
        return Err(unfit(format!(
            "has {} bytes, and a disk's size is a multiple of {SIZE_UNIT}: change its size there",
            found.size
        )));
    }
    Ok((found.size, block))
}

/// Connects to an export of a server.
///
/// # Errors
/// As [`Dialed::dial`].
pub(super) fn dial(server: &Uri, export: &str) -> Result<Dialed, NbdError> {
    let uri = Uri { address: server.address.clone(), export: export.to_owned() };
    Dialed::dial(&uri, true, true, HANDSHAKE)
}

/// Whether a disk of `size` bytes in blocks of `logical_block` can be on this export.
///
/// # Errors
/// In words: why not.
pub(super) fn check(export: &Export, size: u64, logical_block: u32) -> Result<(), String> {
    if export.is_read_only() {
        return Err("is read-only".into());
    }
    if !export.can_flush() {
        return Err("has no FLUSH, without which nothing on it is ever certain to be durable".into());
    }
    if export.minimum_block > logical_block || !logical_block.is_multiple_of(export.minimum_block) {
        return Err(format!(
            "takes blocks of {} bytes, and the disk has blocks of {logical_block}",
            export.minimum_block
        ));
    }
    if export.maximum_block < logical_block {
        return Err(format!("takes at most {} bytes at once", export.maximum_block));
    }
    if export.size < size {
        return Err(format!(
            "has {} bytes, and the disk has {size}: it was shrunk or replaced; restore it",
            export.size
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_nbd::protocol::transmission_flag as flag;

    fn export() -> Export {
        Export {
            size: 1 << 20,
            flags: flag::HAS_FLAGS | flag::SEND_FLUSH,
            minimum_block: 1,
            preferred_block: 4096,
            maximum_block: 32 << 20,
            structured_replies: true,
            extended_headers: false,
            allocation_context: None,
        }
    }

    #[test]
    fn an_export_is_refused_for_what_a_disk_needs() {
        assert_eq!(check(&export(), 1 << 20, 512), Ok(()));
        let refused = |change: fn(&mut Export), expected: &str| {
            let mut export = export();
            change(&mut export);
            let reason = check(&export, 1 << 20, 512).unwrap_err();
            assert!(reason.contains(expected), "{reason}");
        };
        refused(|one| one.flags |= flag::READ_ONLY, "read-only");
        refused(|one| one.flags = flag::HAS_FLAGS, "no FLUSH");
        refused(|one| one.minimum_block = 4096, "blocks of 4096");
        refused(|one| one.minimum_block = 3, "blocks of 3");
        refused(|one| one.maximum_block = 0, "at most 0");
        refused(|one| one.size -= 1, "has 1048575 bytes, and the disk has 1048576");
    }

    #[test]
    fn a_message_names_a_few_exports() {
        let names = |count: usize| (0..count).map(|number| format!("e{number}")).collect::<Vec<_>>();
        assert_eq!(named(&[]), "none");
        assert_eq!(named(&names(2)), "`e0`, `e1`");
        assert!(named(&names(11)).ends_with("`e7` and 3 more"));
    }
}
