//! The disks that are exports of an NBD server: they have records and no files here.

use weir_cluster::records::{DiskRecord, Record, keys};
use weir_cluster::registry::{Entry, RegistryError, Transaction};

use super::in_volume;
use crate::control::node::{Node, unavailable};
use crate::error::{ApiError, ApiErrorKind};

/// Makes the record of a disk whose data is there already: an export of its volume's server. Nothing is written there.
///
/// # Errors
/// Another disk has the name or the export, or the registry does not answer.
pub async fn adopt_export(node: &Node, record: &DiskRecord) -> Result<(), ApiError> {
    let key = keys::disk(&record.name);
    loop {
        // Read before the disks: whoever makes one of this volume meanwhile rewrites it.
        let (volume, _) = node.volume_entry(&record.volume).await?;
        check_export_free(node, record).await?;
        let commit = in_volume(&volume)
            .absent(keys::unfinished(&record.name))
            .absent(key.clone())
            .put(key.clone(), record.encode());
        match node.registry.transact(commit).await {
            Ok(_) => return Ok(()),
            Err(RegistryError::Conflict { .. })
                if node.volume_entry(&record.volume).await?.0.mod_revision != volume.mod_revision => {}
            Err(RegistryError::Conflict { .. }) => {
                let message = format!("there is a disk {} already", record.name);
                return Err(ApiError::new(ApiErrorKind::Exists, message));
            }
            Err(error) => return Err(unavailable(error)),
        }
    }
}

/// Two disks must not have the same bytes.
async fn check_export_free(node: &Node, record: &DiskRecord) -> Result<(), ApiError> {
    for entry in node.registry.list(keys::DISKS).await.map_err(unavailable)?.entries {
        let Ok(other) = DiskRecord::of(&entry) else {
            let message = format!("{} cannot be read: it may have the export", entry.key);
            return Err(ApiError::new(ApiErrorKind::Refused, message)
                .hint("a newer version has written it; run the same version on all nodes"));
        };
        if other.volume == record.volume && other.source == record.source && other.name != record.name {
            let message = format!("disk {} of volume {} has that export", other.name, other.volume);
            return Err(ApiError::new(ApiErrorKind::Exists, message));
        }
    }
    Ok(())
}

/// Removes the record of a disk that is an export, and leaves that as it is.
pub(super) async fn forget_export(
    node: &Node,
    entry: &Entry,
    record: &DiskRecord,
    lost: &str,
) -> Result<(), ApiError> {
    let gone = Transaction::new().unchanged(entry.key.clone(), entry.mod_revision).delete(entry.key.clone());
    match node.registry.transact(gone).await {
        Ok(_) => {
            let lost = if lost.is_empty() { String::new() } else { format!("; lost: {lost}") };
            let text = format!("it is forgotten; its export stays as it is{lost}");
            node.journal.tell("disk-deleted", &record.name, text);
            Ok(())
        }
        Err(RegistryError::Conflict { .. }) => {
            let message = format!("disk {} has just been opened", record.name);
            Err(ApiError::new(ApiErrorKind::Refused, message))
        }
        Err(error) => Err(unavailable(error)),
    }
}
