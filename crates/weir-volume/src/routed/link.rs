//! The connection to a volume's coordinator: on this shard, or on another node.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use weir_block::{BufferPool, Event, Interest, Reactor, Stream, Token};
use weir_net::ChannelError;

use crate::lun::redirect::connection::Connection;
use crate::lun::redirect::wire::{self, WireError};
use crate::lun::redirect::{ToCoordinator, ToOwner};
use crate::lun::serving::{PIECE, ServedDisk};

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The connection.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// What came over it.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Another version.
    #[error(
        "the coordinator's filesystem moves pieces of {0} bytes, this node expects {PIECE}: run the same version on both"
    )]
    Piece(u64),
    /// A former coordinator.
    #[error("the coordinator is of epoch {epoch}, and there was one of epoch {known}: it has been replaced")]
    Former {
        /// Its epoch.
        epoch: u64,
        /// The highest one.
        known: u64,
    },
    /// A read without its bytes.
    #[error("the coordinator answers a read without the bytes that it asks for")]
    NoData,
    /// An answer to nothing.
    #[error("the coordinator answers what it was not asked")]
    Unknown,
    /// On this shard.
    #[error("the coordinator has ended the connection")]
    Ended,
}

pub enum Link {
    None,
    /// The coordinator's side of the disk, which this one drives.
    Here {
        served: Rc<RefCell<ServedDisk>>,
        /// The connection's number.
        connection: u64,
        /// It has been told something since it was driven.
        told: bool,
    },
    Remote(Box<Connection>),
}

impl Link {
    pub fn here(reactor: &mut Reactor, served: &Rc<RefCell<ServedDisk>>) -> Link {
        let connection = served.borrow_mut().connect_here(reactor);
        Link::Here { served: Rc::clone(served), connection, told: true }
    }

    pub fn remote(reactor: &mut Reactor, stream: Stream, token: Token) -> io::Result<Link> {
        Ok(Link::Remote(Box::new(Connection::new(reactor, stream, token)?)))
    }

    pub fn is_remote(&self) -> bool {
        matches!(self, Link::Remote(_))
    }

    pub fn is_there(&self) -> bool {
        !matches!(self, Link::None)
    }

    pub fn send(&mut self, reactor: &mut Reactor, message: ToCoordinator) {
        match self {
            Link::None => {}
            Link::Here { served, told, .. } => {
                served.borrow_mut().hear(reactor, message);
                *told = true;
            }
            Link::Remote(remote) => remote.send(wire::encode_to_coordinator(message)),
        }
    }

    pub fn on_event(&mut self, slot: u32, interest: Interest) {
        if let Link::Remote(remote) = self {
            remote.on_event(slot, interest);
        }
    }

    /// An event that is none of the owner's.
    pub fn on_served_event(&mut self, reactor: &mut Reactor, event: Event) {
        if let Link::Here { served, told, .. } = self {
            served.borrow_mut().on_event(reactor, event);
            *told = true;
        }
    }

    /// Messages that have arrived, and whether more may have: then it is to be called again. It takes nothing while there is no memory for
    /// more data ([`Link::has_more`]).
    pub fn receive(
        &mut self,
        reactor: &mut Reactor,
        pool: &BufferPool,
    ) -> Result<(Vec<ToOwner>, bool), LinkError> {
        match self {
            Link::None => Ok((Vec::new(), false)),
            Link::Here { served, connection, told } => {
                let mut served = served.borrow_mut();
                served.advance(reactor);
                *told = false;
                if !served.is_connected(*connection) {
                    return Err(LinkError::Ended);
                }
                let messages: Vec<ToOwner> = served.answers().collect();
                let more = !messages.is_empty();
                Ok((messages, more))
            }
            Link::Remote(remote) => remote.receive(reactor, pool, wire::decode_to_owner),
        }
    }

    /// A coordinator here was told something, and has perhaps an answer already.
    pub fn may_have_answered(&self) -> bool {
        matches!(self, Link::Here { told: true, .. })
    }

    /// More may have arrived than was taken, or the coordinator here waits for memory.
    pub fn has_more(&self) -> bool {
        match self {
            Link::None => false,
            Link::Here { served, .. } => served.borrow().waits(),
            Link::Remote(remote) => remote.has_more(),
        }
    }

    /// Answers are not taken, for lack of memory at this end.
    pub fn awaits_memory(&self) -> bool {
        match self {
            Link::None => false,
            Link::Here { served, .. } => served.borrow().waits_for_memory_alone(),
            Link::Remote(remote) => remote.has_more(),
        }
    }

    pub fn flush(&mut self, reactor: &mut Reactor) -> Result<(), LinkError> {
        match self {
            Link::Remote(remote) => Ok(remote.flush(reactor)?),
            Link::None | Link::Here { .. } => Ok(()),
        }
    }

    pub fn close(&mut self, reactor: &mut Reactor) {
        match self {
            Link::None => {}
            Link::Here { served, connection, .. } => {
                served.borrow_mut().disconnect_here(reactor, *connection);
            }
            Link::Remote(remote) => remote.close(reactor),
        }
        *self = Link::None;
    }
}
