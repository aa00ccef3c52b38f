//! Whose turn it is to coordinate a volume.
//!
//! Every node decides for itself: the registry's compare-and-swap lets one claim through. To keep nodes from claiming in vain, they come
//! one after the other, in an order that differs from volume to volume, so that the coordinators are spread. A node that has no path to the LUN
//! is passed over after its time. A node that has claimed the volume, and then cannot fence or mount, gives it up, and is the last one from
//! then on: without that, the first in the order would claim again at once, and no other node would get its turn. The others see that in the
//! record, and do not wait for it.
//!
//! A coordinator that is drained, or whose volume an operator moves, gives the volume up: it unmounts, and then leaves the record. Nobody
//! claims before that, or the claim would have to fence a node that is about to be done. Both waits, for the coordinator and for the node that
//! an operator names, are bounded: a claim with a fence is safe at any time.

use std::collections::BTreeSet;
use std::time::Duration;

use weir_block::Nanos;
use weir_block::hash::{FNV_BASIS, fnv1a};
use weir_cluster::records::{CoordinatorRecord, NodeRef};

/// The time that each node gets before the next one's turn.
const EACH: Duration = Duration::from_secs(3);
/// The time that a coordinator that is there has to give its volume up.
const GIVES_UP: Duration = Duration::from_secs(8);
/// The time that the node of an operator's choice gets before all others.
const PREFERRED: Duration = Duration::from_secs(5);

/// What a decision rests on.
pub struct Situation<'a> {
    /// The volume's identity.
    pub volume: u64,
    /// The record, if there is one.
    pub record: Option<&'a CoordinatorRecord>,
    /// This process.
    pub me: &'a NodeRef,
    /// The processes whose lease stands.
    pub live: &'a BTreeSet<NodeRef>,
    /// Nodes that are to take nothing: drained, quarantined.
    pub barred: &'a BTreeSet<String>,
    /// This node stops, or the volume is gone.
    pub stops: bool,
}

/// Decides, with the times since which it waits.
#[derive(Debug, Default)]
pub struct Turn {
    /// There is no coordinator, or it does not give the volume up in time.
    vacant_since: Option<Nanos>,
    /// The coordinator gives the volume up.
    leaves_since: Option<Nanos>,
    /// Processes that have given the volume up, in the order in which they did: this one, until it serves the volume, and those of which the
    /// record has shown that.
    gave_up: Vec<NodeRef>,
    /// The coordinator, by the last record.
    coordinator: Option<NodeRef>,
    /// It leaves the record, which may name it still.
    leaves: bool,
}

impl Turn {
    /// This process, `me`, gives the volume up, which it has claimed: it cannot fence, or mount, or go on.
    pub fn gave_up(&mut self, me: &NodeRef) {
        self.leaves = true;
        self.put_last(me);
    }

    /// This process, `me`, serves the volume.
    pub fn serves(&mut self, me: &NodeRef) {
        self.gave_up.retain(|one| one != me);
    }

    fn put_last(&mut self, process: &NodeRef) {
        self.gave_up.retain(|one| one != process);
        self.gave_up.push(process.clone());
    }

    /// Whether this process is to coordinate the volume now.
    pub fn is_mine(&mut self, situation: &Situation<'_>, now: Nanos) -> bool {
        let Situation { record, me, live, barred, stops, .. } = situation;
        let coordinator = record.and_then(|record| record.coordinator.as_ref());
        self.leaves &= coordinator == Some(me);
        if *stops || self.leaves {
            return false;
        }
        let serves = |process: &&NodeRef| live.contains(*process) && !barred.contains(&process.node);
        let next = record.and_then(|record| record.next.as_ref()).filter(serves);
        self.follow(coordinator, me, |one| serves(&one) && next.is_none());
        let stays = |one: &&NodeRef| next.is_none_or(|next| next == *one);
        if let Some(coordinator) = coordinator.filter(serves).filter(stays) {
            // That one may fail as this one did.
            (self.vacant_since, self.leaves_since, self.leaves) = (None, None, false);
            return coordinator == *me;
        }
        if coordinator == Some(me) || barred.contains(&me.node) {
            return false;
        }
        if coordinator.is_some_and(|one| live.contains(one)) {
            let since = *self.leaves_since.get_or_insert(now);
            if now < since + GIVES_UP {
                return false;
            }
        }
        let since = *self.vacant_since.get_or_insert(now);
        let wait = match next {
            Some(next) if next == *me => Duration::ZERO,
            Some(_) => PREFERRED + EACH * self.rank(situation),
            None => EACH * self.rank(situation),
        };
        now >= since + wait
    }

    /// A former coordinator that `could` still coordinate the volume has given it up. A node that has missed a record may also count one that
    /// an operator's move has replaced: then two nodes may claim at once, and the registry lets one through.
    fn follow(&mut self, coordinator: Option<&NodeRef>, me: &NodeRef, could: impl Fn(&NodeRef) -> bool) {
        if self.coordinator.as_ref() != coordinator {
            let former = std::mem::replace(&mut self.coordinator, coordinator.cloned());
            if let Some(former) = former.filter(|former| former != me) {
                self.put_last(&former);
            }
        }
        self.gave_up.retain(|one| one == me || could(one) && Some(one) != coordinator);
    }

    /// Nodes whose turn comes before this one's. Those that have given the volume up come after all others, also after that of them which comes
    /// last, as not everybody has seen all of it; and whoever did so last comes last, or those whose turn is later would never have one.
    fn rank(&self, situation: &Situation<'_>) -> u32 {
        let Situation { volume, me, live, barred, .. } = situation;
        let others = live.iter().filter(|one| one.node != me.node && !barred.contains(&one.node));
        let (gave_up, fresh): (Vec<_>, Vec<_>) = others.partition(|one| self.gave_up.contains(*one));
        let before = match self.gave_up.iter().position(|one| one == *me) {
            None => {
                let own = weight(*volume, &me.node);
                fresh.iter().filter(|one| weight(*volume, &one.node) < own).count()
            }
            Some(_) if gave_up.is_empty() && fresh.is_empty() => 0,
            Some(at) => {
                fresh.len() + self.gave_up[..at].iter().filter(|one| gave_up.contains(one)).count() + 1
            }
        };
        before as u32
    }
}

/// The order of the nodes for a volume (rendezvous hashing; Thaler and Ravishankar 1998).
fn weight(volume: u64, node: &str) -> u64 {
    let hash = fnv1a(volume ^ FNV_BASIS, node.bytes());
    (hash ^ hash >> 32).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(name: &str) -> NodeRef {
        NodeRef::new(name, 1)
    }

    fn record(coordinator: Option<&str>) -> CoordinatorRecord {
        let coordinator = coordinator.map(process);
        CoordinatorRecord { volume: "v".into(), epoch: 1, coordinator, mounts: Vec::new(), next: None }
    }

    /// An operator moves the volume.
    fn moving(coordinator: Option<&str>, to: &str) -> CoordinatorRecord {
        CoordinatorRecord { next: Some(process(to)), ..record(coordinator) }
    }

    /// When each node's turn comes, in seconds; `None`: not within a minute.
    fn turns(
        volume: u64,
        record: Option<&CoordinatorRecord>,
        live: &[&str],
        barred: &[&str],
    ) -> Vec<Option<u64>> {
        let all: BTreeSet<NodeRef> = live.iter().map(|name| process(name)).collect();
        let barred: BTreeSet<String> = barred.iter().map(|name| (*name).to_owned()).collect();
        let turn = |name: &&str| {
            let (mut turn, me) = (Turn::default(), process(name));
            let situation = Situation { volume, record, me: &me, live: &all, barred: &barred, stops: false };
            (0..60).find(|second| turn.is_mine(&situation, Nanos(second * 1_000_000_000)))
        };
        live.iter().map(turn).collect()
    }

    #[test]
    fn nodes_come_one_after_the_other_and_each_volume_has_its_own_order() {
        let mut first = BTreeSet::new();
        for volume in 0..20 {
            let mut turns = turns(volume, None, &["a", "b", "c"], &[]);
            first.insert(turns.iter().position(|turn| *turn == Some(0)).unwrap());
            turns.sort();
            assert_eq!(turns, [Some(0), Some(3), Some(6)]);
        }
        assert_eq!(first.len(), 3, "the coordinators are spread");
    }

    #[test]
    fn a_coordinator_that_lives_stays_and_nobody_else_claims() {
        let b = record(Some("b"));
        assert_eq!(turns(7, Some(&b), &["a", "b", "c"], &[]), [None, Some(0), None]);
        // Its process has ended.
        assert!(turns(7, Some(&b), &["a", "c"], &[]).contains(&Some(0)));
    }

    #[test]
    fn a_drained_coordinator_gives_the_volume_up_before_another_one_claims_it() {
        let (b, nobody) = (record(Some("b")), record(None));
        let all = &["a", "b", "c"];
        // It does not get done: whoever claims fences it.
        let late = turns(7, Some(&b), all, &["b"]);
        assert_eq!(late[1], None);
        assert!(late.contains(&Some(8)) && late.contains(&Some(11)), "{late:?}");
        let clean = turns(7, Some(&nobody), all, &["b"]);
        assert_eq!(clean[1], None);
        assert!(clean.contains(&Some(0)) && clean.contains(&Some(3)), "{clean:?}");
    }

    #[test]
    fn the_node_that_an_operator_names_comes_first_and_the_others_hold_back() {
        let all = &["a", "b", "c"];
        for (index, to) in all.iter().enumerate().filter(|(_, to)| **to != "b") {
            // The coordinator unmounts.
            let unmounts = turns(7, Some(&moving(Some("b"), to)), all, &[]);
            assert_eq!((unmounts[1], unmounts[index]), (None, Some(8)), "to {to}");
            let mut given_up = turns(7, Some(&moving(None, to)), all, &[]);
            assert_eq!(given_up.remove(index), Some(0), "to {to}: {given_up:?}");
            assert!(given_up.iter().all(|turn| *turn >= Some(5)), "to {to}: {given_up:?}");
        }
        // One that is gone, or is to take nothing, is not waited for: the coordinator stays, or whoever's turn it is comes.
        assert_eq!(turns(7, Some(&moving(Some("b"), "x")), all, &[]), [None, Some(0), None]);
        assert_eq!(turns(7, Some(&moving(Some("b"), "c")), all, &["c"]), [None, Some(0), None]);
        assert!(turns(7, Some(&moving(None, "x")), all, &[]).contains(&Some(0)));
        // The one that is named has it.
        assert_eq!(turns(7, Some(&moving(Some("b"), "b")), all, &[]), [None, Some(0), None]);
    }

    /// A coordinator that leaves the record in time leaves the others their own time, from then on.
    #[test]
    fn turns_count_from_the_moment_at_which_the_coordinator_has_left() {
        let all: BTreeSet<NodeRef> = ["a", "b", "c"].map(process).into();
        let (barred, nobody) = (BTreeSet::new(), BTreeSet::from(["b".to_owned()]));
        let (leaves, left) = (record(Some("b")), record(None));
        let second = |second: u64| Nanos(second * 1_000_000_000);
        let mut first = Vec::new();
        for name in ["a", "c"] {
            let (mut turn, me) = (Turn::default(), process(name));
            let situation = |record| Situation {
                volume: 7,
                record: Some(record),
                me: &me,
                live: &all,
                barred: &nobody,
                stops: false,
            };
            assert!((0..7).all(|at| !turn.is_mine(&situation(&leaves), second(at))), "{name}");
            first.push((7..60).find(|at| turn.is_mine(&situation(&left), second(*at))).unwrap());
            // Another one takes it, and is drained in its turn: that is another wait.
            assert!(!turn.is_mine(&Situation { barred: &barred, ..situation(&leaves) }, second(60)));
            assert!((61..68).all(|at| !turn.is_mine(&situation(&leaves), second(at))), "{name}");
        }
        first.sort_unstable();
        assert_eq!(first, [7, 10]);
    }

    /// The LUN refuses one coordinator after the other.
    #[test]
    fn nobody_waits_for_those_that_have_given_the_volume_up() {
        let live: BTreeSet<NodeRef> = ["a", "b", "c"].map(process).into();
        let barred = BTreeSet::new();
        let is_mine = |turn: &mut Turn, me: &NodeRef, record: &CoordinatorRecord, second: u64| {
            let record = Some(record);
            let situation = Situation { volume: 7, record, me, live: &live, barred: &barred, stops: false };
            turn.is_mine(&situation, Nanos(second * 1_000_000_000))
        };
        let mut nodes: Vec<(NodeRef, Turn)> = live.iter().map(|me| (me.clone(), Turn::default())).collect();
        let nobody = record(None);
        let (mut tried, mut second) = (Vec::new(), 0);
        while tried.len() < 3 * live.len() {
            let is_turn = |(me, turn): &mut (NodeRef, Turn)| is_mine(turn, me, &nobody, second);
            let mine: Vec<bool> = nodes.iter_mut().map(is_turn).collect();
            if let Some(first) = mine.iter().position(|mine| *mine) {
                assert_eq!(mine.iter().filter(|mine| **mine).count(), 1, "{second}: {mine:?}");
                let claimed = record(Some(&nodes[first].0.node));
                for (me, turn) in &mut nodes {
                    is_mine(turn, me, &claimed, second);
                }
                let (me, turn) = &mut nodes[first];
                turn.gave_up(me);
                tried.push((first, second));
            }
            second += 1;
        }
        let order: Vec<usize> = tried.iter().map(|(node, _)| *node).collect();
        assert_eq!(BTreeSet::from_iter(&order[..3]).len(), 3, "{tried:?}");
        assert!(order[3..6] == order[..3] && order[6..] == order[..3], "each in its turn: {tried:?}");
        let times: Vec<u64> = tried.iter().map(|(_, second)| *second).collect();
        assert_eq!(times[..3], [0, 1, 2], "nobody waits for those");
        // Not at once, when all have (P10).
        assert!(times[2..].windows(2).all(|two| two[1] - two[0] >= 3), "{tried:?}");
    }

    /// The first in the order can claim, and cannot mount.
    #[test]
    fn a_node_that_gives_the_volume_up_lets_every_other_one_try_first() {
        let all: BTreeSet<NodeRef> = ["a", "b", "c"].map(process).into();
        let barred = BTreeSet::new();
        let second = |second: u64| Nanos(second * 1_000_000_000);
        let situation =
            |me, record| Situation { volume: 7, record, me, live: &all, barred: &barred, stops: false };
        let names = ["a", "b", "c"].map(process);
        let first = names.iter().find(|me| Turn::default().is_mine(&situation(me, None), second(0))).unwrap();
        let (claimed, nobody) = (record(Some(&first.node)), record(None));
        let mut turn = Turn::default();
        assert!(turn.is_mine(&situation(first, Some(&claimed)), second(1)));
        turn.gave_up(first);
        // Its way out of the record, and its unmount, take their time.
        for at in 1..5 {
            assert!(!turn.is_mine(&situation(first, Some(&claimed)), second(at)));
        }
        let next = (5..60).find(|at| turn.is_mine(&situation(first, Some(&nobody)), second(*at)));
        assert_eq!(next, Some(14), "after both others");
        // Another one has come, and gone, meanwhile.
        let other = names.iter().find(|one| *one != first).unwrap();
        let theirs = record(Some(&other.node));
        assert!(!turn.is_mine(&situation(first, Some(&theirs)), second(15)));
        let next = (16..60).find(|at| turn.is_mine(&situation(first, Some(&nobody)), second(*at)));
        assert_eq!(next, Some(22), "after the third one: that one has given it up, too");
        // It has claimed again, and may go on with that; it serves, and its next end is none of those.
        assert!(turn.is_mine(&situation(first, Some(&claimed)), second(26)));
        assert!(turn.is_mine(&situation(first, Some(&claimed)), second(27)));
        turn.serves(first);
        assert!(turn.is_mine(&situation(first, Some(&claimed)), second(30)));
        assert!(turn.is_mine(&situation(first, Some(&nobody)), second(31)));
        // Alone, there is nobody to wait for.
        let alone = BTreeSet::from([first.clone()]);
        let mut turn = Turn { gave_up: vec![first.clone()], ..Turn::default() };
        assert!(turn.is_mine(&Situation { live: &alone, ..situation(first, Some(&nobody)) }, second(0)));
    }
}
