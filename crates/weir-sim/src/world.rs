//! Virtual time and everything in it. What happens next is decided by one seeded generator, so a run can be replayed.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use fastrand::Rng;
use weir_accel::planted::{Bug, Planted};
use weir_accel::replica::Replica;
use weir_accel::wire::{Batch, Confirm, Hello, RecordHeader, Refuse};
use weir_block::Nanos;
use weir_cluster::records::Medium;
use weir_node::control::decide::Evidence;

use crate::atlas::Fault;
use crate::backing::Backing;
use crate::counts::Counts;
use crate::faults::{Swarm, Weather};
use crate::flash::Device;
use crate::guest::{Guest, Request};
use crate::owner_process::OwnerProcess;
use crate::registry::{Racks, Record, Registry};
use crate::store::Store;

pub const NODES: usize = 4;
pub const BLOCKS: usize = 6;
/// Bytes of a block.
pub const BLOCK: usize = 512;
/// Bytes of a log.
pub const LOG: u64 = 2 << 20;
/// Most records in a log on flash, by seed: few, so that rings are full now and then, and go round often.
pub const FLASH_RECORDS: [u64; 2] = [6, 24];
/// Blocks of a ring for what is cut off, and for frames that only say that the epoch is another.
pub const RING_SLACK: usize = 14;

pub const PEER_DEADLINE: Duration = Duration::from_millis(300);
/// How long the registry keeps a process that is silent, and how long a process believes in its own lease.
pub const LEASE: Duration = Duration::from_millis(600);
pub const OWN_LEASE: Duration = Duration::from_millis(540);
/// How long a silent owner may have I/O under way; longer than any operation takes.
pub const FENCE_GRACE: Duration = Duration::from_millis(900);
pub const LONGEST_OPERATION: Duration = Duration::from_millis(300);

/// `N` of the policies that operators ask for; most want replicas.
pub const POLICIES: [Option<usize>; 6] = [None, Some(0), Some(1), Some(1), Some(2), Some(2)];

/// Faults happen until this time, and guests go on for a second.
pub const CALM: Nanos = Nanos(6_000_000_000);
pub const GUESTS_END: Nanos = Nanos(7_000_000_000);
/// From the end of the faults until everything must have settled; it takes a lease, a fence grace, some retries and a log
/// that has to be filled or drained.
pub const BOUND: Duration = Duration::from_secs(10);
/// Having settled, nothing may happen for so long.
pub const QUIET: Duration = Duration::from_secs(2);

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
    WantPeer { serial: u64, node: Option<String>, connected: Vec<String>, exclude: Vec<String> },
    Propose { serial: u64, epoch: u64, replicas: Vec<String>, write_back: bool },
    SetPolicy(Option<usize>),
    Move { serial: u64, to: usize, until: Nanos },
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
    /// A renewal of a lease reaches the registry.
    Renew {
        process: Process,
    },
    /// Its answer is back.
    Renewed {
        process: Process,
        sent: Nanos,
    },
    Reach {
        node: usize,
    },
    /// A frame reaches the flash.
    FrameLands {
        node: usize,
        store: u64,
    },
    /// Its process hears of it.
    FrameEnds {
        process: Process,
        store: u64,
        succeeded: bool,
    },
    /// A node whose flash has failed gets another one.
    Mend {
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
            | Task::Renewed { process, .. }
            | Task::FrameEnds { process, .. }
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
    /// How much faster its clock runs, in thousandths.
    pub drift: i64,
    /// It has let go in this epoch and is to say so when nothing is under way any more.
    pub owes_release: Option<u64>,
    /// What is known of each former owner, and since when.
    pub former_since: Vec<(Process, Evidence, Nanos)>,
    pub replica: Option<Replica>,
    pub owner: Option<OwnerProcess>,
    pub control: VecDeque<Control>,
    /// Whom the owner here is connected to, for what the registry is told.
    pub connected: [Option<Process>; NODES],
    /// What waits until the process is resumed.
    pub held: Vec<Task>,
    /// Since when the owner has been seen without a lease.
    pub owner_gone: Option<(Process, Nanos)>,
    /// The record when this node last saw it.
    pub view: Record,
    /// When the last of what the shard is told arrives.
    pub told_until: Nanos,
    pub forgotten_below: u64,
    busy: Nanos,
    /// Its flash, if logs are on flash here.
    pub flash: Option<Device>,
    /// Where the log of the owner or replica here is at rest.
    pub store: Option<Store>,
    /// Those of logs that nobody needs any more, with a frame under way.
    pub retired: Vec<Store>,
    /// What becomes of the newest frame on its flash when the next one comes to rest.
    pub ill: Option<Fault>,
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
    /// The bug that the cores, and the shell around them, have.
    pub planted: Planted,
    pub is_planted: bool,
    /// Records that were spoiled on their way.
    pub corrupted: u64,
    /// Whether an owner without a lease keeps the answers of `write-back` back too. The epochs alone must be enough.
    pub lease_guards_answers: bool,
    /// Whether the registry knows when a process ends.
    pub sees_ends: bool,
    pub serial: u64,
    /// Requests and answers so far.
    pub ticks: u64,
    /// Newest answer of each epoch: who gave it (P2).
    pub answered_in: Vec<(u64, Process)>,
    pub violation: Option<String>,
    pub swarm: Swarm,
    pub weather: Weather,
    /// Since when everything has been as it should, after the faults.
    pub settled: Option<Nanos>,
    /// Messages, operations and wishes so far.
    pub activity: u64,
    /// `activity` when everything had settled.
    pub settled_activity: u64,
    /// Something that the checks look at has changed.
    pub touched: bool,
    pub trace: Option<Vec<String>>,
    pub counts: Counts,
    /// Most records in a log, if it is on flash.
    pub flash_records: u64,
}

impl World {
    pub fn new(seed: u64, bug: Option<Bug>, traced: bool) -> World {
        let mut rng = Rng::with_seed(seed);
        let lease_guards_answers = rng.bool();
        let swarm = Swarm::choose(&mut rng);
        // Not drawn: what seeds have shown of logs in memory stays as it was.
        let medium = if seed.is_multiple_of(2) { Medium::Flash } else { Medium::Ram };
        let wanted = POLICIES[rng.usize(..POLICIES.len())];
        let registry = Registry::new(wanted, medium, Racks::choose(seed));
        let sees_ends = rng.bool();
        let node = |node| Node {
            flash: (medium == Medium::Flash).then(|| Device::new(1 + node as u64)),
            store: None,
            retired: Vec::new(),
            ill: None,
            incarnation: 1,
            alive: true,
            paused: false,
            reaches: true,
            lease: Nanos(0),
            drift: 0,
            owes_release: None,
            former_since: Vec::new(),
            replica: None,
            owner: None,
            control: VecDeque::new(),
            connected: [None; NODES],
            held: Vec::new(),
            owner_gone: None,
            view: Record::default(),
            told_until: Nanos(0),
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
            registry,
            pending: Vec::new(),
            backing: Backing::default(),
            connections: Vec::new(),
            guest: Guest::default(),
            planted: Planted::new(bug),
            is_planted: bug.is_some(),
            corrupted: 0,
            lease_guards_answers,
            sees_ends,
            serial: 0,
            ticks: 0,
            answered_in: Vec::new(),
            violation: None,
            swarm,
            weather: Weather::default(),
            settled: None,
            activity: 0,
            settled_activity: 0,
            touched: false,
            trace: traced.then(Vec::new),
            counts: Counts::default(),
            flash_records: FLASH_RECORDS[(seed / 2 % 2) as usize],
        };
        for node in 0..NODES {
            let process = world.process(node);
            world.tell_flash(node);
            world.after(0, 5_000, Task::Reconcile { process });
        }
        world.after(10_000, 20_000, Task::Guest);
        world.after(100_000, 600_000, Task::Fault);
        world
    }

    /// Runs to the end, or to the first violation.
    pub fn run(&mut self) {
        while self.violation.is_none()
            && !self.has_been_quiet()
            && let Some(Reverse((at, _, place))) = self.queue.pop()
        {
            self.now = self.now.max(at);
            self.counts.steps += 1;
            let task = self.tasks[place].take().expect("a place is queued once");
            self.free.push(place);
            self.dispatch(task);
            if std::mem::take(&mut self.touched) {
                self.counts.checks += 1;
                self.check();
            }
        }
        self.counts.virtual_time = self.now - Nanos(0);
        if self.violation.is_none() {
            self.check_histories();
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
            Task::Crash { node } => self.crash_now(node),
            Task::Restart { node } => self.restart(node),
            Task::Resume { node } => self.resume(node),
            Task::RegistryUp => self.registry.up = true,
            Task::Renew { process } => self.registry.renew(process, self.now + LEASE),
            Task::Renewed { process, sent } => self.renewed(process, sent),
            Task::Reach { node } => self.nodes[node].reaches = true,
            Task::FrameLands { node, store } => self.frame_lands(node, store),
            Task::FrameEnds { process, store, succeeded } => self.frame_ends(process, store, succeeded),
            Task::Mend { node } => self.mend(node),
        }
    }

    pub fn process(&self, node: usize) -> Process {
        Process { node, incarnation: self.nodes[node].incarnation }
    }

    /// The registry learns what flash a process begins with.
    pub fn tell_flash(&mut self, node: usize) {
        if let Some(device) = &self.nodes[node].flash {
            self.registry.has_flash(self.process(node), device.identity);
        }
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
        self.activity += 1;
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
