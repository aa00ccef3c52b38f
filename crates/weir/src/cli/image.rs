//! `weir image`

use std::path::PathBuf;

use clap::{Subcommand, ValueEnum};
use weir_node::api::Medium;

use super::disk::LimitArgs;
use super::snapshot::{CloneSource, parse_source};
use crate::completion;

pub const EXAMPLES: &str = "Examples:
  weir image import debian-12.qcow2 golden --volume pool
  weir image import disk.img vm1 --volume pool --format raw
  weir image export vm1@monday vm1.qcow2
  weir image export vm1 /backup/vm1.img --format raw";

#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Create a disk with the content of an image file, through qemu-img.
    ///
    /// Holes of the image stay holes; on a LUN only larger ones do, because space is allocated there in steps of up to 64 MiB. An image that needs other files (a backing file, a data file) or a key is refused: whoever made it could
    /// have any file of this host read. If the import fails or is interrupted, the disk is removed. One that is cut off (kill -9, the death of
    /// the disk's owner) leaves the disk in the state `importing`: nobody can use it, and `weir disk delete` removes it. An image whose data is more
    /// than the volume has free is refused. Afterwards the disk is open.
    Import {
        /// The image, on this host.
        file: PathBuf,
        /// The name of the new disk.
        name: String,
        /// The volume to put it in.
        #[arg(long, add = completion::volumes())]
        volume: String,
        /// The image's format. Without it, an image that begins as qcow2 does and is named .qcow2 is that, and one that neither is raw. Any other
        /// is refused: the first bytes of a raw image are its guest's, which could have written anything.
        #[arg(long, value_enum)]
        format: Option<Format>,
        /// As of `weir disk create`.
        #[arg(long, default_value = "write-back+1")]
        policy: String,
        /// As of `weir disk create`.
        #[arg(long, default_value = "ram")]
        medium: Medium,
        /// Logical block: 512 or 4096 bytes. Default: 4096, which a volume on a LUN and snapshots need.
        #[arg(long, default_value_t = 4096, value_name = "BYTES")]
        block: u32,
        #[command(flatten)]
        limit: LimitArgs,
    },
    /// Write a disk or a snapshot to a new image file, through qemu-img.
    ///
    /// A disk in use is written as it is at one point in time, from a clone that is removed afterwards (export-BOOT-PROCESS-NUMBER; what a killed
    /// export leaves, the next one removes). Where the filesystem has no reflinks, only a
    /// disk without clients can be written.
    Export {
        /// The disk, or one of its snapshots.
        #[arg(value_name = "DISK[@SNAPSHOT]", value_parser = parse_source, add = completion::snapshots_and_disks())]
        source: CloneSource,
        /// The new file, on this host.
        file: PathBuf,
        /// Its format. Default: qcow2 if its name ends in .qcow2, otherwise raw.
        #[arg(long, value_enum)]
        format: Option<Format>,
    },
}

/// A format of image files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Raw,
    Qcow2,
}

impl Format {
    /// As qemu-img calls it.
    pub fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        }
    }
}
