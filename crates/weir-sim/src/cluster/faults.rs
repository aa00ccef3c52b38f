//! Injects faults around the production code, within the limits of the [atlas](crate::atlas).

use std::time::Duration;

use weir_block::Nanos;
use weir_block::sim::{Death, MediumFaults, Wires};

use super::{Cluster, Task};
use crate::atlas::{FAULTS, Fault};
use crate::scale::{CALM, LONGEST_OPERATION, NODES, PEER_DEADLINE, POLICIES, Process, backing_fault};

/// Spontaneous faults, weighted by their number of entries.
const SPONTANEOUS: [Fault; 38] = [
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
    Fault::ConnectionStall,
    Fault::ConnectionStall,
    Fault::PartitionOneWay,
    Fault::PartitionOneWay,
    Fault::PartitionFull,
    Fault::CorruptRecord,
    Fault::RegistryAway,
    Fault::RegistrySlow,
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
    // On flash.
    Fault::CleanRestart,
    Fault::CleanRestart,
    Fault::PowerCut,
    Fault::PowerCut,
    Fault::FlashBitError,
    Fault::FlashLostWrite,
    Fault::FlashMisdirected,
    Fault::FlashFailure,
    Fault::FlashFailure,
];

/// The kinds of fault in a run. Half of the runs have all; the others omit some, because faults hide each other (swarm testing;
/// Groce et al. 2012).
#[derive(Clone, Copy, Debug)]
pub struct Swarm(u32);

impl Swarm {
    pub fn choose(rng: &mut fastrand::Rng) -> Swarm {
        Swarm(if rng.bool() { u32::MAX } else { rng.u32(..) })
    }

    /// None of these.
    pub fn without(self, faults: &[Fault]) -> Swarm {
        Swarm(faults.iter().fold(self.0, |kinds, fault| kinds & !(1 << *fault as u32)))
    }

    pub fn has(self, fault: Fault) -> bool {
        self.0 & (1 << fault as u32) != 0
    }
}

/// Two spontaneous kinds.
pub fn favourites(rng: &mut fastrand::Rng) -> [Fault; 2] {
    std::array::from_fn(|_| SPONTANEOUS[rng.usize(..SPONTANEOUS.len())])
}

/// Longest pause of a shard at a read of its clock: with the longest operation after it, less than the fence grace by the fastest
/// clock (beyond that only fencing of the storage protects).
const LONGEST_STALL: Duration = Duration::from_millis(400);

impl Cluster {
    /// The behaviour of media and clocks without faults.
    pub fn reset_media(&mut self) {
        let medium = MediumFaults {
            late: if self.slow_medium { 2 } else { self.rng.u32(10..100) },
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

    pub fn count(&mut self, fault: Fault) {
        self.counts.faults[fault as usize] += 1;
        self.note(|| format!("fault: {}", FAULTS[fault as usize].name));
    }

    pub fn fault(&mut self) {
        if self.world.now() >= CALM {
            return self.end_all_faults();
        }
        self.after(10_000, 400_000, Task::Fault);
        self.end_expired_faults();
        let on_flash = !self.flash.is_empty();
        let may = |fault: &Fault| on_flash || (*fault as usize) < Fault::CleanRestart as usize;
        let kinds: Vec<Fault> =
            SPONTANEOUS.iter().copied().filter(|fault| self.swarm.has(*fault) && may(fault)).collect();
        if kinds.is_empty() {
            return;
        }
        let mut fault = kinds[self.rng.usize(..kinds.len())];
        if let Some(favourites) = self.favourites.filter(|_| self.rng.bool()) {
            let favourite = favourites[self.rng.usize(..favourites.len())];
            fault = if kinds.contains(&favourite) { favourite } else { fault };
        }
        let owner = self.registry.record.owner.filter(|owner| self.is_alive(*owner));
        let node = match (owner, self.rng.u8(..3)) {
            (Some(owner), 0 | 1) => owner.node,
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
                let other = (node + self.rng.usize(1..NODES)) % NODES;
                return self.world.cut(node, other) > 0;
            }
            Fault::ConnectionStall => {
                let until = self.in_a_while(10, 3 * PEER_DEADLINE.as_millis() as u64);
                let other = (node + self.rng.usize(1..NODES)) % NODES;
                self.world.block(node, other, until);
                self.world.block(other, node, until);
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
                self.after(50_000, 2_500_000, Task::RegistryUp);
            }
            Fault::RegistrySlow => self.registry_slow = self.in_a_while(100, 2_000),
            Fault::RegistryUnreachable => self.lose_registry(node),
            Fault::Move => return self.request_move(),
            Fault::PolicyChange => {
                let wanted = POLICIES[self.rng.usize(..POLICIES.len())];
                let Some(owner) = self.registry.record.owner else { return false };
                let set = self.registry.set_policy(owner, wanted);
                self.note(|| format!("policy {wanted:?}: {set:?}"));
                self.record_changed();
            }
            Fault::CleanRestart => return self.restart_cleanly(node),
            Fault::PowerCut => return self.cut_all_power(),
            Fault::FlashBitError | Fault::FlashLostWrite | Fault::FlashMisdirected => {
                return self.damage_flash(node, fault);
            }
            Fault::FlashFailure => return self.fail_flash(node),
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

    /// The node cannot reach the registry, but its peers.
    pub fn lose_registry(&mut self, node: usize) {
        self.nodes[node].reaches = false;
        self.after(100_000, 3_000_000, Task::Reach { node });
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
            self.nodes[node].clock.stall(if stalls { 2_000 } else { 0 }, LONGEST_STALL);
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

    /// Whether each set that is committed, or may be, keeps a holder without `process`, or does not need it.
    pub fn holders_survive(&self, process: Process, is_left: impl Fn(Process) -> bool) -> bool {
        let record = &self.registry.record;
        let survives = |replicas: &[Process]| {
            let mut holders = record.owner.iter().chain(replicas);
            let named = |holder: &Process| *holder == process || self.registry.counts(*holder, process);
            let left = holders.clone().any(|holder| is_left(*holder));
            left || (process.node < NODES && !holders.any(named))
        };
        (!record.write_back || survives(&record.replicas))
            && self.pending.iter().all(|(_, set)| survives(set))
    }

    /// Whether all acknowledged data survives the loss of this node's copy (durably, with logs on flash).
    pub fn may_lose(&self, node: usize) -> bool {
        let process = self.process(node);
        !self.taking_over.contains(&process)
            && self.holders_survive(process, |holder| holder.node != node && self.keeps_copy(holder))
    }

    /// Whether this node's copy comes back with the node, or is not needed.
    fn may_crash(&self, node: usize) -> bool {
        let at_rest = !self.flash.is_empty() && self.keeps_copy(self.process(node));
        at_rest || self.may_lose(node)
    }

    fn crash(&mut self, node: usize) -> bool {
        if !self.nodes[node].alive || !self.may_crash(node) {
            return false;
        }
        let death = if self.rng.u8(..4) == 0 { Death::PowerCut } else { Death::Killed };
        self.note(|| format!("n{node} ends: {death:?}"));
        let loses =
            !self.flash.is_empty() && self.may_lose(node) && self.should_inject(Fault::FlashReplaced, 6);
        self.end(node, death);
        if loses {
            self.renew_flash(node);
        }
        self.after(50_000, 2_500_000, Task::Restart { node });
        true
    }

    /// Asks a process to end; the node starts another one at once.
    fn restart_cleanly(&mut self, node: usize) -> bool {
        let possible = self.nodes[node].alive && !self.nodes[node].paused && self.may_crash(node);
        if possible {
            self.note(|| format!("n{node} is asked to end"));
            self.end(node, Death::Killed);
            self.after(1_000, 50_000, Task::Restart { node });
        }
        possible
    }

    pub fn restart(&mut self, node: usize) {
        if self.nodes[node].alive {
            return;
        }
        if !self.ready_flash(node) {
            return self.after(1_000, 20_000, Task::Restart { node });
        }
        self.world.restore_power(self.nodes[node].process);
        let next = self.start(node, self.nodes[node].incarnation + 1);
        self.nodes[node] = next;
        self.note(|| format!("n{node} restarts"));
        self.begin_control(node);
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
        if !std::mem::replace(&mut self.nodes[node].paused, false) {
            return;
        }
        self.note(|| format!("n{node} continues"));
        // Threads continue in any order: the shard may run before the control plane.
        for task in std::mem::take(&mut self.nodes[node].held) {
            let now = self.world.now();
            let delay = Duration::from_micros(self.rng.u64(0..=2_000));
            match task {
                // Earlier messages are in a queue, before all later ones.
                Task::ShardMessage { .. } => self.at(now, task),
                task => self.at(now + delay, task),
            }
        }
    }

    fn end_all_faults(&mut self) {
        self.note(|| "no more faults".into());
        self.registry.up = true;
        self.registry_slow = Nanos(0);
        self.world.unblock();
        self.world.set_wires(Wires { late: 0, flip_bit: None, ..self.world.wires() });
        self.reset_media();
        self.world.set_medium(self.medium, MediumFaults { late: 0, ..self.world.medium(self.medium) });
        for node in 0..NODES {
            self.nodes[node].reaches = true;
            self.resume(node);
            self.restart(node);
            self.nodes[node].clock.stall(0, Duration::ZERO);
            self.replace_failed_flash(node);
        }
    }
}
