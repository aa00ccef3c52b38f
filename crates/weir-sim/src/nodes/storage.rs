//! Where the simulated backing is opened.

use std::path::Path;

use tokio::sync::oneshot;
use weir_block::sim::{FileId, World};
use weir_block::{OwnerId, Reactor};
use weir_node::shard::opener::{Backing, Report, Storage};
use weir_node::stack::{Bottom, Wrap};
use weir_volume::{BackingOptions, Mark, Trace};

use super::{Who, Wish, Wishes};
use crate::cluster::backing;

/// The storage as one process reaches it: an opening takes as long as the simulation says.
pub struct Shelf {
    pub who: Who,
    pub wishes: Wishes,
}

impl Storage for Shelf {
    fn open(&self, _: &Path, _: BackingOptions, report: Report) -> Result<(), String> {
        self.wishes.push(self.who, Wish::Open(report));
        Ok(())
    }

    /// Every node has a machine of its own, where nothing is to be seen of the others' I/O.
    fn look(&self, _: &Path, _: Mark, _: oneshot::Sender<Trace>) {}
}

/// A file that has been opened.
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
