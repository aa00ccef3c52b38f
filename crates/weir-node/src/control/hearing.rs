//! Whether the members of a disk's set hear its owner: asked by a node that is about to take the disk over.
//!
//! The owner may have hundreds of disks, whose tasks all ask at once. So one question to a member is about all disks of that owner,
//! and who asks meanwhile waits for its answer. The time limit is that of the member's answer alone: a member that is busy with
//! this node's own questions must not look like one that hears nobody, because an isolated owner would lose its disks.

use weir_block::Nanos;
use weir_cluster::records::DiskRecord;

use super::Node;
use super::grants::Connection;
use super::rights::heard::Heard;
use super::rights::wire::{Ask, MOST_ENTRIES};

/// Whether any other member of the disk's set hears the owner, with a right that the set's grants uphold. Members that do not answer
/// soon do not hear it. Asked once for each renewal, however often the disk's task wakes up.
pub async fn others_hear(node: &Node, record: &DiskRecord) -> bool {
    let (me, set) = (&node.config.name, record.grant_set());
    let live = node.records.nodes.now();
    for member in set.members().iter().filter(|member| *member != me && live.contains_key(*member)) {
        if hears(node, member, record).await {
            return true;
        }
    }
    false
}

async fn hears(node: &Node, member: &str, record: &DiskRecord) -> bool {
    let (said, renewal) = (node.rights.heard.of(member), node.rights.renewal());
    let mut said = said.lock().await;
    let now = Nanos::now();
    said.disks.retain(|_, verdict| now < verdict.at + renewal);
    if let Some(known) = said.disks.get(&record.name).filter(|known| known.epoch == record.epoch) {
        return known.hears;
    }
    if now < said.silent_until {
        return false;
    }
    let disks = disks_to_ask_about(node, member, record);
    let ask = async { Connection::open(node, member).await?.ask(Ask::Heard, &disks).await };
    match weir_task::timeout(renewal, ask).await {
        Ok(Ok(verdicts)) => {
            let at = Nanos::now();
            for ((disk, epoch), verdict) in disks.into_iter().zip(verdicts) {
                said.disks.insert(disk, Heard { epoch, at, hears: verdict.is_ok() });
            }
        }
        // It may answer on another connection: only this disk's task has its answer.
        Ok(Err(error)) => {
            tracing::debug!(member, %error, "it does not say whom it hears");
            let verdict = Heard { epoch: record.epoch, at: Nanos::now(), hears: false };
            said.disks.insert(record.name.clone(), verdict);
        }
        // Each disk's task would wait as long, one after the other.
        Err(_) => said.silent_until = Nanos::now() + renewal,
    }
    said.disks.get(&record.name).is_some_and(|verdict| verdict.hears)
}

/// This disk, and the others of its owner whose sets have `member`.
fn disks_to_ask_about(node: &Node, member: &str, record: &DiskRecord) -> Vec<(String, u64)> {
    let all = node.records.disks.now();
    let others = all.values().filter(|other| {
        let has_member = || other.grant_set().members().iter().any(|name| name == member);
        other.name != record.name && other.owner == record.owner && has_member()
    });
    let asked = std::iter::once(record).chain(others).take(MOST_ENTRIES);
    asked.map(|disk| (disk.name.clone(), disk.epoch)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};
    use weir_cluster::membership::{NodeSession, SessionConfig};
    use weir_cluster::records::{NodeRecord, NodeRef, Record, keys};

    use super::*;
    use crate::control::disk::tests::{disk_of_a, node, record_of};
    use crate::control::rights::wire::{Answer, Question};
    use crate::peer::Greeting;

    /// Long, but within the limit of an answer.
    const SLOW: Duration = Duration::from_millis(500);

    /// Answers one question of a connection after a while: the owner is heard in all disks.
    async fn answer(mut stream: TcpStream) {
        Greeting::read(&mut stream).await.unwrap();
        let question = Question::read(&mut stream).await.unwrap();
        tokio::time::sleep(SLOW).await;
        let verdicts = vec![Ok(Duration::ZERO); question.disks.len()];
        stream.write_all(&Answer { number: question.number, verdicts }.encode()).await.unwrap();
    }

    /// Node `a`, a guard `c` with connections counted, and disks of `b` that `c` guards.
    async fn isolated(
        directory: &std::path::Path,
        answers: bool,
    ) -> (Arc<Node>, NodeSession, Arc<AtomicUsize>) {
        let (node, mut told) = node(directory).await;
        tokio::spawn(async move { while told.recv().await.is_some() {} });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let guard = NodeRecord { peer_address: listener.local_addr().unwrap(), ..record_of("c") };
        let session =
            NodeSession::start(node.registry.clone(), guard, SessionConfig::default()).await.unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        tokio::spawn(async move {
            let mut silent = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                if answers {
                    tokio::spawn(answer(stream));
                } else {
                    silent.push(stream);
                }
            }
        });
        let mut disk = disk_of_a(&node, |record| {
            (record.owner, record.guards) = (Some(NodeRef::new("b", 1)), vec!["c".into()]);
        })
        .await;
        for number in 1..50 {
            disk.name = format!("d{number}");
            node.registry.transact(disk.create(keys::disk(&disk.name))).await.unwrap();
        }
        node.records.disks.changes().wait_for(|known| known.len() == 50).await.unwrap();
        node.records.nodes.changes().wait_for(|known| known.contains_key("c")).await.unwrap();
        (node, session, asked)
    }

    async fn heard(node: &Arc<Node>) -> usize {
        let mut asking = tokio::task::JoinSet::new();
        for disk in node.records.disks.now().values() {
            let (node, disk) = (Arc::clone(node), disk.clone());
            asking.spawn(async move { others_hear(&node, &disk).await });
        }
        asking.join_all().await.into_iter().filter(|heard| *heard).count()
    }

    #[tokio::test]
    async fn an_owner_with_many_disks_is_heard_in_all_of_them() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _guard, asked) = isolated(directory.path(), true).await;
        assert_eq!(heard(&node).await, 50, "the member was only busy");
        assert_eq!(asked.load(Ordering::Relaxed), 1, "one question is about all of them");
    }

    /// A dead owner's disks are taken over without delay.
    #[tokio::test]
    async fn a_silent_member_is_waited_for_once() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _guard, asked) = isolated(directory.path(), false).await;
        let began = Nanos::now();
        assert_eq!(heard(&node).await, 0);
        assert!(Nanos::now() - began < node.rights.renewal() * 3, "{:?}", Nanos::now() - began);
        assert!(asked.load(Ordering::Relaxed) <= 2);
    }
}
