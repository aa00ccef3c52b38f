//! The flash medium: a disk's durable write log, which survives the end of the process and a power cut of the host.
//!
//! A node has one flash *device* (a preallocated file or a block device), cut into *slots* of equal size, one for each disk
//! whose log or replica is kept there ([`device`]). A slot is a ring that is written sequentially in *frames* of whole
//! blocks: a header with the log's whole state, and the records since the last frame ([`frame`]). One frame is in flight at a
//! time; records that come meanwhile go into the next (group commit).
//!
//! The records are in the arena as well, from where they are read, sent and destaged; flash is read only after a restart
//! ([`recovery`]). [`journal`] decides what to write when, and knows the state that is certainly durable: no I/O there, so
//! that the simulator can drive it. [`FlashStore`] drives it on a shard.

mod device;
mod error;
mod file;
mod format;
pub mod frame;
pub mod journal;
pub mod recovery;
mod store;
#[cfg(test)]
mod tests;

pub use device::{FlashDevice, SlotLease};
pub use error::FlashError;
pub use format::{device_bytes, ring_bytes};
pub use store::FlashStore;

/// The version of the format: of the device, and of the frames on it.
const VERSION: u32 = 3;
