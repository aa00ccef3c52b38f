//! A replica whose node is paused, cut off or restarted while nobody writes.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::control::grants;
use crate::control::rights::wire::{Answer, Question};
use crate::peer::Greeting;

/// Short, for the sake of the test's duration.
const TIMES: GrantTimes = GrantTimes { length: Duration::from_secs(1), margin: Duration::from_millis(100) };

/// The way in which `b` treats questions for grants.
#[derive(Clone, Copy)]
enum Answers {
    Soon,
    /// The next one never; then as before.
    NotThis,
    Never,
}

/// Process 1 of node `b`, as far as it answers questions for grants.
struct Member {
    session: Option<NodeSession>,
    answers: Arc<Mutex<Answers>>,
    connections: Arc<AtomicUsize>,
}

impl Member {
    async fn start(node: &Node) -> Member {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let record = NodeRecord { peer_address: listener.local_addr().unwrap(), ..record_of("b") };
        let session = NodeSession::start(node.registry.clone(), record, SessionConfig::default()).await;
        let answers = Arc::new(Mutex::new(Answers::Soon));
        let connections = Arc::new(AtomicUsize::new(0));
        let (of, count) = (Arc::clone(&answers), Arc::clone(&connections));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(answer(stream, Arc::clone(&of)));
            }
        });
        node.records.nodes.changes().wait_for(|live| live.contains_key("b")).await.unwrap();
        Member { session: session.ok(), answers, connections }
    }

    /// The registry does not hear it any more.
    async fn end_session(&mut self, node: &Node) {
        self.session.take().unwrap().leave().await.unwrap();
        node.records.nodes.changes().wait_for(|live| !live.contains_key("b")).await.unwrap();
    }

    async fn connects_again(&self, than: usize) {
        let again = async {
            while self.connections.load(Ordering::Relaxed) <= than {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(SOON, again).await.expect("it is not asked again");
    }

    fn does(&self, answers: Answers) {
        *self.answers.lock().unwrap() = answers;
    }
}

async fn answer(mut stream: TcpStream, answers: Arc<Mutex<Answers>>) {
    Greeting::read(&mut stream).await.unwrap();
    while let Ok(question) = Question::read(&mut stream).await {
        let now = *answers.lock().unwrap();
        match now {
            Answers::Soon => {
                let verdicts = vec![Ok(Duration::ZERO); question.disks.len()];
                let answer = Answer { number: question.number, verdicts }.encode();
                stream.write_all(&answer).await.unwrap();
            }
            Answers::NotThis => *answers.lock().unwrap() = Answers::Soon,
            Answers::Never => {}
        }
    }
}

/// Node `a`, with short grants, and its shard's commands.
async fn owner(directory: &std::path::Path) -> (Arc<Node>, mpsc::Receiver<String>) {
    let (mut node, told) = node(directory).await;
    let lease = *node.session.leased().borrow();
    Arc::get_mut(&mut node).unwrap().rights = Rights::new(TIMES, lease, Nanos::now());
    (node, told)
}

/// An open disk of `a` with a replica on process 1 of `b`.
async fn watched(node: &Arc<Node>) -> (DiskTask, DiskRecord) {
    let record = disk_of_a(node, |record| {
        (record.mode, record.replicas) = (Mode::WriteBack, vec![NodeRef::new("b", 1)]);
    })
    .await;
    let (mut task, _inbox) = DiskTask::new("d", node);
    task.local = Local::Open { epoch: record.epoch };
    (task, record)
}

fn begin(node: &Node, record: &DiskRecord) {
    drop(node.rights.begin("d", record.epoch, record.grant_set(), *node.session.leased().borrow()));
}

/// How often the disk is told within `time`, while its task looks whenever it wants to.
async fn told_within(
    time: Duration,
    task: &mut DiskTask,
    record: &DiskRecord,
    told: &mut mpsc::Receiver<String>,
) -> usize {
    let (until, mut count) = (Nanos::now() + time, 0);
    while Nanos::now() < until {
        let again = task.settle_silent(record).await;
        sleep_until(Some(again.unwrap_or(until).min(until))).await;
        while let Ok(command) = told.try_recv() {
            count += usize::from(command.starts_with("PeerSilent"));
        }
    }
    count
}

/// It has lost the registry, and keeps its copy: whatever becomes of a connection, it is asked again.
#[tokio::test]
async fn a_replica_that_answers_this_node_is_not_silent() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = owner(directory.path()).await;
    let mut member = Member::start(&node).await;
    tokio::spawn(grants::run(Arc::clone(&node)));
    let (mut task, record) = watched(&node).await;
    begin(&node, &record);
    member.connects_again(0).await;
    member.end_session(&node).await;
    let patience = node.rights.patience();
    for round in 1..=2 {
        member.does(Answers::NotThis);
        assert_eq!(told_within(patience * 3, &mut task, &record, &mut told).await, 0, "one late answer");
        member.connects_again(round).await;
    }
    let before = member.connections.load(Ordering::Relaxed);
    node.rights.end("d");
    tokio::time::sleep(node.rights.renewal() * 3).await;
    begin(&node, &record);
    assert_eq!(
        told_within(patience * 3, &mut task, &record, &mut told).await,
        0,
        "it was closed for a while"
    );
    member.connects_again(before).await;
}

/// The disk may not have been connected to it when it was told first.
#[tokio::test]
async fn a_replica_that_nobody_hears_is_reported_again_and_again_without_a_write() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = owner(directory.path()).await;
    let mut member = Member::start(&node).await;
    tokio::spawn(grants::run(Arc::clone(&node)));
    let (mut task, record) = watched(&node).await;
    begin(&node, &record);
    member.connects_again(0).await;
    member.does(Answers::Never);
    let patience = node.rights.patience();
    assert_eq!(told_within(patience * 2, &mut task, &record, &mut told).await, 0, "the registry hears it");
    member.end_session(&node).await;
    let mut count = 0;
    let often = async {
        while count < 2 {
            count += told_within(patience, &mut task, &record, &mut told).await;
        }
    };
    tokio::time::timeout(SOON, often).await.expect("it is not reported");
}

#[tokio::test]
async fn a_replica_that_was_not_asked_is_not_silent() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = owner(directory.path()).await;
    let (mut task, record) = watched(&node).await;
    let patience = node.rights.patience();
    assert_eq!(told_within(patience * 3, &mut task, &record, &mut told).await, 0);
}

/// While this node was paused, so were its questions.
#[tokio::test]
async fn after_a_pause_of_the_owner_the_patience_begins_anew() {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = owner(directory.path()).await;
    let (mut task, record) = watched(&node).await;
    let again = task.settle_silent(&record).await.unwrap();
    for _ in 0..2 {
        let long_ago = Nanos(Nanos::now().0 - node.rights.patience().as_nanos() as u64);
        node.rights.answers.not_answered(&record.replicas[0], long_ago);
    }
    sleep_until(Some(again + node.rights.renewal() * 2)).await;
    let again = task.settle_silent(&record).await.unwrap();
    assert!(again >= Nanos::now() + node.rights.patience() / 2, "the whole patience");
    let patience = node.rights.patience();
    assert_eq!(told_within(patience / 2, &mut task, &record, &mut told).await, 0);
    let told = told_within(patience * 2, &mut task, &record, &mut told).await;
    assert!(told > 0, "it was silent after the pause, too");
}

/// A host that loses power sends no end of its connections, and may be back before anybody has missed it.
#[tokio::test]
async fn another_process_of_the_node_is_a_proof() {
    another_process_is_a_proof(None).await;
}

/// Its log may be lost, though the flash is the same.
#[tokio::test]
async fn another_process_on_the_same_flash_is_a_proof() {
    another_process_is_a_proof(Some(7)).await;
}

async fn another_process_is_a_proof(flash: Option<u64>) {
    let directory = tempfile::tempdir().unwrap();
    let (node, mut told) = owner(directory.path()).await;
    let (mut task, mut record) = watched(&node).await;
    record.replicas = vec![NodeRef::new("b", 1).with_flash(flash)];
    record.medium = if flash.is_some() { Medium::Flash } else { Medium::Ram };
    let next = NodeRecord { incarnation: 2, flash, ..record_of("b") };
    let _session = NodeSession::start(node.registry.clone(), next, SessionConfig::default()).await.unwrap();
    node.records.nodes.changes().wait_for(|live| live.contains_key("b")).await.unwrap();
    let moment = node.rights.patience() / 2;
    assert_eq!(told_within(moment, &mut task, &record, &mut told).await, 1, "at once");
    task.connected.insert("b".into(), NodeRef::new("b", 2).with_flash(flash));
    assert_eq!(
        told_within(TIMES.length, &mut task, &record, &mut told).await,
        0,
        "the copy goes to that one"
    );
}
