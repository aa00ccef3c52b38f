//! An export of an NBD server between its opening, which blocks, and its first request.

use std::thread;
use std::time::Duration;

use weir_block::Reactor;
use weir_nbd::Uri;
use weir_nbd::client::Dialed;

use super::{NbdBacking, server};
use crate::error::{NbdTrouble, VolumeError};
use crate::interface::{Backing, OpenedBacking};

/// How a disk on an NBD server is used here.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// The server; the export of the URI is not used.
    pub server: Uri,
    /// The export.
    pub export: String,
    /// Bytes.
    pub size: u64,
    /// 512 or 4096.
    pub logical_block: u32,
    /// Most requests in flight.
    pub depth: usize,
    /// Requests wait for a server that is away for this long, and fail then (P9).
    pub server_wait: Duration,
    /// Changes that were under way when a connection broke may land for this long after it was closed (P4).
    pub fence_grace: Duration,
}

/// A disk on an NBD server, connected, before it is on its shard.
pub(crate) struct OpenedNbd {
    dialed: Dialed,
    options: NbdOptions,
}

impl OpenedNbd {
    /// Connects. Blocks, for no longer than [`server::HANDSHAKE`] and the resolution of the server's name.
    pub(crate) fn open(options: NbdOptions) -> Result<OpenedNbd, VolumeError> {
        let dialed = connect(&options, options.size, options.logical_block)?;
        Ok(OpenedNbd { dialed, options })
    }
}

/// Connects to an export that is as the disk needs it.
pub(super) fn connect(options: &NbdOptions, size: u64, logical_block: u32) -> Result<Dialed, NbdTrouble> {
    let dialed = server::dial(&options.server, &options.export)?;
    server::check(dialed.export(), size, logical_block).map_err(|reason| NbdTrouble::Unfit {
        server: options.server.address.to_string(),
        export: options.export.clone(),
        reason,
    })?;
    Ok(dialed)
}

impl OpenedBacking for OpenedNbd {
    fn attach(self: Box<Self>, reactor: &mut Reactor) -> Result<Box<dyn Backing>, VolumeError> {
        let OpenedNbd { dialed, options } = *self;
        Ok(Box::new(NbdBacking::new(reactor, dialed, options)?))
    }

    fn discard(self: Box<Self>) {
        // If the thread cannot start, the closure is dropped here and closes the connection.
        let _ = thread::Builder::new().name("weir-close".into()).spawn(move || drop(self));
    }
}
