//! A replica on a shard: the protocol core of [`crate::replica`] with real channels.

use std::io;
use std::time::Duration;

use weir_block::{Action, Event, Nanos, OwnerId, Reactor, Stream, Token};
use weir_net::{Channel, ChannelError, Frame};
use zerocopy::IntoBytes;

use crate::config::{AccelConfig, Inheritance};
use crate::flash::FlashStore;
use crate::log::{Layout, Log};
use crate::owner::Held;
use crate::replica::{Replica, Verdict};
use crate::wire::{self, Confirm, MessageKind, Refuse, WireError};

/// Connections to one replica at once: the owner's, and those of owners that come or go (P10).
const MOST_SESSIONS: usize = 4;

/// Longest time between a connection and its Hello, which an owner sends at once. Longer than any shard's pause; who has said
/// nothing by then only takes a place (P10).
const HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// Frames read from one connection before others get their turn.
const MOST_ROUNDS: usize = 8;

#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Wire(#[from] WireError),
}

struct Session {
    slot: u32,
    node: String,
    channel: Channel,
    /// Its Hello was taken.
    greeted: bool,
    /// It ends if its Hello is not taken by then.
    hello_due: Nanos,
    /// The durable state last confirmed to the owner; `None` until its Hello is answered.
    told: Option<Held>,
    ended: bool,
}

/// The owner by the disk's record.
#[derive(Debug, PartialEq, Eq)]
struct Ownership {
    epoch: u64,
    node: Option<String>,
}

/// Keeps a copy of the log of a disk that another node owns.
pub struct ReplicaHost {
    owner: OwnerId,
    /// The newest record that this host knows; `None` before the first.
    record: Option<Ownership>,
    replica: Replica,
    /// The copy's store, if it is on flash.
    store: Option<FlashStore>,
    /// All of the node that `record` names.
    sessions: Vec<Session>,
    next_slot: u32,
}

impl ReplicaHost {
    /// A replica with an empty log, in memory or on flash; events of its connections go to `owner`. `known_epoch` is that of
    /// the disk's record: owners below begin nothing here ([`Replica::new`]).
    ///
    /// # Errors
    /// No memory for the log's arena.
    pub fn new(
        owner: OwnerId,
        log_bytes: u64,
        store: Option<FlashStore>,
        known_epoch: u64,
    ) -> io::Result<ReplicaHost> {
        let layout = if store.is_some() { Layout::Flash } else { Layout::Memory };
        let log = Log::with_layout(layout, log_bytes.max(AccelConfig::SMALLEST_LOG), 1)?;
        Ok(ReplicaHost::holding(owner, Replica::new(log, known_epoch), store))
    }

    /// A replica that there is already; events of its connections go to `owner`.
    #[must_use]
    pub fn holding(owner: OwnerId, replica: Replica, store: Option<FlashStore>) -> ReplicaHost {
        ReplicaHost { owner, record: None, replica, store, sessions: Vec::new(), next_slot: 0 }
    }

    /// Plants a bug in a new host, so that the checks can show that they find it.
    #[cfg(feature = "planted-bugs")]
    pub fn plant(&mut self, planted: crate::planted::Planted) {
        self.replica.plant(planted);
    }

    /// The number under which events of its flash store come, if it has one.
    #[must_use]
    pub fn store_owner(&self) -> Option<OwnerId> {
        self.store.as_ref().map(FlashStore::owner)
    }

    /// The copy's store, if it is on flash.
    #[must_use]
    pub fn store(&self) -> Option<&FlashStore> {
        self.store.as_ref()
    }

    /// The time at which a turn is due even without events: a write to flash that has not completed by then counts as failed,
    /// and a connection without a Hello ends.
    #[must_use]
    pub fn deadline(&self) -> Nanos {
        let silent = self.sessions.iter().filter(|session| !session.greeted).map(|session| session.hello_due);
        silent.chain(self.store.as_ref().map(FlashStore::deadline)).min().unwrap_or(Nanos::NEVER)
    }

    /// The reason why nothing becomes durable here any more; an owner cannot use this copy then.
    #[must_use]
    pub fn store_error(&self) -> Option<&str> {
        self.store.as_ref().and_then(FlashStore::error)
    }

    /// The protocol state.
    #[must_use]
    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    /// Whether an owner is connected.
    #[must_use]
    pub fn has_owner(&self) -> bool {
        self.sessions.iter().any(|session| session.greeted && !session.ended)
    }

    /// The disk's record is in this epoch and names `owner`. To be called whenever either changes, also while a connection
    /// stands: the host accepts the owner up to a few epochs beyond. Connections of nodes that own the disk no more end, because
    /// a former owner could go on to replace what the new one counts on (P2). News that are older than what is known change
    /// nothing: the view of the registry lags behind what was read from it for a connection.
    pub fn record_is(&mut self, reactor: &mut Reactor, epoch: u64, owner: Option<&str>) {
        self.replica.record_is_in(epoch);
        if self.record.as_ref().is_some_and(|known| epoch < known.epoch) || self.replica.listens_to_all() {
            return;
        }
        self.record = Some(Ownership { epoch, node: owner.map(str::to_owned) });
        self.sessions.retain_mut(|session| {
            if owner == Some(session.node.as_str()) {
                return true;
            }
            tracing::info!(node = session.node, epoch, owner, "the connection of a former owner ends");
            session.turn_away(reactor, epoch);
            false
        });
    }

    /// A node has connected that owns the disk according to its record in `known_epoch`.
    ///
    /// # Errors
    /// The connection cannot be used, or a newer record names another owner. The node may try again; the record is read for that.
    pub fn attach(
        &mut self,
        reactor: &mut Reactor,
        node: String,
        known_epoch: u64,
        stream: Stream,
    ) -> io::Result<()> {
        match &self.record {
            Some(known) if known_epoch <= known.epoch && known.node.as_ref() != Some(&node) => {
                let owner = known.node.as_deref().unwrap_or("nobody");
                let text = format!(
                    "{node} does not own the disk: {owner} does, since epoch {} or before",
                    known.epoch
                );
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
            }
            _ => self.record_is(reactor, known_epoch, Some(&node)),
        }
        if let Some(error) = self.store_error() {
            return Err(io::Error::other(format!("this node's flash has failed: {error}")));
        }
        if self.sessions.len() >= MOST_SESSIONS {
            // Drops the oldest session without a Hello: an owner with a newer epoch must always be able to connect.
            let index = self.sessions.iter().position(|session| !session.greeted).unwrap_or(0);
            self.sessions.remove(index).channel.close(reactor);
        }
        let slot = self.next_slot;
        self.next_slot = self.next_slot.wrapping_add(1);
        let channel = Channel::new(stream, Token { owner: self.owner, slot }, None, &[], reactor)?;
        let hello_due = reactor.now() + HELLO_DEADLINE;
        let (greeted, told, ended) = (false, None, false);
        self.sessions.push(Session { slot, node, channel, greeted, hello_due, told, ended });
        Ok(())
    }

    /// An event for one of the connections, or for the flash store.
    pub fn on_event(&mut self, reactor: &Reactor, event: Event) {
        if let Some(store) = self.store.as_mut().filter(|store| store.owner() == event.token.owner) {
            return store.on_event(event, reactor.now());
        }
        if let Action::Ready(interest) = event.action
            && let Some(session) = self.sessions.iter_mut().find(|session| session.slot == event.token.slot)
        {
            session.channel.on_event(interest);
        }
    }

    /// Takes what has arrived and confirms it. Returns whether more may be waiting.
    pub fn advance(&mut self, reactor: &mut Reactor) -> bool {
        let mut more = false;
        let mut greeted = None;
        let now = reactor.now();
        for session in &mut self.sessions {
            let before = session.greeted;
            more |= session.advance(reactor, &mut self.replica, self.store.is_none());
            if session.greeted && !before {
                greeted = Some(session.slot);
            }
            if !session.greeted && session.hello_due <= now && !session.ended {
                tracing::warn!(node = session.node, "no Hello in time: replication connection closed");
                session.ended = true;
            }
        }
        if greeted.is_some()
            && let Some(store) = &mut self.store
        {
            // The Hello may have cut the log off, or begun it anew.
            store.rewound(self.replica.log());
        }
        if let Some(newest) = greeted {
            // One owner at a time: the former connection is of a lower epoch, or an old one of the same node.
            for session in
                self.sessions.iter_mut().filter(|session| session.slot != newest && session.greeted)
            {
                session.ended = true;
            }
        }
        self.keep_at_rest(reactor);
        self.sessions.retain_mut(|session| {
            if session.ended {
                session.channel.close(reactor);
            }
            !session.ended
        });
        more
    }

    /// Writes what is new to flash, and confirms what is durable there. A Hello is answered when everything is: the owner
    /// goes on behind what the answer says.
    fn keep_at_rest(&mut self, reactor: &mut Reactor) {
        let ReplicaHost { replica, store, sessions, .. } = self;
        let Some(store) = store else { return };
        let state = replica.state(store.stored().last);
        store.expire(reactor.now());
        store.advance(reactor, replica.log_mut(), state);
        if store.error().is_some() {
            return sessions.iter_mut().for_each(|session| session.ended = true);
        }
        for session in sessions.iter_mut().filter(|session| session.greeted && !session.ended) {
            // A copy that is being filled does not count; the owner only watches its progress.
            let unstored = replica.confirms_unstored() || !replica.is_complete();
            let held = if unstored { replica.held() } else { store.stored() };
            let news = match session.told {
                None => store.has_caught_up(replica.log(), &state),
                Some(told) => told != held,
            };
            if news && let Err(error) = session.confirm(reactor, held) {
                session.give_up(&error);
            }
        }
    }

    /// Refuses every owner up to `epoch - 1` from now on, and this very epoch's too: this node is its owner (P2).
    pub fn seal(&mut self, epoch: u64) {
        self.replica.seal(epoch);
    }

    /// This node becomes the owner: the connections are closed and the log is handed over.
    pub fn inherit(mut self, reactor: &mut Reactor) -> (Inheritance, Option<FlashStore>) {
        self.close(reactor);
        let (log, lineage) = self.replica.into_log();
        (Inheritance::Replica { log, lineage }, self.store)
    }

    /// The copy is not needed any more. Its store, if it has one, is to be retired.
    pub fn forget(mut self, reactor: &mut Reactor) -> Option<FlashStore> {
        self.close(reactor);
        self.store
    }

    /// Closes all connections.
    pub fn close(&mut self, reactor: &mut Reactor) {
        for mut session in self.sessions.drain(..) {
            session.channel.close(reactor);
        }
    }
}

impl Session {
    fn advance(&mut self, reactor: &mut Reactor, replica: &mut Replica, confirms: bool) -> bool {
        for _ in 0..MOST_ROUNDS {
            match self.round(reactor, replica, confirms) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(error) => {
                    self.give_up(&error);
                    return false;
                }
            }
        }
        true
    }

    /// Tells a former owner that it is one: it may not have heard of it, and takes a mere end for a lost replica.
    fn turn_away(&mut self, reactor: &mut Reactor, epoch: u64) {
        let refuse = Refuse { epoch: epoch.into() };
        self.channel.queue(MessageKind::Refuse as u16, refuse.as_bytes(), &[]);
        // A former owner that does not read it learns it from the registry.
        let _ = self.channel.flush(reactor);
        self.channel.close(reactor);
    }

    fn give_up(&mut self, error: &SessionError) {
        if !matches!(error, SessionError::Channel(ChannelError::Closed)) {
            tracing::warn!(owner = self.node, %error, "replication connection closed");
        }
        self.ended = true;
    }

    fn confirm(&mut self, reactor: &mut Reactor, held: Held) -> Result<(), SessionError> {
        self.told = Some(held);
        self.channel.queue(MessageKind::Confirm as u16, Confirm::new(held).as_bytes(), &[]);
        self.channel.flush(reactor)?;
        Ok(())
    }

    /// One read, everything in it, one answer; the answer later if the copy has to become durable first.
    fn round(
        &mut self,
        reactor: &mut Reactor,
        replica: &mut Replica,
        confirms: bool,
    ) -> Result<bool, SessionError> {
        let mut taken = false;
        let mut refused = None;
        let Session { channel, greeted, .. } = self;
        channel.flush(reactor)?;
        if channel.is_backed_up() {
            // The host does not read from an owner that does not take its answers (P10). An event follows when the socket
            // takes more.
            return Ok(false);
        }
        let more = channel.receive(reactor, |frame| -> Result<(), SessionError> {
            match take(frame, greeted, replica)? {
                Verdict::Taken => taken = true,
                Verdict::Refused(epoch) => refused = Some(epoch),
            }
            Ok(())
        })?;
        if taken && confirms {
            channel.queue(MessageKind::Confirm as u16, Confirm::new(replica.held()).as_bytes(), &[]);
        }
        if let Some(epoch) = refused {
            let refuse = Refuse { epoch: epoch.into() };
            channel.queue(MessageKind::Refuse as u16, refuse.as_bytes(), &[]);
        }
        channel.flush(reactor)?;
        Ok(more)
    }
}

fn take(frame: Frame<'_>, greeted: &mut bool, replica: &mut Replica) -> Result<Verdict, WireError> {
    match MessageKind::from_wire(frame.kind) {
        Some(MessageKind::Hello) if !*greeted => {
            let verdict = replica.hello(&wire::fixed(MessageKind::Hello, frame.meta)?)?;
            *greeted = verdict == Verdict::Taken;
            Ok(verdict)
        }
        Some(MessageKind::Batch) if *greeted => {
            let (head, headers) = wire::batch(frame.meta)?;
            replica.batch(&head, headers, frame.data)
        }
        Some(MessageKind::Hello | MessageKind::Batch) => {
            Err(WireError::Protocol("hello must come first, and once"))
        }
        _ => Err(WireError::Kind(frame.kind)),
    }
}
