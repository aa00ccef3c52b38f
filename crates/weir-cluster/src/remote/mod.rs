//! The embedded registry for all nodes of one machine: a server on a Unix socket and its client.

mod client;
mod config;
mod connection;
mod frame;
mod link;
mod process;
mod protocol;
mod server;

use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

pub use client::Client;
pub use config::ClientConfig;
pub use frame::MAX_FRAME;
pub use process::MAX_PROCESSES;
pub use server::{MAX_CONNECTIONS, Server};

/// Creates a directory and its missing parents, for this user alone (mode 0700).
///
/// # Errors
/// The system's error.
pub fn make_private_dir(path: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}
