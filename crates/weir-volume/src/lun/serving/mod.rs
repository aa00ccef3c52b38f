//! The coordinator's side of one disk, on a shard: drives [`Coordinator`] with the disk's file, the LUN and the owner's messages.
//!
//! Reads and writes of the file and the LUN go through the shard's reactor. What blocks (syncs, looks at extents, zeroes, freeing) is for
//! two threads: one for what is short, one for what is long.

pub mod ahead;
mod asked;
mod dispatch;
mod file_work;
mod jobs;
mod opened;
mod peer;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use slab::Slab;
use weir_block::{
    Action, Buffer, BufferPool, Code, ErrorKind, Event, Group, IoError, LayerMeter, OwnerId, Reactor, Region,
    Stream, Token,
};

use super::coordinator::{self, Coordinator, Effect, Job};
use super::leases::{Lease, Leases, Piece};
use super::redirect::{ToCoordinator, ToOwner};
use super::router::{Kind, Range};
use crate::backing::engine_uring::UringEngine;
use crate::offload::Offload;
use crate::planted::{Bug, Planted};
use ahead::Ahead;
use asked::{Asked, Waiting};
use dispatch::Held;
pub use dispatch::{Dispatch, Redirected};
pub use file_work::{Change, FileWork, Layout, WorkFile};
pub use opened::OpenedDisk;
use peer::{Peer, PeerError};

/// The filesystem moves blocks in pieces of at most this many bytes: the owner gives up whole ones.
pub const PIECE: u64 = 64 << 10;

/// Bytes of the file that are looked at in one go when an owner has come.
const WINDOW: u64 = 1 << 30;

/// Slots of events that are no I/O.
const SHORT: u32 = u32::MAX - 1;
const LONG: u32 = u32::MAX - 2;
/// From here on: the owner's connections, by their number.
const CONNECTIONS: u32 = 1 << 31;

/// Memory that the data of redirected I/O has at most, in bytes (P10). What is idle is the shard's.
const MEMORY: usize = 64 << 20;

/// Bytes of zeroes to write from: 1,024 pieces of a write (`IOV_MAX`) are as much as any request.
const ZEROES: usize = 4 << 20;

/// Most requests of the owner that are under way at once. More are not begun until some have ended.
const MOST_OPEN: usize = 512;

/// Most requests of the owner that wait for others, or for a change of somebody else. To leave them unread would leave an answer to a recall
/// unread, too, for which they may wait. So an owner with more is none: it has at most its depth, 256, under way, and as many that wait at
/// its end for space, and it sends each of them once to be done through the filesystem.
const MOST_WAITING: usize = 1024;

/// Whole blocks of every filesystem: less goes through the page cache, past which the owner writes.
const UNIT: u64 = 4096;

/// Of a change that is not made any more.
const STOPPING: IoError =
    IoError::new(ErrorKind::Retry, Code::ShuttingDown, "a volume whose coordination ends");

/// Of work that has ended in a panic, which is in the log.
const PANICKED: IoError = IoError::new(ErrorKind::Bug, Code::Io, "work on a disk's file");

/// A job that has begun.
#[derive(Clone, Copy)]
struct Working {
    job: u64,
    what: Job,
}

/// A flush that is under way: it is no job.
struct Flush {
    id: u64,
    connection: u64,
}

enum Slot {
    Job(Working),
    Flush(Flush),
}

/// What a thread has done, by slot.
enum Done {
    /// Of all writes that were to be committed, in order.
    Committed(Vec<Layout>),
    Looked(usize, Layout),
    Allocated(usize, Result<Option<Vec<Piece>>, IoError>),
    /// An error of a slot, and whether the filesystem has shut down.
    Judged(usize, IoError, bool),
    /// The error of a write, and the layout after what it had begun has ended.
    Settled(usize, IoError, Layout),
}

/// One disk of a volume that this node coordinates.
pub struct ServedDisk {
    core: Coordinator,
    /// Empty between steps; kept for its memory.
    effects: Vec<Effect>,
    /// The coordinator's.
    epoch: u64,
    /// The least epoch of an owner (P2).
    owner_epoch: u64,
    id: OwnerId,
    /// For what blocks.
    work: Arc<dyn FileWork>,
    file: UringEngine,
    lun: UringEngine,
    size: u64,
    slots: Slab<Slot>,
    /// Messages that have come, and were not looked at: too much is under way.
    inbox: VecDeque<ToCoordinator>,
    /// Requests without an answer.
    asked: Asked,
    /// The data of a read that is answered now, and its number.
    read: Option<(u64, Buffer)>,
    /// What is durable of the file's layout, as far as it is known.
    layout: Leases,
    /// Writes that are to be made durable together.
    commits: Group<usize>,
    short: Offload<Done>,
    long: Offload<Done>,
    ahead: Ahead,
    /// Where the next look at the file begins.
    looks_from: u64,
    /// A look is to begin.
    looks_again: bool,
    peer: Peer,
    /// A connection that has not greeted yet, and the highest epoch that it may have.
    candidate: Option<(Peer, u64)>,
    /// Counts the sockets.
    sockets: u32,
    /// Counts the owner's connections.
    connection: u64,
    /// Jobs for which there was no memory.
    starved: VecDeque<Working>,
    /// Reads and writes whose time has not come; absent where they begin at once.
    held: Option<Held>,
    changes: BTreeMap<u64, Change>,
    changed: Vec<(u64, Result<(), IoError>)>,
    pool: BufferPool,
    zeroes: Rc<Region>,
    /// The LUN, or the filesystem, has refused I/O, and nobody has heard of that yet.
    newly_refused: bool,
    stops: bool,
    planted: Planted,
}

impl ServedDisk {
    /// Puts a disk on the shard of `reactor`. `owner`: the epoch of its owner, if the registry names one, or a former one that may not be
    /// over. `dispatch`: when its reads and writes begin, if not at once.
    ///
    /// # Errors
    /// No memory.
    pub fn new(
        reactor: &mut Reactor,
        opened: OpenedDisk,
        epoch: u64,
        owner: Option<u64>,
        dispatch: Option<Box<dyn Dispatch>>,
    ) -> io::Result<ServedDisk> {
        let OpenedDisk { work, file, lun, size } = opened;
        let id = reactor.new_owner();
        Ok(ServedDisk {
            core: Coordinator::new(owner.is_some(), PIECE, Planted::default()),
            effects: Vec::new(),
            epoch,
            owner_epoch: owner.unwrap_or(0),
            id,
            work,
            file: UringEngine::new(file, id),
            lun: UringEngine::new(lun, id),
            size,
            slots: Slab::new(),
            inbox: VecDeque::new(),
            asked: Asked::default(),
            read: None,
            layout: Leases::default(),
            commits: Group::default(),
            short: Offload::new("weir-disk", Token { owner: id, slot: SHORT }),
            long: Offload::new("weir-disk-long", Token { owner: id, slot: LONG }),
            ahead: Ahead::default(),
            looks_from: 0,
            looks_again: false,
            peer: Peer::None,
            candidate: None,
            sockets: 0,
            connection: 0,
            starved: VecDeque::new(),
            held: dispatch.map(Held::new),
            changes: BTreeMap::new(),
            changed: Vec::new(),
            pool: reactor.buffers().beside(MEMORY),
            zeroes: Rc::new(Region::new(ZEROES)?),
            newly_refused: false,
            stops: false,
            planted: Planted::default(),
        })
    }

    /// Plants a bug, for the simulator.
    pub fn plant(&mut self, planted: Planted) {
        self.core.plant(planted);
        self.planted = planted;
    }

    /// The owner of its events.
    #[must_use]
    pub fn id(&self) -> OwnerId {
        self.id
    }

    /// The registry names an owner of this epoch: none of an older one counts any more (P2).
    pub fn owner_is(&mut self, reactor: &mut Reactor, epoch: u64) {
        if epoch > self.owner_epoch {
            self.owner_epoch = epoch;
            self.drop_peer(reactor, None);
        }
    }

    /// The owner's node connects. Its first message is a hello, of an epoch of `most` at most: that of the disk's record. Until that has
    /// come, the present connection stays.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn connect(&mut self, reactor: &mut Reactor, stream: Stream, most: u64) -> io::Result<()> {
        self.drop_candidate(reactor);
        self.sockets += 1;
        let slot = CONNECTIONS | (self.sockets & (CONNECTIONS / 2 - 1));
        self.candidate = Some((Peer::remote(reactor, stream, Token { owner: self.id, slot })?, most));
        Ok(())
    }

    /// The owner is on this shard: it calls [`ServedDisk::hear`] and [`ServedDisk::answers`]. Returns the connection's number.
    pub fn connect_here(&mut self, reactor: &mut Reactor) -> u64 {
        self.drop_candidate(reactor);
        self.drop_peer(reactor, None);
        self.connection += 1;
        self.peer = Peer::here();
        self.connection
    }

    /// The owner on this shard is gone, unless another connection has come since.
    pub fn disconnect_here(&mut self, reactor: &mut Reactor, connection: u64) {
        if connection == self.connection {
            self.drop_peer(reactor, None);
        }
    }

    /// Whether the owner's connection of this number is the present one.
    #[must_use]
    pub fn is_connected(&self, connection: u64) -> bool {
        connection == self.connection && self.peer.is_there()
    }

    /// Measures the owner's requests from the message to the answer.
    #[must_use]
    pub fn meter(&self) -> LayerMeter {
        LayerMeter { layer: "coordinator", meter: self.asked.meter().clone() }
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The file has grown to `size` bytes. What the owner holds of it stays as it is.
    pub fn lengthened(&mut self, size: u64) {
        if size <= self.size {
            return;
        }
        // It hears of what is new, unless it is still being told of what was there.
        self.looks_again |= self.looks_from >= self.size;
        self.size = size;
    }

    /// Wants a change of the layout: a clone, say. Its result is in [`ServedDisk::changed`] under its number. It begins when the owner has
    /// given the range up.
    pub fn change(&mut self, reactor: &mut Reactor, number: u64, range: Range, change: Change) {
        if self.stops {
            return self.changed.push((number, Err(STOPPING)));
        }
        self.changes.insert(number, change);
        self.step(reactor, coordinator::Event::Wanted { change: number, range });
    }

    /// Nobody waits for a change any more. One that has not begun is not made, and has no result.
    pub fn forget_change(&mut self, reactor: &mut Reactor, number: u64) {
        // One that has begun is not among them.
        if self.changes.remove(&number).is_some() {
            self.step(reactor, coordinator::Event::Unwanted(number));
        }
    }

    /// The results of changes.
    pub fn changed(&mut self) -> Vec<(u64, Result<(), IoError>)> {
        std::mem::take(&mut self.changed)
    }

    /// Begins nothing any more, and answers nobody. What is under way ends: [`ServedDisk::is_over`].
    pub fn stop(&mut self, reactor: &mut Reactor) {
        self.stops = true;
        self.drop_candidate(reactor);
        self.drop_peer(reactor, None);
        self.ahead.clear();
        self.feed_starved(reactor);
        self.begin_all(reactor);
        // Those that have begun are not among them.
        let waiting = std::mem::take(&mut self.changes).into_keys();
        self.changed.extend(waiting.map(|number| (number, Err(STOPPING))));
    }

    /// Whether the LUN has refused I/O since the last call, or the filesystem has shut down: this node cannot coordinate the volume.
    pub fn is_newly_refused(&mut self) -> bool {
        std::mem::take(&mut self.newly_refused)
    }

    /// It has stopped, and nothing of it is under way.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.stops && self.slots.is_empty() && self.short.open() == 0 && self.long.open() == 0
    }

    /// A message of the owner on this shard.
    pub fn hear(&mut self, reactor: &mut Reactor, message: ToCoordinator) {
        if let Err(error) = self.take_message(reactor, message) {
            self.drop_peer(reactor, Some(&error));
        }
    }

    /// Messages for the owner on this shard.
    pub fn answers(&mut self) -> impl Iterator<Item = ToOwner> + use<'_> {
        self.peer.outbox()
    }

    /// A kernel operation has ended.
    pub fn on_event(&mut self, reactor: &mut Reactor, event: Event) {
        if event.token.owner != self.id {
            return;
        }
        match (event.token.slot, event.action) {
            (SHORT, _) => {
                for done in self.short.take(reactor) {
                    self.worked(reactor, done);
                }
            }
            (LONG, _) => {
                for done in self.long.take(reactor) {
                    self.worked(reactor, done);
                }
            }
            (slot, Action::Ready(interest)) if slot >= CONNECTIONS => {
                self.peer.on_event(slot, interest);
                if let Some((candidate, _)) = &mut self.candidate {
                    candidate.on_event(slot, interest);
                }
            }
            (slot, Action::File { result, buffer }) => {
                self.io_ended(reactor, slot as usize, result, buffer);
            }
            (_, Action::Ready(_)) => {}
        }
    }

    /// Makes all possible progress.
    pub fn advance(&mut self, reactor: &mut Reactor) {
        self.hear_candidate(reactor);
        self.feed_starved(reactor);
        self.begin_held(reactor);
        self.receive(reactor);
        self.allocate_ahead(reactor);
        if std::mem::take(&mut self.looks_again) {
            self.look_on(reactor);
        }
        self.commit(reactor);
        if let Err(error) = self.peer.flush(reactor) {
            self.drop_peer(reactor, Some(&error));
        }
        // What was not read because too much was unsent.
        self.receive(reactor);
        if let Err(error) = self.peer.flush(reactor) {
            self.drop_peer(reactor, Some(&error));
        }
    }

    /// It waits for memory, or for its turn: it needs another one soon, though no event comes.
    #[must_use]
    pub fn waits(&self) -> bool {
        let greets = self.candidate.as_ref().is_some_and(|(candidate, _)| candidate.has_more());
        !self.starved.is_empty() || self.peer.has_more() || greets
    }

    /// It waits for memory, and not for the LUN.
    #[must_use]
    pub fn waits_for_memory_alone(&self) -> bool {
        !self.starved.is_empty() && self.slots.is_empty()
    }

    fn receive(&mut self, reactor: &mut Reactor) {
        while self.slots.len() + self.starved.len() + self.held() < MOST_OPEN {
            if let Some(message) = self.inbox.pop_front() {
                if let Err(error) = self.take_message(reactor, message) {
                    return self.drop_peer(reactor, Some(&error));
                }
                continue;
            }
            match self.peer.receive(reactor, &self.pool) {
                Ok((messages, more)) if messages.is_empty() && !more => return,
                Ok((messages, _)) => self.inbox.extend(messages),
                Err(error) => return self.drop_peer(reactor, Some(&error)),
            }
        }
    }

    /// Begins again what had no memory.
    fn feed_starved(&mut self, reactor: &mut Reactor) {
        for working in std::mem::take(&mut self.starved) {
            self.execute(reactor, working);
        }
    }

    fn drop_peer(&mut self, reactor: &mut Reactor, reason: Option<&PeerError>) {
        if !self.peer.is_there() {
            return;
        }
        if let Some(reason) = reason {
            tracing::warn!(disk = %self.work.path().display(), %reason, "the connection of a disk's owner ended");
        }
        let had_greeted = self.peer.has_greeted();
        self.peer.close(reactor);
        self.inbox.clear();
        if !self.planted.has(Bug::KeepWaiting) {
            self.asked.clear(reactor.now());
        }
        self.ahead.clear();
        if had_greeted {
            self.step(reactor, coordinator::Event::OwnerLost);
        }
    }

    /// A connection whose first message is that of the owner takes the place of the present one.
    fn hear_candidate(&mut self, reactor: &mut Reactor) {
        let Some((candidate, most)) = &mut self.candidate else { return };
        let most = *most;
        // A greeting needs no memory for data, and must not wait for what a present owner that takes no answers keeps lent: it ends that one.
        let pool = self.pool.beside(MEMORY);
        let mut messages = match candidate.receive(reactor, &pool) {
            Ok((messages, _)) if messages.is_empty() => return,
            Ok((messages, _)) => messages,
            Err(reason) => {
                tracing::debug!(%reason, "a connection of a disk's owner ended before its greeting");
                return self.drop_candidate(reactor);
            }
        };
        let first = messages.remove(0);
        let is_owner = matches!(&first, ToCoordinator::Hello { epoch }
            if *epoch >= self.owner_epoch && *epoch <= most && messages.is_empty() && !self.stops);
        if !is_owner {
            let disk = self.work.path().display();
            tracing::warn!(%disk, message = ?first, "not the disk's owner: its connection ends");
            return self.drop_candidate(reactor);
        }
        let Some((candidate, _)) = self.candidate.take() else { return };
        self.drop_peer(reactor, None);
        self.connection += 1;
        self.peer = candidate;
        if let Err(error) = self.take_message(reactor, first) {
            self.drop_peer(reactor, Some(&error));
        }
    }

    fn drop_candidate(&mut self, reactor: &mut Reactor) {
        if let Some((mut candidate, _)) = self.candidate.take() {
            candidate.close(reactor);
        }
    }

    fn take_message(&mut self, reactor: &mut Reactor, message: ToCoordinator) -> Result<(), PeerError> {
        match message {
            ToCoordinator::Hello { epoch } => {
                if self.peer.has_greeted() {
                    return Err(PeerError::Order("a second greeting"));
                }
                if epoch < self.owner_epoch || self.stops {
                    return Err(PeerError::Former { epoch, now: self.owner_epoch });
                }
                self.owner_epoch = epoch;
                self.peer.greeted();
                self.step(reactor, coordinator::Event::OwnerFound);
            }
            _ if !self.peer.is_welcome() => return Err(PeerError::Order("a message before the welcome")),
            ToCoordinator::Redirected { request, gives_up, durable, data } => {
                self.check(request.range)?;
                self.check_number(request.id)?;
                if self.core.waiting() >= MOST_WAITING {
                    return Err(PeerError::Order("more requests wait than an owner can have"));
                }
                let expected = match request.kind.changes() {
                    true => super::router::neighbourhood(request.range, PIECE),
                    false => (request.range.0, request.range.0),
                };
                if gives_up != expected {
                    return Err(PeerError::Order("a request that gives up something else than it may move"));
                }
                let (what, waiting) =
                    (of(request.kind, request.range), Waiting { data, durable, by_file: false });
                self.asked.arrive(request.id, what, Some(waiting), reactor.now());
                self.step(reactor, coordinator::Event::Redirected { request, gives_up });
            }
            ToCoordinator::Block { id, kind, piece, by_file, durable, data } => {
                self.check((piece.start, piece.end))?;
                if !self.holds(kind, piece) {
                    let error = IoError::new(ErrorKind::Fence, Code::NotOwner, "block-redirected I/O");
                    self.peer.send(ToOwner::BlockAnswer { id, result: Err(error), data: None });
                    return Ok(());
                }
                self.check_number(id)?;
                let (what, waiting) =
                    (of(kind, (piece.start, piece.end)), Waiting { data, durable, by_file });
                self.asked.arrive(id, what, Some(waiting), reactor.now());
                self.step(reactor, coordinator::Event::Block { id, kind, piece });
            }
            ToCoordinator::Flush(id) => {
                self.check_number(id)?;
                self.asked.arrive(id, (Kind::Flush, 0), None, reactor.now());
                let connection = self.connection;
                let slot = self.slots.insert(Slot::Flush(Flush { id, connection }));
                self.lun.sync(reactor, slot as u32);
            }
            ToCoordinator::RecallDone(number) => {
                self.step(reactor, coordinator::Event::RecallDone(number));
            }
        }
        Ok(())
    }

    fn check_number(&self, id: u64) -> Result<(), PeerError> {
        if self.asked.has(id) { Err(PeerError::Order("two requests of one number")) } else { Ok(()) }
    }

    fn check(&self, (start, end): Range) -> Result<(), PeerError> {
        let fits = end <= self.size && start.is_multiple_of(UNIT) && end.is_multiple_of(UNIT);
        if fits {
            Ok(())
        } else {
            Err(PeerError::Order("I/O outside the disk, or not in whole blocks of 4096 bytes"))
        }
    }

    /// Whether the file has these blocks, durably, so that the owner can have got them.
    fn holds(&self, kind: Kind, piece: Piece) -> bool {
        self.layout.of((piece.start, piece.end)).all(|own| {
            let claimed = piece.within((own.start, own.end)).map(|part| part.lease);
            match (own.lease, claimed) {
                (Lease::ReadWrite(at), Some(Lease::ReadWrite(claimed))) => at == claimed,
                (Lease::ReadWrite(at) | Lease::ReadOnly(at), Some(Lease::ReadOnly(claimed))) => {
                    at == claimed && kind == Kind::Read
                }
                _ => false,
            }
        })
    }

    fn step(&mut self, reactor: &mut Reactor, event: coordinator::Event) {
        let mut effects = std::mem::take(&mut self.effects);
        self.core.step(event, &mut effects);
        for effect in effects.drain(..) {
            self.carry_out(reactor, effect);
        }
        self.effects = effects;
    }

    fn carry_out(&mut self, reactor: &mut Reactor, effect: Effect) {
        match effect {
            Effect::Execute { job, what } => self.begin(reactor, Working { job, what }),
            Effect::Welcome => {
                self.peer.send(ToOwner::Welcome { epoch: self.epoch, piece: PIECE });
                self.peer.welcomed();
                self.looks_from = 0;
                self.look_on(reactor);
            }
            Effect::Answer { id, result, grants } => {
                let data = self.answer(reactor, id, result);
                self.peer.send(ToOwner::Answer { id, result, grants, data });
            }
            Effect::BlockAnswer { id, result } => {
                let data = self.answer(reactor, id, result);
                self.peer.send(ToOwner::BlockAnswer { id, result, data });
            }
            Effect::Grant(grants) => self.peer.send(ToOwner::Grant(grants)),
            Effect::Recall { number, range } => {
                self.peer.send(ToOwner::Recall { number, range });
            }
            // One that had not begun was told already.
            Effect::Changed { result: Err(error), .. } if self.stops && error.kind == ErrorKind::Bug => {}
            Effect::Changed { change, result } => {
                self.changes.remove(&change);
                self.changed.push((change, result));
                // The owner gets what the file has now, whether or not it has been changed.
                self.looks_from = 0;
                self.looks_again = true;
            }
        }
    }

    /// A request is answered. Returns the data if it is a read.
    fn answer(&mut self, reactor: &Reactor, id: u64, result: Result<(), IoError>) -> Option<Buffer> {
        self.asked.answer(id, result.is_ok(), reactor.now());
        self.read.take_if(|(of, _)| *of == id).map(|(_, buffer)| buffer)
    }

    /// The owner gets what the file has, a window after the other.
    fn look_on(&mut self, reactor: &mut Reactor) {
        if self.looks_from < self.size && self.peer.is_welcome() {
            let range = (self.looks_from, (self.looks_from + WINDOW).min(self.size));
            self.looks_from = range.1;
            self.step(reactor, coordinator::Event::Prepare { range, allocates: false });
        }
    }

    fn allocate_ahead(&mut self, reactor: &mut Reactor) {
        if self.stops || !self.peer.is_welcome() {
            return;
        }
        if let Some(range) = self.ahead.take() {
            self.step(reactor, coordinator::Event::Prepare { range, allocates: true });
        }
    }
}

/// For the meter.
fn of(kind: Kind, (start, end): Range) -> (Kind, u64) {
    (kind, end - start)
}
