//! Takes away what nobody asks for any more (P10): each start of a node may leave a `stopped/` behind, each
//! takeover a `released/`.

use std::collections::BTreeSet;

use crate::records::{DiskRecord, Record, keys};
use crate::registry::{Entry, MAX_TRANSACTION, Registry, RegistryError, Transaction};

/// Deletes every `stopped/` and `released/` that no disk's record asks for; returns how many. Call it now and
/// then, from any node.
///
/// A `stopped/` is asked for by a disk whose owner, replica or former owner it names. One that came after this
/// looked is kept. What is read first is the notes and then the disks: a process that is known to have
/// stopped gets into no record any more, because whoever claims a disk does so under
/// [`crate::membership::NodeSession::guard`].
///
/// # Errors
/// What the registry says. A disk record that cannot be read keeps everything: it may ask for anything.
pub async fn prune_notes(registry: &dyn Registry) -> Result<usize, RegistryError> {
    let mut notes = registry.list(keys::STOPPED).await?.entries;
    notes.extend(registry.list(keys::RELEASED).await?.entries);
    let mut wanted = BTreeSet::new();
    for entry in registry.list(keys::DISKS).await?.entries {
        match DiskRecord::of(&entry) {
            Ok(disk) => wanted.extend(asked_for(&disk)),
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

/// The notes that can still matter to a disk.
fn asked_for(disk: &DiskRecord) -> Vec<String> {
    let former = disk.former.iter();
    let released = former.clone().map(|former| keys::released(&disk.name, former.epoch, &former.node.node));
    let nodes = disk.owner.iter().chain(&disk.replicas).chain(former.map(|former| &former.node));
    nodes.map(keys::stopped).chain(released).collect()
}
