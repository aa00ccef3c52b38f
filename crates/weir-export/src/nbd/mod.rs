//! The NBD server.
//!
//! A connection has two phases. In the *handshake* it is a tokio task ([`Listener`]) that drives an I/O-free state machine
//! ([`Handshake`](weir_nbd::server::Handshake)): slow, rare, and exposed to any client that can connect. So it runs outside
//! the shards and is bounded in number, time and bytes. Once the client has chosen an export, the bare descriptor is handed
//! ([`Attach`]) to the shard that owns the disk. There, in the *transmission* phase, [`NbdDisk`] turns received requests of
//! all connections of the disk into requests to its layer, and completions into replies.
//!
//! The protocol itself is in `weir-nbd`; comments cite the sections of its reference.

mod connection;
mod disk;
mod edges;
mod export;
mod handshakes;
mod hold;
mod listener;
mod replies;

pub use connection::{BAD_REQUESTS, Limits};
pub use disk::NbdDisk;
pub use listener::{AcceptedClient, Attach, ListenAddress, ListenError, Listener, ListenerConfig};
