//! The owner's side of the protocol: the records that may be acknowledged, destaged and freed, and the configuration to
//! propose. `step(now, event) -> effects`; no I/O, no clock, no randomness here.

mod local_copy;
mod member;
mod messages;
mod placement;
mod proposals;
mod set;
#[cfg(test)]
mod tests;

use std::time::Duration;

use weir_block::Nanos;

use crate::config::{Configuration, Former};
use crate::planted::{Bug, Planted};
use local_copy::LocalCopy;
use member::Member;
pub use messages::{Effect, Event, Held, Watermarks};
use proposals::Proposals;

/// After a peer or a change could not be had, wait this long before asking again.
const RETRY: Duration = Duration::from_millis(500);

/// One disk's owner.
#[derive(Clone, Debug)]
pub struct Owner {
    configuration: Configuration,
    members: Vec<Member>,
    local_copy: LocalCopy,
    marks: Watermarks,
    /// In the backing, flushed, up to here. No reader has seen the records between `marks.destaged` and this, and none must
    /// yet: a copy that may be taken over from lacks them, and its older records would cover them (P4, P7).
    in_backing: u64,
    /// The last record that was there when this owner began: the former owner may have acknowledged it.
    inherited: u64,
    /// After a takeover: new writes are acknowledged once the set is restored or given up.
    restoring: bool,
    /// Records up to here are older than a write that went past the log: a node that still holds one must not take over.
    bypassed_at: u64,
    proposals: Proposals,
    former: Former,
    /// The disk came here without a log, so that the backing alone answers reads: the former owner's writes must have ended.
    reads_wait: bool,
    /// The node that has reported the end of this owner, until the registry is asked.
    fenced: Option<String>,
    peer_deadline: Duration,
    peer_wanted: bool,
    /// No node was available when one was last asked for.
    lacks_peer: bool,
    /// If a peer is wanted next time, ask for the member of the set that is away.
    ask_absent: bool,
    /// Nodes that accepted a connection and did not become members, since the last time that no other node was available.
    avoid: Vec<String>,
    /// No node is available: drain, then acknowledge from the backing.
    falling: bool,
    /// The next owner: a member of the set before it becomes the owner.
    successor: Option<String>,
    /// The core requests nothing from the control plane before these times; zero: it may do so now.
    ask_peer_at: Nanos,
    propose_at: Nanos,
    planted: Planted,
}

impl Owner {
    /// An owner of a log that holds the records after `freed` up to `last`.
    #[must_use]
    pub fn new(
        configuration: Configuration,
        freed: u64,
        last: u64,
        former: Former,
        peer_deadline: Duration,
    ) -> Owner {
        let members = configuration.replicas.iter().map(|node| Member::new(node.clone(), true)).collect();
        let short = configuration.wanted_replicas.is_some_and(|wanted| configuration.replicas.len() < wanted);
        let reads_wait = !configuration.write_back;
        let restoring = configuration.write_back && (last > freed || short);
        Owner {
            configuration,
            members,
            local_copy: LocalCopy::Memory,
            marks: Watermarks {
                appended: last,
                replicated: freed,
                acknowledged: freed,
                destaged: freed,
                freed,
            },
            in_backing: freed,
            inherited: last,
            restoring,
            bypassed_at: freed,
            proposals: Proposals::default(),
            former,
            reads_wait,
            fenced: None,
            peer_deadline,
            peer_wanted: false,
            lacks_peer: false,
            ask_absent: true,
            avoid: Vec::new(),
            falling: false,
            successor: None,
            ask_peer_at: Nanos(0),
            propose_at: Nanos(0),
            planted: Planted::default(),
        }
    }

    /// The owner's own copy is on flash, of which nothing is known to be durable yet ([`Event::Stored`]).
    #[must_use]
    pub fn on_flash(self) -> Owner {
        Owner { local_copy: LocalCopy::Flash(Held::default()), ..self }
    }

    /// Plants a bug in a new owner, so that the checks can show that they find it.
    #[cfg(feature = "planted-bugs")]
    pub fn plant(&mut self, planted: Planted) {
        self.planted = planted;
        self.restoring &= !planted.has(Bug::AcknowledgeUnrestored);
        if planted.has(Bug::AnswerInheritedAtOnce) {
            (self.marks.replicated, self.marks.acknowledged) = (self.inherited, self.inherited);
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

    /// Whether a node has reported that this owner is over.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.fenced.is_some()
    }

    /// Everything up to here is in the backing: the next checkpoint begins behind it.
    #[must_use]
    pub fn in_backing(&self) -> u64 {
        self.in_backing
    }

    /// Everything up to here, as far as it may be destaged at all, goes into one checkpoint: after a takeover, the inherited
    /// records. Other members of the set may have freed more of them than we have; if they take over from us in the middle of
    /// it, the backing must not hold versions older than those that they have freed (P4).
    #[must_use]
    pub fn checkpoint_whole(&self) -> u64 {
        if self.planted.has(Bug::DestageInheritedInParts) { 0 } else { self.inherited }
    }

    /// Everything up to here may be written to the backing now.
    #[must_use]
    pub fn destage_limit(&self) -> u64 {
        if self.is_fenced() || !self.may_use_backing() {
            return self.in_backing;
        }
        // A proposed set may be committed by now: the backing must not show yet what its members lack (P7).
        if !self.configuration.write_back && !self.proposals.any {
            self.marks.appended
        } else if self.drains() {
            self.held().max(self.promised())
        } else {
            self.marks.acknowledged
        }
    }

    /// Whether nothing may be answered yet, because the backing alone is the disk and the former owner may still write to it (P7).
    #[must_use]
    pub fn waits_for_former(&self) -> bool {
        self.reads_wait && !self.may_use_backing()
    }

    /// Whether the log takes new records. Not beside a former owner that may still acknowledge writes, because it has them in the
    /// backing: the next owner could not tell records from that time from acknowledged ones, and would cover newer data by them
    /// (P4, P7). Clients wait for its end anyway.
    #[must_use]
    pub fn appends(&self) -> bool {
        self.former != Former::Serving || self.planted.has(Bug::ForgetFormer)
    }

    /// Whether the backing may be changed: no former owner has I/O under way to it (P4).
    #[must_use]
    pub fn may_use_backing(&self) -> bool {
        self.former == Former::Stopped || self.planted.has(Bug::ForgetFormer)
    }

    /// Whether writes are acknowledged from the backing, so that clients wait for the log to be drained.
    ///
    /// Also while the mode goes to `write-through`, or may be there already: until that is known, writes are acknowledged
    /// when the replicas *and* the backing have them. Otherwise a busy guest would keep the log from ever being drained, and
    /// a change that commits late would lose writes that were acknowledged from the replicas alone.
    #[must_use]
    pub fn drains(&self) -> bool {
        !self.configuration.write_back || self.leaves_write_back() || self.proposals.write_through
    }

    fn leaves_write_back(&self) -> bool {
        self.falling || self.wanted().is_none()
    }

    /// The number of replicas wanted; `None`: write-through, also because this node cannot keep a copy of its own.
    fn wanted(&self) -> Option<usize> {
        self.configuration.wanted_replicas.filter(|_| !self.local_copy.has_failed())
    }

    /// The last record that this owner, or the one whose log it has inherited, can have acknowledged.
    #[must_use]
    pub fn promised(&self) -> u64 {
        self.marks.acknowledged.max(self.inherited)
    }

    /// Whether the backing holds everything that was acknowledged, here or possibly by the former owner, so that write-back
    /// can be left.
    fn is_drained(&self) -> bool {
        self.in_backing >= self.promised() || self.planted.has(Bug::LeaveUndrained)
    }

    /// All nodes that may take over hold everything up to here, this node after a restart included.
    fn held(&self) -> u64 {
        let counts =
            (self.configuration.write_back || self.proposals.any) && !self.planted.has(Bug::CountUnstored);
        let local = if counts { self.local_copy.last() } else { u64::MAX };
        self.held_by_members().min(local)
    }

    fn held_by_members(&self) -> u64 {
        let needed = self.members.iter().filter(|member| self.is_needed(member));
        let last = needed.map(|member| member.last());
        if self.planted.has(Bug::AcknowledgeOneCopyShort) {
            return last
                .max()
                .filter(|_| self.members.len() > 1)
                .unwrap_or(u64::MAX)
                .min(self.marks.appended);
        }
        last.min().unwrap_or(u64::MAX).min(self.marks.appended)
    }

    /// Whether writes can bypass the log: acknowledged from the backing, and nothing older is on its way there (P4).
    #[must_use]
    pub fn bypasses(&self) -> bool {
        !self.is_fenced()
            && self.may_use_backing()
            && !self.configuration.write_back
            && !self.proposals.any
            && self.marks.freed == self.marks.appended
    }

    /// A write bypasses the log: all records that a copy still holds now are older (P4).
    pub fn bypassed(&mut self) {
        if !self.planted.has(Bug::ForgetBypassed) {
            self.bypassed_at = self.marks.appended;
        }
    }

    /// The reason, in words, why a write waits; empty when nothing is unusual.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        if self.is_fenced() {
            "another node owns the disk"
        } else if self.former == Former::Serving {
            "waiting until the former owner's right to serve has certainly ended"
        } else if self.former == Former::Silent {
            "waiting until the former owner has certainly stopped; destage is held back"
        } else if self.local_copy.has_failed() {
            "this node's flash has failed: effective policy is write-through until the disk moves or the node is mended"
        } else if self.falling {
            "no peer to replicate to: draining, then write-through"
        } else if self.restoring {
            "restoring the replica set"
        } else if self.members.iter().any(|member| member.in_set && !member.connected) {
            "a replica is lost"
        } else if !self.configuration.misplaced.is_empty() {
            "a replica is where the policy wants none: looking for another"
        } else if !self.configuration.leaving.is_empty() {
            "a replica's node takes no disks at present: looking for another"
        } else if self.proposals.any && !self.proposals.waiting {
            "the registry has not confirmed or rejected a change; asking again"
        } else if !self.configuration.write_back && self.configuration.wanted_replicas.is_some() {
            match self.lacks_peer {
                true => "not enough peers: effective policy is write-through",
                false => "its replicas are being filled; write-back begins when they are complete",
            }
        } else {
            ""
        }
    }

    /// Takes an event into account and appends what follows from it to `effects`.
    pub fn step(&mut self, now: Nanos, event: Event, effects: &mut Vec<Effect>) {
        let lifts = event == Event::StillOwner;
        if let Some(mistaken) = self.fenced.take_if(|_| lifts) {
            self.lift_fence(now, &mistaken, effects);
        }
        self.take(now, event, effects);
        // A fenced owner takes each event, which comes only once, in case that it is the owner after all; it decides nothing.
        if !self.is_fenced() {
            self.acknowledge(effects);
            self.decide(now, effects);
        }
        self.marks.check();
    }

    fn take(&mut self, now: Nanos, event: Event, effects: &mut Vec<Effect>) {
        match event {
            Event::Appended(last) => self.appended(now, last),
            Event::PeerJoined(node) => self.joined(now, node),
            Event::PeerConfirmed { node, held } => self.confirmed(now, &node, held),
            Event::PeerLost(node) => self.lost(now, &node, effects),
            Event::PeerSilent(node) => self.silent(now, &node, effects),
            Event::PeerUnavailable => {
                self.avoid.clear();
                self.unavailable(now, effects);
            }
            Event::Configured(configuration) => self.configured(now, configuration, effects),
            Event::NotConfigured => {
                self.proposals.waiting = false;
                self.propose_at = now + RETRY;
                if self.planted.has(Bug::ForgetDoubt) {
                    self.proposals = Proposals::default();
                }
            }
            Event::PolicyRequested(wanted) => {
                self.configuration.wanted_replicas = wanted;
                self.falling = false;
            }
            Event::Successor(node) => {
                self.avoid.retain(|avoided| Some(avoided) != node.as_ref());
                self.successor = node;
            }
            Event::Destaged(to) => {
                assert!(to <= self.marks.appended, "destaged {to} of {}", self.marks.appended);
                self.in_backing = self.in_backing.max(to);
            }
            Event::Former(former) => self.former = self.former.max(former),
            Event::Stored(held) => {
                if let LocalCopy::Flash(copy) = &mut self.local_copy {
                    *copy = held;
                }
            }
            Event::StoreFailed(reason) => self.store_failed(&reason, effects),
            Event::Refused { node, epoch } => {
                if !self.is_fenced() && epoch >= self.configuration.epoch {
                    self.fenced = Some(node);
                    effects.push(Effect::Fenced(epoch));
                }
            }
            Event::StillOwner => {}
            // A fenced owner has sent nothing since, so no replica is late.
            Event::Tick if self.is_fenced() => {}
            Event::Tick => self.expire(now, effects),
        }
    }

    /// The time at which [`Event::Tick`] is due.
    #[must_use]
    pub fn deadline(&self) -> Nanos {
        if self.is_fenced() {
            return Nanos::NEVER;
        }
        let waiting = self.members.iter().filter(|member| member.is_behind(self.due(self.marks.appended)));
        let slowest = waiting.map(|member| member.progress + self.peer_deadline);
        let retries = [self.ask_peer_at, self.propose_at].into_iter().filter(|at| *at != Nanos(0));
        slowest.chain(retries).min().unwrap_or(Nanos::NEVER)
    }

    /// The node that refused us is mistaken. All are greeted anew, that one last: they were sent nothing meanwhile, and a
    /// requested connection may have come in vain.
    fn lift_fence(&mut self, now: Nanos, mistaken: &str, effects: &mut Vec<Effect>) {
        effects.push(Effect::DropPeer(mistaken.to_owned()));
        let connected = self.members.iter().filter(|member| member.connected);
        let nodes: Vec<String> = connected.map(|member| member.node.clone()).collect();
        for node in nodes {
            self.lost(now, &node, effects);
        }
        self.avoid.retain(|node| node == mistaken);
        self.avoid(mistaken);
        (self.peer_wanted, self.ask_peer_at) = (false, Nanos(0));
        let text = format!("{mistaken} refuses this owner, whom the registry confirms: its copy is given up");
        effects.push(Effect::Tell("replica-mistaken", text));
    }

    fn appended(&mut self, now: Nanos, last: u64) {
        self.begin_waiting(now);
        self.marks.appended = last;
    }

    /// More is about to be expected of the members; those of whom nothing was are given the whole time for it.
    fn begin_waiting(&mut self, now: Nanos) {
        let due = self.due(self.marks.appended);
        for member in self.members.iter_mut().filter(|member| !member.is_behind(due)) {
            member.progress = now;
        }
    }

    /// A copy with which one can take over, if nothing after `last` was acknowledged.
    ///
    /// The epoch is in it because a node forgets a copy outside the set once it learns of an epoch that the copy does not
    /// know: a node that has confirmed in this epoch does not do so before the next one.
    fn due(&self, last: u64) -> Held {
        let epoch = if self.planted.has(Bug::IgnoreCopyEpoch) { 0 } else { self.configuration.epoch };
        let freed = self.bypassed_at;
        Held { epoch, last, freed, gap: freed, complete: true }
    }

    fn joined(&mut self, now: Nanos, node: String) {
        (self.peer_wanted, self.lacks_peer) = (false, false);
        let index = self.members.iter().position(|member| member.node == node);
        let in_set = index.is_some_and(|index| self.members.swap_remove(index).in_set);
        // One member is back: so may be the next, and no other node is needed then.
        self.ask_absent |= in_set;
        // It may have restarted and lost everything: only its confirmations on this connection count.
        self.members.push(Member { connected: true, progress: now, ..Member::new(node, in_set) });
    }

    fn confirmed(&mut self, now: Nanos, node: &str, held: Held) {
        let complete = held.complete || self.planted.has(Bug::CountIncompleteCopy);
        let held = Held { last: held.last.min(self.marks.appended), complete, ..held };
        if let Some(member) = self.members.iter_mut().find(|member| member.node == node) {
            member.confirmed(now, held);
        }
    }

    fn lost(&mut self, now: Nanos, node: &str, effects: &mut Vec<Effect>) {
        effects.push(Effect::DropPeer(node.to_owned()));
        let index = self.members.iter().position(|member| member.node == node && member.connected);
        let Some(index) = index else {
            // The connection ended before the node joined: the node counts as absent.
            self.avoid(node);
            return self.unavailable(now, effects);
        };
        let needed = self.is_needed(&self.members[index]);
        let member = &mut self.members[index];
        if !member.held.complete {
            // A node that cannot be filled now is not asked again at once, and not before others.
            self.ask_peer_at = now + RETRY;
            self.avoid(node);
        }
        if needed {
            let member = &mut self.members[index];
            // Its confirmations still count; it confirms later records when it is back.
            member.connected = false;
            self.ask_absent = false;
            // No loss: a node that was to join and did not; one that hears of its removal from the set before this owner does.
            if member.in_set && !self.proposals.omits(node) {
                effects.push(Effect::Tell("replica-lost", format!("replica on {node} is lost")));
            }
        } else {
            self.members.remove(index);
        }
        self.peer_wanted = false;
    }

    /// While nothing is written, no confirmation is due: only others can tell that a member is not there.
    fn silent(&mut self, now: Nanos, node: &str, effects: &mut Vec<Effect>) {
        if self.members.iter().any(|member| member.node == node && member.connected) {
            effects.push(Effect::Tell(
                "replica-silent",
                format!("{node}, which has a replica, does not answer"),
            ));
            self.lost(now, node, effects);
        }
    }

    fn avoid(&mut self, node: &str) {
        if !self.avoid.iter().any(|known| known == node) {
            self.avoid.push(node.to_owned());
        }
    }

    fn unavailable(&mut self, now: Nanos, effects: &mut Vec<Effect>) {
        (self.peer_wanted, self.lacks_peer) = (false, true);
        self.ask_peer_at = now + RETRY;
        if self.configuration.write_back && !self.falling && (self.is_stuck() || self.is_too_loose()) {
            self.falling = true;
            effects.push(Effect::Tell(
                "policy-falling",
                "no peer available: draining, then write-through".into(),
            ));
        }
    }

    fn store_failed(&mut self, reason: &str, effects: &mut Vec<Effect>) {
        if let LocalCopy::Flash(held) = self.local_copy {
            self.local_copy = LocalCopy::Failed(held);
            let text =
                format!("the write log's flash on this node fails ({reason}): draining, then write-through");
            effects.push(Effect::Tell("flash-failed", text));
        }
    }

    fn configured(&mut self, now: Nanos, configuration: Configuration, effects: &mut Vec<Effect>) {
        if configuration.epoch <= self.configuration.epoch {
            return;
        }
        let before = self.configuration.effective();
        self.begin_waiting(now);
        self.proposals = Proposals::default();
        self.propose_at = Nanos(0);
        let former = std::mem::replace(&mut self.configuration, configuration);
        for node in &self.configuration.replicas {
            if !self.members.iter().any(|member| member.node == *node) {
                self.members.push(Member::new(node.clone(), true));
            }
        }
        for member in &mut self.members {
            member.in_set = self.configuration.replicas.contains(&member.node);
        }
        // A member that was to go and has left the set must not be the first to rejoin it.
        let goes = |member: &Member| !member.connected || former.to_go().any(|node| *node == member.node);
        self.drop_members(|member| !member.in_set && goes(member), effects);
        let Configuration { replicas, write_back, .. } = &self.configuration;
        if !write_back || self.wanted().is_none_or(|wanted| replicas.len() >= wanted) {
            self.restoring = false;
            self.falling &= self.configuration.write_back && !self.configuration.misplaced.is_empty();
            self.avoid.clear();
        }
        let after = self.configuration.effective();
        if before != after {
            effects
                .push(Effect::Tell("policy-effective", format!("effective policy is {after}, was {before}")));
        }
    }

    fn expire(&mut self, now: Nanos, effects: &mut Vec<Effect>) {
        let slow: Vec<String> = self
            .members
            .iter()
            .filter(|member| member.is_behind(self.due(self.marks.appended)))
            .filter(|member| now >= member.progress + self.peer_deadline)
            .map(|member| member.node.clone())
            .collect();
        for node in slow {
            effects.push(Effect::Tell("replica-slow", format!("replica on {node} missed its deadline")));
            self.lost(now, &node, effects);
        }
    }

    /// Whether acknowledging needs this member: it is in the committed set or in one that may be committed by now (P3).
    fn is_needed(&self, member: &Member) -> bool {
        if self.planted.has(Bug::BelieveBeforeCommit) && self.proposals.any {
            return self.proposals.replicas.contains(&member.node);
        }
        member.in_set || self.proposals.replicas.contains(&member.node)
    }

    fn drop_members(&mut self, which: impl Fn(&Member) -> bool, effects: &mut Vec<Effect>) {
        self.members.retain(|member| {
            let goes = which(member);
            // A member that is not connected has no channel, or one that has not joined and answers a request for a peer.
            if goes && member.connected {
                effects.push(Effect::DropPeer(member.node.clone()));
            }
            !goes
        });
    }

    /// Moves the watermarks. They never go back: a statement once true of a record stays true.
    fn acknowledge(&mut self, effects: &mut Vec<Effect>) {
        let restoring = self.configuration.write_back && self.restoring;
        // While the former owner may answer reads, a new write must not be acknowledged: it would read an older version (P7).
        let limit = if restoring || self.former == Former::Serving { self.inherited } else { u64::MAX };
        let held = self.held().min(limit);
        let safe = if self.drains() { held.min(self.in_backing) } else { held };
        let replicated = if self.configuration.write_back { held } else { safe };
        let marks = &mut self.marks;
        marks.replicated = marks.replicated.max(replicated);
        marks.acknowledged = marks.acknowledged.max(safe);
        // Freeing shows to reads what is in the backing, so it must have been acknowledged (P7).
        marks.destaged = marks.destaged.max(self.in_backing.min(marks.acknowledged));
        if marks.destaged > marks.freed {
            marks.freed = marks.destaged;
            effects.push(Effect::FreeTo(marks.freed));
        }
    }

    /// Whether acknowledging has come to a stop that only a change of configuration ends.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        self.restoring || self.members.iter().any(|member| self.is_needed(member) && !member.connected)
    }

    /// Whether guests wait for a copy that is being filled, so that it may take everything.
    #[must_use]
    pub fn hurries(&self) -> bool {
        let waits = |member: &Member| self.is_needed(member) && !member.held.complete;
        self.is_stuck() || self.members.iter().any(waits)
    }

    /// Whether the configuration is as requested and all members are connected.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let Configuration { replicas, write_back, .. } = &self.configuration;
        let as_requested = match self.wanted() {
            None => !write_back && self.members.is_empty(),
            Some(wanted) => *write_back && replicas.len() == wanted && self.members.len() == wanted,
        };
        as_requested
            && !self.proposals.any
            && !self.restoring
            && !self.falling
            && self.successor.as_ref().is_none_or(|successor| replicas.contains(successor))
            && self
                .members
                .iter()
                .all(|member| member.in_set && member.connected && !self.is_to_go(&member.node))
    }
}
