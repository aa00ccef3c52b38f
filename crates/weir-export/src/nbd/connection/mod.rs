//! One client in the transmission phase: requests in, replies out.

mod intake;
mod parts;

use std::io;
use std::time::Duration;

use slab::Slab;
use weir_block::{
    Buffer, Extent, Interest, IoError, Layer, LayerInfo, Meter, Nanos, Outcome, Reactor, RequestKind, Socket,
    Tag, Token,
};
use weir_nbd::protocol::error;
use weir_nbd::server::{Asked, CheckedRequest, RequestHead, Session, Terms, describe_extents, error_number};

use super::client::Via;
use super::edges::Edges;
use super::gate::Gate;
use super::replies::{Counted, Data, Flushed, Form, Replies, To};
use crate::workspace::Workspace;
pub use intake::BAD_REQUESTS;
use parts::{Rest, Whole};

/// Requests processed in one turn; then the connection sends the answers, and other connections have their turn. A small
/// number, so that a client with a deep queue processes the first answers and sends new requests while the server processes
/// the rest.
pub(super) const TURN: usize = 16;

/// Limits of the connections of one disk (P10).
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests of one connection that are in flight or whose replies are unsent. A client with more of them
    /// is not read from.
    pub requests: usize,
    /// Bytes of buffers that one connection holds for requests and unsent replies. Never less than one request.
    pub bytes: usize,
    /// Connections to one disk.
    pub connections: usize,
    /// The time for which a client that holds memory may neither take its replies nor go on with a write while another client
    /// waits for memory. Without such a waiter it may stop for any time: a suspended guest does.
    pub stall: Duration,
}

impl Limits {
    /// Default limit of connections to one disk.
    pub(crate) const CONNECTIONS: usize = 16384;
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            requests: 128,
            bytes: 64 << 20,
            connections: Limits::CONNECTIONS,
            stall: Duration::from_secs(30),
        }
    }
}

/// Why parsing stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// The rest is the beginning of a request, or nothing.
    Incomplete,
    TurnOver,
    Held,
    /// The next request would exceed the disk's limit.
    Limited,
    /// Nothing is read for the time being.
    Paused,
    Closing,
}

/// The resources of a connection, lent to it for a turn.
pub(super) struct Turn<'a> {
    pub reactor: &'a mut Reactor,
    pub layer: &'a mut dyn Layer,
    /// Of `layer`, asked once for all requests of the turn.
    pub info: LayerInfo,
    pub workspace: &'a mut Workspace,
    pub meter: &'a mut Meter,
    pub edges: &'a mut Edges,
    pub gate: &'a mut Gate,
    pub limits: &'a Limits,
    pub now: Nanos,
    /// The connection's number on its disk, in the upper half of its tags.
    pub index: u32,
    /// Requests that it may still submit in this turn.
    pub left: usize,
    /// Bytes of buffers of all connections of the disk, as of the last count.
    pub disk_memory: usize,
}

impl Turn<'_> {
    fn tag(&self, slot: u32) -> Tag {
        Tag(u64::from(self.index) << 32 | u64::from(slot))
    }
}

/// The reason why a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pumped {
    /// Everything received is processed and the socket is being watched; or the connection is paused.
    Idle,
    /// There is more; give others a turn first.
    More,
    /// A limit is reached; see [`Connection::could_go_on`].
    Held,
    /// It waits in line at the disk's [`Gate`].
    Limited,
    /// Nothing more will be read.
    Closing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// The disk is being closed: new requests are still served, and the replies wait until no request is unanswered.
    Draining,
    /// The disk is about to move to another node: no new requests are read, those at the layer are answered.
    Paused {
        /// The replies wait until the outcome of the move is known.
        keeps: bool,
    },
    /// The disk has gone on without the client: new requests are refused with `NBD_ESHUTDOWN`.
    Refusing,
    /// Nothing more is read; requests in flight are still answered.
    Closing,
    /// All replies are sent and the connection is half-closed: received bytes are discarded until the client disconnects. With a
    /// full close, a client that sends at that moment gets a broken pipe before it has read its replies.
    Parting {
        since: Nanos,
    },
    /// The socket is closed. Requests in flight have to complete before the connection may be dropped.
    Dead,
}

/// One request to the layer: a client's request, or a part of one.
#[derive(Clone, Copy, Debug)]
struct Part {
    cookie: u64,
    offset: u64,
    length: u64,
    /// The request of which it is a part.
    whole: Option<u32>,
}

impl From<&RequestHead> for Part {
    fn from(head: &RequestHead) -> Part {
        Part { cookie: head.cookie, offset: head.offset, length: head.length, whole: None }
    }
}

/// A request at the layer.
#[derive(Debug)]
struct InFlight {
    part: Part,
    command: CheckedRequest,
    arrived: Nanos,
    /// Bytes of buffers that it holds.
    memory: usize,
    /// Bytes of a read's buffer before the requested ones.
    from: usize,
    /// Room for the reply to `BLOCK_STATUS`.
    status: Option<Buffer>,
}

/// A write whose payload is arriving in a buffer of its own.
#[derive(Debug)]
struct Incoming {
    part: Part,
    fua: bool,
    /// Whole blocks.
    buffer: Buffer,
    /// The payload's range in the buffer.
    from: usize,
    to: usize,
    /// Up to where it has arrived.
    filled: usize,
}

impl Incoming {
    fn is_whole_blocks(&self) -> bool {
        self.from == 0 && self.to == self.buffer.len()
    }
}

/// The needs of the next request.
#[derive(Clone, Copy, Debug)]
struct Need {
    /// Room at the layer for a request of this kind and length, unless it is answered here.
    at_layer: Option<(RequestKind, u64)>,
    /// Bytes of buffers.
    memory: usize,
    /// No request of the connection is in flight, and all its replies are out.
    alone: bool,
    /// It changes parts of blocks: no other change of the disk is in flight.
    parts_of_blocks: bool,
    /// It counts against the disk's limit, as one request with so many bytes.
    counts: Option<u64>,
}

impl Need {
    /// Nothing but a place among the replies.
    const REPLY: Need =
        Need { at_layer: None, memory: 0, alone: false, parts_of_blocks: false, counts: None };

    fn at_layer(kind: RequestKind, length: u64) -> Need {
        Need { at_layer: Some((kind, length)), ..Need::REPLY }
    }

    /// It is a client's request, which counts with so many bytes; not a part of one.
    fn counting(self, bytes: u64) -> Need {
        Need { counts: Some(bytes), ..self }
    }
}

/// The resources that a waiting request needs.
#[derive(Clone, Copy)]
pub(super) struct Room<'a> {
    pub layer: &'a dyn Layer,
    pub reactor: &'a Reactor,
    pub workspace: &'a Workspace,
    pub edges: &'a Edges,
    pub limits: &'a Limits,
    /// As [`Turn::disk_memory`].
    pub disk_memory: usize,
}

#[derive(Debug)]
pub(super) struct Connection {
    socket: Socket,
    terms: Terms,
    state: State,
    in_flight: Slab<InFlight>,
    /// Requests that go to the layer in parts.
    wholes: Slab<Whole>,
    /// The part of the last of them that is not at the layer yet. Later requests wait until it is.
    rest: Option<Rest>,
    replies: Replies,
    /// Received bytes that are not processed yet.
    stash: Vec<u8>,
    /// Bytes of `stash` that are processed.
    stash_taken: usize,
    incoming: Option<Incoming>,
    /// Payload bytes of a refused request that are still to be discarded.
    skip: u64,
    /// A reply has failed of which the beginning is out: the client can only be disconnected.
    broken: bool,
    /// There may be something to receive.
    readable: bool,
    /// The last writes did not fit the window.
    large_writes: bool,
    held: Option<Need>,
    /// `held` waits for buffers and nothing else.
    lacks_memory: bool,
    /// The next request that counts against the disk's limit has passed it, and waits for room.
    passed: bool,
    /// Since when the next request has waited for the disk's limit.
    limited_since: Option<Nanos>,
    /// The time for which requests before the next one have waited for the limit since it was received, and it behind them.
    limited: Duration,
    /// The server ends the connection: half-close it first ([`State::Parting`]).
    takes_leave: bool,
    /// The client has exceeded its limit of requests in flight while its replies were kept.
    has_crowded: bool,
    /// Bytes of buffers of requests in flight and of the incoming write.
    memory: usize,
    /// Bytes of buffers that it held when its disk counted last.
    counted: usize,
    /// The last time that bytes moved in either direction.
    moved: Nanos,
    /// The other node that it comes by, if it is not this one's.
    pub via: Option<Via>,
    /// The client has gone, and its next request waited for the disk's limit.
    pub hung_up: bool,
    /// In its disk's list of connections to pump, or in line at its gate.
    pub listed: bool,
    /// In line at its disk's gate.
    pub lined: bool,
    /// In its disk's list of connections to flush.
    pub flush_listed: bool,
}

impl Connection {
    pub fn new(
        stream: impl Into<weir_block::Stream>,
        session: &Session,
        leftover: Vec<u8>,
        token: Token,
        workspace: &mut Workspace,
    ) -> io::Result<Connection> {
        let socket = Socket::new(stream, token)?;
        workspace.stashed += leftover.capacity();
        Ok(Connection {
            socket,
            terms: Terms::from(session),
            state: State::Open,
            in_flight: Slab::new(),
            wholes: Slab::new(),
            rest: None,
            replies: Replies::default(),
            stash: leftover,
            stash_taken: 0,
            incoming: None,
            skip: 0,
            broken: false,
            readable: true,
            large_writes: false,
            held: None,
            lacks_memory: false,
            passed: false,
            limited_since: None,
            limited: Duration::ZERO,
            takes_leave: false,
            has_crowded: false,
            memory: 0,
            counted: 0,
            moved: Nanos::now(),
            via: None,
            hung_up: false,
            listed: false,
            lined: false,
            flush_listed: false,
        })
    }

    /// The socket is ready.
    pub fn on_event(&mut self, interest: Interest) {
        self.socket.on_event(interest);
        self.readable |= interest == Interest::Read;
    }

    /// Whether nobody would take the answers. A client that has only closed its sending half waits for them.
    pub fn has_hung_up(&self) -> bool {
        self.socket.has_hung_up()
    }

    /// Whom a reply is for.
    fn to(&self, cookie: u64, offset: u64) -> To {
        To { form: Form::from(self.terms), cookie, offset }
    }

    /// The layer has answered a request.
    pub fn complete(
        &mut self,
        slot: u32,
        result: Result<Outcome, IoError>,
        edges: &mut Edges,
        meter: &mut Meter,
    ) {
        let request = self.in_flight.remove(slot as usize);
        self.memory -= request.memory;
        let Some(kind) = kind_of(request.command) else { return };
        if kind.changes_data() {
            edges.end();
        }
        if let Some(whole) = request.part.whole {
            return self.complete_part(whole, request, result, meter);
        }
        let counted = Counted { kind, bytes: request.part.length, arrived: request.arrived };
        if self.state == State::Dead {
            meter.complete(kind, counted.bytes, counted.arrived, Nanos::now(), false);
            return;
        }
        self.reply(request, result, counted);
    }

    fn reply(&mut self, request: InFlight, result: Result<Outcome, IoError>, counted: Counted) {
        let (to, command) = (self.to(request.part.cookie, request.part.offset), request.command);
        match (result, command) {
            (Ok(Outcome::Read(buffer)), CheckedRequest::Read) => match cut_out(&request, buffer) {
                Some(data) => self.replies.data(to, request.part.offset, data, true, Some(counted)),
                None => self.contradiction(to, command, counted),
            },
            (Ok(Outcome::Extents(extents)), CheckedRequest::BlockStatus { one }) => {
                self.reply_status(request, one, &extents, counted);
            }
            (Ok(Outcome::Done), CheckedRequest::Read | CheckedRequest::BlockStatus { .. })
            | (Ok(Outcome::Read(_)), _) => self.contradiction(to, command, counted),
            (Ok(_), _) => self.replies.done(to, Some(counted)),
            (Err(failure), _) => {
                let value = error_number(&failure, command);
                self.replies.error(to, value, failure.context, Some(counted));
            }
        }
    }

    fn contradiction(&mut self, to: To, command: CheckedRequest, counted: Counted) {
        tracing::error!(?command, "nbd: a layer's answer does not fit the request");
        self.replies.error(to, error::EIO, CONTRADICTION, Some(counted));
    }

    fn reply_status(&mut self, request: InFlight, one: bool, extents: &[Extent], counted: Counted) {
        let InFlight { part: Part { cookie, offset, length, .. }, status, .. } = request;
        let asked = Asked { offset, length, one, extended: self.terms.extended_headers };
        let described = status.and_then(|mut room| {
            let used = describe_extents(asked, extents, room.bytes_mut());
            room.truncate(used);
            (used > 0).then_some(room)
        });
        let to = self.to(cookie, offset);
        match (self.terms.base_allocation, described) {
            (Some(context), Some(described)) => {
                self.replies.block_status(to, context, described, counted);
            }
            _ => {
                let message = "the layer described no extent at the offset";
                self.replies.error(to, error::EIO, message, Some(counted));
            }
        }
    }

    /// Sends what can be sent, and closes when all is said.
    pub fn flush(&mut self, reactor: &mut Reactor, workspace: &mut Workspace, meter: &mut Meter) {
        if self.state == State::Dead {
            return;
        }
        if self.broken {
            return self.close(reactor, workspace, meter);
        }
        if self.keeps_replies() {
            return;
        }
        if !self.replies.is_empty() {
            let before = self.replies.len();
            match self.replies.send(&mut self.socket, &mut workspace.slices, meter) {
                Ok(Flushed::All) => self.moved = Nanos::now(),
                Ok(Flushed::Full) => {
                    if self.replies.len() < before {
                        self.moved = Nanos::now();
                    }
                    self.socket.watch_write(reactor);
                }
                Err(error) => {
                    tracing::debug!(%error, "nbd: a client went away with requests in flight");
                    return self.close(reactor, workspace, meter);
                }
            }
        }
        if self.state == State::Closing && self.in_flight.is_empty() && self.replies.is_empty() {
            if !self.takes_leave {
                return self.close(reactor, workspace, meter);
            }
            self.socket.finish();
            self.state = State::Parting { since: Nanos::now() };
            self.socket.watch_read(reactor);
        }
    }

    /// Begins an orderly end: serves requests that have arrived and that arrive, and keeps the replies until no request is
    /// unanswered ([`Connection::is_quiet`]). A client has a limited number of requests in flight, so that it stops sending
    /// when it gets no replies; its requests up to then are answered together, and the end of the connection follows.
    pub fn drain(&mut self) {
        if self.state == State::Open {
            (self.state, self.has_crowded) = (State::Draining, false);
            // Bytes may have arrived that nothing has received yet.
            self.readable = true;
        }
    }

    /// Whether replies wait for unanswered requests. They do not if those requests wait for the replies: for the memory that
    /// the replies hold, or for their places.
    fn keeps_replies(&self) -> bool {
        let waits_for_itself = self.held.is_some() && self.in_flight.is_empty();
        match self.state {
            State::Draining => !waits_for_itself,
            State::Paused { keeps } => keeps,
            State::Open | State::Refusing | State::Closing | State::Parting { .. } | State::Dead => false,
        }
    }

    /// Whether new requests are served.
    pub fn takes(&self) -> bool {
        matches!(self.state, State::Open | State::Draining)
    }

    /// Stops reading and keeps the replies, until [`Connection::resume`] or the end.
    pub fn pause(&mut self) {
        if self.takes() {
            self.state = State::Paused { keeps: true };
        }
    }

    /// Sends the kept replies. The connection stays paused.
    pub fn send_kept(&mut self) {
        if matches!(self.state, State::Paused { .. }) {
            self.state = State::Paused { keeps: false };
        }
    }

    /// Undoes [`Connection::drain`] and [`Connection::pause`].
    pub fn resume(&mut self) {
        if matches!(self.state, State::Draining | State::Paused { .. }) {
            (self.state, self.readable) = (State::Open, true);
        }
    }

    /// Whether a request of a connected client is at the layer.
    pub fn is_owed_an_answer(&self) -> bool {
        self.state != State::Dead && !self.in_flight.is_empty()
    }

    /// Whether the client sends requests without waiting for replies, and all requests taken are answered.
    pub fn has_asked_too_much(&self) -> bool {
        self.has_crowded
            && self.in_flight.is_empty()
            && matches!(self.state, State::Draining | State::Paused { .. })
    }

    /// Whether the connection could end, but its client does not read its replies.
    pub fn does_not_take_its_replies(&self) -> bool {
        self.state == State::Closing && self.in_flight.is_empty() && !self.replies.is_empty()
    }

    /// Whether the client has had its time to disconnect.
    pub fn has_parted(&self, now: Nanos) -> bool {
        matches!(self.state, State::Parting { since } if now - since >= PARTING)
    }

    /// Takes no new requests, answers those in flight, then half-closes the connection.
    pub fn take_leave(&mut self, workspace: &mut Workspace, meter: &mut Meter) {
        self.takes_leave = true;
        self.stop_reading(workspace, meter);
    }

    /// Sends the replies that are ready and half-closes the connection. With requests unanswered, it closes the connection.
    pub fn leave(&mut self, reactor: &mut Reactor, workspace: &mut Workspace, meter: &mut Meter) {
        if self.in_flight.is_empty() && self.incoming.is_none() && self.rest.is_none() {
            return self.take_leave(workspace, meter);
        }
        if matches!(self.state, State::Draining | State::Paused { .. }) {
            self.state = State::Closing;
        }
        self.flush(reactor, workspace, meter);
        self.close(reactor, workspace, meter);
    }

    /// Whether every request that has come is answered, and none has come for a moment.
    pub fn is_quiet(&self, now: Nanos) -> bool {
        let has_begun = self.incoming.is_some() || self.rest.is_some() || self.skip > 0;
        let has_come = self.readable || self.stash_taken < self.stash.len();
        self.state == State::Draining
            && self.in_flight.is_empty()
            && !has_begun
            && !has_come
            && now - self.moved >= QUIET
    }

    /// Serves nothing more: refuses requests that are not at the layer yet, and later ones. True when that is new.
    pub fn refuse_from_now(&mut self, meter: &mut Meter) -> bool {
        if !matches!(self.state, State::Open | State::Draining | State::Paused { .. }) {
            return false;
        }
        self.state = State::Refusing;
        (self.readable, self.held, self.passed, self.limited_since) = (true, None, false, None);
        let rest = self.rest.take();
        if let Some(Rest { whole, .. }) = rest {
            self.skip += self.unsent(rest);
            self.give_up(whole, meter);
        }
        if let Some(Incoming { part, buffer, filled, to, .. }) = self.incoming.take() {
            self.memory -= buffer.len();
            self.skip += (to - filled) as u64;
            match part.whole {
                Some(whole) => self.give_up(whole, meter),
                None => {
                    self.replies.error(self.to(part.cookie, part.offset), error::ESHUTDOWN, CLOSING, None)
                }
            }
        }
        true
    }

    /// Reads nothing more; answers what is in flight.
    pub fn stop_reading(&mut self, workspace: &mut Workspace, meter: &mut Meter) {
        if !matches!(self.state, State::Dead | State::Parting { .. }) {
            self.state = State::Closing;
        }
        self.forget_input(workspace, meter);
    }

    /// Closes the socket at once.
    pub fn close(&mut self, reactor: &mut Reactor, workspace: &mut Workspace, meter: &mut Meter) {
        if self.state != State::Dead {
            self.state = State::Dead;
            self.forget_input(workspace, meter);
            self.replies.discard(meter);
            self.socket.close(reactor);
        }
    }

    fn forget_input(&mut self, workspace: &mut Workspace, meter: &mut Meter) {
        workspace.leave_line(self.socket.token());
        workspace.stashed -= self.stash.capacity();
        self.stash = Vec::new();
        self.stash_taken = 0;
        self.held = None;
        let rest = self.rest.take().map(|rest| rest.whole);
        let incoming = self.incoming.take();
        if let Some(incoming) = &incoming {
            self.memory -= incoming.buffer.len();
        }
        if let Some(whole) = rest.or(incoming.and_then(|incoming| incoming.part.whole)) {
            self.give_up(whole, meter);
        }
    }

    /// May be dropped: the socket is closed and nothing is at the layer.
    pub fn is_finished(&self) -> bool {
        self.state == State::Dead && self.in_flight.is_empty()
    }

    /// Bytes of buffers that the client is the cause of.
    fn memory_held(&self) -> usize {
        self.memory + self.replies.payload_bytes()
    }

    /// Updates the disk's count of the bytes that its connections hold. True if this one holds fewer than before.
    pub fn count(&mut self, disk_memory: &mut usize) -> bool {
        let (held, before) = (self.memory_held(), self.counted);
        *disk_memory = *disk_memory - before + held;
        self.counted = held;
        held < before
    }

    /// Takes it out of the disk's count.
    pub fn uncount(&mut self, disk_memory: &mut usize) {
        *disk_memory -= std::mem::take(&mut self.counted);
    }

    /// Whether it waits for buffers and nothing else.
    pub fn lacks_memory(&self) -> bool {
        self.held.is_some() && self.lacks_memory
    }

    /// Whether it waits to be alone on the disk with a change of parts of blocks.
    pub fn waits_for_edges(&self) -> bool {
        self.held.is_some_and(|need| need.parts_of_blocks)
    }

    /// Requests at the layer.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Since when the client has held memory without moving: it does not take its replies, or has stopped in the
    /// middle of a write.
    pub fn stalled_since(&self) -> Option<Nanos> {
        let waits_for_client =
            self.replies.payload_bytes() > 0 || (self.incoming.is_some() && self.held.is_none());
        (self.state != State::Dead && waits_for_client).then_some(self.moved)
    }
}

/// The error for requests for which a closing disk does not wait.
const CLOSING: &str = "the disk is closing; look up its address again";

/// A client from which nothing has come for so long, and which waits for replies, has no request in flight any more.
const QUIET: Duration = Duration::from_millis(5);

/// The time for a client to disconnect after a half-close.
const PARTING: Duration = Duration::from_millis(100);

/// The error for a request that a layer answered inconsistently.
const CONTRADICTION: &str = "internal error: a layer's answer does not fit the request";

/// The requested range of the data that was read; `None` if the data is shorter.
fn cut_out(request: &InFlight, mut buffer: Buffer) -> Option<Data> {
    let end = request.from + request.part.length as usize;
    if buffer.len() < end {
        return None;
    }
    buffer.truncate(end);
    Some(Data { buffer, from: request.from })
}

/// The meter's word for a command; none for what never reaches a layer.
fn kind_of(command: CheckedRequest) -> Option<RequestKind> {
    match command {
        CheckedRequest::Read => Some(RequestKind::Read),
        CheckedRequest::Write { .. } => Some(RequestKind::Write),
        CheckedRequest::Flush => Some(RequestKind::Flush),
        CheckedRequest::Discard { .. } => Some(RequestKind::Discard),
        CheckedRequest::WriteZeroes { .. } => Some(RequestKind::WriteZeroes),
        CheckedRequest::BlockStatus { .. } => Some(RequestKind::Extents),
        CheckedRequest::Cache | CheckedRequest::Disconnect => None,
    }
}
