//! A small server to test the export with: one shard thread that serves disks from files, a tokio listener, and a
//! way to look inside.

mod bench;
mod layer;
mod raw;
mod server;
mod tool;
mod witness;

pub use bench::Bench;
pub use raw::{Answer, RawClient, answers};
pub use server::{Server, ServerConfig, memory_file, writable};
pub use tool::{python, run, run_ok, scratch};
pub use witness::Witness;
