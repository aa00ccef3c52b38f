//! The coordinator's side of one disk, on a shard: drives [`Coordinator`] with the disk's file, the LUN and the owner's messages.
//!
//! Reads and writes of the file and the LUN go through the shard's reactor. What blocks (syncs, looks at extents, zeroes, freeing) is for
//! two threads: one for what is short, one for what is long.

pub mod ahead;
mod file_work;
mod opened;
mod peer;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use slab::Slab;
use weir_block::{
    Action, Buffer, BufferPool, Code, ErrorKind, Event, Group, IoError, OwnerId, Reactor, Region, SharedFile,
    Stream, Token, WriteSource,
};

use super::coordinator::{self, Coordinator, Effect, Job};
use super::filesystem::Mounted;
use super::leases::{Lease, Leases, Piece};
use super::redirect::{Data, ToCoordinator, ToOwner};
use super::router::{Kind, Range};
use crate::offload::Offload;
use crate::planted::Planted;
use ahead::Ahead;
use file_work::{Layout, WorkFile};
pub use opened::{OpenedDisk, open_lun};
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

/// Memory for the data of redirected I/O, in bytes (P10).
const MEMORY: usize = 64 << 20;

/// Bytes of zeroes to write from: 1,024 pieces of a write (`IOV_MAX`) are as much as any request.
const ZEROES: usize = 4 << 20;

/// Most requests of the owner that are under way at once.
const MOST_OPEN: usize = 512;

/// Whole blocks of every filesystem: less goes through the page cache, past which the owner writes.
const UNIT: u64 = 4096;

/// Of a change that is not made any more.
const STOPPING: IoError =
    IoError::new(ErrorKind::Retry, Code::ShuttingDown, "a volume whose coordination ends");

/// Of work that has ended in a panic, which is in the log.
const PANICKED: IoError = IoError::new(ErrorKind::Bug, Code::Io, "work on a disk's file");

/// A change of a disk's layout that somebody else wants.
pub type Change = Box<dyn FnOnce(&File) -> io::Result<()> + Send>;

/// A job that has begun.
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
}

/// A request's data, until it begins.
struct Waiting {
    data: Data,
    durable: bool,
    by_file: bool,
}

/// One disk of a volume that this node coordinates.
pub struct ServedDisk {
    core: Coordinator,
    /// The coordinator's.
    epoch: u64,
    /// The least epoch of an owner (P2).
    owner_epoch: u64,
    id: OwnerId,
    /// Kept while anything may be under way: the unmount waits for it.
    _mounted: Arc<Mounted>,
    work: Arc<WorkFile>,
    file: SharedFile,
    lun: SharedFile,
    size: u64,
    slots: Slab<Slot>,
    /// Requests that have not begun, by their id; block I/O begins at once.
    waiting: BTreeMap<u64, Waiting>,
    /// Data of reads, until they are answered.
    read: BTreeMap<u64, Buffer>,
    /// What is durable of the file's layout, as far as it is known.
    layout: Leases,
    /// Writes that are to be made durable together.
    commits: Group<usize>,
    short: Offload<Done>,
    long: Offload<Done>,
    ahead: Ahead,
    /// Where the next look at the file begins.
    looks_from: u64,
    peer: Peer,
    /// A connection that has not greeted yet, and the highest epoch that it may have.
    candidate: Option<(Peer, u64)>,
    /// Counts the sockets.
    sockets: u32,
    /// Counts the owner's connections.
    connection: u64,
    /// Jobs for which there was no memory.
    starved: VecDeque<Working>,
    changes: BTreeMap<u64, Change>,
    changed: Vec<(u64, Result<(), IoError>)>,
    pool: BufferPool,
    zeroes: Rc<Region>,
    stops: bool,
}

impl ServedDisk {
    /// Puts a disk on the shard of `reactor`. `owner`: the epoch of its owner, if the registry names one, or a former one that may not be
    /// over.
    ///
    /// # Errors
    /// No memory.
    pub fn new(
        reactor: &mut Reactor,
        opened: OpenedDisk,
        epoch: u64,
        owner: Option<u64>,
    ) -> io::Result<ServedDisk> {
        let OpenedDisk { mounted, work, file, lun, size } = opened;
        let id = reactor.new_owner();
        Ok(ServedDisk {
            core: Coordinator::new(owner.is_some(), PIECE, Planted::default()),
            epoch,
            owner_epoch: owner.unwrap_or(0),
            id,
            _mounted: mounted,
            work,
            file: SharedFile::new(file),
            lun: SharedFile::new(lun),
            size,
            slots: Slab::new(),
            waiting: BTreeMap::new(),
            read: BTreeMap::new(),
            layout: Leases::default(),
            commits: Group::default(),
            short: Offload::new("weir-disk", Token { owner: id, slot: SHORT }),
            long: Offload::new("weir-disk-long", Token { owner: id, slot: LONG }),
            ahead: Ahead::default(),
            looks_from: 0,
            peer: Peer::None,
            candidate: None,
            sockets: 0,
            connection: 0,
            starved: VecDeque::new(),
            changes: BTreeMap::new(),
            changed: Vec::new(),
            pool: BufferPool::new(MEMORY),
            zeroes: Rc::new(Region::new(ZEROES)?),
            stops: false,
        })
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

    /// The own I/O to the LUN of the owner of this epoch, and of those before, has certainly ended, and nobody owns the disk.
    pub fn owner_over(&mut self, reactor: &mut Reactor, epoch: u64) {
        if epoch < self.owner_epoch {
            return;
        }
        self.drop_peer(reactor, None);
        self.step(reactor, coordinator::Event::OwnerOver);
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

    /// Wants a change of the layout: a clone, say. Its result is in [`ServedDisk::changed`] under its number. It begins when the owner has
    /// given the range up.
    pub fn change(&mut self, reactor: &mut Reactor, number: u64, range: Range, change: Change) {
        if self.stops {
            return self.changed.push((number, Err(STOPPING)));
        }
        self.changes.insert(number, change);
        self.step(reactor, coordinator::Event::Wanted { change: number, range });
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
        // Those that have begun are not among them.
        let waiting = std::mem::take(&mut self.changes).into_keys();
        self.changed.extend(waiting.map(|number| (number, Err(STOPPING))));
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
        self.receive(reactor);
        self.allocate_ahead(reactor);
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
        !self.starved.is_empty() || self.peer.has_more()
    }

    fn receive(&mut self, reactor: &mut Reactor) {
        while self.slots.len() + self.starved.len() < MOST_OPEN {
            let (messages, more) = match self.peer.receive(reactor, &self.pool) {
                Ok(received) => received,
                Err(error) => return self.drop_peer(reactor, Some(&error)),
            };
            for message in messages {
                if let Err(error) = self.take_message(reactor, message) {
                    return self.drop_peer(reactor, Some(&error));
                }
            }
            if !more {
                return;
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
            tracing::warn!(disk = %self.work.path.display(), %reason, "the connection of a disk's owner ended");
        }
        let had_greeted = self.peer.has_greeted();
        self.peer.close(reactor);
        self.waiting.clear();
        self.ahead.clear();
        if had_greeted {
            self.step(reactor, coordinator::Event::OwnerLost);
        }
    }

    /// A connection whose first message is that of the owner takes the place of the present one.
    fn hear_candidate(&mut self, reactor: &mut Reactor) {
        let Some((candidate, most)) = &mut self.candidate else { return };
        let most = *most;
        let mut messages = match candidate.receive(reactor, &self.pool) {
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
            let disk = self.work.path.display();
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
                if self.waiting.contains_key(&request.id) {
                    return Err(PeerError::Order("two requests of one number"));
                }
                let expected = match request.kind.changes() {
                    true => super::router::neighbourhood(request.range, PIECE),
                    false => (request.range.0, request.range.0),
                };
                if gives_up != expected {
                    return Err(PeerError::Order("a request that gives up something else than it may move"));
                }
                self.waiting.insert(request.id, Waiting { data, durable, by_file: false });
                self.step(reactor, coordinator::Event::Redirected { request, gives_up });
            }
            ToCoordinator::Block { id, kind, piece, by_file, durable, data } => {
                self.check((piece.start, piece.end))?;
                if !self.holds(kind, piece) {
                    let error = IoError::new(ErrorKind::Fence, Code::NotOwner, "block-redirected I/O");
                    self.peer.send(ToOwner::BlockAnswer { id, result: Err(error), data: None });
                    return Ok(());
                }
                self.waiting.insert(id, Waiting { data, durable, by_file });
                self.step(reactor, coordinator::Event::Block { id, kind, piece });
            }
            ToCoordinator::Flush(id) => {
                let connection = self.connection;
                let slot = self.slots.insert(Slot::Flush(Flush { id, connection }));
                reactor.sync(&self.lun, self.token(slot));
            }
            ToCoordinator::RecallDone(number) => {
                self.step(reactor, coordinator::Event::RecallDone(number));
            }
        }
        Ok(())
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
        let mut effects = Vec::new();
        self.core.step(event, &mut effects);
        for effect in effects {
            self.carry_out(reactor, effect);
        }
    }

    fn carry_out(&mut self, reactor: &mut Reactor, effect: Effect) {
        match effect {
            Effect::Execute { job, what } => self.execute(reactor, Working { job, what }),
            Effect::Welcome => {
                self.peer.send(ToOwner::Welcome { epoch: self.epoch, piece: PIECE });
                self.peer.welcomed();
                self.looks_from = 0;
                self.look_on(reactor);
            }
            Effect::Answer { id, result, grants } => {
                let data = self.read.remove(&id);
                self.peer.send(ToOwner::Answer { id, result, grants, data });
            }
            Effect::BlockAnswer { id, result } => {
                self.waiting.remove(&id);
                let data = self.read.remove(&id);
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
            }
        }
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

    fn token(&self, slot: usize) -> Token {
        Token { owner: self.id, slot: slot as u32 }
    }

    fn execute(&mut self, reactor: &mut Reactor, working: Working) {
        let Working { job, what } = working;
        let slot = self.slots.insert(Slot::Job(working));
        let begun = match what {
            Job::Request { request, gives_up } => match request.kind {
                Kind::Read => {
                    self.waiting.remove(&request.id);
                    self.read_file(reactor, slot, request.range)
                }
                Kind::Write => self.write_file(reactor, slot, (request.id, request.range), gives_up),
                Kind::Punch => {
                    self.waiting.remove(&request.id);
                    self.layout.clear(gives_up);
                    let range = (request.range.0, request.range.1);
                    let around = (gives_up.0, gives_up.1.min(self.size));
                    self.on_thread(reactor, true, slot, move |file| file.punch(range, around))
                }
                Kind::Flush => Err(IoError::new(ErrorKind::Bug, Code::Io, "a flush through the filesystem")),
            },
            Job::Block { id, kind, piece } => self.block(reactor, slot, (id, kind), piece),
            Job::Prepare { range, allocates } => {
                let range = (range.0, range.1.min(self.size));
                match allocates {
                    true => {
                        let file = Arc::clone(&self.work);
                        let work = move || Done::Allocated(slot, file.allocate(range));
                        let asked = self.long.ask(reactor, work, Done::Allocated(slot, Err(PANICKED)));
                        asked.map_err(|errno| {
                            IoError::from_errno(errno, "starting a thread for a disk's file")
                        })
                    }
                    false => self.on_thread(reactor, false, slot, move |file| file.look(range)),
                }
            }
            Job::Change { change, range } => self.begin_change(reactor, slot, change, range),
        };
        if let Err(error) = begun {
            self.slots.remove(slot);
            match error.code {
                Code::NoMemory if !self.stops => self.starved.push_back(Working { job, what }),
                _ => self.executed(reactor, job, Err(error), Vec::new()),
            }
        }
    }

    fn begin_change(
        &mut self,
        reactor: &mut Reactor,
        slot: usize,
        change: u64,
        range: Range,
    ) -> Result<(), IoError> {
        self.layout.clear(range);
        let Some(work) = self.changes.remove(&change) else {
            return Err(IoError::new(ErrorKind::Bug, Code::Io, "a change that nobody wants"));
        };
        let range = (range.0, range.1.min(self.size));
        self.on_thread(reactor, true, slot, move |file| {
            let changed = work(&file.file).and_then(|()| file.file.sync_data());
            let changed = changed.map_err(|error| {
                IoError::from_errno(error.raw_os_error().unwrap_or(libc::EIO), "changing a disk's file")
            });
            changed.and_then(|()| file.look(range))
        })
    }

    fn on_thread(
        &mut self,
        reactor: &mut Reactor,
        is_long: bool,
        slot: usize,
        work: impl FnOnce(&WorkFile) -> Layout + Send + 'static,
    ) -> Result<(), IoError> {
        let file = Arc::clone(&self.work);
        let offload = if is_long { &mut self.long } else { &mut self.short };
        let work = move || Done::Looked(slot, work(&file));
        let asked = offload.ask(reactor, work, Done::Looked(slot, Err(PANICKED)));
        asked.map_err(|errno| IoError::from_errno(errno, "starting a thread for a disk's file"))
    }

    fn buffer(&self, length: u64) -> Result<Buffer, IoError> {
        let no_memory = IoError::new(ErrorKind::Retry, Code::NoMemory, "reading for another node");
        self.pool.take(length as usize).ok_or(no_memory)
    }

    fn read_file(&mut self, reactor: &mut Reactor, slot: usize, range: Range) -> Result<(), IoError> {
        let buffer = self.buffer(range.1 - range.0)?;
        reactor.read(&self.file, range.0, buffer, self.token(slot));
        Ok(())
    }

    fn block(
        &mut self,
        reactor: &mut Reactor,
        slot: usize,
        (id, kind): (u64, Kind),
        piece: Piece,
    ) -> Result<(), IoError> {
        let length = piece.end - piece.start;
        let buffer = if kind == Kind::Read { Some(self.buffer(length)?) } else { None };
        let (Some(Waiting { data, durable, by_file }), Lease::ReadWrite(at) | Lease::ReadOnly(at)) =
            (self.waiting.remove(&id), piece.lease)
        else {
            return Err(IoError::new(ErrorKind::Bug, Code::Io, "block I/O without blocks"));
        };
        let (target, at) = if by_file { (&self.file, piece.start) } else { (&self.lun, at) };
        let token = self.token(slot);
        if let Some(buffer) = buffer {
            reactor.read(target, at, buffer, token);
            return Ok(());
        }
        let source = self.source(data, length)?;
        match durable {
            true => reactor.write_durable(target, at, source, token),
            false => reactor.write(target, at, source, token),
        }
        Ok(())
    }

    fn write_file(
        &mut self,
        reactor: &mut Reactor,
        slot: usize,
        (id, range): (u64, Range),
        gives_up: Range,
    ) -> Result<(), IoError> {
        let Some(Waiting { data, durable, .. }) = self.waiting.remove(&id) else {
            return Err(IoError::new(ErrorKind::Bug, Code::Io, "a redirected write without data"));
        };
        let is_in_place = self.is_in_place(range);
        if !is_in_place {
            if !self.has_space(range) {
                self.ahead.found_none(range, self.size);
            }
            self.layout.clear(gives_up);
        }
        let source = self.source(data, range.1 - range.0)?;
        // What is not in place is made durable with its blocks.
        match durable && is_in_place {
            true => reactor.write_durable(&self.file, range.0, source, self.token(slot)),
            false => reactor.write(&self.file, range.0, source, self.token(slot)),
        }
        Ok(())
    }

    fn source(&self, data: Data, length: u64) -> Result<WriteSource, IoError> {
        match data {
            Data::Bytes(buffer) => Ok(WriteSource::Shared(buffer, 0, length as usize)),
            Data::Zeroes => {
                let pieces = (0..length).step_by(ZEROES).map(|at| (0, ZEROES.min((length - at) as usize)));
                Ok(WriteSource::Gather(Rc::clone(&self.zeroes), pieces.collect()))
            }
            Data::None => Err(IoError::new(ErrorKind::Bug, Code::Io, "a write without data")),
        }
    }

    /// A write there moves nothing: the file has the blocks, durably, and alone.
    fn is_in_place(&self, range: Range) -> bool {
        self.layout.of(range).all(|piece| matches!(piece.lease, Lease::ReadWrite(_)))
    }

    /// The file has blocks there, if perhaps shared ones.
    fn has_space(&self, range: Range) -> bool {
        self.layout.of(range).all(|piece| matches!(piece.lease, Lease::ReadWrite(_) | Lease::ReadOnly(_)))
    }

    fn io_ended(
        &mut self,
        reactor: &mut Reactor,
        slot: usize,
        result: Result<u64, i32>,
        buffer: Option<Buffer>,
    ) {
        let done = result.map_err(|errno| IoError::from_errno(errno, "I/O of the volume's coordinator"));
        match self.slots.get(slot) {
            Some(Slot::Flush(_)) => {
                if let Slot::Flush(Flush { id, connection }) = self.slots.remove(slot)
                    && connection == self.connection
                {
                    self.peer.send(ToOwner::Flushed { id, result: done.map(drop) });
                }
            }
            Some(Slot::Job(Working { what, .. })) => match (*what, done) {
                (Job::Request { request, .. }, Ok(_)) if request.kind == Kind::Write => {
                    match self.is_in_place(request.range) {
                        true => self.finish(reactor, slot, Ok(()), Vec::new()),
                        false => self.commits.arrive(slot),
                    }
                }
                (Job::Block { piece, .. }, Ok(count))
                    if buffer.is_some() && count < piece.end - piece.start =>
                {
                    let error = IoError::from_errno(libc::EIO, "reading behind the end of a LUN");
                    self.finish(reactor, slot, Err(error), Vec::new());
                }
                (what, Ok(count)) => {
                    if let Some(mut buffer) = buffer {
                        buffer.bytes_mut()[count as usize..].fill(0);
                        let id = match what {
                            Job::Request { request, .. } => request.id,
                            Job::Block { id, .. } => id,
                            Job::Change { .. } | Job::Prepare { .. } => return,
                        };
                        self.read.insert(id, buffer);
                        self.finish(reactor, slot, Ok(()), Vec::new());
                        // Nobody waits for it if the connection is gone.
                        self.read.remove(&id);
                    } else {
                        self.finish(reactor, slot, Ok(()), Vec::new());
                    }
                }
                (_, Err(error)) => self.finish(reactor, slot, Err(error), Vec::new()),
            },
            None => {}
        }
    }

    /// Commits the writes that have arrived since the last commit began.
    fn commit(&mut self, reactor: &mut Reactor) {
        if !self.commits.start() {
            return;
        }
        let range = |slot: &usize| match self.slots.get(*slot) {
            Some(Slot::Job(Working { what, .. })) => (what.range().0, what.range().1.min(self.size)),
            Some(Slot::Flush(_)) | None => (0, 0),
        };
        let ranges: Vec<Range> = self.commits.running().map(range).collect();
        let (file, otherwise) = (Arc::clone(&self.work), vec![Err(PANICKED); ranges.len()]);
        let work = move || Done::Committed(file.commit(&ranges));
        if let Err(errno) = self.short.ask(reactor, work, Done::Committed(otherwise)) {
            let error = IoError::from_errno(errno, "starting a thread for a disk's file");
            self.committed(reactor, std::iter::repeat(Err(error)));
        }
    }

    fn committed(&mut self, reactor: &mut Reactor, layouts: impl IntoIterator<Item = Layout>) {
        let slots: Vec<usize> = self.commits.finish().collect();
        for (slot, layout) in slots.into_iter().zip(layouts) {
            self.finish_with(reactor, slot, layout);
        }
    }

    fn worked(&mut self, reactor: &mut Reactor, done: Done) {
        match done {
            Done::Committed(layouts) => self.committed(reactor, layouts),
            Done::Looked(slot, layout) => {
                let is_look = matches!(
                    self.slots.get(slot),
                    Some(Slot::Job(Working { what: Job::Prepare { allocates: false, .. }, .. }))
                );
                self.finish_with(reactor, slot, layout);
                if is_look {
                    self.look_on(reactor);
                }
            }
            Done::Allocated(slot, allocated) => {
                self.ahead.done(matches!(allocated, Ok(Some(_))));
                self.finish_with(reactor, slot, allocated.map(Option::unwrap_or_default));
            }
        }
    }

    fn finish_with(&mut self, reactor: &mut Reactor, slot: usize, layout: Layout) {
        match layout {
            Ok(layout) => self.finish(reactor, slot, Ok(()), layout),
            Err(error) => self.finish(reactor, slot, Err(error), Vec::new()),
        }
    }

    /// A job has ended. `layout`: what the filesystem has in its range, if that may be new.
    fn finish(
        &mut self,
        reactor: &mut Reactor,
        slot: usize,
        result: Result<(), IoError>,
        layout: Vec<Piece>,
    ) {
        if !self.slots.contains(slot) {
            return;
        }
        let Slot::Job(Working { job, what }) = self.slots.remove(slot) else { return };
        self.executed(reactor, job, result, if layout.is_empty() { self.known(what) } else { layout });
    }

    /// What is known of a job's range.
    fn known(&self, what: Job) -> Vec<Piece> {
        match what {
            Job::Request { .. } => {
                self.layout.of(what.range()).filter(|piece| piece.lease != Lease::Nothing).collect()
            }
            Job::Block { .. } | Job::Change { .. } | Job::Prepare { .. } => Vec::new(),
        }
    }

    fn executed(&mut self, reactor: &mut Reactor, job: u64, result: Result<(), IoError>, layout: Vec<Piece>) {
        for piece in &layout {
            self.layout.set(*piece);
        }
        self.step(reactor, coordinator::Event::Executed { job, result, layout });
    }
}
