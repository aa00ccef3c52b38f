//! An owner's changes of the record, and its behaviour while their outcome is unknown.

use std::rc::Rc;
use std::time::Duration;

use weir_block::Nanos;
use weir_cluster::ownership::{
    Caller, Refusal, change_replicas, forget_former, hand_over, renew, set_guards, set_policy, silence_former,
};
use weir_cluster::records::{DiskRecord, Mode, NodeRef, Policy};
use weir_cluster::right::{Event as RightEvent, MAX_GUARDS};

use super::Simulation;
use super::state::{Copy, Order, Proposal, Wait};
use crate::right::planted::Rule;

const ANSWER_WITHIN: Duration = Duration::from_millis(300);
const BETWEEN_CHANGES: Duration = Duration::from_millis(40);
const PATIENCE: Duration = Duration::from_secs(3);

impl Simulation {
    /// Sends the next change, if one is pending and none is in doubt.
    pub fn propose(&mut self, n: usize) {
        let now = self.local(n);
        let Some(owner) = &mut self.nodes[n].owner else { return };
        if let Some(last) = owner.proposals.last() {
            if now >= last.sent + ANSWER_WITHIN {
                self.resolve(n);
            }
            return;
        }
        if now < owner.proposed_at + BETWEEN_CHANGES || self.nodes[n].session.number == 0 {
            return;
        }
        self.restore(n);
        let Some(Ok(next)) = self.next_change(n) else { return };
        let is_move = next.owner.as_ref() != Some(&self.nodes[n].me);
        let Some(owner) = &mut self.nodes[n].owner else { return };
        match is_move {
            // It stops serving before it sends the change.
            true => {
                self.counts.moves += 1;
                owner.right.step(RightEvent::HandingOver)
            }
            false if next.grant_set() != owner.record.grant_set() => {
                owner.right.step(RightEvent::Proposed(next.grant_set()))
            }
            false => Nanos(0),
        };
        self.send_proposal(n, Rc::new(next));
    }

    fn send_proposal(&mut self, n: usize, next: Rc<DiskRecord>) {
        let sent = self.local(n);
        let Some(base) = self.nodes[n].owner.as_ref().map(|owner| owner.revision) else { return };
        let id = self.change(n, base, Rc::clone(&next));
        self.note(|| format!("node {n} proposes epoch {} over revision {base}", next.epoch));
        if let Some(owner) = &mut self.nodes[n].owner {
            owner.proposed_at = sent;
            owner.proposals.push(Proposal { id, base, next, sent });
        }
    }

    /// Resolves a change with unknown outcome: a new epoch over the same revision prevents it, or finds it committed.
    fn resolve(&mut self, n: usize) {
        self.counts.doubts += 1;
        if self.has(Rule::DoubtTakenForNo) {
            return self.not_committed(n);
        }
        self.nodes[n].wants_read = true;
        let node = &self.nodes[n];
        let Some(owner) = &node.owner else { return };
        if node.session.number != 0
            && let Ok(next) = renew(&owner.record, &node.me, owner.record.epoch)
        {
            self.send_proposal(n, Rc::new(next));
        }
    }

    fn not_committed(&mut self, n: usize) {
        let Some(owner) = &mut self.nodes[n].owner else { return };
        owner.proposals.clear();
        owner.right.step(RightEvent::NotCommitted);
        owner.right.step(RightEvent::Kept);
    }

    /// A change of the owner's was refused.
    pub fn refused(&mut self, n: usize, id: u64) {
        self.nodes[n].wants_read = true;
        let Some(owner) = &mut self.nodes[n].owner else { return };
        if owner.proposals.len() == 1 && owner.proposals[0].id == id {
            return self.not_committed(n);
        }
        // Another change in doubt may be the reason for the refusal.
        owner.proposals.retain(|proposal| proposal.id != id);
    }

    /// Applies the record of this owner, from a read or its own change, sent during `session`.
    pub fn reconfigure(&mut self, n: usize, record: &Rc<DiskRecord>, revision: u64, session: u64) {
        let (resumes, repeats) = (self.has(Rule::ResumeOnRead), self.has(Rule::DoubtEndedByOldRecord));
        let Some(owner) = &mut self.nodes[n].owner else { return };
        owner.right.step(RightEvent::Confirmed { session, epoch: record.epoch });
        let committed = RightEvent::Committed { epoch: record.epoch, set: record.grant_set() };
        let moves = owner.proposals.iter().any(|proposal| proposal.next.owner != record.owner);
        if revision == owner.revision && resumes && moves {
            owner.right.step(RightEvent::Kept);
            owner.proposals.clear();
            owner.order = None;
        }
        if revision <= owner.revision {
            // The record is unchanged: later requests may still commit, although the epoch is the same.
            if repeats {
                owner.right.step(RightEvent::NotCommitted);
            }
            return;
        }
        // Requests against an earlier revision will be refused.
        owner.proposals.retain(|proposal| proposal.base >= revision);
        owner.right.step(committed);
        owner.right.step(RightEvent::NotCommitted);
        owner.right.step(RightEvent::Kept);
        let in_record = |wait: &Wait| {
            record
                .former
                .iter()
                .any(|former| (&former.node, former.epoch) == (&wait.former.node, wait.former.epoch))
        };
        owner.waits.retain(in_record);
        (owner.record, owner.revision) = (Rc::clone(record), revision);
        owner.joiners.clear();
        self.append_log(n, true);
    }

    /// Restores the requested number of copies after a takeover or at the start.
    fn restore(&mut self, n: usize) {
        let now = self.local(n);
        let Some(owner) = &self.nodes[n].owner else { return };
        let record = Rc::clone(&owner.record);
        let wanted = record.policy.replicas();
        if owner.order.is_none()
            && record.policy != record.effective()
            && record.replicas.is_empty()
            && wanted > 0
        {
            let mut replicas = self.others(n);
            replicas.truncate(wanted.max(1));
            if let Some(owner) = &mut self.nodes[n].owner {
                owner.order = Some(Order::Set { policy: record.policy, replicas, since: now });
            }
        }
    }

    fn next_change(&mut self, n: usize) -> Option<Result<DiskRecord, Refusal>> {
        let (now, grace_over) = (self.local(n), self.is_grace_over(n));
        let hasty = self.has(Rule::SilenceBeforeProof);
        let node = &self.nodes[n];
        let (owner, me) = (node.owner.as_ref()?, &node.me);
        let (record, epoch) = (&owner.record, owner.record.epoch);
        let over = |former| owner.waits.iter().any(|wait| wait.former.node == former && wait.is_over);
        for former in &record.former {
            if former.set.is_some() && (hasty || over(former.node.clone())) {
                return Some(silence_former(record, me, epoch, former));
            }
            if former.set.is_none() && grace_over {
                return Some(forget_former(record, me, epoch, former));
            }
        }
        match owner.order.clone() {
            Some(Order::Move { since, .. } | Order::Set { since, .. }) if now >= since + PATIENCE => {
                self.nodes[n].owner.as_mut()?.order = None;
                None
            }
            Some(Order::Move { to, .. }) => self.next_move(n, &to),
            Some(Order::Set { policy, replicas, .. }) => self.next_set(n, policy, &replicas),
            None => self.next_guards(n),
        }
    }

    fn next_move(&mut self, n: usize, to: &NodeRef) -> Option<Result<DiskRecord, Refusal>> {
        let node = &mut self.nodes[n];
        let owner = node.owner.as_mut()?;
        if !owner.record.replicas.contains(to) {
            owner.order = None;
            return None;
        }
        let quiet = !owner.destages && owner.acked == node.copy?.newest;
        quiet.then(|| hand_over(&owner.record, &node.me, owner.record.epoch, to))
    }

    fn next_set(
        &mut self,
        n: usize,
        policy: Policy,
        replicas: &[NodeRef],
    ) -> Option<Result<DiskRecord, Refusal>> {
        let (ready, with_bypass) = (self.is_grace_over(n), self.has(Rule::ProposeBesideBypass));
        let node = &mut self.nodes[n];
        let (owner, me) = (node.owner.as_mut()?, &node.me);
        let Copy { newest, freed, .. } = node.copy?;
        let record = Rc::clone(&owner.record);
        let mode = if policy == Policy::WriteThrough { Mode::WriteThrough } else { Mode::WriteBack };
        if record.mode == mode && record.policy == policy && record.replicas == replicas {
            owner.order = None;
            return None;
        }
        // The effective mode must be allowed before and after.
        if record.policy != policy && mode == Mode::WriteBack {
            return Some(set_policy(&record, Caller::Owner { node: me, epoch: record.epoch }, policy));
        }
        owner.joiners = replicas.to_vec();
        let complete = replicas.iter().all(|joiner| owner.confirms.get(&joiner.incarnation) >= Some(&newest));
        let may = match (record.mode, mode) {
            (Mode::WriteBack, Mode::WriteThrough) => {
                newest <= freed && owner.writes.is_empty() && !owner.destages
            }
            (Mode::WriteThrough, Mode::WriteBack) => {
                ready && complete && (owner.bypasses == 0 || with_bypass)
            }
            (Mode::WriteBack, Mode::WriteBack) => complete,
            (Mode::WriteThrough, Mode::WriteThrough) => {
                return Some(set_policy(&record, Caller::Owner { node: me, epoch: record.epoch }, policy));
            }
        };
        may.then(|| change_replicas(&record, me, record.epoch, replicas, mode, 0))
    }

    /// Sets guards of a disk without replicas; sometimes changes them.
    fn next_guards(&mut self, n: usize) -> Option<Result<DiskRecord, Refusal>> {
        let owner = self.nodes[n].owner.as_ref()?;
        let record = Rc::clone(&owner.record);
        let wanted = MAX_GUARDS.min(self.nodes.len() - 1);
        let due = record.replicas.is_empty() && (record.guards.len() < wanted || self.rng.u8(0..60) == 0);
        if !due {
            return None;
        }
        let mut others: Vec<String> = (0..self.nodes.len())
            .filter(|other| *other != n)
            .map(|other| self.nodes[other].name.clone())
            .collect();
        self.rng.shuffle(&mut others);
        others.truncate(wanted);
        Some(set_guards(&record, &self.nodes[n].me, record.epoch, &others))
    }
}
