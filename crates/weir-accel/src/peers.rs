//! The owner's channels to its replicas.

use std::io;
use std::os::fd::OwnedFd;

use slab::Slab;
use weir_block::{Interest, OwnerId, Reactor, Token};
use weir_net::{Channel, ChannelError, Frame};
use zerocopy::IntoBytes;

use crate::log::Log;
use crate::owner::Event;
use crate::wire::{self, Batch, Confirm, Hello, MessageKind, RecordHeader, Refuse, WireError};

/// Most records and (softly) bytes of data in one batch.
const MOST_RECORDS: usize = 1024;
const MOST_BYTES: usize = 1 << 20;

/// Frames read from one peer before others get their turn.
const MOST_ROUNDS: usize = 8;

/// Why a channel to a replica was given up.
#[derive(Debug, thiserror::Error)]
enum PeerError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Wire(#[from] WireError),
}

struct Peer {
    node: String,
    channel: Channel,
    /// The replica has answered our Hello; `next` is valid.
    joined: bool,
    /// The record to be sent next.
    next: u64,
    /// Epoch and freed record that the replica was last told.
    told: (u64, u64),
    /// The replica was told that its copy is complete.
    complete: bool,
    lost: bool,
}

/// What every message of this owner carries.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    pub epoch: u64,
    pub lineage: u64,
    /// Lineage and last record of the log that this one was inherited from.
    pub inherited: (u64, u64),
}

/// All channels of one disk's owner.
pub struct Peers {
    owner: OwnerId,
    peers: Slab<Peer>,
    meta: Vec<u8>,
    pieces: Vec<(usize, usize)>,
}

impl Peers {
    /// No channels; their events will go to `owner`.
    pub fn new(owner: OwnerId) -> Peers {
        Peers { owner, peers: Slab::new(), meta: Vec::new(), pieces: Vec::new() }
    }

    /// A connection to `node` stands: introduce ourselves.
    pub fn connect(
        &mut self,
        reactor: &mut Reactor,
        node: String,
        fd: OwnedFd,
        identity: Identity,
        log: &Log,
    ) -> io::Result<()> {
        self.drop_peer(reactor, &node);
        let slot = self.peers.vacant_key() as u32;
        let token = Token { owner: self.owner, slot };
        let mut channel = Channel::new(fd, token, Some(log.region().clone()), &[], reactor)?;
        let hello = Hello {
            epoch: identity.epoch.into(),
            lineage: identity.lineage.into(),
            inherited_lineage: identity.inherited.0.into(),
            inherited_last: identity.inherited.1.into(),
            freed: log.freed().into(),
        };
        channel.queue(MessageKind::Hello as u16, hello.as_bytes(), &[]);
        let told = (identity.epoch, log.freed());
        self.peers.insert(Peer { node, channel, joined: false, next: 0, told, complete: false, lost: false });
        Ok(())
    }

    /// An event for one of the channels.
    pub fn on_event(&mut self, slot: u32, interest: Interest) {
        if let Some(peer) = self.peers.get_mut(slot as usize) {
            peer.channel.on_event(interest);
        }
    }

    /// Reads what the replicas say. Returns whether more may be waiting.
    pub fn receive(&mut self, reactor: &mut Reactor, freed: u64, events: &mut Vec<Event>) -> bool {
        let mut more = false;
        for (_, peer) in self.peers.iter_mut().filter(|(_, peer)| !peer.lost) {
            more |= peer.receive(reactor, freed, events);
        }
        more
    }

    /// Sends every replica what it does not have yet, in as few frames as possible.
    pub fn send(&mut self, reactor: &mut Reactor, log: &Log, epoch: u64, events: &mut Vec<Event>) {
        let Peers { peers, meta, pieces, .. } = self;
        for (_, peer) in peers.iter_mut().filter(|(_, peer)| !peer.lost) {
            while peer.joined && !peer.channel.is_backed_up() && peer.queue_batch(log, epoch, meta, pieces) {}
            if let Err(error) = peer.channel.flush(reactor) {
                peer.give_up(&error.into(), events);
            }
        }
    }

    /// Closes the channel to a node.
    pub fn drop_peer(&mut self, reactor: &mut Reactor, node: &str) {
        self.peers.retain(|_, peer| {
            if peer.node == node {
                peer.channel.close(reactor);
            }
            peer.node != node
        });
    }

    /// Closes all channels.
    pub fn drop_all(&mut self, reactor: &mut Reactor) {
        for mut peer in self.peers.drain() {
            peer.channel.close(reactor);
        }
    }
}

impl Peer {
    fn receive(&mut self, reactor: &mut Reactor, freed: u64, events: &mut Vec<Event>) -> bool {
        for _ in 0..MOST_ROUNDS {
            let Peer { node, channel, joined, next, .. } = self;
            let mut take = |frame: Frame<'_>| -> Result<(), PeerError> {
                match MessageKind::from_wire(frame.kind) {
                    Some(MessageKind::Confirm) => {
                        let confirm: Confirm = wire::fixed(MessageKind::Confirm, frame.meta)?;
                        let last = confirm.last.get();
                        if !*joined {
                            *joined = true;
                            *next = last.max(freed) + 1;
                            events.push(Event::PeerJoined(node.clone()));
                        }
                        let complete = confirm.complete.get() == 1;
                        confirmed(events, node, last, complete);
                        Ok(())
                    }
                    Some(MessageKind::Refuse) => {
                        let refuse: Refuse = wire::fixed(MessageKind::Refuse, frame.meta)?;
                        events.push(Event::Refused(refuse.epoch.get()));
                        Ok(())
                    }
                    _ => Err(WireError::Kind(frame.kind).into()),
                }
            };
            match channel.receive(reactor, &mut take) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(error) => {
                    self.give_up(&error, events);
                    return false;
                }
            }
        }
        true
    }

    fn give_up(&mut self, error: &PeerError, events: &mut Vec<Event>) {
        if !self.lost {
            tracing::warn!(node = self.node, %error, "channel to a replica ended");
            self.lost = true;
            events.push(Event::PeerLost(self.node.clone()));
        }
    }

    /// Queues the next batch. False when the replica has been sent everything.
    fn queue_batch(
        &mut self,
        log: &Log,
        epoch: u64,
        meta: &mut Vec<u8>,
        pieces: &mut Vec<(usize, usize)>,
    ) -> bool {
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
            if count > 0 && bytes + length > MOST_BYTES {
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

/// Records that follow each other in the arena are sent as one piece.
fn push_piece(pieces: &mut Vec<(usize, usize)>, position: usize, length: usize) {
    match pieces.last_mut() {
        Some((start, before)) if *start + *before == position => *before += length,
        _ => pieces.push((position, length)),
    }
}

/// Of several confirmations in one read only the last one counts.
fn confirmed(events: &mut Vec<Event>, node: &str, last: u64, complete: bool) {
    if let Some(Event::PeerConfirmed { node: before, last: held, complete: whole }) = events.last_mut()
        && before == node
    {
        (*held, *whole) = (last, complete);
        return;
    }
    events.push(Event::PeerConfirmed { node: node.to_owned(), last, complete });
}
