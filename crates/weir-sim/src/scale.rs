//! How large everything is, and how long it takes.

use std::time::Duration;

use weir_block::Nanos;

pub const NODES: usize = 4;
pub const BLOCKS: usize = 6;
/// Bytes of a block.
pub const BLOCK: usize = 512;

pub const PEER_DEADLINE: Duration = Duration::from_millis(300);
/// How long the registry keeps a process that is silent, and how long a process believes in its own lease.
pub const LEASE: Duration = Duration::from_millis(600);
pub const OWN_LEASE: Duration = Duration::from_millis(540);
/// How long a silent owner may have I/O under way; longer than any operation takes.
pub const FENCE_GRACE: Duration = Duration::from_millis(900);
pub const LONGEST_OPERATION: Duration = Duration::from_millis(300);

/// `N` of the policies that operators ask for; most want replicas.
pub const POLICIES: [Option<usize>; 6] = [None, Some(0), Some(1), Some(1), Some(2), Some(2)];

/// Faults happen until this time, and guests go on for a second.
pub const CALM: Nanos = Nanos(6_000_000_000);
pub const GUESTS_END: Nanos = Nanos(7_000_000_000);
/// From the end of the faults until everything must have settled; it takes a lease, a fence grace, some retries and a log
/// that has to be filled or drained.
pub const BOUND: Duration = Duration::from_secs(10);
/// Having settled, nothing may happen for so long.
pub const QUIET: Duration = Duration::from_secs(2);

/// One life of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pub node: usize,
    pub incarnation: u32,
}

pub fn name(node: usize) -> String {
    format!("n{node}")
}

pub fn node_of(name: &str) -> usize {
    name[1..].parse().expect("names are made by `name`")
}
