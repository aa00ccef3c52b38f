//! Checks that every possible owner, now or after a takeover, has all acknowledged or seen data.

use std::collections::BTreeMap;

use weir_accel::Log;
use weir_accel::flash::FlashStore;

use super::Cluster;
use super::requests::{CORRUPT, value_in};
use crate::scale::{BLOCK, BLOCKS, Process};

/// The values of a block that clients have seen, and the acknowledged ones.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// From all answers.
    pub seen: Seen,
    /// From acknowledged writes alone: a read may have returned data in a volatile cache.
    pub kept: Seen,
    /// Unacknowledged values that the backing has lost, with the times. A read that began before may still return one.
    lost: Vec<(u64, u64)>,
}

impl Known {
    pub fn written(&mut self, value: u64, began: u64, ended: u64) {
        self.seen.ended(value, began, ended);
        self.kept.ended(value, began, ended);
    }

    pub fn read(&mut self, value: u64, began: u64, ended: u64) {
        self.seen.ended(value, began, ended);
    }

    /// The backing has lost an unacknowledged value.
    pub fn lost(&mut self, value: u64, at: u64) {
        self.seen.forget(value);
        self.lost.push((value, at));
    }

    /// Whether a read that began at `began` may have returned this value before its loss.
    pub fn was_there(&self, value: u64, began: u64) -> bool {
        self.lost.iter().any(|&(lost, at)| lost == value && began < at)
    }
}

/// Values and times of answers.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// End time of the first operation on each value.
    ended: BTreeMap<u64, u64>,
    /// The last start times of ended operations, of at most two values: the latest first.
    latest: Vec<(u64, u64)>,
}

impl Seen {
    /// An operation on `value` has ended.
    fn ended(&mut self, value: u64, began: u64, ended: u64) {
        self.ended.entry(value).or_insert(ended);
        self.latest.retain(|&(known, other)| other != value || known > began);
        if !self.latest.iter().any(|&(_, other)| other == value) {
            self.latest.push((began, value));
        }
        self.latest.sort_unstable_by_key(|&(began, _)| std::cmp::Reverse(began));
        self.latest.truncate(2);
    }

    /// Removes a value from the seen ones.
    fn forget(&mut self, value: u64) {
        self.ended.remove(&value);
        self.latest.retain(|&(_, other)| other != value);
    }

    /// The newer value, if any, that makes this one stale: it was current when the last operation on this one was over.
    pub fn newer_than(&self, value: u64) -> Option<u64> {
        let ended = if [0, CORRUPT].contains(&value) { 0 } else { *self.ended.get(&value)? };
        let newer = self.latest.iter().find(|&&(_, other)| other != value)?;
        (newer.0 > ended).then_some(newer.1)
    }
}

impl Cluster {
    /// Checks P1, P4, P6 and P7 together: a violation of any would show in some read.
    pub fn check_copies(&mut self) {
        let record = &self.registry.record;
        let Some(owner) = record.owner else { return };
        self.counts.checks += 1;
        let problem = if record.write_back {
            let holders = record.replicas.iter().chain([&owner]);
            holders.filter_map(|holder| self.check_copy(*holder)).next()
        } else {
            self.stale_block(None).map(|stale| format!("P1: write-through, and the backing has {stale}"))
        };
        if let Some(problem) = problem {
            self.fail(|| problem);
        }
    }

    /// Checks the results that reads of this process alone would return.
    fn check_copy(&self, named: Process) -> Option<String> {
        let number = named.node;
        let process = self.process(number);
        let counted = named == process || self.registry.counts(named, process);
        if !self.is_alive(process) || !counted || !(self.flash.is_empty() || self.keeps_copy(process)) {
            return None;
        }
        let node = &self.nodes[number];
        let owned = node.disk.as_ref().map(|disk| (disk.accel.log(), disk.accel.store()));
        let host = node.host.as_ref().filter(|(_, host)| host.replica().is_complete());
        let Some((log, store)) = owned.or(host.map(|(_, host)| (host.replica().log(), host.store()))) else {
            return Some(format!("P1: n{number} is in the set and has no complete copy"));
        };
        if let Some(stale) = self.stale_block(Some((log, u64::MAX))) {
            return Some(format!("P1: with the copy of n{number} the disk has {stale}"));
        }
        let stored = store.map(FlashStore::stored).filter(|stored| stored.epoch > 0)?;
        let stale = self.stale_block(Some((log, stored.last)))?;
        Some(format!("P1: with the durable log of n{number} up to {} the disk has {stale}", stored.last))
    }

    /// A block with a stale read through a log up to a record, even after a power cut of the backing.
    fn stale_block(&self, log: Option<(&Log, u64)>) -> Option<String> {
        let mut values: [Option<u64>; BLOCKS] = [None; BLOCKS];
        let mut missing = BLOCKS;
        let newest_first = |(log, last): (_, u64)| {
            let last: u64 = last.min(Log::last(log));
            let count = last.saturating_sub(Log::freed(log));
            (0..count).filter_map(move |index| Some((log, log.get(last - index)?)))
        };
        for (log, record) in log.map(newest_first).into_iter().flatten() {
            let value = &mut values[record.offset as usize / BLOCK];
            if value.is_none() {
                *value = Some(value_in(log.data(record)));
                missing -= 1;
                if missing == 0 {
                    break;
                }
            }
        }
        values.iter().enumerate().find_map(|(block, value)| {
            let Known { seen, kept, .. } = &self.known[block];
            let durable = self.in_backing(block, true);
            let lost = || kept.newer_than(durable).filter(|_| value.is_none() && self.durable_writes);
            let value = value.unwrap_or_else(|| self.in_backing(block, false));
            match seen.newer_than(value) {
                Some(newer) => Some(format!("version {value} of block {block}, not {newer}")),
                None => lost().map(|newer| {
                    format!("version {durable} of block {block} after a power cut, not {newer}")
                }),
            }
        })
    }

    /// Cuts the backing's power. It may lose unacknowledged values.
    pub fn cut_backing_power(&mut self) {
        let at = self.tick();
        let before: Vec<u64> = (0..BLOCKS).map(|block| self.in_backing(block, false)).collect();
        self.world.power_cut(self.medium);
        for (block, before) in before.into_iter().enumerate() {
            if self.in_backing(block, false) != before && !self.histories[block].is_acknowledged(before) {
                self.histories[block].forget_reads(before);
                self.known[block].lost(before, at);
            }
        }
    }

    fn in_backing(&self, block: usize, durable: bool) -> u64 {
        let (mut bytes, offset) = ([0; 8], (block * BLOCK) as u64);
        if durable {
            self.world.read_durable(self.medium, offset, &mut bytes);
        } else {
            self.world.read(self.medium, offset, &mut bytes);
        }
        u64::from_le_bytes(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_stale_once_another_was_seen_after_its_last_operation() {
        let mut seen = Seen::default();
        assert_eq!(seen.newer_than(0), None);
        seen.ended(1, 10, 20);
        assert_eq!((seen.newer_than(0), seen.newer_than(1), seen.newer_than(9)), (Some(1), None, None));
        // Concurrent with the first one: either may be later.
        seen.ended(2, 15, 30);
        assert_eq!((seen.newer_than(1), seen.newer_than(2)), (None, None));
        // A read that began after both had ended decides.
        seen.ended(1, 40, 50);
        assert_eq!((seen.newer_than(1), seen.newer_than(2), seen.newer_than(0)), (None, Some(1), Some(1)));
        seen.ended(3, 60, 70);
        assert_eq!((seen.newer_than(1), seen.newer_than(3)), (Some(3), None));
    }
}
