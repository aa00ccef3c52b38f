//! Inputs and outputs of an owner's core.

use crate::config::{Configuration, Former};

/// The watermarks of a log: sequence numbers of the last record in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermarks {
    /// In the owner's log.
    pub appended: u64,
    /// In the log of every member of the set.
    pub replicated: u64,
    /// Answered, or free to be answered.
    pub acknowledged: u64,
    /// In the backing, and the backing flushed over it.
    pub destaged: u64,
    /// Gone from the log.
    pub freed: u64,
}

impl Watermarks {
    pub(super) fn check(&self) {
        let Watermarks { appended, replicated, acknowledged, destaged, freed } = *self;
        assert!(
            appended >= replicated
                && replicated >= acknowledged
                && acknowledged >= destaged
                && destaged >= freed,
            "watermarks out of order: {self:?}"
        );
    }
}

/// The state of a replica's copy, as it confirms it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// The epoch that it knows.
    pub epoch: u64,
    /// Sequence number of the newest record; those between the gap and it are held.
    pub last: u64,
    /// Sequence number of the newest record that it has freed.
    pub freed: u64,
    /// Up to here, records that are not freed are missing: the copy is being filled. `freed` if nothing is missing.
    pub gap: u64,
    /// It holds every record that was live when the owner said so, and all that followed.
    pub complete: bool,
}

impl Held {
    /// Whether this copy is at least as far as that one.
    pub(super) fn covers(self, due: Held) -> bool {
        self.complete && self.epoch >= due.epoch && self.last >= due.last && self.freed >= due.freed
    }
}

/// An input of the core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The log has grown up to this record.
    Appended(u64),
    /// A connection to this node stands and it has taken our Hello.
    PeerJoined(String),
    /// A replica has confirmed this state.
    PeerConfirmed {
        /// Node.
        node: String,
        /// The confirmed state.
        held: Held,
    },
    /// The connection to a replica is gone.
    PeerLost(String),
    /// This node answers nobody any more, although its connection stands.
    PeerSilent(String),
    /// No connection to a wanted node (or to any) is possible now.
    PeerUnavailable,
    /// The registry committed a configuration.
    Configured(Configuration),
    /// The registry has not committed the proposal, as far as known: it may still do so.
    NotConfigured,
    /// The requested policy changed.
    PolicyRequested(Option<usize>),
    /// This node is to own the disk next, so it must be a member of the set; `None`: no particular node.
    Successor(Option<String>),
    /// The backing holds, flushed, everything up to this record.
    Destaged(u64),
    /// The durable state of this node's own copy, if it is on flash.
    Stored(Held),
    /// Nothing becomes durable on this node's flash any more; the reason.
    StoreFailed(String),
    /// The state of the former owner (P2, P4).
    Former(Former),
    /// This node reports a higher epoch than ours (P2).
    Refused {
        /// Node.
        node: String,
        /// Its epoch.
        epoch: u64,
    },
    /// The registry, asked since a node refused us, names this owner in its present epoch: the other node is mistaken.
    StillOwner,
    /// Time passed.
    Tick,
}

/// An output of the core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Have a connection made: to this node, or to any node but these.
    WantPeer {
        /// `None`: the control plane chooses.
        node: Option<String>,
        /// Nodes with a connection already: the choice complements these.
        connected: Vec<String>,
        /// Connected already, or just lost.
        exclude: Vec<String>,
    },
    /// Have this configuration committed, if the epoch is still ours (P3).
    Propose {
        /// The epoch that the change starts from.
        epoch: u64,
        /// The new set.
        replicas: Vec<String>,
        /// The new effective mode.
        write_back: bool,
        /// The requested policy that this serves.
        wanted_replicas: Option<usize>,
    },
    /// Close the channel to this node.
    DropPeer(String),
    /// Free the log up to this record, here and (with the next batch) on the replicas (P6).
    FreeTo(u64),
    /// We do not own the disk any more (P2).
    Fenced(u64),
    /// Tell the operator.
    Tell(&'static str, String),
}
