//! Whether the files behind the disks that are open here are still where they belong. A file that was deleted, or that another one has
//! replaced, takes I/O as before, and is gone when the disk is closed. Looked at beside the I/O, every two seconds
//! and when somebody asks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use weir_volume::FileIdentity;

use crate::control::Node;
use crate::control::node::Here;
use crate::file_fault::fault;

/// Pause between two looks.
const LOOK: Duration = Duration::from_secs(2);

/// Longest wait for a look of somebody who asks.
const MOMENT: Duration = Duration::from_millis(100);

/// Faults of the files behind the disks, by disk.
#[derive(Debug, Default)]
pub struct Backings {
    faults: Mutex<BTreeMap<String, String>>,
    /// Held during a look: a storage that hangs holds up one of them.
    looking: tokio::sync::Mutex<()>,
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
        loop {
            tokio::time::sleep(LOOK).await;
            self.look(&node).await;
        }
    }

    /// Looks now, for somebody who asks; waits for the storage for a moment only, and not at all while another look lasts.
    pub async fn look_soon(self: &Arc<Backings>, node: &Arc<Node>) {
        let (backings, node) = (Arc::clone(self), Arc::clone(node));
        // A task, so that the look is finished, and its result kept, when this wait is over.
        let look = tokio::spawn(async move { backings.look(&node).await });
        let _ = tokio::time::timeout(MOMENT, look).await;
    }

    async fn look(&self, node: &Node) {
        let Ok(_turn) = self.looking.try_lock() else { return };
        let files = node.here.files();
        let look = move || files.into_iter().map(with_fault).collect::<Vec<_>>();
        let Ok(looks) = tokio::task::spawn_blocking(look).await else { return };
        for (kind, disk, text) in self.take(looks, &node.here) {
            node.journal.tell(kind, &disk, text);
        }
    }

    /// Keeps what was found, and says what is new.
    fn take(&self, looks: Vec<Looked>, here: &Here) -> Vec<(&'static str, String, String)> {
        let open = here.files();
        // A disk that was closed meanwhile, and perhaps opened again, has nothing to do with the file that was looked for.
        let current = looks.into_iter().filter(|(disk, file, _)| open.get(disk) == Some(file));
        let now: BTreeMap<_, _> =
            current.filter_map(|(disk, _, fault)| fault.map(|fault| (disk, fault))).collect();
        let before = std::mem::replace(&mut *self.lock(), now.clone());
        let gone = now.iter().filter(|(disk, _)| !before.contains_key(*disk));
        let gone = gone.map(|(disk, fault)| ("backing-gone", disk.clone(), fault.clone()));
        let back = before.keys().filter(|disk| !now.contains_key(*disk) && open.contains_key(*disk));
        let back = back
            .map(|disk| ("backing-back", disk.clone(), "its backing file is in its place again".to_owned()));
        gone.chain(back).collect()
    }
}

/// A disk, the file that it had open, and that file's fault.
type Looked = (String, FileIdentity, Option<String>);

fn with_fault((disk, file): (String, FileIdentity)) -> Looked {
    let fault = fault(&file);
    (disk, file, fault)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use weir_cluster::records::{DiskRecord, Policy, Source};
    use weir_volume::{BackingOptions, DirVolume, OpenedFile};

    use super::*;

    /// Disk `d` in a volume that is reached by a link.
    fn volume(directory: &Path) -> DirVolume {
        std::fs::create_dir(directory.join("volume")).unwrap();
        std::os::unix::fs::symlink(directory.join("volume"), directory.join("link")).unwrap();
        let volume = DirVolume::open(directory.join("link")).unwrap();
        volume.identify(7).unwrap();
        volume.create_disk("d", 4096).unwrap();
        volume
    }

    fn open(volume: &DirVolume) -> OpenedFile {
        let options = BackingOptions { volume: Some(7), ..BackingOptions::default() };
        OpenedFile::open(&volume.disk_path("d").unwrap(), &options).unwrap()
    }

    #[test]
    fn a_file_that_is_gone_or_replaced_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let volume = volume(directory.path());
        let path = volume.disk_path("d").unwrap();
        let disk = open(&volume);
        let file = disk.file().unwrap();
        assert_eq!(fault(&file), None);
        std::fs::remove_file(&path).unwrap();
        assert!(fault(&file).unwrap().contains("was deleted"));
        volume.create_disk("d", 4096).unwrap();
        assert!(fault(&file).unwrap().contains("another file is there"));
        let other = open(&volume);
        let moved = directory.path().join("moved.raw");
        drop(disk);
        std::fs::rename(&path, &moved).unwrap();
        assert!(fault(&other.file().unwrap()).unwrap().contains("deleted or moved"));
        std::fs::rename(&moved, &path).unwrap();
        assert_eq!(fault(&other.file().unwrap()), None);
    }

    /// A script deletes a disk, and makes and opens another of its name, between two looks.
    #[test]
    fn a_disk_that_is_opened_anew_is_not_taken_for_the_former_one_of_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let volume = volume(directory.path());
        let source = Source::File { name: "d".into() };
        let record = DiskRecord::new("d", "v", source, 4096, 512, Policy::WriteThrough);
        let (backings, here) = (Backings::default(), Here::default());
        let look = || here.files().into_iter().map(with_fault).collect::<Vec<_>>();
        // Kept open, so that the next one is another file for certain.
        let first = open(&volume);
        here.insert(&record, first.file());
        assert_eq!(backings.take(look(), &here), []);
        volume.delete("d").unwrap();
        let late = look();
        here.remove("d");
        volume.create_disk("d", 4096).unwrap();
        let second = open(&volume);
        here.insert(&record, second.file());
        for looks in [look(), late] {
            assert_eq!(backings.take(looks, &here), [], "nothing is wrong with the disk that is open");
            assert_eq!(backings.fault_of("d"), None);
        }
        volume.delete("d").unwrap();
        let told = backings.take(look(), &here);
        assert_eq!(told.iter().map(|(kind, ..)| *kind).collect::<Vec<_>>(), ["backing-gone"]);
        assert!(backings.fault_of("d").unwrap().contains("was deleted"));
    }
}
