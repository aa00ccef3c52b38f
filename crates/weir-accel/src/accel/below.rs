//! The requests that the accelerator makes of the layer below.

use weir_block::{Code, ErrorKind, IoError, Tag};

use crate::reads::Overlay;

/// The purpose of a request to the layer below.
pub(super) enum Below {
    /// A write past the log; `range` is its index among those.
    Pass {
        tag: Tag,
        range: usize,
    },
    Read {
        tag: Tag,
        offset: u64,
        overlay: Option<(Overlay, u64)>,
    },
    /// For clients.
    Flush,
    /// With the runs that were data in the log at the time of the request.
    Extents {
        tag: Tag,
        before: Vec<(u64, u64)>,
    },
    /// Measured below the accelerator, on purpose.
    Direct {
        tag: Tag,
        changes: bool,
    },
    Destage,
}

/// The answer to every request after another node has become the owner.
pub(super) fn not_owner() -> IoError {
    IoError::new(ErrorKind::Fence, Code::NotOwner, "another node owns the disk now")
}
