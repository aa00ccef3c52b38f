//! Puts a node together from the parts.
//!
//! - [`config`], [`units`]: a node's configuration;
//! - [`run()`]: a node, from start to stop;
//! - [`control`]: the control plane: ownership, takeover, configuration;
//! - `coordination`: who coordinates the volumes on LUNs, and mounts their filesystems;
//! - [`shard`]: the data path, on threads of its own;
//! - [`stack`]: the layers around a disk's, chosen by the program that starts the node;
//! - [`peer`], [`network`], [`exports`]: connections from other nodes and clients; [`identity`]: proofs of who speaks;
//! - [`api`], [`operations`], [`http`], [`client`]: operators' requests; [`metrics`]: for Prometheus;
//! - [`access`]: who may ask for what at the API; [`cluster`]: who belongs to the cluster;
//! - [`backings`]: whether the disks' files are still where they belong;
//! - `files`: the disks as files of a FUSE mount;
//! - [`members`]: the nodes of the cluster, those that are down among them.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod accept;
pub mod access;
pub mod api;
mod audit;
pub mod backings;
pub mod client;
mod clock_check;
pub mod cluster;
pub mod config;
pub mod control;
mod coordination;
mod error;
pub mod exports;
mod file_fault;
mod files;
mod former_processes;
mod gate;
pub mod http;
mod https;
pub mod identity;
pub mod members;
pub mod metrics;
pub mod nbd_address;
pub mod network;
mod null_if_empty;
pub mod operations;
mod patience;
pub mod peer;
pub mod places;
pub mod plane;
pub mod refusal;
mod registry;
mod run;
pub mod shard;
mod silent_hosts;
mod state_lock;
mod stop;
mod throttles;
pub mod timestamps;
pub mod units;
pub mod vector_copies;

pub use cluster::unix_seconds;
pub use error::{ApiError, ApiErrorKind};
pub use registry::{RegistryUnusable, registry};
pub use run::{NodeError, Setup, run, run_with};
pub use shard::stack;
pub use state_lock::LockError;
pub use stop::{Left, What, left_behind};
pub use weir_etcd::ConfigError as SettingError;
