//! Conditions that end a node's part of a disk, and the notes about it in the registry.

use weir_cluster::registry::Transaction;

use super::*;

/// Replaces what is under the disk's key and waits until the node has seen it.
async fn overwrite(node: &Node, value: &str) {
    let seen = node.records.seen("d").revision();
    node.registry.transact(Transaction::new().put(keys::disk("d"), value)).await.unwrap();
    let mut disks = node.records.disks.changes();
    disks.wait_for(|known| known.seen("d").revision() > seen).await.unwrap();
}

/// P1: a record of a newer version says nothing to this one; above all it does not say that the disk was deleted.
#[tokio::test]
async fn a_record_that_cannot_be_read_ends_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    let record = disk_of_a(&node, |_| ()).await;
    let lease = *node.session.leased().borrow();
    let until = node.rights.begin("d", 3, record.grant_set(), lease);
    let (mut owner, _inbox) = DiskTask::new("d", &node);
    owner.local = Local::Open { epoch: 3 };
    let (mut replica, _inbox) = DiskTask::new("d", &node);
    overwrite(&node, r#"{"v":2,"something":"else"}"#).await;
    owner.reconcile().await;
    replica.reconcile().await;
    assert!(owner.local == Local::Open { epoch: 3 } && !owner.is_taken());
    assert!(until.load(std::sync::atomic::Ordering::Relaxed) > 0);
    assert!(owner.unreadable && replica.unreadable, "it is told of");
    assert!(told.try_recv().is_err() && replica.forgotten_below == 0, "the shard goes on as it was");
    let refused = owner.known().unwrap_err();
    assert!(refused.message.contains("version 2"), "{refused}");

    overwrite(&node, std::str::from_utf8(&record.encode()).unwrap()).await;
    owner.reconcile().await;
    assert!(!owner.unreadable && owner.local == Local::Open { epoch: 3 });
}

/// P4: a disk comes and goes while the registry is away; both of its owners are waited for until both notes are there.
#[tokio::test]
async fn every_release_is_noted() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::new(RegistryFaults::default());
    let (node, mut told) = node_at(directory.path(), Arc::clone(&faults)).await;
    tokio::spawn(async move { while told.recv().await.is_some() {} });
    let record = disk_of_a(&node, |_| ()).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    for (epoch, heard) in [(3, false), (7, true)] {
        task.local = Local::Open { epoch };
        let (b, former) = (NodeRef::new("b", 1), vec![FormerOwner::silent(NodeRef::new("a", 1), epoch)]);
        let theirs = DiskRecord { owner: Some(b), epoch: epoch + 1, former, ..record.clone() };
        faults.refuses.store(!heard, std::sync::atomic::Ordering::Relaxed);
        task.release_disk(epoch + 1, Some(theirs)).await;
        sleep_until(Some(task.note_at.unwrap_or_default())).await;
    }
    for epoch in [3, 7] {
        let note = node.registry.get(&keys::released("d", epoch, "a")).await.unwrap();
        assert!(note.is_some(), "epoch {epoch}");
    }
}

/// Following has ended, and the node that followed does not know it yet.
#[tokio::test]
async fn a_former_followers_write_moves_no_disk() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    disk_of_a(&node, |_| ()).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    let refused = task.move_to(&NodeRef::new("b", 1), Why::Followed).await.unwrap_err();
    assert!(refused.message.contains("does not follow it any more"), "{refused}");
    assert_eq!(task.known().unwrap().owner, Some(task.me.clone()));
}
