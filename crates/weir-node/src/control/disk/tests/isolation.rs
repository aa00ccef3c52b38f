//! An owner without a session that a member still hears is isolated: its disk stays there.

use std::sync::atomic::{AtomicUsize, Ordering};

use weir_cluster::membership::declare_stopped;
use weir_cluster::node_state;
use weir_cluster::records::{EventRecord, Isolation, NodeStateRecord, NodeStatesRecord};
use weir_cluster::registry::Transaction;

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
    let node = quiet_node(directory.path()).await;
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
    let long_ago = Nanos(Nanos::now().0 - 60_000_000_000);
    task.vacant = Some(Vacant { owner: Some(owner.clone()), epoch: record.epoch, since: long_ago });
    assert!(task.held_until(&silent, Some(&record)).await.is_some());
    assert!(
        task.vacant.as_ref().unwrap().since > long_ago,
        "the best process comes first once nobody hears it"
    );
    assert_eq!(task.held_until(&stopped, Some(&record)).await, None, "it is known to have ended");
    assert_eq!(task.held_until(&Decision::Nothing, Some(&record)).await, None);
    let long_gone = Nanos(Nanos::now().0.saturating_sub(node.rules.resiliency_period.as_nanos() as u64));
    task.owner_gone = Some(OwnerGone::new(owner.clone(), long_gone));
    assert_eq!(task.held_until(&silent, Some(&record)).await, None, "the period is over");
}

/// It has been back, and this node, which was cut off, has not seen that.
#[tokio::test]
async fn a_second_isolation_begins_a_period_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let record = disk_of_b(&node).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    let owner = NodeRef::new("b", 1);
    let silent =
        Decision::TakeOver(ownership::OwnerGone { owner: owner.clone(), how: ownership::Gone::LeaseEnded });
    node.rights.hear(&rights::key(&record), "b", record.epoch);
    let long_ago = Nanos(Nanos::now().0 - node.rules.resiliency_period.as_nanos() as u64);
    let isolate = async |ago: Duration| {
        let since_unix_ms = weir_task::unix_millis() - ago.as_millis() as u64;
        let isolation = Some(Isolation { incarnation: 1, since_unix_ms });
        let state = NodeStateRecord { isolation, ..NodeStateRecord::default() };
        let states = NodeStatesRecord { nodes: [("b".to_owned(), state)].into() };
        node.registry.transact(Transaction::new().put(keys::NODE_STATES, states.encode())).await.unwrap();
        let mut seen = node.records.changes();
        while node.records.node_states() != states {
            weir_task::timeout(SOON, seen.next()).await.unwrap();
        }
    };
    isolate(Duration::from_secs(1)).await;
    task.owner_gone = Some(OwnerGone::new(owner, long_ago));
    task.note_isolation(long_ago);
    assert_eq!(task.held_until(&silent, Some(&record)).await, None, "it is over by this node's clock");
    isolate(Duration::ZERO).await;
    assert!(task.held_until(&silent, Some(&record)).await.is_some());
}

/// A node that was killed and has started again, or is about to, was not isolated, though its members heard it a moment ago.
#[tokio::test(flavor = "multi_thread")]
async fn an_owner_that_has_ended_or_started_again_is_not_isolated() {
    for restarts in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        let record = disk_of_b(&node).await;
        let owner = NodeRef::new("b", 1);
        let mut changes = node.records.changes();
        let _next = if restarts {
            let next = NodeRecord { incarnation: 2, ..record_of("b") };
            Some(NodeSession::start(node.registry.clone(), next, SessionConfig::default()).await.unwrap())
        } else {
            declare_stopped(&*node.registry, &owner).await.unwrap();
            None
        };
        // The node's view may lag behind.
        node_states::report_isolation(&node, &owner).await.unwrap_err();
        assert_eq!(states(&node).await, NodeStatesRecord::default(), "restarts: {restarts}");
        while !node.records.has_stopped(&owner) && !node.records.nodes.now().contains_key("b") {
            changes.next().await;
        }
        let keep = weir_task::spawn(node_states::keep(Arc::clone(&node)));
        for _ in 0..15 {
            node.rights.hear(&rights::key(&record), "b", record.epoch);
            // Wakes the reports.
            let note = ReleasedRecord { disk: "e".into(), epoch: 1, node: owner.clone(), time_unix_ms: 1 };
            let key = keys::released("e", 1, "b");
            node.registry.transact(note.create(key.clone())).await.unwrap();
            node.registry.transact(weir_cluster::registry::Transaction::new().delete(key)).await.unwrap();
            weir_task::sleep(Duration::from_millis(20)).await;
        }
        let states = states(&node).await;
        assert!(states.nodes.contains_key("a") && !states.nodes.contains_key("b"), "{restarts}: {states:?}");
        keep.abort();
    }
}

/// A committed change whose answer was lost is told, once.
#[tokio::test]
async fn effects_are_told_though_the_answer_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::new(RegistryFaults::default());
    let (node, _told) = node_at(directory.path(), Arc::clone(&faults)).await;
    let present = node_state::Event::Present { node: "a".into() };
    node_states::change(&node, &present, node.session.guard()).await.unwrap();
    let drain = node_state::Event::Drain { node: "a".into(), fewer_copies: false };
    faults.unanswered.store(1, Ordering::Relaxed);
    node_states::change(&node, &drain, node.session.guard()).await.unwrap();
    let told = async {
        loop {
            let events = node.registry.list(keys::EVENTS).await.unwrap().entries;
            let events = events.iter().map(|entry| EventRecord::of(entry).unwrap());
            let told = events.filter(|event| event.kind == "drain").count();
            if told > 0 {
                return told;
            }
            weir_task::sleep(Duration::from_millis(10)).await;
        }
    };
    assert_eq!(weir_task::timeout(SOON, told).await.expect("nobody tells of the drain"), 1);
}

/// P10: a task wakes up at every change of any record.
#[tokio::test]
async fn guards_are_asked_once_for_each_renewal() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let guard = NodeRecord { peer_address: listener.local_addr().unwrap(), ..record_of("c") };
    let _guard = NodeSession::start(node.registry.clone(), guard, SessionConfig::default()).await.unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::Relaxed);
            drop(connection);
        }
    });
    let record = disk_of_a(&node, |record| {
        record.owner = Some(NodeRef::new("b", 1));
        (record.mode, record.guards) = (Mode::WriteThrough, vec!["c".into()]);
    })
    .await;
    let mut nodes = node.records.nodes.changes();
    nodes.wait_for(|known| known.contains_key("c")).await.unwrap();
    let (mut task, _inbox) = DiskTask::new("d", &node);
    let gone = ownership::OwnerGone { owner: NodeRef::new("b", 1), how: ownership::Gone::LeaseEnded };
    let take_over = Decision::TakeOver(gone);
    for _ in 0..5 {
        assert_eq!(task.held_until(&take_over, Some(&record)).await, None, "the guard does not hear it");
    }
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    let later = DiskRecord { epoch: record.epoch + 1, ..record };
    assert_eq!(task.held_until(&take_over, Some(&later)).await, None);
    assert_eq!(asked.load(Ordering::Relaxed), 2, "an answer is of an epoch");
    weir_task::sleep(node.rights.renewal()).await;
    assert_eq!(task.held_until(&take_over, Some(&later)).await, None);
    assert_eq!(asked.load(Ordering::Relaxed), 3, "and of a renewal");
}
