//! Moves this node's disks to other nodes while it is drained or quarantined, and disks back to the nodes that a drain has moved
//! them away from.
//!
//! [`mod@weir_cluster::node_state::drain`] plans it anew for each step, from the records as they are then. The copies of other owners'
//! logs are those owners' business: each replaces its own (see `settle_leaving` of a disk's task).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use weir_block::Nanos;
use weir_cluster::node_state::{self, Plan, Unfit, counts_on, may_return};
use weir_cluster::records::{DiskRecord, NodeRef};

use super::agreement::{self, NotAgreed};
use super::disk::{Request, Why};
use super::failures::{Failures, GUESTS_WAIT};
use super::{Node, Tasks};

/// Moves at once: each fills a copy of a log, or empties one, and holds its disk's clients for a moment.
const AT_ONCE: usize = 4;

/// A move that lasts longer does not keep other disks from being moved. Each of its steps has a shorter limit, except the end of a
/// closing, which waits for the storage.
const LONGEST: Duration = Duration::from_secs(90);

/// A node that cannot open a disk is not asked about it again for so long, and one that does not answer is asked nothing: it may be
/// well by then, and the drain waits for nobody else if no other node can have the disk.
const UNFIT: Duration = Duration::from_secs(10);

/// A node that got a disk and let it come back is not given it again for so long. It has answered, and may hang all the same: its
/// storage may open files and complete no request. Without the pause the disk would go to and fro, and have no owner most of the time.
const CAME_BACK: Duration = Duration::from_secs(60);

/// Longest time between two looks: a quarantine ends by the clock.
const LOOK: Duration = Duration::from_secs(1);

/// A move that has ended: the disk, the node that was to have it, and the outcome.
type Ended = (String, String, Result<u64, Stays>);

/// Why a disk was not moved.
struct Stays {
    reason: String,
    at: Obstacle,
}

/// Where a move fails.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Obstacle {
    /// It is not to move any more.
    Over,
    /// At the disk, whoever is to have it.
    Disk,
    /// The node that is to have the disk cannot open it.
    Unfit,
    /// The node that is to have the disk does not answer, about this disk or any other.
    Silent,
}

/// Moves disks for as long as the node lives.
pub async fn keep(node: Arc<Node>, tasks: Arc<Tasks>) {
    let mut changes = node.records.changes();
    let (ended, mut endings) = mpsc::channel::<Ended>(AT_ONCE);
    let mut moves = Moves::default();
    let mut was_barred = false;
    // A node that starts while it is drained has said so before.
    let mut was_drained = is_drained(&node);
    loop {
        let drained = is_drained(&node);
        if drained && !was_drained {
            let me = &node.config.name;
            node.journal.tell("node-drained", me, format!("no disk counts on {me} any more"));
        }
        was_drained = drained;
        let is_barred = node.barred().contains(&node.config.name);
        if is_barred != was_barred {
            // Whoever drains the node again wants to know again what stays on it.
            moves.forget();
        }
        was_barred = is_barred;
        let (mine, now) = (owned(&node), Nanos::now());
        let wanted = wanted(&node, &moves.unfit(&mine, now));
        for Step { disk, to, why } in moves.begin(wanted, &mine, now) {
            let (node, tasks, ended) = (Arc::clone(&node), Arc::clone(&tasks), ended.clone());
            weir_task::spawn(async move {
                let target = to.node.clone();
                let moved = move_disk(&node, &tasks, &disk, to, why).await;
                let _ = ended.send((disk, target, moved)).await;
            });
        }
        tokio::select! {
            biased;
            Some((disk, to, moved)) = endings.recv() => {
                let reason = moves.end(&disk, &to, moved, Nanos::now());
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
    agreement::ask(node, &to, disk).await.map_err(|refused| match refused {
        NotAgreed::Cannot(reason) => Stays { reason, at: Obstacle::Unfit },
        NotAgreed::Silent(reason) => Stays { reason, at: Obstacle::Silent },
    })?;
    let moved = tasks.ask(disk, node, |done| Request::Move { to, why, done }).await;
    moved.map_err(|error| {
        let at = if why.is_over(node) { Obstacle::Over } else { Obstacle::Disk };
        Stays { reason: error.message, at }
    })
}

/// The moves of this node's disks, and what is known of earlier ones.
#[derive(Default)]
struct Moves {
    /// The disks on their way, and since when.
    under_way: BTreeMap<String, Nanos>,
    /// The reasons for which disks of this node were not moved.
    tried: BTreeMap<String, Tried>,
    /// The nodes that cannot open a disk, or have got it, and until when that counts.
    unfit: BTreeMap<(String, String), Nanos>,
    /// The nodes that do not answer, and until when that counts.
    silent: BTreeMap<String, Nanos>,
}

/// The attempts to move a disk.
#[derive(Default)]
struct Tried {
    /// When the last one began.
    last: Nanos,
    /// The failures, by the node that was to have the disk: the operator is told of each once.
    failures: BTreeMap<String, Failures>,
    /// When the disk is tried again.
    again: Nanos,
    /// Another node than this one is tried at once.
    unable: Option<String>,
}

impl Tried {
    fn waits(&self, to: &str, now: Nanos) -> bool {
        self.again > now && self.unable.as_ref().is_none_or(|unable| unable == to)
    }
}

impl Moves {
    /// The nodes that are not to get a disk, of the disks that are `mine`.
    fn unfit(&mut self, mine: &BTreeSet<String>, now: Nanos) -> Unfit {
        self.unfit.retain(|_, until| *until > now);
        self.silent.retain(|_, until| *until > now);
        let mut unfit = Unfit::new();
        for (disk, node) in self.unfit.keys() {
            unfit.entry(disk.clone()).or_default().insert(node.clone());
        }
        for disk in mine.iter().filter(|_| !self.silent.is_empty()) {
            unfit.entry(disk.clone()).or_default().extend(self.silent.keys().cloned());
        }
        unfit
    }

    /// The moves that begin now, of those that are `wanted`. A disk that stays is `mine` for as long as it does, wanted or not.
    fn begin(&mut self, wanted: Vec<Step>, mine: &BTreeSet<String>, now: Nanos) -> Vec<Step> {
        self.tried.retain(|disk, _| mine.contains(disk));
        let busy = self.under_way.values().filter(|since| **since + LONGEST > now).count();
        let is_due = |step: &Step| {
            let waits = self.tried.get(&step.disk).is_some_and(|tried| tried.waits(&step.to.node, now));
            !waits && !self.under_way.contains_key(&step.disk)
        };
        let mut due: Vec<Step> = wanted.into_iter().filter(is_due).collect();
        // Disks that fail again and again, each time after a while, do not keep others from being tried.
        due.sort_by_key(|step| self.tried.get(&step.disk).map_or(Nanos::default(), |tried| tried.last));
        due.truncate(AT_ONCE.saturating_sub(busy));
        for step in &due {
            self.under_way.insert(step.disk.clone(), now);
            self.tried.entry(step.disk.clone()).or_default().last = now;
        }
        due
    }

    /// A move has ended. Returns why not, if the operator does not know that yet.
    fn end(&mut self, disk: &str, to: &str, moved: Result<u64, Stays>, now: Nanos) -> Option<String> {
        self.under_way.remove(disk);
        let Err(Stays { reason, at }) = moved else {
            self.tried.remove(disk);
            // Of no consequence, unless the disk comes back.
            self.unfit.insert((disk.to_owned(), to.to_owned()), now + CAME_BACK);
            return None;
        };
        match at {
            Obstacle::Over => {
                self.tried.remove(disk);
                return None;
            }
            Obstacle::Disk => {}
            Obstacle::Unfit => drop(self.unfit.insert((disk.to_owned(), to.to_owned()), now + UNFIT)),
            Obstacle::Silent => drop(self.silent.insert(to.to_owned(), now + UNFIT)),
        }
        let tried = self.tried.entry(disk.to_owned()).or_default();
        let (pause, is_new) = tried.failures.entry(to.to_owned()).or_default().failed(&reason, GUESTS_WAIT);
        tried.again = now + pause;
        tried.unable = (at != Obstacle::Disk).then(|| to.to_owned());
        is_new.then_some(reason)
    }

    /// The knowledge of earlier moves counts no more.
    fn forget(&mut self) {
        self.tried.clear();
        self.unfit.clear();
        self.silent.clear();
    }
}

/// The disks of this process.
fn owned(node: &Node) -> BTreeSet<String> {
    let (me, disks) = (node.session.node_ref(), node.records.disks.now());
    let mine = disks.values().filter(|disk| disk.owner.as_ref() == Some(&me));
    mine.map(|disk| disk.name.clone()).collect()
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
                // It stays with its guest when the drain ends. Nowhere else, should the guest's node not be able to have it yet.
                let is_fit = !is_unfit(unfit, &moved.disk, &to.node);
                return is_fit.then_some(Step { disk: moved.disk, to, why: Why::Followed });
            }
            let to = live.get(&moved.to)?.node_ref();
            Some(Step { disk: moved.disk, to, why })
        });
    steps.collect()
}

fn is_unfit(unfit: &Unfit, disk: &str, node: &str) -> bool {
    unfit.get(disk).is_some_and(|nodes| nodes.contains(node))
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
        let home = disk.home.as_ref().filter(|home| *home != me && !is_unfit(unfit, &disk.name, home))?;
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
        // It goes to no other node meanwhile, and is not asked for again at once.
        let unfit = Unfit::from([("d".into(), ["b".to_owned()].into())]);
        assert_eq!(super::wanted(&node, &unfit).len(), 0, "it was sent to a node that cannot open it");
    }

    fn wanted(disks: std::ops::Range<usize>, to: &str) -> Vec<Step> {
        let step =
            |number: usize| Step { disk: format!("d{number}"), to: NodeRef::new(to, 1), why: Why::Drained };
        disks.map(step).collect()
    }

    fn mine() -> BTreeSet<String> {
        (0..9).map(|number| format!("d{number}")).collect()
    }

    fn begun(moves: &mut Moves, at: Nanos) -> Vec<String> {
        begun_to(moves, "b", at)
    }

    fn begun_to(moves: &mut Moves, to: &str, at: Nanos) -> Vec<String> {
        moves.begin(wanted(0..9, to), &mine(), at).into_iter().map(|step| step.disk).collect()
    }

    fn stays(reason: &str, at: Obstacle) -> Result<u64, Stays> {
        Err(Stays { reason: reason.into(), at })
    }

    #[test]
    fn moves_that_do_not_end_stop_no_others() {
        let (mut moves, start) = (Moves::default(), Nanos(1));
        assert_eq!(begun(&mut moves, start), ["d0", "d1", "d2", "d3"]);
        assert!(begun(&mut moves, start).is_empty());
        assert_eq!(moves.end("d1", "b", Ok(0), start), None);
        let unfit = moves.unfit(&mine(), start + (CAME_BACK - Duration::from_nanos(1)));
        assert!(is_unfit(&unfit, "d1", "b"), "should the disk come back, that node has not served it");
        assert!(moves.unfit(&mine(), start + CAME_BACK).is_empty());
        assert_eq!(begun(&mut moves, start), ["d1"], "the records still want it");
        assert!(begun(&mut moves, start + (LONGEST - Duration::from_nanos(1))).is_empty());
        assert_eq!(begun(&mut moves, start + LONGEST), ["d4", "d5", "d6", "d7"]);
    }

    #[test]
    fn a_disk_that_stays_is_told_of_once_and_tried_again_after_others() {
        let (mut moves, start) = (Moves::default(), Nanos(1));
        begun(&mut moves, start);
        let end = |moves: &mut Moves, disk: &str, at| {
            moves.end(disk, "b", stays("its log is not empty", Obstacle::Disk), at)
        };
        assert_eq!(end(&mut moves, "d0", start).as_deref(), Some("its log is not empty"));
        assert_eq!(begun(&mut moves, start), ["d4"]);
        moves.end("d4", "b", Ok(0), start);
        let later = start + Duration::from_secs(5);
        assert_eq!(begun(&mut moves, later), ["d4"], "it was never tried, as far as is known");
        moves.end("d1", "b", Ok(0), later);
        assert_eq!(begun(&mut moves, later), ["d1"]);
        for disk in ["d1", "d2", "d3", "d4"] {
            assert!(end(&mut moves, disk, later).is_some());
        }
        assert_eq!(begun(&mut moves, later), ["d5", "d6", "d7", "d8"]);
        moves.end("d5", "b", Ok(0), later);
        assert_eq!(
            moves.begin(wanted(0..5, "c"), &mine(), later).len(),
            1,
            "the disk is tried, whatever the node"
        );
        assert_eq!(end(&mut moves, "d0", later), None, "the operator knows");
        let unfit = moves.unfit(&mine(), later);
        assert!(!is_unfit(&unfit, "d0", "b"), "{unfit:?}");
        // It is not wanted for a while, because no node can have it.
        assert!(moves.begin(Vec::new(), &mine(), later).is_empty());
        assert_eq!(end(&mut moves, "d0", later), None, "the operator knows still");
        // Another node has owned it meanwhile.
        moves.begin(Vec::new(), &BTreeSet::new(), later);
        assert!(end(&mut moves, "d0", later).is_some());
        moves.forget();
        assert!(end(&mut moves, "d0", later).is_some(), "the node was drained again");
    }

    #[test]
    fn a_node_that_cannot_open_a_disk_is_left_out_for_a_while() {
        let (mut moves, start) = (Moves::default(), Nanos(1));
        begun(&mut moves, start);
        let cannot = || stays("its volume is not mounted", Obstacle::Unfit);
        assert!(moves.end("d0", "b", cannot(), start).is_some());
        let unfit = Unfit::from([("d0".into(), ["b".to_owned()].into())]);
        assert_eq!(moves.unfit(&mine(), start + (UNFIT - Duration::from_nanos(1))), unfit);
        // Not even if that node is the only one that the disk can go to.
        assert!(moves.begin(wanted(0..1, "b"), &mine(), start).is_empty(), "the same question again at once");
        assert_eq!(moves.begin(wanted(0..1, "c"), &mine(), start).len(), 1, "another node is asked at once");
        assert!(moves.end("d0", "c", cannot(), start).is_some(), "another node, the same reason");
        assert!(moves.unfit(&mine(), start + UNFIT).is_empty());
        let later = start + UNFIT;
        assert_eq!(moves.begin(wanted(0..1, "b"), &mine(), later).len(), 1);
        assert_eq!(moves.end("d0", "b", cannot(), later), None, "the operator knows");
    }

    /// Each question to it lasts, and only four moves go on at once.
    #[test]
    fn a_node_that_does_not_answer_is_asked_about_no_other_disk() {
        let (mut moves, start) = (Moves::default(), Nanos(1));
        begun(&mut moves, start);
        moves.end("d0", "b", stays("it has not said", Obstacle::Silent), start);
        let unfit = moves.unfit(&mine(), start);
        assert!(mine().iter().all(|disk| is_unfit(&unfit, disk, "b")), "{unfit:?}");
        assert_eq!(begun_to(&mut moves, "c", start), ["d4"], "no other has been tried for a longer time");
        assert!(moves.unfit(&mine(), start + UNFIT).is_empty());
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
