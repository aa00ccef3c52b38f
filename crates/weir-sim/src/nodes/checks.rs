//! Checks that every possible owner, now or after a takeover, has all acknowledged or seen data.

use weir_accel::Log;
use weir_cluster::records::{Mode, NodeRef};

use super::Cluster;
use super::registry::DISK;
use crate::cluster::copies::Known;
use crate::scale::{BLOCK, BLOCKS};

impl Cluster {
    /// Checks P1, P4, P6 and P7 together: a violation of any would show in some read.
    pub fn check_copies(&mut self) {
        let record = &self.registry.disk;
        let Some(owner) = &record.owner else { return };
        let problem = match record.mode {
            Mode::WriteBack => {
                let holders = record.replicas.iter().chain([owner]);
                holders.filter_map(|holder| self.check_copy(holder)).next()
            }
            Mode::WriteThrough => {
                self.stale_block(None).map(|stale| format!("P1: write-through, and the backing has {stale}"))
            }
        };
        if let Some(problem) = problem {
            self.fail(|| problem);
        }
    }

    /// Checks the results that reads of this process alone would return.
    fn check_copy(&self, named: &NodeRef) -> Option<String> {
        let number = self.living(named)?;
        let shard = self.nodes[number].shard.as_ref()?;
        let owned = shard.owned(DISK).map(|accel| accel.log());
        let copy = shard.copy(DISK).map(|host| host.replica()).filter(|replica| replica.is_complete());
        let log = owned.or(copy.map(|replica| replica.log()));
        // An owner may have closed the disk, without dirty data.
        if log.is_none() && self.registry.disk.owner.as_ref() != Some(named) {
            return Some(format!("P1: n{number} is in the set and has no complete copy"));
        }
        let stale = self.stale_block(log)?;
        Some(format!("P1: with the copy of n{number} the disk has {stale}"))
    }

    /// A block with a stale read through a log, even after a power cut of the backing.
    fn stale_block(&self, log: Option<&Log>) -> Option<String> {
        let mut values: [Option<u64>; BLOCKS] = [None; BLOCKS];
        let mut missing = BLOCKS;
        let newest_first = |log| {
            let last: u64 = Log::last(log);
            let count = last.saturating_sub(Log::freed(log));
            (0..count).filter_map(move |index| Some((log, log.get(last - index)?)))
        };
        for (log, record) in log.map(newest_first).into_iter().flatten() {
            let value = &mut values[record.offset as usize / BLOCK];
            if value.is_none() {
                *value = Some(log.data(record).first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)));
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

    pub fn in_backing(&self, block: usize, durable: bool) -> u64 {
        let (mut bytes, offset) = ([0; 8], (block * BLOCK) as u64);
        if durable {
            self.world.read_durable(self.medium, offset, &mut bytes);
        } else {
            self.world.read(self.medium, offset, &mut bytes);
        }
        u64::from_le_bytes(bytes)
    }
}
