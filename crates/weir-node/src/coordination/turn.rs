//! Whose turn it is to coordinate a volume.
//!
//! Every node decides for itself: the registry's compare-and-swap lets one claim through. To keep nodes from claiming in vain, they come
//! one after the other, in an order that differs from volume to volume, so that the coordinators are spread. A node that has no path to the LUN,
//! or fails, is passed over after its time.

use std::collections::BTreeSet;
use std::time::Duration;

use weir_block::Nanos;
use weir_block::hash::{FNV_BASIS, fnv1a};
use weir_cluster::records::{CoordinatorRecord, NodeRef};

/// The time that each node gets before the next one's turn.
const EACH: Duration = Duration::from_secs(3);

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

/// Decides, with the time since which there is no coordinator.
#[derive(Debug, Default)]
pub struct Turn {
    vacant_since: Option<Nanos>,
}

impl Turn {
    /// Whether this process is to coordinate the volume now.
    pub fn is_mine(&mut self, situation: &Situation<'_>, now: Nanos) -> bool {
        let Situation { record, me, live, barred, stops, .. } = situation;
        let coordinator = record.and_then(|record| record.coordinator.as_ref());
        if *stops {
            return false;
        }
        let serves = |process: &NodeRef| live.contains(process) && !barred.contains(&process.node);
        if let Some(coordinator) = coordinator.filter(|one| serves(one)) {
            self.vacant_since = None;
            return coordinator == *me;
        }
        if barred.contains(&me.node) {
            return false;
        }
        let since = *self.vacant_since.get_or_insert(now);
        now >= since + EACH * rank(situation)
    }
}

/// Nodes whose turn comes before this one's.
fn rank(situation: &Situation<'_>) -> u32 {
    let own = weight(situation.volume, &situation.me.node);
    let others = situation.live.iter().filter(|one| !situation.barred.contains(&one.node));
    let before = others.filter(|one| one.node != situation.me.node);
    before.filter(|one| weight(situation.volume, &one.node) < own).count() as u32
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
        CoordinatorRecord { volume: "v".into(), epoch: 1, coordinator, mounts: Vec::new() }
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
        // Its process has ended, or its node is drained.
        assert!(turns(7, Some(&b), &["a", "c"], &[]).contains(&Some(0)));
        let turns = turns(7, Some(&b), &["a", "b", "c"], &["b"]);
        assert_eq!(turns[1], None);
        assert!(turns.contains(&Some(0)) && turns.contains(&Some(3)), "{turns:?}");
    }
}
