//! Requests and events from an accelerator to its node.

/// A request or an event from the accelerator to the node that it runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccelNotice {
    /// Connect to this node, or to any node but these; answer with `peer_connected` or `peer_unavailable`.
    WantPeer {
        /// `None`: choose.
        node: Option<String>,
        /// Nodes with a connection already: the choice complements these.
        connected: Vec<String>,
        /// Not these.
        exclude: Vec<String>,
    },
    /// Have this configuration committed; answer with `configured` or `not_configured`.
    WantConfiguration {
        /// The epoch that the change starts from.
        epoch: u64,
        /// The new set.
        replicas: Vec<String>,
        /// The new effective mode.
        write_back: bool,
        /// The policy that the disk strove for when it asked; `None` is write-through. It may have been told another since.
        wanted_replicas: Option<usize>,
    },
    /// A node has seen this epoch, and it is not ours: ask the registry (P2).
    Fenced(u64),
    /// Tell the operator.
    Tell(&'static str, String),
}
