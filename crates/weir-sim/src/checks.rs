//! What must hold after every step, and at the end.

use std::iter;

use weir_accel::Log;
use weir_accel::replica::Replica;

use crate::owner_process::{block_of, newest_first, version_of};
use crate::world::{BLOCKS, BOUND, CALM, NODES, Process, QUIET, World};

/// Blocks and versions of a log's records, the newest first.
fn newest_records(log: &Log) -> impl Iterator<Item = (usize, u64)> {
    newest_first(log).map(|(_, record)| (block_of(record), version_of(log, record)))
}

impl World {
    /// Whoever may be asked for the disk, now or after a takeover, has all that was acknowledged or seen, and nothing
    /// older in its place: P1, P4, P6 and P7 in one.
    pub fn check(&mut self) {
        let record = &self.registry.record;
        let Some(owner) = record.owner else { return };
        if let Some(problem) = self.check_owner(owner) {
            return self.fail(|| problem);
        }
        if !record.write_back {
            if let Some((block, version, floor)) = self.stale_block(iter::empty()) {
                let what = format!("the backing has version {version} of block {block}, not {floor}");
                self.fail(|| format!("P1: write-through, and {what}"));
            }
            return;
        }
        for holder in record.replicas.iter().chain(&record.owner) {
            if let Some(problem) = self.check_at_rest(*holder) {
                return self.fail(|| problem);
            }
        }
        for replica in record.replicas.clone() {
            if let Some(problem) = self.check_replica(replica) {
                return self.fail(|| problem);
            }
        }
    }

    fn check_owner(&self, owner: Process) -> Option<String> {
        if !self.is_alive(owner) {
            return None;
        }
        match &self.nodes[owner.node].owner {
            Some(open) => self.stale_block(newest_records(&open.log)).map(|(block, worst, floor)| {
                format!("the owner n{} has version {worst} of block {block}, not {floor}", owner.node)
            }),
            // Not opened yet.
            None if self.registry.record.write_back => self.check_replica(owner),
            None => None,
        }
    }

    /// A process that the registry names could take over this moment.
    fn check_replica(&self, named: Process) -> Option<String> {
        let process = self.process(named.node);
        if !self.is_alive(process) || !self.stands_for(named, process) {
            return None;
        }
        let node = process.node;
        let damaged = self.nodes[node].flash.as_ref().is_some_and(|device| device.damaged.is_some());
        let replica = self.nodes[node].replica.as_ref().filter(|replica| replica.is_complete());
        // An owner that has handed the disk over may not know it yet; it becomes a replica when it does.
        let former = self.nodes[node].owner.as_ref().map(|owner| &owner.log);
        let Some(log) = former.or(replica.map(Replica::log)) else {
            if damaged {
                return None;
            }
            return Some(format!("P1: n{node} is in the set and has no complete copy"));
        };
        self.stale_block(newest_records(log)).map(|(block, worst, floor)| {
            format!("P1: after a takeover by n{node}, block {block} would be version {worst}, not {floor}")
        })
    }

    /// What a process that the registry names has at rest on its flash: all that would be left of its copy if the power went.
    fn check_at_rest(&self, holder: Process) -> Option<String> {
        let node = holder.node;
        let device = self.nodes[node].flash.as_ref()?;
        if device.damaged.is_some() || self.registry.flash_of(holder) != Some(device.identity) {
            return None;
        }
        let at_rest = device.found().map(|slot| &slot.at_rest);
        let complete = at_rest.filter(|found| found.state.is_some_and(|state| state.complete));
        let Some(found) = complete else {
            return Some(format!("P1: n{node} is in the set and has no complete copy at rest"));
        };
        let newest_first = found.records.iter().rev().map(|record| (record.block, record.version));
        self.stale_block(newest_first).map(|(block, worst, floor)| {
            format!("P1: after a loss of power, block {block} on the flash of n{node} would be version {worst}, not {floor}")
        })
    }

    /// A block that may be read through these records, the newest first, in a version older than it must have, even if the storage loses its
    /// power: the block, the version, and what it must be at least.
    fn stale_block(&self, log: impl Iterator<Item = (usize, u64)>) -> Option<(usize, u64, u64)> {
        let mut versions: [u64; BLOCKS] = std::array::from_fn(|block| self.backing.blocks[block].worst());
        let mut seen = [false; BLOCKS];
        for (block, version) in log {
            if !std::mem::replace(&mut seen[block], true) {
                // What nobody wrote is as bad as nothing (P11).
                versions[block] = if self.guest.has_written(block, version) { version } else { 0 };
                if seen == [true; BLOCKS] {
                    break;
                }
            }
        }
        (0..BLOCKS)
            .map(|block| (block, versions[block], self.guest.floor[block]))
            .find(|(_, version, floor)| version < floor)
    }

    /// A checkpoint has been flushed: of what the log covers, the backing holds exactly its records up to `to` (P5), and
    /// they may be freed (P6).
    pub fn check_checkpoint(&mut self, process: Process, to: u64) {
        if self.registry.record.owner != Some(process) {
            // What a former owner writes late is covered by the log that was taken over (P4).
            return;
        }
        let Some(owner) = self.owner(process) else { return };
        let mut expected: [Option<u64>; BLOCKS] = [None; BLOCKS];
        for (_, record) in owner.log.range(0, to) {
            expected[block_of(record)] = Some(version_of(&owner.log, record));
        }
        let blocks = self.backing.blocks.iter().zip(expected).enumerate();
        let mut wrong = blocks.filter_map(|(block, (here, expected))| {
            let (current, worst) = (here.current(), here.worst());
            let expected = expected.filter(|expected| current != *expected || worst != *expected)?;
            Some((block, current, worst, expected))
        });
        if let Some((block, current, worst, expected)) = wrong.next() {
            self.fail(|| {
                format!(
                    "P5: n{}'s checkpoint up to record {to} leaves version {current} of block {block}, or {worst} after \
                     a loss of power, and not {expected}",
                    process.node
                )
            });
        }
    }

    /// What guests saw of each block could have been a register (P7).
    pub fn check_histories(&mut self) {
        for block in 0..BLOCKS {
            self.counts.reads += self.guest.histories[block].reads();
            if let Some(problem) = self.guest.histories[block].contradiction() {
                self.fail(|| format!("P7: the history of block {block} is not linearizable: {problem}"));
            }
        }
    }

    /// After the last fault: within the bound everything must be as it should and stay so.
    pub fn look_whether_settled(&mut self) {
        let active = self.settled.is_none() && self.activity != self.settled_activity;
        self.settled_activity = if active { self.activity } else { self.settled_activity };
        match (self.unsettled(), self.settled) {
            (None, None) if active => {}
            (None, None) => {
                self.note(|| "everything has settled".into());
                self.settled = Some(self.now);
                self.counts.longest_convergence = self.now - CALM;
            }
            (None, Some(_)) if self.activity != self.settled_activity => {
                self.fail(|| "P10: everything had settled, and yet something is done".into());
            }
            (Some(why), Some(_)) => self.fail(|| format!("it does not stay settled: {why}")),
            (Some(why), None) if self.now > CALM + BOUND => {
                self.fail(|| format!("P9: {BOUND:?} after the last fault, {why}"));
            }
            _ => {}
        }
    }

    /// Whether it has been settled for long enough to end the run.
    pub fn has_been_quiet(&self) -> bool {
        self.settled.is_some_and(|since| self.now > since + QUIET)
    }

    /// What is not as it should be: somebody owns the disk, the policy in effect is the requested one, the log is drained,
    /// nobody waits, nobody else has the disk or a copy.
    fn unsettled(&self) -> Option<String> {
        let record = &self.registry.record;
        let Some(process) = self.owner_process() else { return Some("nobody owns the disk".into()) };
        let Some(open) = &self.nodes[process.node].owner else { return Some("the disk is not open".into()) };
        let (marks, reason) = (open.owner.marks(), open.owner.reason());
        let as_requested = record.write_back == record.wanted.is_some()
            && record.replicas.len() == record.wanted.unwrap_or(0);
        let known = open.owner.configuration() == &record.configuration();
        let others = (0..NODES).filter(|node| *node != process.node);
        let mut stray = others.clone().filter(|node| {
            let in_set = record.replicas.iter().any(|replica| replica.node == *node);
            let here = &self.nodes[*node];
            // One of this epoch may be named by a change that is still under way, and one that a former owner has filled
            // after the older ones were forgotten is not noticed: both stay until the next epoch.
            let stays = here.forgotten_below == record.epoch;
            here.replica.as_ref().is_some_and(|copy| copy.epoch() < record.epoch) && !in_set && !stays
        });
        if !as_requested || !known {
            Some(format!("the policy has not come back: {record:?}, {reason}"))
        } else if !reason.is_empty() {
            Some(format!("the owner is not content: {reason}"))
        } else if marks.freed != marks.appended {
            Some(format!("the log is not drained: {marks:?}, {reason}"))
        } else if !self.guest.is_idle() {
            Some(format!("the guest still waits: {reason}"))
        } else if open.channels.len() != record.replicas.len() {
            Some(format!("there are {} channels for {record:?}", open.channels.len()))
        } else if !record.former.is_empty() {
            Some(format!("former owners are not forgotten: {record:?}"))
        } else if others.clone().any(|node| self.nodes[node].owner.is_some()) {
            Some("a former owner has not let go".into())
        } else if let Some(node) = stray.next() {
            Some(format!("n{node} keeps a copy that nobody asks for"))
        } else {
            let stale = self.stale_block(iter::empty());
            stale.map(|(block, worst, floor)| {
                format!("the backing has version {worst} of block {block}, not {floor}")
            })
        }
    }
}
