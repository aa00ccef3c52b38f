//! The control plane of a node: it reconciles the node with the registry.
//!
//! - [`registry_copy`]: copies of the registry's records, kept up to date;
//! - [`decide`]: the next step for one disk, as a pure function;
//! - [`change`]: compare-and-swap on a disk's record;
//! - [`disk`]: the task that does it, one per disk;
//! - [`node`]: their common state;
//! - [`grants`], [`rights`]: the right to serve, kept alive and granted;
//! - [`hearing`]: whether members hear an owner that the registry does not hear;
//! - [`copies`]: copies of other owners' logs are told what the records say;
//! - [`node_states`]: isolation of nodes, reported by those that hear them;
//! - [`relocation`]: disks move away from a node that is drained or quarantined, and back;
//! - [`agreement`]: the target of a move is asked whether it can open the disk;
//! - [`flash`]: the logs on this node's flash when it starts;
//! - [`capacity`], [`admission`]: this node's capacity for write logs, and its limit;
//! - [`failures`]: pauses between attempts;
//! - [`provisioning`], [`intents`]: files of disks that are being created or deleted;
//! - [`clone_snapshots`]: snapshots that are there only while a clone is made;
//! - [`supervisor`]: starts the tasks, routes the shards' notices, keeps the membership;
//! - [`coordinators`]: the volumes on LUNs, as this node sees them;
//! - [`forwarders`], [`forwarding`]: the clients of disks here that other nodes forward;
//! - [`readers`]: which other nodes' programs may read disks here;
//! - [`find_lun`]: the LUN of such a volume among this host's devices;
//! - [`looks`]: looks at devices that may not answer;
//! - [`lun_disks`]: the disks of such volumes: served to their owners, and connected to their coordinators;
//! - [`former_owners`], [`owner_fences`]: former owners of such disks are kept from the LUN;
//! - [`clocks`]: the nodes' wall clocks, compared;
//! - [`shards`]: the way to the shards;
//! - [`watchdog`]: reports a shard that hangs or spins.
//!
//! Nothing here is on the I/O path.

pub mod admission;
pub mod agreement;
pub mod capacity;
pub mod change;
pub mod clocks;
pub(crate) mod clone_snapshots;
pub mod compactions;
pub mod coordinators;
pub mod copies;
pub mod decide;
pub mod disk;
pub mod failures;
#[cfg(test)]
pub(crate) mod faulty_registry;
pub mod find_lun;
pub mod flash;
pub mod former_owners;
pub mod forwarders;
pub mod forwarding;
pub mod grants;
pub mod hearing;
pub mod intents;
pub mod looks;
pub mod lun_disks;
pub mod node;
pub mod node_states;
pub mod owner_fences;
pub mod provisioning;
pub mod readers;
pub mod registry_copy;
pub mod relocation;
pub mod rights;
pub mod shards;
pub mod supervisor;
pub mod watchdog;

pub use capacity::LogCapacity;
pub use node::Node;
pub use shards::Shards;
pub use supervisor::Tasks;
