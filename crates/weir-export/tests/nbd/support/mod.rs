//! A small server to test the export with: one shard thread that serves disks from files, a tokio listener, and a
//! way to look inside.

mod layer;
mod raw;
mod server;
mod tool;

pub use layer::Knobs;
pub use raw::{Answer, RawClient, negotiate};
pub use server::{Server, ServerConfig, memory_file};
pub use tool::{memory_of, python, run, run_ok, scratch};
