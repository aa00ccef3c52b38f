//! The heartbeat area of a LUN: who coordinates it, written on the LUN itself (`VOLUME.md` §2).
//!
//! The registry excludes the nodes of one cluster from each other. It knows nothing of strangers: the same LUN presented to two
//! clusters, a registry that was restored from a backup, or a copy of one. So a coordinator writes a heartbeat to the LUN for as long as
//! it has the filesystem mounted, and looks at the area for a while before it mounts ([`crate::lun::claim`]). This is no fence: it finds
//! mistakes, and a stranger that is slow enough goes unnoticed.
//!
//! The area also keeps the last epoch in which the LUN was coordinated. A registry whose record is older has lost what happened since,
//! and with it processes that may still have the filesystem mounted.
//!
//! - [`layout`]: the blocks on the LUN;
//! - [`area`]: reads and writes them, directly;
//! - [`listener`]: what a look at the area for a while has shown.

pub mod area;
pub mod layout;
pub mod listener;

pub use area::{Area, HeartbeatError};
pub use layout::{Beat, Slot, VolumeId};
pub use listener::{Heard, Listener};
