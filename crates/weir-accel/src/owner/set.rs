//! Steps towards the requested set and mode: peers to ask for, changes to propose, members to drop.

use weir_block::Nanos;

use super::member::Member;
use super::proposals::Proposals;
use super::{Effect, Owner};
use crate::config::Configuration;

impl Owner {
    /// Asks for what is missing.
    pub(super) fn decide(&mut self, now: Nanos, effects: &mut Vec<Effect>) {
        for at in [&mut self.ask_peer_at, &mut self.propose_at] {
            if now >= *at {
                *at = Nanos(0);
            }
        }
        if self.is_settled() {
            return;
        }
        match self.wanted() {
            None => self.leave_write_back(effects),
            Some(wanted) => self.gather(wanted, effects),
        }
        if self.proposals.any && self.may_propose() {
            self.end_doubt(effects);
        }
    }

    /// Nothing else is to be changed, but an earlier proposal may still be committed: a new epoch rules that out. (A takeover
    /// may leave a disk with one copy where more are requested, but the owner may not propose that.)
    fn end_doubt(&mut self, effects: &mut Vec<Effect>) {
        let Configuration { replicas, write_back, wanted_replicas, .. } = self.configuration.clone();
        if !write_back || !replicas.is_empty() || wanted_replicas == Some(0) {
            self.propose(replicas, write_back, effects);
        }
    }

    /// Towards write-through: drains the acknowledged records, then changes the mode.
    fn leave_write_back(&mut self, effects: &mut Vec<Effect>) {
        if !self.configuration.write_back {
            let Proposals { replicas, .. } = self.proposals.clone();
            return self.drop_members(|member| !replicas.contains(&member.node), effects);
        }
        if self.is_drained() {
            self.propose(Vec::new(), false, effects);
        }
    }

    /// Towards `write-back+wanted`.
    fn gather(&mut self, wanted: usize, effects: &mut Vec<Effect>) {
        // A member of the set with a complete copy stays in the set though it is a message behind another member.
        let due = self.due(self.promised());
        let keeps = |member: &Member| member.in_set && member.connected && member.held.complete;
        let stays = |member: &&Member| !self.is_to_go(&member.node) || self.is_leaving(&member.node);
        let candidates = self.members.iter().filter(stays);
        let candidates = candidates.filter(|member| keeps(member) || member.holds(due));
        let mut candidates: Vec<&Member> = candidates.collect();
        candidates.sort_by_key(|member| {
            let is_leaving = self.is_leaving(&member.node);
            (!self.is_successor(&member.node), is_leaving, !member.in_set, &member.node)
        });
        candidates.truncate(wanted);
        let chosen: Vec<String> = candidates.iter().map(|member| member.node.clone()).collect();
        let ready = chosen.len() >= wanted
            && self.local_copy.covers(due)
            && candidates.iter().all(|member| member.holds(due));
        let short = self.placed() < wanted || self.lacks_successor();
        if short && !self.peer_wanted && self.ask_peer_at == Nanos(0) {
            self.want_peer(effects);
        }
        if ready {
            return self.settle_on(chosen, effects);
        }
        if self.falling && self.configuration.write_back && self.is_drained() {
            self.propose(Vec::new(), false, effects);
        }
    }

    /// Asks by turns for a member of the set that is away and for another node. After a takeover or a move the members come first:
    /// their copies need no filling, and there may be no other node.
    fn want_peer(&mut self, effects: &mut Vec<Effect>) {
        self.peer_wanted = true;
        let absent = self.members.iter().find(|member| member.in_set && !member.connected);
        let absent = absent.filter(|_| self.ask_absent).map(|member| member.node.clone());
        self.ask_absent = absent.is_none();
        let node = self.successor.clone().filter(|_| self.lacks_successor()).or(absent);
        let mut exclude: Vec<String> = self.members.iter().map(|member| member.node.clone()).collect();
        exclude.extend(self.avoid.iter().filter(|node| !exclude.contains(node)).cloned().collect::<Vec<_>>());
        let connected = self.members.iter().filter(|member| member.connected);
        let connected = connected.map(|member| member.node.clone()).collect();
        effects.push(Effect::WantPeer { node, connected, exclude });
    }

    fn settle_on(&mut self, chosen: Vec<String>, effects: &mut Vec<Effect>) {
        let current = &self.configuration.replicas;
        let same = current.len() == chosen.len() && current.iter().all(|node| chosen.contains(node));
        if self.waits_for_former() {
            // The record stays at write-through, so that the next owner waits for the same former owners (P7).
            return;
        }
        if !same || !self.configuration.write_back {
            return self.propose(chosen, true, effects);
        }
        self.restoring = false;
        self.falling = false;
        if chosen.iter().any(|node| self.is_leaving(node)) {
            // Guests go on; the node that is to replace it may be on its way.
            return self.acknowledge(effects);
        }
        // The set is as it should be; other connected nodes are not needed.
        let Proposals { replicas, .. } = self.proposals.clone();
        let successor = self.successor.clone();
        let stays = |node: &String| replicas.contains(node) || successor.as_ref() == Some(node);
        self.drop_members(|member| !member.in_set && !stays(&member.node), effects);
        self.acknowledge(effects);
    }

    fn may_propose(&self) -> bool {
        !self.proposals.waiting && self.propose_at == Nanos(0)
    }

    fn propose(&mut self, replicas: Vec<String>, write_back: bool, effects: &mut Vec<Effect>) {
        if self.may_propose() {
            self.proposals.add(&replicas, write_back);
            let Configuration { epoch, wanted_replicas, .. } = self.configuration;
            effects.push(Effect::Propose { epoch, replicas, write_back, wanted_replicas });
        }
    }
}
