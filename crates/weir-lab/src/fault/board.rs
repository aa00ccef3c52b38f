//! The faults of a node's disks: a switch for each place of each disk.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use weir_block::{Completion, Event, Layer, LayerInfo, LayerMeter, Nanos, Reactor, Request, RequestKind};
use weir_node::stack::{DiskAccel, Top, Wrap};
use weir_volume::Backing;
use weir_volume::lun::serving::{Dispatch, Redirected};

use super::layer::{Held, Place};
use super::sectors::Sectors;
use super::settings::Switch;
use super::split::Split;
use super::timing::{self, Fate, Timing};
use super::{Line, Mechanism};

/// A place on the path of a disk's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum At {
    /// Between the export and the accelerator.
    Export,
    /// Between the accelerator and the backing. A load on the backing alone does not pass here.
    Accel,
    /// The backing itself.
    Backing,
    /// At the coordinator of the disk's volume on a LUN: where it begins what the disk's owner redirects.
    Redirected,
}

/// The switches of all disks of a node. Clones are the same board.
#[derive(Clone, Debug, Default)]
pub struct Board(Arc<Mutex<HashMap<(String, At), Switch>>>);

impl Board {
    /// The switch of one place; it stays when the disk is closed, and is the same when it is opened again.
    #[must_use]
    pub fn switch(&self, disk: &str, at: At) -> Switch {
        let mut switches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        switches.entry((disk.to_owned(), at)).or_default().clone()
    }

    fn line(&self, disk: &str, at: At) -> Line {
        // Another sequence for each place, the same each time.
        Line::new(self.switch(disk, at), 1 + at as u64)
    }
}

impl Wrap for Board {
    fn bottom(&self, disk: &str, backing: Box<dyn Backing>) -> Box<dyn Backing> {
        let mechanism = Mechanism::new(self.switch(disk, At::Backing), backing.info().size);
        let disk_itself = Held::new(backing, mechanism, Place::Backing);
        let backing = Held::new(disk_itself, self.line(disk, At::Backing), Place::Backing);
        Box::new(Held::new(backing, self.line(disk, At::Accel), Place::Between))
    }

    fn top(&self, disk: &str, accel: DiskAccel) -> Box<dyn Top> {
        let held = Held::new(accel, self.line(disk, At::Export), Place::Between);
        let split = Split::new(held, self.switch(disk, At::Export));
        Box::new(FaultyTop(Sectors::new(split, self.switch(disk, At::Export))))
    }

    fn served(&self, disk: &str) -> Option<Box<dyn Dispatch>> {
        Some(Box::new(FaultyDispatch(self.line(disk, At::Redirected))))
    }
}

/// A fault where a coordinator begins redirected I/O. It loses no request, and does not see their answers: orders set neither errors nor a
/// limit in flight here.
struct FaultyDispatch(Line);

impl Dispatch for FaultyDispatch {
    fn arrive(&mut self, redirected: Redirected, now: Nanos) {
        let Redirected { number, kind, offset, bytes } = redirected;
        self.0.arrive(timing::Request { key: number as usize, kind, offset, bytes }, now);
    }

    fn next(&mut self, now: Nanos) -> Option<u64> {
        let (key, fate) = self.0.next(now)?;
        if fate == Fate::PassOn {
            self.0.returned(key, now);
        }
        Some(key as u64)
    }

    fn deadline(&self) -> Nanos {
        self.0.deadline()
    }
}

/// A fault above the accelerator.
struct FaultyTop(Sectors<Split<Held<DiskAccel, Line>>>);

impl Top for FaultyTop {
    fn accel(&self) -> &DiskAccel {
        self.0.inner().inner().inner()
    }

    fn accel_mut(&mut self) -> &mut DiskAccel {
        self.0.inner_mut().inner_mut().inner_mut()
    }
}

impl Layer for FaultyTop {
    fn info(&self) -> LayerInfo {
        self.0.info()
    }

    fn has_room(&self, kind: RequestKind, bytes: u64) -> bool {
        self.0.has_room(kind, bytes)
    }

    fn submit(&mut self, reactor: &mut Reactor, request: Request<'_>) {
        self.0.submit(reactor, request);
    }

    fn on_event(&mut self, reactor: &mut Reactor, event: Event) {
        self.0.on_event(reactor, event);
    }

    fn advance(&mut self, reactor: &mut Reactor, done: &mut Vec<Completion>) {
        self.0.advance(reactor, done);
    }

    fn deadline(&self) -> Nanos {
        self.0.deadline()
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn meters(&self, out: &mut Vec<LayerMeter>) {
        self.0.meters(out);
    }
}
