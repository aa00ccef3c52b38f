//! What goes wrong, and how it ends, within the limits of the [atlas](crate::atlas).

use std::time::Duration;

use weir_accel::Layout;
use weir_block::Nanos;

use crate::atlas::{FAULTS, Fault};
use crate::flash::Device;
use crate::registry::Record;
use crate::world::{
    CALM, Control, FENCE_GRACE, LONGEST_OPERATION, NODES, PEER_DEADLINE, POLICIES, Process, Task, World,
};

/// Faults that happen by themselves, as often as they are named; the others happen when their occasion comes.
const BY_THEMSELVES: [Fault; 36] = [
    Fault::Crash,
    Fault::Crash,
    Fault::Crash,
    Fault::Crash,
    Fault::Pause,
    Fault::Pause,
    Fault::Pause,
    Fault::ClockDrift,
    Fault::ConnectionCut,
    Fault::ConnectionCut,
    Fault::ConnectionCut,
    Fault::ConnectionStall,
    Fault::ConnectionStall,
    Fault::PartitionOneWay,
    Fault::PartitionFull,
    Fault::CorruptRecord,
    Fault::RegistryAway,
    Fault::RegistrySlow,
    Fault::RegistryUnreachable,
    Fault::RegistryUnreachable,
    Fault::PolicyChange,
    Fault::PolicyChange,
    Fault::Move,
    Fault::Move,
    Fault::BackingError,
    Fault::BackingFull,
    Fault::BackingSlow,
    Fault::BackingPowerLoss,
    // On flash.
    Fault::CleanRestart,
    Fault::PowerLoss,
    Fault::PowerLoss,
    Fault::FlashRot,
    Fault::FlashLostWrite,
    Fault::FlashMisdirected,
    Fault::FlashFailure,
    Fault::FlashFailure,
];

/// Which kinds a run has. Half of the runs have all of them; the others leave some out, because faults hide each other
/// (swarm testing; Groce et al. 2012).
#[derive(Clone, Copy, Debug)]
pub struct Swarm(u32);

impl Swarm {
    pub fn choose(rng: &mut fastrand::Rng) -> Swarm {
        Swarm(if rng.bool() { u32::MAX } else { rng.u32(..) })
    }

    pub fn has(self, fault: Fault) -> bool {
        self.0 & (1 << fault as u32) != 0
    }
}

/// What lasts for a while.
#[derive(Default)]
pub struct Weather {
    /// Until when one node's messages to another do not arrive.
    pub blocked: [[Nanos; NODES]; NODES],
    pub registry_slow: Nanos,
    pub backing_failing: Nanos,
    pub backing_full: Nanos,
    pub backing_slow: Nanos,
    /// The next record that is sent is spoiled.
    pub corrupting: bool,
}

impl World {
    /// A fault of this kind happens, once in `odds`, if this run has it.
    pub fn strikes(&mut self, fault: Fault, odds: u32) -> bool {
        let strikes = self.now < CALM && self.swarm.has(fault) && self.rng.u32(..odds) == 0;
        if strikes {
            self.count(fault);
        }
        strikes
    }

    pub fn count(&mut self, fault: Fault) {
        self.counts.faults[fault as usize] += 1;
        self.note(|| format!("fault: {}", FAULTS[fault as usize].name));
    }

    pub fn fault(&mut self) {
        if self.now >= CALM {
            return self.calm_down();
        }
        self.after(10_000, 400_000, Task::Fault);
        let on_flash = self.layout() == Layout::Flash;
        let kinds = BY_THEMSELVES.iter().filter(|fault| {
            self.swarm.has(**fault) && (on_flash || (**fault as usize) < Fault::CleanRestart as usize)
        });
        let place = self.rng.usize(..kinds.clone().count().max(1));
        let Some(&fault) = kinds.clone().nth(place) else { return };
        let node = match (self.owner_process(), self.rng.u8(..3)) {
            // Most of it happens to the owner.
            (Some(owner), 0) => owner.node,
            _ => self.rng.usize(..NODES),
        };
        if self.happens(fault, node) {
            self.count(fault);
        }
    }

    /// Whether there was an occasion for it.
    fn happens(&mut self, fault: Fault, node: usize) -> bool {
        match fault {
            Fault::Crash => return self.crash(node),
            Fault::Pause => return self.pause(node),
            Fault::ClockDrift => self.nodes[node].drift = self.rng.i64(-40..=40),
            Fault::ConnectionCut => return self.cut_some(),
            Fault::ConnectionStall => return self.stall_some(),
            Fault::PartitionOneWay => {
                let to = (node + self.rng.usize(1..NODES)) % NODES;
                self.weather.blocked[node][to] = self.in_a_while(50, 3_000);
            }
            Fault::PartitionFull => {
                let until = self.in_a_while(50, 3_000);
                for other in (0..NODES).filter(|other| *other != node) {
                    self.weather.blocked[node][other] = until;
                    self.weather.blocked[other][node] = until;
                }
            }
            Fault::CorruptRecord => self.weather.corrupting = true,
            Fault::RegistryAway => {
                self.registry.up = false;
                self.after(50_000, 1_500_000, Task::RegistryUp);
            }
            Fault::RegistrySlow => self.weather.registry_slow = self.in_a_while(100, 2_000),
            Fault::RegistryUnreachable => self.lose_registry(node),
            Fault::PolicyChange => return self.change_policy(),
            Fault::Move => return self.want_move(),
            Fault::BackingError => self.weather.backing_failing = self.in_a_while(10, 1_000),
            Fault::BackingFull => self.weather.backing_full = self.in_a_while(10, 2_000),
            Fault::BackingSlow => self.weather.backing_slow = self.in_a_while(10, 2_000),
            Fault::BackingPowerLoss => {
                let mut rng = self.rng.fork();
                self.backing.lose_power(&mut rng);
                self.touched = true;
            }
            Fault::CleanRestart => return self.restart_cleanly(node),
            Fault::PowerLoss => return self.lose_power(),
            Fault::FlashRot | Fault::FlashLostWrite | Fault::FlashMisdirected => {
                // When its next frame comes to rest.
                self.nodes[node].ill = Some(fault);
                return false;
            }
            Fault::FlashFailure => return self.fail_flash(node),
            // These happen on occasion.
            Fault::ConnectFailure
            | Fault::LostAnswer
            | Fault::LeaseLoss
            | Fault::DuplicateNotice
            | Fault::LateWrite
            | Fault::TornFrame
            | Fault::FlashLost => return false,
        }
        true
    }

    /// Between `least` and `most` milliseconds from now.
    fn in_a_while(&mut self, least: u64, most: u64) -> Nanos {
        self.now + Duration::from_millis(self.rng.u64(least..=most))
    }

    /// A crash is most telling right after a decision: once in `odds`, `node` crashes within so many microseconds.
    pub fn crash_soon(&mut self, node: usize, odds: u32, within: u64) {
        if self.now < CALM && self.swarm.has(Fault::Crash) && self.rng.u32(..odds) == 0 {
            self.after(0, within, Task::Crash { node });
        }
    }

    pub fn crash_now(&mut self, node: usize) {
        if self.now < CALM && self.crash(node) {
            self.count(Fault::Crash);
        }
    }

    /// Whether all that was acknowledged survives when this node's copy is lost: at rest, if it is on flash.
    pub fn may_lose(&self, node: usize) -> bool {
        let process = self.process(node);
        self.holders_survive(|holder| holder.node != node && self.keeps_copy(holder), process)
    }

    /// Whether of each set that is committed, or may be, somebody is left (or `process` is of no importance).
    fn holders_survive(&self, is_left: impl Fn(Process) -> bool, process: Process) -> bool {
        let record = &self.registry.record;
        let survives = |replicas: &[Process]| {
            let mut holders = record.owner.iter().chain(replicas);
            let left = holders.clone().any(|holder| is_left(*holder));
            left || !holders.any(|holder| self.stands_for(*holder, process))
        };
        // A change that is on its way to the registry may come into force after its sender's end.
        let mut pending = self.pending.iter().filter(|pending| pending.0 == record.epoch);
        (!record.write_back || survives(&record.replicas)) && pending.all(|(_, replicas)| survives(replicas))
    }

    /// Whether this node's copy is there again when the node is, or is not needed.
    fn may_crash(&self, node: usize) -> bool {
        let on_flash = self.nodes[node].flash.is_some();
        (on_flash && self.keeps_copy(self.process(node))) || self.may_lose(node)
    }

    fn crash(&mut self, node: usize) -> bool {
        if !self.nodes[node].alive || !self.may_crash(node) {
            return false;
        }
        self.note(|| format!("n{node} crashes"));
        let silently = self.rng.u8(..4) == 0;
        self.end(node, silently, false);
        let on_flash = self.nodes[node].flash.is_some();
        if on_flash && self.may_lose(node) && self.strikes(Fault::FlashLost, 6) {
            self.renew_flash(node);
        }
        self.after(50_000, 2_500_000, Task::Restart { node });
        true
    }

    /// The process ends.
    fn end(&mut self, node: usize, silently: bool, waits: bool) {
        let process = self.process(node);
        if !silently {
            self.cut_all(|connection| connection.owner == process || connection.replica == process);
        }
        let node_ = &mut self.nodes[node];
        (node_.alive, node_.paused) = (false, false);
        (node_.owner, node_.replica) = (None, None);
        node_.control.clear();
        node_.held.clear();
        if node_.flash.is_some() {
            self.end_frames(node, waits);
            self.touched = true;
        }
    }

    /// Another flash, or the same one formatted.
    fn renew_flash(&mut self, node: usize) {
        self.serial += 1;
        // Those of the start are lower.
        self.nodes[node].flash = Some(Device::new(self.serial + NODES as u64));
        self.note(|| format!("n{node} has another flash"));
    }

    /// A process is told to end, and the node starts another one at once.
    fn restart_cleanly(&mut self, node: usize) -> bool {
        let possible = self.nodes[node].alive && !self.nodes[node].paused && self.may_crash(node);
        if possible {
            self.note(|| format!("n{node} is told to end"));
            self.end(node, false, true);
            self.after(1_000, 50_000, Task::Restart { node });
        }
        possible
    }

    /// All nodes lose their power at once, and perhaps the storage too.
    fn lose_power(&mut self) -> bool {
        if !self.holders_survive(|holder| self.keeps_copy(holder), self.owner_or_nobody()) {
            return false;
        }
        self.note(|| "all nodes lose their power".into());
        for node in (0..NODES).filter(|node| self.nodes[*node].alive).collect::<Vec<_>>() {
            self.end(node, true, false);
            self.after(50_000, 1_500_000, Task::Restart { node });
        }
        if self.rng.bool() {
            let mut rng = self.rng.fork();
            self.backing.lose_power(&mut rng);
        }
        true
    }

    /// A process that stands for the whole set.
    fn owner_or_nobody(&self) -> Process {
        self.registry.record.owner.unwrap_or(Process { node: 0, incarnation: 0 })
    }

    /// The flash takes no write any more until the node starts again.
    fn fail_flash(&mut self, node: usize) -> bool {
        let possible = self.nodes[node].alive && self.may_lose(node);
        let Some(device) = self.nodes[node].flash.as_mut().filter(|device| possible && !device.failed) else {
            return false;
        };
        device.failed = true;
        true
    }

    /// After the last fault, a flash that has failed is replaced, once the node's copy is not the last one.
    pub fn mend(&mut self, node: usize) {
        if self.nodes[node].flash.as_ref().is_none_or(|device| !device.failed) {
            return;
        }
        if !self.may_lose(node) {
            return self.after(100_000, 200_000, Task::Mend { node });
        }
        self.end(node, false, false);
        self.renew_flash(node);
        self.after(1_000, 50_000, Task::Restart { node });
    }

    pub fn restart(&mut self, node: usize) {
        if self.nodes[node].alive {
            return;
        }
        let process = self.process(node);
        self.cut_all(|connection| connection.owner == process || connection.replica == process);
        let transient = self.nodes[node].flash.as_ref().is_some_and(|device| device.failed);
        if transient && self.may_lose(node) && self.rng.bool() {
            self.renew_flash(node);
        }
        let node_ = &mut self.nodes[node];
        node_.flash.iter_mut().for_each(|device| device.failed = false);
        (node_.alive, node_.incarnation) = (true, node_.incarnation + 1);
        (node_.connected, node_.owner_gone, node_.forgotten_below) = ([None; NODES], None, 0);
        (node_.reaches, node_.lease) = (true, Nanos(0));
        (node_.owes_release, node_.told_until) = (None, Nanos(0));
        node_.former_since.clear();
        node_.view = Record::default();
        self.note(|| format!("n{node} starts again"));
        self.tell_flash(node);
        self.recover(node);
        let process = self.process(node);
        self.after(0, 50_000, Task::Reconcile { process });
    }

    /// A process stands still and goes on later as if nothing had happened.
    fn pause(&mut self, node: usize) -> bool {
        let process = self.process(node);
        let node_ = &mut self.nodes[node];
        if !node_.alive || node_.paused {
            return false;
        }
        node_.paused = true;
        let resumed = self.in_a_while(10, 4_000);
        self.note(|| format!("n{node} stands still"));
        self.at(resumed, Task::Resume { node });
        // It may have stood still between its look at the lease and the system call. Beyond the fence grace nothing
        // protects from that, but within it a write may come as late as this.
        let latest = self.nodes[node].lease + (FENCE_GRACE - LONGEST_OPERATION);
        if resumed < latest && self.rng.bool() {
            self.backing.delay(process, resumed);
        }
        true
    }

    pub fn resume(&mut self, node: usize) {
        if !std::mem::replace(&mut self.nodes[node].paused, false) {
            return;
        }
        self.note(|| format!("n{node} goes on"));
        // Threads go on in any order: the shard may well be before the control plane.
        for task in std::mem::take(&mut self.nodes[node].held) {
            let delay = Duration::from_micros(self.rng.u64(0..=2_000));
            match task {
                // What was told is in a queue, before all that is told from now on.
                Task::Told { .. } => self.at(self.now, task),
                task => self.at(self.now + delay, task),
            }
        }
    }

    fn cut_some(&mut self) -> bool {
        let open = self.some_connection();
        if let Some(connection) = open {
            self.note(|| format!("connection {connection} breaks"));
            self.cut(connection);
        }
        open.is_some()
    }

    fn stall_some(&mut self) -> bool {
        let until = self.in_a_while(10, 3 * PEER_DEADLINE.as_millis() as u64);
        let open = self.some_connection();
        if let Some(connection) = open {
            self.note(|| format!("connection {connection} stalls"));
            self.connections[connection].stalled = until;
        }
        open.is_some()
    }

    fn some_connection(&mut self) -> Option<usize> {
        let open = self.connections.iter().enumerate().filter(|(_, connection)| connection.open);
        let open: Vec<usize> = open.map(|(number, _)| number).collect();
        (!open.is_empty()).then(|| open[self.rng.usize(..open.len())])
    }

    /// The node does not reach the registry; its peers it does.
    pub fn lose_registry(&mut self, node: usize) {
        self.note(|| format!("n{node} does not reach the registry"));
        self.nodes[node].reaches = false;
        self.after(100_000, 3_000_000, Task::Reach { node });
    }

    fn change_policy(&mut self) -> bool {
        let wanted = POLICIES[self.rng.usize(..POLICIES.len())];
        let owner = self.owner_process();
        if let Some(owner) = owner {
            self.ask_control(owner, Control::SetPolicy(wanted));
        }
        owner.is_some()
    }

    /// The owner that the registry names, if it lives.
    pub fn owner_process(&self) -> Option<Process> {
        self.registry.record.owner.filter(|owner| self.is_alive(*owner))
    }

    /// Whether messages from one node to another arrive, and if not, when.
    pub fn blocked(&self, from: usize, to: usize) -> Option<Nanos> {
        Some(self.weather.blocked[from][to]).filter(|until| *until > self.now)
    }

    /// How much longer than usual the registry takes for an answer.
    pub fn registry_delay(&mut self) -> Duration {
        let most = if self.now < self.weather.registry_slow { 800_000 } else { 0 };
        Duration::from_micros(self.rng.u64(..=most))
    }

    fn calm_down(&mut self) {
        self.note(|| "no more faults".into());
        self.registry.up = true;
        self.weather = Weather::default();
        for node in 0..NODES {
            self.nodes[node].reaches = true;
            self.resume(node);
            self.restart(node);
            self.mend(node);
        }
        for connection in 0..self.connections.len() {
            self.unblock(connection);
        }
    }
}
