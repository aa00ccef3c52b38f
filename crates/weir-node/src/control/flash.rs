//! What is at rest on this node's flash when the node starts.

use weir_accel::flash::FlashDevice;

use super::node::Node;
use super::shards::Shards;
use crate::shard::messages::Command;

/// Has the shards read all logs that are at rest, to be kept as replicas. Returns the disks whose copies cannot be used, and
/// why.
pub async fn recover(flash: Option<&FlashDevice>, shards: &Shards) -> Vec<(String, String)> {
    let mut damaged = Vec::new();
    for (disk, _) in flash.map(FlashDevice::disks).unwrap_or_default() {
        let name = disk.clone();
        let recovered = shards.ask(&disk, |done| Command::Recover { disk: name, done }).await;
        if let Ok(Err(reason)) = recovered {
            tracing::error!(disk, reason, "a log on the flash cannot be used");
            damaged.push((disk, reason));
        }
    }
    damaged
}

/// Gives up logs of disks that were deleted while this node was away; another disk may have their name by now. (Those of disks
/// that there are, and whose record does not count on this node any more, are given up by their tasks.)
pub async fn forget_strangers(node: &Node) {
    for (disk, id) in node.flash.as_ref().map(|flash| flash.disks()).unwrap_or_default() {
        if node.world.disk(&disk).is_none_or(|record| record.id != id) {
            tracing::info!(disk, "the log of a disk that there is no more is given up");
            node.shards
                .send(&disk, Command::ForgetReplica { disk: disk.clone(), below_epoch: u64::MAX })
                .await;
        }
    }
}
