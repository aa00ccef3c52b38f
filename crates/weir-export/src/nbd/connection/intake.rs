//! The way in: from the socket to the layer.

use std::io::{self, IoSliceMut};

use weir_block::{Buffer, Layer, Payload, Reactor, Received, Request, RequestKind};
use weir_nbd::protocol::{REQUEST_MAGIC, RequestHeader, command, error};
use weir_nbd::server::{CheckedRequest, Refusal, STATUS_BYTES, check_request};
use zerocopy::FromBytes;

use super::{Connection, InFlight, Incoming, Limits, Need, Pumped, State, Turn, kind_of};
use crate::nbd::workspace::{WINDOW, Workspace, fair, largest_fair};

/// Bytes received behind the rest of a large payload while writes are so large that they never fit the window: just
/// enough for the next header, so that little is copied.
const HEADER_HUNT: usize = 4 << 10;

/// A stash of at most so many bytes is kept for reuse when it is empty.
const KEPT_STASH: usize = 4 << 10;

/// Why parsing stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// The rest is the beginning of a request, or nothing.
    Incomplete,
    TurnOver,
    Held,
    Closing,
}

impl Connection {
    /// Reads and submits what has arrived, within a turn's measure.
    pub fn pump(&mut self, turn: &mut Turn<'_>) -> Pumped {
        self.held = None;
        let stop = self.work(turn);
        let token = self.socket.token();
        if stop != Stop::Held || self.held.is_none_or(|need| need.memory == 0) {
            turn.workspace.leave_line(token);
        }
        match stop {
            Stop::Incomplete => {
                self.socket.watch_read(turn.reactor);
                Pumped::Idle
            }
            Stop::TurnOver => Pumped::More,
            Stop::Held => Pumped::Held,
            Stop::Closing => {
                self.stop_reading(turn.workspace);
                Pumped::Closing
            }
        }
    }

    /// Whether the request that had to wait could go on now.
    pub fn could_go_on(
        &self,
        layer: &dyn Layer,
        reactor: &Reactor,
        workspace: &Workspace,
        limits: &Limits,
    ) -> bool {
        self.held.is_none_or(|need| self.admits(need, layer, reactor, workspace, limits))
    }

    fn work(&mut self, turn: &mut Turn<'_>) -> Stop {
        let mut received = 0;
        loop {
            if self.state != State::Open {
                return Stop::Closing;
            }
            if let Some(stop) = self.submit_incoming(turn) {
                return stop;
            }
            if self.stash_taken < self.stash.len() {
                let stash = std::mem::take(&mut self.stash);
                let (used, stop) = self.parse(&stash[self.stash_taken..], turn);
                self.stash = stash;
                self.stash_taken += used;
                if self.stash_taken == self.stash.len() {
                    self.restash(&[], turn.workspace);
                }
                if stop != Stop::Incomplete {
                    return stop;
                }
            }
            if !self.readable {
                return Stop::Incomplete;
            }
            if received >= WINDOW {
                return Stop::TurnOver;
            }
            match self.receive(turn) {
                Ok((bytes, Stop::Incomplete)) => received += bytes,
                Ok((_, stop)) => return stop,
                Err(error) => {
                    tracing::debug!(%error, "nbd: a connection broke");
                    return Stop::Closing;
                }
            }
        }
    }

    /// One receive call, and what can be done with what it brought.
    fn receive(&mut self, turn: &mut Turn<'_>) -> io::Result<(usize, Stop)> {
        let window = if self.large_writes { HEADER_HUNT } else { turn.workspace.window() };
        let kept = self.stash.len() - self.stash_taken;
        let mut space = std::mem::take(&mut turn.workspace.receive);
        space[..kept].copy_from_slice(&self.stash[self.stash_taken..]);
        let target = &mut space[kept..kept + window];
        let (asked, received) = match &mut self.incoming {
            Some(Incoming { buffer, filled, .. }) => {
                let rest = &mut buffer.bytes_mut()[*filled..];
                let asked = rest.len() + target.len();
                (asked, self.socket.receive_vectored(&mut [IoSliceMut::new(rest), IoSliceMut::new(target)]))
            }
            None => (target.len(), self.socket.receive(target)),
        };
        let outcome = match received {
            Ok(Received::Bytes(bytes)) => {
                turn.now = turn.reactor.now();
                self.moved = turn.now;
                self.readable = bytes == asked;
                let behind = self.fill_incoming(bytes);
                let fresh = &space[..kept + behind];
                let (used, stop) = self.digest(fresh, turn);
                self.restash(&fresh[used..], turn.workspace);
                Ok((bytes, stop))
            }
            Ok(Received::Nothing) => {
                self.readable = false;
                Ok((0, Stop::Incomplete))
            }
            Ok(Received::End) => Ok((0, Stop::Closing)),
            Err(error) => Err(error),
        };
        turn.workspace.receive = space;
        outcome
    }

    /// Submits the incoming write if it is complete, then parses.
    fn digest(&mut self, bytes: &[u8], turn: &mut Turn<'_>) -> (usize, Stop) {
        match self.submit_incoming(turn) {
            Some(stop) => (0, stop),
            None => self.parse(bytes, turn),
        }
    }

    /// Accounts for received bytes that went into the incoming write; returns how many came behind it.
    fn fill_incoming(&mut self, bytes: usize) -> usize {
        let Some(Incoming { buffer, filled, .. }) = &mut self.incoming else { return bytes };
        let taken = bytes.min(buffer.len() - *filled);
        *filled += taken;
        bytes - taken
    }

    /// Keeps what could not be worked off.
    fn restash(&mut self, rest: &[u8], workspace: &mut Workspace) {
        workspace.stashed -= self.stash.capacity();
        self.stash.clear();
        self.stash_taken = 0;
        if rest.is_empty() && self.stash.capacity() > KEPT_STASH {
            self.stash = Vec::new();
        }
        if rest.len() > self.stash.capacity() {
            self.stash = Vec::with_capacity(rest.len());
        }
        self.stash.extend_from_slice(rest);
        workspace.stashed += self.stash.capacity();
    }

    /// Works off complete requests at the beginning of `bytes`; returns how many bytes they were.
    fn parse(&mut self, bytes: &[u8], turn: &mut Turn<'_>) -> (usize, Stop) {
        let info = turn.layer.info();
        let mut rest = bytes;
        let stop = loop {
            let skipped = self.skip.min(rest.len());
            rest = &rest[skipped..];
            self.skip -= skipped;
            if turn.left == 0 {
                break Stop::TurnOver;
            }
            let Ok((header, behind)) = RequestHeader::read_from_prefix(rest) else { break Stop::Incomplete };
            if header.magic != REQUEST_MAGIC {
                tracing::info!(magic = header.magic.get(), "nbd: a request without its magic; closing");
                break Stop::Closing;
            }
            let taken = match check_request(&header, &info, self.terms) {
                Ok(CheckedRequest::Disconnect) => Err(Stop::Closing),
                Ok(CheckedRequest::Write { fua }) => self.write(&header, fua, behind, turn),
                Ok(command) => self.plain(&header, command, turn),
                Err(refusal) => self.refuse(&header, refusal, turn),
            };
            match taken {
                Ok(payload) => rest = &behind[payload..],
                Err(stop) => break stop,
            }
            turn.left -= 1;
        };
        (bytes.len() - rest.len(), stop)
    }

    /// Answers a request that is not in order. What a refused write carries is thrown away.
    fn refuse(
        &mut self,
        header: &RequestHeader,
        refusal: Refusal,
        turn: &mut Turn<'_>,
    ) -> Result<usize, Stop> {
        self.admit(Need::REPLY, turn)?;
        if header.command == command::WRITE {
            self.skip = header.length.get() as usize;
        }
        let Refusal { error, message } = refusal;
        self.replies.error(self.terms.structured_replies, header.cookie.get(), error, message, None);
        Ok(0)
    }

    /// A write. Small ones, and all that have arrived whole, are lent to the layer from where they lie.
    fn write(
        &mut self,
        header: &RequestHeader,
        fua: bool,
        behind: &[u8],
        turn: &mut Turn<'_>,
    ) -> Result<usize, Stop> {
        let length = header.length.get() as usize;
        let need = Need { at_layer: Some((RequestKind::Write, length as u64)), memory: 0 };
        if let Some(payload) = behind.get(..length) {
            self.admit(need, turn)?;
            let slot = self.begin(header, CheckedRequest::Write { fua }, 0, None, turn);
            let tag = turn.tag(slot);
            let offset = header.offset.get();
            turn.layer
                .submit(turn.reactor, Request::Write { tag, offset, payload: Payload::Lent(payload), fua });
            self.large_writes &= length > WINDOW;
            return Ok(length);
        }
        if length < turn.workspace.direct() {
            return Err(Stop::Incomplete);
        }
        if length > largest_fair(turn.reactor.buffers()) {
            let message = "the request is larger than the server's memory allows";
            return self.refuse(header, Refusal { error: error::ENOMEM, message }, turn);
        }
        let mut buffer = self.take_buffer(Need { memory: length, ..need }, turn)?;
        buffer.bytes_mut()[..behind.len()].copy_from_slice(behind);
        self.memory += length;
        self.large_writes = length > WINDOW;
        self.incoming = Some(Incoming { header: *header, fua, buffer, filled: behind.len() });
        Ok(behind.len())
    }

    /// Submits the incoming write if it is complete and there is room. `Some` when nothing else can be done first.
    fn submit_incoming(&mut self, turn: &mut Turn<'_>) -> Option<Stop> {
        let Incoming { buffer, filled, .. } = self.incoming.as_ref()?;
        if *filled < buffer.len() {
            return None;
        }
        let need = Need { at_layer: Some((RequestKind::Write, buffer.len() as u64)), memory: 0 };
        if let Err(stop) = self.admit(need, turn) {
            return Some(stop);
        }
        let Incoming { header, fua, buffer, .. } = self.incoming.take()?;
        let slot = self.begin(&header, CheckedRequest::Write { fua }, buffer.len(), None, turn);
        let tag = turn.tag(slot);
        let request =
            Request::Write { tag, offset: header.offset.get(), payload: Payload::Given(buffer), fua };
        turn.layer.submit(turn.reactor, request);
        None
    }

    /// Any request without payload.
    fn plain(
        &mut self,
        header: &RequestHeader,
        command: CheckedRequest,
        turn: &mut Turn<'_>,
    ) -> Result<usize, Stop> {
        let (offset, length) = (header.offset.get(), header.length.get());
        let Some(kind) = kind_of(command) else {
            // A hint to read ahead. Nothing is promised by answering it ("there is no guarantee of an actual
            // performance gain"), and the layers below have their own judgement.
            self.admit(Need::REPLY, turn)?;
            self.replies.done(header.cookie.get(), None);
            return Ok(0);
        };
        let memory = match command {
            CheckedRequest::Read => length as usize,
            CheckedRequest::BlockStatus { .. } => STATUS_BYTES,
            _ => 0,
        };
        if memory > largest_fair(turn.reactor.buffers()) {
            let message = "the request is larger than the server's memory allows";
            return self.refuse(header, Refusal { error: error::ENOMEM, message }, turn);
        }
        let need = Need { at_layer: Some((kind, length.into())), memory };
        let mut buffer = if memory > 0 {
            let buffer = self.take_buffer(need, turn)?;
            self.memory += memory;
            Some(buffer)
        } else {
            self.admit(need, turn)?;
            None
        };
        let status = if matches!(command, CheckedRequest::BlockStatus { .. }) { buffer.take() } else { None };
        let slot = self.begin(header, command, memory, status, turn);
        let tag = turn.tag(slot);
        let length = u64::from(length);
        let request = match (command, buffer) {
            (_, Some(buffer)) => Request::Read { tag, offset, buffer },
            (CheckedRequest::Discard { fua }, _) => Request::Discard { tag, offset, length, fua },
            (CheckedRequest::WriteZeroes { fua, may_unmap, fast_only }, _) => {
                Request::WriteZeroes { tag, offset, length, fua, may_unmap, fast_only }
            }
            (CheckedRequest::BlockStatus { .. }, _) => Request::Extents { tag, offset, length },
            _ => Request::Flush { tag },
        };
        turn.layer.submit(turn.reactor, request);
        Ok(0)
    }

    /// Notes a request that goes to the layer; returns its slot.
    fn begin(
        &mut self,
        header: &RequestHeader,
        command: CheckedRequest,
        memory: usize,
        status: Option<Buffer>,
        turn: &mut Turn<'_>,
    ) -> u32 {
        if let Some(kind) = kind_of(command) {
            turn.meter.arrive(kind, turn.now);
        }
        let slot = self.in_flight.insert(InFlight {
            cookie: header.cookie.get(),
            command,
            offset: header.offset.get(),
            length: header.length.get(),
            arrived: turn.now,
            memory,
            status,
        });
        u32::try_from(slot).expect("a connection has few requests in flight")
    }

    /// Takes a buffer for a request that may go on.
    fn take_buffer(&mut self, need: Need, turn: &mut Turn<'_>) -> Result<Buffer, Stop> {
        self.admit(need, turn)?;
        turn.reactor.buffers().take(need.memory).ok_or_else(|| {
            self.held = Some(need);
            Stop::Held
        })
    }

    /// Whether the next request may go on; if not, remembers what it needs (P10).
    fn admit(&mut self, need: Need, turn: &mut Turn<'_>) -> Result<(), Stop> {
        if self.admits(need, turn.layer, turn.reactor, turn.workspace, turn.limits) {
            return Ok(());
        }
        self.held = Some(need);
        // Who holds something already waits for itself as much as for others.
        if need.memory > 0 && self.memory_held() == 0 {
            turn.workspace.line_up(self.socket.token(), turn.now);
        }
        Err(Stop::Held)
    }

    fn admits(
        &self,
        need: Need,
        layer: &dyn Layer,
        reactor: &Reactor,
        workspace: &Workspace,
        limits: &Limits,
    ) -> bool {
        if self.in_flight.len() + self.replies.len() >= limits.requests {
            return false;
        }
        if need.memory > 0 {
            let held = self.memory_held();
            let within = held == 0 || held + need.memory <= limits.bytes;
            let first = !workspace.yields(self.socket.token(), need.memory);
            if !within || !first || !fair(reactor.buffers(), held, need.memory) {
                return false;
            }
        }
        need.at_layer.is_none_or(|(kind, length)| layer.has_room(kind, length))
    }
}
