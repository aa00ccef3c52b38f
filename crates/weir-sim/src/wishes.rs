//! What an owner asks of its control plane: somebody to replicate to, another configuration, another policy.

use weir_accel::owner::Event;
use weir_cluster::placement::choose_replicas;

use crate::atlas::Fault;
use crate::registry::process_of;
use crate::world::{Control, NODES, PEER_DEADLINE, Process, Task, World, name, node_of};

impl World {
    /// The next thing that the control plane was asked for.
    pub fn control(&mut self, process: Process) {
        let Some(control) = self.nodes[process.node].control.pop_front() else { return };
        match control {
            Control::WantPeer { serial, node, connected, exclude } => {
                self.want_peer(process, serial, node, &connected, &exclude);
            }
            Control::Propose { serial, epoch, replicas, write_back } => {
                self.propose(process, serial, epoch, &replicas, write_back);
            }
            Control::Move { serial, to, until } => self.go_on_moving(process, serial, to, until),
            Control::SetPolicy(wanted) => {
                let reaches = self.registry.up && self.nodes[process.node].reaches;
                if reaches && self.owner(process).is_some() {
                    let set = self.registry.set_policy(process, wanted);
                    self.note(|| format!("policy {wanted:?}: {set:?}"));
                }
            }
        }
    }

    fn want_peer(
        &mut self,
        process: Process,
        serial: u64,
        node: Option<String>,
        connected: &[String],
        exclude: &[String],
    ) {
        let now = self.now;
        // What this node knows of the registry may be old. It must then be as old as what its owner knows: a newer record
        // would not tell that a replica of the owner's set has started again and lost its copy.
        let record = &self.nodes[process.node].view;
        let peer = match node.map(|node| node_of(&node)) {
            Some(node) => {
                let live = self.registry.live(node, now);
                let holder = record.replicas.iter().find(|replica| replica.node == node);
                live.filter(|live| holder.is_none_or(|holder| self.registry.counts(*holder, *live)))
            }
            // Where the place matters, the real choice is made.
            None if self.registry.racks.is_some() => {
                let (disk, live) = (self.registry.disk(), self.registry.live_nodes(now));
                let chosen = choose_replicas(disk, &name(process.node), connected, exclude, &live);
                chosen.first().map(process_of)
            }
            None => {
                let free = (0..NODES).filter(|node| {
                    *node != process.node && !exclude.iter().any(|known| node_of(known) == *node)
                });
                let live: Vec<Process> = free.filter_map(|node| self.registry.live(node, now)).collect();
                (!live.is_empty()).then(|| live[self.rng.usize(..live.len())])
            }
        };
        let owns = record.owner == Some(process);
        let peer = peer.filter(|peer| owns && self.is_alive(*peer));
        let reaches = |peer: &Process| {
            self.blocked(process.node, peer.node).is_none() && self.blocked(peer.node, process.node).is_none()
        };
        let fails = !peer.as_ref().is_none_or(reaches) || self.strikes(Fault::ConnectFailure, 10);
        let delay = if fails { PEER_DEADLINE } else { self.mostly(1_000, 200_000) };
        let peer = peer.filter(|_| !fails);
        self.at(self.now + delay, Task::Connected { process, serial, peer });
    }

    fn propose(&mut self, process: Process, serial: u64, epoch: u64, replicas: &[String], write_back: bool) {
        let record = &self.registry.record;
        let connected = &self.nodes[process.node].connected;
        let whom = |name: &String| {
            let node = node_of(name);
            connected[node].or_else(|| record.replicas.iter().find(|known| known.node == node).copied())
        };
        let Some(replicas) = replicas.iter().map(whom).collect::<Option<Vec<Process>>>() else {
            return self.tell(process, serial, Event::NotConfigured);
        };
        let reaches = self.registry.up && self.nodes[process.node].reaches;
        if !reaches || self.strikes(Fault::LostAnswer, 6) {
            // The answer is lost. What was asked for is committed before, afterwards, twice, or never.
            let late = Task::LateCommit { process, epoch, replicas: replicas.clone(), write_back };
            match self.rng.u8(..3) {
                0 if reaches => self.commit(process, epoch, replicas, write_back),
                0 | 1 => {
                    if write_back {
                        self.pending.push((epoch, replicas));
                    }
                    self.after(1_000, 800_000, late.clone());
                    self.after(1_000, 800_000, late);
                }
                _ => {}
            }
            return self.tell(process, serial, Event::NotConfigured);
        }
        self.commit(process, epoch, replicas, write_back);
        if self.strikes(Fault::LeaseLoss, 12) {
            self.lose_registry(process.node);
            return self.tell(process, serial, Event::NotConfigured);
        }
        let record = self.registry.record.clone();
        self.nodes[process.node].view = record.clone();
        let answer = if record.owner == Some(process) && record.epoch == epoch + 1 {
            if let Some(owner) = self.owner(process) {
                owner.told_epoch = record.epoch;
            }
            Event::Configured(record.configuration())
        } else {
            Event::NotConfigured
        };
        self.tell(process, serial, answer);
    }

    pub fn late_commit(&mut self, process: Process, epoch: u64, replicas: Vec<Process>, write_back: bool) {
        self.pending.retain(|pending| pending.0 != epoch || pending.1 != replicas);
        self.commit(process, epoch, replicas, write_back);
    }

    fn commit(&mut self, process: Process, epoch: u64, replicas: Vec<Process>, write_back: bool) {
        self.touched = true;
        let changed = self.registry.change_replicas(process, epoch, &replicas, write_back);
        self.note(|| {
            format!("registry, from epoch {epoch}: {replicas:?}, write-back {write_back}: {changed:?}")
        });
        if changed.is_ok() {
            self.crash_soon(process.node, 16, 5_000);
        }
    }
}
