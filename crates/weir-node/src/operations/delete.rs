//! Deletion of disks.

use std::path::PathBuf;
use std::time::Duration;

use weir_cluster::ownership;
use weir_cluster::records::{DiskRecord, Mode, VolumeKind, keys};

use super::{Answer, Operations, check_named, ownership_error};
use crate::api::{ApiError, ApiErrorKind, Delete, Deleted, Snapshots};
use crate::control::change::read;
use crate::control::decide::is_live;
use crate::control::disk::Request;
use crate::control::node::unavailable;
use crate::control::provisioning;
use crate::control::{grants, hearing};
use crate::units::{about, count_are};

/// Longest wait for the list of a disk's snapshots before it is closed.
const SNAPSHOTS: Duration = Duration::from_secs(2);

impl Operations {
    /// Deletes a disk and its data, or says what would be deleted.
    ///
    /// # Errors
    /// As [`Operations::disks`].
    pub async fn delete(&self, name: &str, wanted: Delete) -> Answer<Deleted> {
        check_named(name)?;
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
        self.check_no_snapshots(name).await?;
        if let Some(owner) = self.owner_elsewhere(name).await? {
            return self.forward(&owner, name, "delete", &wanted).await;
        }
        if record.owner.is_none()
            && let Some(coordinator) = self.coordinated_elsewhere(&record.volume).await?
        {
            return self.forward(&coordinator, name, "delete", &wanted).await;
        }
        self.check_not_serving(&record).await?;
        let place = self.node.place_of(&record).await;
        let place = place.map_err(|reason| ApiError::new(ApiErrorKind::Failed, reason))?;
        let path = PathBuf::from(place.backing.to_string());
        let allocated = self.allocated(&record, false).await;
        let lost = self.lost_with(&record).await;
        self.check_deletable(&record, lost.as_deref(), wanted.force).await?;
        let lost_text = lost.clone().unwrap_or_default();
        let deleted =
            Deleted { disk: name.to_owned(), path, allocated, lost: lost_text, done: !wanted.dry_run };
        if wanted.dry_run {
            return Ok(deleted);
        }
        if let Some(lost) = lost {
            self.ask(name, |done| Request::DeleteUnopened { lost, done }).await?;
        } else {
            if record.owner.as_ref() == Some(&self.me()) {
                self.ask(name, |done| Request::Release { done }).await?;
            }
            if let Some(coordinator) = self.coordinated_elsewhere(&record.volume).await? {
                return self.forward(&coordinator, name, "delete", &wanted).await;
            }
            self.remove(name, wanted.force).await?;
        }
        Ok(deleted)
    }

    /// Before its clients lose it for nothing. Whoever removes the file looks again.
    async fn check_no_snapshots(&self, name: &str) -> Answer<()> {
        let found = tokio::time::timeout(SNAPSHOTS, self.snapshots(name)).await;
        let Ok(Ok(Snapshots { snapshots })) = found else { return Ok(()) };
        let names: Vec<String> = snapshots.into_iter().map(|one| one.name).collect();
        provisioning::check_no_snapshots(name, &names)
    }

    /// Removes the remains of a disk without a record that a process has left when it ended.
    async fn delete_leftover(&self, name: &str) -> Answer<Option<Deleted>> {
        let path = provisioning::finish_others(&self.node, name).await?;
        let deleted =
            |path| Deleted { disk: name.to_owned(), path, allocated: None, lost: String::new(), done: true };
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

    async fn check_deletable(&self, record: &DiskRecord, lost: Option<&str>, force: bool) -> Answer<()> {
        if force {
            return Ok(());
        }
        let refuse = |reason: String| {
            Err(ApiError::new(ApiErrorKind::Refused, format!("disk {}: {reason}", record.name))
                .hint("--force deletes it all the same"))
        };
        if let Some(lost) = lost {
            return refuse(format!("it cannot be opened, and a deletion loses {lost}"));
        }
        let mine = record.owner.as_ref() == Some(&self.me());
        let statuses = self.node.shards.status().await;
        let clients = statuses.iter().find(|status| status.disk == record.name && status.role == "owner");
        match (&record.owner, clients.map_or(0, |status| status.clients)) {
            (Some(_), clients @ 1..) if mine => {
                refuse(format!("{} connected to it", count_are(clients as u64, "client")))
            }
            (Some(owner), _) if !mine => {
                refuse(format!("its owner {owner} is gone; writes in its log may be lost"))
            }
            _ => Ok(()),
        }
    }

    /// Only while it has no owner: a node may have opened it since the check.
    async fn remove(&self, name: &str, force: bool) -> Answer<()> {
        let (entry, record) = read(&*self.node.registry, name).await?;
        let owner_lives =
            record.owner.as_ref().is_some_and(|owner| is_live(&self.node.records.nodes.now(), owner));
        if let Some(owner) = record.owner.clone().filter(|_| owner_lives || !force) {
            return Err(ownership_error(ownership::Refusal::Owned { owner }));
        }
        self.check_not_serving(&record).await?;
        let is_on_lun = self.node.volume(&record.volume).await?.kind == VolumeKind::Lun;
        if is_on_lun && !record.former.is_empty() {
            // Its blocks would be another disk's, while they write there (I4).
            let message = format!("former owners of disk {name} may still write to its blocks on the LUN");
            let hint =
                format!("`weir disk export {name}` opens it; when it is closed again, it can be deleted");
            return Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint));
        }
        provisioning::remove(&self.node, &entry, &record, String::new()).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weir_cluster::membership::declare_stopped;
    use weir_cluster::records::NodeRef;

    use super::*;
    use crate::control::disk::tests::{disk_of_a, node};
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
        let wanted = |dry_run| Delete { name: "d".into(), force: true, dry_run };
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
}
