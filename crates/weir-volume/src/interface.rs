//! The interfaces of backings, by which a shard uses them without knowing their kinds.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use weir_block::{Destage, Nanos, OwnerId, Reactor, SharedFile, Stream};

use crate::backing::FileIdentity;
use crate::error::VolumeError;
use crate::lun::route_status::{Overdue, RouteStatus};
use crate::lun::serving::ServedDisk;

/// The way to the coordinator of a volume.
pub enum CoordinatorWay {
    /// A connection to another node.
    Remote(Stream),
    /// On this shard.
    Here(Rc<RefCell<ServedDisk>>),
}

/// The lowest layer of a disk. The dynamic dispatch costs one virtual call for each request.
pub trait Backing: Destage {
    /// The owner of its events, which the shard passes to [`Layer::on_event`](weir_block::Layer::on_event).
    fn owner(&self) -> OwnerId;

    /// Sets the disk's size, in bytes. Does not block.
    ///
    /// # Errors
    /// [`VolumeError::InvalidSize`]: not a multiple of the logical block, or more than the storage has; the size is then
    /// unchanged.
    fn resize(&mut self, size: u64) -> Result<(), VolumeError>;

    /// Whether writes wait for space on the volume, or lately have found none. Of a backing that waits for none: no.
    fn lacks_space(&self, _now: Nanos) -> bool {
        false
    }

    /// Requests that wait for space fail, and none waits from now on: the disk is another node's, or closed.
    fn stop_waiting(&mut self) {}

    /// The part that a disk of a shared volume has beside that.
    fn shared(&mut self) -> Option<&mut dyn SharedDisk> {
        None
    }

    /// By which way its I/O goes, of a disk of a shared volume.
    fn route(&self) -> Option<RouteStatus> {
        None
    }

    /// The disk is another node's, or closed here: nothing more is begun, and requests that wait fail.
    fn end(&mut self, _reactor: &mut Reactor) {}

    /// Whether something of the disk may still reach the storage, or has to, though every request is answered: the disk is not to be
    /// another node's before.
    fn owes(&self) -> bool {
        false
    }

    /// The disk is about to be handed over: whether all that was acknowledged and only this process could write again is durable. Otherwise
    /// it is on its way.
    fn settle(&mut self) -> bool {
        true
    }

    /// Whether its storage cannot be reached at present, and requests wait for it.
    fn is_away(&self) -> bool {
        false
    }

    /// What keeps it from serving as it should, in words.
    fn trouble(&self, _now: Nanos) -> Option<String> {
        None
    }

    /// The next event for the operator: its kind, and a text.
    fn news(&mut self) -> Option<(&'static str, String)> {
        None
    }
}

/// A disk of a volume on a LUN, at its owner: what it has to do with the coordinator of the volume, and with fences.
pub trait SharedDisk {
    /// The tenure of this node, which owns the disk in this epoch: nothing begins from `until` on (nanoseconds of the shard's clock).
    fn own(&mut self, epoch: u64, until: &Arc<AtomicU64>);

    /// Whether it needs a way to the coordinator; at most twice a second.
    fn wants_coordinator(&mut self, now: Nanos) -> bool;

    /// A way to the coordinator.
    fn coordinator(&mut self, reactor: &mut Reactor, way: CoordinatorWay);

    /// Another node coordinates the volume now, or nobody does: it asks anew.
    fn lose_coordinator(&mut self, reactor: &mut Reactor);

    /// Whether the LUN has refused this node's I/O since the last call: another node has fenced it.
    fn is_newly_fenced(&mut self) -> bool;

    /// Why requests have begun to fail since the last call, if they have: there has been no coordinator for too long, or it answers nothing.
    fn newly_overdue(&mut self) -> Option<Overdue>;

    /// Gives everything up that it holds, because this node is fenced. [`SharedDisk::dropped`] has the number when nothing of it is under
    /// way.
    fn drop_leases(&mut self, reactor: &mut Reactor, number: u64);

    /// The numbers of [`SharedDisk::drop_leases`] that are done.
    fn dropped(&mut self) -> Vec<u64>;

    /// The LUN lets this node write again.
    fn admitted(&mut self);

    /// Whether it has no path to the LUN, or one that has failed, and needs one; at most twice a second.
    fn wants_path(&mut self, now: Nanos) -> bool;

    /// A path of this node to the LUN. One that works stays, and so does one on which something is under way.
    fn reach(&mut self, lun: SharedFile);

    /// Every request goes through the coordinator's filesystem, or does not any more.
    fn go_through_filesystem(&mut self, reactor: &mut Reactor, wanted: bool);

    /// The disk is another node's, or closed: what waits for a coordinator fails.
    fn abandon(&mut self, reactor: &mut Reactor);
}

/// A backing opened by a thread, for use by a shard.
pub trait OpenedBacking: Send {
    /// Moves it to the shard of `reactor`. Does not block.
    ///
    /// # Errors
    /// As for the kind; [`FileBacking::new`](crate::FileBacking::new), for example.
    fn attach(self: Box<Self>, reactor: &mut Reactor) -> Result<Box<dyn Backing>, VolumeError>;

    /// Closes it without blocking the caller.
    fn discard(self: Box<Self>);

    /// The file of a volume that it has open, if it has one.
    fn file(&self) -> Option<FileIdentity> {
        None
    }
}

impl<B: Backing + ?Sized> Backing for Box<B> {
    fn owner(&self) -> OwnerId {
        (**self).owner()
    }

    fn resize(&mut self, size: u64) -> Result<(), VolumeError> {
        (**self).resize(size)
    }

    fn lacks_space(&self, now: Nanos) -> bool {
        (**self).lacks_space(now)
    }

    fn stop_waiting(&mut self) {
        (**self).stop_waiting();
    }

    fn shared(&mut self) -> Option<&mut dyn SharedDisk> {
        (**self).shared()
    }

    fn route(&self) -> Option<RouteStatus> {
        (**self).route()
    }

    fn end(&mut self, reactor: &mut Reactor) {
        (**self).end(reactor);
    }

    fn owes(&self) -> bool {
        (**self).owes()
    }

    fn settle(&mut self) -> bool {
        (**self).settle()
    }

    fn is_away(&self) -> bool {
        (**self).is_away()
    }

    fn trouble(&self, now: Nanos) -> Option<String> {
        (**self).trouble(now)
    }

    fn news(&mut self) -> Option<(&'static str, String)> {
        (**self).news()
    }
}
