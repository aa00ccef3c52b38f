//! The control plane of a node: what the registry says, carried out here (DESIGN §6).
//!
//! - [`world`]: copies of the registry's records, kept up to date;
//! - [`decide`]: what to do about one disk, as a pure function;
//! - [`change`]: compare-and-swap on a disk's record;
//! - [`disk`]: the task that does it, one per disk;
//! - [`node`]: what all of these share;
//! - [`flash`]: what is at rest on this node's flash when it starts;
//! - [`room`]: what this node offers for write logs, and that it takes no more than fit;
//! - [`unfinished`]: files of disks that are being made or deleted;
//! - [`supervisor`]: starts the tasks, routes what the shards want, keeps the membership;
//! - [`shards`]: the way to the shards;
//! - [`watchdog`]: tells when a shard hangs or spins.
//!
//! Nothing here is on the way of an I/O.

pub mod change;
pub mod decide;
pub mod disk;
pub mod flash;
#[cfg(test)]
mod moody;
pub mod node;
pub mod room;
pub mod shards;
pub mod supervisor;
pub mod unfinished;
pub mod watchdog;
pub mod world;

pub use node::Node;
pub use room::LogRoom;
pub use shards::{ShardQueue, Shards};
pub use supervisor::Tasks;
