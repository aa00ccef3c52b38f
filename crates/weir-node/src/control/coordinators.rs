//! The volumes on LUNs, as this node sees them: its path to each, and its part in its coordination.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use weir_block::Nanos;
use weir_cluster::records::NodeRef;
use weir_volume::lun::claim::Phase;
use weir_volume::lun::fencing::{Fencing, Tier};
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
    /// Until when an operator's move of the coordination accounts for the lack of a coordinator, in nanoseconds. Shared with shards, as above.
    pub handover: Arc<AtomicU64>,
    /// The epoch in which an operator last wanted that.
    pub wish: Option<u64>,
    /// This node opens its path to the LUN for disks that have none; one attempt at a time, as the LUN may not answer (P10).
    pub opens_path: Arc<AtomicBool>,
    /// How this node keeps others from the LUN; absent while it does not reach the LUN.
    pub tier: Option<Tier>,
    /// The tiers of fencing on this node; absent as above.
    pub fencing: Option<Fencing>,
    /// The last thing that an operator should know; empty if all is well.
    pub notice: String,
    /// Disks that were open here and have I/O of this process on the LUN, or may have: also those that are deleted by now.
    pub disks: BTreeSet<String>,
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
            handover: Arc::default(),
            wish: None,
            opens_path: Arc::default(),
            tier: None,
            fencing: None,
            notice: String::new(),
            disks: BTreeSet::new(),
            deleted: None,
        }
    }
}

/// The disks of one volume that this node serves, by name, with their numbers: a later disk may get the name. Locked while one is begun or
/// ended.
pub type Served = Arc<tokio::sync::Mutex<BTreeMap<String, u64>>>;

/// A disk is about to be served, until this is dropped.
#[derive(Debug)]
pub struct Beginning<'a>(&'a Coordinators, String);

impl Drop for Beginning<'_> {
    fn drop(&mut self) {
        self.0.beginning().remove(&self.1);
    }
}

/// All of them, by name.
#[derive(Debug)]
pub struct Coordinators {
    volumes: Mutex<BTreeMap<String, VolumeState>>,
    changed: watch::Sender<u64>,
    /// The disks that this node serves to their owners, by volume: a LUN that does not answer holds up no other volume (P9).
    served: Mutex<BTreeMap<String, Served>>,
    /// Disks that are about to be served; one attempt for each at a time, as the LUN may not answer (P10).
    beginning: Mutex<BTreeSet<String>>,
    /// The disks that this node copies to fewer pieces.
    pub compactions: Compactions,
}

impl Default for Coordinators {
    fn default() -> Coordinators {
        Coordinators {
            volumes: Mutex::default(),
            changed: watch::Sender::new(0),
            served: Mutex::default(),
            beginning: Mutex::default(),
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

    /// The disks of a volume that this node serves to their owners.
    #[must_use]
    pub fn served(&self, volume: &str) -> Served {
        let mut all = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(volume.to_owned()).or_default())
    }

    /// A disk is about to be served; `None`: it is already.
    #[must_use]
    pub fn begin(&self, disk: &str) -> Option<Beginning<'_>> {
        let is_first = self.beginning().insert(disk.to_owned());
        is_first.then(|| Beginning(self, disk.to_owned()))
    }

    fn beginning(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.beginning.lock().unwrap_or_else(PoisonError::into_inner)
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
