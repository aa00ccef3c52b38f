//! The coordinator's filesystem, as far as it moves blocks: one file, its clones, and a stranger that takes every block that is freed.
//!
//! It counts in blocks, and a version stands for a block's content. A change that finds holes or shared blocks copies the whole piece to new
//! blocks, as copy-on-write does: it reads the old ones when it begins, and lets them go when it commits.

use std::collections::{BTreeMap, BTreeSet};

use weir_volume::lun::leases::{Lease, Piece};
use weir_volume::lun::router::{Range, neighbourhood};

/// Blocks of the LUN for each of the file: enough for the file and three clones, all of whose pieces are being copied.
const COPIES: usize = 6;

/// The content of a stranger's block. No version of a client is so large.
pub const STRANGER: u64 = u64::MAX;

/// A clone of the file.
#[derive(Debug)]
struct Clone {
    /// The LUN's block of each, and its content when the clone was made.
    blocks: Vec<Option<(usize, u64)>>,
}

/// A change that has begun: for each of its pieces that move, the new blocks and what they have got.
#[derive(Debug, Default)]
pub struct Copying {
    moved: Vec<(usize, Vec<(usize, u64)>)>,
}

impl Copying {
    /// The new blocks.
    pub fn blocks(&self) -> impl Iterator<Item = usize> {
        self.moved.iter().flat_map(|(_, copied)| copied.iter().map(|(at, _)| *at))
    }
}

/// The LUN and the filesystem on it.
#[derive(Debug)]
pub struct Filesystem {
    /// The versions in the LUN's blocks.
    pub lun: Vec<u64>,
    /// The blocks that it moves together.
    piece: u64,
    /// It may also move a piece of which a write touches none but blocks in place.
    moves_beside: bool,
    /// The file's blocks.
    map: Vec<Option<usize>>,
    /// Blocks that are allocated, and read as zeroes whatever is there.
    unwritten: Vec<bool>,
    /// Blocks that were allocated in holes, and that a crash frees again.
    uncommitted: Vec<(usize, usize)>,
    /// The version that a hole reads as: that of the request that made it.
    zeroes: Vec<u64>,
    clones: BTreeMap<u64, Clone>,
    /// The number of files that have a block; a stranger counts.
    users: Vec<usize>,
    /// The stranger's blocks.
    strangers: BTreeSet<usize>,
}

impl Filesystem {
    /// A file of `blocks` blocks without content; copy-on-write moves `piece` blocks together.
    pub fn new(blocks: usize, piece: u64, moves_beside: bool) -> Filesystem {
        Filesystem {
            lun: vec![0; blocks * COPIES],
            piece,
            moves_beside,
            map: vec![None; blocks],
            unwritten: vec![false; blocks],
            uncommitted: Vec::new(),
            zeroes: vec![0; blocks],
            clones: BTreeMap::new(),
            users: vec![0; blocks * COPIES],
            strangers: BTreeSet::new(),
        }
    }

    fn allocate(&mut self, rng: &mut fastrand::Rng) -> usize {
        let free: Vec<usize> = (0..self.lun.len()).filter(|block| self.users[*block] == 0).collect();
        // The stranger has the others, and lets go of one.
        let block = rng.choice(free).unwrap_or_else(|| {
            let strangers = self.strangers.iter().copied().collect::<Vec<_>>();
            rng.choice(strangers).expect("the LUN is large enough")
        });
        self.strangers.remove(&block);
        self.users[block] = 1;
        block
    }

    fn let_go(&mut self, block: usize, rng: &mut fastrand::Rng) {
        self.users[block] -= 1;
        if self.users[block] == 0 && rng.u8(0..4) > 0 {
            (self.users[block], self.lun[block]) = (1, STRANGER);
            self.strangers.insert(block);
        }
    }

    /// The version that a read of the block returns.
    pub fn read(&self, block: usize) -> u64 {
        let written = self.map[block].filter(|_| !self.unwritten[block]);
        written.map_or(self.zeroes[block], |at| self.lun[at])
    }

    /// The version that the block reads as where the file has a hole.
    pub fn zero_version(&self, block: usize) -> u64 {
        self.zeroes[block]
    }

    /// Where the block is, if the file alone has it.
    pub fn own(&self, block: usize) -> Option<usize> {
        self.map[block].filter(|at| self.users[*at] == 1)
    }

    /// Allocates what is not written in a range. It reads as the zeroes that it was before.
    pub fn begin_allocation(&mut self, (start, end): Range, rng: &mut fastrand::Rng) -> Copying {
        let mut copying = Copying::default();
        for block in start as usize..end as usize {
            if self.map[block].is_none() || self.unwritten[block] {
                let copied = (self.allocate(rng), self.zeroes[block]);
                copying.moved.push((block, vec![copied]));
            }
        }
        copying
    }

    /// A write of the range moves a piece: where it is not in place, or also where another block of the piece would not be.
    fn moves(&self, piece: usize, (start, end): Range) -> bool {
        let mut blocks = piece..piece + self.piece as usize;
        let counts = |block: usize| self.moves_beside || (start as usize..end as usize).contains(&block);
        blocks.any(|block| counts(block) && self.own(block).is_none())
    }

    /// Begins a change of a range: copies what has to move. `all`: all of it, as a defragmenter does.
    pub fn begin(&mut self, range: Range, all: bool, rng: &mut fastrand::Rng) -> Copying {
        let (start, end) = neighbourhood(range, self.piece);
        let mut copying = Copying::default();
        for piece in (start as usize..end as usize).step_by(self.piece as usize) {
            if all || self.moves(piece, range) {
                let blocks = piece..piece + self.piece as usize;
                let copied = blocks.map(|block| (self.allocate(rng), self.read(block))).collect();
                copying.moved.push((piece, copied));
            }
        }
        copying
    }

    /// A coordinator that ends has not committed: its new blocks are free.
    pub fn abandon(&mut self, copying: Copying, rng: &mut fastrand::Rng) {
        for (block, _) in copying.moved.into_iter().flat_map(|(_, copied)| copied) {
            self.let_go(block, rng);
        }
    }

    /// Commits what was copied.
    pub fn commit(&mut self, copying: Copying, is_durable: bool, rng: &mut fastrand::Rng) {
        for (piece, copied) in copying.moved {
            // Of a piece in a hole, the filesystem may write no more than it is asked to.
            let leaves = copied.len() > 1 && rng.bool();
            for (block, (at, version)) in (piece..).zip(copied) {
                self.lun[at] = version;
                match self.map[block].replace(at) {
                    Some(before) => self.let_go(before, rng),
                    None => {
                        self.unwritten[block] = leaves;
                        if !is_durable {
                            self.uncommitted.push((block, at));
                        }
                        continue;
                    }
                }
                self.unwritten[block] &= leaves;
            }
        }
    }

    /// The filesystem's log has everything.
    pub fn make_durable(&mut self) {
        self.uncommitted.clear();
    }

    /// The filesystem's log did not have them yet.
    pub fn lose_uncommitted(&mut self, rng: &mut fastrand::Rng) {
        for (block, at) in std::mem::take(&mut self.uncommitted) {
            if self.map[block] == Some(at) {
                self.map[block] = None;
                self.let_go(at, rng);
            }
        }
    }

    /// A change of the range moves blocks, or allocates some.
    pub fn needs_space(&self, range: Range) -> bool {
        let (start, end) = neighbourhood(range, self.piece);
        (start as usize..end as usize).step_by(self.piece as usize).any(|piece| self.moves(piece, range))
    }

    /// The block of the file that is there.
    pub fn block_at(&self, at: usize) -> Option<usize> {
        self.map.iter().position(|other| *other == Some(at))
    }

    /// The version that a crash of the LUN and of the coordinator would leave of the block; `durable` has those of the LUN's blocks.
    pub fn read_after_crash(&self, block: usize, durable: &[u64]) -> u64 {
        let is_committed = |at: &usize| !self.uncommitted.contains(&(block, *at));
        let written = self.map[block].filter(|_| !self.unwritten[block]).filter(is_committed);
        written.map_or(self.zeroes[block], |at| durable[at])
    }

    /// Whether the filesystem's log has the block's place.
    pub fn is_committed(&self, block: usize) -> bool {
        !self.uncommitted.iter().any(|(other, at)| *other == block && self.map[block] == Some(*at))
    }

    /// As a coordinator sees it that does not look at the flags of extents.
    pub fn unwritten_as_written(&self, layout: Vec<Piece>) -> Vec<Piece> {
        let written = |piece: Piece| match (piece.lease, self.map[piece.start as usize]) {
            (Lease::Nothing, Some(at)) => Piece { lease: Lease::ReadWrite(at as u64), ..piece },
            _ => piece,
        };
        layout.into_iter().map(written).collect()
    }

    /// Writes a version through the filesystem, which has made the range its own.
    pub fn write(&mut self, (start, end): Range, version: u64) {
        for block in start as usize..end as usize {
            let at = self.own(block).expect("the change has made it the file's own");
            self.lun[at] = version;
            self.unwritten[block] = false;
        }
    }

    /// Frees the blocks of a range, which reads as zeroes of this version then.
    pub fn punch(&mut self, (start, end): Range, version: u64, rng: &mut fastrand::Rng) {
        for block in start as usize..end as usize {
            self.zeroes[block] = version;
            if let Some(before) = self.map[block].take() {
                self.let_go(before, rng);
            }
        }
    }

    /// Makes a clone of the whole file, which takes the place of an earlier one of its number.
    pub fn clone_file(&mut self, number: u64, rng: &mut fastrand::Rng) {
        if let Some(Clone { blocks }) = self.clones.remove(&number) {
            blocks.into_iter().flatten().for_each(|(at, _)| self.let_go(at, rng));
        }
        let blocks = self.map.iter().map(|at| at.map(|at| (at, self.lun[at]))).collect::<Vec<_>>();
        blocks.iter().flatten().for_each(|(at, _)| self.users[*at] += 1);
        self.clones.insert(number, Clone { blocks });
    }

    /// The layout of a range, as the filesystem reports it.
    pub fn layout(&self, (start, end): Range) -> Vec<Piece> {
        let piece = |block: u64| {
            let lease = match self.map[block as usize] {
                None => Lease::Hole,
                Some(_) if self.unwritten[block as usize] => Lease::Nothing,
                Some(at) if self.users[at] == 1 => Lease::ReadWrite(at as u64),
                Some(at) => Lease::ReadOnly(at as u64),
            };
            Piece { start: block, end: block + 1, lease }
        };
        (start..end).map(piece).collect()
    }

    /// Whether a lease of the owner is still true: nothing has moved under it (I1, I3).
    pub fn is_true(&self, block: usize, lease: Lease) -> bool {
        match lease {
            Lease::Nothing => true,
            // Also what was allocated since reads as zeroes, until the owner itself writes there.
            Lease::Hole => self.read(block) == self.zeroes[block],
            Lease::ReadWrite(at) => self.own(block) == Some(at as usize) && !self.unwritten[block],
            Lease::ReadOnly(at) => self.map[block] == Some(at as usize),
        }
    }

    /// A block that is not the file's and has changed, in words (I4).
    pub fn damage(&self) -> Option<String> {
        for (number, clone) in &self.clones {
            for (block, kept) in clone.blocks.iter().enumerate() {
                if let Some((at, version)) = kept.filter(|(at, version)| self.lun[*at] != *version) {
                    let now = self.lun[at];
                    return Some(format!(
                        "I1: block {block} of clone {number} has version {now}, not {version}"
                    ));
                }
            }
        }
        let mut strangers = self.strangers.iter();
        strangers
            .find(|at| self.lun[**at] != STRANGER)
            .map(|at| format!("I4: block {at} of the LUN is a stranger's, and has version {}", self.lun[*at]))
    }
}
