//! Disks in many pieces: how many, what that costs, and a copy in fewer ones.
//!
//! The disk is closed meanwhile, like one that goes back to a snapshot, and its file is replaced in the same way. The copy ends when its node does not coordinate the volume any more:
//! the filesystem is not given back before.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, VolumeKind};
use weir_volume::compaction::{MANY_EXTENTS, Pieces, pieces, share_time};
use weir_volume::snapshot::clone_error;
use weir_volume::{DirVolume, DiskFiles, VolumeError, snapshot};

use super::imports::check_imported;
use super::measured::NOTHING;
use super::snapshots::{SNAPSHOT_IT, check_reflinks, is_file, no_snapshot};
use super::{Answer, Operations, is_busy};
use crate::api::{
    ApiError, ApiErrorKind, COMPACTION_FAILED, COMPACTION_INTERRUPTED, CompactDisk, CompactionView,
    LayoutView, LookAtLayout, Sharing, compaction_interrupted,
};
use crate::client::{LAYOUT, ROLLBACK};
use crate::control::compactions::Compaction;
use crate::control::disk::{NewContent, Request};
use crate::control::provisioning::Files;
use crate::shard::barrier::HELD;
use crate::units::about;

/// Longest look at the extents of one file.
const LOOK: Duration = Duration::from_secs(5);

/// Space that stays free beside a copy, for the filesystem itself: a sixty-fourth of it, and this.
const SPARE: u64 = 16 << 20;

impl Operations {
    /// The extents of a disk's file, or of a snapshot's, and how long it takes to share its blocks.
    ///
    /// # Errors
    /// As [`Operations::snapshots`]; there is no such snapshot.
    pub async fn layout(&self, disk: &str, wanted: LookAtLayout) -> Answer<LayoutView> {
        let record = self.record(disk).await?;
        is_file(&record, SNAPSHOT_IT)?;
        if let Some(sharing) = &wanted.before {
            self.check_sharing(&record, sharing).await?;
        }
        if let Some(keeper) = self.keeper_elsewhere(&record).await? {
            return self.forward_within(LAYOUT, &keeper, disk, "layout", Some(&wanted)).await;
        }
        let volume = self.node.volume(&record.volume).await?;
        match &wanted.before {
            Some(Sharing::Snapshot(snapshot)) => {
                self.check_new_snapshots(&[record], &volume, &snapshot.name).await?;
            }
            Some(Sharing::Clone(_)) => check_reflinks(&self.node, &volume)?,
            None => {}
        }
        let is_on_lun = volume.kind == VolumeKind::Lun;
        let file = match &wanted.snapshot {
            None => DirVolume::file_of(disk),
            Some(snapshot) => weir_volume::snapshot::file_of(disk, snapshot),
        };
        let file = file.map_err(crate::control::node::volume_error)?;
        let files = Files::of(&self.node, volume);
        let found = self.bounded(files.with(move |files| look(&**files, &file))).await;
        let found = found.map_err(|error| match (&wanted.snapshot, error.kind) {
            (Some(snapshot), ApiErrorKind::NotFound) => no_snapshot(disk, snapshot),
            _ => error,
        })?;
        let extents = found.map(|found| found.extents);
        let takes = extents.map(share_time);
        Ok(LayoutView {
            disk: disk.to_owned(),
            extents,
            is_many: extents.is_none_or(|extents| extents > MANY_EXTENTS),
            share_seconds: takes.map(|takes| takes.as_secs_f64()),
            advice: advice(disk, &wanted, (extents, takes), is_on_lun),
            snapshot: wanted.snapshot,
        })
    }

    /// Copies a disk without clients to fewer pieces, or says what would be done. The disk is closed then. Returns when the copy has begun.
    ///
    /// # Errors
    /// As [`Operations::roll_back`]; the disk is not on a LUN; there is not enough space.
    pub async fn compact(&self, disk: &str, wanted: CompactDisk) -> Answer<CompactionView> {
        let record = self.record(disk).await?;
        is_file(&record, "compact it")?;
        check_imported(&record)?;
        if self.node.volume(&record.volume).await?.kind != VolumeKind::Lun {
            let message = format!("volume {} is a directory: its filesystem is not Weir's", record.volume);
            return Err(ApiError::new(ApiErrorKind::Refused, message)
                .hint("a filesystem has a tool of its own for that, as xfs_fsr; close the disk before"));
        }
        if let Some(owner) = self.lives_elsewhere(&record) {
            return self.forward_within(ROLLBACK, &owner, disk, "compact", Some(&wanted)).await;
        }
        self.check_not_compacting(disk)?;
        let was_open = self.check_not_used(&record).await?;
        self.check_no_former(&record)?;
        if was_open || wanted.dry_run {
            // Before it is closed for nothing. A look, which every node takes from every other one.
            let plan = match self.coordinated_elsewhere(&record.volume).await? {
                Some(there) => {
                    self.forward_within(ROLLBACK, &there, disk, "compaction-plan", NOTHING).await?
                }
                None => self.plan_compaction(disk).await?,
            };
            if wanted.dry_run {
                return Ok(CompactionView { was_open, ..plan });
            }
        }
        let record = self.close_to_replace(disk, was_open).await?;
        if let Some(coordinator) = self.coordinated_elsewhere(&record.volume).await? {
            let there: CompactionView =
                self.forward_within(ROLLBACK, &coordinator, disk, "compact", Some(&wanted)).await?;
            return Ok(CompactionView { was_open: was_open || there.was_open, ..there });
        }
        let begun = self.compact_here(&record).await?;
        Ok(CompactionView { was_open, ..begun })
    }

    /// What a compaction of a disk would do, at the coordinator of its volume.
    ///
    /// # Errors
    /// As [`Operations::compact`].
    pub async fn plan_compaction(&self, disk: &str) -> Answer<CompactionView> {
        let record = self.record(disk).await?;
        is_file(&record, "compact it")?;
        self.check_coordinated(&record.volume).await?;
        let before = self.check_room(&record).await?;
        Ok(view(disk, &Compaction::new(0, before), "planned"))
    }

    /// Copies the file of a closed disk, which this node reaches as the coordinator of its volume.
    async fn compact_here(&self, record: &DiskRecord) -> Answer<CompactionView> {
        let disk = record.name.as_str();
        self.check_coordinated(&record.volume).await?;
        let before = self.check_room(record).await?;
        let epoch = self.node.coordinators.get(&record.volume).mounted.map_or(0, |(epoch, _)| epoch);
        let compaction = Arc::new(Compaction::new(epoch, before));
        let begun = self.node.coordinators.compactions.begin(disk, &compaction);
        begun.map_err(|percent| is_compacting(disk, percent))?;
        let (operations, of, one) = (self.clone(), disk.to_owned(), Arc::clone(&compaction));
        let volume = record.volume.clone();
        weir_task::spawn(async move {
            let outcome = operations.run_compaction(&of, &one).await;
            let outcome = outcome.map_err(|error| match operations.is_interrupted(&volume, &one) {
                true => compaction_interrupted(&of),
                false => error.code(COMPACTION_FAILED),
            });
            match &outcome {
                Ok(()) => {
                    let (before, after) = (one.before.extents, one.extents.load(Ordering::Relaxed));
                    let text =
                        format!("{} copied: {before} extents before, {after} now", about(one.before.bytes));
                    operations.node.journal.tell("disk-compacted", &of, text);
                }
                Err(error) => {
                    let is_interrupted = error.code == COMPACTION_INTERRUPTED;
                    let kind = if is_interrupted { COMPACTION_INTERRUPTED } else { COMPACTION_FAILED };
                    operations.node.journal.tell(kind, &of, error.message.clone());
                }
            }
            one.end(outcome);
        });
        Ok(view(disk, &compaction, "copying"))
    }

    /// Whether this process stops, or does not coordinate the volume any more: then a copy ends.
    fn is_interrupted(&self, volume: &str, one: &Compaction) -> bool {
        let mounted = self.node.coordinators.get(volume).mounted;
        self.node.here.is_stopping() || mounted.is_none_or(|(epoch, _)| epoch != one.epoch)
    }

    async fn run_compaction(&self, disk: &str, compaction: &Arc<Compaction>) -> Answer<()> {
        let Some(_step) = self.node.intents.begin(disk) else { return Err(is_busy(disk)) };
        let content = NewContent::Same(Arc::clone(compaction));
        self.ask(disk, |done| Request::Replace { content, done }).await
    }

    /// How far the copy of a disk is, or how it has ended.
    ///
    /// # Errors
    /// As [`Operations::disks`]; it has failed; nothing is known of one.
    pub async fn compaction(&self, disk: &str) -> Answer<CompactionView> {
        let record = self.record(disk).await?;
        if let Some(coordinator) = self.coordinated_elsewhere(&record.volume).await? {
            let nothing: Option<&()> = None;
            return self.forward_within(super::STORAGE, &coordinator, disk, "compact", nothing).await;
        }
        let Some(one) = self.node.coordinators.compactions.get(disk) else {
            let message = format!("nothing is known here of a compaction of disk {disk}");
            return Err(ApiError::new(ApiErrorKind::NotFound, message)
                .hint("a new coordinator of its volume stops it; `weir events` shows what became of it"));
        };
        match one.outcome() {
            None => Ok(view(disk, &one, "copying")),
            Some(Ok(())) => Ok(view(disk, &one, "done")),
            Some(Err(error)) => Err(error),
        }
    }

    /// A disk that is being compacted is not opened, and not compacted again.
    pub(super) fn check_not_compacting(&self, disk: &str) -> Answer<()> {
        let percent = self.node.coordinators.compactions.under_way(disk);
        percent.map_or(Ok(()), |percent| Err(is_compacting(disk, percent)))
    }

    /// Whether the volume has space for a second copy of what the disk's file has. A copy whose node has ended does not count: it is removed.
    async fn check_room(&self, record: &DiskRecord) -> Answer<Pieces> {
        let disk = record.name.clone();
        let files = Files::of(&self.node, self.node.volume(&record.volume).await?);
        let Some(_step) = self.node.intents.begin(&disk) else { return Err(is_busy(&disk)) };
        let look = files.with(move |files| {
            snapshot::remove_unfinished(&**files, &disk)?;
            Ok((look(&**files, &DirVolume::file_of(&disk)?)?, files.space()?))
        });
        let (found, space) = self.bounded(look).await?;
        let Some(found) = found else {
            let message = format!("the extents of disk {} were not counted within {LOOK:?}", record.name);
            let hint = format!("`weir disk clone --copy {} NAME` makes a disk in few pieces", record.name);
            return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint(hint));
        };
        let needed = found.bytes + found.bytes / 64 + SPARE;
        if needed > space.available {
            let message = format!(
                "disk {} is not compacted: a copy needs {} for a while, and volume {} has {} available",
                record.name,
                about(needed),
                record.volume,
                about(space.available)
            );
            let hint = "delete a snapshot or a disk (`weir volume du` shows what they take), or add space";
            return Err(ApiError::new(ApiErrorKind::Refused, message).hint(hint));
        }
        Ok(found)
    }
}

fn is_compacting(disk: &str, percent: u64) -> ApiError {
    let message = format!("disk {disk} is being compacted: {percent} % copied");
    ApiError::new(ApiErrorKind::Refused, message).hint("try again when that is over")
}

/// `None`: there are too many extents to count them in time. Blocks.
fn look(files: &dyn DiskFiles, file: &str) -> Result<Option<Pieces>, VolumeError> {
    let (opened, deadline) = (files.open(file)?, Nanos::now() + LOOK);
    // A filesystem that has no extents to show shares no blocks.
    let failed = |error| clone_error(files.path(file), error);
    let size = opened.metadata().map_err(failed)?.len();
    pieces(&opened, size, || Nanos::now() < deadline).map_err(failed)
}

fn view(disk: &str, one: &Compaction, state: &str) -> CompactionView {
    let after = one.extents.load(Ordering::Relaxed);
    CompactionView {
        disk: disk.to_owned(),
        state: state.to_owned(),
        extents: one.before.extents,
        extents_after: (state == "done").then_some(after),
        bytes: one.before.bytes,
        copied: one.copied.load(Ordering::Relaxed),
        shared: one.before.shared,
        was_open: false,
    }
}

/// What an operator should know before blocks are shared; empty if that takes hardly any time.
fn advice(
    disk: &str,
    wanted: &LookAtLayout,
    (extents, takes): (Option<u64>, Option<Duration>),
    is_on_lun: bool,
) -> String {
    let (Some(extents), Some(takes)) = (extents, takes) else {
        return format!(
            "the extents of disk {disk} were not counted within {LOOK:?}: a copy may take too long"
        );
    };
    if extents <= MANY_EXTENTS {
        return String::new();
    }
    let of = match &wanted.snapshot {
        Some(snapshot) => format!("{disk}@{snapshot}"),
        None => format!("disk {disk}"),
    };
    let mut text =
        format!("{of} is in {extents} extents: sharing its blocks takes about {:.1} s", takes.as_secs_f64());
    if wanted.snapshot.is_none() {
        text += ", in which writes that its log does not take wait";
    }
    if takes > HELD {
        text += &format!("; after {} s it is given up", HELD.as_secs());
    }
    match (&wanted.snapshot, is_on_lun) {
        (_, false) => {}
        (None, true) => text += &format!(". `weir disk compact {disk}` copies it to fewer"),
        (Some(_), true) => {
            text += &format!(". A snapshot that is made after `weir disk compact {disk}` is in fewer");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_extents_are_told_with_the_time_and_the_remedy() {
        let of = |extents: u64, snapshot: Option<&str>, is_on_lun| {
            let wanted = LookAtLayout { snapshot: snapshot.map(str::to_owned), before: None };
            advice("d", &wanted, (Some(extents), Some(share_time(extents))), is_on_lun)
        };
        assert_eq!(of(MANY_EXTENTS, None, true), "");
        let many = of(16_384, None, true);
        assert!(
            many.starts_with("disk d is in 16384 extents: sharing its blocks takes about 0.4 s"),
            "{many}"
        );
        assert!(
            many.contains("its log does not take")
                && many.ends_with("`weir disk compact d` copies it to fewer")
        );
        let snapshot = of(16_384, Some("s"), true);
        assert!(
            snapshot.starts_with("d@s is in 16384 extents") && snapshot.contains("made after"),
            "{snapshot}"
        );
        assert!(!of(16_384, None, false).contains("compact"), "not in a directory");
        assert!(of(2_000_000, None, true).contains("after 10 s it is given up"));
    }
}
