//! Deletion of disks.

use std::path::PathBuf;
use std::time::Duration;

use weir_cluster::ownership;
use weir_cluster::records::{DiskRecord, Mode, NodeRef, Source, VolumeKind, keys};

use super::imports::check_import;
use super::{Answer, Operations, check_named, ownership_error};
use crate::api::{ApiError, ApiErrorKind, Delete, Deleted, Export, Snapshots};
use crate::control::change::read;
use crate::control::decide::is_live;
use crate::control::disk::Request;
use crate::control::node::unavailable;
use crate::control::provisioning;
use crate::control::{grants, hearing, readers};
use crate::shard::messages::DiskStatus;
use crate::units::about;

/// Longest wait for the list of a disk's snapshots before it is closed.
const SNAPSHOTS: Duration = Duration::from_secs(2);

/// Longest wait for a disk to be destaged before it is deleted: a client waits for a minute.
const DESTAGED: Duration = Duration::from_secs(45);

impl Operations {
    /// Deletes a disk and its data, or says what would be deleted.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn delete(&self, name: &str, wanted: Delete) -> Answer<Deleted> {
        check_named(name)?;
        let wanted = Delete { force: wanted.force || wanted.discard, ..wanted };
        if wanted.name != name && !wanted.force && !wanted.dry_run {
            let message = match wanted.name.as_str() {
                "" => format!("the request to delete disk {name} does not repeat its name"),
                other => format!("the request to delete disk {name} names disk {other:?}"),
            };
            return Err(ApiError::new(ApiErrorKind::Invalid, message)
                .hint("set \"name\" to the disk's name, or \"force\" to true"));
        }
        let record = match self.record(name).await {
            Err(error) if error.kind == ApiErrorKind::NotFound && !wanted.dry_run => {
                return self.delete_leftover(name).await?.ok_or(error);
            }
            record => record?,
        };
        if let Some(number) = wanted.import {
            check_import(&record, number)?;
        }
        self.check_no_snapshots(&record).await?;
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return self.forward(&owner, name, "delete", &wanted).await;
        }
        self.check_not_serving(&record).await?;
        // Also if its owner is gone: whoever removes the file finds out what is over of that owner's I/O.
        if record.owner.as_ref() != Some(&self.me()) {
            if let Some(coordinator) = self.coordinated_elsewhere(&record.volume).await? {
                return self.forward(&coordinator, name, "delete", &wanted).await;
            }
            self.check_coordinated(&record.volume).await?;
        }
        if !wanted.dry_run {
            self.check_former(&record).await?;
        }
        let place = self.node.place_of(&record).await;
        let place = place.map_err(|reason| ApiError::new(ApiErrorKind::Failed, reason))?;
        let path = PathBuf::from(place.backing.to_string());
        let allocated = self.allocated(&record, false).await;
        let unopened = self.lost_with(&record).await;
        let open = self.open_here(&record).await;
        self.check_deletable(&record, unopened.as_deref(), open.as_ref(), wanted.force)?;
        let clients = open.as_ref().map_or(0, |status| status.clients);
        let connected = match clients {
            0 => String::new(),
            clients => readers::connected(&self.node, name, clients),
        };
        // Whether the storage takes what is left is for the operator to judge: it may be slow, or wait for a former owner's last I/O.
        let discards = wanted.discard || wanted.force && !outlives(&record);
        let undestaged = open.filter(|_| discards).map(|status| not_destaged(&status));
        // Nobody has been promised what an incomplete disk has.
        let is_whole = record.importing == 0;
        let lost = unopened.or(undestaged).map(|lost| if is_whole { lost } else { String::new() });
        let lost_text = lost.clone().unwrap_or_default();
        let (disk, done) = (name.to_owned(), !wanted.dry_run);
        let stays = outlives(&record);
        let deleted = Deleted { disk, path, stays, allocated, lost: lost_text, connected, done };
        if wanted.dry_run {
            return Ok(deleted);
        }
        if let Some(lost) = lost {
            let (unless_open, id) = (!discards, record.id);
            self.ask(name, |done| Request::DeleteUndestaged { id, lost, unless_open, done }).await?;
            self.finish_removal(&record, &wanted).await?;
        } else {
            if record.owner.as_ref() == Some(&self.me()) {
                let at_once = by_loss(&record);
                let otherwise = format!(
                    "delete it again later, or with {at_once} at once, without what its log alone has"
                );
                self.release(name, !wanted.force, &otherwise).await?;
            }
            if let Some(coordinator) = self.coordinated_elsewhere(&record.volume).await? {
                return self.forward(&coordinator, name, "delete", &wanted).await;
            }
            self.remove(&record, &wanted).await?;
        }
        Ok(deleted)
    }

    /// Before the disk is closed for nothing: only an owner finds out that the I/O of former ones has ended. Nobody else opens a disk whose
    /// import was cut off, so that this does.
    async fn check_former(&self, record: &DiskRecord) -> Answer<()> {
        let is_gone = |owner: &NodeRef| !is_live(&self.node.records.nodes.now(), owner);
        let unowned = record.owner.as_ref().is_none_or(is_gone);
        let was_cut_off = record.importing != 0 && unowned;
        if record.former.is_empty() && !was_cut_off {
            return Ok(());
        }
        let Err(refused) = provisioning::check_former(&self.node, record).await else { return Ok(()) };
        if was_cut_off {
            // Nobody wants the part of the image in its log.
            let wanted = Export { accept_loss: self.by_node.is_none(), ..Export::default() };
            self.open(&record.name, wanted).await?;
        } else if unowned {
            return Err(refused);
        }
        let grace = self.node.config.lease.fence_grace;
        Err(refused.hint(format!("{} is open, and finds out within {grace}: delete it then", record.name)))
    }

    /// Before its clients lose it for nothing. In a directory, whoever removes the file looks again; on a LUN, a later coordinator
    /// removes the file, and the snapshots would be those of the next disk of the name.
    async fn check_no_snapshots(&self, record: &DiskRecord) -> Answer<()> {
        let name = &record.name;
        let found = tokio::time::timeout(SNAPSHOTS, self.snapshots(name)).await.unwrap_or_else(|_| {
            let message = format!("disk {name}: whether it has snapshots is not known after {SNAPSHOTS:?}");
            Err(ApiError::new(ApiErrorKind::Unavailable, message)
                .hint("check the volume's storage; try again"))
        });
        let Snapshots { snapshots } = match found {
            Ok(found) => found,
            Err(error) => {
                let volume = self.node.volume(&record.volume).await;
                return if volume.is_ok_and(|one| one.kind == VolumeKind::Lun) { Err(error) } else { Ok(()) };
            }
        };
        let names: Vec<String> = snapshots.into_iter().map(|one| one.name).collect();
        provisioning::check_no_snapshots(name, &names)
    }

    /// Destages and closes a disk that is open here, for as long as a client waits. `otherwise`: what the operator can do if that does not
    /// suffice.
    pub(super) async fn release(&self, name: &str, unless_used: bool, otherwise: &str) -> Answer<()> {
        self.check_not_compacting(name)?;
        let release = self.ask(name, |done| Request::Release { unless_used, done });
        if let Ok(released) = tokio::time::timeout(DESTAGED, release).await {
            return released;
        }
        let open = self.node.shards.status().await;
        let open = open.into_iter().find(|status| status.disk == name && status.role == "owner");
        let lost = open.map_or_else(String::new, |status| format!(" ({})", not_destaged(&status)));
        let message = format!("disk {name} has not been destaged within {} s{lost}", DESTAGED.as_secs());
        Err(ApiError::new(ApiErrorKind::Unavailable, message).hint(format!("destaging goes on: {otherwise}")))
    }

    /// The record of a disk on a LUN is gone, and its file is its volume's coordinator's to remove.
    async fn finish_removal(&self, record: &DiskRecord, wanted: &Delete) -> Answer<()> {
        let (name, volume) = (&record.name, &record.volume);
        if self.node.volume(volume).await?.kind != VolumeKind::Lun
            || self.node.coordinators.get(volume).mounted.is_some()
        {
            return Ok(());
        }
        let Some(coordinator) = self.coordinated_elsewhere(volume).await? else {
            let message = format!("disk {name} is deleted, but nobody coordinates volume {volume}");
            return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint(
                "its file is removed, and its space is free, as soon as a node coordinates the volume",
            ));
        };
        // Nothing is left to discard, and a coordinator of an earlier version does not know the word.
        let wanted = Delete { discard: false, ..wanted.clone() };
        match self.forward::<Deleted>(&coordinator, name, "delete", &wanted).await {
            // The coordinator looks for such files by itself, also one on another host, which takes this from nobody but an operator.
            Err(error) if error.kind == ApiErrorKind::NotFound || error.elsewhere.is_some() => Ok(()),
            removed => removed.map(drop),
        }
    }

    /// The status of a disk that is open on this node, its owner.
    pub(super) async fn open_here(&self, record: &DiskRecord) -> Option<DiskStatus> {
        let mine = record.owner.as_ref() == Some(&self.me());
        let statuses = self.node.shards.status().await;
        statuses.into_iter().find(|status| mine && status.disk == record.name && status.role == "owner")
    }

    /// Removes the remains of a disk without a record that a process has left when it ended.
    async fn delete_leftover(&self, name: &str) -> Answer<Option<Deleted>> {
        let path = provisioning::finish_others(&self.node, name).await?;
        let deleted = |path| Deleted {
            disk: name.to_owned(),
            path,
            stays: false,
            allocated: None,
            lost: String::new(),
            connected: String::new(),
            done: true,
        };
        Ok(path.map(deleted))
    }

    /// What a deletion loses apart from the disk's file: this process owns the disk, cannot open its backing, and so cannot
    /// destage its log.
    async fn lost_with(&self, record: &DiskRecord) -> Option<String> {
        if record.owner.as_ref() != Some(&self.me()) {
            return None;
        }
        let reason = self.node.here.unopened(&record.name)?;
        let statuses = self.node.shards.status().await;
        let copy = statuses.iter().find(|status| status.disk == record.name && status.role == "replica");
        let lost = match (record.mode, copy) {
            (Mode::WriteThrough, _) => "what its backing still holds".to_owned(),
            (Mode::WriteBack, Some(copy)) => {
                let dirty = about(copy.dirty_bytes);
                format!(
                    "{dirty} of acknowledged writes, which only its write log has and no storage can take"
                )
            }
            (Mode::WriteBack, None) => "the acknowledged writes that only its write log has".to_owned(),
        };
        Some(format!("{lost}: {reason}"))
    }

    /// Refuses a disk whose owner is isolated, also by force: the owner has no session, and serves its guests on the strength of its
    /// members' grants. They would lose the disk while they use it.
    async fn check_not_serving(&self, record: &DiskRecord) -> Answer<()> {
        let (node, me) = (&self.node, self.me());
        let Some(owner) = record.owner.as_ref().filter(|owner| **owner != me) else { return Ok(()) };
        if is_live(&node.records.nodes.now(), owner) {
            return Ok(());
        }
        if !grants::hears(node, record) && !hearing::others_hear(node, record).await {
            return Ok(());
        }
        // Members hear a process for a moment after its end.
        if node.registry.get(&keys::stopped(owner)).await.map_err(unavailable)?.is_some() {
            return Ok(());
        }
        let message = format!(
            "disk {}: its owner {owner} is isolated and serving: the registry does not hear it, members of the disk's set do",
            record.name
        );
        Err(ApiError::new(ApiErrorKind::Refused, message).hint(format!(
            "reconnect {} to the registry, or stop it; then delete the disk. If it has stopped just now, try again in some seconds",
            owner.node
        )))
    }

    fn check_deletable(
        &self,
        record: &DiskRecord,
        lost: Option<&str>,
        open: Option<&DiskStatus>,
        force: bool,
    ) -> Answer<()> {
        if force {
            return Ok(());
        }
        check_not_moving(record)?;
        let refuse_unless = |flag: &str, reason: String| {
            Err(ApiError::new(ApiErrorKind::Refused, format!("disk {}: {reason}", record.name))
                .hint(format!("{flag} deletes it all the same")))
        };
        let refuse = |reason| refuse_unless("--force", reason);
        if let Some(lost) = lost {
            return refuse(format!("it cannot be opened, and a deletion loses {lost}"));
        }
        let mine = record.owner.as_ref() == Some(&self.me());
        match (&record.owner, open.map_or(0, |status| status.clients)) {
            (Some(_), clients @ 1..) if mine => refuse(readers::connected(&self.node, &record.name, clients)),
            _ if open.is_some_and(is_stuck) => {
                let lost = open.map(not_destaged).unwrap_or_default();
                refuse_unless(
                    by_loss(record),
                    format!("its storage takes nothing, and a deletion loses {lost}"),
                )
            }
            (Some(owner), _) if !mine => {
                refuse(format!("its owner {owner} is gone; writes in its log may be lost"))
            }
            _ => Ok(()),
        }
    }

    /// Only while it has no owner: a node may have opened it since the check.
    async fn remove(&self, seen: &DiskRecord, wanted: &Delete) -> Answer<()> {
        let (entry, record) = read(&*self.node.registry, &seen.name).await?;
        provisioning::check_same(seen.id, &record)?;
        if let Some(number) = wanted.import {
            check_import(&record, number)?;
        }
        let force = wanted.force;
        let owner_lives =
            record.owner.as_ref().is_some_and(|owner| is_live(&self.node.records.nodes.now(), owner));
        if let Some(owner) = record.owner.clone().filter(|_| owner_lives || !force) {
            return Err(ownership_error(ownership::Refusal::Owned { owner }));
        }
        if !force {
            check_not_moving(&record)?;
        }
        self.check_not_serving(&record).await?;
        provisioning::check_former(&self.node, &record).await?;
        self.check_coordinated(&record.volume).await?;
        provisioning::remove(&self.node, &entry, &record, String::new()).await
    }
}

/// Its owner has passed it on, and the node that claims it next reconnects its clients: they use it, and no node can tell how many they are.
fn check_not_moving(record: &DiskRecord) -> Answer<()> {
    let Some(heir) = &record.heir else { return Ok(()) };
    let message = format!("disk {} is being moved to node {}", record.name, heir.node);
    Err(ApiError::new(ApiErrorKind::Unavailable, message)
        .hint("try again when it has arrived; --force deletes it all the same"))
}

/// A device or an export stays when its disk is deleted, and with it everything that is destaged.
fn outlives(record: &DiskRecord) -> bool {
    !matches!(record.source, Source::File { .. })
}

/// The flag that deletes an open disk without destaging.
fn by_loss(record: &DiskRecord) -> &'static str {
    if outlives(record) { "--discard" } else { "--force" }
}

/// Its storage takes nothing. While the disk is being opened, that is not known.
fn is_stuck(status: &DiskStatus) -> bool {
    status.state != DiskStatus::OPENING
        && status.dirty_bytes > 0
        && !status.reason.is_empty()
        && status.destage.time_to_clean_ms.is_none()
}

/// What is lost with the log of a disk that is open.
fn not_destaged(status: &DiskStatus) -> String {
    if status.dirty_bytes == 0 {
        return String::new();
    }
    let why = if status.reason.is_empty() { String::new() } else { format!(": {}", status.reason) };
    format!("{} of acknowledged writes, which are not destaged{why}", about(status.dirty_bytes))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weir_cluster::membership::declare_stopped;
    use weir_cluster::records::NodeRef;

    use super::*;
    use crate::control::disk::tests::{disk_of_a, node, volume_in};
    use crate::control::rights;

    /// Its guests use the disk.
    #[tokio::test]
    async fn a_disk_of_an_isolated_owner_is_not_deleted_even_by_force() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        let record = disk_of_a(&node, |record| {
            record.owner = Some(NodeRef::new("b", 1));
            (record.mode, record.replicas) = (Mode::WriteBack, vec![NodeRef::new("a", 1)]);
        })
        .await;
        let operations = Operations::new(Arc::clone(&node), Arc::default(), Arc::default());
        let wanted = |dry_run| Delete { force: true, dry_run, ..Delete::default() };
        for dry_run in [true, false] {
            node.rights.hear(&rights::key(&record), "b", record.epoch);
            let refused = operations.delete("d", wanted(dry_run)).await.unwrap_err();
            assert_eq!(refused.kind, ApiErrorKind::Refused);
            assert!(refused.message.contains("b#1 is isolated and serving"), "{refused}");
        }
        // Its end is known, or it was heard in an earlier epoch: what is refused now is that its volume does not exist.
        for stopped in [false, true] {
            node.rights.hear(&rights::key(&record), "b", record.epoch - u64::from(!stopped));
            if stopped {
                declare_stopped(&*node.registry, &NodeRef::new("b", 1)).await.unwrap();
            }
            let other = operations.delete("d", wanted(false)).await.unwrap_err();
            assert!(other.message.contains("volume"), "{other}");
        }
    }

    /// Between its owners a disk has no owner and no connection, and its guest uses it all the same.
    #[tokio::test]
    async fn a_disk_that_is_being_moved_is_deleted_only_by_force() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        let volume = volume_in(&node, directory.path()).await;
        volume.create_disk("d", 1 << 20).unwrap();
        let record =
            disk_of_a(&node, |record| (record.owner, record.heir) = (None, Some(NodeRef::new("b", 1)))).await;
        let operations = Operations::new(Arc::clone(&node), Arc::default(), Arc::default());
        let wanted = |force, dry_run| Delete { name: "d".into(), force, dry_run, ..Delete::default() };
        for dry_run in [true, false] {
            let refused = operations.delete("d", wanted(false, dry_run)).await.unwrap_err();
            assert_eq!(refused.kind, ApiErrorKind::Unavailable);
            assert!(refused.message.contains("d is being moved to node b"), "{refused}");
        }
        // It has been passed on since it was looked at.
        let refused = operations.remove(&record, &wanted(false, false)).await.unwrap_err();
        assert!(refused.message.contains("is being moved"), "{refused}");
        // Nor is a disk that has got its name since.
        let before = DiskRecord { id: record.id + 1, ..record };
        let refused = operations.remove(&before, &wanted(true, false)).await.unwrap_err();
        assert!(refused.message.contains("there is another one of this name"), "{refused}");
        assert!(volume.disk_path("d").unwrap().exists());
        operations.delete("d", wanted(true, false)).await.unwrap();
        assert!(!volume.disk_path("d").unwrap().exists());
    }
}
