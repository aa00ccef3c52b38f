//! The filesystem on a shared LUN, as its coordinator uses it: identified before it is touched, mounted where nobody else reaches it,
//! and asked where a file's blocks are (`VOLUME.md` §1, §2).
//!
//! - [`identify`], [`superblock`]: which filesystem a LUN has, and whether it suits, without mounting it;
//! - [`mount`]: a detached mount, which no other process and no path reaches; [`by_hand`]: mounts that others have made;
//! - [`mod@extents`]: the blocks of a file, and who may use them;
//! - `extent_sizes`: what XFS allocates around a write;
//! - [`space`]: space that is written with zeroes before it is used directly.
//!
//! Everything here blocks. It is for the coordinator's own threads, never for a shard.

pub mod by_hand;
pub mod error;
pub(in crate::lun) mod extent_sizes;
pub mod extents;
mod handle;
pub mod identify;
pub mod mount;
pub mod pages;
pub mod space;
pub mod superblock;

pub use error::FilesystemError;
pub use extents::{Extent, extents, layout};
pub use identify::{content, open_lun};
pub use mount::Mounted;
pub use superblock::{Content, Kind, Superblock};
