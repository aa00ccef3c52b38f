//! Opening of the simulated backing.

use tokio::sync::oneshot;
use weir_block::Reactor;
use weir_block::sim::{FileId, World};
use weir_node::shard::opener::{Report, Storage};
use weir_volume::{Backing, BackingKind, BackingOptions, Mark, OpenedBacking, Trace, VolumeError};

use super::{Who, WorldRequest, WorldRequests};
use crate::cluster::backing;

/// One process's access to the storage: the simulation decides the duration of an opening.
pub struct SimulatedStorage {
    pub who: Who,
    pub requests: WorldRequests,
}

impl Storage for SimulatedStorage {
    fn open(&self, _: &BackingKind, _: BackingOptions, report: Report) -> Result<(), String> {
        self.requests.push(self.who, WorldRequest::Open(report));
        Ok(())
    }

    /// Every node has its own machine and cannot observe the others' I/O.
    fn look(&self, _: &BackingKind, _: Mark, _: oneshot::Sender<Trace>) {}
}

/// An opened file.
pub struct Opened {
    pub world: World,
    pub file: FileId,
    pub size: u64,
}

impl OpenedBacking for Opened {
    fn attach(self: Box<Self>, reactor: &mut Reactor) -> Result<Box<dyn Backing>, VolumeError> {
        Ok(Box::new(backing::Backing::new(reactor, self.world.open(self.file), self.size, None)))
    }

    fn discard(self: Box<Self>) {}
}
