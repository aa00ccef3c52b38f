#![cfg_attr(test, allow(clippy::unwrap_used))]
//! The accelerator: a write log on the owner and its replicas, destaged in order to the backing.
//!
//! The protocol is primary–backup with a configuration that lives in a registry (PacificA; Lin et al. 2008).
//! Its decisions are in [`owner`] and [`replica`]: state machines without I/O, clock or randomness.
//! [`Accel`] and [`ReplicaHost`] drive them on a shard with real sockets, a real arena and a real backing.

mod accel;
pub mod checkpoint;
mod config;
mod depth;
mod destage;
mod dirty;
pub mod feed;
pub mod flash;
mod host;
mod index;
pub mod lineage;
mod log;
pub mod owner;
mod pacing;
mod peers;
pub mod planted;
mod reads;
pub mod replica;
pub mod wire;
mod writes;

pub use accel::{Accel, AccelNotice, AccelStatus, DestageStatus, NoMemory};
pub use config::{AccelConfig, Configuration, Former, Inheritance};
pub use host::ReplicaHost;
pub use log::{Layout, Log, Record, RecordKind, checksum};
