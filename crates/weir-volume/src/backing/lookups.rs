//! Extent lookups on a thread per backing: `lseek` may block on the filesystem, and a shard must not block.
//!
//! A write that completed before the lookup is in the file, so it is never reported as a hole (P7).

use std::os::fd::AsRawFd;

use weir_block::{Extent, OwnerId, Reactor, SharedFile, Token};

use super::extents;
use crate::offload::Offload;

/// The slot of the watch for answers; requests never reach it.
const ANSWERS: u32 = u32::MAX - 1;

/// A range to look up.
pub(super) struct Lookup {
    /// The request's slot.
    pub slot: u32,
    pub offset: u64,
    pub length: u64,
    pub logical_block: u64,
}

/// The request's slot and its extents, or the kernel's error number.
pub(super) type Answer = (u32, Result<Vec<Extent>, i32>);

/// The lookups of one backing; at most as many as its queue depth.
pub(super) struct Lookups {
    file: SharedFile,
    offload: Offload<Answer>,
}

impl Lookups {
    pub fn new(file: SharedFile, owner: OwnerId) -> Lookups {
        Lookups { file, offload: Offload::new("weir-extents", Token { owner, slot: ANSWERS }) }
    }

    /// Starts a lookup. The answer is available after an event of the backing's owner ([`Lookups::take`]).
    ///
    /// # Errors
    /// The thread cannot start: the error number.
    pub fn ask(&mut self, reactor: &mut Reactor, lookup: Lookup) -> Result<(), i32> {
        let file = self.file.share();
        let Lookup { slot, offset, length, logical_block } = lookup;
        let look = move || (slot, extents::of_file(file.as_raw_fd(), offset, length, logical_block));
        self.offload.ask(reactor, look, (slot, Err(libc::EIO)))
    }

    /// After an event: the answers that have arrived.
    pub fn take(&mut self, reactor: &mut Reactor) -> Vec<Answer> {
        self.offload.take(reactor)
    }
}
