//! The client's requests, and what their answers promise.

use std::rc::Rc;

use weir_block::{Completion, Destage, IoError, Layer, Outcome, Payload, Request, RequestKind, Tag};
use weir_volume::lun::router::Range;

use super::storage::{fill, value_in, value_of, version_of};
use super::{BLOCK, BLOCKS, World};

/// Most blocks of a request.
const LARGEST: usize = 24;
/// Bytes of a part of the region, and how many there are.
pub const SLOT: usize = LARGEST * BLOCK as usize;
pub const SLOTS: usize = 16;

/// A request without an answer, or whose answer says nothing of what it has done.
#[derive(Debug)]
pub struct Pending {
    pub kind: RequestKind,
    /// In blocks.
    pub range: Range,
    pub began: u64,
    /// Durable when it is answered.
    durable: bool,
    /// Of the region.
    slot: Option<usize>,
    /// It came when all faults were over.
    is_last: bool,
}

impl Pending {
    fn blocks(&self) -> impl Iterator<Item = usize> + use<> {
        self.range.0 as usize..self.range.1 as usize
    }

    fn covers(&self, block: usize) -> bool {
        self.blocks().any(|other| other == block)
    }

    /// The part of the region that it has.
    pub fn slot(&self) -> Option<usize> {
        self.slot
    }

    /// It makes blocks zeroes.
    pub fn zeroes(&self, block: usize) -> bool {
        self.kind.changes_data() && self.kind != RequestKind::Write && self.covers(block)
    }
}

impl World {
    /// A request of the client, if it may have another one.
    pub fn submit(&mut self) {
        if self.owner.is_none() || self.pending.len() >= self.depth {
            return;
        }
        let start = self.rng.usize(0..self.used);
        let blocks = if self.rng.u8(0..6) == 0 { LARGEST } else { 4 };
        let end = (start + self.rng.usize(1..=blocks)).min(self.used);
        let kind = match self.rng.u8(0..20) {
            0..7 => RequestKind::Read,
            7..14 => RequestKind::Write,
            14..16 => RequestKind::WriteZeroes,
            16..18 => RequestKind::Discard,
            _ => RequestKind::Flush,
        };
        self.begin(kind, (start as u64, end as u64), false);
    }

    /// Reads, writes and flushes everything when the faults are over.
    pub fn begin_last(&mut self) {
        let piece = LARGEST as u64;
        for start in (0..BLOCKS as u64).step_by(LARGEST) {
            let range = (start, (start + piece).min(BLOCKS as u64));
            self.begin(RequestKind::Read, range, true);
            self.begin(RequestKind::Write, (start, start + 1), true);
        }
        self.begin(RequestKind::Flush, (0, 0), true);
    }

    fn begin(&mut self, kind: RequestKind, range: Range, is_last: bool) {
        let range = if kind == RequestKind::Flush { (0, 0) } else { range };
        let bytes = (range.1 - range.0) * BLOCK;
        let Some(node) = self.owner.map(|owner| &mut self.nodes[owner]) else { return };
        let (Some(owner), Some(reactor)) = (&mut node.owner, &mut node.reactor) else { return };
        if !owner.has_room(kind, bytes) {
            return;
        }
        self.next += 1;
        let (id, offset, tag) = (self.next, range.0 * BLOCK, Tag(self.next));
        let began = self.lun.lock().tick();
        let mut pending = Pending { kind, range, began, durable: false, slot: None, is_last };
        let fua = self.rng.u8(0..4) == 0;
        let value = |number: usize| value_of(id, range.0 as usize + number);
        let mut buffer = match kind {
            RequestKind::Read | RequestKind::Write => reactor.buffers().take(bytes as usize),
            _ => None,
        };
        node.wake = weir_block::Nanos(0);
        let request = match (kind, buffer.take()) {
            (RequestKind::Read, Some(buffer)) => Request::Read { tag, offset, buffer },
            (RequestKind::Write, Some(mut buffer)) => {
                fill(buffer.bytes_mut(), value);
                for block in pending.blocks() {
                    self.histories[block].write(id, began);
                }
                match (self.rng.u8(0..3), self.free.pop()) {
                    (0, Some(slot)) => {
                        self.region.copy_in(slot * SLOT, buffer.bytes());
                        pending.slot = Some(slot);
                        let pieces = pieces(slot * SLOT, bytes as usize, &mut self.rng);
                        owner.write_gather(reactor, tag, offset, Rc::clone(&self.region), pieces);
                        self.log.note(|| format!("client: gathered write {id} of {range:?}"));
                        self.pending.insert(id, pending);
                        return;
                    }
                    (roll, slot) => {
                        self.free.extend(slot);
                        pending.durable = fua;
                        if roll == 1 {
                            let bytes = buffer.bytes().to_vec();
                            drop(buffer);
                            let payload = Payload::Lent(&bytes);
                            self.log.note(|| format!("client: write {id} of {range:?}, fua {fua}"));
                            self.pending.insert(id, pending);
                            return owner.submit(reactor, Request::Write { tag, offset, payload, fua });
                        }
                        Request::Write { tag, offset, payload: Payload::Given(buffer), fua }
                    }
                }
            }
            (RequestKind::Read | RequestKind::Write, None) => return,
            (RequestKind::WriteZeroes, _) => {
                pending.durable = fua;
                let may_unmap = self.rng.bool();
                Request::WriteZeroes { tag, offset, length: bytes, fua, may_unmap, fast_only: false }
            }
            (RequestKind::Discard, _) => {
                pending.durable = fua;
                Request::Discard { tag, offset, length: bytes, fua }
            }
            (RequestKind::Flush | RequestKind::Extents, _) => Request::Flush { tag },
        };
        let durable = pending.durable;
        self.log.note(|| format!("client: {kind:?} {id} of {range:?}, fua {durable}"));
        self.pending.insert(id, pending);
        match kind {
            RequestKind::WriteZeroes | RequestKind::Discard if self.rng.bool() => {
                owner.submit_destaged(reactor, request);
            }
            _ => owner.submit(reactor, request),
        }
    }

    pub fn complete(&mut self, Completion { tag: Tag(id), result }: Completion) {
        let Some(mut pending) = self.pending.remove(&id) else {
            // Of an owner that has given the disk up after its client had gone.
            if !self.failed.contains_key(&id) {
                self.log.fail(|| format!("request {id} is answered twice"));
            }
            return;
        };
        self.log.note(|| format!("client: {:?} {id}: {:?}", pending.kind, result.as_ref().map(|_| ())));
        if let Some(slot) = pending.slot.take() {
            // From now on the bytes are the client's again.
            self.region.copy_in(slot * SLOT, &[0x5A; SLOT]);
            self.free.push(slot);
        }
        let now = self.lun.lock().tick();
        match result {
            Ok(outcome) => {
                self.counts.answered += 1;
                self.answered(id, &pending, outcome, now);
            }
            Err(error) => self.request_failed(id, pending, error),
        }
    }

    fn request_failed(&mut self, id: u64, pending: Pending, error: IoError) {
        self.counts.failed += 1;
        self.counts.full += u64::from(error.errno == libc::ENOSPC);
        if pending.is_last {
            self.log.fail(|| format!("I8: {pending:?} fails after the last fault: {error}"));
        }
        self.failed.insert(id, pending);
    }

    fn answered(&mut self, id: u64, pending: &Pending, outcome: Outcome, now: u64) {
        match (pending.kind, outcome) {
            (RequestKind::Read, Outcome::Read(buffer)) => self.read(id, pending, buffer.bytes(), now),
            (RequestKind::Read, _) => self.log.fail(|| format!("read {id} is answered without its bytes")),
            (RequestKind::Flush, _) => self.check_flush(id, pending),
            _ => {
                self.acknowledged.insert(id, now);
                self.changed(id, pending, now);
            }
        }
    }

    fn read(&mut self, id: u64, pending: &Pending, bytes: &[u8], now: u64) {
        for (block, bytes) in pending.blocks().zip(bytes.chunks(BLOCK as usize)) {
            let value = value_in(bytes);
            let had = value.is_some_and(|value| self.lun.lock().had(block, value, pending.began));
            let Some(value) = value.filter(|_| had) else {
                let version = value.map(version_of);
                return self.log.fail(|| {
                    format!(
                        "P7: read {id} returns version {version:?} for block {block}, which it did not have"
                    )
                });
            };
            if value != 0 {
                self.histories[block].read(version_of(value), pending.began, now);
            }
        }
    }

    /// A change is done: it has been there, and durably if it was to be.
    fn changed(&mut self, id: u64, pending: &Pending, now: u64) {
        for block in pending.blocks() {
            let is_write = pending.kind == RequestKind::Write;
            let value = if is_write { value_of(id, block) } else { 0 };
            if !self.lun.lock().had(block, value, pending.began) {
                return self
                    .log
                    .fail(|| format!("P7: {pending:?} {id} is answered, and block {block} has not got it"));
            }
            if is_write {
                self.histories[block].acknowledged(id, now);
            }
            if pending.durable {
                self.check_durable(id, block, value, pending.began);
            }
        }
    }
}

/// Parts of the region that are these bytes, one after the other.
fn pieces(start: usize, length: usize, rng: &mut fastrand::Rng) -> Vec<(usize, usize)> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < length {
        let blocks = rng.usize(1..=(length - at) / BLOCK as usize);
        let piece = blocks * BLOCK as usize;
        pieces.push((start + at, piece));
        at += piece;
    }
    pieces
}
