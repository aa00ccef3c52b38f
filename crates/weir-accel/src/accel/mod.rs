//! The accelerator as a layer: the protocol core of [`crate::owner`] driven with a real log, real channels and a real backing.

mod barrier;
mod below;
mod flushes;
mod full_log;
mod life;
mod notices;
mod parked;
mod requests;
mod status;
mod turn;

use std::collections::VecDeque;
use std::io;

use slab::Slab;
use weir_block::buffer::LARGEST;
use weir_block::{
    Buffer, BufferPool, Clock, Completion, Destage, Metered, Nanos, OwnerId, Reactor, Request, Stream, Tag,
};

use crate::config::{AccelConfig, Configuration, Former, Inheritance};
use crate::destage::Destager;
use crate::dirty::Dirty;
use crate::flash::FlashStore;
use crate::index::Index;
use crate::lineage::Lineage;
use crate::log::{Layout, Log, RecordKind};
use crate::owner::{Effect, Event as OwnerEvent, Owner, Watermarks};
use crate::pacing::Pacer;
use crate::peers::{Identity, Peers};
use crate::planted::{Bug, Planted};
use crate::reads::HeldRead;
use crate::replica::Replica;
use crate::writes::Writes;
use below::{Below, not_owner};
use flushes::Flushes;
use full_log::FullLog;
use life::Life;
pub use notices::AccelNotice;
use parked::Parked;
pub use status::{AccelStatus, DestageStatus};

/// There is no memory for a log.
#[derive(Debug, thiserror::Error)]
#[error("no memory for the write log: {source}")]
pub struct NoMemory {
    source: io::Error,
    /// The store of the log: to be retired, because a write to it may be in flight.
    pub store: Option<Box<FlashStore>>,
}

/// One disk's accelerator on its owner.
pub struct Accel<L: Destage> {
    config: AccelConfig,
    owner: Owner,
    identity: Identity,
    log: Log,
    /// The log's store, if it is on flash.
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
    /// Changes that wait for the end of the former owner's right.
    parked: Parked,
    flushes: Flushes,
    destager: Destager,
    pacer: Pacer,
    full_log: FullLog,
    dirty: Dirty,
    clock: Clock,
    /// The start of the last turn.
    now: Nanos,
    finished: Vec<Completion>,
    completions: Vec<Completion>,
    events: Vec<OwnerEvent>,
    effects: Vec<Effect>,
    notices: Vec<AccelNotice>,
    direct: Vec<Completion>,
    /// Another turn of the loop has work without a new event.
    again: bool,
    /// The time to check again for the right to serve; never while there is one.
    look_again: Nanos,
    life: Life,
    /// The last record before the barrier, while there is one.
    barrier: Option<u64>,
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
            let position = (record.kind == RecordKind::Write).then_some(record.position);
            index.insert(record.offset, record.end(), sequence, position);
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
            full_log: FullLog::new(config.full_log_wait, log.freed()),
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
            reserve: reactor.buffers().beside(LARGEST),
            bypassing: Slab::new(),
            behind: None,
            parked: Parked::default(),
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
            life: Life::new(),
            barrier: None,
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
        if self.life.is_released() || self.owner.is_fenced() {
            return;
        }
        let counted = self.owner.configuration().replicas.contains(&node);
        if let Err(error) = self.peers.connect(reactor, node, stream, (self.identity, counted), &self.log) {
            tracing::warn!(%error, "connection to a peer cannot be used");
            self.events.push(OwnerEvent::PeerUnavailable);
        }
        self.again = true;
    }

    /// No connection to `node` is possible, or, when the name is empty, to any node.
    pub fn peer_unavailable(&mut self, node: String) {
        self.push_event(if node.is_empty() {
            OwnerEvent::PeerUnavailable
        } else {
            OwnerEvent::PeerLost(node)
        });
    }

    /// `node` answers nobody any more, although its connection stands.
    pub fn peer_silent(&mut self, node: String) {
        self.push_event(OwnerEvent::PeerSilent(node));
    }

    /// The registry committed a configuration.
    pub fn configured(&mut self, configuration: Configuration) {
        self.push_event(OwnerEvent::Configured(configuration));
    }

    /// The registry did not commit the proposal.
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
        self.life.close();
        // And has another turn.
        self.lower_barrier();
    }

    /// Nothing is dirty, nothing waits, nothing is in flight.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        let marks = self.owner.marks();
        let waits =
            self.writes.len() + self.parked.len() + self.flushes.pending() > 0 || self.behind.is_some();
        marks.destaged == marks.appended && self.is_quiet() && !waits
    }

    /// Another node owns the disk: fails waiting requests, and returns the log as a replica from which the new owner may
    /// continue, with its flash store if it has one. I/O in flight to the backing still has to complete
    /// ([`Accel::is_quiet`]). `None` when it was released before, or there is no memory.
    pub fn release(&mut self, reactor: &mut Reactor) -> Option<(Replica, Option<FlashStore>)> {
        let first = self.life.release();
        self.again = true;
        self.peers.drop_all(reactor);
        self.destager.stop();
        if !first {
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
        self.life.hold_destage(true);
    }

    /// Destage goes on.
    pub fn resume_destage(&mut self) {
        self.life.hold_destage(false);
        self.again = true;
    }

    /// Whether no write of the log's is on its way to the backing, and every member of the set knows this owner: a member
    /// knows no more than two owners that came before the one that greets it ([`Lineage`]).
    #[must_use]
    pub fn may_hand_over(&self) -> bool {
        let destages = self.below.iter().any(|(_, below)| matches!(below, Below::Destage));
        self.owner.is_settled() && (!destages || self.planted.has(Bug::HandOverBesideDestage))
    }

    /// The node that is to own the disk next: it becomes a member of the replica set before any other.
    pub fn prepare_successor(&mut self, node: Option<String>) {
        self.push_event(OwnerEvent::Successor(node));
    }

    /// Whether no request to the backing is in flight.
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

    /// Why the backing must not be changed past the accelerator: a former owner may still use it (P4).
    #[must_use]
    pub fn backing_is_taken(&self) -> Option<&'static str> {
        (!self.owner.may_use_backing()).then(|| self.owner.reason())
    }

    /// A request past the accelerator, for measuring the backing. Only while [`Accel::is_clean`] and no client writes through
    /// the accelerator; the answer comes from [`Accel::take_direct`].
    pub fn submit_direct(&mut self, reactor: &mut Reactor, mut request: Request<'_>) {
        let (tag, changes) = (request.tag(), request.kind().changes_data());
        if changes && !(self.may_bypass() && self.owner.may_use_backing()) {
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

    /// The configuration.
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

    /// Its log's store, if it is on flash.
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

    fn below_tag(&mut self, below: Below) -> Tag {
        Tag(self.below.insert(below) as u64)
    }
}
