//! Snapshots of disks, and disks that begin as one.
//!
//! A snapshot is what was acknowledged when it was asked for, while the guest goes on. The disk's owner raises a *barrier*: it brings to the backing what
//! its log has, and nothing from behind that. Then the node that keeps the files copies the disk's file by sharing its blocks; on a LUN its owner gives up all leases
//! before. The copy becomes the snapshot only if the owner says, afterwards, that the barrier has stood all the time.

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use weir_block::{IoError, Nanos};
use weir_cluster::records::{DiskRecord, NodeRef, Source, VolumeKind, VolumeRecord};
use weir_volume::lun::filesystem::Kind;
use weir_volume::snapshot::{self, Snapshot, Unfinished};
use weir_volume::{DirVolume, DiskFiles, VolumeError};

use super::imports::check_imported;
use super::{Answer, Operations, check_named};
use crate::api::{
    ApiError, ApiErrorKind, Barrier, BarrierStep, BarrierStood, CloneDisk, CreateDisk, CreateSnapshot,
    DeleteSnapshot, DiskView, Sharing, SnapshotView, Snapshots,
};
use crate::client::SNAPSHOT;
use crate::control::node::{blocking, random, volume_error};
use crate::control::provisioning::{Files, Origin, to_its_end};
use crate::control::{Node, clone_snapshots, lun_disks};
use crate::shard::barrier::{BarrierError, HELD, REACHED};
use crate::shard::messages::{Command, ServedChange};
use crate::timestamps::rfc3339;

/// Most disks of which snapshots are made at one point.
const MOST_DISKS: usize = 64;

/// A pass of [`Operations::destage_first`] that takes less leaves less than a disk may stand still for ([`HELD`]).
const SHORT_PASS: Duration = Duration::from_secs(3);
/// No pass begins after this time.
const DESTAGED_FIRST: Duration = Duration::from_secs(20);

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
        let found = self.own_snapshots(&record).await?;
        Ok(Snapshots { snapshots: found.iter().map(view).collect() })
    }

    async fn own_snapshots(&self, record: &DiskRecord) -> Answer<Vec<Snapshot>> {
        self.bounded(self.listed_snapshots(record)).await
    }

    async fn listed_snapshots(&self, record: &DiskRecord) -> Answer<Vec<Snapshot>> {
        let (files, disk) =
            (Files::of(&self.node, self.node.volume(&record.volume).await?), record.name.clone());
        files.with(move |files| snapshot::list(&**files, Some(&disk))).await
    }

    /// Makes a snapshot of a disk, in use or not, and of others of its volume at the same point in time.
    ///
    /// # Errors
    /// As [`Operations::disks`]; the filesystem has no reflinks; there is such a snapshot; a disk is being made, deleted or moved; the storage does
    /// not take what a write log has in time. No snapshot is made then.
    pub async fn create_snapshot(&self, disk: &str, wanted: CreateSnapshot) -> Answer<Snapshots> {
        let records = self.to_snapshot(disk, &wanted).await?;
        let volume = self.node.volume(&records[0].volume).await?;
        // In a directory, any node that has it mounted reaches the files of all disks.
        let is_anybodys = records.len() > 1 && volume.kind != VolumeKind::Lun;
        if !is_anybodys && let Some(keeper) = self.keeper_elsewhere(&records[0]).await? {
            return self.forward_within(SNAPSHOT, &keeper, disk, "snapshots", Some(&wanted)).await;
        }
        let operations = self.clone();
        let made = to_its_end(async move { operations.snapshots_here(records, &wanted.name).await }).await?;
        for one in &made {
            let text = format!("snapshot {}@{}", one.disk, one.name);
            self.node.journal.tell("snapshot-made", &one.disk, text);
        }
        Ok(Snapshots { snapshots: made.iter().map(view).collect() })
    }

    /// The disks of which snapshots are to be made; the named one is the first.
    async fn to_snapshot(&self, disk: &str, wanted: &CreateSnapshot) -> Answer<Vec<DiskRecord>> {
        let invalid = |message: String| Err(ApiError::new(ApiErrorKind::Invalid, message));
        let others: BTreeSet<&str> =
            wanted.group.iter().map(String::as_str).filter(|other| *other != disk).collect();
        if others.len() >= MOST_DISKS {
            return invalid(format!("a snapshot at one point is of at most {MOST_DISKS} disks"));
        }
        let mut records: Vec<DiskRecord> = Vec::new();
        for name in std::iter::once(disk).chain(others) {
            let record = self.record(name).await?;
            check_snapshot(name, &wanted.name)?;
            is_file(&record, SNAPSHOT_IT)?;
            check_imported(&record)?;
            self.check_blocks(&record).await?;
            let first = records.first().unwrap_or(&record);
            if first.volume != record.volume {
                return invalid(format!(
                    "disk {name} is in volume {}, and disk {disk} in {}: snapshots at one point are of disks of one volume",
                    record.volume, first.volume
                ));
            }
            records.push(record);
        }
        Ok(records)
    }

    async fn snapshots_here(&self, records: Vec<DiskRecord>, name: &str) -> Answer<Vec<Snapshot>> {
        let (node, number) = (&self.node, random());
        let mut steps = Vec::new();
        for record in &records {
            let step = node.intents.begin(&record.name);
            steps.push(step.filter(|_| !node.intents.is_being_deleted(&record.name)).ok_or_else(|| {
                let message =
                    format!("disk {} is being made, deleted, or copied for another snapshot", record.name);
                ApiError::new(ApiErrorKind::Unavailable, message).hint("try again")
            })?);
        }
        let volume = node.volume(&records[0].volume).await?;
        self.check_new_snapshots(&records, &volume, name).await?;
        let made = match self.stand_still(&records, number).await {
            Ok(()) => self.copy_all(&records, number, (&volume, name)).await,
            Err(error) => {
                // Not all may have begun to.
                self.each(&records, number, BarrierStep::Lower).await;
                Err(error)
            }
        };
        let made = made?;
        self.check_still_there(&records, &volume, &made).await?;
        Ok(made)
    }

    /// Another node may have deleted a closed disk in a directory meanwhile, and its name is free: then no snapshot of the group stays. Only
    /// the registry's word counts for that. Without an answer they stay: the barriers have proved what they hold.
    async fn check_still_there(
        &self,
        records: &[DiskRecord],
        volume: &VolumeRecord,
        made: &[Snapshot],
    ) -> Answer<()> {
        let mut gone = None;
        for record in records {
            let is_gone = match self.record(&record.name).await {
                Ok(now) => now.id != record.id,
                Err(error) => error.kind == ApiErrorKind::NotFound,
            };
            gone = gone.or(is_gone.then_some(&record.name));
        }
        let Some(gone) = gone else { return Ok(()) };
        let (files, made) = (Files::of(&self.node, volume.clone()), made.to_vec());
        files
            .with(move |files| {
                let remove = |one: &Snapshot| match snapshot::remove(&**files, &one.disk, &one.name) {
                    // Its disk's deletion has removed it.
                    Err(VolumeError::NotFound(_)) => Ok(()),
                    removed => removed,
                };
                let removed: Vec<Result<(), VolumeError>> = made.iter().map(remove).collect();
                removed.into_iter().collect::<Result<(), VolumeError>>()
            })
            .await?;
        Err(ApiError::new(ApiErrorKind::NotFound, format!("disk {gone} has been deleted meanwhile")))
    }

    /// Whether the filesystem can have them, and their names are free: on the node that reaches it.
    pub(super) async fn check_new_snapshots(
        &self,
        records: &[DiskRecord],
        volume: &VolumeRecord,
        name: &str,
    ) -> Answer<()> {
        check_reflinks(&self.node, volume)?;
        for record in records {
            if self.own_snapshots(record).await?.iter().any(|one| one.name == name) {
                let message = format!("there is a snapshot {}@{name} already", record.name);
                return Err(ApiError::new(ApiErrorKind::Exists, message));
            }
        }
        Ok(())
    }

    /// What the registry says about a snapshot or a clone that is to be made.
    pub(super) async fn check_sharing(&self, record: &DiskRecord, wanted: &Sharing) -> Answer<()> {
        match wanted {
            Sharing::Snapshot(snapshot) => self.to_snapshot(&record.name, snapshot).await.map(drop),
            Sharing::Clone(clone) => self.check_clone(record, clone).await,
        }
    }

    async fn check_clone(&self, record: &DiskRecord, wanted: &CloneDisk) -> Answer<()> {
        is_file(record, SNAPSHOT_IT)?;
        check_imported(record)?;
        self.check_blocks(record).await?;
        let CloneDisk { name, policy, medium, limit, .. } = wanted.clone();
        let (volume, size, logical_block) = (record.volume.clone(), record.size, record.logical_block);
        let new = CreateDisk { name, volume, size, logical_block, policy, medium, limit };
        let new = self.new_record(new)?;
        self.check_free(&new.name).await.map(drop)
    }

    /// While the disks stand still: copies their files, which count if the disks have stood still until then.
    async fn copy_all(
        &self,
        records: &[DiskRecord],
        number: u64,
        (volume, name): (&VolumeRecord, &str),
    ) -> Answer<Vec<Snapshot>> {
        let (files, name) = (Files::of(&self.node, volume.clone()), name.to_owned());
        let disks: Vec<String> = records.iter().map(|record| record.name.clone()).collect();
        let begun = files.with(move |files| {
            let unfinished = begin_all(&**files, &disks, &name, number)?;
            // It is the filesystem as it is mounted now, and is not unmounted meanwhile.
            Ok((Arc::clone(files), unfinished))
        });
        let begun = tokio::time::timeout(HELD, begun).await.unwrap_or_else(|_| {
            let message = format!("the volume's filesystem has not answered for {HELD:?}");
            Err(ApiError::new(ApiErrorKind::Unavailable, message))
        });
        let mut result = Ok(());
        let (files, unfinished) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                self.each(records, number, BarrierStep::Lower).await;
                return Err(error);
            }
        };
        let share = |(record, one): (&DiskRecord, &Unfinished)| {
            let (operations, record, copy) = (self.clone(), record.clone(), one.file.try_clone());
            weir_task::spawn(async move {
                let no_file =
                    |error| ApiError::new(ApiErrorKind::Failed, format!("no descriptor for a file: {error}"));
                operations.share_blocks(&record, number, copy.map_err(no_file)?).await
            })
        };
        let sharing: Vec<_> = records.iter().zip(&unfinished).map(share).collect();
        for (record, shared) in records.iter().zip(sharing) {
            let shared = tokio::time::timeout(HELD, shared).await;
            let cut_off = |_| Err(ApiError::new(ApiErrorKind::Failed, "the copy did not come to its end"));
            result = result
                .and(shared.map_or_else(|_| Err(late(record)), |shared| shared.unwrap_or_else(cut_off)));
        }
        if result.is_err() && volume.kind == VolumeKind::Lun {
            // Nobody waits for what has not begun.
            for record in records {
                let disk = record.name.clone();
                self.node.shards.send(&record.name, Command::ForgetChange { disk, number }).await;
            }
        }
        let stood = self.each(records, number, BarrierStep::Lower).await;
        for (record, stood) in records.iter().zip(stood) {
            let stood = stood.and_then(|stood| if stood { Ok(()) } else { Err(has_moved(record)) });
            result = result.and(stood);
        }
        let done = blocking(move || match &result {
            Ok(()) => finish_all(&*files, unfinished).map(Ok).map_err(|error| files.judge(error)),
            Err(error) => {
                if let Err(left) = abandon_all(&*files, unfinished) {
                    tracing::warn!(%left, "the file of a snapshot that was not made is left");
                }
                Ok(Err(error.clone()))
            }
        });
        done.await?
    }

    /// Waits until no disk's backing changes any more. Several disks do so as of one time: between the last one's hold and the first
    /// one's release no client of any of them hears of anything, and each barrier was raised with its hold.
    async fn stand_still(&self, records: &[DiskRecord], number: u64) -> Answer<()> {
        if let [record] = records {
            let stands = self.step_of(record, number, BarrierStep::Raise).await?;
            return if stands { Ok(()) } else { Err(has_moved(record)) };
        }
        self.destage_first(records, number).await?;
        for step in [BarrierStep::Hold, BarrierStep::Release] {
            for (record, stands) in records.iter().zip(self.each(records, number, step).await) {
                if !stands? {
                    return Err(has_moved(record));
                }
            }
        }
        Ok(())
    }

    /// Destages the disks until that takes a short time: each pass has only what was written during the last one. Disks that are written faster
    /// than their storage takes it do not come to that.
    async fn destage_first(&self, records: &[DiskRecord], number: u64) -> Answer<()> {
        let began = Nanos::now();
        loop {
            let pass = Nanos::now();
            self.destage_each(records, number).await?;
            let now = Nanos::now();
            if now - pass < SHORT_PASS || now - began >= DESTAGED_FIRST {
                return Ok(());
            }
        }
    }

    /// Brings every disk to a barrier once, each in its own time, and lets it go on: logs take very different times, and a disk stands still for
    /// a short time only while the others come to theirs.
    async fn destage_each(&self, records: &[DiskRecord], number: u64) -> Answer<()> {
        let destage = |record: &DiskRecord| {
            let (operations, record) = (self.clone(), record.clone());
            weir_task::spawn(async move {
                let reached = operations.step_of(&record, number, BarrierStep::Raise).await;
                // Also a barrier that was not reached.
                let _ = operations.step_of(&record, number, BarrierStep::Lower).await;
                reached.map(drop)
            })
        };
        let destaging: Vec<_> = records.iter().map(destage).collect();
        let mut all = Ok(());
        for one in destaging {
            let cut_off =
                |_| Err(ApiError::new(ApiErrorKind::Failed, "a disk's barrier has not come to its end"));
            all = all.and(one.await.unwrap_or_else(cut_off));
        }
        all
    }

    /// Takes a step with each disk, all at the same time.
    async fn each(&self, records: &[DiskRecord], number: u64, step: BarrierStep) -> Vec<Answer<bool>> {
        let take = |record: &DiskRecord| {
            let (operations, record) = (self.clone(), record.clone());
            weir_task::spawn(async move { operations.step_of(&record, number, step).await })
        };
        let taking: Vec<_> = records.iter().map(take).collect();
        let mut taken = Vec::new();
        for one in taking {
            let cut_off =
                |_| Err(ApiError::new(ApiErrorKind::Failed, "a barrier's step did not come to its end"));
            taken.push(one.await.unwrap_or_else(cut_off));
        }
        taken
    }

    /// Whether the disk stands still, or has done so until now.
    async fn step_of(&self, record: &DiskRecord, number: u64, step: BarrierStep) -> Answer<bool> {
        let disk = &record.name;
        let Some(owner) = record.owner.clone() else { return self.is_closed(record).await };
        let barrier = Barrier { number, step };
        if owner == self.me() {
            return Ok(self.barrier(disk, barrier).await?.stood);
        }
        if self.lives_elsewhere(record).is_none() {
            let message = format!("the owner of disk {disk}, {owner}, is gone; another node takes it over");
            return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"));
        }
        let patience = REACHED + Duration::from_secs(5);
        let BarrierStood { stood } =
            self.forward_within(patience, &owner, disk, "barrier", Some(&barrier)).await?;
        Ok(stood)
    }

    /// Whether a disk without an owner has had none since the record was read.
    pub(super) async fn is_closed(&self, record: &DiskRecord) -> Answer<bool> {
        let disk = &record.name;
        if record.heir.is_some() {
            let message = format!("disk {disk} is being moved");
            return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"));
        }
        if !record.former.is_empty() {
            let message = format!("former owners of disk {disk} may still write to it");
            let hint = format!("`weir disk export {disk}` opens it; then try again");
            return Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint));
        }
        let now = self.record(disk).await?;
        Ok(now.owner.is_none() && now.epoch == record.epoch && now.id == record.id)
    }

    /// A node of another host asks for a barrier only if it coordinates the disk's volume: nobody else makes snapshots there.
    async fn check_barrier_by(&self, disk: &str) -> Answer<()> {
        let Some(node) = &self.by_node else { return Ok(()) };
        let record = self.record(disk).await?;
        let coordinator = self.node.coordinators.get(&record.volume).coordinator;
        if coordinator.is_some_and(|one| *one.node == **node) {
            return Ok(());
        }
        let message = format!(
            "node {node} does not coordinate volume {}, so it makes no snapshots there",
            record.volume
        );
        Err(ApiError::new(ApiErrorKind::Forbidden, message))
    }

    /// Takes a step of a barrier of a disk that this process owns, for the node that makes a snapshot.
    ///
    /// # Errors
    /// It is not open here; or the storage does not take what the log has in time.
    pub async fn barrier(&self, disk: &str, wanted: Barrier) -> Answer<BarrierStood> {
        check_named(disk)?;
        self.check_barrier_by(disk).await?;
        let (Barrier { number, step }, shards) = (wanted, &self.node.shards);
        let name = || disk.to_owned();
        let refused = |error: BarrierError| {
            let hint = match error {
                BarrierError::Full => "delete a disk or a snapshot, or add space; then try again",
                _ => "try again",
            };
            // Also on a full volume: space may be free by now, and destage has not come so far yet.
            ApiError::new(ApiErrorKind::Unavailable, format!("disk {disk}: {error}")).hint(hint)
        };
        let raise = |holds| move |done| Command::RaiseBarrier { disk: name(), number, holds, done };
        let stood = match step {
            BarrierStep::Raise => {
                shards.ask(disk, raise(false)).await?.map_err(refused)?;
                true
            }
            BarrierStep::Hold => {
                shards.ask(disk, raise(true)).await?.map_err(refused)?;
                true
            }
            BarrierStep::Release => {
                shards.ask(disk, |done| Command::ReleaseBarrier { disk: name(), number, done }).await?
            }
            BarrierStep::Lower => {
                shards.ask(disk, |done| Command::LowerBarrier { disk: name(), number, done }).await?
            }
        };
        if matches!(step, BarrierStep::Raise | BarrierStep::Release) {
            let reached =
                shards.ask(disk, |done| Command::AwaitBarrier { disk: name(), number, done }).await?;
            reached.map_err(refused)?;
        }
        Ok(BarrierStood { stood })
    }

    /// Makes `copy` share the blocks of a disk's file. Never cut off: it has a part in what this node serves.
    async fn share_blocks(&self, record: &DiskRecord, number: u64, copy: File) -> Answer<()> {
        let (node, disk) = (&self.node, &record.name);
        // Owned or not, as the registry has it now: whoever holds leases of an earlier coordinator is there.
        let now = self.record(disk).await?;
        let volume = node.volume(&now.volume).await?;
        let file = DirVolume::file_of(disk).map_err(volume_error)?;
        let path = volume.path.join(&file);
        if volume.kind != VolumeKind::Lun {
            return Files::of(node, volume)
                .with(move |files| {
                    let shared = snapshot::share(&files.open(&file)?, &copy);
                    shared.map_err(|error| snapshot::clone_error(path, error))
                })
                .await;
        }
        if now.owner.is_none() {
            if !self.is_closed(record).await? {
                return Err(late(record));
            }
            // Its last owner may count as one that has only lost its connection.
            lun_disks::stop_serving(node, &now.volume, Some(disk)).await;
        }
        let try_again = |message| ApiError::new(ApiErrorKind::Unavailable, message).hint("try again");
        lun_disks::serve(node, &now).await.map_err(try_again)?;
        let change = ServedChange(Box::new(move |file| snapshot::share(file, &copy)));
        let name = disk.clone();
        let ask = |done| Command::ChangeServed { disk: name, number, change, done };
        let shared: Result<(), IoError> = node.shards.ask(disk, ask).await?;
        match shared {
            Ok(()) => Ok(()),
            Err(error) if error.errno == 0 => Err(try_again(error.to_string())),
            Err(error) => {
                let error = snapshot::clone_error(path, std::io::Error::from_raw_os_error(error.errno));
                Files::of(node, volume).with(move |_| Err(error)).await
            }
        }
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
            self.bounded(files.with(move |files| snapshot::remove(&**files, &disk, &name))).await?;
            self.node.coordinators.update(&record.volume, |state| state.deleted = Some(Nanos::now()));
            let text = format!("snapshot {}@{}", record.name, wanted.name);
            self.node.journal.tell("snapshot-deleted", &record.name, text);
        }
        Ok(view(&found))
    }

    async fn snapshot(&self, record: &DiskRecord, name: &str) -> Answer<Snapshot> {
        let found = self.own_snapshots(record).await?.into_iter().find(|one| one.name == name);
        found.ok_or_else(|| no_snapshot(&record.name, name))
    }

    /// Makes a disk that begins as a snapshot of another one, or as that disk is now.
    ///
    /// # Errors
    /// As [`Operations::create_snapshot`] and [`Operations::create_disk`].
    pub async fn clone_disk(&self, disk: &str, wanted: CloneDisk) -> Answer<DiskView> {
        let record = self.record(disk).await?;
        self.check_clone(&record, &wanted).await?;
        if let Some(keeper) = self.keeper_elsewhere(&record).await? {
            return self.forward_within(SNAPSHOT, &keeper, disk, "clone", Some(&wanted)).await;
        }
        let operations = self.clone();
        // Also if its client goes away: a snapshot that is made for it does not stay.
        to_its_end(async move { operations.clone_here(record, wanted).await }).await
    }

    async fn clone_here(&self, record: DiskRecord, wanted: CloneDisk) -> Answer<DiskView> {
        let (disk, CloneDisk { name, snapshot, policy, medium, limit }) = (record.name.clone(), wanted);
        let own = match &snapshot {
            Some(snapshot) => snapshot.clone(),
            None => clone_snapshots::name(&self.me(), random()),
        };
        check_snapshot(&disk, &own)?;
        // Or a sweep for what others have left would take it for that.
        let _cloning = if snapshot.is_none() { self.node.intents.begin_clone(&own) } else { None };
        let made = async {
            if snapshot.is_none() {
                let only = CreateSnapshot { name: own.clone(), group: Vec::new() };
                self.create_snapshot(&disk, only).await?;
            }
            let found = self.snapshot(&record, &own).await?;
            let (volume, logical_block) = (record.volume.clone(), record.logical_block);
            let new = CreateDisk { name, volume, size: found.size, logical_block, policy, medium, limit };
            self.make_disk(new, Origin::Snapshot { disk: disk.clone(), snapshot: own.clone() }).await
        };
        let made = made.await;
        // Also one that could not be made, as far as is known here.
        if snapshot.is_none() {
            let delete = DeleteSnapshot { name: own, dry_run: false };
            match self.delete_snapshot(&disk, delete).await {
                Err(error) if error.kind != ApiErrorKind::NotFound => {
                    tracing::warn!(disk, %error, "the snapshot that a clone was made from is left");
                }
                Ok(_) | Err(_) => {}
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
    pub(super) async fn keeper_elsewhere(&self, record: &DiskRecord) -> Answer<Option<NodeRef>> {
        match self.node.volume(&record.volume).await?.kind {
            VolumeKind::Lun => {
                let other = self.coordinated_elsewhere(&record.volume).await?;
                if other.is_none() {
                    self.check_coordinated(&record.volume).await?;
                }
                Ok(other)
            }
            _ => Ok(self.lives_elsewhere(record)),
        }
    }
}

fn has_moved(record: &DiskRecord) -> ApiError {
    let message = format!("disk {} has not stood still while it was copied", record.name);
    ApiError::new(ApiErrorKind::Unavailable, message)
        .hint("it was opened or moved meanwhile, or it or its storage is slow; try again")
}

fn late(record: &DiskRecord) -> ApiError {
    let message = format!("disk {}: its file has not been copied within {HELD:?}", record.name);
    ApiError::new(ApiErrorKind::Unavailable, message)
        .hint("its owner or the storage is slow: `weir disk show` tells its route; try again")
}

/// Before the owner of a disk on a LUN gives everything up for nothing.
pub(super) fn check_reflinks(node: &Node, volume: &VolumeRecord) -> Answer<()> {
    let Some((_, mounted)) = node.coordinators.get(&volume.name).mounted else { return Ok(()) };
    let superblock = mounted.superblock();
    if superblock.kind == Kind::Xfs && superblock.reflink {
        return Ok(());
    }
    Err(volume_error(VolumeError::NoReflinks(volume.path.clone())))
}

/// A task of [`is_file`].
pub(super) const SNAPSHOT_IT: &str = "make snapshots of it";

/// Refuses a disk that is no file of Weir's. `task`: what only its storage can do then.
pub(super) fn is_file(record: &DiskRecord, task: &str) -> Answer<()> {
    if matches!(record.source, Source::File { .. }) {
        return Ok(());
    }
    let what = if matches!(record.source, Source::Export { .. }) { "an export" } else { "a device" };
    let message = format!("disk {} is {what}: only its storage can {task}", record.name);
    Err(ApiError::new(ApiErrorKind::Refused, message))
}

pub(super) fn no_snapshot(disk: &str, name: &str) -> ApiError {
    let message = format!("disk {disk} has no snapshot {name}");
    let hint = format!("`weir snapshot list {disk}` shows those that there are");
    ApiError::new(ApiErrorKind::NotFound, message).hint(hint)
}

pub(super) fn check_snapshot(disk: &str, snapshot: &str) -> Answer<()> {
    snapshot::check(disk, snapshot).map_err(|error| match error {
        VolumeError::InvalidName { name, reason } => {
            ApiError::new(ApiErrorKind::Invalid, format!("the name of a snapshot, {name:?}, {reason}"))
        }
        error => volume_error(error),
    })
}

fn begin_all(
    files: &dyn DiskFiles,
    disks: &[String],
    name: &str,
    number: u64,
) -> Result<Vec<Unfinished>, VolumeError> {
    let mut all = Vec::new();
    for disk in disks {
        match Unfinished::begin(files, disk, name, number) {
            Ok(unfinished) => all.push(unfinished),
            Err(error) => {
                // What is left, the next snapshot removes.
                let _left = abandon_all(files, all);
                return Err(error);
            }
        }
    }
    Ok(all)
}

fn abandon_all(files: &dyn DiskFiles, all: Vec<Unfinished>) -> Result<(), VolumeError> {
    let abandoned: Vec<_> = all.into_iter().map(|one| one.abandon(files)).collect();
    abandoned.into_iter().collect()
}

/// All of them, or none.
fn finish_all(files: &dyn DiskFiles, all: Vec<Unfinished>) -> Result<Vec<Snapshot>, VolumeError> {
    let mut finished: Vec<Snapshot> = Vec::new();
    let mut rest = all.into_iter();
    while let Some(one) = rest.next() {
        match one.finish(files) {
            Ok(snapshot) => finished.push(snapshot),
            Err(error) => {
                let _left = abandon_all(files, rest.collect());
                let removed: Vec<_> =
                    finished.iter().map(|one| snapshot::remove(files, &one.disk, &one.name)).collect();
                removed.into_iter().collect::<Result<(), _>>()?;
                return Err(error);
            }
        }
    }
    Ok(finished)
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use weir_cluster::records::{Policy, Record, keys};
    use weir_cluster::registry::Transaction;

    use super::*;
    use crate::control::disk::tests::{node_at, volume_in};
    use crate::control::faulty_registry::RegistryFaults;

    /// No answer is not the answer that a disk is gone; and where one is gone, a part of the group is of no use.
    #[tokio::test]
    async fn a_group_of_snapshots_goes_only_with_one_of_its_disks() {
        let directory = tempfile::tempdir().unwrap();
        let faults = Arc::<RegistryFaults>::default();
        let (node, _told) = node_at(directory.path(), faults.clone()).await;
        let files = volume_in(&node, directory.path()).await;
        let volume = node.volume("v").await.unwrap();
        let mut records = Vec::new();
        for (name, id) in [("d", 1), ("e", 2)] {
            let source = Source::File { name: name.into() };
            let mut record = DiskRecord::new(name, "v", source, 1 << 20, 4096, Policy::WriteThrough);
            record.id = id;
            node.registry.transact(record.create(keys::disk(name))).await.unwrap();
            std::fs::write(files.path().join(format!("{name}@s.snap")), [1; 512]).unwrap();
            records.push(record);
        }
        let made = snapshot::list(&files, None).unwrap();
        let operations = Operations::new(Arc::clone(&node), Arc::default(), Arc::default());
        let check = || operations.check_still_there(&records, &volume, &made);
        check().await.unwrap();
        faults.away.store(true, Ordering::Relaxed);
        check().await.unwrap();
        faults.away.store(false, Ordering::Relaxed);
        assert_eq!(snapshot::list(&files, None).unwrap().len(), 2);

        // Another disk has got the name.
        let other = DiskRecord { id: 3, ..records[1].clone() };
        let replaced = Transaction::new().put(keys::disk("e"), other.encode());
        node.registry.transact(replaced).await.unwrap();
        let gone = check().await.unwrap_err();
        assert_eq!(gone.kind, ApiErrorKind::NotFound);
        assert!(gone.message.contains("disk e has been deleted"), "{gone}");
        assert_eq!(snapshot::list(&files, None).unwrap(), []);
        node.registry.transact(Transaction::new().delete(keys::disk("d"))).await.unwrap();
        let gone = check().await.unwrap_err();
        assert!(gone.message.contains("disk d has been deleted"), "{gone}");
    }
}
