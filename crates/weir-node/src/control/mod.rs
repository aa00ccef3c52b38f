//! The control plane of a node: what the registry says, carried out here (DESIGN §6).
//!
//! - [`world`]: copies of the registry's records, kept up to date;
//! - [`decide`]: what to do about one disk, as a pure function;
//! - [`change`]: compare-and-swap on a disk's record;
//! - [`disk`]: the task that does it, one per disk;
//! - [`node`]: what all of these share;
//! - [`grants`], [`rights`]: the right to serve, kept alive and granted;
//! - [`flash`]: the logs that are on this node's flash when it starts;
//! - [`capacity`], [`admission`]: what this node offers for write logs, and that it takes no more than fit;
//! - [`provisioning`], [`intents`]: files of disks that are being made or deleted;
//! - [`supervisor`]: starts the tasks, routes what the shards want, keeps the membership;
//! - [`shards`]: the way to the shards;
//! - [`watchdog`]: tells when a shard hangs or spins.
//!
//! Nothing here is on the I/O path.

pub mod admission;
pub mod capacity;
pub mod change;
pub mod decide;
pub mod disk;
#[cfg(test)]
mod faulty_registry;
pub mod flash;
pub mod grants;
pub mod intents;
pub mod node;
pub mod provisioning;
pub mod rights;
pub mod shards;
pub mod supervisor;
pub mod watchdog;
pub mod world;

pub use capacity::LogCapacity;
pub use node::Node;
pub use shards::Shards;
pub use supervisor::Tasks;
