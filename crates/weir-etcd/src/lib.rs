//! The registry of a cluster of several machines: [`Registry`](weir_cluster::Registry) over etcd 3.4 or later.
//!
//! - `config`: endpoints, prefix, TLS, user, time limits, and their checks.
//! - `layout`: where Weir's keys are, and the marker that identifies one registry.
//! - `failure`: what each error of etcd means for a call.
//! - `links`: one connection for each endpoint, and the choice among them.
//! - `keepers`: the streams that keep leases alive.
//! - `calls`: deadlines, retries, and the marker's check in every transaction.
//! - `transaction`: Weir's transactions as etcd's.
//! - `batches`, `watch`: watches that outlive connections.
//! - `registry`: the implementation of the trait.
//!
//! Differences from the embedded registry: the time to live of a lease is whole seconds, rounded up, and at least one and a half
//! election time-outs of etcd (2 s by default); a transaction takes at most 1.5 MiB; etcd does not detect the end of a process;
//! revisions also count changes that others make in the same etcd.

mod batches;
mod calls;
mod config;
mod failure;
mod keepers;
mod layout;
mod links;
mod registry;
mod transaction;
mod watch;

pub use config::{ConfigError, EtcdConfig, TlsFiles, UserFile};
pub use registry::{Etcd, MAX_REQUEST};
