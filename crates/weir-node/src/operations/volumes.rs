//! Volumes: made, shown, deleted.

use std::collections::BTreeSet;

use weir_cluster::records::{
    CoordinatorRecord, DiskRecord, Record, UnfinishedRecord, VolumeKind, VolumeRecord, keys,
};
use weir_cluster::registry::{Entry, RegistryError, Transaction};
use weir_volume::DirVolume;

use super::owners::Known;
use super::setups::{self, Setup};
use super::{Answer, Operations, check_named};
use crate::api::{ApiError, ApiErrorKind, CreateVolume, DeleteVolume, DeletedVolume, FilesView, VolumeView};
use crate::control::node::{blocking, random, unavailable};

/// Disks that a refusal names.
const NAMED: usize = 5;

impl Operations {
    /// All volumes; while the registry is away, as last read.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn volumes(&self) -> Answer<Vec<VolumeView>> {
        let (volumes, disks) = tokio::join!(self.ask_registry(keys::VOLUMES), self.ask_registry(keys::DISKS));
        let (Ok(volumes), Ok(disks)) = (volumes, disks) else {
            return Ok(self
                .node
                .records
                .volumes
                .now()
                .values()
                .map(|record| self.volume_view(record))
                .collect());
        };
        let disks = disks.entries.iter().filter_map(|entry| DiskRecord::of(entry).ok());
        let disks: Vec<DiskRecord> = disks.collect();
        let full = self.without_space(&disks).await;
        let volumes = volumes.entries.iter().filter_map(|entry| VolumeRecord::of(entry).ok());
        let view = |record: VolumeRecord| VolumeView {
            disks: disks.iter().filter(|disk| disk.volume == record.name).count(),
            full_for: full
                .iter()
                .filter(|disk| disk.volume == record.name)
                .map(|disk| disk.name.clone())
                .collect(),
            ..self.volume_view(&record)
        };
        let mut known = self.coordinations().await;
        let view = |record: VolumeRecord| VolumeView {
            lun: self.lun_view(&record, known.remove(&record.name)),
            ..view(record)
        };
        Ok(volumes.map(view).collect())
    }

    /// The disks whose owners say that their volume is full.
    async fn without_space<'a>(&self, disks: &'a [DiskRecord]) -> Vec<&'a DiskRecord> {
        let owners = disks.iter().filter_map(|disk| disk.owner.clone()).collect();
        let own = self.owned_of(self.node.shards.status().await).await;
        let said = self.ask_owners(owners, own).await;
        let is_full = |disk: &&DiskRecord| {
            disk.owner.as_ref().is_some_and(|owner| match said.of(owner, &disk.name) {
                Known::Open(status) => status.is_full,
                Known::NotOpen { .. } | Known::Silent => false,
            })
        };
        disks.iter().filter(is_full).collect()
    }

    pub(super) async fn volume_records(&self) -> Answer<Vec<VolumeRecord>> {
        let volumes = self.node.registry.list(keys::VOLUMES).await.map_err(unavailable)?;
        Ok(volumes.entries.iter().filter_map(|entry| VolumeRecord::of(entry).ok()).collect())
    }

    /// The registry's entry of a volume.
    pub(super) async fn volume_entry(&self, name: &str) -> Answer<(Entry, VolumeRecord)> {
        let entry = self.node.registry.get(&keys::volume(name)).await.map_err(unavailable)?;
        let entry = entry.ok_or_else(|| {
            ApiError::new(ApiErrorKind::NotFound, format!("there is no volume {name}"))
                .hint("`weir volume list` shows those that there are")
        })?;
        let record = VolumeRecord::of(&entry)
            .map_err(|error| ApiError::new(ApiErrorKind::Failed, error.to_string()))?;
        Ok((entry, record))
    }

    pub(super) fn volume_view(&self, record: &VolumeRecord) -> VolumeView {
        let kind = match record.kind {
            VolumeKind::Dir => "dir",
            VolumeKind::Lun => "lun",
            VolumeKind::Nbd => "nbd",
            _ => "unknown",
        };
        VolumeView {
            name: record.name.clone(),
            kind: kind.to_owned(),
            path: record.path.clone(),
            server: record.nbd.as_ref().map(|nbd| nbd.server.clone()),
            exports: None,
            disks: self.node.records.disks.now().values().filter(|disk| disk.volume == record.name).count(),
            full_for: Vec::new(),
            lun: None,
            files: self.node.config.fuse.directory.as_ref().map(|directory| FilesView {
                path: directory.join(&record.name),
                transport: weir_export::fuse::TRANSPORT.to_owned(),
            }),
        }
    }

    /// Makes a volume.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn create_volume(&self, wanted: CreateVolume) -> Answer<VolumeView> {
        let invalid = |message: String| ApiError::new(ApiErrorKind::Invalid, message);
        check_named(&wanted.name)?;
        self.check_cluster()?;
        if wanted.kind == "lun" {
            return self.create_lun(wanted).await;
        }
        if wanted.kind == "nbd" {
            return self.create_nbd(wanted).await;
        }
        check_dir(&wanted)?;
        let mut record = VolumeRecord::dir(wanted.name, wanted.path, random());
        record.check().map_err(|error| invalid(error.to_string()))?;
        let known = self.volume_records().await?;
        if known.iter().any(|other| other.name == record.name) {
            return Err(exists(&record.name));
        }
        let (path, new) = (record.path.clone(), record.id);
        let others = known.iter().filter(|other| other.nbd.is_none());
        let others: Vec<_> = others.map(|other| (other.name.clone(), other.path.clone())).collect();
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
        // The same storage under another device number: a second mount, or a mount of another node.
        if let Some(other) = known.iter().find(|other| other.id == record.id) {
            return Err(same_volume(&record, &other.name));
        }
        self.register(record, None).await
    }

    /// Puts a new volume's record into the registry, if neither its name nor its identity is taken; in place of its setup.
    pub(super) async fn register(
        &self,
        record: VolumeRecord,
        setup: Option<&Setup<'_>>,
    ) -> Answer<VolumeView> {
        let id = keys::volume_id(record.id);
        let create =
            record.create(keys::volume(&record.name)).absent(id.clone()).put(id.clone(), &*record.name);
        let create = match setup {
            Some(setup) => setup.commit(create),
            None => create,
        };
        match self.node.registry.transact(create).await {
            Ok(_) => {
                self.node.journal.tell("volume-created", &record.name, record.place());
                Ok(self.volume_view(&record))
            }
            Err(RegistryError::Conflict { .. }) => {
                let other = self.node.registry.get(&id).await.map_err(unavailable)?;
                let other = other.map(|entry| String::from_utf8_lossy(&entry.value).into_owned());
                let named = self.node.registry.get(&keys::volume(&record.name)).await.map_err(unavailable)?;
                Err(match other.filter(|other| *other != record.name) {
                    Some(other) => same_volume(&record, &other),
                    None if setup.is_some() && named.is_none() => setups::lost(&record),
                    None => exists(&record.name),
                })
            }
            Err(error) => Err(unavailable(error)),
        }
    }

    /// Deletes a volume without disks, or reports what it would delete. Its directory stays, with the volume's mark: a volume that
    /// is created there later takes the mark over.
    ///
    /// # Errors
    /// As [`Operations::disks`]; there are disks in it.
    pub async fn delete_volume(&self, name: &str, wanted: DeleteVolume) -> Answer<DeletedVolume> {
        check_named(name)?;
        let (entry, record) = self.volume_entry(name).await?;
        let disks = self.disks_in(name).await?;
        let what = match record.kind {
            VolumeKind::Lun => "the filesystem on its LUN stays",
            VolumeKind::Nbd => "the server stays as it is",
            _ => "its directory stays",
        };
        if !disks.is_empty() {
            let message = format!("volume {name} has disks in it: {}", named(disks.into_iter().collect()));
            return Err(ApiError::new(ApiErrorKind::Refused, message).hint("delete them first"));
        }
        let coordinated = self.check_unmounted(&record).await?;
        let deleted =
            DeletedVolume { volume: name.to_owned(), path: record.place().into(), done: !wanted.dry_run };
        if wanted.dry_run {
            return Ok(deleted);
        }
        // The creation of a disk rewrites the volume's record. So if one was begun since that was read, this fails.
        let gone = coordinated
            .unchanged(entry.key.clone(), entry.mod_revision)
            .delete(entry.key.clone())
            .delete(keys::volume_id(record.id));
        match self.node.registry.transact(gone).await {
            Ok(_) => {}
            Err(RegistryError::Conflict { .. }) => {
                return Err(just_changed(name));
            }
            Err(error) => return Err(unavailable(error)),
        }
        self.node.journal.tell("volume-deleted", name, format!("{}: {what}", record.place()));
        Ok(deleted)
    }

    /// Refuses to delete a volume on a LUN that a node may have mounted which is down: nobody would fence it any more, and whatever is made of
    /// the LUN next would not know of it. A node that is there unmounts the filesystem when the volume is gone; a former process of it is no
    /// reason, because its mount has ended with it. Returns the condition that nothing of that has changed.
    async fn check_unmounted(&self, record: &VolumeRecord) -> Answer<Transaction> {
        let (key, unconditional) = (keys::coordinator(record.id), Transaction::new());
        if record.kind != VolumeKind::Lun {
            return Ok(unconditional);
        }
        let Some(entry) = self.node.registry.get(&key).await.map_err(unavailable)? else {
            return Ok(unconditional.absent(key));
        };
        let Ok(found) = CoordinatorRecord::of(&entry) else { return Ok(unconditional) };
        let nodes = self.node.records.nodes.now();
        let Some(lost) = found.mounts.iter().find(|one| !nodes.contains_key(&one.node)) else {
            return Ok(unconditional.unchanged(key, entry.mod_revision));
        };
        let name = &record.name;
        let message = format!("volume {name}: {lost} is gone, and may still have its filesystem mounted");
        Err(ApiError::new(ApiErrorKind::Refused, message).hint(format!(
            "the next node that coordinates it fences that one first: `weir volume show {name}`; or `weir volume confirm-fenced {name} {}`, if its \
             host is certainly off",
            lost.node
        )))
    }

    /// The disks of a volume, also those that are being created or deleted. The creation of a disk replaces a note by a record, the
    /// deletion a record by a note: reading the notes before and after the records misses neither.
    async fn disks_in(&self, volume: &str) -> Answer<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        for prefix in [keys::UNFINISHED, keys::DISKS, keys::UNFINISHED] {
            for entry in self.node.registry.list(prefix).await.map_err(unavailable)?.entries {
                let read = match prefix {
                    keys::DISKS => DiskRecord::of(&entry).map(|disk| (disk.volume, disk.name)),
                    _ => UnfinishedRecord::of(&entry).map(|note| (note.volume, note.disk)),
                };
                match read {
                    Ok((of, disk)) if of == volume => drop(names.insert(disk)),
                    Ok(_) => {}
                    // It may be in this volume.
                    Err(_) => drop(names.insert(entry.key)),
                }
            }
        }
        Ok(names)
    }
}

/// A wish for a volume in a directory has nothing that only a LUN has.
pub(super) fn check_dir(wanted: &CreateVolume) -> Answer<()> {
    let invalid = |message: String| Err(ApiError::new(ApiErrorKind::Invalid, message));
    match wanted {
        CreateVolume { kind, .. } if kind != "dir" => {
            invalid(format!("{kind:?} is not a kind of volume; use dir, lun or nbd"))
        }
        CreateVolume { server: Some(_), .. } => {
            invalid("a directory has no server; that is for --kind nbd".into())
        }
        CreateVolume { path, .. } if path.as_os_str().is_empty() => {
            invalid("a directory has a path: add --path".into())
        }
        CreateVolume { format: None, identity: None, destroy: false, .. } => Ok(()),
        CreateVolume { .. } => invalid(
            "a directory has no format, no identity and nothing to destroy; they are for --kind lun".into(),
        ),
    }
}

/// What a volume is, for sentences.
pub(super) fn noun(kind: VolumeKind) -> &'static str {
    match kind {
        VolumeKind::Dir => "a directory",
        VolumeKind::Lun => "a LUN",
        VolumeKind::Nbd => "an NBD server",
        _ => "of an unknown kind",
    }
}

/// Two volumes must not share a directory, or a LUN.
pub(super) fn same_volume(record: &VolumeRecord, other: &str) -> ApiError {
    if record.kind == VolumeKind::Nbd {
        let message = format!("{} is volume {other} already", record.place());
        return ApiError::new(ApiErrorKind::Exists, message).hint("make its exports disks of that volume");
    }
    if record.kind == VolumeKind::Lun {
        let message = format!("the filesystem on {} is that of volume {other}", record.path.display());
        return ApiError::new(ApiErrorKind::Exists, message).hint(
            "if it is a copy of that LUN, give it another identity (xfs_admin -U, tune2fs -U), and try again",
        );
    }
    let message = format!("{} is the directory of volume {other}", record.path.display());
    ApiError::new(ApiErrorKind::Exists, message)
        .hint("if it is a copy of that directory, remove the file .weir-volume from it, and try again")
}

/// The first disks that a refusal is about, and how many more there are.
pub(super) fn named(disks: Vec<String>) -> String {
    let more = disks.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let named = disks.into_iter().take(NAMED).collect::<Vec<_>>().join(", ");
    format!("{named}{more}")
}

/// Somebody else has changed the volume's record meanwhile.
pub(super) fn just_changed(name: &str) -> ApiError {
    let message = format!("volume {name} has just been changed, or a disk made in it");
    ApiError::new(ApiErrorKind::Unavailable, message).hint("try again")
}

pub(super) fn exists(name: &str) -> ApiError {
    ApiError::new(ApiErrorKind::Exists, format!("there is a volume {name} already"))
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use weir_cluster::records::{Policy, Source, Step};

    use super::*;
    use crate::control::Node;
    use crate::control::disk::tests::node_at;
    use crate::control::faulty_registry::RegistryFaults;
    use crate::control::provisioning::in_volume;

    async fn operations(directory: &Path) -> (Operations, Arc<Node>, Arc<RegistryFaults>) {
        let faults = Arc::new(RegistryFaults::default());
        let (node, mut told) = node_at(directory, Arc::clone(&faults)).await;
        tokio::spawn(async move { while told.recv().await.is_some() {} });
        (Operations::new(Arc::clone(&node), Arc::default(), Arc::default()), node, faults)
    }

    fn wanted(name: &str, path: &Path) -> CreateVolume {
        CreateVolume::dir(name, path.to_owned())
    }

    fn new_directory(parent: &Path, name: &str) -> PathBuf {
        let path = parent.join(name);
        std::fs::create_dir(&path).unwrap();
        path
    }

    /// Another process creates or deletes a disk in two steps; each happens after a number of listings of the volume's deletion.
    #[tokio::test]
    async fn no_disk_is_ever_left_without_its_volume() {
        const LISTINGS: usize = 3;
        let directory = tempfile::tempdir().unwrap();
        let (operations, node, faults) = operations(directory.path()).await;
        let path = new_directory(directory.path(), "volume");
        let mut outcomes = BTreeSet::new();
        let orders = (0..=LISTINGS).flat_map(|first| (first..=LISTINGS).map(move |second| (first, second)));
        for ((first, second), is_deletion) in orders.flat_map(|order| [(order, false), (order, true)]) {
            operations.create_volume(wanted("v", &path)).await.unwrap();
            let entry = node.registry.get(&keys::volume("v")).await.unwrap().unwrap();
            let source = Source::File { name: "d".into() };
            let disk = DiskRecord::new("d", "v", source, 4096, 512, Policy::WriteThrough);
            let (key, note_key) = (keys::disk("d"), keys::unfinished("d"));
            let step = if is_deletion { Step::Removing } else { Step::Making };
            let by = node.session.node_ref();
            let note = UnfinishedRecord {
                disk: "d".into(),
                volume: "v".into(),
                step,
                by,
                lost: String::new(),
                clone: 0,
            };
            let steps = if is_deletion {
                node.registry.transact(disk.create(key.clone())).await.unwrap();
                let begin = note.create(note_key.clone()).delete(key.clone());
                [begin, Transaction::new().delete(note_key.clone())]
            } else {
                let begin = in_volume(&entry).absent(note_key.clone()).put(note_key.clone(), note.encode());
                [begin, disk.create(key.clone()).delete(note_key.clone())]
            };
            let mut plan = vec![Vec::new(); LISTINGS + 1];
            for (at, step) in [first, second].into_iter().zip(steps) {
                plan[at].push(step);
            }
            for before in plan.remove(0) {
                node.registry.transact(before).await.unwrap();
            }
            faults.after_listing.lock().unwrap().extend(plan);
            let deleted = operations.delete_volume("v", DeleteVolume::default()).await;
            faults.after_listing.lock().unwrap().clear();
            let mut left = Vec::new();
            for key in [keys::volume("v"), key, note_key] {
                left.extend(node.registry.get(&key).await.unwrap().map(|entry| entry.key));
            }
            let what = format!("{is_deletion} after {first} and {second}: {deleted:?}, {left:?}");
            assert_eq!(deleted.is_ok(), !left.contains(&keys::volume("v")), "{what}");
            assert!(deleted.is_err() || left.is_empty(), "{what}");
            outcomes.insert(deleted.map_or_else(|error| format!("{:?}", error.kind), |_| "deleted".into()));
            let ids = node.registry.list(keys::VOLUME_IDS).await.unwrap();
            assert_eq!(ids.entries.len(), usize::from(left.contains(&keys::volume("v"))), "{what}");
            for key in left.into_iter().chain(ids.entries.into_iter().map(|id| id.key)) {
                node.registry.transact(Transaction::new().delete(key)).await.unwrap();
            }
        }
        assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), ["Refused", "Unavailable", "deleted"]);
    }

    #[tokio::test]
    async fn two_volumes_never_share_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        let (operations, ..) = operations(directory.path()).await;
        let path = new_directory(directory.path(), "volume");
        let both = tokio::join!(
            operations.create_volume(wanted("v1", &path)),
            operations.create_volume(wanted("v2", &path))
        );
        let (created, refused) = match both {
            (Ok(created), Err(refused)) | (Err(refused), Ok(created)) => (created, refused),
            both => panic!("{both:?}"),
        };
        assert_eq!(refused.kind, ApiErrorKind::Exists, "{refused:?}");
        assert!(refused.message.contains(&created.name), "{refused}");
        // The same storage under another device number looks like another directory with the same mark.
        let copy = new_directory(directory.path(), "copy");
        std::fs::copy(path.join(".weir-volume"), copy.join(".weir-volume")).unwrap();
        let refused = operations.create_volume(wanted("v3", &copy)).await.unwrap_err();
        assert!(refused.message.contains(&created.name), "{refused}");
        // The directory keeps its mark, and can be a volume again.
        operations.delete_volume(&created.name, DeleteVolume::default()).await.unwrap();
        assert!(path.join(".weir-volume").exists());
        operations.create_volume(wanted("v4", &path)).await.unwrap();
        let again = operations.create_volume(wanted("v4", &path)).await.unwrap_err();
        assert!(again.message.contains("there is a volume v4"), "{again}");
        std::fs::write(copy.join(".weir-volume"), "no number").unwrap();
        let refused = operations.create_volume(wanted("v3", &copy)).await.unwrap_err();
        assert!(refused.message.contains("is not the mark"), "{refused}");
    }

    #[tokio::test]
    async fn volumes_are_shown_while_the_registry_is_away() {
        let directory = tempfile::tempdir().unwrap();
        let (operations, node, faults) = operations(directory.path()).await;
        let path = new_directory(directory.path(), "volume");
        let created = operations.create_volume(wanted("v", &path)).await.unwrap();
        let mut volumes = node.records.volumes.changes();
        volumes.wait_for(|known| known.contains_key("v")).await.unwrap();
        assert_eq!(operations.volumes().await.unwrap(), std::slice::from_ref(&created));
        faults.away.store(true, Ordering::Relaxed);
        assert_eq!(operations.volumes().await.unwrap(), [created]);
    }
}
