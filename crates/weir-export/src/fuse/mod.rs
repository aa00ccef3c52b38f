//! Disks as files: a FUSE mount of each disk, which any program opens.
//!
//! Each disk's file is a mount of its own, so each has its own descriptor at the kernel. While nobody has the file open, and while
//! the disk is not served on this node, the control plane answers there ([`File`]). From the first opener to the last, the
//! disk's shard reads that descriptor itself, as it reads the socket of an NBD client: [`Bridge`] translates the kernel's requests
//! into those of an NBD connection, and its replies into the kernel's answers, on the shard's thread and without a copy of a read's
//! data. So everything that a connection guarantees holds for a file: order and exclusion of parts of blocks, limits, bounded memory,
//! and clients that are held while a disk moves.

mod bridge;
mod file;
mod mount;
mod translation;
mod wire;

pub use bridge::Bridge;
pub use file::{Access, Asked, File, Io, IoKind, Sender};
pub use mount::{Mount, remove_leftovers};
pub use translation::{HEAD, Translation, reading_session, session};
pub use wire::{LARGEST, LONGEST_REQUEST};

/// How requests come from the kernel. FUSE over io_uring would need a ring for each processor, and gains nothing at a queue depth of 32.
pub const TRANSPORT: &str = "/dev/fuse";
