//! Injects faults around whole nodes, within the limits of the [atlas](crate::atlas), and operators' requests.

use std::time::Duration;

use weir_block::Nanos;
use weir_block::sim::{Death, MediumFaults, Wires};
use weir_cluster::records::{DiskRecord, Mode, NodeRef};

use super::machine::Order;
use super::{Cluster, Task, Who, policy};
use crate::atlas::{FAULTS, Fault};
use crate::scale::{CALM, LONGEST_OPERATION, NODES, POLICIES, backing_fault};

/// Spontaneous faults, weighted by their number of entries.
const SPONTANEOUS: [Fault; 26] = [
    Fault::Crash,
    Fault::Crash,
    Fault::Crash,
    Fault::Crash,
    Fault::Pause,
    Fault::Pause,
    Fault::Pause,
    Fault::ConnectionCut,
    Fault::ConnectionCut,
    Fault::ConnectionCut,
    Fault::PartitionOneWay,
    Fault::PartitionOneWay,
    Fault::PartitionFull,
    Fault::CorruptRecord,
    Fault::RegistryAway,
    Fault::RegistryUnreachable,
    Fault::RegistryUnreachable,
    Fault::RegistryUnreachable,
    Fault::PolicyChange,
    Fault::PolicyChange,
    Fault::Move,
    Fault::Move,
    Fault::BackingError,
    Fault::BackingFull,
    Fault::BackingSlow,
    Fault::BackingPowerCut,
];

/// Longest pause of a shard at a read of its clock: with the longest operation after it, less than the fence grace by the fastest
/// clock (beyond that only fencing of the storage protects).
const LONGEST_STALL: Duration = Duration::from_millis(400);

/// A control plane submits nothing to the storage: its thread may pause for longer than any lease.
const LONGEST_PLANE_STALL: Duration = Duration::from_millis(2_500);

impl Cluster {
    /// The behaviour of media without faults.
    pub fn reset_media(&mut self) {
        let medium = MediumFaults {
            late: self.rng.u32(10..100),
            longest: LONGEST_OPERATION,
            partial: [0, 3][self.rng.usize(..2)],
            ..MediumFaults::default()
        };
        self.world.set_medium(self.medium, medium);
    }

    /// Injects a fault of this kind once in `odds` calls, if this run has it.
    pub fn should_inject(&mut self, fault: Fault, odds: u32) -> bool {
        let should_inject = self.world.now() < CALM && self.swarm.has(fault) && self.rng.u32(..odds) == 0;
        if should_inject {
            self.count(fault);
        }
        should_inject
    }

    fn count(&mut self, fault: Fault) {
        self.counts.faults[fault as usize] += 1;
        self.note(|| format!("fault: {}", FAULTS[fault as usize].name));
    }

    pub fn fault(&mut self) {
        if self.world.now() >= CALM {
            return self.end_all_faults();
        }
        self.after(10_000, 400_000, Task::Fault);
        self.end_expired_faults();
        let kinds: Vec<Fault> = SPONTANEOUS.iter().copied().filter(|fault| self.swarm.has(*fault)).collect();
        if kinds.is_empty() {
            return;
        }
        let fault = kinds[self.rng.usize(..kinds.len())];
        let owner = self.registry.disk.owner.as_ref().and_then(|owner| self.living(owner));
        let node = match (owner, self.rng.u8(..3)) {
            (Some(owner), 0 | 1) => owner,
            _ => self.rng.usize(..NODES),
        };
        if self.inject(fault, node) {
            self.count(fault);
        }
    }

    /// Returns whether it was injected.
    fn inject(&mut self, fault: Fault, node: usize) -> bool {
        let medium = self.world.medium(self.medium);
        match fault {
            Fault::Crash => return self.crash(node),
            Fault::Pause => return self.pause(node),
            Fault::ConnectionCut => {
                let other = (node + self.rng.usize(1..=NODES)) % (NODES + 1);
                return self.world.cut(node, other) > 0;
            }
            Fault::PartitionOneWay => {
                let until = self.in_a_while(50, 3_000);
                self.world.block(node, (node + self.rng.usize(1..NODES)) % NODES, until);
            }
            Fault::PartitionFull => {
                let until = self.in_a_while(50, 3_000);
                for other in (0..NODES).filter(|other| *other != node) {
                    self.world.block(node, other, until);
                    self.world.block(other, node, until);
                }
            }
            Fault::CorruptRecord => {
                // Only batches are so long.
                self.world.set_wires(Wires { flip_bit: Some(600), ..self.world.wires() });
            }
            Fault::RegistryAway => {
                self.registry.up = false;
                self.registry.stands = self.rng.bool();
                self.after(50_000, 2_500_000, Task::RegistryUp);
            }
            Fault::RegistryUnreachable => {
                let machine = &mut self.nodes[node];
                // In one direction or in both.
                match self.rng.u8(..3) {
                    0 => machine.reaches = false,
                    1 => machine.hears = false,
                    _ => (machine.reaches, machine.hears) = (false, false),
                }
                self.after(100_000, 3_000_000, Task::Reach { node });
            }
            Fault::PolicyChange => {
                let wanted = POLICIES[self.rng.usize(..POLICIES.len())];
                // The node forwards the request to the owner, which may be a former one by now.
                return self.order(node, Order::SetPolicy(policy(wanted)));
            }
            Fault::Move => {
                let to = self.rng.usize(..NODES);
                return self.order(node, Order::Move(to));
            }
            Fault::BackingPowerCut if !self.durable_writes => return false,
            _ => {
                let Some((medium, most)) = backing_fault(fault, medium) else { return false };
                if fault == Fault::BackingPowerCut {
                    self.cut_backing_power();
                }
                self.bad_backing(medium, most);
            }
        }
        true
    }

    pub fn order(&mut self, node: usize, order: Order) -> bool {
        let taken = self.nodes[node].orders.as_ref().is_some_and(|orders| orders.send(order.clone()).is_ok());
        if taken {
            self.nodes[node].shared.lock().orders += 1;
            self.note(|| format!("n{node} gets the request {order:?}"));
        }
        taken
    }

    /// Exports a disk without an owner on some node.
    pub fn operator_acts(&mut self) {
        self.after(200_000, 600_000, Task::Operator);
        if self.world.now() >= CALM {
            self.calm_states();
        }
        if self.registry.disk.owner.is_none() {
            let node = self.rng.usize(..NODES);
            self.order(node, Order::Export);
        }
    }

    fn bad_backing(&mut self, medium: MediumFaults, most: u64) {
        self.world.set_medium(self.medium, medium);
        self.backing_until = self.in_a_while(10, most);
    }

    /// Ends faults whose time is over.
    fn end_expired_faults(&mut self) {
        if self.world.now() >= self.backing_until {
            self.reset_media();
        }
        for node in 0..NODES {
            let stalls = self.swarm.has(Fault::Pause) && self.rng.u8(..3) == 0;
            let odds = if stalls { 2_000 } else { 0 };
            self.nodes[node].stalls = (odds, LONGEST_STALL, LONGEST_PLANE_STALL);
        }
    }

    fn in_a_while(&mut self, least: u64, most: u64) -> Nanos {
        self.world.now() + Duration::from_millis(self.rng.u64(least..=most))
    }

    /// A crash finds most bugs right after a decision: once in `odds` calls, `node` crashes within `within` microseconds.
    pub fn crash_soon(&mut self, node: usize, odds: u32, within: u64) {
        if self.world.now() < CALM && self.swarm.has(Fault::Crash) && self.rng.u32(..odds) == 0 {
            self.after(0, within, Task::Crash { node });
        }
    }

    pub fn crash_now(&mut self, node: usize) {
        if self.world.now() < CALM && self.crash(node) {
            self.count(Fault::Crash);
        }
    }

    /// Whether all acknowledged data survives without this process: each set that is committed, or may be, keeps a holder, or
    /// does not need it.
    fn may_crash(&self, number: usize) -> bool {
        let who = self.nodes[number].who();
        let is_it = |node: &NodeRef| self.living(node) == Some(number);
        let survives = |record: &DiskRecord| {
            let mut holders = record.owner.iter().chain(&record.replicas);
            record.mode == Mode::WriteThrough
                || holders.clone().any(|holder| self.living(holder).is_some_and(|node| node != number))
                || !holders.any(is_it)
        };
        let proposed = self.registry.proposed.values();
        survives(&self.registry.disk)
            && proposed.clone().all(|(_, record)| survives(record))
            // A process that has requested the disk may get it, even if dead.
            && !proposed.into_iter().any(|(by, record)| *by == who && self.registry.disk.owner != record.owner)
    }

    fn crash(&mut self, node: usize) -> bool {
        let machine = &self.nodes[node];
        if !machine.alive || !self.may_crash(node) {
            return false;
        }
        // Its actions during the current pause are done by then.
        let stands = machine.clock.busy_until();
        if stands > self.world.now() {
            self.at(stands, Task::Crash { node });
            return false;
        }
        let death = if self.rng.u8(..4) == 0 { Death::PowerCut } else { Death::Killed };
        self.note(|| format!("n{node} ends: {death:?}"));
        self.end_and_restart(node, death, 2_500_000);
        true
    }

    /// Ends a process; another one starts within `within` microseconds.
    pub fn end_and_restart(&mut self, node: usize, death: Death, within: u64) {
        let who: Who = self.nodes[node].who();
        self.end(node, death);
        if death == Death::Killed {
            self.after(100, 30_000, Task::EndSeen(who));
        }
        self.after(50_000, within, Task::Restart { node });
    }

    pub fn restart(&mut self, node: usize) {
        if self.nodes[node].alive {
            return;
        }
        self.world.restore_power(self.nodes[node].process);
        let next = self.start(node, self.nodes[node].incarnation + 1);
        self.nodes[node] = next;
        self.note(|| format!("n{node} restarts"));
    }

    /// Pauses a process; it continues later.
    fn pause(&mut self, node: usize) -> bool {
        if !self.nodes[node].alive || self.nodes[node].paused {
            return false;
        }
        self.nodes[node].paused = true;
        let resumed = self.in_a_while(10, 4_000);
        self.at(resumed, Task::Resume { node });
        self.note(|| format!("n{node} pauses until {:.3}", resumed.0 as f64 / 1e9));
        true
    }

    pub fn resume(&mut self, node: usize) {
        if std::mem::replace(&mut self.nodes[node].paused, false) {
            self.note(|| format!("n{node} continues"));
        }
    }

    pub fn reach(&mut self, node: usize) {
        let machine = &mut self.nodes[node];
        if !(machine.reaches && machine.hears) {
            (machine.reaches, machine.hears) = (true, true);
            self.notify_all(Some(node));
        }
    }

    fn end_all_faults(&mut self) {
        self.note(|| "no more faults".into());
        self.registry_up();
        self.world.unblock();
        self.world.set_wires(Wires { late: 0, flip_bit: None, ..self.world.wires() });
        self.reset_media();
        for node in 0..NODES {
            self.reach(node);
            self.resume(node);
            self.restart(node);
            self.nodes[node].stalls = (0, Duration::ZERO, Duration::ZERO);
        }
    }
}
