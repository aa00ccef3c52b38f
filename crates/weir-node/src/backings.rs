//! Whether the files behind the disks that are open here are still where they belong. A file that was deleted, or that another one has
//! replaced, takes I/O as before, and is gone when the disk is closed. Looked at beside the I/O, every two seconds.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use weir_cluster::records::{DiskRecord, Source};
use weir_volume::DirVolume;

use crate::control::Node;

/// Pause between two looks.
const LOOK: Duration = Duration::from_secs(2);

/// The suffix that the kernel adds to the path of an open file without a name.
const DELETED: &[u8] = b" (deleted)";

/// Device and inode.
type Identity = (u64, u64);

/// Faults of the files behind the disks, by disk.
#[derive(Debug, Default)]
pub struct Backings {
    faults: Mutex<BTreeMap<String, String>>,
}

/// A file that a disk has open.
#[derive(Clone, Debug)]
struct Watched {
    disk: String,
    path: PathBuf,
    /// Of the file that is open; `None` until it has been found among this process's.
    identity: Option<Identity>,
}

impl Backings {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fault of a disk's file.
    #[must_use]
    pub fn fault_of(&self, disk: &str) -> Option<String> {
        self.lock().get(disk).cloned()
    }

    /// Looks until the node stops. A storage that hangs holds up the looks, and nothing else.
    pub async fn watch(self: Arc<Backings>, node: Arc<Node>) {
        let mut watched: BTreeMap<String, Watched> = BTreeMap::new();
        loop {
            tokio::time::sleep(LOOK).await;
            let open = node.here.all();
            watched.retain(|disk, _| open.contains_key(disk));
            for disk in open.keys().filter_map(|disk| node.world.disk(disk)) {
                let Some(path) = path_of(&node, &disk) else { continue };
                let new = Watched { disk: disk.name.clone(), path, identity: None };
                let known = watched.entry(disk.name).or_insert_with(|| new.clone());
                if known.path != new.path {
                    *known = new;
                }
            }
            let looks: Vec<_> = watched.values().cloned().collect();
            let look = move || looks.into_iter().map(look).collect::<Vec<_>>();
            let Ok(seen) = tokio::task::spawn_blocking(look).await else { continue };
            let mut now = BTreeMap::new();
            for (one, fault) in seen {
                now.extend(fault.map(|fault| (one.disk.clone(), fault)));
                // One that was closed meanwhile is not put back.
                if let Some(known) = watched.get_mut(&one.disk) {
                    *known = one;
                }
            }
            let before = std::mem::replace(&mut *self.lock(), now.clone());
            for (disk, fault) in now.iter().filter(|(disk, _)| !before.contains_key(*disk)) {
                node.journal.tell("backing-gone", disk, fault.clone());
            }
            for disk in before.keys().filter(|disk| !now.contains_key(*disk) && open.contains_key(*disk)) {
                node.journal.tell("backing-back", disk, "its backing file is in its place again".to_owned());
            }
        }
    }
}

fn path_of(node: &Node, disk: &DiskRecord) -> Option<PathBuf> {
    let Source::File { name } = &disk.source else { return None };
    let directory = node.volume_path(&disk.volume).ok()?;
    DirVolume::path_of(&directory, name).ok()
}

fn look(mut one: Watched) -> (Watched, Option<String>) {
    if one.identity.is_none() {
        one.identity = open_file(&one.path);
    }
    let path = one.path.display();
    let fault = match std::fs::symlink_metadata(&one.path) {
        // Nothing is known of the one that is open: it has another name now, and this is the first look.
        Ok(_) if one.identity.is_none() => None,
        Ok(there) if Some((there.dev(), there.ino())) == one.identity => None,
        Ok(_) => Some(format!(
            "{path} is not its backing file any more, another file is there; what is written is lost when the disk is closed"
        )),
        Err(error) if error.kind() == ErrorKind::NotFound => Some(format!(
            "its backing file {path} was deleted or moved; what is written is lost when the disk is closed"
        )),
        // Nothing is known.
        Err(_) => None,
    };
    (one, fault)
}

/// The file that this process has open and that is, or was, at `path`.
fn open_file(path: &Path) -> Option<Identity> {
    let real = match (path.parent().and_then(|parent| parent.canonicalize().ok()), path.file_name()) {
        (Some(parent), Some(name)) => parent.join(name),
        _ => path.to_owned(),
    };
    let real = real.as_os_str().as_bytes();
    let mut gone = None;
    for entry in std::fs::read_dir("/proc/self/fd").ok()?.flatten() {
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        let target = target.as_os_str().as_bytes();
        let is_deleted = target.strip_suffix(DELETED) == Some(real);
        if target != real && !is_deleted {
            continue;
        }
        let Ok(file) = std::fs::metadata(entry.path()) else { continue };
        let identity = (file.dev(), file.ino());
        if !is_deleted {
            return Some(identity);
        }
        gone = Some(identity);
    }
    gone
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn fault(path: &Path, identity: Option<Identity>) -> (Option<Identity>, Option<String>) {
        let (one, fault) = look(Watched { disk: "d".into(), path: path.to_owned(), identity });
        (one.identity, fault)
    }

    #[test]
    fn a_file_that_is_gone_or_replaced_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(directory.path(), directory.path().join("link")).unwrap();
        let path = directory.path().join("link/d.raw");
        let file = File::create(&path).unwrap();
        let (known, fine) = fault(&path, None);
        assert!(known.is_some() && fine.is_none(), "{known:?} {fine:?}");
        std::fs::remove_file(&path).unwrap();
        assert!(fault(&path, known).1.unwrap().contains("was deleted"));
        assert!(fault(&path, None).1.unwrap().contains("was deleted"), "also if nobody looked before");
        let other = File::create(&path).unwrap();
        assert!(fault(&path, known).1.unwrap().contains("another file is there"));
        let moved = directory.path().join("moved.raw");
        drop(file);
        std::fs::rename(&path, &moved).unwrap();
        assert!(
            fault(&path, None).1.unwrap().contains("deleted or moved"),
            "also if it was moved before the first look"
        );
        drop(other);
    }
}
