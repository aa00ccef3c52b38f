//! Puts a node together from the parts.
//!
//! - [`config`], [`units`]: what a node is told;
//! - [`run()`]: a node, from start to stop;
//! - [`control`]: the control plane: ownership, takeover, configuration;
//! - [`shard`]: the data path, on threads of its own;
//! - [`stack`]: where whoever starts a node may put layers around a disk's;
//! - [`peer`], [`exports`]: who connects, and where to;
//! - [`api`], [`operations`], [`http`], [`client`]: what operators can ask, and how; [`metrics`]: what Prometheus can;
//! - [`backings`]: whether the disks' files are still where they belong;
//! - [`members`]: the nodes of the cluster, those that are down among them.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod api;
pub mod backings;
pub mod client;
pub mod config;
pub mod control;
mod error;
pub mod exports;
pub mod http;
pub mod members;
pub mod metrics;
pub mod operations;
pub mod peer;
pub mod plane;
mod run;
pub mod shard;
mod stop;
pub mod timestamps;
pub mod units;

pub use error::{ApiError, ApiErrorKind};
pub use run::{NodeError, Setup, run, run_with};
pub use shard::stack;
pub use stop::{Left, What, left_behind};
