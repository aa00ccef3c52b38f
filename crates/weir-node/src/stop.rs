//! A requested stop: the node destages and closes everything first, and names what would be lost with this process.
//!
//! Logs in RAM end with their processes. A stop waits while acknowledged writes are neither in the backing, nor on flash, nor
//! in the log of a node that stays. It also waits while a copy kept here is the last one of a disk whose owner is gone or
//! stops too, and while the registry counts on a log that has been emptied, so that no node could open its disk. If none of
//! this moves for `limits.stop_wait`, the process ends all the same, and reports the loss.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use weir_block::Nanos;
use weir_cluster::placement::Live;
use weir_cluster::records::{DiskRecord, Medium, Mode, NodeRef, keys};
use weir_cluster::registry::Transaction;
use weir_cluster::view::Seen;

use crate::control::disk::{Message, Request};
use crate::control::{Node, Tasks, decide::is_live};
use crate::shard::messages::DiskStatus;

/// Between two looks at what is left.
const LOOK: Duration = Duration::from_millis(200);

/// Longest time for the registry to answer one question.
const ANSWER: Duration = Duration::from_secs(2);

/// The loss that a process causes when it stops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// The disk.
    pub disk: String,
    /// The lost part.
    pub what: What,
}

/// The part of a disk's log that ends with a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// So many bytes, at most, that its log holds and its backing does not.
    Dirty(u64),
    /// Unknown: its shard does not answer. So many bytes when it did.
    Unknown(u64),
    /// Nothing, but the registry counts on its log, which is closed and gone.
    Unreleased,
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "disk {}: ", self.disk)?;
        match self.what {
            What::Dirty(bytes) => write!(f, "{bytes} bytes"),
            What::Unknown(bytes) => {
                write!(f, "an unknown amount, its shard does not answer ({bytes} bytes when it did)")
            }
            What::Unreleased => {
                f.write_str("nothing, but the registry still counts on its log, which is empty")
            }
        }
    }
}

/// The file in which a process that ended with a loss has left its report, a line for each disk; removed at the next start.
#[must_use]
pub fn left_behind(state_dir: &Path) -> PathBuf {
    state_dir.join("left-behind")
}

/// Destages and closes all disks. Returns what would be lost by ending now: nothing, or what had not moved for `wait`; `None`:
/// waits for as long as it takes.
pub(crate) async fn drain(node: &Arc<Node>, tasks: &Arc<Tasks>, wait: Option<Duration>) -> Vec<Left> {
    announce(node).await;
    let (mut seen, mut since) = (Vec::new(), Nanos::now());
    let mut closing = Box::pin(close_all(node, tasks));
    loop {
        let closed = tokio::time::timeout(LOOK, &mut closing).await.is_ok();
        let now = look(node).await;
        if closed && now.left.is_empty() && node.here.all().is_empty() {
            return Vec::new();
        }
        if now.marks != seen {
            (seen, since) = (now.marks, Nanos::now());
        }
        if wait.is_some_and(|wait| Nanos::now() - since >= wait) {
            return now.left;
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
    let (statuses, silent) = node.shards.look().await;
    !silent.is_empty() || statuses.iter().any(|status| status.role == "owner")
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
    /// The positions up to which the logs that the stop waits for are destaged and freed: as long as they move, the stop
    /// waits.
    marks: Vec<Mark>,
}

async fn look(node: &Node) -> Look {
    let (mut statuses, silent) = node.shards.look().await;
    let listed = tokio::time::timeout(ANSWER, node.registry.list(keys::STOPPING)).await;
    let stopping: Option<BTreeSet<String>> = match listed {
        Ok(Ok(listing)) => Some(listing.entries.into_iter().map(|entry| entry.key).collect()),
        _ => None,
    };
    let me = node.session.node_ref();
    let disks = node.records.disks.now();
    let is_silent = |disk: &str| silent.contains(&node.shards.number_of(disk));
    statuses.extend(unspoken(disks.values(), &statuses, &me, is_silent));
    let others = Others { live: &node.records.nodes.now(), stopping: stopping.as_ref() };
    let unreleased = node.here.unreleased();
    let is_lost = |status: &DiskStatus| match disks.seen(&status.disk) {
        // A closed disk holds nothing.
        _ if unreleased.contains(&status.disk) => false,
        Seen::Record { record, .. } => would_be_lost(&record, status, &me, |node| others.stays(node)),
        Seen::Unreadable { .. } => status.dirty_bytes > 0 || status.state == DiskStatus::SILENT,
        Seen::Nothing => false,
    };
    let mut look = summary(&statuses, is_lost);
    let stranded = unreleased.into_iter().filter(|disk| {
        disks.get(disk).is_some_and(|record| is_stranded(record, &me, |node| others.lives(node)))
    });
    look.left.extend(stranded.map(|disk| Left { disk, what: What::Unreleased }));
    look
}

/// The other nodes.
struct Others<'a> {
    live: &'a Live,
    /// Those that stop, as far as the registry says.
    stopping: Option<&'a BTreeSet<String>>,
}

impl Others<'_> {
    /// Whether this process certainly goes on. Without the registry none counts.
    fn stays(&self, other: &NodeRef) -> bool {
        self.stopping.is_some() && self.lives(other)
    }

    /// Whether this process goes on, as far as is known.
    fn lives(&self, other: &NodeRef) -> bool {
        let goes = self.stopping.is_some_and(|keys| keys.contains(&keys::stopping(other)));
        !goes && is_live(self.live, other)
    }
}

/// Possible logs of silent shards' disks that are missing in their last status.
fn unspoken<'a>(
    disks: impl Iterator<Item = &'a DiskRecord>,
    statuses: &[DiskStatus],
    me: &NodeRef,
    is_silent: impl Fn(&str) -> bool,
) -> Vec<DiskStatus> {
    let unspoken = disks
        .filter(|record| is_silent(&record.name) && statuses.iter().all(|status| status.disk != record.name));
    let status = |record: &DiskRecord| {
        let is_mine = record.owner.as_ref() == Some(me);
        let role = if is_mine { "owner" } else { "replica" };
        DiskStatus {
            disk: record.name.clone(),
            role: role.into(),
            state: DiskStatus::SILENT.into(),
            ..DiskStatus::default()
        }
    };
    unspoken.map(status).collect()
}

/// The copies of logs whose owners go on are not among the marks: the stop does not wait for them, and busy owners move them without end.
fn summary(statuses: &[DiskStatus], is_lost: impl Fn(&DiskStatus) -> bool) -> Look {
    let mut look = Look { left: Vec::new(), marks: Vec::new() };
    for status in statuses {
        let lost = is_lost(status);
        if lost {
            let what = match status.state == DiskStatus::SILENT {
                true => What::Unknown(status.dirty_bytes),
                false => What::Dirty(status.dirty_bytes),
            };
            look.left.push(Left { disk: status.disk.clone(), what });
        }
        if lost || status.state == "closing" {
            look.marks.push((status.disk.clone(), status.destaged, status.freed));
        }
    }
    look
}

/// Whether acknowledged writes would be lost with the log, or the copy of one, in `status`. `stays` returns whether another
/// process lives and goes on. The last status of a shard that does not answer proves nothing about its present state.
fn would_be_lost(
    record: &DiskRecord,
    status: &DiskStatus,
    me: &NodeRef,
    stays: impl Fn(&NodeRef) -> bool,
) -> bool {
    let owner = record.owner.as_ref();
    let is_silent = status.state == DiskStatus::SILENT;
    // Under write-through nothing is acknowledged before the backing has it.
    let holds = (status.dirty_bytes > 0 || is_silent) && record.mode == Mode::WriteBack;
    let counts = match (status.role == "owner", owner == Some(me)) {
        (true, is_mine) => is_mine && (status.promised > status.destaged || is_silent),
        // Taken over, or handed over, and not open yet.
        (false, true) => true,
        (false, false) => record.is_replica(me) && owner.is_some_and(|owner| !stays(owner)),
    };
    let elsewhere = record.replicas.iter().any(|replica| replica != me && stays(replica));
    holds && counts && !elsewhere && record.medium != Medium::Flash
}

/// Whether no node could open the disk, which is closed here with nothing dirty, once this process has ended: the registry
/// counts on a log that no longer exists.
fn is_stranded(record: &DiskRecord, me: &NodeRef, lives: impl Fn(&NodeRef) -> bool) -> bool {
    let elsewhere = record.replicas.iter().any(|replica| replica != me && lives(replica));
    record.owner.as_ref() == Some(me) && record.mode == Mode::WriteBack && !elsewhere
}

/// Destages and closes all disks that are open here, side by side.
async fn close_all(node: &Arc<Node>, tasks: &Arc<Tasks>) {
    let mut closing = JoinSet::new();
    for name in node.here.all().into_keys() {
        let inbox = tasks.of(&name, node);
        closing.spawn(async move {
            let (done, closed) = oneshot::channel();
            let _ = inbox.send(Message::Request(Request::Release { unless_used: false, done })).await;
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
        // Of an inherited log, nothing need be acknowledged by this owner.
        let (promised, destaged) = (u64::from(dirty > 0) * 7, 0);
        let role = role.into();
        DiskStatus { disk: "d".into(), role, dirty_bytes: dirty, promised, destaged, ..DiskStatus::default() }
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
        assert_eq!(look.left, [Left { disk: "last-copy".into(), what: What::Dirty(0) }]);
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

    /// P1: guests may have written since a shard's last status, or even since the last one with the disk in it.
    #[test]
    fn what_a_silent_shard_said_last_is_no_reason_to_end() {
        let me = NodeRef::new("a", 1);
        let (alone, shared) = (record("a", &[]), record("a", &["b"]));
        let lost = |record: &DiskRecord, status: &DiskStatus| {
            would_be_lost(record, status, &me, |node| node.node == "b")
        };
        let silent = |role: &str| DiskStatus { state: DiskStatus::SILENT.into(), ..status(role, 0) };
        assert!(lost(&alone, &silent("owner")) && !lost(&alone, &status("owner", 0)));
        assert!(!lost(&shared, &silent("owner")), "b has it");
        assert!(!lost(&DiskRecord { mode: Mode::WriteThrough, ..alone.clone() }, &silent("owner")));
        assert!(!lost(&DiskRecord { medium: Medium::Flash, ..alone.clone() }, &silent("owner")));
        let look = summary(&[silent("owner")], |status| lost(&alone, status));
        assert_eq!(look.left, [Left { disk: "d".into(), what: What::Unknown(0) }]);

        let unspoken = |statuses: &[DiskStatus], is_silent: bool| {
            unspoken(std::iter::once(&alone), statuses, &me, |_| is_silent)
        };
        assert!(lost(&alone, &unspoken(&[], true)[0]), "opened since");
        assert!(unspoken(&[], false).is_empty() && unspoken(&[silent("owner")], true).is_empty());
    }

    #[test]
    fn a_copy_of_a_disk_that_is_not_open_here_yet_counts() {
        let (me, mine) = (NodeRef::new("a", 1), record("a", &[]));
        assert!(would_be_lost(&mine, &status("replica", 9), &me, |_| true), "its owner is this process");
        assert!(!would_be_lost(&record("a", &["b"]), &status("replica", 9), &me, |_| true));
    }

    #[test]
    fn a_log_that_the_registry_counts_on_is_not_left_though_it_is_empty() {
        let me = NodeRef::new("a", 1);
        let stranded = |record: &DiskRecord| is_stranded(record, &me, |node| node.node == "b");
        assert!(stranded(&record("a", &[])) && stranded(&record("a", &["c"])));
        assert!(!stranded(&record("a", &["b"])), "b takes over");
        assert!(!stranded(&record("b", &[])), "another's");
        assert!(!stranded(&DiskRecord { mode: Mode::WriteThrough, ..record("a", &[]) }));
    }
}
