//! The layer that holds requests until their fault lets them go.

use std::collections::VecDeque;
use std::rc::Rc;

use slab::Slab;
use weir_block::{
    BufferPool, Code, Completion, Destage, ErrorKind, Event, IoError, Layer, LayerInfo, LayerMeter, Nanos,
    OwnerId, Reactor, Region, Request, RequestKind, Tag,
};
use weir_volume::lun::route_status::RouteStatus;
use weir_volume::{Backing, SharedDisk, VolumeError};

use super::timing::{self, Fate, Timing};

/// Requests that are held, or below, at most (P10).
const MOST: usize = 1024;

/// Bytes of writes that are held at most: twice the largest request (P10).
const MOST_BYTES: usize = 64 << 20;

/// Set in every tag that goes down from here. A layer that submits past this one keeps tags of its own without it, or with
/// the highest bit, and their answers pass through.
const OURS: u64 = 1 << 62;
const MARKS: u64 = 3 << 62;

/// The place of a layer; it decides how the layer handles requests for the backing itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Part of the backing: such a request is held like any other.
    Backing,
    /// Between the accelerator and the backing: it passes.
    Between,
}

/// A layer in front of `L` with the faults of `T`.
pub struct Held<L, T> {
    inner: L,
    timing: T,
    place: Place,
    /// By key.
    requests: Slab<Pending<L>>,
    /// Their time has come and the layer below had no room.
    stuck: VecDeque<usize>,
    failed: Vec<Completion>,
    /// The layer below was given something since it was advanced.
    given: bool,
    finished: Vec<Completion>,
    /// For copies of lent buffers.
    pool: BufferPool,
}

struct Pending<L> {
    tag: Tag,
    kind: RequestKind,
    bytes: u64,
    /// Absent once it has gone on.
    body: Option<Body<L>>,
}

/// How a destaging layer submits pieces of a region: known where they come in, needed where they go on.
type WriteGather<L> = fn(&mut L, &mut Reactor, Tag, u64, Rc<Region>, Vec<(usize, usize)>);

/// As above, how it submits a request.
type Submit<L> = fn(&mut L, &mut Reactor, Request<'_>);

enum Body<L> {
    Request { submit: Submit<L>, request: Request<'static> },
    Gather { write: WriteGather<L>, offset: u64, region: Rc<Region>, pieces: Vec<(usize, usize)> },
}

impl<L: Layer, T: Timing> Held<L, T> {
    /// Puts the faults of `timing` in front of `inner`.
    #[must_use]
    pub fn new(inner: L, timing: T, place: Place) -> Held<L, T> {
        Held {
            inner,
            timing,
            place,
            requests: Slab::new(),
            stuck: VecDeque::new(),
            failed: Vec::new(),
            given: false,
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

    fn hold(&mut self, tag: Tag, kind: RequestKind, (offset, bytes): (u64, u64), body: Body<L>) {
        let key = self.requests.insert(Pending { tag, kind, bytes, body: Some(body) });
        self.timing.arrive(timing::Request { key, kind, offset, bytes }, Nanos::now());
    }

    fn fail(&mut self, tag: Tag, code: Code, context: &'static str) {
        self.failed.push(Completion { tag, result: Err(IoError::new(ErrorKind::Retry, code, context)) });
    }

    fn hold_request(&mut self, reactor: &mut Reactor, request: Request<'_>, submit: Submit<L>) {
        let (tag, kind, range) = (request.tag(), request.kind(), request.range());
        match request.into_owned(&self.pool) {
            Ok(request) => self.hold(tag, kind, range, Body::Request { submit, request }),
            Err(_) => self.fail(tag, Code::NoMemory, "holding a write"),
        }
        self.pass_on(reactor);
    }

    /// Takes the layer below's answers: ours by their keys, others' as they are.
    fn take_answers(&mut self, done: &mut Vec<Completion>) {
        let now = Nanos::now();
        for mut completion in self.finished.drain(..) {
            if completion.tag.0 & MARKS == OURS {
                let key = (completion.tag.0 & !OURS) as usize;
                completion.tag = self.requests.remove(key).tag;
                self.timing.returned(key, now);
            }
            done.push(completion);
        }
    }
}

impl<L: Layer, T: Timing> Held<L, T> {
    /// Passes on everything whose time has come and that the layer below has room for.
    fn pass_on(&mut self, reactor: &mut Reactor) {
        while let Some(&key) = self.stuck.front() {
            if !self.pass(reactor, key) {
                return;
            }
            self.stuck.pop_front();
        }
        while let Some((key, fate)) = self.timing.next(Nanos::now()) {
            match fate {
                Fate::Fail => {
                    let tag = self.requests.remove(key).tag;
                    self.fail(tag, Code::Io, "a fault of the lab");
                }
                Fate::PassOn if self.stuck.is_empty() && self.pass(reactor, key) => {}
                Fate::PassOn => self.stuck.push_back(key),
            }
        }
    }

    /// False when there is no room.
    fn pass(&mut self, reactor: &mut Reactor, key: usize) -> bool {
        let pending = &mut self.requests[key];
        if !self.inner.has_room(pending.kind, pending.bytes) {
            return false;
        }
        self.given = true;
        let tag = Tag(OURS | key as u64);
        match pending.body.take() {
            Some(Body::Request { submit, mut request }) => {
                request.set_tag(tag);
                submit(&mut self.inner, reactor, request);
            }
            Some(Body::Gather { write, offset, region, pieces }) => {
                write(&mut self.inner, reactor, tag, offset, region, pieces);
            }
            None => {}
        }
        true
    }
}

impl<L: Layer, T: Timing> Layer for Held<L, T> {
    fn info(&self) -> LayerInfo {
        self.inner.info()
    }

    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        let copies = kind == RequestKind::Write;
        let bytes_held = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.requests.len() < MOST
            && (!copies || self.pool.has_room(bytes_held))
            && self.inner.has_room(kind, bytes)
    }

    fn submit(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        self.hold_request(reactor, request, L::submit);
    }

    fn on_event(&mut self, reactor: &mut Reactor, event: Event) {
        self.inner.on_event(reactor, event);
    }

    fn advance(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>) {
        self.pass_on(reactor);
        self.given = false;
        self.inner.advance(reactor, &mut self.finished);
        self.take_answers(done);
        // An answer may have made room for another request, which is then answered in the next turn.
        self.pass_on(reactor);
        done.append(&mut self.failed);
    }

    fn deadline(&self) -> Nanos {
        let at_once = self.given || !self.failed.is_empty();
        let here = if at_once { Nanos(0) } else { self.timing.deadline() };
        here.min(self.inner.deadline())
    }

    fn in_flight(&self) -> usize {
        // Below are also requests that were submitted past this layer.
        let held = self.requests.iter().filter(|(_, pending)| pending.body.is_some()).count();
        held + self.failed.len() + self.inner.in_flight()
    }

    fn meters(&self, out: &mut Vec<LayerMeter>) {
        self.inner.meters(out);
    }
}

impl<L: Destage, T: Timing> Destage for Held<L, T> {
    fn submit_direct(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        match self.place {
            Place::Backing => self.submit(reactor, request),
            Place::Between => {
                self.given = true;
                self.inner.submit_direct(reactor, request);
            }
        }
    }

    fn submit_destaged(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        self.hold_request(reactor, request, L::submit_destaged);
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
        let body = Body::Gather { write: L::write_gather, offset, region, pieces };
        self.hold(tag, RequestKind::Write, (offset, bytes), body);
        self.pass_on(reactor);
    }
}

impl<L: Backing, T: Timing> Backing for Held<L, T> {
    fn owner(&self) -> OwnerId {
        self.inner.owner()
    }

    fn resize(&mut self, size: u64) -> Result<(), VolumeError> {
        self.inner.resize(size)
    }

    fn lacks_space(&self, now: Nanos) -> bool {
        self.inner.lacks_space(now)
    }

    fn stop_waiting(&mut self) {
        self.inner.stop_waiting();
    }

    fn shared(&mut self) -> Option<&mut dyn SharedDisk> {
        self.inner.shared()
    }

    fn route(&self) -> Option<RouteStatus> {
        self.inner.route()
    }

    fn end(&mut self, reactor: &mut Reactor) {
        self.inner.end(reactor);
    }

    fn owes(&self) -> bool {
        self.inner.owes()
    }

    fn settle(&mut self) -> bool {
        self.inner.settle()
    }

    fn is_away(&self) -> bool {
        self.inner.is_away()
    }

    fn trouble(&self, now: Nanos) -> Option<String> {
        self.inner.trouble(now)
    }

    fn news(&mut self) -> Option<(&'static str, String)> {
        self.inner.news()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::{Faults, Line, Mechanism, Switch};
    use std::time::Duration;
    use weir_block::{Outcome, Payload, ReactorConfig};
    use weir_volume::{BackingOptions, FileBacking};

    type Stack = Held<Held<FileBacking, Mechanism>, Line>;

    struct Bench {
        reactor: Reactor,
        stack: Stack,
        faults: Switch,
        disk: Switch,
        _directory: tempfile::TempDir,
    }

    const SIZE: u64 = 16 << 20;

    fn bench() -> Bench {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("disk");
        std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        let mut reactor = Reactor::new(ReactorConfig::default()).unwrap();
        let backing = FileBacking::open(&mut reactor, &path, &BackingOptions::default()).unwrap();
        let (faults, disk) = (Switch::default(), Switch::default());
        let backing = Held::new(backing, Mechanism::new(disk.clone(), SIZE), Place::Backing);
        let stack = Held::new(backing, Line::new(faults.clone(), 3), Place::Between);
        Bench { reactor, stack, faults, disk, _directory: directory }
    }

    impl Bench {
        /// Waits until so many requests are answered.
        fn answers(&mut self, count: usize) -> Vec<Completion> {
            let (mut done, mut events) = (Vec::new(), Vec::new());
            while done.len() < count {
                self.reactor.wait(self.stack.deadline(), &mut events).unwrap();
                for event in events.drain(..) {
                    self.stack.on_event(&mut self.reactor, event);
                }
                self.stack.advance(&mut self.reactor, &mut done);
            }
            done
        }

        fn write(&mut self, tag: u64, block: u64) {
            let bytes = [(block % 200) as u8 + 1; 4096];
            let (tag, offset) = (Tag(tag), block * 4096);
            let request = Request::Write { tag, offset, payload: Payload::Lent(&bytes), fua: false };
            self.stack.submit(&mut self.reactor, request);
        }

        fn read(&mut self, tag: u64, block: u64) {
            let buffer = self.reactor.buffers().take(4096).unwrap();
            let request = Request::Read { tag: Tag(tag), offset: block * 4096, buffer };
            self.stack.submit(&mut self.reactor, request);
        }
    }

    fn tags(done: &[Completion]) -> Vec<u64> {
        done.iter().map(|completion| completion.tag.0).collect()
    }

    #[test]
    fn every_request_is_answered_once_with_its_data_whatever_the_faults() {
        let mut bench = bench();
        let all = [
            Faults::default(),
            Faults { delay_us: 200, jitter_us: 300, in_flight: 3, ..Faults::default() },
            Faults { bandwidth: 50 << 20, ..Faults::order_lost(4) },
            Faults::default(),
        ];
        for (round, faults) in all.into_iter().enumerate() {
            bench.faults.set(faults);
            let simulated_disk = round % 2 == 1;
            bench.disk.set(Faults { simulated_disk, ..Faults::default() });
            (0..40).for_each(|n| bench.write(n, n));
            let mut written = tags(&bench.answers(40));
            written.sort_unstable();
            assert_eq!(written, (0..40).collect::<Vec<_>>());
            (0..40).for_each(|n| bench.read(100 + n, n));
            for answer in bench.answers(40) {
                let Ok(Outcome::Read(buffer)) = answer.result else { panic!("{answer:?}") };
                assert!(buffer.bytes().iter().all(|byte| u64::from(*byte) == answer.tag.0 - 100 + 1));
            }
            assert_eq!(bench.stack.in_flight(), 0);
        }
    }

    #[test]
    fn a_delay_is_waited_for_and_what_passes_is_not_delayed() {
        let mut bench = bench();
        bench.faults.set(Faults::delayed(Duration::from_millis(30)));
        let began = Nanos::now();
        bench.write(1, 1);
        let request = Request::Flush { tag: Tag(2) };
        bench.stack.submit_direct(&mut bench.reactor, request);
        assert_eq!(tags(&bench.answers(1)), [2]);
        assert!(Nanos::now() - began < Duration::from_millis(30), "past the fault");
        assert_eq!(tags(&bench.answers(1)), [1]);
        assert!(Nanos::now() - began >= Duration::from_millis(30));
    }

    #[test]
    fn gathered_writes_wait_like_others() {
        let mut bench = bench();
        bench.faults.set(Faults::delayed(Duration::from_millis(5)));
        let region = Rc::new(Region::new(8192).unwrap());
        let began = Nanos::now();
        let pieces = vec![(0, 512), (4096, 512)];
        bench.stack.write_gather(&mut bench.reactor, Tag(9), 4096, region, pieces);
        let done = bench.answers(1);
        assert!(tags(&done) == [9] && done[0].result.is_ok());
        assert!(Nanos::now() - began >= Duration::from_millis(5));
    }

    #[test]
    fn errors_reach_who_asked_and_not_the_backing() {
        let mut bench = bench();
        bench.faults.set(Faults { errors_per_million: 1_000_000, ..Faults::default() });
        bench.write(1, 7);
        let error = bench.answers(1).pop().unwrap().result.unwrap_err();
        assert_eq!((error.kind, error.code), (ErrorKind::Retry, Code::Io));
        bench.faults.set(Faults::default());
        bench.read(2, 7);
        let Ok(Outcome::Read(buffer)) = bench.answers(1).pop().unwrap().result else { panic!("a read") };
        assert!(buffer.bytes().iter().all(|byte| *byte == 0));
    }

    #[test]
    fn what_cannot_be_held_is_pushed_back() {
        let mut bench = bench();
        bench.faults.set(Faults::delayed(Duration::from_secs(60)));
        let room = |bench: &Bench| bench.stack.has_room(RequestKind::Write, 4096);
        let mut taken = 0;
        while room(&bench) {
            bench.write(taken, taken % 1000);
            taken += 1;
        }
        assert_eq!(taken, MOST as u64);
    }
}
