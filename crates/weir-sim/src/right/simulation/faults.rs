//! Faults and operators' requests. A seed first draws its fault rates, so that rare combinations are common in some seeds.

use std::time::Duration;

use fastrand::Rng;
use weir_block::Nanos;
use weir_cluster::records::{NodeRef, Policy};

use super::node::Node;
use super::state::Order;
use super::{Event, Simulation};
use crate::right::clock::Clock;

const MOST_NODES: usize = 5;

/// The fault rates of a seed.
#[derive(Clone, Debug)]
pub struct FaultRates {
    /// Share of messages that are late by up to 700 ms.
    pub slow: f64,
    /// Share of messages that are lost.
    pub loss: f64,
    /// Share of compare-and-swaps that are late by up to 1.5 s.
    pub late_changes: f64,
    /// Share of writes that the storage holds for long.
    pub slow_storage: f64,
    /// Share of new owners that die or are cut off soon.
    pub short_lives: f64,
    /// Share of late compare-and-swaps whose sender cannot reach the registry afterwards.
    pub lasting_doubts: f64,
    /// Share of takeovers with a restart of a member of the former set.
    pub restarts: f64,
    /// Share of operators' requests that are moves, if a replica exists.
    moves: f64,
    /// Time until which a node's messages to another are lost.
    pub blocked: [[Nanos; MOST_NODES]; MOST_NODES],
    /// Time until which a node cannot reach the registry.
    pub registry_cut: [Nanos; MOST_NODES],
    /// Time until which no node can.
    pub registry_down: Nanos,
    /// Milliseconds between two faults, at most.
    pause: u64,
    /// Weight of each kind.
    weights: [u32; KINDS],
}

const KINDS: usize = 9;

impl FaultRates {
    pub fn new(rng: &mut Rng) -> FaultRates {
        let mut of = |shares: &[f64]| shares[rng.usize(..shares.len())];
        FaultRates {
            slow: of(&[0.0, 0.02, 0.1, 0.25]),
            loss: of(&[0.0, 0.02, 0.1]),
            late_changes: of(&[0.0, 0.2, 0.6]),
            slow_storage: of(&[0.05, 0.3, 0.8]),
            short_lives: of(&[0.0, 0.2, 0.7]),
            lasting_doubts: of(&[0.0, 0.3, 0.8]),
            restarts: of(&[0.0, 0.3, 0.8]),
            moves: of(&[0.2, 0.5, 0.9]),
            blocked: Default::default(),
            registry_cut: Default::default(),
            registry_down: Nanos(0),
            pause: [500, 1_500, 4_000][rng.usize(..3)],
            // Crashes lose copies, and losing the last one ends the run.
            weights: std::array::from_fn(
                |kind| if kind == 0 { [0, 0, 1, 2] } else { [0, 1, 2, 6] }[rng.usize(..4)],
            ),
        }
    }
}

impl Simulation {
    pub fn fault(&mut self) {
        let weights = self.rates.weights;
        let mut left = self.rng.u32(0..weights.iter().sum::<u32>().max(1));
        let kind = weights.iter().position(|weight| {
            let here = left < *weight;
            left = left.saturating_sub(*weight);
            here
        });
        let owner = self.some_owner();
        let any = self.rng.usize(..self.nodes.len());
        let node = if self.rng.u8(0..3) > 0 { owner.unwrap_or(any) } else { any };
        let a_while = self.between(100, 3_500);
        let until = self.now + a_while;
        match kind.unwrap_or(0) {
            0 => self.crash(node, self.nodes[node].incarnation),
            1 => {
                let pause = self.between(50, 2_500);
                self.note(|| format!("node {node} is stopped for {pause:?}"));
                self.nodes[node].paused_until = self.now + pause;
            }
            2 | 3 => {
                self.note(|| format!("node {node} cannot reach the registry for {a_while:?}"));
                self.rates.registry_cut[node] = until;
            }
            4 => {
                self.note(|| format!("the registry is away for {a_while:?}"));
                self.rates.registry_down = until;
            }
            5 => {
                let other = self.rng.usize(..self.nodes.len());
                self.note(|| format!("nodes {node} and {other} cannot reach each other for {a_while:?}"));
                self.rates.blocked[node][other] = until;
                if self.rng.bool() {
                    self.rates.blocked[other][node] = until;
                }
            }
            6 => {
                let now = self.now;
                self.nodes[node].clock.turn(&mut self.rng, now);
                self.registry.clock.turn(&mut self.rng, now);
            }
            _ => self.send_order(),
        }
        let pause = self.between(10, self.rates.pause);
        self.after(pause, Event::Fault);
    }

    /// A node that considers itself the owner.
    fn some_owner(&mut self) -> Option<usize> {
        let owners: Vec<usize> =
            (0..self.nodes.len()).filter(|node| self.nodes[*node].owner.is_some()).collect();
        (!owners.is_empty()).then(|| owners[self.rng.usize(..owners.len())])
    }

    fn send_order(&mut self) {
        let Some(node) = self.some_owner() else { return };
        let others: Vec<NodeRef> = self.others(node);
        let now = self.nodes[node].clock.at(self.now);
        let Some(owner) = &self.nodes[node].owner else { return };
        let replicas = owner.record.replicas.clone();
        let order = if !replicas.is_empty() && self.rng.f64() < self.rates.moves {
            Order::Move { to: replicas[self.rng.usize(..replicas.len())].clone(), since: now }
        } else {
            let count = self.rng.usize(0..=2.min(others.len()));
            let policy = match self.rng.u8(0..3) {
                0 | 1 if count == 0 => Policy::WriteThrough,
                _ => Policy::WriteBack(count as u8),
            };
            Order::Set { policy, replicas: others[..count].to_vec(), since: now }
        };
        self.note(|| format!("node {node} gets the order {order:?}"));
        if let Some(owner) = &mut self.nodes[node].owner {
            owner.order.get_or_insert(order);
        }
    }

    /// The living processes on other nodes, in random order.
    pub fn others(&mut self, node: usize) -> Vec<NodeRef> {
        let others = self.nodes.iter().enumerate().filter(|(other, there)| *other != node && there.alive);
        let mut others: Vec<NodeRef> = others.map(|(_, there)| there.me.clone()).collect();
        self.rng.shuffle(&mut others);
        others
    }

    /// A change of this process has committed.
    pub fn committed(&mut self, node: usize, incarnation: u64) {
        let took = self.registry.record.owner.as_ref().is_some_and(|owner| owner.incarnation == incarnation)
            && self.registry.record.epoch == self.registry.tenure;
        if took && self.rng.f64() < self.rates.restarts {
            self.restart_member();
        }
        if took && self.rng.f64() < self.rates.short_lives {
            let delay = self.between(0, 800);
            match self.rng.bool() {
                true => self.after(delay, Event::Crash { node, incarnation }),
                false => self.rates.registry_cut[node] = self.now + Duration::from_secs(2),
            }
        }
    }

    /// Restarts a member of the set that a takeover must seal, just before or after.
    fn restart_member(&mut self) {
        let sets = self.registry.record.former.iter().filter_map(|former| former.set.as_ref());
        let members: Vec<&String> = sets.flat_map(|set| set.members()).collect();
        let member = (!members.is_empty()).then(|| members[self.rng.usize(..members.len())]);
        let Some(node) = member.and_then(|name| self.index(name)) else { return };
        if self.registry.record.owner.as_ref().is_none_or(|owner| owner.node != self.nodes[node].name) {
            let (delay, incarnation) = (self.between(0, 60), self.nodes[node].incarnation);
            self.after(delay, Event::Crash { node, incarnation });
        }
    }

    pub fn crash(&mut self, node: usize, incarnation: u64) {
        let there = &mut self.nodes[node];
        if !there.alive || there.incarnation != incarnation {
            return;
        }
        there.alive = false;
        there.paused_until = Nanos(0);
        self.note(|| format!("node {node} dies"));
        let most = if self.rng.bool() { 60 } else { 2_000 };
        let (known, back) = (self.between(0, 1_500), self.between(10, most));
        if self.rng.bool() {
            self.after(known, Event::Stopped { incarnation });
        }
        self.after(back, Event::Start { node });
    }

    pub fn start(&mut self, node: usize) {
        let name = self.nodes[node].name.clone();
        let process = self.process(&name);
        let clock = match self.rng.bool() {
            true => Clock::new(&mut self.rng, self.now),
            false => self.nodes[node].clock,
        };
        self.note(|| format!("node {node} starts as {process}"));
        self.nodes[node] = Node::new(process, clock, self.now, self.bug);
        self.start_turns(node);
    }
}
