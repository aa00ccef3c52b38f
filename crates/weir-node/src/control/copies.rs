//! The news of their disks' records for the copies of other owners' logs on this node's shards.
//!
//! Not from the disks' tasks: such a task may wait for long in the middle of a step, and a former owner would keep its connection to
//! the copy for as long (P2).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use weir_cluster::records::DiskRecord;
use weir_cluster::view::Seen;

use super::Node;
use crate::shard::messages::Command;

/// Pause before a shard whose queue was full is told again.
const TELL_AGAIN: Duration = Duration::from_millis(50);

/// The epoch of a record, and the node that it names as the owner.
type News = (u64, Option<String>);

/// Tells the shards of each change of a disk's epoch or owner: a copy believes an owner only a few epochs beyond the record, and
/// listens to no other node. Never waits for a shard, so one that hangs holds up its own disks only.
pub async fn keep_told(node: Arc<Node>) {
    let (mut shown, mut learned) = (node.records.disks.changes(), node.records.learned());
    let mut told = BTreeMap::new();
    loop {
        shown.mark_unchanged();
        learned.mark_unchanged();
        let all = tell_news(&node, &mut told);
        tokio::select! {
            biased;
            changed = shown.changed() => if changed.is_err() { return },
            changed = learned.changed() => if changed.is_err() { return },
            () = weir_task::sleep(TELL_AGAIN), if !all => {}
        }
    }
}

/// Returns whether all shards have taken what is new.
fn tell_news(node: &Node, told: &mut BTreeMap<String, News>) -> bool {
    let mut all = true;
    let mut tell = |disk: &str, (epoch, owner): News| {
        let command = Command::RecordIs { disk: disk.to_owned(), epoch, owner };
        let taken = node.shards.try_send(disk, command).is_ok();
        all &= taken;
        taken
    };
    node.records.for_each_disk(|record| {
        let owner = record.owner.as_ref().map(|owner| owner.node.as_str());
        let is_news = |(epoch, known): &News| {
            record.epoch >= *epoch && (record.epoch, owner) != (*epoch, known.as_deref())
        };
        if told.get(&record.name).is_none_or(is_news) && tell(&record.name, news_of(record)) {
            told.insert(record.name.clone(), news_of(record));
        }
    });
    // Nobody owns a disk that is gone. A later one of its name begins in a later epoch.
    let shown = node.records.disks.now();
    told.retain(|disk, (epoch, _)| {
        shown.exists(disk) || node.records.seen(disk) != Seen::Nothing || !tell(disk, (*epoch, None))
    });
    all
}

/// Tells a copy that may have been made only now: it has not heard what its shard was told before.
pub async fn tell(node: &Node, as_checked: &DiskRecord) {
    let newest = node.records.disk(&as_checked.name);
    let (epoch, owner) = newest.as_ref().map_or((as_checked.epoch, None), news_of);
    let command = Command::RecordIs { disk: as_checked.name.clone(), epoch, owner };
    node.shards.send(&as_checked.name, command).await;
}

fn news_of(record: &DiskRecord) -> News {
    (record.epoch, record.owner.as_ref().map(|owner| owner.node.clone()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::sync::mpsc;
    use weir_cluster::records::{Mode, NodeRef, Record, keys};
    use weir_cluster::registry::Transaction;

    use super::*;
    use crate::control::change;
    use crate::control::disk::tests::{SOON, disk_of_a, node};

    async fn next(told: &mut mpsc::Receiver<String>) -> String {
        loop {
            let command = weir_task::timeout(SOON, told.recv()).await.expect("nothing is told").unwrap();
            if command.starts_with("RecordIs") {
                return command;
            }
        }
    }

    /// P2: there is no task of the disk here at all, or it waits for something; a former owner's connection ends all the same.
    #[tokio::test]
    async fn a_copy_hears_of_each_change_of_hands_whatever_the_disks_task_does() {
        let directory = tempfile::tempdir().unwrap();
        let (node, mut told) = node(directory.path()).await;
        let of_b = |record: &mut DiskRecord| {
            (record.owner, record.mode) = (Some(NodeRef::new("b", 1)), Mode::WriteBack);
            record.replicas = vec![NodeRef::new("a", 1)];
        };
        let record = disk_of_a(&node, of_b).await;
        weir_task::spawn(keep_told(Arc::clone(&node)));
        assert_eq!(next(&mut told).await, "RecordIs { disk: \"d\", epoch: 3, owner: Some(\"b\") }");
        for (epoch, owner) in [(40, Some("b")), (40, Some("c")), (41, None)] {
            let mut owned = DiskRecord { epoch, ..record.clone() };
            owned.owner = owner.map(|name| NodeRef::new(name, 1));
            if owner.is_none() {
                (owned.mode, owned.replicas) = (Mode::WriteThrough, Vec::new());
            }
            let (entry, _) = change::read(&*node.registry, "d").await.unwrap();
            node.registry.transact(owned.replace(&entry)).await.unwrap();
            let expected = format!("RecordIs {{ disk: \"d\", epoch: {epoch}, owner: {owner:?} }}");
            assert_eq!(next(&mut told).await, expected);
        }
        // A record that was read for a connection is newer than the view, and an older one changes nothing.
        let read = DiskRecord { epoch: 50, owner: Some(NodeRef::new("e", 1)), ..record.clone() };
        node.records.learn(&DiskRecord { epoch: 39, ..record.clone() }, u64::MAX - 1);
        node.records.learn(&read, u64::MAX);
        let newest = "RecordIs { disk: \"d\", epoch: 50, owner: Some(\"e\") }";
        assert_eq!(next(&mut told).await, newest);
        tell(&node, &record).await;
        assert_eq!(next(&mut told).await, newest, "a copy that was made for an older record");
    }

    #[tokio::test]
    async fn nobody_owns_a_disk_that_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let (node, mut told) = node(directory.path()).await;
        disk_of_a(&node, |_| {}).await;
        weir_task::spawn(keep_told(Arc::clone(&node)));
        assert_eq!(next(&mut told).await, "RecordIs { disk: \"d\", epoch: 3, owner: Some(\"a\") }");
        node.registry.transact(Transaction::new().delete(keys::disk("d"))).await.unwrap();
        assert_eq!(next(&mut told).await, "RecordIs { disk: \"d\", epoch: 3, owner: None }");
        disk_of_a(&node, |record| (record.epoch, record.id) = (9, 9)).await;
        assert_eq!(next(&mut told).await, "RecordIs { disk: \"d\", epoch: 9, owner: Some(\"a\") }");
    }

    /// The shard of these disks takes nothing for a while, and its queue has room for a few.
    #[tokio::test]
    async fn a_shard_with_a_full_queue_is_told_later() {
        const DISKS: u64 = 200;
        let directory = tempfile::tempdir().unwrap();
        let (node, mut told) = node(directory.path()).await;
        let mut disk = disk_of_a(&node, |_| {}).await;
        for number in 1..DISKS {
            disk.name = format!("d{number}");
            node.registry.transact(disk.create(keys::disk(&disk.name))).await.unwrap();
        }
        let mut disks = node.records.disks.changes();
        disks.wait_for(|known| known.len() == DISKS as usize).await.unwrap();
        weir_task::spawn(keep_told(Arc::clone(&node)));
        weir_task::sleep(TELL_AGAIN * 2).await;
        let mut all = std::collections::BTreeSet::new();
        for _ in 0..DISKS {
            all.insert(next(&mut told).await);
        }
        assert_eq!(all.len(), DISKS as usize);
    }
}
