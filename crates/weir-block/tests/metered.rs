//! A meter around a layer that completes out of order.
#![allow(clippy::unwrap_used)]

use std::rc::Rc;

use weir_block::{
    Code, Completion, Destage, ErrorKind, Event, IoError, Layer, LayerInfo, LayerMeter, Metered, Outcome,
    Payload, Reactor, ReactorConfig, Region, Request, RequestKind, Tag,
};

/// Completes everything at the next advance, the latest first; refuses discards.
#[derive(Default)]
struct Backwards {
    taken: Vec<Completion>,
}

impl Layer for Backwards {
    fn info(&self) -> LayerInfo {
        LayerInfo {
            size: 1 << 20,
            logical_block: 512,
            preferred_block: 4096,
            max_transfer: 1 << 20,
            writable: true,
            fast_zeroes: false,
            discards: false,
        }
    }

    fn has_room(&self, _kind: RequestKind, _bytes: u64) -> bool {
        self.taken.len() < 4
    }

    fn submit(&mut self, _reactor: &mut Reactor, request: Request<'_>) {
        let tag = request.tag();
        let result = match request {
            Request::Read { buffer, .. } => Ok(Outcome::Read(buffer)),
            Request::Discard { .. } => {
                Err(IoError::new(ErrorKind::Operator, Code::NotSupported, "discarding"))
            }
            _ => Ok(Outcome::Done),
        };
        self.taken.push(Completion { tag, result });
    }

    fn on_event(&mut self, _reactor: &mut Reactor, _event: Event) {}

    fn advance(&mut self, _reactor: &mut Reactor, done: &mut Vec<Completion>) {
        done.extend(self.taken.drain(..).rev());
    }

    fn in_flight(&self) -> usize {
        self.taken.len()
    }

    fn meters(&self, _out: &mut Vec<LayerMeter>) {}
}

impl Destage for Backwards {
    fn write_gather(
        &mut self,
        _reactor: &mut Reactor,
        tag: Tag,
        _offset: u64,
        _region: Rc<Region>,
        _pieces: Vec<(usize, usize)>,
    ) {
        self.taken.push(Completion { tag, result: Ok(Outcome::Done) });
    }
}

#[test]
fn tags_come_back_and_counts_are_right() {
    let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
    let mut layer = Metered::new("test", Metered::new("inner", Backwards::default()));
    assert_eq!(layer.info().size, 1 << 20);
    let mut done = Vec::new();
    for round in 0..3u64 {
        let tag = |n: u64| Tag(u64::MAX - 10 * round - n);
        let buffer = reactor.buffers().take(4096).unwrap();
        layer.submit(&mut reactor, Request::Read { tag: tag(0), offset: 0, buffer });
        let write = Request::Write { tag: tag(1), offset: 0, payload: Payload::Lent(&[0; 512]), fua: false };
        layer.submit(&mut reactor, write);
        layer.submit(&mut reactor, Request::Discard { tag: tag(2), offset: 0, length: 4096, fua: false });
        assert!(layer.can_gather());
        let region = Rc::new(Region::new(4096).unwrap());
        layer.write_gather(&mut reactor, tag(3), 0, region, vec![(0, 512), (1024, 1024)]);
        assert!(!layer.has_room(RequestKind::Read, 512) && !layer.can_gather());
        assert_eq!(layer.in_flight(), 4);
        assert_eq!(layer.meter().in_flight(), 4);
        layer.advance(&mut reactor, &mut done);
        let tags: Vec<_> = done.iter().map(|completion| completion.tag).collect();
        assert_eq!(tags, [tag(3), tag(2), tag(1), tag(0)]);
        assert!(done[1].result.is_err());
        assert!(matches!(&done[3].result, Ok(Outcome::Read(buffer)) if buffer.len() == 4096));
        done.clear();
    }
    assert_eq!((layer.in_flight(), layer.meter().in_flight()), (0, 0));
    let mut meters = Vec::new();
    layer.meters(&mut meters);
    assert_eq!(meters.iter().map(|meter| meter.layer).collect::<Vec<_>>(), ["test", "inner"], "from the top");
    for LayerMeter { meter, .. } in &meters {
        let counts = |kind| {
            let kind = meter.kind(kind);
            (kind.arrivals, kind.completions, kind.errors, kind.bytes, kind.latency.len())
        };
        assert_eq!(counts(RequestKind::Read), (3, 3, 0, 3 * 4096, 3));
        assert_eq!(counts(RequestKind::Write), (6, 6, 0, 3 * (512 + 1536), 6));
        assert_eq!(counts(RequestKind::Discard), (3, 0, 3, 0, 0), "errors have no latency");
        assert_eq!(counts(RequestKind::Flush), (0, 0, 0, 0, 0));
        assert!(meter.occupancy() > 0);
    }
    let (outer, inner) = (&meters[0].meter, &meters[1].meter);
    assert!(outer.occupancy() >= inner.occupancy(), "the outer layer waits at least as long");
}
