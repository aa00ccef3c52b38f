//! Disks of volumes that this node coordinates: each is served to its owner, here or on another node.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::oneshot;
use weir_block::{Code, ErrorKind, Event, IoError, LayerMeter, Nanos, Stream};
use weir_volume::CoordinatorWay;
use weir_volume::lun::serving::ServedDisk;

use super::Turning;
use crate::shard::answer;
use crate::shard::dispatch::Target;
use crate::shard::messages::{Notice, OpenedServed, ServedChange};

/// A disk that waits for memory gets another turn after this long.
const WAITS_AGAIN: Duration = Duration::from_millis(1);

/// One of them.
pub(super) struct Served {
    name: Rc<str>,
    disk: Rc<RefCell<ServedDisk>>,
    /// Something has happened to it since its last turn.
    touched: bool,
    /// Who waits for its end.
    stopping: Option<oneshot::Sender<()>>,
    /// Who waits for changes of its layout, by their numbers.
    changing: BTreeMap<u64, oneshot::Sender<Result<(), IoError>>>,
}

impl Served {
    fn new(name: Rc<str>, disk: Rc<RefCell<ServedDisk>>) -> Served {
        Served { name, disk, touched: true, stopping: None, changing: BTreeMap::new() }
    }

    /// Answers those whose changes are made, or have failed.
    fn answer_changes(&mut self) {
        for (number, result) in self.disk.borrow_mut().changed() {
            self.changing.remove(&number).into_iter().for_each(|done| answer(done, result));
        }
    }
}

impl Turning {
    /// Serves a disk, unless it is served already.
    pub(super) fn serve(
        &mut self,
        name: String,
        OpenedServed(opened): OpenedServed,
        epoch: u64,
        owner: Option<u64>,
    ) -> Result<(), String> {
        if let Some((_, served)) = self.served.iter().find(|(_, served)| *served.name == *name) {
            return match served.stopping {
                None => Ok(()),
                Some(_) => Err("its volume is being given back".into()),
            };
        }
        let dispatch = self.config.wrap.served(&name);
        let disk = ServedDisk::new(&mut self.reactor, opened, epoch, owner, dispatch);
        let disk = Rc::new(RefCell::new(disk.map_err(|error| error.to_string())?));
        let id = disk.borrow().id();
        let slot = self.served.insert(Served::new(name.into(), disk));
        self.dispatch.set(id, Target::Served(slot));
        Ok(())
    }

    /// What is under way ends, and then it is gone.
    pub(super) fn stop_serving(&mut self, name: &str, done: oneshot::Sender<()>) {
        let Some((_, served)) = self.served.iter_mut().find(|(_, served)| *served.name == *name) else {
            return answer(done, ());
        };
        served.disk.borrow_mut().stop(&mut self.reactor);
        (served.touched, served.stopping) = (true, Some(done));
        // Its owner here, if there is one, lets go of it.
        self.touch(name);
    }

    /// Changes the layout of a disk, when its owner has given up all that it holds.
    pub(super) fn change_served(
        &mut self,
        name: &str,
        number: u64,
        ServedChange(change): ServedChange,
        done: oneshot::Sender<Result<(), IoError>>,
    ) {
        let Some((_, served)) = self.served.iter_mut().find(|(_, served)| *served.name == *name) else {
            let error = IoError::new(ErrorKind::Retry, Code::ShuttingDown, "the disk is not served here");
            return answer(done, Err(error));
        };
        served.touched = true;
        served.changing.insert(number, done);
        let mut disk = served.disk.borrow_mut();
        let whole = (0, disk.size());
        disk.change(&mut self.reactor, number, whole, change);
    }

    pub(super) fn lengthened(&mut self, name: &str, size: u64) {
        if let Some((_, served)) = self.served.iter_mut().find(|(_, served)| *served.name == *name) {
            served.touched = true;
            served.disk.borrow_mut().lengthened(size);
        }
    }

    pub(super) fn forget_change(&mut self, name: &str, number: u64) {
        if let Some((_, served)) = self.served.iter_mut().find(|(_, served)| *served.name == *name) {
            served.touched = true;
            served.changing.remove(&number);
            served.disk.borrow_mut().forget_change(&mut self.reactor, number);
        }
    }

    pub(super) fn owner_connected(&mut self, name: &str, stream: Stream, epoch: u64) {
        let Some((_, served)) = self.served.iter_mut().find(|(_, served)| *served.name == *name) else {
            // Dropping the connection says so; the owner asks again.
            return;
        };
        served.touched = true;
        if let Err(error) = served.disk.borrow_mut().connect(&mut self.reactor, stream, epoch) {
            tracing::warn!(disk = name, %error, "a connection of its owner cannot be used");
        }
    }

    pub(super) fn connect_here(&mut self, name: &str) {
        let served =
            self.served.iter().find(|(_, served)| *served.name == *name && served.stopping.is_none());
        if let Some(disk) = served.map(|(_, served)| Rc::clone(&served.disk)) {
            self.connect(name, CoordinatorWay::Here(disk));
        }
    }

    pub(super) fn connect(&mut self, name: &str, way: CoordinatorWay) {
        if let Some(slot) = self.slot_of(name) {
            self.disks[slot].coordinator(&mut self.reactor, way);
        }
    }

    pub(super) fn served_meter(&self, name: &str) -> Option<LayerMeter> {
        let served = self.served.iter().find(|(_, served)| *served.name == *name);
        served.map(|(_, served)| served.disk.borrow().meter())
    }

    /// When one needs a turn though no event comes.
    pub(super) fn served_deadline(&self) -> Nanos {
        let waits = self.served.iter().any(|(_, served)| served.disk.borrow().waits());
        let touched = self.served.iter().any(|(_, served)| served.touched);
        let own = self.served.iter().map(|(_, served)| served.disk.borrow().deadline()).min();
        let own = own.unwrap_or(Nanos::NEVER);
        match (touched, waits) {
            (true, _) => Nanos(0),
            (false, true) => own.min(self.reactor.now() + WAITS_AGAIN),
            (false, false) => own,
        }
    }

    /// A disk of this name that is open here gets a turn.
    fn touch(&mut self, name: &str) {
        self.find(name);
    }

    pub(super) fn on_served_event(&mut self, slot: usize, event: Event) {
        let served = &mut self.served[slot];
        served.touched = true;
        served.disk.borrow_mut().on_event(&mut self.reactor, event);
    }

    /// Gives those a turn to which something has happened. An owner on this shard gets one, too.
    pub(super) fn turn_served(&mut self) -> bool {
        let has_come = |deadline| deadline != Nanos::NEVER && deadline <= self.reactor.recent();
        let due = |served: &Served| {
            let disk = served.disk.borrow();
            served.touched || disk.waits() || has_come(disk.deadline())
        };
        let touched: Vec<usize> =
            self.served.iter().filter(|(_, served)| due(served)).map(|(slot, _)| slot).collect();
        for &slot in &touched {
            let served = &mut self.served[slot];
            served.touched = false;
            served.disk.borrow_mut().advance(&mut self.reactor);
            served.answer_changes();
            let name = Rc::clone(&served.name);
            if served.disk.borrow_mut().is_newly_refused() {
                self.unsent.push(Notice::Fenced { disk: name.to_string() });
            }
            self.touch(&name);
            if self.served[slot].disk.borrow().is_over() {
                let served = self.served.remove(slot);
                self.dispatch.clear(served.disk.borrow().id());
                served.stopping.into_iter().for_each(|done| answer(done, ()));
            }
        }
        !touched.is_empty()
    }
}
