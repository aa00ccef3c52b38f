//! The cluster's disks as files on this node: `DIRECTORY/VOLUME/DISK.raw`, each a FUSE mount of its own ([`weir_export::fuse`]).
//!
//! One task for each disk ([`keeper`]) answers the kernel while the disk is not served here, or nobody has its file open. It opens for
//! programs what NBD clients may open on this node, and refuses what they may not. From the first opener to the last, the disk's shard
//! serves the file. If the disk goes away meanwhile, requests wait for it here, as NBD clients do that reconnect. With
//! `fuse.elsewhere = "read"`, the owner on another node answers what programs read here ([`owner`]).

mod keeper;
mod owner;

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinHandle;
use weir_cluster::records::DiskRecord;
use weir_cluster::view::Seen;
use weir_export::fuse::{self, File, Mount};

use self::keeper::Keeper;
use crate::cluster::unix_seconds;
use crate::control::Node;
use crate::exports::Exports;

/// Pause before a file that could not be mounted, or has ended, is mounted again.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// The files, until [`Files::stop`].
pub struct Files {
    stop: watch::Sender<()>,
    task: JoinHandle<()>,
    /// Keeps other nodes from the directory.
    _lock: OwnedFd,
}

impl Files {
    /// Mounts the files of all disks, if the configuration names a directory for them, and follows the registry. Removes what a former
    /// process has left there.
    ///
    /// # Errors
    /// The directory cannot be made, it is another node's, or a former process's mounts cannot be found.
    pub fn start(node: &Arc<Node>, exports: &Arc<Exports>) -> io::Result<Option<Files>> {
        let Some(directory) = node.config.fuse.directory.clone() else { return Ok(None) };
        make_directory(&directory)?;
        // What another node has mounted there must not be taken for left over.
        let lock = lock(&directory)?;
        let left = fuse::remove_leftovers(&directory)?;
        let (path, transport) = (directory.display(), fuse::TRANSPORT);
        tracing::info!(%path, transport, left, "fuse: disks are files here");
        let (stop, stopping) = watch::channel(());
        let task = tokio::spawn(keep(Arc::clone(node), Arc::clone(exports), directory, stopping));
        Ok(Some(Files { stop, task, _lock: lock }))
    }

    /// Unmounts all.
    pub async fn stop(self) {
        drop(self.stop);
        if let Err(error) = self.task.await {
            tracing::error!(%error, "fuse: the files' task failed");
        }
    }
}

/// Readable by all: the files' own modes say who may open them.
fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path).map_err(|error| {
        io::Error::new(error.kind(), format!("making {}, for fuse.directory: {error}", path.display()))
    })
}

/// The right to mount files in a directory; the kernel ends it with the process.
fn lock(directory: &Path) -> io::Result<OwnedFd> {
    let opened =
        rustix::fs::open(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    match rustix::fs::flock(&opened, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(opened),
        Err(Errno::WOULDBLOCK) => Err(io::Error::other(format!(
            "another node has its disks' files in {}; give this one a directory of its own (fuse.directory)",
            directory.display()
        ))),
        Err(error) => Err(error.into()),
    }
}

/// A mounted file.
struct Served {
    /// The identity and volume of its disk: another disk may get the name.
    identity: (u64, String),
    size: Arc<AtomicU64>,
    end: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Served {
    async fn end(self, directory: &Path) {
        drop(self.end);
        if let Err(error) = self.task.await {
            tracing::error!(%error, "fuse: a file's task failed");
        }
        // With its last file; what somebody has put there keeps it.
        let _ = std::fs::remove_dir(directory.join(self.identity.1));
    }
}

/// A disk whose file could not be mounted.
struct Failed {
    /// Its identity.
    disk: u64,
    why: String,
    /// An event has told it.
    told: bool,
    /// The next attempt comes later.
    waits: bool,
}

/// Has a file for each disk in the registry.
async fn keep(node: Arc<Node>, exports: Arc<Exports>, directory: PathBuf, mut stopping: watch::Receiver<()>) {
    let mut served: BTreeMap<String, Served> = BTreeMap::new();
    let mut failed: BTreeMap<String, Failed> = BTreeMap::new();
    let readers = owner::places();
    let mut disks = node.records.disks.changes();
    let mut again = tokio::time::interval(LOOK_AGAIN);
    loop {
        let records = Arc::clone(&disks.borrow_and_update());
        let is_current = |name: &str, one: &Served| {
            // One that has ended, because somebody has unmounted it for example, begins anew.
            let is_same = match records.get(name) {
                Some(record) => one.identity == identity(record),
                // Its disk goes on, too.
                None => matches!(records.seen(name), Seen::Unreadable { .. }),
            };
            is_same && !one.task.is_finished()
        };
        let gone: Vec<_> = served
            .iter()
            .filter(|(name, one)| !is_current(name, one))
            .map(|(name, _)| name.clone())
            .collect();
        for name in gone {
            if let Some(one) = served.remove(&name) {
                one.end(&directory).await;
            }
        }
        failed.retain(|name, one| records.get(name).is_some_and(|record| record.id == one.disk));
        for (name, record) in records.iter() {
            if let Some(one) = served.get(name) {
                one.size.store(record.size, Ordering::Relaxed);
                continue;
            }
            if failed.get(name).is_some_and(|one| one.waits) {
                continue;
            }
            match start(&node, &exports, &readers, &directory, record) {
                Ok(one) => {
                    served.insert(name.clone(), one);
                    if failed.remove(name).is_some_and(|before| before.told) {
                        let text = format!("node {} has its file now", node.config.name);
                        node.journal.tell("file-back", name, text);
                    }
                }
                Err(error) => {
                    let why = error.to_string();
                    // What keeps the files of all disks away is told of the first.
                    let is_known = failed.values().any(|before| before.why == why);
                    let told = !is_known || failed.get(name).is_some_and(|before| before.told);
                    if !is_known {
                        let text = format!("it has no file on node {}: {why}", node.config.name);
                        node.journal.tell("file-missing", name, text);
                    }
                    failed.insert(name.clone(), Failed { disk: record.id, why, told, waits: true });
                }
            }
        }
        // Or the view would have to copy all records at the next change.
        drop(records);
        tokio::select! {
            changed = disks.changed() => if changed.is_err() { break },
            _ = again.tick() => failed.values_mut().for_each(|one| one.waits = false),
            _ = stopping.changed() => break,
        }
    }
    for one in std::mem::take(&mut served).into_values() {
        one.end(&directory).await;
    }
}

fn identity(record: &DiskRecord) -> (u64, String) {
    (record.id, record.volume.clone())
}

/// The file of a disk.
fn start(
    node: &Arc<Node>,
    exports: &Arc<Exports>,
    readers: &Arc<Semaphore>,
    directory: &Path,
    record: &DiskRecord,
) -> io::Result<Served> {
    let volume = directory.join(&record.volume);
    make_directory(&volume)?;
    let (mount, device) = Mount::new(&volume.join(format!("{}.raw", record.name)), &record.name)?;
    // SAFETY: an `OwnedFd` has the same descriptor from here to its drop, which closes it and comes after the registration's end.
    let device = unsafe { AsyncFd::register_with_interest(device, keeper::INTEREST)? };
    let size = Arc::new(AtomicU64::new(record.size));
    let since = unix_seconds();
    let file = File::new(&record.name, node.config.fuse.access(), Arc::clone(&size), since);
    let (end, ended) = oneshot::channel();
    let keeper = Keeper::new(Arc::clone(node), Arc::clone(exports), Arc::clone(readers), record.id, device);
    let task = tokio::spawn(async move {
        // Unmounted when the task ends.
        let _mount = mount;
        keeper.run(file, ended).await;
    });
    Ok(Served { identity: identity(record), size, end, task })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_the_files_of_one_node() {
        let directory = tempfile::tempdir().unwrap();
        let first = lock(directory.path()).unwrap();
        let refused = lock(directory.path()).unwrap_err().to_string();
        assert!(refused.contains("another node") && refused.contains("fuse.directory"), "{refused}");
        drop(first);
        lock(directory.path()).unwrap();
    }
}
