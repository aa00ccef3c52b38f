//! What a disk's owner and the coordinator of its volume say to each other: in memory on one node ([`message`]), in frames between two
//! nodes ([`wire`]).

pub(crate) mod connection;
pub mod message;
pub mod wire;

pub use message::{Data, ToCoordinator, ToOwner};
