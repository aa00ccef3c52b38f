//! Whole nodes under virtual time.
//!
//! **Real**: all of a node except its sockets and threads: the control plane ([`weir_node::plane`]) with its membership,
//! grants, disk tasks and operators' requests; the shard ([`weir_node::shard::Turning`]) with export, accelerator, replicas and
//! openings; their messages; the registry's transactions, leases and watches. **Simulated**: time, network and media
//! ([`weir_block::sim`]), threads ([`weir_task::Process`]), connections to the registry, opening a backing, operators, clients.
//!
//! A process may pause at any read of its clock, in a shard's turn or in a task of the control plane. Calls to the registry may
//! get lost before or after their commit. See [`crate::run`] for the checks.

mod checks;
mod clients;
mod faults;
mod machine;
mod network;
mod registry;
mod settle;
mod state_checks;
mod states;
mod storage;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use tokio::sync::oneshot;
use weir_accel::planted::{Bug, Planted};
use weir_block::Nanos;
use weir_block::sim::{End, FileId, ProcessId, Wires, World};
use weir_cluster::node_state::Rules;
use weir_cluster::node_state::planted::Planted as StatePlanted;
use weir_cluster::records::{DiskRecord, NodeRef, Policy, Source};
use weir_cluster::registry::RegistryError;
use weir_node::shard::opener::Report;

pub use weir_cluster::node_state::planted::Bug as StateBug;

use crate::cluster::Run;
use crate::cluster::copies::Known;
use crate::cluster::faults::Swarm;
use crate::counts::Counts;
use crate::scale::{BLOCK, BLOCKS, CALM, NODES, name};
use clients::Client;
use machine::Machine;
use network::Dialling;
use registry::{Answer, Asked, DISK, Question, Reply, Service};
use states::States;

/// One incarnation of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Who {
    node: usize,
    incarnation: u64,
}

/// A process's request to the simulation.
enum WorldRequest {
    Ask(Question, Reply),
    Connect { to: usize, reply: oneshot::Sender<End> },
    Open(Report),
}

/// Requests of processes, collected until their turn is over.
#[derive(Clone, Default)]
struct WorldRequests(Arc<Mutex<Vec<(Who, WorldRequest)>>>);

impl WorldRequests {
    fn push(&self, who: Who, request: WorldRequest) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((who, request));
    }

    fn take(&self) -> Vec<(Who, WorldRequest)> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A scheduled event, apart from those of network and media.
enum Task {
    AtRegistry(Asked),
    Answered {
        to: Who,
        reply: Reply,
        answer: Result<Answer, RegistryError>,
    },
    /// Notifies the waiting caller that no answer will come.
    Lost(Reply),
    /// Notifies a watcher of the registry.
    Notify(u64),
    EndSeen(Who),
    Dialled(Dialling),
    Connected {
        to: Who,
        reply: oneshot::Sender<End>,
        end: End,
    },
    Opened(Who, Report),
    Clients,
    Operator,
    /// A fault or an operator's request that concerns nodes' states.
    States,
    /// The registry is about to be away for long; and is.
    LongOutage,
    Outage,
    Listen,
    Fault,
    Crash {
        node: usize,
    },
    Restart {
        node: usize,
    },
    Resume {
        node: usize,
    },
    RegistryUp,
    Reach {
        node: usize,
    },
}

/// Machines with nodes, a registry, a medium, operators and clients.
struct Cluster {
    world: World,
    rng: Rng,
    queue: BinaryHeap<Reverse<(Nanos, u64, usize)>>,
    tasks: Vec<Option<Task>>,
    free: Vec<usize>,
    number: u64,
    requests: WorldRequests,
    nodes: Vec<Machine>,
    registry: Service,
    /// Calls to the registry whose callers do not know yet that no answer will come.
    unheard: usize,
    medium: FileId,
    /// The process of all clients.
    guests: ProcessId,
    guests_woken: Arc<AtomicBool>,
    clients: Vec<Client>,
    histories: Vec<crate::history::History>,
    known: Vec<Known>,
    /// Whether all acknowledged writes are durable.
    durable_writes: bool,
    /// The flush after the last write, once sent, and whether it completed.
    last_flush: u64,
    flushed: bool,
    /// The value of each block after the final flush.
    last_read: Vec<Option<u64>>,
    next_value: u64,
    ticks: u64,
    planted: Planted,
    /// The limits of node states.
    rules: Rules,
    /// The knowledge of the checks of node states, if this run has their faults.
    states: Option<States>,
    swarm: Swarm,
    backing_until: Nanos,
    destage_delay: Duration,
    /// Whether the cluster had settled at the last check.
    activity: u64,
    settled: Option<(Nanos, u64)>,
    /// The time since which nothing is left to be done.
    calm: Option<Nanos>,
    violation: Option<String>,
    trace: Option<Vec<String>>,
    counts: Counts,
}

/// Runs a seed to its end, or to the first violation; with a bug planted if one is given.
#[must_use]
pub fn run(seed: u64, bug: Option<Bug>, traced: bool) -> Run {
    finish(Cluster::new(seed, bug, None, traced))
}

/// As [`run`], with the faults and requests that concern the states of nodes: one node loses the registry, again and again; the
/// registry is away for long; operators drain, resume, clear and remove.
#[must_use]
pub fn run_states(seed: u64, bug: Option<Bug>, traced: bool) -> Run {
    finish(Cluster::new(seed, bug, None, traced).with_states(seed))
}

/// As [`run_states`], with a rule of node states disabled.
#[must_use]
pub fn run_without(seed: u64, rule: StateBug, traced: bool) -> Run {
    finish(Cluster::new(seed, None, Some(rule), traced).with_states(seed))
}

fn finish(mut cluster: Cluster) -> Run {
    let ended = catch_unwind(AssertUnwindSafe(|| cluster.run()));
    if let Err(panic) = ended {
        let text = crate::panic_text(&*panic);
        cluster.violation = Some(format!("a node panicked: {text}"));
    }
    cluster.switch_off();
    Run {
        counts: cluster.counts,
        violation: cluster.violation.take(),
        trace: cluster.trace.take().unwrap_or_default(),
    }
}

fn policy(wanted: Option<usize>) -> Policy {
    wanted.map_or(Policy::WriteThrough, |copies| Policy::WriteBack(copies as u8))
}

/// Limits of node states: shorter than the faults, or longer. By random numbers of their own, so that a seed's other choices do
/// not depend on them.
fn rules(seed: u64) -> Rules {
    let mut rng = Rng::with_seed(seed ^ 0x6e6f_6465);
    let mut period = |choices: [u64; 4]| Duration::from_millis(choices[rng.usize(..choices.len())]);
    Rules {
        resiliency_period: period([0, 500, 2_000, 60_000]),
        quarantine_window: period([1_000, 2_000, 4_000, 8_000]),
        quarantine_duration: period([300, 1_000, 3_000, 5_000]),
        quarantine_threshold: rng.usize(1..=3),
        ..Rules::default()
    }
}

impl Cluster {
    fn new(seed: u64, bug: Option<Bug>, rule: Option<StateBug>, traced: bool) -> Cluster {
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
        let source = Source::Device { path: PathBuf::from("/backing") };
        let size = (BLOCKS * BLOCK) as u64;
        let disk = DiskRecord::new(DISK, "volume", source, size, BLOCK as u32, policy(wanted));
        let guests = world.process(NODES);
        let mut cluster = Cluster {
            registry: Service::new(disk, rng.bool()),
            nodes: Vec::new(),
            requests: WorldRequests::default(),
            queue: BinaryHeap::new(),
            tasks: Vec::new(),
            free: Vec::new(),
            number: 0,
            unheard: 0,
            medium,
            guests,
            guests_woken: Arc::default(),
            durable_writes: rng.bool(),
            clients: Client::all(),
            histories: vec![Default::default(); BLOCKS],
            known: vec![Known::default(); BLOCKS],
            last_flush: u64::MAX,
            flushed: false,
            last_read: vec![None; BLOCKS],
            next_value: 0,
            ticks: 0,
            planted: Planted::new(bug),
            rules: Rules { planted: StatePlanted::new(rule), ..rules(seed) },
            states: None,
            swarm,
            backing_until: Nanos(0),
            destage_delay: Duration::from_millis([2, 20, 300, 1_500][rng.usize(..4)]),
            activity: 0,
            settled: None,
            calm: None,
            violation: None,
            trace: traced.then(Vec::new),
            counts: Counts::default(),
            world,
            rng,
        };
        cluster.reset_media();
        for node in 0..NODES {
            let machine = cluster.start(node, 1);
            cluster.nodes.push(machine);
        }
        cluster.after(10_000, 20_000, Task::Clients);
        cluster.after(10_000, 20_000, Task::Operator);
        cluster.after(100_000, 600_000, Task::Fault);
        cluster
    }

    fn with_states(mut self, seed: u64) -> Cluster {
        self.plan_states(seed);
        self
    }

    fn run(&mut self) {
        while self.violation.is_none() && !self.has_been_quiet() {
            let now = self.world.now();
            let task = self.queue.peek().map_or(Nanos::NEVER, |Reverse((at, ..))| *at);
            let due = self.nodes.iter().map(|node| node.due(&self.world).0).min().unwrap_or(Nanos::NEVER);
            let lease = self.registry.due();
            let next = task.min(due).min(lease).min(self.world.next()).max(now);
            self.world.advance(next);
            self.counts.steps += 1;
            if lease <= next {
                self.expire_leases(false);
            }
            if self.guests_woken.swap(false, std::sync::atomic::Ordering::Relaxed) {
                self.clients_receive();
            }
            if task <= next {
                let Some(Reverse((_, _, index))) = self.queue.pop() else { continue };
                self.free.push(index);
                if let Some(task) = self.tasks[index].take() {
                    self.dispatch(task);
                }
                continue;
            }
            for node in 0..NODES {
                let (due, part) = self.nodes[node].due(&self.world);
                if due <= next {
                    self.turn(node, part);
                }
            }
        }
        self.counts.virtual_time = self.world.now() - Nanos(0);
        if self.violation.is_none() {
            self.check_end();
        }
    }

    /// Executes the requests of a turn that was over at `sent`.
    fn execute_requests(&mut self, sent: Nanos) {
        for (who, request) in self.requests.take() {
            match request {
                WorldRequest::Ask(question, reply) => self.asked(who, question, reply, sent),
                WorldRequest::Connect { to, reply } => {
                    let delay = self.mostly(400, 50_000);
                    self.at(sent + delay, Task::Dialled(Dialling { from: who, to, reply }));
                }
                WorldRequest::Open(report) => {
                    // The medium, or a dead owner's kernel, may delay it.
                    let slow = self.world.now() < CALM && self.rng.u8(..4) == 0;
                    let most = if slow { 3_000_000 } else { 2_000 };
                    let delay = Duration::from_micros(self.rng.u64(200..=most));
                    self.at(sent + delay, Task::Opened(who, report));
                }
            }
        }
    }

    fn dispatch(&mut self, task: Task) {
        match task {
            Task::AtRegistry(asked) => self.at_registry(asked),
            Task::Answered { to, reply, answer } => {
                // A process that has ended or was cut off meanwhile gets nothing.
                if self.is_alive(to) && self.nodes[to.node].hears {
                    let _ = reply.send(answer);
                }
            }
            Task::Lost(reply) => {
                self.unheard -= 1;
                drop(reply);
            }
            Task::Notify(number) => self.notify(number),
            Task::EndSeen(who) => self.end_seen(who),
            Task::Dialled(dialling) => self.dialled(dialling),
            Task::Connected { to, reply, end } => {
                if self.is_alive(to) {
                    let _ = reply.send(end);
                }
            }
            Task::Opened(who, report) => {
                if self.is_alive(who) {
                    let (world, file) = (self.world.clone(), self.medium);
                    let size = (BLOCKS * BLOCK) as u64;
                    report.done(Ok(Box::new(storage::Opened { world, file, size })));
                }
            }
            Task::Clients => self.clients_act(),
            Task::Operator => self.operator_acts(),
            Task::States => self.states_act(),
            Task::LongOutage => self.long_outage(),
            Task::Outage => self.outage(),
            Task::Listen => self.listen(),
            Task::Fault => self.fault(),
            Task::Crash { node } => self.crash_now(node),
            Task::Restart { node } => self.restart(node),
            Task::Resume { node } => self.resume(node),
            // The end of a shorter outage does not end a longer one.
            Task::RegistryUp if self.world.now() < self.registry.away_until => {}
            Task::RegistryUp => self.registry_up(),
            Task::Reach { node } => self.reach(node),
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

    fn is_alive(&self, who: Who) -> bool {
        self.nodes[who.node].alive && self.nodes[who.node].incarnation == who.incarnation
    }

    /// The living process of a reference, if any.
    fn living(&self, node: &NodeRef) -> Option<usize> {
        let number = (0..NODES).find(|number| name(*number) == node.node)?;
        self.is_alive(Who { node: number, incarnation: node.incarnation }).then_some(number)
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
