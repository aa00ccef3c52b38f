//! The NBD protocol, and both of its ends.
//!
//! [`protocol`] has the numbers and structures on the wire. [`client`] connects to any server. [`server`] is the protocol part of
//! a server: the handshake as a state machine, request checks, and reply encoding. It does no I/O; `weir-export` drives it on
//! sockets and disks. [`Uri`] names an export.
//!
//! The protocol's reference is `doc/proto.md` of the NetworkBlockDevice project; comments cite its sections.
//! The URI is that of `doc/uri.md` there.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod client;
pub mod protocol;
pub mod server;
mod uri;

pub use uri::{Address, Uri, UriError};
