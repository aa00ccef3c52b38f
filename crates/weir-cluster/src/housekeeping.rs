//! Deletes notes that no disk needs (P10): each start of a node may leave a `stopped/` note, each takeover a `released/` note.

use std::collections::BTreeSet;

use crate::records::{DiskRecord, Record, keys};
use crate::registry::{Entry, MAX_TRANSACTION, Registry, RegistryError, Transaction};

/// Deletes every `stopped/` and `released/` note that no disk's record needs; returns the number. Call it occasionally, from any
/// node.
///
/// A disk needs the `stopped/` note of its owner, replicas and former owners. Notes written after the listing are kept. The order
/// is notes first, then disks: no record can name a stopped process later, because every claim carries
/// [`crate::membership::NodeSession::guard`].
///
/// # Errors
/// The registry's error. An unreadable disk record keeps all notes: it may need any of them.
pub async fn prune_notes(registry: &dyn Registry) -> Result<usize, RegistryError> {
    let mut notes = registry.list(keys::STOPPED).await?.entries;
    notes.extend(registry.list(keys::RELEASED).await?.entries);
    let mut wanted = BTreeSet::new();
    for entry in registry.list(keys::DISKS).await?.entries {
        match DiskRecord::of(&entry) {
            Ok(disk) => wanted.extend(needed_notes(&disk)),
            Err(error) => {
                tracing::warn!(key = entry.key, %error, "keeping all notes");
                return Ok(0);
            }
        }
    }
    let surplus: Vec<Entry> = notes.into_iter().filter(|note| !wanted.contains(&note.key)).collect();
    for some in surplus.chunks(MAX_TRANSACTION) {
        let delete = some.iter().fold(Transaction::new(), |all, note| all.delete(&*note.key));
        registry.transact(delete).await?;
    }
    Ok(surplus.len())
}

/// The notes that a disk needs.
fn needed_notes(disk: &DiskRecord) -> Vec<String> {
    let former = disk.former.iter();
    let released = former.clone().map(|former| keys::released(&disk.name, former.epoch, &former.node.node));
    let nodes = disk.owner.iter().chain(&disk.replicas).chain(former.map(|former| &former.node));
    nodes.map(keys::stopped).chain(released).collect()
}
