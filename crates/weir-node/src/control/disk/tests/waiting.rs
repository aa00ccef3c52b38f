//! The registry takes long, and the disk is served all the same.

use std::sync::atomic::Ordering;

use weir_cluster::ownership::{Caller, Refusal};

use super::*;
use crate::control::faulty_registry::RegistryFaults;

/// Node `a` with a disk that is open, and a registry that is about to take no change any more.
async fn open(
    directory: &std::path::Path,
) -> (Arc<Node>, mpsc::Receiver<String>, DiskTask, Inbox, DiskRecord, Arc<RegistryFaults>) {
    let faults = Arc::new(RegistryFaults::default());
    let (node, told) = node_at(directory, Arc::clone(&faults)).await;
    let record = disk_of_a(&node, |_| {}).await;
    let (mut task, inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    (node, told, task, inbox, record, faults)
}

fn wanted(record: &DiskRecord) -> Result<DiskRecord, Refusal> {
    ownership::set_policy(
        record,
        Caller::Owner { node: &NodeRef::new("a", 1), epoch: 3 },
        Policy::WriteThrough,
    )
}

/// P9: a shard that waits for a peer, or for word that it is fenced, does not wait for a registry that hangs.
#[tokio::test]
async fn a_shard_is_answered_while_the_registry_hangs() {
    let directory = tempfile::tempdir().unwrap();
    let (_node, mut told, mut task, inbox, _, faults) = open(directory.path()).await;
    faults.hangs.store(true, Ordering::Relaxed);
    let (disk, nobody) = ("d".to_owned(), Some("nobody".to_owned()));
    let wanted_configuration =
        WantedConfiguration { epoch: 3, replicas: Vec::new(), write_back: false, wanted_replicas: Some(1) };
    let configuration = Notice::WantConfiguration { disk: disk.clone(), wanted: wanted_configuration };
    let peer = Notice::WantPeer { disk, node: nobody, connected: Vec::new(), exclude: Vec::new() };
    for notice in [configuration, peer] {
        inbox.send(Message::Notice(notice)).await.unwrap();
    }
    let answered = weir_task::timeout(SOON, async {
        tokio::select! {
            answer = told.recv() => answer.unwrap(),
            changed = task.change(wanted) => panic!("the registry hangs: {changed:?}"),
        }
    });
    let answer = answered.await.expect("the shard waits for the registry");
    assert!(answer.contains("PeerUnavailable") && answer.contains("nobody"), "{answer}");
    // The other change comes when there is none under way.
    faults.hangs.store(false, Ordering::Relaxed);
    assert!(task.catch_up().await);
    let answer = told.recv().await.unwrap();
    assert!(answer.starts_with("Configured"), "{answer}");
    assert!(!task.catch_up().await, "once");
}

/// P2: a node that learns from the registry that another one owns the disk releases it, whatever it is waiting for.
#[tokio::test]
async fn a_disk_that_was_taken_is_not_held_up_by_a_change_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told, mut task, _inbox, record, faults) = open(directory.path()).await;
    let (entry, _) = change::read(&*node.registry, "d").await.unwrap();
    let theirs = DiskRecord { owner: Some(NodeRef::new("b", 1)), epoch: 4, ..record };
    let taking = async {
        // The change is sent, and gets no answer.
        while !faults.hung.load(Ordering::Relaxed) {
            weir_task::sleep(Duration::from_millis(1)).await;
        }
        faults.hangs.store(false, Ordering::Relaxed);
        node.registry.transact(theirs.replace(&entry)).await.unwrap();
    };
    faults.hangs.store(true, Ordering::Relaxed);
    let (changed, ()) = tokio::join!(weir_task::timeout(SOON, task.change(wanted)), taking);
    let error = changed.expect("the change is waited for").unwrap_err();
    assert!(matches!(error, ChangeError::Refused(Refusal::Fenced { epoch: 4, .. })), "{error}");
    assert!(task.is_taken() && task.doubt.is_none());
}
