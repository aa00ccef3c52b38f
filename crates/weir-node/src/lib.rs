//! Puts a node together from the parts.
//!
//! - [`config`], [`units`]: a node's configuration;
//! - [`run()`]: a node, from start to stop;
//! - [`control`]: the control plane: ownership, takeover, configuration;
//! - [`shard`]: the data path, on threads of its own;
//! - [`stack`]: the layers around a disk's, chosen by the program that starts the node;
//! - [`peer`], [`network`], [`exports`]: connections from other nodes and clients; [`identity`]: proofs of who speaks;
//! - [`api`], [`operations`], [`http`], [`client`]: operators' requests; [`metrics`]: for Prometheus;
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
pub mod identity;
pub mod members;
pub mod metrics;
pub mod network;
pub mod operations;
pub mod peer;
pub mod plane;
mod run;
pub mod shard;
mod stop;
mod throttles;
pub mod timestamps;
pub mod units;

pub use error::{ApiError, ApiErrorKind};
pub use run::{NodeError, Setup, run, run_with};
pub use shard::stack;
pub use stop::{Left, What, left_behind};
