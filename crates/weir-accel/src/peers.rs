//! The owner's channels to its replicas.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use weir_block::{Interest, Meter, Nanos, OwnerId, Reactor, RequestKind, Stream, Token};
use weir_net::{Channel, ChannelError, Frame};
use zerocopy::IntoBytes;

use crate::feed::{Feed, Limits, Run};
use crate::lineage::Lineage;
use crate::log::Log;
use crate::owner::{Event, Held};
use crate::planted::Planted;
use crate::wire::{self, Confirm, Hello, MessageKind, RecordHeader, Refuse, WireError};

/// Most bytes of data (softly) in one batch.
const BATCH: usize = 1 << 20;

/// The same for a batch of the backlog.
const PART: usize = 256 << 10;

/// After a confirmation, the backlog pauses for this multiple of the time that the batch took. So it gets a quarter of the
/// scarce resource: the network, or the processors of this node or the replica's.
const REST: u32 = 3;

/// But the pause is at most this part of the time after which a silent replica counts as lost: the replica sends nothing
/// during the pause.
const LONGEST_REST: u32 = 8;

/// Frames read from one peer before others get their turn.
const MOST_ROUNDS: usize = 8;

/// Why a channel to a replica was given up.
#[derive(Debug, thiserror::Error)]
enum PeerError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("no answer to our hello within {0:?}")]
    Silent(Duration),
}

/// A batch of records that is not confirmed.
struct UnderWay {
    first: u64,
    last: u64,
    bytes: u64,
    queued: Nanos,
}

struct Peer {
    /// Never used again, so that an event of an older channel is not taken for one of this.
    slot: u32,
    node: String,
    since: Nanos,
    channel: Channel,
    /// The next batches for it; `None` until it has answered our Hello.
    feed: Option<Feed>,
    /// Epoch and freed record of our Hello.
    told: (u64, u64),
    /// Live batches that are not confirmed. At most one for each record of the log (P10).
    under_way: VecDeque<UnderWay>,
    /// The same of the backlog.
    parts: VecDeque<UnderWay>,
    /// The time at which the next part of the backlog is due.
    resumes: Nanos,
    longest_rest: Duration,
    lost: bool,
    planted: Planted,
}

/// Log, epoch and scratch space of one round of sending.
struct Sending<'a> {
    log: &'a Log,
    epoch: u64,
    records: usize,
    meta: &'a mut Vec<u8>,
    pieces: &'a mut Vec<(usize, usize)>,
    meter: &'a mut Meter,
}

/// The identity in every message of this owner.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    pub epoch: u64,
    pub lineage: Lineage,
}

/// All channels of one disk's owner.
pub struct Peers {
    owner: OwnerId,
    /// A node that connects and does not answer our Hello within this time is dropped.
    deadline: Duration,
    /// Most records of a batch.
    records: usize,
    peers: Vec<Peer>,
    next_slot: u32,
    meta: Vec<u8>,
    pieces: Vec<(usize, usize)>,
    /// Batches on their way to replicas and back.
    meter: Meter,
    planted: Planted,
}

impl Peers {
    /// No channels; their events will go to `owner`.
    pub fn new(owner: OwnerId, deadline: Duration, records: usize) -> Peers {
        Peers {
            owner,
            deadline,
            records,
            peers: Vec::new(),
            next_slot: 0,
            meta: Vec::new(),
            pieces: Vec::new(),
            meter: Meter::new(),
            planted: Planted::default(),
        }
    }

    /// Plants a bug, so that the checks can show that they find it.
    #[cfg(feature = "planted-bugs")]
    pub fn plant(&mut self, planted: Planted) {
        self.planted = planted;
    }

    /// The meter of the replicas: a request is a batch of records, from the moment that it is queued until the replica has
    /// confirmed it.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// A connection to `node`, whose copy the registry counts or does not, stands: introduce ourselves.
    pub fn connect(
        &mut self,
        reactor: &mut Reactor,
        node: String,
        stream: Stream,
        (identity, counted): (Identity, bool),
        log: &Log,
    ) -> io::Result<()> {
        self.drop_peer(reactor, &node);
        let slot = self.next_slot;
        self.next_slot = slot.wrapping_add(1);
        let token = Token { owner: self.owner, slot };
        let mut channel = Channel::new(stream, token, Some(log.region().clone()), &[], reactor)?;
        #[cfg(feature = "planted-bugs")]
        if self.planted.has(crate::planted::Bug::CountPartialFrame) {
            channel.plant_counting_parts();
        }
        let hello = Hello::new(identity.epoch, identity.lineage, log.freed(), counted);
        channel.queue(MessageKind::Hello as u16, hello.as_bytes(), &[]);
        let told = (identity.epoch, log.freed());
        self.peers.push(Peer {
            slot,
            node,
            since: reactor.now(),
            channel,
            feed: None,
            told,
            under_way: VecDeque::new(),
            parts: VecDeque::new(),
            resumes: Nanos(0),
            longest_rest: self.deadline / LONGEST_REST,
            lost: false,
            planted: self.planted,
        });
        Ok(())
    }

    /// An event for one of the channels.
    pub fn on_event(&mut self, slot: u32, interest: Interest) {
        if let Some(peer) = self.peers.iter_mut().find(|peer| peer.slot == slot) {
            peer.channel.on_event(interest);
        }
    }

    /// Reads what the replicas say. Returns whether more may be waiting.
    pub fn receive(&mut self, reactor: &mut Reactor, log: &Log, events: &mut Vec<Event>) -> bool {
        let Peers { peers, meter, .. } = self;
        let mut more = false;
        for peer in peers.iter_mut().filter(|peer| !peer.lost) {
            more |= peer.receive(reactor, log, meter, events);
        }
        more
    }

    /// Gives up who does not answer our Hello.
    pub fn expire(&mut self, now: Nanos, events: &mut Vec<Event>) {
        let deadline = self.deadline;
        let Peers { peers, meter, .. } = self;
        for peer in peers.iter_mut().filter(|peer| peer.is_silent() && now >= peer.since + deadline) {
            peer.give_up(&PeerError::Silent(deadline), now, meter, events);
        }
    }

    /// The time at which [`Peers::expire`] or [`Peers::send`] is due without an event.
    pub fn deadline(&self) -> Nanos {
        let silent = self.peers.iter().filter(|peer| peer.is_silent()).map(|peer| peer.since + self.deadline);
        let resting = self.peers.iter().filter(|peer| peer.is_resting());
        silent.chain(resting.map(|peer| peer.resumes)).min().unwrap_or(Nanos::NEVER)
    }

    /// Sends every replica what it does not have yet, in as few frames as possible. The backlog of a copy that is being filled
    /// leaves most of the time to live writes, unless they wait for it: then `hurry`.
    pub fn send(
        &mut self,
        reactor: &mut Reactor,
        log: &Log,
        epoch: u64,
        hurry: bool,
        events: &mut Vec<Event>,
    ) {
        let Peers { peers, records, meta, pieces, meter, .. } = self;
        let mut sending = Sending { log, epoch, records: *records, meta, pieces, meter };
        for peer in peers.iter_mut().filter(|peer| !peer.lost) {
            if let Err(error) = peer.send(reactor, &mut sending, hurry) {
                peer.give_up(&error.into(), reactor.now(), sending.meter, events);
            }
        }
    }

    /// The log is about to free everything up to `sequence`. A peer that does not count may still have some of it in its
    /// queue: the queued data must not change any more, although the arena will (P11).
    pub fn freeing(&mut self, sequence: u64) {
        let lacks =
            |peer: &&mut Peer| peer.under_way.iter().chain(&peer.parts).any(|batch| batch.first <= sequence);
        for peer in self.peers.iter_mut().filter(lacks) {
            peer.channel.copy_out();
        }
    }

    /// Closes the channel to a node.
    pub fn drop_peer(&mut self, reactor: &mut Reactor, node: &str) {
        let Peers { peers, meter, .. } = self;
        peers.retain_mut(|peer| {
            if peer.node == node {
                peer.forget(reactor.now(), meter);
                peer.channel.close(reactor);
            }
            peer.node != node
        });
    }

    /// Closes all channels.
    pub fn drop_all(&mut self, reactor: &mut Reactor) {
        for mut peer in self.peers.drain(..) {
            peer.forget(reactor.now(), &mut self.meter);
            peer.channel.close(reactor);
        }
    }
}

impl Peer {
    fn is_silent(&self) -> bool {
        self.feed.is_none() && !self.lost
    }

    /// A part of the backlog is due at [`Peer::resumes`], and nothing else has to happen before.
    fn is_resting(&self) -> bool {
        let has_backlog = self.feed.as_ref().is_some_and(Feed::has_backlog);
        has_backlog && !self.lost && self.parts.is_empty() && !self.channel.is_backed_up()
    }

    /// Sends what there is, as much as the socket takes. Of the backlog only a part when that is due, but then first: a guest
    /// that fills the link would otherwise keep it from ever being sent.
    fn send(
        &mut self,
        reactor: &mut Reactor,
        sending: &mut Sending<'_>,
        hurry: bool,
    ) -> Result<(), ChannelError> {
        let now = reactor.now();
        while !self.channel.is_backed_up() {
            let due = hurry || (self.parts.is_empty() && now >= self.resumes);
            let part = due && self.queue_part(now, sending);
            let live = self.queue_live(now, sending);
            if !part && !live {
                break;
            }
        }
        self.channel.flush(reactor)
    }

    fn queue_live(&mut self, now: Nanos, sending: &mut Sending<'_>) -> bool {
        let Some(feed) = &mut self.feed else { return false };
        let Some(run) = feed.live(sending.log, sending.epoch, sending.limits(BATCH)) else { return false };
        self.under_way.extend(sending.queue(&mut self.channel, &run, now));
        true
    }

    fn queue_part(&mut self, now: Nanos, sending: &mut Sending<'_>) -> bool {
        let Some(feed) = &mut self.feed else { return false };
        let Some(run) = feed.backlog(sending.log, sending.epoch, sending.limits(PART)) else { return false };
        self.parts.extend(sending.queue(&mut self.channel, &run, now));
        true
    }

    /// No confirmation will come for batches in flight.
    fn forget(&mut self, now: Nanos, meter: &mut Meter) {
        for UnderWay { bytes, queued, .. } in self.under_way.drain(..).chain(self.parts.drain(..)) {
            meter.complete(RequestKind::Write, bytes, queued, now, false);
        }
    }

    fn receive(
        &mut self,
        reactor: &mut Reactor,
        log: &Log,
        meter: &mut Meter,
        events: &mut Vec<Event>,
    ) -> bool {
        for _ in 0..MOST_ROUNDS {
            let now = reactor.now();
            let Peer { node, channel, feed, told, under_way, parts, resumes, longest_rest, planted, .. } =
                self;
            let mut take = |frame: Frame<'_>| -> Result<(), PeerError> {
                match MessageKind::from_wire(frame.kind) {
                    Some(MessageKind::Confirm) => {
                        let confirm: Confirm = wire::fixed(MessageKind::Confirm, frame.meta)?;
                        let next = feed.as_ref().map_or(log.last() + 1, Feed::next);
                        let held = check(&confirm, next)?;
                        if feed.is_none() {
                            *feed = Some(Feed::new(held, log, *told).planted(*planted));
                            events.push(Event::PeerJoined(node.clone()));
                        }
                        came_back(under_way, |batch| batch.last <= held.last, now, meter);
                        let no_gap = held.gap <= held.freed;
                        if let Some(took) =
                            came_back(parts, |part| part.first > held.gap || no_gap, now, meter)
                        {
                            *resumes = now + (took * REST).min(*longest_rest);
                        }
                        confirmed(events, node, held);
                        Ok(())
                    }
                    Some(MessageKind::Refuse) => {
                        let refuse: Refuse = wire::fixed(MessageKind::Refuse, frame.meta)?;
                        events.push(Event::Refused { node: node.clone(), epoch: refuse.epoch.get() });
                        Ok(())
                    }
                    _ => Err(WireError::Kind(frame.kind).into()),
                }
            };
            match channel.receive(reactor, &mut take) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(error) => {
                    self.give_up(&error, now, meter, events);
                    return false;
                }
            }
        }
        true
    }

    fn give_up(&mut self, error: &PeerError, now: Nanos, meter: &mut Meter, events: &mut Vec<Event>) {
        if !self.lost {
            self.forget(now, meter);
            tracing::warn!(node = self.node, %error, "channel to a replica ended");
            self.lost = true;
            events.push(Event::PeerLost(self.node.clone()));
        }
    }
}

impl Sending<'_> {
    fn limits(&self, bytes: usize) -> Limits {
        Limits { records: self.records, bytes }
    }

    /// Queues a batch. Returns it as in flight, if it has records.
    fn queue(&mut self, channel: &mut Channel, run: &Run, now: Nanos) -> Option<UnderWay> {
        let Sending { log, meta, pieces, meter, .. } = self;
        let Run { head, first, last, bytes } = *run;
        meta.clear();
        pieces.clear();
        meta.extend_from_slice(head.as_bytes());
        for (_, record) in log.range(first, last) {
            meta.extend_from_slice(RecordHeader::of(record).as_bytes());
            if record.data_length() > 0 {
                push_piece(pieces, log.arena_offset(record.position), record.data_length());
            }
        }
        channel.queue(MessageKind::Batch as u16, meta, pieces);
        (last >= first).then(|| {
            meter.arrive(RequestKind::Write, now);
            UnderWay { first, last, bytes: bytes as u64, queued: now }
        })
    }
}

/// Removes batches at the front for which `is_confirmed` holds. Returns the time that the last of them was in flight.
fn came_back(
    under_way: &mut VecDeque<UnderWay>,
    is_confirmed: impl Fn(&UnderWay) -> bool,
    now: Nanos,
    meter: &mut Meter,
) -> Option<Duration> {
    let mut took = None;
    while under_way.front().is_some_and(&is_confirmed)
        && let Some(UnderWay { bytes, queued, .. }) = under_way.pop_front()
    {
        meter.complete(RequestKind::Write, bytes, queued, now, true);
        took = Some(now - queued);
    }
    took
}

/// Records that follow each other in the arena are sent as one piece.
fn push_piece(pieces: &mut Vec<(usize, usize)>, position: usize, length: usize) {
    match pieces.last_mut() {
        Some((start, before)) if *start + *before == position => *before += length,
        _ => pieces.push((position, length)),
    }
}

/// The state that a replica confirms. It cannot include `next`, the live record that is sent next, or anything after it.
fn check(confirm: &Confirm, next: u64) -> Result<Held, WireError> {
    let held = confirm.held()?;
    if held.last >= next {
        return Err(WireError::Protocol("confirmed records that were never sent"));
    }
    Ok(held)
}

/// Of several confirmations in one read only the last one counts.
fn confirmed(events: &mut Vec<Event>, node: &str, now: Held) {
    match events.last_mut() {
        Some(Event::PeerConfirmed { node: before, held }) if before == node => *held = now,
        _ => events.push(Event::PeerConfirmed { node: node.to_owned(), held: now }),
    }
}
