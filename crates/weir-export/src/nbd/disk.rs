//! All connections of one disk, on the disk's shard.

use std::io;
use std::time::Duration;

use slab::Slab;
use weir_block::{Action, Completion, Event, Layer, LayerMeter, Meter, Nanos, OwnerId, Reactor, Token};

use super::connection::{Connection, Limits, Pumped, TURN, Turn};
use super::listener::Client;
use super::workspace::{PATIENCE, Workspace};

/// How long somebody must have waited for memory before clients that do not move are looked for, and how often then.
const STALL_CHECK: Duration = Duration::from_secs(1);

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
    next_stall_check: Nanos,
    closing: bool,
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
            next_stall_check: Nanos::default(),
            closing: false,
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
    pub fn attach(&mut self, client: Client, workspace: &mut Workspace) -> io::Result<()> {
        if self.closing {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "the disk is being closed"));
        }
        if self.connections.len() >= self.limits.connections {
            let reason = format!("the disk has {} connections already", self.limits.connections);
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, reason));
        }
        let entry = self.connections.vacant_entry();
        let index = u32::try_from(entry.key()).expect("the number of connections is limited");
        let token = Token { owner: self.owner, slot: index };
        let Client { stream, leftover, session } = client;
        entry.insert(Connection::new(stream, &session, leftover, token, workspace)?);
        self.list_ready(index);
        Ok(())
    }

    /// Notes that a connection can be read from or written to. Nothing is done before [`pump`](NbdDisk::pump)
    /// and [`flush`](NbdDisk::flush).
    pub fn on_event(&mut self, event: &Event) {
        let Action::Ready(interest) = event.action else { return };
        let index = event.token.slot;
        let Some(connection) = self.connections.get_mut(index as usize) else { return };
        if connection.on_event(interest) {
            self.list_ready(index);
        } else {
            self.list_flush(index);
        }
    }

    /// Receives what has arrived and submits it to `layer`: one turn for each connection that has something and for
    /// each that had to wait.
    pub fn pump(&mut self, reactor: &mut Reactor, layer: &mut dyn Layer, workspace: &mut Workspace) {
        if self.ready.is_empty() && self.held.is_empty() {
            return;
        }
        let mut turn = std::mem::take(&mut self.turn);
        turn.append(&mut self.held);
        turn.append(&mut self.ready);
        for index in turn.drain(..) {
            let Some(connection) = self.connections.get_mut(index as usize) else { continue };
            connection.listed = false;
            let (meter, limits, now) = (&mut self.meter, &self.limits, reactor.now());
            let mut turn = Turn { reactor, layer, workspace, meter, limits, now, index, left: TURN };
            match connection.pump(&mut turn) {
                Pumped::Idle | Pumped::Closing => {}
                Pumped::More => self.list_ready(index),
                Pumped::Held => {
                    self.connections[index as usize].listed = true;
                    self.held.push(index);
                }
            }
            self.list_flush(index);
        }
        self.turn = turn;
    }

    /// Whether a connection waits for room, in the layer or in the shard's memory, which other disks give back.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.held.is_empty()
    }

    /// Whether a connection stopped only to give others their turn.
    #[must_use]
    pub fn has_more(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Takes the layer's answers and queues the replies.
    pub fn complete(&mut self, done: &mut Vec<Completion>) {
        for Completion { tag, result } in done.drain(..) {
            let (index, slot) = ((tag.0 >> 32) as u32, tag.0 as u32);
            let connection = &mut self.connections[index as usize];
            connection.complete(slot, result, &mut self.meter);
            self.list_flush(index);
        }
    }

    /// Sends what is queued, one call for each connection that has something, and forgets the connections that
    /// are over.
    pub fn flush(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        self.close_stalled(reactor, workspace);
        let mut to_flush = std::mem::take(&mut self.to_flush);
        for index in to_flush.drain(..) {
            let Some(connection) = self.connections.get_mut(index as usize) else { continue };
            connection.flush_listed = false;
            connection.flush(reactor, workspace, &mut self.meter);
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
        let could_go_on = |index: &u32| {
            self.connections[*index as usize].could_go_on(layer, reactor, workspace, &self.limits)
        };
        if !self.ready.is_empty() || self.held.iter().any(could_go_on) {
            return Nanos::default();
        }
        // Whose turn it is changes with time, and clients that do not move are to be found.
        let somebody_waits = workspace.longest_wait().is_some();
        if somebody_waits { reactor.now() + PATIENCE } else { Nanos::NEVER }
    }

    /// Begins to close: nothing more is read, what is in flight is answered, then the clients are disconnected.
    /// Done when [`is_empty`](NbdDisk::is_empty).
    pub fn close(&mut self, workspace: &mut Workspace) {
        self.closing = true;
        for (index, connection) in &mut self.connections {
            connection.stop_reading(workspace);
            if !connection.flush_listed {
                connection.flush_listed = true;
                self.to_flush.push(index as u32);
            }
        }
    }

    /// Disconnects all clients now, whatever they are owed. The layer's answers are still to be taken; done when
    /// [`is_empty`](NbdDisk::is_empty).
    pub fn abort(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        self.close(workspace);
        for (_, connection) in &mut self.connections {
            connection.close(reactor, workspace, &mut self.meter);
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

    /// What the export saw: a request arrives when it is parsed and is complete when its reply was handed to the socket.
    /// Requests that are refused here are not counted.
    #[must_use]
    pub fn meter(&self) -> LayerMeter {
        LayerMeter { layer: "export", meter: self.meter.clone() }
    }

    fn list_ready(&mut self, index: u32) {
        let connection = &mut self.connections[index as usize];
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
        if self.connections.remove(index as usize).listed {
            self.ready.retain(|&other| other != index);
            self.held.retain(|&other| other != index);
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
