//! A meter around a layer.

use std::rc::Rc;

use slab::Slab;

use crate::clock::Nanos;
use crate::layer::{Destage, Layer, LayerInfo};
use crate::meter::{LayerMeter, Meter};
use crate::reactor::{Event, Reactor};
use crate::region::Region;
use crate::request::{Completion, Request, RequestKind, Tag};

/// Observes every request that arrives at a meter. Gets the time that the meter has already read.
pub trait Observe {
    /// A request arrives: `length` bytes at `offset`; both 0 for a flush.
    fn observe(&mut self, now: Nanos, kind: RequestKind, offset: u64, length: u64);
}

/// No observer.
impl Observe for () {
    #[inline]
    fn observe(&mut self, _: Nanos, _: RequestKind, _: u64, _: u64) {}
}

/// Measures every request to the inner layer, from `submit` to the completion.
///
/// Requests that are submitted together arrive at one time, that of [`Reactor::recent`]. So whoever submits reads the clock before, and a layer that
/// does the work within `submit` reads it after.
///
/// It replaces each request's tag by a slot number, so that a completion finds its start time without hashing. Slots are reused,
/// so the steady state does not allocate.
#[derive(Debug)]
pub struct Metered<L, O = ()> {
    name: &'static str,
    inner: L,
    observer: O,
    meter: Meter,
    pending: Slab<Pending>,
    finished: Vec<Completion>,
}

#[derive(Debug)]
struct Pending {
    tag: Tag,
    kind: RequestKind,
    bytes: u64,
    arrived: Nanos,
}

impl<L: Layer> Metered<L> {
    /// Puts a meter with the layer's `name` on top of `inner`.
    pub fn new(name: &'static str, inner: L) -> Metered<L> {
        Metered::observed(name, inner, ())
    }
}

impl<L: Layer, O: Observe> Metered<L, O> {
    /// As [`Metered::new`], with an observer of every request.
    pub fn observed(name: &'static str, inner: L, observer: O) -> Metered<L, O> {
        Metered { name, inner, observer, meter: Meter::new(), pending: Slab::new(), finished: Vec::new() }
    }

    /// The observer.
    pub fn observer(&self) -> &O {
        &self.observer
    }

    /// The observer.
    pub fn observer_mut(&mut self) -> &mut O {
        &mut self.observer
    }

    /// The inner layer.
    pub fn inner(&self) -> &L {
        &self.inner
    }

    /// The inner layer, for operations other than requests (configuration, peers).
    pub fn inner_mut(&mut self) -> &mut L {
        &mut self.inner
    }

    /// The measurements so far.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// The meter, for the splits and merges that only the layer's owner sees.
    pub fn meter_mut(&mut self) -> &mut Meter {
        &mut self.meter
    }

    /// Records the arrival of a request; returns its tag for the inner layer.
    fn arrive(&mut self, arrived: Nanos, tag: Tag, kind: RequestKind, (offset, bytes): (u64, u64)) -> Tag {
        self.meter.arrive(kind, arrived);
        self.observer.observe(arrived, kind, offset, bytes);
        Tag(self.pending.insert(Pending { tag, kind, bytes, arrived }) as u64)
    }
}

impl<L: Layer, O: Observe> Layer for Metered<L, O> {
    fn info(&self) -> LayerInfo {
        self.inner.info()
    }

    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        self.inner.has_room(kind, bytes)
    }

    fn submit(&mut self, reactor: &mut Reactor, mut request: Request<'_>) {
        let tag = self.arrive(reactor.recent(), request.tag(), request.kind(), request.range());
        request.set_tag(tag);
        self.inner.submit(reactor, request);
    }

    fn on_event(&mut self, reactor: &mut Reactor, event: Event) {
        self.inner.on_event(reactor, event);
    }

    fn advance(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>) {
        self.inner.advance(reactor, &mut self.finished);
        if self.finished.is_empty() {
            return;
        }
        let now = reactor.now();
        for mut completion in self.finished.drain(..) {
            let pending = self.pending.remove(completion.tag.0 as usize);
            self.meter.complete(pending.kind, pending.bytes, pending.arrived, now, completion.result.is_ok());
            completion.tag = pending.tag;
            done.push(completion);
        }
    }

    fn deadline(&self) -> Nanos {
        self.inner.deadline()
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }

    fn meters(&self, out: &mut Vec<LayerMeter>) {
        out.push(LayerMeter { layer: self.name, meter: self.meter.clone() });
        self.inner.meters(out);
    }
}

impl<L: Destage, O: Observe> Destage for Metered<L, O> {
    fn can_gather(&self) -> bool {
        self.inner.can_gather()
    }

    fn submit_direct(&mut self, reactor: &mut Reactor, mut request: Request<'_>) {
        let tag = self.arrive(reactor.recent(), request.tag(), request.kind(), request.range());
        request.set_tag(tag);
        self.inner.submit_direct(reactor, request);
    }

    fn submit_destaged(&mut self, reactor: &mut Reactor, mut request: Request<'_>) {
        let tag = self.arrive(reactor.recent(), request.tag(), request.kind(), request.range());
        request.set_tag(tag);
        self.inner.submit_destaged(reactor, request);
    }

    fn write_gather(
        &mut self,
        reactor: &mut Reactor,
        tag: Tag,
        offset: u64,
        region: Rc<Region>,
        pieces: Vec<(usize, usize)>,
    ) {
        let bytes = pieces.iter().map(|&(_, length)| length as u64).sum();
        let tag = self.arrive(reactor.recent(), tag, RequestKind::Write, (offset, bytes));
        self.inner.write_gather(reactor, tag, offset, region, pieces);
    }
}
