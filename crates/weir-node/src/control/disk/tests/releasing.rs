//! Conditions that end a node's part of a disk, and the notes about it in the registry.

use weir_cluster::registry::Transaction;
use weir_volume::{BackingOptions, DirVolume, OpenedFile};

use super::*;
use crate::ApiErrorKind;
use crate::shard::messages::NotClosed;

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
    assert!(until.load(Ordering::Relaxed) > 0);
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
        faults.refuses.store(!heard, Ordering::Relaxed);
        task.release_disk(epoch + 1, Some(theirs)).await;
        sleep_until(Some(task.note_at.unwrap_or_default())).await;
    }
    for epoch in [3, 7] {
        let note = node.registry.get(&keys::released("d", epoch, "a")).await.unwrap();
        assert!(note.is_some(), "epoch {epoch}");
    }
}

/// P9: once its closing has begun, a disk cannot go back. Its guest would wait for as long as the storage hangs.
#[tokio::test]
async fn a_disk_whose_backing_does_not_answer_is_not_closed_for_a_move() {
    for (in_flight, reason) in [(1, "1 request"), (UNKNOWN, "its shard has not said")] {
        let directory = tempfile::tempdir().unwrap();
        let in_flight = Arc::new(AtomicUsize::new(in_flight));
        let (node, mut told) = node_with(directory.path(), Arc::default(), in_flight).await;
        let record = disk_of_a(&node, |_| ()).await;
        drain(&node, "a", false).await;
        let (mut task, _inbox) = DiskTask::new("d", &node);
        task.local = Local::Open { epoch: 3 };
        let b = NodeRef::new("b", 1);
        let moved = tokio::time::timeout(SOON, task.move_to(&b, Why::Drained));
        let (moved, commands) = tokio::join!(moved, all_until(&mut told, "ResumeClients"));
        let error = moved.expect("it has a limit").unwrap_err();
        assert!(error.message.contains("stays") && error.message.contains(reason), "{error}");
        // It is write-through, and members are being filled: they go on.
        let ends = ["Close", "SetPolicy"];
        assert!(
            !commands.iter().any(|command| ends.iter().any(|end| command.starts_with(end))),
            "{commands:?}"
        );
        assert_eq!(task.known().unwrap(), record);
        assert_eq!(task.local, Local::Open { epoch: 3 });
        // Clients are not held every few seconds for as long as the drain lasts.
        assert_eq!(task.move_to(&b, Why::Drained).await.unwrap_err(), error);
        while let Ok(command) = told.try_recv() {
            assert!(!command.starts_with("HoldClients"), "{command}");
        }
        let (until, _) = task.not_ready.as_mut().unwrap();
        *until = Nanos::now();
        task.check_pause(Why::Drained).expect("it is tried again after a while");
    }
}

/// The node has room, and not the volume: it could not open the disk that it has been given.
#[tokio::test]
async fn an_operators_move_asks_whether_the_node_can_open_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    let record = disk_of_a(&node, |_| ()).await;
    let _b = neighbour(&node, "b").await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    let refused = task.move_to(&NodeRef::new("b", 1), Why::Requested).await.unwrap_err();
    assert!(refused.message.contains("whether it can open it"), "{refused}");
    assert!(told.try_recv().is_err(), "the shard goes on as it was");
    assert_eq!(task.known().unwrap(), record);
}

/// A disk without an heir is nobody's until an operator exports it; its heir may open it as soon as it can.
#[tokio::test]
async fn an_export_that_cannot_open_the_disk_leaves_it_to_its_heir() {
    let directory = tempfile::tempdir().unwrap();
    let node = quiet_node(directory.path()).await;
    let record = disk_of_a(&node, |record| {
        (record.owner, record.heir) = (None, Some(NodeRef::new("a", 1)));
    })
    .await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    let (done, exported) = oneshot::channel();
    task.on_request(Request::Export { accept_loss: false, done }).await;
    let refused = exported.await.unwrap().unwrap_err();
    assert!(refused.message.contains("cannot be opened"), "{refused}");
    assert_eq!(change::read(&*node.registry, "d").await.unwrap().1, record);
}

/// The removal would take the file away from under it.
#[tokio::test]
async fn a_disk_that_is_being_deleted_is_not_claimed() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let record = disk_of_a(&node, |record| {
        (record.owner, record.heir) = (None, Some(NodeRef::new("a", 1)));
    })
    .await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    let deletion = node.intents.begin_deletion("d");
    assert!(task.carry_out(Decision::Claim, Some(record)).await.is_some(), "it is tried again");
    assert!(format!("{:?}", task.failures).contains("None"), "whether it opens has not been looked at");
    drop(deletion);
}

/// Whoever moves it: the open file is the only way to the data of a file that was deleted.
#[tokio::test]
async fn a_disk_whose_file_is_gone_stays_whoever_moves_it() {
    for (mode, why) in [(Mode::WriteThrough, Why::Drained), (Mode::WriteBack, Why::Requested)] {
        let directory = tempfile::tempdir().unwrap();
        let (node, mut told) = node(directory.path()).await;
        let b = NodeRef::new("b", 1);
        let record = disk_of_a(&node, |record| {
            (record.mode, record.replicas) = (mode, vec![b.clone()]);
            record.replicas.truncate(usize::from(mode == Mode::WriteBack));
        })
        .await;
        let volume = DirVolume::open(directory.path()).unwrap();
        volume.identify(7).unwrap();
        volume.create_disk("d", record.size).unwrap();
        let path = volume.disk_path("d").unwrap();
        let options = BackingOptions { volume: Some(7), ..BackingOptions::default() };
        let opened = OpenedFile::open(&path, &options).unwrap();
        node.here.insert(&record, opened.file());
        std::fs::remove_file(&path).unwrap();
        drain(&node, "a", false).await;
        let (mut task, _inbox) = DiskTask::new("d", &node);
        task.local = Local::Open { epoch: 3 };
        let refused = task.move_to(&b, why).await.unwrap_err();
        assert!(refused.message.contains("was deleted"), "{refused}");
        assert!(told.try_recv().is_err(), "the shard goes on as it was");
        assert_eq!(task.known().unwrap(), record);
    }
}

/// P12: a disk that was closed could not be given to anybody, nor be opened again, for as long as the registry is away.
#[tokio::test]
async fn a_disk_without_replicas_stays_open_while_the_registry_is_away() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::new(RegistryFaults::default());
    let (node, mut told) = node_at(directory.path(), Arc::clone(&faults)).await;
    disk_of_a(&node, |_| ()).await;
    drain(&node, "a", false).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    faults.away.store(true, Ordering::Relaxed);
    let refused = task.move_to(&NodeRef::new("b", 1), Why::Drained).await.unwrap_err();
    assert!(refused.message.contains("the registry does not answer"), "{refused}");
    assert!(told.try_recv().is_err(), "the shard goes on as it was");
    assert_eq!(task.local, Local::Open { epoch: 3 });
}

/// Its log is emptied first, as for write-through, while its guest goes on; when that takes too long, it is write-back again.
#[tokio::test]
async fn a_disk_without_replicas_is_emptied_before_it_is_closed() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    disk_of_a(&node, |record| (record.policy, record.mode) = (Policy::WriteBack(0), Mode::WriteBack)).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    let record = task.known().unwrap();
    let _b = neighbour(&node, "b").await;
    let b = NodeRef::new("b", 1);
    let goal = handover::Goal { to: &b, why: Why::Requested };
    let error = task.empty(Duration::from_millis(300), goal).await.unwrap_err();
    assert!(error.message.contains("its log is not empty"), "{error}");
    let mut wanted = Vec::new();
    while wanted.len() < 2 {
        let command = tokio::time::timeout(SOON, told.recv()).await.unwrap().unwrap();
        if command.starts_with("SetPolicy") {
            wanted.push(command.contains("Some(0)"));
        }
    }
    assert_eq!(wanted, [false, true]);
    assert!(task.tell_configuration(&record).wanted_replicas == Some(0));
}

/// Waits for a command to the shard. Returns all up to it.
async fn all_until(told: &mut mpsc::Receiver<String>, command: &str) -> Vec<String> {
    let mut all = Vec::new();
    let heard = async {
        while all.last().is_none_or(|last: &String| !last.starts_with(command)) {
            all.push(told.recv().await.expect("the shard lives"));
        }
    };
    tokio::time::timeout(SOON, heard).await.unwrap_or_else(|_| panic!("no {command}"));
    all
}

/// Emptying takes up to 40 s, and nobody could open the disk that was closed for a node that is gone.
#[tokio::test]
async fn a_disk_is_emptied_for_a_node_that_lives_only() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    disk_of_a(&node, |record| (record.policy, record.mode) = (Policy::WriteBack(0), Mode::WriteBack)).await;
    let session = neighbour(&node, "b").await;
    drain(&node, "a", false).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    let dies = async {
        all_until(&mut told, "SetPolicy").await;
        session.leave().await.unwrap();
        all_until(&mut told, "SetPolicy").await.pop().unwrap()
    };
    let b = NodeRef::new("b", 1);
    let moved = tokio::time::timeout(SOON, task.move_to(&b, Why::Drained));
    let (moved, policy) = tokio::join!(moved, dies);
    let error = moved.expect("it ends").unwrap_err();
    assert!(error.message.contains("it is gone"), "{error}");
    assert!(policy.contains("Some(0)"), "it is write-back again: {policy}");
}

/// P12: once it is closed, its guest waits for as long as nobody can own it. A node that takes disks again keeps its own.
#[tokio::test]
async fn a_disk_is_closed_only_while_its_next_owner_and_the_registry_are_there() {
    for case in ["gone", "drained", "resumed", "registry"] {
        let directory = tempfile::tempdir().unwrap();
        let (faults, in_flight) = (Arc::new(RegistryFaults::default()), Arc::new(AtomicUsize::new(1)));
        let (node, mut told) = node_with(directory.path(), Arc::clone(&faults), Arc::clone(&in_flight)).await;
        disk_of_a(&node, |_| ()).await;
        let session = neighbour(&node, "b").await;
        drain(&node, "a", false).await;
        let (mut task, _inbox) = DiskTask::new("d", &node);
        task.local = Local::Open { epoch: 3 };
        let changes = async {
            all_until(&mut told, "HoldClients").await;
            let mut seen = node.records.changes();
            match case {
                "gone" => {
                    session.leave().await.unwrap();
                    while node.records.nodes.now().contains_key("b") {
                        seen.next().await;
                    }
                }
                "drained" => drain(&node, "b", false).await,
                "resumed" => {
                    let event = node_state::Event::Resume { node: "a".into() };
                    node_states::change(&node, &event, node.session.guard()).await.unwrap();
                    while node.barred().contains("a") {
                        seen.next().await;
                    }
                }
                _ => faults.away.store(true, Ordering::Relaxed),
            }
            in_flight.store(0, Ordering::Relaxed);
            all_until(&mut told, "ResumeClients").await
        };
        let b = NodeRef::new("b", 1);
        let moved = tokio::time::timeout(SOON, task.move_to(&b, Why::Drained));
        let (moved, commands) = tokio::join!(moved, changes);
        let error = moved.expect("it ends").unwrap_err();
        let reason = match case {
            "gone" => "it is gone",
            "drained" => "takes no disks",
            "resumed" => "takes disks again",
            _ => "the registry does not answer",
        };
        assert!(error.message.contains(reason), "{case}: {error}");
        assert!(!commands.iter().any(|command| command.starts_with("Close")), "{case}: {commands:?}");
        assert_eq!(task.local, Local::Open { epoch: 3 }, "{case}");
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

/// Nothing would open the disk again that its shard has closed, and nobody could use it.
#[tokio::test]
async fn a_deletion_that_is_refused_leaves_no_disk_that_is_half_closed() {
    let directory = tempfile::tempdir().unwrap();
    let (mut node, _told) = node(directory.path()).await;
    let (commands, mut queue) = mpsc::channel(16);
    Arc::get_mut(&mut node).unwrap().shards = Shards::new(vec![ShardQueue::new(commands, || {})]);
    let (asked, mut closing) = mpsc::channel(16);
    tokio::spawn(async move {
        while let Some(command) = queue.recv().await {
            if let Command::Close { done, .. } = command {
                asked.send(done).await.unwrap();
            }
        }
    });
    // It is on a volume that is not there.
    let record = disk_of_a(&node, |_| {}).await;
    let (mut task, inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    let (done, released) = oneshot::channel();
    let (deletion, deleted) = oneshot::channel();
    let (first, ()) = tokio::join!(
        async {
            task.on_request(Request::Release { unless_used: false, done }).await;
            closing.recv().await.unwrap()
        },
        async {
            let (id, lost) = (record.id, "4096 bytes".into());
            let request = Request::DeleteUndestaged { id, lost, unless_open: false, done: deletion };
            inbox.send(Message::Request(request)).await.unwrap();
        }
    );
    assert!(released.await.unwrap().unwrap_err().message.contains("it is being deleted"));
    assert!(first.is_closed() && task.local == Local::Open { epoch: 3 });
    let request = task.waiting.pop().unwrap();
    let (second, ()) = tokio::join!(
        async {
            let second = weir_task::timeout(SOON, closing.recv()).await.expect("nobody closes it").unwrap();
            let refused = deleted.await.unwrap().unwrap_err();
            assert_eq!(refused.kind, ApiErrorKind::NotFound, "{refused}");
            second.send(Ok(()))
        },
        task.on_request(request)
    );
    second.unwrap();
    assert_eq!((task.local, task.closed_since(&record)), (Local::Closed, Some(3)));
}

/// An export stays and takes the log, once the disk is open: what was asked for while it was not is no reason to lose that.
#[tokio::test]
async fn a_disk_that_has_been_opened_meanwhile_is_not_deleted_undestaged() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    disk_of_a(&node, |_| {}).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    let (done, deleted) = oneshot::channel();
    let lost = "4096 bytes".to_owned();
    task.on_request(Request::DeleteUndestaged { id: 0, lost, unless_open: true, done }).await;
    let refused = deleted.await.unwrap().unwrap_err();
    assert!(refused.message.contains("has just been opened"), "{refused}");
    assert!(task.local == Local::Open { epoch: 3 } && told.try_recv().is_err());
}

/// An export of it would succeed, and its clients would find nothing.
#[tokio::test]
async fn a_deletion_comes_before_what_waits_for_a_disk_that_closes() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    for closing in [false, true] {
        task.closing = closing.then_some(Closing { unless_used: false, shown: None });
        let (export, deletion) = (oneshot::channel().0, oneshot::channel().0);
        let lost = String::new();
        let requests = [
            Request::Export { accept_loss: false, done: export },
            Request::DeleteUndestaged { id: 0, lost, unless_open: false, done: deletion },
        ];
        for request in requests {
            task.attend(Message::Request(request)).await;
        }
        let order: Vec<bool> =
            std::iter::from_fn(|| task.next_request()).map(|one| one.is_deletion()).collect();
        assert_eq!(order, [closing, !closing]);
    }
}

/// A deletion without --force has looked for clients before; one may have come since.
#[tokio::test]
async fn a_disk_with_clients_stays_open_where_that_is_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let (mut node, _told) = node(directory.path()).await;
    let (commands, mut queue) = mpsc::channel(16);
    Arc::get_mut(&mut node).unwrap().shards = Shards::new(vec![ShardQueue::new(commands, || {})]);
    tokio::spawn(async move {
        while let Some(command) = queue.recv().await {
            if let Command::Close { unless_used, done, .. } = command {
                let closed = if unless_used { Err(NotClosed::Used(2)) } else { Ok(()) };
                done.send(closed).unwrap();
            }
        }
    });
    let record = disk_of_a(&node, |_| {}).await;
    node.here.insert(&record, None);
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    let (done, released) = oneshot::channel();
    task.on_request(Request::Release { unless_used: true, done }).await;
    let refused = released.await.unwrap().unwrap_err();
    assert_eq!(refused.kind, ApiErrorKind::Refused);
    assert!(refused.message.contains("2 clients are connected"), "{refused}");
    assert_eq!(task.local, Local::Open { epoch: 3 });
    assert!(node.here.all().contains_key("d"), "clients find it");
    let (done, released) = oneshot::channel();
    task.on_request(Request::Release { unless_used: false, done }).await;
    released.await.unwrap().unwrap();
    assert!(!node.here.all().contains_key("d"));
}

/// A shard that has ended answers no command: the disk's task ends its wait, and the node's stop goes on.
#[tokio::test]
async fn a_shard_that_has_ended_is_no_reason_to_panic() {
    let directory = tempfile::tempdir().unwrap();
    let (mut node, _told) = node(directory.path()).await;
    let (commands, queue) = mpsc::channel(16);
    Arc::get_mut(&mut node).unwrap().shards = Shards::new(vec![ShardQueue::new(commands, || {})]);
    drop(queue);
    disk_of_a(&node, |_| {}).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    let (done, released) = oneshot::channel();
    task.on_request(Request::Release { unless_used: false, done }).await;
    let refused = released.await.unwrap().unwrap_err();
    assert!(refused.message.contains("the node is stopping"), "{refused}");
}
