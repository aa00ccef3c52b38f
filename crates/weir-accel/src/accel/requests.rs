//! The requests that the accelerator takes, divided among the log, the path past it, and the layer below.

use weir_block::{
    Action, Buffer, Completion, Destage, Event, Layer, LayerInfo, LayerMeter, Nanos, Outcome, Reactor,
    Request, RequestKind, Tag,
};

use super::Accel;
use super::below::{Below, not_owner};
use crate::log::{LARGEST_RECORD, RecordKind};
use crate::planted::Bug;
use crate::reads::{self, HeldRead, Hit};

/// Most bytes of zeroes in one record; longer ranges become several.
const LARGEST_ZERO: u64 = 1 << 30;

impl<L: Destage> Accel<L> {
    pub(super) fn read(&mut self, reactor: &mut Reactor, tag: Tag, offset: u64, mut buffer: Buffer) {
        let overlay = match reads::look_up(&self.index, &self.log, offset, &mut buffer) {
            Hit::Full(sequence) => return self.held.push(HeldRead { sequence, tag, buffer }),
            Hit::Miss => None,
            Hit::Partial(newest) => {
                let side = reactor.buffers().take(buffer.len());
                let Some(side) = side.or_else(|| self.reserve.take(buffer.len())) else {
                    return self.deferred.push_back((tag, offset, buffer));
                };
                Some((reads::overlay(&self.index, &self.log, offset, side), newest))
            }
        };
        let tag = self.below_tag(Below::Read { tag, offset, overlay });
        self.lower.submit(reactor, Request::Read { tag, offset, buffer });
    }

    pub(super) fn write(&mut self, tag: Tag, offset: u64, data: &[u8]) {
        let mut at = offset;
        let mut last = 0;
        for part in data.chunks(LARGEST_RECORD) {
            last = self.append(RecordKind::Write, at, part.len() as u32, part);
            at += part.len() as u64;
        }
        self.writes.push(last, tag);
    }

    pub(super) fn zero(&mut self, tag: Tag, mut offset: u64, mut length: u64, kind: RecordKind) {
        let mut last = 0;
        while length > 0 {
            let part = length.min(LARGEST_ZERO);
            last = self.append(kind, offset, part as u32, &[]);
            offset += part;
            length -= part;
        }
        self.writes.push(last, tag);
    }

    fn append(&mut self, kind: RecordKind, offset: u64, length: u32, data: &[u8]) -> u64 {
        let sequence =
            self.log.append(kind, offset, length, data).expect("has_room was asked before the submit");
        let record = self.log.get(sequence).expect("appended a moment ago");
        let position = (kind == RecordKind::Write).then_some(record.position);
        self.index.insert(offset, record.end(), sequence, position);
        self.dirty.add(sequence, record.weight(), self.now);
        // Records without data fill the table of records instead of the arena.
        self.pacer.admitted(record.weight());
        sequence
    }

    fn pass(&mut self, reactor: &mut Reactor, mut request: Request<'_>) {
        let (offset, length) = request.range();
        let range = self.bypassing.insert((offset, offset + length));
        self.owner.bypassed();
        request.set_tag(self.below_tag(Below::Pass { tag: request.tag(), range }));
        self.lower.submit(reactor, request);
    }

    fn flush(&mut self, tag: Tag) {
        if self.owner.configuration().write_back && self.flushes.is_flushed() {
            // Everything acknowledged is in the log of every member of the set: that is what the policy names (P8).
            return self.finished.push(Completion { tag, result: Ok(Outcome::Done) });
        }
        // It begins with the next turn: all clients that ask until then share it.
        self.flushes.group().arrive(tag);
    }

    pub(super) fn may_flush(&self) -> bool {
        self.flushes.is_due() && !self.destager.is_flushing() && self.lower.has_room(RequestKind::Flush, 0)
    }

    /// Submits the flush that clients wait for to the backing, unless another one is in flight.
    pub(super) fn begin_flush(&mut self, reactor: &mut Reactor) {
        if self.may_flush() {
            self.flushes.begin();
            let tag = self.below_tag(Below::Flush);
            self.lower.submit(reactor, Request::Flush { tag });
        }
    }

    /// Whether writes go past the log: nothing older is in it.
    pub(super) fn bypasses(&self) -> bool {
        self.owner.bypasses() && self.log.last() == self.owner.marks().appended
    }

    /// Whether a write of this range is in flight past the log. If a client loses its connection and sends again, the old
    /// request must not overwrite its later writes (P4).
    pub(super) fn overlaps(&self, (start, length): (u64, u64)) -> bool {
        let end = start + length;
        self.bypassing.iter().any(|(_, &(first, last))| first < end && start < last)
    }

    /// Whether a write may go straight to the backing now. Looks at the clock as late as possible: this process may have
    /// stood still since the last turn, and another node may own the disk by now (P2, P4).
    pub(super) fn may_bypass(&self) -> bool {
        !self.life.is_released()
            && !self.owner.is_fenced()
            && (self.planted.has(Bug::BypassWithoutLease) || self.config.holds_right(self.clock.now()))
    }

    fn log_has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        if self.log_takes(kind, bytes) { self.pacer.admits() } else { self.full_log.no_room() }
    }

    pub(super) fn log_takes(&self, kind: RequestKind, bytes: u64) -> bool {
        let (data, largest) =
            if kind == RequestKind::Write { (bytes, LARGEST_RECORD as u64) } else { (0, LARGEST_ZERO) };
        !self.refuses_for_space(kind) && self.log.has_room(data, bytes.div_ceil(largest))
    }
}

impl<L: Destage> Layer for Accel<L> {
    fn info(&self) -> LayerInfo {
        LayerInfo { fast_zeroes: true, ..self.lower.info() }
    }

    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        if self.life.is_released() {
            return true;
        }
        match kind {
            kind if !kind.changes_data() => self.deferred.is_empty() && self.lower.has_room(kind, bytes),
            kind if !self.owner.appends() => self.parked.has_room(kind, bytes),
            _ if self.behind.is_some() || self.parked.len() > 0 => false,
            // Also the log: a write that overlaps one on its way past it goes through it when there is no memory for waiting.
            kind if self.owner.bypasses() => {
                self.barrier.is_none()
                    && self.lower.has_room(kind, bytes)
                    && self.may_bypass()
                    && self.log_has_room(kind, bytes)
            }
            kind => self.log_has_room(kind, bytes),
        }
    }

    fn submit(&mut self, reactor: &mut Reactor, mut request: Request<'_>) {
        if self.life.is_released() {
            return self.finished.push(Completion { tag: request.tag(), result: Err(not_owner()) });
        }
        if !self.owner.appends() || self.parked.len() > 0 {
            match self.parked.push(request) {
                Some(other) => request = other,
                None => return,
            }
        }
        if request.kind().changes_data() && self.bypasses() {
            assert!(self.behind.is_none(), "has_room was asked before the submit");
            if !self.overlaps(request.range()) {
                return self.pass(reactor, request);
            }
            request = match request.into_owned(reactor.buffers()) {
                Ok(request) => return self.behind = Some(request),
                Err(request) => request,
            };
        }
        let (kind, (_, bytes)) = (request.kind(), request.range());
        if kind.changes_data() && self.full_log.refuses() && !self.log_takes(kind, bytes) {
            return self.finished.push(Completion { tag: request.tag(), result: Err(self.full_log_error()) });
        }
        match request {
            Request::Read { tag, offset, buffer } => self.read(reactor, tag, offset, buffer),
            Request::Write { tag, offset, payload, .. } => self.write(tag, offset, payload.bytes()),
            Request::WriteZeroes { tag, offset, length, may_unmap, .. } => {
                let kind = if may_unmap { RecordKind::Discard } else { RecordKind::Zero };
                self.zero(tag, offset, length, kind);
            }
            Request::Discard { tag, offset, length, .. } => {
                self.zero(tag, offset, length, RecordKind::Discard)
            }
            Request::Flush { tag } => self.flush(tag),
            Request::Extents { tag, offset, length } => {
                let before = reads::data_runs(&self.index, offset, length);
                let tag = self.below_tag(Below::Extents { tag, before });
                self.lower.submit(reactor, Request::Extents { tag, offset, length });
            }
        }
    }

    fn on_event(&mut self, reactor: &mut Reactor, event: Event) {
        if let Some(store) = self.store.as_mut().filter(|store| store.owner() == event.token.owner) {
            return store.on_event(event, reactor.now());
        }
        if event.token.owner != self.peers_id {
            return self.lower.on_event(reactor, event);
        }
        if let Action::Ready(interest) = event.action {
            self.peers.on_event(event.token.slot, interest);
        }
    }

    fn advance(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>) {
        self.turn(reactor, done);
    }

    fn deadline(&self) -> Nanos {
        self.next_turn()
    }

    fn in_flight(&self) -> usize {
        let waiting = self.deferred.len()
            + usize::from(self.behind.is_some())
            + self.parked.len()
            + self.flushes.pending();
        self.below.len() + self.writes.len() + self.held.len() + waiting + self.finished.len()
    }

    fn meters(&self, out: &mut Vec<LayerMeter>) {
        out.push(LayerMeter { layer: "replicas", meter: self.peers.meter().clone() });
        if let Some(store) = &self.store {
            out.push(LayerMeter { layer: "flash", meter: store.meter().clone() });
        }
        self.lower.meters(out);
    }
}
