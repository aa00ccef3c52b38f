//! A layer that writes whole sectors only, as a disk of 4 KiB sectors does that shows smaller ones, or a volume with large
//! records: of a write that covers parts of some, the rest is read first.

use std::collections::VecDeque;
use std::ops::Range;

use slab::Slab;
use weir_block::{
    Buffer, BufferPool, Code, Completion, ErrorKind, Event, IoError, Layer, LayerInfo, LayerMeter, Nanos,
    Outcome, Payload, Reactor, Request, RequestKind, Tag,
};

use super::settings::Switch;

/// Changes of data in flight at most (P10).
const MOST: usize = 256;

/// Bytes of writes and of whole sectors at most (P10): twice the largest request.
const MOST_BYTES: usize = 64 << 20;

/// Marks the tag of what changes data: the highest four bits are 0001. Tags of others are small, or have one of the highest
/// three.
const OURS: u64 = 1 << 60;

/// A layer in front of `L` with sectors as large as its switch says.
pub struct Sectors<L> {
    inner: L,
    switch: Switch,
    seen: u64,
    /// In bytes; 1: every write covers whole ones.
    sector: u64,
    size: u64,
    changes: Slab<Change>,
    /// In order: the first one touches sectors of a change in flight, or the layer below has no room.
    waiting: VecDeque<Request<'static>>,
    /// Sectors that were read and overlaid, to be written as soon as there is room.
    whole: VecDeque<(usize, Buffer)>,
    failed: Vec<Completion>,
    finished: Vec<Completion>,
    pool: BufferPool,
}

/// A change of data in flight: no other one touches its sectors.
struct Change {
    tag: Tag,
    sectors: Range<u64>,
    fua: bool,
    /// The write's bytes and their place in the sectors, while the rest is read.
    part: Option<(usize, Buffer)>,
}

impl<L: Layer> Sectors<L> {
    /// Sectors in front of `inner`, as `switch` says.
    #[must_use]
    pub fn new(inner: L, switch: Switch) -> Sectors<L> {
        Sectors {
            size: inner.info().size,
            inner,
            switch,
            seen: 0,
            sector: 1,
            changes: Slab::new(),
            waiting: VecDeque::new(),
            whole: VecDeque::new(),
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

    /// The bytes of all sectors that a range touches.
    fn sectors(&self, (offset, bytes): (u64, u64)) -> Range<u64> {
        let end = (offset + bytes).next_multiple_of(self.sector);
        offset / self.sector * self.sector..end.min(self.size)
    }

    fn pass_on(&mut self, reactor: &mut Reactor) {
        while let Some((_, buffer)) = self.whole.front() {
            if !self.inner.has_room(RequestKind::Write, buffer.len() as u64) {
                return;
            }
            let Some((key, buffer)) = self.whole.pop_front() else { return };
            let Change { sectors, fua, .. } = &self.changes[key];
            let (offset, payload) = (sectors.start, Payload::Given(buffer));
            self.inner.submit(reactor, Request::Write { tag: tag(key), offset, payload, fua: *fua });
        }
        while let Some(next) = self.waiting.front() {
            let (sectors, (_, bytes)) = (self.sectors(next.range()), next.range());
            let touches =
                |other: &Change| other.sectors.start < sectors.end && sectors.start < other.sectors.end;
            let room = self.inner.has_room(RequestKind::Read, sectors.end - sectors.start)
                && self.inner.has_room(next.kind(), bytes);
            if !room || self.changes.iter().any(|(_, other)| touches(other)) {
                return;
            }
            let Some(request) = self.waiting.pop_front() else { return };
            self.begin(reactor, request, sectors);
        }
    }

    /// Writes what covers whole sectors; reads first where it does not.
    fn begin(&mut self, reactor: &mut Reactor, mut request: Request<'static>, sectors: Range<u64>) {
        let (asked, (offset, bytes)) = (request.tag(), request.range());
        let mut change = Change { tag: asked, sectors: sectors.clone(), fua: false, part: None };
        match request {
            Request::Write { payload: Payload::Given(part), fua, .. }
                if (offset..offset + bytes) != sectors =>
            {
                let Some(buffer) = self.pool.take((sectors.end - sectors.start) as usize) else {
                    return self.no_memory(asked);
                };
                (change.fua, change.part) = (fua, Some(((offset - sectors.start) as usize, part)));
                let tag = tag(self.changes.insert(change));
                self.inner.submit(reactor, Request::Read { tag, offset: sectors.start, buffer });
            }
            _ => {
                request.set_tag(tag(self.changes.insert(change)));
                self.inner.submit(reactor, request);
            }
        }
    }

    fn no_memory(&mut self, tag: Tag) {
        let error = IoError::new(ErrorKind::Retry, Code::NoMemory, "reading the rest of sectors");
        self.failed.push(Completion { tag, result: Err(error) });
    }

    /// Overlays sectors that were read, answers writes, and passes completions of other requests on.
    fn take_answers(&mut self, done: &mut Vec<Completion>) {
        for completion in self.finished.drain(..) {
            if completion.tag.0 >> 60 != 1 {
                done.push(completion);
                continue;
            }
            let key = (completion.tag.0 & !OURS) as usize;
            match (completion.result, self.changes[key].part.take()) {
                (Ok(Outcome::Read(mut whole)), Some((at, part))) => {
                    whole.bytes_mut()[at..at + part.len()].copy_from_slice(part.bytes());
                    self.whole.push_back((key, whole));
                }
                (result, _) => done.push(Completion { tag: self.changes.remove(key).tag, result }),
            }
        }
    }
}

fn tag(key: usize) -> Tag {
    Tag(OURS | key as u64)
}

impl<L: Layer> Layer for Sectors<L> {
    fn info(&self) -> LayerInfo {
        self.inner.info()
    }

    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        // Its own bytes, and those of the sectors around them.
        let needed = 2 * (bytes + self.sector);
        let free = !kind.changes_data()
            || self.changes.len() < MOST && self.pool.has_room(usize::try_from(needed).unwrap_or(usize::MAX));
        self.waiting.is_empty() && free && self.inner.has_room(kind, bytes)
    }

    fn submit(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        if let Some(faults) = self.switch.changed(&mut self.seen) {
            self.sector = u64::from(faults.sectors).max(1);
        }
        let idle = self.changes.is_empty() && self.waiting.is_empty();
        if !request.kind().changes_data() || self.sector == 1 && idle {
            return self.inner.submit(reactor, request);
        }
        let tag = request.tag();
        match request.into_owned(&self.pool) {
            Ok(request) => self.waiting.push_back(request),
            Err(_) => self.no_memory(tag),
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
        // Each change counts once, and once more below: it only matters that it is not 0.
        self.changes.len() + self.waiting.len() + self.failed.len() + self.inner.in_flight()
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

    const SIZE: u64 = 256 << 10;

    /// Over a backing in which requests overtake each other.
    fn bench() -> Bench<Sectors<Below>> {
        let bench = Bench::new(SIZE, Sectors::new);
        bench.below.set(Faults { jitter_us: 500, ..Faults::order_lost(4) });
        bench
    }

    fn write(tag: u64, offset: u64, data: &[u8]) -> Request<'_> {
        Request::Write { tag: Tag(tag), offset, payload: Payload::Lent(data), fua: false }
    }

    fn all(bench: &mut Bench<Sectors<Below>>) -> Vec<u8> {
        let buffer = BufferPool::new(1 << 20).take(SIZE as usize).unwrap();
        match bench.go(Request::Read { tag: Tag(0), offset: 0, buffer }).result {
            Ok(Outcome::Read(buffer)) => buffer.bytes().to_vec(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn parts_of_sectors_cost_a_read_and_whole_ones_do_not() {
        let mut bench = bench();
        bench.switch.set(Faults { sectors: 16 << 10, ..Faults::default() });
        bench.go(write(1, 4096, &[1; 4096]));
        assert_eq!((bench.arrivals(RequestKind::Read), bench.arrivals(RequestKind::Write)), (1, 1));
        // Across a border: both sectors at once.
        bench.go(write(2, (16 << 10) - 512, &[2; 1024]));
        assert_eq!((bench.arrivals(RequestKind::Read), bench.arrivals(RequestKind::Write)), (2, 2));
        bench.go(write(3, 32 << 10, &[3; 32 << 10]));
        assert_eq!((bench.arrivals(RequestKind::Read), bench.arrivals(RequestKind::Write)), (2, 3));
        bench.switch.set(Faults::default());
        bench.go(write(4, 512, &[4; 512]));
        assert_eq!(bench.arrivals(RequestKind::Read), 2, "as they come");
    }

    /// Neighbours in a sector, many at once, each read and written as a whole: no write is lost under another one's sector.
    #[test]
    fn neighbours_in_a_sector_do_not_undo_each_other() {
        let mut bench = bench();
        let mut expected = vec![0u8; SIZE as usize];
        let mut random = fastrand::Rng::with_seed(3);
        for round in 0..20u8 {
            let sectors = if round % 5 == 4 { 0 } else { 16 << 10 };
            bench.switch.set(Faults { sectors, ..Faults::default() });
            for slot in 0..40u64 {
                // Ranges of different writes do not overlap within a round.
                let length = 512 * random.u64(1..=8);
                let (offset, fill) = (slot * 4096 + 4096 - length, round * 7 + slot as u8 + 1);
                expected[offset as usize..(offset + length) as usize].fill(fill);
                bench.submit(write(slot + 1, offset, &vec![fill; length as usize]));
            }
            let done = bench.answers(40);
            assert!(done.iter().all(|answer| answer.result.is_ok()));
            let mut tags: Vec<u64> = done.iter().map(|answer| answer.tag.0).collect();
            tags.sort_unstable();
            assert_eq!(tags, (1..=40).collect::<Vec<_>>());
            assert!(all(&mut bench) == expected, "round {round}");
        }
        assert_eq!(bench.layer.in_flight(), 0);
    }
}
