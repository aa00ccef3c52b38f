//! The simulator: a small cluster in virtual time, with all faults from a seed.
//!
//! **Real** is production code: [`Accel`](weir_accel::Accel) with all its parts (log, index, destage, pacing, peers),
//! [`ReplicaHost`](weir_accel::ReplicaHost), a flash log's device, store and recovery ([`weir_accel::flash`]), their channels and
//! frames, the reactor's bookkeeping of operations and buffers, and of the control plane [`decide`](weir_node::control::decide)
//! and the rules of changes to the registry's record ([`weir_cluster::ownership`]). **Simulated** are time, network and
//! media ([`weir_block::sim`]), the registry, the tasks of the control plane, and guests. [`right`] simulates the right to serve
//! alone.
//!
//! **A run** has two phases. First [faults](FAULTS), some tens of them within six virtual seconds; with every answer and every
//! change of the record, the checks cover all possible owners of the disk, now or after a takeover. Then the faults stop, and
//! within a bound the cluster must have the requested policy, be drained, fully replicated and idle. The same seed gives the same
//! run; [`run`] with `traced` keeps a line per event.
//!
//! **The promises**, and the check that detects each violation:
//!
//! | | |
//! |---|---|
//! | P1 | every copy that the registry names is complete and not older than what was acknowledged or seen, in memory and on flash; after a takeover nothing is acknowledged on fewer copies than requested |
//! | P2 | as P7: answers of two owners are not the history of one disk |
//! | P3 | as P1, with changes that commit late, twice, without an answer or never |
//! | P4 | as P1, read through the log over the backing; and at the end the backing has the last value read |
//! | P5 | as P4, with crashes in the middle of a checkpoint |
//! | P6 | as P1, over what a power cut would leave of the backing |
//! | P7 | each block's history is linearizable |
//! | P8 | flushed writes are durable at the end; durable writes survive a power cut |
//! | P9 | when the faults have stopped, all waits end within a bound; a disk of another owner is released |
//! | P10 | no shard spins, no arena and no slot stays in use, and a settled cluster is idle |
//! | P11 | no copy has a record corrupted in transit; a log on flash is intact, or detected as damaged |
//!
//! **Planted [bugs](Bug) show that the checks can fail**: [`find`] counts the seeds that find one.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod atlas;
mod cluster;
mod counts;
mod history;
mod many;
pub mod nodes;
mod registry;
pub mod right;
mod scale;
pub mod volume;

pub use atlas::{FAULTS, Fault, FaultCounts, FaultEntry};
pub use cluster::{Run, run};
pub use counts::Counts;
pub use many::{Finding, Progress, Simulation, Summary, find, find_in, many, many_of};
pub use weir_accel::planted::Bug;

/// The words of a panic.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}
