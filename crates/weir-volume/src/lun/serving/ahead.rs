//! Where space is allocated ahead, so that writes soon go directly.
//!
//! A write into a hole goes through the coordinator's filesystem, and scattered small ones would shatter the file: 20,000 random writes of
//! 4 KiB make 31,800 extents (`VOLUME.md` §1). So the space around such a write is allocated in large pieces. How large, the writes show: the
//! first one in a step gets a chunk, and the next ones that find no space there get the rest of the step.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::lun::router::Range;

/// The first piece, in bytes. It is written with zeroes in a few milliseconds, for which redirected writes there wait.
pub const CHUNK: u64 = 4 << 20;
/// The most that is allocated for writes in one place, in bytes; whole chunks.
pub const STEP: u64 = 64 << 20;
/// Most chunks that wait: further writes there ask again.
const MOST_QUEUED: usize = 64;
/// Steps that are remembered; the one that was used first is forgotten.
const MOST_STEPS: usize = 1024;

/// What to allocate next, for one file.
#[derive(Debug, Default)]
pub struct Ahead {
    /// By step: writes that found no space there.
    steps: BTreeMap<u64, u32>,
    /// Chunks to be allocated, in order.
    queue: VecDeque<Range>,
    /// The same, to find them.
    queued: BTreeSet<Range>,
    /// A chunk is being allocated.
    is_busy: bool,
}

impl Ahead {
    /// A write has found no space of its own.
    pub fn found_none(&mut self, (start, end): Range, size: u64) {
        let chunk = start / CHUNK * CHUNK;
        self.add((chunk, end.next_multiple_of(CHUNK)), size);
        let step = start / STEP * STEP;
        if self.steps.len() >= MOST_STEPS && !self.steps.contains_key(&step) {
            self.steps.pop_first();
        }
        let writes = self.steps.entry(step).or_default();
        *writes += 1;
        if *writes > 1 {
            // What is behind the write first: most writers go forward.
            self.add((chunk, step + STEP), size);
            self.add((step, chunk), size);
        }
    }

    fn add(&mut self, (start, end): Range, size: u64) {
        let end = end.min(size);
        let chunks = (start..end).step_by(CHUNK as usize).map(|at| (at, (at + CHUNK).min(end)));
        for chunk in chunks {
            if self.queue.len() < MOST_QUEUED && self.queued.insert(chunk) {
                self.queue.push_back(chunk);
            }
        }
    }

    /// The next chunk to allocate, if none is under way.
    pub fn take(&mut self) -> Option<Range> {
        if self.is_busy {
            return None;
        }
        let chunk = self.queue.pop_front()?;
        self.queued.remove(&chunk);
        self.is_busy = true;
        Some(chunk)
    }

    /// The chunk is allocated, or not. `goes_on: false`: there is no space for more.
    pub fn done(&mut self, goes_on: bool) {
        self.is_busy = false;
        if !goes_on {
            self.queue.clear();
            self.queued.clear();
        }
    }

    /// The owner is gone, and with it whoever would use the space.
    pub fn clear(&mut self) {
        *self = Ahead::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 3 * STEP + 4096;

    fn all(ahead: &mut Ahead) -> Vec<Range> {
        let mut chunks = Vec::new();
        while let Some(chunk) = ahead.take() {
            assert_eq!(ahead.take(), None, "one at a time");
            chunks.push(chunk);
            ahead.done(true);
        }
        chunks
    }

    #[test]
    fn one_write_gets_a_chunk_and_the_next_one_the_step() {
        let mut ahead = Ahead::default();
        ahead.found_none((STEP + 5 * CHUNK + 4096, STEP + 5 * CHUNK + 8192), SIZE);
        assert_eq!(all(&mut ahead), [(STEP + 5 * CHUNK, STEP + 6 * CHUNK)]);
        ahead.found_none((STEP + 6 * CHUNK, STEP + 6 * CHUNK + 4096), SIZE);
        let chunks = all(&mut ahead);
        assert_eq!(chunks[0], (STEP + 6 * CHUNK, STEP + 7 * CHUNK));
        assert_eq!(chunks.len() as u64, STEP / CHUNK);
        assert!(chunks.iter().all(|chunk| chunk.0 >= STEP && chunk.1 <= 2 * STEP));
    }

    #[test]
    fn nothing_is_allocated_behind_the_end_of_the_file() {
        let mut ahead = Ahead::default();
        ahead.found_none((SIZE - 4096, SIZE), SIZE);
        ahead.found_none((SIZE - 4096, SIZE), SIZE);
        assert_eq!(all(&mut ahead), [(3 * STEP, SIZE)]);
    }

    #[test]
    fn without_space_nothing_more_is_tried_for_these_writes() {
        let mut ahead = Ahead::default();
        ahead.found_none((0, 4096), SIZE);
        ahead.found_none((4096, 8192), SIZE);
        ahead.take();
        ahead.done(false);
        assert_eq!(ahead.take(), None);
    }
}
