//! The load generator behind `weir bench` and `weir diagnose`.
//!
//! A [`workload::Workload`] describes a load. A [`generator::Generator`] chooses the next request and counts
//! completions, without any I/O. An [`engine::Engine`] moves the bytes: to the null target, to a file or device, over NBD, or
//! ([`engine::LayerLoad`]) to a layer from within its shard. [`run::run`] combines the three and returns a [`summary::Summary`];
//! [`run::run_steady`] continues until the target is in a steady state, and [`prefill::look`] precedes it. [`report`] writes
//! summaries for other programs and compares them.
//!
//! [`submitters`] simulates several threads that issue one sequence.
//!
//! [`judge`] reads back the data of a verified load and reports damage. [`timeline`] has completions over time.
//!
//! [`verify`] makes written data verifiable. [`verifying::VerifyingLoad`] continues across restarts of its server.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod arrivals;
mod bits;
mod buckets;
mod checker;
pub mod cpu;
mod data;
pub mod device;
pub mod engine;
pub mod error;
pub mod generator;
pub mod io;
pub mod io_engine;
pub mod job;
pub mod judge;
mod monitor;
pub mod pattern;
mod plan;
pub mod prefill;
pub mod report;
pub mod run;
mod seconds;
pub mod steady;
pub mod submitters;
pub mod summary;
pub mod tally;
pub mod target;
pub mod timeline;
pub mod verify;
pub mod verifying;
pub mod workload;
pub mod zipf;

pub use arrivals::Arrivals;
pub use engine::LayerLoad;
pub use error::LoadError;
pub use io_engine::IoEngine;
pub use pattern::{BlockMix, Pattern};
pub use run::{Monitor, run, run_keeping};
pub use summary::Summary;
pub use target::Target;
pub use workload::{Access, Workload};
