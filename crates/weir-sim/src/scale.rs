//! Sizes and times of the simulated cluster.

use std::time::Duration;

use weir_block::Nanos;
use weir_block::sim::MediumFaults;

use crate::atlas::Fault;

pub const NODES: usize = 4;
pub const BLOCKS: usize = 6;
/// Bytes of a block.
pub const BLOCK: usize = 512;

pub const PEER_DEADLINE: Duration = Duration::from_millis(300);
/// The registry's lease of a silent process, and the process's own, shorter deadline.
pub const LEASE: Duration = Duration::from_millis(600);
pub const OWN_LEASE: Duration = Duration::from_millis(540);
/// Longest time for which a silent owner may have I/O in flight; longer than any operation.
pub const FENCE_GRACE: Duration = Duration::from_millis(900);
pub const LONGEST_OPERATION: Duration = Duration::from_millis(300);

/// `N` of the requested policies; most have replicas.
pub const POLICIES: [Option<usize>; 6] = [None, Some(0), Some(1), Some(1), Some(2), Some(2)];

/// Faults happen until this time; guests continue for a second.
pub const CALM: Nanos = Nanos(6_000_000_000);
pub const GUESTS_END: Nanos = Nanos(7_000_000_000);
/// From the end of the faults until the cluster must have settled: a lease, a fence grace, some retries, and filling or draining
/// a log.
pub const BOUND: Duration = Duration::from_secs(10);
/// A settled cluster must be idle for this long.
pub const QUIET: Duration = Duration::from_secs(2);

/// One incarnation of a node.
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

/// The faults of a backing that had `medium`'s before, and their longest duration in milliseconds; `None` for a fault of another
/// part.
pub fn backing_fault(fault: Fault, medium: MediumFaults) -> Option<(MediumFaults, u64)> {
    match fault {
        Fault::BackingError => Some((MediumFaults { fails: 2, ..medium }, 1_000)),
        Fault::BackingFull => Some((MediumFaults { full: true, ..medium }, 2_000)),
        Fault::BackingSlow => Some((MediumFaults { most: LONGEST_OPERATION, ..medium }, 2_000)),
        Fault::BackingPowerCut => Some((MediumFaults { fails: 1, ..medium }, 1_000)),
        _ => None,
    }
}
