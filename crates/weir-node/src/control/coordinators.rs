//! The volumes on LUNs, as this node sees them: its path to each, and its part in its coordination.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use weir_block::Nanos;
use weir_cluster::records::NodeRef;
use weir_volume::lun::claim::Phase;
use weir_volume::lun::fencing::Tier;
use weir_volume::lun::filesystem::Mounted;

use super::compactions::Compactions;

/// One volume.
#[derive(Clone, Debug)]
pub struct VolumeState {
    /// This node's path to the LUN, if it has one.
    pub lun: Option<PathBuf>,
    /// This node's part in its coordination.
    pub phase: Phase,
    /// The coordinator, as the registry has it.
    pub coordinator: Option<NodeRef>,
    /// The filesystem, while this node serves it, and the epoch.
    pub mounted: Option<(u64, Arc<Mounted>)>,
    /// Counts the times that the LUN has refused I/O of a disk that is open here.
    pub refusals: u64,
    /// All I/O goes through the coordinator's filesystem. Shared with shards, so that whatever order messages arrive in, a disk follows the last word.
    pub redirected: Arc<AtomicBool>,
    /// This node opens its path to the LUN for disks that have none; one attempt at a time, as the LUN may not answer (P10).
    pub opens_path: Arc<AtomicBool>,
    /// How this node keeps others from the LUN; absent while it does not reach the LUN.
    pub tier: Option<Tier>,
    /// The last thing that an operator should know; empty if all is well.
    pub notice: String,
    /// When this node last deleted a file of it. The filesystem frees the space later.
    pub deleted: Option<Nanos>,
}

impl Default for VolumeState {
    fn default() -> VolumeState {
        VolumeState {
            lun: None,
            phase: Phase::Absent,
            coordinator: None,
            mounted: None,
            refusals: 0,
            redirected: Arc::default(),
            opens_path: Arc::default(),
            tier: None,
            notice: String::new(),
            deleted: None,
        }
    }
}

/// All of them, by name.
#[derive(Debug)]
pub struct Coordinators {
    volumes: Mutex<BTreeMap<String, VolumeState>>,
    changed: watch::Sender<u64>,
    /// The disks that this node serves to their owners, each with its volume. Held while one is begun or ended.
    pub served: tokio::sync::Mutex<BTreeMap<String, String>>,
    /// The disks that this node copies to fewer pieces.
    pub compactions: Compactions,
}

impl Default for Coordinators {
    fn default() -> Coordinators {
        Coordinators {
            volumes: Mutex::default(),
            changed: watch::Sender::new(0),
            served: tokio::sync::Mutex::default(),
            compactions: Compactions::default(),
        }
    }
}

impl Coordinators {
    /// One volume.
    #[must_use]
    pub fn get(&self, volume: &str) -> VolumeState {
        self.lock().get(volume).cloned().unwrap_or_default()
    }

    /// Changes what is known of a volume.
    pub fn update(&self, volume: &str, change: impl FnOnce(&mut VolumeState)) {
        change(self.lock().entry(volume.to_owned()).or_default());
        self.changed.send_modify(|count| *count += 1);
    }

    /// The volume is gone.
    pub fn forget(&self, volume: &str) {
        self.lock().remove(volume);
        self.changed.send_modify(|count| *count += 1);
    }

    /// Wakes on changes.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, VolumeState>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
