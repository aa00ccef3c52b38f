//! What media do to writes that they have reported as done.

use super::file::{File, FileId, PAGE, SECTOR};
use super::random::Random;
use super::{State, World};

/// What becomes of a write that was reported as done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// A bit of it flips.
    Rot,
    /// It is not there; what was there before is.
    Lost,
    /// It went elsewhere, over what was there.
    Misdirected,
}

/// A write that is durable.
pub(super) struct Written {
    offset: u64,
    bytes: Vec<u8>,
    before: Vec<u8>,
}

/// The last two durable writes of a file, from `start` on; those that go astray stay within `each` bytes.
pub(super) struct Remembered {
    start: u64,
    each: u64,
    last: Vec<Written>,
}

impl File {
    pub(super) fn remember(&mut self, offset: u64, bytes: &[u8]) {
        let Some(remembered) = self.remembered.as_mut().filter(|remembered| offset >= remembered.start)
        else {
            return;
        };
        let mut before = vec![0; bytes.len()];
        self.durable.read(offset, &mut before);
        if remembered.last.len() > 1 {
            remembered.last.remove(0);
        }
        remembered.last.push(Written { offset, bytes: bytes.to_vec(), before });
    }

    /// Harm comes over the write before the newest one. Nothing when there is none, or the newest one covers it.
    fn harm(&mut self, random: &mut Random, harm: Harm) -> Option<Vec<u8>> {
        let Remembered { start, each, last } = self.remembered.as_mut()?;
        let [Written { offset, bytes, before }, newest] = &last[..] else { return None };
        let (length, end) = (bytes.len() as u64, offset + bytes.len() as u64);
        if *offset < newest.offset + newest.bytes.len() as u64 && newest.offset < end {
            return None;
        }
        let mut writes = vec![(*offset, before.clone())];
        match harm {
            Harm::Rot => {
                let mut rotten = bytes.clone();
                // What lies behind the first sector of a page may mean nothing.
                let page = random.below(length.div_ceil(PAGE as u64)) * PAGE as u64;
                let place = page + random.below((length - page).min(SECTOR as u64));
                rotten[place as usize] ^= 1 << random.below(8);
                writes = vec![(*offset, rotten)];
            }
            Harm::Lost => {}
            Harm::Misdirected => {
                let slot = *start + (offset - *start) / *each * *each;
                let pages = (*each - length) / PAGE as u64;
                writes.push((slot + random.below(pages + 1) * PAGE as u64, bytes.clone()));
            }
        }
        // The newest one came after it.
        writes.push((newest.offset, newest.bytes.clone()));
        let harmed = last.remove(0).bytes;
        for (offset, bytes) in writes {
            self.content.write(offset, &bytes);
            self.durable.write(offset, &bytes);
        }
        Some(harmed)
    }
}

impl World {
    /// From now on, durable writes behind `start` are remembered, so that harm may come over them ([`World::harm`]); those that
    /// go astray stay within `each` bytes, counted from there.
    pub fn remember(&self, file: FileId, start: u64, each: u64) {
        self.lock().files[file.0].remembered = Some(Remembered { start, each, last: Vec::new() });
    }

    /// Harm comes over the last durable write but one of a file that remembers them. Returns what was written; `None` when
    /// there is no such write, or the one after it covers a part of it.
    #[must_use]
    pub fn harm(&self, file: FileId, harm: Harm) -> Option<Vec<u8>> {
        let State { files, random, .. } = &mut *self.lock();
        files[file.0].harm(random, harm)
    }
}
