//! The simulator: the protocol cores of a small cluster in virtual time, with everything that goes wrong decided by a seed.
//!
//! A run has two phases. First faults: after every step the promises are checked on everything that could be asked for
//! the disk, now or after a takeover. Then the faults stop, and within a bound the cluster must be as requested, drained
//! and quiet. The same seed gives the same run.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod atlas;
mod backing;
mod checks;
mod control;
mod counts;
mod faults;
mod guest;
mod history;
mod many;
mod network;
mod owner_process;
mod registry;
mod run;
mod shell;
mod wishes;
mod world;

pub use atlas::{FAULTS, Fault, FaultCounts, FaultEntry};
pub use counts::Counts;
pub use many::{Finding, Summary, find_bugs, many};
pub use run::{Run, run};
pub use weir_accel::planted::Bug;
