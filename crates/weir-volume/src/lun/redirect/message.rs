//! The messages between a disk's owner and the coordinator.
//!
//! Both sides get them in the order in which they were sent, and none of a connection that is gone.

use std::rc::Rc;

use weir_block::{Buffer, IoError};

use crate::lun::leases::Piece;
use crate::lun::router::{Kind, Range, Request};

/// The bytes of a write.
#[derive(Clone, Debug)]
pub enum Data {
    /// It is no write.
    None,
    /// These.
    Bytes(Rc<Buffer>),
    /// Zeroes, which take space as data does.
    Zeroes,
}

/// To the coordinator.
#[derive(Clone, Debug)]
pub enum ToCoordinator {
    /// The first message of a connection.
    Hello {
        /// The disk's epoch, by which this node owns it (P2).
        epoch: u64,
    },
    /// A request that the coordinator is to do through its filesystem.
    Redirected {
        /// The request.
        request: Request,
        /// The range for which the owner has given up its leases.
        gives_up: Range,
        /// Durable when it is answered. A write that changes the layout always is.
        durable: bool,
        /// Of a write.
        data: Data,
    },
    /// I/O on blocks of the LUN that the owner holds.
    Block {
        /// Of the answer.
        id: u64,
        /// A read or a write.
        kind: Kind,
        /// The blocks.
        piece: Piece,
        /// By the file: the same blocks.
        by_file: bool,
        /// Durable when it is answered.
        durable: bool,
        /// Of a write.
        data: Data,
    },
    /// Make durable what was done before.
    Flush(u64),
    /// The answer to a recall.
    RecallDone(u64),
}

/// To the owner.
#[derive(Debug)]
pub enum ToOwner {
    /// The answer to [`ToCoordinator::Hello`]: the owner may begin.
    Welcome {
        /// The coordinator's.
        epoch: u64,
        /// The filesystem moves blocks in pieces of this many bytes.
        piece: u64,
    },
    /// A redirected request is done, or has failed.
    Answer {
        /// The request.
        id: u64,
        /// Why it has failed.
        result: Result<(), IoError>,
        /// Leases that the owner has from now on.
        grants: Vec<Piece>,
        /// Of a read.
        data: Option<Buffer>,
    },
    /// Block I/O is done, or has failed.
    BlockAnswer {
        /// Of the I/O.
        id: u64,
        /// Why it has failed.
        result: Result<(), IoError>,
        /// Of a read.
        data: Option<Buffer>,
    },
    /// A flush is done, or has failed.
    Flushed {
        /// The flush.
        id: u64,
        /// Why it has failed.
        result: Result<(), IoError>,
    },
    /// The owner is to give a range up.
    Recall {
        /// Unique for the connection.
        number: u64,
        /// The range.
        range: Range,
    },
    /// Leases that belong to no request.
    Grant(Vec<Piece>),
}
