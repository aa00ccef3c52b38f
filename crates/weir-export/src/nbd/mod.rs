//! The NBD server.
//!
//! A connection has two phases. In the *handshake* it is a tokio task ([`Listener`]) that drives an I/O-free state machine
//! ([`TlsHandshake`](weir_nbd::server::TlsHandshake)): slow, rare, and exposed to any client that can connect. So it runs outside
//! the shards and is bounded in number, time and bytes. Once the client has chosen an export, the descriptor, with its TLS keys if it
//! has any, is handed ([`Attach`]) to the shard that owns the disk. There, in the *transmission* phase, [`NbdDisk`] turns received requests of
//! all connections of the disk into requests to its layer, and completions into replies.
//!
//! The protocol itself is in `weir-nbd`; comments cite the sections of its reference.

mod client;
mod connection;
mod disk;
mod edges;
mod export;
mod gate;
mod hold;
mod listener;
mod negotiation;
mod replies;
mod secure;

pub use client::{AcceptedClient, Attach, Refused, Via};
pub use connection::{BAD_REQUESTS, Limits};
pub use disk::NbdDisk;
pub use listener::{ListenAddress, ListenError, Listener, ListenerConfig, keep_alive};
