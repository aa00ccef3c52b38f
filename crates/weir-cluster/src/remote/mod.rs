//! The embedded registry for all nodes of one machine: a server on a Unix socket and its client.

mod client;
mod connection;
mod frame;
mod link;
mod process;
mod protocol;
mod server;

pub use client::{Client, ClientConfig};
pub use frame::MAX_FRAME;
pub use process::MAX_PROCESSES;
pub use server::{MAX_CONNECTIONS, Server};
