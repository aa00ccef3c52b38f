//! What a former coordinator of a volume has left unfinished.
//!
//! Whoever makes a snapshot, a clone, a rollback or a compaction of a disk on a LUN is the volume's coordinator, and has the disk in hand
//! ([`crate::control::intents`]) from before the first file until after the last. It works through its own mount, and there is none but
//! this node's now: a former coordinator has unmounted, or is fenced. So what is there, and is in nobody's hand here, is left.

use std::sync::Arc;
use std::time::Duration;

use weir_cluster::records::VolumeRecord;
use weir_volume::snapshot::{self, Interrupted};

use crate::control::Node;
use crate::control::clone_snapshots;
use crate::control::provisioning::{Files, LEFTOVER_REMOVED};
use crate::error::{ApiError, COMPACTION_INTERRUPTED, compaction_interrupted};

/// Pause before another look, where one has failed.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// This node coordinates a volume from now on, in `epoch`: what a former coordinator has begun, and did not get done, is removed and told.
/// Until all of it has been looked at, or the epoch is over.
pub async fn remove(node: Arc<Node>, volume: String, epoch: u64) {
    while let Err(error) = try_remove(&node, &volume).await {
        tracing::warn!(volume, %error, "what a former coordinator has left is not removed yet");
        weir_task::sleep(LOOK_AGAIN).await;
        if node.coordinators.get(&volume).mounted.is_none_or(|(now, _)| now != epoch) {
            return;
        }
    }
}

async fn try_remove(node: &Node, volume: &str) -> Result<(), ApiError> {
    let record = node.volume(volume).await?;
    let files = Files::of(node, record.clone());
    for one in files.with(|files| snapshot::interrupted(&**files)).await? {
        drop_interrupted(node, &record, one).await;
    }
    let is_left = |name: &str| !node.intents.is_being_cloned(name);
    clone_snapshots::remove_left(node, &record, None, is_left).await;
    Ok(())
}

async fn drop_interrupted(node: &Node, volume: &VolumeRecord, one: Interrupted) {
    // Whoever has the disk in hand here has begun since, and has removed what was left.
    let Some(_step) = node.intents.begin(&one.disk) else { return };
    let (files, of) = (Files::of(node, volume.clone()), one.disk.clone());
    let removed = files.with(move |files| snapshot::remove_unfinished(&**files, &of)).await;
    let disk = &one.disk;
    match (&removed, one.is_copy) {
        (Err(error), _) => tracing::warn!(disk, %error, "what was unfinished of a disk is left"),
        (Ok(()), false) => {
            let what =
                "what a process left that ended while it made a snapshot or clone of it, or rolled it back";
            node.journal.tell(LEFTOVER_REMOVED, disk, what.to_owned());
        }
        (Ok(()), true) => {}
    }
    if one.is_copy {
        node.journal.tell(COMPACTION_INTERRUPTED, disk, compaction_interrupted(disk).message);
    }
}

#[cfg(test)]
mod tests {
    use weir_cluster::records::{EventRecord, NodeRef, Record, keys};
    use weir_volume::DirVolume;

    use super::*;
    use crate::control::disk::tests::{node, volume_in};

    fn names(volume: &DirVolume) -> Vec<String> {
        let all = snapshot::Files::list(volume, &|_| true).unwrap().into_iter().map(|entry| entry.name);
        let mut names: Vec<String> = all.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        names
    }

    /// It would pin blocks, keep its disk from being deleted, and nobody would ask for it.
    #[tokio::test]
    async fn what_is_in_nobodys_hand_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        // Its files are those of any volume.
        let volume = volume_in(&node, directory.path()).await;
        let (former, me) = (NodeRef::new("b", 1), node.session.node_ref());
        let clone = |maker, number| clone_snapshots::name(maker, number);
        let snap = |name: &str| format!("d@{name}.snap");
        let (left, own, made) = (clone(&former, 1), clone(&me, 2), clone(&me, 3));
        let kept = ["busy@0000000000000001.new".to_owned(), "d.raw".to_owned(), snap("clone-1"), snap(&made)];
        let others = [
            "copied@copy-0000000000000001.new".to_owned(),
            "d@0000000000000001.new".to_owned(),
            snap(&left),
            snap(&own),
        ];
        for file in kept.iter().chain(&others) {
            std::fs::write(volume.path().join(file), [1; 512]).unwrap();
        }
        let _step = node.intents.begin("busy").unwrap();
        let _cloning = node.intents.begin_clone(&made).unwrap();
        remove(Arc::clone(&node), "v".into(), 1).await;
        let mut expected = kept.to_vec();
        expected.sort();
        assert_eq!(names(&volume), expected);

        let told = loop {
            let listing = node.registry.list(keys::EVENTS).await.unwrap();
            let events = listing.entries.iter().map(|entry| EventRecord::of(entry).unwrap());
            let mut told: Vec<_> = events.map(|event| (event.kind, event.subject)).collect();
            if told.len() >= 4 {
                told.sort();
                break told;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        };
        let removed = |disk: &str| (LEFTOVER_REMOVED.to_owned(), disk.to_owned());
        let copy = (COMPACTION_INTERRUPTED.to_owned(), "copied".to_owned());
        assert_eq!(told, [copy, removed("d"), removed("d"), removed("d")]);
    }
}
