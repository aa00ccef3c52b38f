#![cfg_attr(test, allow(clippy::unwrap_used))]
//! Backings, and the volumes that hold disks.
//!
//! A *backing* is the lowest layer of a disk ([`Backing`]); [`BackingKind`] opens one of any kind, for example a file or a block
//! device ([`FileBacking`]). A *volume* holds disks; a `dir` volume ([`DirVolume`]) is a directory in which each disk is one raw
//! sparse file, so that other tools can read a disk without Weir.

pub mod backing;
pub mod compaction;
pub mod disk_files;
pub mod error;
pub mod factory;
mod full;
pub mod interface;
pub mod lun;
pub mod nbd;
mod offload;
mod patience;
pub mod planted;
pub mod routed;
pub mod snapshot;
pub mod usage;
pub mod volume;

pub use backing::{
    BackingOptions, EngineChoice, FileBacking, FileIdentity, Mark, OpenedFile, StorageKind, Trace,
};
pub use disk_files::{DiskFiles, LunVolume};
pub use error::{NbdTrouble, VolumeError};
pub use factory::BackingKind;
pub use interface::{Backing, CoordinatorWay, OpenedBacking, SharedDisk};
pub use nbd::{NbdBacking, NbdOptions};
pub use volume::DirVolume;
