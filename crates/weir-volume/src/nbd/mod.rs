//! A disk on an NBD server: its requests go over one connection, and over the next one if that breaks.
//!
//! Two things are not as on a disk of this host. A change that was under way when the connection broke may land later than what comes over
//! the next one ([`doubt`]). And the server's process may have ended with what it had acknowledged and not flushed ([`kept`]): that is
//! written again before anything sees its range; writes of destage are not kept, because the log has them until their flush, and that fails.

mod body;
mod connecting;
mod doubt;
mod flushing;
mod kept;
mod link;
mod opened;
mod requests;
mod server;

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use slab::Slab;
use weir_block::buffer::LARGEST;
use weir_block::{
    Action, Buffer, BufferPool, Code, Completion, Destage, ErrorKind, Event, Extent, ExtentState, IoError,
    Layer, LayerInfo, LayerMeter, Nanos, Outcome, OwnerId, Payload, Reactor, Region, Request, RequestKind,
    Tag,
};
use weir_nbd::client::{Dialed, Done, NbdError};
use weir_nbd::protocol::error as errno;

use crate::error::{NbdTrouble, VolumeError};
use crate::interface::Backing;
use crate::patience::Patience;
use body::{Data, Source};
use doubt::Doubts;
use flushing::{Flushes, RewriteRefused};
use kept::Kept;
use link::Link;
pub use opened::NbdOptions;
pub(crate) use opened::OpenedNbd;
use requests::{Limits, Pending, Whose, Work};
pub use server::{describe, named, survey};

/// Bytes of acknowledged writes that are kept until they are flushed, with those that are under way. From half of it on they are flushed
/// without being asked to.
const KEPT: usize = 64 << 20;

/// Ranges of those, of which half has the same effect.
const MOST_KEPT: usize = 32 << 10;

/// Writes again under way at once.
const AGAIN: usize = 16;

/// Without the right to use the disk, nothing is sent. It may come back.
const RIGHT_AGAIN: Duration = Duration::from_millis(50);

/// A disk on an NBD server, as a layer.
pub struct NbdBacking {
    id: OwnerId,
    info: LayerInfo,
    /// The server and the export, for people.
    name: String,
    depth: usize,
    server_wait: Duration,
    fence_grace: Duration,
    link: Link,
    /// What the present server takes, or the last one took.
    limits: Limits,
    patience: Patience,
    pending: Slab<Pending>,
    serial: u64,
    /// Those that are not on the connection, by age.
    waiting: VecDeque<u32>,
    /// Some of them may go on.
    may_go_on: bool,
    doubts: Doubts,
    kept: Kept,
    /// Where the next look for something to write again begins, how many are under way, and when to begin after one has failed.
    again_from: u64,
    again: usize,
    again_at: Nanos,
    rewrite_refused: Option<RewriteRefused>,
    flushes: Flushes,
    ready: Vec<Completion>,
    /// Finished commands in processing; empty between calls.
    round: Vec<Done>,
    /// For what is kept.
    memory: BufferPool,
    zeroes: Rc<Region>,
    /// Why there is no connection.
    why: String,
    /// Since when.
    away_since: Option<Nanos>,
    /// It was told since then that its export does not do.
    is_unfit: bool,
    /// It was told then that the server answers nothing; and the next time is told from then on.
    silent_since: Option<Nanos>,
    silent_again_at: Nanos,
    /// The wait for the server is over: requests fail.
    fails: bool,
    /// The connection ends as soon as nothing is under way on it, and the next one shows the export's size of then.
    renews: bool,
    /// Nothing but destage is to hold up the end.
    is_closing: bool,
    /// Flush the kept writes as soon as possible.
    settles: bool,
    /// The disk is another node's, or closed.
    has_ended: bool,
    news: VecDeque<(&'static str, String)>,
    /// When it was last driven.
    looked_at: Nanos,
    /// When to send again: in the past with the right to the disk.
    right_at: Nanos,
}

impl NbdBacking {
    /// Moves a connection to the shard of `reactor`. Does not block.
    ///
    /// # Errors
    /// The connection cannot be used, or there is no memory.
    pub fn new(
        reactor: &mut Reactor,
        dialed: Dialed,
        options: NbdOptions,
    ) -> Result<NbdBacking, VolumeError> {
        let id = reactor.new_owner();
        let limits = Limits::of(dialed.export(), options.logical_block);
        let info = LayerInfo {
            size: options.size,
            logical_block: options.logical_block,
            preferred_block: 4096,
            max_transfer: LARGEST as u32,
            writable: true,
            fast_zeroes: limits.zeroes,
            discards: limits.zeroes,
        };
        let name = format!("the export `{}` of {}", options.export, options.server.address);
        let zeroes = Region::new(1)
            .map_err(|error| VolumeError::from_io("mapping zeroes for", name.as_ref(), error))?;
        let mut patience = Patience::new(reactor.now(), options.server_wait);
        patience.greeted();
        Ok(NbdBacking {
            id,
            info,
            name,
            depth: options.depth.max(1),
            server_wait: options.server_wait,
            fence_grace: options.fence_grace,
            link: Link::new(id, dialed, options).map_err(NbdTrouble::from)?,
            limits,
            patience,
            pending: Slab::new(),
            serial: 0,
            waiting: VecDeque::new(),
            may_go_on: false,
            doubts: Doubts::default(),
            kept: Kept::default(),
            again_from: 0,
            again: 0,
            again_at: Nanos(0),
            rewrite_refused: None,
            flushes: Flushes::default(),
            ready: Vec::new(),
            round: Vec::new(),
            memory: reactor.buffers().beside(KEPT),
            zeroes: Rc::new(zeroes),
            why: String::new(),
            away_since: None,
            is_unfit: false,
            silent_since: None,
            silent_again_at: Nanos(0),
            fails: false,
            renews: false,
            is_closing: false,
            settles: false,
            has_ended: false,
            news: VecDeque::new(),
            looked_at: Nanos(0),
            right_at: Nanos(0),
        })
    }

    /// Takes a request. It goes on the connection at once if nothing bars it.
    fn accept(&mut self, reactor: &mut Reactor, whose: Whose, work: Work, (offset, length): (u64, u64)) {
        if let (Some(error), Some(tag)) = (self.refusal(), tag_of(whose)) {
            return self.ready.push(Completion { tag, result: Err(error) });
        }
        let serial = self.serial;
        self.serial += 1;
        let request = Pending { whose, work, offset, length, next: offset, sent: 0, is_sent: false, serial };
        let slot = self.pending.insert(request) as u32;
        let is_smooth = self.link.is_up()
            && self.waiting.is_empty()
            && self.doubts.is_empty()
            && self.kept.owed() == 0
            && !self.renews;
        if is_smooth {
            self.begin(reactor, slot);
        } else {
            self.waiting.push_back(slot);
            self.may_go_on = true;
        }
    }

    /// Why no request is taken.
    fn refusal(&self) -> Option<IoError> {
        if self.has_ended {
            return Some(IoError::new(ErrorKind::Retry, Code::ShuttingDown, "a disk on an NBD server"));
        }
        (self.fails && !self.link.is_up()).then(away)
    }

    /// Puts the next command of a request on the connection.
    fn begin(&mut self, reactor: &Reactor, slot: u32) {
        let request = &mut self.pending[slot as usize];
        let (command, data) = self.limits.command(request, &self.zeroes);
        self.link.start(slot, command, data);
        self.patience.asked(|| reactor.now());
    }

    /// Whether a change is under way on the connection that overlaps the range.
    fn is_changing(&self, (start, end): (u64, u64)) -> bool {
        self.pending.iter().any(|(_, request)| {
            let (first, last) = request.range();
            request.is_sent && request.changes_data() && first < end && start < last
        })
    }

    /// Begins whatever waits and may go on. A change never overtakes one that waits or is under way and overlaps it.
    fn go_on(&mut self, reactor: &mut Reactor) {
        if !std::mem::take(&mut self.may_go_on) || !self.link.is_up() || self.renews {
            return;
        }
        let now = reactor.now();
        let mut still = VecDeque::new();
        while let Some(slot) = self.waiting.pop_front() {
            let request = &self.pending[slot as usize];
            let (range, serial, is_read) = (request.range(), request.serial, !request.changes_data());
            let overtakes = !is_read
                && still.iter().any(|&before: &u32| {
                    let before = &self.pending[before as usize];
                    let (first, end) = before.range();
                    before.changes_data() && first < range.1 && range.0 < end
                });
            if overtakes
                || !is_read && self.is_changing(range)
                || self.kept.owes(range)
                || self.doubts.bar((slot, serial), range, is_read, now)
            {
                still.push_back(slot);
            } else {
                self.begin(reactor, slot);
            }
        }
        self.waiting = still;
    }

    /// Sends what was begun, receives what has come, and what follows from that.
    fn drive(&mut self, reactor: &mut Reactor) {
        self.looked_at = reactor.now();
        if !self.doubts.is_empty() {
            self.doubts.expire(self.looked_at);
            self.may_go_on = true;
        }
        self.connect(reactor);
        self.write_again(reactor);
        self.go_on(reactor);
        self.start_flush(reactor);
        let mut round = std::mem::take(&mut self.round);
        let received = self.send(reactor).and_then(|()| self.link.receive(&mut round));
        for Done { slot, errno } in round.drain(..) {
            // An answer before it may have ended the connection.
            if self.pending.get(slot as usize).is_some_and(|request| request.is_sent) {
                self.answered(reactor, slot, errno);
            }
        }
        self.round = round;
        // What the answers have brought about. Nothing else may come that leads to the next of what is written again.
        self.write_again(reactor);
        if let Err(error) = received.and_then(|()| self.send(reactor)) {
            self.lose(reactor, &error.to_string());
        }
        self.renew(reactor);
        self.say_farewell(reactor);
        self.link.watch(reactor, self.right_at <= self.looked_at);
    }

    /// Sends what the socket takes. Nothing of a former owner is to reach the server late (P4).
    fn send(&mut self, reactor: &Reactor) -> Result<(), NbdError> {
        if !self.link.has_unsent() {
            return Ok(());
        }
        let has_right = reactor.may_write(self.id);
        self.right_at = if has_right { Nanos(0) } else { self.looked_at + RIGHT_AGAIN };
        if has_right { self.link.send() } else { Ok(()) }
    }

    fn answered(&mut self, reactor: &mut Reactor, slot: u32, number: u32) {
        if number == errno::ESHUTDOWN {
            return self.lose(reactor, "it is being shut down");
        }
        self.patience.answered(reactor.now());
        self.fails = false;
        let extents = match self.pending[slot as usize].work {
            Work::Extents if number == 0 => {
                let range = self.pending[slot as usize].range();
                self.limits.extents(self.link.extents(slot), range)
            }
            _ => Vec::new(),
        };
        let data = self.link.take(slot);
        let request = &mut self.pending[slot as usize];
        request.is_sent = false;
        if let (Work::Read(buffer), Data::Into(taken, _)) = (&mut request.work, data) {
            *buffer = Some(taken);
        }
        if number != 0 {
            return self.refused(reactor, slot, number);
        }
        request.next += request.sent;
        if request.next < request.offset + request.length {
            return if self.has_ended { self.cut_short(slot) } else { self.begin(reactor, slot) };
        }
        self.finished(reactor, slot, extents);
    }

    /// The rest of a request is not begun: the disk is not this node's any more.
    fn cut_short(&mut self, slot: u32) {
        let request = self.pending.remove(slot as usize);
        self.settle(slot);
        self.again -= usize::from(matches!(request.whose, Whose::Again(_)));
        if let (Some(error), Some(tag)) = (self.refusal(), tag_of(request.whose)) {
            self.finish(tag, Err(error));
        }
    }

    /// The server has refused a command.
    fn refused(&mut self, reactor: &mut Reactor, slot: u32, number: u32) {
        let request = &self.pending[slot as usize];
        if let Work::Zero { fast_only, .. } = request.work
            && self.limits.zeroes
            && matches!(number, errno::EINVAL | errno::ENOTSUP)
            && !(fast_only && number == errno::ENOTSUP)
        {
            self.limits.zeroes = false;
            (self.info.fast_zeroes, self.info.discards) = (false, false);
            if !fast_only && !self.has_ended {
                return self.begin(reactor, slot);
            }
        }
        let error = match request.work {
            Work::Zero { fast_only: true, .. } if !self.limits.zeroes => io_error(errno::ENOTSUP),
            _ => io_error(number),
        };
        let request = self.pending.remove(slot as usize);
        self.settle(slot);
        match request.whose {
            Whose::Client(tag) | Whose::Destage(tag) => self.finish(tag, Err(error)),
            Whose::Flush => self.flush_failed(reactor, error),
            Whose::Again(_) => self.not_written_again(reactor, error, request.range()),
        }
    }

    /// Everything of a request is done.
    fn finished(&mut self, reactor: &mut Reactor, slot: u32, extents: Vec<Extent>) {
        let request = self.pending.remove(slot as usize);
        self.settle(slot);
        let outcome = match request.work {
            Work::Read(Some(buffer)) => Outcome::Read(buffer),
            // Its buffer comes back with the answer; a read without one is never begun.
            Work::Read(None) => return,
            Work::Extents => Outcome::Extents(extents),
            Work::Flush => return self.flush_done(reactor.now()),
            Work::Write { .. } | Work::Zero { .. } => return self.changed(reactor, request),
        };
        if let Some(tag) = tag_of(request.whose) {
            self.finish(tag, Ok(outcome));
        }
    }

    /// A change is done: it is kept until it is durable.
    fn changed(&mut self, reactor: &mut Reactor, request: Pending) {
        let range = request.range();
        match request.whose {
            Whose::Client(tag) => {
                if self.limits.makes_durable(request.fua()) {
                    self.kept.forget(range);
                } else if let Some(content) = request.content() {
                    self.flushes.keeps(reactor.now(), self.kept.is_empty());
                    self.kept.insert(range, content, self.flushes.begun());
                }
                match (request.fua() && !self.limits.makes_durable(true), self.refusal()) {
                    (true, Some(error)) => self.finish(tag, Err(error)),
                    (true, None) => self.flushes.arrive(Whose::Client(tag)),
                    (false, _) => self.finish(tag, Ok(Outcome::Done)),
                }
            }
            Whose::Destage(tag) => {
                // The log has what is newer.
                self.kept.forget(range);
                self.flushes.destaged();
                self.finish(tag, Ok(Outcome::Done));
            }
            Whose::Again(start) => self.written_again(start),
            Whose::Flush => {}
        }
    }

    /// A request that may have been in doubt is answered.
    fn settle(&mut self, slot: u32) {
        if !self.doubts.is_empty() {
            self.doubts.settled(slot);
        }
        self.may_go_on |= !self.waiting.is_empty();
    }

    fn finish(&mut self, tag: Tag, result: Result<Outcome, IoError>) {
        self.ready.push(Completion { tag, result });
    }

    fn write(
        &mut self,
        reactor: &mut Reactor,
        whose: Whose,
        offset: u64,
        (payload, fua): (Payload<'_>, bool),
    ) {
        let bytes = payload.bytes();
        if let (Some(error), Some(tag)) = (self.refusal(), tag_of(whose)) {
            return self.finish(tag, Err(error));
        }
        let Some(mut buffer) = self.memory.take(bytes.len()) else {
            let error = IoError::new(ErrorKind::Retry, Code::NoMemory, "writing to an NBD server");
            return tag_of(whose).into_iter().for_each(|tag| self.finish(tag, Err(error)));
        };
        buffer.bytes_mut().copy_from_slice(bytes);
        let (length, source) = (bytes.len() as u64, Source::Buffer(Rc::new(buffer), 0));
        self.accept(reactor, whose, Work::Write { source, fua }, (offset, length));
    }

    fn read(&mut self, reactor: &mut Reactor, tag: Tag, offset: u64, buffer: Buffer) {
        let range = (offset, buffer.len() as u64);
        self.accept(reactor, Whose::Client(tag), Work::Read(Some(buffer)), range);
    }

    fn take_request(&mut self, reactor: &mut Reactor, request: Request<'_>, of: fn(Tag) -> Whose) {
        let (range, whose) = (request.range(), of(request.tag()));
        match request {
            Request::Read { tag, offset, buffer } => self.read(reactor, tag, offset, buffer),
            Request::Write { offset, payload, fua, .. } => self.write(reactor, whose, offset, (payload, fua)),
            Request::WriteZeroes { tag, fast_only: true, .. } if self.limits.lacks_fast_zero() => {
                let what = "zeroing faster than by writing";
                self.finish(tag, Err(IoError::new(ErrorKind::Operator, Code::NotSupported, what)));
            }
            Request::WriteZeroes { .. } | Request::Discard { .. }
                if self.is_refusal_overdue() && self.kept.len() >= MOST_KEPT =>
            {
                let error = IoError::new(ErrorKind::Retry, Code::NoMemory, "zeroing at an NBD server");
                tag_of(whose).into_iter().for_each(|tag| self.finish(tag, Err(error)));
            }
            Request::WriteZeroes { fua, may_unmap, fast_only, .. } => {
                self.accept(reactor, whose, Work::Zero { fua, may_unmap, fast_only }, range);
            }
            // What is discarded reads as zeroes, which a TRIM does not promise.
            Request::Discard { fua, .. } => {
                let work = Work::Zero { fua, may_unmap: true, fast_only: false };
                self.accept(reactor, whose, work, range);
            }
            Request::Flush { tag } => match self.refusal() {
                Some(error) => self.finish(tag, Err(error)),
                None => self.flushes.arrive(whose),
            },
            Request::Extents { tag, offset, length } if !self.limits.extents => {
                let all = vec![Extent { offset, length, state: ExtentState::Allocated }];
                self.finish(tag, Ok(Outcome::Extents(all)));
            }
            Request::Extents { .. } => self.accept(reactor, whose, Work::Extents, range),
        }
    }
}

impl Layer for NbdBacking {
    fn info(&self) -> LayerInfo {
        self.info
    }

    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        if self.refusal().is_some() {
            // It is answered at once, whatever is kept.
            return true;
        }
        if self.pending.len() + self.flushes.pending() >= self.depth {
            return false;
        }
        if self.is_refusal_overdue() {
            // The server lets nothing of what is kept go: a change without room fails rather than wait (P9).
            return true;
        }
        match kind {
            RequestKind::Write => self.memory.has_room(usize::try_from(bytes).unwrap_or(usize::MAX)),
            kind => !kind.changes_data() || self.kept.len() < MOST_KEPT,
        }
    }

    fn submit(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        self.take_request(reactor, request, Whose::Client);
    }

    fn on_event(&mut self, _reactor: &mut Reactor, event: Event) {
        if let Action::Ready(interest) = event.action
            && event.token.owner == self.id
        {
            self.link.on_event(event.token.slot, interest);
        }
    }

    fn advance(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>) {
        self.drive(reactor);
        self.check_patience(reactor);
        done.append(&mut self.ready);
    }

    fn deadline(&self) -> Nanos {
        let goes_on = self.may_go_on && self.link.is_up() && !self.renews;
        if !self.ready.is_empty() || self.link.has_more() || goes_on || self.may_flush() {
            return Nanos(0);
        }
        self.next_turn()
    }

    fn in_flight(&self) -> usize {
        self.pending.len() + self.flushes.pending() + self.ready.len()
    }

    fn meters(&self, _out: &mut Vec<LayerMeter>) {}
}

impl Destage for NbdBacking {
    fn can_gather(&self) -> bool {
        self.pending.len() + self.flushes.pending() < self.depth
    }

    fn submit_destaged(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        self.take_request(reactor, request, Whose::Destage);
    }

    fn write_gather(
        &mut self,
        reactor: &mut Reactor,
        tag: Tag,
        offset: u64,
        region: Rc<Region>,
        pieces: Vec<(usize, usize)>,
    ) {
        let length = pieces.iter().map(|&(_, length)| length as u64).sum();
        let work = Work::Write { source: Source::Gather(region, Rc::new(pieces)), fua: false };
        self.accept(reactor, Whose::Destage(tag), work, (offset, length));
    }
}

impl Backing for NbdBacking {
    fn owner(&self) -> OwnerId {
        self.id
    }

    fn resize(&mut self, size: u64) -> Result<(), VolumeError> {
        let reason = "is not a multiple of the logical block (512 or 4096)";
        if !size.is_multiple_of(u64::from(self.info.logical_block)) {
            return Err(VolumeError::InvalidSize { path: self.name.as_str().into(), size, reason });
        }
        self.info.size = size;
        self.renews = self.link.export().is_some_and(|export| export.size < size);
        Ok(())
    }

    fn stop_waiting(&mut self) {
        self.is_closing = true;
        let error = IoError::new(ErrorKind::Retry, Code::ShuttingDown, "waiting for an NBD server");
        self.fail_waiting(error, |whose| matches!(whose, Whose::Client(_)));
    }

    fn end(&mut self, reactor: &mut Reactor) {
        self.end_all(reactor);
    }

    fn owes(&self) -> bool {
        self.still_owes()
    }

    fn settle(&mut self) -> bool {
        let is_on_its_way = |(_, request): (usize, &Pending)| {
            request.changes_data() && matches!(request.whose, Whose::Client(_))
        };
        self.settles = !self.kept.is_empty() || self.pending.iter().any(is_on_its_way);
        !self.settles
    }

    fn is_away(&self) -> bool {
        !self.link.is_up()
    }

    fn trouble(&self, now: Nanos) -> Option<String> {
        self.trouble_at(now)
    }

    fn news(&mut self) -> Option<(&'static str, String)> {
        self.news.pop_front()
    }
}

fn tag_of(whose: Whose) -> Option<Tag> {
    match whose {
        Whose::Client(tag) | Whose::Destage(tag) => Some(tag),
        Whose::Again(_) | Whose::Flush => None,
    }
}

/// The error of a request that has waited for long enough.
fn away() -> IoError {
    IoError::new(ErrorKind::Retry, Code::Io, "waiting for an NBD server")
}

/// An error number of the protocol, as the error of a request.
fn io_error(number: u32) -> IoError {
    const CONTEXT: &str = "a request to an NBD server";
    let number = match number {
        errno::EPERM => libc::EPERM,
        errno::ENOMEM => libc::ENOMEM,
        errno::EINVAL => libc::EINVAL,
        errno::ENOSPC => libc::ENOSPC,
        errno::ENOTSUP => libc::EOPNOTSUPP,
        _ => libc::EIO,
    };
    IoError::from_errno(number, CONTEXT)
}
