//! One client in the transmission phase: requests in, replies out.

mod intake;

use std::io;
use std::time::Duration;

use slab::Slab;
use weir_block::{
    Buffer, Extent, Interest, IoError, Layer, Meter, Nanos, Outcome, Reactor, RequestKind, Socket, Tag, Token,
};
use weir_nbd::protocol::{RequestHeader, error};
use weir_nbd::server::{CheckedRequest, Session, Terms, describe_extents, error_number};

use super::replies::{Counted, Flushed, Replies};
use super::workspace::Workspace;

/// Requests worked off in one turn; then they are answered and other connections have theirs. Few, so that a client
/// takes the answers to the first of a deep queue and asks again while the server does the rest.
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
    /// How long a client may neither take its replies nor go on with a write while it holds memory that another
    /// waits for. If nobody waits, it may stop as long as it likes: a suspended guest does.
    pub stall: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { requests: 128, bytes: 64 << 20, connections: 16384, stall: Duration::from_secs(30) }
    }
}

/// What a connection works with, lent to it for a turn.
pub(super) struct Turn<'a> {
    pub reactor: &'a mut Reactor,
    pub layer: &'a mut dyn Layer,
    pub workspace: &'a mut Workspace,
    pub meter: &'a mut Meter,
    pub limits: &'a Limits,
    pub now: Nanos,
    /// The connection's number on its disk, in the upper half of its tags.
    pub index: u32,
    /// Requests that it may still submit in this turn.
    pub left: usize,
}

impl Turn<'_> {
    fn tag(&self, slot: u32) -> Tag {
        Tag(u64::from(self.index) << 32 | u64::from(slot))
    }
}

/// How a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pumped {
    /// Everything that has arrived is worked off; the socket is being watched.
    Idle,
    /// There is more; give others a turn first.
    More,
    /// A limit is reached; see [`Connection::could_go_on`].
    Held,
    /// Nothing more will be read.
    Closing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// Nothing more is read; what is in flight is still answered.
    Closing,
    /// The socket is closed. What is in flight has to come back before the connection may be dropped.
    Dead,
}

/// A request at the layer.
#[derive(Debug)]
struct InFlight {
    cookie: u64,
    command: CheckedRequest,
    offset: u64,
    length: u32,
    arrived: Nanos,
    /// Bytes of buffers that it holds.
    memory: usize,
    /// Room for the reply to `BLOCK_STATUS`.
    status: Option<Buffer>,
}

/// A large write whose payload is arriving.
#[derive(Debug)]
struct Incoming {
    header: RequestHeader,
    fua: bool,
    buffer: Buffer,
    filled: usize,
}

/// What the request that is next needs in order to go on.
#[derive(Clone, Copy, Debug)]
struct Need {
    /// Room at the layer for a request of this kind and length, unless it is answered here.
    at_layer: Option<(RequestKind, u64)>,
    /// Bytes of buffers.
    memory: usize,
}

impl Need {
    /// Nothing but a place among the replies.
    const REPLY: Need = Need { at_layer: None, memory: 0 };
}

#[derive(Debug)]
pub(super) struct Connection {
    socket: Socket,
    terms: Terms,
    state: State,
    in_flight: Slab<InFlight>,
    replies: Replies,
    /// Received and not worked off.
    stash: Vec<u8>,
    /// Bytes of `stash` that are worked off.
    stash_taken: usize,
    incoming: Option<Incoming>,
    /// Payload bytes of a refused write that are still to be thrown away.
    skip: usize,
    /// There may be something to receive.
    readable: bool,
    /// The last writes did not fit the window.
    large_writes: bool,
    held: Option<Need>,
    /// Bytes of buffers of requests in flight and of the incoming write.
    memory: usize,
    /// When bytes last moved in either direction.
    moved: Nanos,
    /// In its disk's list of connections to pump.
    pub listed: bool,
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
            terms: Terms {
                structured_replies: session.structured_replies,
                base_allocation: session.base_allocation,
            },
            state: State::Open,
            in_flight: Slab::new(),
            replies: Replies::default(),
            stash: leftover,
            stash_taken: 0,
            incoming: None,
            skip: 0,
            readable: true,
            large_writes: false,
            held: None,
            memory: 0,
            moved: Nanos::now(),
            listed: false,
            flush_listed: false,
        })
    }

    /// The socket is ready; true when there may be something to read.
    pub fn on_event(&mut self, interest: Interest) -> bool {
        self.socket.on_event(interest);
        self.readable |= interest == Interest::Read;
        interest == Interest::Read
    }

    /// The layer has answered a request.
    pub fn complete(&mut self, slot: u32, result: Result<Outcome, IoError>, meter: &mut Meter) {
        let request = self.in_flight.remove(slot as usize);
        self.memory -= request.memory;
        let Some(kind) = kind_of(request.command) else { return };
        let counted = Counted { kind, bytes: request.length.into(), arrived: request.arrived };
        if self.state == State::Dead {
            meter.complete(kind, counted.bytes, counted.arrived, Nanos::now(), false);
            return;
        }
        self.reply(request, result, counted);
    }

    fn reply(&mut self, request: InFlight, result: Result<Outcome, IoError>, counted: Counted) {
        let structured = self.terms.structured_replies;
        let (cookie, command) = (request.cookie, request.command);
        match (result, command) {
            (Ok(Outcome::Read(data)), CheckedRequest::Read) if data.len() == request.length as usize => {
                self.replies.data(structured, cookie, request.offset, data, counted);
            }
            (Ok(Outcome::Extents(extents)), CheckedRequest::BlockStatus { one }) => {
                self.reply_status(request, one, &extents, counted);
            }
            (Ok(Outcome::Done), CheckedRequest::Read | CheckedRequest::BlockStatus { .. })
            | (Ok(Outcome::Read(_)), _) => {
                tracing::error!(?command, "nbd: a layer answered with something else than was asked for");
                let message = "the server contradicts itself";
                self.replies.error(structured, cookie, error::EIO, message, Some(counted));
            }
            (Ok(_), _) => self.replies.done(cookie, Some(counted)),
            (Err(failure), _) => {
                let value = error_number(&failure, command);
                self.replies.error(structured, cookie, value, failure.context, Some(counted));
            }
        }
    }

    fn reply_status(&mut self, request: InFlight, one: bool, extents: &[Extent], counted: Counted) {
        let InFlight { cookie, offset, length, status, .. } = request;
        let described = status.and_then(|mut room| {
            let used = describe_extents(offset, length, one, extents, room.bytes_mut());
            room.truncate(used);
            (used > 0).then_some(room)
        });
        match (self.terms.base_allocation, described) {
            (Some(context), Some(described)) => {
                self.replies.block_status(context, cookie, described, counted);
            }
            _ => {
                let message = "the layer described no extent at the offset";
                self.replies.error(true, cookie, error::EIO, message, Some(counted));
            }
        }
    }

    /// Sends what can be sent, and closes when all is said.
    pub fn flush(&mut self, reactor: &mut Reactor, workspace: &mut Workspace, meter: &mut Meter) {
        if self.state == State::Dead {
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
            self.close(reactor, workspace, meter);
        }
    }

    /// Reads nothing more; answers what is in flight.
    pub fn stop_reading(&mut self, workspace: &mut Workspace) {
        if self.state == State::Open {
            self.state = State::Closing;
        }
        self.forget_input(workspace);
    }

    /// Closes the socket at once.
    pub fn close(&mut self, reactor: &mut Reactor, workspace: &mut Workspace, meter: &mut Meter) {
        if self.state != State::Dead {
            self.state = State::Dead;
            self.forget_input(workspace);
            self.replies.discard(meter);
            self.socket.close(reactor);
        }
    }

    fn forget_input(&mut self, workspace: &mut Workspace) {
        workspace.leave_line(self.socket.token());
        workspace.stashed -= self.stash.capacity();
        self.stash = Vec::new();
        self.stash_taken = 0;
        self.held = None;
        if let Some(incoming) = self.incoming.take() {
            self.memory -= incoming.buffer.len();
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
