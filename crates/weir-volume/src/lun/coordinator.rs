//! The coordinator's side, for one file: what its filesystem may do now, and what the owner must give up before.
//!
//! No table of leases is kept: the owner of a disk counts as holding the whole file, except for what its redirected requests give up
//! and for what it has answered to a recall. So a new coordinator knows as much as its predecessor, once the owner has come to it; until
//! then it changes no layout (the *grace*).

use std::collections::VecDeque;

use weir_block::{Code, ErrorKind, IoError};

use super::leases::{Lease, Leases, Piece};
use super::router::{Kind, Range, Request, neighbourhood, overlap};
use crate::planted::{Bug, Planted};

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The owner has connected, and goes on with what it holds. It sends nothing before [`Effect::Welcome`].
    OwnerFound,
    /// Its connection is gone. It may go on with what it holds.
    OwnerLost,
    /// Its own I/O to the LUN has certainly ended, and nobody owns the disk now.
    OwnerOver,
    /// A request of the owner, which has given up its leases for `gives_up`.
    Redirected {
        /// The request.
        request: Request,
        /// Empty for a read.
        gives_up: Range,
    },
    /// I/O of the owner on blocks of the LUN that it holds, because its node does not reach the LUN.
    Block {
        /// Of the answer.
        id: u64,
        /// A read or a write.
        kind: Kind,
        /// The part of the file, and where it is on the LUN.
        piece: Piece,
    },
    /// The owner's answer to [`Effect::Recall`].
    RecallDone(u64),
    /// The owner is to get leases for a range. `allocates`: also where the file has no written blocks; they are written with zeroes. A
    /// hole's lease is true before and after that: the owner alone puts something else there, and gives it up.
    Prepare {
        /// In whole pieces.
        range: Range,
        /// Allocates space.
        allocates: bool,
    },
    /// Somebody else wants to change the layout of a range: a clone makes it shared, say.
    Wanted {
        /// Unique.
        change: u64,
        /// The range.
        range: Range,
    },
    /// Nobody waits for a change any more. One that has not begun is not made.
    Unwanted(u64),
    /// The filesystem has done a job, durably, or has failed. `layout`: what it has in the job's range now; empty if that is not known.
    /// Blocks that are allocated and not written are no part of it.
    Executed {
        /// The job.
        job: u64,
        /// Why it has failed. It may have been done in part.
        result: Result<(), IoError>,
        /// In leases; shared blocks are [`ReadOnly`](Lease::ReadOnly).
        layout: Vec<Piece>,
    },
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// By the filesystem. Answered by [`Event::Executed`].
    Execute {
        /// Unique.
        job: u64,
        /// The work.
        what: Job,
    },
    /// To the owner: whatever came over its former connections has ended. It may begin, and issue again what was not answered.
    Welcome,
    /// To the owner: a redirected request is done, or has failed.
    Answer {
        /// The request.
        id: u64,
        /// Why it has failed.
        result: Result<(), IoError>,
        /// Leases that the owner has from now on.
        grants: Vec<Piece>,
    },
    /// To the owner: it is to give a range up.
    Recall {
        /// Unique.
        number: u64,
        /// The range.
        range: Range,
    },
    /// To the owner: its block I/O is done, or has failed.
    BlockAnswer {
        /// Of the I/O.
        id: u64,
        /// Why it has failed.
        result: Result<(), IoError>,
    },
    /// To the owner: leases that belong to no request.
    Grant(Vec<Piece>),
    /// A change that was wanted is made, or has failed.
    Changed {
        /// Its number.
        change: u64,
        /// Why it has failed.
        result: Result<(), IoError>,
    },
}

/// Work for the filesystem, or for the LUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// A request of the owner; a change may move the blocks of `gives_up`.
    Request {
        /// The request.
        request: Request,
        /// Empty for a read.
        gives_up: Range,
    },
    /// A change of the layout, which leaves the content as it is, and where it is: a clone makes blocks shared. Reads through the filesystem
    /// go on beside it, as it takes its time for each extent.
    Change {
        /// Its number.
        change: u64,
        /// Its range.
        range: Range,
    },
    /// Look at a range, and allocate before.
    Prepare {
        /// The range.
        range: Range,
        /// Write zeroes wherever the file has no written blocks.
        allocates: bool,
    },
    /// I/O on the LUN itself.
    Block {
        /// Of the answer.
        id: u64,
        /// A read or a write.
        kind: Kind,
        /// The blocks.
        piece: Piece,
    },
}

impl Job {
    fn changes(self) -> bool {
        match self {
            Job::Request { request, .. } => request.kind.changes(),
            Job::Change { .. } => true,
            Job::Prepare { allocates, .. } => allocates,
            Job::Block { kind, .. } => kind.changes(),
        }
    }

    /// Whether one does not begin before the other has ended.
    fn excludes(self, other: Job) -> bool {
        (self.changes() || other.changes()) && overlap(self.range(), other.range())
    }

    /// Whether it begins although the other one, which it overlaps, is under way. Not the other way round: a change waits for reads that have
    /// begun, because the filesystem would, holding up everything else, and nobody could give the change up any more.
    fn begins_beside(self, other: Job) -> bool {
        let reads = matches!(self, Job::Request { request, .. } if !request.kind.changes());
        reads && matches!(other, Job::Change { .. })
    }

    /// Everything that it reads or may move.
    #[must_use]
    pub fn range(self) -> Range {
        match self {
            Job::Request { request, .. } if !request.kind.changes() => request.range,
            Job::Request { gives_up, .. } => gives_up,
            Job::Change { range, .. } | Job::Prepare { range, .. } => range,
            Job::Block { piece, .. } => (piece.start, piece.end),
        }
    }
}

/// The disk's owner, as the coordinator knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Nobody,
    /// It may hold anything, and cannot be asked.
    Silent,
    Connected,
}

#[derive(Clone, Copy, Debug)]
struct Recall {
    number: u64,
    change: u64,
    done: bool,
}

#[derive(Clone, Copy, Debug)]
struct Active {
    job: u64,
    what: Job,
    /// The owner's connection on which it came.
    connection: u64,
    /// A change has ended beside it: what it knows of the layout may be older.
    is_outdated: bool,
}

/// One file.
#[derive(Debug)]
pub struct Coordinator {
    owner: Owner,
    /// Counts the owner's connections.
    connection: u64,
    /// The owner waits until it may begin.
    greets: bool,
    /// In the order of their arrival.
    waiting: VecDeque<Job>,
    active: Vec<Active>,
    /// For the first change that waits.
    recall: Option<Recall>,
    /// Numbers of jobs and recalls.
    next: u64,
    piece: u64,
    planted: Planted,
}

impl Coordinator {
    /// A file that has an owner or has none, by the registry. The filesystem moves blocks in pieces of `piece` bytes.
    #[must_use]
    pub fn new(has_owner: bool, piece: u64, planted: Planted) -> Coordinator {
        assert!(piece > 0, "a piece has bytes");
        let owner = if has_owner { Owner::Silent } else { Owner::Nobody };
        let (waiting, active) = (VecDeque::new(), Vec::new());
        Coordinator {
            owner,
            connection: 0,
            greets: false,
            waiting,
            active,
            recall: None,
            next: 0,
            piece,
            planted,
        }
    }

    /// Plants a bug, for the simulator.
    pub fn plant(&mut self, planted: Planted) {
        self.planted = planted;
    }

    /// Whether nothing is to be done.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.active.is_empty()
    }

    /// How many jobs have come, and have not begun.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Takes an event into account and appends what follows from it to `effects`.
    pub fn step(&mut self, event: Event, effects: &mut Vec<Effect>) {
        match event {
            Event::OwnerFound => {
                self.owner_gone(Owner::Connected);
                self.connection += 1;
                self.greets = true;
            }
            Event::OwnerLost => self.owner_gone(Owner::Silent),
            Event::OwnerOver => self.owner_gone(Owner::Nobody),
            // Of a connection that is gone.
            Event::Redirected { .. } | Event::Block { .. } | Event::RecallDone(_) | Event::Prepare { .. }
                if self.owner != Owner::Connected =>
            {
                return;
            }
            // What comes, or begins at once, lets nothing begin that waits already.
            Event::Block { id, kind, piece } => {
                return self.block(Job::Block { id, kind, piece }, id, effects);
            }
            Event::Prepare { range, allocates } => {
                let range = neighbourhood(range, self.piece);
                return self.arrive(Job::Prepare { range, allocates }, effects);
            }
            Event::Redirected { request, gives_up } => return self.redirected(request, gives_up, effects),
            Event::RecallDone(number) => {
                match self.recall.as_mut().filter(|recall| recall.number == number) {
                    Some(recall) => recall.done = true,
                    None => return,
                }
            }
            Event::Wanted { change, range } => {
                let range = neighbourhood(range, self.piece);
                self.waiting.push_back(Job::Change { change, range });
            }
            Event::Unwanted(unwanted) => {
                self.waiting.retain(|job| !matches!(job, Job::Change { change, .. } if *change == unwanted));
                self.recall = self.recall.filter(|recall| recall.change != unwanted);
            }
            Event::Executed { job, result, layout } => self.executed(job, result, layout, effects),
        }
        self.welcome(effects);
        self.start(effects);
    }

    /// The owner issues again whatever it has not got an answer to, and takes from then on what is on the LUN for the last word: nothing of
    /// before may come after that (P4).
    fn welcome(&mut self, effects: &mut Vec<Effect>) {
        let of_former = |active: &Active| {
            active.connection != self.connection && !matches!(active.what, Job::Change { .. })
        };
        let is_free = !self.active.iter().any(of_former) || self.planted.has(Bug::WelcomeBesideFormer);
        if self.greets && is_free {
            self.greets = false;
            effects.push(Effect::Welcome);
        }
    }

    /// The owner repeats requests that have no answer. An unanswered recall is void: its answer would come from before the
    /// owner's last grants.
    fn owner_gone(&mut self, owner: Owner) {
        self.owner = owner;
        self.greets = false;
        self.waiting.retain(|job| matches!(job, Job::Change { .. }));
        if self.planted.has(Bug::ForgetRecall) {
            self.recall.iter_mut().for_each(|recall| recall.done = true);
        } else {
            self.recall = None;
        }
    }

    /// An owner that gives up less than the filesystem may move gets no answer: better that it waits than that data is lost.
    fn redirected(&mut self, request: Request, gives_up: Range, effects: &mut Vec<Effect>) {
        let (start, end) = neighbourhood(request.range, self.piece);
        let covers = gives_up.0 <= start && end <= gives_up.1 || self.planted.has(Bug::NeighbourMoved);
        if covers || !request.kind.changes() {
            self.arrive(Job::Request { request, gives_up }, effects);
        }
    }

    /// At once: whatever waits for the owner's answer to a recall waits for this, too. Nothing moves the blocks meanwhile, or the owner
    /// has claimed what it does not hold.
    fn block(&mut self, what: Job, id: u64, effects: &mut Vec<Effect>) {
        let moves = |active: &Active| {
            let is_move =
                active.what.changes() && !matches!(active.what, Job::Block { .. } | Job::Prepare { .. });
            is_move && overlap(active.what.range(), what.range())
        };
        if self.active.iter().any(moves) {
            let error = IoError::new(ErrorKind::Fence, Code::NotOwner, "block-redirected I/O");
            return effects.push(Effect::BlockAnswer { id, result: Err(error) });
        }
        self.begin(what, effects);
    }

    fn begin(&mut self, what: Job, effects: &mut Vec<Effect>) {
        let job = self.number();
        self.active.push(Active { job, what, connection: self.connection, is_outdated: false });
        effects.push(Effect::Execute { job, what });
    }

    fn executed(
        &mut self,
        job: u64,
        result: Result<(), IoError>,
        layout: Vec<Piece>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(index) = self.active.iter().position(|active| active.job == job) else { return };
        let Active { what, connection, is_outdated, .. } = self.active.remove(index);
        // What a change was made for is over with it: whoever owns the disk now has given the range up, or has never had it.
        let is_change = matches!(what, Job::Change { .. });
        let is_present = connection == self.connection || is_change;
        let hears = is_present && self.owner == Owner::Connected && !self.greets;
        if let Job::Change { change, range } = what {
            effects.push(Effect::Changed { change, result });
            let beside = self.active.iter_mut().filter(|active| overlap(active.what.range(), range));
            beside.for_each(|active| active.is_outdated = true);
        }
        if !hears {
            return;
        }
        let own = layout.iter().filter_map(|piece| piece.within(what.range()));
        let is_outdated = is_outdated && !self.planted.has(Bug::GrantOutdated);
        let grants = if is_outdated { Vec::new() } else { self.grants(own.collect()) };
        match what {
            Job::Request { request, .. } => {
                effects.push(Effect::Answer { id: request.id, result, grants });
            }
            Job::Block { id, .. } => effects.push(Effect::BlockAnswer { id, result }),
            Job::Change { .. } | Job::Prepare { .. } if grants.is_empty() => {}
            Job::Change { .. } | Job::Prepare { .. } => effects.push(Effect::Grant(grants)),
        }
    }

    /// The part of a layout that the owner may have: nothing that is being changed, or is about to be.
    fn grants(&self, layout: Vec<Piece>) -> Vec<Piece> {
        let active = self.active.iter().map(|active| active.what);
        let others = self.waiting.iter().copied().chain(active).filter(|job| job.changes());
        let beside = self.planted.has(Bug::GrantBesideRecall);
        let barred: Vec<Range> =
            others.filter(|job| !beside || !matches!(job, Job::Change { .. })).map(Job::range).collect();
        let whole = layout
            .iter()
            .fold((u64::MAX, 0), |(start, end), piece| (start.min(piece.start), end.max(piece.end)));
        let mut grants = Leases::default();
        layout.into_iter().for_each(|piece| grants.set(piece));
        barred.into_iter().for_each(|range| grants.clear(range));
        grants.of(whole).filter(|piece| piece.lease != Lease::Nothing).collect()
    }

    /// Starts a job that has come, unless it has to wait: it is compared with all that wait, and they are not compared with each other, which
    /// an owner could ask for as often as it likes (P10). No change of somebody else comes this way.
    fn arrive(&mut self, what: Job, effects: &mut Vec<Effect>) {
        let mut before = self.waiting.iter().copied().filter(|other| !self.awaits_owner(*other));
        match self.is_busy(what) || before.any(|other| what.excludes(other)) {
            true => self.waiting.push_back(what),
            false => self.begin(what, effects),
        }
    }

    /// Something is under way that a job waits for.
    fn is_busy(&self, what: Job) -> bool {
        let bars = |other: Job| what.excludes(other) && !what.begins_beside(other);
        self.active.iter().any(|active| bars(active.what)) && !self.planted.has(Bug::ChangeBesideChange)
    }

    /// Starts what can be started, in order.
    fn start(&mut self, effects: &mut Vec<Effect>) {
        // Neither allocates unless something has to wait.
        let mut passed: Vec<Job> = Vec::new();
        for _ in 0..self.waiting.len() {
            let Some(what) = self.waiting.pop_front() else { break };
            self.ask(what, &passed, effects);
            let awaits_owner = self.awaits_owner(what);
            if self.is_busy(what) || passed.iter().any(|other| what.excludes(*other)) || !self.may_start(what)
            {
                // The owner's answer may be behind requests that would wait for the change.
                if !awaits_owner {
                    passed.push(what);
                }
                self.waiting.push_back(what);
                continue;
            }
            self.begin(what, effects);
        }
    }

    /// The first change that waits asks the owner for its range, while jobs that came before it are under way.
    fn ask(&mut self, what: Job, passed: &[Job], effects: &mut Vec<Effect>) {
        let Job::Change { change, range } = what else { return };
        let is_first = !passed.iter().any(|other| matches!(other, Job::Change { .. }));
        if is_first && self.recall.is_none() && self.owner == Owner::Connected && !self.greets {
            let number = self.number();
            self.recall = Some(Recall { number, change, done: false });
            effects.push(Effect::Recall { number, range });
        }
    }

    /// A change that the owner has not given its range up for, also because another one comes first. Requests go on meanwhile; their
    /// grants are barred.
    fn awaits_owner(&self, what: Job) -> bool {
        let Job::Change { change, .. } = what else { return false };
        let is_given_up = self.recall.is_some_and(|recall| recall.change == change && recall.done);
        self.owner == Owner::Connected && !is_given_up
    }

    /// Whether the owner holds nothing that a job changes.
    fn may_start(&mut self, what: Job) -> bool {
        let Job::Change { change, .. } = what else { return true };
        let is_over = match self.owner {
            Owner::Nobody => true,
            Owner::Silent => self.planted.has(Bug::GraceSkipped),
            Owner::Connected => self.planted.has(Bug::CloneWithoutRecall),
        };
        let recalled = self.recall.is_some_and(|recall| recall.change == change && recall.done);
        self.recall = self.recall.filter(|recall| recall.change != change || !(is_over || recalled));
        is_over || recalled
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(coordinator: &mut Coordinator, event: Event) -> (Vec<Job>, Vec<u64>) {
        let mut effects = Vec::new();
        coordinator.step(event, &mut effects);
        let job = |effect: &Effect| match effect {
            Effect::Execute { what, .. } => Some(*what),
            _ => None,
        };
        let recall = |effect: &Effect| match effect {
            Effect::Recall { number, .. } => Some(*number),
            _ => None,
        };
        (effects.iter().filter_map(job).collect(), effects.iter().filter_map(recall).collect())
    }

    fn write(id: u64) -> Event {
        let request = Request { id, kind: Kind::Write, range: (0, 10) };
        Event::Redirected { request, gives_up: (0, 10) }
    }

    /// The owner's answer can be behind requests that would wait for a change: then nothing would ever end.
    #[test]
    fn requests_wait_for_no_change_that_the_owner_has_not_agreed_to() {
        let mut coordinator = Coordinator::new(true, 10, Planted::default());
        begun(&mut coordinator, Event::OwnerFound);
        let (_, first) = begun(&mut coordinator, Event::Wanted { change: 1, range: (0, 100) });
        assert_eq!(first.len(), 1);
        assert_eq!(begun(&mut coordinator, Event::Wanted { change: 2, range: (0, 100) }), (vec![], vec![]));
        let (jobs, _) = begun(&mut coordinator, write(7));
        assert!(matches!(jobs[..], [Job::Request { .. }]), "{jobs:?}");
        let done = |job| Event::Executed { job, result: Ok(()), layout: Vec::new() };
        begun(&mut coordinator, done(2));
        // Nobody waits for the first any more: its recall is void, and the second has its own.
        let (jobs, second) = begun(&mut coordinator, Event::Unwanted(1));
        assert_eq!((jobs, second.len()), (vec![], 1));
        assert_eq!(begun(&mut coordinator, Event::RecallDone(first[0])), (vec![], vec![]));
        let (jobs, _) = begun(&mut coordinator, Event::RecallDone(second[0]));
        assert!(matches!(jobs[..], [Job::Change { change: 2, .. }]), "{jobs:?}");
        assert_eq!(begun(&mut coordinator, write(8)), (vec![], vec![]), "now they wait");
    }

    /// A copy of a disk in thousands of extents takes its time. What a read beside it has found of the layout may be from before it (I1).
    #[test]
    fn reads_go_on_beside_a_change_and_grant_nothing() {
        let mut coordinator = Coordinator::new(true, 10, Planted::default());
        begun(&mut coordinator, Event::OwnerFound);
        let (_, recalls) = begun(&mut coordinator, Event::Wanted { change: 1, range: (0, 100) });
        let (jobs, _) = begun(&mut coordinator, Event::RecallDone(recalls[0]));
        assert!(matches!(jobs[..], [Job::Change { change: 1, .. }]), "{jobs:?}");
        let request = Request { id: 7, kind: Kind::Read, range: (0, 10) };
        let (jobs, _) = begun(&mut coordinator, Event::Redirected { request, gives_up: (0, 0) });
        assert!(matches!(jobs[..], [Job::Request { .. }]), "{jobs:?}");
        assert_eq!(begun(&mut coordinator, write(8)), (vec![], vec![]), "a write waits");
        // Jobs have the numbers behind the recall's.
        let job = |number| recalls[0] + number;
        let (jobs, _) =
            begun(&mut coordinator, Event::Executed { job: job(1), result: Ok(()), layout: Vec::new() });
        assert_eq!(jobs, [], "the write overlaps the read");
        let before = Piece { start: 0, end: 10, lease: Lease::ReadWrite(0) };
        let mut effects = Vec::new();
        coordinator.step(Event::Executed { job: job(2), result: Ok(()), layout: vec![before] }, &mut effects);
        let answered = effects
            .iter()
            .any(|effect| matches!(effect, Effect::Answer { id: 7, grants, .. } if grants.is_empty()));
        assert!(answered, "{effects:?}");
    }

    /// Otherwise it could not be given up while a read hangs.
    #[test]
    fn a_change_waits_for_reads_that_have_begun_and_later_ones_for_it() {
        let mut coordinator = Coordinator::new(true, 10, Planted::default());
        begun(&mut coordinator, Event::OwnerFound);
        let read = |id| {
            let request = Request { id, kind: Kind::Read, range: (0, 10) };
            Event::Redirected { request, gives_up: (0, 0) }
        };
        assert_eq!(begun(&mut coordinator, read(1)).0.len(), 1);
        let (_, recalls) = begun(&mut coordinator, Event::Wanted { change: 1, range: (0, 100) });
        assert_eq!(begun(&mut coordinator, Event::RecallDone(recalls[0])).0, []);
        assert_eq!(begun(&mut coordinator, read(2)).0, []);
        let (jobs, _) =
            begun(&mut coordinator, Event::Executed { job: 1, result: Ok(()), layout: Vec::new() });
        assert!(matches!(jobs[..], [Job::Change { .. }, Job::Request { .. }]), "{jobs:?}");
    }
}
