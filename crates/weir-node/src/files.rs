//! The cluster's disks as files on this node: `DIRECTORY/VOLUME/DISK.raw`, each a FUSE mount of its own ([`weir_export::fuse`]).
//!
//! One task for each disk answers the kernel while the disk is not served here, or nobody has its file open. It opens for programs
//! what NBD clients may open on this node, and refuses what they may not. From the first opener to the last, the disk's shard
//! serves the file. If the disk goes away meanwhile, requests wait for it here, as NBD clients do that reconnect.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use weir_block::{Nanos, Stream};
use weir_cluster::records::DiskRecord;
use weir_export::fuse::{self, Asked, Bridge, File, Mount};
use weir_export::nbd::AcceptedClient;

use crate::cluster::unix_seconds;
use crate::control::Node;
use crate::control::decide::is_live;
use crate::exports::{self, Exports};
use crate::throttles::FILE_REFUSED;

/// Pause between two looks at whether a disk is here that somebody waits for.
const LOOK: Duration = Duration::from_millis(50);

/// Pause before a file that could not be mounted, or has ended, is mounted again.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Longest wait for a disk that no other node owns.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Requests that are taken in one go.
const BATCH: usize = 64;

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
    async fn end(self) {
        drop(self.end);
        if let Err(error) = self.task.await {
            tracing::error!(%error, "fuse: a file's task failed");
        }
    }
}

/// Has a file for each disk in the registry.
async fn keep(node: Arc<Node>, exports: Arc<Exports>, directory: PathBuf, mut stopping: watch::Receiver<()>) {
    let mut served: BTreeMap<String, Served> = BTreeMap::new();
    let mut failed: BTreeMap<String, u64> = BTreeMap::new();
    let mut disks = node.records.disks.changes();
    loop {
        let records = Arc::clone(&disks.borrow_and_update());
        let is_current = |name: &str, one: &Served| {
            // One that has ended, because somebody has unmounted it for example, begins anew.
            records.get(name).is_some_and(|record| one.identity == identity(record))
                && !one.task.is_finished()
        };
        let gone: Vec<_> = served
            .iter()
            .filter(|(name, one)| !is_current(name, one))
            .map(|(name, _)| name.clone())
            .collect();
        for name in gone {
            if let Some(one) = served.remove(&name) {
                one.end().await;
            }
        }
        failed.retain(|name, id| records.get(name).is_some_and(|record| record.id == *id));
        for (name, record) in records.iter() {
            if let Some(one) = served.get(name) {
                one.size.store(record.size, Ordering::Relaxed);
                continue;
            }
            if failed.contains_key(name) {
                continue;
            }
            match start(&node, &exports, &directory, record) {
                Ok(one) => drop(served.insert(name.clone(), one)),
                Err(error) => {
                    tracing::error!(disk = name, %error, "fuse: the disk has no file on this node");
                    failed.insert(name.clone(), record.id);
                }
            }
        }
        tokio::select! {
            changed = disks.changed() => if changed.is_err() { break },
            () = tokio::time::sleep(LOOK_AGAIN) => failed.clear(),
            _ = stopping.changed() => break,
        }
    }
    for one in std::mem::take(&mut served).into_values() {
        one.end().await;
    }
}

fn identity(record: &DiskRecord) -> (u64, String) {
    (record.id, record.volume.clone())
}

/// The file of a disk.
fn start(
    node: &Arc<Node>,
    exports: &Arc<Exports>,
    directory: &Path,
    record: &DiskRecord,
) -> io::Result<Served> {
    let volume = directory.join(&record.volume);
    make_directory(&volume)?;
    let (mount, device) = Mount::new(&volume.join(format!("{}.raw", record.name)), &record.name)?;
    // SAFETY: an `OwnedFd` has the same descriptor from here to its drop, which closes it and comes after the registration's end.
    let device = unsafe { AsyncFd::register_with_interest(device, Interest::READABLE)? };
    let size = Arc::new(AtomicU64::new(record.size));
    let since = unix_seconds();
    let file = File::new(&record.name, node.config.fuse.access(), Arc::clone(&size), since);
    let (end, ended) = oneshot::channel();
    let keeper = Keeper { node: Arc::clone(node), exports: Arc::clone(exports), device, waits_since: None };
    let task = tokio::spawn(async move {
        // Unmounted when the task ends.
        let _mount = mount;
        keeper.run(file, ended).await;
    });
    Ok(Served { identity: identity(record), size, end, task })
}

/// Answers the kernel for one file.
struct Keeper {
    node: Arc<Node>,
    exports: Arc<Exports>,
    device: AsyncFd<OwnedFd>,
    /// Since when somebody has waited for the disk.
    waits_since: Option<Nanos>,
}

impl Keeper {
    async fn run(mut self, mut file: File, mut ended: oneshot::Receiver<()>) {
        loop {
            let served = tokio::select! {
                served = self.answer(&mut file) => served,
                _ = &mut ended => return,
            };
            if let Err(error) = served {
                tracing::warn!(disk = file.name(), %error, "fuse: the kernel has ended a disk's file");
                return;
            }
            let name = file.name().to_owned();
            let returned = match self.hand_over(file) {
                Ok(returned) => returned,
                Err(error) => {
                    tracing::error!(disk = name, %error, "fuse: a disk's file cannot be served");
                    return;
                }
            };
            file = tokio::select! {
                returned = returned => match returned {
                    Ok(file) => file,
                    Err(_) => return,
                },
                _ = &mut ended => return,
            };
            if file.is_open() {
                // The disk was closed or moved, or takes no clients at present.
                tokio::time::sleep(LOOK).await;
            }
        }
    }

    fn is_here(&self, file: &File) -> bool {
        self.exports.serves(file.name())
    }

    /// Answers until the disk is here and somebody has its file open.
    async fn answer(&mut self, file: &mut File) -> io::Result<()> {
        loop {
            if file.is_open() && self.is_here(file) {
                self.waits_since = None;
                return file.ask_again(self.device.get_ref().as_fd());
            }
            self.consider_giving_up(file);
            let is_awaited = file.is_open() || file.is_awaited();
            tokio::select! {
                ready = self.device.readable() => {
                    let mut ready = ready?;
                    if take(&self.exports, ready.get_inner(), file)? {
                        ready.clear_ready();
                    }
                }
                () = tokio::time::sleep(LOOK), if is_awaited => {}
            }
        }
    }

    /// Requests do not wait for a disk that another node serves, and not without an end (a program that waits cannot be killed).
    fn consider_giving_up(&mut self, file: &mut File) {
        if !file.is_awaited() {
            self.waits_since = None;
            return;
        }
        let now = Nanos::now();
        let since = *self.waits_since.get_or_insert(now);
        let owner = self.node.records.disk(file.name()).and_then(|record| record.owner);
        let me = self.node.session.node_ref();
        let is_elsewhere =
            owner.is_some_and(|owner| owner != me && is_live(&self.node.records.nodes.now(), &owner));
        if is_elsewhere || now - since >= LONGEST_WAIT {
            let reason = self.exports.why_not_here(file.name());
            tracing::warn!(disk = file.name(), reason, "fuse: requests of a disk's file fail");
            file.give_up(self.device.get_ref().as_fd());
            self.waits_since = None;
        }
    }

    /// Gives the file to the disk's shard. It comes back when its last opener or the disk has gone.
    fn hand_over(&self, file: File) -> io::Result<oneshot::Receiver<File>> {
        let device = self.device.get_ref().try_clone()?;
        let session = fuse::session(file.name());
        let (back, returned) = oneshot::channel();
        let stream = Stream::Protected(device, Box::new(Bridge::new(file, back)));
        exports::attach(&self.node, AcceptedClient { stream, leftover: Vec::new(), session, via: None });
        Ok(returned)
    }
}

/// Takes what the kernel asks for, while the shard does not. True: that was all.
fn take(exports: &Exports, device: &OwnedFd, file: &mut File) -> io::Result<bool> {
    let mut request = vec![0; fuse::LONGEST_REQUEST];
    for _ in 0..BATCH {
        let length = match rustix::io::read(device, &mut request[..]) {
            Ok(length) => length,
            Err(Errno::AGAIN) => return Ok(true),
            Err(Errno::INTR | Errno::NOENT) => continue,
            Err(error) => return Err(error.into()),
        };
        match file.take(device.as_fd(), &request[..length])? {
            Asked::Nothing | Asked::Closed => {}
            Asked::Open { unique } if exports.serves(file.name()) => {
                file.opened(device.as_fd(), unique)?;
                // The shard takes the rest.
                return Ok(false);
            }
            Asked::Open { unique } => {
                if let Some(left_out) = FILE_REFUSED.pass(Nanos::now()) {
                    let reason = exports.why_not_here(file.name());
                    tracing::warn!(
                        disk = file.name(),
                        reason,
                        left_out,
                        "fuse: opening a disk's file is refused"
                    );
                }
                file.refuse(device.as_fd(), unique, Errno::BUSY)?;
            }
            Asked::Io(io) => file.keep_waiting(device.as_fd(), io.unique)?,
            Asked::Ended => return Err(io::ErrorKind::NotConnected.into()),
        }
    }
    Ok(false)
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
