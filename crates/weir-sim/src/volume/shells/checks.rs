//! What has to hold after every step: the invariants of `VOLUME.md` §3, and the promises to the client.

use weir_volume::lun::leases::{Lease, Piece};

use super::client::Pending;
use super::storage::{Changed, version_of};
use super::{BLOCK, BLOCKS, SIZE, World};
use crate::volume::checks::locked_twice;

impl World {
    pub fn check(&mut self) {
        let (changes, violation) = {
            let mut lun = self.lun.lock();
            (lun.take_changes(), lun.violation.take())
        };
        let broken = violation
            .or_else(|| changes.iter().find_map(|changed| self.unasked(*changed)))
            .or_else(|| self.false_lease())
            .or_else(|| if changes.is_empty() { None } else { self.lun.lock().filesystem.damage() });
        for Changed { block, before, now } in changes {
            let (before, now) = (version_of(before), version_of(now));
            self.log.note(|| format!("block {block}: version {before} becomes {now}"));
        }
        if let Some(text) = broken {
            self.log.fail(|| text);
        }
    }

    /// P4, P7: whatever changes in the file, a request is open that does it. One that has failed, or whose owner has ended, may do it late,
    /// but not over a newer one that was answered.
    fn unasked(&self, Changed { block, before, now }: Changed) -> Option<String> {
        let (before, version) = (version_of(before), version_of(now));
        let may_be_late = |id: u64| !(before > id && self.acknowledged.contains_key(&before));
        if now != 0 {
            let is_open = self.pending.contains_key(&version);
            let is_late = self.failed.contains_key(&version) && may_be_late(version);
            return (!is_open && !is_late).then(|| {
                let ended = self.acknowledged.get(&version).map_or("has failed", |_| "was answered");
                format!("P4: write {version}, which {ended}, covers version {before} in block {block}")
            });
        }
        let zeroes = |(id, pending): (&u64, &Pending)| pending.zeroes(block).then_some(*id);
        let is_open = self.pending.iter().find_map(zeroes).is_some();
        let is_late = self.failed.iter().filter_map(zeroes).any(may_be_late);
        // A crash undoes what was not committed.
        let was_promised = self.acknowledged.contains_key(&before);
        (was_promised && !is_open && !is_late)
            .then(|| format!("P7: version {before} of block {block} is lost, which was answered"))
    }

    /// I1, I3: what the owner holds is as the filesystem has it, durably.
    fn false_lease(&self) -> Option<String> {
        let router = self.nodes[self.owner?].owner.as_ref()?.router();
        let lun = self.lun.lock();
        let wrong = |piece: Piece| {
            let mut blocks = (piece.start / BLOCK..piece.end / BLOCK)
                .filter_map(|block| piece.within((block * BLOCK, (block + 1) * BLOCK)));
            blocks.find_map(|one| {
                let block = (one.start / BLOCK) as usize;
                let lease = match one.lease {
                    Lease::ReadWrite(at) => Lease::ReadWrite(at / BLOCK),
                    Lease::ReadOnly(at) => Lease::ReadOnly(at / BLOCK),
                    other => other,
                };
                let is_committed =
                    !matches!(lease, Lease::ReadWrite(_)) || lun.filesystem.is_committed(block);
                let is_true = lun.filesystem.is_true(block, lease);
                (!is_true)
                    .then(|| format!("I3: the owner holds {lease:?} for block {block}, and it has moved"))
                    .or_else(|| {
                        (!is_committed).then(|| {
                            format!("I1: the owner holds {lease:?} for block {block}, which is not committed")
                        })
                    })
            })
        };
        let found = router.leases().of((0, SIZE)).find_map(wrong);
        found.or_else(|| locked_twice(router))
    }

    /// P8: what was answered before a flush began survives. What was under way then may survive or not.
    pub fn check_flush(&mut self, id: u64, pending: &Pending) {
        self.counts.durable += 1;
        let began = pending.began;
        let broken = (0..BLOCKS).find_map(|block| {
            let lun = self.lun.lock();
            let durable = lun.durable(block);
            let (before, later) = lun.values_since(block, began);
            if later.iter().any(|(_, value)| *value == durable) {
                return None;
            }
            let mut newest = None;
            for value in before {
                newest = newest.or(Some(value));
                if value == durable {
                    return None;
                }
                let version = version_of(value);
                let is_certain = match value {
                    0 => !self.pending.values().chain(self.failed.values()).any(|one| one.zeroes(block)),
                    _ => self.acknowledged.get(&version).is_some_and(|at| *at < began),
                };
                if is_certain {
                    break;
                }
            }
            Some((block, version_of(durable), newest.map(version_of)))
        });
        if let Some((block, durable, newest)) = broken {
            self.log.fail(|| {
                format!("P8: flush {id} is answered, and version {durable} of block {block} is durable, not {newest:?}")
            });
        }
    }

    /// P8: a durable change, or a later one, survives.
    pub fn check_durable(&mut self, id: u64, block: usize, value: u64, began: u64) {
        self.counts.durable += 1;
        let lun = &self.lun.lock();
        let durable = lun.durable(block);
        let (mut before, later) = lun.values_since(block, began);
        let was_there = before.next() == Some(value);
        let since = later.iter().map(|(_, value)| *value).skip_while(|one| !was_there && *one != value);
        let survives = was_there && durable == value || since.into_iter().any(|one| one == durable);
        if !survives {
            let durable = version_of(durable);
            self.log.fail(|| {
                format!("P8: {id} is answered as durable, and version {durable} of block {block} is")
            });
        }
    }

    /// The disk's content in the end is the last of each block's history.
    pub fn read_all(&mut self) {
        for block in 0..BLOCKS {
            let mut lun = self.lun.lock();
            let (began, now) = (lun.tick(), lun.tick());
            let value = lun.filesystem.read(block);
            drop(lun);
            if value != 0 {
                self.histories[block].read(version_of(value), began, now);
            }
        }
    }

    /// Each block's history is that of a register. Zeroes are no part of it: any request for zeroes may have made them.
    pub fn check_histories(&mut self) {
        let mut histories = self.histories.iter().enumerate();
        let broken = histories.find_map(|(block, history)| Some((block, history.contradiction()?)));
        if let Some((block, text)) = broken {
            self.log.fail(|| format!("P7: block {block}: {text}"));
        }
    }
}
