//! The production code over the reactor's simulated engine.
//!
//! **Real**: [`Accel`](weir_accel::Accel) with all its parts (log, index, destage, pacing, peers), the
//! [`ReplicaHost`](weir_accel::ReplicaHost), their channels and frames, the reactor's bookkeeping of operations and buffers, and
//! of the control plane [`decide`](weir_node::control::decide) and the rules of record changes. **Simulated**:
//! time, network and media ([`weir_block::sim`]), the registry, the tasks of the control plane, guests.
//!
//! A process may pause at any read of its clock, bytes arrive in pieces, writes of a dead process land late. Reads, flushes and
//! writes of two clients make a history per block that must be linearizable; when the faults have stopped, the disk must have its
//! requested policy, be drained and idle, and the medium must have the last value read.

pub(crate) mod backing;
mod clients;
mod control;
pub(crate) mod copies;
pub(crate) mod faults;
mod flash;
mod moves;
mod node;
mod planted;
mod requests;
mod retired;
mod settle;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use fastrand::Rng;
use weir_accel::AccelConfig;
use weir_accel::planted::{Bug, Planted};
use weir_block::Nanos;
use weir_block::sim::{End, FileId, ProcessId, Wires, World};
use weir_cluster::records::{DiskRecord, Medium};

use crate::atlas::Fault;
use crate::counts::Counts;
use crate::registry::{Racks, Record, Registry};
use crate::scale::{BLOCK, BLOCKS, NODES, Process};
use clients::{Client, Reply};
use control::{Answer, Ask, ShardMessage};
use copies::Known;
use faults::Swarm;
use flash::Flash;
use node::Node;
use requests::Request;

/// Least cost of a shard's turn; see [`crate::scale`] for leases and graces.
const TURN: Duration = Duration::from_micros(2);

/// A scheduled event, apart from those of network and media.
enum Task {
    Reconcile { process: Process },
    Look { process: Process },
    Renew { process: Process },
    AtRegistry { from: Process, ask: Ask },
    Answered { to: Process, answer: Answer },
    ShardMessage { process: Process, serial: u64, message: ShardMessage },
    Connected { process: Process, serial: u64, node: String, peer: Option<Process> },
    Open { process: Process, number: u64, record: Record, disk: Box<DiskRecord>, session: u64 },
    Attach { process: Process, owner: String, end: End },
    Move { process: Process, serial: u64 },
    Clients,
    Arrives { process: Process, serial: u64, request: Request },
    Replied(Reply),
    Fault,
    Crash { node: usize },
    Restart { node: usize },
    Resume { node: usize },
    RegistryUp,
    Reach { node: usize },
    ReplaceFlash { node: usize },
}

impl Task {
    /// The process that the event needs, if any.
    fn process(&self) -> Option<Process> {
        match self {
            Task::Reconcile { process }
            | Task::Look { process }
            | Task::Renew { process }
            | Task::Answered { to: process, .. }
            | Task::ShardMessage { process, .. }
            | Task::Connected { process, .. }
            | Task::Open { process, .. }
            | Task::Move { process, .. }
            | Task::Attach { process, .. }
            | Task::Arrives { process, .. } => Some(*process),
            _ => None,
        }
    }
}

/// Machines with production code, a registry, a medium and clients.
struct Cluster {
    world: World,
    rng: Rng,
    queue: BinaryHeap<Reverse<(Nanos, u64, usize)>>,
    tasks: Vec<Option<Task>>,
    free: Vec<usize>,
    number: u64,
    nodes: Vec<Node>,
    registry: Registry,
    /// The registry's session of each node.
    sessions: [u64; NODES],
    /// Requested changes that may still commit: their base epoch and members.
    pending: Vec<(u64, Vec<Process>)>,
    /// Processes that have requested the disk and may still get it, even if dead.
    taking_over: Vec<Process>,
    medium: FileId,
    /// The flash of each node, if logs are on flash.
    flash: Vec<Flash>,
    /// Whether one failed flash stays failed to the end. A strict policy may need every node.
    leaves_failed: bool,
    /// Whether all acknowledged writes are durable, so that the backing may also lose power in write-through.
    durable_writes: bool,
    clients: Vec<Client>,
    histories: Vec<crate::history::History>,
    known: Vec<Known>,
    /// The flush after the last write, once sent, and whether it completed.
    last_flush: u64,
    flushed: bool,
    /// The value of each block after the final flush.
    last_read: Vec<Option<u64>>,
    next_value: u64,
    ticks: u64,
    serial: u64,
    planted: Planted,
    /// Whether the registry detects the end of a process.
    sees_ends: bool,
    swarm: Swarm,
    backing_until: Nanos,
    /// Whether every second operation on the backing is slow.
    slow_medium: bool,
    /// End of a slow phase of the registry.
    registry_slow: Nanos,
    /// The accelerators' configuration.
    destage_delay: Duration,
    batch_records: usize,
    checkpoint_records: u64,
    /// Preferred kinds of fault in this run: makes rare combinations common in some runs.
    favourites: Option<[Fault; 2]>,
    settled: Option<(Nanos, u64)>,
    violation: Option<String>,
    trace: Option<Vec<String>>,
    counts: Counts,
}

/// The result of one seed.
#[derive(Clone, Debug)]
pub struct Run {
    /// Its counts.
    pub counts: Counts,
    /// The broken promise, with time and cause; `None` when all held.
    pub violation: Option<String>,
    /// The trace, one line per event, if requested.
    pub trace: Vec<String>,
}

/// Runs a seed to its end, or to the first violation; with a bug planted if one is given.
#[must_use]
pub fn run(seed: u64, bug: Option<Bug>, traced: bool) -> Run {
    let mut cluster = Cluster::new(seed, bug, traced);
    let ended = catch_unwind(AssertUnwindSafe(|| cluster.run()));
    if let Err(panic) = ended {
        let text = crate::panic_text(&*panic);
        cluster.violation = Some(format!("production code panicked: {text}"));
    }
    cluster.switch_off();
    Run {
        counts: cluster.counts,
        violation: cluster.violation.take(),
        trace: cluster.trace.take().unwrap_or_default(),
    }
}

impl Cluster {
    fn new(seed: u64, bug: Option<Bug>, traced: bool) -> Cluster {
        let mut rng = Rng::with_seed(seed);
        let world = World::new(rng.u64(..));
        world.set_wires(Wires {
            late: rng.u32(20..200),
            longest: Duration::from_millis(rng.u64(1..60)),
            partial: [0, 2, 5][rng.usize(..3)],
            capacity: [2 << 10, 16 << 10, 256 << 10][rng.usize(..3)],
            ..Wires::default()
        });
        let wanted = crate::scale::POLICIES[rng.usize(..crate::scale::POLICIES.len())];
        let medium = world.file((BLOCKS * BLOCK) as u64);
        let swarm = Swarm::choose(&mut rng);
        let on_flash = rng.bool();
        let kind = if on_flash { Medium::Flash } else { Medium::Ram };
        let racks = Racks::choose(&mut rng);
        let mut cluster = Cluster {
            registry: Registry::new(wanted, kind, racks),
            sessions: [0; NODES],
            pending: Vec::new(),
            taking_over: Vec::new(),
            nodes: Vec::new(),
            queue: BinaryHeap::new(),
            tasks: Vec::new(),
            free: Vec::new(),
            number: 0,
            medium,
            flash: Vec::new(),
            leaves_failed: rng.bool() && racks.is_none(),
            durable_writes: rng.bool(),
            clients: Client::all(),
            histories: vec![Default::default(); BLOCKS],
            known: vec![Known::default(); BLOCKS],
            last_flush: u64::MAX,
            flushed: false,
            last_read: vec![None; BLOCKS],
            next_value: 0,
            ticks: 0,
            serial: 0,
            planted: Planted::new(bug),
            sees_ends: rng.bool(),
            swarm,
            backing_until: Nanos(0),
            slow_medium: rng.u8(..4) == 0,
            registry_slow: Nanos(0),
            destage_delay: Duration::from_millis([2, 20, 300, 1_500][rng.usize(..4)]),
            checkpoint_records: [3, 12, AccelConfig::CHECKPOINT_RECORDS][rng.usize(..3)],
            favourites: rng.bool().then(|| faults::favourites(&mut rng)),
            batch_records: [3, 16, AccelConfig::BATCH_RECORDS][rng.usize(..3)],
            settled: None,
            violation: None,
            trace: traced.then(Vec::new),
            counts: Counts::default(),
            world,
            rng,
        };
        cluster.reset_media();
        for node in 0..NODES {
            if on_flash {
                let flash = cluster.new_flash();
                cluster.flash.push(flash);
            }
            let node = cluster.start(node, 1);
            cluster.nodes.push(node);
            cluster.begin_control(cluster.nodes.len() - 1);
        }
        cluster.after(10_000, 20_000, Task::Clients);
        cluster.after(100_000, 600_000, Task::Fault);
        cluster
    }

    fn run(&mut self) {
        while self.violation.is_none() && !self.has_been_quiet() {
            let now = self.world.now();
            let task = self.queue.peek().map_or(Nanos::NEVER, |Reverse((at, ..))| *at);
            let turn = self.nodes.iter().map(|node| node.due(&self.world)).min().unwrap_or(Nanos::NEVER);
            let next = task.min(turn).min(self.world.next()).max(now);
            self.world.advance(next);
            self.counts.steps += 1;
            if task <= next {
                let Some(Reverse((_, _, index))) = self.queue.pop() else { continue };
                self.free.push(index);
                if let Some(task) = self.tasks[index].take() {
                    self.dispatch(task);
                }
                continue;
            }
            for node in 0..NODES {
                if self.nodes[node].due(&self.world) <= next {
                    self.turn(node);
                }
            }
        }
        self.counts.virtual_time = self.world.now() - Nanos(0);
        if self.violation.is_none() {
            self.check_end();
        }
    }

    fn dispatch(&mut self, task: Task) {
        if let Some(process) = task.process() {
            let node = &mut self.nodes[process.node];
            if !node.alive || node.incarnation != process.incarnation {
                return;
            }
            if node.paused {
                return node.held.push(task);
            }
        }
        match task {
            Task::Reconcile { process } => self.reconcile(process),
            Task::Look { process } => self.look(process),
            Task::Renew { process } => self.renew(process),
            Task::AtRegistry { from, ask } => self.at_registry(from, ask),
            Task::Answered { to, answer } => self.answered(to, answer),
            Task::ShardMessage { process, serial, message } => {
                self.deliver_to_shard(process, serial, message)
            }
            Task::Connected { process, serial, node, peer } => self.connected(process, serial, node, peer),
            Task::Open { process, number, record, disk, session } => {
                self.open(process, number, &record, &disk, session);
            }
            Task::Attach { process, owner, end } => self.attach(process, owner, end),
            Task::Move { process, serial } => self.continue_move(process, serial),
            Task::Clients => self.clients_act(),
            Task::Arrives { process, serial, request } => self.arrives(process, serial, request),
            Task::Replied(reply) => self.replied(reply),
            Task::Fault => self.fault(),
            Task::Crash { node } => self.crash_now(node),
            Task::Restart { node } => self.restart(node),
            Task::Resume { node } => self.resume(node),
            Task::RegistryUp => self.registry.up = true,
            Task::Reach { node } => self.nodes[node].reaches = true,
            Task::ReplaceFlash { node } => self.replace_failed_flash(node),
        }
    }

    fn at(&mut self, time: Nanos, task: Task) {
        let index = self.free.pop().unwrap_or(self.tasks.len());
        if index == self.tasks.len() {
            self.tasks.push(None);
        }
        self.tasks[index] = Some(task);
        self.number += 1;
        self.queue.push(Reverse((time.max(self.world.now()), self.number, index)));
    }

    /// Schedules a task between `least` and `most` microseconds from now.
    fn after(&mut self, least: u64, most: u64, task: Task) {
        let delay = Duration::from_micros(self.rng.u64(least..=most));
        self.at(self.world.now() + delay, task);
    }

    fn process(&self, node: usize) -> Process {
        Process { node, incarnation: self.nodes[node].incarnation }
    }

    fn is_alive(&self, process: Process) -> bool {
        let node = &self.nodes[process.node];
        node.alive && node.incarnation == process.incarnation
    }

    fn simulated(&self, process: Process) -> ProcessId {
        self.nodes[process.node].process
    }

    fn tick(&mut self) -> u64 {
        self.ticks += 1;
        self.ticks
    }

    fn fail(&mut self, text: impl FnOnce() -> String) {
        if self.violation.is_none() {
            let at = self.world.now().0 as f64 / 1e9;
            self.violation = Some(format!("at {at:.6} s: {}", text()));
            self.note(|| "VIOLATION".into());
        }
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>12.6} {}", self.world.now().0 as f64 / 1e9, text()));
        }
    }
}
