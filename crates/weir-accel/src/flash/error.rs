//! Why a flash device cannot be used.

use std::io;
use std::path::PathBuf;

use super::VERSION;
use super::recovery::RecoveryError;

/// Why a flash device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FlashError {
    /// A system call failed.
    #[error("{}: {source}", path.display())]
    System {
        /// The device.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process has it, or one that has ended with a write in flight.
    #[error(
        "{}: another process uses this flash device, or a write of an ended one is still in flight to it", .0.display()
    )]
    InUse(PathBuf),
    /// It holds something that is not Weir's.
    #[error(
        "{}: holds something that is not a flash medium of Weir's; name another file, or erase its first 4 KiB if \
         nobody needs it", .0.display()
    )]
    Foreign(PathBuf),
    /// It was formatted by a build with another format.
    #[error("{}: has format version {version}, this build reads {VERSION}; drain it with the build that wrote it", path.display())]
    Version {
        /// The device.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// It was formatted for logs of another size and logs are in it.
    #[error(
        "{}: formatted for logs of {formatted} bytes, of which {taken} are in use; set resources.log back to that, drain \
         and release those disks, then change it", path.display()
    )]
    OtherSize {
        /// The device.
        path: PathBuf,
        /// Bytes of log per slot.
        formatted: u64,
        /// Slots in use.
        taken: usize,
    },
    /// Not even one log fits.
    #[error("{}: {size} bytes are too few; one log of this size needs {needed}", path.display())]
    TooSmall {
        /// The device.
        path: PathBuf,
        /// Its size, in bytes.
        size: u64,
        /// Bytes that a device with one slot needs.
        needed: u64,
    },
    /// It has shrunk since it was formatted.
    #[error(
        "{}: has {size} bytes and was formatted for {needed}, so logs at its end are cut off; put the whole file or device back, \
         or name another one and let the disks be filled anew from their other copies", path.display()
    )]
    Short {
        /// The device.
        path: PathBuf,
        /// Its size now, in bytes.
        size: u64,
        /// Bytes that the formatted slots need.
        needed: u64,
    },
    /// All slots are taken.
    #[error("{}: all {slots} logs that fit are in use; make it larger or use another node", path.display())]
    Full {
        /// The device.
        path: PathBuf,
        /// Number of slots.
        slots: usize,
    },
    /// A log on the device cannot be recovered.
    #[error(transparent)]
    Recovery(#[from] RecoveryError),
}
