//! A process: its session, its view of the record, and its role as a member of sets.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::ownership::{Gone, OwnerGone, take_over};
use weir_cluster::records::{DiskRecord, Mode, NodeRef};
use weir_cluster::right::planted::Planted;
use weir_cluster::right::{Event as RightEvent, Grants, SessionLease};

use super::Simulation;
use super::state::{Copy, Message, Owner, Version};
use crate::right::clock::Clock;
use crate::right::planted::{Bug, Rule};
use crate::right::registry::{Answer, Change, Question, Seen};
use crate::right::{DISK, GRANT, MARGIN, TTL};

#[derive(Clone, Debug)]
enum Purpose {
    Session,
    Read,
    TakeOver,
    Change,
    Other,
}

/// A requested takeover.
#[derive(Clone, Debug)]
pub struct Attempt {
    pub copy: Option<Copy>,
    pub gone_at: Nanos,
}

#[derive(Clone, Debug)]
struct Asked {
    purpose: Purpose,
    sent: Nanos,
    session: u64,
    /// The proposed record.
    next: Option<Rc<DiskRecord>>,
}

/// One process of a node.
pub struct Node {
    pub name: String,
    pub me: NodeRef,
    pub incarnation: u64,
    pub alive: bool,
    pub paused_until: Nanos,
    pub clock: Clock,
    pub session: SessionLease,
    pub owner: Option<Owner>,
    pub copy: Option<Copy>,
    /// The lowest epoch from which the log takes records.
    pub log_floor: u64,
    /// Writes to the backing in flight.
    pub io: u32,
    pub view: Option<Seen>,
    pub attempt: Option<Attempt>,
    pub wants_read: bool,
    /// Epochs that it has ended and not reported.
    pub leaving: Vec<u64>,
    grants: Grants,
    /// The record's epoch, read since the start.
    known: Option<u64>,
    revision: u64,
    asked: BTreeMap<u64, Asked>,
    asked_session: Nanos,
    asked_read: Nanos,
    attempted: Nanos,
}

const RETRY: Duration = Duration::from_millis(120);
const READ_EVERY: Duration = Duration::from_millis(350);

impl Node {
    pub fn new(me: NodeRef, clock: Clock, now: Nanos, bug: Option<Bug>) -> Node {
        let mut grants = Grants::new(clock.at(now), GRANT);
        if let Some(Bug::Core(bug)) = bug {
            grants.plant(Planted::new(Some(bug)));
        }
        Node {
            name: me.node.clone(),
            incarnation: me.incarnation,
            me,
            alive: true,
            paused_until: Nanos(0),
            clock,
            session: SessionLease::default(),
            owner: None,
            copy: None,
            log_floor: 0,
            io: 0,
            view: None,
            attempt: None,
            wants_read: true,
            leaving: Vec::new(),
            grants,
            known: None,
            revision: 0,
            asked: BTreeMap::new(),
            asked_session: Nanos(0),
            asked_read: Nanos(0),
            attempted: Nanos(0),
        }
    }
}

impl Simulation {
    pub fn local(&self, node: usize) -> Nanos {
        self.nodes[node].clock.at(self.now)
    }

    /// Executes all due actions.
    pub fn turn(&mut self, n: usize) {
        let now = self.local(n);
        let node = &self.nodes[n];
        let pause = if node.session.number == 0 { RETRY } else { TTL / 3 };
        if now >= node.asked_session + pause {
            let question = match node.session.number {
                0 => Question::Register,
                number => Question::KeepAlive(number),
            };
            self.nodes[n].asked_session = now;
            self.ask(n, question, Purpose::Session);
        }
        let node = &self.nodes[n];
        if now >= node.asked_read + if node.wants_read { RETRY } else { READ_EVERY } {
            (self.nodes[n].asked_read, self.nodes[n].wants_read) = (now, false);
            self.ask(n, Question::Read, Purpose::Read);
        }
        if self.nodes[n].io == 0
            && let Some(epoch) = self.nodes[n].leaving.pop()
        {
            self.ask(n, Question::Release(epoch), Purpose::Other);
        }
        if self.nodes[n].owner.is_some() {
            self.own(n);
        }
    }

    fn ask(&mut self, n: usize, question: Question, purpose: Purpose) -> u64 {
        let (sent, session) = (self.local(n), self.nodes[n].session.number);
        let next = match &question {
            Question::Change(change) => Some(Rc::clone(&change.next)),
            _ => None,
        };
        let id = self.ask_registry(n, question);
        self.nodes[n].asked.insert(id, Asked { purpose, sent, session, next });
        id
    }

    /// Sends a compare-and-swap of the owner's.
    pub fn change(&mut self, n: usize, base: u64, next: Rc<DiskRecord>) -> u64 {
        let session = self.nodes[n].session.number;
        let change = Change { base, session, absent: None, next };
        self.ask(n, Question::Change(change), Purpose::Change)
    }

    pub fn hear_registry(&mut self, n: usize, id: u64, answer: Answer) {
        let Some(Asked { purpose, sent, session, next }) = self.nodes[n].asked.remove(&id) else { return };
        match (purpose, answer, next) {
            (Purpose::Session, Answer::Session(number), _) => self.session(n, number, sent),
            (Purpose::Session, _, _) if session != 0 && session == self.nodes[n].session.number => {
                self.set_session(n, SessionLease::default());
            }
            (Purpose::Read, Answer::Seen(seen), _) => self.saw(n, session, *seen),
            (Purpose::TakeOver | Purpose::Change, Answer::Committed(revision), Some(next)) => {
                self.adopt(n, &next, revision, session);
            }
            (Purpose::Change, Answer::Refused, _) => self.refused(n, id),
            (Purpose::TakeOver, _, _) => self.nodes[n].wants_read = true,
            _ => {}
        }
        self.turn(n);
    }

    fn session(&mut self, n: usize, number: u64, sent: Nanos) {
        let until = sent + (TTL - MARGIN);
        let held = self.nodes[n].session;
        if number == held.number {
            self.set_session(n, SessionLease { number, until: until.max(held.until) });
        } else if number > held.number {
            self.note(|| format!("node {n} has session {number}"));
            let is_confirmed = self.has(Rule::ConfirmByGrants);
            self.set_session(n, SessionLease { number, until });
            let now = self.local(n);
            if is_confirmed
                && let Some(owner) = &mut self.nodes[n].owner
                && owner.right.until() > now
            {
                owner.right.step(RightEvent::Confirmed { session: number, epoch: owner.right.epoch() });
            }
            self.nodes[n].wants_read = true;
        }
    }

    fn set_session(&mut self, n: usize, lease: SessionLease) {
        let node = &mut self.nodes[n];
        node.session = lease;
        if let Some(owner) = &mut node.owner {
            owner.right.step(RightEvent::Session(lease));
        }
    }

    /// A linearizable read, sent during `session`.
    fn saw(&mut self, n: usize, session: u64, seen: Seen) {
        let session = if self.has(Rule::ReadBeforeSession) { self.nodes[n].session.number } else { session };
        let (record, revision) = (Rc::clone(&seen.record), seen.revision);
        let node = &mut self.nodes[n];
        node.known = Some(node.known.unwrap_or(0).max(record.epoch));
        if revision >= node.revision {
            node.view = Some(seen);
        }
        self.adopt(n, &record, revision, session);
        self.consider_takeover(n);
    }

    /// Applies the record, from a read or from this process's own change.
    fn adopt(&mut self, n: usize, record: &Rc<DiskRecord>, revision: u64, session: u64) {
        let node = &mut self.nodes[n];
        let mine = record.owner.as_ref() == Some(&node.me);
        let newest = revision >= node.revision;
        node.revision = node.revision.max(revision);
        node.known = node.known.map(|known| known.max(record.epoch));
        match &node.owner {
            Some(owner) if mine && record.epoch >= owner.since => {
                self.reconfigure(n, record, revision, session)
            }
            Some(owner) if !mine && revision > owner.revision => self.end_tenure(n),
            None if mine && newest => self.open(n, record, revision, session),
            _ => {}
        }
    }

    fn consider_takeover(&mut self, n: usize) {
        let now = self.local(n);
        let node = &self.nodes[n];
        let Some(seen) = &node.view else { return };
        let Some(former) = seen.record.owner.clone() else { return self.claim(n) };
        let may = node.owner.is_none() && node.session.number != 0 && now >= node.attempted + RETRY;
        if !may || former == node.me || seen.live.contains(&former) {
            return;
        }
        let evidence = OwnerGone { owner: former.clone(), how: Gone::LeaseEnded };
        let Ok(mut next) = take_over(&seen.record, &node.me, &evidence) else { return };
        if seen.record.mode == Mode::WriteBack && node.copy.is_none() || self.rng.u8(0..3) == 0 {
            return;
        }
        if self.has(Rule::FormerSetDropped) {
            let earlier = next.former.len() - 1;
            next.former[..earlier].iter_mut().for_each(|former| former.set = None);
        }
        let node = &mut self.nodes[n];
        let Some(seen) = &node.view else { return };
        node.attempted = now;
        node.attempt = Some(Attempt { copy: node.copy, gone_at: now });
        let absent = (self.bug != Some(Bug::Shell(Rule::SessionNotCompared))).then_some(former);
        let change =
            Change { base: seen.revision, session: node.session.number, absent, next: Rc::new(next) };
        self.note(|| format!("node {n} takes over"));
        self.counts.takeovers += 1;
        self.ask(n, Question::Change(change), Purpose::TakeOver);
    }

    fn claim(&mut self, n: usize) {
        let node = &self.nodes[n];
        let Some(seen) = &node.view else { return };
        let (session, base) = (node.session.number, seen.revision);
        if session != 0
            && let Ok(next) = weir_cluster::ownership::claim_free(&seen.record, &node.me)
        {
            let change = Change { base, session, absent: None, next: Rc::new(next) };
            self.ask(n, Question::Change(change), Purpose::Change);
        }
    }

    pub fn hear_peer(&mut self, from: usize, sender: u64, n: usize, message: Message) {
        let now = self.local(n);
        let reply = |simulation: &mut Simulation, message| simulation.send(n, from, Some(sender), message);
        match message {
            Message::Renew { epoch, sent } => match self.renew(n, epoch, now) {
                true => reply(self, Message::Granted { epoch, sent }),
                false => reply(self, Message::Refused),
            },
            Message::Seal { epoch } => match self.seal(n, epoch) {
                Some(until) => reply(self, Message::Sealed { remaining: until - now }),
                None => reply(self, Message::Refused),
            },
            Message::Append { epoch, tenure, newest, freed } => {
                match self.append(n, epoch, Copy { tenure, newest, freed }) {
                    Some(newest) => reply(self, Message::Confirm { tenure, newest }),
                    None => reply(self, Message::Refused),
                }
            }
            Message::Refused => self.nodes[n].wants_read = true,
            Message::Granted { epoch, sent } => self.granted(n, from, epoch, sent),
            Message::Sealed { remaining } => self.sealed(n, from, now + remaining),
            Message::Confirm { tenure, newest } => self.confirmed(n, sender, tenure, newest),
        }
    }

    fn renew(&mut self, n: usize, epoch: u64, now: Nanos) -> bool {
        let believes = self.has(Rule::GrantBeforeRead);
        let node = &mut self.nodes[n];
        let known = if believes { node.known.or(Some(epoch)) } else { node.known };
        let granted = node.grants.renew(now, DISK, epoch, GRANT, known).is_ok();
        node.wants_read |= !granted;
        self.counts.grants += u64::from(granted);
        if granted {
            self.checks.grant(n, epoch);
        }
        granted
    }

    /// Ends all earlier epochs here. Returns the end of their last grant, by this node's clock.
    pub fn seal(&mut self, n: usize, epoch: u64) -> Option<Nanos> {
        let now = self.local(n);
        let node = &mut self.nodes[n];
        let sealed = node.grants.seal(now, DISK, epoch, node.known);
        node.wants_read |= sealed.is_err();
        let until = sealed.ok()?;
        node.log_floor = node.log_floor.max(epoch);
        self.counts.seals += 1;
        self.checks.seal(n, epoch);
        Some(until)
    }

    fn append(&mut self, n: usize, epoch: u64, log: Copy) -> Option<Version> {
        let node = &mut self.nodes[n];
        if node.owner.is_some() || epoch < node.log_floor || node.known.is_none_or(|known| epoch < known) {
            node.wants_read = true;
            return None;
        }
        node.log_floor = epoch;
        let copy = match node.copy {
            Some(copy) if copy.tenure == log.tenure => {
                Copy { newest: copy.newest.max(log.newest), freed: copy.freed.max(log.freed), ..copy }
            }
            _ => log,
        };
        node.copy = Some(copy);
        Some(copy.newest)
    }
}
