//! The simulator: a small cluster in virtual time, with everything that goes wrong decided by a seed.
//!
//! **What is real** and what is not. Real are the protocol cores ([`weir_accel::owner`], [`weir_accel::replica`], the log,
//! [`weir_accel::checkpoint`]), a flash log's journal and recovery ([`weir_accel::flash`]), the control plane's [`decide`](weir_node::control::decide) and the rules by which the
//! registry's record changes ([`weir_cluster::ownership`]). Played here are what surrounds them: time, connections, the
//! registry's leases and answers, the backing, flash devices (those of even seeds; the logs of odd ones are in RAM), guests, and a shell that drives the cores as `weir_accel::Accel` does.
//!
//! [`production`] is the other way round: the shell that runs in production over simulated wires and media.
//!
//! **A run** has two phases. First [faults](FAULTS), some tens of them within six virtual seconds; after every step that
//! changed a copy, the promises are checked on all that could be asked for the disk, now or after a takeover. Then the
//! faults stop, and within a bound the cluster must be as requested, drained and fully replicated, and do nothing more.
//! The same seed gives the same run; [`run()`] with `traced` keeps a line for everything that happens.
//!
//! **The promises**, and what would notice that one is broken:
//!
//! | | |
//! |---|---|
//! | P1 | every copy that the registry names, committed or asked for, is complete and not older than what was acknowledged or seen; after a takeover nothing is acknowledged on fewer copies than are requested |
//! | P2 | no two processes answer in one epoch |
//! | P3 | as P1, with changes that are committed late, twice, unanswered or never |
//! | P4 | as P1, read through the log over the worst that a loss of power could leave of the backing |
//! | P5 | a flushed checkpoint leaves in the backing exactly the records up to its end |
//! | P6 | as P4: a record that was freed too early is missing |
//! | P7 | reads are not older than what was acknowledged or seen, and each block's history is linearizable |
//! | P8 | what write-through has acknowledged survives a loss of power; FLUSH requests themselves are the shell's business and not simulated |
//! | P9 | when the faults have stopped, nobody waits any more within a bound |
//! | P10 | no core asks to be woken at a time that has passed, and a settled cluster is quiet; the sizes of queues are the shell's |
//! | P11 | a record that was spoiled on its way is in no copy; a log on flash is found as it was at rest, or found damaged |
//!
//! **That the checker can fail** is shown by [bugs](Bug) planted in the cores: [`find()`] counts the seeds that find one.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod atlas;
mod backing;
mod checks;
mod control;
mod counts;
mod faults;
mod flash;
mod guest;
mod history;
mod many;
mod moves;
mod network;
mod owner_process;
pub mod production;
mod registry;
pub mod right;
mod run;
mod shell;
mod store;
mod wishes;
mod world;

pub use atlas::{FAULTS, Fault, FaultCounts, FaultEntry};
pub use counts::Counts;
pub use many::{Finding, Progress, Simulation, Summary, find, find_in, many, many_of};
pub use run::{Run, run};
pub use weir_accel::planted::Bug;
