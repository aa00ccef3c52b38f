//! A replica whose node is paused while nobody writes.

use super::*;

/// An open disk of `a` with a replica on `b`, which the registry does not hear.
async fn watched(node: &Arc<Node>) -> (DiskTask, DiskRecord) {
    let record = disk_of_a(node, |record| {
        (record.mode, record.replicas) = (Mode::WriteBack, vec![NodeRef::new("b", 1)]);
    })
    .await;
    let (mut task, _inbox) = DiskTask::new("d", node);
    task.local = Local::Open { epoch: record.epoch };
    (task, record)
}

async fn is_told(told: &mut mpsc::Receiver<String>) -> bool {
    let told = tokio::time::timeout(Duration::from_millis(100), told.recv()).await;
    told.is_ok_and(|told| told.is_some_and(|command| command.starts_with("PeerSilent")))
}

#[tokio::test]
async fn a_replica_that_nobody_hears_is_reported_once_without_a_write() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    let (mut task, record) = watched(&node).await;
    let again = task.settle_silent(&record).await.expect("it may answer yet");
    assert!(!is_told(&mut told).await);
    sleep_until(Some(again)).await;
    assert_eq!(task.settle_silent(&record).await, None);
    assert!(is_told(&mut told).await);
    task.settle_silent(&record).await;
    assert!(!is_told(&mut told).await, "once");
}

/// It has lost the registry, and keeps its copy.
#[tokio::test]
async fn a_replica_that_answers_this_node_is_not_silent() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    let (mut task, record) = watched(&node).await;
    let again = task.settle_silent(&record).await.expect("it may answer yet");
    sleep_until(Some(again)).await;
    node.rights.answered("b", &[], &[], Nanos::now());
    assert!(task.settle_silent(&record).await.is_some());
    assert!(!is_told(&mut told).await);
}
