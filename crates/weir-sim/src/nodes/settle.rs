//! Checks after the last fault: requested policy, drained log, idle; no acknowledged write is missing.

use std::time::Duration;

use weir_cluster::records::{Mode, Policy};

use super::Cluster;
use super::clients::Client;
use super::registry::DISK;
use crate::scale::{CALM, GUESTS_END, NODES, QUIET, name};

/// From the end of the clients' requests until the cluster must have settled. The longest part is the minute for which a disk does not
/// return to a node that has let it go, by a slow clock, and the move after that.
const BOUND: Duration = Duration::from_secs(90);

/// Longest pause before a change that has failed is tried again.
const AGAIN: Duration = Duration::from_millis(1_500);

impl Cluster {
    pub fn check_settled(&mut self) {
        let now = self.world.now();
        let moves = std::mem::replace(&mut self.activity, self.world.activity()) != self.world.activity();
        let moving = (moves && self.settled.is_none()).then(|| "messages or operations are in flight".into());
        let problem = self.unsettled().or(moving);
        match (problem, self.settled) {
            (Some(problem), None) if now > GUESTS_END + BOUND => {
                self.note_states();
                self.fail(|| format!("P9: {:?} after the last fault {problem}", now - CALM));
            }
            // A task may be about to try again what has failed.
            (None, None) if *self.calm.get_or_insert(now) + AGAIN > now => {}
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
            (Some(_), None) => self.calm = None,
        }
    }

    /// Notes the state of all nodes in the trace.
    fn note_states(&mut self) {
        for number in 0..NODES {
            let node = &self.nodes[number];
            let disks = node.shard.as_ref().map(|shard| shard.status());
            let (alive, paused, due) = (node.alive, node.paused, node.due(&self.world));
            let known = node.shared.lock().node.clone();
            let joined = known.as_ref().map(|node| {
                let owner = node.records.disk(DISK).map(|record| (record.epoch, record.owner));
                let live: Vec<_> =
                    node.records.nodes.now().values().map(|node| node.node_ref().to_string()).collect();
                format!("sees {owner:?} and {live:?}")
            });
            let session = self.registry.has_session(&name(number), node.incarnation);
            self.note(|| format!("n{number}: alive {alive}, paused {paused}, joined {joined:?}, session {session}, due {due:?}: {disks:?}"));
        }
    }

    pub fn has_been_quiet(&self) -> bool {
        self.settled.is_some_and(|(since, _)| self.world.now() > since + QUIET)
    }

    /// The reason why the cluster has not settled, if any.
    fn unsettled(&self) -> Option<String> {
        if self.unheard > 0 {
            return Some("a caller waits for a lost answer of the registry".into());
        }
        let record = &self.registry.disk;
        let Some(owner) = record.owner.as_ref().and_then(|owner| self.living(owner)) else {
            return Some("the disk has no living owner".into());
        };
        let shard = self.nodes[owner].shard.as_ref()?;
        let Some(accel) = shard.owned(DISK) else {
            return Some(format!("n{owner} owns the disk and does not have it open"));
        };
        let status = accel.status();
        if status.configuration.epoch != record.epoch {
            return Some(format!("n{owner} does not know epoch {}", record.epoch));
        }
        let wanted = match record.policy {
            Policy::WriteThrough => None,
            policy => Some(policy.replicas().min(NODES - 1)),
        };
        let write_back = record.mode == Mode::WriteBack;
        if write_back != wanted.is_some() || record.replicas.len() != wanted.unwrap_or(0) {
            return Some(format!("the set is not as requested: {record:?}, n{owner}: {}", status.reason));
        }
        if !accel.may_hand_over() {
            return Some(format!("n{owner} still waits for members or for a change: {}", status.reason));
        }
        if !record.former.is_empty() {
            return Some(format!("the record still names former owners: {:?}", record.former));
        }
        if status.marks.freed != status.marks.appended {
            return Some(format!(
                "the log of n{owner} is not drained: {:?}; {}",
                status.marks, status.reason
            ));
        }
        if status.log_used > 0 {
            return Some(format!(
                "P10: the log of n{owner} is empty and {} bytes of its arena are held",
                status.log_used
            ));
        }
        for (number, node) in self.nodes.iter().enumerate() {
            let Some(shard) = &node.shard else { return Some(format!("n{number} is down")) };
            if !self.registry.has_session(&name(number), node.incarnation) {
                return Some(format!("n{number} has not joined"));
            }
            if node.shared.lock().orders > 0 {
                return Some(format!("n{number} has not completed an operator's request"));
            }
            if shard.left_over() > 0 || (number != owner && shard.owned(DISK).is_some()) {
                return Some(format!("n{number} still has the disk open"));
            }
            if node.has_open() != (number == owner) {
                return Some(format!("n{number} has a wrong view of where the disk is open"));
            }
            if shard.status().iter().any(|disk| disk.in_flight > 0) {
                return Some(format!("requests are in flight on n{number}"));
            }
        }
        if !self.clients.iter().all(Client::is_idle) {
            return Some("a client waits for an answer".into());
        }
        if let Some(problem) = self.unsettled_states() {
            return Some(problem);
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
            let there = self.in_backing(block, false);
            if let Some(read) = self.last_read[block].filter(|read| *read != there) {
                return self.fail(|| {
                    format!("P4: the backing has version {there} of block {block}, and {read} was read last")
                });
            }
            let durable = self.in_backing(block, true);
            if durable != there {
                return self.fail(|| {
                    format!(
                        "P6, P8: of block {block} only version {durable} is durable, not {there}, and all was flushed"
                    )
                });
            }
        }
    }
}
