//! A disk's backing: a simulated file as the layer below the accelerator.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use slab::Slab;
use weir_block::buffer::LARGEST;
use weir_block::sim::{VirtualClock, World};
use weir_block::{
    Action, Buffer, Completion, Destage, Event, IoError, Layer, LayerInfo, LayerMeter, Nanos, Outcome,
    OwnerId, Reactor, Region, Request, RequestKind, SharedFile, Tag, Token, WriteSource,
};
use weir_volume::VolumeError;

use crate::scale::{FENCE_GRACE, LONGEST_OPERATION};

/// The right of an owner's writes; detects writes without it.
#[derive(Clone)]
pub struct Guard {
    clock: Rc<VirtualClock>,
    world: World,
    /// The right's deadline, by that clock.
    pub until: Arc<AtomicU64>,
    /// The previous deadline, before its last change.
    held: Rc<Cell<Nanos>>,
    /// Delay of a write's submission after the right's end.
    late: Rc<Cell<Duration>>,
}

impl Guard {
    /// No right yet.
    pub fn new(world: &World, clock: &Rc<VirtualClock>) -> Guard {
        let (until, held, late) = (Arc::default(), Rc::default(), Rc::default());
        Guard { clock: Rc::clone(clock), world: world.clone(), until, held, late }
    }

    fn now(&self) -> Nanos {
        self.clock.at(self.world.now().max(self.clock.busy_until()))
    }

    /// The right's end, or now.
    fn end(&self) -> Nanos {
        self.held.get().max(self.now().min(Nanos(self.until.load(Ordering::Acquire))))
    }

    /// Sets the right's deadline.
    pub fn set(&self, until: Nanos) {
        self.held.set(self.end());
        self.until.store(until.0, Ordering::Release);
    }

    fn writes(&self) {
        self.late.set(self.late.get().max(self.now() - self.end()));
    }

    /// Whether a write was too late for the fence grace: a shard may pause between the check of its right and the write, and the
    /// write may take the longest time.
    pub fn was_broken(&self) -> Option<Duration> {
        Some(self.late.get()).filter(|late| *late > FENCE_GRACE - LONGEST_OPERATION)
    }
}

/// The lower layer of a simulated owner.
pub struct Backing {
    owner: OwnerId,
    file: SharedFile,
    size: u64,
    /// None if the right is unknown here.
    guard: Option<Guard>,
    pending: Slab<(Tag, RequestKind)>,
    done: Vec<Completion>,
}

impl Backing {
    pub fn new(reactor: &mut Reactor, file: SharedFile, size: u64, guard: Option<Guard>) -> Backing {
        Backing { owner: reactor.new_owner(), file, size, guard, pending: Slab::new(), done: Vec::new() }
    }

    /// The owner number of its events.
    pub fn owner(&self) -> OwnerId {
        self.owner
    }

    fn token(&mut self, tag: Tag, kind: RequestKind) -> Token {
        Token { owner: self.owner, slot: self.pending.insert((tag, kind)) as u32 }
    }
}

impl Layer for Backing {
    fn info(&self) -> LayerInfo {
        LayerInfo {
            size: self.size,
            logical_block: 512,
            preferred_block: 4096,
            max_transfer: LARGEST as u32,
            writable: true,
            fast_zeroes: true,
            discards: true,
        }
    }

    fn has_room(&self, _: RequestKind, _: u64) -> bool {
        self.pending.len() < 64
    }

    fn submit(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        let (tag, kind) = (request.tag(), request.kind());
        let token = self.token(tag, kind);
        if kind.changes_data()
            && let Some(guard) = &self.guard
        {
            guard.writes();
        }
        match request {
            Request::Read { offset, buffer, .. } => reactor.read(&self.file, offset, buffer, token),
            Request::Write { offset, payload, fua, .. } => {
                let mut buffer = reactor.buffers().take(payload.len()).expect("requests are few and small");
                buffer.bytes_mut().copy_from_slice(payload.bytes());
                let source = WriteSource::Buffer(buffer);
                if fua {
                    reactor.write_durable(&self.file, offset, source, token);
                } else {
                    reactor.write(&self.file, offset, source, token);
                }
            }
            Request::WriteZeroes { offset, length, .. } | Request::Discard { offset, length, .. } => {
                reactor.allocate(&self.file, libc::FALLOC_FL_ZERO_RANGE, offset, length, token);
            }
            Request::Flush { .. } | Request::Extents { .. } => reactor.sync(&self.file, token),
        }
    }

    fn on_event(&mut self, _: &mut Reactor, event: Event) {
        let Action::File { result, buffer } = event.action else { return };
        let (tag, kind) = self.pending.remove(event.token.slot as usize);
        let result = match result {
            Ok(_) => Ok(outcome(kind, buffer)),
            Err(number) => Err(IoError::from_errno(number, "the simulated medium")),
        };
        self.done.push(Completion { tag, result });
    }

    fn advance(&mut self, _: &mut Reactor, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
    }

    fn deadline(&self) -> Nanos {
        if self.done.is_empty() { Nanos::NEVER } else { Nanos(0) }
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }

    fn meters(&self, _: &mut Vec<LayerMeter>) {}
}

impl Destage for Backing {
    fn write_gather(
        &mut self,
        reactor: &mut Reactor,
        tag: Tag,
        offset: u64,
        region: Rc<Region>,
        pieces: Vec<(usize, usize)>,
    ) {
        let token = self.token(tag, RequestKind::Write);
        if let Some(guard) = &self.guard {
            guard.writes();
        }
        reactor.write(&self.file, offset, WriteSource::Gather(region, pieces), token);
    }
}

fn outcome(kind: RequestKind, buffer: Option<Buffer>) -> Outcome {
    match (kind, buffer) {
        (RequestKind::Read, Some(buffer)) => Outcome::Read(buffer),
        _ => Outcome::Done,
    }
}

impl weir_volume::Backing for Backing {
    fn owner(&self) -> OwnerId {
        Backing::owner(self)
    }

    fn resize(&mut self, size: u64) -> Result<(), VolumeError> {
        self.size = size;
        Ok(())
    }
}
