//! What goes wrong, and how it ends. Only faults that the promises cover: at any time one copy that the registry names
//! stays alive, and `write-back+0` has its owner back.

use crate::world::{CALM, Control, NODES, Process, Task, World};

impl World {
    pub fn fault(&mut self) {
        if self.now >= CALM {
            return self.calm_down();
        }
        self.after(10_000, 500_000, Task::Fault);
        let node = match (self.registry.record.owner, self.rng.u8(..3)) {
            // Most of it happens to the owner.
            (Some(owner), 0) => owner.node,
            _ => self.rng.usize(..NODES),
        };
        match self.rng.u8(..16) {
            0..3 => self.crash(node),
            3..5 => self.pause(node),
            5..8 => self.cut_some(),
            8..10 => self.stall_some(),
            10 => self.registry_goes(),
            11..13 => self.partition(node),
            13..15 => self.change_policy(),
            _ => {
                self.note(|| "the storage loses power".into());
                let mut rng = self.rng.fork();
                self.backing.lose_power(&mut rng);
                self.touched = true;
            }
        }
    }

    /// Whether all that was acknowledged survives the end of this node's process.
    fn may_crash(&self, node: usize) -> bool {
        let record = &self.registry.record;
        let process = self.process(node);
        let survives = |replicas: &[Process]| {
            let mut holders = record.owner.iter().chain(replicas);
            let others = holders.clone().any(|holder| *holder != process && self.is_alive(*holder));
            others || !holders.any(|holder| *holder == process)
        };
        // A change that is on its way to the registry may come into force after its sender's end.
        let mut pending = self.pending.iter().filter(|pending| pending.0 == record.epoch);
        (!record.write_back || survives(&record.replicas)) && pending.all(|(_, replicas)| survives(replicas))
    }

    fn crash(&mut self, node: usize) {
        if !self.nodes[node].alive || !self.may_crash(node) {
            return;
        }
        self.note(|| format!("n{node} crashes"));
        self.counts.crashes += 1;
        let process = self.process(node);
        let silently = self.rng.u8(..4) == 0;
        if !silently {
            self.cut_all(|connection| connection.owner == process || connection.replica == process);
        }
        let node_ = &mut self.nodes[node];
        (node_.alive, node_.paused) = (false, false);
        (node_.owner, node_.replica) = (None, None);
        node_.control.clear();
        node_.held.clear();
        self.after(50_000, 2_500_000, Task::Restart { node });
    }

    pub fn restart(&mut self, node: usize) {
        let process = self.process(node);
        self.cut_all(|connection| connection.owner == process || connection.replica == process);
        let node_ = &mut self.nodes[node];
        if node_.alive {
            return;
        }
        (node_.alive, node_.incarnation) = (true, node_.incarnation + 1);
        (node_.connected, node_.owner_gone, node_.forgotten_below) = ([None; NODES], None, 0);
        (node_.reaches, node_.lease) = (true, weir_block::Nanos(0));
        self.note(|| format!("n{node} starts again"));
        let process = self.process(node);
        self.after(0, 50_000, Task::Reconcile { process });
    }

    /// A process stands still and goes on later as if nothing had happened.
    fn pause(&mut self, node: usize) {
        if self.nodes[node].alive && !self.nodes[node].paused {
            self.note(|| format!("n{node} stands still"));
            self.nodes[node].paused = true;
            self.after(10_000, 4_000_000, Task::Resume { node });
        }
    }

    pub fn resume(&mut self, node: usize) {
        if !std::mem::replace(&mut self.nodes[node].paused, false) {
            return;
        }
        self.note(|| format!("n{node} goes on"));
        // Threads go on in any order: the shard may well be before the control plane.
        for task in std::mem::take(&mut self.nodes[node].held) {
            self.after(0, 2_000, task);
        }
    }

    fn cut_some(&mut self) {
        let open: Vec<usize> = self.open_connections();
        if let Some(&connection) = open.get(self.rng.usize(..open.len().max(1))) {
            self.note(|| format!("connection {connection} breaks"));
            self.counts.cuts += 1;
            self.cut(connection);
        }
    }

    fn stall_some(&mut self) {
        let until = self.now + std::time::Duration::from_micros(self.rng.u64(10_000..900_000));
        let open: Vec<usize> = self.open_connections();
        if let Some(&connection) = open.get(self.rng.usize(..open.len().max(1))) {
            self.note(|| format!("connection {connection} stalls"));
            self.connections[connection].stalled = until;
        }
    }

    fn open_connections(&self) -> Vec<usize> {
        (0..self.connections.len()).filter(|number| self.connections[*number].open).collect()
    }

    fn registry_goes(&mut self) {
        self.note(|| "the registry is away".into());
        self.registry.up = false;
        self.after(50_000, 1_500_000, Task::RegistryUp);
    }

    /// The node does not reach the registry; its peers it does.
    fn partition(&mut self, node: usize) {
        self.note(|| format!("n{node} does not reach the registry"));
        self.nodes[node].reaches = false;
        self.after(100_000, 3_000_000, Task::Reach { node });
    }

    fn change_policy(&mut self) {
        let wanted = [None, Some(0), Some(1), Some(1), Some(2), Some(2)][self.rng.usize(..6)];
        if let Some(owner) = self.registry.record.owner.filter(|owner| self.is_alive(*owner)) {
            self.ask_control(owner, Control::SetPolicy(wanted));
        }
    }

    fn calm_down(&mut self) {
        self.note(|| "no more faults".into());
        self.registry.up = true;
        for node in 0..NODES {
            self.nodes[node].reaches = true;
            self.resume(node);
            self.restart(node);
        }
    }
}
