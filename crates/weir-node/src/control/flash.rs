//! The logs on this node's flash when the node starts.

use weir_accel::flash::FlashDevice;
use weir_cluster::view::Seen;

use super::node::Node;
use super::shards::Shards;
use crate::shard::messages::Command;

/// Has the shards read all logs on the flash, to be kept as replicas, however long that takes: a node that joined before
/// would deny its copies. Returns the disks whose copies cannot be used, and why.
pub async fn recover(flash: Option<&FlashDevice>, shards: &Shards) -> Vec<(String, String)> {
    let mut damaged = Vec::new();
    for (disk, _) in flash.map(FlashDevice::disks).unwrap_or_default() {
        let name = disk.clone();
        let recovered = shards.ask_patiently(&disk, |done| Command::Recover { disk: name, done }).await;
        if let Err(reason) = recovered.unwrap_or_else(|ended| Err(ended.to_string())) {
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
        let is_strange = match node.records.seen(&disk) {
            Seen::Nothing => true,
            Seen::Record { record, .. } => record.id != id,
            Seen::Unreadable { .. } => false,
        };
        if is_strange {
            tracing::info!(disk, "discarding the log of a disk that no longer exists");
            node.shards
                .send(&disk, Command::ForgetReplica { disk: disk.clone(), below_epoch: u64::MAX })
                .await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::mpsc;
    use weir_accel::AccelConfig;
    use weir_accel::flash::device_bytes;
    use weir_block::Nanos;

    use super::*;
    use crate::shard::ShardQueue;
    use crate::shard::health::{Health, Pulse};

    /// A large log takes longer to read than a turn of a shard may take at any other time.
    #[tokio::test]
    async fn a_node_waits_for_its_flash_to_be_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("flash");
        let log = AccelConfig::SMALLEST_LOG;
        let flash = FlashDevice::open(&path, device_bytes(1, log), log, 1).expect("made");
        let mut lease = flash.take("d", 1).expect("it is empty");
        let (offset, entry) = lease.entry().expect("to be entered");
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("there");
        file.write_all_at(&entry, offset).expect("room");
        lease.entered();

        let (commands, mut queue) = mpsc::channel(16);
        let health = Arc::new(Health::default());
        let shards = Shards::new(vec![ShardQueue::new(commands, || {}).with_health(Arc::clone(&health))]);
        let reads = async {
            let Some(Command::Recover { done, .. }) = queue.recv().await else { panic!("it is asked") };
            Pulse::new(health).begin(Nanos(Nanos::now().0 - 60_000_000_000));
            tokio::time::sleep(Duration::from_millis(500)).await;
            done.send(Err("frame 7 is damaged".into())).expect("somebody waits");
        };
        let (damaged, ()) = tokio::join!(recover(Some(&flash), &shards), reads);
        assert_eq!(damaged, [("d".to_owned(), "frame 7 is damaged".to_owned())]);
    }
}
