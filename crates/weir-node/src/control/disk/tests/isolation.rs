//! An owner without a session that a member still hears is isolated: its disk stays there.

use weir_cluster::records::{Isolation, NodeStatesRecord};

use super::*;
use crate::control::{node_states, rights};

/// The disk of `b`, which has no session, with a replica on this node.
async fn disk_of_b(node: &Node) -> DiskRecord {
    let change = |record: &mut DiskRecord| {
        record.owner = Some(NodeRef::new("b", 1));
        (record.mode, record.replicas) = (Mode::WriteBack, vec![NodeRef::new("a", 1)]);
    };
    disk_of_a(node, change).await
}

async fn states(node: &Node) -> NodeStatesRecord {
    let entry = node.registry.get(keys::NODE_STATES).await.unwrap();
    entry.map(|entry| NodeStatesRecord::of(&entry).unwrap()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_is_taken_from_an_isolated_owner_only_when_nobody_hears_it() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    tokio::spawn(async move { while told.recv().await.is_some() {} });
    let record = disk_of_b(&node).await;
    let key = rights::key(&record);
    node.rights.hear(&key, "b", record.epoch);
    weir_task::spawn(node_states::keep(Arc::clone(&node)));
    let _inbox = start("d", &node);
    let heard_until = Nanos::now() + Duration::from_secs(4);
    while Nanos::now() < heard_until {
        node.rights.hear(&key, "b", record.epoch);
        weir_task::sleep(Duration::from_millis(100)).await;
        assert_eq!(node.records.disk("d").unwrap(), record, "it stays");
    }
    let states = states(&node).await;
    assert!(states.nodes.contains_key("a"), "it has said that it is there");
    let isolation: Option<Isolation> = states.nodes["b"].isolation;
    assert_eq!(isolation.unwrap().incarnation, 1);
    assert_eq!(states.nodes["b"].isolations_unix_ms.len(), 1, "counted once");
    let mut disks = node.records.disks.changes();
    let taken = disks.wait_for(|known| known["d"].owner == Some(NodeRef::new("a", 1)));
    weir_task::timeout(SOON, taken).await.expect("nobody hears it: it is taken over").unwrap();
}

#[tokio::test]
async fn a_takeover_waits_for_no_owner_of_another_epoch_and_none_that_has_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let record = disk_of_b(&node).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    let owner = NodeRef::new("b", 1);
    let take_over = |how| Decision::TakeOver(ownership::OwnerGone { owner: owner.clone(), how });
    let (silent, stopped) = (take_over(ownership::Gone::LeaseEnded), take_over(ownership::Gone::Stopped));
    assert_eq!(task.held_until(&silent, Some(&record)).await, None, "nobody hears it");
    let key = rights::key(&record);
    node.rights.hear(&key, "b", record.epoch - 1);
    assert_eq!(task.held_until(&silent, Some(&record)).await, None, "an owner of an earlier epoch");
    node.rights.hear(&key, "b", record.epoch);
    assert!(task.held_until(&silent, Some(&record)).await.is_some());
    assert_eq!(task.held_until(&stopped, Some(&record)).await, None, "it is known to have ended");
    assert_eq!(task.held_until(&Decision::Nothing, Some(&record)).await, None);
    let long_gone = Nanos(Nanos::now().0.saturating_sub(node.rules.resiliency_period.as_nanos() as u64));
    task.owner_gone = Some((owner.clone(), long_gone));
    assert_eq!(task.held_until(&silent, Some(&record)).await, None, "the period is over");
}
