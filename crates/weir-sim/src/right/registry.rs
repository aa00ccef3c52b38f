//! The registry: one linearizable record, and sessions that end by its clock.

use std::collections::BTreeSet;
use std::rc::Rc;

use weir_block::Nanos;
use weir_cluster::records::{DiskRecord, NodeRef};

use super::TTL;
use super::clock::Clock;

/// A node's call to the registry.
#[derive(Clone, Debug)]
pub enum Question {
    /// A new session for this process.
    Register,
    /// Renews the session.
    KeepAlive(u64),
    /// Reads the record and the sessions.
    Read,
    /// Compare and swap.
    Change(Change),
    /// The owner of that epoch has no more I/O in flight and has stopped serving.
    Release(u64),
}

/// A compare-and-swap.
#[derive(Clone, Debug)]
pub struct Change {
    /// The revision that the record must have.
    pub base: u64,
    /// The caller's session, which must be valid.
    pub session: u64,
    /// The process whose session must be absent.
    pub absent: Option<NodeRef>,
    /// The record to put.
    pub next: Rc<DiskRecord>,
}

/// The result of a read.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The record.
    pub record: Rc<DiskRecord>,
    /// Its revision.
    pub revision: u64,
    /// Processes with a session.
    pub live: Vec<NodeRef>,
    /// Processes that are known to have ended.
    pub stopped: Rc<BTreeSet<u64>>,
    /// Epochs whose owners have released the disk.
    pub released: Rc<BTreeSet<u64>>,
}

/// The registry's answer.
#[derive(Clone, Debug)]
pub enum Answer {
    /// A session of this number.
    Session(u64),
    /// No such session, or another process has the name.
    NoSession,
    /// The result of a read.
    Seen(Box<Seen>),
    /// The change has committed, with this revision.
    Committed(u64),
    /// The comparison failed.
    Refused,
    /// Recorded.
    Released,
}

#[derive(Clone, Debug)]
struct Session {
    process: NodeRef,
    number: u64,
    until: Nanos,
}

/// The registry.
#[derive(Debug)]
pub struct Registry {
    pub record: Rc<DiskRecord>,
    /// The epoch in which the owner became the owner.
    pub tenure: u64,
    pub clock: Clock,
    pub stopped: Rc<BTreeSet<u64>>,
    revision: u64,
    sessions: Vec<Session>,
    numbers: u64,
    released: Rc<BTreeSet<u64>>,
}

impl Registry {
    pub fn new(record: DiskRecord, clock: Clock) -> Registry {
        Registry {
            record: Rc::new(record),
            tenure: 0,
            clock,
            stopped: Rc::default(),
            revision: 1,
            sessions: Vec::new(),
            numbers: 0,
            released: Rc::default(),
        }
    }

    pub fn answer(&mut self, real: Nanos, from: &NodeRef, question: Question) -> Answer {
        let now = self.clock.at(real);
        self.sessions.retain(|session| session.until > now);
        match question {
            Question::Register => {
                if self.sessions.iter().any(|held| held.process.node == from.node && held.process != *from) {
                    return Answer::NoSession;
                }
                self.sessions.retain(|session| session.process != *from);
                self.numbers += 1;
                self.sessions.push(Session { process: from.clone(), number: self.numbers, until: now + TTL });
                Answer::Session(self.numbers)
            }
            Question::KeepAlive(number) => {
                match self.sessions.iter_mut().find(|held| held.number == number) {
                    Some(session) => {
                        session.until = now + TTL;
                        Answer::Session(number)
                    }
                    None => Answer::NoSession,
                }
            }
            Question::Read => Answer::Seen(Box::new(Seen {
                record: Rc::clone(&self.record),
                revision: self.revision,
                live: self.sessions.iter().map(|session| session.process.clone()).collect(),
                stopped: Rc::clone(&self.stopped),
                released: Rc::clone(&self.released),
            })),
            Question::Change(change) => self.change(change),
            Question::Release(epoch) => {
                Rc::make_mut(&mut self.released).insert(epoch);
                Answer::Released
            }
        }
    }

    fn change(&mut self, change: Change) -> Answer {
        let Change { base, session, absent, next } = change;
        let stands = self.sessions.iter().any(|held| held.number == session);
        let present = absent.is_some_and(|process| self.sessions.iter().any(|held| held.process == process));
        if base != self.revision || !stands || present {
            return Answer::Refused;
        }
        if next.owner != self.record.owner {
            self.tenure = next.epoch;
        }
        self.revision += 1;
        self.record = next;
        Answer::Committed(self.revision)
    }
}
