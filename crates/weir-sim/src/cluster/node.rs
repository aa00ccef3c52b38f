//! A machine with one shard of a node: the turn of `weir-node`'s shard thread.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use slab::Slab;
use weir_accel::flash::{FlashDevice, FlashStore};
use weir_accel::planted::{Bug, Planted};
use weir_accel::{Accel, AccelConfig, AccelNotice, Former, Inheritance, ReplicaHost};
use weir_block::sim::{Death, End, ProcessId, VirtualClock, World};
use weir_block::{Completion, Layer, Metered, Nanos, OwnerId, Payload, Reactor, ReactorConfig, Tag};
use weir_cluster::records::{DiskRecord, NodeRef};
use weir_node::control::decide::Evidence;

use super::backing::{Backing, Guard};
use super::control::Session;
use super::moves::Moving;
use super::planted::unsealed;
use super::requests::{Request, RequestKind, block_of, value_block};
use super::retired::{retire, retired_event};
use super::{Cluster, TURN, Task};
use crate::atlas::Fault;
use crate::registry::{Record, process_of};
use crate::scale::{BLOCK, BLOCKS, NODES, PEER_DEADLINE, Process, name};

/// More consecutive idle turns than this mean that the shard spins (P10).
const IDLE_TURNS: u32 = 300;

pub struct Node {
    pub number: usize,
    pub incarnation: u32,
    pub alive: bool,
    pub paused: bool,
    /// Reaches the registry.
    pub reaches: bool,
    pub process: ProcessId,
    /// Disk, copies and retired stores are dropped before the reactor of their sockets.
    pub disk: Option<Disk>,
    pub host: Option<(OwnerId, ReplicaHost)>,
    /// Released, with I/O still in flight.
    pub leaving: Vec<(u64, Accel<Backing>, OwnerId)>,
    /// Stores of logs that are no longer needed.
    pub retired: Vec<FlashStore>,
    /// The flash device, if logs are on flash.
    pub device: Option<Arc<FlashDevice>>,
    pub reactor: Option<Reactor>,
    pub clock: Rc<VirtualClock>,
    pub session: Session,
    /// The record at this node's last read.
    pub view: Record,
    pub owner_gone: Option<(Process, Nanos)>,
    pub former_since: Vec<(NodeRef, Evidence, Nanos)>,
    pub connected: [Option<Process>; NODES],
    pub held: Vec<Task>,
    pub told_until: Nanos,
    pub forgotten_below: u64,
    /// Start of the time in which a disk of another owner has been open here although the registry is reachable.
    pub overstays: Option<Nanos>,
    /// Number of the backing's opening in progress, or 0.
    pub opening: u64,
    idle_turns: u32,
    wake: Nanos,
    busy: Nanos,
}

/// A disk that is open on its owner.
pub struct Disk {
    pub serial: u64,
    pub accel: Accel<Backing>,
    pub backing: OwnerId,
    /// The right's deadline.
    pub right: Guard,
    /// The session for which the record has confirmed this owner.
    pub confirmed: u64,
    pub told_epoch: u64,
    pub told_policy: Option<usize>,
    pub told_former: bool,
    pub moving: Option<Moving>,
    pub waiting: VecDeque<Request>,
    pub serving: Slab<Request>,
}

impl Node {
    /// Time of its next turn, in world time.
    pub fn due(&self, world: &World) -> Nanos {
        if !self.alive || self.paused {
            return Nanos::NEVER;
        }
        let free = self.busy.max(self.clock.busy_until());
        let soonest = if world.is_ready(self.process) { world.now() } else { self.wake };
        soonest.max(free)
    }

    /// Tells a copy what the record says of the disk's owner.
    pub fn tell_copy(&mut self, planted: Planted) {
        if planted.has(Bug::SkipSeal) {
            return;
        }
        let (Some((_, host)), Some(reactor)) = (&mut self.host, &mut self.reactor) else { return };
        let owner = self.view.owner.map(|owner| name(owner.node));
        host.record_is(reactor, self.view.epoch, owner.as_deref());
        self.wake();
    }

    /// Wakes the shard for new work.
    pub fn wake(&mut self) {
        self.wake = Nanos(0);
    }
}

impl Cluster {
    /// A process starts on a machine.
    pub fn start(&mut self, number: usize, incarnation: u32) -> Node {
        let process = self.world.process(number);
        let drift = if self.should_inject(Fault::ClockDrift, 1) { self.rng.i64(-40..=40) } else { 0 };
        let clock = self.world.clock(process, drift);
        let config = ReactorConfig { buffer_limit: 8 << 20, ..ReactorConfig::default() };
        let reactor = Reactor::simulated(&self.world, process, Rc::clone(&clock), config);
        let mut node = Node {
            number,
            incarnation,
            alive: true,
            paused: false,
            reaches: true,
            process,
            disk: None,
            host: None,
            leaving: Vec::new(),
            retired: Vec::new(),
            device: None,
            reactor: Some(reactor.expect("a descriptor for its waker")),
            clock,
            session: Session::default(),
            view: Record::default(),
            owner_gone: None,
            former_since: Vec::new(),
            connected: [None; NODES],
            held: Vec::new(),
            told_until: Nanos(0),
            forgotten_below: 0,
            overstays: None,
            opening: 0,
            idle_turns: 0,
            wake: Nanos(0),
            busy: Nanos(0),
        };
        self.open_flash(&mut node);
        node
    }

    /// Ends a process; its memory is lost.
    pub fn end(&mut self, node: usize, death: Death) {
        self.leave_flash(node, death == Death::PowerCut);
        let node = &mut self.nodes[node];
        self.world.end(node.process, death);
        (node.alive, node.paused) = (false, false);
        (node.disk, node.host) = (None, None);
        node.leaving.clear();
        node.retired.clear();
        node.held.clear();
        node.device = None;
        node.reactor = None;
    }

    /// Drops the parts in the order that they require.
    pub fn switch_off(&mut self) {
        for node in 0..self.nodes.len() {
            self.end(node, Death::PowerCut);
        }
        self.tasks.clear();
    }

    /// One turn of the shard's loop.
    pub fn turn(&mut self, number: usize) {
        let mut notices = Vec::new();
        let mut done = Vec::new();
        let node = &mut self.nodes[number];
        let Some(reactor) = &mut node.reactor else { return };
        let mut events = Vec::new();
        reactor.wait(Nanos(0), &mut events).expect("the simulated engine polls without errors");
        let mut moved = !events.is_empty();
        for event in events {
            let Some(event) = retired_event(&mut node.retired, reactor, event) else { continue };
            let owner = event.token.owner;
            if let Some((id, host)) = &mut node.host
                && (*id == owner || host.store_owner() == Some(owner))
            {
                host.on_event(reactor, event);
                continue;
            }
            let open = node.disk.iter_mut().map(|disk| (&mut disk.accel, disk.backing));
            let mut accels = open.chain(node.leaving.iter_mut().map(|(_, accel, backing)| (accel, *backing)));
            if let Some((accel, _)) = accels.find(|(accel, backing)| {
                *backing == owner || accel.peers_id() == owner || accel.store_id() == Some(owner)
            }) {
                accel.on_event(reactor, event);
            }
        }
        let (mut deadline, mut late) = (Nanos::NEVER, None);
        if let Some((_, host)) = &mut node.host {
            let more = host.advance(reactor);
            deadline = if more { Nanos(0) } else { host.deadline() };
        }
        if let Some(disk) = &mut node.disk {
            moved |= disk.pump(reactor, self.durable_writes);
            let destaged = disk.accel.marks().destaged;
            disk.accel.advance(reactor, &mut done);
            late = disk.right.was_broken();
            self.counts.checkpoints += u64::from(disk.accel.marks().destaged > destaged);
            disk.accel.take_notices(&mut notices);
            deadline = deadline.min(disk.deadline());
        }
        for (_, accel, _) in &mut node.leaving {
            accel.advance(reactor, &mut Vec::new());
            deadline = deadline.min(accel.deadline());
        }
        moved |= !done.is_empty() || !notices.is_empty();
        let now = self.world.now();
        node.busy = now.max(node.clock.busy_until()) + TURN;
        node.wake = node.clock.when(deadline).max(node.busy);
        let spins = deadline <= node.clock.at(now) && !moved;
        node.idle_turns = if spins { node.idle_turns + 1 } else { 0 };
        let idle = node.idle_turns;
        if let Some(late) = late {
            self.fail(|| format!("P4: n{number} writes to the backing {late:?} after its right has ended"));
        }
        if idle > IDLE_TURNS {
            self.fail(|| format!("P10: n{number} spins: {idle} turns in a row with nothing to do"));
        }
        self.heal(number);
        let serial = self.nodes[number].disk.as_ref().map_or(0, |disk| disk.serial);
        for completion in done {
            self.complete(number, completion);
        }
        for notice in notices {
            self.notice(number, serial, notice);
        }
    }

    /// The backing is open: opens the disk that the record, read in this session, assigns to this process, with the log of its
    /// copy, if any. The record may have changed since.
    pub fn open(&mut self, process: Process, number: u64, record: &Record, disk: &DiskRecord, session: u64) {
        let opening = &mut self.nodes[process.node].opening;
        if *opening != number {
            return;
        }
        *opening = 0;
        // The registry has ended the former owner's lease: its right was over before.
        let ended = self.former_has_ended(process, disk);
        let former = if ended { Former::Stopped } else { Former::Silent };
        let (medium, planted) = (self.medium, self.planted);
        let Cluster { destage_delay, batch_records, checkpoint_records, .. } = *self;
        self.serial += 1;
        let serial = self.serial;
        let file = self.world.open(medium);
        let node = &mut self.nodes[process.node];
        let store = if record.write_back { Ok(None) } else { node.empty_store(disk.id) };
        let Some(reactor) = &mut node.reactor else { return };
        let inherited = match (record.write_back, node.host.take()) {
            (true, Some((_, mut host))) if host.replica().is_complete() => {
                let lineage = host.replica().state(0).lineage;
                let copy = planted.has(Bug::SkipSeal).then(|| unsealed(host.replica(), lineage));
                node.host = copy.map(|copy| {
                    let owner = reactor.new_owner();
                    (owner, ReplicaHost::holding(owner, copy, None))
                });
                host.seal(record.epoch);
                host.inherit(reactor)
            }
            (true, host) => {
                node.host = host;
                return self.note(|| format!("n{} has no copy to open the disk with", process.node));
            }
            (false, host) => {
                let copy = host.and_then(|(_, host)| host.forget(reactor));
                retire(&mut node.retired, reactor, copy);
                match store {
                    Ok(mut store) => {
                        // No data exists only on this flash.
                        let fails = node.device.as_ref().is_some_and(|device| device.has_failed());
                        let fails = store.as_mut().filter(|_| fails);
                        fails.into_iter().for_each(|store| store.fail("it has failed before".into()));
                        (Inheritance::Nothing, store)
                    }
                    Err(error) => {
                        return self.note(|| format!("n{} cannot open the disk: {error}", process.node));
                    }
                }
            }
        };
        let right = Guard::new(&self.world, &node.clock);
        let config = AccelConfig {
            peer_deadline: PEER_DEADLINE,
            batch_records,
            destage_delay,
            checkpoint_records,
            serves_until: Arc::clone(&right.until),
            ..AccelConfig::standalone(0)
        };
        let backing = Backing::new(reactor, file, (BLOCKS * BLOCK) as u64, Some(right.clone()));
        let backing_id = backing.owner();
        reactor.guard(backing_id, &right.until);
        let lower = Metered::new("backing", backing);
        let (inheritance, store) = inherited;
        let configuration = record.configuration();
        let accel = Accel::new(reactor, config, configuration, inheritance, former, lower, store);
        let mut accel = accel.expect("memory for a log");
        accel.plant(planted);
        let trusts = planted.has(Bug::OpenWhileFenced);
        let confirmed = if trusts { node.session.number } else { session };
        node.connected = [None; NODES];
        node.disk = Some(Disk {
            serial,
            accel,
            backing: backing_id,
            right,
            confirmed,
            told_epoch: record.epoch,
            told_policy: record.wanted,
            told_former: ended,
            moving: None,
            waiting: VecDeque::new(),
            serving: Slab::new(),
        });
        node.wake();
        self.publish(process);
        self.note(|| format!("n{} opens the disk in epoch {}: {record:?}", process.node, record.epoch));
    }

    /// Releases a disk of another owner: the log stays as a copy if the record requires it.
    pub fn release_disk(&mut self, process: Process) {
        let keep = self.registry_view(process).replicas.contains(&process);
        let planted = self.planted;
        let node = &mut self.nodes[process.node];
        let (Some(mut disk), Some(reactor)) = (node.disk.take(), &mut node.reactor) else { return };
        node.former_since.clear();
        match disk.accel.release(reactor) {
            Some((replica, store)) if keep => {
                let owner = reactor.new_owner();
                let mut host = ReplicaHost::holding(owner, replica, store);
                host.plant(planted);
                node.host = Some((owner, host));
            }
            Some((_, store)) => retire(&mut node.retired, reactor, store),
            None => {}
        }
        let mut broken: Vec<Request> = disk.waiting.drain(..).collect();
        broken.extend(disk.serving.drain());
        node.leaving.push((disk.told_epoch, disk.accel, disk.backing));
        node.wake();
        self.note(|| format!("n{} releases the disk", process.node));
        for request in broken {
            self.reply(process.node, request, None);
        }
    }

    /// Whether released disks have no I/O in flight any more; drops them.
    pub fn take_left(&mut self, process: Process) -> bool {
        let leaving = &mut self.nodes[process.node].leaving;
        let before = leaving.len();
        leaving.retain(|(_, accel, _)| !accel.is_quiet());
        before > 0 && leaving.is_empty()
    }

    /// An owner, or a former one, has connected.
    pub fn attach(&mut self, process: Process, owner: String, end: End) {
        let names = |record: &Record| record.owner.is_some_and(|one| name(one.node) == owner);
        let view = &self.nodes[process.node].view;
        let asks_nobody = self.planted.has(Bug::SkipSeal) || self.planted.has(Bug::IgnoreEpoch);
        let known = if names(view) || asks_nobody {
            view.epoch
        } else if self.reaches_registry(process.node) && names(&self.registry.record) {
            self.registry.record.epoch
        } else {
            self.counts.refusals += 1;
            return self.note(|| format!("n{} turns {owner} away: not the owner", process.node));
        };
        let (planted, disk_id) = (self.planted, self.registry.disk().id);
        let node = &mut self.nodes[process.node];
        let is_open = node.disk.is_some() || node.opening != 0;
        if (is_open && !planted.has(Bug::SkipSeal)) || known == 0 {
            // Dropped: the caller finds no process here.
            return;
        }
        if node.host.is_none() {
            if node.device.as_ref().is_some_and(|device| device.has_failed()) {
                return self.note(|| format!("n{} keeps no copy: its flash has failed", process.node));
            }
            let store = match node.empty_store(disk_id) {
                Ok(store) => store,
                Err(error) => return self.note(|| format!("n{} keeps no copy: {error}", process.node)),
            };
            let Some(reactor) = &mut node.reactor else { return };
            let id = reactor.new_owner();
            let mut host = ReplicaHost::new(id, 0, store, known).expect("memory for a log");
            host.plant(planted);
            node.host = Some((id, host));
        }
        let (Some((_, host)), Some(reactor)) = (&mut node.host, &mut node.reactor) else { return };
        let attached = host.attach(reactor, owner, known, end.into());
        node.wake();
        if let Err(error) = attached {
            self.counts.refusals += 1;
            self.note(|| format!("n{} refuses a connection: {error}", process.node));
        }
    }

    /// A request reaches the export.
    pub fn arrives(&mut self, process: Process, serial: u64, request: Request) {
        let node = &mut self.nodes[process.node];
        match node.disk.as_mut().filter(|disk| disk.serial == serial) {
            Some(disk) => {
                disk.waiting.push_back(request);
                node.wake();
            }
            None => self.reply(process.node, request, None),
        }
    }

    fn complete(&mut self, number: usize, completion: Completion) {
        let Some(disk) = &mut self.nodes[number].disk else { return };
        let request = disk.serving.remove(completion.tag.0 as usize);
        let epoch = disk.told_epoch;
        match completion.result {
            Ok(outcome) => {
                self.counts.answers += 1;
                self.note(|| format!("n{number} answers {request:?} in epoch {epoch}"));
                self.enough_copies(number, request);
                let value = value_block(&outcome);
                self.reply(number, request, Some(value));
            }
            Err(error) => {
                self.note(|| format!("n{number} fails {request:?}: {error}"));
                self.reply(number, request, None);
            }
        }
    }

    /// After a takeover the owner acknowledges no new write before the set is restored or the mode is write-through (P1).
    fn enough_copies(&mut self, number: usize, request: Request) {
        let process = self.process(number);
        let record = &self.registry.record;
        if request.kind == RequestKind::Write && record.short && record.owner == Some(process) {
            self.fail(|| format!("P1: n{number} acknowledges with fewer copies than are requested"));
        }
    }

    fn notice(&mut self, number: usize, serial: u64, notice: AccelNotice) {
        let process = self.process(number);
        self.note(|| format!("n{number}: {notice:?}"));
        match notice {
            AccelNotice::WantPeer { node, connected, exclude } => {
                self.want_peer(process, serial, node, &connected, &exclude);
            }
            AccelNotice::WantConfiguration { epoch, replicas, write_back, .. } => {
                self.propose(process, serial, epoch, &replicas, write_back);
            }
            AccelNotice::Fenced(_) => {
                self.counts.refusals += 1;
                self.after(100, 5_000, Task::Look { process });
            }
            AccelNotice::Tell(..) => {}
        }
    }

    /// The record at a node's last read.
    pub fn registry_view(&self, process: Process) -> &Record {
        &self.nodes[process.node].view
    }

    /// The node of a reference in the record.
    pub fn named(node: &NodeRef) -> Process {
        process_of(node)
    }
}

impl Disk {
    /// Submits waiting requests to the accelerator, in order, while it has room. Returns whether any was submitted.
    fn pump(&mut self, reactor: &mut Reactor, durable: bool) -> bool {
        let mut moved = false;
        while let Some(request) = self.waiting.front()
            && self.accel.has_room(request.kind.of_layer(), request.kind.bytes())
        {
            let Some(request) = self.waiting.pop_front() else { break };
            let tag = Tag(self.serving.insert(request) as u64);
            let offset = (request.block * BLOCK) as u64;
            moved = true;
            let submitted = match request.kind {
                RequestKind::Flush => weir_block::Request::Flush { tag },
                RequestKind::Read => {
                    let buffer = reactor.buffers().take(BLOCK).expect("requests are few and small");
                    weir_block::Request::Read { tag, offset, buffer }
                }
                RequestKind::Write => {
                    let data = block_of(request.value);
                    self.accel.submit(
                        reactor,
                        weir_block::Request::Write {
                            tag,
                            offset,
                            payload: Payload::Lent(&data),
                            fua: durable,
                        },
                    );
                    continue;
                }
            };
            self.accel.submit(reactor, submitted);
        }
        moved
    }

    /// A request that waits for room is retried after a turn of the accelerator.
    fn deadline(&self) -> Nanos {
        let room = self
            .waiting
            .front()
            .is_some_and(|request| self.accel.has_room(request.kind.of_layer(), request.kind.bytes()));
        if room { Nanos(0) } else { self.accel.deadline() }
    }
}
