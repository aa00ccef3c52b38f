//! A closed disk gets another file: one with the content of a snapshot (a rollback), or with its own content in fewer pieces.
//!
//! A replacement is a tenure of its own: this process claims the disk, replaces its file and releases it. Nobody else has the disk open
//! meanwhile. Each log of an earlier tenure has an older epoch, so nothing of it is destaged over the disk's new content (P2, P4), and
//! whoever opens the disk afterwards begins with an empty log. If this process ends in between, it is an owner that has ended: the disk is
//! taken over with one content or the other.
//!
//! The change of the file's name needs the right to serve the disk, as each write does. It may nevertheless be late, as a write may: this
//! process stands still, or its storage is slow. So whoever takes a disk over removes what would be renamed, before it opens the
//! disk's file ([`DiskTask::bar_replacement`]): the file has the other content by then, or does not get it.
//!
//! A copy in fewer pieces is what the disk holds only if nobody has written to the disk since it was begun: each writer is an owner in a
//! later epoch, and the record, read after the copy, shows none.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use weir_block::Nanos;
use weir_cluster::ownership::{self, Refusal};
use weir_cluster::records::{DiskRecord, Source, VolumeKind, VolumeRecord};
use weir_volume::snapshot::{self, Begun, Replacement};
use weir_volume::{DiskFiles, VolumeError, compaction};

use super::record::PATIENCE;
use super::{Came, DiskTask, NewContent};
use crate::control::compactions::Compaction;
use crate::control::node::{blocking, random};
use crate::control::provisioning::{Files, to_its_end};
use crate::control::{Node, clone_snapshots, lun_disks};
use crate::error::{ApiError, ApiErrorKind};

/// What replaces a disk's file, and the snapshot that was made of the present one.
struct Prepared {
    files: Arc<dyn DiskFiles>,
    replacement: Replacement,
    kept: Option<String>,
}

impl DiskTask {
    /// Gives the disk, which is closed, another file.
    pub(super) async fn replace(&mut self, content: NewContent) -> Result<(), ApiError> {
        self.check_not_deleted().map_err(|reason| {
            ApiError::new(
                ApiErrorKind::Refused,
                format!("the file of disk {} is not replaced: {reason}", self.name),
            )
        })?;
        let me = self.me.clone();
        let claim = |record: &DiskRecord| match (&record.heir, record.former.first()) {
            (Some(heir), _) => Err(Refusal::Owned { owner: heir.clone() }),
            (None, Some(former)) => Err(Refusal::MayStillWrite { owner: former.node.clone() }),
            (None, None) => ownership::claim_free(record, &me),
        };
        let claimed = self.change(claim).await?;
        self.arrival = Some((claimed.epoch, Came::By(self.arrival_after(&claimed))));
        let replaced = self.replace_file(&claimed, content).await;
        self.give_back(&claimed).await;
        replaced
    }

    async fn replace_file(&mut self, record: &DiskRecord, content: NewContent) -> Result<(), ApiError> {
        let (node, name) = (Arc::clone(&self.node), record.volume.clone());
        let volume = self.meanwhile(async move { node.volume(&name).await }).await??;
        let (files, disk) = (Files::of(&self.node, volume.clone()), record.name.clone());
        let (node, name, volume_kind) = (Arc::clone(&self.node), volume.name.clone(), volume.kind);
        let prepare = async move {
            let is_copy = matches!(content, NewContent::Same(_));
            let (coordinator, of, replaced) = (Arc::clone(&node), name.clone(), disk.clone());
            let coordinates = move |epoch| {
                let mounted = coordinator.coordinators.get(&of).mounted;
                !coordinator.here.is_stopping() && mounted.is_some_and(|(now, _)| now == epoch)
            };
            let work = files.with(move |files| prepare(Arc::clone(files), &replaced, content, coordinates));
            // The disk's last owner may count as one that has only lost its connection.
            match (volume_kind, is_copy) {
                // To keep the present content shares the blocks of the disk's file. Whoever serves the disk knows them as blocks of that file
                // alone, and would write into the snapshot (I1, I4), also if nothing comes of the replacement afterwards.
                (VolumeKind::Lun, false) => {
                    // The volume's other disks are served meanwhile: many extents take minutes.
                    let Some(_unserved) = node.intents.begin_unserved(&disk) else {
                        let message = format!("another change of the file of disk {disk} has not ended yet");
                        return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"));
                    };
                    lun_disks::stop_serving(&node, &name, Some(&disk)).await;
                    work.await
                }
                // It shares nothing with the disk's file. While it goes on, which may be for hours, other disks are served.
                (VolumeKind::Lun, true) => {
                    lun_disks::stop_serving(&node, &name, Some(&disk)).await;
                    work.await
                }
                _ => work.await,
            }
        };
        // A task of its own: if nobody waits for it any more, the disk stays unserved until it has ended.
        let prepared = self.meanwhile(weir_task::spawn(prepare)).await?;
        let aborted = |_| ApiError::new(ApiErrorKind::Failed, "the preparation of another file was aborted");
        let prepared = prepared.map_err(aborted)??;
        // That may have taken long. What follows is one change of a name.
        let session = *self.node.session.leased().borrow();
        let now = self.read(PATIENCE).await;
        let is_still_ours =
            |now: &DiskRecord| now.owner.as_ref() == Some(&self.me) && now.epoch == record.epoch;
        let serves_until = match now.ok().filter(is_still_ours) {
            Some(now) => self.node.rights.begin(&self.name, now.epoch, now.grant_set(), session),
            None => Arc::default(),
        };
        let (node, disk) = (Arc::clone(&self.node), record.name.clone());
        let replace = async move {
            let of = disk.clone();
            let replaced = blocking(move || prepared.finish(&of, &serves_until));
            match volume.kind {
                VolumeKind::Lun => lun_disks::while_unserved(&node, &volume.name, &disk, replaced).await,
                _ => replaced.await,
            }
        };
        let replaced = self.meanwhile(replace).await;
        self.node.rights.end(&self.name);
        if replaced?? {
            return Ok(());
        }
        let message =
            format!("this node's right to serve disk {} had ended before its file was replaced", self.name);
        Err(ApiError::new(ApiErrorKind::Unavailable, message)
            .hint("the disk is as it was; check that this node reaches the registry, and try again"))
    }

    /// Nothing that a former owner of the disk has prepared becomes the disk's file any more, however late that owner is (P4).
    pub(super) async fn bar_replacement(&mut self, record: &DiskRecord) -> Result<(), String> {
        let (Source::File { name }, false) = (&record.source, record.former.is_empty()) else {
            return Ok(());
        };
        let (node, volume, name) = (Arc::clone(&self.node), record.volume.clone(), name.clone());
        let disk = self.name.clone();
        // To its end: while the storage does not answer, a thread waits for it, and another attempt would take one more.
        let bar = to_its_end(async move {
            let volume = node.volume(&volume).await?;
            if volume.kind == VolumeKind::Lun {
                // Its coordinator alone changes the names of files there, and serves a disk to nobody meanwhile.
                return Ok(None);
            }
            let Some(_alone) = node.intents.begin_bar(&disk) else {
                let message = format!(
                    "volume {} has not answered since an earlier attempt to open disk {disk}; check its storage",
                    volume.name
                );
                return Err(ApiError::new(ApiErrorKind::Unavailable, message));
            };
            let (files, file) = (Files::Dir(volume.clone()), name.clone());
            files.with(move |files| snapshot::remove_unfinished(&**files, &file)).await?;
            Ok(Some((volume, name)))
        });
        if let Some((volume, name)) = self.storage(bar).await.map_err(|error| error.message)? {
            let node = Arc::clone(&self.node);
            weir_task::spawn(async move { drop_clones(&node, &volume, name).await });
        }
        Ok(())
    }
}

/// In a directory the owner makes the clones of its disk, and nobody waits for those of an owner that has ended. If it lives all the same, its
/// clone may fail.
async fn drop_clones(node: &Node, volume: &VolumeRecord, disk: String) {
    let (me, live) = (node.session.node_ref(), node.records.nodes.now());
    let is_left = |name: &str| {
        let mut makers = live.values().map(|one| one.node_ref()).chain([me.clone()]);
        !makers.any(|maker| clone_snapshots::is_of(name, &maker))
    };
    clone_snapshots::remove_left(node, volume, Some(disk), is_left).await;
}

/// Everything that takes long. `coordinates`: this process coordinates the volume, in this epoch, and does not stop. Blocks.
fn prepare(
    files: Arc<dyn DiskFiles>,
    disk: &str,
    content: NewContent,
    coordinates: impl Fn(u64) -> bool,
) -> Result<Prepared, VolumeError> {
    let number = random();
    let (snapshot, keep_as) = match content {
        NewContent::Snapshot { snapshot, keep_as } => (snapshot, keep_as),
        NewContent::Same(compaction) => {
            let replacement = copy(&*files, disk, number, &compaction, coordinates)?;
            return Ok(Prepared { files, replacement, kept: None });
        }
    };
    if let Some(name) = &keep_as {
        snapshot::keep(&*files, disk, name, number)?;
    }
    match Replacement::of_snapshot(&*files, (disk, &snapshot), number) {
        Ok(replacement) => Ok(Prepared { files, replacement, kept: keep_as }),
        Err(error) => {
            remove_kept(&*files, disk, keep_as);
            Err(error)
        }
    }
}

/// The disk's content in another file. Ends when this process stops or does not coordinate the volume any more: that waits for it.
fn copy(
    files: &dyn DiskFiles,
    disk: &str,
    number: u64,
    compaction: &Compaction,
    coordinates: impl Fn(u64) -> bool,
) -> Result<Replacement, VolumeError> {
    let Begun { replacement, own, new, size } = Replacement::begin(files, disk, number, true)?;
    let path = files.disk_path(disk)?;
    let copied = compaction::copy(&own, &new, size, |bytes| {
        compaction.copied.fetch_add(bytes, Ordering::Relaxed);
        coordinates(compaction.epoch)
    });
    let counted =
        copied.and_then(|done| Ok(if done { compaction::pieces(&new, size, || true)? } else { None }));
    let error = match counted {
        Ok(Some(after)) => {
            compaction.extents.store(after.extents, Ordering::Relaxed);
            return Ok(replacement);
        }
        Ok(None) => VolumeError::Stopped(path),
        Err(error) => snapshot::clone_error(path, error),
    };
    replacement.abandon(files);
    Err(error)
}

impl Prepared {
    /// Replaces the disk's file, unless the right to serve the disk has ended: then nothing has changed. Blocks.
    fn finish(self, disk: &str, serves_until: &AtomicU64) -> Result<bool, VolumeError> {
        let files = Arc::clone(&self.files);
        self.replace(disk, serves_until).map_err(|error| files.judge(error))
    }

    fn replace(self, disk: &str, serves_until: &AtomicU64) -> Result<bool, VolumeError> {
        let Prepared { files, replacement, kept } = self;
        let may_serve = || Nanos::now() < Nanos(serves_until.load(Ordering::Acquire));
        match replacement.replace(&*files, may_serve) {
            // Whether or not it is durable: the disk has another content, and `kept` alone has the former one.
            Ok(true) => files.sync().map(|()| true),
            not_replaced => {
                // Without the right, a snapshot of this name may be another node's.
                if may_serve() {
                    remove_kept(&*files, disk, kept);
                } else if let Some(kept) = kept {
                    tracing::warn!(
                        disk,
                        snapshot = kept,
                        "a snapshot is left of a rollback that did not happen"
                    );
                }
                not_replaced
            }
        }
    }
}

fn remove_kept(files: &dyn DiskFiles, disk: &str, kept: Option<String>) {
    let Some(name) = kept else { return };
    if let Err(error) = snapshot::remove(files, disk, &name) {
        tracing::warn!(disk, snapshot = name, %error, "a snapshot is left of a rollback that did not happen");
    }
}
