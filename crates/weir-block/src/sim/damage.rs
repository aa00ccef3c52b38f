//! Damage to writes that the medium has reported as durable.

use super::{PAGE, SECTOR};
use crate::random::Random;

/// The damage to a write that was reported as durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// One bit is flipped.
    BitFlip,
    /// It is missing; the older content is still there.
    Lost,
    /// It overwrote another location.
    Misdirected,
}

/// A durable write.
struct Written {
    offset: u64,
    bytes: Vec<u8>,
    before: Vec<u8>,
}

impl Written {
    fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

/// Writes to apply at once, by offset.
pub(super) type Writes = Vec<(u64, Vec<u8>)>;

/// The last two durable writes of a file from `start` on; misdirected ones stay within their extent of `each` bytes.
pub(super) struct TrackedWrites {
    start: u64,
    each: u64,
    last: Vec<Written>,
}

impl TrackedWrites {
    pub(super) fn new(start: u64, each: u64) -> TrackedWrites {
        TrackedWrites { start, each, last: Vec::new() }
    }

    /// A write at `offset` becomes durable. `before` reads the content that it replaces.
    pub(super) fn track(&mut self, offset: u64, bytes: &[u8], before: impl FnOnce(&mut [u8])) {
        if offset < self.start {
            return;
        }
        let mut replaced = vec![0; bytes.len()];
        before(&mut replaced);
        if self.last.len() > 1 {
            self.last.remove(0);
        }
        self.last.push(Written { offset, bytes: bytes.to_vec(), before: replaced });
    }

    /// Damages the write before the newest one. Returns its bytes, and the writes that produce the damage. `None` when there
    /// is none, or the newest one overlaps it.
    pub(super) fn damage(&mut self, random: &mut Random, damage: Damage) -> Option<(Vec<u8>, Writes)> {
        let TrackedWrites { start, each, last } = self;
        let [write, newest] = &last[..] else { return None };
        let (length, offset) = (write.bytes.len() as u64, write.offset);
        if offset < newest.end() && newest.offset < write.end() {
            return None;
        }
        let mut writes = vec![(offset, write.before.clone())];
        match damage {
            Damage::BitFlip => {
                let mut flipped = write.bytes.clone();
                // Bytes after the first sector of a page may be padding.
                let page = random.below(length.div_ceil(PAGE as u64)) * PAGE as u64;
                let index = page + random.below((length - page).min(SECTOR as u64));
                flipped[index as usize] ^= 1 << random.below(8);
                writes = vec![(offset, flipped)];
            }
            Damage::Lost => {}
            Damage::Misdirected => {
                let slot = *start + (offset - *start) / *each * *each;
                let pages = (*each - length) / PAGE as u64;
                writes.push((slot + random.below(pages + 1) * PAGE as u64, write.bytes.clone()));
            }
        }
        // The newest write came later.
        writes.push((newest.offset, newest.bytes.clone()));
        Some((last.remove(0).bytes, writes))
    }
}
