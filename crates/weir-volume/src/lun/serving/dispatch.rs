//! When a coordinator begins the reads and writes that an owner has redirected to it: at once and as they come, unless the program that
//! starts the node says otherwise. The product does not; the lab puts a fault there.

use std::collections::BTreeMap;

use weir_block::{Nanos, Reactor, RequestKind};

use super::{ServedDisk, Working};
use crate::lun::coordinator::Job;
use crate::lun::router::Kind;

/// A redirected read or write that may begin.
#[derive(Clone, Copy, Debug)]
pub struct Redirected {
    /// Names it.
    pub number: u64,
    /// Read or write.
    pub kind: RequestKind,
    /// First byte, in the disk.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Decides when redirected I/O begins, and in which order. Has no clock: it is given the time, which never goes back.
pub trait Dispatch {
    /// A read or write may begin.
    fn arrive(&mut self, redirected: Redirected, now: Nanos);

    /// The number of the next one whose time has come, if there is one. Called until it says no.
    fn next(&mut self, now: Nanos) -> Option<u64>;

    /// The time of the next call of [`Dispatch::next`] even if nothing arrives.
    fn deadline(&self) -> Nanos;
}

/// What a [`Dispatch`] holds. To the coordinator it has begun: its range is taken.
pub(super) struct Held {
    dispatch: Box<dyn Dispatch>,
    jobs: BTreeMap<u64, Working>,
}

impl Held {
    pub fn new(dispatch: Box<dyn Dispatch>) -> Held {
        Held { dispatch, jobs: BTreeMap::new() }
    }

    /// Holds a job, or gives it back: it is neither a read nor a write.
    fn hold(&mut self, working: Working, now: Nanos) -> Option<Working> {
        let (kind, (start, end)) = match working.what {
            Job::Request { request, .. } => (request.kind, request.range),
            Job::Block { kind, piece, .. } => (kind, (piece.start, piece.end)),
            Job::Change { .. } | Job::Prepare { .. } => return Some(working),
        };
        let kind = match kind {
            Kind::Read => RequestKind::Read,
            Kind::Write => RequestKind::Write,
            Kind::Punch | Kind::Flush => return Some(working),
        };
        let number = working.job;
        self.jobs.insert(number, working);
        self.dispatch.arrive(Redirected { number, kind, offset: start, bytes: end - start }, now);
        None
    }

    fn next(&mut self, now: Nanos) -> Option<Working> {
        let number = self.dispatch.next(now)?;
        self.jobs.remove(&number)
    }
}

impl ServedDisk {
    /// The time at which it needs a turn though no event comes.
    #[must_use]
    pub fn deadline(&self) -> Nanos {
        let held = self.held.as_ref().filter(|held| !held.jobs.is_empty());
        held.map_or(Nanos::NEVER, |held| held.dispatch.deadline())
    }

    /// How many reads and writes have not begun, because their time has not come.
    pub(super) fn held(&self) -> usize {
        self.held.as_ref().map_or(0, |held| held.jobs.len())
    }

    pub(super) fn begin(&mut self, reactor: &mut Reactor, working: Working) {
        let Some(held) = &mut self.held else { return self.execute(reactor, working) };
        match held.hold(working, reactor.now()) {
            Some(working) => self.execute(reactor, working),
            None => self.begin_held(reactor),
        }
    }

    /// Begins what was held until now.
    pub(super) fn begin_held(&mut self, reactor: &mut Reactor) {
        if self.held() == 0 {
            return;
        }
        let now = reactor.now();
        while let Some(working) = self.held.as_mut().and_then(|held| held.next(now)) {
            self.execute(reactor, working);
        }
    }

    /// Begins everything: nothing is held any more.
    pub(super) fn begin_all(&mut self, reactor: &mut Reactor) {
        for working in self.held.take().into_iter().flat_map(|held| held.jobs.into_values()) {
            self.execute(reactor, working);
        }
    }
}
