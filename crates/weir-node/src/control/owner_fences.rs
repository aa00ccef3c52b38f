//! The fences that a node has made for its disks, and how LUNs and kernels know processes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use weir_block::Nanos;
use weir_block::hash::{FNV_BASIS, fnv1a};
use weir_cluster::records::NodeRef;
use weir_volume::Mark;
use weir_volume::lun::claim::Process;

/// The number of a host, by which heartbeats, keys and the fence command know it. The name of a node is its own for as long as the
/// cluster lasts.
#[must_use]
pub fn number(node: &str) -> u64 {
    fnv1a(FNV_BASIS, node.bytes())
}

/// A process, as a LUN knows it.
#[must_use]
pub fn process(node: &NodeRef) -> Process<u64> {
    Process { node: number(&node.node), incarnation: node.incarnation }
}

/// A process, as the kernel of its host shows what it still does for it.
#[must_use]
pub fn mark_of(process: &NodeRef) -> Mark {
    Mark::of(&process.to_string())
}

/// When the last fence of one process began that was a success.
pub(super) type Begun = Arc<tokio::sync::Mutex<Option<Nanos>>>;

/// The fences that this node has made for its disks. One process may have owned many disks of a volume: one fence is enough for all.
#[derive(Debug, Default)]
pub struct OwnerFences(Mutex<BTreeMap<(String, NodeRef), Begun>>);

impl OwnerFences {
    pub(super) fn of(&self, volume: &str, former: &NodeRef) -> Begun {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry((volume.to_owned(), former.clone())).or_default())
    }
}
