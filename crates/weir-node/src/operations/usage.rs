//! What the disks of a volume take, as the node that keeps its files finds.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use weir_block::Nanos;
use weir_cluster::records::{NodeRef, VolumeKind};
use weir_volume::VolumeError;
use weir_volume::disk_files::Space;
use weir_volume::usage::{FileUsage, Usage, What, measure};

use super::{Answer, MOST_FORWARDS, Operations, check_named};
use crate::api::{ApiError, ApiErrorKind, UsageItem, VolumeUsage};
use crate::client::{Other, USAGE};
use crate::control::node::blocking;
use crate::control::provisioning::Files;

/// Longest time that is spent on looking. Files with millions of extents take longer.
const LOOK: Duration = Duration::from_secs(30);

/// A filesystem frees what was deleted within about this time.
const FREES: Duration = Duration::from_secs(10);

/// Looks at once, for whoever only looks (P10): each holds a thread, and memory ([`measure`]), for as long as the storage lets it.
static LOOKS: Semaphore = Semaphore::const_new(MOST_LOOKS);
const MOST_LOOKS: usize = 3;

/// Longest wait for a look of others to end.
const TURN: Duration = Duration::from_secs(4);

impl Operations {
    /// What the disks and snapshots of a volume take.
    ///
    /// # Errors
    /// As [`Operations::disks`]; nobody coordinates the volume.
    pub async fn volume_usage(&self, volume: &str) -> Answer<VolumeUsage> {
        check_named(volume)?;
        if let Some(coordinator) = self.coordinated_elsewhere(volume).await? {
            return self.usage_from(&coordinator, volume).await;
        }
        self.check_coordinated(volume).await?;
        let record = self.node.volume(volume).await?;
        if record.kind == VolumeKind::Nbd {
            let message =
                format!("volume {volume} is an NBD server, which does not say what its exports take");
            return Err(ApiError::new(ApiErrorKind::Refused, message)
                .hint("`weir volume show` lists its disks with their sizes"));
        }
        let is_alone = record.kind == VolumeKind::Lun;
        let files = Files::of(&self.node, record);
        // A volume that is given up is not held for it.
        let epoch = self.node.coordinators.get(volume).mounted.map(|(epoch, _)| epoch);
        let (node, name, until) = (Arc::clone(&self.node), volume.to_owned(), Nanos::now() + LOOK);
        // Nor does a look go on for a client that has gone.
        let client = Arc::new(());
        let asked = Arc::downgrade(&client);
        let goes_on = move || {
            let now = node.coordinators.get(&name).mounted.map(|(epoch, _)| epoch);
            Nanos::now() < until && now == epoch && asked.strong_count() > 0
        };
        // On a thread, and not on a shard: the filesystem may take long for a file in many pieces.
        let looking = in_turn(&LOOKS, move || {
            files.run(|files| {
                let usage = measure(&**files, &goes_on)?;
                Ok((usage, files.space()?))
            })
        });
        let (usage, space) =
            tokio::time::timeout(LOOK + super::STORAGE, looking).await.unwrap_or_else(|_| {
                let message = format!("the filesystem of volume {volume} does not answer");
                Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("check the volume's storage"))
            })?;
        drop(client);
        let deleted = self.node.coordinators.get(volume).deleted.map(|at| Nanos::now() - at);
        let deleted_seconds_ago = deleted.filter(|age| *age < FREES).map(|age| age.as_secs());
        Ok(VolumeUsage { deleted_seconds_ago, ..view(volume, is_alone, &usage, space) })
    }

    async fn usage_from(&self, coordinator: &NodeRef, volume: &str) -> Answer<VolumeUsage> {
        let nodes = self.node.records.nodes.now();
        let there = nodes.get(&coordinator.node).filter(|there| there.node_ref() == *coordinator);
        let Some(there) = there.filter(|_| self.forwarded < MOST_FORWARDS) else {
            let message = format!("the coordinator of volume {volume} has just changed");
            return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint("try again"));
        };
        let at = self.api_of(there)?;
        let other = Other { at: &at, process: coordinator, forwarded: self.forwarded + 1 };
        other.get(&format!("/v1/volumes/{volume}/usage"), USAGE).await
    }
}

/// Runs `look`, which blocks, when it is its turn. The turn ends with it, and not with its waiter.
async fn in_turn<T: Send + 'static>(
    turns: &'static Semaphore,
    look: impl FnOnce() -> Result<T, VolumeError> + Send + 'static,
) -> Answer<T> {
    let Ok(Ok(turn)) = tokio::time::timeout(TURN, turns.acquire()).await else {
        let message = format!("this node is looking at what disks take for {MOST_LOOKS} other requests");
        return Err(ApiError::new(ApiErrorKind::Unavailable, message).hint(
            "try again in half a minute; if it stays so, check the volumes' storage: one may not answer",
        ));
    };
    blocking(move || {
        let looked = look();
        drop(turn);
        looked
    })
    .await
}

fn view(volume: &str, is_alone: bool, usage: &Usage, space: Space) -> VolumeUsage {
    let parts = usage.files.iter().filter_map(|file| file.parts);
    let exclusive = parts.map(|parts| parts.exclusive).sum();
    let used = space.size - space.free.min(space.size);
    // What is written meanwhile may be in one number and not in the other.
    let other = usage.shared_once.map(|shared| used.saturating_sub(exclusive + shared));
    VolumeUsage {
        volume: volume.to_owned(),
        size: space.size,
        available: space.available,
        used,
        exclusive,
        shared: usage.shared_once,
        other,
        filesystem_is_its_own: is_alone,
        deleted_seconds_ago: None,
        items: usage.files.iter().map(item).collect(),
    }
}

fn item(file: &FileUsage) -> UsageItem {
    let (kind, name) = match &file.what {
        What::Disk(name) => ("disk", name),
        What::Snapshot(name) => ("snapshot", name),
        What::Unfinished(name) => ("unfinished", name),
    };
    UsageItem {
        kind: kind.to_owned(),
        name: name.clone(),
        size: file.entry.size,
        allocated: file.entry.allocated,
        exclusive: file.parts.map(|parts| parts.exclusive),
        shared: file.parts.map(|parts| parts.shared),
        extents: file.parts.map(|parts| parts.extents),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Requests whose clients have gone still hold their threads: further ones are refused, and not added to them.
    #[tokio::test]
    async fn no_more_looks_go_on_than_there_are_turns() {
        static TURNS: Semaphore = Semaphore::const_new(2);
        let mut storage = Vec::new();
        for _ in 0..2 {
            let (answers, answer) = mpsc::channel::<()>();
            let (begins, mut begun) = tokio::sync::mpsc::unbounded_channel();
            let look = in_turn(&TURNS, move || {
                begins.send(()).unwrap();
                let _ = answer.recv();
                Ok(())
            });
            tokio::select! {
                _ = look => panic!("the storage does not answer yet"),
                // The client goes.
                _ = begun.recv() => {}
            }
            storage.push(answers);
        }
        let refused = in_turn(&TURNS, || Ok(())).await.unwrap_err();
        assert_eq!(refused.kind, ApiErrorKind::Unavailable);
        assert!(refused.hint.contains("try again"), "{refused:?}");
        // One waits for its turn, and gets it.
        storage.pop();
        in_turn(&TURNS, || Ok(())).await.unwrap();
    }
}
