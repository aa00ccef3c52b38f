//! The task of a disk on a node with a simulated shard, which obeys at once.

mod arrival;
mod doubt;
mod isolation;
mod leaving;
mod notices;
mod opening;
mod releasing;
mod replacing;
mod silence;
mod waiting;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use weir_accel::Former;
use weir_cluster::Machine;
use weir_cluster::events::Events;
use weir_cluster::membership::{NodeSession, SessionConfig};
use weir_cluster::node_state::Rules;
use weir_cluster::records::{
    FormerOwner, Mode, NodeRecord, Record, ReleasedRecord, Source, StoppedHow, StoppedRecord, VolumeRecord,
    keys,
};
use weir_cluster::registry::{Registry, RegistryError};
use weir_cluster::right::{Event, GrantSet, GrantTimes};
use weir_volume::{DirVolume, Trace};

use super::*;
use crate::config::Config;
use crate::control::change;
use crate::control::faulty_registry::{FaultyRegistry, RegistryFaults};
use crate::control::node::{Here, Journal};
use crate::control::registry_copy::RegistryCopy;
use crate::control::rights::Rights;
use crate::control::{LogCapacity, Shards, node_states, rights};
use crate::shard::ShardQueue;
use crate::shard::messages::{DiskStatus, Notice};

/// Longer than anything here takes on any machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

pub(crate) fn record_of(name: &str) -> NodeRecord {
    NodeRecord {
        flash: None,
        name: name.into(),
        incarnation: 1,
        peer_address: ([127, 0, 0, 1], 1).into(),
        nbd_tcp: None,
        nbd_tls: None,
        nbd_unix: "/a".into(),
        api: "/b".into(),
        fault_domain: "default".into(),
        media: Vec::new(),
        load: 0,
        forwards: true,
    }
}

/// Node `a`, a registry, and the shard's commands. A check for I/O of an ended process finds some the first time.
pub(crate) async fn node(directory: &std::path::Path) -> (Arc<Node>, mpsc::Receiver<String>) {
    node_at(directory, Arc::default()).await
}

/// As [`node`], where nobody reads the commands.
async fn quiet_node(directory: &std::path::Path) -> Arc<Node> {
    let (node, mut told) = node(directory).await;
    tokio::spawn(async move { while told.recv().await.is_some() {} });
    node
}

/// As [`node`], with a registry in this faults.
pub(crate) async fn node_at(
    directory: &std::path::Path,
    faults: Arc<RegistryFaults>,
) -> (Arc<Node>, mpsc::Receiver<String>) {
    node_with(directory, faults, Arc::new(AtomicUsize::new(1))).await
}

/// The shard does not say how many requests are at the disk's backing.
const UNKNOWN: usize = usize::MAX;

/// As [`node_at`], with so many requests at the disk's backing.
async fn node_with(
    directory: &std::path::Path,
    faults: Arc<RegistryFaults>,
    in_flight: Arc<AtomicUsize>,
) -> (Arc<Node>, mpsc::Receiver<String>) {
    node_of(Arc::new(FaultyRegistry::open(directory, faults)), "a", in_flight).await
}

/// As [`node`], under another name, in a registry with others.
pub(crate) async fn node_in(registry: Arc<dyn Registry>, name: &str) -> (Arc<Node>, mpsc::Receiver<String>) {
    node_of(registry, name, Arc::new(AtomicUsize::new(1))).await
}

async fn node_of(
    registry: Arc<dyn Registry>,
    name: &str,
    in_flight: Arc<AtomicUsize>,
) -> (Arc<Node>, mpsc::Receiver<String>) {
    let session =
        NodeSession::start(registry.clone(), record_of(name), SessionConfig::default()).await.unwrap();
    let (commands, mut queue) = mpsc::channel(16);
    let (told, heard) = mpsc::channel(64);
    tokio::spawn(async move {
        let mut seen = Trace::InFlight;
        let mut held = Vec::new();
        while let Some(command) = queue.recv().await {
            let _ = told.send(format!("{command:?}")).await;
            match command {
                Command::ReleaseDisk { done, .. } => drop(done.send(())),
                Command::Open(_, done) => drop(done.send(Ok(None))),
                Command::CanOpen { backing, options, answer, .. } => {
                    let opened = backing.open(&options).map(drop);
                    let opened = opened.map_err(|error| Unopened::Fails(error.to_string()));
                    drop(answer.send(opened));
                }
                Command::Close { done, .. } => drop(done.send(Ok(()))),
                Command::Look { answer, .. } => {
                    let _ = answer.send(std::mem::replace(&mut seen, Trace::Gone));
                }
                Command::HoldClients { done, .. } => drop(done.send(())),
                Command::Status { answer } if in_flight.load(Ordering::Relaxed) == UNKNOWN => {
                    drop(answer.send(Vec::new()));
                }
                Command::Status { answer } => {
                    let status =
                        DiskStatus { disk: "d".into(), role: "owner".into(), ..DiskStatus::default() };
                    drop(
                        answer.send(vec![DiskStatus {
                            in_flight: in_flight.load(Ordering::Relaxed),
                            ..status
                        }]),
                    );
                }
                // Its backing does not answer.
                Command::HoldDestage { done, .. } => held.push(done),
                _ => {}
            }
        }
    });
    let times = GrantTimes { length: Duration::from_secs(5), margin: Duration::from_secs(1) };
    let rights = Rights::new(times, *session.leased().borrow(), Nanos::now());
    let node = Node {
        network: Arc::new(crate::network::Tcp::default()),
        identity: None,
        flash: None,
        rules: Rules::default(),
        rights,
        config: Config::parse(&format!("name = \"{name}\""), std::path::Path::new("weir.toml")).unwrap(),
        records: RegistryCopy::start(&registry).await.unwrap(),
        journal: Journal::start(Events::new(registry.clone(), session.node_ref())),
        registry,
        session,
        shards: Shards::new(vec![ShardQueue::new(commands, || {})]),
        clocks: crate::control::clocks::Clocks::default(),
        here: Here::default(),
        capacity: LogCapacity::default(),
        intents: crate::control::intents::Intents::default(),
        coordinators: crate::control::coordinators::Coordinators::default(),
        former: Vec::new(),
        owner_fences: crate::control::owner_fences::OwnerFences::default(),
        readers: crate::control::readers::places(),
        forwarders: Arc::default(),
        forwarded: AtomicUsize::new(0),
    };
    (Arc::new(node), heard)
}

/// The session of another node, which `node` knows of.
pub(crate) async fn neighbour(node: &Node, name: &str) -> NodeSession {
    let session = NodeSession::start(node.registry.clone(), record_of(name), SessionConfig::default());
    let session = session.await.unwrap();
    node.records.nodes.changes().wait_for(|live| live.contains_key(name)).await.unwrap();
    session
}

/// A disk of `a`, after `former`, in the registry and in the node's view of it.
pub(crate) async fn disk_of_a(node: &Node, change: impl FnOnce(&mut DiskRecord)) -> DiskRecord {
    let source = Source::File { name: "d".into() };
    let mut record = DiskRecord::new("d", "v", source, 1 << 20, 512, Policy::WriteBack(1));
    (record.owner, record.epoch) = (Some(NodeRef::new("a", 1)), 3);
    change(&mut record);
    node.registry.transact(record.create(keys::disk("d"))).await.unwrap();
    let mut disks = node.records.disks.changes();
    disks.wait_for(|known| known.contains_key("d")).await.unwrap();
    record
}

/// An empty volume `v` in a directory, in the registry.
pub(crate) async fn volume_in(node: &Node, directory: &std::path::Path) -> DirVolume {
    let path = directory.join("volume");
    std::fs::create_dir(&path).unwrap();
    let volume = DirVolume::open(&path).unwrap();
    let id = volume.identify(7).unwrap();
    let entry = VolumeRecord::dir("v", path, id);
    node.registry.transact(entry.create(keys::volume("v"))).await.unwrap();
    volume
}

/// P4: an owner that was silent before this node released the disk may have owned it since, and written.
#[tokio::test]
async fn releasing_forgets_how_long_former_owners_were_silent() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let former = FormerOwner::silent(NodeRef::new("c", 1), 2);
    let record = disk_of_a(&node, |record| record.former = vec![former]).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    let (certain, first) = task.former(&record);
    assert_eq!(certain, Former::Silent, "c may still write");
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(task.former(&record).1, first, "it counts from when it was first seen");
    let theirs = DiskRecord { owner: Some(NodeRef::new("c", 1)), epoch: 4, ..record.clone() };
    task.release_disk(4, Some(theirs)).await;
    assert_eq!(task.local, Local::Closed);
    let again = task.former(&record).1.expect("c may still write");
    assert!(again >= first.unwrap() + Duration::from_millis(20), "the whole grace from now on");
}

#[tokio::test]
async fn a_follower_that_is_gone_is_struck_off() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    let record = disk_of_a(&node, |record| record.follower = Some(NodeRef::new("b", 1))).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.settle_follower(&record).await;
    assert_eq!(task.record().unwrap().follower, record.follower, "not by who does not have it open");
    task.local = Local::Open { epoch: 3 };
    task.settle_follower(&record).await;
    let (_, now) = change::read(&*node.registry, "d").await.unwrap();
    assert_eq!((now.follower, now.epoch), (None, 3));
    let command = told.recv().await.unwrap();
    assert!(command.contains("Successor") && command.contains("None"), "{command}");
}

/// A node of the same name that joins later is another one.
#[tokio::test]
async fn a_removed_node_is_no_disks_home() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let mut states = node.records.changes();
    let joined = node_state::Event::Present { node: "b".into() };
    node_states::change(&node, &joined, node.session.guard()).await.unwrap();
    while !node.records.node_states().nodes.contains_key("b") {
        states.next().await;
    }
    let record = disk_of_a(&node, |record| record.home = Some("b".into())).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    task.settle_home(&record).await;
    assert_eq!(task.record().unwrap().home, record.home, "it has been drained, and is there");
    node_states::remove(&node, "b").await.unwrap();
    while node.records.node_states().nodes.contains_key("b") {
        states.next().await;
    }
    task.settle_home(&record).await;
    let (_, now) = change::read(&*node.registry, "d").await.unwrap();
    assert_eq!((now.home, now.epoch), (None, 3));
}

/// A newer version has written the states of the nodes.
#[tokio::test]
async fn an_unreadable_record_removes_no_home() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let mut states = node.records.changes();
    let unreadable = r#"{"v":2,"something":"else"}"#;
    let change = weir_cluster::registry::Transaction::new().put(keys::NODE_STATES, unreadable);
    node.registry.transact(change).await.unwrap();
    while node.records.reads_node_states() {
        states.next().await;
    }
    let record = disk_of_a(&node, |record| record.home = Some("b".into())).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    task.settle_home(&record).await;
    let (_, now) = change::read(&*node.registry, "d").await.unwrap();
    assert_eq!(now.home, record.home);
}

/// Nothing else may wake the task for it.
#[tokio::test]
async fn a_home_that_is_not_struck_off_is_tried_again() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::new(RegistryFaults::default());
    let (node, _told) = node_at(directory.path(), Arc::clone(&faults)).await;
    disk_of_a(&node, |record| record.home = Some("b".into())).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    faults.refuses.store(true, Ordering::Relaxed);
    let mut again = task.reconcile().await;
    assert!(again.is_some(), "it is tried again");
    faults.refuses.store(false, Ordering::Relaxed);
    // An epoch of its own comes first: the outcome of the change is unknown.
    while change::read(&*node.registry, "d").await.unwrap().1.home.is_some() {
        let now = again.take().expect("nothing else wakes it");
        sleep_until(Some(now)).await;
        again = task.reconcile().await;
    }
}

/// The open disk serves clients of the follower alone, so it has to know each change.
#[tokio::test]
async fn the_open_disk_is_told_who_follows() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = node(directory.path()).await;
    let [b, c] = ["b", "c"].map(|name| NodeRef::new(name, 1));
    disk_of_a(&node, |record| record.follower = Some(b.clone())).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.tell_follower().await;
    task.local = Local::Open { epoch: 3 };
    task.tell_follower().await;
    task.tell_follower().await;
    for to in [Some(&c), None, Some(&b)] {
        task.follow(to).await.unwrap();
    }
    // The view of the registry may be one of before that.
    task.tell_follower().await;
    task.local = Local::Closed;
    task.tell_follower().await;
    task.local = Local::Open { epoch: 3 };
    task.tell_follower().await;
    let mut known = Vec::new();
    for _ in 0..5 {
        let command = loop {
            let command = tokio::time::timeout(SOON, told.recv()).await.unwrap().unwrap();
            if command.starts_with("FollowerIs") {
                break command;
            }
        };
        known.push(command.contains("\"b\"").then_some('b').or(command.contains("\"c\"").then_some('c')));
    }
    assert_eq!(
        known,
        [Some('b'), Some('c'), None, Some('b'), Some('b')],
        "the last after it was opened anew"
    );
}

/// A failed claim says nothing about the disk's next arrival here, with a log that is inherited then.
#[tokio::test]
async fn an_arrival_belongs_to_its_epoch() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let record = disk_of_a(&node, |record| {
        record.former = vec![FormerOwner::silent(NodeRef::new("c", 1), 1)];
        (record.mode, record.replicas) = (Mode::WriteBack, vec![NodeRef::new("c", 1)]);
    })
    .await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.arrival = Some((1, Came::By(Arrival::Clean)));
    assert_eq!(task.arrival(&record), Arrival::TakeOver { former: Former::Silent });
    task.arrival = Some((3, Came::By(Arrival::Clean)));
    assert_eq!(task.arrival(&record), Arrival::Clean);
    // Closed cleanly, and the release failed: the log is empty, and the former owner is the same.
    task.arrival = Some((2, Came::Closed));
    assert_eq!(task.arrival(&record), Arrival::FromWriteThrough { former: Former::Silent });
    task.arrival = Some((3, Came::Closed));
    let renewed = task.record_to_open(&record).await.unwrap();
    assert_eq!(renewed.epoch, 4, "a disk that is opened again in its tenure gets an epoch of its own");
}

/// A disk comes back to a node that once sealed members of another set: those seals say nothing about who owned it in between.
#[tokio::test]
async fn seals_belong_to_a_tenure() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let set = Some(GrantSet::Replicas(vec!["c".into()]));
    let former = FormerOwner { set, ..FormerOwner::silent(NodeRef::new("b", 1), 2) };
    let record = disk_of_a(&node, |record| record.former = vec![former]).await;
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.on_sealed("c".into(), 3, Ok(Nanos(1)));
    assert_eq!(task.former(&record).0, Former::Serving, "sealed before this tenure began");
    let lease = *node.session.leased().borrow();
    drop(node.rights.begin("d", 3, record.grant_set(), lease));
    task.on_sealed("c".into(), 2, Ok(Nanos(1)));
    assert_eq!(task.former(&record).0, Former::Serving, "a seal for an earlier tenure");
    task.on_sealed("c".into(), 3, Ok(Nanos(1)));
    assert_eq!(task.former(&record).0, Former::Silent);
    let arrival = task.arrival_after(&record);
    assert_eq!(arrival, Arrival::FromWriteThrough { former: Former::Serving }, "the next tenure begins anew");
}

/// P4: the kernel may be busy with what an ended process had handed to it for longer than any grace, and then be done with it at once.
#[tokio::test]
async fn an_ended_owner_is_waited_for_until_its_requests_have_come_back() {
    let directory = tempfile::tempdir().unwrap();
    let (node, _told) = node(directory.path()).await;
    let [here, elsewhere] = ["c", "d"].map(|name| FormerOwner::silent(NodeRef::new(name, 1), 2));
    let record = disk_of_a(&node, |record| record.former = vec![here.clone()]).await;
    let mut stopped = node.records.changes();
    for (former, machine) in [(&here, Machine::here()), (&elsewhere, None)] {
        let (node_ref, how) = (former.node.clone(), StoppedHow::ProcessEnded);
        let note = StoppedRecord { node: node_ref, how, time_unix_ms: 0, machine };
        node.registry.transact(note.create(keys::stopped(&former.node))).await.unwrap();
        while !node.records.has_stopped(&former.node) {
            stopped.next().await;
        }
    }
    let (mut task, _inbox) = DiskTask::new("d", &node);
    task.local = Local::Open { epoch: 3 };
    for expected in [Former::Silent, Former::Stopped] {
        assert_eq!(task.former(&record), (Former::Silent, None), "nobody knows of an end");
        let again = task.look_for_traces(&record).await.expect("its end is looked for");
        let Some(Message::Looked { process, seen }) = task.inbox.recv().await else { panic!("no answer") };
        task.on_looked(process, seen);
        assert_eq!(task.former(&record), (expected, None));
        sleep_until(Some(again)).await;
    }
    assert_eq!(task.look_for_traces(&record).await, None, "there is nothing to look for any more");
    let (certain, again) = task.former(&DiskRecord { former: vec![elsewhere], ..record });
    assert_eq!(certain, Former::Silent, "its kernel is out of sight");
    assert!(again.is_some(), "the grace counts");
}

/// The volume `v` and the file of the disk `d`.
async fn volume_of_d(node: &Node, directory: &std::path::Path) {
    let path = directory.join("volume");
    std::fs::create_dir(&path).unwrap();
    let volume = weir_volume::DirVolume::open(&path).unwrap();
    volume.identify(7).unwrap();
    volume.create_disk("d", 1 << 20).unwrap();
    let record = VolumeRecord::dir("v", path, 7);
    node.registry.transact(record.create(keys::volume("v"))).await.unwrap();
}

/// Other disks' storage hangs: that says nothing about this one, which would have no owner.
#[tokio::test]
async fn a_disk_that_cannot_be_looked_at_because_of_others_is_claimed() {
    for (refused, is_claimed) in
        [(Unopened::Busy("8 others hang".into()), true), (Unopened::Fails("it hangs".into()), false)]
    {
        let directory = tempfile::tempdir().unwrap();
        let (mut node, _told) = node(directory.path()).await;
        let (commands, mut queue) = mpsc::channel(16);
        Arc::get_mut(&mut node).unwrap().shards = Shards::new(vec![ShardQueue::new(commands, || {})]);
        tokio::spawn(async move {
            while let Some(command) = queue.recv().await {
                if let Command::CanOpen { answer, .. } = command {
                    drop(answer.send(Err(refused.clone())));
                }
            }
        });
        volume_of_d(&node, directory.path()).await;
        let record = disk_of_a(&node, |_| {}).await;
        let (mut task, _inbox) = DiskTask::new("d", &node);
        assert_eq!(task.check_claim(&record).await.is_ok(), is_claimed);
    }
}

/// The heir may hang and keep its lease: others claim the disk, and wake for it though nothing changes.
#[tokio::test]
async fn a_disk_that_its_heir_does_not_claim_is_claimed_after_a_while() {
    for stops in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let node = quiet_node(directory.path()).await;
        let registry = node.registry.clone();
        let _heir = NodeSession::start(registry, record_of("b"), SessionConfig::default()).await.unwrap();
        node.records.nodes.changes().wait_for(|live| live.contains_key("b")).await.unwrap();
        volume_of_d(&node, directory.path()).await;
        disk_of_a(&node, |record| {
            (record.policy, record.mode) = (Policy::WriteThrough, Mode::WriteThrough);
            (record.owner, record.heir) = (None, Some(NodeRef::new("b", 1)));
        })
        .await;
        let (mut task, _inbox) = DiskTask::new("d", &node);
        let owner =
            async || DiskRecord::of(&change::read(&*node.registry, "d").await.unwrap().0).unwrap().owner;
        let wakes = task.reconcile().await.expect("nothing else wakes it");
        assert!(wakes <= Nanos::now() + CLAIMED_WITHIN, "{wakes:?}");
        assert_eq!(owner().await, None, "it is the heir's");
        if stops {
            node.here.stop();
        }
        let since = &mut task.vacant.as_mut().unwrap().since;
        *since = Nanos(since.0 - CLAIMED_WITHIN.as_nanos() as u64);
        task.reconcile().await;
        // A node that stops would close it again.
        assert_eq!(owner().await, (!stops).then(|| NodeRef::new("a", 1)));
    }
}

async fn drain(node: &Node, name: &str, fewer_copies: bool) {
    let mut seen = node.records.changes();
    let name = name.to_owned();
    for event in [
        node_state::Event::Present { node: name.clone() },
        node_state::Event::Drain { node: name.clone(), fewer_copies },
    ] {
        node_states::change(node, &event, node.session.guard()).await.unwrap();
    }
    while !node.barred().contains(&name) {
        seen.next().await;
    }
}

/// A disk of `z`, which is gone, with another node as the first candidate and this one as the second; and its task here.
async fn abandoned(node: &Arc<Node>, mode: Mode) -> (NodeSession, DiskTask, Inbox) {
    let record = disk_of_a(node, |record| {
        (record.owner, record.mode) = (Some(NodeRef::new("z", 1)), mode);
        record.policy = if mode == Mode::WriteBack { record.policy } else { Policy::WriteThrough };
        record.replicas = if mode == Mode::WriteBack {
            vec![NodeRef::new("b", 1), NodeRef::new("a", 1)]
        } else {
            Vec::new()
        };
    })
    .await;
    // In write-through, hashes make the order.
    let comes_first = |name: &&str| {
        let live = ["a", *name].map(|name| (name.to_owned(), record_of(name))).into();
        successors(&record, &live, &BTreeSet::new(), Duration::ZERO) == [NodeRef::new(*name, 1)]
    };
    let name = ["b", "c", "e", "f", "g", "h"].into_iter().find(comes_first).unwrap();
    let session = NodeSession::start(node.registry.clone(), record_of(name), SessionConfig::default());
    let first = session.await.unwrap();
    node.records.nodes.changes().wait_for(|live| live.contains_key(name)).await.unwrap();
    let (task, inbox) = DiskTask::new("d", node);
    (first, task, inbox)
}

impl DiskTask {
    /// Nobody has acted for so many turns.
    fn turns_have_passed(&mut self, turns: u32) {
        let since = &mut self.vacant.as_mut().unwrap().since;
        *since = Nanos(since.0 - (CLAIMED_WITHIN * turns).as_nanos() as u64);
        self.retry_at = None;
    }

    async fn owner_is(&self) -> Option<NodeRef> {
        let (entry, _) = change::read(&*self.node.registry, &self.name).await.unwrap();
        DiskRecord::of(&entry).unwrap().owner
    }
}

/// The node that comes first may hang, or take this one for the first, because their clocks differ and a quarantine has an end.
#[tokio::test]
async fn a_disk_that_the_first_replica_does_not_take_over_is_taken_over_after_a_while() {
    let directory = tempfile::tempdir().unwrap();
    let node = quiet_node(directory.path()).await;
    let (_first, mut task, _inbox) = abandoned(&node, Mode::WriteBack).await;
    volume_of_d(&node, directory.path()).await;
    let wakes = task.reconcile().await.expect("nothing else wakes it");
    assert!(wakes <= Nanos::now() + CLAIMED_WITHIN, "{wakes:?}");
    assert_eq!(task.owner_is().await, Some(NodeRef::new("z", 1)), "it is for b to act");
    task.turns_have_passed(1);
    task.reconcile().await;
    assert_eq!(task.owner_is().await, Some(NodeRef::new("a", 1)));
}

/// As its owner it would keep the disk, and nobody could open it.
#[tokio::test]
async fn a_disk_that_cannot_be_opened_here_is_left_to_others_while_they_have_their_turns() {
    let directory = tempfile::tempdir().unwrap();
    let node = quiet_node(directory.path()).await;
    let (_first, mut task, _inbox) = abandoned(&node, Mode::WriteBack).await;
    task.reconcile().await;
    task.turns_have_passed(1);
    task.reconcile().await.expect("it is tried again");
    assert_eq!(task.owner_is().await, Some(NodeRef::new("z", 1)));
    task.turns_have_passed(1);
    task.reconcile().await;
    assert_eq!(task.owner_is().await, Some(NodeRef::new("a", 1)), "no other can, and an owner says why");
}

/// The look at its storage takes up to seconds.
#[tokio::test]
async fn a_disk_whose_owner_is_heard_again_during_the_look_is_not_taken_over() {
    let directory = tempfile::tempdir().unwrap();
    let (mut node, _told) = node(directory.path()).await;
    let (commands, mut queue) = mpsc::channel(16);
    Arc::get_mut(&mut node).unwrap().shards = Shards::new(vec![ShardQueue::new(commands, || {})]);
    let (_first, mut task, _inbox) = abandoned(&node, Mode::WriteBack).await;
    volume_of_d(&node, directory.path()).await;
    let (hears, record) = (Arc::clone(&node), task.record().unwrap());
    tokio::spawn(async move {
        while let Some(command) = queue.recv().await {
            if let Command::CanOpen { answer, .. } = command {
                hears.rights.hear(&rights::key(&record), "z", record.epoch);
                drop(answer.send(Ok(())));
            }
        }
    });
    task.reconcile().await;
    task.turns_have_passed(1);
    task.reconcile().await.expect("it looks again");
    assert_eq!(task.owner_is().await, Some(NodeRef::new("z", 1)));
}

/// It would close the disk again for good, and another node may take it over. A log is another matter.
#[tokio::test]
async fn a_stopping_node_takes_over_only_a_log() {
    for (mode, owner) in [(Mode::WriteThrough, "z"), (Mode::WriteBack, "a")] {
        let directory = tempfile::tempdir().unwrap();
        let node = quiet_node(directory.path()).await;
        let (_first, mut task, _inbox) = abandoned(&node, mode).await;
        volume_of_d(&node, directory.path()).await;
        task.reconcile().await;
        node.here.stop();
        task.turns_have_passed(1);
        task.reconcile().await;
        assert_eq!(task.owner_is().await, Some(NodeRef::new(owner, 1)), "{mode:?}");
    }
}
