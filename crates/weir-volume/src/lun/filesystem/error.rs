//! Errors of the filesystem on a LUN.

use std::io;
use std::path::{Path, PathBuf};

use super::superblock::{Kind, Unsuitable};

/// Errors that may be of this node, its mount or its path alone.
pub(in crate::lun) const MAY_BE_OF_NODE: [i32; 7] =
    [libc::EIO, libc::EUCLEAN, libc::EBADMSG, libc::ENOLINK, libc::ENODEV, libc::ENXIO, libc::ETIMEDOUT];
/// The LUN refuses the I/O of this node, which is fenced: as a reservation does, a device that is made read-only, or a filesystem that has made
/// itself so.
pub(in crate::lun) const REFUSED: [i32; 3] = [libc::EBADE, libc::EPERM, libc::EROFS];

/// The reason why a LUN's filesystem cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FilesystemError {
    /// The system's answer.
    #[error("cannot {action} {}: {source}", .path.display())]
    System {
        /// The verb.
        action: &'static str,
        /// The LUN, or a file on it.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel mounts it not.
    #[error("{} cannot be mounted as {kind}: {source}{}", .path.display(), in_parentheses(.said))]
    Mount {
        /// The LUN.
        path: PathBuf,
        /// The filesystem.
        kind: Kind,
        /// The kernel's own words.
        said: String,
        /// Why.
        source: io::Error,
    },
    /// XFS has the filesystem mounted through another device of this host.
    #[error(
        "{}: its filesystem is still mounted in this kernel, through {}: a process that has coordinated the volume on this host is stopped or \
         hangs, and has not let go of it; end that process (SIGKILL also ends a stopped one), and the volume is mounted here",
        .path.display(),
        .other.display()
    )]
    InThisKernel {
        /// The LUN.
        path: PathBuf,
        /// The device of that mount.
        other: PathBuf,
    },
    /// It has a filesystem that a shared volume cannot use.
    #[error("{} has a filesystem that cannot be a shared volume: {source}", .path.display())]
    Unsuitable {
        /// The LUN.
        path: PathBuf,
        /// Why.
        source: Unsuitable,
    },
    /// This host's path to it has larger sectors.
    #[error(
        "{} has a filesystem with sectors of {filesystem} bytes, and this host reaches it in sectors of {path_sector} bytes: format it with \
         sectors of {path_sector} bytes, for all nodes",
        .path.display()
    )]
    Sectors {
        /// The LUN.
        path: PathBuf,
        /// Of the filesystem.
        filesystem: u32,
        /// Of the path.
        path_sector: u32,
    },
    /// The path leads to something else.
    #[error(
        "{} does not lead to the LUN of this volume any more (its filesystem has the UUID {}): let the path lead there again, or restart this \
         node, which looks for the LUN by that UUID",
        .path.display(),
        hexadecimal(.filesystem)
    )]
    OtherLun {
        /// The path.
        path: PathBuf,
        /// The identity of the volume's filesystem.
        filesystem: [u8; 16],
    },
    /// The storage has made a copy of the LUN, with the same filesystem.
    #[error(
        "{} leads to another LUN, {identity}, which has a copy of the filesystem of this volume: a copy is not used; let the path lead to the \
         volume's LUN again",
        .path.display()
    )]
    Copy {
        /// The path.
        path: PathBuf,
        /// The copy's.
        identity: String,
    },
    /// Space was written, and is still not the file's own.
    #[error(
        "{}: bytes {start} to {end} were written, and the filesystem does not have them as written blocks of this file alone ({found}); \
         is another program at work on this filesystem?",
        .path.display()
    )]
    NotWritten {
        /// The file.
        path: PathBuf,
        /// First byte.
        start: u64,
        /// The byte after the last one.
        end: u64,
        /// The state of the first block that is not written.
        found: String,
    },
}

impl FilesystemError {
    pub(in crate::lun) fn system(
        action: &'static str,
        path: &Path,
    ) -> impl FnOnce(io::Error) -> FilesystemError {
        move |source| FilesystemError::System { action, path: path.to_path_buf(), source }
    }

    /// No space is left on the filesystem.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self.errno(), Some(libc::ENOSPC | libc::EDQUOT))
    }

    /// There is no such file.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.errno() == Some(libc::ENOENT)
    }

    /// Something on this host has the LUN mounted, or open exclusively.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.errno() == Some(libc::EBUSY)
    }

    fn errno(&self) -> Option<i32> {
        match self {
            FilesystemError::System { source, .. } | FilesystemError::Mount { source, .. } => {
                source.raw_os_error()
            }
            FilesystemError::InThisKernel { .. }
            | FilesystemError::Unsuitable { .. }
            | FilesystemError::Sectors { .. }
            | FilesystemError::OtherLun { .. }
            | FilesystemError::Copy { .. }
            | FilesystemError::NotWritten { .. } => None,
        }
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn in_parentheses(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!(" ({said})") }
}
