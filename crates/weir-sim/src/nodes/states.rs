//! States of nodes: faults that isolate one node, long outages of the registry, and operators who drain, resume, clear and remove.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use weir_block::Nanos;
use weir_block::sim::SetTime;
use weir_cluster::node_state::Event;
use weir_cluster::records::{DiskRecord, NodeRef, NodeStateRecord, NodeStatesRecord, Policy};
use weir_node::control::rights::key;

use super::machine::Order;
use super::registry::DISK;
use super::{Cluster, Task};
use crate::atlas::Fault;
use crate::scale::{CALM, NODES, name, node_of};

/// Pause between two looks at who hears the owner.
const LISTEN: Duration = Duration::from_millis(25);

/// Faults after which a node's answer may come late or not at all.
pub const DEAFENING: [Fault; 7] = [
    Fault::Pause,
    Fault::ConnectionCut,
    Fault::ConnectionStall,
    Fault::PartitionOneWay,
    Fault::PartitionFull,
    Fault::ConnectFailure,
    Fault::CorruptRecord,
];

/// Faults that end a node's process or its session, or hold a change back.
const DISTURBING: [Fault; 4] =
    [Fault::Crash, Fault::RegistryAway, Fault::RegistryUnreachable, Fault::LostAnswer];

/// A long outage of the registry lasts several leases, and mostly longer than the resiliency period; in microseconds.
const LONG_OUTAGE: (u64, u64) = (1_800_000, 4_500_000);

/// The knowledge of the checks.
#[derive(Default)]
pub struct States {
    /// The committed record.
    pub record: NodeStatesRecord,
    /// Since when nothing may be placed on a node.
    pub barred: BTreeMap<String, Nanos>,
    /// Since when the disk's record names a node as its owner or a replica.
    pub named: BTreeMap<String, Nanos>,
    /// The policy of the disk's record, and since when.
    pub policy: Option<(Policy, Nanos)>,
    /// Since when the owner has no session.
    pub absent: Option<Nanos>,
    /// When a node of the set was without a complete copy that the owner writes to, the last time.
    pub lost: BTreeMap<String, Nanos>,
    /// When a node, by its number, was cut off from the registry the last time.
    pub cut_off: BTreeMap<usize, Nanos>,
    /// Since when the view of a node, by its number, shows why at present nothing may be placed on another node.
    pub known_barred: BTreeMap<(usize, String), Nanos>,
    /// The members that hear the owner, and since when without a gap.
    pub heard: BTreeMap<usize, Nanos>,
    /// The nodes whose drains, and whose quarantines, operators have ever asked to end.
    pub resumed: BTreeSet<String>,
    pub cleared: BTreeSet<String>,
    /// The nodes whose drains have ever permitted fewer copies.
    pub permitted: BTreeSet<String>,
    /// Whether nodes are drained and none fails.
    is_maintained: bool,
    /// The node that was isolated last.
    last: usize,
    /// The node that is still drained at the end, if any, once that is decided.
    stays_drained: Option<Option<String>>,
}

impl Cluster {
    /// Schedules what concerns nodes' states. A third of the runs have a long outage of the registry. In half of them the nodes reach
    /// each other at all times: only there does each check know what a node must have heard. In an eighth, no node fails or is isolated,
    /// and operators drain all nodes but the owner's: only there is no other place for a copy.
    pub fn plan_states(&mut self, seed: u64) {
        // By the seed, so that the choices of the other seeds do not depend on it.
        let is_maintained = seed % 8 == 7;
        self.states = Some(States { is_maintained, ..States::default() });
        if self.rng.bool() || is_maintained {
            self.swarm = self.swarm.without(&DEAFENING);
        }
        if is_maintained {
            self.swarm = self.swarm.without(&DISTURBING);
        } else if self.rng.u8(..3) == 0 {
            self.after(500_000, 3_500_000, Task::LongOutage);
        }
        self.after(300_000, 900_000, Task::States);
        self.after(10_000, 20_000, Task::Listen);
    }

    /// A node loses the registry and nothing else, or an operator acts.
    pub fn states_act(&mut self) {
        if self.world.now() >= CALM {
            return;
        }
        self.after(100_000, 900_000, Task::States);
        let owner = self.registry.disk.owner.as_ref().and_then(|owner| self.living(owner));
        let any = self.rng.usize(..NODES);
        let Some(states) = &self.states else { return };
        let (last, is_maintained) = (states.last, states.is_maintained);
        match self.rng.u8(..14) {
            0..=3 if is_maintained => self.drain_others(),
            4..=6 if is_maintained => {
                (0..NODES).map(name).for_each(|node| self.order_state(Event::Resume { node }));
            }
            0..=3 => self.isolate(owner.unwrap_or(any)),
            4 => self.isolate(any),
            // It flaps.
            5 | 6 => self.isolate(last),
            7 | 8 => {
                let node = name(if self.rng.bool() { owner.unwrap_or(any) } else { any });
                let fewer_copies = self.rng.bool();
                self.order_state(Event::Drain { node, fewer_copies });
            }
            9 | 10 => self.order_state(Event::Resume { node: name(any) }),
            11 => self.order_state(Event::Clear { node: name(any) }),
            _ => self.order_state(Event::Removed { node: name(last) }),
        }
    }

    /// No node is left for the copies of the disk, if the requests succeed.
    fn drain_others(&mut self) {
        let owner = self.registry.disk.owner.as_ref().map(|owner| owner.node.clone());
        for node in (0..NODES).map(name).filter(|node| Some(node) != owner.as_ref()) {
            self.order_state(Event::Drain { node, fewer_copies: false });
        }
    }

    /// The registry is away for several leases. Half of the outages meet a drain that has just begun.
    pub fn long_outage(&mut self) {
        if self.world.now() >= CALM {
            return;
        }
        let owner = self.registry.disk.owner.as_ref().map(|owner| owner.node.clone());
        if let Some(node) = owner.filter(|_| self.rng.bool()) {
            self.order_state(Event::Drain { node, fewer_copies: false });
            return self.after(5_000, 500_000, Task::Outage);
        }
        self.outage();
    }

    pub fn outage(&mut self) {
        let delay = Duration::from_micros(self.rng.u64(LONG_OUTAGE.0..=LONG_OUTAGE.1));
        self.registry.up = false;
        self.registry.stands = self.rng.bool();
        self.registry.away_until = self.world.now() + delay;
        self.at(self.registry.away_until, Task::RegistryUp);
        self.note(|| format!("fault: the registry is away for {delay:?}"));
        self.counts.states.outages += 1;
        let barred = self.states.as_ref().is_some_and(|states| !states.barred.is_empty());
        self.counts.states.outages_barred += u64::from(barred);
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
        self.counts.states.requests_away += u64::from(!self.registry.up);
        if let Some(states) = &mut self.states {
            match &event {
                Event::Resume { node } => drop(states.resumed.insert(node.clone())),
                Event::Clear { node } => drop(states.cleared.insert(node.clone())),
                Event::Drain { node, fewer_copies: true } => drop(states.permitted.insert(node.clone())),
                _ => {}
            }
        }
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

    /// Looks at what the nodes know and have, who hears the owner, and whether it has a session.
    pub fn listen(&mut self) {
        let now = self.world.now();
        self.at(now + LISTEN, Task::Listen);
        self.note_views();
        self.note_copies();
        if now >= CALM {
            return;
        }
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

    fn note_copies(&mut self) {
        let now = self.world.now();
        let lost = self.registry.disk.replicas.iter().filter(|replica| !self.is_written(replica));
        let lost: Vec<String> = lost.map(|replica| replica.node.clone()).collect();
        let Some(states) = &mut self.states else { return };
        states.lost.extend(lost.into_iter().map(|node| (node, now)));
    }

    /// Whether a process has a complete copy, and an owner that writes to it.
    pub fn is_written(&self, replica: &NodeRef) -> bool {
        let shard = self.living(replica).and_then(|number| self.nodes[number].shard.as_ref());
        let copy = shard.and_then(|shard| shard.copy(DISK));
        copy.is_some_and(|host| host.has_owner() && host.replica().is_complete())
    }

    /// A node decides by its own view, which stands still while its request for a new list waits for a lost answer.
    fn note_views(&mut self) {
        let now = self.world.now();
        let Some(states) = &mut self.states else { return };
        for machine in &self.nodes {
            let node = machine.shared.lock().node.clone();
            if !(self.registry.up && machine.reaches && machine.hears) {
                states.cut_off.insert(machine.number, now);
            }
            let known = node.map(|node| node.records.node_states());
            for key in (0..NODES).map(|other| (machine.number, name(other))) {
                // It may show a quarantine that is over, and not the drain that has begun since.
                let bars = |states: &NodeStatesRecord| {
                    let node = states.nodes.get(&key.1).filter(|node| is_barred(Some(node)));
                    node.map(|node| (node.drain, node.quarantine))
                };
                let committed = bars(&states.record);
                if committed.is_some() && committed == known.as_ref().and_then(bars) {
                    states.known_barred.entry(key).or_insert(now);
                } else {
                    states.known_barred.remove(&key);
                }
            }
        }
    }

    /// Whether a node that works hears the owner of the record.
    pub fn is_hearing(&self, number: usize, record: &DiskRecord) -> bool {
        let machine = &self.nodes[number];
        let works = machine.alive && !machine.paused && machine.reaches && machine.hears;
        let known = machine.shared.lock().node.clone();
        let Some(node) = known.filter(|_| works && self.registry.up) else { return false };
        let _time = SetTime::by(&machine.clock);
        node.rights.hears(&key(record), record.epoch)
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

pub fn is_barred(node: Option<&NodeStateRecord>) -> bool {
    node.is_some_and(|node| node.drain.is_some() || node.quarantine.is_some())
}
