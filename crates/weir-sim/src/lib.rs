//! The simulator: a small cluster in virtual time, with everything that goes wrong decided by a seed.
//!
//! **What is real** is the shell that runs in production: [`Accel`](weir_accel::Accel) with everything in it (log, index, destage,
//! pacing, peers), [`ReplicaHost`](weir_accel::ReplicaHost), a flash log's device, store and recovery
//! ([`weir_accel::flash`]), their channels and frames, the reactor's bookkeeping of operations and buffers, and of the control plane
//! [`decide`](weir_node::control::decide) and the rules by which the registry's record changes
//! ([`weir_cluster::ownership`]). **What is played** is time, wires and media ([`weir_block::sim`]), the registry, the
//! tasks of the control plane, and guests. [`right`] plays the right to serve alone.
//!
//! **A run** has two phases. First [faults](FAULTS), some tens of them within six virtual seconds; with every answer and every change of
//! the record, the promises are checked on all that could be asked for the disk, now or after a takeover. Then the
//! faults stop, and within a bound the cluster must be as requested, drained and fully replicated, and do nothing more.
//! The same seed gives the same run; [`run`] with `traced` keeps a line for everything that happens.
//!
//! **The promises**, and what would notice that one is broken:
//!
//! | | |
//! |---|---|
//! | P1 | every copy that the registry names is complete and not older than what was acknowledged or seen, in memory and at rest; after a takeover nothing is acknowledged on fewer copies than are requested |
//! | P2 | as P7: what two owners answer is not the history of one disk |
//! | P3 | as P1, with changes that are committed late, twice, unanswered or never |
//! | P4 | as P1, read through the log over the backing; and what was read last is what the backing has at the end |
//! | P5 | as P4, with crashes in the middle of a checkpoint |
//! | P6 | as P1, over what a loss of power would leave of the backing |
//! | P7 | each block's history is linearizable |
//! | P8 | what was flushed is durable at the end; what was written durably survives a loss of power |
//! | P9 | when the faults have stopped, nobody waits any more within a bound; a disk that is another's is let go |
//! | P10 | no shard spins, no arena and no slot stays held, and a settled cluster is quiet |
//! | P11 | a record that was spoiled on its way is in no copy; a log on flash is whole, or found damaged |
//!
//! **That the checker can fail** is shown by planted [bugs](Bug): [`find`] counts the seeds that find one.
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

pub use atlas::{FAULTS, Fault, FaultCounts, FaultEntry};
pub use cluster::{Run, run};
pub use counts::Counts;
pub use many::{Finding, Progress, Simulation, Summary, find, find_in, many, many_of};
pub use weir_accel::planted::Bug;
