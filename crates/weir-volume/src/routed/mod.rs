//! The backing of a disk of a shared volume, at its owner: drives [`Router`] with the LUN and the connection to the coordinator.
//!
//! Requests go to the LUN directly wherever the owner holds the blocks, at the price of one look into a tree; all others go through the
//! coordinator, in memory where it is this shard's, in frames otherwise. A request whose way breaks is done again by another way, and its
//! client merely waits.

mod link;
mod parts;
mod requests;
mod shared;
mod space;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use slab::Slab;
use weir_block::buffer::LARGEST as LARGEST_BUFFER;
use weir_block::{
    Action, Buffer, BufferPool, Code, Completion, Destage, ErrorKind, Event, Extent, ExtentState, IoError,
    Layer, LayerInfo, LayerMeter, Meter, Nanos, Outcome, OwnerId, Payload, Reactor, Region, Request,
    RequestKind, SharedFile, Stream, Tag, Token,
};

use crate::backing::engine_uring::UringEngine;
use crate::full::{SpaceWait, Wait, is_full};
use crate::lun::leases::Lease;
use crate::lun::redirect::wire::LARGEST;
use crate::lun::redirect::{ToCoordinator, ToOwner};
use crate::lun::route_status::{Overdue, RouteCounts};
use crate::lun::router::{self, Effect, Kind, Route, Router};
use crate::lun::serving::{PIECE, ServedDisk};
use crate::patience::Patience;
use crate::planted::Planted;
use link::{Link, LinkError};
use parts::Part;
use requests::{Pending, Source};

/// From here on, slots of events are connections, by their number.
const CONNECTIONS: u32 = 1 << 31;
/// The slot of a look whether the LUN can be reached again.
const PROBE: u32 = CONNECTIONS - 1;
/// Pause between two such looks.
const PROBE_EVERY: Duration = Duration::from_millis(250);
/// Pause before what could not be begun is tried again: there was no memory, or no right.
const RETRY_AFTER: Duration = Duration::from_millis(1);
/// Pause before a coordinator is asked for again.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// Pause before a path to the LUN is asked for again.
const PATH_AGAIN: Duration = Duration::from_millis(500);
/// Bytes of zeroes to write from: 1,024 pieces of a write (`IOV_MAX`) are as much as any request.
const ZEROES: usize = 4 << 20;

/// How a disk of a shared volume is used here.
#[derive(Clone, Copy, Debug)]
pub struct RoutedOptions {
    /// Bytes.
    pub size: u64,
    /// 512 or 4096.
    pub logical_block: u32,
    /// Most requests in flight.
    pub depth: usize,
    /// Requests that need a coordinator wait for one for this long, and fail then (P9).
    pub coordinator_wait: Duration,
    /// Writes wait for space on a full volume for this long; zero: they fail at once.
    pub full_volume_wait: Duration,
}

/// A disk of a shared volume, as its owner uses it.
pub struct RoutedBacking {
    core: Router,
    id: OwnerId,
    info: LayerInfo,
    depth: usize,
    /// The epoch in which this node owns the disk.
    epoch: u64,
    /// The time at which a coordinator is asked for again.
    ask_at: Nanos,
    patience: Patience,
    /// Requests have begun to fail, and nobody has heard of that yet.
    newly_overdue: Option<Overdue>,
    /// This node's path, if it has one.
    lun: Option<UringEngine>,
    /// The LUN has refused this node's I/O: it is fenced until it is told otherwise.
    fenced: bool,
    /// Nobody has heard of that yet.
    newly_fenced: bool,
    /// The time of the next look at the LUN; [`Nanos::NEVER`] while it can be reached, or one is under way.
    probe_at: Nanos,
    /// Looks that are under way.
    probes: usize,
    /// The last one has found nothing.
    is_away: bool,
    path_at: Nanos,
    link: Link,
    /// The highest epoch of a coordinator (P2).
    coordinator_epoch: u64,
    /// Counts the connections to the coordinator.
    connection: u32,
    pending: Slab<Pending>,
    parts: Slab<Part>,
    /// Makes numbers of requests and parts unique.
    serial: u32,
    /// What the router wants, and could not be begun, on the LUN and by the coordinator; and when that is tried again. What is for the LUN
    /// never waits for the other: the coordinator may wait for its end.
    held: [VecDeque<Effect>; 2],
    retry_at: Nanos,
    /// When more is taken of what has come, for which there was no memory.
    more_at: Nanos,
    ready: Vec<Completion>,
    /// Empty between steps; kept for its memory.
    effects: Vec<Effect>,
    space: SpaceWait<Pending>,
    /// Changes of what a write that waits for space changes, too, by age.
    behind: VecDeque<(Kind, Pending)>,
    dropped: Vec<u64>,
    /// It is another node's by now.
    abandoned: bool,
    /// Until then this node has the right to use the disk.
    serves_until: Option<Arc<AtomicU64>>,
    pool: BufferPool,
    /// When the shard's buffers are exhausted, perhaps by requests that wait for this layer.
    reserve: BufferPool,
    /// For what the coordinator sends.
    incoming: BufferPool,
    zeroes: Rc<Region>,
    counts: RouteCounts,
    /// Of what the coordinator does for this disk: from the message to its answer.
    redirected: Meter,
    planted: Planted,
}

impl RoutedBacking {
    /// A disk that holds no lease. `lun`: this node's path, open for direct I/O.
    ///
    /// # Errors
    /// No memory.
    pub fn new(
        reactor: &mut Reactor,
        lun: Option<SharedFile>,
        options: RoutedOptions,
    ) -> io::Result<RoutedBacking> {
        let id = reactor.new_owner();
        let info = LayerInfo {
            size: options.size,
            logical_block: options.logical_block,
            preferred_block: 4096,
            max_transfer: LARGEST as u32,
            writable: true,
            fast_zeroes: true,
            discards: true,
        };
        let mut core = Router::new(PIECE, Planted::default());
        core.step(router::Event::Path(lun.is_some()), &mut Vec::new());
        Ok(RoutedBacking {
            core,
            id,
            info,
            depth: options.depth.max(1),
            epoch: 0,
            ask_at: Nanos(0),
            patience: Patience::new(reactor.now(), options.coordinator_wait),
            newly_overdue: None,
            lun: lun.map(|lun| UringEngine::new(lun, id)),
            fenced: false,
            newly_fenced: false,
            probe_at: Nanos::NEVER,
            probes: 0,
            is_away: false,
            path_at: reactor.now() + PATH_AGAIN,
            link: Link::None,
            coordinator_epoch: 0,
            connection: 0,
            pending: Slab::new(),
            parts: Slab::new(),
            serial: 0,
            held: Default::default(),
            retry_at: Nanos::NEVER,
            more_at: Nanos::NEVER,
            ready: Vec::new(),
            effects: Vec::new(),
            space: SpaceWait::new(options.full_volume_wait),
            behind: VecDeque::new(),
            dropped: Vec::new(),
            abandoned: false,
            serves_until: None,
            pool: reactor.buffers().clone(),
            reserve: reactor.buffers().beside(LARGEST_BUFFER),
            incoming: reactor.buffers().beside(LARGEST_BUFFER),
            zeroes: Rc::new(Region::new(ZEROES)?),
            counts: RouteCounts::default(),
            redirected: Meter::new(),
            planted: Planted::default(),
        })
    }

    /// Plants a bug, for the simulator.
    pub fn plant(&mut self, planted: Planted) {
        self.core.plant(planted);
        self.planted = planted;
    }

    /// What it holds, and what is under way.
    #[must_use]
    pub fn router(&self) -> &Router {
        &self.core
    }

    /// Requests, by their way.
    #[must_use]
    pub fn counts(&self) -> RouteCounts {
        self.counts
    }

    /// A coordinator is there.
    #[must_use]
    pub fn has_coordinator(&self) -> bool {
        self.core.has_coordinator()
    }

    /// A connection to the coordinator on another node.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn connect(&mut self, reactor: &mut Reactor, stream: Stream) -> io::Result<()> {
        self.disconnect(reactor, None);
        self.connection += 1;
        let slot = CONNECTIONS | (self.connection & (CONNECTIONS - 1));
        self.link = Link::remote(reactor, stream, Token { owner: self.id, slot })?;
        self.link.send(reactor, ToCoordinator::Hello { epoch: self.epoch });
        Ok(())
    }

    /// The coordinator is on this shard. This disk drives its side, too: events of [`ServedDisk::id`] are for
    /// [`Layer::on_event`] here.
    pub fn connect_here(&mut self, reactor: &mut Reactor, served: &Rc<RefCell<ServedDisk>>) {
        self.disconnect(reactor, None);
        self.link = Link::here(reactor, served);
        self.link.send(reactor, ToCoordinator::Hello { epoch: self.epoch });
    }

    /// The connection to the coordinator is gone.
    pub fn disconnect(&mut self, reactor: &mut Reactor, reason: Option<&LinkError>) {
        if !self.link.is_there() {
            return;
        }
        if let Some(reason) = reason {
            tracing::warn!(%reason, "the connection to a volume's coordinator ended");
        }
        self.link.close(reactor);
        self.forget_redirected(reactor);
        self.held[BY_COORDINATOR].clear();
        self.patience.disconnected(reactor.now());
        self.step(reactor, router::Event::CoordinatorLost);
    }

    /// The disk is closed here: requests fail, but for those that are under way on the LUN.
    pub fn give_up(&mut self, reactor: &mut Reactor) {
        self.disconnect(reactor, None);
        let error = IoError::new(ErrorKind::Retry, Code::ShuttingDown, "a disk of a shared volume");
        self.step(reactor, router::Event::Abandon(error));
        self.refuse_held(reactor);
    }

    /// What was not begun on the LUN is not begun any more.
    fn refuse_held(&mut self, reactor: &mut Reactor) {
        for effect in std::mem::take(&mut self.held).into_iter().flatten() {
            if let Effect::Direct { id, .. } | Effect::Flush { id, .. } = effect {
                self.step(reactor, router::Event::Answered { id, ok: false });
            }
        }
    }

    fn may_begin(&self, now: Nanos) -> bool {
        self.serves_until.as_ref().is_none_or(|until| now.0 < until.load(Ordering::Acquire))
    }

    fn is_direct_read(&self, effect: &Effect) -> bool {
        let Effect::Direct { id, .. } = effect else { return false };
        self.request(*id).is_some_and(|pending| pending.kind == RequestKind::Read)
    }

    fn step(&mut self, reactor: &mut Reactor, event: router::Event) {
        let mut effects = std::mem::take(&mut self.effects);
        self.core.step(event, &mut effects);
        // From whatever moment on nobody coordinates, there is a limit, which is over once.
        if !self.core.has_coordinator() && !self.core.is_overdue() && self.patience.is_idle() {
            self.patience.start(reactor.now());
        }
        for effect in effects.drain(..) {
            self.carry_out(reactor, effect);
        }
        self.effects = effects;
    }

    fn carry_out(&mut self, reactor: &mut Reactor, effect: Effect) {
        match effect {
            Effect::Done(id) => self.done(reactor, id, Ok(())),
            Effect::Failed { id, error } => self.done(reactor, id, Err(error)),
            Effect::Dropped(number) => self.dropped.push(number),
            Effect::RecallDone(number) => self.link.send(reactor, ToCoordinator::RecallDone(number)),
            Effect::Zeroes { id, range } => self.fill(id, range),
            Effect::Direct { .. } | Effect::Block { .. } | Effect::File { .. } | Effect::Flush { .. } => {
                // In order: what was held comes first.
                let queue = queue_of(&effect);
                if !self.held[queue].is_empty() || !self.try_begin(reactor, effect) {
                    self.held[queue].push_back(effect);
                    self.retry_at = self.retry_at.min(reactor.now() + RETRY_AFTER);
                }
            }
        }
    }

    /// Begins what could not be begun.
    fn begin_held(&mut self, reactor: &mut Reactor) {
        self.retry_at = Nanos::NEVER;
        for queue in [ON_LUN, BY_COORDINATOR] {
            while let Some(effect) = self.held[queue].pop_front() {
                if !self.try_begin(reactor, effect) {
                    self.held[queue].push_front(effect);
                    // Without the right, longer.
                    let pause = if self.may_begin(reactor.now()) { RETRY_AFTER } else { ASK_AGAIN / 10 };
                    self.retry_at = self.retry_at.min(reactor.now() + pause);
                    break;
                }
            }
        }
    }

    /// `false`: not now.
    fn try_begin(&mut self, reactor: &mut Reactor, effect: Effect) -> bool {
        // The accelerator answers a read only with the right to serve.
        let now = if self.is_direct_read(&effect) { reactor.recent() } else { reactor.now() };
        if !self.may_begin(now) {
            return false;
        }
        match effect {
            Effect::Direct { id, piece } => self.begin_direct(reactor, id, piece),
            Effect::Block { id, piece, by_file } => self.begin_block(reactor, id, piece, by_file),
            Effect::Flush { id, route } => self.begin_flush(reactor, id, route),
            Effect::File { request, gives_up } => {
                let Some(data) = self.data(request.id, request.range) else { return false };
                let durable = self.request(request.id).is_some_and(|pending| pending.durable);
                self.counts.file += 1;
                self.begin_redirected(reactor, request.id);
                self.ask(reactor, ToCoordinator::Redirected { request, gives_up, durable, data });
                true
            }
            _ => true,
        }
    }

    fn take_message(&mut self, reactor: &mut Reactor, message: ToOwner) -> Result<(), LinkError> {
        if matches!(message, ToOwner::Answer { .. } | ToOwner::BlockAnswer { .. } | ToOwner::Flushed { .. }) {
            self.patience.answered(reactor.now());
        }
        match message {
            ToOwner::Welcome { piece, .. } if piece != PIECE => return Err(LinkError::Piece(piece)),
            ToOwner::Welcome { epoch, .. } if epoch < self.coordinator_epoch => {
                return Err(LinkError::Former { epoch, known: self.coordinator_epoch });
            }
            // What it has would be asked for again.
            ToOwner::Welcome { .. } if self.core.has_coordinator() => return Err(LinkError::Unknown),
            ToOwner::Welcome { epoch, .. } => {
                self.coordinator_epoch = epoch;
                self.patience.greeted();
                self.step(reactor, router::Event::CoordinatorFound);
            }
            ToOwner::Answer { id, result, grants, data } => {
                self.end_redirected(reactor, id, result.is_ok());
                if let Some(data) = data {
                    self.take_data(id, None, &data)?;
                } else if result.is_ok() && self.request(id).is_some_and(|one| one.kind == RequestKind::Read)
                {
                    return Err(LinkError::NoData);
                }
                self.step(reactor, router::Event::Redirected { id, result, grants });
            }
            ToOwner::BlockAnswer { id, result, data } => self.block_answered(reactor, id, result, data)?,
            ToOwner::Flushed { id, result } => self.block_answered(reactor, id, result, None)?,
            ToOwner::Recall { number, range } => {
                self.step(reactor, router::Event::Recalled { number, range });
            }
            ToOwner::Grant(grants) => self.step(reactor, router::Event::Granted(grants)),
        }
        Ok(())
    }

    fn receive(&mut self, reactor: &mut Reactor) {
        loop {
            let (messages, more) = match self.link.receive(reactor, &self.incoming) {
                Ok(received) => received,
                Err(error) => return self.disconnect(reactor, Some(&error)),
            };
            for message in messages {
                if let Err(error) = self.take_message(reactor, message) {
                    return self.disconnect(reactor, Some(&error));
                }
            }
            if !more {
                return;
            }
        }
    }

    /// Sends a message that the coordinator has to answer.
    fn ask(&mut self, reactor: &mut Reactor, message: ToCoordinator) {
        self.patience.asked(|| reactor.now());
        self.link.send(reactor, message);
    }

    /// Whoever waits for a coordinator has waited for long enough. What a silent one has may still be done, as with one that is gone: so its
    /// connection ends, and the next one begins when it has ended all that came over this one (P4).
    fn check_overdue(&mut self, reactor: &mut Reactor) {
        if self.abandoned || self.patience.has_nothing() {
            return;
        }
        let now = reactor.now();
        if self.link.awaits_memory() {
            self.patience.takes_none(now);
        }
        let (is_there, waits) = (self.core.has_coordinator(), self.core.waits_for_coordinator());
        let Some(overdue) = self.patience.check(now, is_there, waits) else { return };
        if overdue == Overdue::Silent {
            tracing::warn!("the coordinator of a volume has answered nothing for lun.coordinator_wait");
            self.disconnect(reactor, None);
            self.patience.gave_up();
        }
        self.newly_overdue = Some(overdue);
        let error = IoError::new(ErrorKind::Operator, Code::Io, "waiting for the coordinator of a volume");
        self.step(reactor, router::Event::CoordinatorOverdue(error));
    }

    /// Looks whether the LUN can be reached again.
    fn probe(&mut self, reactor: &mut Reactor) {
        if self.core.has_path() || self.fenced {
            return;
        }
        let now = reactor.now();
        if now < self.probe_at {
            return;
        }
        self.probe_at = now + PROBE_EVERY;
        let (Some(lun), Some(buffer)) = (&self.lun, self.memory(4096)) else { return };
        self.probe_at = Nanos::NEVER;
        self.probes += 1;
        lun.read(reactor, PROBE, 0, buffer);
    }

    /// The time at which a path to the LUN is asked for: where there is none, and where it has failed. The device of a session that has ended
    /// does not come back, and the next session makes another one.
    fn path_deadline(&self) -> Nanos {
        let has_one = self.lun.is_some() && (!self.is_away || self.fenced);
        if has_one || self.abandoned { Nanos::NEVER } else { self.path_at }
    }

    /// Whether another path may take the present one's place: nothing is under way there, or begins.
    fn may_replace_path(&self) -> bool {
        let is_idle = self.probes == 0 && self.parts.iter().all(|(_, part)| part.is_redirected);
        self.is_away && is_idle && !self.core.has_path() && !self.fenced
    }

    fn probed(&mut self, reactor: &mut Reactor, is_there: bool) {
        self.probes -= 1;
        self.is_away = !is_there;
        if is_there && !self.fenced {
            self.step(reactor, router::Event::Path(true));
        } else {
            self.probe_at = reactor.now() + PROBE_EVERY;
        }
    }

    fn extents(&mut self, tag: Tag, offset: u64, length: u64) {
        const MOST: usize = 64;
        let mut all: Vec<Extent> = Vec::new();
        for piece in self.core.leases().of((offset, offset + length)) {
            let state = match piece.lease {
                Lease::Hole => ExtentState::Hole,
                // What the coordinator has not told may be data.
                _ => ExtentState::Allocated,
            };
            let is_full = all.len() == MOST;
            match all.last_mut() {
                Some(last) if last.state == state => last.length += piece.end - piece.start,
                _ if is_full => break,
                _ => all.push(Extent { offset: piece.start, length: piece.end - piece.start, state }),
            }
        }
        self.ready.push(Completion { tag, result: Ok(Outcome::Extents(all)) });
    }

    fn submit_waiting(&mut self, reactor: &mut Reactor, request: Request<'_>, wait: Wait) {
        let (offset, length) = request.range();
        let (kind, tag) = (request.kind(), request.tag());
        let (route_kind, durable, source, buffer) = match request {
            Request::Extents { offset, length, .. } => return self.extents(tag, offset, length),
            Request::Read { buffer, .. } => (Kind::Read, false, Source::None, Some(buffer)),
            Request::Write { payload: Payload::Given(buffer), fua, .. } => {
                (Kind::Write, fua, Source::Buffer(Rc::new(buffer)), None)
            }
            Request::Write { payload: Payload::Lent(bytes), fua, .. } => {
                let Some(mut buffer) = self.memory(bytes.len()) else {
                    let error =
                        IoError::new(ErrorKind::Retry, Code::NoMemory, "copying a write for the backing");
                    return self.ready.push(Completion { tag, result: Err(error) });
                };
                buffer.bytes_mut().copy_from_slice(bytes);
                (Kind::Write, fua, Source::Buffer(Rc::new(buffer)), None)
            }
            // What stays allocated is written, by whatever way is there.
            Request::WriteZeroes { fua, may_unmap: false, fast_only: false, .. } => {
                (Kind::Write, fua, Source::Zeroes, None)
            }
            Request::WriteZeroes { may_unmap: false, .. } => {
                let error =
                    IoError::new(ErrorKind::Operator, Code::NotSupported, "zeroing faster than by writing");
                return self.ready.push(Completion { tag, result: Err(error) });
            }
            Request::WriteZeroes { fua, .. } | Request::Discard { fua, .. } => {
                (Kind::Punch, fua, Source::None, None)
            }
            Request::Flush { .. } => (Kind::Flush, true, Source::None, None),
        };
        let pending =
            Pending { id: 0, tag, kind, offset, length, durable, source, buffer, wait, redirected: None };
        self.accept_in_turn(reactor, route_kind, pending);
    }

    fn accept(&mut self, reactor: &mut Reactor, kind: Kind, pending: Pending) {
        let range = pending.range();
        self.serial = self.serial.wrapping_add(1);
        let slot = self.pending.insert(pending);
        let id = u64::from(self.serial & (u32::MAX >> 1)) << 32 | slot as u64;
        self.pending[slot].id = id;
        let request = router::Request { id, kind, range };
        self.step(reactor, router::Event::Submitted(request));
    }

    /// The request of an id, if it is not done.
    fn request(&self, id: u64) -> Option<&Pending> {
        self.pending.get(id as u32 as usize).filter(|pending| pending.id == id)
    }

    fn request_mut(&mut self, id: u64) -> Option<&mut Pending> {
        self.pending.get_mut(id as u32 as usize).filter(|pending| pending.id == id)
    }

    fn done(&mut self, reactor: &Reactor, id: u64, mut result: Result<(), IoError>) {
        if self.request(id).is_none() {
            return;
        }
        self.end_redirected(reactor, id, false);
        let mut pending = self.pending.remove(id as u32 as usize);
        match result {
            Err(error) if is_full(&error) && pending.needs_space() => {
                let (now, wait) = (reactor.now(), pending.wait);
                let wait = if self.is_overtaken(&pending) { wait.ended(now) } else { wait };
                let Some(refused) = self.space.refused(now, wait, pending) else { return };
                (pending, result) = (refused, Err(self.space.reason(error)));
            }
            _ => self.space.answered(&mut pending.wait),
        }
        let Pending { tag, buffer, .. } = pending;
        let outcome = |()| buffer.map_or(Outcome::Done, Outcome::Read);
        self.ready.push(Completion { tag, result: result.map(outcome) });
    }

    /// The part of a read that is in a hole.
    fn fill(&mut self, id: u64, (start, end): router::Range) {
        self.counts.zeroes += 1;
        if let Some(pending) = self.request_mut(id)
            && let Some(buffer) = &mut pending.buffer
        {
            buffer.bytes_mut()[(start - pending.offset) as usize..(end - pending.offset) as usize].fill(0);
        }
    }

    fn memory(&self, length: usize) -> Option<Buffer> {
        self.pool.take(length).or_else(|| self.reserve.take(length))
    }
}

/// The queues of what could not be begun.
const ON_LUN: usize = 0;
const BY_COORDINATOR: usize = 1;

fn queue_of(effect: &Effect) -> usize {
    match effect {
        Effect::Direct { .. } | Effect::Flush { route: Route::Direct, .. } => ON_LUN,
        _ => BY_COORDINATOR,
    }
}

impl Layer for RoutedBacking {
    fn info(&self) -> LayerInfo {
        self.info
    }

    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        let waiting = self.waiting();
        // Reads go on beside what waits for space.
        if !self.has_depth() || kind.changes_data() && waiting >= self.depth {
            return false;
        }
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        kind != RequestKind::Write || self.pool.has_room(bytes) || self.reserve.has_room(bytes)
    }

    fn submit(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        self.submit_waiting(reactor, request, Wait::default());
    }

    fn on_event(&mut self, reactor: &mut Reactor, event: Event) {
        if event.token.owner != self.id {
            return self.link.on_served_event(reactor, event);
        }
        match (event.token.slot, event.action) {
            (slot, Action::Ready(interest)) => self.link.on_event(slot, interest),
            (PROBE, Action::File { result, .. }) => self.probed(reactor, result == Ok(4096)),
            (slot, Action::File { result, buffer }) => self.part_ended(reactor, slot, result, buffer),
        }
    }

    fn advance(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>) {
        self.receive(reactor);
        self.check_overdue(reactor);
        self.begin_held(reactor);
        self.retry_full(reactor);
        self.probe(reactor);
        if !self.behind.is_empty() {
            self.begin_behind(reactor);
        }
        // A coordinator on this shard may answer a message at once.
        if self.link.may_have_answered() {
            self.receive(reactor);
        }
        if let Err(error) = self.link.flush(reactor) {
            self.disconnect(reactor, Some(&error));
        }
        if self.link.has_more() {
            self.more_at = reactor.now() + RETRY_AFTER;
        }
        done.append(&mut self.ready);
    }

    fn deadline(&self) -> Nanos {
        if !self.ready.is_empty() {
            return Nanos(0);
        }
        let probe = if self.core.has_path() || self.fenced { Nanos::NEVER } else { self.probe_at };
        let ask = if self.link.is_there() || self.abandoned { Nanos::NEVER } else { self.ask_at };
        let more = if self.link.has_more() { self.more_at } else { Nanos::NEVER };
        let overdue = if self.abandoned { Nanos::NEVER } else { self.patience.deadline() };
        let path = self.path_deadline();
        let all = [probe, self.retry_at, ask, more, overdue, path, self.space.deadline(self.has_depth())];
        all.into_iter().min().unwrap_or(Nanos::NEVER)
    }

    fn in_flight(&self) -> usize {
        self.pending.len() + self.waiting() + self.ready.len()
    }

    fn meters(&self, out: &mut Vec<LayerMeter>) {
        out.push(LayerMeter { layer: "redirected", meter: self.redirected.clone() });
    }
}

impl Destage for RoutedBacking {
    fn submit_destaged(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        self.submit_waiting(reactor, request, Wait::NONE);
    }

    fn write_gather(
        &mut self,
        reactor: &mut Reactor,
        tag: Tag,
        offset: u64,
        region: Rc<Region>,
        pieces: Vec<(usize, usize)>,
    ) {
        let length: usize = pieces.iter().map(|piece| piece.1).sum();
        let (length, source) = (length as u64, Source::Gather(region, pieces));
        let kind = RequestKind::Write;
        let (durable, buffer, wait) = (false, None, Wait::NONE);
        let pending =
            Pending { id: 0, tag, kind, offset, length, durable, source, buffer, wait, redirected: None };
        self.accept_in_turn(reactor, Kind::Write, pending);
    }
}
