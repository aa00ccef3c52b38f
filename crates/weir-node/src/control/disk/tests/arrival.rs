//! The arrival of a disk at a node that has closed it before: the node trusts an empty log only as long as no other node has
//! owned the disk.

use super::*;

/// Node `a`, and its task of a disk that it has closed in epoch 3 without being able to release it.
async fn closed(
    directory: &std::path::Path,
    change: impl FnOnce(&mut DiskRecord),
) -> (Arc<Node>, DiskTask, DiskRecord) {
    let (node, mut told) = node(directory).await;
    tokio::spawn(async move { while told.recv().await.is_some() {} });
    let record = disk_of_a(&node, change).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    // Its session ends while the disk is being closed.
    node.registry.revoke(node.session.lease()).await.unwrap();
    task.release(false).await.unwrap_err();
    assert_eq!(task.local, Local::Closed);
    (node, task, record)
}

/// Puts the record in the registry and waits until the node sees it.
async fn put(node: &Node, next: &DiskRecord) {
    let (entry, _) = change::read(&*node.registry, "d").await.unwrap();
    node.registry.transact(next.replace(&entry)).await.unwrap();
    let mut disks = node.records.disks.changes();
    disks.wait_for(|known| known["d"].epoch == next.epoch).await.unwrap();
}

/// P1: another node takes the disk over, writes, and hands it back with a log. Nothing of that log may be discarded.
#[tokio::test]
async fn a_log_that_is_handed_over_counts_though_the_disk_was_closed_here_before() {
    let directory = tempfile::tempdir().unwrap();
    let (a, b) = (NodeRef::new("a", 1), NodeRef::new("b", 1));
    let (node, mut task, record) = closed(directory.path(), |record| {
        (record.mode, record.replicas) = (Mode::WriteBack, vec![NodeRef::new("b", 1)]);
    })
    .await;
    let theirs = DiskRecord { owner: Some(b.clone()), epoch: 4, replicas: vec![a.clone()], ..record.clone() };
    put(&node, &theirs).await;
    node.session.register_again().await.unwrap();
    let former = FormerOwner::silent(b.clone(), 4);
    let mine = DiskRecord { owner: Some(a), epoch: 5, replicas: vec![b], former: vec![former], ..record };
    put(&node, &mine).await;
    // The record as the task last saw it, and as it is: either way, the log is the one that was handed over.
    for seen in [DiskRecord { former: Vec::new(), epoch: 3, ..mine.clone() }, mine] {
        let opened = task.record_to_open(&seen).await.unwrap();
        assert_eq!(task.arrival(&opened), Arrival::TakeOver { former: Former::Silent });
    }
}

/// P9: a cleanly closed disk opens again, whatever was tried in between.
#[tokio::test]
async fn an_export_that_fails_does_not_forget_that_the_log_is_empty() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut task, record) = closed(directory.path(), |record| {
        (record.policy, record.mode) = (Policy::WriteBack(0), Mode::WriteBack);
    })
    .await;
    let (done, answer) = oneshot::channel();
    task.on_request(Request::Export { accept_loss: false, done }).await;
    answer.await.unwrap().unwrap_err();
    node.session.register_again().await.unwrap();
    let opened = task.record_to_open(&record).await.unwrap();
    assert_eq!(task.arrival(&opened), Arrival::Clean, "no node holds a replica of its log");
}

/// P9: while its node stops, a disk that is closed is released as soon as the registry answers, and not opened again.
#[tokio::test]
async fn what_is_closed_is_released_later_while_the_node_stops() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut task, _) = closed(directory.path(), |record| {
        (record.policy, record.mode) = (Policy::WriteBack(0), Mode::WriteBack);
    })
    .await;
    node.here.stop();
    assert!(node.here.unreleased().contains("d"));
    task.reconcile().await;
    assert!(node.here.unreleased().contains("d"), "the registry does not hear of it");
    node.session.register_again().await.unwrap();
    sleep_until(task.retry_at).await;
    task.reconcile().await;
    let (_, now) = change::read(&*node.registry, "d").await.unwrap();
    assert_eq!((now.owner, now.mode), (None, Mode::WriteThrough));
    assert!(node.here.unreleased().is_empty() && task.local == Local::Closed);
}

/// P1: a log that another node has handed over since is not released as if it were empty.
#[tokio::test]
async fn a_release_that_comes_late_spares_the_next_owners_log() {
    let directory = tempfile::tempdir().unwrap();
    let (a, b) = (NodeRef::new("a", 1), NodeRef::new("b", 1));
    let (node, mut task, record) = closed(directory.path(), |record| {
        (record.policy, record.mode) = (Policy::WriteBack(0), Mode::WriteBack);
    })
    .await;
    node.session.register_again().await.unwrap();
    let former = FormerOwner::silent(b.clone(), 4);
    let mine = DiskRecord { owner: Some(a), epoch: 5, replicas: vec![b], former: vec![former], ..record };
    let (entry, seen) = change::read(&*node.registry, "d").await.unwrap();
    node.registry.transact(mine.replace(&entry)).await.unwrap();
    // The view, and with it the task, may lag behind.
    task.told(&seen, u64::MAX);
    task.release(false).await.unwrap_err();
    assert_eq!(change::read(&*node.registry, "d").await.unwrap().1, mine);
}
