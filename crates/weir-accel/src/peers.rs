//! The owner's channels to its replicas.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use weir_block::{Interest, Meter, Nanos, OwnerId, Reactor, RequestKind, Stream, Token};
use weir_net::{Channel, ChannelError, Frame};
use zerocopy::IntoBytes;

use crate::lineage::Lineage;
use crate::log::Log;
use crate::owner::{Event, Held};
#[cfg(feature = "planted-bugs")]
use crate::planted::Planted;
use crate::wire::{self, Batch, Confirm, Hello, MessageKind, RecordHeader, Refuse, WireError};

/// Most records and (softly) bytes of data in one batch.
const MOST_RECORDS: usize = 1024;
const MOST_BYTES: usize = 1 << 20;

/// The same (softly) for a batch of a copy that is filled while nobody waits for it.
const FILLING_BYTES: usize = 512 << 10;

/// When such a batch is confirmed, the copy rests for so many times as long as that took: it gets a quarter of whatever is
/// scarce, be it the network, the processors here or those of the replica's node.
const REST: u32 = 3;

/// After each batch, what is left must have become less by this part of it.
const GAIN: u64 = 4;

/// But no longer than this part of the time after which a silent replica counts as lost: it says nothing while it rests.
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
    /// The replica has answered our Hello; `next` is valid.
    joined: bool,
    /// The record to be sent next.
    next: u64,
    /// Epoch and freed record that the replica was last told.
    told: (u64, u64),
    /// The replica was told that its copy is complete.
    complete: bool,
    /// Batches that are not confirmed. At most one for each record of the log (P10).
    under_way: VecDeque<UnderWay>,
    /// When the next part of a copy that is being filled is due.
    resumes: Nanos,
    longest_rest: Duration,
    /// Records that may be left to copy until then.
    most_left: u64,
    lost: bool,
}

/// Log, epoch and scratch space of one round of sending.
struct Sending<'a> {
    log: &'a Log,
    epoch: u64,
    meta: &'a mut Vec<u8>,
    pieces: &'a mut Vec<(usize, usize)>,
    meter: &'a mut Meter,
}

/// What every message of this owner carries.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    pub epoch: u64,
    pub lineage: Lineage,
}

/// All channels of one disk's owner.
pub struct Peers {
    owner: OwnerId,
    /// Who connects and then does not answer our Hello within this time is given up.
    deadline: Duration,
    peers: Vec<Peer>,
    next_slot: u32,
    meta: Vec<u8>,
    pieces: Vec<(usize, usize)>,
    /// Batches on their way to replicas and back.
    meter: Meter,
    #[cfg(feature = "planted-bugs")]
    planted: Planted,
}

impl Peers {
    /// No channels; their events will go to `owner`.
    pub fn new(owner: OwnerId, deadline: Duration) -> Peers {
        Peers {
            owner,
            deadline,
            peers: Vec::new(),
            next_slot: 0,
            meta: Vec::new(),
            pieces: Vec::new(),
            meter: Meter::new(),
            #[cfg(feature = "planted-bugs")]
            planted: Planted::default(),
        }
    }

    /// Plants a bug, so that the checks can show that they find it.
    #[cfg(feature = "planted-bugs")]
    pub fn plant(&mut self, planted: Planted) {
        self.planted = planted;
    }

    /// What the replicas did: a request is a batch of records, from the moment that it is queued until the replica has
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
            joined: false,
            next: 0,
            told,
            complete: false,
            under_way: VecDeque::new(),
            resumes: Nanos(0),
            longest_rest: self.deadline / LONGEST_REST,
            most_left: u64::MAX,
            lost: false,
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

    /// When [`Peers::expire`] or [`Peers::send`] is due without an event.
    pub fn deadline(&self) -> Nanos {
        let silent = self.peers.iter().filter(|peer| peer.is_silent()).map(|peer| peer.since + self.deadline);
        let filling = self.peers.iter().filter(|peer| peer.is_filling() && peer.under_way.is_empty());
        silent.chain(filling.map(|peer| peer.resumes)).min().unwrap_or(Nanos::NEVER)
    }

    /// Sends every replica what it does not have yet, in as few frames as possible. A copy that is being filled leaves most
    /// of the time to live writes, unless they wait for it: then `hurry`.
    pub fn send(
        &mut self,
        reactor: &mut Reactor,
        log: &Log,
        epoch: u64,
        hurry: bool,
        events: &mut Vec<Event>,
    ) {
        let Peers { peers, meta, pieces, meter, .. } = self;
        let mut sending = Sending { log, epoch, meta, pieces, meter };
        for peer in peers.iter_mut().filter(|peer| !peer.lost) {
            let sent = if peer.is_filling() && !hurry {
                peer.fill(reactor, &mut sending)
            } else {
                peer.send(reactor, &mut sending)
            };
            if let Err(error) = sent {
                peer.give_up(&error.into(), reactor.now(), sending.meter, events);
            }
        }
    }

    /// The log is about to free everything up to `sequence`. A peer that nobody counts may not have been sent all of it: what is
    /// queued for it must not change any more, although the arena will (P11).
    pub fn freeing(&mut self, sequence: u64) {
        let lacks = |peer: &&mut Peer| peer.under_way.iter().any(|batch| batch.first <= sequence);
        for peer in self.peers.iter_mut().filter(lacks) {
            peer.channel.copy_out();
        }
    }

    /// Closes the channel to a node.
    pub fn drop_peer(&mut self, reactor: &mut Reactor, node: &str) {
        let Peers { peers, meter, .. } = self;
        peers.retain_mut(|peer| {
            if peer.node == node {
                forget(&mut peer.under_way, reactor.now(), meter);
                peer.channel.close(reactor);
            }
            peer.node != node
        });
    }

    /// Closes all channels.
    pub fn drop_all(&mut self, reactor: &mut Reactor) {
        for mut peer in self.peers.drain(..) {
            forget(&mut peer.under_way, reactor.now(), &mut self.meter);
            peer.channel.close(reactor);
        }
    }
}

impl Peer {
    fn is_silent(&self) -> bool {
        !self.joined && !self.lost
    }

    /// It has not been sent all of the log yet.
    fn is_filling(&self) -> bool {
        self.joined && !self.complete && !self.lost
    }

    /// Sends all that there is, as much as the socket takes.
    fn send(&mut self, reactor: &mut Reactor, sending: &mut Sending<'_>) -> Result<(), ChannelError> {
        while self.joined
            && !self.channel.is_backed_up()
            && self.queue_batch(reactor.now(), sending, MOST_BYTES)
        {}
        self.channel.flush(reactor)
    }

    /// Sends a part of the log, once the part before is confirmed and the copy has rested. When the guest has written nearly
    /// as much meanwhile, then all that the socket takes, or the copy would not catch up with it.
    fn fill(&mut self, reactor: &mut Reactor, sending: &mut Sending<'_>) -> Result<(), ChannelError> {
        let left = (sending.log.last() + 1).saturating_sub(self.next);
        if left > self.most_left {
            return self.send(reactor, sending);
        }
        let now = reactor.now();
        if self.under_way.is_empty() && now >= self.resumes {
            let before = self.next;
            self.queue_batch(now, sending, FILLING_BYTES);
            self.most_left = left.saturating_sub((self.next - before) / GAIN);
        }
        self.channel.flush(reactor)
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
            let Peer { node, channel, joined, next, under_way, resumes, longest_rest, .. } = self;
            let mut take = |frame: Frame<'_>| -> Result<(), PeerError> {
                match MessageKind::from_wire(frame.kind) {
                    Some(MessageKind::Confirm) => {
                        let confirm: Confirm = wire::fixed(MessageKind::Confirm, frame.meta)?;
                        let held = check(&confirm, if *joined { *next } else { log.last() + 1 })?;
                        if !*joined {
                            *joined = true;
                            *next = held.last.max(log.freed()) + 1;
                            events.push(Event::PeerJoined(node.clone()));
                        }
                        if let Some(took) = came_back(under_way, held.last, now, meter) {
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
            forget(&mut self.under_way, now, meter);
            tracing::warn!(node = self.node, %error, "channel to a replica ended");
            self.lost = true;
            events.push(Event::PeerLost(self.node.clone()));
        }
    }

    /// Queues the next batch, softly of `most` bytes. False when the replica has been sent everything.
    fn queue_batch(&mut self, now: Nanos, sending: &mut Sending<'_>, most: usize) -> bool {
        let Sending { log, epoch, meta, pieces, meter } = sending;
        let epoch = *epoch;
        // What was freed meanwhile is in the backing; nobody needs it any more.
        let first = self.next.max(log.freed() + 1);
        let told = (epoch, log.freed());
        if first > log.last() && self.told == told && self.complete {
            return false;
        }
        meta.clear();
        pieces.clear();
        let mut head = Batch {
            epoch: epoch.into(),
            first: first.into(),
            freed: 0.into(),
            count: 0.into(),
            complete: 0.into(),
        };
        meta.extend_from_slice(head.as_bytes());
        let (mut count, mut bytes) = (0, 0);
        for (_, record) in log.range(first, log.last()).take(MOST_RECORDS) {
            let length = record.data_length();
            if count > 0 && bytes + length > most {
                break;
            }
            meta.extend_from_slice(RecordHeader::of(record).as_bytes());
            if length > 0 {
                push_piece(pieces, log.position(record.place), length);
            }
            count += 1;
            bytes += length;
        }
        self.next = first + count as u64;
        if count > 0 {
            meter.arrive(RequestKind::Write, now);
            let last = self.next - 1;
            self.under_way.push_back(UnderWay { first, last, bytes: bytes as u64, queued: now });
        }
        self.complete |= self.next > log.last();
        self.told = told;
        head.freed = told.1.into();
        head.count = (count as u32).into();
        head.complete = u32::from(self.complete).into();
        meta[..size_of::<Batch>()].copy_from_slice(head.as_bytes());
        self.channel.queue(MessageKind::Batch as u16, meta, pieces);
        true
    }
}

/// The batches up to this record are confirmed. Returns how long the last of them was under way.
fn came_back(
    under_way: &mut VecDeque<UnderWay>,
    last: u64,
    now: Nanos,
    meter: &mut Meter,
) -> Option<Duration> {
    let mut took = None;
    while let Some(&UnderWay { bytes, queued, .. }) = under_way.front().filter(|batch| batch.last <= last) {
        meter.complete(RequestKind::Write, bytes, queued, now, true);
        took = Some(now - queued);
        under_way.pop_front();
    }
    took
}

/// Nobody will confirm them.
fn forget(under_way: &mut VecDeque<UnderWay>, now: Nanos, meter: &mut Meter) {
    for UnderWay { bytes, queued, .. } in under_way.drain(..) {
        meter.complete(RequestKind::Write, bytes, queued, now, false);
    }
}

/// Records that follow each other in the arena are sent as one piece.
fn push_piece(pieces: &mut Vec<(usize, usize)>, position: usize, length: usize) {
    match pieces.last_mut() {
        Some((start, before)) if *start + *before == position => *before += length,
        _ => pieces.push((position, length)),
    }
}

/// What a replica says that it holds. It cannot hold what comes after `next`, the record that it is sent next.
fn check(confirm: &Confirm, next: u64) -> Result<Held, WireError> {
    let complete = confirm.complete.get() == 1;
    let (epoch, last, freed) = (confirm.epoch.get(), confirm.last.get(), confirm.freed.get());
    let held = Held { epoch, last, freed, complete };
    if held.last >= next || held.freed > held.last {
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
