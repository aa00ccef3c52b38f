//! Faults, and what brings the parts back.

use std::time::Duration;

use weir_block::Nanos;
use weir_block::sim::{Death, MediumFaults, Wires};
use weir_volume::SharedDisk;
use weir_volume::planted::Bug;

use super::storage::NodePath;
use super::{Ending, NODES, Node, SIZE, World, changing};

/// Kinds of faults.
const KINDS: u32 = 14;
/// Most changes that somebody waits for.
const MOST_WANTED: usize = 3;

impl World {
    /// A medium without errors.
    pub fn medium(&mut self) -> MediumFaults {
        MediumFaults {
            late: self.rng.u32(4..40),
            // A coordinator whose medium takes longer than the limit for answers counts as silent.
            longest: Duration::from_millis([3, 40, 500][self.rng.usize(0..3)])
                .min(self.options.coordinator_wait / 8),
            partial: [0, 4][self.rng.usize(0..2)],
            direct: true,
            ..MediumFaults::default()
        }
    }

    pub fn reset_media(&mut self) {
        let (late, partial) = (self.rng.u32(10..100), [0, 3][self.rng.usize(0..2)]);
        let longest = Duration::from_millis(5);
        self.world.set_wires(Wires { late, longest, partial, ..Wires::default() });
        let medium = self.medium();
        for file in self.nodes.iter().flat_map(|node| [Some(node.lun), node.file]).flatten() {
            self.world.set_medium(file, medium);
        }
    }

    fn in_a_while(&mut self, least: u64, most: u64) -> Nanos {
        self.world.now() + Duration::from_millis(self.rng.u64(least..most))
    }

    pub fn fault(&mut self) {
        let kinds: Vec<u32> = (0..KINDS).filter(|kind| self.swarm & 1 << kind != 0).collect();
        let Some(kind) = self.rng.choice(kinds) else { return };
        let (owner, coordinator) = (self.owner, self.coordinator);
        self.log.note(|| format!("fault {kind}"));
        match (kind, owner, coordinator) {
            (0, Some(owner), Some(coordinator)) => drop(self.world.cut(owner, coordinator)),
            (1, Some(owner), Some(coordinator)) => {
                let until = self.in_a_while(5, 600);
                self.world.block(owner, coordinator, until);
                if self.rng.bool() {
                    self.world.block(coordinator, owner, until);
                }
            }
            (2, _, Some(node)) | (3, Some(node), _) => {
                let death = if self.rng.u8(0..4) == 0 { Death::PowerCut } else { Death::Killed };
                self.kill(node, death);
            }
            (4, Some(node), _) | (5, _, Some(node)) if kind == 4 || self.rng.u8(0..3) == 0 => {
                self.flip_path(node);
            }
            (6, Some(node), _) | (7, _, Some(node)) => {
                let fails = if self.rng.bool() { self.rng.u32(3..30) } else { 0 };
                let medium = MediumFaults { fails, ..self.medium() };
                let Node { lun, file, .. } = self.nodes[node];
                self.world.set_medium(file.filter(|_| kind == 7).unwrap_or(lun), medium);
            }
            (8, ..) => {
                let mut lun = self.lun.lock();
                lun.is_full = !lun.is_full;
            }
            (9, ..) => self.want(),
            (10, _, Some(node)) => self.stop_coordinating(node, Ending::Unmounts),
            (11, Some(node), _) => self.give_up(node),
            (12, Some(node), _) => {
                let wanted = self.rng.bool();
                let node = &mut self.nodes[node];
                if let (Some(owner), Some(reactor)) = (&mut node.owner, &mut node.reactor) {
                    owner.go_through_filesystem(reactor, wanted);
                    node.wake = Nanos(0);
                }
            }
            (13, Some(node), _) => match self.rng.u8(0..3) {
                0 => self.lun.lock().paths[self.nodes[node].path].is_fenced = true,
                _ => {
                    let fails = if self.rng.bool() { self.rng.u32(3..30) } else { 0 };
                    self.lun.lock().fails = fails;
                }
            },
            _ => {}
        }
    }

    fn flip_path(&mut self, node: usize) {
        let path = &mut self.lun.lock().paths[self.nodes[node].path];
        path.is_up = !path.is_up;
    }

    /// Somebody wants a clone, or a defragmenter moves a piece; or nobody waits for that any more.
    fn want(&mut self) {
        let coordinator = self.coordinator;
        if self.wanted.len() >= MOST_WANTED || self.rng.u8(0..4) == 0 {
            let Some(change) = self.wanted.pop_first() else { return };
            if let Some(node) = coordinator.map(|node| &mut self.nodes[node])
                && let (Some(served), Some(reactor)) = (&node.served, &mut node.reactor)
            {
                served.borrow_mut().forget_change(reactor, change);
                (node.touched, node.wake) = (true, Nanos(0));
            }
            return;
        }
        self.next += 1;
        let change = self.next;
        self.wanted.insert(change);
        let lun = self.lun.clone();
        if let Some(node) = coordinator.map(|node| &mut self.nodes[node])
            && let (Some(served), Some(reactor), None) = (&node.served, &mut node.reactor, node.stops)
        {
            served.borrow_mut().change(reactor, change, (0, SIZE), changing(&lun, change));
            (node.touched, node.wake) = (true, Nanos(0));
        }
    }

    /// The owner gives the disk up: another node owns it when nothing of this one is under way.
    fn give_up(&mut self, number: usize) {
        let node = &mut self.nodes[number];
        if node.leaving.is_some() {
            return;
        }
        let (Some(mut owner), Some(reactor)) = (node.owner.take(), &mut node.reactor) else { return };
        owner.abandon(reactor);
        self.counts.add_routes(owner.counts());
        (node.leaving, node.wake, self.owner) = (Some(owner), Nanos(0), None);
        self.log.note(|| format!("n{number} gives the disk up"));
    }

    /// A node's process ends, with I/O under way.
    pub fn kill(&mut self, number: usize, death: Death) {
        let node = &mut self.nodes[number];
        if !std::mem::replace(&mut node.alive, false) {
            return;
        }
        self.counts.killed += 1;
        self.log.note(|| format!("n{number} ends: {death:?}"));
        self.world.end(node.process, death);
        let (owner, served) = (node.owner.take(), node.served.take());
        (node.stops, node.reactor) = (None, None);
        let leaving = node.leaving.take();
        if let Some(owner) = &owner {
            self.counts.add_routes(owner.counts());
        }
        if owner.is_some() || leaving.is_some() {
            self.former_owner = Some(node.path);
            // Nobody hears of them any more.
            let lost = std::mem::take(&mut self.pending);
            let slots = lost.values().filter_map(|pending| pending.slot());
            self.free.extend(slots);
            self.failed.extend(lost);
        }
        if owner.is_some() {
            self.owner = None;
        }
        if served.is_some() {
            (self.coordinator, self.former_coordinator) = (None, Some(node.path));
            self.lun.lock().crash();
        }
    }

    /// Brings a part back that is missing.
    pub fn mend(&mut self) {
        if let Some(number) = (0..NODES).find(|node| !self.nodes[*node].alive)
            && self.rng.bool()
        {
            self.world.restore_power(self.nodes[number].process);
            self.nodes[number] = self.start(number);
            self.log.note(|| format!("n{number} starts"));
        }
        let alive: Vec<usize> =
            (0..NODES).filter(|node| self.nodes[*node].alive && self.nodes[*node].stops.is_none()).collect();
        let Some(number) = self.rng.choice(alive) else { return };
        if self.coordinator.is_none() {
            if let Some(path) = self.former_coordinator.take() {
                self.lun.lock().paths[path].is_fenced = true;
            }
            self.coordinate(number);
        } else if self.owner.is_none() && self.nodes.iter().all(|node| node.leaving.is_none()) {
            if let Some(path) = self.former_owner.take()
                && !self.planted.has(Bug::FreeWithoutQuarantine)
            {
                self.lun.lock().paths[path].is_fenced = true;
            }
            self.own(number);
        }
    }

    /// From now on everything works.
    pub fn end_faults(&mut self) {
        self.calm_since = Some(self.world.now());
        self.faults_at = Nanos::NEVER;
        self.log.note(|| "no more faults".into());
        self.world.unblock();
        self.reset_media();
        let mut lun = self.lun.lock();
        (lun.is_full, lun.fails) = (false, 0);
        for node in self.nodes.iter().filter(|node| node.alive) {
            lun.paths[node.path] = NodePath { is_up: true, is_fenced: false };
        }
    }
}
