//! The way in: from the socket to the layer.

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::time::Duration;

use weir_block::{Buffer, Nanos, Payload, Received, Request, RequestKind, Tag, Throttle};
use weir_nbd::protocol::{LARGEST_PAYLOAD, command_flag, error};
use weir_nbd::server::{
    CheckedRequest, LONGEST_STATUS, Refusal, RequestHead, STATUS_BYTES, WrongMagic, check_request,
};

use super::parts::{LONGEST_RANGE, blocks_around};
use super::{CLOSING, Connection, InFlight, Incoming, Need, Part, Pumped, Room, State, Stop, Turn, kind_of};
use crate::nbd::client::Via;
use crate::nbd::edges::Change;
use crate::workspace::{WINDOW, Workspace, fair, fair_to_disks, largest_whole};

/// Bytes received behind the rest of a large payload while writes are so large that they never fit the window, and while requests
/// wait for the disk's limit: just enough for the next header, so that little is copied and kept.
const HEADER_HUNT: usize = 4 << 10;

/// A stash of at most so many bytes is kept for reuse when it is empty.
const KEPT_STASH: usize = 4 << 10;

/// One line a second about clients that break the protocol.
pub static BAD_REQUESTS: Throttle = Throttle::new("nbd-bad-request", Duration::from_secs(1));

/// The resource that a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lack {
    /// Buffers that this disk's connections, or other disks, give back.
    Memory,
    Other,
}

impl Connection {
    /// Reads and submits what has arrived, within a turn's measure.
    pub fn pump(&mut self, turn: &mut Turn<'_>) -> Pumped {
        (self.held, self.lacks_memory) = (None, false);
        if matches!(self.state, State::Parting { .. }) {
            return self.part(turn);
        }
        if matches!(self.via, Some(Via::Forwarder(_))) && self.socket.has_hung_up() {
            // Its client may have these requests answered by another way already: to serve them now could put old data over new (P4).
            self.close(turn.reactor, turn.workspace, turn.meter);
            return Pumped::Closing;
        }
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
            Stop::Paused => Pumped::Idle,
            Stop::TurnOver => Pumped::More,
            Stop::Held => Pumped::Held,
            Stop::Limited => {
                self.socket.watch_hang_up(turn.reactor);
                Pumped::Limited
            }
            Stop::Closing => {
                self.stop_reading(turn.workspace, turn.meter);
                Pumped::Closing
            }
        }
    }

    /// Discards received bytes until the client disconnects.
    fn part(&mut self, turn: &mut Turn<'_>) -> Pumped {
        match self.socket.receive(&mut turn.workspace.receive) {
            Ok(Received::Bytes(_)) => Pumped::More,
            Ok(Received::Nothing) => {
                self.socket.watch_read(turn.reactor);
                Pumped::Idle
            }
            Ok(Received::End) | Err(_) => {
                self.close(turn.reactor, turn.workspace, turn.meter);
                Pumped::Closing
            }
        }
    }

    /// Whether the request that had to wait could go on now.
    pub fn could_go_on(&self, index: u32, room: Room<'_>) -> bool {
        self.held.is_none_or(|need| self.admits(need, index, room).is_ok())
    }

    fn work(&mut self, turn: &mut Turn<'_>) -> Stop {
        let mut received = 0;
        loop {
            if self.hung_up || matches!(self.state, State::Closing | State::Dead) {
                return Stop::Closing;
            }
            if matches!(self.state, State::Paused { .. }) {
                return Stop::Paused;
            }
            if self.stash_taken < self.stash.len() || self.incoming.is_some() || self.rest.is_some() {
                let stash = std::mem::take(&mut self.stash);
                let (used, stop) = self.parse(&stash[self.stash_taken..], turn);
                self.stash = stash;
                self.stash_taken += used;
                if used > 0 && self.stash_taken == self.stash.len() {
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

    /// One receive call, and processing of the received bytes.
    fn receive(&mut self, turn: &mut Turn<'_>) -> io::Result<(usize, Stop)> {
        let takes_little = self.large_writes || turn.gate.is_closed();
        let window = if takes_little { HEADER_HUNT } else { turn.workspace.window() };
        let kept = self.stash.len() - self.stash_taken;
        let mut space = std::mem::take(&mut turn.workspace.receive);
        space[..kept].copy_from_slice(&self.stash[self.stash_taken..]);
        let target = &mut space[kept..kept + window];
        let (asked, received) = match &mut self.incoming {
            Some(Incoming { buffer, filled, to, .. }) => {
                let rest = &mut buffer.bytes_mut()[*filled..*to];
                let asked = rest.len() + target.len();
                (asked, self.socket.receive_vectored(&mut [IoSliceMut::new(rest), IoSliceMut::new(target)]))
            }
            None => (target.len(), self.socket.receive(target)),
        };
        let outcome = match received {
            Ok(Received::Bytes(bytes)) => {
                turn.now = turn.reactor.now();
                self.moved = turn.now;
                self.limited = Duration::ZERO;
                self.readable = bytes == asked;
                let behind = self.fill_incoming(bytes);
                let fresh = &space[..kept + behind];
                let (used, stop) = self.parse(fresh, turn);
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

    /// Accounts for received bytes that went into the incoming write; returns how many came behind it.
    fn fill_incoming(&mut self, bytes: usize) -> usize {
        let Some(Incoming { filled, to, .. }) = &mut self.incoming else { return bytes };
        let taken = bytes.min(*to - *filled);
        *filled += taken;
        bytes - taken
    }

    /// Stashes the bytes that could not be processed.
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
        let info = turn.info;
        let mut rest = bytes;
        let stop = loop {
            if let Some(stop) = self.feed(&mut rest, turn) {
                break stop;
            }
            let skipped = usize::try_from(self.skip).unwrap_or(usize::MAX).min(rest.len());
            rest = &rest[skipped..];
            self.skip -= skipped as u64;
            if turn.left == 0 {
                break Stop::TurnOver;
            }
            let (head, behind) = match RequestHead::read(rest, self.terms.extended_headers) {
                Ok(Some(read)) => read,
                Ok(None) => break Stop::Incomplete,
                Err(WrongMagic(magic)) => {
                    if let Some(left_out) = BAD_REQUESTS.pass(Nanos::now()) {
                        tracing::info!(magic, left_out, "nbd: a request without its magic; closing");
                    }
                    break Stop::Closing;
                }
            };
            if self.terms.extended_headers && head.payload > LARGEST_PAYLOAD.into() {
                // "A server SHOULD initiate hard disconnect".
                if let Some(left_out) = BAD_REQUESTS.pass(Nanos::now()) {
                    let bytes = head.payload;
                    tracing::info!(bytes, left_out, "nbd: a payload above the maximum; closing");
                }
                break Stop::Closing;
            }
            let taken = match check_request(&head, &info, self.terms) {
                Ok(CheckedRequest::Disconnect) => Err(Stop::Closing),
                _ if self.state == State::Refusing => {
                    self.refuse(&head, Refusal { error: error::ESHUTDOWN, message: CLOSING }, turn)
                }
                Ok(CheckedRequest::Write { fua }) => self.write(&head, fua, behind, turn),
                Ok(command) => self.plain(&head, command, turn),
                Err(refusal) => self.refuse(&head, refusal, turn),
            };
            match taken {
                Ok(payload) => rest = &behind[payload..],
                Err(stop) => break stop,
            }
            turn.left -= 1;
        };
        (bytes.len() - rest.len(), stop)
    }

    /// Answers an invalid request and discards its payload.
    fn refuse(&mut self, head: &RequestHead, refusal: Refusal, turn: &mut Turn<'_>) -> Result<usize, Stop> {
        self.admit(Need::REPLY, turn)?;
        // It may have waited as a request that counts, before the layer changed.
        (self.passed, self.limited_since) = (false, None);
        self.skip = head.payload;
        let Refusal { error, message } = refusal;
        self.replies.error(self.to(head.cookie, head.offset), error, message, None);
        Ok(0)
    }

    /// A write. Small ones, and all that have arrived whole, are lent to the layer without a copy.
    fn write(
        &mut self,
        head: &RequestHead,
        fua: bool,
        behind: &[u8],
        turn: &mut Turn<'_>,
    ) -> Result<usize, Stop> {
        let length = head.length as usize;
        let info = turn.info;
        let (_, blocks, _) = blocks_around(head.offset, head.length, info.logical_block);
        let whole_blocks = blocks == head.length;
        if let Some(payload) = behind.get(..length)
            && whole_blocks
            && head.length <= info.max_transfer.into()
        {
            self.admit(Need::at_layer(RequestKind::Write, head.length).counting(head.length), turn)?;
            let tag = self.begin(head.into(), CheckedRequest::Write { fua }, 0, 0, None, turn);
            let offset = head.offset;
            turn.layer
                .submit(turn.reactor, Request::Write { tag, offset, payload: Payload::Lent(payload), fua });
            self.large_writes &= length > WINDOW;
            return Ok(length);
        }
        if behind.len() < length && length < turn.workspace.direct() {
            return Err(Stop::Incomplete);
        }
        if blocks > largest_whole(turn.reactor.buffers(), &info) {
            self.admit(Need::REPLY.counting(head.length), turn)?;
            self.begin_whole(head, range_of(head), CheckedRequest::Write { fua }, turn);
        } else {
            self.expect_payload(head.into(), fua, turn)?;
        }
        self.large_writes = length > WINDOW;
        Ok(0)
    }

    /// Makes room for a payload, with which [`Connection::feed`] goes on.
    pub(super) fn expect_payload(&mut self, part: Part, fua: bool, turn: &mut Turn<'_>) -> Result<(), Stop> {
        let block = turn.info.logical_block;
        let (_, length, from) = blocks_around(part.offset, part.length, block);
        let memory = length as usize;
        let counts = part.whole.is_none().then_some(part.length);
        let need = Need { memory, counts, ..Need::at_layer(RequestKind::Write, length) };
        let buffer = self.take_buffer(need, turn)?;
        self.memory += memory;
        let to = from + part.length as usize;
        self.incoming = Some(Incoming { part, fua, buffer, from, to, filled: from });
        Ok(())
    }

    /// Submits the incoming write, which is complete, if there is room.
    pub(super) fn submit_incoming(&mut self, turn: &mut Turn<'_>) -> Result<(), Stop> {
        let Some(incoming) = &self.incoming else { return Ok(()) };
        let parts_of_blocks = !incoming.is_whole_blocks();
        let length = incoming.buffer.len() as u64;
        self.admit(Need { parts_of_blocks, ..Need::at_layer(RequestKind::Write, length) }, turn)?;
        let Some(Incoming { part, fua, buffer, from, to, .. }) = self.incoming.take() else { return Ok(()) };
        // Counted since it was taken; it is the request's from here on.
        self.memory -= buffer.len();
        let tag = self.begin(part, CheckedRequest::Write { fua }, buffer.len(), 0, None, turn);
        let block = turn.info.logical_block;
        let (offset, ..) = blocks_around(part.offset, part.length, block);
        if parts_of_blocks {
            turn.edges.start(Change { tag, offset, buffer, from, to, fua }, block);
            turn.edges.advance(turn.layer, turn.reactor);
        } else {
            let request = Request::Write { tag, offset, payload: Payload::Given(buffer), fua };
            turn.layer.submit(turn.reactor, request);
        }
        Ok(())
    }

    /// Any request without payload.
    fn plain(
        &mut self,
        head: &RequestHead,
        command: CheckedRequest,
        turn: &mut Turn<'_>,
    ) -> Result<usize, Stop> {
        let info = turn.info;
        let (start, blocks, from) = blocks_around(head.offset, head.length, info.logical_block);
        match command {
            CheckedRequest::Read if blocks > largest_whole(turn.reactor.buffers(), &info) => {
                if head.flags & command_flag::DF != 0 {
                    let message = "the read is larger than the server's memory allows in one piece";
                    return self.refuse(head, Refusal { error: error::EOVERFLOW, message }, turn);
                }
                self.admit(Need::REPLY.counting(head.length), turn)?;
                self.begin_whole(head, range_of(head), command, turn);
            }
            CheckedRequest::Read => {
                let memory = blocks as usize;
                let need = Need { memory, ..Need::at_layer(RequestKind::Read, blocks).counting(head.length) };
                let buffer = self.take_buffer(need, turn)?;
                let tag = self.begin(head.into(), command, memory, from, None, turn);
                turn.layer.submit(turn.reactor, Request::Read { tag, offset: start, buffer });
            }
            CheckedRequest::BlockStatus { .. } => {
                let (memory, length) = (STATUS_BYTES, blocks.min(LONGEST_STATUS));
                let need = Need { memory, ..Need::at_layer(RequestKind::Extents, length) };
                let room = self.take_buffer(need, turn)?;
                let tag = self.begin(head.into(), command, memory, 0, Some(room), turn);
                turn.layer.submit(turn.reactor, Request::Extents { tag, offset: start, length });
            }
            CheckedRequest::Discard { .. } => return self.discard(head, command, turn),
            CheckedRequest::WriteZeroes { fua, may_unmap, fast_only } => {
                if blocks > head.length || head.length > LONGEST_RANGE {
                    self.admit(Need::REPLY.counting(0), turn)?;
                    self.begin_whole(head, range_of(head), command, turn);
                    return Ok(0);
                }
                self.admit(Need::at_layer(RequestKind::WriteZeroes, head.length).counting(0), turn)?;
                let tag = self.begin(head.into(), command, 0, 0, None, turn);
                let (offset, length) = (head.offset, head.length);
                let request = Request::WriteZeroes { tag, offset, length, fua, may_unmap, fast_only };
                turn.layer.submit(turn.reactor, request);
            }
            CheckedRequest::Flush => {
                self.admit(Need::at_layer(RequestKind::Flush, 0), turn)?;
                let tag = self.begin(head.into(), command, 0, 0, None, turn);
                turn.layer.submit(turn.reactor, Request::Flush { tag });
            }
            CheckedRequest::Cache | CheckedRequest::Write { .. } | CheckedRequest::Disconnect => {
                // A hint to read ahead. Nothing is promised by answering it ("there is no guarantee of an actual
                // performance gain"), and the layers below have their own judgement.
                self.admit(Need::REPLY, turn)?;
                self.replies.done(self.to(head.cookie, head.offset), None);
            }
        }
        Ok(0)
    }

    /// "A server MAY round offset up and length down to meet internal alignment constraints".
    fn discard(
        &mut self,
        head: &RequestHead,
        command: CheckedRequest,
        turn: &mut Turn<'_>,
    ) -> Result<usize, Stop> {
        let block = u64::from(turn.info.logical_block);
        let offset = head.offset.next_multiple_of(block);
        let end = (head.offset + head.length) / block * block;
        if end <= offset {
            self.admit(Need::REPLY, turn)?;
            self.replies.done(self.to(head.cookie, head.offset), None);
            return Ok(0);
        }
        let length = end - offset;
        if length > LONGEST_RANGE {
            self.admit(Need::REPLY.counting(0), turn)?;
            self.begin_whole(head, offset..end, command, turn);
            return Ok(0);
        }
        self.admit(Need::at_layer(RequestKind::Discard, length).counting(0), turn)?;
        let fua = matches!(command, CheckedRequest::Discard { fua: true });
        let tag = self.begin(head.into(), command, 0, 0, None, turn);
        turn.layer.submit(turn.reactor, Request::Discard { tag, offset, length, fua });
        Ok(0)
    }

    /// Notes a request that goes to the layer; returns its tag.
    pub(super) fn begin(
        &mut self,
        part: Part,
        command: CheckedRequest,
        memory: usize,
        from: usize,
        status: Option<Buffer>,
        turn: &mut Turn<'_>,
    ) -> Tag {
        if let Some(kind) = kind_of(command) {
            if part.whole.is_none() {
                turn.meter.arrive(kind, turn.now);
            }
            if kind.changes_data() {
                turn.edges.begin();
            }
        }
        if let Some(whole) = part.whole {
            self.part_begins(whole);
        }
        self.memory += memory;
        let arrived = turn.now;
        let slot = self.in_flight.insert(InFlight { part, command, arrived, memory, from, status });
        turn.tag(u32::try_from(slot).expect("a connection has few requests in flight"))
    }

    /// Takes a buffer for a request that may go on.
    pub(super) fn take_buffer(&mut self, need: Need, turn: &mut Turn<'_>) -> Result<Buffer, Stop> {
        self.check(need, turn)?;
        let taken = turn.reactor.buffers().take(need.memory);
        let Some(buffer) = taken else {
            (self.held, self.lacks_memory) = (Some(need), true);
            return Err(Stop::Held);
        };
        self.take(need);
        Ok(buffer)
    }

    /// The next request goes on, or waits.
    pub(super) fn admit(&mut self, need: Need, turn: &mut Turn<'_>) -> Result<(), Stop> {
        self.check(need, turn)?;
        self.take(need);
        Ok(())
    }

    /// The request goes on; the next one that counts has not passed the limit.
    fn take(&mut self, need: Need) {
        self.passed &= need.counts.is_none();
    }

    /// The request passes the disk's limit, or waits for it. It passes and is charged once: if it waits for room afterwards, it keeps
    /// its place there.
    fn pass_limit(&mut self, need: Need, turn: &mut Turn<'_>) -> Result<(), Stop> {
        let Some(bytes) = need.counts else { return Ok(()) };
        if self.passed {
            return Ok(());
        }
        // While the disk closes or is about to move, its clients' queues are served at once: what is left of them would end in errors
        // or in doubt (P9). They are not charged: a disk that stays after all would pay for them with its silence.
        if self.state == State::Open {
            if !turn.gate.admits(turn.index, bytes, turn.now) {
                turn.gate.line_up(turn.index, bytes);
                self.held = Some(need);
                self.limited_since.get_or_insert(turn.now);
                return Err(Stop::Limited);
            }
            turn.gate.pass(turn.index, bytes, turn.now);
        }
        self.passed = true;
        if let Some(since) = self.limited_since.take() {
            self.limited += turn.now - since;
        }
        if !self.limited.is_zero() {
            turn.gate.count(self.limited);
        }
        Ok(())
    }

    /// Whether the next request may go on; if not, remembers what it needs (P10).
    fn check(&mut self, need: Need, turn: &mut Turn<'_>) -> Result<(), Stop> {
        // First, so that nobody waits for memory or a place behind a request that may not have them yet.
        self.pass_limit(need, turn)?;
        if need.parts_of_blocks {
            turn.edges.line_up(turn.index);
        }
        let (index, limits) = (turn.index, turn.limits);
        let (layer, reactor) = (&*turn.layer, &*turn.reactor);
        let (edges, disk_memory) = (&*turn.edges, turn.disk_memory);
        let room = Room { layer, reactor, workspace: turn.workspace, edges, limits, disk_memory };
        let Err(lack) = self.admits(need, index, room) else { return Ok(()) };
        self.lacks_memory = lack == Lack::Memory;
        self.has_crowded |= self.in_flight.len() + self.replies.len() >= limits.requests;
        self.held = Some(need);
        // A connection that holds memory waits for itself as much as for others.
        if need.memory > 0 && self.memory_held() == 0 {
            let who = self.socket.token();
            if fair_to_disks(turn.reactor.buffers(), self.memory_of_others(disk_memory), need.memory) {
                turn.workspace.line_up(who, turn.now);
            } else {
                turn.workspace.line_up_in_disk(who, turn.now);
            }
        }
        Err(Stop::Held)
    }

    /// Bytes of buffers that the other connections of its disk hold.
    fn memory_of_others(&self, disk_memory: usize) -> usize {
        disk_memory - self.counted
    }

    fn admits(&self, need: Need, index: u32, room: Room<'_>) -> Result<(), Lack> {
        let Room { layer, reactor, workspace, edges, limits, disk_memory } = room;
        if self.in_flight.len() + self.replies.len() >= limits.requests {
            return Err(Lack::Other);
        }
        if need.alone && !(self.in_flight.is_empty() && self.replies.is_empty()) {
            return Err(Lack::Other);
        }
        if need.memory > 0 {
            let held = self.memory_held();
            let within = held == 0 || held + need.memory <= limits.bytes;
            let first = !workspace.yields(self.socket.token(), need.memory);
            let of_disk = self.memory_of_others(disk_memory) + held;
            let is_fair = fair(reactor.buffers(), held, need.memory)
                && fair_to_disks(reactor.buffers(), of_disk, need.memory);
            if !first {
                return Err(Lack::Other);
            }
            if !within || !is_fair {
                return Err(Lack::Memory);
            }
        }
        let Some((kind, length)) = need.at_layer else { return Ok(()) };
        if kind.changes_data() {
            let may = if need.parts_of_blocks { edges.is_alone(index) } else { edges.may_change() };
            // A payload may arrive while others are alone; it is submitted when they are not any more.
            if !may && need.memory == 0 {
                return Err(Lack::Other);
            }
        }
        if layer.has_room(kind, length) { Ok(()) } else { Err(Lack::Other) }
    }
}

/// The bytes of a request whose end was checked.
fn range_of(head: &RequestHead) -> Range<u64> {
    head.offset..head.offset + head.length
}
