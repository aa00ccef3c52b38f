//! The accelerator as a layer: the protocol core of [`crate::owner`] driven with a real log, real channels and a real backing.

use std::io;
use std::os::fd::OwnedFd;

use slab::Slab;
use weir_block::{
    Action, Buffer, Code, Completion, Destage, ErrorKind, Event, IoError, Layer, LayerInfo, LayerMeter,
    Metered, Nanos, Outcome, OwnerId, Payload, Reactor, Request, RequestKind, Tag,
};

use crate::config::{AccelConfig, Configuration, Inheritance};
use crate::destage::{Destager, Progress};
use crate::index::Index;
use crate::log::{LARGEST_RECORD, Log, RecordKind};
use crate::owner::{Effect, Event as OwnerEvent, Owner, Watermarks};
use crate::pacing::Pacer;
use crate::peers::{Identity, Peers};
use crate::reads::{self, HeldRead, Hit, Overlay};
use crate::writes::Writes;

/// Most bytes of zeroes in one record; longer ranges become several.
const LARGEST_ZERO: u64 = 1 << 30;

/// What the accelerator asks of, or tells, the node that it runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccelNotice {
    /// Connect to this node, or to any node but these; answer with `peer_connected` or `peer_unavailable`.
    WantPeer {
        /// `None`: choose.
        node: Option<String>,
        /// Not these.
        exclude: Vec<String>,
    },
    /// Have this configuration committed; answer with `configured` or `not_configured`.
    WantConfiguration {
        /// The epoch that the change starts from.
        epoch: u64,
        /// The new set.
        replicas: Vec<String>,
        /// The new effective mode.
        write_back: bool,
    },
    /// Somebody has seen this epoch, and it is not ours: ask the registry (P2).
    Fenced(u64),
    /// Tell the operator.
    Tell(&'static str, String),
}

/// The accelerator's state, for people.
#[derive(Clone, Debug)]
pub struct AccelStatus {
    /// The committed configuration.
    pub configuration: Configuration,
    /// The watermarks.
    pub marks: Watermarks,
    /// Why something waits; empty when nothing is unusual.
    pub reason: String,
    /// Bytes acknowledged and not destaged.
    pub dirty_bytes: u64,
    /// Bytes of the arena in use.
    pub log_used: u64,
    /// Bytes of the arena.
    pub log_bytes: u64,
    /// Destage throughput lately, bytes per second.
    pub destage_rate: u64,
}

/// What a request to the layer below is for.
enum Below {
    /// Goes back to the guest as it is. `changes` for what leaves data in the backing's cache.
    Pass {
        tag: Tag,
        changes: bool,
    },
    Read {
        tag: Tag,
        overlay: Option<(Overlay, u64)>,
    },
    Flush {
        tag: Tag,
    },
    Extents {
        tag: Tag,
    },
    /// Measured below the accelerator, on purpose.
    Direct {
        tag: Tag,
    },
    Destage,
}

/// One disk's accelerator on its owner.
pub struct Accel<L: Destage> {
    config: AccelConfig,
    owner: Owner,
    identity: Identity,
    log: Log,
    index: Index,
    lower: Metered<L>,
    below: Slab<Below>,
    peers: Peers,
    peers_id: OwnerId,
    writes: Writes,
    held: Vec<HeldRead>,
    /// Writes that went past the log and have not come back.
    bypassing: usize,
    /// The backing may hold acknowledged writes in a volatile cache.
    unflushed: bool,
    destager: Destager,
    pacer: Pacer,
    dirty_bytes: u64,
    finished: Vec<Completion>,
    completions: Vec<Completion>,
    events: Vec<OwnerEvent>,
    effects: Vec<Effect>,
    notices: Vec<AccelNotice>,
    direct: Vec<Completion>,
    /// Another turn of the loop has work without a new event.
    again: bool,
    closing: bool,
    gone: bool,
}

impl<L: Destage> Accel<L> {
    /// An accelerator in front of `lower`. Events of its channels go to `peers_id`.
    ///
    /// # Errors
    /// No memory for the log's arena.
    pub fn new(
        config: AccelConfig,
        configuration: Configuration,
        inheritance: Inheritance,
        former_stopped: bool,
        lower: Metered<L>,
        peers_id: OwnerId,
    ) -> io::Result<Accel<L>> {
        let (log, inherited) = match inheritance {
            Inheritance::Nothing => (Log::new(config.log_bytes.max(AccelConfig::SMALLEST_LOG), 1)?, (0, 0)),
            Inheritance::Replica { log, lineage } => {
                let last = log.last();
                (log, (lineage, last))
            }
        };
        let mut index = Index::new();
        let mut dirty_bytes = 0;
        for (sequence, record) in log.range(0, log.last()) {
            let place = (record.kind == RecordKind::Write).then_some(record.place);
            index.insert(record.offset, record.end(), sequence, place);
            dirty_bytes += u64::from(record.length);
        }
        let identity = Identity { epoch: configuration.epoch, lineage: configuration.epoch, inherited };
        let owner = Owner::new(configuration, log.freed(), log.last(), former_stopped, config.peer_deadline);
        let mut accel = Accel {
            destager: Destager::new(config.destage_delay, config.destage_depth),
            config,
            owner,
            identity,
            log,
            index,
            lower,
            below: Slab::new(),
            peers: Peers::new(peers_id),
            peers_id,
            writes: Writes::default(),
            held: Vec::new(),
            bypassing: 0,
            unflushed: true,
            pacer: Pacer::new(),
            dirty_bytes,
            finished: Vec::new(),
            completions: Vec::new(),
            events: Vec::new(),
            effects: Vec::new(),
            notices: Vec::new(),
            direct: Vec::new(),
            again: true,
            closing: false,
            gone: false,
        };
        accel.events.push(OwnerEvent::Tick);
        Ok(accel)
    }

    /// A connection to `node` stands.
    pub fn peer_connected(&mut self, reactor: &mut Reactor, node: String, fd: OwnedFd) {
        if self.gone || self.owner.is_fenced() {
            return;
        }
        if let Err(error) = self.peers.connect(reactor, node, fd, self.identity, &self.log) {
            tracing::warn!(%error, "connection to a peer cannot be used");
            self.events.push(OwnerEvent::PeerUnavailable);
        }
        self.again = true;
    }

    /// No connection can be had.
    pub fn peer_unavailable(&mut self) {
        self.push_event(OwnerEvent::PeerUnavailable);
    }

    /// The registry committed a configuration.
    pub fn configured(&mut self, configuration: Configuration) {
        self.push_event(OwnerEvent::Configured(configuration));
    }

    /// The registry did not commit what was asked for.
    pub fn not_configured(&mut self) {
        self.push_event(OwnerEvent::NotConfigured);
    }

    /// The former owner has certainly stopped (P4).
    pub fn former_stopped(&mut self) {
        self.push_event(OwnerEvent::FormerStopped);
    }

    /// The requested policy changed.
    pub fn request_policy(&mut self, wanted_replicas: Option<usize>) {
        self.push_event(OwnerEvent::PolicyRequested(wanted_replicas));
    }

    fn push_event(&mut self, event: OwnerEvent) {
        self.events.push(event);
        self.again = true;
    }

    /// Destages everything; done when [`Accel::is_drained`].
    pub fn close(&mut self) {
        self.closing = true;
        self.again = true;
    }

    /// Nothing is dirty, nothing waits, nothing is under way.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        let marks = self.owner.marks();
        marks.destaged == marks.appended && self.is_quiet() && self.writes.len() == 0
    }

    /// Another node owns the disk: forget the log, fail what waits. What is under way towards the backing still has to
    /// come back ([`Accel::is_quiet`]).
    pub fn let_go(&mut self, reactor: &mut Reactor) {
        self.gone = true;
        self.again = true;
        self.peers.drop_all(reactor);
        self.destager.stop();
        let error = not_owner();
        self.writes.fail(error, &mut self.finished);
        self.finished
            .extend(self.held.drain(..).map(|held| Completion { tag: held.tag, result: Err(error) }));
    }

    /// Whether no request to the backing is under way.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.below.is_empty()
    }

    /// Takes what the accelerator has to say to its node.
    pub fn take_notices(&mut self, out: &mut Vec<AccelNotice>) {
        out.append(&mut self.notices);
    }

    /// Whether the log holds nothing, so that the backing alone is the disk.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.index.is_empty() && self.log.freed() == self.log.last()
    }

    /// A request past the accelerator, for measuring the backing. Only while [`Accel::is_clean`] and nobody writes
    /// through the accelerator; the answer comes from [`Accel::take_direct`].
    pub fn submit_direct(&mut self, reactor: &mut Reactor, mut request: Request<'_>) {
        request.set_tag(self.below_tag(Below::Direct { tag: request.tag() }));
        self.lower.submit(reactor, request);
        self.again = true;
    }

    /// Answers to [`Accel::submit_direct`].
    pub fn take_direct(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.direct);
    }

    /// What it was told.
    #[must_use]
    pub fn config(&self) -> &AccelConfig {
        &self.config
    }

    /// The owner's number for events of this accelerator's channels.
    #[must_use]
    pub fn peers_id(&self) -> OwnerId {
        self.peers_id
    }

    /// The backing with its meter.
    #[must_use]
    pub fn lower(&self) -> &Metered<L> {
        &self.lower
    }

    /// The backing with its meter.
    pub fn lower_mut(&mut self) -> &mut Metered<L> {
        &mut self.lower
    }

    /// The state, for people.
    #[must_use]
    pub fn status(&self) -> AccelStatus {
        let reason = match self.destager.error() {
            Some(error) => format!("the backing refuses destage: {error}"),
            None if !self.gone && !self.config.holds_lease(Nanos::now()) => {
                "the registry has not confirmed this node lately: waiting for its lease".into()
            }
            None => self.owner.reason().into(),
        };
        AccelStatus {
            configuration: self.owner.configuration().clone(),
            marks: self.owner.marks(),
            reason,
            dirty_bytes: self.dirty_bytes,
            log_used: self.log.used(),
            log_bytes: self.log.capacity(),
            destage_rate: self.pacer.destage_rate(),
        }
    }

    fn read(&mut self, reactor: &mut Reactor, tag: Tag, offset: u64, mut buffer: Buffer) {
        let overlay = match reads::look_up(&self.index, &self.log, offset, &mut buffer) {
            Hit::Full(sequence) => return self.held.push(HeldRead { sequence, tag, buffer }),
            Hit::Miss => None,
            Hit::Partial(newest) => {
                let Some(side) = reactor.buffers().take(buffer.len()) else {
                    let error =
                        IoError::new(ErrorKind::Retry, Code::NoMemory, "reading through the write log");
                    return self.finished.push(Completion { tag, result: Err(error) });
                };
                Some((reads::overlay(&self.index, &self.log, offset, side), newest))
            }
        };
        let tag = self.below_tag(Below::Read { tag, overlay });
        self.lower.submit(reactor, Request::Read { tag, offset, buffer });
    }

    fn write(&mut self, tag: Tag, offset: u64, payload: &Payload<'_>) {
        let mut at = offset;
        let mut last = 0;
        for part in payload.bytes().chunks(LARGEST_RECORD) {
            last = self.append(RecordKind::Write, at, part.len() as u32, part);
            at += part.len() as u64;
        }
        self.writes.push(last, tag);
    }

    fn zero(&mut self, tag: Tag, mut offset: u64, mut length: u64, kind: RecordKind) {
        let mut last = 0;
        while length > 0 {
            let part = length.min(LARGEST_ZERO);
            last = self.append(kind, offset, part as u32, &[]);
            offset += part;
            length -= part;
        }
        self.writes.push(last, tag);
    }

    fn append(&mut self, kind: RecordKind, offset: u64, length: u32, data: &[u8]) -> u64 {
        let sequence =
            self.log.append(kind, offset, length, data).expect("has_room was asked before the submit");
        let place = self.log.get(sequence).filter(|_| kind == RecordKind::Write).map(|record| record.place);
        self.index.insert(offset, offset + u64::from(length), sequence, place);
        self.dirty_bytes += u64::from(length);
        self.pacer.admitted(data.len() as u64);
        sequence
    }

    fn pass(&mut self, reactor: &mut Reactor, mut request: Request<'_>) {
        self.bypassing += 1;
        request.set_tag(self.below_tag(Below::Pass { tag: request.tag(), changes: true }));
        self.lower.submit(reactor, request);
    }

    fn flush(&mut self, reactor: &mut Reactor, tag: Tag) {
        if self.owner.configuration().write_back && !self.unflushed {
            // Everything acknowledged is in the log of every member of the set: that is what the policy names (P8).
            return self.finished.push(Completion { tag, result: Ok(Outcome::Done) });
        }
        let tag = self.below_tag(Below::Flush { tag });
        self.lower.submit(reactor, Request::Flush { tag });
    }

    fn below_tag(&mut self, below: Below) -> Tag {
        Tag(self.below.insert(below) as u64)
    }

    /// Answers of the backing.
    fn collect(&mut self, reactor: &mut Reactor, now: Nanos) {
        let mut completions = std::mem::take(&mut self.completions);
        self.lower.advance(reactor, &mut completions);
        for Completion { tag, result } in completions.drain(..) {
            match self.below.remove(tag.0 as usize) {
                Below::Pass { tag, changes } => {
                    self.bypassing -= usize::from(changes);
                    self.unflushed |= changes;
                    self.finished.push(Completion { tag, result });
                }
                Below::Read { tag, overlay } => self.read_back(tag, overlay, result),
                Below::Flush { tag } => {
                    if result.is_ok() && self.bypassing == 0 {
                        self.unflushed = false;
                    }
                    self.finished.push(Completion { tag, result });
                }
                Below::Extents { tag } => {
                    let result = result.map(|outcome| match outcome {
                        Outcome::Extents(extents) => {
                            Outcome::Extents(reads::overlay_extents(&self.index, &extents))
                        }
                        other => other,
                    });
                    self.finished.push(Completion { tag, result });
                }
                Below::Direct { tag } => self.direct.push(Completion { tag, result }),
                Below::Destage => {
                    let progress = self.destager.completed(now, result.map(drop));
                    self.destaged(progress);
                }
            }
        }
        self.completions = completions;
    }

    fn read_back(&mut self, tag: Tag, overlay: Option<(Overlay, u64)>, result: Result<Outcome, IoError>) {
        match (overlay, result) {
            (Some((overlay, sequence)), Ok(Outcome::Read(mut buffer))) if !self.gone => {
                overlay.apply(&mut buffer);
                self.held.push(HeldRead { sequence, tag, buffer });
            }
            (_, result) => {
                let result = if self.gone { Err(not_owner()) } else { result };
                self.finished.push(Completion { tag, result });
            }
        }
    }

    fn destaged(&mut self, progress: Progress) {
        match progress {
            Progress::None => {}
            Progress::Done { to, bytes, time, recovered } => {
                self.pacer.destaged(bytes, time);
                self.events.push(OwnerEvent::Destaged(to));
                if recovered {
                    let text = "the backing takes writes again; destage goes on".into();
                    self.notices.push(AccelNotice::Tell("backing-recovered", text));
                }
            }
            Progress::Failed { error, first } => {
                self.pacer.stuck();
                if first {
                    let text = format!(
                        "destage stopped: {error}; acknowledged writes stay in the log, retrying every second"
                    );
                    self.notices.push(AccelNotice::Tell("backing-error", text));
                }
            }
        }
    }

    /// Feeds everything that happened to the protocol core and carries out what it decides.
    fn decide(&mut self, reactor: &mut Reactor, now: Nanos) {
        if self.log.last() > self.owner.marks().appended {
            self.events.push(OwnerEvent::Appended(self.log.last()));
        }
        if now >= self.owner.deadline() {
            self.events.push(OwnerEvent::Tick);
        }
        while !self.events.is_empty() {
            let mut events = std::mem::take(&mut self.events);
            for event in events.drain(..) {
                self.owner.step(now, event, &mut self.effects);
            }
            self.identity.epoch = self.owner.configuration().epoch;
            let mut effects = std::mem::take(&mut self.effects);
            for effect in effects.drain(..) {
                self.carry_out(reactor, effect);
            }
            self.effects = effects;
            if self.events.is_empty() {
                self.events = events;
            }
        }
    }

    fn carry_out(&mut self, reactor: &mut Reactor, effect: Effect) {
        match effect {
            Effect::WantPeer { node, exclude } => self.notices.push(AccelNotice::WantPeer { node, exclude }),
            Effect::Propose { epoch, replicas, write_back } => {
                self.notices.push(AccelNotice::WantConfiguration { epoch, replicas, write_back });
            }
            Effect::DropPeer(node) => self.peers.drop_peer(reactor, &node),
            Effect::FreeTo(to) => self.free_to(to),
            Effect::Fenced(epoch) => self.notices.push(AccelNotice::Fenced(epoch)),
            Effect::Tell(kind, text) => self.notices.push(AccelNotice::Tell(kind, text)),
        }
    }

    fn free_to(&mut self, to: u64) {
        for (sequence, record) in self.log.range(0, to) {
            self.index.remove(record.offset, record.end(), sequence);
            self.dirty_bytes -= u64::from(record.length);
        }
        self.log.free_to(to);
    }

    fn destage(&mut self, reactor: &mut Reactor, now: Nanos) {
        if self.bypassing > 0 {
            // A write that went past the log must not land on top of a newer one that went through it (P4).
            return;
        }
        let urgent = self.closing || self.owner.drains();
        let marks = self.owner.marks();
        self.destager.begin(now, &self.log, marks.destaged, self.owner.destage_limit(), urgent);
        let Accel { destager, log, lower, below, .. } = self;
        self.again |= destager.submit(reactor, log, lower, || Tag(below.insert(Below::Destage) as u64));
    }

    /// Answers everything that the watermarks allow.
    fn release(&mut self) {
        let acknowledged = self.owner.marks().acknowledged;
        self.writes.release(acknowledged, &mut self.finished);
        let mut place = 0;
        while place < self.held.len() {
            if self.held[place].sequence <= acknowledged {
                let HeldRead { tag, buffer, .. } = self.held.swap_remove(place);
                self.finished.push(Completion { tag, result: Ok(Outcome::Read(buffer)) });
            } else {
                place += 1;
            }
        }
    }
}

fn not_owner() -> IoError {
    IoError::new(ErrorKind::Fence, Code::NotOwner, "another node owns the disk now")
}

impl<L: Destage> Layer for Accel<L> {
    fn info(&self) -> LayerInfo {
        LayerInfo { fast_zeroes: true, ..self.lower.info() }
    }

    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        if self.gone {
            return true;
        }
        match kind {
            RequestKind::Write | RequestKind::WriteZeroes | RequestKind::Discard
                if !self.owner.bypasses() =>
            {
                let data = if kind == RequestKind::Write { bytes } else { bytes.div_ceil(LARGEST_ZERO) };
                self.pacer.admits() && self.log.has_room(data)
            }
            // A read may need a second buffer for what the log has of it.
            RequestKind::Read if !self.index.is_empty() => self.lower.has_room(kind, bytes.saturating_mul(2)),
            _ => self.lower.has_room(kind, bytes),
        }
    }

    fn submit(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        if self.gone {
            return self.finished.push(Completion { tag: request.tag(), result: Err(not_owner()) });
        }
        if request.kind().changes_data() && self.owner.bypasses() {
            return self.pass(reactor, request);
        }
        match request {
            Request::Read { tag, offset, buffer } => self.read(reactor, tag, offset, buffer),
            Request::Write { tag, offset, payload, .. } => self.write(tag, offset, &payload),
            Request::WriteZeroes { tag, offset, length, may_unmap, .. } => {
                let kind = if may_unmap { RecordKind::Discard } else { RecordKind::Zero };
                self.zero(tag, offset, length, kind);
            }
            Request::Discard { tag, offset, length, .. } => {
                self.zero(tag, offset, length, RecordKind::Discard)
            }
            Request::Flush { tag } => self.flush(reactor, tag),
            Request::Extents { tag, offset, length } => {
                let tag = self.below_tag(Below::Extents { tag });
                self.lower.submit(reactor, Request::Extents { tag, offset, length });
            }
        }
    }

    fn on_event(&mut self, reactor: &mut Reactor, event: Event) {
        if event.token.owner != self.peers_id {
            return self.lower.on_event(reactor, event);
        }
        if let Action::Ready(interest) = event.action {
            self.peers.on_event(event.token.slot, interest);
        }
    }

    fn advance(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>) {
        let now = Nanos::now();
        self.again = false;
        self.again |= self.peers.receive(reactor, self.log.freed(), &mut self.events);
        self.collect(reactor, now);
        if !self.gone {
            self.pacer.refill(now, self.log.used() as f64 / self.log.capacity() as f64);
            self.decide(reactor, now);
            // What is older than our lease must neither reach the backing nor be answered (P2, P4).
            let holds_lease = self.config.holds_lease(now);
            if !self.owner.is_fenced() {
                self.peers.send(reactor, &self.log, self.identity.epoch, &mut self.events);
                if holds_lease {
                    self.destage(reactor, now);
                }
            }
            // A backing in memory has answered already.
            let freed = self.log.freed();
            self.collect(reactor, now);
            self.decide(reactor, now);
            // The replicas are told with the next batch, or next turn.
            self.again |= self.log.freed() != freed;
            if !holds_lease || self.owner.is_fenced() {
                return;
            }
            self.release();
        }
        done.append(&mut self.finished);
    }

    fn deadline(&self) -> Nanos {
        if self.again {
            return Nanos(0);
        }
        if self.gone {
            return self.lower.deadline();
        }
        let own = self.owner.deadline().min(self.destager.deadline()).min(self.pacer.deadline());
        own.min(self.lower.deadline())
    }

    fn in_flight(&self) -> usize {
        self.below.len() + self.writes.len() + self.held.len() + self.finished.len()
    }

    fn meters(&self, out: &mut Vec<LayerMeter>) {
        self.lower.meters(out);
    }
}
