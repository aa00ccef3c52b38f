//! A stop that was asked for: everything is destaged and closed first, and what would be lost with this process is named.
//!
//! Logs in RAM end with their processes. A stop waits while acknowledged writes are neither in the backing, nor on flash, nor in the
//! log of a node that stays; also while a copy kept here is the last one of a disk whose owner is gone or stops too. When
//! nothing of it has moved for `limits.stop_wait`, the process ends all the same, and says what it takes with it.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, Medium, Mode, NodeRef, keys};
use weir_cluster::registry::Transaction;

use crate::control::disk::{Message, Request};
use crate::control::{Node, Tasks, decide::is_live};
use crate::shard::messages::DiskStatus;

/// Between two looks at what is left.
const LOOK: Duration = Duration::from_millis(200);

/// Longest time for the shards, or the registry, to answer one question.
const ANSWER: Duration = Duration::from_secs(2);

/// What a process that stops takes with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// The disk.
    pub disk: String,
    /// Bytes that its log holds and its backing does not, at most.
    pub bytes: u64,
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "disk {}: {} bytes", self.disk, self.bytes)
    }
}

/// The file in which a process that ended with a loss has left what it was, a line for each disk; removed at the next start.
#[must_use]
pub fn left_behind(state_dir: &Path) -> PathBuf {
    state_dir.join("left-behind")
}

/// Destages and closes all disks. Returns what would be lost by ending now: nothing, or what had not moved for the
/// configured time.
pub(crate) async fn drain(node: &Arc<Node>, tasks: &Arc<Tasks>) -> Vec<Left> {
    announce(node).await;
    let wait = node.config.limits.stop_wait.0;
    let (mut seen, mut since) = (Vec::new(), Nanos::now());
    let mut closing = Box::pin(close_all(node, tasks));
    loop {
        let closed = tokio::time::timeout(LOOK, &mut closing).await.is_ok();
        let now = look(node).await;
        if let Some(now) = &now {
            if closed && now.left.is_empty() && node.here.all().is_empty() {
                return Vec::new();
            }
            if now.marks != seen {
                (seen, since) = (now.marks.clone(), Nanos::now());
            }
        }
        if Nanos::now() - since >= wait {
            let unknown = || vec![Left { disk: "(a shard does not answer)".into(), bytes: 0 }];
            return now.map_or_else(unknown, |now| now.left);
        }
        if closed {
            // A disk may have come here meanwhile.
            closing = Box::pin(close_all(node, tasks));
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Whether a disk is still open here: its shard would not end.
pub(crate) async fn is_open(node: &Node) -> bool {
    let statuses = tokio::time::timeout(ANSWER, node.shards.status()).await;
    statuses.map_or(true, |all| all.iter().any(|status| status.role == "owner"))
}

/// Others must not count on a copy that is about to go.
async fn announce(node: &Node) {
    let me = node.session.node_ref();
    let mark = Transaction::new().put_leased(keys::stopping(&me), me.to_string(), node.session.lease());
    if !matches!(tokio::time::timeout(ANSWER, node.registry.transact(mark)).await, Ok(Ok(_))) {
        tracing::warn!("the registry does not hear that this node stops");
    }
}

/// A log's disk, and how far it is destaged and freed.
type Mark = (String, u64, u64);

struct Look {
    left: Vec<Left>,
    /// What the logs that the stop waits for have destaged and freed: as long as it changes, waiting is worth while.
    marks: Vec<Mark>,
}

/// `None` when a shard does not answer.
async fn look(node: &Node) -> Option<Look> {
    let statuses = tokio::time::timeout(ANSWER, node.shards.status()).await.ok()?;
    let listed = tokio::time::timeout(ANSWER, node.registry.list(keys::STOPPING)).await;
    // Without the registry nobody can be counted on.
    let stopping: Option<BTreeSet<String>> = match listed {
        Ok(Ok(listing)) => Some(listing.entries.into_iter().map(|entry| entry.key).collect()),
        _ => None,
    };
    let live = node.world.nodes.now();
    let stays = |other: &NodeRef| {
        let going = stopping.as_ref().is_none_or(|keys| keys.contains(&keys::stopping(other)));
        !going && is_live(&live, other)
    };
    let me = node.session.node_ref();
    let is_lost = |status: &DiskStatus| {
        let record = node.world.disk(&status.disk);
        record.is_some_and(|record| would_be_lost(&record, status, &me, stays))
    };
    Some(summary(&statuses, is_lost))
}

/// The copies of logs whose owners go on are not among the marks: the stop does not wait for them, and busy owners move them without end.
fn summary(statuses: &[DiskStatus], is_lost: impl Fn(&DiskStatus) -> bool) -> Look {
    let mut look = Look { left: Vec::new(), marks: Vec::new() };
    for status in statuses {
        let lost = is_lost(status);
        if lost {
            look.left.push(Left { disk: status.disk.clone(), bytes: status.dirty_bytes });
        }
        if lost || status.state == "closing" {
            look.marks.push((status.disk.clone(), status.destaged, status.freed));
        }
    }
    look
}

/// Whether acknowledged writes would be lost with the log, or the copy of one, that `status` tells of. `stays` says of another
/// process that it lives and goes on.
fn would_be_lost(
    record: &DiskRecord,
    status: &DiskStatus,
    me: &NodeRef,
    stays: impl Fn(&NodeRef) -> bool,
) -> bool {
    let owner = record.owner.as_ref();
    let is_mine = status.role == "owner";
    // Under write-through nothing is acknowledged before the backing has it.
    let holds = status.dirty_bytes > 0 && record.mode == Mode::WriteBack;
    let counts = if is_mine {
        owner == Some(me) && status.acknowledged > status.destaged
    } else {
        record.is_replica(me) && owner.is_some_and(|owner| owner != me && !stays(owner))
    };
    let elsewhere = record.replicas.iter().any(|replica| replica != me && stays(replica));
    holds && counts && !elsewhere && record.medium != Medium::Flash
}

/// Destages and closes all disks that are open here, side by side.
async fn close_all(node: &Arc<Node>, tasks: &Arc<Tasks>) {
    let mut closing = JoinSet::new();
    for name in node.here.all().into_keys() {
        let inbox = tasks.of(&name, node);
        closing.spawn(async move {
            let (done, closed) = oneshot::channel();
            let _ = inbox.send(Message::Request(Request::Release { done })).await;
            if let Ok(Err(error)) = closed.await {
                tracing::warn!(disk = name, %error, "not closed");
            }
        });
    }
    while closing.join_next().await.is_some() {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_cluster::records::{Policy, Source};

    fn record(owner: &str, replicas: &[&str]) -> DiskRecord {
        let mut record =
            DiskRecord::new("d", "v", Source::File { name: "d".into() }, 1 << 20, 512, Policy::WriteBack(1));
        (record.owner, record.epoch, record.mode) = (Some(NodeRef::new(owner, 1)), 2, Mode::WriteBack);
        record.replicas = replicas.iter().map(|name| NodeRef::new(*name, 1)).collect();
        record
    }

    fn status(role: &str, dirty: u64) -> DiskStatus {
        let (acknowledged, destaged) = (u64::from(dirty > 0) * 7, 0);
        let role = role.into();
        DiskStatus {
            disk: "d".into(),
            role,
            dirty_bytes: dirty,
            acknowledged,
            destaged,
            ..DiskStatus::default()
        }
    }

    #[test]
    fn only_what_a_stop_waits_for_holds_it_up() {
        let state = |name: &str, state: &str| DiskStatus {
            disk: name.into(),
            state: state.into(),
            destaged: 3,
            freed: 2,
            ..DiskStatus::default()
        };
        let all = [state("closes", "closing"), state("others", "complete"), state("last-copy", "complete")];
        let look = summary(&all, |status| status.disk == "last-copy");
        let marks: Vec<_> = look.marks.iter().map(|(disk, ..)| &**disk).collect();
        assert_eq!(marks, ["closes", "last-copy"]);
        assert_eq!(look.left, [Left { disk: "last-copy".into(), bytes: 0 }]);
    }

    #[test]
    fn a_log_in_memory_is_lost_unless_somebody_who_stays_has_it() {
        let me = NodeRef::new("a", 1);
        let lost = |record: &DiskRecord, status: &DiskStatus, staying: &[&str]| {
            would_be_lost(record, status, &me, |node| staying.contains(&&*node.node))
        };
        let mine = record("a", &["b"]);
        assert!(!lost(&mine, &status("owner", 9), &["b"]), "b has it");
        assert!(lost(&mine, &status("owner", 9), &["c"]), "b stops too");
        assert!(!lost(&mine, &status("owner", 0), &[]), "clean");
        assert!(!lost(&DiskRecord { medium: Medium::Flash, ..mine.clone() }, &status("owner", 9), &[]));
        assert!(!lost(&DiskRecord { mode: Mode::WriteThrough, ..mine.clone() }, &status("owner", 9), &[]));
        assert!(lost(&record("a", &[]), &status("owner", 9), &["b", "c"]), "write-back+0");
        let copy = record("b", &["a", "c"]);
        assert!(!lost(&copy, &status("replica", 9), &["b"]), "its owner goes on");
        assert!(!lost(&copy, &status("replica", 9), &["c"]), "c has another");
        assert!(lost(&copy, &status("replica", 9), &["d"]), "the last copy");
        assert!(!lost(&record("b", &["c"]), &status("replica", 9), &[]), "ours does not count");
    }
}
