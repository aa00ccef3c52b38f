//! What disks, snapshots and clones take in a volume's filesystem: blocks of their own, and blocks that they share (`FIEMAP`).
//!
//! The filesystem says of each extent whether another file has it, too, and not which one. So the bytes of a file that nobody shares are
//! free when it is deleted; the others only when the last file that has them goes. XFS keeps a note of blocks that were shared for a while
//! after the last clone has gone: they count as shared until it has looked.

use crate::error::VolumeError;
use crate::lun::filesystem::extents::{Extent, each_batch};
use crate::snapshot::{self, Entry, Files};
use crate::volume::DirVolume;

/// Most pieces of shared blocks that are remembered, to count each block once: 64 MiB (P10).
const MOST_SHARED: usize = 4 << 20;

/// Bytes of a file, by who else has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Nobody: they are free when the file is deleted.
    pub exclusive: u64,
    /// At least one other file.
    pub shared: u64,
    /// Extents.
    pub extents: u64,
}

/// What a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// A disk, by its name. So is a clone.
    Disk(String),
    /// A snapshot, as in `disk@snapshot`.
    Snapshot(String),
    /// A snapshot, a clone or a replacement that is being made, or was when its maker ended: the name of the file.
    Unfinished(String),
}

impl What {
    /// Nothing of files that are not Weir's.
    fn of(entry: &Entry) -> Option<What> {
        if snapshot::is_unfinished(&entry.name) {
            return Some(What::Unfinished(entry.name.clone()));
        }
        let snapshot = snapshot::name_of(entry).map(|(disk, name)| What::Snapshot(format!("{disk}@{name}")));
        snapshot.or_else(|| DirVolume::disk_of(&entry.name).map(|disk| What::Disk(disk.to_owned())))
    }
}

/// A file of the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileUsage {
    /// What it is.
    pub what: What,
    /// The file.
    pub entry: Entry,
    /// Absent: there was no time to look, or the filesystem cannot tell.
    pub parts: Option<Parts>,
}

/// What is known of all files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// By name.
    pub files: Vec<FileUsage>,
    /// Bytes that the files share, each block counted once; absent if a file was not looked at, or there are too many.
    pub shared_once: Option<u64>,
}

/// Looks at all files of a volume that are Weir's, for as long as it goes on. Blocks.
///
/// # Errors
/// The system's. A file that goes meanwhile is left out.
pub fn measure(files: &dyn Files, goes_on: &dyn Fn() -> bool) -> Result<Usage, VolumeError> {
    let mut entries = files.list(&|_| true)?;
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    let (mut found, mut shared) = (Vec::new(), Shared::default());
    for entry in entries {
        let Some(what) = What::of(&entry) else { continue };
        match look(files, &entry, goes_on, &mut shared) {
            Err(VolumeError::NotFound(_)) => {}
            looked => found.push(FileUsage { what, parts: looked?, entry }),
        }
    }
    let is_complete = found.iter().all(|file| file.parts.is_some());
    Ok(Usage { files: found, shared_once: shared.once().filter(|_| is_complete) })
}

fn look(
    files: &dyn Files,
    entry: &Entry,
    goes_on: &dyn Fn() -> bool,
    shared: &mut Shared,
) -> Result<Option<Parts>, VolumeError> {
    if !goes_on() {
        return Ok(None);
    }
    let file = files.open(&entry.name)?;
    let mut parts = Parts::default();
    let looked = each_batch(&file, 0..u64::MAX >> 1, |some| {
        for extent in &some {
            parts.extents += 1;
            match extent.is_shared() {
                true => parts.shared += shared.add(extent),
                false => parts.exclusive += extent.length,
            }
        }
        goes_on()
    });
    match looked {
        Ok(is_whole) => Ok(is_whole.then_some(parts)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY)) => Ok(None),
        Err(error) => Err(VolumeError::from_io("looking at the extents of", &files.path(&entry.name), error)),
    }
}

/// Places on the storage that files share.
#[derive(Debug, Default)]
struct Shared {
    /// First byte and the one after the last.
    places: Vec<(u64, u64)>,
    /// Some are not in it.
    is_full: bool,
}

impl Shared {
    /// Returns the extent's bytes.
    fn add(&mut self, extent: &Extent) -> u64 {
        let (start, end) = (extent.physical, extent.physical + extent.length);
        let is_full = self.places.len() >= MOST_SHARED;
        match self.places.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ if is_full => self.is_full = true,
            _ => self.places.push((start, end)),
        }
        extent.length
    }

    /// The bytes, each counted once.
    fn once(mut self) -> Option<u64> {
        self.places.sort_unstable();
        let mut bytes = 0;
        let mut known = 0;
        for (start, end) in self.places {
            let start = start.max(known);
            bytes += end.saturating_sub(start);
            known = known.max(end);
        }
        (!self.is_full).then_some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_shared_block_counts_once() {
        let once = |places: &[(u64, u64)]| Shared { places: places.to_vec(), is_full: false }.once();
        assert_eq!(once(&[]), Some(0));
        assert_eq!(once(&[(0, 10), (0, 10), (5, 15)]), Some(15));
        assert_eq!(once(&[(20, 30), (0, 10), (0, 4), (22, 24)]), Some(20));
        assert_eq!(Shared { places: vec![(0, 10)], is_full: true }.once(), None);
    }
}
