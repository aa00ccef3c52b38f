//! The connection of a disk's owner: on this shard, or from another node.

use std::collections::VecDeque;
use std::io;

use weir_block::{BufferPool, Interest, Reactor, Stream, Token};
use weir_net::{Channel, ChannelError};

use crate::lun::redirect::wire::{self, LARGEST, WireError};
use crate::lun::redirect::{ToCoordinator, ToOwner};

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The connection.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// What came over it.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// It does not follow the protocol.
    #[error("the owner does not follow the protocol of redirected I/O: {0}")]
    Order(&'static str),
    /// It owned the disk once.
    #[error("it owns the disk in epoch {epoch}, and the disk's owner is of epoch {now}")]
    Former {
        /// Its epoch.
        epoch: u64,
        /// The present one.
        now: u64,
    },
}

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    New,
    Greeted,
    Welcome,
}

/// The owner's connection, if there is one.
pub enum Peer {
    None,
    /// On this shard.
    Here(Connection<VecDeque<ToOwner>>),
    /// From another node.
    Remote(Box<Connection<Remote>>),
}

pub struct Connection<T> {
    way: T,
    stage: Stage,
}

pub struct Remote {
    channel: Channel,
    slot: u32,
    /// More may have arrived than was taken.
    more: bool,
}

impl Peer {
    pub fn here() -> Peer {
        Peer::Here(Connection { way: VecDeque::new(), stage: Stage::New })
    }

    pub fn remote(reactor: &mut Reactor, stream: Stream, token: Token) -> io::Result<Peer> {
        let channel = Channel::new(stream, token, None, &[], reactor)?;
        let way = Remote { channel, slot: token.slot, more: true };
        Ok(Peer::Remote(Box::new(Connection { way, stage: Stage::New })))
    }

    pub fn is_there(&self) -> bool {
        !matches!(self, Peer::None)
    }

    fn stage(&mut self) -> Option<&mut Stage> {
        match self {
            Peer::None => None,
            Peer::Here(connection) => Some(&mut connection.stage),
            Peer::Remote(connection) => Some(&mut connection.stage),
        }
    }

    pub fn has_greeted(&mut self) -> bool {
        self.stage().is_some_and(|stage| *stage != Stage::New)
    }

    pub fn is_welcome(&mut self) -> bool {
        self.stage().is_some_and(|stage| *stage == Stage::Welcome)
    }

    pub fn greeted(&mut self) {
        self.stage().into_iter().for_each(|stage| *stage = Stage::Greeted);
    }

    pub fn welcomed(&mut self) {
        self.stage().into_iter().for_each(|stage| *stage = Stage::Welcome);
    }

    pub fn on_event(&mut self, slot: u32, interest: Interest) {
        if let Peer::Remote(connection) = self
            && connection.way.slot == slot
        {
            connection.way.channel.on_event(interest);
            connection.way.more |= interest == Interest::Read;
        }
    }

    pub fn send(&mut self, message: ToOwner) {
        match self {
            Peer::None => {}
            Peer::Here(connection) => connection.way.push_back(message),
            Peer::Remote(connection) => {
                let frames = wire::encode_to_owner(message).into_iter();
                frames.for_each(|frame| frame.queue(&mut connection.way.channel));
            }
        }
    }

    pub fn outbox(&mut self) -> impl Iterator<Item = ToOwner> + use<'_> {
        let outbox = match self {
            Peer::Here(connection) => Some(&mut connection.way),
            Peer::None | Peer::Remote(_) => None,
        };
        outbox.into_iter().flat_map(|outbox| outbox.drain(..))
    }

    /// Messages that have arrived, and whether more may have: then it is to be called again. It takes nothing while there is no room for more
    /// data, or too much is unsent ([`Peer::has_more`]).
    pub fn receive(
        &mut self,
        reactor: &mut Reactor,
        pool: &BufferPool,
    ) -> Result<(Vec<ToCoordinator>, bool), PeerError> {
        let mut messages = Vec::new();
        // One call takes at most a full receive buffer, and a buffer of the pool is at most twice as large as its data.
        let has_room = pool.lent() + 4 * LARGEST <= pool.limit();
        let Peer::Remote(connection) = self else { return Ok((messages, false)) };
        let Remote { channel, more, .. } = &mut connection.way;
        if !*more || !has_room || channel.is_backed_up() {
            return Ok((messages, false));
        }
        *more = channel.receive(reactor, |frame| {
            messages.push(wire::decode_to_coordinator(frame, pool)?);
            Ok::<(), PeerError>(())
        })?;
        Ok((messages, *more))
    }

    /// More may have arrived than was taken.
    pub fn has_more(&self) -> bool {
        matches!(self, Peer::Remote(connection) if connection.way.more)
    }

    pub fn flush(&mut self, reactor: &mut Reactor) -> Result<(), PeerError> {
        match self {
            Peer::Remote(connection) => Ok(connection.way.channel.flush(reactor)?),
            Peer::None | Peer::Here(_) => Ok(()),
        }
    }

    pub fn close(&mut self, reactor: &mut Reactor) {
        if let Peer::Remote(connection) = self {
            connection.way.channel.close(reactor);
        }
        *self = Peer::None;
    }
}
