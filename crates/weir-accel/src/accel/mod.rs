//! The accelerator as a layer: the protocol core of [`crate::owner`] driven with a real log, real channels and a real backing.

mod flushes;
mod jam;
mod notices;
mod turn;

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use slab::Slab;
use weir_block::buffer::LARGEST;
use weir_block::{
    Action, Buffer, BufferPool, Clock, Code, Completion, Destage, ErrorKind, Event, IoError, Layer,
    LayerInfo, LayerMeter, Metered, Nanos, Outcome, OwnerId, Payload, Reactor, Request, RequestKind, Stream,
    Tag,
};

use crate::config::{AccelConfig, Configuration, Former, Inheritance};
use crate::destage::Destager;
use crate::dirty::Dirty;
use crate::flash::FlashStore;
use crate::index::Index;
use crate::lineage::Lineage;
use crate::log::{LARGEST_RECORD, Layout, Log, RecordKind};
use crate::owner::{Effect, Event as OwnerEvent, Owner, Watermarks};
use crate::pacing::Pacer;
use crate::peers::{Identity, Peers};
use crate::planted::{Bug, Planted};
use crate::reads::{self, HeldRead, Hit, Overlay};
use crate::replica::Replica;
use crate::writes::Writes;
use flushes::Flushes;
use jam::Jam;
pub use notices::{AccelNotice, AccelStatus, DestageStatus};

/// Most bytes of zeroes in one record; longer ranges become several.
const LARGEST_ZERO: u64 = 1 << 30;

/// What a request to the layer below is for.
enum Below {
    /// A write past the log; `range` is its place among those.
    Pass {
        tag: Tag,
        range: usize,
    },
    Read {
        tag: Tag,
        offset: u64,
        overlay: Option<(Overlay, u64)>,
    },
    /// For clients.
    Flush,
    /// With the runs that were data in the log when it was asked for.
    Extents {
        tag: Tag,
        before: Vec<(u64, u64)>,
    },
    /// Measured below the accelerator, on purpose.
    Direct {
        tag: Tag,
        changes: bool,
    },
    Destage,
}

/// There is no memory for a log.
#[derive(Debug, thiserror::Error)]
#[error("no memory for the write log: {source}")]
pub struct NoMemory {
    source: io::Error,
    /// Where the log was to be at rest: to be retired, because a write to it may be under way.
    pub store: Option<Box<FlashStore>>,
}

/// One disk's accelerator on its owner.
pub struct Accel<L: Destage> {
    config: AccelConfig,
    owner: Owner,
    identity: Identity,
    log: Log,
    /// Where the log is at rest, if it is on flash.
    store: Option<FlashStore>,
    index: Index,
    lower: Metered<L>,
    below: Slab<Below>,
    peers: Peers,
    peers_id: OwnerId,
    writes: Writes,
    held: Vec<HeldRead>,
    /// Reads that wait for memory.
    deferred: VecDeque<(Tag, u64, Buffer)>,
    /// Memory for one read at a time when the shard has none left: its buffers may all wait for this very disk.
    reserve: BufferPool,
    /// Ranges of the writes that went past the log and have not come back.
    bypassing: Slab<(u64, u64)>,
    /// A write that may go past the log and overlaps one that is on its way there: it waits for that one, and all that come
    /// after it for it.
    behind: Option<Request<'static>>,
    flushes: Flushes,
    destager: Destager,
    pacer: Pacer,
    jam: Jam,
    dirty: Dirty,
    clock: Clock,
    /// When the last turn began.
    now: Nanos,
    finished: Vec<Completion>,
    completions: Vec<Completion>,
    events: Vec<OwnerEvent>,
    effects: Vec<Effect>,
    notices: Vec<AccelNotice>,
    direct: Vec<Completion>,
    /// Another turn of the loop has work without a new event.
    again: bool,
    /// When to look for the right again; never while there is one.
    look_again: Nanos,
    closing: bool,
    destage_held: bool,
    gone: bool,
    planted: Planted,
}

impl<L: Destage> Accel<L> {
    /// An accelerator in front of `lower`, on the shard of `reactor`. With a `store`, its log is on flash.
    ///
    /// # Errors
    /// [`NoMemory`] for the arena of an empty log.
    pub fn new(
        reactor: &mut Reactor,
        config: AccelConfig,
        configuration: Configuration,
        inheritance: Inheritance,
        former: Former,
        lower: Metered<L>,
        mut store: Option<FlashStore>,
    ) -> Result<Accel<L>, NoMemory> {
        let (clock, peers_id, epoch) = (reactor.clock(), reactor.new_owner(), configuration.epoch);
        let (log, lineage) = match inheritance {
            Inheritance::Nothing => {
                let layout = if store.is_some() { Layout::Flash } else { Layout::Memory };
                let bytes = config.log_bytes.max(AccelConfig::SMALLEST_LOG);
                match Log::with_layout(layout, bytes, 1) {
                    Ok(log) => (log, Lineage::new(epoch)),
                    Err(source) => return Err(NoMemory { source, store: store.map(Box::new) }),
                }
            }
            Inheritance::Replica { log, lineage } => {
                let last = log.last();
                (log, lineage.continued(epoch, last))
            }
        };
        let mut index = Index::new();
        let mut dirty = Dirty::default();
        for (sequence, record) in log.range(0, log.last()) {
            let place = (record.kind == RecordKind::Write).then_some(record.place);
            index.insert(record.offset, record.end(), sequence, place);
            dirty.add(sequence, record.weight(), clock.now());
        }
        let identity = Identity { epoch, lineage };
        let mut owner = Owner::new(configuration, log.freed(), log.last(), former, config.peer_deadline);
        if let Some(store) = &mut store {
            owner = owner.on_flash();
            store.rewound(&log);
        }
        let failed = store.as_ref().and_then(FlashStore::error).map(str::to_owned);
        let mut accel = Accel {
            destager: Destager::new(config.destage_delay, config.checkpoint_records),
            jam: Jam::new(config.full_log_wait, log.freed()),
            owner,
            identity,
            log,
            store,
            index,
            lower,
            below: Slab::new(),
            peers: Peers::new(peers_id, config.peer_deadline, config.batch_records),
            config,
            peers_id,
            writes: Writes::default(),
            held: Vec::new(),
            deferred: VecDeque::new(),
            reserve: BufferPool::new(LARGEST),
            bypassing: Slab::new(),
            behind: None,
            flushes: Flushes::new(),
            pacer: Pacer::new(),
            dirty,
            now: clock.now(),
            clock,
            finished: Vec::new(),
            completions: Vec::new(),
            events: Vec::new(),
            effects: Vec::new(),
            notices: Vec::new(),
            direct: Vec::new(),
            again: true,
            look_again: Nanos::NEVER,
            closing: false,
            destage_held: false,
            gone: false,
            planted: Planted::default(),
        };
        accel.events.extend(failed.map(OwnerEvent::StoreFailed));
        accel.events.push(OwnerEvent::Tick);
        Ok(accel)
    }

    /// Plants a bug in a new accelerator, so that the checks can show that they find it.
    #[cfg(feature = "planted-bugs")]
    pub fn plant(&mut self, planted: Planted) {
        self.planted = planted;
        self.owner.plant(planted);
        self.destager.plant(planted);
        self.peers.plant(planted);
    }

    /// A connection to `node` stands.
    pub fn peer_connected(&mut self, reactor: &mut Reactor, node: String, stream: Stream) {
        if self.gone || self.owner.is_fenced() {
            return;
        }
        let counted = self.owner.configuration().replicas.contains(&node);
        if let Err(error) = self.peers.connect(reactor, node, stream, (self.identity, counted), &self.log) {
            tracing::warn!(%error, "connection to a peer cannot be used");
            self.events.push(OwnerEvent::PeerUnavailable);
        }
        self.again = true;
    }

    /// No connection to `node` can be had, or, when the name is empty, to any node.
    pub fn peer_unavailable(&mut self, node: String) {
        self.push_event(if node.is_empty() {
            OwnerEvent::PeerUnavailable
        } else {
            OwnerEvent::PeerLost(node)
        });
    }

    /// The registry committed a configuration.
    pub fn configured(&mut self, configuration: Configuration) {
        self.push_event(OwnerEvent::Configured(configuration));
    }

    /// The registry did not commit what was asked for.
    pub fn not_configured(&mut self) {
        self.push_event(OwnerEvent::NotConfigured);
    }

    /// More is certain about the former owner now (P2, P4).
    pub fn former(&mut self, former: Former) {
        self.push_event(OwnerEvent::Former(former));
    }

    /// The registry names this owner, though a node has refused it.
    pub fn still_owner(&mut self) {
        if self.owner.is_fenced() {
            self.push_event(OwnerEvent::StillOwner);
        }
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
        let waits = self.writes.len() > 0 || self.behind.is_some() || self.flushes.pending() > 0;
        marks.destaged == marks.appended && self.is_quiet() && !waits
    }

    /// Another node owns the disk: fail what waits, and give the log away, as a replica from which the new owner may go
    /// on, with its flash store if it has one. What is under way towards the backing still has to come back
    /// ([`Accel::is_quiet`]). `None` when it was let go before, or there is no memory.
    pub fn let_go(&mut self, reactor: &mut Reactor) -> Option<(Replica, Option<FlashStore>)> {
        let before = std::mem::replace(&mut self.gone, true);
        self.again = true;
        self.peers.drop_all(reactor);
        self.destager.stop();
        if before {
            return None;
        }
        let empty = Log::new(0, self.log.last() + 1).ok()?;
        let log = std::mem::replace(&mut self.log, empty);
        (self.index, self.dirty) = (Index::new(), Dirty::default());
        let replica = Replica::of_former_owner(log, self.identity.epoch, self.identity.lineage);
        Some((replica, self.store.take()))
    }

    /// The flash store of a disk that has come to its end here, if it has one: to be retired.
    pub fn take_store(&mut self) -> Option<FlashStore> {
        self.store.take()
    }

    /// Nothing more is handed to the backing until [`Accel::resume_destage`]; see [`Accel::may_hand_over`].
    pub fn hold_destage(&mut self) {
        self.destage_held = true;
    }

    /// Destage goes on.
    pub fn resume_destage(&mut self) {
        self.destage_held = false;
        self.again = true;
    }

    /// Whether no write of the log's is on its way to the backing, and every member of the set knows this owner: a member
    /// knows no more than two owners that came before the one that greets it ([`Lineage`]).
    #[must_use]
    pub fn may_hand_over(&self) -> bool {
        let destages = self.below.iter().any(|(_, below)| matches!(below, Below::Destage));
        self.owner.is_settled() && (!destages || self.planted.has(Bug::HandOverBesideDestage))
    }

    /// The node that is to own the disk next: it gets a place in the replica set before any other.
    pub fn prepare_successor(&mut self, node: Option<String>) {
        self.push_event(OwnerEvent::Successor(node));
    }

    /// Whether no request to the backing is under way.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.below.is_empty()
    }

    /// Whether a request waits for memory of the shard, which other disks give back without a word: it needs a turn whenever
    /// one of them has had one.
    #[must_use]
    pub fn waits_for_memory(&self) -> bool {
        !self.deferred.is_empty() || self.behind.is_some()
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
        let (tag, changes) = (request.tag(), request.kind().changes_data());
        if changes && !self.may_bypass() {
            self.direct.push(Completion { tag, result: Err(not_owner()) });
            self.again = true;
            return;
        }
        request.set_tag(self.below_tag(Below::Direct { tag, changes }));
        self.lower.submit_direct(reactor, request);
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

    /// The log.
    #[must_use]
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Where its log is at rest, if it is on flash.
    #[must_use]
    pub fn store(&self) -> Option<&FlashStore> {
        self.store.as_ref()
    }

    /// The number under which events of its flash store come, if it has one.
    #[must_use]
    pub fn store_id(&self) -> Option<OwnerId> {
        self.store.as_ref().map(FlashStore::owner)
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

    /// The watermarks.
    #[must_use]
    pub fn marks(&self) -> Watermarks {
        self.owner.marks()
    }

    /// The state, for people.
    #[must_use]
    pub fn status(&self) -> AccelStatus {
        let reason = match self.destager.error() {
            _ if self.jam.is_jammed() => self.jam_reason(),
            Some(error) => format!("the backing refuses destage: {error}"),
            None if !self.gone && !self.config.holds_right(self.clock.now()) => {
                "neither the registry nor the members of its set have confirmed this owner lately: waiting for that".into()
            }
            None => self.owner.reason().into(),
        };
        AccelStatus {
            configuration: self.owner.configuration().clone(),
            marks: self.owner.marks(),
            promised: self.owner.promised(),
            reason,
            dirty_bytes: self.dirty.bytes(),
            log_used: self.log.used(),
            log_bytes: self.log.capacity(),
            destage: self.destage_status(self.clock.now()),
        }
    }

    fn destage_status(&self, now: Nanos) -> DestageStatus {
        let ms = |time: Duration| time.as_millis() as u64;
        let (rate, dirty) = (self.pacer.destage_rate(), self.dirty.bytes());
        let to_clean = if dirty == 0 { Some(0) } else { (dirty * 1000).checked_div(rate) };
        DestageStatus {
            rate,
            oldest_dirty_ms: self.dirty.oldest(now).map(ms),
            time_to_clean_ms: to_clean,
            checkpoint_age_ms: self.destager.completed_at().map(|at| ms(now - at)),
            destaged_bytes: self.destager.destaged(),
            coalesced_bytes: self.destager.coalesced(),
            flash_bytes: self.store.as_ref().map_or(0, |store| store.meter().kind(RequestKind::Write).bytes),
            depth: self.destager.depth(),
        }
    }

    fn read(&mut self, reactor: &mut Reactor, tag: Tag, offset: u64, mut buffer: Buffer) {
        let overlay = match reads::look_up(&self.index, &self.log, offset, &mut buffer) {
            Hit::Full(sequence) => return self.held.push(HeldRead { sequence, tag, buffer }),
            Hit::Miss => None,
            Hit::Partial(newest) => {
                let side = reactor.buffers().take(buffer.len());
                let Some(side) = side.or_else(|| self.reserve.take(buffer.len())) else {
                    return self.deferred.push_back((tag, offset, buffer));
                };
                Some((reads::overlay(&self.index, &self.log, offset, side), newest))
            }
        };
        let tag = self.below_tag(Below::Read { tag, offset, overlay });
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
        let record = self.log.get(sequence).expect("appended a moment ago");
        let place = (kind == RecordKind::Write).then_some(record.place);
        self.index.insert(offset, record.end(), sequence, place);
        self.dirty.add(sequence, record.weight(), self.now);
        // Records without data fill the table of records instead of the arena.
        self.pacer.admitted(record.weight());
        sequence
    }

    fn pass(&mut self, reactor: &mut Reactor, mut request: Request<'_>) {
        let (offset, length) = request.range();
        let range = self.bypassing.insert((offset, offset + length));
        self.owner.bypassed();
        request.set_tag(self.below_tag(Below::Pass { tag: request.tag(), range }));
        self.lower.submit(reactor, request);
    }

    fn flush(&mut self, tag: Tag) {
        if self.owner.configuration().write_back && self.flushes.is_flushed() {
            // Everything acknowledged is in the log of every member of the set: that is what the policy names (P8).
            return self.finished.push(Completion { tag, result: Ok(Outcome::Done) });
        }
        // It begins with the next turn: everybody who asks until then shares it.
        self.flushes.group().arrive(tag);
    }

    fn may_flush(&self) -> bool {
        self.flushes.is_due() && !self.destager.is_flushing() && self.lower.has_room(RequestKind::Flush, 0)
    }

    /// Hands the flush that clients wait for to the backing, unless another one is under way.
    fn begin_flush(&mut self, reactor: &mut Reactor) {
        if self.may_flush() {
            self.flushes.begin();
            let tag = self.below_tag(Below::Flush);
            self.lower.submit(reactor, Request::Flush { tag });
        }
    }

    /// Whether writes go past the log: nothing older is in it.
    fn bypasses(&self) -> bool {
        self.owner.bypasses() && self.log.last() == self.owner.marks().appended
    }

    /// Whether a write of this range is on its way past the log. A client that has lost its connection and sends again must not
    /// have the old request land on top of what it wrote later (P4).
    fn overlaps(&self, (start, length): (u64, u64)) -> bool {
        let end = start + length;
        self.bypassing.iter().any(|(_, &(first, last))| first < end && start < last)
    }

    /// Whether a write may go straight to the backing now. Looks at the clock as late as possible: this process may have
    /// stood still since the last turn, and another node may own the disk by now (P2, P4).
    fn may_bypass(&self) -> bool {
        !self.gone
            && !self.owner.is_fenced()
            && (self.planted.has(Bug::BypassWithoutLease) || self.config.holds_right(self.clock.now()))
    }

    fn log_has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        if self.log_takes(kind, bytes) { self.pacer.admits() } else { self.jam.no_room() }
    }

    fn log_takes(&self, kind: RequestKind, bytes: u64) -> bool {
        let (data, largest) =
            if kind == RequestKind::Write { (bytes, LARGEST_RECORD as u64) } else { (0, LARGEST_ZERO) };
        self.log.has_room(data, bytes.div_ceil(largest))
    }

    /// Why writes do not wait for room any more.
    fn jam_reason(&self) -> String {
        let why = self.destager.error().map_or_else(String::new, |error| format!(": {error}"));
        let (wait, dirty) = (self.config.full_log_wait, self.dirty.bytes());
        format!(
            "the write log is full and has freed nothing for {wait:?}{why}; writes get an error, {dirty} acknowledged bytes stay in \
             the log"
        )
    }

    /// The answer to a write that has waited for room long enough: what the backing said, if it said something.
    fn jam_error(&self) -> IoError {
        let full = "the write log is full and its backing takes nothing";
        self.destager.error().map_or_else(
            || IoError::new(ErrorKind::Retry, Code::Io, full),
            |error| IoError { context: full, ..error },
        )
    }

    fn below_tag(&mut self, below: Below) -> Tag {
        Tag(self.below.insert(below) as u64)
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
            kind if !kind.changes_data() => self.deferred.is_empty() && self.lower.has_room(kind, bytes),
            _ if self.behind.is_some() => false,
            // Also the log: a write that overlaps one on its way past it goes through it when there is no memory for waiting.
            kind if self.owner.bypasses() => {
                self.lower.has_room(kind, bytes) && self.may_bypass() && self.log_has_room(kind, bytes)
            }
            kind => self.log_has_room(kind, bytes),
        }
    }

    fn submit(&mut self, reactor: &mut Reactor, mut request: Request<'_>) {
        if self.gone {
            return self.finished.push(Completion { tag: request.tag(), result: Err(not_owner()) });
        }
        if request.kind().changes_data() && self.bypasses() {
            assert!(self.behind.is_none(), "has_room was asked before the submit");
            if !self.overlaps(request.range()) {
                return self.pass(reactor, request);
            }
            request = match request.into_owned(reactor.buffers()) {
                Ok(request) => return self.behind = Some(request),
                Err(request) => request,
            };
        }
        let (kind, (_, bytes)) = (request.kind(), request.range());
        if kind.changes_data() && self.jam.is_jammed() && !self.log_takes(kind, bytes) {
            return self.finished.push(Completion { tag: request.tag(), result: Err(self.jam_error()) });
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
            Request::Flush { tag } => self.flush(tag),
            Request::Extents { tag, offset, length } => {
                let before = reads::data_runs(&self.index, offset, length);
                let tag = self.below_tag(Below::Extents { tag, before });
                self.lower.submit(reactor, Request::Extents { tag, offset, length });
            }
        }
    }

    fn on_event(&mut self, reactor: &mut Reactor, event: Event) {
        if let Some(store) = self.store.as_mut().filter(|store| store.owner() == event.token.owner) {
            return store.on_event(event, reactor.now());
        }
        if event.token.owner != self.peers_id {
            return self.lower.on_event(reactor, event);
        }
        if let Action::Ready(interest) = event.action {
            self.peers.on_event(event.token.slot, interest);
        }
    }

    fn advance(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>) {
        self.turn(reactor, done);
    }

    fn deadline(&self) -> Nanos {
        self.next_turn()
    }

    fn in_flight(&self) -> usize {
        let waiting = self.deferred.len() + usize::from(self.behind.is_some()) + self.flushes.pending();
        self.below.len() + self.writes.len() + self.held.len() + waiting + self.finished.len()
    }

    fn meters(&self, out: &mut Vec<LayerMeter>) {
        out.push(LayerMeter { layer: "replicas", meter: self.peers.meter().clone() });
        if let Some(store) = &self.store {
            out.push(LayerMeter { layer: "flash", meter: store.meter().clone() });
        }
        self.lower.meters(out);
    }
}
