//! A machine with a whole node: the production control plane and shard as one process.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use weir_block::sim::{Death, End, ProcessId, SetTime, VirtualClock, World};
use weir_block::size::Size;
use weir_block::{Engine, Nanos, Reactor, ReactorConfig, Waker};
use weir_cluster::node_state::{Event, Rules};
use weir_cluster::records::{NodeRecord, NodeRef, Policy};
use weir_cluster::registry::Registry;
use weir_export::nbd::AcceptedClient;
use weir_nbd::server::Session;
use weir_node::config::{Config, LeaseConfig, NbdConfig, PeersConfig, ResourcesConfig};
use weir_node::control::disk::{Request, Why};
use weir_node::control::{Node, Shards, Tasks, capacity, flash, grants, node_states};
use weir_node::exports;
use weir_node::members;
use weir_node::plane::{self, Parts, Plane};
use weir_node::shard::ShardQueue;
use weir_node::shard::health::Health;
use weir_node::shard::messages::Notice;
use weir_node::shard::{ShardConfig, Turned, Turning};
use weir_node::stack::Plain;
use weir_node::units::Period;

use super::network::{Wire, Wires, address};
use super::registry::{DISK, Line};
use super::storage::SimulatedStorage;
use super::{Cluster, Who};
use crate::scale::{FENCE_GRACE, LEASE, PEER_DEADLINE, name};

/// Least cost of a shard's turn, or of a round of the control plane's tasks.
const TURN: Duration = Duration::from_micros(2);

/// More consecutive idle turns than this mean that the shard spins (P10).
const IDLE_TURNS: u32 = 300;

/// Bytes of a log.
const LOG: u64 = weir_accel::AccelConfig::SMALLEST_LOG;

/// Capacity for waiting commands and notices.
const QUEUE: usize = 4096;

/// Timeout of a greeting.
const GREETING: Duration = Duration::from_secs(5);

/// An operator's request to a node.
#[derive(Clone, Debug)]
pub enum Order {
    Export,
    SetPolicy(Policy),
    Move(usize),
    State(Event),
}

/// State of a control plane, shared with the simulation.
#[derive(Default)]
pub struct Known {
    pub node: Option<Arc<Node>>,
    /// The reason of the process's exit.
    pub failed: Option<String>,
    /// Operators' requests in progress.
    pub orders: usize,
    /// Their outcomes, for the trace.
    pub said: Vec<String>,
}

/// See [`Known`].
#[derive(Clone, Default)]
pub struct Shared(Arc<Mutex<Known>>);

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct Machine {
    pub number: usize,
    pub incarnation: u64,
    pub alive: bool,
    pub has_power: bool,
    pub paused: bool,
    /// Whether its requests reach the registry.
    pub reaches: bool,
    /// Whether the registry's answers reach it.
    pub hears: bool,
    pub process: ProcessId,
    pub clock: Rc<VirtualClock>,
    /// The control plane is dropped before the shard, because it has queues to it.
    tasks: Option<weir_task::Process>,
    pub shard: Option<Turning>,
    waker: Option<Arc<Waker>>,
    pub shared: Shared,
    /// Connections of other nodes.
    pub peers: Option<mpsc::UnboundedSender<End>>,
    /// Connections of clients.
    pub guests: Option<mpsc::UnboundedSender<End>>,
    pub orders: Option<mpsc::UnboundedSender<Order>>,
    /// Pauses of the shard (longest, and once in how many reads of its clock), and of the control plane.
    pub stalls: (u32, Duration, Duration),
    idle_turns: u32,
    /// Time of the shard's next turn, in world time.
    wake: Nanos,
    /// Time until which the control plane's thread is busy.
    elsewhere: Nanos,
    busy: Nanos,
}

/// The part of a machine that gets a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Shard,
    Plane,
}

impl Machine {
    /// Time of its next turn, in world time, and the part that gets it.
    pub fn due(&self, world: &World) -> (Nanos, Part) {
        let (Some(tasks), Some(waker), false) = (&self.tasks, &self.waker, self.paused) else {
            return (Nanos::NEVER, Part::Shard);
        };
        let ready = waker.is_notified() || world.is_ready(self.process);
        let shard = if ready { world.now() } else { self.wake };
        let plane = match tasks.due() {
            Nanos(0) => world.now(),
            local => self.clock.when(local),
        };
        let plane = plane.max(self.elsewhere);
        let free = self.busy.max(self.clock.busy_until());
        let next = if plane < shard { (plane, Part::Plane) } else { (shard, Part::Shard) };
        (next.0.max(free), next.1)
    }

    /// Whether its node has the disk open for clients.
    pub fn has_open(&self) -> bool {
        self.alive && self.shared.lock().node.as_ref().is_some_and(|node| node.here.get(DISK).is_some())
    }

    pub fn who(&self) -> Who {
        Who { node: self.number, incarnation: self.incarnation }
    }
}

fn config(number: usize) -> Config {
    Config {
        name: name(number),
        fault_domain: name(number),
        state_dir: PathBuf::from("/"),
        registry: Default::default(),
        lease: LeaseConfig { ttl: Period(LEASE), fence_grace: Period(FENCE_GRACE) },
        identity: Default::default(),
        peers: PeersConfig { listen: address(number), deadline: Period(PEER_DEADLINE), plaintext: false },
        nbd: NbdConfig { unix: Some(PathBuf::new()), tcp: Vec::new(), ..NbdConfig::default() },
        fuse: Default::default(),
        api: Default::default(),
        nodes: Default::default(),
        resources: ResourcesConfig {
            shards: 1,
            buffers: Size(8 << 20),
            log: Size(LOG),
            logs: Size(16 * LOG),
            busy_poll_us: 0,
        },
        flash: Default::default(),
        limits: Default::default(),
        lun: Default::default(),
    }
}

/// The parts of a process.
struct Life {
    config: Config,
    rules: Rules,
    record: NodeRecord,
    registry: Arc<dyn Registry>,
    wires: Wires,
    shards: Shards,
    notices: mpsc::Receiver<Notice>,
    peers: mpsc::UnboundedReceiver<End>,
    guests: mpsc::UnboundedReceiver<End>,
    orders: mpsc::UnboundedReceiver<Order>,
    shared: Shared,
}

/// As [`weir_node::run`], after its sockets and shards exist.
async fn live(life: Life) -> Result<(), String> {
    let Life {
        config,
        rules,
        record,
        registry,
        wires,
        shards,
        notices,
        mut peers,
        mut guests,
        mut orders,
        shared,
    } = life;
    let started = Nanos::now();
    let damaged = flash::recover(None, &shards).await;
    let session = plane::join(&registry, record, &config, |_| {}).await.map_err(|error| error.to_string())?;
    let network = Arc::new(wires);
    let (identity, flash, former) = (None, None, Vec::new());
    let parts = Parts { config, rules, registry, network, identity, shards, flash, started, damaged, former };
    let plane = Plane::start(parts, session, notices).await.map_err(|error| error.to_string())?;
    shared.lock().node = Some(Arc::clone(&plane.node));
    weir_task::spawn(members::keep(Arc::clone(&plane.node)));
    let grants = grants::places();
    loop {
        tokio::select! {
            biased;
            Some(end) = peers.recv() => {
                let (node, grants) = (Arc::clone(&plane.node), Arc::clone(&grants));
                weir_task::spawn(async move {
                    let _ = weir_task::timeout(GREETING, plane::welcome(Wire(end), &node, &grants, None)).await;
                });
            }
            Some(end) = guests.recv() => {
                if plane.node.here.get(DISK).is_some() {
                    let session =
                        Session { export: DISK.into(), block_sizes: true, ..Session::default() };
                    exports::attach(&plane.node, AcceptedClient { stream: end.into(), leftover: Vec::new(), session, via: None });
                }
            }
            Some(order) = orders.recv() => {
                let (node, tasks) = (Arc::clone(&plane.node), Arc::clone(&plane.tasks));
                let shared = shared.clone();
                weir_task::spawn(async move {
                    let said = carry_out(&node, &tasks, order.clone()).await;
                    let mut known = shared.lock();
                    known.orders -= 1;
                    known.said.push(format!("{order:?} on {}: {said}", node.config.name));
                });
            }
        }
    }
}

/// As [`weir_node::operations`], on the right node.
async fn carry_out(node: &Arc<Node>, tasks: &Tasks, order: Order) -> String {
    let answer = match order {
        Order::Export => {
            tasks.ask(DISK, node, |done| Request::Export { accept_loss: false, done }).await.map(|()| 0)
        }
        Order::SetPolicy(policy) => {
            tasks.ask(DISK, node, |done| Request::SetPolicy { policy, done }).await.map(|()| 0)
        }
        Order::State(event) => {
            let changed = match &event {
                Event::Removed { node: name } => node_states::remove(node, name).await,
                event => node_states::change(node, event, node.session.guard()).await,
            };
            return changed.map_or_else(|error| error.to_string(), |()| "done".into());
        }
        Order::Move(to) => {
            let to: Option<NodeRef> = node.records.nodes.now().get(&name(to)).map(|to| to.node_ref());
            match to.filter(|to| *to != node.session.node_ref()) {
                Some(to) => {
                    tasks.ask(DISK, node, |done| Request::Move { to, why: Why::Requested, done }).await
                }
                None => return "there is no such node".into(),
            }
        }
    };
    answer.map_or_else(|error| error.message, |_| "done".into())
}

impl Cluster {
    /// A process starts on a machine.
    pub fn start(&mut self, number: usize, incarnation: u64) -> Machine {
        let who = Who { node: number, incarnation };
        let process = self.world.process(number);
        let drift = self.rng.i64(-40..=40);
        let clock = self.world.clock(process, drift);
        let reactor = ReactorConfig { buffer_limit: 8 << 20, ..ReactorConfig::default() };
        let reactor = Reactor::simulated(&self.world, process, Rc::clone(&clock), reactor);
        let reactor = reactor.expect("a descriptor for its waker");
        let config = config(number);
        let shard = ShardConfig {
            buffer_bytes: 8 << 20,
            busy_poll: Duration::ZERO,
            log_bytes: LOG,
            peer_deadline: PEER_DEADLINE,
            full_log_wait: config.limits.full_log_wait.0,
            full_volume_wait: config.limits.full_volume_wait.0,
            coordinator_wait: config.lun.coordinator_wait.0,
            server_wait: config.nbd.server_wait.0,
            nbd_fence_grace: config.nbd.fence_grace(&config.lease),
            destage_delay: self.destage_delay,
            io_flusher: false,
            engine: Engine::Auto,
            storage: Arc::new(SimulatedStorage { who, requests: self.requests.clone() }),
            flash: None,
            wrap: Arc::new(Plain),
            planted: self.planted,
        };
        let (commands, queue) = mpsc::channel(QUEUE);
        let (wanted, notices) = mpsc::channel(QUEUE);
        let health = Arc::new(Health::default());
        let shard = Turning::new(reactor, shard, queue, wanted, Arc::clone(&health));
        let waker = shard.waker();
        let shared = Shared::default();
        let (peers, to_peers) = mpsc::unbounded_channel();
        let (guests, to_guests) = mpsc::unbounded_channel();
        let (orders, to_orders) = mpsc::unbounded_channel();
        let wakes = Arc::clone(&waker);
        let shards = vec![ShardQueue::new(commands, move || wakes.wake()).with_health(health)];
        let record = NodeRecord {
            name: name(number),
            incarnation,
            flash: None,
            peer_address: address(number),
            nbd_tcp: None,
            nbd_tls: None,
            nbd_unix: PathBuf::from("/nbd"),
            api: PathBuf::from("/api"),
            fault_domain: name(number),
            media: capacity::media(&config.resources, None, &[]),
            load: 0,
            forwards: config.nbd.forward,
        };
        let life = Life {
            config,
            rules: self.rules.clone(),
            record,
            registry: Arc::new(Line { who, requests: self.requests.clone() }),
            wires: Wires { who, requests: self.requests.clone() },
            shards: Shards::new(shards),
            notices,
            peers: to_peers,
            guests: to_guests,
            orders: to_orders,
            shared: shared.clone(),
        };
        let tasks = weir_task::Process::new(self.rng.u64(..));
        tasks.enter(&clock, || {
            let shared = shared.clone();
            weir_task::spawn(async move {
                if let Err(reason) = live(life).await {
                    shared.lock().failed = Some(reason);
                }
            })
        });
        Machine {
            number,
            incarnation,
            alive: true,
            has_power: true,
            paused: false,
            reaches: true,
            hears: true,
            process,
            clock,
            tasks: Some(tasks),
            shard: Some(shard),
            waker: Some(waker),
            shared,
            peers: Some(peers),
            guests: Some(guests),
            orders: Some(orders),
            stalls: (0, Duration::ZERO, Duration::ZERO),
            idle_turns: 0,
            wake: Nanos(0),
            elsewhere: Nanos(0),
            busy: Nanos(0),
        }
    }

    /// Ends a process; its memory is lost.
    pub fn end(&mut self, number: usize, death: Death) {
        let machine = &mut self.nodes[number];
        self.world.end(machine.process, death);
        (machine.alive, machine.paused) = (false, false);
        machine.has_power = death == Death::Killed;
        (machine.peers, machine.guests, machine.orders) = (None, None, None);
        *machine.shared.lock() = Known::default();
        machine.tasks = None;
        machine.shard = None;
        machine.waker = None;
    }

    /// Drops the parts in the order that they require.
    pub fn switch_off(&mut self) {
        for node in 0..self.nodes.len() {
            self.end(node, Death::PowerCut);
        }
        self.tasks.clear();
        self.requests.take();
    }

    /// One turn of a machine's shard, or one round of its control plane.
    pub fn turn(&mut self, number: usize, part: Part) {
        let now = self.world.now();
        let machine = &mut self.nodes[number];
        let (odds, shard, plane) = machine.stalls;
        match part {
            Part::Shard => {
                machine.clock.stall(odds, shard);
                self.turn_shard(number);
            }
            Part::Plane => {
                machine.clock.stall(odds / 8, plane);
                if machine.tasks.as_ref().is_some_and(|tasks| !tasks.run(&machine.clock)) {
                    self.fail(|| format!("P10: the control plane of n{number} spins"));
                }
                // The scheduler runs a thread at any time.
                let late = if self.rng.u8(..) < 8 { 3_000 } else { 20 };
                let late = Duration::from_micros(self.rng.u64(0..late));
                self.nodes[number].elsewhere = now.max(self.nodes[number].clock.busy_until()) + late;
            }
        }
        let machine = &mut self.nodes[number];
        machine.busy = now.max(machine.clock.busy_until()) + TURN;
        let sent = now.max(machine.clock.busy_until());
        self.execute_requests(sent);
        if part == Part::Plane {
            self.check_plane(number);
        }
    }

    fn turn_shard(&mut self, number: usize) {
        let machine = &mut self.nodes[number];
        let Some(shard) = &mut machine.shard else { return };
        let time = SetTime::by(&machine.clock);
        let turned = shard.turn_once(Nanos(0)).expect("the simulated engine polls without errors");
        let deadline = shard.deadline();
        drop(time);
        machine.wake = machine.clock.when(deadline);
        machine.idle_turns = if turned == Turned::Idle { machine.idle_turns + 1 } else { 0 };
        let (idle, finished) = (machine.idle_turns, turned == Turned::Finished);
        self.counts.checks += 1;
        if idle > IDLE_TURNS && deadline == Nanos(0) {
            self.fail(|| format!("P10: n{number} spins: {idle} turns in a row with nothing to do"));
        }
        if finished {
            self.fail(|| format!("n{number} has exited"));
        }
    }

    fn check_plane(&mut self, number: usize) {
        let mut known = self.nodes[number].shared.lock();
        let (failed, said) = (known.failed.take(), std::mem::take(&mut known.said));
        drop(known);
        for said in said {
            self.note(|| said);
        }
        if let Some(reason) = failed {
            // A supervisor restarts it.
            self.note(|| format!("n{number} ends: {reason}"));
            self.end_and_restart(number, Death::Killed, 300_000);
        }
    }
}
