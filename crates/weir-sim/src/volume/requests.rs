//! The client's requests and their data.

use std::collections::BTreeMap;

use weir_block::IoError;
use weir_volume::lun::coordinator;
use weir_volume::lun::leases::{Lease, Piece};
use weir_volume::lun::router::{Event, Kind, Range, Request};

use super::{DEPTH, LunIo, World};

/// A request without an answer.
#[derive(Debug)]
pub struct Pending {
    pub request: Request,
    began: u64,
    /// The versions that a read has returned so far, by block.
    seen: BTreeMap<u64, u64>,
    /// The versions that the filesystem has returned, on their way to the owner.
    redirected: BTreeMap<u64, u64>,
    /// Its owner has ended: it never gets an answer.
    pub is_lost: bool,
}

impl Pending {
    /// The coordinator's answer has arrived.
    pub fn take_redirected(&mut self) {
        self.seen = std::mem::take(&mut self.redirected);
    }
}

impl World {
    pub fn submit(&mut self) {
        let open = self.pending.values().filter(|pending| !pending.is_lost).count();
        if self.router.is_none() || open >= DEPTH {
            return self.go_on();
        }
        let start = self.rng.u64(0..self.used);
        let end = (start + self.rng.u64(1..7)).min(self.used);
        let kind = match self.rng.u8(0..20) {
            0..8 => Kind::Read,
            8..17 => Kind::Write,
            17 => Kind::Flush,
            _ => Kind::Punch,
        };
        let (id, began) = (self.number(), self.number());
        let range = if kind == Kind::Flush { (0, 0) } else { (start, end) };
        let request = Request { id, kind, range };
        if kind.changes() {
            (start..end).for_each(|block| self.histories[block as usize].write(id, began));
        }
        let (seen, redirected) = (BTreeMap::new(), BTreeMap::new());
        self.pending.insert(id, Pending { request, began, seen, redirected, is_lost: false });
        self.route(Event::Submitted(request));
    }

    pub fn answer(&mut self, id: u64) {
        let now = self.number();
        let Some(Pending { request, began, seen, .. }) = self.pending.remove(&id) else {
            return self.log.fail(|| format!("request {id} is answered twice"));
        };
        self.counts.answered += 1;
        for block in request.range.0..request.range.1 {
            let history = &mut self.histories[block as usize];
            match (request.kind, seen.get(&block)) {
                (Kind::Read, Some(version)) => history.read(*version, began, now),
                (Kind::Read, None) => {
                    return self.log.fail(|| format!("read {id} is answered without block {block}"));
                }
                _ => history.acknowledged(id, now),
            }
        }
    }

    /// The owner answers a part of a read by itself.
    pub fn reads_zeroes(&mut self, id: u64, (start, end): Range) {
        for block in start..end {
            let version = self.filesystem.zero_version(block as usize);
            self.sees(id, block, version);
        }
    }

    fn sees(&mut self, id: u64, block: u64, version: u64) {
        if let Some(pending) = self.pending.get_mut(&id) {
            pending.seen.insert(block, version);
        }
    }

    /// I/O to the LUN ends: it is done now, however long ago it began. Without a path it may not be done.
    pub fn io_ends(&mut self) {
        let index = self.rng.usize(0..self.lun_io.len());
        // The longer it is under way after its connection is gone, the more can go wrong.
        let LunIo { block, connection, .. } = self.lun_io[index];
        let is_former = !self.connected || connection != self.connection;
        if block.is_some() && is_former && self.rng.u8(0..20) > 0 {
            return;
        }
        let io = self.lun_io.swap_remove(index);
        let ok = io.block.is_some() && self.rng.u8(0..20) > 0 || self.path || io.owner != self.owner;
        if ok || self.rng.bool() {
            self.do_on_lun(io);
        }
        match io.block {
            Some(job) => {
                let result = if ok { Ok(()) } else { Err(IoError::from_errno(libc::EIO, "writing")) };
                self.coordinate(coordinator::Event::Executed { job, result, layout: Vec::new() });
            }
            None if io.owner == self.owner => self.route(Event::Answered { id: io.id, ok }),
            None => {}
        }
    }

    pub fn do_on_lun(&mut self, LunIo { id, kind, piece: Piece { start, end, lease }, .. }: LunIo) {
        let (Lease::ReadWrite(at) | Lease::ReadOnly(at)) = lease else { return };
        for block in start..end {
            let on_lun = (at + block - start) as usize;
            match kind {
                Kind::Read => {
                    let version = self.filesystem.lun[on_lun];
                    self.sees(id, block, version);
                }
                _ => {
                    self.check_order(id, block, self.filesystem.lun[on_lun]);
                    self.filesystem.lun[on_lun] = id;
                }
            }
        }
    }

    pub fn do_through_filesystem(&mut self, request: Request) {
        let Request { id, kind, range } = request;
        match kind {
            Kind::Read => {
                let seen = (range.0..range.1).map(|block| (block, self.filesystem.read(block as usize)));
                let seen = seen.collect();
                if let Some(pending) = self.pending.get_mut(&id) {
                    pending.redirected = seen;
                }
            }
            Kind::Write => {
                (range.0..range.1)
                    .for_each(|block| self.check_order(id, block, self.filesystem.read(block as usize)));
                self.filesystem.write(range, id);
            }
            Kind::Punch => self.filesystem.punch(range, id, &mut self.rng),
            Kind::Flush => {}
        }
    }

    /// P4: a write that has failed for its client may land, but not over a newer one that was acknowledged. (For the others, the histories
    /// tell.)
    fn check_order(&mut self, id: u64, block: u64, there: u64) {
        if self.failed.contains(&id) && there > id && self.histories[block as usize].is_acknowledged(there) {
            self.log.fail(|| format!("P4: write {id}, which has failed, covers {there} in block {block}"));
        }
    }
}
