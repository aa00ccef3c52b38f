//! The connection of a disk's owner: on this shard, or from another node.

use std::collections::VecDeque;
use std::io;

use weir_block::{BufferPool, Interest, IoError, Reactor, Stream, Token};
use weir_net::ChannelError;

use crate::lun::redirect::connection::Connection;
use crate::lun::redirect::wire::{self, WireError};
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
    /// The LUN refuses this node's I/O, or the filesystem has shut down: another one coordinates the volume by now, or soon. The owner goes
    /// there, and its guest waits (P9).
    #[error("the LUN refuses the I/O of this node, or the filesystem has shut down: {0}")]
    Refused(IoError),
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
    Here(Staged<VecDeque<ToOwner>>),
    /// From another node.
    Remote(Box<Staged<Connection>>),
}

pub struct Staged<T> {
    way: T,
    stage: Stage,
}

impl Peer {
    pub fn here() -> Peer {
        Peer::Here(Staged { way: VecDeque::new(), stage: Stage::New })
    }

    pub fn remote(reactor: &mut Reactor, stream: Stream, token: Token) -> io::Result<Peer> {
        let way = Connection::new(reactor, stream, token)?;
        Ok(Peer::Remote(Box::new(Staged { way, stage: Stage::New })))
    }

    pub fn is_there(&self) -> bool {
        !matches!(self, Peer::None)
    }

    fn stage(&mut self) -> Option<&mut Stage> {
        match self {
            Peer::None => None,
            Peer::Here(owner) => Some(&mut owner.stage),
            Peer::Remote(owner) => Some(&mut owner.stage),
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
        if let Peer::Remote(owner) = self {
            owner.way.on_event(slot, interest);
        }
    }

    pub fn send(&mut self, message: ToOwner) {
        match self {
            Peer::None => {}
            Peer::Here(owner) => owner.way.push_back(message),
            Peer::Remote(owner) => {
                wire::encode_to_owner(message).into_iter().for_each(|frame| owner.way.send(frame));
            }
        }
    }

    pub fn outbox(&mut self) -> impl Iterator<Item = ToOwner> + use<'_> {
        let outbox = match self {
            Peer::Here(owner) => Some(&mut owner.way),
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
        match self {
            // An owner that sends much, and takes nothing, would have ever more answers waiting here.
            Peer::Remote(owner) if !owner.way.is_backed_up() => {
                owner.way.receive(reactor, pool, wire::decode_to_coordinator)
            }
            Peer::None | Peer::Here(_) | Peer::Remote(_) => Ok((Vec::new(), false)),
        }
    }

    /// More may have arrived than was taken.
    pub fn has_more(&self) -> bool {
        matches!(self, Peer::Remote(owner) if owner.way.has_more())
    }

    pub fn flush(&mut self, reactor: &mut Reactor) -> Result<(), PeerError> {
        match self {
            Peer::Remote(owner) => Ok(owner.way.flush(reactor)?),
            Peer::None | Peer::Here(_) => Ok(()),
        }
    }

    pub fn close(&mut self, reactor: &mut Reactor) {
        if let Peer::Remote(owner) = self {
            owner.way.close(reactor);
        }
        *self = Peer::None;
    }
}
