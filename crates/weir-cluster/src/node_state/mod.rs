//! The states of nodes: isolation, quarantine, drain, removal. No clock, no I/O; every node computes the same from the same
//! records.
//!
//! - [`rules`]: the time limits;
//! - [`mod@step`]: events, and the changes of the [`NodeStatesRecord`] that follow from them;
//! - [`state`]: the state of each node, and the nodes that get no disk;
//! - [`drain`]: where the disks of a drained node go, and whether a node may be removed.
//!
//! All of this is policy, never safety: a disk is safe whatever the records of node states say. So the times in it are those of
//! the nodes' wall clocks. A wrong clock makes a node move disks too early or too late; [`mod@step`] limits times that lie in the
//! future, so that no entry outlasts its period by more than once.
//!
//! [`NodeStatesRecord`]: crate::records::NodeStatesRecord

pub mod drain;
pub mod planted;
pub mod rules;
pub mod state;
pub mod step;

pub use drain::{
    Copied, Leaving, Moved, NotRemovable, Plan, Reason, Unfit, Unmovable, leaving, may_remove, may_return,
    plan,
};
pub use rules::{Rules, quarantine_limit};
pub use state::{Cluster, State, barred, counts_on, hold};
pub use step::{Effect, Event, UnknownNode, step};
