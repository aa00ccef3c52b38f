//! All connections of one disk, on the disk's shard.

use std::io;
use std::time::Duration;

use slab::Slab;
use weir_block::{
    Action, Completion, Event, Interest, Layer, LayerMeter, Meter, Nanos, OwnerId, Reactor, Token,
};

use super::client::{AcceptedClient, Via};
use super::connection::{Connection, Limits, Pumped, Room, TURN, Turn};
use super::edges::Edges;
use super::gate::Gate;
use super::hold::{Hold, Order};
use crate::limit::{Delays, Rate};
use crate::workspace::{PATIENCE, Workspace};

/// How long somebody must have waited for memory before clients that do not move are looked for, and how often then.
const STALL_CHECK: Duration = Duration::from_secs(1);

/// How long a disk that is being closed goes on serving clients that do not fall silent. Then it refuses what they ask for.
const SERVED: Duration = Duration::from_secs(2);

/// How long it goes on telling them so; who has not disconnected by then is disconnected.
const LINGERS: Duration = Duration::from_millis(500);

/// As [`LINGERS`], for a disk that another node serves by now: its destage waits for this node's release of the disk (P4).
const LEAVES: Duration = Duration::from_millis(100);

/// Between two looks at whether clients have fallen silent.
const FAREWELL_CHECK: Duration = Duration::from_millis(2);

/// The end of a disk's connections.
#[derive(Clone, Copy, Debug)]
struct Farewell {
    since: Nanos,
    /// The time for which new requests are served.
    served: Duration,
    /// The time for which they are refused after that. Unread replies are kept for as long again.
    lingers: Duration,
}

/// The outcome of the turns of a disk's connections.
struct Turns {
    /// Most bytes of the shard's buffers that were lent when a connection had to wait.
    lent: usize,
    /// A connection has given buffers back.
    gave_back: bool,
}

/// The NBD side of one disk: its connections, and the meter `export`.
///
/// The shard's loop calls, in this order:
/// [`on_event`](NbdDisk::on_event) for each event of [`owner`](NbdDisk::owner) and [`attach`](NbdDisk::attach) for each
/// new client; [`pump`](NbdDisk::pump); `Layer::advance`; [`complete`](NbdDisk::complete);
/// [`flush`](NbdDisk::flush); and waits until [`deadline`](NbdDisk::deadline) at most.
#[derive(Debug)]
pub struct NbdDisk {
    owner: OwnerId,
    limits: Limits,
    connections: Slab<Connection>,
    /// Have something to read, or may have.
    ready: Vec<u32>,
    /// Wait for room somewhere; first come, first served.
    held: Vec<u32>,
    /// Have something to send or to close.
    to_flush: Vec<u32>,
    /// Scratch for the list that is being worked off.
    turn: Vec<u32>,
    meter: Meter,
    edges: Edges,
    /// The limit, and who waits for it.
    gate: Gate,
    /// Bytes of buffers that the connections hold.
    memory: usize,
    /// All of `held` lack buffers: no connection of this disk has given any back since, and the shard had lent so many bytes. Until
    /// it has lent fewer, none of them could go on, and hundreds of them cost no time.
    stuck: Option<usize>,
    next_stall_check: Nanos,
    /// A hold of the clients before a move.
    hold: Option<Hold>,
    /// It is being closed.
    closing: Option<Farewell>,
}

impl NbdDisk {
    /// A disk without connections.
    pub fn new(reactor: &mut Reactor, limits: Limits) -> NbdDisk {
        NbdDisk {
            owner: reactor.new_owner(),
            limits,
            connections: Slab::new(),
            ready: Vec::new(),
            held: Vec::new(),
            to_flush: Vec::new(),
            turn: Vec::new(),
            meter: Meter::new(),
            edges: Edges::default(),
            gate: Gate::default(),
            memory: 0,
            stuck: None,
            next_stall_check: Nanos::default(),
            hold: None,
            closing: None,
        }
    }

    /// The owner of the events of this disk's connections.
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    /// Takes a client whose handshake is done. Its requests are served from the next
    /// [`pump`](NbdDisk::pump) on.
    ///
    /// # Errors
    /// The disk is being closed or has as many connections as it may, or the socket is unusable; the client is
    /// disconnected.
    pub fn attach(&mut self, client: AcceptedClient, workspace: &mut Workspace) -> io::Result<()> {
        if self.closing.is_some() {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "the disk is being closed"));
        }
        if self.connections.len() >= self.limits.connections {
            let reason = format!("the disk has {} connections already", self.limits.connections);
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, reason));
        }
        let entry = self.connections.vacant_entry();
        let index = u32::try_from(entry.key()).expect("the number of connections is limited");
        let token = Token { owner: self.owner, slot: index };
        let AcceptedClient { stream, leftover, session, via } = client;
        let connection = entry.insert(Connection::new(stream, &session, leftover, token, workspace)?);
        connection.via = via;
        if self.hold.is_some() {
            connection.pause();
        }
        self.list_ready(index);
        Ok(())
    }

    /// Notes that a connection can be read from or written to. Nothing is done before [`pump`](NbdDisk::pump)
    /// and [`flush`](NbdDisk::flush).
    pub fn on_event(&mut self, event: &Event) {
        let Action::Ready(interest) = event.action else { return };
        let index = event.token.slot;
        let Some(connection) = self.connections.get_mut(index as usize) else { return };
        connection.on_event(interest);
        match interest {
            Interest::Read => self.list_ready(index),
            Interest::Write => self.list_flush(index),
            // Its requests leave the line with it. Anywhere else they are served, and the end is read behind them.
            Interest::HangUp if connection.lined && connection.has_hung_up() => {
                connection.hung_up = true;
                self.list_ready(index);
            }
            Interest::HangUp => {}
        }
    }

    /// Receives what has arrived and submits it to `layer`: one turn for each connection that has something and for
    /// each that had to wait.
    pub fn pump(&mut self, reactor: &mut Reactor, layer: &mut dyn Layer, workspace: &mut Workspace) {
        self.edges.advance(layer, reactor);
        let is_stuck = self.is_stuck(reactor);
        let waits_for_limit = self.gate.deadline(reactor.recent()) > reactor.recent();
        if self.ready.is_empty() && (is_stuck || self.held.is_empty()) && waits_for_limit {
            return;
        }
        let connections = &self.connections;
        let waits = |index| connections.get(index as usize).is_some_and(Connection::waits_for_edges);
        self.edges.release(waits);
        let mut turns = Turns { lent: 0, gave_back: false };
        let mut turn = std::mem::take(&mut self.turn);
        if !is_stuck {
            turn.append(&mut self.held);
            self.stuck = None;
        }
        turns.lent = self.stuck.unwrap_or(0);
        turn.append(&mut self.ready);
        // Whoever lines up again does so behind the others.
        for _ in 0..self.gate.waiting() {
            let Some(index) = self.gate.call(reactor.now()) else { break };
            self.give_turn(index, &mut turns, reactor, layer, workspace);
            self.gate.end_call();
        }
        for index in turn.drain(..) {
            self.give_turn(index, &mut turns, reactor, layer, workspace);
        }
        self.turn = turn;
        let lacks_memory = |index: &u32| self.connections[*index as usize].lacks_memory();
        let is_stuck = !turns.gave_back && !self.held.is_empty() && self.held.iter().all(lacks_memory);
        self.stuck = is_stuck.then_some(turns.lent);
    }

    /// One turn of a connection.
    fn give_turn(
        &mut self,
        index: u32,
        turns: &mut Turns,
        reactor: &mut Reactor,
        layer: &mut dyn Layer,
        workspace: &mut Workspace,
    ) {
        let Some(connection) = self.connections.get_mut(index as usize) else { return };
        (connection.listed, connection.lined) = (false, false);
        let (meter, edges, gate) = (&mut self.meter, &mut self.edges, &mut self.gate);
        let (limits, now, disk_memory) = (&self.limits, reactor.now(), self.memory);
        let (info, left) = (layer.info(), TURN);
        let mut turn = Turn {
            reactor,
            layer,
            info,
            workspace,
            meter,
            edges,
            gate,
            limits,
            now,
            index,
            left,
            disk_memory,
        };
        let pumped = connection.pump(&mut turn);
        turns.gave_back |= connection.count(&mut self.memory);
        match pumped {
            Pumped::Idle | Pumped::Closing => {}
            Pumped::More => self.list_ready(index),
            Pumped::Held => {
                connection.listed = true;
                turns.lent = turns.lent.max(reactor.buffers().lent());
                self.held.push(index);
            }
            Pumped::Limited => (connection.listed, connection.lined) = (true, true),
        }
        self.list_flush(index);
    }

    /// Whether it would be in vain to give the waiting connections a turn.
    fn is_stuck(&self, reactor: &Reactor) -> bool {
        self.stuck.is_some_and(|lent| reactor.buffers().lent() >= lent)
    }

    /// Sets or removes the highest rate at which clients are served. Reads, writes, zeroing and discards count; the last two without
    /// bytes, because they move none. The allowance for a burst is full at first.
    pub fn set_rate(&mut self, rate: Option<Rate>, now: Nanos) {
        let waiting: Vec<u32> = self.gate.set(rate, now).collect();
        for index in waiting {
            self.list_ready(index);
        }
    }

    /// The delays that the limit has caused.
    #[must_use]
    pub fn delays(&self) -> Delays {
        self.gate.delays()
    }

    /// Whether a connection waits for room, in the layer or in the shard's memory, which other disks give back.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.held.is_empty() || self.edges.is_busy()
    }

    /// Whether a connection stopped only to give others their turn.
    #[must_use]
    pub fn has_more(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Takes an answer of the layer and queues the reply.
    pub fn complete(&mut self, Completion { tag, result }: Completion) {
        let (tag, result) = if Edges::is_ours(tag) {
            let Some((tag, error)) = self.edges.take(result) else { return };
            (tag, Err(error))
        } else {
            (tag, result)
        };
        let (index, slot) = ((tag.0 >> 32) as u32, tag.0 as u32);
        if let Some(hold) = &mut self.hold {
            hold.on_answer(Nanos::now());
        }
        let connection = &mut self.connections[index as usize];
        connection.complete(slot, result, &mut self.edges, &mut self.meter);
        self.list_flush(index);
    }

    /// Sends what is queued, one call for each connection that has something, and forgets the connections that
    /// are over.
    pub fn flush(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        self.close_stalled(reactor, workspace);
        self.advance_hold(reactor.recent());
        self.say_goodbye(reactor, workspace);
        let mut to_flush = std::mem::take(&mut self.to_flush);
        for index in to_flush.drain(..) {
            let Some(connection) = self.connections.get_mut(index as usize) else { continue };
            connection.flush_listed = false;
            connection.flush(reactor, workspace, &mut self.meter);
            if connection.count(&mut self.memory) {
                self.stuck = None;
            }
            if connection.is_finished() {
                self.forget(index);
            }
        }
        self.to_flush = to_flush;
    }

    /// When [`pump`](NbdDisk::pump) should be called again even if nothing happens. A time that has passed means:
    /// there is more to do now.
    #[must_use]
    pub fn deadline(&self, layer: &dyn Layer, reactor: &Reactor, workspace: &Workspace) -> Nanos {
        let (edges, limits, disk_memory) = (&self.edges, &self.limits, self.memory);
        let room = Room { layer, reactor, workspace, edges, limits, disk_memory };
        let could_go_on = |index: &u32| self.connections[*index as usize].could_go_on(*index, room);
        if !self.ready.is_empty()
            || self.edges.could_advance(layer, reactor.buffers())
            || (!self.is_stuck(reactor) && self.held.iter().any(could_go_on))
        {
            return Nanos::default();
        }
        // Whose turn it is changes with time, and clients that do not move are to be found.
        let somebody_waits = workspace.longest_wait().is_some();
        let goodbye = self.closing.is_some() && !self.connections.is_empty();
        let now = reactor.recent();
        let hold = self.hold.map_or(Nanos::NEVER, |hold| hold.deadline(now, FAREWELL_CHECK));
        hold.min(self.gate.deadline(now)).min(match (goodbye, somebody_waits) {
            (true, _) => now + FAREWELL_CHECK,
            (false, true) => now + PATIENCE,
            (false, false) => Nanos::NEVER,
        })
    }

    /// Begins to hold the clients before a move. As [`close`](NbdDisk::close), serves their requests and keeps the replies until
    /// no request is unanswered. Then takes no new requests and keeps the replies until the outcome of the move is known: after a
    /// reply, a client would send its next request into a connection that may be about to end. Clients that do not stop
    /// sending, and layers that do not answer, delay the move for a bounded time ([`Hold`]).
    pub fn hold(&mut self) {
        if self.closing.is_some() || self.hold.is_some() {
            return;
        }
        self.hold = Some(Hold::new(Nanos::now()));
        self.drain_all();
    }

    /// Whether the hold is complete. True without a hold.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.hold.is_none_or(|hold| hold.is_complete())
    }

    /// The disk stays: sends the kept replies and serves the clients again.
    pub fn resume(&mut self) {
        if self.hold.take().is_none() {
            return;
        }
        for index in self.indices() {
            self.connections[index as usize].resume();
            self.list_ready(index);
            self.list_flush(index);
        }
    }

    /// Another node serves the disk: sends the kept replies and ends the connections. Without a hold, as
    /// [`abort`](NbdDisk::abort).
    ///
    /// Requests that arrived after the hold, or that the layer did not answer in time, stay unanswered: a client that
    /// reconnects sends them again to the new owner, but QEMU passes an error to its guest (P9). Only a client above
    /// its limit of requests in flight, which QEMU never is, gets `NBD_ESHUTDOWN` for the rest.
    pub fn dismiss(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        if self.hold.take().is_none() {
            return self.abort(reactor, workspace);
        }
        self.closing = Some(Farewell { since: Nanos::now(), served: Duration::ZERO, lingers: LEAVES });
        for index in self.indices() {
            let connection = &mut self.connections[index as usize];
            if connection.has_asked_too_much() {
                connection.refuse_from_now(&mut self.meter);
                self.list_ready(index);
            } else {
                connection.leave(reactor, workspace, &mut self.meter);
            }
            self.list_flush(index);
        }
        self.flush(reactor, workspace);
    }

    /// Begins to close. What clients have asked for is served and answered, then they are disconnected: at a moment when nothing
    /// is unanswered, so that whoever reconnects elsewhere has nothing in doubt. Of a client that never falls silent, what
    /// comes later than [`SERVED`] is refused with `NBD_ESHUTDOWN`. Done when [`is_empty`](NbdDisk::is_empty).
    pub fn close(&mut self) {
        self.resume();
        let farewell = Farewell { since: Nanos::now(), served: SERVED, lingers: LINGERS };
        self.closing.get_or_insert(farewell);
        self.drain_all();
    }

    fn drain_all(&mut self) {
        for index in self.indices() {
            self.connections[index as usize].drain();
            self.list_ready(index);
            self.list_flush(index);
        }
    }

    fn indices(&self) -> Vec<u32> {
        self.connections.iter().map(|(index, _)| index as u32).collect()
    }

    /// Disconnects all clients now, whatever they are owed. The layer's answers are still to be taken; done when
    /// [`is_empty`](NbdDisk::is_empty).
    pub fn abort(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        self.close();
        for (_, connection) in &mut self.connections {
            connection.close(reactor, workspace, &mut self.meter);
        }
        self.flush(reactor, workspace);
    }

    /// Disconnects the clients that follow the disk on other nodes than `node`, whatever they are owed. This node's own stay, those
    /// that others forward, and those that only read.
    pub fn keep_via(&mut self, node: Option<&str>, reactor: &mut Reactor, workspace: &mut Workspace) {
        for index in self.indices() {
            let connection = &mut self.connections[index as usize];
            let follows_elsewhere =
                matches!(&connection.via, Some(Via::Follower(via)) if Some(via.as_str()) != node);
            if follows_elsewhere {
                connection.close(reactor, workspace, &mut self.meter);
                self.list_flush(index);
            }
        }
        self.flush(reactor, workspace);
    }

    /// Whether there is no connection left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// Connections, those that are closing included.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Requests at the layer.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.connections.iter().map(|(_, connection)| connection.in_flight()).sum()
    }

    /// The export's meter: a request arrives when it is parsed and is complete when its reply was handed to the socket.
    /// Requests that are refused here are not counted.
    #[must_use]
    pub fn meter(&self) -> LayerMeter {
        LayerMeter { layer: "export", meter: self.meter.clone() }
    }

    fn list_ready(&mut self, index: u32) {
        // A waiting one stays in `held`; its state may be another by now.
        self.stuck = None;
        let connection = &mut self.connections[index as usize];
        // In line it would wait for its turn, and it is to have one now.
        if std::mem::take(&mut connection.lined) {
            self.gate.leave(index);
            connection.listed = false;
        }
        if !connection.listed {
            connection.listed = true;
            self.ready.push(index);
        }
    }

    fn list_flush(&mut self, index: u32) {
        let connection = &mut self.connections[index as usize];
        if !connection.flush_listed {
            connection.flush_listed = true;
            self.to_flush.push(index);
        }
    }

    fn forget(&mut self, index: u32) {
        let mut gone = self.connections.remove(index as usize);
        gone.uncount(&mut self.memory);
        self.stuck = None;
        if gone.listed {
            self.ready.retain(|&other| other != index);
            self.held.retain(|&other| other != index);
        }
        if gone.lined {
            self.gate.leave(index);
        }
        // Changes of others may wait for it, and nothing else would wake them.
        self.edges.release(|who| who != index);
    }

    /// Takes the next steps of a hold that are due.
    fn advance_hold(&mut self, now: Nanos) {
        while let Some(hold) = &mut self.hold {
            let mut all = self.connections.iter().map(|(_, connection)| connection);
            let takes = hold.takes();
            let quiet = takes && all.all(|connection| !connection.takes() || connection.is_quiet(now));
            let unanswered = !takes && all.any(Connection::is_owed_an_answer);
            let Some(order) = hold.step(now, quiet, unanswered) else { return };
            for (index, connection) in &mut self.connections {
                match order {
                    Order::Pause => connection.pause(),
                    Order::Send => {
                        connection.send_kept();
                        if !connection.flush_listed {
                            connection.flush_listed = true;
                            self.to_flush.push(index as u32);
                        }
                    }
                }
            }
        }
    }

    /// While the disk is being closed: ends the connections on which nothing is unanswered, and those that take too long.
    fn say_goodbye(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        let Some(Farewell { since, served, lingers }) = self.closing else { return };
        let now = reactor.now();
        let lasts = now - since;
        for index in self.indices() {
            let connection = &mut self.connections[index as usize];
            let does_not_read = lasts >= served + 2 * lingers && connection.does_not_take_its_replies();
            if does_not_read || connection.has_parted(now) {
                connection.close(reactor, workspace, &mut self.meter);
            } else if connection.is_quiet(now) || lasts >= served + lingers {
                connection.take_leave(workspace, &mut self.meter);
            } else if lasts >= served && connection.refuse_from_now(&mut self.meter) {
                self.list_ready(index);
            }
            self.list_flush(index);
        }
    }

    /// While somebody waits for memory, disconnects clients that have held some for longer than they may without
    /// moving.
    fn close_stalled(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        let Some(since) = workspace.longest_wait() else { return };
        let now = reactor.now();
        if now - since < STALL_CHECK || now < self.next_stall_check {
            return;
        }
        self.next_stall_check = now + STALL_CHECK;
        for (index, connection) in &mut self.connections {
            if connection.stalled_since().is_some_and(|since| now - since >= self.limits.stall) {
                tracing::warn!(stall = ?self.limits.stall, "nbd: closing a client that holds memory and does not move");
                connection.close(reactor, workspace, &mut self.meter);
                if !connection.flush_listed {
                    connection.flush_listed = true;
                    self.to_flush.push(index as u32);
                }
            }
        }
    }
}
