//! The last steps of each block's history, with their times: a wrong block tells when it was written, and by how many connections.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;

/// Steps that are kept of a block.
const KEPT: usize = 12;
/// Most blocks with steps, the first ones that are used: some 20 MiB, however large the disk is.
const MOST: usize = 64 << 10;

/// Something that has happened to a version of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Its write was sent.
    Sent,
    /// Its write was answered.
    Acknowledged,
    /// The connection broke before its write was answered.
    Abandoned,
    /// A read has returned it.
    Seen,
}

impl Step {
    const fn name(self) -> &'static str {
        match self {
            Step::Sent => "sent",
            Step::Acknowledged => "acknowledged",
            Step::Abandoned => "abandoned",
            Step::Seen => "seen",
        }
    }
}

/// Of the blocks of a history that were used since its load began. It is in memory alone, and not part of what a history says.
#[derive(Clone, Debug, Default)]
pub struct Trail {
    of: HashMap<u64, VecDeque<(u64, Step, u32)>>,
}

impl PartialEq for Trail {
    /// Two histories are the same whenever they were written.
    fn eq(&self, _: &Trail) -> bool {
        true
    }
}

impl Eq for Trail {}

impl Trail {
    /// Notes a step that is made now.
    pub fn note(&mut self, block: u64, step: Step, version: u32) {
        #[expect(clippy::disallowed_methods, reason = "people compare it with logs")]
        let now = std::time::SystemTime::now();
        let since = now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        self.note_at(since.as_millis() as u64, block, step, version);
    }

    fn note_at(&mut self, unix_ms: u64, block: u64, step: Step, version: u32) {
        if self.of.len() == MOST && !self.of.contains_key(&block) {
            return;
        }
        let steps = self.of.entry(block).or_default();
        if steps.len() == KEPT {
            steps.pop_front();
        }
        steps.push_back((unix_ms, step, version));
    }

    /// The steps of a block in words, with times of the day in UTC, as logs have them; empty if there are none.
    #[must_use]
    pub fn describe(&self, block: u64) -> String {
        let mut text = String::new();
        for &(unix_ms, step, version) in self.of.get(&block).into_iter().flatten() {
            let (ms, seconds) = (unix_ms % 1000, unix_ms / 1000 % 86_400);
            let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
            let comma = if text.is_empty() { "" } else { ", " };
            // Writing to a string never fails.
            let _ = write!(
                text,
                "{comma}{hours:02}:{minutes:02}:{:02}.{ms:03} {} {version}",
                seconds % 60,
                step.name()
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_steps_of_a_block_are_kept_with_their_times() {
        let mut trail = Trail::default();
        assert_eq!(trail.describe(3), "");
        trail.note_at(1_795_909_966_914, 3, Step::Sent, 145);
        trail.note_at(1_795_909_969_915, 3, Step::Abandoned, 145);
        trail.note_at(1_795_909_969_916, 4, Step::Sent, 1);
        assert_eq!(trail.describe(3), "23:52:46.914 sent 145, 23:52:49.915 abandoned 145");
        for version in 146..160 {
            trail.note_at(0, 3, Step::Acknowledged, version);
        }
        let text = trail.describe(3);
        assert_eq!(text.matches(',').count(), KEPT - 1);
        assert!(text.starts_with("00:00:00.000 acknowledged 148") && text.ends_with(" 159"), "{text}");
        assert_eq!(trail, Trail::default());
        (0..2 * MOST as u64).for_each(|block| trail.note_at(0, block, Step::Sent, 1));
        assert_eq!((trail.of.len(), trail.describe(2 * MOST as u64 - 1).as_str()), (MOST, ""));
    }
}
