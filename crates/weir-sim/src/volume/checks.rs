//! The invariants of `VOLUME.md` §3.

use weir_volume::lun::leases::{Lease, Piece};
use weir_volume::lun::router::{Route, Router, overlap};

use super::{BLOCKS, World};

/// As a coordinator sees it that does not look at the flags of extents.
pub fn shared_as_own(layout: Vec<Piece>) -> Vec<Piece> {
    let own = |piece: Piece| match piece.lease {
        Lease::ReadOnly(at) => Piece { lease: Lease::ReadWrite(at), ..piece },
        _ => piece,
    };
    layout.into_iter().map(own).collect()
}

/// I6, by what the router says: of two that overlap and do not only read, both are redirected, or they are on one route and one of them
/// reads.
pub fn locked_twice(router: &Router) -> Option<String> {
    let all = router.under_way();
    all.iter().enumerate().find_map(|(index, one)| {
        let other = all[index + 1..].iter().find(|other| {
            let (before, after) = (one.request.kind.changes(), other.request.kind.changes());
            let overlaps = overlap(one.locks, other.locks);
            let two_routes = one.route != other.route && (before || after);
            overlaps && (two_routes || before && after && one.route != Route::File)
        })?;
        Some(format!("I6: {one:?} and {other:?} are under way together"))
    })
}

impl World {
    pub fn check(&mut self) {
        let broken = self.false_lease().or_else(|| self.misdirected()).or_else(|| self.two_routes());
        if let Some(text) = broken.or_else(|| self.locked_twice()) {
            return self.log.fail(|| text);
        }
        if let Some(text) = self.filesystem.damage() {
            self.log.fail(|| text);
        }
    }

    /// I1, I3: what the owner holds is as the filesystem has it.
    fn false_lease(&self) -> Option<String> {
        let router = self.router.as_ref()?;
        let pieces: Vec<Piece> = router.leases().of((0, BLOCKS as u64)).collect();
        let blocks = pieces
            .iter()
            .flat_map(|piece| (piece.start..piece.end).filter_map(|block| piece.within((block, block + 1))));
        let mut wrong = blocks.filter(|one| !self.filesystem.is_true(one.start as usize, one.lease));
        wrong.next().map(|one| {
            format!("I3: the owner holds {:?} for block {}, and it has moved", one.lease, one.start)
        })
    }

    /// I3, I4: I/O that is under way goes to the blocks of the file, also that of an owner or a coordinator that has ended.
    fn misdirected(&self) -> Option<String> {
        self.lun_io.iter().find_map(|io| {
            let mut blocks =
                (io.piece.start..io.piece.end).filter_map(|block| io.piece.within((block, block + 1)));
            let wrong = blocks.find(|one| !self.filesystem.is_true(one.start as usize, one.lease))?;
            Some(format!(
                "I3: request {} is under way to {:?} for block {}, which has moved",
                io.id, wrong.lease, wrong.start
            ))
        })
    }

    /// I6: overlapping requests, of which one changes something, are on one route.
    fn two_routes(&self) -> Option<String> {
        let direct = self.lun_io.iter().filter(|io| io.block.is_none() && io.owner == self.owner);
        direct.filter_map(|io| Some((io.piece, self.pending.get(&io.id)?))).find_map(|(piece, one)| {
            let redirected = self.redirected().find(|other| {
                let overlaps = overlap(other.range, (piece.start, piece.end));
                let changes = other.kind.changes() || one.request.kind.changes();
                overlaps && changes && other.id != one.request.id
            })?;
            Some(format!("I6: {:?} is direct and {redirected:?} is redirected", one.request))
        })
    }

    fn locked_twice(&self) -> Option<String> {
        locked_twice(self.router.as_ref()?)
    }

    /// The filesystem's content in the end is the last of each block's history.
    pub fn read_all(&mut self) {
        for block in 0..BLOCKS {
            let (began, now) = (self.number(), self.number());
            self.histories[block].read(self.filesystem.read(block), began, now);
        }
    }

    /// Each block's history is that of a register.
    pub fn check_histories(&mut self) {
        let broken = self
            .histories
            .iter()
            .enumerate()
            .find_map(|(block, history)| Some((block, history.contradiction()?)));
        if let Some((block, text)) = broken {
            self.log.fail(|| format!("P7: block {block}: {text}"));
        }
    }
}
