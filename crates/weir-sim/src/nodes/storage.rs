//! Opening of the simulated backing.

use std::path::Path;

use tokio::sync::oneshot;
use weir_block::sim::{FileId, World};
use weir_block::{OwnerId, Reactor};
use weir_node::shard::opener::{Backing, Report, Storage};
use weir_node::stack::{Bottom, Wrap};
use weir_volume::{BackingOptions, Mark, Trace};

use super::{Who, WorldRequest, WorldRequests};
use crate::cluster::backing;

/// One process's access to the storage: the simulation decides how long an opening takes.
pub struct SimulatedStorage {
    pub who: Who,
    pub requests: WorldRequests,
}

impl Storage for SimulatedStorage {
    fn open(&self, _: &Path, _: BackingOptions, report: Report) -> Result<(), String> {
        self.requests.push(self.who, WorldRequest::Open(report));
        Ok(())
    }

    /// Every node has its own machine and cannot observe the others' I/O.
    fn look(&self, _: &Path, _: Mark, _: oneshot::Sender<Trace>) {}
}

/// An opened file.
pub struct Opened {
    pub world: World,
    pub file: FileId,
    pub size: u64,
}

impl Backing for Opened {
    fn attach(
        self: Box<Self>,
        reactor: &mut Reactor,
        _: &str,
        _: &dyn Wrap,
    ) -> Result<(OwnerId, Box<dyn Bottom>), String> {
        let backing = backing::Backing::new(reactor, self.world.open(self.file), self.size, None);
        Ok((backing.owner(), Box::new(backing)))
    }

    fn discard(self: Box<Self>) {}
}
