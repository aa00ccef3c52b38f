//! Writes due to a slot, and the state that is certainly durable there. No I/O.

use std::collections::VecDeque;

use super::frame::{Frame, Location, MOST_RECORDS, STATE_ROOM, State, data_room};
use crate::log::{BLOCK, Log};
use crate::owner::Held;
use crate::planted::{Bug, Planted};
use crate::wire::RecordHeader;

/// Softly, bytes of data in one frame: a larger one would make those who come later wait for too long.
const MOST_BYTES: u64 = 1 << 20;

/// A frame with records that may still be needed.
#[derive(Clone, Copy, Debug)]
struct Span {
    position: u64,
    /// Its last record.
    last: u64,
}

/// A frame on its way.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    held: Held,
    tail: u64,
}

/// The next write, and its place in the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// Bytes from the start of the slot.
    pub offset: u64,
    /// Bytes, the header block included.
    pub length: u64,
    /// Position of its first data in the log's arena, which must not change until it is written ([`Log::pin`]).
    pub pins: Option<u64>,
}

/// The frames of one slot.
#[derive(Clone, Debug)]
pub struct Journal {
    instance: u64,
    run: u64,
    /// Bytes for the frames with records.
    ring: u64,
    /// Number of the next frame, and of the newest one with records and its run.
    number: u64,
    before: u64,
    before_run: u64,
    /// Position of the next frame with records.
    head: u64,
    /// The frames with records that are needed, oldest first. Those without are not: the newest frame says all that they said.
    frames: VecDeque<Span>,
    /// No durable frame refers to data before this position: there is room to write.
    released: u64,
    /// The state in the newest frame, durable or not.
    told: Option<State>,
    /// The last record in any frame.
    framed: u64,
    in_flight: Option<InFlight>,
    stored: Held,
    headers: Vec<RecordHeader>,
    /// Position in the arena of the first data of the frame in the making.
    pins: Option<u64>,
    planted: Planted,
}

impl Journal {
    /// A journal in a slot of `bytes` that holds nothing of this instance.
    #[must_use]
    pub fn new(instance: u64, bytes: u64) -> Journal {
        Journal {
            instance,
            run: 1,
            ring: bytes - STATE_ROOM,
            number: 1,
            before: 0,
            before_run: 0,
            head: 0,
            frames: VecDeque::new(),
            released: 0,
            told: None,
            framed: 0,
            in_flight: None,
            stored: Held::default(),
            headers: Vec::new(),
            pins: None,
            planted: Planted::default(),
        }
    }

    /// Goes on as `run`, behind the newest frame that was recovered from a slot of `bytes`. `needed` are the frames with records
    /// that are needed, oldest first.
    pub(super) fn continued(
        instance: u64,
        bytes: u64,
        run: u64,
        newest: &Frame,
        needed: &[Frame],
    ) -> Journal {
        let (location, last) = (&newest.location, Frame::last);
        let has_records = !newest.records.is_empty();
        let spans = needed.iter().map(|frame| Span { position: frame.location.position, last: last(frame) });
        Journal {
            run,
            number: location.number + 1,
            before: if has_records { location.number } else { location.before },
            before_run: if has_records { location.run } else { location.before_run },
            head: if has_records { location.position + location.length } else { location.position },
            frames: spans.collect(),
            released: location.tail,
            framed: last(newest),
            ..Journal::new(instance, bytes)
        }
    }

    /// The same with a bug, if one is planted.
    #[cfg(feature = "planted-bugs")]
    pub(super) fn planted(self, planted: Planted) -> Journal {
        Journal { planted, ..self }
    }

    /// The state that is certainly durable.
    #[must_use]
    pub fn stored(&self) -> Held {
        self.stored
    }

    /// Whether a frame is on its way.
    #[must_use]
    pub fn is_writing(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Whether everything that is to be durable, and this state, is. Records become durable in order: those of a copy that is being
    /// filled, whose oldest are still missing, once nothing is missing any more.
    #[must_use]
    pub fn has_caught_up(&self, log: &Log, state: &State) -> bool {
        let framed = self.framed == log.last() || self.has_gap(log, state);
        self.in_flight.is_none() && self.told == Some(*state) && framed
    }

    /// The log was truncated or begun anew: frames behind its last record do not count any more.
    pub fn rewound(&mut self, log: &Log) {
        if self.planted.has(Bug::ForgetRewind) {
            return;
        }
        let last = log.last();
        if log.freed() == last {
            // Nothing of what was there is needed, and numbers may begin again below those that were.
            self.frames.clear();
            self.framed = last;
        }
        self.framed = self.framed.min(last);
        self.stored.last = self.stored.last.min(last);
        self.told = None;
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.held.last = in_flight.held.last.min(last);
        }
    }

    /// The next frame: its header block and the pieces of the log's arena that follow it. `None` when one is in flight, there
    /// is nothing new, or there is no room.
    pub fn next(
        &mut self,
        log: &Log,
        state: State,
        block: &mut [u8],
        pieces: &mut Vec<(usize, usize)>,
    ) -> Option<Write> {
        if self.in_flight.is_some() || self.has_caught_up(log, &state) {
            return None;
        }
        while self.frames.front().is_some_and(|frame| frame.last <= state.freed) {
            self.frames.pop_front();
        }
        self.framed = self.framed.max(state.freed);
        let first = self.framed + 1;
        let last = if self.has_gap(log, &state) { self.framed } else { log.last() };
        let length = self.gather(log, (first, last), pieces);
        if !self.headers.is_empty()
            && let Some(position) = self.fit(length)
        {
            return Some(self.write(Some((position, length)), first, state, block));
        }
        self.forget(pieces);
        // A frame without records needs no room. It says what is news, also that others are not needed any more, which makes room.
        let news = self.told != Some(state) || self.tail_is_news();
        news.then(|| self.write(None, first, state, block))
    }

    /// The frame is durable.
    ///
    /// # Panics
    /// None was in flight.
    pub fn written(&mut self) {
        let InFlight { held, tail } = self.in_flight.take().expect("a frame was under way");
        self.stored = held;
        self.released = tail;
    }

    /// The frame in flight has no waiter any more: it may be durable or not, and is the last one.
    pub fn abandon(&mut self) {
        self.in_flight = None;
    }

    /// Chooses the records; returns the frame's length.
    fn gather(&mut self, log: &Log, (first, last): (u64, u64), pieces: &mut Vec<(usize, usize)>) -> u64 {
        self.forget(pieces);
        let mut length = BLOCK;
        for (_, record) in log.range(first, last).take(MOST_RECORDS) {
            let room = data_room(record);
            if length > BLOCK && length + room > BLOCK + MOST_BYTES {
                break;
            }
            if room > 0 {
                pieces.push((log.arena_offset(record.position), room as usize));
                self.pins.get_or_insert(record.position);
            }
            length += room;
            self.headers.push(RecordHeader::of(record));
        }
        length
    }

    /// Whether records are missing that are older than those in the log and not freed.
    fn has_gap(&self, log: &Log, state: &State) -> bool {
        log.freed() > state.freed && !self.planted.has(Bug::RestBesideGap)
    }

    fn forget(&mut self, pieces: &mut Vec<(usize, usize)>) {
        pieces.clear();
        self.headers.clear();
        self.pins = None;
    }

    /// The position for a frame of this length, if there is room.
    fn fit(&self, length: u64) -> Option<u64> {
        let rest = self.ring - self.head % self.ring;
        let position = if length > rest { self.head + rest } else { self.head };
        (position + length <= self.released + self.ring).then_some(position)
    }

    fn tail_is_news(&self) -> bool {
        self.frames.front().map_or(self.head, |frame| frame.position) > self.released
    }

    /// Writes the header block of a frame whose records lie at this position and with it take this length, or that has none.
    fn write(&mut self, records: Option<(u64, u64)>, first: u64, state: State, block: &mut [u8]) -> Write {
        let last = first + self.headers.len() as u64 - 1;
        let (position, length) = records.unwrap_or((self.head, BLOCK));
        if records.is_some() {
            self.frames.push_back(Span { position, last });
            self.head = position + length;
        }
        let Journal { instance, run, number, before, before_run, .. } = *self;
        let tail = self.frames.front().map_or(self.head, |frame| frame.position);
        let location = Location { instance, run, number, before, before_run, position, tail, length };
        Frame::encode(&location, &state, first, &self.headers, block);
        self.number += 1;
        if records.is_some() {
            (self.before, self.before_run) = (number, run);
        }
        self.framed = last;
        self.told = Some(state);
        let State { epoch, freed, complete, .. } = state;
        let held = Held { epoch, last, freed, gap: freed, complete };
        self.in_flight = Some(InFlight { held, tail });
        Write { offset: location.offset(records.is_some(), self.ring), length, pins: self.pins }
    }
}
