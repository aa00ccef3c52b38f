//! Checks after the last fault: requested policy, drained log, idle; no acknowledged write is missing.

use weir_block::Layer;

use super::Cluster;
use super::clients::Client;
use crate::scale::{BLOCK, BOUND, CALM, GUESTS_END, NODES, QUIET};

impl Cluster {
    pub fn check_settled(&mut self) {
        let now = self.world.now();
        let problem = self.unsettled();
        match (problem, self.settled) {
            (Some(problem), None) if now > GUESTS_END + BOUND => {
                self.fail(|| format!("P9: {:?} after the last fault {problem}", now - CALM));
            }
            (None, None) => {
                self.settled = Some((now, self.world.activity()));
                self.counts.longest_convergence = self.counts.longest_convergence.max(now - CALM);
                self.note(|| "everything has settled".into());
            }
            (problem, Some((_, before))) => {
                let moved = self.world.activity() - before;
                if let Some(problem) = problem {
                    self.fail(|| format!("P9: everything had settled, and then {problem}"));
                } else if moved > 0 {
                    self.fail(|| {
                        format!("P10: everything had settled, and then {moved} messages and operations")
                    });
                }
            }
            (Some(_), None) => {}
        }
    }

    pub fn has_been_quiet(&self) -> bool {
        self.settled.is_some_and(|(since, _)| self.world.now() > since + QUIET)
    }

    /// The reason why the cluster has not settled, if any.
    fn unsettled(&self) -> Option<String> {
        if !self.world.is_quiet() {
            return Some("messages or operations are in flight".into());
        }
        let record = &self.registry.record;
        let Some(owner) = record.owner.filter(|owner| self.is_alive(*owner)) else {
            return Some("the disk has no living owner".into());
        };
        let Some(disk) = &self.nodes[owner.node].disk else {
            return Some(format!("n{} owns the disk and does not have it open", owner.node));
        };
        let status = disk.accel.status();
        if status.configuration.epoch != record.epoch {
            return Some(format!("n{} does not know epoch {}", owner.node, record.epoch));
        }
        let wanted = record.wanted.map_or(0, |wanted| wanted.min(NODES - 1));
        let fails = self.has_failed_flash(owner.node);
        if fails && record.write_back {
            return Some(format!("n{} has failed flash and stays in write-back", owner.node));
        }
        if !fails && (record.write_back != record.wanted.is_some() || record.replicas.len() != wanted) {
            return Some(format!(
                "the set is not as requested: {record:?}, n{}: {}",
                owner.node, status.reason
            ));
        }
        if !record.misplaced.is_empty() {
            return Some(format!("replicas are misplaced for the policy: {record:?}"));
        }
        if !record.former.is_empty() {
            return Some("the record still names former owners".into());
        }
        if status.marks.freed != status.marks.appended || disk.accel.in_flight() > 0 {
            return Some(format!(
                "the log of n{} is not drained: {:?}; {}",
                owner.node, status.marks, status.reason
            ));
        }
        if status.log_used > 0 {
            return Some(format!(
                "P10: the log of n{} is empty and {} bytes of its arena are held",
                owner.node, status.log_used
            ));
        }
        if let Some(node) = (0..NODES).find(|node| self.needs_replacement(*node)) {
            return Some(format!("the flash of n{node} is still to be replaced"));
        }
        if let Some(node) = (0..NODES).find(|node| self.keeps_stray(*node)) {
            return Some(format!("n{node} keeps a copy that no record needs"));
        }
        if let Some(node) = self.nodes.iter().find(|node| !node.retired.is_empty()) {
            return Some(format!("P10: n{} has not released a flash slot", node.number));
        }
        if let Some(node) = self.nodes.iter().find(|node| {
            !node.leaving.is_empty()
                || node.opening != 0
                || (node.disk.is_some() && node.number != owner.node)
        }) {
            return Some(format!("n{} still has the disk open", node.number));
        }
        if !self.clients.iter().all(Client::is_idle) {
            return Some("a client waits for an answer".into());
        }
        if self.last_read.iter().any(Option::is_none) {
            return Some("a block could not be read".into());
        }
        None
    }

    /// Each block's history is that of a register, and the medium has the last value read, durably.
    pub fn check_end(&mut self) {
        for block in 0..self.histories.len() {
            self.counts.reads += self.histories[block].reads();
            if let Some(contradiction) = self.histories[block].contradiction() {
                return self.fail(|| format!("P7: block {block}: {contradiction}"));
            }
            let mut bytes = [0; 8];
            self.world.read(self.medium, (block * BLOCK) as u64, &mut bytes);
            let there = u64::from_le_bytes(bytes);
            if let Some(read) = self.last_read[block].filter(|read| *read != there) {
                return self.fail(|| {
                    format!("P4: the backing has version {there} of block {block}, and {read} was read last")
                });
            }
            self.world.read_durable(self.medium, (block * BLOCK) as u64, &mut bytes);
            let durable = u64::from_le_bytes(bytes);
            if durable != there {
                return self.fail(|| {
                    format!("P6, P8: of block {block} only version {durable} is durable, not {there}, and all was flushed")
                });
            }
        }
    }
}
