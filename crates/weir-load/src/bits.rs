//! The set of blocks of a range with a request in flight.

/// Random draws for a clear bit before a linear search.
const DRAWS: u32 = 16;

/// The set of blocks in flight.
#[derive(Debug)]
pub(crate) struct BitSet {
    words: Vec<u64>,
    length: u64,
    count: u64,
}

impl BitSet {
    pub(crate) fn new(length: u64) -> BitSet {
        BitSet { words: vec![0; length.div_ceil(64) as usize], length, count: 0 }
    }

    /// Sets a bit that was clear; false when it was set already.
    pub(crate) fn set(&mut self, at: u64) -> bool {
        let (word, bit) = (&mut self.words[(at / 64) as usize], 1 << (at % 64));
        let was_clear = *word & bit == 0;
        *word |= bit;
        self.count += u64::from(was_clear);
        was_clear
    }

    /// Clears a bit that was set.
    pub(crate) fn clear(&mut self, at: u64) {
        let (word, bit) = (&mut self.words[(at / 64) as usize], 1 << (at % 64));
        self.count -= u64::from(*word & bit != 0);
        *word &= !bit;
    }

    /// Sets a random clear bit; `None` when none is clear. Uniform as long as most bits are clear.
    pub(crate) fn set_random(&mut self, random: &mut fastrand::Rng) -> Option<u64> {
        if self.count == self.length {
            return None;
        }
        for _ in 0..DRAWS {
            let at = random.u64(0..self.length);
            if self.set(at) {
                return Some(at);
            }
        }
        self.set_from(random.u64(0..self.length))
    }

    /// Sets the first clear bit from `start` on, past the end from the beginning; `None` when none is clear.
    pub(crate) fn set_from(&mut self, start: u64) -> Option<u64> {
        if self.count == self.length {
            return None;
        }
        let length = self.length;
        (0..length).map(|step| (start + step) % length).find(|&at| self.set(at))
    }
}
