//! A layer that makes several requests of a large one, as one does whose largest transfer is small.

use std::collections::VecDeque;

use slab::Slab;
use weir_block::{
    Buffer, BufferPool, Code, Completion, ErrorKind, Event, IoError, Layer, LayerInfo, LayerMeter, Nanos,
    Outcome, Payload, Reactor, Request, RequestKind, Tag,
};

use super::settings::Switch;

/// Requests in pieces at most (P10).
const MOST: usize = 256;

/// Bytes of pieces at most (P10): twice the largest request.
const MOST_BYTES: usize = 64 << 20;

/// Marks the tag of a piece: the highest three bits are 001. Tags of others are small, or have one of the highest two.
const PIECE: u64 = 1 << 61;

/// A layer in front of `L` that divides reads and writes as its switch says.
pub struct Split<L> {
    inner: L,
    switch: Switch,
    seen: u64,
    /// Largest piece in bytes; 0: nothing is divided.
    largest: usize,
    wholes: Slab<Whole>,
    pieces: Slab<Piece>,
    /// The layer below had no room for them yet.
    waiting: VecDeque<Request<'static>>,
    failed: Vec<Completion>,
    finished: Vec<Completion>,
    pool: BufferPool,
}

/// A request in pieces.
struct Whole {
    tag: Tag,
    /// The buffer into which the parts of a read are copied.
    buffer: Option<Buffer>,
    left: usize,
    error: Option<IoError>,
}

struct Piece {
    whole: usize,
    /// In the whole's buffer.
    at: usize,
}

impl<L: Layer> Split<L> {
    /// Divides what goes to `inner`, as `switch` says.
    #[must_use]
    pub fn new(inner: L, switch: Switch) -> Split<L> {
        Split {
            inner,
            switch,
            seen: 0,
            largest: 0,
            wholes: Slab::new(),
            pieces: Slab::new(),
            waiting: VecDeque::new(),
            failed: Vec::new(),
            finished: Vec::new(),
            pool: BufferPool::new(MOST_BYTES),
        }
    }

    /// The layer below.
    pub fn inner(&self) -> &L {
        &self.inner
    }

    /// The layer below, for what is not a request.
    pub fn inner_mut(&mut self) -> &mut L {
        &mut self.inner
    }

    fn read(&mut self, tag: Tag, offset: u64, buffer: Buffer) {
        let lengths = lengths(buffer.len(), self.largest);
        let Some(parts) = self.take(&lengths) else { return self.no_memory(tag) };
        let whole = self.wholes.insert(Whole { tag, buffer: Some(buffer), left: lengths.len(), error: None });
        let mut at = 0;
        for buffer in parts {
            let (tag, offset, length) = (self.piece(whole, at), offset + at as u64, buffer.len());
            self.waiting.push_back(Request::Read { tag, offset, buffer });
            at += length;
        }
    }

    fn write(&mut self, tag: Tag, offset: u64, bytes: &[u8], fua: bool) {
        let lengths = lengths(bytes.len(), self.largest);
        let Some(parts) = self.take(&lengths) else { return self.no_memory(tag) };
        let whole = self.wholes.insert(Whole { tag, buffer: None, left: lengths.len(), error: None });
        let mut at = 0;
        for mut buffer in parts {
            let length = buffer.len();
            buffer.bytes_mut().copy_from_slice(&bytes[at..at + length]);
            let (tag, offset) = (self.piece(whole, at), offset + at as u64);
            self.waiting.push_back(Request::Write { tag, offset, payload: Payload::Given(buffer), fua });
            at += length;
        }
    }

    /// Buffers for all pieces, or none.
    fn take(&self, lengths: &[usize]) -> Option<Vec<Buffer>> {
        lengths.iter().map(|length| self.pool.take(*length)).collect()
    }

    fn piece(&mut self, whole: usize, at: usize) -> Tag {
        Tag(PIECE | self.pieces.insert(Piece { whole, at }) as u64)
    }

    fn no_memory(&mut self, tag: Tag) {
        let error = IoError::new(ErrorKind::Retry, Code::NoMemory, "dividing a request");
        self.failed.push(Completion { tag, result: Err(error) });
    }

    fn pass_on(&mut self, reactor: &mut Reactor) {
        while let Some(next) = self.waiting.front() {
            let (kind, (_, bytes)) = (next.kind(), next.range());
            if !self.inner.has_room(kind, bytes) {
                return;
            }
            let Some(request) = self.waiting.pop_front() else { return };
            self.inner.submit(reactor, request);
        }
    }

    /// Puts pieces together; passes whole requests as they are.
    fn take_answers(&mut self, done: &mut Vec<Completion>) {
        let mut finished = std::mem::take(&mut self.finished);
        for completion in finished.drain(..) {
            if completion.tag.0 >> 61 != 1 {
                done.push(completion);
                continue;
            }
            let Piece { whole: key, at } = self.pieces.remove((completion.tag.0 & !PIECE) as usize);
            let whole = &mut self.wholes[key];
            whole.left -= 1;
            match (completion.result, &mut whole.buffer) {
                (Ok(Outcome::Read(part)), Some(buffer)) => {
                    buffer.bytes_mut()[at..at + part.len()].copy_from_slice(part.bytes());
                }
                (Ok(_), _) => {}
                (Err(error), _) => whole.error = Some(error),
            }
            if whole.left == 0 {
                let Whole { tag, buffer, error, .. } = self.wholes.remove(key);
                let result = match error {
                    Some(error) => Err(error),
                    None => Ok(buffer.map_or(Outcome::Done, Outcome::Read)),
                };
                done.push(Completion { tag, result });
            }
        }
        self.finished = finished;
    }
}

/// Pieces of `largest`, and the rest.
fn lengths(bytes: usize, largest: usize) -> Vec<usize> {
    (0..bytes).step_by(largest).map(|at| largest.min(bytes - at)).collect()
}

impl<L: Layer> Layer for Split<L> {
    fn info(&self) -> LayerInfo {
        self.inner.info()
    }

    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        let needed = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.wholes.len() < MOST
            && self.waiting.is_empty()
            && self.pool.has_room(needed)
            && self.inner.has_room(kind, bytes)
    }

    fn submit(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        if let Some(faults) = self.switch.changed(&mut self.seen) {
            self.largest = faults.split as usize;
        }
        let largest = if self.largest == 0 { usize::MAX } else { self.largest };
        match request {
            Request::Read { tag, offset, buffer } if buffer.len() > largest => {
                self.read(tag, offset, buffer);
            }
            Request::Write { tag, offset, payload, fua } if payload.len() > largest => {
                self.write(tag, offset, payload.bytes(), fua);
            }
            // Behind the pieces that wait there is no other: then there is no room.
            whole => self.inner.submit(reactor, whole),
        }
        self.pass_on(reactor);
    }

    fn on_event(&mut self, reactor: &mut Reactor, event: Event) {
        self.inner.on_event(reactor, event);
    }

    fn advance(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>) {
        self.pass_on(reactor);
        self.inner.advance(reactor, &mut self.finished);
        self.take_answers(done);
        self.pass_on(reactor);
        done.append(&mut self.failed);
    }

    fn deadline(&self) -> Nanos {
        if self.failed.is_empty() { self.inner.deadline() } else { Nanos(0) }
    }

    fn in_flight(&self) -> usize {
        // Each whole counts once, and its pieces below once more: it only matters that it is not 0.
        self.wholes.len() + self.failed.len() + self.inner.in_flight()
    }

    fn meters(&self, out: &mut Vec<LayerMeter>) {
        self.inner.meters(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Faults;
    use crate::fault::bench::{Below, Bench};

    fn bench() -> Bench<Split<Below>> {
        Bench::new(4 << 20, Split::new)
    }

    #[test]
    fn a_large_request_comes_below_in_pieces_and_comes_back_whole() {
        let mut bench = bench();
        bench.switch.set(Faults { split: 16 << 10, ..Faults::default() });
        let data: Vec<u8> = (0..100 << 10).map(|at: usize| (at / 512) as u8).collect();
        let write = Request::Write { tag: Tag(7), offset: 4096, payload: Payload::Lent(&data), fua: false };
        let answer = bench.go(write);
        assert!(answer.tag == Tag(7) && answer.result.is_ok(), "{answer:?}");
        // Six of 16 KiB and one of 4.
        assert_eq!(bench.arrivals(RequestKind::Write), 7);
        let read = |bench: &mut Bench<_>| {
            let buffer = BufferPool::new(1 << 20).take(100 << 10).unwrap();
            match bench.go(Request::Read { tag: Tag(8), offset: 4096, buffer }).result {
                Ok(Outcome::Read(buffer)) => assert_eq!(buffer.bytes(), data),
                other => panic!("{other:?}"),
            }
        };
        read(&mut bench);
        assert_eq!(bench.arrivals(RequestKind::Read), 7);
        bench.switch.set(Faults::default());
        read(&mut bench);
        assert_eq!(bench.arrivals(RequestKind::Read), 8, "whole again");
    }

    #[test]
    fn failed_pieces_fail_the_whole() {
        let mut bench = bench();
        bench.switch.set(Faults { split: 16 << 10, ..Faults::default() });
        // Of sixteen pieces about half fail, each by itself.
        bench.below.set(Faults { errors_per_million: 500_000, ..Faults::default() });
        let buffer = BufferPool::new(1 << 20).take(256 << 10).unwrap();
        let answer = bench.go(Request::Read { tag: Tag(9), offset: 0, buffer });
        assert!(answer.tag == Tag(9) && answer.result.is_err(), "{answer:?}");
    }
}
