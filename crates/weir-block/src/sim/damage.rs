//! Damage to writes that the medium has reported as durable.

use super::file::{File, FileId, PAGE, SECTOR};
use super::random::Random;
use super::{State, World};

/// What happens to a write that was reported as durable.
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
pub(super) struct Written {
    offset: u64,
    bytes: Vec<u8>,
    before: Vec<u8>,
}

/// The last two durable writes of a file from `start` on; misdirected ones stay within their extent of `each` bytes.
pub(super) struct TrackedWrites {
    start: u64,
    each: u64,
    last: Vec<Written>,
}

impl File {
    pub(super) fn track(&mut self, offset: u64, bytes: &[u8]) {
        let Some(tracked) = self.tracked.as_mut().filter(|tracked| offset >= tracked.start) else {
            return;
        };
        let mut before = vec![0; bytes.len()];
        self.durable.read(offset, &mut before);
        if tracked.last.len() > 1 {
            tracked.last.remove(0);
        }
        tracked.last.push(Written { offset, bytes: bytes.to_vec(), before });
    }

    /// Damages the write before the newest one. `None` when there is none, or the newest one overlaps it.
    fn damage(&mut self, random: &mut Random, damage: Damage) -> Option<Vec<u8>> {
        let TrackedWrites { start, each, last } = self.tracked.as_mut()?;
        let [Written { offset, bytes, before }, newest] = &last[..] else { return None };
        let (length, end) = (bytes.len() as u64, offset + bytes.len() as u64);
        if *offset < newest.offset + newest.bytes.len() as u64 && newest.offset < end {
            return None;
        }
        let mut writes = vec![(*offset, before.clone())];
        match damage {
            Damage::BitFlip => {
                let mut flipped = bytes.clone();
                // Bytes after the first sector of a page may be padding.
                let page = random.below(length.div_ceil(PAGE as u64)) * PAGE as u64;
                let index = page + random.below((length - page).min(SECTOR as u64));
                flipped[index as usize] ^= 1 << random.below(8);
                writes = vec![(*offset, flipped)];
            }
            Damage::Lost => {}
            Damage::Misdirected => {
                let slot = *start + (offset - *start) / *each * *each;
                let pages = (*each - length) / PAGE as u64;
                writes.push((slot + random.below(pages + 1) * PAGE as u64, bytes.clone()));
            }
        }
        // The newest write came later.
        writes.push((newest.offset, newest.bytes.clone()));
        let damaged = last.remove(0).bytes;
        for (offset, bytes) in writes {
            self.content.write(offset, &bytes);
            self.durable.write(offset, &bytes);
        }
        Some(damaged)
    }
}

impl World {
    /// From now on, the world tracks durable writes after `start`, so that [`World::damage`] can damage them; misdirected ones
    /// stay within their extent of `each` bytes, counted from `start`.
    pub fn track_writes(&self, file: FileId, start: u64, each: u64) {
        self.lock().files[file.0].tracked = Some(TrackedWrites { start, each, last: Vec::new() });
    }

    /// Damages the last durable write but one of a tracked file. Returns its bytes; `None` when there is no such write, or the
    /// newest write overlaps it.
    #[must_use]
    pub fn damage(&self, file: FileId, damage: Damage) -> Option<Vec<u8>> {
        let State { files, random, .. } = &mut *self.lock();
        files[file.0].damage(random, damage)
    }
}
