//! The registry and the cluster logic on top of it.
//!
//! - [`registry`]: the trait that every registry implements: keys with revisions, compare-and-swap of
//!   several keys at once, watches, leases.
//! - [`embedded`]: the registry of a single machine, in one durable file.
//! - [`remote`]: that registry served on a Unix socket, and the client for it.
//! - [`records`]: the keys and the format of their values.
//! - [`ownership`]: allowed changes of a disk's configuration (P2, P3). Pure functions.
//! - [`placement`]: chooses the successor, replicas and guards. Pure functions; every node computes the same.
//! - [`node_state`]: isolation, quarantine, drain and removal of nodes. Pure functions.
//! - [`migration`]: moves the content of one registry to another one.
//! - [`membership`]: this node's lease and the view of the others.
//!
//! Nothing here is on the I/O path. The data path reads one atomic number, the lease deadline of
//! [`membership::NodeSession`].

pub mod embedded;
pub mod events;
pub mod housekeeping;
pub mod machine;
pub mod membership;
pub mod migration;
pub mod node_state;
pub mod ownership;
pub mod placement;
pub mod records;
pub mod registry;
pub mod remote;
pub mod right;
pub mod view;

pub use embedded::{Embedded, Feed, Memory};
pub use machine::Machine;
pub use registry::{Registry, RegistryError};
pub use remote::{Client, ClientConfig, Server};
