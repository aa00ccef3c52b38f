//! Access to a disk for guests and tools. An [`Export`] turns a protocol into requests to a [`weir_block::Layer`] and holds
//! no data itself; a shard drives all exports of a disk as [`Exports`].

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod export;
mod exports;
pub mod fuse;
pub mod handshakes;
mod limit;
pub mod nbd;
mod workspace;

pub use export::Export;
pub use exports::{Client, Exports};
pub use limit::{Delays, Limiter, Rate};
pub use workspace::Workspace;
