//! States of nodes: faults that isolate one node, operators who drain, resume and clear, and the checks of the rules.
//!
//! The checks compute what they can from two consecutive records, and not with the production code.

use std::collections::BTreeMap;
use std::time::Duration;

use weir_block::Nanos;
use weir_block::sim::SetTime;
use weir_cluster::node_state::Event;
use weir_cluster::records::{DiskRecord, NodeRef, NodeStateRecord, NodeStatesRecord};
use weir_cluster::right::GrantSet;
use weir_node::control::rights::key;

use super::machine::Order;
use super::{Cluster, Task, Who};
use crate::atlas::Fault;
use crate::scale::{CALM, NODES, name, node_of};

/// Pause between two looks at who hears the owner.
const LISTEN: Duration = Duration::from_millis(25);

/// Longest time from a decision to its commit, while the registry answers and answers are not lost.
const DECIDED: Duration = Duration::from_millis(1_500);

/// Faults after which a guard's answer may come late or not at all.
const DEAFENING: [Fault; 6] = [
    Fault::Pause,
    Fault::ConnectionCut,
    Fault::ConnectionStall,
    Fault::PartitionOneWay,
    Fault::PartitionFull,
    Fault::ConnectFailure,
];

/// Longest time from the choice of a node for a copy until the copy is complete and in the record.
const FILLED: Duration = Duration::from_secs(3);

/// Longest time for which a node's view may lag behind the registry, while faults are injected.
const VIEWED: Duration = Duration::from_secs(4);

/// The knowledge of the checks.
#[derive(Default)]
pub struct States {
    /// The committed record.
    record: NodeStatesRecord,
    /// Since when nothing may be placed on a node.
    barred: BTreeMap<String, Nanos>,
    /// Since when the owner has no session.
    absent: Option<Nanos>,
    /// The members that hear the owner, and since when without a gap.
    heard: BTreeMap<usize, Nanos>,
    /// The node that was isolated last.
    last: usize,
    /// The node that is still drained at the end, if any, once that is decided.
    stays_drained: Option<Option<String>>,
}

/// Length of a time span between two times of records, in milliseconds.
fn age(now: u64, start: u64) -> u64 {
    now.saturating_sub(start)
}

impl Cluster {
    /// A node loses the registry and nothing else, or an operator acts.
    pub fn states_act(&mut self) {
        if self.world.now() >= CALM {
            return;
        }
        self.after(100_000, 900_000, Task::States);
        let owner = self.registry.disk.owner.as_ref().and_then(|owner| self.living(owner));
        let any = self.rng.usize(..NODES);
        match self.rng.u8(..12) {
            0..=3 => self.isolate(owner.unwrap_or(any)),
            4 => self.isolate(any),
            5 | 6 => {
                // It flaps.
                let last = self.states.as_ref().map_or(any, |states| states.last);
                self.isolate(last);
            }
            7 | 8 => {
                let node = name(if self.rng.bool() { owner.unwrap_or(any) } else { any });
                let fewer_copies = self.rng.bool();
                self.order_state(Event::Drain { node, fewer_copies });
            }
            9 | 10 => self.order_state(Event::Resume { node: name(any) }),
            _ => self.order_state(Event::Clear { node: name(any) }),
        }
    }

    fn isolate(&mut self, node: usize) {
        if let Some(states) = &mut self.states {
            states.last = node;
        }
        (self.nodes[node].reaches, self.nodes[node].hears) = (false, false);
        self.note(|| format!("n{node} loses the registry"));
        self.after(700_000, 4_000_000, Task::Reach { node });
    }

    fn order_state(&mut self, event: Event) {
        let by = self.rng.usize(..NODES);
        self.order(by, Order::State(event));
    }

    /// When the faults are over, operators end what they and the faults have begun.
    pub fn calm_states(&mut self) {
        // One drain may last: it must come to its end.
        let lasts = self.rng.bool();
        let Some(states) = &mut self.states else { return };
        let drained = states.record.nodes.iter().filter(|(_, node)| node.drain.is_some());
        let mut drained: Vec<String> = drained.map(|(node, _)| node.clone()).collect();
        let stays = states.stays_drained.get_or_insert_with(|| drained.first().filter(|_| lasts).cloned());
        drained.retain(|node| stays.as_ref() != Some(node));
        let mut events: Vec<Event> = drained.into_iter().map(|node| Event::Resume { node }).collect();
        let quarantined = states.record.nodes.iter().filter(|(_, node)| node.quarantine.is_some());
        events.extend(quarantined.map(|(node, _)| Event::Clear { node: node.clone() }));
        events.into_iter().for_each(|event| self.order_state(event));
    }

    /// Looks at who hears the owner, and whether it has a session.
    pub fn listen(&mut self) {
        let now = self.world.now();
        if now >= CALM {
            return;
        }
        self.at(now + LISTEN, Task::Listen);
        let record = self.registry.disk.clone();
        let living = record.owner.as_ref().filter(|owner| self.living(owner).is_some());
        let alone = living.filter(|owner| !self.registry.has_session(&owner.node, owner.incarnation));
        let (owner, alone) = (living.map(|owner| node_of(&owner.node)), alone.is_some());
        let others = (0..NODES).filter(|number| owner.is_some() && Some(*number) != owner);
        let hearing: Vec<usize> = others.filter(|number| self.is_hearing(*number, &record)).collect();
        let Some(states) = &mut self.states else { return };
        states.absent = alone.then(|| states.absent.unwrap_or(now));
        states.heard.retain(|number, _| hearing.contains(number));
        for number in hearing {
            states.heard.entry(number).or_insert(now);
        }
    }

    /// Whether a node that works hears the owner of the record.
    fn is_hearing(&self, number: usize, record: &DiskRecord) -> bool {
        let machine = &self.nodes[number];
        let works = machine.alive && !machine.paused && machine.reaches && machine.hears;
        let known = machine.shared.lock().node.clone();
        let Some(node) = known.filter(|_| works && self.registry.up) else { return false };
        let _time = SetTime::by(&machine.clock);
        node.rights.hears(&key(record), record.epoch)
    }

    /// Nobody takes a disk from an isolated owner that its members hear, within the period.
    pub fn check_taken(&mut self, before: &DiskRecord, by: Who) {
        let (now, period) = (self.world.now(), self.rules.resiliency_period);
        let Some(states) = &self.states else { return };
        let (Some(absent), Some(owner)) = (states.absent, &before.owner) else { return };
        // It may have ended since the last look.
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
        if within && since + DECIDED < now && !self.swarm.has(crate::atlas::Fault::LostAnswer) {
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
    pub fn check_placed(&mut self, before: &DiskRecord, by: Who) {
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
        let known_here =
            self.nodes[by.node].shared.lock().node.as_ref().map(|node| node.records.node_states());
        let is_known =
            |node: &String| known_here.as_ref().is_some_and(|known| is_barred(known.nodes.get(node)));
        let is_long_barred = |node: &String| {
            let limit = if is_known(node) { FILLED } else { FILLED + VIEWED };
            states.barred.get(node).is_some_and(|since| *since + limit < now)
                && states.record.nodes.get(node).is_some_and(is_in_force)
        };
        let placed = names(&disk).into_iter().find(|node| {
            // A takeover is a rescue.
            !known.contains(node) && Some(node) != owner.as_ref() && is_long_barred(node)
        });
        let current = self.nodes[by.node].reaches && self.nodes[by.node].hears;
        if let Some(node) = placed.filter(|_| current && !self.swarm.has(crate::atlas::Fault::LostAnswer)) {
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
    pub fn check_node_states(&mut self) {
        let Some(next) = self.registry.node_states() else { return };
        let now = self.world.now();
        let rules = self.rules.clone();
        let Some(states) = &mut self.states else { return };
        let before = std::mem::replace(&mut states.record, next.clone());
        let wrong = self.wrong_isolation(&before, &next);
        if let Some(wrong) = wrong {
            self.fail(|| wrong);
        }
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

    /// The reason why the nodes' states have not settled, if any.
    pub fn unsettled_states(&self) -> Option<String> {
        let states = self.states.as_ref()?;
        let disk = &self.registry.disk;
        let owner = disk.owner.as_ref().map(|owner| &owner.node);
        let is_drained =
            |node: &String| states.record.nodes.get(node).is_some_and(|state| state.drain.is_some());
        if disk.heir.is_some()
            || disk.home.as_ref().is_some_and(|home| Some(home) != owner && !is_drained(home))
        {
            return Some(format!("the disk is on its way from {owner:?}: {:?}, {:?}", disk.heir, disk.home));
        }
        let holders = disk.owner.iter().chain(&disk.replicas).map(|holder| &holder.node);
        if let Some(node) = holders.chain(&disk.guards).find(|node| is_drained(node)) {
            return Some(format!("{node} is drained, and the disk counts on it: {disk:?}"));
        }
        let open = |name: &String, node: &NodeStateRecord| {
            let is_drained =
                node.drain.is_some() && states.stays_drained.as_ref().and_then(Option::as_ref) != Some(name);
            node.isolation.is_some() || is_drained || node.quarantine.is_some()
        };
        let (name, node) = states.record.nodes.iter().find(|(name, node)| open(name, node))?;
        Some(format!("the state of {name} is {node:?}"))
    }
}

fn is_barred(node: Option<&NodeStateRecord>) -> bool {
    node.is_some_and(|node| node.drain.is_some() || node.quarantine.is_some())
}

/// The broken rule of two consecutive records, if any.
fn broken_rule(
    before: &NodeStatesRecord,
    next: &NodeStatesRecord,
    rules: &weir_cluster::node_state::Rules,
) -> Option<String> {
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
