//! Virtual time and everything in it. What happens next is decided by one seeded generator, so a run can be replayed.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use fastrand::Rng;
use weir_accel::replica::Replica;
use weir_accel::wire::{Batch, Confirm, Hello, RecordHeader, Refuse};
use weir_block::Nanos;

use crate::backing::Backing;
use crate::guest::{Guest, Request};
use crate::owner_process::OwnerProcess;
use crate::registry::Registry;

pub const NODES: usize = 4;
pub const BLOCKS: usize = 6;
/// Bytes of a block.
pub const BLOCK: usize = 512;
/// Bytes of a log.
pub const LOG: u64 = 2 << 20;

pub const PEER_DEADLINE: Duration = Duration::from_millis(300);
/// How long the registry keeps a process that is silent, and how long a process believes in its own lease.
pub const LEASE: Duration = Duration::from_millis(1000);
pub const OWN_LEASE: Duration = Duration::from_millis(900);
/// How long a silent owner may have I/O under way; longer than any operation takes.
pub const FENCE_GRACE: Duration = Duration::from_millis(1500);
pub const LONGEST_OPERATION: Duration = Duration::from_millis(500);

/// Faults happen until this time, then everything has to settle until that time.
pub const CALM: Nanos = Nanos(6_000_000_000);
pub const END: Nanos = Nanos(20_000_000_000);

/// One life of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pub node: usize,
    pub incarnation: u32,
}

pub fn name(node: usize) -> String {
    format!("n{node}")
}

pub fn node_of(name: &str) -> usize {
    name[1..].parse().expect("names are made by `name`")
}

/// A fault in Weir itself, planted to see whether the checks find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A replica's answer is taken for more than it says.
    AcknowledgeOneCopyShort,
    /// A checkpoint counts as done when it is written.
    FreeBeforeFlush,
    /// The new owner takes the log and leaves the replica open to the former owner.
    SkipSeal,
    /// A replica obeys whoever talks to it.
    IgnoreEpoch,
    /// A checkpoint writes the oldest version of a block.
    DestageOldest,
    /// A copy is called complete while it is being filled.
    IncompleteIsComplete,
    /// The owner believes that a change is committed when it was only asked for.
    BelieveBeforeCommit,
    /// The new owner destages while the former owner's writes are under way.
    FormerIsForgotten,
    /// A replica keeps what it was told to free, and says that it does not.
    KeepFreed,
    /// What a new owner has inherited is destaged in several checkpoints.
    DestageInheritedInParts,
    /// Nobody looks at the lease before writing past the log.
    BypassWithoutLease,
}

impl Bug {
    pub const ALL: [Bug; 11] = [
        Bug::AcknowledgeOneCopyShort,
        Bug::FreeBeforeFlush,
        Bug::SkipSeal,
        Bug::IgnoreEpoch,
        Bug::DestageOldest,
        Bug::IncompleteIsComplete,
        Bug::BelieveBeforeCommit,
        Bug::FormerIsForgotten,
        Bug::KeepFreed,
        Bug::BypassWithoutLease,
        Bug::DestageInheritedInParts,
    ];
}

#[derive(Clone, Debug)]
pub enum Message {
    Hello(Hello),
    Batch(Batch, Vec<RecordHeader>, Vec<u8>),
    Confirm(Confirm),
    Refuse(Refuse),
    End,
}

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Owner,
    Replica,
}

/// What the control plane of a node is asked to do, in this order.
#[derive(Clone, Debug)]
pub enum Control {
    WantPeer { serial: u64, node: Option<String>, exclude: Vec<String> },
    Propose { serial: u64, epoch: u64, replicas: Vec<String>, write_back: bool },
    SetPolicy(Option<usize>),
}

#[derive(Clone, Debug)]
pub enum Task {
    Deliver {
        connection: usize,
        to: Side,
    },
    Turn {
        process: Process,
    },
    Control {
        process: Process,
    },
    Connected {
        process: Process,
        serial: u64,
        peer: Option<Process>,
    },
    /// What the control plane tells the shard.
    Told {
        process: Process,
        serial: u64,
        event: weir_accel::owner::Event,
    },
    Land {
        operation: usize,
    },
    Complete {
        process: Process,
        operation: crate::backing::Operation,
        succeeded: bool,
    },
    Reconcile {
        process: Process,
    },
    /// A change that seemed to have failed is committed after all.
    LateCommit {
        process: Process,
        epoch: u64,
        replicas: Vec<Process>,
        write_back: bool,
    },
    Request {
        process: Process,
        serial: u64,
        request: Request,
    },
    /// A read of the backing ends.
    ReadBacking {
        process: Process,
        serial: u64,
        id: u64,
        block: usize,
    },
    Guest,
    Fault,
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

impl Task {
    /// The process without which it does not happen.
    fn process(&self) -> Option<Process> {
        match self {
            Task::Turn { process }
            | Task::Control { process }
            | Task::Connected { process, .. }
            | Task::Told { process, .. }
            | Task::Complete { process, .. }
            | Task::Reconcile { process }
            | Task::Request { process, .. }
            | Task::ReadBacking { process, .. } => Some(*process),
            _ => None,
        }
    }
}

pub struct Node {
    pub incarnation: u32,
    pub alive: bool,
    pub paused: bool,
    /// Reaches the registry.
    pub reaches: bool,
    /// Until when it believes in its lease.
    pub lease: Nanos,
    pub replica: Option<Replica>,
    pub owner: Option<OwnerProcess>,
    pub control: VecDeque<Control>,
    /// Whom the owner here is connected to, for what the registry is told.
    pub connected: [Option<Process>; NODES],
    /// What waits until the process is resumed.
    pub held: Vec<Task>,
    /// Since when the owner has been seen without a lease.
    pub owner_gone: Option<(Process, Nanos)>,
    pub forgotten_below: u64,
    busy: Nanos,
}

pub struct World {
    pub rng: Rng,
    pub now: Nanos,
    queue: BinaryHeap<Reverse<(Nanos, u64, usize)>>,
    tasks: Vec<Option<Task>>,
    free: Vec<usize>,
    number: u64,
    pub nodes: Vec<Node>,
    pub registry: Registry,
    /// Changes that may still be committed: from which epoch, and whom they would name.
    pub pending: Vec<(u64, Vec<Process>)>,
    pub backing: Backing,
    pub connections: Vec<crate::network::Connection>,
    pub guest: Guest,
    pub bug: Option<Bug>,
    /// Whether an owner without a lease keeps the answers of `write-back` back too. The epochs alone must be enough.
    pub lease_guards_answers: bool,
    pub serial: u64,
    /// Newest answer of each epoch: who gave it (P2).
    pub answered_in: Vec<(u64, Process)>,
    pub violation: Option<String>,
    /// Something that the checks look at has changed.
    pub touched: bool,
    pub trace: Option<Vec<String>>,
    pub counts: Counts,
}

/// What a run has seen, so that it can be told whether it tests anything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub takeovers: u64,
    pub answers: u64,
    pub crashes: u64,
    pub cuts: u64,
    pub doubts: u64,
    pub refusals: u64,
}

impl Counts {
    pub fn add(&mut self, other: Counts) {
        self.takeovers += other.takeovers;
        self.answers += other.answers;
        self.crashes += other.crashes;
        self.cuts += other.cuts;
        self.doubts += other.doubts;
        self.refusals += other.refusals;
    }

    /// Whether everything happened that can.
    pub fn is_lively(&self) -> bool {
        [self.takeovers, self.answers, self.crashes, self.cuts, self.doubts, self.refusals]
            .iter()
            .all(|n| *n > 50)
    }
}

impl World {
    pub fn new(seed: u64, bug: Option<Bug>, traced: bool) -> World {
        let mut rng = Rng::with_seed(seed);
        let lease_guards_answers = rng.bool();
        let node = |_| Node {
            incarnation: 1,
            alive: true,
            paused: false,
            reaches: true,
            lease: Nanos(0),
            replica: None,
            owner: None,
            control: VecDeque::new(),
            connected: [None; NODES],
            held: Vec::new(),
            owner_gone: None,
            forgotten_below: 0,
            busy: Nanos(0),
        };
        let mut world = World {
            rng,
            now: Nanos(1_000_000),
            queue: BinaryHeap::new(),
            tasks: Vec::new(),
            free: Vec::new(),
            number: 0,
            nodes: (0..NODES).map(node).collect(),
            registry: Registry::new(),
            pending: Vec::new(),
            backing: Backing::default(),
            connections: Vec::new(),
            guest: Guest::default(),
            bug,
            lease_guards_answers,
            serial: 0,
            answered_in: Vec::new(),
            violation: None,
            touched: false,
            trace: traced.then(Vec::new),
            counts: Counts::default(),
        };
        for node in 0..NODES {
            let process = world.process(node);
            world.after(0, 5_000, Task::Reconcile { process });
        }
        world.registry.record.wanted = Some(1);
        world.after(10_000, 20_000, Task::Guest);
        world.after(100_000, 600_000, Task::Fault);
        world
    }

    /// Runs to the end, or to the first violation.
    pub fn run(&mut self) {
        while self.violation.is_none()
            && let Some(Reverse((at, _, place))) = self.queue.pop()
            && at < END
        {
            self.now = self.now.max(at);
            let task = self.tasks[place].take().expect("a place is queued once");
            self.free.push(place);
            self.dispatch(task);
            if std::mem::take(&mut self.touched) {
                self.check();
            }
        }
        if self.violation.is_none() {
            self.check_settled();
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
            Task::Deliver { connection, to } => self.deliver(connection, to),
            Task::Turn { process } => self.turn(process),
            Task::Control { process } => self.control(process),
            Task::Connected { process, serial, peer } => self.connected(process, serial, peer),
            Task::Told { process, serial, event } => self.told(process, serial, event),
            Task::Land { operation } => self.land(operation),
            Task::Complete { process, operation, succeeded } => self.complete(process, operation, succeeded),
            Task::Reconcile { process } => self.reconcile(process),
            Task::LateCommit { process, epoch, replicas, write_back } => {
                self.late_commit(process, epoch, replicas, write_back);
            }
            Task::Request { process, serial, request } => self.request(process, serial, request),
            Task::ReadBacking { process, serial, id, block } => {
                self.read_backing(process, serial, id, block);
            }
            Task::Guest => self.guest_acts(),
            Task::Fault => self.fault(),
            Task::Restart { node } => self.restart(node),
            Task::Resume { node } => self.resume(node),
            Task::RegistryUp => self.registry.up = true,
            Task::Reach { node } => self.nodes[node].reaches = true,
        }
    }

    pub fn process(&self, node: usize) -> Process {
        Process { node, incarnation: self.nodes[node].incarnation }
    }

    pub fn is_alive(&self, process: Process) -> bool {
        let node = &self.nodes[process.node];
        node.alive && node.incarnation == process.incarnation
    }

    pub fn at(&mut self, time: Nanos, task: Task) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.tasks.push(None);
            self.tasks.len() - 1
        });
        self.tasks[place] = Some(task);
        self.number += 1;
        self.queue.push(Reverse((time, self.number, place)));
    }

    /// Between `least` and `most` microseconds from now.
    pub fn after(&mut self, least: u64, most: u64, task: Task) {
        let delay = Duration::from_micros(self.rng.u64(least..=most));
        self.at(self.now + delay, task);
    }

    /// A time that is mostly short and sometimes long, in microseconds.
    pub fn mostly(&mut self, short: u64, long: u64) -> Duration {
        let most = if self.rng.u8(..) < 16 && self.now < CALM { long } else { short };
        Duration::from_micros(self.rng.u64(short / 4..=most))
    }

    /// The control plane of a node does one thing after the other.
    pub fn ask_control(&mut self, process: Process, control: Control) {
        let delay = self.mostly(2_000, 400_000);
        let node = &mut self.nodes[process.node];
        node.control.push_back(control);
        node.busy = node.busy.max(self.now) + delay;
        let at = node.busy;
        self.at(at, Task::Control { process });
    }

    pub fn fail(&mut self, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(format!("at {:.6} s: {}", self.now.0 as f64 / 1e9, what()));
        }
    }

    pub fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    pub fn note(&mut self, what: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>10.6}  {}", self.now.0 as f64 / 1e9, what()));
        }
    }
}
