//! Volumes: made, shown, deleted.

use weir_cluster::records::{DiskRecord, Record, UnfinishedRecord, VolumeKind, VolumeRecord, keys};
use weir_cluster::registry::{RegistryError, Transaction};
use weir_volume::DirVolume;

use super::{Answer, Operations, check_named};
use crate::api::{ApiError, ApiErrorKind, CreateVolume, DeleteVolume, DeletedVolume, VolumeView};
use crate::control::node::{blocking, random, unavailable};

/// Disks that a refusal names.
const NAMED: usize = 5;

impl Operations {
    /// All volumes.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn volumes(&self) -> Answer<Vec<VolumeView>> {
        Ok(self.volume_records().await?.iter().map(|record| self.volume_view(record)).collect())
    }

    async fn volume_records(&self) -> Answer<Vec<VolumeRecord>> {
        let volumes = self.node.registry.list(keys::VOLUMES).await.map_err(unavailable)?;
        Ok(volumes.entries.iter().filter_map(|entry| VolumeRecord::of(entry).ok()).collect())
    }

    fn volume_view(&self, record: &VolumeRecord) -> VolumeView {
        VolumeView {
            name: record.name.clone(),
            kind: "dir".to_owned(),
            path: record.path.clone(),
            disks: self.node.world.disks.now().values().filter(|disk| disk.volume == record.name).count(),
        }
    }

    /// Makes a volume.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn create_volume(&self, wanted: CreateVolume) -> Answer<VolumeView> {
        let invalid = |message: String| ApiError::new(ApiErrorKind::Invalid, message);
        check_named(&wanted.name)?;
        if wanted.kind != "dir" {
            return Err(invalid(format!("{:?} is not a kind of volume; use dir", wanted.kind)));
        }
        let mut record =
            VolumeRecord { name: wanted.name, kind: VolumeKind::Dir, path: wanted.path, id: random() };
        record.check().map_err(|error| invalid(error.to_string()))?;
        let known = self.volume_records().await?;
        if known.iter().any(|other| other.name == record.name) {
            return Err(exists(&record.name));
        }
        let (path, new) = (record.path.clone(), record.id);
        let others: Vec<_> = known.into_iter().map(|other| (other.name, other.path)).collect();
        let identified = self.bounded(blocking(move || {
            let volume = DirVolume::open_new(path)?;
            for (name, path) in &others {
                volume.check_other(name, path)?;
            }
            volume.identify(new)
        }));
        record.id = identified.await.map_err(|error| match error.kind {
            ApiErrorKind::NotFound => error
                .hint("the directory must exist, on this node and on every other that is to serve its disks"),
            _ => error,
        })?;
        match self.node.registry.transact(record.create(keys::volume(&record.name))).await {
            Ok(_) => {
                self.node.journal.tell("volume-created", &record.name, record.path.display().to_string());
                Ok(self.volume_view(&record))
            }
            Err(RegistryError::Conflict { .. }) => Err(exists(&record.name)),
            Err(error) => Err(unavailable(error)),
        }
    }

    /// Deletes a volume that has no disks, or says what would be deleted. Its directory stays, without the volume's mark.
    ///
    /// # Errors
    /// As [`Operations::disks`]; there are disks in it.
    pub async fn delete_volume(&self, name: &str, wanted: DeleteVolume) -> Answer<DeletedVolume> {
        check_named(name)?;
        let entry = self.node.registry.get(&keys::volume(name)).await.map_err(unavailable)?;
        let entry = entry.ok_or_else(|| {
            ApiError::new(ApiErrorKind::NotFound, format!("there is no volume {name}"))
                .hint("`weir volume list` shows those that there are")
        })?;
        let record = VolumeRecord::of(&entry)
            .map_err(|error| ApiError::new(ApiErrorKind::Failed, error.to_string()))?;
        let disks = self.disks_in(name).await?;
        if !disks.is_empty() {
            let more = disks.len().saturating_sub(NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let named = disks[..disks.len().min(NAMED)].join(", ");
            let message = format!("volume {name} has disks in it: {named}{more}");
            return Err(ApiError::new(ApiErrorKind::Refused, message).hint("delete them first"));
        }
        let deleted =
            DeletedVolume { volume: name.to_owned(), path: record.path.clone(), done: !wanted.dry_run };
        if wanted.dry_run {
            return Ok(deleted);
        }
        let gone =
            Transaction::new().unchanged(entry.key.clone(), entry.mod_revision).delete(entry.key.clone());
        match self.node.registry.transact(gone).await {
            Ok(_) => {}
            Err(RegistryError::Conflict { .. }) => {
                let message = format!("volume {name} has just been changed");
                return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"));
            }
            Err(error) => return Err(unavailable(error)),
        }
        // A disk that was begun in between: the volume stays.
        if let Some(disk) = self.disks_in(name).await?.first() {
            let back = self.node.registry.transact(record.create(keys::volume(name))).await;
            back.map_err(unavailable)?;
            let message = format!("disk {disk} has just been made in volume {name}");
            return Err(ApiError::new(ApiErrorKind::Refused, message).hint("delete it first"));
        }
        // The volume is gone whatever becomes of its mark: another volume may be made in the directory, and takes the mark over.
        let (path, id) = (record.path.clone(), record.id);
        let unmarked = self.bounded(blocking(move || DirVolume::open_as(path, id)?.forget_identity()));
        if let Err(error) = unmarked.await {
            tracing::info!(volume = name, %error, "the mark in the directory stays");
        }
        self.node.journal.tell("volume-deleted", name, format!("{} stays", record.path.display()));
        Ok(deleted)
    }

    /// The disks of a volume, also those that are being made or deleted.
    async fn disks_in(&self, volume: &str) -> Answer<Vec<String>> {
        let disks = self.node.registry.list(keys::DISKS).await.map_err(unavailable)?;
        let unfinished = self.node.registry.list(keys::UNFINISHED).await.map_err(unavailable)?;
        let mut names = Vec::new();
        for entry in disks.entries {
            match DiskRecord::of(&entry) {
                Ok(disk) if disk.volume == volume => names.push(disk.name),
                Ok(_) => {}
                // It may be in this volume.
                Err(_) => names.push(entry.key),
            }
        }
        let unfinished = unfinished.entries.iter().filter_map(|entry| UnfinishedRecord::of(entry).ok());
        names.extend(unfinished.filter(|disk| disk.volume == volume).map(|disk| disk.disk));
        Ok(names)
    }
}

fn exists(name: &str) -> ApiError {
    ApiError::new(ApiErrorKind::Exists, format!("there is a volume {name} already"))
}
