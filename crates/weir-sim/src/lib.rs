//! The simulator: the protocol cores of a small cluster in virtual time, with everything that goes wrong decided by a seed.
//!
//! A run has two phases. First faults: after every step the promises are checked on everything that could be asked for
//! the disk, now or after a takeover. Then the faults stop, and within a bound the cluster must be as requested, drained
//! and quiet. The same seed gives the same run.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod backing;
mod checks;
mod control;
mod faults;
mod guest;
mod many;
mod network;
mod owner_process;
mod registry;
mod run;
mod shell;
mod world;

pub use many::{Summary, many};
pub use run::{Run, run};
pub use world::{Bug, Counts};
