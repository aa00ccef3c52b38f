//! Answers the kernel for one file while the disk's shard does not.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Semaphore, oneshot};
use weir_block::{Nanos, Stream};
use weir_cluster::records::NodeRef;
use weir_export::fuse::{self, Asked, Bridge, File, Io, IoKind};
use weir_export::nbd::AcceptedClient;

use super::owner::Owner;
use crate::config::FilesElsewhere;
use crate::control::Node;
use crate::control::decide::is_live;
use crate::exports::{self, Exports};
use crate::throttles::FILE_REFUSED;

/// Pause between two looks at where a disk is that somebody has open or waits for.
const LOOK: Duration = Duration::from_millis(50);

/// Longest time without an answer, for requests of a disk that no node serves.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The kernel tells the end of a connection, by `umount` or an abort, as an error alone.
pub(super) const INTEREST: Interest = Interest::READABLE.add(Interest::ERROR);

/// Requests that are taken in one go.
const BATCH: usize = 64;

/// Answers the kernel for one file.
pub(super) struct Keeper {
    node: Arc<Node>,
    exports: Arc<Exports>,
    /// The identity of the disk: another one may get its name.
    disk: u64,
    device: AsyncFd<OwnedFd>,
    /// The way to the disk's owner, on another node.
    owner: Owner,
    /// Since when somebody has waited for the disk, and has had no answer. The time that a shard has taken over it does not count.
    waits_since: Option<Nanos>,
    /// When a shard gave the file back without one answer: it may do so again, and closings are heard of meanwhile.
    came_back: Option<Nanos>,
    longest_wait: Duration,
}

impl Keeper {
    /// Of the disk with this identity, whose file has this descriptor at the kernel. `readers` are the places of the node's files that
    /// are read on other nodes.
    pub(super) fn new(
        node: Arc<Node>,
        exports: Arc<Exports>,
        readers: Arc<Semaphore>,
        disk: u64,
        device: AsyncFd<OwnedFd>,
    ) -> Keeper {
        let owner = Owner::new(Arc::clone(&node), readers);
        let (waits_since, came_back) = (None, None);
        Keeper { node, exports, disk, device, owner, waits_since, came_back, longest_wait: LONGEST_WAIT }
    }

    /// Serves the file until the kernel or `ended` ends it.
    pub(super) async fn run(mut self, mut file: File, mut ended: oneshot::Receiver<()>) {
        loop {
            let served = tokio::select! {
                served = self.answer(&mut file) => served,
                _ = &mut ended => return,
            };
            if let Err(error) = served {
                tracing::warn!(disk = file.name(), %error, "fuse: the kernel has ended a disk's file");
                return;
            }
            let (answers, handed_over) = (file.answers(), Nanos::now());
            let device = match self.device.get_ref().try_clone() {
                Ok(device) => device,
                Err(error) => {
                    tracing::warn!(disk = file.name(), %error, "fuse: a disk's file is not served yet");
                    self.came_back = Some(Nanos::now());
                    continue;
                }
            };
            file = tokio::select! {
                returned = self.hand_over(file, device) => match returned {
                    Ok(file) => file,
                    Err(_) => return,
                },
                _ = &mut ended => return,
            };
            if file.answers() > answers {
                self.waits_since = None;
            } else if file.is_open() {
                // It takes no clients at present; or the disk was closed or moved.
                self.came_back = Some(Nanos::now());
                self.waits_since = self.waits_since.map(|since| since + (Nanos::now() - handed_over));
            }
        }
    }

    /// Answers until the disk is here and somebody has its file open.
    async fn answer(&mut self, file: &mut File) -> io::Result<()> {
        loop {
            let pauses = self.came_back.is_some_and(|at| Nanos::now() - at < LOOK);
            if !pauses && serves(&self.node, &self.exports, (self.disk, file)) {
                self.owner.hand_back(file, self.device.get_ref().as_fd())?;
                if is_over(self.device.get_ref()) {
                    return Err(io::ErrorKind::NotConnected.into());
                }
                if file.is_open() {
                    return file.ask_again(self.device.get_ref().as_fd());
                }
            }
            self.look_for_owner(file)?;
            self.consider_giving_up(file)?;
            let is_awaited = file.is_open() || file.is_awaited() || self.owner.is_awaited();
            tokio::select! {
                ready = self.device.ready(INTEREST), if !self.owner.is_full() => {
                    let mut ready = ready?;
                    let device = ready.get_inner();
                    let mut taker = Taker {
                        node: &self.node,
                        exports: &self.exports,
                        disk: self.disk,
                        owner: &mut self.owner,
                        device,
                        file: &mut *file,
                    };
                    if taker.take()? {
                        ready.clear_ready();
                    }
                    self.owner.send(file).await;
                }
                heard = self.owner.hear() => {
                    if self.owner.act_on(heard, file, self.device.get_ref().as_fd())? {
                        // Whoever waits still has waited for the next answer from now on.
                        self.waits_since = None;
                    }
                }
                () = tokio::time::sleep(LOOK), if is_awaited => {}
            }
        }
    }

    /// Keeps the way to the owner as long as somebody has the file open, and to no other process.
    fn look_for_owner(&mut self, file: &mut File) -> io::Result<()> {
        let is_whole = self.node.records.disk(file.name()).is_some_and(|record| record.importing == 0);
        let owner = if is_whole { reads_at(&self.node, (self.disk, file)) } else { None };
        self.owner.follow(owner, file, self.device.get_ref().as_fd())
    }

    /// Requests do not wait for a disk that another node serves and this one may not read, and not without an end (a program that waits
    /// for a write cannot be killed).
    fn consider_giving_up(&mut self, file: &mut File) -> io::Result<()> {
        if !file.is_awaited() && !self.owner.is_awaited() {
            // The kernel may have been told to send again what a shard then did not take.
            if self.came_back.is_none_or(|at| Nanos::now() - at >= LOOK) {
                (self.waits_since, self.came_back) = (None, None);
            }
            return Ok(());
        }
        let now = Nanos::now();
        let since = *self.waits_since.get_or_insert(now);
        let is_refused = self.node.config.fuse.elsewhere == FilesElsewhere::Refuse
            && owner_elsewhere(&self.node, (self.disk, file)).is_some();
        if is_refused || now - since >= self.longest_wait {
            let reason = why_not(&self.node, &self.exports, (self.disk, file));
            tracing::warn!(disk = file.name(), reason, "fuse: requests of a disk's file fail");
            let device = self.device.get_ref().as_fd();
            self.owner.refuse_openers(file, device, &reason)?;
            self.owner.leave(file);
            file.give_up(device);
            self.waits_since = None;
        }
        Ok(())
    }

    /// Gives the file to the disk's shard. It comes back when its last opener or the disk has gone.
    fn hand_over(&self, file: File, device: OwnedFd) -> oneshot::Receiver<File> {
        let session = fuse::session(file.name());
        let (back, returned) = oneshot::channel();
        let stream = Stream::Protected(device, Box::new(Bridge::new(file, back)));
        exports::attach(&self.node, AcceptedClient { stream, leftover: Vec::new(), session, via: None });
        returned
    }
}

/// Whether the kernel has ended the file's connection: nothing that is written there tells.
fn is_over(device: impl AsFd) -> bool {
    let mut ends = [PollFd::new(&device, PollFlags::IN)];
    matches!(poll(&mut ends, Some(&Timespec::default())), Ok(1)) && ends[0].revents().contains(PollFlags::ERR)
}

/// Whether the shard takes the file of the disk with this identity now, as far as is known here.
fn serves(node: &Node, exports: &Exports, (disk, file): (u64, &File)) -> bool {
    // By identity: the open file of a deleted disk must not reach a new disk of the same name.
    let is_here = node.here.id(file.name()) == Some(disk) && exports.serves(file.name());
    is_here && !node.shards.takes_no_clients(file.name())
}

/// The reason why the disk's shard does not take the file, in words.
fn why_not(node: &Node, exports: &Exports, (disk, file): (u64, &File)) -> String {
    let name = file.name();
    match node.here.id(name) {
        Some(other) if other != disk => "the disk is gone, and another one has its name".into(),
        Some(_) if node.shards.takes_no_clients(name) => "a load overwrites the disk".into(),
        Some(_) if exports.serves(name) => "the disk is open here, and takes no clients".into(),
        _ => exports.why_not_here(name),
    }
}

/// The live process on another node that owns the disk with this identity.
fn owner_elsewhere(node: &Node, (disk, file): (u64, &File)) -> Option<NodeRef> {
    let owner = node.records.disk(file.name()).filter(|record| record.id == disk)?.owner?;
    (owner != node.session.node_ref() && is_live(&node.records.nodes.now(), &owner)).then_some(owner)
}

/// The owner that answers what is read here.
fn reads_at(node: &Node, of: (u64, &File)) -> Option<NodeRef> {
    let reads = node.config.fuse.elsewhere == FilesElsewhere::Read;
    if reads { owner_elsewhere(node, of) } else { None }
}

/// Takes what the kernel asks for, while the shard does not.
struct Taker<'a> {
    node: &'a Node,
    exports: &'a Exports,
    /// The identity of the disk.
    disk: u64,
    owner: &'a mut Owner,
    device: &'a OwnedFd,
    file: &'a mut File,
}

impl Taker<'_> {
    /// True: that was all.
    fn take(&mut self) -> io::Result<bool> {
        for _ in 0..BATCH {
            if self.owner.is_full() {
                return Ok(false);
            }
            let request = self.owner.buffer();
            let length = match rustix::io::read(self.device, &mut request[..]) {
                Ok(length) => length,
                Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::INTR | Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            };
            match self.file.take(self.device.as_fd(), &request[..length])? {
                Asked::Nothing => {}
                Asked::Closed => self.owner.leave(self.file),
                Asked::Open { unique, .. } if serves(self.node, self.exports, (self.disk, self.file)) => {
                    self.file.opened(self.device.as_fd(), unique)?;
                    // The shard takes the rest.
                    return Ok(false);
                }
                Asked::Open { unique, writes } => self.open(unique, writes)?,
                Asked::Io(io) => self.serve(&io)?,
                Asked::Interrupted(unique) => {
                    self.owner.interrupt(unique, self.file, self.device.as_fd())?;
                }
                Asked::Ended => return Err(io::ErrorKind::NotConnected.into()),
            }
        }
        Ok(false)
    }

    fn open(&mut self, unique: u64, writes: bool) -> io::Result<()> {
        let device = self.device.as_fd();
        let is_read = reads_at(self.node, (self.disk, self.file)).is_some();
        if !writes && is_read {
            return self.owner.open(unique, self.file, device);
        }
        if let Some(left_out) = FILE_REFUSED.pass(Nanos::now()) {
            let (disk, reason) = (self.file.name(), why_not(self.node, self.exports, (self.disk, self.file)));
            tracing::warn!(disk, writes, reason, left_out, "fuse: opening a disk's file is refused");
        }
        // A busy file is waited for, by `losetup` without an end; one that takes no writes is read.
        self.file.refuse(device, unique, if is_read { Errno::ROFS } else { Errno::BUSY })
    }

    fn serve(&mut self, io: &Io) -> io::Result<()> {
        // A sync makes durable what others have written, too (P8): it is the owner's.
        if !io.kind.changes() && self.owner.ask(io) {
            return Ok(());
        }
        let reads = matches!(io.kind, IoKind::Read | IoKind::Seek { .. });
        // Nothing changes a disk where another node owns it.
        if !reads && owner_elsewhere(self.node, (self.disk, self.file)).is_some() {
            return self.file.refuse(self.device.as_fd(), io.sender.unique, Errno::IO);
        }
        self.file.keep_waiting(self.device.as_fd(), io.sender, io.kind)
    }
}

#[cfg(test)]
mod tests;
