//! The right to serve a disk: until when its owner may answer, and hand anything to the backing (P2, P4, P12).
//!
//! A right belongs to one disk in one tenure of an owner. Two legs keep it alive, and either is enough:
//!
//! - the *registry leg*: the node's session in the registry. A session counts for a disk only after a linearizable read of the
//!   disk's record, sent since the session began, has confirmed the owner. A session that ended may have been followed by a
//!   takeover; a new one says nothing about that.
//! - the *set leg*: grants of the committed set's members ([`GrantSet`]), and of those of every set whose proposal is in doubt.
//!   The registry is not asked, so it may be away (P12).
//!
//! Both legs count from when the owner *sent* the question. A takeover is committed only while the owner's session is absent
//! (registry leg over), then seals members of every former set and waits until the last grant that they gave has ended
//! (set leg over). [`Grants`] is the members' side.
//!
//! [`Right`] decides; it reads no clock and sends nothing. The node publishes [`Right::until`] to the disk's shard.

mod grants;
pub mod planted;
mod set;

use std::collections::BTreeMap;
use std::time::Duration;

use weir_block::Nanos;

pub use grants::{EPOCH_LEAD, GrantRefusal, Grants};
use planted::{Bug, Planted};
pub use set::{GrantSet, MAX_GUARDS};

/// A node's session in the registry, as the node itself may count on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionLease {
    /// Tells sessions apart; 0 is none.
    pub number: u64,
    /// Until when it certainly stands, with the margin taken off. 0: not at all.
    pub until: Nanos,
}

/// How long grants last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantTimes {
    /// A grant lasts so long from when the member gives it.
    pub length: Duration,
    /// The owner stops counting on it so much earlier, because clocks run at different speeds.
    pub margin: Duration,
}

/// What bears on an owner's right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The node's session is this one.
    Session(SessionLease),
    /// A linearizable read of the record, sent when `session` was the node's session, names this process as the owner in `epoch`.
    Confirmed {
        /// Its number.
        session: u64,
        /// The record's epoch.
        epoch: u64,
    },
    /// A change of the record that makes this the set is about to be sent: until it is known what became of it, both count.
    Proposed(GrantSet),
    /// The record has this set, in this epoch: by a change of this owner's, or by a read of a later revision than all that it has
    /// heard of before. A record that is as it was before says nothing about what is in doubt.
    Committed {
        /// The record's epoch.
        epoch: u64,
        /// The set.
        set: GrantSet,
    },
    /// What was proposed is certainly not committed, and will not be.
    NotCommitted,
    /// A member has granted what was asked for in `epoch` at `sent`; the answer came at `received`.
    Granted {
        /// The member.
        member: String,
        /// The epoch in the question.
        epoch: u64,
        /// When the question was sent.
        sent: Nanos,
        /// When the answer came.
        received: Nanos,
    },
    /// The change that gives the disk to another node is about to be sent.
    HandingOver,
    /// This process certainly keeps the disk: the change was refused, or an epoch of its own has been committed behind it.
    Kept,
    /// Another process owns the disk.
    Ended,
}

/// Where an owner is in its tenure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tenure {
    Serving,
    HandingOver,
    Ended,
}

/// One owner's right to one disk.
#[derive(Clone, Debug)]
pub struct Right {
    /// The first epoch of this tenure: a grant of an earlier one was given to somebody else, or to a former self.
    since: u64,
    epoch: u64,
    times: GrantTimes,
    session: SessionLease,
    /// The session for which the record has confirmed this owner.
    confirmed: u64,
    committed: GrantSet,
    doubtful: Vec<GrantSet>,
    grants: BTreeMap<String, Nanos>,
    tenure: Tenure,
    planted: Planted,
}

impl Right {
    /// The right of an owner that the record, read while `session` stood, names in `epoch` with this set.
    #[must_use]
    pub fn new(epoch: u64, set: GrantSet, session: SessionLease, times: GrantTimes) -> Right {
        Right {
            since: epoch,
            epoch,
            times,
            session,
            confirmed: session.number,
            committed: set,
            doubtful: Vec::new(),
            grants: BTreeMap::new(),
            tenure: Tenure::Serving,
            planted: Planted::default(),
        }
    }

    /// Plants a bug, so that the checks can show that they find it.
    #[cfg(feature = "planted-bugs")]
    pub fn plant(&mut self, planted: Planted) {
        self.planted = planted;
    }

    /// Takes an event into account. Returns until when the right lasts now.
    pub fn step(&mut self, event: Event) -> Nanos {
        match event {
            Event::Session(lease) => self.session = lease,
            Event::Confirmed { session, epoch } => {
                // A read that was overtaken by a change of our own says nothing that the change did not.
                if epoch >= self.since {
                    self.confirmed = session;
                }
            }
            Event::Proposed(set) => {
                if !self.doubtful.contains(&set) {
                    self.doubtful.push(set);
                }
            }
            Event::Committed { epoch, set } => {
                // A change of guards keeps the epoch, so the record as it was does not show that it will not commit.
                let is_news = epoch > self.epoch || set != self.committed;
                if epoch >= self.epoch && is_news {
                    (self.epoch, self.committed) = (epoch, set);
                    self.doubtful.clear();
                    self.forget_strangers();
                }
            }
            Event::NotCommitted => self.doubtful.clear(),
            Event::Granted { member, epoch, sent, received } => self.granted(member, epoch, sent, received),
            Event::HandingOver if self.tenure == Tenure::Serving => self.tenure = Tenure::HandingOver,
            Event::Kept if self.tenure == Tenure::HandingOver => self.tenure = Tenure::Serving,
            Event::HandingOver | Event::Kept => {}
            Event::Ended => self.tenure = Tenure::Ended,
        }
        self.until()
    }

    fn granted(&mut self, member: String, epoch: u64, sent: Nanos, received: Nanos) {
        if epoch < self.since || !self.asks().any(|asked| *asked == member) {
            return;
        }
        let from = if self.planted.has(Bug::CountFromReceipt) { received } else { sent };
        let margin = if self.planted.has(Bug::NoDriftMargin) { Duration::ZERO } else { self.times.margin };
        let until = from + self.times.length.saturating_sub(margin);
        let known = self.grants.entry(member).or_default();
        *known = until.max(*known);
    }

    fn forget_strangers(&mut self) {
        let asked: Vec<String> = self.asks().cloned().collect();
        self.grants.retain(|member, _| asked.contains(member));
    }

    /// The members that are to be asked for grants. Some may come twice.
    pub fn asks(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.committed).chain(&self.doubtful).flat_map(|set| set.members())
    }

    /// The epoch in which they are asked.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The first epoch of this tenure.
    #[must_use]
    pub fn since(&self) -> u64 {
        self.since
    }

    /// Whether the node has a session that does not count for this disk until the record is read again.
    #[must_use]
    pub fn lacks_confirmation(&self) -> bool {
        self.tenure != Tenure::Ended && self.session.number != self.confirmed && self.session.number != 0
    }

    /// Until when the disk may be served.
    #[must_use]
    pub fn until(&self) -> Nanos {
        match self.tenure {
            Tenure::Ended => Nanos(0),
            Tenure::HandingOver if !self.planted.has(Bug::ServeWhileHandingOver) => Nanos(0),
            Tenure::Serving | Tenure::HandingOver => self.registry_leg().max(self.set_leg()),
        }
    }

    fn registry_leg(&self) -> Nanos {
        let counts = self.session.number == self.confirmed || self.planted.has(Bug::TrustNewSession);
        if counts { self.session.until } else { Nanos(0) }
    }

    fn set_leg(&self) -> Nanos {
        let grant = |member: &str| self.grants.get(member).copied().unwrap_or(Nanos(0));
        let doubtful = if self.planted.has(Bug::ForgetDoubtfulSet) { &[] } else { self.doubtful.as_slice() };
        let sets = std::iter::once(&self.committed).chain(doubtful);
        sets.map(|set| set.granted_until(grant)).min().unwrap_or(Nanos(0))
    }
}

#[cfg(test)]
mod tests;
