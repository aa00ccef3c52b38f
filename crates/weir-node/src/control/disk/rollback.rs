//! A closed disk goes back to one of its snapshots.
//!
//! A rollback is a tenure of its own: this process claims the disk, replaces its file and releases it. Nobody else has the disk open
//! meanwhile. Each log of an earlier tenure has an older epoch, so nothing of it is destaged over the disk's new content (P2, P4), and
//! whoever opens the disk afterwards begins with an empty log. If this process ends in between, it is an owner that has ended: the disk is
//! taken over with one content or the other.

use std::sync::Arc;

use weir_cluster::ownership::{self, Refusal};
use weir_cluster::records::{DiskRecord, VolumeKind};
use weir_volume::snapshot::{self, Rollback};
use weir_volume::{DiskFiles, VolumeError};

use super::record::PATIENCE;
use super::{Came, DiskTask};
use crate::control::lun_disks;
use crate::control::node::{blocking, random};
use crate::control::provisioning::Files;
use crate::error::{ApiError, ApiErrorKind};

/// What replaces a disk's file, and the snapshot that was made of the present one.
struct Prepared {
    files: Arc<dyn DiskFiles>,
    rollback: Rollback,
    kept: Option<String>,
}

impl DiskTask {
    /// Gives the disk, which is closed, the content of a snapshot. Its present content becomes the snapshot `keep_as` before.
    pub(super) async fn roll_back(
        &mut self,
        snapshot: String,
        keep_as: Option<String>,
    ) -> Result<(), ApiError> {
        self.check_not_deleted().map_err(|reason| {
            ApiError::new(ApiErrorKind::Refused, format!("disk {} does not go back: {reason}", self.name))
        })?;
        let me = self.me.clone();
        let claim = |record: &DiskRecord| match (&record.heir, record.former.first()) {
            (Some(heir), _) => Err(Refusal::Owned { owner: heir.clone() }),
            (None, Some(former)) => Err(Refusal::MayStillWrite { owner: former.node.clone() }),
            (None, None) => ownership::claim_free(record, &me),
        };
        let claimed = self.change(claim).await?;
        self.arrival = Some((claimed.epoch, Came::By(self.arrival_after(&claimed))));
        let gone_back = self.replace_file(&claimed, snapshot, keep_as).await;
        self.give_back(&claimed).await;
        gone_back
    }

    async fn replace_file(
        &mut self,
        record: &DiskRecord,
        snapshot: String,
        keep_as: Option<String>,
    ) -> Result<(), ApiError> {
        let (node, name) = (Arc::clone(&self.node), record.volume.clone());
        let volume = self.meanwhile(async move { node.volume(&name).await }).await??;
        let (files, disk) = (Files::of(&self.node, volume.clone()), record.name.clone());
        let prepare = blocking(move || prepare(files.open()?.into(), (&disk, &snapshot), keep_as));
        let prepared = self.meanwhile(prepare).await??;
        // That may have taken long. What follows is one change of a name.
        let now = self.read(PATIENCE).await;
        let is_still_ours =
            |now: &DiskRecord| now.owner.as_ref() == Some(&self.me) && now.epoch == record.epoch;
        if !now.is_ok_and(|now| is_still_ours(&now)) {
            let disk = self.name.clone();
            self.meanwhile(blocking(move || prepared.undo(&disk))).await??;
            let message = format!("disk {} was taken from this node before it had gone back", self.name);
            return Err(ApiError::new(ApiErrorKind::Unavailable, message)
                .hint("nothing has changed; check that this node reaches the registry, and try again"));
        }
        let (node, disk) = (Arc::clone(&self.node), record.name.clone());
        let replace = async move {
            let of = disk.clone();
            let replaced = blocking(move || prepared.finish(&of));
            match volume.kind {
                VolumeKind::Lun => lun_disks::while_unserved(&node, &volume.name, &disk, replaced).await,
                _ => replaced.await,
            }
        };
        self.meanwhile(replace).await?
    }
}

/// Everything that takes long. Blocks.
fn prepare(
    files: Arc<dyn DiskFiles>,
    (disk, snapshot): (&str, &str),
    keep_as: Option<String>,
) -> Result<Prepared, VolumeError> {
    let number = random();
    if let Some(name) = &keep_as {
        snapshot::keep(&*files, disk, name, number)?;
    }
    match Rollback::prepare(&*files, (disk, snapshot), number) {
        Ok(rollback) => Ok(Prepared { files, rollback, kept: keep_as }),
        Err(error) => {
            remove_kept(&*files, disk, keep_as);
            Err(error)
        }
    }
}

impl Prepared {
    fn finish(self, disk: &str) -> Result<(), VolumeError> {
        let Prepared { files, rollback, kept } = self;
        match rollback.replace(&*files) {
            // Whether or not it is durable: the disk has another content, and `kept` alone has the former one.
            Ok(()) => files.sync(),
            Err(error) => {
                remove_kept(&*files, disk, kept);
                Err(error)
            }
        }
    }

    fn undo(self, disk: &str) -> Result<(), VolumeError> {
        self.rollback.abandon(&*self.files);
        remove_kept(&*self.files, disk, self.kept);
        Ok(())
    }
}

fn remove_kept(files: &dyn DiskFiles, disk: &str, kept: Option<String>) {
    let Some(name) = kept else { return };
    if let Err(error) = snapshot::remove(files, disk, &name) {
        tracing::warn!(disk, snapshot = name, %error, "a snapshot is left of a rollback that did not happen");
    }
}
