//! The data of writes: random bytes with a given compressibility and share of repeated blocks.
//!
//! Reusing one buffer would favour a target that compresses or deduplicates. A number in each 4 KiB piece of a write makes it
//! unique, at the cost of one store instead of a new buffer.

use crate::generator::spread;
use crate::workload::Workload;

/// The unit of uniqueness and compressibility: the smallest block that compression and deduplication work on.
const PIECE: usize = 4096;

/// The content of one thread's writes.
#[derive(Debug)]
pub(crate) struct Data {
    random: fastrand::Rng,
    compress_percent: usize,
    repeat_percent: u8,
    /// Different for each written piece.
    number: u64,
}

impl Data {
    /// For thread number `thread`.
    pub fn new(workload: &Workload, thread: u32) -> Data {
        let seed = spread(workload.seed ^ spread(u64::from(thread) << 32 | 1));
        Data {
            random: fastrand::Rng::with_seed(seed),
            compress_percent: workload.compress_percent.into(),
            repeat_percent: workload.repeat_percent,
            number: seed,
        }
    }

    /// Fills a buffer, once before the load.
    pub fn fill(&mut self, buffer: &mut [u8]) {
        for piece in buffer.chunks_mut(PIECE) {
            let zeroes = piece.len() * self.compress_percent / 100;
            let (random, zeroed) = piece.split_at_mut(piece.len() - zeroes);
            self.random.fill(random);
            zeroed.fill(0);
        }
    }

    /// Makes a buffer unique, or, for the configured share of writes, leaves its last content.
    #[inline]
    pub fn renew(&mut self, buffer: &mut [u8]) {
        if self.repeat_percent > 0 && self.random.u8(0..100) < self.repeat_percent {
            return;
        }
        for piece in buffer.chunks_mut(PIECE) {
            if let Some(head) = piece.first_chunk_mut() {
                self.number = self.number.wrapping_add(1);
                *head = self.number.to_le_bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn writes(workload: &Workload, thread: u32) -> Vec<Vec<u8>> {
        let mut data = Data::new(workload, thread);
        let mut buffer = vec![0; 8192];
        data.fill(&mut buffer);
        let next = || {
            data.renew(&mut buffer);
            buffer.clone()
        };
        std::iter::repeat_with(next).take(1000).collect()
    }

    fn unique(writes: &[Vec<u8>]) -> usize {
        writes.iter().flat_map(|write| write.chunks(PIECE)).collect::<HashSet<_>>().len()
    }

    #[test]
    fn every_piece_is_unique_over_threads_unless_asked_for() {
        let workload = Workload::default();
        let both = [writes(&workload, 0), writes(&workload, 1)].concat();
        assert_eq!(unique(&both), 4000);
        let repeated = unique(&writes(&Workload { repeat_percent: 75, ..workload.clone() }, 0)) / 2;
        assert!((200..300).contains(&repeated), "{repeated} of 1000");
        assert!(unique(&writes(&Workload { repeat_percent: 100, ..workload }, 0)) == 2);
    }

    #[test]
    fn so_much_is_zeroes() {
        for percent in [0u8, 50, 100] {
            let workload = Workload { compress_percent: percent, ..Workload::default() };
            let write = &writes(&workload, 0)[0];
            let zeroes = write.iter().filter(|&&byte| byte == 0).count() * 100 / write.len();
            assert!(zeroes.abs_diff(percent.into()) <= 1, "{zeroes} % zeroes for {percent}");
        }
    }
}
