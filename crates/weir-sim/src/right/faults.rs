//! What goes wrong, and what operators wish for. A seed draws its weather first: rare things meet when each is common somewhere.

use std::time::Duration;

use fastrand::Rng;
use weir_block::Nanos;
use weir_cluster::records::{NodeRef, Policy};

use super::change::Wish;
use super::clock::Clock;
use super::node::Node;
use super::world::{Event, World};

const MOST_NODES: usize = 5;

/// How bad it is, in this seed.
#[derive(Clone, Debug)]
pub struct Weather {
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
    /// Share of late compare-and-swaps whose sender does not reach the registry afterwards.
    pub lasting_doubts: f64,
    /// Share of takeovers at which a member of the former set starts again.
    pub restarts: f64,
    /// Share of wishes that are moves, where there is a replica.
    moves: f64,
    /// Until when a node's messages to another are lost.
    pub blocked: [[Nanos; MOST_NODES]; MOST_NODES],
    /// Until when a node does not reach the registry.
    pub registry_cut: [Nanos; MOST_NODES],
    /// Until when nobody does.
    pub registry_down: Nanos,
    /// Milliseconds between two faults, at most.
    pause: u64,
    /// How often each kind comes.
    weights: [u32; KINDS],
}

const KINDS: usize = 9;

impl Weather {
    pub fn new(rng: &mut Rng) -> Weather {
        let mut of = |shares: &[f64]| shares[rng.usize(..shares.len())];
        Weather {
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
            // Crashes lose copies, and with the last one the run is over.
            weights: std::array::from_fn(
                |kind| if kind == 0 { [0, 0, 1, 2] } else { [0, 1, 2, 6] }[rng.usize(..4)],
            ),
        }
    }
}

impl World {
    pub fn fault(&mut self) {
        let weights = self.weather.weights;
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
                self.note(|| format!("node {node} does not reach the registry for {a_while:?}"));
                self.weather.registry_cut[node] = until;
            }
            4 => {
                self.note(|| format!("the registry is away for {a_while:?}"));
                self.weather.registry_down = until;
            }
            5 => {
                let other = self.rng.usize(..self.nodes.len());
                self.note(|| format!("nodes {node} and {other} do not reach each other for {a_while:?}"));
                self.weather.blocked[node][other] = until;
                if self.rng.bool() {
                    self.weather.blocked[other][node] = until;
                }
            }
            6 => {
                let now = self.now;
                self.nodes[node].clock.turn(&mut self.rng, now);
                self.registry.clock.turn(&mut self.rng, now);
            }
            _ => self.wish_something(),
        }
        let pause = self.between(10, self.weather.pause);
        self.after(pause, Event::Fault);
    }

    /// A node that believes to own the disk.
    fn some_owner(&mut self) -> Option<usize> {
        let owners: Vec<usize> =
            (0..self.nodes.len()).filter(|node| self.nodes[*node].owner.is_some()).collect();
        (!owners.is_empty()).then(|| owners[self.rng.usize(..owners.len())])
    }

    fn wish_something(&mut self) {
        let Some(node) = self.some_owner() else { return };
        let others: Vec<NodeRef> = self.others(node);
        let now = self.nodes[node].clock.at(self.now);
        let Some(owner) = &self.nodes[node].owner else { return };
        let replicas = owner.record.replicas.clone();
        let wish = if !replicas.is_empty() && self.rng.f64() < self.weather.moves {
            Wish::Move { to: replicas[self.rng.usize(..replicas.len())].clone(), since: now }
        } else {
            let count = self.rng.usize(0..=2.min(others.len()));
            let policy = match self.rng.u8(0..3) {
                0 | 1 if count == 0 => Policy::WriteThrough,
                _ => Policy::WriteBack(count as u8),
            };
            Wish::Set { policy, replicas: others[..count].to_vec(), since: now }
        };
        self.note(|| format!("node {node} shall {wish:?}"));
        if let Some(owner) = &mut self.nodes[node].owner {
            owner.wish.get_or_insert(wish);
        }
    }

    /// The processes that live on other nodes, in any order.
    pub fn others(&mut self, node: usize) -> Vec<NodeRef> {
        let others = self.nodes.iter().enumerate().filter(|(other, there)| *other != node && there.alive);
        let mut others: Vec<NodeRef> = others.map(|(_, there)| there.me.clone()).collect();
        self.rng.shuffle(&mut others);
        others
    }

    /// A change of this process has been committed.
    pub fn committed(&mut self, node: usize, incarnation: u64) {
        let took = self.registry.record.owner.as_ref().is_some_and(|owner| owner.incarnation == incarnation)
            && self.registry.record.epoch == self.registry.tenure;
        if took && self.rng.f64() < self.weather.restarts {
            self.restart_member();
        }
        if took && self.rng.f64() < self.weather.short_lives {
            let delay = self.between(0, 800);
            match self.rng.bool() {
                true => self.after(delay, Event::Crash { node, incarnation }),
                false => self.weather.registry_cut[node] = self.now + Duration::from_secs(2),
            }
        }
    }

    /// A member of the set that a takeover has to seal starts again, just before or after.
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
