//! The server side of the NBD protocol.
//!
//! A connection has two lives. In the *handshake* it is a tokio task ([`Listener`]) that drives an I/O-free
//! state machine ([`Handshake`]): slow, rare, and exposed to anybody who can connect, so it is kept away from the
//! shards and bounded in number, time and bytes. Once the client has chosen an export, the bare descriptor is
//! handed ([`Attach`]) to the shard that owns the disk. There, in the *transmission* phase, [`NbdDisk`] turns
//! what arrives on all connections of the disk into requests to its layer, and completions into replies.
//!
//! The protocol's reference is `doc/proto.md` of the NetworkBlockDevice project; comments cite its sections.

mod check;
mod connection;
mod directory;
mod disk;
mod handshake;
mod listener;
mod option;
pub mod protocol;
mod replies;
mod status;
mod workspace;

pub use connection::Limits;
pub use directory::{Directory, ExportInfo, Listed, Session};
pub use disk::NbdDisk;
pub use handshake::{BASE_ALLOCATION_ID, Handshake, HandshakeError, MOST_OPTION_BYTES, Step};
pub use listener::{Address, Attach, Client, ListenError, Listener, ListenerConfig};
pub use workspace::Workspace;
