//! The registry's records, as this node last read them.

use std::sync::Arc;

use tokio::sync::watch;
use weir_cluster::Machine;
use weir_cluster::records::{
    DiskRecord, MemberRecord, NodeRecord, NodeRef, NodeStatesRecord, Record, ReleasedRecord, StoppedRecord,
    VolumeRecord, keys,
};
use weir_cluster::registry::{Registry, RegistryError};
use weir_cluster::view::{Records, Seen, View};

/// Copies of everything that decisions rest on, kept up to date.
#[derive(Debug)]
pub struct RegistryCopy {
    /// All disks.
    pub disks: View<DiskRecord>,
    /// All volumes.
    pub volumes: View<VolumeRecord>,
    /// The nodes whose lease stands.
    pub nodes: View<NodeRecord>,
    /// The nodes that have ever joined and have not been removed. Not an input of decisions about disks.
    pub members: View<MemberRecord>,
    /// The nodes' states: one record.
    states: View<NodeStatesRecord>,
    /// Processes that have ended.
    stopped: View<StoppedRecord>,
    /// Former owners that have no I/O under way any more.
    released: View<ReleasedRecord>,
    /// The machine of this process.
    machine: Option<Machine>,
}

impl RegistryCopy {
    /// Lists and follows.
    ///
    /// # Errors
    /// The registry does not answer.
    pub async fn start(registry: &Arc<dyn Registry>) -> Result<RegistryCopy, RegistryError> {
        Ok(RegistryCopy {
            disks: View::start(Arc::clone(registry), keys::DISKS).await?,
            volumes: View::start(Arc::clone(registry), keys::VOLUMES).await?,
            nodes: View::start(Arc::clone(registry), keys::NODES).await?,
            members: View::start(Arc::clone(registry), keys::MEMBERS).await?,
            states: View::start(Arc::clone(registry), keys::NODE_STATES_PREFIX).await?,
            stopped: View::start(Arc::clone(registry), keys::STOPPED).await?,
            released: View::start(Arc::clone(registry), keys::RELEASED).await?,
            machine: Machine::here(),
        })
    }

    /// A disk's record, as last read.
    #[must_use]
    pub fn seen(&self, name: &str) -> Seen<DiskRecord> {
        self.disks.now().seen(name)
    }

    /// The record of a disk, if it can be read.
    #[must_use]
    pub fn disk(&self, name: &str) -> Option<DiskRecord> {
        self.disks.now().get(name).cloned()
    }

    /// The nodes' states, as last read. None while the record cannot be read: isolation and drain are policy.
    #[must_use]
    pub fn node_states(&self) -> NodeStatesRecord {
        let name = short(keys::NODE_STATES, keys::NODE_STATES_PREFIX);
        self.states.now().get(name).cloned().unwrap_or_default()
    }

    /// Whether a process is known to have ended.
    #[must_use]
    pub fn has_stopped(&self, node: &NodeRef) -> bool {
        self.stopped.now().contains_key(short(&keys::stopped(node), keys::STOPPED))
    }

    /// Whether a process is known to have ended, and ran where this one can see what the kernel still has of it.
    #[must_use]
    pub fn has_stopped_here(&self, node: &NodeRef) -> bool {
        let stopped = self.stopped.now();
        let note = stopped.get(short(&keys::stopped(node), keys::STOPPED));
        note.is_some_and(|note| note.machine.is_some() && note.machine == self.machine)
    }

    /// Whether a former owner has declared that it has no I/O to the disk in flight any more.
    #[must_use]
    pub fn has_released(&self, disk: &str, epoch: u64, node: &NodeRef) -> bool {
        let key = keys::released(disk, epoch, &node.node);
        self.released.now().get(short(&key, keys::RELEASED)).is_some_and(|record| record.node == *node)
    }

    /// Wakes on changes from now on.
    #[must_use]
    pub fn changes(&self) -> Changes {
        Changes {
            disks: fresh(self.disks.changes()),
            volumes: fresh(self.volumes.changes()),
            nodes: fresh(self.nodes.changes()),
            states: fresh(self.states.changes()),
            stopped: fresh(self.stopped.changes()),
            released: fresh(self.released.changes()),
        }
    }
}

fn short<'a>(key: &'a str, prefix: &str) -> &'a str {
    key.strip_prefix(prefix).unwrap_or(key)
}

type Receiver<R> = watch::Receiver<Arc<Records<R>>>;

fn fresh<R: Record>(mut receiver: Receiver<R>) -> Receiver<R> {
    receiver.mark_unchanged();
    receiver
}

/// Wakes tasks that depend on any part of the [`RegistryCopy`].
#[derive(Debug)]
pub struct Changes {
    disks: Receiver<DiskRecord>,
    volumes: Receiver<VolumeRecord>,
    nodes: Receiver<NodeRecord>,
    states: Receiver<NodeStatesRecord>,
    stopped: Receiver<StoppedRecord>,
    released: Receiver<ReleasedRecord>,
}

impl Changes {
    /// Waits for the next change. Several in a row may be seen as one. Cancel safe.
    pub async fn next(&mut self) {
        let changed = tokio::select! {
            biased;
            changed = self.disks.changed() => changed,
            changed = self.volumes.changed() => changed,
            changed = self.nodes.changed() => changed,
            changed = self.states.changed() => changed,
            changed = self.stopped.changed() => changed,
            changed = self.released.changed() => changed,
        };
        if changed.is_err() {
            // A view ends only with the node; there is nothing to tell any more.
            std::future::pending::<()>().await;
        }
    }
}
