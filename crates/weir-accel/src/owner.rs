//! The owner's side of the protocol: what may be acknowledged, destaged and freed, and which configuration to
//! ask for. `step(now, event) -> effects`; no I/O, no clock, no randomness here.

use std::time::Duration;

use weir_block::Nanos;

use crate::config::Configuration;

/// After a peer or a change could not be had, wait this long before asking again.
const RETRY: Duration = Duration::from_millis(500);

/// The watermarks of a log: sequence numbers of the last record in each state (DESIGN §3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermarks {
    /// In the owner's log.
    pub appended: u64,
    /// In the log of every member of the set.
    pub replicated: u64,
    /// Answered, or free to be answered.
    pub acknowledged: u64,
    /// In the backing, and the backing flushed over it.
    pub destaged: u64,
    /// Gone from the log.
    pub freed: u64,
}

impl Watermarks {
    fn check(&self) {
        let Watermarks { appended, replicated, acknowledged, destaged, freed } = *self;
        assert!(
            appended >= replicated
                && replicated >= acknowledged
                && acknowledged >= destaged
                && destaged >= freed,
            "watermarks out of order: {self:?}"
        );
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The log has grown up to this record.
    Appended(u64),
    /// A connection to this node stands and it has taken our Hello.
    PeerJoined(String),
    /// A replica holds everything up to `last`.
    PeerConfirmed {
        /// Node.
        node: String,
        /// Sequence number.
        last: u64,
        /// Holds every live record up to `last`.
        complete: bool,
    },
    /// The connection to a replica is gone.
    PeerLost(String),
    /// No connection to a wanted node (or to any) can be had now.
    PeerUnavailable,
    /// The registry committed a configuration.
    Configured(Configuration),
    /// The registry did not commit what was asked for.
    NotConfigured,
    /// The requested policy changed.
    PolicyRequested(Option<usize>),
    /// The backing holds, flushed, everything up to this record.
    Destaged(u64),
    /// The former owner has no I/O under way any more (P4).
    FormerStopped,
    /// Somebody knows a higher epoch than ours (P2).
    Refused(u64),
    /// Time passed.
    Tick,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Have a connection made: to this node, or to any node but these.
    WantPeer {
        /// `None`: the control plane chooses.
        node: Option<String>,
        /// Connected already, or just lost.
        exclude: Vec<String>,
    },
    /// Have this configuration committed, if the epoch is still ours (P3).
    Propose {
        /// The epoch that the change starts from.
        epoch: u64,
        /// The new set.
        replicas: Vec<String>,
        /// The new effective mode.
        write_back: bool,
    },
    /// Close the channel to this node.
    DropPeer(String),
    /// Free the log up to this record, here and (with the next batch) on the replicas (P6).
    FreeTo(u64),
    /// We do not own the disk any more (P2).
    Fenced(u64),
    /// Tell the operator.
    Tell(&'static str, String),
}

/// A node that holds, or is getting, a copy of the log.
#[derive(Clone, Debug)]
struct Member {
    node: String,
    /// Named by the committed configuration.
    in_set: bool,
    connected: bool,
    /// Everything up to here is held by it (meaningless before `complete`).
    confirmed: u64,
    complete: bool,
    /// When it last confirmed something, or last had nothing to confirm.
    progress: Nanos,
}

/// One disk's owner.
#[derive(Clone, Debug)]
pub struct Owner {
    configuration: Configuration,
    members: Vec<Member>,
    marks: Watermarks,
    proposal: Option<(Vec<String>, bool)>,
    /// After a takeover: the last inherited record. New writes are acknowledged once the set is restored or given up.
    restoring: Option<u64>,
    former_stopped: bool,
    fenced: bool,
    peer_deadline: Duration,
    peer_wanted: bool,
    /// No node is to be had: drain, then acknowledge from the backing.
    falling: bool,
    ask_again: Nanos,
}

impl Owner {
    /// An owner of a log that holds the records after `freed` up to `last`.
    #[must_use]
    pub fn new(
        configuration: Configuration,
        freed: u64,
        last: u64,
        former_stopped: bool,
        peer_deadline: Duration,
    ) -> Owner {
        let inherited = last > freed;
        let members = configuration.replicas.iter().map(|node| Member::new(node.clone(), true)).collect();
        let short = configuration.wanted_replicas.is_some_and(|wanted| configuration.replicas.len() < wanted);
        let restoring = (configuration.write_back && (inherited || short)).then_some(last);
        Owner {
            configuration,
            members,
            marks: Watermarks {
                appended: last,
                replicated: freed,
                acknowledged: freed,
                destaged: freed,
                freed,
            },
            proposal: None,
            restoring,
            former_stopped,
            fenced: false,
            peer_deadline,
            peer_wanted: false,
            falling: false,
            ask_again: Nanos(0),
        }
    }

    /// The committed configuration.
    #[must_use]
    pub fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    /// The watermarks.
    #[must_use]
    pub fn marks(&self) -> Watermarks {
        self.marks
    }

    /// Whether this owner was told that it is none.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// Everything up to here may be written to the backing now.
    #[must_use]
    pub fn destage_limit(&self) -> u64 {
        if self.fenced || !self.former_stopped {
            return self.marks.destaged;
        }
        match (self.configuration.write_back, self.leaves_write_back()) {
            (true, false) => self.marks.acknowledged,
            (true, true) => self.marks.replicated.max(self.drain_target()),
            (false, _) => self.marks.appended,
        }
    }

    /// Whether `write-through` is where we are going. Until it is committed writes are acknowledged when the replicas
    /// *and* the backing have them; otherwise a busy guest would keep the log from ever being drained.
    fn leaves_write_back(&self) -> bool {
        self.falling || self.configuration.wanted_replicas.is_none()
    }

    /// What must be in the backing before `write-through` may be asked for. After a takeover that is all that was
    /// inherited, even if a member of the old set that could confirm it cannot be reached.
    fn drain_target(&self) -> u64 {
        let inherited = self.restoring.filter(|_| self.falling).unwrap_or(0);
        self.marks.acknowledged.max(inherited)
    }

    /// Whether somebody waits for the log to be drained.
    #[must_use]
    pub fn drains(&self) -> bool {
        !self.configuration.write_back || self.leaves_write_back()
    }

    /// Whether writes can bypass the log: acknowledged from the backing, and nothing older is on its way there (P4).
    #[must_use]
    pub fn bypasses(&self) -> bool {
        !self.fenced
            && self.former_stopped
            && !self.configuration.write_back
            && self.proposal.is_none()
            && self.marks.freed == self.marks.appended
    }

    /// In words, why a write waits; empty when nothing is unusual.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        if self.fenced {
            "another node owns the disk"
        } else if !self.former_stopped {
            "waiting until the former owner has certainly stopped; destage is held back"
        } else if self.falling {
            "no peer to replicate to: draining, then write-through"
        } else if self.restoring.is_some() {
            "restoring the replica set"
        } else if self.members.iter().any(|member| member.in_set && !member.connected) {
            "a replica is lost"
        } else if !self.configuration.write_back && self.configuration.wanted_replicas.is_some() {
            "not enough peers: effective policy is write-through"
        } else {
            ""
        }
    }

    /// Takes an event into account and appends what follows from it to `effects`.
    pub fn step(&mut self, now: Nanos, event: Event, effects: &mut Vec<Effect>) {
        if self.fenced {
            return;
        }
        match event {
            Event::Appended(last) => self.appended(now, last),
            Event::PeerJoined(node) => self.joined(now, node),
            Event::PeerConfirmed { node, last, complete } => self.confirmed(now, &node, last, complete),
            Event::PeerLost(node) => self.lost(now, &node, effects),
            Event::PeerUnavailable => self.unavailable(now, effects),
            Event::Configured(configuration) => self.configured(now, configuration, effects),
            Event::NotConfigured => {
                self.proposal = None;
                self.ask_again = now + RETRY;
            }
            Event::PolicyRequested(wanted) => {
                self.configuration.wanted_replicas = wanted;
                self.falling = false;
            }
            Event::Destaged(to) => self.destaged(to, effects),
            Event::FormerStopped => self.former_stopped = true,
            Event::Refused(epoch) => {
                if epoch >= self.configuration.epoch {
                    self.fenced = true;
                    effects.push(Effect::Fenced(epoch));
                    return;
                }
            }
            Event::Tick => self.expire(now, effects),
        }
        self.acknowledge();
        self.decide(now, effects);
        self.marks.check();
    }

    /// When [`Event::Tick`] is due.
    #[must_use]
    pub fn deadline(&self) -> Nanos {
        let waiting =
            self.members.iter().filter(|member| member.in_set && member.is_behind(self.marks.appended));
        let slowest =
            waiting.map(|member| member.progress + self.peer_deadline).min().unwrap_or(Nanos::NEVER);
        let retry = if self.ask_again == Nanos(0) { Nanos::NEVER } else { self.ask_again };
        slowest.min(retry)
    }

    fn appended(&mut self, now: Nanos, last: u64) {
        for member in &mut self.members {
            if !member.is_behind(self.marks.appended) {
                member.progress = now;
            }
        }
        self.marks.appended = last;
    }

    fn joined(&mut self, now: Nanos, node: String) {
        self.peer_wanted = false;
        let member = match self.members.iter_mut().find(|member| member.node == node) {
            Some(member) => member,
            None => {
                self.members.push(Member::new(node, false));
                self.members.last_mut().expect("just pushed")
            }
        };
        // It may have restarted and lost everything: only what it confirms on this connection counts.
        *member = Member {
            connected: true,
            progress: now,
            ..Member::new(std::mem::take(&mut member.node), member.in_set)
        };
    }

    fn confirmed(&mut self, now: Nanos, node: &str, last: u64, complete: bool) {
        let last = last.min(self.marks.appended);
        if let Some(member) = self.members.iter_mut().find(|member| member.node == node) {
            if last > member.confirmed || !member.is_behind(self.marks.appended) {
                member.progress = now;
            }
            member.confirmed = member.confirmed.max(last);
            member.complete |= complete;
        }
    }

    fn lost(&mut self, now: Nanos, node: &str, effects: &mut Vec<Effect>) {
        let Some(place) = self.members.iter().position(|member| member.node == node) else {
            // It went before it had joined: as good as not there.
            effects.push(Effect::DropPeer(node.to_owned()));
            return self.unavailable(now, effects);
        };
        let needed = self.is_needed(&self.members[place]);
        let member = &mut self.members[place];
        if !member.connected {
            effects.push(Effect::DropPeer(node.to_owned()));
            return self.unavailable(now, effects);
        }
        member.connected = false;
        member.complete = false;
        effects.push(Effect::DropPeer(node.to_owned()));
        if needed {
            effects.push(Effect::Tell("replica-lost", format!("replica on {node} is lost")));
        } else {
            self.members.remove(place);
        }
        self.peer_wanted = false;
    }

    fn unavailable(&mut self, now: Nanos, effects: &mut Vec<Effect>) {
        self.peer_wanted = false;
        self.ask_again = now + RETRY;
        if self.configuration.write_back && !self.falling && self.is_stuck() {
            self.falling = true;
            effects.push(Effect::Tell(
                "policy-falling",
                "no peer to be had: draining, then write-through".into(),
            ));
        }
    }

    fn configured(&mut self, now: Nanos, configuration: Configuration, effects: &mut Vec<Effect>) {
        if configuration.epoch < self.configuration.epoch {
            return;
        }
        let before = self.configuration.effective();
        self.proposal = None;
        self.configuration = configuration;
        for node in &self.configuration.replicas {
            if !self.members.iter().any(|member| member.node == *node) {
                self.members.push(Member::new(node.clone(), true));
            }
        }
        for member in &mut self.members {
            member.in_set = self.configuration.replicas.contains(&member.node);
            member.progress = now;
        }
        self.members.retain(|member| {
            let keep = member.in_set || member.connected;
            if !keep {
                effects.push(Effect::DropPeer(member.node.clone()));
            }
            keep
        });
        let enough = self
            .configuration
            .wanted_replicas
            .is_none_or(|wanted| self.configuration.replicas.len() >= wanted);
        if !self.configuration.write_back || enough {
            self.restoring = None;
            self.falling = false;
        }
        let after = self.configuration.effective();
        if before != after {
            effects
                .push(Effect::Tell("policy-effective", format!("effective policy is {after}, was {before}")));
        }
    }

    fn destaged(&mut self, to: u64, effects: &mut Vec<Effect>) {
        assert!(to <= self.marks.appended, "destaged {to} of {}", self.marks.appended);
        // In the backing, flushed: this is what write-through acknowledges from (P1).
        self.marks.replicated = self.marks.replicated.max(to);
        self.marks.acknowledged = self.marks.acknowledged.max(to);
        self.marks.destaged = self.marks.destaged.max(to);
        self.marks.freed = self.marks.destaged;
        for member in &mut self.members {
            // A record that was freed need not be held by anybody.
            member.confirmed = member.confirmed.max(self.marks.freed);
        }
        effects.push(Effect::FreeTo(self.marks.freed));
    }

    fn expire(&mut self, now: Nanos, effects: &mut Vec<Effect>) {
        let slow: Vec<String> = self
            .members
            .iter()
            .filter(|member| member.connected && member.is_behind(self.marks.appended))
            .filter(|member| now >= member.progress + self.peer_deadline)
            .map(|member| member.node.clone())
            .collect();
        for node in slow {
            effects.push(Effect::Tell("replica-slow", format!("replica on {node} missed its deadline")));
            self.lost(now, &node, effects);
        }
    }

    /// Whether acknowledging needs this member: it is in the committed set or in the one that may be committed at
    /// any moment (P3).
    fn is_needed(&self, member: &Member) -> bool {
        let proposed = |(replicas, _): &(Vec<String>, bool)| replicas.contains(&member.node);
        member.in_set || self.proposal.as_ref().is_some_and(proposed)
    }

    fn acknowledge(&mut self) {
        if !self.configuration.write_back {
            return;
        }
        let needed = self.members.iter().filter(|member| self.is_needed(member));
        let everywhere = needed.map(|member| member.confirmed).min().unwrap_or(self.marks.appended);
        let limit = self.restoring.unwrap_or(u64::MAX);
        let safe = everywhere.min(self.marks.appended).min(limit);
        self.marks.replicated = self.marks.replicated.max(safe);
        if !self.leaves_write_back() {
            self.marks.acknowledged = self.marks.acknowledged.max(safe);
        }
    }

    /// Whether acknowledging has come to a stop that only a change of configuration ends.
    fn is_stuck(&self) -> bool {
        self.restoring.is_some() || self.members.iter().any(|member| member.in_set && !member.connected)
    }

    /// Whether the configuration is as requested and everybody is there.
    fn is_settled(&self) -> bool {
        let Configuration { replicas, write_back, wanted_replicas, .. } = &self.configuration;
        match wanted_replicas {
            None => !write_back && self.members.is_empty(),
            Some(wanted) => {
                *write_back
                    && replicas.len() == *wanted
                    && self.restoring.is_none()
                    && self.members.len() == *wanted
                    && self.members.iter().all(|member| member.in_set && member.connected)
            }
        }
    }

    fn decide(&mut self, now: Nanos, effects: &mut Vec<Effect>) {
        if self.proposal.is_some() || self.is_settled() || now < self.ask_again {
            return;
        }
        self.ask_again = Nanos(0);
        match self.configuration.wanted_replicas {
            None => self.leave_write_back(effects),
            Some(wanted) => self.gather(wanted, effects),
        }
    }

    /// Towards write-through: drain what was acknowledged, then change (DESIGN §4).
    fn leave_write_back(&mut self, effects: &mut Vec<Effect>) {
        if self.configuration.write_back {
            if self.marks.destaged >= self.drain_target() {
                self.propose(Vec::new(), false, effects);
            }
            return;
        }
        for member in self.members.drain(..) {
            effects.push(Effect::DropPeer(member.node));
        }
    }

    /// Towards `write-back+wanted`.
    fn gather(&mut self, wanted: usize, effects: &mut Vec<Effect>) {
        let mut ready: Vec<(bool, String)> = self
            .members
            .iter()
            .filter(|member| {
                member.connected && member.complete && member.confirmed >= self.marks.acknowledged
            })
            .map(|member| (!member.in_set, member.node.clone()))
            .collect();
        ready.sort();
        if ready.len() >= wanted {
            let chosen: Vec<String> = ready.into_iter().take(wanted).map(|(_, node)| node).collect();
            return self.settle_on(chosen, effects);
        }
        let absent = self.members.iter().find(|member| member.in_set && !member.connected);
        let connected = self.members.iter().filter(|member| member.connected).count();
        if connected < wanted && !self.peer_wanted {
            self.peer_wanted = true;
            // After a takeover the members of the old set come first: their copies need no filling.
            let node = absent
                .filter(|_| self.restoring.is_some() && !self.falling)
                .map(|member| member.node.clone());
            let exclude = self.members.iter().map(|member| member.node.clone()).collect();
            effects.push(Effect::WantPeer { node, exclude });
        }
        if self.falling && self.configuration.write_back && self.marks.destaged >= self.drain_target() {
            self.propose(Vec::new(), false, effects);
        }
    }

    fn settle_on(&mut self, chosen: Vec<String>, effects: &mut Vec<Effect>) {
        let mut current = self.configuration.replicas.clone();
        current.sort();
        let mut sorted = chosen.clone();
        sorted.sort();
        if self.configuration.write_back && sorted == current {
            // The set is what it should be; whoever else is connected is not needed.
            self.restoring = None;
            self.falling = false;
            self.members.retain(|member| {
                if !member.in_set {
                    effects.push(Effect::DropPeer(member.node.clone()));
                }
                member.in_set
            });
            self.acknowledge();
        } else {
            self.propose(chosen, true, effects);
        }
    }

    fn propose(&mut self, replicas: Vec<String>, write_back: bool, effects: &mut Vec<Effect>) {
        self.proposal = Some((replicas.clone(), write_back));
        effects.push(Effect::Propose { epoch: self.configuration.epoch, replicas, write_back });
    }
}

impl Member {
    fn new(node: String, in_set: bool) -> Member {
        Member { node, in_set, connected: false, confirmed: 0, complete: false, progress: Nanos(0) }
    }

    fn is_behind(&self, appended: u64) -> bool {
        self.connected && self.confirmed < appended
    }
}
