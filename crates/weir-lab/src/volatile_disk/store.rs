//! The medium and the volatile cache in front of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The unit of a cache, kept or lost as a whole, in bytes.
pub const BLOCK: u64 = 4096;

/// The size that a medium writes atomically, in bytes.
pub const SECTOR: u64 = 512;

/// The part of the unflushed writes that survives a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survivors {
    /// Nothing: the longest reach that a loss can have.
    None,
    /// Every block by chance: half of them whole, some in part, the others not at all. Caches write back in an order
    /// of their own, so that later writes may be there and earlier ones not.
    Some {
        /// Decides which; the same seed and the same writes give the same outcome.
        seed: u64,
    },
}

/// The effect of a power cut on the unflushed blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Toll {
    /// Blocks of [`BLOCK`] bytes that are as they were at the last flush.
    pub lost: u64,
    /// Blocks that reached the medium.
    pub kept: u64,
    /// Blocks of which only some sectors did.
    pub torn: u64,
}

/// A block of the cache.
#[derive(Debug)]
struct Cached {
    data: Box<[u8; BLOCK as usize]>,
    /// A bit for each sector that was written since the last flush.
    dirty: u8,
}

/// A file for the medium and, in memory, the unflushed writes.
#[derive(Debug)]
pub struct Store {
    medium: File,
    size: u64,
    cache: BTreeMap<u64, Cached>,
}

impl Store {
    /// A disk on `medium`, which has `size` bytes, a multiple of [`BLOCK`].
    pub fn new(medium: File, size: u64) -> Store {
        Store { medium, size, cache: BTreeMap::new() }
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The data that a reader sees: the cache over the medium. Shorter than `length` at the end of the disk.
    pub fn read(&self, offset: u64, length: u64) -> io::Result<Vec<u8>> {
        let end = offset.saturating_add(length).min(self.size);
        let mut data = vec![0; end.saturating_sub(offset) as usize];
        self.medium.read_exact_at(&mut data, offset)?;
        for (&block, cached) in self.cache.range(offset / BLOCK..end.div_ceil(BLOCK).max(offset / BLOCK)) {
            let start = block * BLOCK;
            let (from, to) = (offset.max(start), end.min(start + BLOCK));
            let into = &mut data[(from - offset) as usize..(to - offset) as usize];
            into.copy_from_slice(&cached.data[(from - start) as usize..(to - start) as usize]);
        }
        Ok(data)
    }

    /// Takes data into the cache.
    pub fn write(&mut self, mut offset: u64, mut data: &[u8]) -> io::Result<()> {
        if offset.saturating_add(data.len() as u64) > self.size {
            return Err(io::ErrorKind::StorageFull.into());
        }
        while !data.is_empty() {
            let at = offset % BLOCK;
            let length = (BLOCK - at).min(data.len() as u64);
            let (now, later) = data.split_at(length as usize);
            let cached = self.cached(offset / BLOCK)?;
            cached.data[at as usize..(at + length) as usize].copy_from_slice(now);
            for sector in at / SECTOR..(at + length).div_ceil(SECTOR) {
                cached.dirty |= 1 << sector;
            }
            (offset, data) = (offset + length, later);
        }
        Ok(())
    }

    /// Writes the cache to the medium.
    pub fn flush(&mut self) -> io::Result<()> {
        while let Some((&block, cached)) = self.cache.first_key_value() {
            self.medium.write_all_at(&cached.data[..], block * BLOCK)?;
            self.cache.pop_first();
        }
        Ok(())
    }

    /// The power goes: the cache is empty afterwards, and only the survivors are on the medium.
    pub fn lose(&mut self, survivors: Survivors) -> io::Result<Toll> {
        let mut toll = Toll::default();
        let mut random = match survivors {
            Survivors::None => None,
            Survivors::Some { seed } => Some(fastrand::Rng::with_seed(seed)),
        };
        for (block, cached) in std::mem::take(&mut self.cache) {
            let survive = match &mut random {
                None => 0,
                Some(random) => match random.u8(0..8) {
                    0..4 => 0,
                    4..7 => cached.dirty,
                    _ => cached.dirty & random.u8(..),
                },
            };
            match survive {
                0 => toll.lost += 1,
                all if all == cached.dirty => toll.kept += 1,
                _ => toll.torn += 1,
            }
            for sector in (0..BLOCK / SECTOR).filter(|sector| survive & (1 << sector) != 0) {
                let at = sector * SECTOR;
                let bytes = &cached.data[at as usize..(at + SECTOR) as usize];
                self.medium.write_all_at(bytes, block * BLOCK + at)?;
            }
        }
        Ok(toll)
    }

    /// A block of the cache, which begins as what the medium holds.
    fn cached(&mut self, block: u64) -> io::Result<&mut Cached> {
        use std::collections::btree_map::Entry;
        match self.cache.entry(block) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let mut data = Box::new([0; BLOCK as usize]);
                self.medium.read_exact_at(&mut data[..], block * BLOCK)?;
                Ok(entry.insert(Cached { data, dirty: 0 }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: u64 = 16;

    fn store() -> Store {
        let medium = tempfile::tempfile().unwrap();
        medium.set_len(BLOCKS * BLOCK).unwrap();
        Store::new(medium, BLOCKS * BLOCK)
    }

    /// Reads and writes of any place and length, against two plain arrays: written data, and flushed data.
    #[test]
    fn readers_see_the_cache_and_a_cut_leaves_what_was_flushed() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut store = store();
        let mut seen = vec![0; (BLOCKS * BLOCK) as usize];
        let mut flushed = seen.clone();
        for step in 0..3000 {
            let from = random.usize(..seen.len());
            let to = (from + random.usize(..3 * BLOCK as usize)).min(seen.len());
            match random.u8(0..20) {
                0 => {
                    store.flush().unwrap();
                    flushed.clone_from(&seen);
                }
                1 => {
                    store.lose(Survivors::None).unwrap();
                    seen.clone_from(&flushed);
                }
                2..10 => {
                    let data: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(to - from).collect();
                    store.write(from as u64, &data).unwrap();
                    seen[from..to].copy_from_slice(&data);
                }
                _ => {
                    let data = store.read(from as u64, (to - from) as u64).unwrap();
                    assert!(data == seen[from..to], "step {step}: {from} to {to}");
                }
            }
        }
    }

    #[test]
    fn some_survive_some_are_torn_and_sectors_are_whole() {
        let mut store = store();
        store.write(0, &vec![1; (BLOCKS * BLOCK) as usize]).unwrap();
        store.flush().unwrap();
        store.write(0, &vec![2; (BLOCKS * BLOCK) as usize]).unwrap();
        let toll = store.lose(Survivors::Some { seed: 3 }).unwrap();
        assert_eq!(toll.lost + toll.kept + toll.torn, BLOCKS);
        assert!(toll.lost > 0 && toll.kept > 0 && toll.torn > 0, "{toll:?}");
        let data = store.read(0, BLOCKS * BLOCK).unwrap();
        let mut counted = Toll::default();
        for block in data.chunks(BLOCK as usize) {
            assert!(block.chunks(SECTOR as usize).all(|sector| sector.iter().all(|byte| *byte == sector[0])));
            match (block.contains(&1), block.contains(&2)) {
                (true, true) => counted.torn += 1,
                (true, false) => counted.lost += 1,
                _ => counted.kept += 1,
            }
        }
        assert_eq!(counted, toll);
    }

    /// A sector that was not written since the flush counts neither as lost nor as kept.
    #[test]
    fn only_written_sectors_can_survive() {
        let mut store = store();
        store.write(3 * SECTOR, &[5; SECTOR as usize]).unwrap();
        let all_or_nothing = (0..64).map(|seed| {
            store.write(3 * SECTOR, &[5; SECTOR as usize]).unwrap();
            store.lose(Survivors::Some { seed }).unwrap()
        });
        let torn: u64 = all_or_nothing.map(|toll| toll.torn).sum();
        assert_eq!(torn, 0, "a single sector is not torn");
        let data = store.read(0, BLOCK).unwrap();
        assert!(data.iter().enumerate().all(|(at, byte)| (*byte == 5) == (at as u64 / SECTOR == 3)));
    }

    #[test]
    fn nothing_is_beyond_the_end() {
        let mut store = store();
        assert!(store.write(BLOCKS * BLOCK - 1, &[0; 2]).is_err());
        assert_eq!(store.read(BLOCKS * BLOCK - 1, 10).unwrap(), [0]);
        assert_eq!(store.read(BLOCKS * BLOCK + 5, 10).unwrap(), [0; 0]);
        assert_eq!(store.read(u64::MAX, 10).unwrap(), [0; 0]);
    }
}
