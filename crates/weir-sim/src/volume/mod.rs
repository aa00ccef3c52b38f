//! Simulates the protocol of a volume on a shared LUN (`VOLUME.md` §2) between the owner of one disk and the coordinator: the
//! production cores [`Router`] and [`Coordinator`], over a filesystem that moves blocks, and a LUN on which late I/O lands.
//!
//! A step is one of the things that can happen next, chosen by the seed: a message arrives, I/O ends, the filesystem does a job, a
//! fault. After each step the invariants I1, I3, I4 and I6 of `VOLUME.md` are checked; in the end the faults stop, and everything has to end (I8),
//! and each block's history has to be that of a register (P4, P7).

mod checks;
pub mod claims;
mod filesystem;
mod log;
mod requests;
pub mod shells;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use weir_block::IoError;
use weir_volume::lun::coordinator::{self, Coordinator, Job};
use weir_volume::lun::leases::{Lease, Piece};
use weir_volume::lun::router::{self, Kind, Request, Route, Router};
use weir_volume::planted::{Bug, Planted};

use crate::history::History;
use filesystem::{Copying, Filesystem};
pub use log::Run;
use log::{Log, run_world, violations};
use requests::Pending;

/// Blocks of the file. A byte of the cores' ranges is a block here.
const BLOCKS: usize = 16;
/// The blocks that the filesystem moves together.
const PIECE: u64 = 4;
/// Steps with faults and requests.
const STEPS: usize = 600;
/// Steps in which everything that has begun must end.
const BOUND: usize = 4_000;
/// Most requests of the client at once.
const DEPTH: usize = 5;

/// The number of each thing that was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Requests that were answered.
    pub answered: u64,
    /// Parts of requests that the owner did on the LUN, and those that were reads of shared blocks.
    pub direct: u64,
    /// As above.
    pub shared: u64,
    /// Parts that the coordinator did on the LUN.
    pub block: u64,
    /// Parts of reads in holes.
    pub zeroes: u64,
    /// Requests through the filesystem.
    pub file: u64,
    /// Recalls that were answered.
    pub recalls: u64,
    /// Clones and moves of blocks.
    pub changes: u64,
    /// Times that space was allocated ahead, or the file looked at, and grants came of it.
    pub prepared: u64,
    /// Requests that the filesystem failed to do.
    pub failed: u64,
}

/// A message to the coordinator.
#[derive(Clone, Copy, Debug)]
enum ToCoordinator {
    Redirected { request: Request, gives_up: router::Range },
    Block { id: u64, kind: Kind, piece: Piece },
    Flush(u64),
    RecallDone(u64),
}

/// I/O to the LUN.
#[derive(Clone, Copy, Debug)]
struct LunIo {
    id: u64,
    /// Also when the request has long been answered.
    kind: Kind,
    piece: Piece,
    /// The owner that has sent it.
    owner: u64,
    /// Through the coordinator, as this job.
    block: Option<u64>,
    /// The connection to the coordinator at the time.
    connection: u64,
}

/// A job of the filesystem that has begun.
#[derive(Debug)]
struct Working {
    job: u64,
    what: Job,
    copying: Copying,
    /// The layout that its answer tells, if that is not the one at its end.
    known: Option<Vec<Piece>>,
    /// The connection on which it came is gone: nobody waits for it.
    is_orphan: bool,
}

/// The other changes move blocks, as a defragmenter does.
fn is_clone(change: u64) -> bool {
    change.is_multiple_of(2)
}

struct World {
    rng: fastrand::Rng,
    planted: Planted,
    /// Of 100 steps, those with a fault.
    faults: u8,
    /// The client's requests are within these first blocks: the fewer, the more of them overlap.
    used: u64,
    filesystem: Filesystem,
    /// Counts the owners; the present one's router.
    owner: u64,
    router: Option<Router>,
    coordinator: Option<Coordinator>,
    /// They have a connection.
    connected: bool,
    /// Counts the connections.
    connection: u64,
    /// This node reaches the LUN.
    path: bool,
    to_coordinator: VecDeque<ToCoordinator>,
    to_owner: VecDeque<router::Event>,
    lun_io: Vec<LunIo>,
    working: Vec<Working>,
    /// Changes of the layout that somebody wants.
    wanted: BTreeMap<u64, router::Range>,
    pending: BTreeMap<u64, Pending>,
    /// Requests that have failed for their client.
    failed: BTreeSet<u64>,
    next: u64,
    histories: Vec<History>,
    counts: Counts,
    log: Log,
}

/// Runs a seed to its end, or to the first violation; with a bug planted if one is given.
#[must_use]
pub fn run(seed: u64, bug: Option<Bug>, traced: bool) -> Run<Counts> {
    let mut world = World::new(seed, bug, traced);
    run_world(&mut world, World::run, |world| &mut world.log);
    world.log.end(world.counts)
}

/// Runs many seeds; the violations, in order of seeds.
#[must_use]
pub fn many(seeds: Range<u64>, threads: usize, bug: Option<Bug>) -> Vec<(u64, String)> {
    violations(run, seeds, threads, bug)
}

impl World {
    fn new(seed: u64, bug: Option<Bug>, traced: bool) -> World {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (faults, used) = (rng.u8(1..8), [PIECE, 2 * PIECE, BLOCKS as u64][rng.usize(0..3)]);
        World {
            faults,
            used,
            rng,
            planted: Planted::new(bug),
            filesystem: Filesystem::new(BLOCKS, PIECE, true),
            owner: 0,
            router: None,
            coordinator: None,
            connected: false,
            connection: 0,
            path: true,
            to_coordinator: VecDeque::new(),
            to_owner: VecDeque::new(),
            lun_io: Vec::new(),
            working: Vec::new(),
            wanted: BTreeMap::new(),
            pending: BTreeMap::new(),
            failed: BTreeSet::new(),
            next: 0,
            histories: vec![History::default(); BLOCKS],
            counts: Counts::default(),
            log: Log::new(traced),
        }
    }

    fn run(&mut self) {
        while self.log.step < STEPS && self.log.violation.is_none() {
            self.log.step += 1;
            match self.rng.u8(0..100) {
                0..30 => self.submit(),
                30..42 => self.mend(),
                42..44 => self.want(),
                44 => self.prepare(),
                roll if (45..45 + self.faults).contains(&roll) => self.fault(),
                _ => self.go_on(),
            }
            self.check();
        }
        while !self.has_ended() && self.log.violation.is_none() {
            self.log.step += 1;
            if self.log.step > STEPS + BOUND {
                let left = (self.pending.len(), self.wanted.len());
                return self.log.fail(|| format!("I8: {left:?} requests and changes do not end"));
            }
            if !std::mem::replace(&mut self.path, true) {
                self.tell_path();
            }
            self.mend();
            self.go_on();
            self.check();
        }
        self.read_all();
        self.check_histories();
    }

    fn has_ended(&self) -> bool {
        let is_idle = self.router.as_ref().is_some_and(|router| router.in_flight() == 0)
            && self.coordinator.as_ref().is_some_and(Coordinator::is_idle);
        is_idle
            && self.pending.values().all(|pending| pending.is_lost)
            && self.wanted.is_empty()
            && self.lun_io.is_empty()
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// One thing that is on its way arrives or ends.
    fn go_on(&mut self) {
        let can = [
            (!self.to_coordinator.is_empty(), 0),
            (!self.to_owner.is_empty(), 1),
            (!self.lun_io.is_empty(), 2),
            (!self.working.is_empty(), 3),
        ];
        let can: Vec<u8> = can.into_iter().filter_map(|(can, what)| can.then_some(what)).collect();
        match self.rng.choice(can) {
            Some(0) => self.coordinator_hears(),
            Some(1) => {
                if let Some(event) = self.to_owner.pop_front() {
                    self.route(event);
                }
            }
            Some(2) => self.io_ends(),
            Some(3) => self.job_ends(),
            _ => {}
        }
    }

    /// The router takes an event, and what it wants is begun.
    fn route(&mut self, event: router::Event) {
        let Some(router) = &mut self.router else { return };
        let mut effects = Vec::new();
        self.log.note(|| format!("owner: {event:?}"));
        if let router::Event::Redirected { id, .. } = event
            && let Some(pending) = self.pending.get_mut(&id)
        {
            pending.take_redirected();
        }
        router.step(event, &mut effects);
        for effect in effects {
            self.log.note(|| format!("  {effect:?}"));
            match effect {
                router::Effect::Direct { id, piece } => {
                    self.counts.direct += 1;
                    self.counts.shared += u64::from(matches!(piece.lease, Lease::ReadOnly(_)));
                    let kind = self.kind_of(id);
                    self.begin_io(id, kind, piece, None);
                }
                router::Effect::Block { id, piece, .. } => {
                    self.counts.block += 1;
                    let kind = self.kind_of(id);
                    self.to_coordinator.push_back(ToCoordinator::Block { id, kind, piece });
                }
                router::Effect::Flush { id, route: Route::Direct } => {
                    let piece = Piece { start: 0, end: 0, lease: Lease::Nothing };
                    self.begin_io(id, Kind::Flush, piece, None);
                }
                router::Effect::Flush { id, .. } => self.to_coordinator.push_back(ToCoordinator::Flush(id)),
                router::Effect::Zeroes { id, range } => {
                    self.counts.zeroes += 1;
                    self.reads_zeroes(id, range);
                }
                router::Effect::File { request, gives_up } => {
                    self.counts.file += 1;
                    self.to_coordinator.push_back(ToCoordinator::Redirected { request, gives_up });
                }
                router::Effect::RecallDone(number) => {
                    self.counts.recalls += 1;
                    self.to_coordinator.push_back(ToCoordinator::RecallDone(number));
                }
                router::Effect::Done(id) => self.answer(id),
                // Its write may be seen or not.
                router::Effect::Failed { id, .. } => {
                    self.counts.failed += 1;
                    self.pending.remove(&id);
                    self.failed.insert(id);
                }
                router::Effect::Dropped(_) => {}
            }
        }
    }

    fn coordinator_hears(&mut self) {
        match self.to_coordinator.pop_front() {
            Some(ToCoordinator::Redirected { request, gives_up }) => {
                self.coordinate(coordinator::Event::Redirected { request, gives_up });
            }
            Some(ToCoordinator::RecallDone(number)) => {
                self.coordinate(coordinator::Event::RecallDone(number));
            }
            Some(ToCoordinator::Block { id, kind, piece }) => {
                self.coordinate(coordinator::Event::Block { id, kind, piece });
            }
            Some(ToCoordinator::Flush(id)) => {
                self.to_owner.push_back(router::Event::Answered { id, ok: self.rng.u8(0..8) > 0 });
            }
            None => {}
        }
    }

    fn begin_io(&mut self, id: u64, kind: Kind, piece: Piece, block: Option<u64>) {
        let (owner, connection) = (self.owner, self.connection);
        self.lun_io.push(LunIo { id, kind, piece, owner, block, connection });
    }

    fn kind_of(&self, id: u64) -> Kind {
        self.pending.get(&id).map_or(Kind::Read, |pending| pending.request.kind)
    }

    fn coordinate(&mut self, event: coordinator::Event) {
        let Some(coordinator) = &mut self.coordinator else { return };
        let mut effects = Vec::new();
        self.log.note(|| format!("coordinator: {event:?}"));
        coordinator.step(event, &mut effects);
        for effect in effects {
            self.log.note(|| format!("  {effect:?}"));
            match effect {
                coordinator::Effect::Execute { job, what } => self.begin_job(job, what),
                coordinator::Effect::Answer { id, result, grants } => {
                    self.to_owner.push_back(router::Event::Redirected { id, result, grants });
                }
                coordinator::Effect::BlockAnswer { id, result } => {
                    self.to_owner.push_back(router::Event::Answered { id, ok: result.is_ok() });
                }
                coordinator::Effect::Grant(grants) => {
                    self.counts.prepared += 1;
                    self.to_owner.push_back(router::Event::Granted(grants));
                }
                coordinator::Effect::Welcome => self.to_owner.push_back(router::Event::CoordinatorFound),
                coordinator::Effect::Recall { number, range } => {
                    self.to_owner.push_back(router::Event::Recalled { number, range });
                }
                coordinator::Effect::Changed { change, result } => {
                    self.counts.changes += u64::from(result.is_ok());
                    self.wanted.remove(&change);
                }
            }
        }
    }

    /// The present owner's requests that are on their way through the filesystem.
    fn redirected(&self) -> impl Iterator<Item = Request> {
        let sent = self.to_coordinator.iter().filter_map(|message| match message {
            ToCoordinator::Redirected { request, .. } => Some(*request),
            _ => None,
        });
        // A read for which nobody waits may be done by another route already.
        let working = self.working.iter().filter_map(|working| match working.what {
            Job::Request { request, .. } if request.kind.changes() || !working.is_orphan => Some(request),
            Job::Request { .. } | Job::Change { .. } | Job::Prepare { .. } | Job::Block { .. } => None,
        });
        sent.chain(working).filter(|request| self.pending.get(&request.id).is_some_and(|one| !one.is_lost))
    }

    fn begin_job(&mut self, job: u64, what: Job) {
        let copying = match what {
            Job::Block { id, kind, piece } => {
                return self.begin_io(id, kind, piece, Some(job));
            }
            Job::Prepare { allocates: false, .. } => Copying::default(),
            Job::Prepare { range, .. } => self.filesystem.begin_allocation(range, &mut self.rng),
            Job::Request { request, .. } if request.kind != Kind::Write => Copying::default(),
            Job::Request { request, .. } => self.filesystem.begin(request.range, false, &mut self.rng),
            // A clone moves nothing.
            Job::Change { change, .. } if is_clone(change) => Copying::default(),
            Job::Change { range, .. } => self.filesystem.begin(range, true, &mut self.rng),
        };
        let reads = matches!(what, Job::Request { request, .. } if !request.kind.changes());
        // A coordinator may answer with the layout of the read's beginning.
        let known = (reads && self.rng.bool()).then(|| self.filesystem.layout(what.range()));
        self.working.push(Working { job, what, copying, known, is_orphan: false });
    }

    fn job_ends(&mut self) {
        let index = self.rng.usize(0..self.working.len());
        let Working { job, what, copying, known, .. } = self.working.swap_remove(index);
        // No space is left, say. Of a write, the blocks may have been allocated.
        let fails = self.log.step < STEPS && self.rng.u8(0..20) == 0;
        let result = if fails { Err(IoError::from_errno(libc::ENOSPC, "allocating")) } else { Ok(()) };
        let forgets = self.planted.has(Bug::GrantBeforeCommit);
        if fails && self.rng.bool() {
            self.filesystem.abandon(copying, &mut self.rng);
        } else {
            // What a job that fails has allocated is not durable before the next one is.
            self.filesystem.commit(copying, !fails && !forgets, &mut self.rng);
            self.finish(what, result.is_ok());
        }
        if !fails && !forgets {
            self.filesystem.make_durable();
        }
        let layout = match fails {
            true => Vec::new(),
            false => known.unwrap_or_else(|| self.filesystem.layout(what.range())),
        };
        let layout = if self.planted.has(Bug::GrantShared) { checks::shared_as_own(layout) } else { layout };
        let layout = match self.planted.has(Bug::GrantUnwritten) {
            true => self.filesystem.unwritten_as_written(layout),
            false => layout,
        };
        self.coordinate(coordinator::Event::Executed { job, result, layout });
    }

    fn finish(&mut self, what: Job, is_done: bool) {
        match what {
            Job::Request { request, .. } if is_done => self.do_through_filesystem(request),
            Job::Change { change, .. } if is_done && is_clone(change) => {
                self.filesystem.clone_file(change % 6, &mut self.rng);
            }
            Job::Request { .. } | Job::Change { .. } | Job::Prepare { .. } | Job::Block { .. } => {}
        }
    }

    /// Space is allocated ahead, or the file is looked at.
    fn prepare(&mut self) {
        let start = self.rng.u64(0..BLOCKS as u64);
        let range = (start, (start + self.rng.u64(1..9)).min(BLOCKS as u64));
        let allocates = self.rng.bool();
        self.coordinate(coordinator::Event::Prepare { range, allocates });
    }

    /// Somebody wants a clone, or a defragmenter moves a range; or nobody waits for that any more.
    fn want(&mut self) {
        if self.rng.u8(0..4) == 0 {
            return self.give_up_waiting();
        }
        let change = self.number();
        let start = self.rng.u64(0..BLOCKS as u64 / PIECE) * PIECE;
        let range = if is_clone(change) { (0, BLOCKS as u64) } else { (start, start + PIECE) };
        self.wanted.insert(change, range);
        self.coordinate(coordinator::Event::Wanted { change, range });
    }

    fn give_up_waiting(&mut self) {
        let begun = |change: u64| {
            let is_it = |what| matches!(what, Job::Change { change: other, .. } if other == change);
            self.working.iter().any(|working| is_it(working.what))
        };
        if let Some(change) = self.wanted.keys().copied().find(|change| !begun(*change)) {
            self.wanted.remove(&change);
            self.log.note(|| format!("nobody waits for change {change} any more"));
            self.coordinate(coordinator::Event::Unwanted(change));
        }
    }

    fn fault(&mut self) {
        match self.rng.u8(0..12) {
            0..2 => self.break_connection(),
            2..4 => self.end_coordinator(),
            4 => self.end_owner(),
            5 => self.overdue(),
            _ => {
                self.path = !self.path;
                self.tell_path();
            }
        }
    }

    /// Somebody has waited for a coordinator for too long.
    fn overdue(&mut self) {
        if self.router.as_ref().is_some_and(|router| !router.has_coordinator()) {
            self.route(router::Event::CoordinatorOverdue(IoError::from_errno(libc::EIO, "waiting")));
        }
    }

    fn tell_path(&mut self) {
        self.route(router::Event::Path(self.path));
    }

    fn break_connection(&mut self) {
        if std::mem::take(&mut self.connected) {
            self.log.note(|| "the connection breaks".into());
            self.to_coordinator.clear();
            self.to_owner.clear();
            self.working.iter_mut().for_each(|working| working.is_orphan = true);
            self.route(router::Event::CoordinatorLost);
            self.coordinate(coordinator::Event::OwnerLost);
        }
    }

    /// It loses all changes that it had not committed. Its I/O goes on until it is fenced: [`World::mend`].
    fn end_coordinator(&mut self) {
        self.break_connection();
        if self.coordinator.take().is_some() {
            self.log.note(|| "the coordinator ends".into());
            self.filesystem.lose_uncommitted(&mut self.rng);
            for Working { copying, .. } in std::mem::take(&mut self.working) {
                self.filesystem.abandon(copying, &mut self.rng);
            }
        }
    }

    /// Its I/O goes on until it is fenced: [`World::mend`].
    fn end_owner(&mut self) {
        self.break_connection();
        if self.router.take().is_some() {
            self.log.note(|| "the owner ends".into());
            self.pending.values_mut().for_each(|pending| pending.is_lost = true);
        }
    }

    /// Starts or connects one missing part.
    fn mend(&mut self) {
        if self.coordinator.is_none() {
            self.fence(|io| io.block.is_some());
            // The registry names an owner, or a former one that is not proved over.
            self.coordinator = Some(Coordinator::new(true, PIECE, self.planted));
            self.log.note(|| "another coordinator".into());
            // Operators ask again.
            for (change, range) in self.wanted.clone() {
                self.coordinate(coordinator::Event::Wanted { change, range });
            }
        } else if self.router.is_none() {
            if !self.planted.has(Bug::FreeWithoutQuarantine) {
                self.fence(|io| io.block.is_none());
            }
            self.coordinate(coordinator::Event::OwnerOver);
            self.owner += 1;
            self.log.note(|| "another owner".into());
            self.router = Some(Router::new(PIECE, self.planted));
            self.tell_path();
        } else if !self.connected {
            self.connected = true;
            self.connection += 1;
            self.coordinate(coordinator::Event::OwnerFound);
        }
    }

    /// That I/O has ended, done or not.
    fn fence(&mut self, which: impl Fn(&LunIo) -> bool) {
        let (ended, others): (Vec<_>, _) = std::mem::take(&mut self.lun_io).into_iter().partition(which);
        self.lun_io = others;
        for io in ended {
            if self.rng.bool() {
                self.do_on_lun(io);
            }
        }
    }
}
