//! Requests that go to the layer in parts, one after the other, and have one answer: reads and writes that are too large
//! for the layer or for the shard's memory (P10), and zeroing that begins or ends inside a block.
//!
//! A connection works on one of them at a time and looks at nothing behind it until the last part is at the layer.

use std::ops::Range;

use weir_block::{IoError, Meter, Nanos, Outcome, Request, RequestKind};
use weir_nbd::protocol::error;
use weir_nbd::server::{CheckedRequest, RequestHead, error_number};

use super::{
    CLOSING, CONTRADICTION, Connection, InFlight, Incoming, Need, Part, State, Stop, Turn, cut_out, kind_of,
};
use crate::nbd::replies::{Counted, Form};
use crate::workspace::part_size;

/// Longest range that is zeroed or discarded with one request to the layer, in bytes: it bounds the room that one request needs
/// there.
pub(super) const LONGEST_RANGE: u64 = 1 << 30;

/// A request that goes to the layer in parts.
#[derive(Debug)]
pub(super) struct Whole {
    /// As the client sent it.
    head: RequestHead,
    /// The first byte that goes to the layer.
    start: u64,
    command: CheckedRequest,
    arrived: Nanos,
    /// Parts at the layer.
    under_way: usize,
    failed: Option<(u32, &'static str)>,
    /// Data of a simple reply is on its way.
    begun: bool,
}

/// The part of a request that is not at the layer yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest {
    pub whole: u32,
    at: u64,
    end: u64,
}

/// The blocks around a range, and where in them the range begins.
pub(super) fn blocks_around(offset: u64, length: u64, block: u32) -> (u64, u64, usize) {
    let block = u64::from(block);
    let start = offset - offset % block;
    let end = (offset + length).next_multiple_of(block);
    (start, end - start, (offset - start) as usize)
}

impl Connection {
    /// Begins a request that goes in parts, whose bytes `range` go to the layer. [`Connection::feed`] does the rest.
    pub(super) fn begin_whole(
        &mut self,
        head: &RequestHead,
        range: Range<u64>,
        command: CheckedRequest,
        turn: &mut Turn<'_>,
    ) {
        if let Some(kind) = kind_of(command) {
            turn.meter.arrive(kind, turn.now);
        }
        let (head, start, arrived) = (*head, range.start, turn.now);
        let whole = Whole { head, start, command, arrived, under_way: 0, failed: None, begun: false };
        let whole =
            u32::try_from(self.wholes.insert(whole)).expect("a connection has few requests in flight");
        self.rest = Some(Rest { whole, at: range.start, end: range.end });
    }

    /// Goes on with the write whose payload arrives and with the request that goes in parts, for which `bytes` are next.
    /// `None` when there is no such request any more.
    pub(super) fn feed(&mut self, bytes: &mut &[u8], turn: &mut Turn<'_>) -> Option<Stop> {
        loop {
            if let Some(incoming) = &mut self.incoming {
                let taken = bytes.len().min(incoming.to - incoming.filled);
                let (now, behind) = bytes.split_at(taken);
                incoming.buffer.bytes_mut()[incoming.filled..incoming.filled + taken].copy_from_slice(now);
                incoming.filled += taken;
                *bytes = behind;
                if incoming.filled < incoming.to {
                    return Some(Stop::Incomplete);
                }
                if let Err(stop) = self.submit_incoming(turn) {
                    return Some(stop);
                }
                continue;
            }
            let Some(rest) = self.rest else {
                // A simple reply of which only a part is out is finished before anything else is answered.
                let need = Need { alone: true, ..Need::REPLY };
                return if self.is_streaming() { self.admit(need, turn).err() } else { None };
            };
            if turn.left == 0 {
                return Some(Stop::TurnOver);
            }
            if let Err(stop) = self.next_part(rest, turn) {
                return Some(stop);
            }
            turn.left -= 1;
        }
    }

    /// Whether a read is being answered with a simple reply, part by part.
    fn is_streaming(&self) -> bool {
        let is_read = |(_, whole): (usize, &Whole)| whole.command == CheckedRequest::Read;
        !self.wholes.is_empty() && Form::from(self.terms) == Form::Simple && self.wholes.iter().any(is_read)
    }

    /// Submits the next part, or makes room for its payload.
    fn next_part(&mut self, rest: Rest, turn: &mut Turn<'_>) -> Result<(), Stop> {
        let info = turn.info;
        let Whole { head, start, command, .. } = self.wholes[rest.whole as usize];
        let block = u64::from(info.logical_block);
        let size = part_size(turn.reactor.buffers(), &info);
        let to_block = rest.at.next_multiple_of(block).min(rest.end);
        let last_block = rest.end - rest.end % block;
        // Parts end at blocks, so that only the first and the last can have parts of blocks at their ends.
        let end = match command {
            CheckedRequest::Read | CheckedRequest::Write { .. } if rest.at + size < rest.end => {
                (rest.at + size) / block * block
            }
            CheckedRequest::Read | CheckedRequest::Write { .. } => rest.end,
            _ if rest.at < to_block => to_block,
            _ if rest.at < last_block => last_block.min(rest.at + LONGEST_RANGE),
            _ => rest.end,
        };
        let length = end - rest.at;
        let part = Part { cookie: head.cookie, offset: rest.at, length, whole: Some(rest.whole) };
        let is_range = rest.at.is_multiple_of(block) && end.is_multiple_of(block);
        match command {
            CheckedRequest::Read => self.read_part(part, turn)?,
            CheckedRequest::Write { fua } => self.expect_payload(part, fua, turn)?,
            CheckedRequest::WriteZeroes { fua, .. } if !is_range => {
                self.expect_payload(part, fua, turn)?;
                if let Some(Incoming { buffer, from, to, filled, .. }) = &mut self.incoming {
                    buffer.bytes_mut()[*from..*to].fill(0);
                    *filled = *to;
                }
            }
            _ => self.range_part(part, command, turn)?,
        }
        if rest.at > start
            && let Some(kind) = kind_of(command)
        {
            turn.meter.split(kind, 1);
        }
        self.rest = (end < rest.end).then_some(Rest { at: end, ..rest });
        Ok(())
    }

    fn read_part(&mut self, part: Part, turn: &mut Turn<'_>) -> Result<(), Stop> {
        let (offset, length, from) = blocks_around(part.offset, part.length, turn.info.logical_block);
        let memory = length as usize;
        // A simple reply is one piece: its data comes in order, and nothing else in between.
        let alone = Form::from(self.terms) == Form::Simple;
        let need = Need { memory, alone, ..Need::at_layer(RequestKind::Read, length) };
        let buffer = self.take_buffer(need, turn)?;
        let tag = self.begin(part, CheckedRequest::Read, memory, from, None, turn);
        turn.layer.submit(turn.reactor, Request::Read { tag, offset, buffer });
        Ok(())
    }

    fn range_part(&mut self, part: Part, command: CheckedRequest, turn: &mut Turn<'_>) -> Result<(), Stop> {
        let Part { offset, length, .. } = part;
        let kind = kind_of(command).unwrap_or(RequestKind::WriteZeroes);
        self.admit(Need::at_layer(kind, length), turn)?;
        let tag = self.begin(part, command, 0, 0, None, turn);
        let request = match command {
            CheckedRequest::WriteZeroes { fua, may_unmap, fast_only } => {
                Request::WriteZeroes { tag, offset, length, fua, may_unmap, fast_only }
            }
            CheckedRequest::Discard { fua } => Request::Discard { tag, offset, length, fua },
            _ => Request::Flush { tag },
        };
        turn.layer.submit(turn.reactor, request);
        Ok(())
    }

    /// A part of a request goes to the layer.
    pub(super) fn part_begins(&mut self, whole: u32) {
        self.wholes[whole as usize].under_way += 1;
    }

    /// The layer has answered a part.
    pub(super) fn complete_part(
        &mut self,
        whole: u32,
        request: InFlight,
        result: Result<Outcome, IoError>,
        meter: &mut Meter,
    ) {
        let command = request.command;
        self.wholes[whole as usize].under_way -= 1;
        match result {
            Ok(Outcome::Read(buffer)) if command == CheckedRequest::Read => match cut_out(&request, buffer) {
                Some(data) => return self.send_part(whole, request.part.offset, data, meter),
                None => self.fail(whole, (error::EIO, CONTRADICTION)),
            },
            Ok(Outcome::Done) if command != CheckedRequest::Read => {}
            Ok(_) => self.fail(whole, (error::EIO, CONTRADICTION)),
            Err(failure) => self.fail(whole, (error_number(&failure, command), failure.context)),
        }
        self.finish_whole(whole, meter);
    }

    /// Data of a read. A failed request sends no more.
    fn send_part(&mut self, whole: u32, at: u64, data: crate::nbd::replies::Data, meter: &mut Meter) {
        let is_last = self.is_over(whole);
        let counted = self.counted(whole);
        let one = &mut self.wholes[whole as usize];
        if self.state == State::Dead || one.failed.is_some() {
            return self.finish_whole(whole, meter);
        }
        let begun = std::mem::replace(&mut one.begun, true);
        let to = self.to(self.wholes[whole as usize].head.cookie, self.wholes[whole as usize].head.offset);
        let counted = counted.filter(|_| is_last);
        if to.form == Form::Simple && begun {
            self.replies.more_data(data, counted);
        } else {
            self.replies.data(to, at, data, is_last, counted);
        }
        if is_last {
            self.wholes.remove(whole as usize);
        }
    }

    fn counted(&self, whole: u32) -> Option<Counted> {
        let Whole { command, arrived, head, .. } = &self.wholes[whole as usize];
        let kind = kind_of(*command)?;
        Some(Counted { kind, bytes: head.length, arrived: *arrived })
    }

    /// Whether all parts have been at the layer and have come back.
    fn is_over(&self, whole: u32) -> bool {
        let is_rest = self.rest.is_some_and(|rest| rest.whole == whole);
        let is_incoming = self.incoming.as_ref().is_some_and(|incoming| incoming.part.whole == Some(whole));
        self.wholes[whole as usize].under_way == 0 && !is_rest && !is_incoming
    }

    /// Records why a request fails. Parts that are not at the layer yet are not submitted any more.
    fn fail(&mut self, whole: u32, why: (u32, &'static str)) {
        self.wholes[whole as usize].failed.get_or_insert(why);
        let rest = self.rest.take_if(|rest| rest.whole == whole);
        self.skip += self.unsent(rest);
    }

    /// A request whose parts are not all at the layer fails: they do not get there any more.
    pub(super) fn give_up(&mut self, whole: u32, meter: &mut Meter) {
        self.wholes[whole as usize].failed.get_or_insert((error::ESHUTDOWN, CLOSING));
        self.finish_whole(whole, meter);
    }

    /// Bytes of payload that still have to come for parts that are not at the layer.
    pub(super) fn unsent(&self, rest: Option<Rest>) -> u64 {
        rest.filter(|rest| self.wholes[rest.whole as usize].head.payload > 0)
            .map_or(0, |rest| rest.end - rest.at)
    }

    /// Answers a request when all its parts are done, except one whose data was the answer.
    fn finish_whole(&mut self, whole: u32, meter: &mut Meter) {
        if !self.is_over(whole) {
            return;
        }
        let counted = self.counted(whole);
        let Whole { head, failed, begun, .. } = self.wholes.remove(whole as usize);
        let to = self.to(head.cookie, head.offset);
        if self.state == State::Dead || (begun && to.form == Form::Simple) {
            // "If an error occurs while reading after the server has already sent out the reply header [...], the server
            // MUST immediately initiate a hard disconnect".
            self.broken = true;
            if let Some(Counted { kind, bytes, arrived }) = counted {
                meter.complete(kind, bytes, arrived, Nanos::now(), false);
            }
            return;
        }
        match failed {
            Some((number, message)) => self.replies.error(to, number, message, counted),
            None => self.replies.done(to, counted),
        }
    }
}
