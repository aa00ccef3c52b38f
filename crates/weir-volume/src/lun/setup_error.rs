//! Why a LUN cannot be a volume.

use std::path::PathBuf;

use weir_block::size::Size;

use super::filesystem::{FilesystemError, Kind};
use super::heartbeat::{Beat, HeartbeatError, VolumeId};
use super::reservations::ReservationError;

/// Smallest LUN, in bytes: mkfs.xfs makes nothing smaller than 300 MiB.
pub(super) const SMALLEST: u64 = 320 << 20;

/// Why a LUN cannot be a volume.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// No block device.
    #[error("{} is no block device; for a file, make a loop device of it on each node (losetup)", .0.display())]
    NotADevice(PathBuf),
    /// Too small.
    #[error("{} has {}, and a volume needs at least {}", .path.display(), Size(*.size), Size(SMALLEST))]
    TooSmall {
        /// The LUN.
        path: PathBuf,
        /// Bytes.
        size: u64,
    },
    /// It has nothing that can be used.
    #[error("{} has {found}; to make a filesystem there, add --format xfs (or ext4) and --identity {identity}: what is there is lost", .path.display())]
    NoFilesystem {
        /// The LUN.
        path: PathBuf,
        /// What it has.
        found: String,
        /// Its identity.
        identity: String,
    },
    /// A format would destroy data.
    #[error(
        "{} (LUN {identity}) is not blank, and a format destroys what is there: {found}; if that is what you want, add --destroy", .path.display()
    )]
    HasData {
        /// The LUN.
        path: PathBuf,
        /// Its identity.
        identity: String,
        /// What it has.
        found: String,
    },
    /// The heartbeat area would destroy data behind the filesystem.
    #[error(
        "{} has data behind its filesystem, from byte {at} on, where the heartbeat area is to be; if nobody needs it, add --destroy", .path.display()
    )]
    DataBehind {
        /// The LUN.
        path: PathBuf,
        /// First byte of the place for the area.
        at: u64,
    },
    /// Its filesystem is not all: it may be a part of an array, for example.
    #[error("{} has {found}: its {kind} cannot be used by itself; `wipefs {}` lists the signatures", .path.display(), .path.display())]
    Ambiguous {
        /// The LUN.
        path: PathBuf,
        /// The filesystem.
        kind: Kind,
        /// What else it has.
        found: String,
    },
    /// The identity was not repeated.
    #[error(
        "make sure that no host uses {} (LUN {identity}) in any other way, and say so with --identity {identity}: {what}", .path.display()
    )]
    NotConfirmed {
        /// The LUN.
        path: PathBuf,
        /// Its identity.
        identity: String,
        /// What would be done.
        what: String,
    },
    /// Another LUN.
    #[error("{} is LUN {identity}, not {said}: is it another device than you mean?", .path.display())]
    OtherLun {
        /// The path.
        path: PathBuf,
        /// Its identity.
        identity: String,
        /// What the operator has said.
        said: String,
    },
    /// Heartbeats come.
    #[error(
        "{} is in use by node {} (process {}) as volume {volume}: is the LUN presented to another cluster? A volume of this one that was just deleted is let go within half a minute", .path.display(), .beat.name, .beat.incarnation
    )]
    InUse {
        /// The LUN.
        path: PathBuf,
        /// The volume that it is there.
        volume: VolumeId,
        /// The last heartbeat.
        beat: Box<Beat>,
    },
    /// It is one already.
    #[error(
        "{} is the LUN of volume {volume}, which this node {}: a LUN is one volume, whatever its paths and partitions are; use that one, or delete it first",
        .path.display(), .here.as_ref().map_or_else(|| "does not find".to_owned(), |here| format!("uses at {}", here.display()))
    )]
    IsVolume {
        /// The path.
        path: PathBuf,
        /// The volume.
        volume: String,
        /// This node's path to it.
        here: Option<PathBuf>,
    },
    /// Somebody has mounted it, by this path or by another one that this host has to it.
    #[error(
        "{} is mounted at {}, by this or another path of this host to it, and not by Weir: both would write to one filesystem; `umount` it first",
        .path.display(), .at.display()
    )]
    Mounted {
        /// The path.
        path: PathBuf,
        /// Where it is mounted.
        at: PathBuf,
    },
    /// This node would not use it.
    #[error(
        "{} is not among lun.devices of this node, by its identity: this node would not use the volume; add it there, or ask a node that has it \
         there (--node)",
        .0.display()
    )]
    NotListed(PathBuf),
    /// This host has it at several paths, and nothing says which one is to be used.
    #[error("{}", several_paths(.identity, .paths))]
    SeveralPaths {
        /// The LUN's identity.
        identity: String,
        /// The paths.
        paths: Vec<PathBuf>,
    },
    /// Somebody has written to it since it was examined.
    #[error(
        "{} has been written to since this command began: it had {before}, and has {now}; nothing was done to it; make sure that no host uses \
         it, and try again", .path.display()
    )]
    Changed {
        /// The path.
        path: PathBuf,
        /// What it had.
        before: String,
        /// What it has.
        now: String,
    },
    /// Another process may set it up by now.
    #[error(
        "the setup of {} has ended early: this node has not reached the registry for too long, and another node may use the LUN by now; \
         `weir volume list` tells, when the registry answers; if it has no volume there, try again",
        .0.display()
    )]
    Ended(PathBuf),
    /// mkfs.
    #[error("{program} failed on {}: {said}", .path.display())]
    Format {
        /// The program.
        program: &'static str,
        /// The LUN.
        path: PathBuf,
        /// What it has said.
        said: String,
    },
    /// The filesystem.
    #[error(transparent)]
    Filesystem(#[from] FilesystemError),
    /// The heartbeat area.
    #[error(transparent)]
    Heartbeat(#[from] HeartbeatError),
    /// Other hosts have keys on it.
    #[error(transparent)]
    Reservation(#[from] ReservationError),
}

/// What to do about a LUN that a host has at several paths: I/O on two of them is not ordered.
#[must_use]
pub fn several_paths(identity: &str, paths: &[PathBuf]) -> String {
    let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    format!(
        "LUN {identity} is at more than one path ({}): set lun.devices to the one that is to be used, for example a multipath device",
        paths.join(", ")
    )
}
