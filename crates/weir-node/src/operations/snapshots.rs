//! Snapshots of disks, and disks that begin as one.
//!
//! A snapshot is what was acknowledged when it was asked for, while the guest goes on. The disk's owner raises a *barrier*: it brings to the backing what
//! its log has, and nothing from behind that. Then the node that keeps the files copies the disk's file by sharing its blocks; on a LUN its owner gives up all leases
//! before. The copy becomes the snapshot only if the owner says, afterwards, that the barrier has stood all the time.

use std::fs::File;
use std::time::Duration;

use weir_block::IoError;
use weir_cluster::records::{DiskRecord, NodeRef, Source, VolumeKind};
use weir_volume::snapshot::{self, Snapshot, Unfinished};
use weir_volume::{DirVolume, VolumeError};

use super::{Answer, Operations, check_named};
use crate::api::{
    ApiError, ApiErrorKind, Barrier, BarrierStood, CloneDisk, CreateDisk, CreateSnapshot, DeleteSnapshot,
    DiskView, SnapshotView, Snapshots,
};
use crate::control::lun_disks;
use crate::control::node::{blocking, random, volume_error};
use crate::control::provisioning::{Files, Origin, to_its_end};
use crate::shard::barrier::{HELD, REACHED};
use crate::shard::messages::{Command, ServedChange};
use crate::timestamps::rfc3339;

/// Longest time that a snapshot takes, seen from another node or a client.
pub const SNAPSHOT: Duration = Duration::from_secs(REACHED.as_secs() + HELD.as_secs() + 15);

/// The disk as it stands still.
enum Still {
    /// It has no owner, as of this epoch.
    Closed { epoch: u64 },
    /// Its owner has raised a barrier.
    Barrier { owner: NodeRef, number: u64 },
}

impl Operations {
    /// The snapshots of a disk.
    ///
    /// # Errors
    /// As [`Operations::disks`]; nobody coordinates its volume.
    pub async fn snapshots(&self, disk: &str) -> Answer<Snapshots> {
        let record = self.record(disk).await?;
        if let Some(keeper) = self.keeper_elsewhere(&record).await? {
            let nothing: Option<&()> = None;
            return self.forward_within(super::STORAGE, &keeper, disk, "snapshots", nothing).await;
        }
        let found = self.bounded(self.own_snapshots(&record)).await?;
        Ok(Snapshots { snapshots: found.iter().map(view).collect() })
    }

    async fn own_snapshots(&self, record: &DiskRecord) -> Answer<Vec<Snapshot>> {
        let (files, disk) =
            (Files::of(&self.node, self.node.volume(&record.volume).await?), record.name.clone());
        blocking(move || snapshot::list(&*files.open()?, Some(&disk))).await
    }

    /// Makes a snapshot of a disk, in use or not.
    ///
    /// # Errors
    /// As [`Operations::disks`]; its filesystem has no reflinks; there is such a snapshot; the disk is being made, deleted or moved; the storage does
    /// not take what the write log has in time.
    pub async fn create_snapshot(&self, disk: &str, wanted: CreateSnapshot) -> Answer<SnapshotView> {
        let record = self.record(disk).await?;
        check_snapshot(disk, &wanted.name)?;
        is_file(&record)?;
        self.check_blocks(&record).await?;
        if let Some(keeper) = self.keeper_elsewhere(&record).await? {
            return self.forward_within(SNAPSHOT, &keeper, disk, "snapshots", Some(&wanted)).await;
        }
        let operations = self.clone();
        let made = to_its_end(async move { operations.snapshot_here(&record, &wanted.name).await }).await?;
        let text = format!("snapshot {}@{}", made.disk, made.name);
        self.node.journal.tell("snapshot-made", disk, text);
        Ok(view(&made))
    }

    async fn snapshot_here(&self, record: &DiskRecord, name: &str) -> Answer<Snapshot> {
        let (node, disk) = (&self.node, record.name.clone());
        let Some(_step) = node.intents.begin(&disk) else {
            let message =
                format!("disk {disk} is being made or deleted, or another snapshot of it is being made");
            return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"));
        };
        let (number, name) = (random(), name.to_owned());
        let volume = node.volume(&record.volume).await?;
        let files = Files::of(node, volume.clone());
        let unfinished = blocking(move || Unfinished::begin(&*files.open()?, &disk, &name, number)).await?;
        let copied = match unfinished.file.try_clone() {
            Ok(file) => self.copy_at_one_point(record, number, file).await,
            Err(error) => {
                Err(ApiError::new(ApiErrorKind::Failed, format!("no descriptor for a file: {error}")))
            }
        };
        // As it is mounted now: a file of a mount that is gone is left, and its successor is another one.
        let files = Files::of(node, volume);
        match copied {
            Ok(()) => blocking(move || unfinished.finish(&*files.open()?)).await,
            Err(error) => {
                let removed = blocking(move || unfinished.abandon(&*files.open()?)).await;
                if let Err(error) = removed {
                    tracing::warn!(disk = record.name, %error, "the file of a snapshot that was not made is left");
                }
                Err(error)
            }
        }
    }

    /// Makes `copy` share the blocks of a disk's file, as they are at one point in time.
    async fn copy_at_one_point(&self, record: &DiskRecord, number: u64, copy: File) -> Answer<()> {
        let still = self.stand_still(record, number).await?;
        let is_closed = matches!(still, Still::Closed { .. });
        let shared = tokio::time::timeout(HELD, self.share_blocks(&record.name, is_closed, copy)).await;
        let stood = self.go_on(record, still).await;
        let late = || {
            let message =
                format!("disk {}: its owner has not given up its part of the LUN for {HELD:?}", record.name);
            ApiError::new(ApiErrorKind::Unavailable, message)
                .hint("`weir disk show` tells its route; try again")
        };
        shared.unwrap_or_else(|_| Err(late()))?;
        if stood? {
            return Ok(());
        }
        let message = format!("disk {} has not stood still while it was copied", record.name);
        Err(ApiError::new(ApiErrorKind::Unavailable, message)
            .hint("it was opened or moved meanwhile, or its storage is slow; try again"))
    }

    async fn stand_still(&self, record: &DiskRecord, number: u64) -> Answer<Still> {
        let disk = &record.name;
        let unavailable =
            |message: String| ApiError::new(ApiErrorKind::Unavailable, message).hint("try again");
        let Some(owner) = record.owner.clone() else {
            if record.heir.is_some() {
                return Err(unavailable(format!("disk {disk} is being moved")));
            }
            if !record.former.is_empty() {
                let message = format!("former owners of disk {disk} may still write to it");
                let hint = format!("`weir disk export {disk}` opens it, and then a snapshot can be made");
                return Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint));
            }
            return Ok(Still::Closed { epoch: record.epoch });
        };
        let barrier = Barrier { number, raise: true };
        if owner == self.me() {
            self.barrier(disk, barrier).await?;
        } else if self.lives_elsewhere(record).is_some() {
            let patience = REACHED + Duration::from_secs(5);
            let _: BarrierStood =
                self.forward_within(patience, &owner, disk, "barrier", Some(&barrier)).await?;
        } else {
            return Err(unavailable(format!(
                "the owner of disk {disk}, {owner}, is gone; another node takes it over"
            )));
        }
        Ok(Still::Barrier { owner, number })
    }

    /// Whether the disk has stood still until now.
    async fn go_on(&self, record: &DiskRecord, still: Still) -> Answer<bool> {
        match still {
            Still::Closed { epoch } => {
                let now = self.record(&record.name).await?;
                Ok(now.owner.is_none() && now.epoch == epoch && now.id == record.id)
            }
            Still::Barrier { owner, number } => {
                let barrier = Barrier { number, raise: false };
                let BarrierStood { stood } = match owner == self.me() {
                    true => self.barrier(&record.name, barrier).await?,
                    false => self.forward(&owner, &record.name, "barrier", &barrier).await?,
                };
                Ok(stood)
            }
        }
    }

    /// Raises or lowers a barrier of a disk that this process owns, for the node that makes a snapshot.
    ///
    /// # Errors
    /// It is not open here; or the storage does not take what the log has in time.
    pub async fn barrier(&self, disk: &str, wanted: Barrier) -> Answer<BarrierStood> {
        check_named(disk)?;
        let Barrier { number, raise } = wanted;
        let (name, shards) = (disk.to_owned(), &self.node.shards);
        if !raise {
            let lower = |done| Command::LowerBarrier { disk: name, number, done };
            return shards.ask(disk, lower).await.map(|stood| BarrierStood { stood });
        }
        let reached = shards.ask(disk, |done| Command::RaiseBarrier { disk: name, number, done }).await?;
        let refused = |reason| {
            ApiError::new(ApiErrorKind::Unavailable, format!("disk {disk}: {reason}")).hint("try again")
        };
        reached.map(|()| BarrierStood { stood: true }).map_err(refused)
    }

    async fn share_blocks(&self, disk: &str, is_closed: bool, copy: File) -> Answer<()> {
        let node = &self.node;
        // Owned or not, as the registry has it now: whoever holds leases of an earlier coordinator is there.
        let record = self.record(disk).await?;
        let volume = node.volume(&record.volume).await?;
        let file = DirVolume::file_of(disk).map_err(volume_error)?;
        let path = volume.path.join(&file);
        if volume.kind != VolumeKind::Lun {
            let files = Files::of(node, volume);
            return blocking(move || {
                let shared = snapshot::share(&files.open()?.open(&file)?, &copy);
                shared.map_err(|error| snapshot::clone_error(path, error))
            })
            .await;
        }
        if is_closed {
            // Its last owner may count as one that has only lost its connection.
            lun_disks::stop_serving(node, &record.volume, Some(disk)).await;
        }
        let unavailable = |message| ApiError::new(ApiErrorKind::Unavailable, message).hint("try again");
        lun_disks::serve(node, &record).await.map_err(unavailable)?;
        let change = ServedChange(Box::new(move |file| snapshot::share(file, &copy)));
        let name = disk.to_owned();
        let shared = node.shards.ask(disk, |done| Command::ChangeServed { disk: name, change, done }).await?;
        shared.map_err(|error: IoError| match error.errno {
            0 => unavailable(error.to_string()),
            errno => volume_error(snapshot::clone_error(path, std::io::Error::from_raw_os_error(errno))),
        })
    }

    /// Deletes a snapshot, or says what would be deleted. Clones of it stay as they are.
    ///
    /// # Errors
    /// As [`Operations::disks`]; there is no such snapshot.
    pub async fn delete_snapshot(&self, disk: &str, wanted: DeleteSnapshot) -> Answer<SnapshotView> {
        let record = self.record(disk).await?;
        check_snapshot(disk, &wanted.name)?;
        if let Some(keeper) = self.keeper_elsewhere(&record).await? {
            return self.forward(&keeper, disk, "delete-snapshot", &wanted).await;
        }
        let found = self.snapshot(&record, &wanted.name).await?;
        if !wanted.dry_run {
            let (files, name) =
                (Files::of(&self.node, self.node.volume(&record.volume).await?), wanted.name.clone());
            let disk = disk.to_owned();
            self.bounded(blocking(move || snapshot::remove(&*files.open()?, &disk, &name))).await?;
            let text = format!("snapshot {}@{}", record.name, wanted.name);
            self.node.journal.tell("snapshot-deleted", &record.name, text);
        }
        Ok(view(&found))
    }

    async fn snapshot(&self, record: &DiskRecord, name: &str) -> Answer<Snapshot> {
        let found = self.own_snapshots(record).await?.into_iter().find(|one| one.name == name);
        found.ok_or_else(|| {
            let message = format!("disk {} has no snapshot {name}", record.name);
            let hint = format!("`weir snapshot list {}` shows those that there are", record.name);
            ApiError::new(ApiErrorKind::NotFound, message).hint(hint)
        })
    }

    /// Makes a disk that begins as a snapshot of another one, or as that disk is now.
    ///
    /// # Errors
    /// As [`Operations::create_snapshot`] and [`Operations::create_disk`].
    pub async fn clone_disk(&self, disk: &str, wanted: CloneDisk) -> Answer<DiskView> {
        let record = self.record(disk).await?;
        is_file(&record)?;
        self.check_blocks(&record).await?;
        if let Some(keeper) = self.keeper_elsewhere(&record).await? {
            return self.forward_within(SNAPSHOT, &keeper, disk, "clone", Some(&wanted)).await;
        }
        let CloneDisk { name, snapshot, policy, medium, limit } = wanted;
        let own = match &snapshot {
            Some(snapshot) => snapshot.clone(),
            None => format!("clone-{:016x}", random()),
        };
        check_snapshot(disk, &own)?;
        if snapshot.is_none() {
            self.create_snapshot(disk, CreateSnapshot { name: own.clone() }).await?;
        }
        let made = async {
            let found = self.snapshot(&record, &own).await?;
            let (volume, logical_block) = (record.volume.clone(), record.logical_block);
            let new = CreateDisk { name, volume, size: found.size, logical_block, policy, medium, limit };
            self.make_disk(new, Origin::Snapshot { disk: disk.to_owned(), snapshot: own.clone() }).await
        };
        let made = made.await;
        if snapshot.is_none() {
            let delete = DeleteSnapshot { name: own, dry_run: false };
            if let Err(error) = self.delete_snapshot(disk, delete).await {
                tracing::warn!(disk, %error, "the snapshot that a clone was made from is left");
            }
        }
        made
    }

    /// A filesystem writes a part of a shared block through the page cache, and Linux from 6.14 on does not call that direct I/O: the disk
    /// could not be opened any more.
    async fn check_blocks(&self, record: &DiskRecord) -> Answer<()> {
        let is_in_directory = self.node.volume(&record.volume).await?.kind != VolumeKind::Lun;
        if !is_in_directory || record.logical_block >= 4096 {
            return Ok(());
        }
        let message = format!(
            "disk {} has blocks of {} bytes: a file with shared blocks can be written directly in units of 4096 bytes only",
            record.name, record.logical_block
        );
        let hint = "disks made with `weir disk create --block 4096` can have snapshots and clones";
        Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint))
    }

    /// The node that reaches the files of a disk's volume, and knows who has the disk open, when that is another one: the coordinator of a volume on a
    /// LUN, the owner of a disk in a directory.
    async fn keeper_elsewhere(&self, record: &DiskRecord) -> Answer<Option<NodeRef>> {
        match self.node.volume(&record.volume).await?.kind {
            VolumeKind::Lun => self.coordinated_elsewhere(&record.volume).await,
            _ => Ok(self.lives_elsewhere(record)),
        }
    }
}

fn is_file(record: &DiskRecord) -> Answer<()> {
    if matches!(record.source, Source::File { .. }) {
        return Ok(());
    }
    let message = format!("disk {} is a device: only its storage can make snapshots of it", record.name);
    Err(ApiError::new(ApiErrorKind::Refused, message))
}

fn check_snapshot(disk: &str, snapshot: &str) -> Answer<()> {
    snapshot::check(disk, snapshot).map_err(|error| match error {
        VolumeError::InvalidName { name, reason } => {
            ApiError::new(ApiErrorKind::Invalid, format!("the name of a snapshot, {name:?}, {reason}"))
        }
        error => volume_error(error),
    })
}

fn view(snapshot: &Snapshot) -> SnapshotView {
    SnapshotView {
        disk: snapshot.disk.clone(),
        name: snapshot.name.clone(),
        size: snapshot.size,
        allocated: snapshot.allocated,
        made: rfc3339(snapshot.made_unix_ms()),
    }
}
