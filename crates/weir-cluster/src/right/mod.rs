//! The right to serve a disk: the time until which its owner may answer requests and submit I/O to the backing (P2, P4, P12).
//!
//! A right belongs to one disk in one tenure of an owner. Two legs uphold it, and either is sufficient:
//!
//! - the *registry leg*: the node's session in the registry. A session counts for a disk only after a linearizable read of the
//!   disk's record, sent since the session began, has confirmed the owner. A takeover may have followed an ended session; a new
//!   session does not show that.
//! - the *set leg*: grants of the committed set's members ([`GrantSet`]), and of those of every set whose proposal is in doubt.
//!   This leg does not use the registry, which may be away (P12).
//!
//! Both legs count from the time at which the owner *sent* the request. A takeover commits only while the owner's session is
//! absent (registry leg over), then seals members of every former set and waits until their last grants have ended (set leg
//! over). [`Grants`] is the members' side.
//!
//! [`Right`] only decides: it reads no clock and sends nothing. The node publishes [`Right::until`] to the disk's shard.

mod grants;
pub mod planted;
mod set;

use std::collections::BTreeMap;
use std::time::Duration;

use weir_block::Nanos;

pub use grants::{EPOCH_LEAD, GrantRefusal, Grants};
use planted::{Bug, Planted};
pub use set::{GrantSet, MAX_GUARDS};

/// A node's session in the registry, as far as the node may rely on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionLease {
    /// The session's number; 0 is none.
    pub number: u64,
    /// Its guaranteed deadline, less the margin. 0: none.
    pub until: Nanos,
}

/// Durations of grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantTimes {
    /// Duration from the member's grant.
    pub length: Duration,
    /// The owner stops relying on it this much earlier, to allow for clock drift.
    pub margin: Duration,
}

/// An event that affects an owner's right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The node has this session.
    Session(SessionLease),
    /// A linearizable read of the record, sent when `session` was the node's session, names this process as the owner in `epoch`.
    Confirmed {
        /// The session's number.
        session: u64,
        /// The record's epoch.
        epoch: u64,
    },
    /// The owner is about to send a change of the record to this set: until its outcome is known, both sets count.
    Proposed(GrantSet),
    /// The record has this set in this epoch: by a change of this owner, or by a read of a later revision than any before. An
    /// unchanged record does not resolve a doubt.
    Committed {
        /// The record's epoch.
        epoch: u64,
        /// The set.
        set: GrantSet,
    },
    /// The proposal certainly did not commit, and will not.
    NotCommitted,
    /// A member has granted a request sent at `sent` in `epoch`; the answer came at `received`.
    Granted {
        /// The member.
        member: String,
        /// The request's epoch.
        epoch: u64,
        /// Send time of the request.
        sent: Nanos,
        /// Arrival time of the answer.
        received: Nanos,
    },
    /// The owner is about to send the change that gives the disk to another node.
    HandingOver,
    /// This process certainly keeps the disk: the change was refused, or a later epoch of its own has been committed.
    Kept,
    /// Another process owns the disk.
    Ended,
}

/// The phase of an owner's tenure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tenure {
    Serving,
    HandingOver,
    Ended,
}

/// One owner's right to one disk.
#[derive(Clone, Debug)]
pub struct Right {
    /// The first epoch of this tenure: an earlier grant belongs to another owner or an earlier tenure.
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
    /// The right of the owner in `epoch` with `set`, by a record read during `session`.
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

    /// Applies an event. Returns the right's new deadline.
    pub fn step(&mut self, event: Event) -> Nanos {
        match event {
            Event::Session(lease) => self.session = lease,
            Event::Confirmed { session, epoch } => {
                // A read older than our own change adds nothing.
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
                // A change of guards keeps the epoch, so an unchanged record does not show that it will not commit.
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

    /// The members to ask for grants. May contain duplicates.
    pub fn asks(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.committed).chain(&self.doubtful).flat_map(|set| set.members())
    }

    /// The epoch of the requests.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The first epoch of this tenure.
    #[must_use]
    pub fn since(&self) -> u64 {
        self.since
    }

    /// Whether the node's session needs a read of the record before it counts for this disk.
    #[must_use]
    pub fn lacks_confirmation(&self) -> bool {
        self.tenure != Tenure::Ended && self.session.number != self.confirmed && self.session.number != 0
    }

    /// The time until which the owner may serve the disk.
    #[must_use]
    pub fn until(&self) -> Nanos {
        match self.tenure {
            Tenure::Ended => Nanos(0),
            Tenure::HandingOver if !self.planted.has(Bug::ServeWhileHandingOver) => Nanos(0),
            Tenure::Serving | Tenure::HandingOver => self.registry_leg().max(self.set_leg()),
        }
    }

    /// Whether the grants of its set uphold the right at `now`, with or without the registry.
    #[must_use]
    pub fn is_granted(&self, now: Nanos) -> bool {
        self.tenure == Tenure::Serving && self.set_leg() > now
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
