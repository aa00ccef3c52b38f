//! Changes without an answer: events that end the doubt about them, and events that do not.

use std::sync::atomic::Ordering;

use weir_cluster::registry::Transaction;

use super::*;

fn write_back_on(replicas: &[&str]) -> WantedConfiguration {
    let replicas: Vec<String> = replicas.iter().map(|&replica| replica.to_owned()).collect();
    WantedConfiguration { epoch: 3, wanted_replicas: Some(replicas.len()), replicas, write_back: true }
}

/// A task of a disk in write-back with the replica `b`, open in epoch 3, and where its right's end is to be seen.
async fn open(node: &Arc<Node>, change: impl FnOnce(&mut DiskRecord)) -> (DiskTask, Inbox, Arc<AtomicU64>) {
    let record = disk_of_a(node, |record| {
        (record.mode, record.replicas) = (Mode::WriteBack, vec![NodeRef::new("b", 1)]);
        change(record);
    })
    .await;
    let (mut task, inbox) = DiskTask::new("d", node);
    task.local = Local::Open { epoch: 3 };
    let lease = *node.session.leased().borrow();
    let until = node.rights.begin("d", 3, record.grant_set(), lease);
    assert!(serves(&until));
    (task, inbox, until)
}

fn serves(until: &AtomicU64) -> bool {
    until.load(Ordering::Relaxed) > 0
}

/// As `hand_over` leaves it when neither the change nor the renewal behind it is answered.
async fn move_in_doubt(task: &mut DiskTask) {
    let (entry, _) = change::read(&*task.node.registry, "d").await.unwrap();
    task.node.rights.step("d", Event::HandingOver);
    task.doubt = Some(entry.mod_revision);
    task.retry_at = Some(Nanos::now() + RETRY);
}

/// P9: any change that commits behind a move in doubt proves that the move never will.
#[tokio::test]
async fn a_move_in_doubt_ends_with_any_change_that_commits_behind_it() {
    let directory = tempfile::tempdir().unwrap();
    let node = quiet_node(directory.path()).await;
    let (mut task, _inbox, until) = open(&node, |_| ()).await;
    move_in_doubt(&mut task).await;
    assert!(!serves(&until));
    let (done, answer) = oneshot::channel();
    task.on_request(Request::SetPolicy { policy: Policy::WriteBack(2), done }).await;
    answer.await.unwrap().unwrap();
    assert!(task.doubt.is_none() && serves(&until));
}

/// P9: a move that certainly failed gives its clients back at once.
#[tokio::test]
async fn clients_are_served_again_after_a_move_that_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    let (mut task, _inbox, until) = open(&node, |_| ()).await;
    // It is no replica.
    task.hand_over(&NodeRef::new("c", 1), Why::Requested).await.unwrap_err();
    for expected in ["Status", "HoldClients"] {
        assert!(told.recv().await.unwrap().contains(expected), "{expected}");
    }
    assert!(task.holds_clients && serves(&until));
    task.resume_clients().await;
    assert!(told.recv().await.unwrap().contains("ResumeClients"));
    task.resume_clients().await;
    assert!(told.try_recv().is_err() && !task.holds_clients, "once");
}

/// The owner cannot answer requests while a move is in doubt: it takes none, and serves its clients again if the move has failed.
#[tokio::test]
async fn clients_are_held_until_a_move_is_certain_to_have_failed() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    let (mut task, _inbox, until) = open(&node, |_| ()).await;
    task.hold_clients().await.unwrap();
    assert!(told.recv().await.unwrap().contains("HoldClients"));
    move_in_doubt(&mut task).await;
    task.resume_clients().await;
    task.reconcile().await;
    assert!(told.try_recv().is_err() && task.holds_clients && !serves(&until));
    sleep_until(task.retry_at).await;
    task.reconcile().await;
    assert!(serves(&until) && !task.holds_clients);
    assert!(told.recv().await.unwrap().contains("ResumeClients"));
}

/// P2: that a second move is refused says nothing about the first.
#[tokio::test]
async fn a_move_in_doubt_does_not_end_with_the_refusal_of_another() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::new(RegistryFaults::default());
    let (node, mut told) = node_at(directory.path(), Arc::clone(&faults)).await;
    tokio::spawn(async move { while told.recv().await.is_some() {} });
    let (mut task, _inbox, until) = open(&node, |_| ()).await;
    move_in_doubt(&mut task).await;
    // The renewal that would end the doubt finds no session to stand on.
    node.registry.revoke(node.session.lease()).await.unwrap();
    task.hand_over(&NodeRef::new("c", 1), Why::Requested).await.unwrap_err();
    assert!(task.doubt.is_some() && !serves(&until));
}

/// P2: a move that commits late has not failed, though its second attempt is refused.
#[tokio::test]
async fn a_move_that_commits_late_is_not_taken_for_refused() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::new(RegistryFaults::default());
    let (node, mut told) = node_at(directory.path(), Arc::clone(&faults)).await;
    tokio::spawn(async move { while told.recv().await.is_some() {} });
    let (mut task, _inbox, until) = open(&node, |_| ()).await;
    faults.delays.store(true, Ordering::Relaxed);
    task.hand_over(&NodeRef::new("b", 1), Why::Requested).await.unwrap_err();
    assert!(!serves(&until), "b owns it");
    assert!(task.is_taken() && task.doubt.is_none());
    task.resume_clients().await;
    assert!(task.holds_clients, "they get what is kept for them when the disk is let go");
}

/// P2, P3: etcd answers "no space" to changes that it has made. Until it is known what became of them, a moved disk is not served,
/// and members of both sets are asked.
#[tokio::test]
async fn a_change_that_a_full_registry_answers_is_in_doubt() {
    for reason in ["full", "damaged", "set up wrongly"].map(str::to_owned) {
        let error = match &*reason {
            "full" => RegistryError::Full { reason },
            "damaged" => RegistryError::Corrupt { reason },
            _ => RegistryError::Setup { reason },
        };
        for moves in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            let faults = Arc::new(RegistryFaults::default());
            let (node, mut told) = node_at(directory.path(), Arc::clone(&faults)).await;
            tokio::spawn(async move { while told.recv().await.is_some() {} });
            let (mut task, _inbox, until) = open(&node, |_| ()).await;
            faults.answered_with.lock().unwrap().push_back(error.clone());
            faults.deafens.store(true, Ordering::Relaxed);
            if moves {
                task.hand_over(&NodeRef::new("b", 1), Why::Requested).await.unwrap_err();
                assert!(task.doubt.is_some() && !serves(&until), "{error}: b owns it");
            } else {
                task.connected.insert("c".into(), NodeRef::new("c", 1));
                task.want_configuration(&write_back_on(&["c"])).await;
                let members: Vec<_> = node.rights.members().into_iter().collect();
                assert!(task.doubt.is_some() && members == ["b", "c"], "{error}: {members:?}");
            }
        }
    }
}

/// P3: so has another set of replicas, which the owner asks for grants from then on.
#[tokio::test]
async fn a_set_that_commits_late_is_the_set() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::new(RegistryFaults::default());
    let (node, mut told) = node_at(directory.path(), Arc::clone(&faults)).await;
    let (mut task, _inbox, until) = open(&node, |_| ()).await;
    task.connected.insert("c".into(), NodeRef::new("c", 1));
    faults.delays.store(true, Ordering::Relaxed);
    task.want_configuration(&write_back_on(&["b", "c"])).await;
    let members: Vec<_> = node.rights.members().into_iter().collect();
    assert_eq!((members, serves(&until)), (vec!["b".to_owned(), "c".to_owned()], true));
    assert!(told.recv().await.unwrap().contains("NotConfigured"), "it is of another epoch by now");
    assert_eq!(task.record().unwrap().replicas.len(), 2);
}

/// P2: news of the revision over which a move has been sent says nothing about that move.
#[tokio::test]
async fn a_move_under_way_does_not_end_with_the_record_that_it_was_sent_over() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::new(RegistryFaults::default());
    let (node, mut told) = node_at(directory.path(), Arc::clone(&faults)).await;
    tokio::spawn(async move { while told.recv().await.is_some() {} });
    let (mut task, _inbox, until) = open(&node, |_| ()).await;
    let (entry, record) = change::read(&*node.registry, "d").await.unwrap();
    // Comes between the move's two reads.
    faults.delays.store(true, Ordering::Relaxed);
    let other = DiskRecord { policy: Policy::WriteBack(2), ..record };
    node.registry.transact(other.replace(&entry)).await.unwrap_err();
    faults.hangs.store(true, Ordering::Relaxed);
    let to = NodeRef::new("b", 1);
    let seen = async {
        while !faults.hung.load(Ordering::Relaxed)
            || node.records.seen("d").revision() == Some(entry.mod_revision)
        {
            weir_task::sleep(Duration::from_millis(1)).await;
        }
        weir_task::sleep(Duration::from_millis(50)).await;
    };
    tokio::select! {
        moved = task.hand_over(&to, Why::Requested) => panic!("the registry hangs: {moved:?}"),
        () = seen => {}
    }
    assert!(!serves(&until), "b may own it at any moment");
}

/// P9: a disk that is to be closed waits for its shard, and that waits for the right, which only a doubt's end brings back.
#[tokio::test]
async fn a_doubt_ends_while_another_step_waits() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    let (mut task, _inbox, until) = open(&node, |_| ()).await;
    move_in_doubt(&mut task).await;
    assert!(task.settle_meanwhile().await.is_some() && !serves(&until), "not at once again");
    sleep_until(task.retry_at).await;
    task.settle_meanwhile().await;
    assert!(task.doubt.is_none() && serves(&until));
    let command = told.recv().await.unwrap();
    assert!(command.contains("Configured") && task.local == Local::Open { epoch: 4 }, "{command}");
}

/// P2, P9: a move that waits in vain for the backing does not cut off a change that is under way meanwhile.
#[tokio::test]
async fn a_change_comes_to_its_end_though_a_move_is_given_up_meanwhile() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::new(RegistryFaults::default());
    let (node, _told) = node_at(directory.path(), Arc::clone(&faults)).await;
    let (mut task, inbox, _until) = open(&node, |_| ()).await;
    task.connected.insert("c".into(), NodeRef::new("c", 1));
    let want = Notice::WantConfiguration { disk: "d".into(), wanted: write_back_on(&["b", "c"]) };
    inbox.send(Message::Notice(want)).await.unwrap();
    faults.loses.store(true, Ordering::Relaxed);
    let error =
        task.prepare(handover::Goal { to: &NodeRef::new("b", 1), why: Why::Requested }).await.unwrap_err();
    assert!(error.message.contains("stays where it is"), "{error}");
    assert_eq!(task.local, Local::Open { epoch: 4 }, "it was sent once more, and committed");
}

/// P12: guards whose change commits late are the guards; the earlier ones, which may be dead, are not asked any more.
#[tokio::test]
async fn guards_that_were_committed_late_stand_alone() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::new(RegistryFaults::default());
    let (node, _told) = node_at(directory.path(), Arc::clone(&faults)).await;
    let (mut task, _inbox, _until) = open(&node, |record| {
        (record.mode, record.replicas) = (Mode::WriteThrough, Vec::new());
        record.guards = vec!["dead".into()];
    })
    .await;
    let record = task.record().unwrap();
    faults.delays.store(true, Ordering::Relaxed);
    task.settle_guards(&record).await;
    let (_, now) = change::read(&*node.registry, "d").await.unwrap();
    assert!(now.guards.is_empty(), "there is nobody else: {:?}", now.guards);
    assert!(task.doubt.is_none());
    assert!(node.rights.members().is_empty(), "{:?}", node.rights.members());
}

/// A change of guards keeps the epoch: of two records, the later commit counts.
#[tokio::test]
async fn of_two_records_the_later_commit_counts() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let (mut task, _inbox, _until) = open(&node, |_| ()).await;
    let seen = node.records.seen("d").revision().unwrap();
    let other = DiskRecord { guards: vec!["x".into()], ..task.record().unwrap() };
    task.told(&other, seen + 1);
    assert_eq!(task.record().unwrap().guards, other.guards, "the view lags behind");
    let other = DiskRecord { epoch: 9, ..other };
    task.told(&other, seen - 1);
    assert_eq!(task.record().unwrap().epoch, 3, "the view is ahead");
}

/// `weir-sim states` 97,836: a move had told a disk without copies to empty its log; when it had got copies, it gave them up.
#[tokio::test]
async fn a_disk_that_has_got_copies_keeps_them_when_it_was_to_go_to_write_through_for_a_move() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node_at(directory.path(), Arc::default()).await;
    let (mut task, _inbox, _until) = open(&node, |_| ()).await;
    let record = task.record().unwrap();
    assert!(record.policy != Policy::WriteThrough && !record.replicas.is_empty(), "{record:?}");
    let wanted = |wanted_replicas| WantedConfiguration {
        epoch: record.epoch,
        replicas: Vec::new(),
        write_back: false,
        wanted_replicas,
    };
    task.want_configuration(&wanted(None)).await;
    let answer = told.recv().await.unwrap();
    assert!(answer.starts_with("NotConfigured") && answer.contains("has copies again"), "{answer}");
    // No peer is left: that is another reason.
    task.want_configuration(&wanted(Some(1))).await;
    let answer = told.recv().await.unwrap();
    assert!(answer.starts_with("Configured"), "{answer}");
}

/// P2: a disk that another process owns by now is no disk with copies again: the right to serve it ends.
#[tokio::test]
async fn a_late_wish_for_write_through_ends_the_right_where_the_disk_is_anothers() {
    let directory = tempfile::tempdir().unwrap();
    let node = quiet_node(directory.path()).await;
    let (mut task, _inbox, until) = open(&node, |_| ()).await;
    let mut record = task.record().unwrap();
    (record.epoch, record.owner, record.replicas) =
        (4, Some(NodeRef::new("b", 1)), vec![NodeRef::new("c", 1)]);
    let put = Transaction::new().put(keys::disk("d"), record.encode());
    node.registry.transact(put).await.unwrap();
    let wanted =
        WantedConfiguration { epoch: 3, replicas: Vec::new(), write_back: false, wanted_replicas: None };
    task.want_configuration(&wanted).await;
    assert!(!serves(&until));
}
