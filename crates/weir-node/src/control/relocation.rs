//! Moves this node's disks to other nodes while it is drained or quarantined, and disks back to the nodes that a drain has moved
//! them away from.
//!
//! [`mod@weir_cluster::node_state::drain`] plans it anew for each step, from the records as they are then. The copies of other owners'
//! logs are those owners' business: each replaces its own (see `settle_leaving` of a disk's task).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use weir_block::Nanos;
use weir_cluster::node_state::{self, Plan, Unfit, counts_on, may_return};
use weir_cluster::records::{DiskRecord, NodeRef};

use super::agreement;
use super::disk::failures::Failures;
use super::disk::{Request, Why};
use super::{Node, Tasks};

/// Moves at once: each fills a copy of a log, or empties one, and holds its disk's clients for a moment.
const AT_ONCE: usize = 4;

/// A move that lasts longer does not keep other disks from being moved. Each of its steps has a shorter limit, except the end of a
/// closing, which waits for the storage.
const LONGEST: Duration = Duration::from_secs(90);

/// A node that cannot open a disk is not asked again for so long: its storage may be back by then, and the drain waits for nobody
/// else if no other node can have the disk.
const UNFIT: Duration = Duration::from_secs(10);

/// Longest time between two looks: a quarantine ends by the clock.
const LOOK: Duration = Duration::from_secs(1);

/// A move that has ended.
type Ended = (String, Result<u64, Stays>);

/// Why a disk was not moved.
struct Stays {
    reason: String,
    /// The node that cannot open it.
    unfit: Option<String>,
}

/// Moves disks for as long as the node lives.
pub async fn keep(node: Arc<Node>, tasks: Arc<Tasks>) {
    let mut changes = node.records.changes();
    let (ended, mut endings) = mpsc::channel::<Ended>(AT_ONCE);
    let mut moves = Moves::default();
    // A node that starts while it is drained has said so before.
    let mut was_drained = is_drained(&node);
    loop {
        let drained = is_drained(&node);
        if drained && !was_drained {
            let me = &node.config.name;
            node.journal.tell("node-drained", me, format!("no disk counts on {me} any more"));
        }
        was_drained = drained;
        let wanted = wanted(&node, &moves.unfit(Nanos::now()));
        for Step { disk, to, why } in moves.begin(wanted, Nanos::now()) {
            let (node, tasks, ended) = (Arc::clone(&node), Arc::clone(&tasks), ended.clone());
            weir_task::spawn(async move {
                let moved = move_disk(&node, &tasks, &disk, to, why).await;
                let _ = ended.send((disk, moved)).await;
            });
        }
        tokio::select! {
            biased;
            Some((disk, moved)) = endings.recv() => {
                let reason = moves.end(&disk, moved, Nanos::now());
                // A move that began by a view from before an earlier one's end is nobody's concern.
                if let Some(reason) = reason.filter(|_| is_mine(&node, &disk)) {
                    node.journal.tell("not-moved", &disk, format!("it is tried again: {reason}"));
                }
            }
            () = changes.next() => {}
            () = weir_task::sleep(LOOK) => {}
        }
    }
}

async fn move_disk(node: &Arc<Node>, tasks: &Tasks, disk: &str, to: NodeRef, why: Why) -> Result<u64, Stays> {
    let stays = |reason| Stays { reason, unfit: Some(to.node.clone()) };
    agreement::ask(node, &to, disk).await.map_err(stays)?;
    let moved = tasks.ask(disk, node, |done| Request::Move { to, why, done }).await;
    moved.map_err(|error| Stays { reason: error.message, unfit: None })
}

/// The moves of this node's disks, and what is known of earlier ones.
#[derive(Default)]
struct Moves {
    /// The disks on their way, and since when.
    under_way: BTreeMap<String, Nanos>,
    /// The disks that could not be moved, and when they are tried again.
    again: BTreeMap<String, (Failures, Nanos)>,
    /// The nodes that cannot open a disk, and until when that counts.
    unfit: BTreeMap<(String, String), Nanos>,
}

impl Moves {
    /// The nodes that are not to get a disk.
    fn unfit(&mut self, now: Nanos) -> Unfit {
        self.unfit.retain(|_, until| *until > now);
        let mut unfit = Unfit::new();
        for (disk, node) in self.unfit.keys() {
            unfit.entry(disk.clone()).or_default().insert(node.clone());
        }
        unfit
    }

    /// The moves that begin now, of those that are `wanted`.
    fn begin(&mut self, wanted: Vec<Step>, now: Nanos) -> Vec<Step> {
        self.again.retain(|disk, _| wanted.iter().any(|step| step.disk == *disk));
        let busy = self.under_way.values().filter(|since| **since + LONGEST > now).count();
        let is_due = |step: &Step| {
            let waits = self.again.get(&step.disk).is_some_and(|(_, again)| *again > now);
            !waits && !self.under_way.contains_key(&step.disk)
        };
        let due: Vec<Step> = wanted.into_iter().filter(is_due).take(AT_ONCE.saturating_sub(busy)).collect();
        self.under_way.extend(due.iter().map(|step| (step.disk.clone(), now)));
        due
    }

    /// A move has ended. Returns why not, if the operator does not know that yet.
    fn end(&mut self, disk: &str, moved: Result<u64, Stays>, now: Nanos) -> Option<String> {
        self.under_way.remove(disk);
        let Err(Stays { reason, unfit }) = moved else {
            self.again.remove(disk);
            return None;
        };
        let (failures, again) = self.again.entry(disk.to_owned()).or_default();
        let (pause, is_new) = failures.failed(&reason);
        // Another node is asked at once.
        *again = if unfit.is_some() { now } else { now + pause };
        if let Some(node) = unfit {
            self.unfit.insert((disk.to_owned(), node), now + UNFIT);
        }
        is_new.then_some(reason)
    }
}

/// Whether this node is drained and no disk counts on it.
fn is_drained(node: &Node) -> bool {
    let (me, disks) = (&node.config.name, node.records.disks.now());
    let drain = node.records.node_states().nodes.get(me).and_then(|state| state.drain);
    drain.is_some() && !disks.values().any(|disk| counts_on(disk, me))
}

fn is_mine(node: &Node, disk: &str) -> bool {
    let owner = node.records.disk(disk).and_then(|record| record.owner);
    owner.is_some_and(|owner| owner == node.session.node_ref())
}

/// A disk of this node, and the process that is to have it.
struct Step {
    disk: String,
    to: NodeRef,
    why: Why,
}

/// The disks of this node that belong elsewhere at present; never on a node that is `unfit` for them.
fn wanted(node: &Node, unfit: &Unfit) -> Vec<Step> {
    if node.here.is_stopping() {
        return Vec::new();
    }
    let me = &node.config.name;
    let states = node.records.node_states();
    let barred = node_state::barred(&states, &node.rules, weir_task::unix_millis());
    if !barred.contains(me) {
        return returning(node, unfit);
    }
    let is_drained = states.nodes.get(me).is_some_and(|state| state.drain.is_some());
    let why = if is_drained { Why::Drained } else { Why::Quarantined };
    let (disks, live) = (node.records.disks.now(), node.records.nodes.now());
    let steps =
        plan_without(node, me, permits_fewer(node, me), unfit).moves.into_iter().filter_map(|moved| {
            // A guest that migrates has named the node for its disk.
            let follower = disks.get(&moved.disk).and_then(|disk| disk.follower.clone());
            if let Some(to) = follower.filter(|follower| !barred.contains(&follower.node)) {
                // It stays with its guest when the drain ends.
                return Some(Step { disk: moved.disk, to, why: Why::Followed });
            }
            let to = live.get(&moved.to)?.node_ref();
            Some(Step { disk: moved.disk, to, why })
        });
    steps.collect()
}

/// The plan for `name` by the present records: what its drain moves, replaces, and leaves.
#[must_use]
pub fn plan(node: &Node, name: &str) -> Plan {
    plan_with(node, name, permits_fewer(node, name))
}

fn permits_fewer(node: &Node, name: &str) -> bool {
    let drain = node.records.node_states().nodes.get(name).and_then(|state| state.drain);
    drain.is_some_and(|drain| drain.fewer_copies)
}

/// As [`plan`], with or without the permission that disks end with fewer copies than their policies request.
#[must_use]
pub fn plan_with(node: &Node, name: &str, fewer_copies: bool) -> Plan {
    plan_without(node, name, fewer_copies, &Unfit::new())
}

fn plan_without(node: &Node, name: &str, fewer_copies: bool, unfit: &Unfit) -> Plan {
    let (disks, live) = (node.records.disks.now(), node.records.nodes.now());
    node_state::plan(name, &disks, &live, &node.barred(), &node.rules, fewer_copies, unfit)
}

/// Disks of this node that a drain has moved away from nodes that take disks again. Not one whose guest migrates.
fn returning(node: &Node, unfit: &Unfit) -> Vec<Step> {
    let me = &node.config.name;
    let (disks, live, barred) = (node.records.disks.now(), node.records.nodes.now(), node.barred());
    let is_mine = |disk: &&DiskRecord| disk.owner.as_ref().is_some_and(|owner| owner.node == *me);
    let mine = disks.values().filter(is_mine).filter(|disk| disk.follower.is_none());
    let steps = mine.filter_map(|disk| {
        let is_unfit = |home: &&String| unfit.get(&disk.name).is_some_and(|nodes| nodes.contains(*home));
        let home = disk.home.as_ref().filter(|home| *home != me && !is_unfit(home))?;
        let record = live.get(home).filter(|_| may_return(disk, home, &live, &barred))?;
        Some(Step { disk: disk.name.clone(), to: record.node_ref(), why: Why::Returned })
    });
    steps.collect()
}

#[cfg(test)]
mod tests {
    use weir_cluster::events::Events;
    use weir_cluster::membership::{NodeSession, SessionConfig};
    use weir_cluster::node_state::Event;

    use super::*;
    use crate::control::disk::tests::{SOON, disk_of_a, node, record_of};
    use crate::control::node_states;

    /// It stays with its guest, which has named the node, and does not come back when the drain ends.
    #[tokio::test]
    async fn a_drain_sends_the_disk_of_a_migrating_guest_after_it() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        let mut sessions = Vec::new();
        for name in ["b", "c"] {
            let session =
                NodeSession::start(node.registry.clone(), record_of(name), SessionConfig::default());
            sessions.push(session.await.unwrap());
        }
        let mut changes = node.records.changes();
        for event in
            [Event::Present { node: "a".into() }, Event::Drain { node: "a".into(), fewer_copies: false }]
        {
            node_states::change(&node, &event, node.session.guard()).await.unwrap();
        }
        disk_of_a(&node, |record| record.follower = Some(NodeRef::new("b", 1))).await;
        while !node.barred().contains("a") || node.records.nodes.now().len() < 3 {
            changes.next().await;
        }
        let steps = super::wanted(&node, &Unfit::new());
        let [Step { disk, to, why }] = &steps[..] else { panic!("{} steps", steps.len()) };
        assert_eq!((&**disk, to, *why), ("d", &NodeRef::new("b", 1), Why::Followed));
        assert_eq!(why.home(None, "a"), None);
    }

    fn wanted(disks: std::ops::Range<usize>) -> Vec<Step> {
        let step =
            |number: usize| Step { disk: format!("d{number}"), to: NodeRef::new("b", 1), why: Why::Drained };
        disks.map(step).collect()
    }

    fn begun(moves: &mut Moves, at: Nanos) -> Vec<String> {
        moves.begin(wanted(0..9), at).into_iter().map(|step| step.disk).collect()
    }

    #[test]
    fn moves_that_do_not_end_stop_no_others() {
        let (mut moves, start) = (Moves::default(), Nanos(1));
        assert_eq!(begun(&mut moves, start), ["d0", "d1", "d2", "d3"]);
        assert!(begun(&mut moves, start).is_empty());
        assert_eq!(moves.end("d1", Ok(0), start), None);
        assert_eq!(begun(&mut moves, start), ["d1"], "the records still want it");
        assert!(begun(&mut moves, start + (LONGEST - Duration::from_nanos(1))).is_empty());
        assert_eq!(begun(&mut moves, start + LONGEST), ["d4", "d5", "d6", "d7"]);
    }

    #[test]
    fn a_disk_that_stays_is_told_of_once_and_tried_again_after_others() {
        let (mut moves, start) = (Moves::default(), Nanos(1));
        begun(&mut moves, start);
        let stays = || Err(Stays { reason: "its log is not empty".into(), unfit: None });
        assert_eq!(moves.end("d0", stays(), start).as_deref(), Some("its log is not empty"));
        assert_eq!(begun(&mut moves, start), ["d4"]);
        moves.end("d4", Ok(0), start);
        let later = start + Duration::from_secs(5);
        assert_eq!(begun(&mut moves, later), ["d0"]);
        assert_eq!(moves.end("d0", stays(), later), None, "the operator knows");
        assert!(moves.unfit(later).is_empty());
        // It is not wanted any more, and then again.
        assert!(moves.begin(Vec::new(), later).is_empty());
        begun(&mut moves, later);
        assert!(moves.end("d0", stays(), later).is_some());
    }

    #[test]
    fn a_node_that_cannot_open_a_disk_is_left_out_for_a_while() {
        let (mut moves, start) = (Moves::default(), Nanos(1));
        begun(&mut moves, start);
        let stays = Stays { reason: "node b cannot open it".into(), unfit: Some("b".into()) };
        assert!(moves.end("d0", Err(stays), start).is_some());
        let unfit = Unfit::from([("d0".into(), ["b".to_owned()].into())]);
        assert_eq!(moves.unfit(start + (UNFIT - Duration::from_nanos(1))), unfit);
        assert_eq!(begun(&mut moves, start), ["d0"], "another node is asked at once");
        assert!(moves.unfit(start + UNFIT).is_empty());
    }

    #[tokio::test]
    async fn the_end_of_a_drain_is_an_event() {
        let directory = tempfile::tempdir().unwrap();
        let (node, _told) = node(directory.path()).await;
        let name = "a".to_owned();
        let change = async |event| node_states::change(&node, &event, node.session.guard()).await.unwrap();
        change(Event::Present { node: name.clone() }).await;
        weir_task::spawn(keep(Arc::clone(&node), Arc::default()));
        change(Event::Drain { node: name, fewer_copies: false }).await;
        let events = Events::new(node.registry.clone(), node.session.node_ref());
        let drained = async {
            loop {
                let told = events.recent(100).await.unwrap();
                if told.iter().any(|event| event.kind == "node-drained") {
                    return told;
                }
                weir_task::sleep(Duration::from_millis(20)).await;
            }
        };
        let told = weir_task::timeout(SOON, drained).await.expect("no event");
        assert_eq!(told.iter().map(|event| &*event.kind).collect::<Vec<_>>(), ["drain", "node-drained"]);
    }
}
