//! Where the bytes finally are: backings, and the volumes that hold disks.
//!
//! A *backing* is the lowest layer: a file or a block device that takes requests ([`FileBacking`]). A *volume* holds
//! disks; a `dir` volume ([`DirVolume`]) is a directory in which each disk is one raw sparse file, so that every other
//! tool can read a disk when Weir is not there.

pub mod backing;
pub mod error;
pub mod volume;

pub use backing::{BackingOptions, EngineChoice, FileBacking, Mark, Medium, OpenedFile, Trace};
pub use error::VolumeError;
pub use volume::DirVolume;
