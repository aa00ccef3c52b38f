//! Checks of the rules of node states. They compute what they can from two consecutive records, and not with the production code.

use std::time::Duration;

use weir_block::Nanos;
use weir_block::sim::SetTime;
use weir_cluster::node_state::Rules;
use weir_cluster::records::{DiskRecord, NodeRef, NodeStateRecord, NodeStatesRecord};
use weir_cluster::right::GrantSet;

use super::registry::PATIENCE;
use super::states::{DEAFENING, is_barred};
use super::{Cluster, Who};
use crate::atlas::Fault;
use crate::scale::{name, node_of};

/// Longest time from a decision to its commit, while the registry answers and answers are not lost.
const DECIDED: Duration = Duration::from_millis(1_500);

/// Longest time from the choice of a node for a copy until the copy is complete and in the record. An operator's request takes no
/// longer either.
const FILLED: Duration = Duration::from_secs(3);

/// Longest time for which a node's view may lag behind the registry, while faults are injected. A request for a new list that waits
/// for a lost answer adds [`PATIENCE`].
const VIEWED: Duration = Duration::from_secs(4);

/// Length of a time span between two times of records, in milliseconds.
fn age(now: u64, start: u64) -> u64 {
    now.saturating_sub(start)
}

/// The nodes that a disk's record names as its owner or a replica.
fn holders(disk: &DiskRecord) -> impl Iterator<Item = &NodeRef> {
    disk.owner.iter().chain(&disk.replicas)
}

impl Cluster {
    /// The disk's record has changed.
    pub fn check_states(&mut self, before: &DiskRecord, by: Who, taken: bool) {
        let (now, disk) = (self.world.now(), self.registry.disk.clone());
        let Some(states) = &mut self.states else { return };
        if states.policy.is_none_or(|(policy, _)| policy != disk.policy) {
            states.policy = Some((disk.policy, now));
        }
        states.named.retain(|node, _| holders(&disk).any(|holder| holder.node == *node));
        for holder in holders(&disk) {
            states.named.entry(holder.node.clone()).or_insert(now);
        }
        // A new owner is not connected to any copy yet.
        if before.owner != disk.owner {
            states.lost.extend(disk.replicas.iter().map(|replica| (replica.node.clone(), now)));
        }
        self.check_placed(before, by);
        self.check_kept(before);
        if taken {
            self.check_taken(before, by);
        }
    }

    /// A drain without permission, or a quarantine, leaves no disk with fewer copies than its policy requests.
    fn check_kept(&mut self, before: &DiskRecord) {
        let (now, disk) = (self.world.now(), &self.registry.disk);
        let (Some(states), Some(owner)) = (&self.states, &disk.owner) else { return };
        let owner = node_of(&owner.node);
        // Copies that the owner has lost go for that reason, and copies that an earlier policy did not ask for for that one. The
        // change may wait for the answer to an earlier one.
        let waits = self.swarm.has(Fault::LostAnswer)
            || states.cut_off.get(&owner).is_some_and(|last| *last + PATIENCE + DECIDED >= now);
        let limit = if waits { PATIENCE + DECIDED } else { DECIDED };
        let was_there = |replica: &NodeRef| {
            let lost = states.lost.get(&replica.node);
            self.is_written(replica) && lost.is_none_or(|last| *last + limit < now)
        };
        let is_steady = states.policy.is_some_and(|(_, since)| since + FILLED < now)
            && !DEAFENING.iter().any(|fault| self.swarm.has(*fault))
            && before.owner == disk.owner
            && before.replicas.iter().all(was_there)
            // Without one copy, as permitted, the disk may go to write-through and need no other.
            && before.replicas.iter().all(|replica| !states.permitted.contains(&replica.node));
        let wanted = disk.policy.replicas();
        let fewer = before.replicas.len() >= wanted && disk.replicas.len() < wanted;
        let is_barred = |node: &String| states.barred.contains_key(node);
        let gone = before
            .replicas
            .iter()
            .find(|replica| !disk.replicas.contains(replica) && is_barred(&replica.node));
        if let Some(gone) = gone.filter(|_| is_steady && fewer).cloned() {
            let replicas = disk.replicas.len();
            self.fail(|| format!("drain: {gone} goes, and {replicas} of {wanted} replicas are left"));
        }
    }

    /// Nobody takes a disk from an isolated owner that its members hear, within the period.
    fn check_taken(&mut self, before: &DiskRecord, by: Who) {
        let (now, period) = (self.world.now(), self.rules.resiliency_period);
        let Some(states) = &self.states else { return };
        let Some(owner) = &before.owner else { return };
        // Its session may have ended since the last look; and so may it.
        let absent = states.absent.unwrap_or(now);
        if self.living(owner).is_none() {
            return;
        }
        let set = before.grant_set();
        let is_member = |number: &usize| set.members().contains(&name(*number));
        let took = self.registry.disk.owner.as_ref() == Some(&NodeRef::new(name(by.node), by.incarnation));
        // A node hears of itself what others can only ask for. Guards answer for any node, unless the network fails between them.
        let is_asked = matches!(set, GrantSet::Guards(_))
            && !DEAFENING.iter().any(|fault| self.swarm.has(*fault))
            && took;
        let own = states.heard.get_key_value(&by.node).filter(|(number, _)| took && is_member(number));
        let guards = states.heard.iter().filter(|(number, _)| is_asked && is_member(number));
        let Some((member, since)) = guards.chain(own).min_by_key(|(_, since)| **since) else { return };
        let (member, since) = (*member, *since);
        if !self.is_hearing(member, before) {
            return;
        }
        // The period may be over by a clock that is ahead of the one that has recorded the isolation.
        let isolation = states.record.nodes.get(&owner.node).and_then(|node| node.isolation);
        let time = SetTime::by(&self.nodes[by.node].clock);
        let recorded =
            isolation.map_or(0, |isolation| age(Nanos::now().0 / 1_000_000, isolation.since_unix_ms));
        drop(time);
        let gone = (now - absent).max(Duration::from_millis(recorded));
        let within = gone + DECIDED < period;
        if within && since + DECIDED < now && !self.swarm.has(Fault::LostAnswer) {
            let (owner, heard) = (owner.clone(), now - since);
            self.fail(|| {
                format!(
                    "isolation: n{} took the disk from {owner}, which n{member} has heard for {heard:?}",
                    by.node
                )
            });
        }
    }

    /// No new replica and no new guard is on a node that is drained or quarantined.
    fn check_placed(&mut self, before: &DiskRecord, by: Who) {
        let (now, disk) = (self.world.now(), self.registry.disk.clone());
        let Some(states) = &self.states else { return };
        let names = |record: &DiskRecord| -> Vec<String> {
            let owner = record.owner.iter().chain(&record.replicas).map(|holder| holder.node.clone());
            owner.chain(record.guards.iter().cloned()).collect()
        };
        let (known, owner) = (names(before), disk.owner.as_ref().map(|owner| owner.node.clone()));
        // An ended quarantine stays in the record until the node's next event.
        let time = SetTime::by(&self.nodes[by.node].clock);
        let local = Nanos::now().0 / 1_000_000;
        drop(time);
        // A quarantine that a clock far ahead has written does not count.
        let farthest = local + 2 * self.rules.quarantine_duration.as_millis() as u64;
        let is_in_force = |node: &NodeStateRecord| {
            let until = node.quarantine.map_or(0, |quarantine| quarantine.until_unix_ms);
            node.drain.is_some() || local < until && until <= farthest
        };
        let is_long_barred = |node: &String| {
            let known = states.known_barred.get(&(by.node, node.clone()));
            let since = states.barred.get(node).map(|since| match known {
                Some(known) => *since.max(known),
                None => *since + VIEWED + PATIENCE,
            });
            since.is_some_and(|since| since + FILLED < now)
                && states.record.nodes.get(node).is_some_and(is_in_force)
        };
        let placed = names(&disk).into_iter().find(|node| {
            // A takeover is a rescue.
            !known.contains(node) && Some(node) != owner.as_ref() && is_long_barred(node)
        });
        let current = self.nodes[by.node].reaches && self.nodes[by.node].hears;
        if let Some(node) = placed.filter(|_| current && !self.swarm.has(Fault::LostAnswer)) {
            let state = states.record.nodes.get(&node).cloned();
            self.fail(|| {
                format!(
                    "placement: n{} places a copy or a guard on {node}, which takes none at {local}: {state:?}",
                    by.node
                )
            });
        }
    }

    /// Whether the change of the record of node states follows the rules.
    pub fn check_node_states(&mut self, by: Who) {
        let Some(next) = self.registry.node_states() else { return };
        let now = self.world.now();
        let rules = self.rules.clone();
        let Some(states) = &mut self.states else { return };
        let before = std::mem::replace(&mut states.record, next.clone());
        let wrong = self.wrong_isolation(&before, &next);
        let wrong = wrong.or_else(|| self.forgotten(&before, &next, by));
        let wrong = wrong.or_else(|| self.wrong_removal(&before, &next));
        if let Some(wrong) = wrong {
            self.fail(|| wrong);
        }
        self.counts.states.add_changes(&before, &next);
        let Some(states) = &mut self.states else { return };
        states.barred.retain(|node, _| is_barred(next.nodes.get(node)));
        for (name, _) in next.nodes.iter().filter(|(_, node)| is_barred(Some(node))) {
            states.barred.entry(name.clone()).or_insert(now);
        }
        let problem = broken_rule(&before, &next, &rules);
        if let Some(problem) = problem {
            self.fail(|| problem);
        }
    }

    /// An isolation of a process that has ended, or under a name that has a session, is none.
    fn wrong_isolation(&self, before: &NodeStatesRecord, next: &NodeStatesRecord) -> Option<String> {
        let isolation =
            |states: &NodeStatesRecord, name: &String| states.nodes.get(name).and_then(|node| node.isolation);
        let began = next.nodes.keys().filter_map(|name| {
            let isolation = isolation(next, name).filter(|new| {
                isolation(before, name).is_none_or(|known| known.incarnation != new.incarnation)
            })?;
            Some(NodeRef::new(name.clone(), isolation.incarnation))
        });
        began.into_iter().find_map(|process| {
            if self.registry.has_any_session(&process.node) {
                return Some(format!("isolation: {process} is isolated, and {} has a session", process.node));
            }
            self.registry
                .has_stopped(&process)
                .then(|| format!("isolation: {process} is isolated, and has ended"))
        })
    }

    /// A drain lasts until an operator ends it, and a quarantine until then or its end.
    fn forgotten(&self, before: &NodeStatesRecord, next: &NodeStatesRecord, by: Who) -> Option<String> {
        let states = self.states.as_ref()?;
        let time = SetTime::by(&self.nodes[by.node].clock);
        let local = Nanos::now().0 / 1_000_000;
        drop(time);
        before.nodes.iter().find_map(|(name, known)| {
            let node = next.nodes.get(name)?;
            if known.drain.is_some() && node.drain.is_none() && !states.resumed.contains(name) {
                return Some(format!("drain: that of {name} has ended, and nobody has ended it"));
            }
            let lasts = known.quarantine.is_some_and(|quarantine| local < quarantine.until_unix_ms);
            (lasts && node.quarantine.is_none() && !states.cleared.contains(name))
                .then(|| format!("quarantine: that of {name} has ended early, and nobody has ended it"))
        })
    }

    /// A removed node is down, and the disk does not count on it.
    fn wrong_removal(&self, before: &NodeStatesRecord, next: &NodeStatesRecord) -> Option<String> {
        let states = self.states.as_ref()?;
        let removed = before.nodes.keys().find(|name| !next.nodes.contains_key(*name))?;
        if self.registry.has_any_session(removed) {
            return Some(format!("removal: {removed} is removed, and has a session"));
        }
        // Between the look at the disks and the removal, the disk may come to count on the node.
        let is_slow = self.swarm.has(Fault::Pause) || self.swarm.has(Fault::LostAnswer);
        let known = states.named.get(removed).map(|since| (*since).max(self.registry.back));
        let counted = known.is_some_and(|since| since + FILLED < self.world.now());
        (counted && !is_slow).then(|| format!("removal: {removed} is removed, and the disk counts on it"))
    }
}

/// The broken rule of two consecutive records, if any.
fn broken_rule(before: &NodeStatesRecord, next: &NodeStatesRecord, rules: &Rules) -> Option<String> {
    let quarantined = next.nodes.values().filter(|node| node.quarantine.is_some()).count();
    if quarantined > 1 && quarantined * 100 > next.nodes.len() * 20 {
        return Some(format!("quarantine: {quarantined} of {} nodes: {next:?}", next.nodes.len()));
    }
    let none = NodeStateRecord::default();
    for (name, node) in &next.nodes {
        let known = before.nodes.get(name).unwrap_or(&none);
        let Some(isolation) = node.isolation.filter(|isolation| {
            known.isolation.is_none_or(|known| known.incarnation != isolation.incarnation)
        }) else {
            continue;
        };
        let at = isolation.since_unix_ms;
        let window = rules.quarantine_window.as_millis() as u64;
        let counted = known.isolations_unix_ms.iter().filter(|start| age(at, **start) < window).count() + 1;
        if node.isolations_unix_ms.len() != counted {
            let found = &node.isolations_unix_ms;
            return Some(format!(
                "isolation: {counted} of {name} within the window, and {found:?} are recorded"
            ));
        }
        let others = next.nodes.iter().filter(|(other, node)| *other != name && node.quarantine.is_some());
        let may_be = (others.count() + 1) * 100 <= next.nodes.len() * 20 || quarantined == 0;
        if counted >= rules.quarantine_threshold && may_be && node.quarantine.is_none() {
            return Some(format!("quarantine: {name} was isolated {counted} times and is not quarantined"));
        }
        let early = counted < rules.quarantine_threshold && known.quarantine.is_none();
        if early && node.quarantine.is_some() {
            return Some(format!("quarantine: {name} was isolated only {counted} times"));
        }
    }
    None
}
