//! The messages that a disk's task receives, and the requests of operators among them.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use weir_block::{Nanos, Stream};
use weir_cluster::records::{DiskRecord, Limit, NodeRef, Policy};
use weir_volume::Trace;

use crate::control::Node;
use crate::control::compactions::Compaction;
use crate::error::ApiError;
use crate::shard::messages::Notice;

/// To a disk's task.
#[derive(Debug)]
pub enum Message {
    /// The disk on its shard wants something.
    Notice(Notice),
    /// A connection to a peer for the disk, or why there is none.
    Peer {
        /// The process that was meant; the name may be empty when there is no node at all.
        node: NodeRef,
        /// The connection, greeted.
        connection: Result<Stream, String>,
    },
    /// A member of a former owner's set has been sealed, or not.
    Sealed {
        /// The member.
        member: String,
        /// For the owner in this epoch.
        epoch: u64,
        /// The end of its last grant to a former owner, or why it is not sealed.
        until: Result<Nanos, String>,
    },
    /// A former owner has been kept from the LUN of the disk, or not.
    Fenced {
        /// The process.
        process: NodeRef,
        /// In which epoch it was the owner.
        epoch: u64,
        /// Why it is not.
        result: Result<(), String>,
    },
    /// The result of a check of this machine's kernel for I/O of a process that has ended.
    Looked {
        /// The process.
        process: NodeRef,
        /// The result; `None` if the look failed.
        seen: Option<Trace>,
    },
    /// An operator wants something.
    Request(Request),
}

/// What the file holds that replaces a disk's own.
#[derive(Debug)]
pub enum NewContent {
    /// What a snapshot of the disk holds.
    Snapshot {
        /// The snapshot.
        snapshot: String,
        /// The present content becomes a snapshot of this name first.
        keep_as: Option<String>,
    },
    /// What the disk holds, in fewer pieces. On a LUN.
    Same(Arc<Compaction>),
}

/// The reason why a disk moves, which decides where it belongs afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// An operator moves it: it stays there.
    Requested,
    /// A client has written on the node that follows it: it stays there.
    Followed,
    /// Its node is drained: it returns.
    Drained,
    /// Its node is quarantined, and the disk stays where it goes; one that another node's drain has sent returns there.
    Quarantined,
    /// It returns from a drain.
    Returned,
}

impl Why {
    /// Whether the disk is not to move any more: its node, which did not take disks, takes them again.
    pub(in crate::control) fn is_over(self, from: &Node) -> bool {
        matches!(self, Why::Drained | Why::Quarantined) && !from.barred().contains(&from.config.name)
    }

    /// The node that the disk returns to, given the one so far. `from`: the node that it leaves.
    pub(in crate::control) fn home(self, so_far: Option<String>, from: &str) -> Option<String> {
        match self {
            Why::Requested | Why::Followed | Why::Returned => None,
            // Twice drained, it returns to where it came from.
            Why::Drained => so_far.or_else(|| Some(from.to_owned())),
            Why::Quarantined => so_far,
        }
    }
}

/// A request of an operator.
#[derive(Debug)]
pub enum Request {
    /// Own it and have it open.
    Export {
        /// Also when acknowledged writes are lost by that.
        accept_loss: bool,
        /// Tells when it is open.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Set the requested policy.
    SetPolicy {
        /// The new one.
        policy: Policy,
        /// Tells when it is committed.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Set or remove the limit of the rate at which clients are served.
    SetLimit {
        /// The new one.
        limit: Option<Limit>,
        /// Tells when it is in force.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// The import with this number has written everything.
    EndImport {
        /// The number.
        number: u64,
        /// Tells when it is committed.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Grow it.
    Resize {
        /// Bytes.
        size: u64,
        /// The record before the file of a disk on a LUN was made longer.
        seen: Box<DiskRecord>,
        /// Tells when guests can use it.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Destage, close, and give ownership up.
    Release {
        /// Not if it has clients, which may have come since somebody looked.
        unless_used: bool,
        /// Answered when no node owns it any more.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Give the disk, which is closed, another file.
    Replace {
        /// What that holds.
        content: NewContent,
        /// Answered when it is the disk's, and the disk has no owner.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Delete the disk, which this process owns, without destaging it. What only its log has is lost.
    DeleteUndestaged {
        /// Its identity: another disk may get its name.
        id: u64,
        /// The loss, in words, for the event.
        lost: String,
        /// Only while it cannot be opened: its storage would take the log otherwise, and stays.
        unless_open: bool,
        /// Answered when its record and its file are gone.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Let clients on another node use the disk; their first write moves it there. Or end that.
    Follow {
        /// The process that is to own it.
        to: Option<NodeRef>,
        /// Tells when that process is ready to.
        done: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Give ownership to another node, which opens the disk.
    Move {
        /// The process that is to own it.
        to: NodeRef,
        /// The reason.
        why: Why,
        /// Tells when this node does not own it any more, and how many bytes were dirty then.
        done: oneshot::Sender<Result<u64, ApiError>>,
    },
}

impl Request {
    /// Whether it ends the disk, whatever its storage does.
    pub(super) fn is_deletion(&self) -> bool {
        matches!(self, Request::DeleteUndestaged { .. })
    }
}

/// The way to a disk's task.
pub type Inbox = mpsc::Sender<Message>;
