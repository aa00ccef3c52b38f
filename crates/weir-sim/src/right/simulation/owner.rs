//! An owner: its right, the former owners that it waits for, its log and its guests.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, FormerOwner, Mode, NodeRef, Policy};
use weir_cluster::right::planted::Planted;
use weir_cluster::right::{Event as RightEvent, GrantTimes, Right, SessionLease};

use super::state::{Copy, Message, Order, Owner, Request, Version, Wait};
use super::{Event, Landing, Simulation};
use crate::right::planted::{Bug, Rule};
use crate::right::{FENCE_GRACE, GRANT, MARGIN};

const TIMES: GrantTimes = GrantTimes { length: GRANT, margin: MARGIN };
const SEAL_AGAIN: Duration = Duration::from_millis(100);
const APPEND_AGAIN: Duration = Duration::from_millis(200);

impl Owner {
    /// The members that must have a write: of the committed set and of all sets in doubt.
    pub fn needed(&self) -> impl Iterator<Item = &NodeRef> {
        let doubtful = self.proposals.iter().flat_map(|proposal| &proposal.next.replicas);
        self.record.replicas.iter().chain(
            doubtful.filter(|node| node.node != self.record.owner.as_ref().map_or("", |owner| &owner.node)),
        )
    }

    /// Whether every former owner's right is proved over.
    pub fn is_alone(&self) -> bool {
        self.waits.iter().all(|wait| wait.is_over)
    }
}

impl Simulation {
    /// The record names this process as the owner: its tenure begins.
    pub fn open(&mut self, n: usize, record: &Rc<DiskRecord>, revision: u64, session: u64) {
        let now = self.local(n);
        let node = &mut self.nodes[n];
        let confirmed = match node.session.number == session {
            true => node.session,
            false => SessionLease { number: session, until: Nanos(0) },
        };
        let mut right = Right::new(record.epoch, record.grant_set(), confirmed, TIMES);
        right.step(RightEvent::Session(node.session));
        if let Some(Bug::Core(bug)) = self.bug {
            right.plant(Planted::new(Some(bug)));
        }
        // From here on this copy accepts nothing from a former owner.
        node.log_floor = node.log_floor.max(record.epoch);
        let attempt = node.attempt.take();
        let empty = Copy { tenure: record.epoch, newest: Version::default(), freed: Version::default() };
        let copy = match record.mode {
            Mode::WriteThrough => empty,
            Mode::WriteBack => node.copy.unwrap_or(empty),
        };
        node.copy = Some(Copy { tenure: record.epoch, ..copy });
        if self.bug == Some(Bug::Shell(Rule::UnsealedCopy))
            && record.mode == Mode::WriteBack
            && let Some(Some(copy)) = attempt.as_ref().map(|attempt| attempt.copy)
        {
            node.copy = Some(Copy { tenure: record.epoch, ..copy });
        }
        let acked = if record.replicas.is_empty() { copy.newest } else { Version::default() };
        let wait = |former: &FormerOwner| Wait {
            former: former.clone(),
            sealed: BTreeMap::new(),
            is_over: former.set.is_none(),
        };
        node.owner = Some(Owner {
            right,
            since: record.epoch,
            record: Rc::clone(record),
            revision,
            waits: record.former.iter().map(wait).collect(),
            silent_at: None,
            gone_at: attempt.map_or(now, |attempt| attempt.gone_at),
            acked,
            confirms: BTreeMap::new(),
            writes: Vec::new(),
            destages: false,
            bypasses: 0,
            proposals: Vec::new(),
            proposed_at: Nanos(0),
            order: None,
            joiners: Vec::new(),
            number: 0,
            asked_grants: Nanos(0),
            asked_seals: Nanos(0),
            appended: Nanos(0),
        });
        self.note(|| format!("node {n} opens in epoch {}", record.epoch));
        self.counts.tenures += 1;
        self.own(n);
    }

    /// Another process owns the disk.
    pub fn end_tenure(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        let Some(mut owner) = node.owner.take() else { return };
        owner.right.step(RightEvent::Ended);
        node.leaving.push(owner.right.epoch());
        self.note(|| format!("node {n} ends its tenure of epoch {}", owner.since));
    }

    /// Executes an owner's due actions.
    pub fn own(&mut self, n: usize) {
        self.ask_grants(n);
        self.end_former(n);
        self.progress(n);
        self.propose(n);
        self.append_log(n, false);
        self.destage(n);
    }

    fn ask_grants(&mut self, n: usize) {
        let now = self.local(n);
        let Some(owner) = &mut self.nodes[n].owner else { return };
        if now < owner.asked_grants + GRANT / 3 {
            return;
        }
        owner.asked_grants = now;
        let mut members: Vec<String> = owner.right.asks().cloned().collect();
        members.sort_unstable();
        members.dedup();
        let epoch = owner.right.epoch();
        for member in members {
            if let Some(to) = self.index(&member) {
                self.send(n, to, None, Message::Renew { epoch, sent: now });
            }
        }
    }

    pub fn index(&self, name: &str) -> Option<usize> {
        self.nodes.iter().position(|node| node.name == name)
    }

    pub fn granted(&mut self, n: usize, from: usize, epoch: u64, sent: Nanos) {
        let (member, received) = (self.nodes[from].name.clone(), self.local(n));
        if let Some(owner) = &mut self.nodes[n].owner {
            owner.right.step(RightEvent::Granted { member, epoch, sent, received });
        }
    }

    /// Seals members of former sets, and determines which are over.
    fn end_former(&mut self, n: usize) {
        let now = self.local(n);
        let (one, no_wait) = (self.has(Rule::OneSealOfThree), self.has(Rule::NoSetWait));
        let new_set = self.has(Rule::SealNewSet);
        let node = &mut self.nodes[n];
        let (me, name) = (node.incarnation, node.name.clone());
        let (Some(owner), Some(view)) = (&mut node.owner, &node.view) else { return };
        let asks = now >= owner.asked_seals + SEAL_AGAIN;
        let (mut members, mut wake, epoch) = (Vec::new(), None, owner.right.epoch());
        for wait in owner.waits.iter_mut().filter(|wait| !wait.is_over) {
            let former = &wait.former;
            let ended =
                view.stopped.contains(&former.node.incarnation) || view.released.contains(&former.epoch);
            let Some(set) = &former.set else { continue };
            let set = if new_set { owner.record.grant_set() } else { set.clone() };
            let end = |member: &str| wait.sealed.get(member).map(|end| if no_wait { now } else { *end });
            let over = match one {
                true => set.members().iter().filter_map(|member| end(member)).min(),
                false => set.over_at(end),
            };
            wait.is_over = ended || former.node.incarnation == me || over.is_some_and(|over| over <= now);
            match over {
                Some(over) if !wait.is_over => wake = Some(over),
                Some(_) => {}
                None => members.extend(set.members().iter().cloned()),
            }
        }
        if owner.is_alone() && owner.silent_at.is_none() {
            owner.silent_at = Some(now);
            self.counts.waits += u64::from(!owner.waits.is_empty());
            self.checks.finished = self.checks.finished.max(owner.since);
            wake = Some(now + FENCE_GRACE);
        }
        if asks {
            owner.asked_seals = now;
            members.sort_unstable();
            members.dedup();
            for member in members {
                match self.index(&member) {
                    Some(to) if member != name => self.send(n, to, None, Message::Seal { epoch }),
                    _ => self.seal_self(n, epoch),
                }
            }
        }
        if let Some(wake) = wake {
            self.wake(n, wake);
        }
    }

    fn seal_self(&mut self, n: usize, epoch: u64) {
        if let Some(until) = self.seal(n, epoch) {
            self.sealed(n, n, until);
        }
    }

    pub fn sealed(&mut self, n: usize, from: usize, until: Nanos) {
        let member = self.nodes[from].name.clone();
        let Some(owner) = &mut self.nodes[n].owner else { return };
        for wait in &mut owner.waits {
            let end = wait.sealed.entry(member.clone()).or_insert(until);
            *end = until.min(*end);
        }
        self.wake(n, until);
    }

    /// Whether no former owner's I/O can be in flight.
    pub fn is_grace_over(&self, n: usize) -> bool {
        let now = self.local(n);
        let node = &self.nodes[n];
        let (Some(owner), Some(view)) = (&node.owner, &node.view) else { return false };
        let Some(silent) = owner.silent_at.filter(|_| owner.is_alone()) else { return false };
        let from = if self.has(Rule::GraceFromSessionEnd) { owner.gone_at } else { silent };
        let released = owner.waits.iter().all(|wait| view.released.contains(&wait.former.epoch));
        released || self.has(Rule::NoGrace) || now >= from + FENCE_GRACE
    }

    /// Whether writes may be acknowledged.
    pub fn is_ready(&self, n: usize) -> bool {
        let Some(owner) = &self.nodes[n].owner else { return false };
        let complete = !owner.record.replicas.is_empty() || owner.record.policy == Policy::WriteBack(0);
        match owner.record.mode {
            Mode::WriteThrough => self.is_grace_over(n),
            Mode::WriteBack => complete && (owner.is_alone() || self.has(Rule::AcknowledgeDuringWait)),
        }
    }

    /// A client sends a request to a node that considers itself the owner.
    pub fn ask_some(&mut self) {
        let owners: Vec<usize> = (0..self.nodes.len())
            .filter(|n| self.nodes[*n].alive && self.nodes[*n].owner.is_some())
            .collect();
        let Some(n) = (!owners.is_empty()).then(|| owners[self.rng.usize(..owners.len())]) else { return };
        if self.nodes[n].paused_until > self.now {
            return;
        }
        let request = Request { is_write: self.rng.bool(), newest: self.checks.seen };
        // The process paused after its check.
        let early = if self.has(Rule::CheckBeforeReceipt) { self.between(0, 600) } else { Duration::ZERO };
        let now = self.local(n);
        let Some(owner) = &self.nodes[n].owner else { return };
        let may = owner.right.until() + early > now;
        match request.is_write {
            true => self.write(n, request, may),
            false if may => self.read(n, request),
            false => {}
        }
    }

    fn read(&mut self, n: usize, request: Request) {
        let node = &self.nodes[n];
        let (Some(owner), Some(copy)) = (&node.owner, node.copy) else { return };
        let version = match owner.record.mode {
            // A write that some member lacks must not be seen yet.
            Mode::WriteBack if copy.newest > owner.acked => return,
            Mode::WriteBack if copy.newest > copy.freed => copy.newest,
            Mode::WriteThrough if !self.is_grace_over(n) => return,
            _ => self.backing,
        };
        self.counts.reads += 1;
        self.reply(n, request, version);
    }

    fn write(&mut self, n: usize, request: Request, may: bool) {
        let now = self.local(n);
        let (ready, with_bypass) = (self.is_ready(n), self.has(Rule::ProposeBesideBypass));
        let node = &mut self.nodes[n];
        let Some(owner) = &mut node.owner else { return };
        let changes = owner.proposals.iter().any(|proposal| proposal.next.mode != owner.record.mode);
        let drains = matches!(owner.order, Some(Order::Set { policy: Policy::WriteThrough, .. }));
        if !ready || (changes && !with_bypass) {
            return;
        }
        let version = Version { tenure: owner.since, number: owner.number + 1 };
        match owner.record.mode {
            Mode::WriteThrough if may && owner.bypasses == 0 => {
                (owner.number, owner.bypasses) = (version.number, 1);
                self.write_backing(n, version, Some(request));
            }
            Mode::WriteBack if !drains && owner.writes.len() < 4 => {
                owner.number = version.number;
                owner.writes.push((request, version, now));
                if let Some(copy) = &mut node.copy {
                    copy.newest = version;
                }
                self.progress(n);
                self.append_log(n, true);
            }
            _ => {}
        }
    }

    /// Sends the answer to the client, with a delay.
    fn reply(&mut self, n: usize, request: Request, version: Version) {
        let incarnation = self.nodes[n].incarnation;
        let most = if self.rng.u8(0..8) == 0 { 1_500 } else { 3 };
        let pause = self.between(0, most);
        self.after(pause, Event::Reply { node: n, incarnation, request, version });
    }

    /// Acknowledges writes that every member has (P1).
    fn progress(&mut self, n: usize) {
        let (now, ready) = (self.local(n), self.is_ready(n));
        let shrinks = self.has(Rule::ShrinkWithoutRegistry);
        let node = &mut self.nodes[n];
        let (Some(owner), Some(copy)) = (&mut node.owner, node.copy) else { return };
        if owner.record.mode == Mode::WriteThrough {
            return;
        }
        let confirmed = |node: &NodeRef| owner.confirms.get(&node.incarnation).copied().unwrap_or_default();
        let mut held = owner.needed().map(confirmed).min().unwrap_or(copy.newest).min(copy.newest);
        if shrinks
            && owner.writes.first().is_some_and(|(.., since)| now >= *since + Duration::from_millis(400))
        {
            held = copy.newest;
        }
        let needs_right = owner.needed().next().is_none() || !owner.proposals.is_empty();
        if needs_right && owner.right.until() <= now {
            return;
        }
        owner.acked = owner.acked.max(held);
        if !ready {
            return;
        }
        let (done, left) = owner.writes.drain(..).partition(|(_, version, _)| *version <= held);
        owner.writes = left;
        let done: Vec<(Request, Version, Nanos)> = done;
        for (request, version, _) in done {
            self.counts.writes += 1;
            self.reply(n, request, version);
        }
    }

    pub fn confirmed(&mut self, n: usize, sender: u64, tenure: u64, newest: Version) {
        let Some(owner) = &mut self.nodes[n].owner else { return };
        if tenure == owner.since {
            let known = owner.confirms.entry(sender).or_default();
            *known = newest.max(*known);
            self.progress(n);
        }
    }

    /// Sends the log to all members and joiners that may lack some of it.
    pub fn append_log(&mut self, n: usize, at_once: bool) {
        let now = self.local(n);
        let node = &mut self.nodes[n];
        let (Some(owner), Some(copy)) = (&mut node.owner, node.copy) else { return };
        if (!at_once && now < owner.appended + APPEND_AGAIN) || owner.right.epoch() < owner.record.epoch {
            return;
        }
        owner.appended = now;
        let (epoch, tenure) = (owner.record.epoch, owner.since);
        let mut to: Vec<NodeRef> = owner.needed().chain(&owner.joiners).cloned().collect();
        to.sort_unstable();
        to.dedup();
        for member in to {
            if let Some(index) = self.index(&member.node) {
                let Copy { newest, freed, .. } = copy;
                self.send(
                    n,
                    index,
                    Some(member.incarnation),
                    Message::Append { epoch, tenure, newest, freed },
                );
            }
        }
    }

    fn destage(&mut self, n: usize) {
        let (now, grace_over) = (self.local(n), self.is_grace_over(n));
        let with_bypass = self.has(Rule::ProposeBesideBypass);
        let node = &mut self.nodes[n];
        let (Some(owner), Some(copy)) = (&mut node.owner, node.copy) else { return };
        let moves = matches!(owner.order, Some(Order::Move { .. }));
        let idle = !owner.destages && (owner.bypasses == 0 || with_bypass) && !moves;
        let due = copy.newest > copy.freed && owner.acked == copy.newest;
        if owner.record.mode == Mode::WriteBack && grace_over && idle && due && owner.right.until() > now {
            owner.destages = true;
            self.write_backing(n, copy.newest, None);
        }
    }

    /// A write to the backing is done, and flushed.
    pub fn landed(&mut self, landing: Landing) {
        let Landing { node: n, version, request, .. } = landing;
        let node = &mut self.nodes[n];
        node.io -= 1;
        let Some(owner) = &mut node.owner else { return };
        match request {
            Some(request) if version.tenure == owner.since => {
                owner.bypasses -= 1;
                // The log begins after it: a rejoining member's earlier copy is older.
                if let Some(copy) = &mut node.copy {
                    (copy.newest, copy.freed) = (copy.newest.max(version), copy.freed.max(version));
                }
                self.counts.writes += 1;
                self.reply(n, request, version);
            }
            // Destage of this tenure may write an inherited record.
            None if owner.destages => {
                owner.destages = false;
                if let Some(copy) = &mut node.copy {
                    copy.freed = copy.freed.max(version);
                }
                self.append_log(n, true);
            }
            _ => {}
        }
        self.turn(n);
    }
}
