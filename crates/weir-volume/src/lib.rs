#![cfg_attr(test, allow(clippy::unwrap_used))]
//! Backings, and the volumes that hold disks.
//!
//! A *backing* is the lowest layer of a disk ([`Backing`]); [`BackingKind`] opens one of any kind, for example a file or a block
//! device ([`FileBacking`]). A *volume* holds disks; a `dir` volume ([`DirVolume`]) is a directory in which each disk is one raw
//! sparse file, so that other tools can read a disk without Weir.

pub mod backing;
pub mod error;
pub mod factory;
pub mod lun;
mod offload;
pub mod planted;
pub mod volume;

pub use backing::{
    BackingOptions, EngineChoice, FileBacking, FileIdentity, Mark, OpenedFile, StorageKind, Trace,
};
pub use error::VolumeError;
pub use factory::{Backing, BackingKind, OpenedBacking};
pub use volume::DirVolume;
