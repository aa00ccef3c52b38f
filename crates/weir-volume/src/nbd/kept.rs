//! What the server has acknowledged and not flushed since: it is kept here, and written again if the connection breaks. The server may have
//! ended with it, and with whatever it had not made durable.

use std::collections::BTreeMap;
use std::rc::Rc;

use weir_block::Buffer;

/// The content of a range.
#[derive(Clone, Debug)]
pub(super) enum Content {
    /// From this byte of a buffer on.
    Data(Rc<Buffer>, usize),
    /// Zeroes; the server may have freed the space.
    Zeroes { may_unmap: bool },
}

/// The newest content of one range.
#[derive(Clone, Debug)]
pub(super) struct Extent {
    pub end: u64,
    pub content: Content,
    /// The number of flushes that had begun when it was acknowledged: a later one covers it.
    age: u64,
    /// The connection on which it was acknowledged is gone: it is to be written again.
    owed: bool,
}

/// Ranges that do not overlap, by their first byte. What is written over is forgotten.
#[derive(Debug, Default)]
pub(super) struct Kept {
    extents: BTreeMap<u64, Extent>,
    owed: usize,
}

impl Kept {
    /// The server has acknowledged this content of a range, after `age` flushes had begun.
    pub fn insert(&mut self, (start, end): (u64, u64), content: Content, age: u64) {
        self.forget((start, end));
        self.extents.insert(start, Extent { end, content, age, owed: false });
    }

    /// The range has newer content, which somebody else keeps.
    pub fn forget(&mut self, (start, end): (u64, u64)) {
        // An extent that begins before the range: what is before it stays, and what is behind it.
        if let Some((&first, before)) = self.extents.range_mut(..start).next_back()
            && before.end > start
        {
            let behind = (before.end > end).then(|| before.without(end - first));
            before.end = start;
            if let Some(behind) = behind {
                self.owed += usize::from(behind.owed);
                self.extents.insert(end, behind);
            }
        }
        while let Some((&first, _)) = self.extents.range(start..end).next() {
            let Some(extent) = self.extents.remove(&first) else { break };
            if extent.end > end {
                self.extents.insert(end, extent.without(end - first));
            } else {
                self.owed -= usize::from(extent.owed);
            }
        }
    }

    /// A flush has succeeded that began as the one after `age` others.
    pub fn flushed(&mut self, age: u64) {
        self.extents.retain(|_, extent| extent.owed || extent.age > age);
    }

    /// Everything is to be written again.
    pub fn owe_all(&mut self) {
        self.extents.values_mut().for_each(|extent| extent.owed = true);
        self.owed = self.extents.len();
    }

    /// Nothing is left of it: the disk is another node's.
    pub fn clear(&mut self) {
        *self = Kept::default();
    }

    /// Extents that are to be written again.
    pub fn owed(&self) -> usize {
        self.owed
    }

    /// The first of those from `at` on.
    pub fn next_owed(&self, at: u64) -> Option<(u64, &Extent)> {
        if self.owed == 0 {
            return None;
        }
        self.extents.range(at..).find(|(_, extent)| extent.owed).map(|(&start, extent)| (start, extent))
    }

    /// The extent that begins at `start` has been written again, after `age` flushes had begun.
    pub fn paid(&mut self, start: u64, age: u64) {
        if let Some(extent) = self.extents.get_mut(&start).filter(|extent| extent.owed) {
            (extent.owed, extent.age) = (false, age);
            self.owed -= 1;
        }
    }

    /// Whether something in the range is still to be written again.
    pub fn owes(&self, (start, end): (u64, u64)) -> bool {
        if self.owed == 0 {
            return false;
        }
        let before = self.extents.range(..start).next_back();
        let reaches = before.is_some_and(|(_, extent)| extent.end > start && extent.owed);
        reaches || self.extents.range(start..end).any(|(_, extent)| extent.owed)
    }

    pub fn len(&self) -> usize {
        self.extents.len()
    }

    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }
}

impl Extent {
    /// Without its first bytes.
    fn without(&self, bytes: u64) -> Extent {
        let content = match &self.content {
            Content::Data(buffer, from) => Content::Data(Rc::clone(buffer), from + bytes as usize),
            zeroes @ Content::Zeroes { .. } => zeroes.clone(),
        };
        Extent { content, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_block::BufferPool;

    const BYTES: u64 = 64;

    /// The same, byte by byte: its value, the age, and whether it is owed.
    type Oracle = Vec<Option<(u8, u64, bool)>>;

    fn seen(kept: &Kept) -> Oracle {
        let mut bytes = vec![None; BYTES as usize];
        for (&start, extent) in &kept.extents {
            for at in start..extent.end {
                let value = match &extent.content {
                    Content::Data(buffer, from) => buffer.bytes()[from + (at - start) as usize],
                    Content::Zeroes { .. } => 0,
                };
                let byte = &mut bytes[at as usize];
                assert!(byte.is_none(), "two extents have byte {at}");
                *byte = Some((value, extent.age, extent.owed));
            }
        }
        assert_eq!(kept.owed, kept.extents.values().filter(|extent| extent.owed).count());
        bytes
    }

    #[test]
    fn it_has_the_newest_of_every_byte_that_no_flush_covers() {
        let pool = BufferPool::new(1 << 20);
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut kept, mut oracle, mut age) = (Kept::default(), vec![None; BYTES as usize], 0);
            for step in 1..200_u64 {
                let start = random.u64(..BYTES);
                let end = random.u64(start + 1..=BYTES);
                let range = start as usize..end as usize;
                match random.u8(..16) {
                    0 => {
                        // One flush covers everything that was acknowledged before it began.
                        age += 1;
                        if random.bool() {
                            kept.flushed(age - 1);
                            oracle.iter_mut().for_each(|byte: &mut Option<(u8, u64, bool)>| {
                                *byte = byte.filter(|(_, of, owed)| *owed || *of >= age);
                            });
                        }
                    }
                    1 => {
                        kept.owe_all();
                        oracle.iter_mut().flatten().for_each(|(.., owed)| *owed = true);
                    }
                    2..5 => {
                        kept.forget((start, end));
                        oracle[range].fill(None);
                    }
                    5..8 => {
                        if let Some((at, extent)) = kept.next_owed(start) {
                            let range = at as usize..extent.end as usize;
                            kept.paid(at, age);
                            oracle[range].iter_mut().flatten().for_each(|one| (one.1, one.2) = (age, false));
                        }
                    }
                    kind => {
                        let value = if kind == 8 { 0 } else { step as u8 };
                        let mut buffer = pool.take((end - start) as usize).unwrap();
                        buffer.bytes_mut().fill(value);
                        let content = match kind {
                            8 => Content::Zeroes { may_unmap: false },
                            _ => Content::Data(Rc::new(buffer), 0),
                        };
                        kept.insert((start, end), content, age);
                        oracle[range].fill(Some((value, age, false)));
                    }
                }
                assert_eq!(seen(&kept), oracle, "seed {seed}, step {step}");
                let owes = oracle[start as usize..end as usize].iter().flatten().any(|(.., owed)| *owed);
                assert_eq!(kept.owes((start, end)), owes, "seed {seed}, step {step}");
            }
        }
        assert_eq!(pool.lent(), 0);
    }
}
