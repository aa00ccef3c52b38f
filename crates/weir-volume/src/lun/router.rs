//! The owner's side: the route of each request to one disk, and its repetition when leases, paths or the coordinator go.
//!
//! A request goes *directly* to the LUN where the owner has leases for all of it; *block-redirected*, through the coordinator to the
//! same blocks, where this node has no path to the LUN; and *file-redirected* otherwise: the coordinator does it through its
//! filesystem. Requests that overlap, and do not only read, are never on two routes at once (I6): the later one waits. So they reach
//! the disk in the order in which the guest issued them. Nor are two overlapping changes under way on the LUN.
//!
//! A file-redirected change may move blocks, and not only those that it touches: the filesystem copies whole pieces. So it gives up the
//! owner's leases for its *neighbourhood*, and begins when nothing of the owner's is in flight there. Its answer has the leases for
//! the neighbourhood as it is then.

use std::collections::VecDeque;

use weir_block::IoError;

use super::in_progress::InProgress;
pub use super::in_progress::UnderWay;
use super::leases::{Lease, Leases, Piece};
pub use super::request::{Kind, Lacks, Range, Request, Route, neighbourhood, overlap};
use crate::planted::{Bug, Planted};

/// Something that happened.
///
/// Messages of the coordinator arrive in the order in which it sent them, and none of a connection that is gone: an answer that was
/// overtaken by a recall would bring leases back that the recall has taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A client's request.
    Submitted(Request),
    /// The LUN has answered a part of a request ([`Effect::Direct`], [`Effect::Block`], [`Effect::Flush`]). Not `ok`: this node's path is broken, or the
    /// coordinator refuses the blocks. The I/O has certainly ended: one that may still land must not be given up (P4).
    Answered {
        /// The request.
        id: u64,
        /// Whether it was done.
        ok: bool,
    },
    /// A flush has failed, and not because this node has lost its path: what was to be made durable may be gone, and another flush would not
    /// tell (P8).
    NotFlushed {
        /// The flush.
        id: u64,
        /// Why.
        error: IoError,
    },
    /// The coordinator has done a request through its filesystem, durably, or has failed.
    Redirected {
        /// The request.
        id: u64,
        /// The reason for which it has failed. A write may have been done in part.
        result: Result<(), IoError>,
        /// The leases of its neighbourhood now.
        grants: Vec<Piece>,
    },
    /// The coordinator gives leases that belong to no request: it has allocated space ahead, or has looked at the file.
    Granted(Vec<Piece>),
    /// The coordinator asks for a range.
    Recalled {
        /// Unique for the connection.
        number: u64,
        /// The range.
        range: Range,
    },
    /// The connection to the coordinator is gone, and with it whatever is on its way there or back.
    CoordinatorLost,
    /// There has been no coordinator for as long as the operator allows: whatever needs one fails, until one is found.
    CoordinatorOverdue(IoError),
    /// A coordinator can be asked, and has heard that this node owns the disk. It has ended all block I/O that came over earlier
    /// connections, also those to a former coordinator (P4).
    CoordinatorFound,
    /// This node reaches the LUN, or does not. After a failure it does not, until this says so.
    Path(bool),
    /// The operator wants every request to go through the coordinator's filesystem, or does not any more. Holes are read as zeroes here.
    ThroughFilesystem(bool),
    /// This node is fenced, or is to be admitted again: its leases may be another's by now. Answered by [`Effect::Dropped`]. The
    /// connection to the coordinator is gone, too.
    Drop(u64),
    /// The disk is closed here, and the connection to the coordinator with it: whatever is not under way on the LUN fails. Redirected
    /// requests may have been done, or may still be: the coordinator ends them before it lets another owner begin.
    Abandon(IoError),
}

/// Something to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// I/O on the LUN. Each is answered by one [`Event::Answered`].
    Direct {
        /// The request.
        id: u64,
        /// The part of it, and where it is on the LUN.
        piece: Piece,
    },
    /// The same through the coordinator.
    Block {
        /// The request.
        id: u64,
        /// The part of it, and where it is on the LUN.
        piece: Piece,
        /// By the file, because the operator wants that. It changes no layout: the file has these blocks, and for a write alone.
        by_file: bool,
    },
    /// The part of a read that is in a hole.
    Zeroes {
        /// The request.
        id: u64,
        /// The part.
        range: Range,
    },
    /// The whole request, by the coordinator through its filesystem. Answered by one [`Event::Redirected`].
    File {
        /// The request.
        request: Request,
        /// The range for which this node has given up its leases: empty for a read.
        gives_up: Range,
    },
    /// A flush: of the LUN, or through the coordinator if this node has no path. Answered by one [`Event::Answered`].
    Flush {
        /// The request.
        id: u64,
        /// Direct or block-redirected.
        route: Route,
    },
    /// The request is done.
    Done(u64),
    /// The request has failed: the coordinator's filesystem cannot do it, or there has been no coordinator for too long.
    Failed {
        /// The request.
        id: u64,
        /// Why.
        error: IoError,
    },
    /// Nothing of this node's is in flight in the range any more, and nothing will be without a new grant.
    RecallDone(u64),
    /// No lease is held, and nothing of this node's is under way on the LUN.
    Dropped(u64),
}

/// The router of one disk.
#[derive(Debug)]
pub struct Router {
    leases: Leases,
    under_way: InProgress,
    /// In the order of their arrival.
    waiting: VecDeque<Request>,
    /// Ranges that the coordinator waits for.
    recalls: Vec<(u64, Range)>,
    /// Whoever has to know that no lease is held.
    drops: Vec<u64>,
    /// The filesystem moves blocks in pieces of this many bytes.
    piece: u64,
    coordinator: bool,
    path: bool,
    through_filesystem: bool,
    /// There has been no coordinator for too long.
    overdue: Option<IoError>,
    /// The disk is closed here.
    abandoned: Option<IoError>,
    planted: Planted,
}

impl Router {
    /// A router without leases, path and coordinator. The filesystem moves blocks in pieces of `piece` bytes, by which both sides go.
    #[must_use]
    pub fn new(piece: u64, planted: Planted) -> Router {
        assert!(piece > 0, "a piece has bytes");
        Router {
            leases: Leases::default(),
            under_way: InProgress::default(),
            waiting: VecDeque::new(),
            recalls: Vec::new(),
            drops: Vec::new(),
            piece,
            coordinator: false,
            path: false,
            through_filesystem: false,
            overdue: None,
            abandoned: None,
            planted,
        }
    }

    /// Plants a bug, for the simulator.
    pub fn plant(&mut self, planted: Planted) {
        self.planted = planted;
    }

    /// Requests without an answer.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.under_way.len() + self.waiting.len()
    }

    /// The requests that are being done, in the order of their start.
    #[must_use]
    pub fn under_way(&self) -> Vec<UnderWay> {
        self.under_way.in_order()
    }

    /// This node reaches the LUN, as far as it knows.
    #[must_use]
    pub fn has_path(&self) -> bool {
        self.path
    }

    /// A coordinator can be asked.
    #[must_use]
    pub fn has_coordinator(&self) -> bool {
        self.coordinator
    }

    /// Requests wait for an answer of the coordinator, or for their turn.
    #[must_use]
    pub fn waits_for_coordinator(&self) -> bool {
        !self.waiting.is_empty() || self.under_way.has_redirected()
    }

    /// There has been no coordinator for too long.
    #[must_use]
    pub fn is_overdue(&self) -> bool {
        self.overdue.is_some()
    }

    /// The operator wants every request to go through the coordinator's filesystem.
    #[must_use]
    pub fn goes_through_filesystem(&self) -> bool {
        self.through_filesystem
    }

    /// What the changes lack that go through the coordinator's filesystem now.
    #[must_use]
    pub fn lacks(&self) -> Lacks {
        if !self.under_way.has_redirected() {
            return Lacks::default();
        }
        self.under_way.iter().fold(Lacks::default(), |all, UnderWay { lacks, .. }| Lacks {
            blocks: all.blocks || lacks.blocks,
            own_blocks: all.own_blocks || lacks.own_blocks,
        })
    }

    /// What a change lacks that has to go through the coordinator's filesystem.
    fn lacks_of(&self, request: Request) -> Lacks {
        if request.kind == Kind::Punch {
            return Lacks { blocks: true, own_blocks: false };
        }
        self.leases.of(request.range).fold(Lacks::default(), |all, piece| match piece.lease {
            Lease::Nothing | Lease::Hole => Lacks { blocks: true, ..all },
            Lease::ReadOnly(_) => Lacks { own_blocks: true, ..all },
            Lease::ReadWrite(_) => all,
        })
    }

    /// The owner's leases.
    #[must_use]
    pub fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Takes an event into account and appends what follows from it to `effects`.
    pub fn step(&mut self, event: Event, effects: &mut Vec<Effect>) {
        match event {
            Event::Submitted(request) => self.waiting.push_back(request),
            Event::Answered { id, ok } => self.answered(id, ok, effects),
            Event::NotFlushed { id, error } => {
                if let Some(index) = self.under_way.find(id, |one| one.request.kind == Kind::Flush) {
                    self.under_way.remove(index);
                    effects.push(Effect::Failed { id, error });
                }
            }
            Event::Redirected { id, result, grants } => self.redirected(id, result, &grants, effects),
            // Of a connection that is gone.
            Event::Granted(_) if !self.coordinator => {}
            Event::Granted(grants) => self.take_grants(&grants),
            // Of a connection that is gone.
            Event::Recalled { .. } if !self.coordinator => {}
            Event::Recalled { number, range } => {
                self.leases.clear(range);
                self.recalls.push((number, range));
            }
            Event::CoordinatorLost => self.lost(),
            Event::CoordinatorOverdue(_) if self.coordinator => {}
            Event::CoordinatorOverdue(error) => self.overdue(error, effects),
            Event::CoordinatorFound => {
                self.lost();
                (self.coordinator, self.overdue) = (true, None);
                self.reissue();
            }
            Event::Path(path) => self.path = path,
            Event::ThroughFilesystem(wanted) => self.through_filesystem = wanted,
            Event::Drop(number) => {
                self.lost();
                self.leases = Leases::default();
                (self.path, self.overdue) = (false, None);
                self.drops.push(number);
            }
            Event::Abandon(error) => self.abandon(error, effects),
        }
        self.answer_recalls(effects);
        self.start(effects);
    }

    fn answered(&mut self, id: u64, ok: bool, effects: &mut Vec<Effect>) {
        let Some(index) = self.under_way.find(id, |one| one.parts > 0) else { return };
        let one = self.under_way.at(index);
        one.parts -= 1;
        one.failed |= !ok;
        match one.route {
            // What went directly until now has not waited for a coordinator.
            Route::Direct if !ok => (self.path, self.overdue) = (false, None),
            Route::Block if !ok => self.leases.clear(one.request.range),
            _ => {}
        }
        if one.parts == 0 {
            let UnderWay { request, failed, .. } = self.under_way.remove(index);
            match failed {
                true => self.again(request),
                false => effects.push(Effect::Done(request.id)),
            }
        }
    }

    /// A request that was begun is done again: before all that came later and overlaps it, because those have waited.
    fn again(&mut self, request: Request) {
        self.waiting.push_front(request);
    }

    fn redirected(
        &mut self,
        id: u64,
        result: Result<(), IoError>,
        grants: &[Piece],
        effects: &mut Vec<Effect>,
    ) {
        let Some(index) = self.under_way.find(id, |one| one.route == Route::File) else { return };
        let locks = self.under_way.remove(index).locks;
        let own: Vec<Piece> = grants.iter().filter_map(|grant| grant.within(locks)).collect();
        self.take_grants(&own);
        effects.push(match result {
            Ok(()) => Effect::Done(id),
            Err(error) => Effect::Failed { id, error },
        });
    }

    fn take_grants(&mut self, grants: &[Piece]) {
        let given_up: Vec<Range> = self
            .under_way
            .iter()
            .filter(|one| one.route == Route::File && one.request.kind.changes())
            .map(|one| one.locks)
            .filter(|_| !self.planted.has(Bug::TakeEveryGrant))
            .chain(self.recalls.iter().map(|(_, range)| *range))
            .collect();
        grants.iter().for_each(|grant| self.leases.set(*grant));
        // Those changes are behind this message: it does not know where they move the blocks.
        given_up.into_iter().for_each(|range| self.leases.clear(range));
    }

    /// Direct I/O goes on. The coordinator's successor asks again for whatever it needs.
    fn lost(&mut self) {
        self.coordinator = false;
        self.recalls.clear();
        if self.planted.has(Bug::ForgetDoubt) {
            self.reissue();
        }
    }

    /// Whatever was redirected over the former connection goes over this one ([`Event::CoordinatorFound`]). Until then it may have
    /// been done or not, and nothing that overlaps it may begin, by whatever route (P4).
    fn reissue(&mut self) {
        if self.planted.has(Bug::LostReissue) {
            return;
        }
        let in_doubt = self.under_way.take_redirected();
        in_doubt.into_iter().rev().filter(|one| !one.given_up).for_each(|one| self.again(one.request));
    }

    /// What the former coordinator has, has failed for its client, and keeps its range until a coordinator is found. What waits for one fails in
    /// [`Router::start`].
    fn overdue(&mut self, error: IoError, effects: &mut Vec<Effect>) {
        self.overdue = Some(error);
        let in_doubt = self.under_way.iter_mut().filter(|one| one.route != Route::Direct && !one.given_up);
        for one in in_doubt {
            one.given_up = true;
            effects.push(Effect::Failed { id: one.request.id, error });
        }
        if self.planted.has(Bug::ForgetGivenUp) {
            self.under_way.forget_given_up();
        }
    }

    fn abandon(&mut self, error: IoError, effects: &mut Vec<Effect>) {
        self.lost();
        self.leases = Leases::default();
        self.path = false;
        let told = self.under_way.take_redirected().into_iter().filter(|one| !one.given_up);
        effects.extend(told.map(|one| Effect::Failed { id: one.request.id, error }));
        self.abandoned = Some(error);
    }

    fn answer_recalls(&mut self, effects: &mut Vec<Effect>) {
        let Router { recalls, drops, under_way, planted, .. } = self;
        if recalls.is_empty() && drops.is_empty() {
            return;
        }
        if !under_way.iter().any(|one| one.route == Route::Direct) {
            effects.extend(drops.drain(..).map(Effect::Dropped));
        }
        recalls.retain(|(number, range)| {
            let uses = |one: &UnderWay| one.route != Route::File && overlap(one.locks, *range);
            let waits = under_way.iter().any(uses) && !planted.has(Bug::AcknowledgeRecallBeforeDrain);
            if !waits {
                effects.push(Effect::RecallDone(*number));
            }
            waits
        });
    }

    /// Starts what can be started, in order.
    fn start(&mut self, effects: &mut Vec<Effect>) {
        if let Some(error) = self.abandoned {
            let waiting = self.waiting.drain(..);
            return effects.extend(waiting.map(|Request { id, .. }| Effect::Failed { id, error }));
        }
        // Neither allocates unless something has to wait.
        let mut passed: Vec<Range> = Vec::new();
        let mut redirected_waits = false;
        for _ in 0..self.waiting.len() {
            let Some(request) = self.waiting.pop_front() else { break };
            let whole = self.leases.whole(request.range);
            let route = self.route(request, whole);
            let locks = self.locks(request, route);
            let overtakes = passed.iter().any(|range| overlap(*range, locks));
            let has_way = match route {
                Route::Direct => true,
                Route::Block | Route::File => self.coordinator && !redirected_waits,
            };
            // Reads among reads.
            let excludes_none = !request.kind.changes() && !self.under_way.has_changes();
            let all = self.under_way.iter().filter(|_| !excludes_none);
            let mut before = all.filter(|one| self.excludes(one, request, route, locks));
            let needs_coordinator =
                !has_way || self.overdue.is_some() && before.clone().any(|one| one.route != Route::Direct);
            let waits = overtakes || !has_way || before.next().is_some();
            if let Some(error) = self.overdue.filter(|_| needs_coordinator && !overtakes) {
                effects.push(Effect::Failed { id: request.id, error });
            } else if waits {
                // Its neighbourhood, because it may be redirected when its time comes.
                passed.push(neighbourhood(request.range, self.piece));
                redirected_waits |= route != Route::Direct;
                self.waiting.push_back(request);
            } else {
                self.begin(request, route, locks, whole, effects);
            }
        }
    }

    /// `whole`: the lease of its range, if it is one.
    fn route(&self, request: Request, whole: Option<Lease>) -> Route {
        if request.kind == Kind::Flush {
            return if self.path { Route::Direct } else { Route::Block };
        }
        let on_lun = |lease: Lease| match (request.kind, lease) {
            (Kind::Read, lease) => lease != Lease::Nothing,
            (Kind::Write, lease) => matches!(lease, Lease::ReadWrite(_)),
            (Kind::Punch | Kind::Flush, _) => false,
        };
        let is_hole = |lease: Lease| request.kind == Kind::Read && lease == Lease::Hole;
        let only_holes = |holes, lease| on_lun(lease).then(|| holes && is_hole(lease));
        let holes = match whole {
            Some(lease) => only_holes(true, lease),
            None => self.leases.of(request.range).map(|piece| piece.lease).try_fold(true, only_holes),
        };
        // The wish needs a coordinator; a guest does not have to wait for one.
        let goes_directly = self.path && !(self.through_filesystem && self.coordinator);
        match holes {
            None => Route::File,
            Some(only_holes) if only_holes || goes_directly => Route::Direct,
            Some(_) => Route::Block,
        }
    }

    fn locks(&self, request: Request, route: Route) -> Range {
        let moves = route == Route::File && request.kind.changes() && !self.planted.has(Bug::NeighbourMoved);
        if moves { neighbourhood(request.range, self.piece) } else { request.range }
    }

    /// Whether a request has to wait for one that is under way: if they overlap, one changes something, and they are on two routes, or
    /// both change something on the LUN. Of two such changes the first may fail in part, and is done again: that must not bring it
    /// back over the second, which was seen meanwhile (P7). What the coordinator's filesystem does, it does and answers in order.
    fn excludes(&self, one: &UnderWay, request: Request, route: Route, locks: Range) -> bool {
        let (before, after) = (one.request.kind.changes(), request.kind.changes());
        let two_routes = one.route != route && (before || after) && !self.planted.has(Bug::TwoRoutes);
        let two_changes = route != Route::File && before && after && !self.planted.has(Bug::OverlapChanges);
        (two_routes || two_changes) && overlap(one.locks, locks)
    }

    fn begin(
        &mut self,
        request: Request,
        route: Route,
        locks: Range,
        whole: Option<Lease>,
        effects: &mut Vec<Effect>,
    ) {
        let id = request.id;
        let (mut parts, mut lacks) = (0, Lacks::default());
        if request.kind == Kind::Flush {
            parts = 1;
            effects.push(Effect::Flush { id, route });
        } else if route == Route::File {
            let gives_up = if request.kind.changes() { locks } else { (locks.0, locks.0) };
            if request.kind.changes() {
                lacks = self.lacks_of(request);
                if !self.planted.has(Bug::KeepLease) {
                    self.leases.clear(gives_up);
                }
            }
            effects.push(Effect::File { request, gives_up });
        } else {
            let whole = whole.map(|lease| Piece { start: request.range.0, end: request.range.1, lease });
            let several = whole.is_none().then(|| self.leases.of(request.range));
            for piece in whole.into_iter().chain(several.into_iter().flatten()) {
                match piece.lease {
                    Lease::Nothing | Lease::Hole => {
                        effects.push(Effect::Zeroes { id, range: (piece.start, piece.end) });
                        continue;
                    }
                    _ if route == Route::Direct => effects.push(Effect::Direct { id, piece }),
                    _ => {
                        let by_file = self.through_filesystem;
                        effects.push(Effect::Block { id, piece, by_file });
                    }
                }
                parts += 1;
            }
        }
        if parts == 0 && route != Route::File {
            return effects.push(Effect::Done(id));
        }
        self.under_way.push(UnderWay::new(request, route, locks, parts, lacks));
    }
}
