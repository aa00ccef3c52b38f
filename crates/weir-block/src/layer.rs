//! The one interface between layers.

use std::rc::Rc;

use crate::clock::Nanos;
use crate::meter::LayerMeter;
use crate::reactor::{Event, Reactor};
use crate::region::Region;
use crate::request::{Completion, Request, RequestKind, Tag};

/// Properties and capabilities of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerInfo {
    /// Size of the disk in bytes, a multiple of `logical_block`.
    pub size: u64,
    /// Smallest unit of an offset or a length, in bytes: 512 or 4096.
    pub logical_block: u32,
    /// Smallest write without a penalty, in bytes (4096 unless the backing reports more).
    pub preferred_block: u32,
    /// Largest read or write, in bytes.
    pub max_transfer: u32,
    /// Writes are refused when false.
    pub writable: bool,
    /// `write_zeroes` is faster than writing zeroes.
    pub fast_zeroes: bool,
    /// `discard` gives space back.
    pub discards: bool,
}

/// Accepts requests and completes them: a backing, the accelerator, a meter around either.
///
/// A layer lives on one shard. The shard's loop is *select → action → apply*: kernel completions arrive ([`Layer::on_event`]),
/// new requests are submitted ([`Layer::submit`]), then the loop advances each touched layer once ([`Layer::advance`]) and sends
/// all completions in one batch. No layer blocks, and none calls upwards.
pub trait Layer {
    /// Size, block sizes, capabilities. Cheap; may change when the disk is resized.
    fn info(&self) -> LayerInfo;

    /// Whether the layer accepts a request of this kind and size now.
    ///
    /// Backpressure (P10): when this is false the caller keeps the request, stops reading from its client, and asks again after
    /// the next [`Layer::advance`].
    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool;

    /// Accepts a request. The caller has checked [`Layer::has_room`], range and alignment. A later [`Layer::advance`] completes
    /// it exactly once, in success or failure.
    fn submit(&mut self, reactor: &mut Reactor, request: Request<'_>);

    /// A kernel operation of this layer, or of one below it, has ended.
    fn on_event(&mut self, reactor: &mut Reactor, event: Event);

    /// Makes all possible progress and appends completions to `done`.
    fn advance(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>);

    /// The time at which [`Layer::advance`] must run again even without an event.
    fn deadline(&self) -> Nanos {
        Nanos::NEVER
    }

    /// Requests accepted and not yet completed.
    fn in_flight(&self) -> usize;

    /// The meters of this layer and of those below, from the top.
    fn meters(&self, out: &mut Vec<LayerMeter>);
}

/// A layer that also writes directly from a memory region: destages the write log without a copy.
pub trait Destage: Layer {
    /// Whether the layer accepts [`Destage::write_gather`] now. It needs a queue slot but no buffer, so that a shard can free log
    /// space even when all its buffers wait for log space.
    fn can_gather(&self) -> bool {
        self.has_room(RequestKind::Flush, 0)
    }

    /// A request that measures the backing alone: a layer between the accelerator and the backing passes it on unchanged. Every
    /// other layer treats it as an ordinary request.
    fn submit_direct(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        self.submit(reactor, request);
    }

    /// A zero request, a discard or a flush of destage. As with [`Destage::write_gather`], it needs [`Destage::can_gather`] only, and a backing
    /// whose volume is full answers at once: destage tries again itself.
    fn submit_destaged(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        self.submit(reactor, request);
    }

    /// Writes `pieces` (offset in `region`, length) one after the other as consecutive bytes of the disk from `offset`. Each
    /// piece starts at a multiple of 512 bytes in memory and its length is a multiple of the logical block; together they are
    /// inside the disk, not empty, and at most [`LayerInfo::max_transfer`] long.
    ///
    /// The caller must not change the pieces before [`Layer::advance`] returns the completion.
    fn write_gather(
        &mut self,
        reactor: &mut Reactor,
        tag: Tag,
        offset: u64,
        region: Rc<Region>,
        pieces: Vec<(usize, usize)>,
    );
}

impl<L: Layer + ?Sized> Layer for Box<L> {
    fn info(&self) -> LayerInfo {
        (**self).info()
    }

    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        (**self).has_room(kind, bytes)
    }

    fn submit(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        (**self).submit(reactor, request);
    }

    fn on_event(&mut self, reactor: &mut Reactor, event: Event) {
        (**self).on_event(reactor, event);
    }

    fn advance(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>) {
        (**self).advance(reactor, done);
    }

    fn deadline(&self) -> Nanos {
        (**self).deadline()
    }

    fn in_flight(&self) -> usize {
        (**self).in_flight()
    }

    fn meters(&self, out: &mut Vec<LayerMeter>) {
        (**self).meters(out);
    }
}

impl<L: Destage + ?Sized> Destage for Box<L> {
    fn can_gather(&self) -> bool {
        (**self).can_gather()
    }

    fn submit_direct(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        (**self).submit_direct(reactor, request);
    }

    fn submit_destaged(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        (**self).submit_destaged(reactor, request);
    }

    fn write_gather(
        &mut self,
        reactor: &mut Reactor,
        tag: Tag,
        offset: u64,
        region: Rc<Region>,
        pieces: Vec<(usize, usize)>,
    ) {
        (**self).write_gather(reactor, tag, offset, region, pieces);
    }
}
